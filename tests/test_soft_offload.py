"""Raw packets, checksums and segmentation on the software device, byte by byte."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ALL, GRH, soft_context

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCFlags, WCOpcode, WCStatus

SLOT = 10240
SLOTS = 64
IP_CSUM = SendFlags.SIGNALED | SendFlags.IP_CSUM
FIN, SYN, PSH, ACK, CWR = 0x01, 0x02, 0x08, 0x10, 0x80

ETHERNET = bytes.fromhex("020000000002 020000000001")
IPV4, IPV6 = b"\x08\x00", b"\x86\xdd"
VLAN = b"\x81\x00\x00\x64"
SRC4, DST4 = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
SRC6, DST6 = bytes(range(16)), bytes(range(16, 32))


context = soft_context


# ---- packets ----------------------------------------------------------------------


def word_sum(data: bytes) -> int:
    """Add up 16-bit words in one's complement, word by word."""
    total = 0
    for high, low in zip(data[::2], (data + b"\0")[1::2], strict=False):
        total += high << 8 | low
        total = (total & 0xFFFF) + (total >> 16)
    return total


def ipv4(protocol: int, payload: bytes, *, ident: int = 7, options: bytes = b"") -> bytes:
    """Make an IPv4 packet whose checksum is still to be filled in."""
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 20 + len(options) + len(payload), ident,
        0x4000, 64, protocol, 0xAAAA, SRC4, DST4,
    )  # fmt: skip
    return header + options + payload


def ipv6(protocol: int, payload: bytes, *, extension: bytes = b"") -> bytes:
    """Make an IPv6 packet, with an extension header if one is given."""
    first = 60 if extension else protocol
    return (
        struct.pack("!IHBB", 6 << 28, len(extension) + len(payload), first, 64)
        + SRC6
        + DST6
        + extension
        + payload
    )


def tcp(payload: bytes = b"", *, seq: int = 1000, flags: int = ACK, options: bytes = b"") -> bytes:
    """Make a TCP segment whose checksum is still to be filled in."""
    offset = (20 + len(options)) // 4 << 4
    return (
        struct.pack("!HHIIBBHHH", 1, 2, seq, 5, offset, flags, 1000, 0xBBBB, 0) + options + payload
    )


def udp(payload: bytes = b"", checksum: int = 0xBBBB) -> bytes:
    """Make a UDP datagram whose checksum is still to be filled in."""
    return struct.pack("!HHHH", 1, 2, 8 + len(payload), checksum) + payload


class Parsed:
    """A packet taken apart, with its checksums verified word by word."""

    def __init__(self, packet: bytes) -> None:
        self.packet = packet
        self.version = packet[0] >> 4
        if self.version == 4:
            self.header = packet[: (packet[0] & 15) * 4]
            (self.length, self.ident) = struct.unpack_from("!HH", packet, 2)
            self.protocol, addresses = packet[9], packet[12:20]
            assert word_sum(self.header) == 0xFFFF
        else:
            (length,) = struct.unpack_from("!H", packet, 4)
            self.length, self.protocol, addresses = 40 + length, packet[6], packet[8:40]
            self.header = packet[:40]
            if self.protocol == 60:
                self.protocol, size = packet[40], 8 + 8 * packet[41]
                self.header = packet[: 40 + size]
        assert self.length == len(packet)
        self.segment = packet[len(self.header) :]
        pseudo = addresses + struct.pack("!HH", self.protocol, len(self.segment))
        assert word_sum(pseudo + self.segment) == 0xFFFF
        if self.protocol == 6:
            (self.seq,) = struct.unpack_from("!I", self.segment, 4)
            self.flags = self.segment[13]
            self.payload = self.segment[(self.segment[12] >> 4) * 4 :]
        else:
            assert struct.unpack_from("!H", self.segment, 4) == (len(self.segment),)
            self.payload = self.segment[8:]


# ---- queue pairs ------------------------------------------------------------------


