"""What queue pairs say to each other: a request, and its acknowledgement.

Requester and responder share nothing but these messages; a wire could connect them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from ....enums import QPType

Segments = list[Any]
"""Bytes in memory: memoryviews of registered memory, or the device's own bytes."""


class Request:
    """A message from a requester, whole: segmentation is not modelled."""

    # Most requests change only two or three of these.
    solicited = False
    imm: int | None = None
    """Immediate data as the work request holds it, in network order."""
    invalidate_rkey: int | None = None
    remote_addr = 0
    rkey = 0
    compare = 0
    swap = 0
    srqn = 0
    qkey = 0
    grh = b""
    sl = 0

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


class AckKind(IntEnum):
    """The kinds of answer."""

    ACK = 0
    """Done."""
    RNR_NAK = 1
    """No receive is posted; try again after the timer."""
    NAK_INVALID_REQUEST = 2
    """The request is malformed, too long or not allowed."""
    NAK_REMOTE_ACCESS = 3
    """The key, the range or the permission is wrong."""
    NAK_REMOTE_OPERATIONAL = 4
    """The responder could not carry it out, for an internal reason."""


class Ack:
    """A responder's answer on a reliable service."""

    __slots__ = ("data", "kind", "rnr_timer", "value")

    def __init__(
        self, kind: AckKind, *, rnr_timer: int = 0, data: Segments | None = None, value: int = 0
    ) -> None:
        self.kind = kind
        self.rnr_timer = rnr_timer
        """Encoded as min_rnr_timer."""
        self.data = data
        """What an RDMA READ fetched."""
        self.value = value
        """What an atomic found."""


ACK = Ack(AckKind.ACK)


def size_of(segments: Segments) -> int:
    """Return the number of bytes in segments."""
    return len(segments[0]) if len(segments) == 1 else sum(map(len, segments))
