"""Lists of work requests: where they stop, and which one bad_wr names."""

from __future__ import annotations

import array
import errno
import weakref

import pytest
from support import GRH, LOSES_MEMORY, TYPES, Pair, in_flight, needs, prints, writes
from support.in_flight import gone, write_from
from support.posting_tap import open_tap

import rdmapost as rp
from rdmapost import QPState

pair = in_flight.pair


def too_many(pair: Pair) -> rp.Send:
    """Make a work request that every device refuses when posted."""
    return rp.Send([pair.mine[:1]] * (pair.a.max_send_sge + 1), wr_id=99)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_soft_device_has_carried_out_the_work_requests_when_the_post_returns(rc, context, count):
    """Before anybody polls."""
    needs(context.kind == "soft", "synchronous execution", context)
    for post in (rc.a.post_send, lambda wrs: rc.a.prepare(wrs).post()):
        rc.theirs.buffer[:count] = bytes(count)
        post(writes(rc, count))
        assert bytes(rc.theirs.buffer[:count]) == bytes(range(1, count + 1))
        rc.wait(count)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_list_with_a_bad_work_request_posts_those_before_it(connect, checked, bad):
    """Those before it are posted and complete; it and those after it are not.

    Checked, the library refuses it; unchecked, the device does.
    """
    pair = connect(checked=checked)
    wrs: list[rp.SendWR] = list(writes(pair, 8))
    wrs[bad] = too_many(pair)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wrs)
    error = caught.value
    assert (error.index, error.posted, error.wr) == (bad, bad, wrs[bad])
    # mlx5 says ENOMEM.
    assert error.errno in (errno.EINVAL, errno.ENOMEM)
    assert f"work request {bad + 1} of 8 (index {bad})" in str(error)
    if checked:
        assert f"max_send_sge={pair.a.max_send_sge}" in error.reason
    assert pair.a.outstanding.send == bad
    assert [wc.wr_id for wc in pair.wait(bad)] == list(range(bad))
    assert pair.a.outstanding.send == 0
    assert bytes(pair.theirs.buffer[:8]) == bytes(range(1, bad + 1)) + bytes(8 - bad)
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_list_with_two_bad_ones_stops_at_the_first(connect, checked):
    pair = connect(checked=checked)
    wrs: list[rp.SendWR] = list(writes(pair, 8))
    wrs[2] = wrs[5] = too_many(pair)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wrs)
    assert (caught.value.index, caught.value.posted) == (2, 2)
    pair.wait(2)
    pair.works()


def test_long_list_is_posted_with_one_call(connect, stack, context):
    """More than the buffers were made for at first."""
    pair = connect(max_send_wr=200)
    pair.a.post_send(writes(pair, 200))
    assert pair.a.outstanding.send == 200
    assert [wc.wr_id for wc in pair.wait(200)] == list(range(200))
    assert bytes(pair.theirs.buffer[:200]) == bytes(range(1, 201))


def test_list_of_different_opcodes_is_posted_in_order(rc, context):
    """One list, records of different lengths."""
    needs(context.attr.atomic_cap, "atomics", context)
    rc.b.post_recv([rp.RecvWR([rc.theirs[:4], rc.theirs[4:100]], wr_id=70), rp.RecvWR(wr_id=71)])
    rc.a.post_send(
        [
            rp.Send([rc.mine[:3], rc.mine[3:6], rc.mine[6:9]], wr_id=1),
            rc.wr(rp.RdmaRead, rc.mine[100:108], wr_id=2),
            rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], wr_id=3),
            rp.SendWithImm(wr_id=4, imm_data=5),
        ]
    )
    assert sorted(wc.wr_id for wc in rc.wait(6)) == [1, 2, 3, 4, 70, 71]


def _posts(context, pd, rc):
    """Yield each verb that posts lists, with a good and a bad work request."""
    srq = rp.SRQ(pd, 8)
    recv = rp.RecvWR(rc.theirs[:8])
    bad_recv = rp.RecvWR([rc.theirs[:1]] * (rc.b.max_recv_sge + 1))
    return srq, {
        "post_send": (rc.a.post_send, writes(rc, 1)[0], too_many(rc)),
        "post_recv": (rc.b.post_recv, recv, bad_recv),
        "post_srq_recv": (srq.post_srq_recv, recv, bad_recv),
        "prepare": (rc.a.prepare, writes(rc, 1)[0], too_many(rc)),
        "prepare_recv": (rc.b.prepare_recv, recv, bad_recv),
    }


