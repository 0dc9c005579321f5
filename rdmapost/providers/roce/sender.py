"""Sending: packets are built, and go out when the step is committed."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...standard.wire import ICRC_BYTES
from ..software.transport_messages import size_of
from . import captured_packets
from .addresses import sockaddr
from .faults import damage
from .packets import Path
from .qp import RoceQueuePair

if TYPE_CHECKING:
    from .device import RoceDevice

_CANNOT_SEGMENT = frozenset({errno.EIO, errno.EINVAL, errno.EOPNOTSUPP})


class Sender(native.Record):
    """What a device sends through its socket.

    Attributes:
        may_join: whether one call may send several packets; False once a send has shown that the
            network device cannot segment them.
        errors: the sends that failed when a step was committed: the errno of each, and how many
            packets, bytes and retransmitted packets it had.
    """

    def __init__(self) -> None:
        self.may_join = True
        self.errors: list[tuple[int, tuple[int, int, int]]] = []

    def send(
        self,
        device: RoceDevice,
        qp: RoceQueuePair,
        path: Path,
        covered: bytes,
        headers: list[bytes],
        payload: Any,
        mtu: int,
        again: int,
    ) -> None:
        """Send packets that go together, as RoceDevice.send does.

        Args:
            covered: their IP and UDP headers as the ICRC covers them.
        """
        # Up to 3 bytes of padding, and the ICRC.
        data = bytearray(sum(map(len, headers)) + size_of(payload) + 7 * len(headers))
        size = native.roce_build(data, covered, headers, tuple(payload), mtu)
        packets_sent, bytes_sent = device.counters.sent
        device.counters.sent = packets_sent + len(headers), bytes_sent + size
        if again:
            device.counters.retransmitted += again
        whole = len(headers[0]) + mtu + -mtu % 4 + ICRC_BYTES
        segment = size if len(headers) == 1 else whole
        about: Any = (
            functools.partial(captured_packets.about_sent, qp) if device.recordings else None
        )
        if device.outgoing.is_straight:
            counted = len(headers), size, again
            self._transmit(device, path, about, data, size, segment, counted)
            return
        # If memory runs out while a bytearray is sliced, Python's error is about exported buffers.
        packet = bytes(memoryview(data)[:size])
        if about is not None:
            # By the time the packet is sent, it may be corrupted, and its work request may be gone.
            about = functools.partial(captured_packets.known_comment, about(packet))

        damaged = functools.partial(_damaged, covered)
        for each in device.admit(device.outgoing, (path, about, packet, again), damaged):
            self.send_held(device, each)

    def _transmit(
        self,
        device: RoceDevice,
        path: Path,
        about: Callable[[bytes], str] | None,
        data: Any,
        size: int,
        segment: int,
        counted: tuple[int, int, int],
    ) -> None:
        assert device.address is not None
        if about is not None:
            captured_packets.sent(device, about, path.dgid, path.traffic_class, data, size, segment)
        native.on_commit(
            native.roce_send,
            device.socket.fileno(),
            sockaddr(path.dgid, device.address.scope),
            data,
            size,
            segment,
            path.traffic_class,
            self.errors,
            counted,
        )

    def send_held(self, device: RoceDevice, item: Any) -> None:
        """Send a packet that the fault plan has held."""
        path, about, packet, again = item
        size = len(packet)
        self._transmit(device, path, about, packet, size, size, (1, size, again))

    def note_errors(self, device: RoceDevice) -> None:
        """Process the sends that failed since the last call; none of their packets were sent."""
        counters = device.counters
        # A new list, because a rollback restores an attribute, but not the contents of a list.
        errors, self.errors = self.errors, []
        for code, (count, size, again) in errors:
            packets_sent, bytes_sent = counters.sent
            counters.sent = packets_sent - count, bytes_sent - size
            counters.retransmitted -= again
            counters.send_errors += count
            if code in _CANNOT_SEGMENT and count > 1:
                self.may_join = False


def _damaged(covered: bytes, item: Any, number: int) -> Any:
    path, about, packet, again = item
    if about is not None:
        about = functools.partial(
            captured_packets.known_comment, f"{about(packet)}, damaged on purpose"
        )
    return path, about, damage(packet, covered, number), again
