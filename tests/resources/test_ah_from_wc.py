"""Address handles from the completions of datagrams: answering a peer that one does not know."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import pytest
from support import GRH, Connect, Pair

import rdmapost as rp
from rdmapost import QPType, WCFlags, WCOpcode, WCStatus
from rdmapost.resources.qp import DEFAULT_QKEY

ROOM = GRH + 64


class Server:
    """A UD queue pair that answers its senders."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.qp, self.mr = pair, pair.b, pair.theirs
        self.receive = rp.RecvWR(self.mr[:ROOM], wr_id=7)
        self.qp.post_recv(self.receive)

    def request(self, data: bytes) -> tuple[rp.WC, rp.Datagram]:
        """Send from a to b; return the completion of b's receive, and the received bytes."""
        pair = self.pair
        pair.mine.buffer[: len(data)] = data
        pair.a.post_send(pair.send(pair.mine[: len(data)], wr_id=6))
        done = {wc.wr_id: wc.check() for wc in pair.cq.wait(2, timeout=10)}
        return done[7], done[7].datagram(self.receive)

    def answer(self, wc: rp.WC, ah: rp.AH) -> bytes:
        """Send an answer to the sender; return what it received."""
        pair = self.pair
        pair.a.post_recv(rp.RecvWR(pair.mine[1024 : 1024 + ROOM], wr_id=9))
        self.mr.buffer[512:518] = b"answer"
        send = rp.Send(
            self.mr[512:518], wr_id=8, ah=ah, remote_qpn=wc.src_qp, remote_qkey=DEFAULT_QKEY
        )
        self.qp.post_send(send)
        done = {each.wr_id: each.check() for each in pair.cq.wait(2, timeout=10)}
        return bytes(pair.mine.buffer[1024 + GRH : 1024 + done[9].byte_len])


@pytest.fixture
def server(connect: Connect) -> Server:
    return Server(connect(QPType.UD))


def test_reply_over_an_address_handle_from_a_completion_reaches_the_sender(server: Server) -> None:
    """The server knows nothing but what arrived."""
    wc, datagram = server.request(b"question")
    assert datagram.payload == b"question"
    with rp.AH.from_wc(server.pair.pd, wc, datagram.grh) as ah:
        assert server.answer(wc, ah) == b"answer"


def test_address_handle_from_a_completion_reverses_the_path_of_the_datagram(server: Server) -> None:
    wc, datagram = server.request(b"question")
    grh, context = datagram.grh, server.pair.pd.context
    assert grh is not None
    with rp.AH.from_wc(server.pair.pd, wc, grh) as ah:
        assert ah.attr.dgid == grh.sgid
        assert context.query_gid(1, ah.attr.sgid_index) == grh.dgid
        assert ah.attr.traffic_class == grh.traffic_class
        assert (ah.attr.port_num, ah.attr.dlid, ah.attr.sl) == (1, wc.slid, wc.sl)


def test_datagram_from_every_gid_of_the_port_can_be_answered(
    context: rp.Context, pd: rp.PD, cq: rp.CQ, stack: contextlib.ExitStack
) -> None:
    """IPv4 and IPv6, whose headers differ."""
    for entry in context.query_gid_table(1):
        if entry.gid_type is rp.GIDType.ROCE_V1:
            continue
        with contextlib.ExitStack() as own:
            server = Server(Pair(own, pd, cq, QPType.UD, gid_index=entry.gid_index))
            wc, datagram = server.request(b"question")
            with rp.AH.from_wc(pd, wc, datagram.grh) as ah:
                assert context.query_gid(1, ah.attr.sgid_index) == entry.gid
                assert server.answer(wc, ah) == b"answer"


def test_datagram_to_another_address_cannot_be_answered(server: Server) -> None:
    wc, _ = server.request(b"question")
    grh = rp.GRH(rp.GID("fe80::1"), rp.GID("2001::1"), 0, 0, 8, 17, 64)
    with pytest.raises(rp.VerbsError, match="2001::1, which the datagram was sent to, may not be"):
        rp.AH.from_wc(server.pair.pd, wc, grh)


def test_datagram_to_a_multicast_group_is_answered_with_an_ahattr(server: Server) -> None:
    wc, datagram = server.request(b"question")
    assert datagram.grh is not None
    group = rp.GID("::ffff:239.1.2.3" if datagram.grh.sgid.is_ipv4 else "ff0e::1")
    grh = replace(datagram.grh, dgid=group)
    with pytest.raises(
        rp.VerbsError, match=f"to the multicast group {group}, which cannot be a source GID"
    ):
        rp.AH.from_wc(server.pair.pd, wc, grh)
    index = server.pair.b.gid.gid_index
    with rp.AH(server.pair.pd, rp.AHAttr(dgid=grh.sgid, sgid_index=index)) as ah:
        assert server.answer(wc, ah) == b"answer"


def test_ah_from_wc_names_what_is_missing(server: Server) -> None:
    wc, datagram = server.request(b"question")
    pd, grh = server.pair.pd, datagram.grh
    with pytest.raises(ValueError, match="grh is missing: the datagram has one"):
        rp.AH.from_wc(pd, wc)
    with pytest.raises(ValueError, match="SEND received nothing"):
        rp.AH.from_wc(pd, wc._replace(opcode=WCOpcode.SEND), grh)
    with pytest.raises(rp.CompletionError):
        rp.AH.from_wc(pd, wc._replace(status=WCStatus.WR_FLUSH_ERR), grh)
    with pytest.raises(ValueError, match="has no port 9"):
        rp.AH.from_wc(pd, wc, grh, 9)
    with pytest.raises(TypeError, match="grh: expected GRH or None, got bytes"):
        rp.AH.from_wc(pd, wc, bytes(40))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is Ethernet: give the AH a dgid"):
        rp.AH.from_wc(pd, wc._replace(wc_flags=WCFlags(0)))