@pytest.mark.parametrize(
    "name", ["post_send", "post_recv", "post_srq_recv", "prepare", "prepare_recv"]
)
def test_generator_is_read_once_and_its_bad_one_is_named(context, pd, rc, name):
    srq, posts = _posts(context, pd, rc)
    post, good, bad = posts[name]
    with srq:
        wrs = [good, good, bad, good]
        left = iter(wrs)
        with pytest.raises(rp.PostError) as caught:
            post(wr for wr in left)
        error = caught.value
        posted = 0 if name.startswith("prepare") else 2
        assert (error.index, error.posted, error.count) == (2, posted, 4)
        assert error.wr is bad
        assert list(left) == []


@pytest.mark.parametrize(
    "name", ["post_send", "post_recv", "post_srq_recv", "prepare", "prepare_recv"]
)
def test_generator_that_raises_posts_nothing(context, pd, rc, name):
    srq, posts = _posts(context, pd, rc)
    post, good, _ = posts[name]

    def raises():
        yield good
        raise ZeroDivisionError

    with srq:
        with pytest.raises(ZeroDivisionError):
            post(raises())
        assert (*rc.a.outstanding, *rc.b.outstanding, srq.outstanding) == (0, 0, 0, 0, 0)


def test_post_accepts_an_iterable_a_single_work_request_and_an_empty_list(rc):
    rc.a.post_send(iter(writes(rc, 3)))
    rc.a.post_send(writes(rc, 1, start=3)[0])
    rc.a.post_send([])
    rc.b.post_recv(())
    assert [wc.wr_id for wc in rc.wait(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_post_of_an_object_that_is_no_work_request_is_a_type_error(rc, wrong):
    with pytest.raises(TypeError, match="ibv_post_send: expected SendWR or an iterable of them"):
        rc.a.post_send(wrong)
    with pytest.raises(TypeError, match="ibv_post_recv: expected RecvWR or an iterable of them"):
        rc.b.post_recv(wrong)


def test_refused_sges_name_the_work_request_to_post(rc):
    sge, blocks = rc.mine[:5], rc.mine.blocks(array.array("q", [0, 64]), 8)
    with pytest.raises(TypeError, match=r"got SGE; post Send\(mr\[a:b\]\)$"):
        rc.a.post_send(sge)
    with pytest.raises(TypeError, match=r"got SGE; post RecvWR\(mr\[a:b\]\)$"):
        rc.b.post_recv(sge)
    with pytest.raises(TypeError, match=r"got Blocks; post_columns\(\) and post_recv_columns\(\)"):
        rc.a.post_send(blocks)
    assert rc.a.outstanding.send == rc.b.outstanding.recv == 0


def test_work_request_of_the_other_queue_is_refused(rc):
    with pytest.raises(rp.PostError, match="expected SendWR, got RecvWR"):
        rc.a.post_send([rp.RecvWR()])
    with pytest.raises(rp.PostError, match="expected RecvWR, got Send") as caught:
        rc.b.post_recv([rp.RecvWR(rc.theirs[:1]), rp.Send()])
    assert caught.value.posted == 1
    assert rc.b.outstanding.recv == 1


@pytest.mark.parametrize("post", ["post_send", "prepare"])
def test_refused_list_with_two_wrong_work_requests_releases_both_wrong_values(rc, post):
    class Unreadable:
        pass

    unreadable = Unreadable()
    gone = weakref.ref(unreadable)
    beside = rc.mine[:8]._replace(addr=rc.mine.addr - 8)
    with pytest.raises(rp.PostError, match="lies outside"):
        getattr(rc.a, post)([rp.Send(beside), rp.Send(rc.mine[:8], wr_id=unreadable)])
    del unreadable
    assert gone() is None


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_error_in_the_middle_of_a_list_names_the_work_request(connect, checked):
    """A failure in the middle has somewhere to go: the exception says which one it was."""
    pair = connect(checked=checked, max_recv_wr=4)
    wr = pair.wr(rp.RdmaWrite, pair.mine[:1])
    too_many = pair.wr(rp.RdmaWrite, [pair.mine[:1]] * (pair.a.max_send_sge + 1))
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([wr, too_many, wr])
    assert (caught.value.index, caught.value.posted, caught.value.wr) == (1, 1, too_many)
    pair.wait()
    # A full queue is the other failure; unchecked the device says when it is full.
    receives = [rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(5000)]
    with pytest.raises(rp.PostError) as caught:
        pair.b.post_recv(receives)
    at = caught.value.index
    assert at is not None
    assert at >= 4
    assert (caught.value.posted, caught.value.wr) == (at, receives[at])
    assert pair.b.outstanding.recv == at
    pair.a.post_send(rp.Send(pair.mine[:8], wr_id=9000))
    assert {wc.wr_id for wc in pair.wait(2)} == {0, 9000}


@pytest.mark.parametrize("bad", ["null", "left alone", "nowhere"])
def test_work_requests_of_a_device_without_bad_wr_count_as_posted(pair, pd, context, bad, stack):
    """All count as posted, so that the memory stays until the queue pair is reset."""
    if context.kind != "soft":
        pytest.skip("only soft0 can be made to refuse")
    tap = open_tap(context)
    stack.callback(tap.close)
    mr = rp.MR(pd, 64)
    region = weakref.ref(mr)
    tap.refuse(passed=1, rc=5, bad={"null": 0, "left alone": 1, "nowhere": 3}[bad])
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([write_from(pair, mr, wr_id) for wr_id in range(3)])
    error = caught.value
    assert (error.errno, error.index, error.posted, error.wr) == (5, None, None, None)
    del mr, error, caught
    tap.answer = None
    tap.chains.clear()
    assert pair.a.outstanding.send == 3
    assert [wc.wr_id for wc in pair.cq.wait(1)] == [0]
    assert pair.a.outstanding.send == 2
    assert not gone(region)
    pair.a.to_reset()
    assert gone(region)


@pytest.mark.parametrize(
    ("rc", "bad", "code", "posted"),
    [
        (-22, 2, 22, 2),  # siw: a negative errno
        (0, 2, 5, 2),  # a partial post
        (0, 3, 0, 4),  # garbage after a success
        (95, 0, 95, 0),  # an unsupported call posts nothing
        (38, 1, 38, 0),
    ],
)
def test_bad_wr_of_a_driver_decides_what_stays_outstanding(
    pair, context, stack, rc, bad, code, posted
):
    if context.kind != "soft":
        pytest.skip("only soft0 can be made to refuse")
    tap = open_tap(context)
    stack.callback(tap.close)
    wrs = [write_from(pair, pair.mine, wr_id) for wr_id in range(4)]
    tap.refuse(passed=posted, rc=rc, bad=bad)
    if code:
        with pytest.raises(rp.PostError) as caught:
            pair.a.post_send(wrs)
        assert (caught.value.errno, caught.value.posted) == (code, posted)
    else:
        pair.a.post_send(wrs)
    assert pair.a.outstanding.send == posted
    assert [wc.wr_id for wc in pair.cq.poll()] == list(range(posted))


ROOM = GRH + 64


def receive(pair: Pair, wr_id: int) -> rp.RecvWR:
    return rp.RecvWR(pair.theirs[:ROOM], wr_id=wr_id)


@pytest.mark.parametrize("qp_type", TYPES)
def test_refused_list_leaves_the_queue_pair_as_it_was(connect, qp_type):
    """What came before the bad one is carried out, what came after it was never posted."""
    pair = connect(qp_type)
    pair.b.post_recv([receive(pair, 10 + i) for i in range(2)])
    too_many = pair.send([pair.mine[:1]] * (pair.a.max_send_sge + 1), wr_id=2)
    wrs = [
        pair.send(pair.mine[:8], wr_id=0),
        pair.send(pair.mine[:8], wr_id=1),
        too_many,
        pair.send(pair.mine[:8], wr_id=3),
    ]
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(wrs)
    assert (caught.value.index, caught.value.posted, caught.value.wr) == (2, 2, too_many)
    assert pair.a.state is QPState.RTS
    assert sorted(wc.wr_id for wc in pair.wait(4)) == [0, 1, 10, 11]
    assert pair.a.outstanding == pair.b.outstanding == (0, 0)
    pair.works()


def test_refused_list_of_receives_keeps_those_before_it(rc):
    wrs = [
        receive(rc, 0),
        receive(rc, 1),
        rp.RecvWR([rc.theirs[:1]] * (rc.b.max_recv_sge + 1)),
        receive(rc, 3),
    ]
    with pytest.raises(rp.PostError, match="work request 3 of 4") as caught:
        rc.b.post_recv(wrs)
    assert (caught.value.index, caught.value.posted, caught.value.wr) == (2, 2, wrs[2])
    assert rc.b.outstanding.recv == 2
    rc.a.post_send([rp.Send(rc.mine[:8], wr_id=9)] * 2)
    assert sorted(wc.wr_id for wc in rc.wait(4)) == [0, 1, 9, 9]


def test_repr_of_a_post_error_says_what_its_text_does(rc):
    with pytest.raises(rp.PostError) as caught:
        rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8]), rp.Send([rc.mine[:8]] * 9)])
    said = repr(caught.value)
    assert said == f"PostError({str(caught.value)!r}, index=1, posted=1)"
    assert "9 SGEs, but this queue was created with max_send_sge=4" in said
    rc.wait()


