"""SGEs: where they may lie, how many there may be, and how data is gathered and scattered."""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from typing import Any

import pytest
from support import ALL, LOCAL_ERROR, in_flight, needs, prints, refused, soft_queues, watching
from support.soft_queues import outside, part, reason

import rdmapost as rp
from rdmapost import QPType, SendFlags
from rdmapost.standard.opcodes import MAX_MSG_SIZE

soft = soft_queues.soft
pair = in_flight.pair
watched = watching.watched


def test_one_sge_of_2_to_the_31_bytes_must_lie_in_its_region(rc):
    """An allowed length is not yet an allowed range."""
    with pytest.raises(IndexError, match="is not within MR of 8192 bytes"):
        rc.mine[:MAX_MSG_SIZE]
    sge = rc.mine[:]._replace(length=MAX_MSG_SIZE)
    with pytest.raises(rp.PostError, match="lies outside MR of 8192 bytes"):
        rc.a.post_send(rp.Send(sge))


def test_sges_of_one_list_may_be_of_different_regions(rc, stack):
    """At both ends, each with its own key."""
    near = [stack.enter_context(rp.MR(rc.pd, bytearray(b), ALL)) for b in (b"one", b"two", b"3")]
    far = [stack.enter_context(rp.MR(rc.pd, size, ALL)) for size in (1, 2, 20)]
    assert len({mr.lkey for mr in near}) == 3
    rc.b.post_recv(rp.RecvWR([mr[:] for mr in far], wr_id=7))
    rc.a.post_send(rp.Send([mr[:] for mr in near], wr_id=9))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].byte_len == 7
    assert [bytes(mr.buffer) for mr in far] == [b"o", b"ne", b"two3" + bytes(16)]
    rc.b.close()
    rc.a.close()


def test_sges_may_overlap(rc):
    rc.mine.buffer[:4] = b"abcd"
    rc.a.post_send(rc.wr(rp.RdmaWrite, [rc.mine[:4], rc.mine[1:3], rc.mine[:4]]))
    rc.wait()
    assert bytes(rc.theirs.buffer[:11]) == b"abcdbcabcd\0"


def test_work_requests_may_have_max_sge_sges(connect):
    pair = connect(max_send_sge=8, max_recv_sge=8)
    pair.mine.buffer[:8] = b"12345678"
    pair.b.post_recv(rp.RecvWR([pair.theirs[2 * i : 2 * i + 1] for i in range(8)], wr_id=7))
    pair.a.post_send(rp.Send([pair.mine[i : i + 1] for i in range(8)], wr_id=9))
    pair.wait(2)
    assert bytes(pair.theirs.buffer[:15]) == b"1\0002\0003\0004\0005\0006\0007\0008"


def test_sge_of_length_0_is_refused_wherever_it_stands(connect):
    """Some devices interpret it as 2^31 bytes; the error says so, and what to do instead."""
    pair = connect()
    words = r"an SGE of length 0 means 2\^31 bytes to some devices; give an empty sg_list"
    empty = pair.mine[8:8]
    for kind in (rp.Send, rp.SendWithImm, rp.RdmaWrite, rp.RdmaWriteWithImm, rp.RdmaRead):
        for sges in ([empty], [pair.mine[:8], empty], [rp.SGE(pair.mine.addr, 0, pair.mine.lkey)]):
            with pytest.raises(rp.PostError, match=words):
                pair.a.post_send(pair.wr(kind, sges))
    with pytest.raises(rp.PostError, match=words):
        pair.b.post_recv(rp.RecvWR([pair.theirs[:8], pair.theirs[8:8]]))
    pair.works()


def test_sge_of_length_0_unchecked_is_2_to_the_31_bytes(connect, context):
    needs(context.kind == "soft", "SGEs of length 0 that mean 2^31 bytes", context)
    pair = connect(checked=False)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[8:8]))
    (done,) = pair.cq.wait()
    assert done.status in LOCAL_ERROR


