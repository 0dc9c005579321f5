"""The messages between queue pairs: a request, and its acknowledgement.

Requester and responder share only these messages; a wire could connect them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from ...enums import QPType

Segments = list[Any]
"""Bytes in memory: memoryviews of registered memory, or the device's own bytes."""


class Request:
    """A whole message from a requester: segmentation is not modelled."""

    # Requests usually change only two or three of these.
    solicited = False
    imm: int | None = None
    """Immediate data as the work request holds it, in network order."""
    invalidate_rkey: int | None = None
    remote_addr = 0
    rkey = 0
    compare = 0
    swap = 0
    flush_type = 0
    flush_level = 0
    srqn = 0
    qkey = 0
    grh = b""
    sl = 0
    psn = 0
    """The requester's sq_psn: packets are not counted, so it is the same in every request."""

    def __init__(
        self, opcode: int, qp_type: QPType, src_qpn: int, dest_qpn: int, data: Segments, length: int
    ) -> None:
        self.opcode = opcode
        """An Opcode, as a number."""
        self.qp_type = qp_type
        self.src_qpn = src_qpn
        self.dest_qpn = dest_qpn
        self.data = data
        self.length = length


class AckType(IntEnum):
    """ACK, RNR NAK, and the NAKs for errors."""

    ACK = 0
    """The request succeeded."""
    RNR_NAK = 1
    """No receive is posted; try again when the timer has expired."""
    NAK_INVALID_REQUEST = 2
    """The request is malformed, too long or not allowed."""
    NAK_REMOTE_ACCESS = 3
    """The key, the range or the permission is wrong."""
    NAK_REMOTE_OPERATIONAL = 4
    """The responder could not execute the request, for an internal reason."""


class Ack:
    """A responder's acknowledgement on a reliable service."""

    __slots__ = ("data", "rnr_timer", "type", "value")

    def __init__(
        self, ack_type: AckType, *, rnr_timer: int = 0, data: Segments | None = None, value: int = 0
    ) -> None:
        self.type = ack_type
        self.rnr_timer = rnr_timer
        """Encoded as min_rnr_timer."""
        self.data = data
        """The data that an RDMA READ fetched: all of it, or the first part."""
        self.value = value
        """The value that an atomic found."""


ACK = Ack(AckType.ACK)


def size_of(segments: Segments) -> int:
    """Return the number of bytes in segments."""
    return len(segments[0]) if len(segments) == 1 else sum(map(len, segments))