class Short(rp.GRH):
    """A header that packs fewer bytes than one has."""

    __slots__ = ()

    def pack(self) -> bytes:
        return b"\x60\0\0\0"


class Endless(Short):
    __slots__ = ()

    def pack(self) -> bytes:
        return bytes(41)


@pytest.mark.parametrize("kind", [Short, Endless])
def test_ah_from_wc_refuses_a_grh_of_another_size(server: Server, kind: type[rp.GRH]) -> None:
    """No memory beyond what it packs is read."""
    wc, datagram = server.request(b"question")
    assert datagram.grh is not None
    grh = kind(*(getattr(datagram.grh, field.name) for field in fields(rp.GRH)))
    with pytest.raises(ValueError, match=r"grh: its pack\(\) returned (4|41) bytes; a GRH has 40"):
        rp.AH.from_wc(server.pair.pd, wc, grh)


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("slid", 1 << 20, ValueError, "wc.slid=1048576 is not in 0..65535"),
        ("slid", "x", TypeError, "wc.slid: expected int, got str"),
        ("sl", -1, ValueError, "wc.sl=-1 is not in 0..255"),
        ("dlid_path_bits", None, TypeError, "wc.dlid_path_bits: expected int, got NoneType"),
        ("src_qp", 1 << 40, ValueError, "wc.src_qp=1099511627776 is not in"),
        ("pkey_index", 1.0, TypeError, "wc.pkey_index: expected int, got float"),
        ("wc_flags", -1, ValueError, "wc.wc_flags=-1 is not in"),
        ("wc_flags", 1 << 40, ValueError, "wc.wc_flags=1099511627776 is not in"),
        ("status", 5, rp.CompletionError, "WR_FLUSH_ERR"),
        ("status", "bad", TypeError, "wc.status: expected WCStatus, got str"),
        ("opcode", None, ValueError, "None received nothing"),
        ("opcode", "RECV", TypeError, "wc.opcode: expected int, got str"),
    ],
)
def test_ah_from_wc_refuses_a_completion_with_changed_fields(
    server: Server, field: str, value: object, error: type[Exception], text: str
) -> None:
    wc, datagram = server.request(b"question")
    with pytest.raises(error, match=text):
        rp.AH.from_wc(server.pair.pd, wc._replace(**{field: value}), datagram.grh)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("hop_limit", "x", TypeError, "hop_limit: expected int, got str"),
        ("flow_label", None, TypeError, "flow_label: expected int, got NoneType"),
        ("sgid", b"short", TypeError, "sgid: expected GID, got bytes"),
        ("payload_length", 1 << 70, ValueError, r"payload_length=\d+ is not in 0\.\.65"),
        ("payload_length", 1 << 16, ValueError, r"payload_length=65536 is not in 0\.\.65"),
        ("traffic_class", -1, ValueError, r"traffic_class=-1 is not in 0\.\.255"),
        ("traffic_class", 999, ValueError, r"traffic_class=999 is not in 0\.\.255"),
        ("flow_label", 0x1FFFFF, ValueError, r"flow_label=2097151 is not in 0\.\."),
        ("next_header", 256, ValueError, r"next_header=256 is not in 0\.\.255"),
        ("hop_limit", 256, ValueError, r"hop_limit=256 is not in 0\.\.255"),
        ("version", 7, ValueError, "version=7 is not 4 or 6"),
        ("version", "4", TypeError, "version: expected int, got str"),
        ("version", None, TypeError, "version: expected int, got NoneType"),
    ],
)
@pytest.mark.parametrize("version", [4, 6])
def test_grh_with_a_wrong_field_is_refused(
    version: int, field: str, value: object, error: type[Exception], text: str
) -> None:
    gid = rp.GID("::ffff:10.0.0.1")
    grh = replace(rp.GRH(gid, gid, 0, 0, 8, 17, 64, version), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        grh.pack()


@pytest.mark.parametrize(
    "grh",
    [
        rp.GRH(rp.GID("fe80::1"), rp.GID("fe80::2"), 3, 0xABCDE, 100, 17, 64),
        rp.GRH(rp.GID("::ffff:10.0.0.1"), rp.GID("::ffff:10.0.0.2"), 8, 0, 100, 17, 64, 4),
    ],
)
def test_packed_grh_is_read_back(grh: rp.GRH) -> None:
    assert rp.GRH.parse(grh.pack()) == grh
    assert len(grh.pack()) == GRH
    largest = 65535 if grh.version == 6 else 65515
    longest = replace(grh, payload_length=largest, traffic_class=255, hop_limit=255)
    assert rp.GRH.parse(longest.pack()) == longest
    with pytest.raises(
        ValueError, match=rf"payload_length={largest + 1} is not in 0\.\.{largest}$"
    ):
        replace(grh, payload_length=largest + 1).pack()


def test_ipv4_grh_has_ipv4_addresses_and_no_flow_label() -> None:
    gid = rp.GID("::ffff:10.0.0.1")
    with pytest.raises(ValueError, match="flow_label=1: an IPv4 header has no flow label"):
        rp.GRH(gid, gid, 0, 1, 8, 17, 64, 4).pack()
    with pytest.raises(ValueError, match="dgid: fe80::1 is not an IPv4 GID, and version is 4"):
        rp.GRH(gid, rp.GID("fe80::1"), 0, 0, 8, 17, 64, 4).pack()
