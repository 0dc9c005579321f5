"""RoCE v2 packets: the ICRC, batches that the kernel splits and joins, and the table of opcodes.

The ICRC is checked against one computed here with zlib, over real IP headers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
import sys
import zlib
from collections.abc import Iterator

import pytest

from rdmapost._binding import native
from rdmapost.enums import Opcode, QPType
from rdmapost.providers.roce import packets
from rdmapost.standard.wire import BTH_BYTES, ICRC_BYTES, IPPROTO_UDP

COUNT = int(os.environ.get("RDMAPOST_PROGRAMS", "3000"))
FIRST_SEED = int(os.environ.get("RDMAPOST_FIRST_SEED", "0"))
FIRST_BYTES = [*packets.ROWS, *range(256)]
PORT = 4791
SOURCE_PORT = 0xC123
V4 = (socket.inet_aton("10.0.0.1"), socket.inet_aton("10.0.0.2"))
V6 = (socket.inet_pton(socket.AF_INET6, "fd00::1"), socket.inet_pton(socket.AF_INET6, "fd00::2"))
FAMILIES = pytest.mark.parametrize("addresses", [V4, V6], ids=["IPv4", "IPv6"])
# linux/in.h, linux/in6.h and linux/udp.h
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_PROBE, IP_RECVTTL = 10, 23, 3, 12
UDP_GRO = 104


def flow_of(addresses: tuple[bytes, bytes], source_port: int = SOURCE_PORT) -> bytes:
    """The headers that the ICRC covers, with the lengths and the identification left 0."""
    if len(addresses[0]) == 4:
        ip = struct.pack("!BBHHHBBH", 0x45, 0xFF, 0, 0, 0x4000, 0xFF, IPPROTO_UDP, 0xFFFF)
    else:
        ip = struct.pack("!IHBB", 0x6FFFFFFF, 0, IPPROTO_UDP, 0xFF)
    return ip + b"".join(addresses) + struct.pack("!HHHH", source_port, PORT, 0, 0xFFFF)


def icrc(addresses: tuple[bytes, bytes], packet: bytes, identification: int = 0) -> bytes:
    """The ICRC of a packet without one, as Annex A17 of the specification defines it."""
    length = len(packet) + ICRC_BYTES + 8
    if len(addresses[0]) == 4:
        fields = 0x45, 0xFF, 20 + length, identification, 0x4000, 0xFF, IPPROTO_UDP, 0xFFFF
        ip = struct.pack("!BBHHHBBH", *(field & 0xFFFF for field in fields))
    else:
        ip = struct.pack("!IHBB", 0x6FFFFFFF, length & 0xFFFF, IPPROTO_UDP, 0xFF)
    udp = struct.pack("!HHHH", SOURCE_PORT, PORT, length & 0xFFFF, 0xFFFF)
    bth = packet[:4] + b"\xff" + packet[5:]
    covered = b"\xff" * 8 + ip + b"".join(addresses) + udp + bth
    return zlib.crc32(covered).to_bytes(4, "little")


def bth(opcode: int, psn: int = 0, qpn: int = 0x12, flags: int = 0) -> bytes:
    return struct.pack("!BBHII", opcode, flags, 0xFFFF, qpn, psn)


def build(
    flow: bytes, headers: list[bytes], payload: tuple[bytes, ...] = (), mtu: int = 0
) -> bytearray:
    out = bytearray(1 << 16)
    return out[: native.roce_build(out, flow, headers, payload, mtu)]


# ---- the ICRC -----------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 15, 16, 17, 256, 1023, 4096])
def test_icrc_is_that_of_the_specification(addresses, size):
    payload = random.Random(size).randbytes(size)
    built = build(flow_of(addresses), [bth(0x04, flags=0xFF)], (payload,), size)
    padding = -size % 4
    expected = bth(0x04, flags=0xCF | padding << 4) + payload + bytes(padding)
    assert bytes(built) == expected + icrc(addresses, expected)
    assert native.roce_check(bytearray(built), len(built), len(built), flow_of(addresses)) == 0


def test_identification_is_recovered_from_the_icrc():
    """Soft-RoCE and NICs number their IPv4 packets, which a UDP socket does not show."""
    rng = random.Random(1)
    for _ in range(300):
        packet = bth(0x04) + rng.randbytes(rng.randrange(1200))
        number = rng.randrange(1 << 16)
        whole = packet + icrc(V4, packet, number)
        assert native.roce_id(whole, 0, len(whole), flow_of(V4)) == number
        assert native.roce_check(bytearray(whole), len(whole), len(whole), flow_of(V4)) == 0
        assert native.roce_id(b"..." + whole + b"..", 3, len(whole), flow_of(V4)) == number
    # IPv6 has none.
    whole = packet + icrc(V6, packet)
    assert native.roce_id(whole, 0, len(whole), flow_of(V6)) == 0


def changed_icrc(right: bytes, change: bytes, size: int) -> bytes:
    """The ICRC of an IPv4 packet whose header differs from the identification on."""
    covered = 20 - 4 + 8 + size - ICRC_BYTES
    difference = zlib.crc32(change.ljust(covered, b"\0")) ^ zlib.crc32(bytes(covered))
    return (int.from_bytes(right, "little") ^ difference).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("addresses", "change", "damaged"),
    [(V4, b"\1\2", 0), (V4, b"\1\2\1", 1), (V4, b"\0\0\x80", 1), (V6, b"\1\2", 1)],
    ids=["identification", "next bit", "other bits", "IPv6"],
)
def test_only_another_ipv4_identification_is_accepted(addresses, change, damaged):
    packet = bth(0x04) + bytes(range(64))
    size = len(packet) + ICRC_BYTES
    wrong = bytearray(packet + changed_icrc(icrc(addresses, packet), change, size))
    assert native.roce_check(wrong, size, size, flow_of(addresses)) == damaged
    assert wrong[0] == (0xFF if damaged else 0x04)


@pytest.mark.parametrize(
    ("addresses", "longest"), [(V4, 65_507), (V6, 65_527)], ids=["IPv4", "IPv6"]
)
def test_packet_that_exceeds_what_ip_carries_is_damaged(addresses, longest):
    for size in (longest, longest + 1):
        packet = bth(0x04) + bytes(size - BTH_BYTES - ICRC_BYTES)
        whole = bytearray(packet + icrc(addresses, packet))
        assert native.roce_check(whole, size, size, flow_of(addresses)) == (size > longest)


@pytest.mark.parametrize(
    "flow",
    [
        b"",
        b"\x46" + flow_of(V4)[1:],
        b"\x65" + flow_of(V4)[1:],
        flow_of(V4)[:-1],
        flow_of(V4) + bytes(4),
        b"\x4f" + flow_of(V6)[1:],
        flow_of(V6) + bytes(4),
    ],
    ids=[
        "empty",
        "IPv4 with options",
        "IPv6 of IPv4's size",
        "IPv4, short",
        "IPv4, long",
        "IPv4 of IPv6's size",
        "IPv6, long",
    ],
)
def test_flow_that_is_not_two_headers_is_refused(flow):
    text = "flow must be an IPv4 header without options or an IPv6 header, followed by a UDP header"
    out = bytearray(99)
    for call, args in (
        ("roce_build", (out, flow, [bth(4)], (), 0)),
        ("roce_check", (out, 99, 99, flow)),
        ("roce_id", (out, 0, 99, flow)),
    ):
        with pytest.raises(ValueError, match=f"^{text}$"):
            getattr(native, call)(*args)
    assert not any(out)


@FAMILIES
def test_damaged_packet_loses_its_opcode_and_the_others_keep_theirs(addresses):
    flow = flow_of(addresses)
    headers = [bth(0x07, psn) for psn in range(8)]
    batch = build(flow, headers, (bytes(range(256)) * 8,), 256)
    size = BTH_BYTES + 256 + ICRC_BYTES
    rng = random.Random(2)
    for _ in range(200):
        damaged = bytearray(batch)
        which, byte = rng.randrange(8), rng.choice([0, *range(5, size)])
        # On IPv4 one change in 65,536 looks like another identification; these do not.
        for at in {byte, rng.randrange(5, size), rng.randrange(5, size)}:
            damaged[which * size + at] ^= rng.randrange(1, 256)
        assert native.roce_check(damaged, len(damaged), size, flow) == 1
        assert [damaged[n * size] for n in range(8)] == [
            0xFF if n == which else 0x07 for n in range(8)
        ]


@FAMILIES
def test_packet_from_another_address_or_port_is_damaged(addresses):
    built = build(flow_of(addresses), [bth(0x04)], (b"abcd",), 4)
    for flow in (flow_of(addresses[::-1]), flow_of(addresses, SOURCE_PORT + 1)):
        assert native.roce_check(bytearray(built), len(built), len(built), flow) == 1


def test_icrc_does_not_cover_resv8a_of_the_bth():
    built = build(flow_of(V4), [bth(0x04)], (b"abcd",), 4)
    built[4] = 0x5A
    assert native.roce_check(built, len(built), len(built), flow_of(V4)) == 0


def test_packets_too_short_for_a_header_are_damaged():
    for size in range(1, BTH_BYTES + ICRC_BYTES):
        short = bytearray(size)
        assert native.roce_check(short, size, size, flow_of(V4)) == 1
        assert short[0] == 0xFF


# ---- batches ------------------------------------------------------------------


@FAMILIES
def test_packets_of_a_batch_are_numbered_and_share_the_payload(addresses):
    """The kernel numbers the packets that it makes of a batch, in their IPv4 identifications."""
    data = random.Random(4).randbytes(620)
    headers = [bth(7, psn) for psn in range(10)]
    batch = build(flow_of(addresses), headers, (data[:100], b"", data[100:110], data[110:]), 64)
    expected = b""
    for number, header in enumerate(headers):
        packet = header + data[64 * number : 64 * number + 64]
        expected += packet + icrc(addresses, packet, number)
    assert batch == expected
    size = BTH_BYTES + 64 + ICRC_BYTES
    assert native.roce_check(batch, len(batch), size, flow_of(addresses)) == 0


def test_runs_of_packets_end_where_opcode_destination_or_order_change():
    flow = flow_of(V4)
    size = BTH_BYTES + 64 + ICRC_BYTES

    def run_of(*headers: bytes, at: int = 0) -> int:
        batch = build(flow, list(headers), (bytes(64 * len(headers)),), 64)
        return native.roce_run(batch, len(batch), size, at * size)

    assert run_of(*[bth(7, psn) for psn in (5, 6, 7, 8)]) == 4
    assert run_of(*[bth(7, psn) for psn in (5, 6, 7, 8)], at=2) == 2
    assert run_of(*[bth(7, psn) for psn in (0xFFFFFE, 0xFFFFFF, 0, 1)]) == 4
    assert run_of(*[bth(7, psn) for psn in (0xFFFE, 0xFFFF, 0x10000)]) == 3
    assert run_of(*[bth(7, psn) for psn in (5, 6, 8)]) == 2
    assert run_of(bth(7, 5), bth(7, 6), bth(8, 7)) == 2
    assert run_of(bth(7, 5), bth(7, 6, qpn=0x13)) == 1
    assert run_of(bth(7, 5), bth(7, 6, flags=0x80)) == 1
    # A request for an acknowledgement does not end it.
    assert run_of(bth(7, 5), bth(7, 6 | packets.ACK_REQ), bth(7, 7)) == 3
    # Nor does resv8a, which may change in transit.
    assert run_of(bth(7, 5), bth(7, 6, qpn=0x5A000012)) == 2


def test_last_packet_of_another_size_is_not_in_the_run_of_packets():
    batch = build(flow_of(V4), [bth(7, psn) for psn in range(3)], (bytes(64 * 2 + 8),), 64)
    assert native.roce_run(batch, len(batch), BTH_BYTES + 64 + ICRC_BYTES, 0) == 2


def test_run_of_packets_ends_with_what_was_received():
    batch = build(flow_of(V4), [bth(7, psn) for psn in range(3)], (bytes(64 * 3),), 64)
    size = BTH_BYTES + 64 + ICRC_BYTES
    assert native.roce_run(batch, 2 * size, size, size) == 1


def test_run_of_packets_that_are_too_short_is_one():
    headers = bth(7, 0) + bth(7, 1)
    assert native.roce_run(headers, 24, BTH_BYTES, 0) == 2
    overlapping = bytearray(30)
    overlapping[22] = 1
    assert native.roce_run(overlapping, 22, 11, 0) == 1


def test_payloads_of_a_run_are_gathered_without_headers():
    data = random.Random(3).randbytes(640)
    batch = build(flow_of(V4), [bth(7, psn) for psn in range(10)], (data[:100], data[100:]), 64)
    size = BTH_BYTES + 64 + ICRC_BYTES
    target = bytearray(b"." * 300)
    native.roce_gather(memoryview(target)[10:266], batch, 2 * size, size, 4, BTH_BYTES)
    assert target == b"." * 10 + data[128:384] + b"." * 34


@pytest.mark.parametrize("size", [0, 5, 8])
def test_packet_may_fill_the_buffer_exactly_whatever_the_mtu(size):
    payload = bytes(range(size))
    exact = bytearray(BTH_BYTES + (size + 3 & ~3) + ICRC_BYTES)
    assert native.roce_build(exact, flow_of(V4), [bth(4)], (payload,), 4096) == len(exact)
    assert exact == build(flow_of(V4), [bth(4)], (payload,), 4096)
    with pytest.raises(ValueError, match="payload"):
        native.roce_build(exact, flow_of(V4), [bth(4)], (payload, bytes(4)), 4096)


V4_ADDRESS = struct.pack("=H", socket.AF_INET) + bytes(14)
V6_ADDRESS = struct.pack("=H", socket.AF_INET6) + bytes(26)
TOO_SMALL = "a header or mtu is too small, or a packet is too large"
TOO_MANY = "there are over 64 packets, or one before the last is short"
LEFT_OVER = "payload is left over, or does not fit"
OUTSIDE = "an offset, a size or a count is out of bounds"


@pytest.mark.parametrize(
    ("call", "args", "text"),
    [
        ("roce_build", (99, flow_of(V4), [bth(4)], (b"abcdefgh",), 4), LEFT_OVER),
        ("roce_build", (20, flow_of(V4), [bth(4)], (b"abcdefgh",), 8), LEFT_OVER),
        ("roce_build", (22, flow_of(V4), [bth(4)], (b"abcde",), 8), "a packet is too large"),
        ("roce_build", (99, flow_of(V4), [bth(4)[:-1]], (), 0), TOO_SMALL),
        ("roce_build", (15, flow_of(V4), [bth(4)], (), 0), TOO_SMALL),
        ("roce_build", (11, flow_of(V4), [bth(4)], (), 0), TOO_SMALL),
        ("roce_build", (99, flow_of(V4), [bth(4)], (), -1), TOO_SMALL),
        ("roce_build", (31, flow_of(V4), [bth(4)] * 2, (), 0), TOO_SMALL),
        ("roce_build", (99, flow_of(V4), [bth(4), bth(4) + bytes(8)], (b"1234",), 4), TOO_SMALL),
        (
            "roce_build",
            (99, flow_of(V4), [bth(4), bth(4) + b"1234", bth(4)], (b"12345678",), 4),
            LEFT_OVER,
        ),
        ("roce_build", (99, flow_of(V4), [bth(4)] * 3, (b"1234",), 4), TOO_MANY),
        ("roce_build", (9999, flow_of(V4), [bth(4)] * 65, (), 0), TOO_MANY),
        ("roce_check", (10, 11, 11, flow_of(V4)), OUTSIDE),
        ("roce_check", (10, -1, 5, flow_of(V4)), OUTSIDE),
        ("roce_check", (10, 1, 0, flow_of(V4)), OUTSIDE),
        ("roce_check", (10, 10, 0, flow_of(V4)), OUTSIDE),
        ("roce_check", (10, 10, -5, flow_of(V4)), OUTSIDE),
        ("roce_id", (10, 0, 11, flow_of(V4)), OUTSIDE),
        ("roce_id", (10, 5, 6, flow_of(V4)), OUTSIDE),
        ("roce_id", (10, -1, 5, flow_of(V4)), OUTSIDE),
        ("roce_id", (10, 0, -1, flow_of(V4)), OUTSIDE),
        ("roce_id", (10, 11, -1, flow_of(V4)), OUTSIDE),
        ("roce_run", (10, 11, 5, 0), OUTSIDE),
        ("roce_run", (10, 10, 0, 0), OUTSIDE),
        ("roce_run", (10, 10, 5, 10), OUTSIDE),
        ("roce_run", (10, 10, 5, -1), OUTSIDE),
        ("roce_gather", (7, bytearray(40), 0, 20, 2, 12), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 1, 20, 2, 12), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 41, 20, 0, 12), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 0, 20, -1, 12), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 0, 20, 1, 17), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 0, 20, 1, -1), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 0, 3, 1, 0), OUTSIDE),
        ("roce_gather", (99, bytearray(40), 0, 1 << 62, 1 << 62, 0), OUTSIDE),
        ("roce_gather", (99, bytearray(40), -1, 20, 1, 12), OUTSIDE),
    ],
)
def test_packet_functions_in_c_refuse_what_is_out_of_bounds(call, args, text):
    """And write nothing behind the buffer that they are given."""
    size, *rest = args
    whole = bytearray(b"." * 10_000)
    with pytest.raises(ValueError, match=f"^{text}$"):
        getattr(native, call)(memoryview(whole)[:size], *rest)
    assert whole[size:] == b"." * (len(whole) - size)


@pytest.mark.parametrize(
    ("address", "size", "segment", "tos"),
    [
        (bytes(16), 9, 9, 0),
        (bytes(3), 9, 9, 0),
        (V4_ADDRESS[:3], 9, 9, 0),
        (V4_ADDRESS[:2] + bytes(26), 9, 9, 0),
        (V6_ADDRESS[:16], 9, 9, 0),
        (V6_ADDRESS + b"1", 9, 9, 0),
        (V4_ADDRESS, 0, 9, 0),
        (V4_ADDRESS, 10, 9, 0),
        (V4_ADDRESS, 9, 0, 0),
        (V4_ADDRESS, 9, 1 << 16, 0),
        (V4_ADDRESS, 9, 9, -1),
        (V4_ADDRESS, 9, 9, 256),
    ],
)
def test_send_with_an_invalid_argument_is_refused(address, size, segment, tos):
    with pytest.raises(ValueError, match=r"^address, size, segment or tos is not valid$"):
        native.roce_send(-1, address, b"123456789", size, segment, tos)


def test_packet_functions_in_c_accept_what_is_just_within_bounds():
    flow, buffer = flow_of(V4), bytearray(40)
    assert native.roce_check(buffer, 0, 0, flow) == 0
    assert native.roce_id(buffer, 0, 0, flow) == native.roce_id(buffer, 40, 0, flow) == -1
    assert native.roce_run(buffer, 40, 5, 39) == native.roce_run(buffer, 40, 1, 0) == 1
    assert native.roce_gather(bytearray(), buffer, 40, 20, 0, 12) == 0
    assert native.roce_gather(bytearray(), buffer, 0, 20, 2, 16) == 0
    assert native.roce_gather(bytearray(), buffer, 0, 4, 10, 0) == 0
    assert native.roce_gather(bytearray(16), buffer, 0, 20, 1, 0) == 16


@pytest.mark.parametrize(
    "call",
    ["roce_build", "roce_send", "roce_receive", "roce_check", "roce_id", "roce_run", "roce_gather"],
)
def test_packet_functions_in_c_refuse_missing_arguments(call):
    with pytest.raises(TypeError, match="argument"):
        getattr(native, call)()


@pytest.mark.parametrize(
    ("headers", "payload", "text"),
    [
        (["no bytes"], (b"1234",), "expected bytes, str found"),
        ([bth(4)], ("no buffer",), "a bytes-like object is required, not 'str'"),
        ([bth(4)], (b"12", "no buffer"), "a bytes-like object is required, not 'str'"),
        (None, (), "'NoneType' object is not iterable"),
        ([bth(4)], None, "'NoneType' object is not iterable"),
    ],
)
def test_packet_of_what_is_no_bytes_is_a_type_error(headers, payload, text):
    with pytest.raises(TypeError, match=f"^{text}$"):
        native.roce_build(bytearray(99), flow_of(V4), headers, payload, 4)


def test_packet_functions_in_c_release_their_arguments():
    """A bytearray that something still looks into cannot be resized."""
    arguments = [bytearray(99), bytearray(flow_of(V4)), bytearray(b"1234"), bytearray(20)]
    out, flow, payload, target = arguments
    for data in (payload, payload * 2):
        with contextlib.suppress(ValueError):
            native.roce_build(out, flow, [bth(4)], (data, data), 8)
    native.roce_check(out, 24, 24, flow)
    native.roce_id(out, 0, 24, flow)
    native.roce_run(out, 24, 24, 0)
    native.roce_gather(target, out, 0, 24, 2, BTH_BYTES)
    for given in arguments:
        given.clear()


def random_packet(rng: random.Random) -> bytearray:
    """Bytes of any length, most of which begin like a BTH."""
    size = rng.choice([rng.randrange(1, 40), rng.randrange(1, 600)])
    buffer = bytearray(rng.randbytes(size))
    buffer[0] = rng.choice(FIRST_BYTES)
    if size > 4 and rng.random() < 0.7:
        buffer[1:4] = bytes((rng.choice([0, 0x30, 0x80]), 0xFF, 0xFF))
    return buffer


def mutated_packets(rng: random.Random) -> bytearray:
    """One valid packet or several, with bytes changed, removed and repeated."""
    opcode = rng.choice([*packets.ROWS])
    row = packets.ROWS[opcode]
    header = bth(opcode, rng.randrange(1 << 24)) + rng.randbytes(row.size - BTH_BYTES)
    payload = rng.randbytes(rng.randrange(200)) if row.has_payload else b""
    flow = flow_of(rng.choice([V4, V6]))
    buffer = build(flow, [header] * max(1, -(-len(payload) // 64)), (payload,), 64)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(buffer))
        change = rng.randrange(3)
        if change == 0:
            buffer[at] = rng.randrange(256)
        elif change == 1 and at:
            del buffer[at:]
        else:
            buffer[at:at] = buffer[at : at + 16]
    return buffer


def test_random_and_mutated_packets_are_never_read_or_written_out_of_bounds():
    """What a stranger sends: nothing raises, and only whole packets are decoded."""
    decoded = 0
    for seed in range(FIRST_SEED, FIRST_SEED + COUNT):
        rng = random.Random(seed)
        buffer = rng.choice((random_packet, mutated_packets))(rng)
        size = len(buffer)
        segment = rng.randrange(1, size + 1)
        if rng.random() < 0.3:
            native.roce_check(buffer, size, segment, flow_of(rng.choice([V4, V6])))
        count = native.roce_run(buffer, size, segment, 0)
        length = segment if count > 1 else min(segment, size)
        packet = packets.parse(memoryview(buffer), 0, length, count)
        if packet is not None:
            decoded += 1
            assert length >= packet.row.size + ICRC_BYTES
            carried = sum(map(len, packet.pieces()))
            assert carried == (packet.length if packet.row.has_payload else 0)
    assert decoded > COUNT / 20


# ---- real sockets ---------------------------------------------------------------


def sockets(family: socket.AddressFamily, host: str) -> Iterator[socket.socket]:
    """A sender and a receiver, with the options that make the ICRC computable."""
    for _ in range(2):
        made = socket.socket(family, socket.SOCK_DGRAM)
        if family is socket.AF_INET:
            made.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_PROBE)
            made.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        else:
            made.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_PROBE)
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
        made.bind((host, 0))
        made.settimeout(10)
        yield made


def address_of(bound: socket.socket) -> bytes:
    host, port = bound.getsockname()[:2]
    if bound.family is socket.AF_INET:
        return struct.pack("=H", socket.AF_INET) + struct.pack(
            "!H4s8x", port, socket.inet_aton(host)
        )
    raw = socket.inet_pton(socket.AF_INET6, host)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", port, 0, raw, 0)


@pytest.mark.parametrize("joined", [False, True], ids=["split", "joined"])
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_batch_of_packets_goes_through_the_kernel_whole_and_in_order(family, host, joined):
    """One system call sends it; the kernel splits it, and may join it again for the receiver."""
    sender, receiver = sockets(family, host)
    with sender, receiver:
        if joined:
            receiver.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        raw = socket.inet_pton(family, host)
        ports = struct.pack("!HH", sender.getsockname()[1], receiver.getsockname()[1])
        flow = flow_of((raw, raw))
        flow = flow[:-8] + ports + flow[-4:]
        data = random.Random(5).randbytes(8 * 1024)
        batch = build(flow, [bth(7, psn) for psn in range(8)], (data,), 1024)
        segment = BTH_BYTES + 1024 + ICRC_BYTES
        sent = native.roce_send(
            sender.fileno(), address_of(receiver), batch, len(batch), segment, 0x68
        )
        assert sent == 0
        buffer, arrived = bytearray(1 << 16), bytearray()
        while len(arrived) < len(data):
            receiver.recv(1, socket.MSG_PEEK)
            got = native.roce_receive(receiver.fileno(), buffer)
            assert got is not None
            size, each, came_from, tos, _ = got
            assert each == segment
            assert came_from[:4] == address_of(sender)[:4]
            assert tos == 0x68
            assert native.roce_check(buffer, size, each, flow) == 0
            count = native.roce_run(buffer, size, each, 0)
            assert count * each == size
            piece = bytearray(count * 1024)
            native.roce_gather(piece, buffer, 0, each, count, BTH_BYTES)
            arrived += piece
        assert arrived == data
        assert native.roce_receive(receiver.fileno(), buffer) is None


@pytest.mark.parametrize(
    ("family", "host", "level", "ttl", "receive_ttl", "receive_tos"),
    [
        (
            socket.AF_INET,
            "127.0.0.1",
            socket.IPPROTO_IP,
            socket.IP_TTL,
            IP_RECVTTL,
            socket.IP_RECVTOS,
        ),
        (
            socket.AF_INET6,
            "::1",
            socket.IPPROTO_IPV6,
            socket.IPV6_UNICAST_HOPS,
            socket.IPV6_RECVHOPLIMIT,
            socket.IPV6_RECVTCLASS,
        ),
    ],
    ids=["IPv4", "IPv6"],
)
def test_received_packet_says_its_traffic_class_and_ttl_where_the_socket_asks(
    family, host, level, ttl, receive_ttl, receive_tos
):
    sender, receiver = sockets(family, host)
    buffer = bytearray(9)
    with sender, receiver:
        sender.setsockopt(level, ttl, 9)

        def sent(tos: int) -> tuple[int, ...]:
            assert (
                native.roce_send(sender.fileno(), address_of(receiver), b"123", 2, 65535, tos) == 0
            )
            receiver.recv(1, socket.MSG_PEEK)
            got = native.roce_receive(receiver, buffer)
            assert got is not None
            assert buffer == b"12" + bytes(7)
            return (*got[:2], *got[3:])

        receiver.setsockopt(level, receive_ttl, 1)
        assert sent(255) == (2, 2, 255, 9)
        assert sent(0) == (2, 2, 0, 9)
        assert native.roce_send(sender.fileno(), address_of(receiver), b"1", 1, 1, 0) == 0
        assert receiver.recv(9) == b"1"
        receiver.setsockopt(level, receive_ttl, 0)
        receiver.setsockopt(level, receive_tos, 0)
        assert sent(255) == (2, 2, 0, 0)
        sender.sendto(b"", receiver.getsockname()[:2])
        receiver.recv(1, socket.MSG_PEEK)
        got = native.roce_receive(receiver, buffer)
        assert got is not None
        assert got[:2] == (0, 0)


def test_receiving_from_a_closed_socket_gives_none_and_from_no_socket_a_type_error():
    closed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    closed.close()
    buffer = bytearray(9)
    assert native.roce_receive(closed, buffer) is None
    with pytest.raises(TypeError, match="fileno"):
        native.roce_receive("no socket", buffer)
    # Nothing looks into the buffer any more.
    buffer.clear()


def test_errors_of_the_network_are_returned_and_not_raised():
    sender, receiver = sockets(socket.AF_INET, "127.0.0.1")
    errors: list[tuple[int, object]] = []
    with sender, receiver:
        address = address_of(receiver)
        assert native.roce_send(sender.fileno(), address, b"123", 3, 3, 0, errors, "why") == 0
        assert errors == []
        # Too long for one datagram.
        assert native.roce_send(sender.fileno(), address, bytearray(65535), 65535, 65535, 0) != 0
        fd = sender.fileno()
    assert native.roce_send(fd, address, b"123", 3, 3, 0, errors, "why") == errno.EBADF
    assert errors == [(errno.EBADF, "why")]
    with pytest.raises(OSError, match="file descriptor"):
        native.roce_receive(fd, bytearray(9))


# ---- the table ------------------------------------------------------------------


def test_opcodes_are_those_of_the_specification():
    """Table 38 of the specification, and the annexes for FLUSH and ATOMIC_WRITE."""
    by_name = {row.name: row.bth_opcode for row in packets.ROWS.values()}
    assert by_name["RC_SEND_FIRST"] == 0x00
    assert by_name["RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE"] == 0x0B
    assert by_name["RC_RDMA_READ_REQUEST"] == 0x0C
    assert by_name["RC_RDMA_READ_RESPONSE_ONLY"] == 0x10
    assert by_name["RC_ACKNOWLEDGE"] == 0x11
    assert by_name["RC_ATOMIC_ACKNOWLEDGE"] == 0x12
    assert by_name["RC_COMPARE_SWAP"] == 0x13
    assert by_name["RC_FETCH_ADD"] == 0x14
    assert by_name["RC_SEND_ONLY_WITH_INVALIDATE"] == 0x17
    assert by_name["RC_FLUSH"] == 0x1C
    assert by_name["RC_ATOMIC_WRITE"] == 0x1D
    assert by_name["UC_SEND_FIRST"] == 0x20
    assert by_name["UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE"] == 0x2B
    assert by_name["UD_SEND_ONLY"] == 0x64
    assert by_name["UD_SEND_ONLY_WITH_IMMEDIATE"] == 0x65
    assert len(by_name) == len(packets.ROWS) == 39


def sizes() -> dict[str, int]:
    return {row.name: row.size - BTH_BYTES for row in packets.ROWS.values()}


def test_extension_headers_have_their_sizes():
    size = sizes()
    assert size["RC_SEND_ONLY"] == size["UC_RDMA_WRITE_MIDDLE"] == 0
    assert size["RC_RDMA_WRITE_FIRST"] == size["RC_RDMA_READ_REQUEST"] == 16
    assert size["RC_COMPARE_SWAP"] == 28
    assert size["RC_ATOMIC_ACKNOWLEDGE"] == 12
    assert size["RC_FLUSH"] == 20
    assert size["UD_SEND_ONLY_WITH_IMMEDIATE"] == 12


@pytest.mark.parametrize("row", packets.ROWS.values(), ids=lambda row: row.name)
def test_every_packet_is_decoded_as_it_was_encoded(row):
    rng = random.Random(row.bth_opcode)
    values = {name: rng.randrange(1, 1 << 16) for name in row.fields}
    values |= {"bth_opcode": row.bth_opcode, "flags": packets.SOLICITED_EVENT, "pkey": 0xFFFF}
    if "immediate" in values:
        values["immediate"] = rng.randbytes(4)
    payload = rng.randbytes(21 if row.has_payload else 0)
    header = row.pack(*[values[name] for name in row.fields])
    whole = build(flow_of(V4), [header], (payload,), len(payload))
    packet = packets.parse(memoryview(bytearray(whole)), 0, len(whole), 1, b"the sender")
    assert packet is not None
    assert packet.row is row
    assert (packet.qpn, packet.psn, packet.solicited) == (values["qpn"], values["psn"], True)
    assert packet.source == b"the sender"
    assert b"".join(packet.pieces()) == payload
    for name in ("remote_addr", "rkey", "aeth", "value", "qkey", "src_qpn", "invalidate_rkey"):
        if name in values:
            assert getattr(packet, name) == values[name]
    if "immediate" in values:
        # As in the work request, whose imm_data is in network order.
        assert packet.imm.to_bytes(4, sys.byteorder) == values["immediate"]


def test_run_of_packets_is_decoded_once_and_can_lose_its_beginning():
    data = random.Random(6).randbytes(64 * 6)
    headers = [bth(7, 0xFFFFFE + n & 0xFFFFFF) for n in range(5)]
    headers.append(bth(7, 3 | packets.ACK_REQ))
    batch = build(flow_of(V4), headers, (data,), 64)
    packet = packets.parse(memoryview(batch), 0, BTH_BYTES + 64 + ICRC_BYTES, 6)
    assert packet is not None
    assert (packet.psn, packet.count, packet.length, packet.ack_req) == (0xFFFFFE, 6, 384, True)
    whole, packet = packet, packet.after(2)
    assert (whole.psn, whole.count, whole.length) == (0xFFFFFE, 6, 384)
    assert (packet.psn, packet.count, packet.length) == (0, 4, 256)
    target = bytearray(256)
    packet.copy_to([memoryview(target)])
    assert target == data[128:]
    scattered = bytearray(100), bytearray(156)
    packet.copy_to([memoryview(piece) for piece in scattered])
    assert b"".join(scattered) == data[128:]
    packet = packet.held()
    batch[:] = bytes(len(batch))
    assert b"".join(packet.pieces()) == data[128:]


@pytest.mark.parametrize(
    ("change", "at"), [(0x0F, 1), (0x7F, 2), (0x20, 0)], ids=["TVer", "P_Key", "opcode"]
)
def test_packets_of_other_protocols_are_not_decoded(change, at):
    whole = build(flow_of(V4), [bth(0x11) + bytes(4)])
    assert packets.parse(memoryview(whole), 0, len(whole)) is not None
    whole[at] ^= change
    assert packets.parse(memoryview(whole), 0, len(whole)) is None


def test_every_work_request_of_a_service_has_its_packets():
    assert {Opcode(each) for each in packets.FORMS[QPType.UD]} == {
        Opcode.SEND,
        Opcode.SEND_WITH_IMM,
    }
    assert Opcode.RDMA_READ not in packets.FORMS[QPType.UC]
    form = packets.FORMS[QPType.RC][Opcode.SEND_WITH_INV]
    assert [row.name for row in form] == [
        "RC_SEND_FIRST",
        "RC_SEND_MIDDLE",
        "RC_SEND_LAST_WITH_INVALIDATE",
        "RC_SEND_ONLY_WITH_INVALIDATE",
    ]


def test_distance_of_psns_wraps_at_2_to_the_24():
    assert packets.distance(1, 0xFFFFFF) == 2
    assert packets.distance(0xFFFFFF, 1) == -2
    assert packets.distance(5, 5) == 0