class Link:
    """A queue pair that sends and others of its type that receive, with many receives each."""

    def __init__(
        self, stack: contextlib.ExitStack, pd: rp.PD, cq: rp.CQ, qp_type: QPType, receivers: int = 1
    ) -> None:
        self.cq = cq
        self.qp_type = qp_type
        self.mr = stack.enter_context(rp.MR(pd, 1 << 19, ALL))
        self.memory = [stack.enter_context(rp.MR(pd, SLOT * SLOTS, ALL)) for _ in range(receivers)]
        self.a = rp.QP(pd, qp_type, cq, max_tso_header=256, max_inline_data=256)
        self.receivers = [
            rp.QP(pd, qp_type, stack.enter_context(rp.CQ(pd.context))) for _ in range(receivers)
        ]
        stack.callback(self.a.close)
        self.more: dict[str, Any] = {}
        for number, qp in enumerate(self.receivers):
            stack.callback(qp.close)
            qp.connect()
            memory = self.memory[number]
            qp.post_recv(
                [rp.RecvWR(memory[i * SLOT : i * SLOT + SLOT], wr_id=i) for i in range(SLOTS)]
            )
        self.a.connect()
        if qp_type is QPType.UD:
            b = self.receivers[0]
            ah = stack.enter_context(self.a.ah_to(b.endpoint()))
            key = rp.queuepair.DEFAULT_QKEY
            self.more = {"ah": ah, "remote_qpn": b.qp_num, "remote_qkey": key}

    def send(self, frame: bytes, send_flags: int = SendFlags.SIGNALED) -> rp.WC:
        """Send one frame or message; return how that ended."""
        self.mr.buffer[: len(frame)] = frame
        wr = rp.Send(self.mr[: len(frame)], wr_id=1, send_flags=send_flags, **self.more)
        self.a.post_send(wr)
        return self.cq.wait(1)[0]

    def tso(self, hdr: bytes, payload: bytes, mss: int) -> rp.WC:
        """Send a payload in segments; return how that ended."""
        self.mr.buffer[: len(payload)] = payload
        sg_list = self.mr[: len(payload)] if payload else ()
        self.a.post_send(rp.TSO(sg_list, hdr=hdr, mss=mss, wr_id=2, **self.more))
        return self.cq.wait(1)[0]

    def received(self, number: int = 0) -> list[tuple[bytes, WCFlags]]:
        """Return the frames that a receiver got, without the GRH, and their flags.

        The receives that they took are posted again.
        """
        grh = GRH if self.qp_type is QPType.UD else 0
        qp, memory = self.receivers[number], self.memory[number]
        found = []
        for wc in qp.recv_cq.poll():
            assert (wc.check().opcode, wc.qp_num) == (WCOpcode.RECV, qp.qp_num)
            start = wc.wr_id * SLOT
            frame = bytes(memory.buffer[start + grh : start + wc.byte_len])
            found.append((frame, wc.wc_flags & ~WCFlags.GRH))
            qp.post_recv(rp.RecvWR(memory[start : start + SLOT], wr_id=wc.wr_id))
        return found


@pytest.fixture
def raw(stack, pd, cq) -> Link:
    return Link(stack, pd, cq, QPType.RAW_PACKET)


@pytest.fixture
def ud(stack, pd, cq) -> Link:
    return Link(stack, pd, cq, QPType.UD)


# ---- raw packets ------------------------------------------------------------------


def test_frame_reaches_the_other_raw_queue_pairs_as_it_is(stack, pd, cq):
    link = Link(stack, pd, cq, QPType.RAW_PACKET, receivers=3)
    frame = ETHERNET + b"\x88\xb5" + bytes(range(200))
    wc = link.send(frame)
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.SEND)
    for number in range(3):
        assert link.received(number) == [(frame, WCFlags(0))]


def test_inline_frame(raw):
    frame = ETHERNET + b"\x88\xb5" + bytes(range(100))
    buffer = bytearray(frame)
    flags = SendFlags.SIGNALED | SendFlags.INLINE
    raw.a.post_send(rp.Send(rp.SGE.from_buffer(buffer), send_flags=flags))
    buffer[:] = bytes(len(buffer))
    raw.cq.wait(1)[0].check()
    assert raw.received() == [(frame, WCFlags(0))]


def test_frame_without_a_receive_is_dropped(stack, pd, cq):
    link = Link(stack, pd, cq, QPType.RAW_PACKET)
    for _ in range(SLOTS + 1):
        assert link.send(ETHERNET + b"\x88\xb5").status is WCStatus.SUCCESS
    assert len(link.received()) == SLOTS
    assert link.receivers[0].state is rp.QPState.RTS


