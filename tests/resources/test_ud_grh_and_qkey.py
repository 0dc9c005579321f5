"""What a UD receive holds: the header, and the payload after it."""

from __future__ import annotations

import dataclasses

import pytest
from support import GRH, needs

import rdmapost as rp
from rdmapost import QPType, WCFlags

SRC, DST = rp.GID("fe80::1"), rp.GID("fe80::2")
IPV6 = bytes.fromhex("6ab12345 0020 1b 40".replace(" ", "")) + SRC + DST


# From 10.0.0.1 to 10.0.0.2; the checksum is the right one.
IPV4 = bytes.fromhex("45080048000040004011269b0a0000010a000002")
OVER_IPV4 = rp.GID("::ffff:10.0.0.1"), rp.GID("::ffff:10.0.0.2")


def test_grh_with_an_ipv6_header_is_read():
    assert rp.GRH.parse(IPV6 + b"payload") == rp.GRH(
        sgid=SRC,
        dgid=DST,
        traffic_class=0xAB,
        flow_label=0x12345,
        payload_length=32,
        next_header=0x1B,
        hop_limit=64,
        version=6,
    )


def test_ipv4_header_stands_in_the_last_20_bytes_of_a_grh():
    assert rp.GRH.parse(bytes(20) + IPV4) == rp.GRH(
        *OVER_IPV4,
        traffic_class=8,
        flow_label=0,
        payload_length=52,
        next_header=17,
        hop_limit=64,
        version=4,
    )


@pytest.mark.parametrize(("checksum", "version"), [(b"\x26\x9b", 4), (b"\x26\x9c", 6)])
def test_ipv4_header_is_recognised_by_its_checksum(checksum, version):
    """What was there before may look like the beginning of an IPv6 header."""
    data = bytes([0x60]) + bytes(19) + IPV4[:10] + checksum + IPV4[12:]
    assert rp.GRH.parse(data).version == version


def test_ipv4_header_checksum_of_0_is_not_verified():
    """A packet that stays on the machine has none."""
    assert rp.GRH.parse(bytes(20) + IPV4[:10] + bytes(2) + IPV4[12:]).version == 4


@pytest.mark.parametrize("data", [b"", IPV6[:39], bytes(40), b"x" * 60, bytes(20) + b"\x46" * 20])
def test_grh_from_bytes_that_are_no_header_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"a GRH has 40 bytes|are not a GRH"):
        rp.GRH.parse(data)


@pytest.mark.parametrize("data", [None, 40, "text"])
def test_grh_from_an_object_without_bytes_is_a_type_error(data):
    with pytest.raises(TypeError):
        rp.GRH.parse(data)


# ---- on a device ------------------------------------------------------------------


def receive(pair, recv, payload: bytes, **fields) -> rp.WC:
    """Send a datagram to b; return the completion of its receive."""
    pair.mine.buffer[: len(payload)] = payload
    pair.b.post_recv(recv)
    sges = pair.mine[: len(payload)] if payload else ()
    pair.a.post_send(pair.send(sges, wr_id=900, **fields))
    return {wc.wr_id: wc for wc in pair.wait(2)}[recv.wr_id]


def test_completion_offers_the_payload_and_the_header(connect):
    pair = connect(QPType.UD)
    path = pair.a.path_to(pair.b.endpoint(), traffic_class=8)
    with rp.AH(pair.pd, path) as ah:
        recv = rp.RecvWR(pair.theirs[: GRH + 64], wr_id=1)
        wc = receive(pair, recv, b"payload", ah=ah)
        grh, payload = wc.datagram(recv)
    assert payload == b"payload"
    assert wc.byte_len == GRH + 7
    assert grh is not None
    assert (grh.sgid, grh.dgid) == (pair.a.gid.gid, pair.b.gid.gid)
    assert (grh.traffic_class, grh.hop_limit) == (8, path.hop_limit)
    # InfiniBand's own header follows, or UDP (RoCE v2).
    assert grh.next_header in (0x1B, 17)
    assert grh.version == (4 if grh.next_header == 17 and grh.sgid.is_ipv4 else 6)


