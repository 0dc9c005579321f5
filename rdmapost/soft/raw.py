"""Raw packets: whole Ethernet frames, seen by every other raw queue pair of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._binding import ffi
from ..enums import Opcode, QPType, SendFlags, WCStatus
from . import offload
from .memory import Fault
from .wire import Request, Segments

if TYPE_CHECKING:
    from .qp import QueuePair
    from .queue import SendWQE

__all__ = ["send", "send_frame"]

ETHERNET_HEADER = 14
MAX_FRAME = 9000 + ETHERNET_HEADER


def send(qp: QueuePair, wqe: SendWQE, data: Segments) -> None:
    """Send one frame as it is, with checksums where the work request asks for them.

    Raises:
        Fault: it is shorter than an Ethernet header, or longer than a frame.
    """
    frame = b"".join(bytes(ffi.buffer(pointer, length)) for pointer, length in data)
    if not ETHERNET_HEADER <= len(frame) <= MAX_FRAME:
        raise Fault(WCStatus.LOC_LEN_ERR)
    if wqe.flags & SendFlags.IP_CSUM:
        frame = offload.fill_checksums(frame)
    send_frame(qp, frame)


def send_frame(qp: QueuePair, frame: bytes) -> None:
    """Put a frame on the wire."""
    data = [(ffi.from_buffer(frame), len(frame))]
    for other in list(qp.device.qps.values()):
        if other is not qp and other.type is QPType.RAW_PACKET:
            request = Request(
                Opcode.SEND, QPType.RAW_PACKET, qp.number, other.number, data, len(frame)
            )
            qp.device.transmit(request, None)
