"""Segmentation (TSO) on the software device, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import soft_context
from support.packets import (
    ACK,
    CWR,
    ETHERNET,
    FIN,
    IPV4,
    IPV6,
    PSH,
    SYN,
    VLAN,
    Link,
    Parsed,
    ipv4,
    ipv6,
    raw_link,
    tcp,
    ud_link,
    udp,
)

import rdmapost as rp
from rdmapost import QPType, WCFlags, WCOpcode, WCStatus

context = soft_context
raw, ud = raw_link, ud_link


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
    """Check that packets are the segments of a payload; return them parsed."""
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
def test_tso_on_a_raw_queue_pair_sends_frames_with_correct_headers(raw, name, size, mss, vlan):
    ethertype, make = HEADERS[name]
    flags, seq = FIN | PSH | ACK | CWR, 0xFFFF_FF00
    head = ETHERNET + vlan + ethertype
    payload = bytes(i * 7 % 251 for i in range(size))
    wc = raw.tso(head + make(flags, seq), payload, mss)
    assert (wc.check().opcode, wc.wr_id, wc.byte_len) == (WCOpcode.TSO, 2, 0)
    frames = raw.received()
    assert all(frame.startswith(head) for frame, _ in frames)
    assert {flags for _, flags in frames} == {WCFlags.IP_CSUM_OK}
    expect_segments([frame[len(head) :] for frame, _ in frames], payload, mss, flags, seq)


@pytest.mark.parametrize("name", HEADERS)
def test_tso_on_ud_sends_ip_over_infiniband_messages(ud, name):
    """Each is a separate datagram, with a GRH in front, and with the IPoIB header."""
    ethertype, make = HEADERS[name]
    payload = bytes(i * 3 % 253 for i in range(5000))
    flags = PSH | ACK | SYN
    wc = ud.tso(ethertype + b"\0\0" + make(flags, 5), payload, 1000)
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.TSO)
    messages = ud.received()
    assert {message[:4] for message, _ in messages} == {ethertype + b"\0\0"}
    assert {flags for _, flags in messages} == {WCFlags.IP_CSUM_OK}
    expect_segments([message[4:] for message, _ in messages], payload, 1000, flags, 5)


@given(
    size=st.integers(1, 3000),
    mss=st.integers(60, 1500),
    seq=st.integers(0, (1 << 32) - 1),
    flags=st.integers(0, 255),
    data=st.integers(0, 255),
)
def test_tso_segments_reassemble_to_any_payload(raw, size, mss, seq, flags, data):
    payload = bytes([data]) * size
    raw.tso(ETHERNET + IPV4 + ipv4(6, tcp(seq=seq, flags=flags)), payload, mss).check()
    expect_segments([frame[14:] for frame, _ in raw.received()], payload, mss, flags, seq)


@pytest.mark.parametrize(
    ("ethertype", "packet"),
    [(IPV4, ipv4(17, udp())), (IPV6, ipv6(17, udp()))],
    ids=["udp4", "udp6"],
)
def test_tso_cuts_udp_into_datagrams(raw, ethertype, packet):
    """Every one of them has the whole UDP header."""
    raw.tso(ETHERNET + ethertype + packet, bytes(range(250)), 100).check()
    found = [Parsed(frame[14:]) for frame, _ in raw.received()]
    assert [one.payload for one in found] == [
        bytes(range(100)),
        bytes(range(100, 200)),
        bytes(range(200, 250)),
    ]


def test_tso_payload_may_span_buffers(raw):
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
def test_tso_with_an_unusable_header_sends_nothing(raw, name):
    hdr, status = BAD_HEADERS[name]
    payload = b"x" if name == "ethernet-cut-short" else bytes(3000)
    assert raw.tso(hdr, payload, 1000).status is status
    assert raw.received() == []
    # An unreliable queue pair only stops sending.
    assert raw.a.state is rp.QPState.SQE


def test_tso_payload_above_the_limit_fails(raw):
    assert raw.tso(TCP4, bytes((1 << 18) + 1), 9000).status is WCStatus.LOC_LEN_ERR
    assert raw.received() == []


def test_tso_segment_longer_than_the_link_allows_fails(raw, ud):
    assert raw.tso(TCP4, bytes(9000), 8961).status is WCStatus.LOC_LEN_ERR
    assert ud.tso(IPV4 + b"\0\0" + TCP4[14:], bytes(9000), 4053).status is WCStatus.LOC_LEN_ERR
    assert raw.received() == ud.received() == []


@pytest.mark.parametrize("qp_type", [QPType.RAW_PACKET, QPType.UD])
def test_tso_sends_segments_of_the_largest_size(stack, pd, cq, qp_type):
    link = Link(stack, pd, cq, qp_type)
    raw = qp_type is QPType.RAW_PACKET
    mss, head = (8960, ETHERNET + IPV4) if raw else (4052, IPV4 + b"\0\0")
    link.tso(head + TCP4[14:], bytes(2 * mss), mss).check()
    assert [len(packet) for packet, _ in link.received()] == [len(head) + 40 + mss] * 2


def test_tso_header_above_max_tso_header_is_refused(raw, stack, pd, cq):
    hdr = ETHERNET + IPV4 + ipv4(6, tcp(options=bytes(40)))
    for made, limit in (
        (rp.QP(pd, QPType.RAW_PACKET, cq, max_tso_header=len(hdr) - 1), len(hdr) - 1),
        (rp.QP(pd, QPType.RAW_PACKET, cq), 0),
    ):
        with stack.enter_context(made) as qp:
            qp.connect()
            with pytest.raises(rp.PostError, match=f"hdr has 94 bytes.*max_tso_header={limit}"):
                qp.post_send(rp.TSO(raw.mr[:100], hdr=hdr, mss=10))


def test_tso_with_mss_0_is_refused_by_name_and_by_the_device(pd, cq, raw):
    """Refused by name; and by the device, if unchecked."""
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


def test_max_tso_header_is_refused_for_types_without_tso(pd, cq):
    with pytest.raises(ValueError, match="RC queue pairs have no TSO"):
        rp.QP(pd, QPType.RC, cq, max_tso_header=64)
    with pytest.raises(ValueError, match=r"max_tso_header=65536 is not in 0\.\.65535"):
        rp.QP(pd, QPType.UD, cq, max_tso_header=65536)
    with pytest.raises(rp.VerbsError, match="at most 512"):
        rp.QP(pd, QPType.UD, cq, max_tso_header=513)
