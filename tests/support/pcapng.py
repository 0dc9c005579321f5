"""Reads pcapng files of RoCE v2 packets, and checks their headers, by the specifications alone."""

from __future__ import annotations

import pathlib
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Seen", "check_headers", "payload_of", "read"]


class Seen(NamedTuple):
    """A packet in a file.

    Attributes:
        time_ns: nanoseconds since 1970.
        is_sent: the direction.
        comment: the comment, or "".
        frame: the packet from its IP header on.
    """

    time_ns: int
    is_sent: bool
    comment: str
    frame: bytes


def blocks(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("=II", data, at)
        assert size % 4 == 0
        assert struct.unpack_from("=I", data, at + size - 4) == (size,)
        yield kind, data[at + 8 : at + size - 4]
        at += size


def options(data: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while True:
        code, size = struct.unpack_from("=HH", data, at)
        if not code:
            assert (size, at + 4) == (0, len(data))
            return found
        found[code] = data[at + 4 : at + 4 + size]
        at += 4 + size + -size % 4


def read(path: pathlib.Path, *, is_whole: bool = True) -> list[Seen]:
    """Read a file, by the specification of its format."""
    (kind, section), (kind_2, interface), *rest = blocks(path.read_bytes())
    assert (kind, kind_2) == (0x0A0D0D0A, 1)
    assert section[:4] == struct.pack("=I", 0x1A2B3C4D)
    assert struct.unpack_from("=H", interface) == (101,)
    assert options(interface[8:])[9] == b"\x09"
    if is_whole:
        kind, statistics = rest.pop()
        assert kind == 5
        (dropped,) = struct.unpack("=Q", options(statistics[12:])[5])
        assert dropped == 0
    found = []
    for kind, body in rest:
        assert kind == 6
        number, high, low, size, original = struct.unpack_from("=IIIII", body)
        assert (number, size) == (0, original)
        frame, has = body[20 : 20 + size], options(body[20 + size + -size % 4 :])
        (flags,) = struct.unpack("=I", has[2])
        assert flags in (1, 2)
        found.append(Seen(high << 32 | low, flags == 2, has.get(1, b"").decode(), frame))
    return found


def payload_of(frame: bytes) -> bytes:
    return frame[28 if frame[0] >> 4 == 4 else 48 :]


def icrc_of(frame: bytes) -> int:
    """Compute a packet's ICRC (IBTA, Annex A17) from its own headers."""
    covered = bytearray(frame[:-4])
    if frame[0] >> 4 == 4:
        udp = 20
        for at in (1, 8, 10, 11):
            covered[at] = 0xFF
    else:
        udp = 40
        covered[0] |= 0x0F
        for at in (1, 2, 3, 7):
            covered[at] = 0xFF
    for at in (udp + 6, udp + 7, udp + 8 + 4):
        covered[at] = 0xFF
    return zlib.crc32(bytes(8 * [0xFF]) + covered)


def sum_of(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def check_headers(frame: bytes) -> None:
    """Check lengths, port and checksums."""
    if frame[0] >> 4 == 4:
        assert frame[0] == 0x45
        assert frame[9] == 17
        assert int.from_bytes(frame[2:4]) == len(frame)
        assert sum_of(frame[:20]) == 0xFFFF
        addresses, udp = frame[12:20], frame[20:]
    else:
        assert frame[6] == 17
        assert int.from_bytes(frame[4:6]) == len(frame) - 40
        addresses, udp = frame[8:40], frame[40:]
    assert int.from_bytes(udp[2:4]) == 4791
    assert int.from_bytes(udp[4:6]) == len(udp)
    assert sum_of(addresses + struct.pack("!HH", 17, len(udp)) + udp) == 0xFFFF
    assert int.from_bytes(frame[-4:], "little") == icrc_of(frame)
