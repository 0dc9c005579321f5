"""Raw packets, and their checksums, on the software device, byte by byte."""

from __future__ import annotations

import struct

import pytest
from support import soft_context
from support.packets import (
    DST4,
    ETHERNET,
    IP_CSUM,
    IPV4,
    IPV6,
    SLOTS,
    SRC4,
    VLAN,
    Link,
    Parsed,
    ipv4,
    ipv6,
    raw_link,
    tcp,
    ud_link,
    udp,
    word_sum,
)

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCFlags, WCOpcode, WCStatus

context = soft_context
raw, ud = raw_link, ud_link


# ---- raw packets ------------------------------------------------------------------


def test_frame_reaches_the_other_raw_queue_pairs_unchanged(stack, pd, cq):
    link = Link(stack, pd, cq, QPType.RAW_PACKET, receivers=3)
    frame = ETHERNET + b"\x88\xb5" + bytes(range(200))
    wc = link.send(frame)
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.SEND)
    for number in range(3):
        assert link.received(number) == [(frame, WCFlags(0))]


def test_inline_frame_is_copied_when_it_is_posted(raw):
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
def test_frame_shorter_than_its_header_or_longer_than_the_link_allows_fails(raw, size):
    frame = (ETHERNET + bytes(9100))[:size]
    raw.mr.buffer[:size] = frame
    raw.a.post_send(rp.Send(raw.mr[:size] if size else ()))
    assert raw.cq.wait(1)[0].status is WCStatus.LOC_LEN_ERR
    assert raw.received() == []


def test_frame_of_9014_bytes_arrives(raw):
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
def test_ip_csum_fills_in_the_checksums(raw, name, vlan):
    ethertype, packet = PACKETS[name]
    head = ETHERNET + vlan + ethertype
    assert raw.send(head + packet, IP_CSUM).status is WCStatus.SUCCESS
    [(frame, flags)] = raw.received()
    assert frame[: len(head)] == head
    Parsed(frame[len(head) :])
    assert flags is WCFlags.IP_CSUM_OK
    # Only the checksums have changed.
    wrong = [i for i, (x, y) in enumerate(zip(frame, head + packet, strict=True)) if x != y]
    assert len(wrong) <= 4


@pytest.mark.parametrize("name", PACKETS)
def test_without_ip_csum_the_frame_is_sent_unchanged(raw, name):
    ethertype, packet = PACKETS[name]
    raw.send(ETHERNET + ethertype + packet)
    assert raw.received() == [(ETHERNET + ethertype + packet, WCFlags(0))]


def test_receiver_reports_correct_checksums_without_ip_csum(raw):
    raw.send(ETHERNET + IPV4 + ipv4(6, tcp(b"hello")), IP_CSUM)
    [(frame, _)] = raw.received()
    raw.send(frame)
    assert raw.received() == [(frame, WCFlags.IP_CSUM_OK)]
    for at in (14 + 8, 14 + 20, len(frame) - 1):
        broken = bytearray(frame)
        broken[at] ^= 0x10
        raw.send(bytes(broken))
        assert raw.received() == [(bytes(broken), WCFlags(0))]


def test_padding_after_the_packet_is_not_summed(raw):
    frame = (ETHERNET + IPV4 + ipv4(17, udp(b"hi"))).ljust(60, b"\xff")
    raw.send(frame, IP_CSUM)
    [(got, flags)] = raw.received()
    Parsed(got[14 : 14 + 20 + 10])
    assert got[-16:] == b"\xff" * 16
    assert flags is WCFlags.IP_CSUM_OK


def test_udp_without_a_checksum_is_valid_on_ipv4_only(raw):
    """A sender need not compute it on IPv4, but must on IPv6."""
    packet = bytearray(ipv4(17, udp(b"hello", checksum=0)))
    packet[10:12] = b"\0\0"
    packet[10:12] = (0xFFFF - word_sum(packet[:20])).to_bytes(2)
    raw.send(ETHERNET + IPV4 + packet)
    raw.send(ETHERNET + IPV6 + ipv6(17, udp(b"hello", checksum=0)))
    assert [flags for _, flags in raw.received()] == [WCFlags.IP_CSUM_OK, WCFlags(0)]


def test_checksum_that_comes_out_as_zero_is_sent_as_ffff(raw):
    """0 would mean "no checksum" (RFC 768)."""
    datagram = udp(b"\0\0", checksum=0)
    pseudo = SRC4 + DST4 + struct.pack("!HH", 17, len(datagram))
    payload = (0xFFFF - word_sum(pseudo + datagram)).to_bytes(2)
    raw.send(ETHERNET + IPV4 + ipv4(17, udp(payload)), IP_CSUM)
    [(frame, flags)] = raw.received()
    assert frame[14 + 26 : 14 + 28] == b"\xff\xff"
    assert flags is WCFlags.IP_CSUM_OK


@pytest.mark.parametrize("fragment", [0x2000, 0x0001])
def test_fragment_gets_only_its_header_checksum(raw, fragment):
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
def test_packet_that_cannot_be_summed_is_sent_unchanged(raw, rest):
    raw.send(ETHERNET + rest, IP_CSUM)
    assert raw.received() == [(ETHERNET + rest, WCFlags(0))]


@pytest.mark.parametrize("name", PACKETS)
def test_ip_csum_on_ud_sums_ip_over_infiniband_messages(ud, name):
    ethertype, packet = PACKETS[name]
    message = ethertype + b"\0\0" + packet
    ud.send(message)
    ud.send(message, IP_CSUM)
    [unchanged, filled] = ud.received()
    assert unchanged == (message, WCFlags(0))
    assert filled[0][:4] == ethertype + b"\0\0"
    Parsed(filled[0][4:])
    assert filled[1] is WCFlags.IP_CSUM_OK