@pytest.mark.parametrize("imm", [False, True])
@pytest.mark.parametrize(("gid_index", "version"), [(0, 6), (1, 4)])
@pytest.mark.parametrize("size", [0, 7, 8])
def test_soft_device_writes_the_ip_header_of_its_roce_v2_packet_into_the_grh(
    context, connect, gid_index, version, size, imm
):
    needs(context.kind == "soft", "known GID table", context)
    pair = connect(QPType.UD, gid_index=gid_index)
    gid = pair.a.gid.gid
    attr = dataclasses.replace(pair.a.path_to(pair.b.endpoint(), traffic_class=8), hop_limit=9)
    with rp.AH(pair.pd, attr) as ah:
        recv = rp.RecvWR(pair.theirs[: GRH + 64], wr_id=1)
        pair.b.post_recv(recv)
        wr = (rp.SendWithImm if imm else rp.Send)(
            pair.mine[:size] if size else (),
            ah=ah,
            remote_qpn=pair.b.qp_num,
            remote_qkey=rp.resources.qp.DEFAULT_QKEY,
        )
        pair.a.post_send(wr)
        wc = {wc.wr_id: wc for wc in pair.wait(2)}[1]
    raw = bytes(pair.theirs.buffer[:GRH])
    # UDP, BTH, DETH, ImmDt, the payload padded to 4 bytes, ICRC.
    udp = 8 + 12 + 8 + 4 * imm + (size + 3) // 4 * 4 + 4
    assert wc.datagram(recv).grh == rp.GRH(
        sgid=gid,
        dgid=gid,
        traffic_class=8,
        flow_label=0,
        payload_length=udp,
        next_header=17,
        hop_limit=9,
        version=version,
    )
    if version == 4:
        assert raw[:20] == bytes(20)
        assert raw[20:24] == bytes([0x45, 8]) + (20 + udp).to_bytes(2)
        assert raw[32:] == bytes([127, 0, 0, 1] * 2)
        # Its checksum is right (RFC 1071): all ones.
        assert int.from_bytes(raw[20:]) % 0xFFFF == 0
    else:
        assert raw[0] >> 4 == 6


def test_grh_says_where_to_reply(connect):
    """What ibv_init_ah_from_wc(3) does: the source becomes the destination."""
    pair = connect(QPType.UD)
    recv = rp.RecvWR(pair.theirs[: GRH + 64], wr_id=1)
    wc = receive(pair, recv, b"question")
    grh = wc.datagram(recv).grh
    assert grh is not None
    back = rp.AHAttr(dgid=grh.sgid, sgid_index=pair.b.gid.gid_index)
    pair.theirs.buffer[100:106] = b"answer"
    with rp.AH(pair.pd, back) as ah:
        answer = rp.RecvWR(pair.mine[1000 : 1000 + GRH + 64], wr_id=2)
        pair.a.post_recv(answer)
        pair.b.post_send(
            rp.Send(
                pair.theirs[100:106],
                ah=ah,
                remote_qpn=wc.src_qp,
                remote_qkey=rp.resources.qp.DEFAULT_QKEY,
                wr_id=3,
            )
        )
        done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[2].datagram(answer).payload == b"answer"


@pytest.mark.parametrize("size", [0, 1, 100])
def test_grh_and_payload_come_from_buffers_of_any_type(connect, size):
    """The header may end in the middle of one."""
    pair = connect(QPType.UD)
    theirs = pair.theirs
    recv = rp.RecvWR([theirs[500:530], theirs[0:20], theirs[800:1000]], wr_id=1)
    data = bytes(range(1, size + 1))
    wc = receive(pair, recv, data)
    grh, payload = wc.datagram(recv)
    assert payload == data
    assert grh is not None
    assert grh.sgid == pair.a.gid.gid


def test_datagram_can_be_read_from_a_buffer_instead_of_the_receive(connect):
    pair = connect(QPType.UD)
    recv = rp.RecvWR(pair.theirs[64 : 64 + GRH + 64], wr_id=1)
    wc = receive(pair, recv, b"payload")
    assert wc.datagram(pair.theirs.buffer[64:]) == wc.datagram(recv)
    assert wc.datagram(bytes(pair.theirs.buffer[64 : 64 + GRH + 7])).payload == b"payload"