def test_sges_are_gathered_and_scattered(rc):
    """The message is the pieces in order, from different regions, scattered into other pieces."""
    with rp.MR(rc.pd, bytearray(b"three"), ALL) as third:
        rc.mine.buffer[:9] = b"two\0one  "
        rc.b.post_recv(rp.RecvWR([rc.theirs[100:102], rc.theirs[0:7], rc.theirs[50:60]], wr_id=7))
        rc.a.post_send(rp.Send([rc.mine[4:8], rc.mine[0:3], third[:]], wr_id=9))
        done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].byte_len == 12
    buffer = rc.theirs.buffer
    assert (bytes(buffer[100:103]), bytes(buffer[:8])) == (b"on\0", b"e twoth\0")
    assert bytes(buffer[50:54]) == b"ree\0"
    rc.a.post_send(rc.wr(rp.RdmaRead, [rc.mine[200:201], rc.mine[300:303]]))
    rc.wait()
    assert bytes(rc.mine.buffer[200:202]) == b"e\0"
    assert bytes(rc.mine.buffer[300:304]) == b" tw\0"


def test_region_of_another_pd_is_refused(rc, context):
    with rp.PD(context) as other, rp.MR(other, 64) as mr:
        with pytest.raises(rp.PostError, match="does not belong to the queue's PD"):
            rc.a.post_send(rp.Send(mr[:8]))
        with pytest.raises(rp.PostError, match="does not belong to the queue's PD"):
            rc.b.post_recv(rp.RecvWR(mr[:8]))
    rc.works()


def test_unchecked_region_of_another_pd_is_left_to_the_device(connect, context):
    pair = connect(checked=False)
    with rp.PD(context) as other, rp.MR(other, 64) as mr:
        pair.a.post_send(pair.wr(rp.RdmaWrite, mr[:8]))
        (done,) = pair.cq.wait()
        assert done.status in LOCAL_ERROR


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_closed_region_is_refused(connect, checked):
    pair = connect(checked=checked)
    with rp.MR(pair.pd, 64) as mr:
        sge = mr[:8]
    with pytest.raises(rp.PostError, match=r"MR of 64 bytes .* is closed"):
        pair.a.post_send(rp.Send(sge))
    with pytest.raises(rp.PostError, match="is closed"):
        pair.b.post_recv(rp.RecvWR(sge))
    pair.works()


def test_sge_of_length_0_is_refused(rc):
    with pytest.raises(rp.PostError, match=r"length 0 means 2\^31 bytes"):
        rc.a.post_send(rp.Send(rc.mine[5:5]))
    with pytest.raises(rp.PostError, match="empty sg_list"):
        rc.b.post_recv(rp.RecvWR(rc.theirs[5:5]))


def test_sge_of_numbers_reaches_the_device_unchanged(rc):
    """The right numbers work, with nothing else behind them."""
    rc.mine.buffer[:4] = b"raw!"
    rc.b.post_recv(rp.RecvWR(rp.SGE(rc.theirs.addr, 4, rc.theirs.lkey)))
    rc.a.post_send(rp.Send(rp.SGE(rc.mine.addr, 4, rc.mine.lkey)))
    rc.wait(2)
    assert bytes(rc.theirs.buffer[:4]) == b"raw!"


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_receive_into_memory_that_may_not_be_written_is_refused(connect, stack, qp_type):
    pair = connect(qp_type)
    read_only = stack.enter_context(rp.MR(pair.pd, 64, rp.Access.REMOTE_READ))
    with pytest.raises(rp.PostError, match=r"the message goes to MR .* without LOCAL_WRITE"):
        pair.b.post_recv(rp.RecvWR([pair.theirs[:8], read_only[:8]]))
    pair.works()


def test_too_many_sges_are_counted(soft):
    text = "5 SGEs, but this queue was created with max_send_sge=4"
    assert reason(soft.qp().post_send, rp.Send([soft.mr[:8]] * 5)) == text
    text = "3 SGEs, but this queue was created with max_recv_sge=2"
    assert reason(soft.qp().post_recv, rp.RecvWR([soft.mr[:8]] * 3)) == text


