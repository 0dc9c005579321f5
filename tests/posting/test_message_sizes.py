"""How long a message may be: empty, one packet, many, 2^31 bytes, and one too many."""

from __future__ import annotations

import errno

import pytest
from support import ALL, CONNECTED, GRH, Pair, needs

import rdmapost as rp
from rdmapost import QPType, WCStatus
from rdmapost.standard.opcodes import MAX_MSG_SIZE

PIECES = 32
"""SGEs of one work request of the largest size, all over one region."""


def pattern(size: int) -> bytes:
    return bytes(i % 251 + 1 for i in range(size))


def sge_or_none(mr: rp.MR, size: int) -> rp.SGE | tuple[()]:
    return mr[:size] if size else ()


@pytest.mark.parametrize("packets", [0, 1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("qp_type", CONNECTED)
def test_message_of_any_number_of_packets_arrives_whole(connect, context, qp_type, packets, more):
    """So does one of a byte less, and one of a byte more."""
    size = max(0, packets * context.query_port(1).active_mtu.bytes + more)
    pair = connect(qp_type, size=size + 1)
    data = pattern(size)
    pair.mine.buffer[:size] = data
    pair.b.post_recv(rp.RecvWR(pair.theirs[:], wr_id=7))
    pair.a.post_send(pair.send(sge_or_none(pair.mine, size), wr_id=9))
    done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[7].byte_len == size
    assert bytes(pair.theirs.buffer) == data + b"\0"
    pair.theirs.buffer[:] = bytes(size + 1)
    pair.a.post_send(pair.wr(rp.RdmaWrite, sge_or_none(pair.mine, size), wr_id=9))
    pair.wait()
    if qp_type is QPType.UC:
        # The completion shows that it has left, and the message after it that it has arrived.
        pair.b.post_recv(rp.RecvWR(wr_id=7))
        pair.a.post_send(pair.send(wr_id=9))
        pair.wait(2)
    assert bytes(pair.theirs.buffer) == data + b"\0"


@pytest.mark.parametrize("packets", [0, 1, 3])
def test_read_of_any_number_of_packets_arrives_whole(connect, context, packets):
    size = packets * context.query_port(1).active_mtu.bytes
    pair = connect(size=size + 1)
    pair.theirs.buffer[:size] = pattern(size)
    pair.a.post_send(pair.wr(rp.RdmaRead, sge_or_none(pair.mine, size)))
    (done,) = pair.wait()
    assert done.byte_len == size
    assert bytes(pair.mine.buffer) == pattern(size) + b"\0"


def test_datagram_of_every_size_up_to_the_mtu_arrives(connect, context):
    mtu = context.query_port(1).active_mtu.bytes
    pair = connect(QPType.UD)
    for size in (0, 1, mtu - 1, mtu):
        pair.mine.buffer[:size] = pattern(size)
        recv = rp.RecvWR(pair.theirs[: GRH + mtu], wr_id=7)
        pair.b.post_recv(recv)
        pair.a.post_send(pair.send(sge_or_none(pair.mine, size), wr_id=9))
        done = {wc.wr_id: wc for wc in pair.wait(2)}
        assert done[7].byte_len == GRH + size
        assert done[7].datagram(recv).payload == pattern(size)


def test_size_of_a_datagram_is_checked_over_all_its_sges(connect, context):
    mtu = context.query_port(1).active_mtu.bytes
    pair = connect(QPType.UD)
    with pytest.raises(rp.PostError, match=f"{mtu + 1} bytes, .* holds at most {mtu}") as caught:
        pair.a.post_send(pair.send([pair.mine[:mtu], pair.mine[:1]]))
    assert (caught.value.errno, caught.value.posted) == (errno.EINVAL, 0)
    pair.works()


def test_unchecked_datagram_longer_than_the_mtu_is_left_to_the_device(connect, context):
    needs(context.kind == "soft", "error for datagrams longer than the MTU", context)
    mtu = context.query_port(1).active_mtu.bytes
    pair = connect(QPType.UD, checked=False)
    pair.a.post_send(pair.send(pair.mine[: mtu + 1]))
    (done,) = pair.cq.wait()
    assert done.status is WCStatus.LOC_LEN_ERR


@pytest.fixture
def largest(context, pd, stack) -> rp.MR:
    """A region of 2^31 / 32 bytes, which 32 SGEs name together, and one byte more."""
    needs(context.kind == "soft", "room for 2^31 bytes", context)
    mr = stack.enter_context(rp.MR(pd, MAX_MSG_SIZE // PIECES + 1, ALL))
    mr.buffer[:8] = b"a piece!"
    mr.buffer[-9:-1] = b"its end!"
    return mr


@pytest.mark.parametrize("qp_type", CONNECTED)
def test_message_of_2_to_the_31_bytes_arrives(connect, largest, qp_type):
    """Gathered from one region, named 32 times, and scattered into one, named 32 times."""
    pair = connect(qp_type, max_send_sge=PIECES, max_recv_sge=PIECES)
    piece = MAX_MSG_SIZE // PIECES
    with rp.MR(pair.pd, piece, ALL) as room:
        pair.b.post_recv(rp.RecvWR([room[:]] * PIECES, wr_id=7))
        pair.a.post_send(pair.send([largest[:piece]] * PIECES, wr_id=9))
        done = {wc.wr_id: wc for wc in pair.wait(2, 60)}
        assert done[7].byte_len == MAX_MSG_SIZE == 2_147_483_648
        assert bytes(room.buffer[:8]) == b"a piece!"
        assert bytes(room.buffer[-8:]) == b"its end!"


@pytest.mark.parametrize("kind", [rp.Send, rp.SendWithImm, rp.RdmaWrite, rp.RdmaWriteWithImm])
@pytest.mark.parametrize("qp_type", CONNECTED)
def test_message_of_more_than_2_to_the_31_bytes_is_refused_by_name(connect, qp_type, kind):
    """The sum over the SGEs counts; each of them alone would be valid."""
    pair = connect(qp_type)
    lkey, addr = pair.mine.lkey, pair.mine.addr
    half = rp.SGE(addr, MAX_MSG_SIZE // 2, lkey)
    with pytest.raises(rp.PostError, match=r"2147483649 bytes, .* holds at most 2147483648"):
        pair.a.post_send(pair.wr(kind, [half, half, rp.SGE(addr, 1, lkey)]))
    with pytest.raises(rp.PostError, match=r"4294967295 bytes, .* holds at most 2147483648"):
        pair.a.post_send(pair.wr(kind, rp.SGE(addr, (1 << 32) - 1, lkey)))
    pair.works()


def test_read_of_more_than_2_to_the_31_bytes_is_refused_by_name(rc):
    half = rp.SGE(rc.mine.addr, MAX_MSG_SIZE // 2, rc.mine.lkey)
    with pytest.raises(rp.PostError, match="2147483656 bytes"):
        rc.a.post_send(rc.wr(rp.RdmaRead, [half, half, rc.mine[:8]]))
    rc.works()


def test_unchecked_message_of_more_than_2_to_the_31_bytes_is_left_to_the_device(connect, largest):
    pair = connect(max_send_sge=PIECES, checked=False)
    piece = MAX_MSG_SIZE // PIECES
    sges = [*[largest[:piece]] * (PIECES - 1), largest[:]]
    pair.a.post_send(pair.send(sges, wr_id=1))
    (done,) = pair.cq.wait()
    assert done.status is WCStatus.LOC_LEN_ERR


def zero_bytes(pair: Pair, kind: type, **fields: object) -> dict[int, rp.WC]:
    if kind is not rp.RdmaWrite and kind is not rp.RdmaRead:
        pair.b.post_recv(rp.RecvWR(pair.theirs[:GRH], wr_id=7))
    pair.a.post_send(pair.wr(kind, wr_id=9, **fields))
    return {wc.wr_id: wc for wc in pair.wait(1 if kind in (rp.RdmaWrite, rp.RdmaRead) else 2)}


@pytest.mark.parametrize(
    ("qp_type", "kind"),
    [
        *((t, k) for t in (QPType.RC, QPType.UC, QPType.UD) for k in (rp.Send, rp.SendWithImm)),
        *((t, k) for t in CONNECTED for k in (rp.RdmaWrite, rp.RdmaWriteWithImm)),
        (QPType.RC, rp.RdmaRead),
    ],
)
def test_message_without_sges_arrives_with_no_bytes(connect, qp_type, kind):
    pair = connect(qp_type)
    imm = {"imm_data": 5} if kind in (rp.SendWithImm, rp.RdmaWriteWithImm) else {}
    done = zero_bytes(pair, kind, **imm)
    assert done[9].status is WCStatus.SUCCESS
    if 7 in done:
        assert done[7].byte_len == (GRH if qp_type is QPType.UD else 0)
        assert done[7].imm_data == imm.get("imm_data")
    if qp_type is not QPType.UD:
        assert not any(pair.theirs.buffer)


def test_remote_memory_of_a_message_of_no_bytes_is_not_checked(rc):
    """So an empty write is a way to see whether the peer is alive."""
    assert zero_bytes(rc, rp.RdmaWrite, remote_addr=0, rkey=0)[9].status is WCStatus.SUCCESS


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_send_of_every_size_arrives(connect, qp_type):
    pair = connect(qp_type)
    grh = GRH if qp_type is QPType.UD else 0
    for size in (1, 7, 8, 64, 511, 1000):
        pair.mine.buffer[:size] = bytes(i % 251 + 1 for i in range(size))
        pair.theirs.buffer[:] = bytes(len(pair.theirs))
        pair.b.post_recv(rp.RecvWR(pair.theirs[: grh + 1024], wr_id=7))
        pair.a.post_send(pair.send(pair.mine[:size], wr_id=9))
        done = {wc.wr_id: wc for wc in pair.wait(2)}
        assert done[7].byte_len == grh + size
        assert pair.theirs.buffer[grh : grh + size] == pair.mine.buffer[:size]
        assert not any(pair.theirs.buffer[grh + size :])


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_large_message_arrives(connect, qp_type):
    """Many packets: more than the path MTU."""
    size = 100_000
    pair = connect(qp_type, size=size)
    pair.mine.buffer[:] = bytes(i % 251 for i in range(size))
    pair.b.post_recv(rp.RecvWR(pair.theirs[:]))
    pair.a.post_send(pair.send(pair.mine[:]))
    pair.wait(2)
    assert pair.theirs.buffer == pair.mine.buffer


def test_ud_message_longer_than_the_mtu_is_refused(connect, context):
    pair = connect(QPType.UD)
    mtu = context.query_port(1).active_mtu.bytes
    pair.b.post_recv(rp.RecvWR(pair.theirs[: GRH + mtu]))
    pair.a.post_send(pair.send(pair.mine[:mtu]))
    pair.wait(2)
    with pytest.raises(rp.PostError, match=f"{mtu + 1} bytes, but a message on this UD QP"):
        pair.a.post_send(pair.send(pair.mine[: mtu + 1]))