@pytest.mark.parametrize("size", [0, 13, 9015])
def test_frame_of_a_wrong_length(raw, size):
    frame = (ETHERNET + bytes(9100))[:size]
    raw.mr.buffer[:size] = frame
    raw.a.post_send(rp.Send(raw.mr[:size] if size else ()))
    assert raw.cq.wait(1)[0].status is WCStatus.LOC_LEN_ERR
    assert raw.received() == []


def test_largest_frame(raw):
    frame = (ETHERNET + b"\x88\xb5" + bytes(9000))[:9014]
    assert raw.send(frame).status is WCStatus.SUCCESS
    assert raw.received() == [(frame, WCFlags(0))]


# ---- checksums --------------------------------------------------------------------

PACKETS = {
    "tcp4": (IPV4, ipv4(6, tcp(b"hello"))),
    "tcp4-options": (IPV4, ipv4(6, tcp(b"hello!", options=bytes(8)), options=bytes(12))),
    "tcp4-empty": (IPV4, ipv4(6, tcp())),
    "udp4": (IPV4, ipv4(17, udp(b"hello"))),
    "udp4-empty": (IPV4, ipv4(17, udp())),
    "tcp6": (IPV6, ipv6(6, tcp(b"hello"))),
    "udp6": (IPV6, ipv6(17, udp(b"hello"))),
    "udp6-extension": (IPV6, ipv6(17, udp(b"hello"), extension=b"\x11\x01" + bytes(14))),
}


@pytest.mark.parametrize("name", PACKETS)
@pytest.mark.parametrize("vlan", [b"", VLAN, VLAN + VLAN], ids=["untagged", "vlan", "qinq"])
def test_ip_csum_fills_the_checksums_in(raw, name, vlan):
    kind, packet = PACKETS[name]
    head = ETHERNET + vlan + kind
    assert raw.send(head + packet, IP_CSUM).status is WCStatus.SUCCESS
    [(frame, flags)] = raw.received()
    assert frame[: len(head)] == head
    Parsed(frame[len(head) :])
    assert flags is WCFlags.IP_CSUM_OK
    # Nothing but the checksums has changed.
    wrong = [i for i, (x, y) in enumerate(zip(frame, head + packet, strict=True)) if x != y]
    assert len(wrong) <= 4


@pytest.mark.parametrize("name", PACKETS)
def test_without_ip_csum_the_frame_stays_as_it_is(raw, name):
    kind, packet = PACKETS[name]
    raw.send(ETHERNET + kind + packet)
    assert raw.received() == [(ETHERNET + kind + packet, WCFlags(0))]


def test_right_checksums_are_seen_without_ip_csum(raw):
    raw.send(ETHERNET + IPV4 + ipv4(6, tcp(b"hello")), IP_CSUM)
    [(frame, _)] = raw.received()
    raw.send(frame)
    assert raw.received() == [(frame, WCFlags.IP_CSUM_OK)]
    for at in (14 + 8, 14 + 20, len(frame) - 1):
        broken = bytearray(frame)
        broken[at] ^= 0x10
        raw.send(bytes(broken))
        assert raw.received() == [(bytes(broken), WCFlags(0))]


def test_padding_behind_the_packet_does_not_count(raw):
    frame = (ETHERNET + IPV4 + ipv4(17, udp(b"hi"))).ljust(60, b"\xff")
    raw.send(frame, IP_CSUM)
    [(got, flags)] = raw.received()
    Parsed(got[14 : 14 + 20 + 10])
    assert got[-16:] == b"\xff" * 16
    assert flags is WCFlags.IP_CSUM_OK


def test_udp_without_checksum_is_right_on_ipv4_only(raw):
    """A sender need not compute it on IPv4, and must on IPv6."""
    packet = bytearray(ipv4(17, udp(b"hello", checksum=0)))
    packet[10:12] = b"\0\0"
    packet[10:12] = (0xFFFF - word_sum(packet[:20])).to_bytes(2)
    raw.send(ETHERNET + IPV4 + packet)
    raw.send(ETHERNET + IPV6 + ipv6(17, udp(b"hello", checksum=0)))
    assert [flags for _, flags in raw.received()] == [WCFlags.IP_CSUM_OK, WCFlags(0)]