def test_datagram_without_a_grh_has_its_payload_at_the_same_offset(connect):
    """On InfiniBand a message of the same subnet has none."""
    pair = connect(QPType.UD)
    recv = rp.RecvWR(pair.theirs[: GRH + 64], wr_id=1)
    wc = receive(pair, recv, b"payload")
    without = wc._replace(wc_flags=wc.wc_flags & ~WCFlags.GRH)
    assert without.datagram(recv) == (None, b"payload")


def test_datagram_of_a_wrong_buffer_is_refused(connect):
    pair = connect(QPType.UD)
    recv = rp.RecvWR(pair.theirs[: GRH + 64], wr_id=1)
    wc = receive(pair, recv, b"payload")
    with rp.MR(pair.pd, 100) as mr:
        closed = rp.RecvWR(mr[:])
    for wrong, words in (
        (rp.RecvWR(pair.theirs[: GRH + 6]), "47 bytes arrived, but this has only 46"),
        (bytes(8), "only 8"),
        (closed, "MR of 100 bytes .* is closed"),
        (rp.RecvWR(rp.SGE(pair.theirs.addr, 104, pair.theirs.lkey)), "pass the buffer itself"),
        (rp.RecvWR(rp.SGE.from_buffer(bytes(104))), "pass the buffer itself"),
    ):
        with pytest.raises(ValueError, match=words):
            wc.datagram(wrong)
    with pytest.raises(TypeError, match="received: expected RecvWR or bytes, got NoneType"):
        wc.datagram(None)
    pair.a.post_send(pair.send(wr_id=5))
    (sent,) = pair.wait()
    with pytest.raises(ValueError, match="SEND received nothing"):
        sent.datagram(recv)
    pair.b.post_recv(recv)
    pair.b.to_err()
    (flushed,) = pair.cq.wait()
    with pytest.raises(rp.CompletionError, match="WR_FLUSH_ERR"):
        flushed.datagram(recv)


def test_message_shorter_than_a_grh_is_not_a_datagram(rc):
    """On a connected queue pair nothing precedes the message."""
    recv = rp.RecvWR(rc.theirs[:64], wr_id=1)
    rc.b.post_recv(recv)
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=2))
    wc = {wc.wr_id: wc for wc in rc.wait(2)}[1]
    with pytest.raises(ValueError, match="a UD receive has at least 40 bytes, and this has 8"):
        wc.datagram(recv)


def test_datagram_without_a_receive_is_dropped_silently(connect, context):
    """The sender cannot know; the next one arrives."""
    needs(context.kind == "soft", "report of dropped datagrams", context)
    pair = connect(QPType.UD)
    pair.a.post_send(pair.send(pair.mine[:8], wr_id=1))
    assert [wc.wr_id for wc in pair.wait()] == [1]
    pair.works()


def test_datagram_with_another_qkey_is_dropped_and_counted(connect, context):
    pair = connect(QPType.UD)
    before = context.query_port().qkey_viol_cntr
    pair.b.post_recv(rp.RecvWR(pair.theirs[: GRH + 64], wr_id=7))
    pair.a.post_send(pair.send(pair.mine[:8], remote_qkey=5, wr_id=1))
    assert [wc.wr_id for wc in pair.wait()] == [1]
    assert pair.b.outstanding.recv == 1
    pair.mine.buffer[:4] = b"good"
    pair.a.post_send(pair.send(pair.mine[:4], wr_id=2))
    assert sorted(wc.wr_id for wc in pair.wait(2)) == [2, 7]
    assert bytes(pair.theirs.buffer[GRH : GRH + 4]) == b"good"
    assert context.query_port().qkey_viol_cntr == before + 1


def test_qkey_with_the_top_bit_stands_for_the_senders_own(connect, context):
    """That bit is for privileged users, not for a process (IBA, controlled Q_Keys)."""
    needs(context.kind == "soft", "controlled Q_Keys (top bit)", context)
    pair = connect(QPType.UD)
    pair.b.post_recv(rp.RecvWR(pair.theirs[: GRH + 64], wr_id=7))
    pair.a.post_send(pair.send(pair.mine[:8], remote_qkey=0xDEAD_BEEF, wr_id=1))
    assert sorted(wc.wr_id for wc in pair.wait(2)) == [1, 7]