@pytest.mark.parametrize(("start", "length"), [(-1, 8), (4089, 8), (4096, 1), (0, 4097)])
def test_sge_outside_its_region_is_refused(soft, start, length):
    wrong = part(soft, start, length)
    text = outside(soft, soft.mr.addr + start, length)
    assert reason(soft.qp().post_send, rp.Send(wrong)) == text
    assert reason(soft.qp().post_recv, rp.RecvWR(wrong)) == text


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_sg_list_of_anything_but_sges_is_refused(connect, checked):
    """A list takes only SGEs, is copied, and knows its own length."""
    pair = connect(checked=checked)
    for wrong, words in (
        (None, "sg_list: expected SGEs, got NoneType"),
        (0x1000, "sg_list: expected SGEs, got int"),
        (object(), "sg_list: expected SGEs, got object"),
        (pair.mine, r"sg_list: expected SGEs, got MR; use mr\[:\]"),
        ([None], "sg_list holds NoneType"),
        ([pair.mine[:8], 0x1000], "sg_list holds int"),
        ([(pair.mine.addr, 8, pair.mine.lkey)], "sg_list holds tuple"),
        (b"bytes", "sg_list holds int, as bytes do; copy them into a region: mr"),
        (pair.mine.buffer[:8], "sg_list holds int, as bytes do; copy them into a region: mr"),
        ([rp.SGE(pair.mine.addr, 8, 1 << 32)], "an SGE's lkey=4294967296 is not in"),
        ([rp.SGE("x", 8, 1)], "an SGE's addr: expected int, got str"),
    ):
        refused(pair, rp.Send(wrong), words)
    sges = [pair.mine[:8]]
    wr = pair.wr(rp.RdmaWrite, sges)
    pair.mine.buffer[:8] = b"as then!"
    pair.a.post_send(wr)
    sges.clear()
    wr.sg_list = None
    pair.wait()
    assert bytes(pair.theirs.buffer[:8]) == b"as then!"
    pair.works()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_closed_region_is_named_at_any_place_in_an_sg_list(pair, pd, at):
    sges = [rp.MR(pd, 64)[:8] for _ in range(3)]
    closed = sges[at].owner
    assert closed is not None
    closed.close()
    says = rf"{re.escape(str(closed))} is closed"
    with pytest.raises(rp.PostError, match=says):
        pair.a.post_send(rp.Send(sges))
    with pytest.raises(rp.PostError, match=says):
        pair.a.prepare([rp.LocalInv(), rp.Send(sges)])
    assert pair.a.outstanding.send == 0
    for sge in sges:
        assert sge.owner is not None
        sge.owner.close()


def test_sge_from_a_buffer_holds_it():
    data = bytearray(b"hello")
    sge = rp.SGE.from_buffer(data)
    assert (sge.length, sge.lkey) == (5, 0)
    with pytest.raises(BufferError):
        data.append(0)
    del sge
    data.append(0)


@pytest.mark.parametrize("wrong", [5, "text", None, object()])
def test_sge_from_what_is_no_buffer_is_a_type_error(wrong):
    with pytest.raises(TypeError):
        rp.SGE.from_buffer(wrong)


def test_sge_from_a_buffer_with_gaps_is_refused():
    with pytest.raises((ValueError, BufferError)):
        rp.SGE.from_buffer(memoryview(bytearray(10))[::2])


def test_sge_shows_addresses_in_hex():
    assert repr(rp.SGE(4096, 16, 255)) == "SGE(addr=0x1000, length=16, lkey=0xff)"


@pytest.mark.parametrize("order", ["ABA", "AABB", "ABAB", "ABCABC", "ABCDEFABCDEF"])
def test_sges_of_one_region_need_not_be_adjacent(watched, order):
    with contextlib.ExitStack() as stack:
        regions = {name: stack.enter_context(rp.MR(watched.pd, 64, ALL)) for name in set(order)}
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=12)
        )
        qp.to_init()
        qp.post_recv(rp.RecvWR([regions[name][i : i + 4] for i, name in enumerate(order)]))
        [record] = watched.tap.last()
        assert record.sges == [
            (regions[name].addr + i, 4, regions[name].lkey) for i, name in enumerate(order)
        ]
        qp.to_reset()


class Own(rp.SGE):
    """A subclass that shows other fields than it holds."""

    note = "mine"

    @property
    def addr(self) -> int:  # type: ignore[override]
        return 8

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an item is asked for")

    def __iter__(self) -> Any:
        raise AssertionError("the items are asked for")

    def __len__(self) -> int:
        return 1 << 20


