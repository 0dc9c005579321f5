"""Wire formats: the sizes and layouts of InfiniBand, RoCE v2 and TCP/IP headers."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

GRH_BYTES = 40
"""Bytes before the payload in a UD receive's buffers, whether or not there is a GRH."""

BTH_BYTES = 12
"""The base transport header, which every packet has."""
DETH_BYTES = 8
"""The datagram extended transport header (UD)."""
RETH_BYTES = 16
"""The RDMA extended transport header (reads and writes)."""
IMM_BYTES = 4
"""Immediate data."""
ICRC_BYTES = 4
"""The invariant CRC at the end of a packet."""

ETHERNET_BYTES = 14
"""An Ethernet header without VLAN tags."""
IPOIB_BYTES = 4
"""The header of an IP-over-InfiniBand message (RFC 4391)."""
ETHERTYPE_IPV4, ETHERTYPE_IPV6 = 0x0800, 0x86DD
IPPROTO_TCP, IPPROTO_UDP = 6, 17
TCP_BYTES, UDP_BYTES = 20, 8
"""Bytes of a TCP header without options, and of a UDP header."""

IPV4 = Struct("!BBHHHBBH4s4s")
"""An IPv4 header: version and length, TOS, total length, identification, fragment, TTL, protocol,
checksum, source, destination."""
IPV4_VERSION_IHL = 0x45
"""The first byte of an IPv4 header without options."""
IPV6 = Struct("!IHBB16s16s")
"""An IPv6 header, and a GRH: version, traffic class and flow label; payload length, next header,
hop limit, source, destination."""
DONT_FRAGMENT = 0x4000
"""A flag in the fragment field of an IPv4 header."""

ROCE_V2_PORT = 4791
"""The UDP port that RoCE v2 packets go to."""
ROCE_V2_BYTES = IPV4.size + UDP_BYTES + BTH_BYTES + RETH_BYTES + IMM_BYTES + ICRC_BYTES
"""The most bytes that RoCE v2 over IPv4 adds to the payload of a packet."""

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
    """The response to a rendezvous request: its data has been fetched."""
    EAGER = 3
    """The payload follows."""


def checksum_residue(data: bytes | bytearray | memoryview) -> int:
    """Return the one's complement sum of 16-bit words (RFC 1071), modulo 2^16 - 1.

    It is 0 for data that includes a correct checksum.
    """
    # 2^16 is 1 modulo 2^16 - 1, so the data as one number has the same remainder as the sum of its
    # words.
    return int.from_bytes(data if len(data) % 2 == 0 else bytes(data) + b"\0") % 0xFFFF


def ipv4_header(
    tos: int,
    length: int,
    fragment: int,
    ttl: int,
    protocol: int,
    src: bytes,
    dst: bytes,
    identification: int = 0,
) -> bytes:
    """Return an IPv4 header without options, with its checksum."""
    fields = (IPV4_VERSION_IHL, tos, length, identification, fragment, ttl, protocol)
    # The checksum is the complement of the sum of the 16-bit words (RFC 1071).
    checksum = -checksum_residue(IPV4.pack(*fields, 0, src, dst)) % 0xFFFF
    return IPV4.pack(*fields, checksum, src, dst)


def is_multicast_gid(gid: bytes) -> bool:
    """Whether a GID names a multicast group: ff00::/8, or 224.0.0.0/4 mapped into IPv6."""
    return gid[0] == 0xFF or (gid[:12] == IPV4_MAPPED and gid[12] >> 4 == 0xE)