def test_checksum_that_comes_out_as_zero_is_sent_as_ffff(raw):
    """0 in its place says that there is none (RFC 768)."""
    datagram = udp(b"\0\0", checksum=0)
    pseudo = SRC4 + DST4 + struct.pack("!HH", 17, len(datagram))
    payload = (0xFFFF - word_sum(pseudo + datagram)).to_bytes(2)
    raw.send(ETHERNET + IPV4 + ipv4(17, udp(payload)), IP_CSUM)
    [(frame, flags)] = raw.received()
    assert frame[14 + 26 : 14 + 28] == b"\xff\xff"
    assert flags is WCFlags.IP_CSUM_OK


@pytest.mark.parametrize("fragment", [0x2000, 0x0001])
def test_fragment_gets_its_header_checksum_only(raw, fragment):
    packet = bytearray(ipv4(6, tcp(b"hello")))
    packet[6:8] = fragment.to_bytes(2)
    raw.send(ETHERNET + IPV4 + packet, IP_CSUM)
    [(frame, flags)] = raw.received()
    assert word_sum(frame[14:34]) == 0xFFFF
    assert frame[34:] == packet[20:]
    assert flags == WCFlags(0)


@pytest.mark.parametrize(
    "rest",
    [
        b"\x88\xb5" + bytes(46),
        IPV4 + b"\x45",
        IPV4 + b"\x4f" + bytes(30),
        IPV4 + b"\x65" + bytes(30),
        IPV6 + bytes(60),
        IPV6 + b"\x60" + bytes(20),
        IPV6 + ipv6(44, bytes(16)),
        b"\x81\x00",
    ],
)
def test_what_cannot_be_summed_goes_out_as_it_is(raw, rest):
    raw.send(ETHERNET + rest, IP_CSUM)
    assert raw.received() == [(ETHERNET + rest, WCFlags(0))]


@pytest.mark.parametrize("name", PACKETS)
def test_ip_csum_on_ud_is_for_ip_over_infiniband(ud, name):
    kind, packet = PACKETS[name]
    message = kind + b"\0\0" + packet
    ud.send(message)
    ud.send(message, IP_CSUM)
    [plain, filled] = ud.received()
    assert plain == (message, WCFlags(0))
    assert filled[0][:4] == kind + b"\0\0"
    Parsed(filled[0][4:])
    assert filled[1] is WCFlags.IP_CSUM_OK


# ---- segmentation -----------------------------------------------------------------

HEADERS = {
    "tcp4": (IPV4, lambda flags, seq: ipv4(6, tcp(flags=flags, seq=seq), ident=0xFFFE)),
    "tcp4-options": (
        IPV4,
        lambda flags, seq: ipv4(6, tcp(flags=flags, seq=seq, options=bytes(12)), options=bytes(4)),
    ),
    "tcp6": (IPV6, lambda flags, seq: ipv6(6, tcp(flags=flags, seq=seq))),
    "tcp6-extension": (
        IPV6,
        lambda flags, seq: ipv6(6, tcp(flags=flags, seq=seq), extension=b"\x06\0" + bytes(6)),
    ),
}


def expect_segments(
    packets: list[bytes], payload: bytes, mss: int, flags: int, seq: int
) -> list[Parsed]:
    """Check that packets are the segments of a payload; return them taken apart."""
    found = [Parsed(packet) for packet in packets]
    pieces = [payload[i : i + mss] for i in range(0, len(payload) or 1, mss)]
    assert [one.payload for one in found] == pieces
    last = len(found) - 1
    for number, one in enumerate(found):
        wanted = flags & ~(FIN | PSH | CWR)
        wanted |= flags & (FIN | PSH) if number == last else 0
        wanted |= flags & CWR if number == 0 else 0
        assert (one.flags, one.seq) == (wanted, (seq + number * mss) % (1 << 32))
        if one.version == 4:
            assert one.ident == (found[0].ident + number) % (1 << 16)
    return found


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize(
    ("size", "mss"), [(1, 1460), (1460, 1460), (1461, 1460), (10000, 1460), (50, 7), (0, 100)]
)
@pytest.mark.parametrize("vlan", [b"", VLAN], ids=["untagged", "vlan"])
def test_tso_on_a_raw_queue_pair(raw, name, size, mss, vlan):
    kind, make = HEADERS[name]
    flags, seq = FIN | PSH | ACK | CWR, 0xFFFF_FF00
    head = ETHERNET + vlan + kind
    payload = bytes(i * 7 % 251 for i in range(size))
    wc = raw.tso(head + make(flags, seq), payload, mss)
    assert (wc.status, wc.opcode, wc.wr_id) == (WCStatus.SUCCESS, WCOpcode.TSO, 2)
    frames = raw.received()
    assert all(frame.startswith(head) for frame, _ in frames)
    assert {flags for _, flags in frames} == {WCFlags.IP_CSUM_OK}
    expect_segments([frame[len(head) :] for frame, _ in frames], payload, mss, flags, seq)


