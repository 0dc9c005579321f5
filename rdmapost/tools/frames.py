"""Messages with headers that a device parses: Ethernet, TCP/IPv4 and tag matching."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .._arguments import content, counted, member, within
from ..enums import QPType
from ..standard.wire import (
    DONT_FRAGMENT,
    ETHERNET_BYTES,
    ETHERTYPE_IPV4,
    IPOIB_BYTES,
    IPPROTO_TCP,
    IPV4,
    IPV4_VERSION_IHL,
    TMH,
    TMHOpcode,
    checksum_residue,
)

__all__ = ["EAGER", "ETHERNET_BYTES", "TMH_BYTES", "ethernet", "tagged", "tcp", "what_is_wrong"]

TMH_BYTES = TMH.size
"""Bytes of the tag-matching header."""
EAGER = int(TMHOpcode.EAGER)
"""A tag-matching message that carries its payload."""

# Locally administered MAC addresses, and IPv4 addresses for documentation (RFC 5737).
_MACS = bytes.fromhex("020000000002020000000001")
_ADDRESSES = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])
_EXPERIMENTAL = 0x88B5
"""An EtherType for experiments."""
_PSH_ACK, _ACK = 0x18, 0x10


def ethernet(ethertype: int = _EXPERIMENTAL) -> bytes:
    """Return the header of a frame between two made-up addresses.

    Args:
        ethertype: the type of the payload, 0..65535.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    return _MACS + within("ethertype", ethertype, 0, 0xFFFF).to_bytes(2)


def tagged(tag: int, payload: bytes, app_ctx: int = 0) -> bytes:
    """Return an eager tag-matching message.

    Args:
        tag: 0..2^64-1.
        payload: the data after the header.
        app_ctx: 32 bits that the receiver's completion shows (tm_priv).

    Raises:
        TypeError: a number is not an integer, or the payload is not bytes.
        ValueError: a number is out of range.
    """
    app_ctx = within("app_ctx", app_ctx, 0, (1 << 32) - 1)
    tag = within("tag", tag, 0, (1 << 64) - 1)
    return TMH.pack(EAGER, app_ctx, tag) + content("payload", payload)


def tcp(qp_type: QPType) -> bytes:
    """Return the header of a TSO work request: TCP over IPv4, preceded by the link header.

    Args:
        qp_type: RAW_PACKET for Ethernet, UD for IP over InfiniBand (RFC 4391).

    Raises:
        TypeError: it is not a QPType.
        ValueError: it is another type.
    """
    qp_type = member("qp_type", qp_type, QPType)
    if qp_type not in (QPType.RAW_PACKET, QPType.UD):
        raise ValueError(f"qp_type: TSO is for RAW_PACKET and UD, not {qp_type.name}")
    link = (
        ethernet(ETHERTYPE_IPV4)
        if qp_type is QPType.RAW_PACKET
        else struct.pack("!HH", ETHERTYPE_IPV4, 0)
    )
    # The device fills in lengths and checksums.
    ip = IPV4.pack(IPV4_VERSION_IHL, 0, 40, 1, DONT_FRAGMENT, 64, IPPROTO_TCP, 0, *_ADDRESSES)
    return link + ip + struct.pack("!HHIIBBHHH", 40000, 5001, 1000, 1, 0x50, _PSH_ACK, 8192, 0, 0)


def what_is_wrong(
    packets: Sequence[bytes], hdr: bytes, qp_type: QPType, payload: bytes, mss: int
) -> str | None:
    """Say why packets are not the segments of a payload; return None if they are.

    Args:
        packets: in order of arrival.
        hdr: the header that tcp() returned.
        qp_type: as in tcp().
        payload: the data that was segmented.
        mss: bytes of payload in each packet but the last.
    """
    starts = range(0, len(payload) or 1, mss)
    if len(packets) != len(starts):
        return f"{counted(len(packets), 'segment')} arrived, not {len(starts)}"
    link = ETHERNET_BYTES if qp_type is QPType.RAW_PACKET else IPOIB_BYTES
    for index, (packet, start) in enumerate(zip(packets, starts, strict=True)):
        piece = payload[start : start + mss]
        last = start + mss >= len(payload)
        if wrong := _what_differs(packet, hdr, link, index, start, piece, last):
            return f"segment {index + 1} of {len(starts)}: {wrong}"
    return None


def _what_differs(
    packet: bytes, hdr: bytes, link: int, index: int, start: int, piece: bytes, last: bool
) -> str | None:
    if packet[len(hdr) :] != piece:
        return f"its payload of {counted(max(0, len(packet) - len(hdr)), 'byte')} is wrong"
    ip, tcp = link, link + IPV4.size
    ident, sequence = _number(hdr, ip + 4, 2) + index, _number(hdr, tcp + 4, 4) + start
    for what, found, expected in (
        ("link header", packet[:link], hdr[:link]),
        ("IPv4 total length", packet[ip + 2 : ip + 4], (len(packet) - ip).to_bytes(2)),
        ("IPv4 identification", packet[ip + 4 : ip + 6], (ident & 0xFFFF).to_bytes(2)),
        ("IPv4 addresses", packet[ip + 12 : tcp], hdr[ip + 12 : tcp]),
        ("TCP ports", packet[tcp : tcp + 4], hdr[tcp : tcp + 4]),
        ("TCP sequence number", packet[tcp + 4 : tcp + 8], (sequence & 0xFFFF_FFFF).to_bytes(4)),
        ("TCP flags", packet[tcp + 13 : tcp + 14], bytes([_PSH_ACK if last else _ACK])),
    ):
        if found != expected:
            return f"its {what} is {found.hex()}, not {expected.hex()}"
    pseudo = packet[ip + 12 : tcp] + struct.pack("!HH", IPPROTO_TCP, len(packet) - tcp)
    for what, covered in (("IPv4", packet[ip:tcp]), ("TCP", pseudo + packet[tcp:])):
        if checksum_residue(covered):
            return f"its {what} checksum is wrong"
    return None


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size])