LACKS_MEMORY = """
import contextlib
import _testcapi
import rdmapost as rp

class Number(int):
    pass

wrong = []

def starve(name, call, state, change):
    \"""Repeat a call, and let each of its allocations fail, until it succeeds.\"""
    for at in range(1000):
        before, error, found = state(), None, None
        _testcapi.set_nomemory(at, at + 1)
        try: found = call()
        except (MemoryError, rp.PostError) as raised: error = raised
        finally: _testcapi.remove_mem_hooks()
        posted = change if error is None else 0
        # The device, too, may lack memory: then it takes some.
        if isinstance(error, rp.PostError): posted = error.posted
        elif hasattr(error, "posted"): wrong.append((name, at, error.__notes__))
        if state() - before != posted: wrong.append((name, at, repr(error)))
        if error is None: return found
    wrong.append((name, "never succeeds"))

with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    context = enter(rp.open_device("soft0"))
    pd, cq = enter(rp.PD(context)), enter(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    srq = rp.SRQ(pd, 4, srq_type=rp.SRQType.TM, cq=cq, max_num_tags=100, max_ops=100)
    room = {"max_send_wr": 999, "max_recv_wr": 999, "max_send_sge": 24, "max_recv_sge": 24}
    qp = rp.QP(pd, rp.QPType.UD, cq, max_tso_header=64, **room)
    qp.connect()
    sges = [enter(rp.MR(pd, 64, rp.Access.LOCAL_WRITE))[:8] for _ in range(24)]
    other = tuple(sges[::-1])
    ah = enter(qp.ah_to(qp.endpoint()))
    # They are closed before the regions.
    stack.callback(qp.close)
    stack.callback(srq.close)
    # What is sent stays in the queue.
    qp.to_sqd()
    tso = rp.TSO(sges, hdr=bytearray(8), mss=8, ah=ah)
    sends = [rp.Send(sges, ah=ah, wr_id=Number(1000)), rp.Send(ah=ah), tso]
    receives = [rp.RecvWR(sges, wr_id=Number(1000)), rp.RecvWR(sges), rp.RecvWR(sges)]
    tag = rp.TagAdd(recv_wr_id=Number(1000), sg_list=sges)
    sent, received = lambda: qp.outstanding.send, lambda: qp.outstanding.recv
    starve("post_send", lambda: qp.post_send(sends), sent, 3)
    starve("post_recv", lambda: qp.post_recv(receives), received, 3)
    starve("post_srq_ops", lambda: srq.post_srq_ops(tag), lambda: srq.outstanding_tags, 1)
    batch = enter(starve("prepare", lambda: qp.prepare(sends), sent, 0))
    changed = lambda: batch[2].sg_list == other
    starve("change", lambda: setattr(batch[2], "sg_list", other), changed, 1)
    found = starve("read", lambda: batch[2].sg_list, sent, 0)
    starve("post", batch.post, sent, 3)
print(wrong, found == other)
"""


def test_post_without_memory_posts_only_what_its_error_says():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(LACKS_MEMORY, **LOSES_MEMORY) == "[] True"