@pytest.mark.parametrize("name", HEADERS)
def test_tso_on_ud_sends_messages(ud, name):
    """Each is a datagram of its own, with a GRH in front, and with the IPoIB header."""
    kind, make = HEADERS[name]
    payload = bytes(i * 3 % 253 for i in range(5000))
    flags = PSH | ACK | SYN
    wc = ud.tso(kind + b"\0\0" + make(flags, 5), payload, 1000)
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.TSO)
    messages = ud.received()
    assert {message[:4] for message, _ in messages} == {kind + b"\0\0"}
    assert {flags for _, flags in messages} == {WCFlags.IP_CSUM_OK}
    expect_segments([message[4:] for message, _ in messages], payload, 1000, flags, 5)


@given(
    size=st.integers(1, 3000), mss=st.integers(60, 1500), seq=st.integers(0, (1 << 32) - 1),
    flags=st.integers(0, 255), data=st.integers(0, 255),
)  # fmt: skip
def test_segments_of_any_payload_add_up(raw, size, mss, seq, flags, data):
    payload = bytes([data]) * size
    raw.tso(ETHERNET + IPV4 + ipv4(6, tcp(seq=seq, flags=flags)), payload, mss).check()
    expect_segments([frame[14:] for frame, _ in raw.received()], payload, mss, flags, seq)


@pytest.mark.parametrize(
    ("kind", "packet"), [(IPV4, ipv4(17, udp())), (IPV6, ipv6(17, udp()))], ids=["udp4", "udp6"]
)
def test_udp_is_cut_into_datagrams(raw, kind, packet):
    """Every one of them has the whole UDP header."""
    raw.tso(ETHERNET + kind + packet, bytes(range(250)), 100).check()
    found = [Parsed(frame[14:]) for frame, _ in raw.received()]
    assert [one.payload for one in found] == [
        bytes(range(100)), bytes(range(100, 200)), bytes(range(200, 250)),
    ]  # fmt: skip


def test_payload_may_come_from_several_buffers(raw):
    raw.mr.buffer[:300] = bytes(i % 256 for i in range(300))
    hdr = ETHERNET + IPV4 + ipv4(6, tcp())
    sg_list = [raw.mr[200:300], raw.mr[0:50], raw.mr[50:51]]
    raw.a.post_send(rp.TSO(sg_list, hdr=hdr, mss=64))
    raw.cq.wait(1)[0].check()
    whole = bytes(raw.mr.buffer[200:300]) + bytes(raw.mr.buffer[:51])
    assert b"".join(frame[54:] for frame, _ in raw.received()) == whole