def test_sge_of_a_subclass_is_read_as_the_tuple_that_it_is(watched):
    mr = watched.mr
    said = watched.refused(watched.write(sg_list=Own(mr.addr, 8, mr.lkey, "mr")))
    assert said == "an SGE's owner: expected MR or a buffer, got str"
    own = Own(mr.addr, 8, mr.lkey, mr)
    for sges in (own, [own], [mr[8:16], own]):
        watched.qp.post_send(watched.write(sg_list=sges))
        [record] = watched.tap.last()
        assert record.sges[-1] == (mr.addr, 8, mr.lkey)


def test_sge_of_a_subclass_is_posted_by_every_verb(rc, pd, stack):
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    own = Own(mr.addr, 8, mr.lkey, mr)
    srq = stack.enter_context(rp.SRQ(pd))
    srq.post_srq_recv(rp.RecvWR(own))
    rc.b.post_recv(rp.RecvWR(own))
    sends = rc.a.prepare(rp.Send(rc.mine[:8]))
    sends[0].sg_list = own
    assert sends[0].sg_list == (mr[:8],)
    assert type(sends[0].sg_list[0]) is rp.SGE
    sends.post()
    for wc in rc.wait(2):
        wc.check()
    with pytest.raises(rp.InUseError):
        mr.close()
    sends.close()


def test_tuples_that_look_like_sges_are_refused(watched):
    mr = watched.mr
    for like in (tuple(mr[:8]), (1, 2), (mr.addr, 8, mr.lkey, mr), mr, None):
        said = watched.refused(rp.Send([mr[:8], like]))
        hint = "use mr[:]" if like is mr else "mr[a:b] makes an SGE"
        assert said == f"sg_list holds {type(like).__name__}; {hint}"
    short: Any = tuple.__new__(rp.SGE, (1, 2))
    assert "sg_list holds SGE" in watched.refused(rp.Send([short]))
    short = tuple.__new__(Own, (1, 2))
    assert "sg_list holds Own" in watched.refused(rp.Send(short))


def test_many_sges_cost_no_more_time_each_than_few(watched):
    """Each has its own memory, which is held: eight times as many do not take 64 times as long."""

    def seconds(count: int) -> float:
        wr = watched.write(
            sg_list=[rp.SGE.from_buffer(bytearray(1)) for _ in range(count)],
            send_flags=SendFlags.INLINE,
        )
        times = []
        for _ in range(3):
            start = time.thread_time()
            with pytest.raises(rp.PostError):
                watched.qp.post_send(wr)
            times.append(time.thread_time() - start)
        return min(times)

    watched.tap.refuse()
    assert seconds(16_000) < 24 * seconds(2_000)


def test_blocks_and_ranges_with_arguments_missing_are_refused_and_keep_no_region(pd):
    mr = rp.MR(pd, 64)
    region = weakref.ref(mr)
    for make in (mr.blocks, mr.ranges):
        for given in ((), (1,), (1, 2, 3)):
            with pytest.raises(TypeError, match="expected two columns"):
                make(*given)
    del mr, make
    assert region() is None


SLICED_WITHOUT_MEMORY = """
import weakref
import _testcapi
import rdmapost as rp

pd = rp.PD(rp.open_device("soft0"))
failed = 0
for at in range(20):
    mr, sge = rp.MR(pd, 1 << 20), None
    # Python has an int for each small number.
    start, stop = 1000, 2000
    _testcapi.set_nomemory(at, at + 1)
    try: sge = mr[start:stop]
    except MemoryError: failed += 1
    finally: _testcapi.remove_mem_hooks()
    assert sge in (None, (mr.addr + 1000, 1000, mr.lkey, mr)), at
    region = weakref.ref(mr)
    del mr, sge
    assert region() is None, at
print(failed > 1)
"""


def test_slice_of_a_region_without_memory_is_an_sge_or_a_memory_error_and_keeps_no_region():
    """Whichever allocation fails."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(SLICED_WITHOUT_MEMORY) == "True"
