"""Stateless offloads: checksums, and cutting one large payload into many packets.

Everything here is bytes in, bytes out. A packet is a link header followed by IPv4 or IPv6, and then
TCP or UDP; the link headers are ``ethernet`` and ``ipoib``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from ...enums import WCStatus
from ...standard.wire import (
    ETHERTYPE_IPV4,
    ETHERTYPE_IPV6,
    IPOIB_BYTES,
    IPPROTO_TCP,
    IPPROTO_UDP,
    IPV4,
    IPV6,
    TCP_BYTES,
    UDP_BYTES,
    checksum_residue,
)
from ..software.memory import ErrorStatus

MAX_TSO = 1 << 18
"""Payload bytes of one TSO work request."""

_Bytes = bytes | memoryview

Link = Callable[[bytes], tuple[int, int]]
"""Finds a packet's network header: its offset, and its EtherType (0: the packet is too short)."""

_VLAN_TAGS = frozenset({0x8100, 0x88A8})
_FRAGMENT = 0x3FFF
"""More Fragments, and the fragment offset."""
_SKIPPED = frozenset({0, 60})
"""IPv6 extension headers that do not affect the checksum: hop-by-hop and destination options."""
_FIN_PSH, _CWR = 0x09, 0x80


def ethernet(frame: bytes) -> tuple[int, int]:
    """Find the network header of an Ethernet frame, after its VLAN tags."""
    at = 12
    while len(frame) >= at + 2:
        ethertype = int.from_bytes(frame[at : at + 2])
        if ethertype not in _VLAN_TAGS:
            return at + 2, ethertype
        at += 4
    return at, 0


def ipoib(message: bytes) -> tuple[int, int]:
    """Find an IP-over-InfiniBand message's network header, after its link header (RFC 4391)."""
    if len(message) < IPOIB_BYTES or message[2:4] != b"\0\0":
        return IPOIB_BYTES, 0
    return IPOIB_BYTES, int.from_bytes(message[:2])


# ---- headers ----------------------------------------------------------------


class _Headers(NamedTuple):
    """Where a packet's headers are."""

    version: int
    ip: int
    transport: int
    protocol: int
    """IPPROTO_TCP or IPPROTO_UDP, or 0 if the transport checksum must stay unchanged."""


def _headers(packet: bytes, link: Link) -> _Headers | None:
    """Find the headers of a packet; return None if it is not an IP packet."""
    at, ethertype = link(packet)
    left = len(packet) - at
    if ethertype == ETHERTYPE_IPV4 and left >= IPV4.size and packet[at] >> 4 == 4:
        size = (packet[at] & 0xF) * 4
        if not IPV4.size <= size <= left:
            return None
        fragment = int.from_bytes(packet[at + 6 : at + 8]) & _FRAGMENT
        return _Headers(4, at, at + size, 0 if fragment else _known(packet[at + 9]))
    if ethertype == ETHERTYPE_IPV6 and left >= IPV6.size and packet[at] >> 4 == 6:
        following, end = packet[at + 6], at + IPV6.size
        while following in _SKIPPED and end + 8 <= len(packet):
            following, end = packet[end], end + 8 + packet[end + 1] * 8
        return _Headers(6, at, end, _known(following) if end <= len(packet) else 0)
    return None


def _known(protocol: int) -> int:
    return protocol if protocol in (IPPROTO_TCP, IPPROTO_UDP) else 0


def _packet_end(packet: _Bytes, headers: _Headers) -> int:
    """Return where the IP packet ends, according to its length field; padding may follow."""
    at = headers.ip
    if headers.version == 4:
        return at + int.from_bytes(packet[at + 2 : at + 4])
    return at + IPV6.size + int.from_bytes(packet[at + 4 : at + 6])


def _holds_transport(packet: _Bytes, headers: _Headers, end: int) -> bool:
    """Whether the packet holds a whole TCP or UDP segment."""
    size = end - headers.transport
    if not headers.protocol or end > len(packet):
        return False
    if headers.protocol == IPPROTO_TCP:
        return size >= TCP_BYTES
    at = headers.transport + 4
    return size >= UDP_BYTES and int.from_bytes(packet[at : at + 2]) == size


# ---- checksums --------------------------------------------------------------


def _checksum(residue: int) -> int:
    """Return the checksum of data that is not all zeros, given the sum of its words mod 0xFFFF."""
    return 0xFFFF - (residue % 0xFFFF or 0xFFFF)


def _pseudo_header(packet: _Bytes, headers: _Headers, size: int) -> int:
    at = headers.ip
    addresses = packet[at + 12 : at + 20] if headers.version == 4 else packet[at + 8 : at + 40]
    return checksum_residue(addresses) + headers.protocol + size


