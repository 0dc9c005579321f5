"""A soft0 queue pair: when it retries, and the checksums of the messages that it receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...enums import QPType
from ..software.qp import QueuePair
from ..software.transport_messages import Request
from . import datagram, raw

if TYPE_CHECKING:
    from .device import SoftDevice


class SoftQueuePair(QueuePair):
    """A queue pair whose peers are on the same device."""

    device: SoftDevice

    def begin_attempts(self) -> None:
        super().begin_attempts()
        self.due = 0.0
        """When to retry the request at the head of the send queue, by the monotonic clock."""

    def drop_queues(self) -> None:
        super().drop_queues()
        self.device.unpark(self)

    def flush_sends(self) -> None:
        self.device.unpark(self)
        super().flush_sends()

    def checksum_flags(self, request: Request) -> int:
        if self.type is QPType.UD:
            return datagram.flags_of(request)
        return raw.flags_of(request)
