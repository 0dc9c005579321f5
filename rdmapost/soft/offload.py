"""Stateless offloads: checksums, and cutting one large payload into many frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..enums import WCStatus
from .memory import Fault
from .wire import Segments

if TYPE_CHECKING:
    from .qp import QueuePair
    from .queue import SendWQE

__all__ = ["fill_checksums", "segment"]


def fill_checksums(frame: bytes) -> bytes:
    """Return an Ethernet frame with its IP, TCP and UDP checksums filled in."""
    return frame


def segment(qp: QueuePair, wqe: SendWQE, data: Segments, size: int) -> None:
    """Send a payload as many frames of at most mss bytes, each with the header."""
    raise Fault(WCStatus.LOC_QP_OP_ERR)
