"""The pcapng file format, as far as a capture needs it (draft-ietf-opsawg-pcapng).

A file is a sequence of blocks: a section header, one interface, packets and, at the end, the
interface's statistics. Wireshark can open such files. Numbers are in this machine's byte order.
"""

from __future__ import annotations

from struct import Struct

_SECTION, _INTERFACE, _STATISTICS, _PACKET = 0x0A0D0D0A, 1, 5, 6
"""Types of blocks."""
_BYTE_ORDER_MAGIC = 0x1A2B3C4D
_LENGTH_UNKNOWN = (1 << 64) - 1
_LINKTYPE_RAW = 101
"""Packets begin with their IP header."""
_NANOSECONDS = bytes((9,))

# Options: of any block; of the section; of the interface; of a packet; of the statistics.
_END_OF_OPTIONS, _COMMENT = 0, 1
_APPLICATION = 4
_NAME, _RESOLUTION = 2, 9
_FLAGS = 2
_RECEIVED, _DROPPED = 4, 5
_INBOUND, _OUTBOUND = 1, 2
"""The direction, in the flags of a packet."""
_LONGEST_COMMENT = 0xFFFF

_BLOCK = Struct("=II")
_TRAILER = Struct("=I")
_OPTION = Struct("=HH")
_U64 = Struct("=Q")
_SECTION_BODY = Struct("=IHHQ")
_INTERFACE_BODY = Struct("=HHI")
_PACKET_BODY = Struct("=IIIII")
_STATISTICS_BODY = Struct("=III")
_FLAGS_OPTION = Struct("=HHI")
_OUTBOUND_FLAGS, _INBOUND_FLAGS = [_FLAGS_OPTION.pack(_FLAGS, 4, n) for n in (_OUTBOUND, _INBOUND)]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _option(code: int, value: bytes) -> bytes:
    return _OPTION.pack(code, len(value)) + _padded(value)


def _block(block_type: int, body: bytes) -> bytes:
    size = _BLOCK.size + len(body) + _TRAILER.size
    return _BLOCK.pack(block_type, size) + body + _TRAILER.pack(size)


def beginning(interface: str) -> bytes:
    """Return the blocks that a file begins with.

    Args:
        interface: the name of the device that sends and receives the packets.
    """
    end = _option(_END_OF_OPTIONS, b"")
    section = _SECTION_BODY.pack(_BYTE_ORDER_MAGIC, 1, 0, _LENGTH_UNKNOWN)
    section += _option(_APPLICATION, b"rdmapost") + end
    options = _option(_NAME, interface.encode()) + _option(_RESOLUTION, _NANOSECONDS) + end
    described = _INTERFACE_BODY.pack(_LINKTYPE_RAW, 0, 0) + options
    return _block(_SECTION, section) + _block(_INTERFACE, described)


def packet(frame: bytes, time_ns: int, is_sent: bool, comment: str) -> bytes:
    """Return a packet's block.

    Args:
        frame: the packet, from its IP header on.
        time_ns: nanoseconds since 1970.
        is_sent: True if it was sent, False if it was received.
        comment: a comment on it, or "".
    """
    size = len(frame)
    body = _PACKET_BODY.pack(0, time_ns >> 32 & 0xFFFFFFFF, time_ns & 0xFFFFFFFF, size, size)
    options = _OUTBOUND_FLAGS if is_sent else _INBOUND_FLAGS
    if comment:
        options += _option(_COMMENT, comment.encode()[:_LONGEST_COMMENT])
    return _block(_PACKET, body + _padded(frame) + options + _option(_END_OF_OPTIONS, b""))


def end(time_ns: int, seen: int, dropped: int) -> bytes:
    """Return the block that a file ends with.

    Args:
        time_ns: nanoseconds since 1970.
        seen: how many packets were sent and received.
        dropped: how many of these are not in the file.
    """
    body = _STATISTICS_BODY.pack(0, time_ns >> 32 & 0xFFFFFFFF, time_ns & 0xFFFFFFFF)
    body += _option(_RECEIVED, _U64.pack(seen)) + _option(_DROPPED, _U64.pack(dropped))
    return _block(_STATISTICS, body + _option(_END_OF_OPTIONS, b""))