TCP4 = ETHERNET + IPV4 + ipv4(6, tcp())
BAD_HEADERS = {
    "no-ip": (ETHERNET + b"\x88\xb5" + bytes(40), WCStatus.LOC_QP_OP_ERR),
    "icmp": (ETHERNET + IPV4 + ipv4(1, bytes(8)), WCStatus.LOC_QP_OP_ERR),
    "ip-cut-short": (TCP4[:30], WCStatus.LOC_QP_OP_ERR),
    "fragment": (TCP4[:20] + b"\x20\0" + TCP4[22:], WCStatus.LOC_QP_OP_ERR),
    "ipv6-fragment": (ETHERNET + IPV6 + ipv6(44, bytes(28)), WCStatus.LOC_QP_OP_ERR),
    "tcp-cut-short": (TCP4[:-1], WCStatus.LOC_LEN_ERR),
    "more-behind": (TCP4 + b"x", WCStatus.LOC_LEN_ERR),
    "options-missing": (TCP4[:46] + b"\x60" + TCP4[47:], WCStatus.LOC_LEN_ERR),
    "udp-cut-short": (ETHERNET + IPV4 + ipv4(17, udp())[:-1], WCStatus.LOC_LEN_ERR),
    "ethernet-cut-short": (ETHERNET, WCStatus.LOC_LEN_ERR),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_header_that_cannot_be_used(raw, name):
    hdr, status = BAD_HEADERS[name]
    payload = b"x" if name == "ethernet-cut-short" else bytes(3000)
    assert raw.tso(hdr, payload, 1000).status is status
    assert raw.received() == []
    # An unreliable queue pair stops sending, and no more.
    assert raw.a.state is rp.QPState.SQE


def test_payload_that_is_too_long(raw):
    assert raw.tso(TCP4, bytes((1 << 18) + 1), 9000).status is WCStatus.LOC_LEN_ERR
    assert raw.received() == []


def test_segment_that_is_too_long_for_the_link(raw, ud):
    assert raw.tso(TCP4, bytes(9000), 8961).status is WCStatus.LOC_LEN_ERR
    assert ud.tso(IPV4 + b"\0\0" + TCP4[14:], bytes(9000), 4053).status is WCStatus.LOC_LEN_ERR
    assert raw.received() == ud.received() == []


@pytest.mark.parametrize("qp_type", [QPType.RAW_PACKET, QPType.UD])
def test_largest_segments(stack, pd, cq, qp_type):
    link = Link(stack, pd, cq, qp_type)
    raw = qp_type is QPType.RAW_PACKET
    mss, head = (8960, ETHERNET + IPV4) if raw else (4052, IPV4 + b"\0\0")
    link.tso(head + TCP4[14:], bytes(2 * mss), mss).check()
    assert [len(packet) for packet, _ in link.received()] == [len(head) + 40 + mss] * 2


def test_header_that_is_longer_than_the_queue_pair_takes(raw, stack, pd, cq):
    hdr = ETHERNET + IPV4 + ipv4(6, tcp(options=bytes(40)))
    for made, most in (
        (rp.QP(pd, QPType.RAW_PACKET, cq, max_tso_header=len(hdr) - 1), len(hdr) - 1),
        (rp.QP(pd, QPType.RAW_PACKET, cq), 0),
    ):
        with stack.enter_context(made) as qp:
            qp.connect()
            with pytest.raises(rp.PostError, match=f"hdr has 94 bytes.*max_tso_header={most}"):
                qp.post_send(rp.TSO(raw.mr[:100], hdr=hdr, mss=10))


def test_mss_of_zero(pd, cq, raw):
    """Refused by name; and by the device, where nobody has looked."""
    with pytest.raises(rp.PostError, match=r"mss=0 is not in 1\.\.65535"):
        raw.a.post_send(rp.TSO(raw.mr[:100], hdr=TCP4, mss=0))
    with rp.QP(pd, QPType.RAW_PACKET, cq, max_tso_header=64, checked=False) as qp:
        qp.connect()
        qp.post_send(rp.TSO(raw.mr[:100], hdr=TCP4, mss=0))
        assert cq.wait(1)[0].status is WCStatus.LOC_QP_OP_ERR
        qp.to_reset()
        qp.connect()
        with pytest.raises(rp.PostError) as caught:
            qp.post_send([rp.TSO(raw.mr[:9], hdr=TCP4, mss=9), rp.TSO(hdr=bytes(65), mss=9)])
        assert (caught.value.index, caught.value.posted) == (1, 1)
        cq.wait(1)[0].check()


def test_tso_header_is_for_types_that_have_tso(pd, cq):
    with pytest.raises(ValueError, match="RC queue pairs have no TSO"):
        rp.QP(pd, QPType.RC, cq, max_tso_header=64)
    with pytest.raises(ValueError, match=r"max_tso_header=65536 is not in 0\.\.65535"):
        rp.QP(pd, QPType.UD, cq, max_tso_header=65536)
    with pytest.raises(rp.VerbsError, match="at most 512"):
        rp.QP(pd, QPType.UD, cq, max_tso_header=513)
