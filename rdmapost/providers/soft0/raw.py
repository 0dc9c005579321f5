"""Raw packets: Ethernet frames, received by every other raw queue pair of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...enums import Opcode, QPType, SendFlags, WCFlags, WCStatus
from ...standard.wire import ETHERNET_BYTES
from ..software.memory import ErrorStatus, gather
from ..software.transport_messages import Request, Segments
from . import offload

if TYPE_CHECKING:
    from ..software.device_queues import WQE
    from .qp import SoftQueuePair

MAX_FRAME = 9000 + ETHERNET_BYTES


def send(qp: SoftQueuePair, wqe: WQE, data: Segments) -> None:
    """Send one frame, with its checksums filled in if the work request asks for that.

    Raises:
        ErrorStatus: LOC_LEN_ERR: the frame is shorter than an Ethernet header, or too long.
    """
    frame = gather(data)
    _check_length(len(frame))
    if wqe.flags & SendFlags.IP_CSUM:
        frame = offload.fill_checksums(frame, offload.ethernet)
    _send_frame(qp, frame)


def send_segmented(qp: SoftQueuePair, wqe: WQE, data: Segments, size: int) -> None:
    """Send a payload as many frames, each with the work request's header.

    Raises:
        ErrorStatus: a frame would be too long, or the header cannot be used.
    """
    _check_length(len(wqe.hdr) + min(size, wqe.mss))
    for frame in offload.segments(wqe.hdr, offload.ethernet, gather(data), wqe.mss):
        _send_frame(qp, frame)


def _check_length(size: int) -> None:
    if not ETHERNET_BYTES <= size <= MAX_FRAME:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)


def _send_frame(qp: SoftQueuePair, frame: bytes) -> None:
    """Put a frame on the wire."""
    for other in list(qp.device.qps.values()):
        if other is not qp and other.type is QPType.RAW_PACKET:
            request = Request(
                Opcode.SEND, QPType.RAW_PACKET, qp.number, other.number, [frame], len(frame)
            )
            qp.device.transmit(request, None)


def flags_of(request: Request) -> int:
    """Return IP_CSUM_OK for a received frame with correct checksums, else 0."""
    right = offload.checksums_are_right(gather(request.data), offload.ethernet)
    return int(WCFlags.IP_CSUM_OK) if right else 0