def fill_checksums(packet: bytes, link: Link) -> bytes:
    """Return a packet with its IPv4 header, TCP and UDP checksums filled in.

    Everything else is left unchanged, and so is the transport checksum of a fragment, which covers
    more than one packet.
    """
    headers = _headers(packet, link)
    if headers is None:
        return packet
    out = bytearray(packet)
    _fill(memoryview(out), headers, _packet_end(packet, headers))
    return bytes(out)


def _fill(out: memoryview, headers: _Headers, end: int) -> None:
    # Not a bytearray: if memory runs out while one is sliced, Python's error is misleading.
    at, transport = headers.ip, headers.transport
    if headers.version == 4:
        out[at + 10 : at + 12] = b"\0\0"
        out[at + 10 : at + 12] = _checksum(checksum_residue(out[at:transport])).to_bytes(2)
    if not _holds_transport(out, headers, end):
        return
    field = transport + (16 if headers.protocol == IPPROTO_TCP else 6)
    out[field : field + 2] = b"\0\0"
    value = _checksum(
        _pseudo_header(out, headers, end - transport) + checksum_residue(out[transport:end])
    )
    if headers.protocol == IPPROTO_UDP:
        # 0 would mean "no checksum", so 0xFFFF is sent, which is the same sum.
        value = value or 0xFFFF
    out[field : field + 2] = value.to_bytes(2)


def checksums_are_right(packet: bytes, link: Link) -> bool:
    """Whether a packet is IP with TCP or UDP, and all its checksums are correct."""
    headers = _headers(packet, link)
    if headers is None:
        return False
    at, transport, end = headers.ip, headers.transport, _packet_end(packet, headers)
    if not _holds_transport(packet, headers, end):
        return False
    if headers.version == 4:
        if checksum_residue(packet[at:transport]):
            return False
        if headers.protocol == IPPROTO_UDP and packet[transport + 6 : transport + 8] == b"\0\0":
            # On IPv4, the UDP checksum is optional.
            return True
    size = end - transport
    return (
        _pseudo_header(packet, headers, size) + checksum_residue(packet[transport:end])
    ) % 0xFFFF == 0


# ---- segmentation -----------------------------------------------------------


def segments(hdr: bytes, link: Link, payload: bytes, mss: int) -> list[bytes]:
    """Cut a payload into packets, each with the header and at most mss bytes of the payload.

    Each packet has its own lengths, IPv4 identification, TCP sequence number and checksums; only
    the last keeps FIN and PSH, and only the first keeps CWR. A UDP payload is also cut, into
    separate datagrams.

    Args:
        hdr: the link header, IPv4 or IPv6, and TCP or UDP, with nothing after them.
        link: the link header's format.
        payload: the data after the header; an empty payload makes one packet.
        mss: payload bytes in a packet.

    Raises:
        ErrorStatus: LOC_QP_OP_ERR: the mss is 0, or the header has a different format; LOC_LEN_ERR:
            hdr is shorter or longer than its headers, or the payload is longer than MAX_TSO.
    """
    headers = _headers(hdr, link)
    if not mss or headers is None or not headers.protocol:
        raise ErrorStatus(WCStatus.LOC_QP_OP_ERR)
    if _transport_size(hdr, headers) != len(hdr) - headers.transport or len(payload) > MAX_TSO:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    return _cut(hdr, headers, payload, mss)


def _transport_size(hdr: bytes, headers: _Headers) -> int:
    """Return the length of the TCP or UDP header; -1 if a TCP header is cut short."""
    if headers.protocol == IPPROTO_UDP:
        return UDP_BYTES
    if len(hdr) < headers.transport + TCP_BYTES:
        return -1
    return max(TCP_BYTES, (hdr[headers.transport + 12] >> 4) * 4)


def _cut(hdr: bytes, headers: _Headers, payload: bytes, mss: int) -> list[bytes]:
    at, transport = headers.ip, headers.transport
    tcp = headers.protocol == IPPROTO_TCP
    (ident,) = struct.unpack_from("!H", hdr, at + 4)
    (sequence,) = struct.unpack_from("!I", hdr, transport + 4) if tcp else (0,)
    segments = []
    for index, start in enumerate(range(0, len(payload) or 1, mss)):
        out = bytearray(hdr + payload[start : start + mss])
        end = len(out)
        if headers.version == 4:
            struct.pack_into("!HH", out, at + 2, end - at, (ident + index) & 0xFFFF)
        else:
            struct.pack_into("!H", out, at + 4, end - at - IPV6.size)
        if tcp:
            struct.pack_into("!I", out, transport + 4, (sequence + start) & 0xFFFF_FFFF)
            if start:
                out[transport + 13] &= ~_CWR
            if start + mss < len(payload):
                out[transport + 13] &= ~_FIN_PSH
        else:
            struct.pack_into("!H", out, transport + 4, end - transport)
        _fill(memoryview(out), headers, end)
        segments.append(bytes(out))
    return segments
