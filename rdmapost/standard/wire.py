"""Wire formats that the model device, the resources and the tools share."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

GRH_BYTES = 40
"""Bytes at the start of a UD receive's buffers, whether there is a header or not."""

IPV4_MAPPED = bytes(10) + b"\xff\xff"
"""The start of a GID that holds an IPv4 address."""

TMH = Struct("!B3xIQ")
"""The tag-matching header: opcode, app_ctx, tag (rdma-core's tag_matching.md)."""


class TMHOpcode(IntEnum):
    """The type of a tag-matching message, the first byte of its header."""

    NO_TAG = 0
    """Does not take part in matching."""
    RNDV = 1
    """A rendezvous request: after the TMH, an RVH and the sender's own data."""
    FIN = 2
    """The answer to a rendezvous request: its data has been fetched."""
    EAGER = 3
    """The payload follows."""


def checksum_residue(data: bytes | bytearray | memoryview) -> int:
    """Return the one's complement sum of 16-bit words (RFC 1071), modulo 2^16 - 1.

    It is 0 for data that includes a correct checksum.
    """
    # 2^16 is 1 modulo 2^16 - 1, so a long number leaves the sum of its words.
    return int.from_bytes(data if len(data) % 2 == 0 else bytes(data) + b"\0") % 0xFFFF


def is_multicast_gid(gid: bytes) -> bool:
    """Whether a GID names a multicast group: ff00::/8, or 224.0.0.0/4 mapped into IPv6."""
    return gid[0] == 0xFF or (gid[:12] == IPV4_MAPPED and gid[12] >> 4 == 0xE)
