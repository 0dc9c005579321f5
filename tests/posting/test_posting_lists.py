"""Posting lists of work requests, full queues, and what is outstanding."""

from __future__ import annotations

import errno
import weakref

import pytest
from support import Pair, needs

import rdmapost as rp
from rdmapost import QPType

U64 = 1 << 64


# ---- lists ------------------------------------------------------------------------


def writes(pair: Pair, count: int, start: int = 0) -> list[rp.RdmaWrite]:
    """Make writes of one byte each, whose values are 1, 2, 3, ..."""
    pair.mine.buffer[:count] = bytes(range(1, count + 1))
    return [
        pair.wr(
            rp.RdmaWrite, pair.mine[i : i + 1], remote_addr=pair.theirs.addr + i, wr_id=start + i
        )
        for i in range(count)
    ]


def too_many(pair: Pair) -> rp.Send:
    """Make a work request that every device refuses when posted."""
    return rp.Send([pair.mine[:1]] * (pair.a.max_send_sge + 1), wr_id=99)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_soft_device_has_done_it_when_the_post_returns(rc, context, count):
    """Before anybody polls."""
    needs(context.kind == "soft", "device that runs in the post", context)
    for post in (rc.a.post_send, lambda wrs: rc.a.prepare(wrs).post()):
        rc.theirs.buffer[:count] = bytes(count)
        post(writes(rc, count))
        assert bytes(rc.theirs.buffer[:count]) == bytes(range(1, count + 1))
        rc.wait(count)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_list_of_8_with_a_bad_one(connect, checked, bad):
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
def test_what_is_no_work_request_is_a_type_error(rc, wrong):
    with pytest.raises(TypeError, match="ibv_post_send: expected SendWR or an iterable of them"):
        rc.a.post_send(wrong)
    with pytest.raises(TypeError, match="ibv_post_recv: expected RecvWR or an iterable of them"):
        rc.b.post_recv(wrong)


def test_work_request_of_the_other_queue_is_refused(rc):
    with pytest.raises(rp.PostError, match="expected SendWR, got RecvWR"):
        rc.a.post_send([rp.RecvWR()])
    with pytest.raises(rp.PostError, match="expected RecvWR, got Send") as caught:
        rc.b.post_recv([rp.RecvWR(rc.theirs[:1]), rp.Send()])
    assert caught.value.posted == 1
    assert rc.b.outstanding.recv == 1


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"wr_id": -1}, "wr_id=-1 is not in 0"),
        ({"wr_id": U64}, "is not in 0..2^64-1"),
        ({"wr_id": "x"}, "wr_id: expected int, got str"),
        ({"wr_id": None}, "wr_id: expected int, got NoneType"),
        ({"imm_data": 1 << 32}, "imm_data=4294967296 is not in 0..2^32-1"),
        ({"imm_data": 1.5}, "imm_data: expected int, got float"),
        ({"send_flags": None}, "send_flags: expected int, got NoneType"),
        ({"remote_addr": -1}, "remote_addr=-1"),
        ({"remote_addr": "x"}, "remote_addr: expected int, got str"),
        ({"rkey": 1 << 32}, "rkey="),
        ({"sg_list": 5}, "int"),
        ({"sg_list": None}, "NoneType"),
        ({"sg_list": [5]}, "sg_list holds int"),
        ({"sg_list": rp.SGE(1, "x", 1)}, "an SGE's length: expected int, got str"),
        ({"sg_list": rp.SGE(None, 1, 1)}, "an SGE's addr: expected int, got NoneType"),
        ({"sg_list": rp.SGE(1, 1, 1 << 32)}, "an SGE's lkey=4294967296"),
    ],
)
def test_field_of_a_wrong_type_is_named(connect, checked, fields, words):
    """Whatever a field holds, the post raises a PostError and the list before it is posted."""
    pair = connect(checked=checked)
    good = writes(pair, 1)[0]
    bad = pair.wr(rp.RdmaWriteWithImm, pair.mine[:1])
    for name, value in fields.items():
        setattr(bad, name, value)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([good, bad])
    assert words in caught.value.reason
    assert (caught.value.index, caught.value.posted) == (1, 1)
    pair.wait(1)
    assert pair.a.outstanding.send == 0
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("ah", ["ah", 5, object(), "mr"])
def test_ud_with_something_else_for_an_address_handle(connect, checked, ah):
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="ah: expected AH"):
        pair.a.post_send(pair.send(pair.mine[:4], ah=pair.mine if ah == "mr" else ah))
    assert pair.a.outstanding.send == 0
    pair.works()


def test_error_of_an_iterator_is_the_callers(rc):
    """Nothing is posted, and nothing is counted as posted."""

    def generate():
        yield writes(rc, 1)[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rc.a.post_send(generate())
    assert rc.a.outstanding.send == 0
    rc.works()


def test_error_of_a_field_is_the_callers_and_nothing_is_posted(rc):
    class Odd(rp.RdmaWrite):
        @property
        def remote_addr(self) -> int:
            raise KeyError("mine")

        @remote_addr.setter
        def remote_addr(self, value: int) -> None:
            pass

    with pytest.raises(KeyError, match="mine"):
        rc.a.post_send([*writes(rc, 2), Odd(rc.mine[:1])])
    assert rc.a.outstanding.send == 0
    rc.works()


@pytest.mark.parametrize("post", ["post_send", "prepare"])
def test_list_with_two_wrong_work_requests_releases_both_values(rc, post):
    class Unreadable:
        pass

    unreadable = Unreadable()
    gone = weakref.ref(unreadable)
    beside = rc.mine[:8]._replace(addr=rc.mine.addr - 8)
    with pytest.raises(rp.PostError, match="outside"):
        getattr(rc.a, post)([rp.Send(beside), rp.Send(rc.mine[:8], wr_id=unreadable)])
    del unreadable
    assert gone() is None


# ---- full queues, and what is outstanding ----------------------------------------


def test_full_send_queue_is_refused_by_name_and_usable_after_polling(connect):
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1]) for _ in range(depth)])
    assert pair.a.outstanding.send == depth
    with pytest.raises(rp.PostError, match=f"the queue is full: max_send_wr={depth}") as caught:
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1]))
    assert caught.value.errno == errno.ENOMEM
    assert "poll the CQ" in str(caught.value)
    pair.wait(depth)
    pair.works()


@pytest.mark.parametrize("sq_sig_all", [False, True])
def test_full_send_queue_says_that_unsignaled_sends_never_leave_it(connect, sq_sig_all):
    """But not if every send is signaled."""
    pair = connect(max_send_wr=8, sq_sig_all=sq_sig_all)
    depth = pair.a.max_send_wr
    quiet = [pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0) for _ in range(depth + 1)]
    pair.a.post_send(quiet[:depth])
    with pytest.raises(rp.PostError, match="the queue is full") as caught:
        pair.a.post_send(quiet[depth])
    doubt = caught.value.reason.endswith("; if none of them is SIGNALED, no slot ever comes free")
    assert doubt is not sq_sig_all


def test_list_that_fills_the_queue_stops_where_it_is_full(connect):
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=0))
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(1, depth + 1)]
    with pytest.raises(rp.PostError, match="the queue is full") as caught:
        pair.a.post_send(wrs)
    assert (caught.value.index, caught.value.posted) == (depth - 1, depth - 1)
    assert [wc.wr_id for wc in pair.wait(depth)] == list(range(depth))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("prepared", [False, True], ids=["posted", "prepared"])
@pytest.mark.parametrize("kind", [list, iter])
def test_error_for_a_list_longer_than_its_queue_does_not_advise_to_poll(
    connect, checked, prepared, kind
):
    """It never fits, however many are polled; a checked queue pair does not even prepare it."""
    pair = connect(max_send_wr=16, checked=checked)
    depth = pair.a.max_send_wr
    # More than a device has beyond what it grants.
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(4 * depth)]

    def post() -> None:
        if not prepared:
            pair.a.post_send(kind(wrs))
        elif checked:
            pair.a.prepare(kind(wrs))
        else:
            pair.a.prepare(kind(wrs)).post()

    with pytest.raises(rp.PostError) as caught:
        post()
    error = caught.value
    assert error.errno == errno.ENOMEM
    assert error.reason == (
        f"a list of {4 * depth} cannot fit a queue of max_send_wr={depth}; "
        "post it in parts, or create the queue deeper"
    )
    # Those that fit are posted, except for a prepared list, which is posted whole or not at all.
    if checked:
        assert error.posted == (0 if prepared else depth)
        assert (error.index, error.count) == (depth, 4 * depth)
        assert error.wr is wrs[depth]
    assert [wc.wr_id for wc in pair.wait(error.posted)] == list(range(error.posted))


def test_full_receive_queue_is_refused_by_name(connect):
    pair = connect(max_recv_wr=8)
    depth = pair.b.max_recv_wr
    pair.b.post_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(depth)])
    with pytest.raises(rp.PostError, match=f"the queue is full: max_recv_wr={depth}") as caught:
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert caught.value.errno == errno.ENOMEM
    assert pair.b.outstanding == (0, depth)
    pair.a.post_send(rp.Send(pair.mine[:8]))
    pair.wait(2)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert pair.b.outstanding == (0, depth)


def test_full_queue_of_the_device_unchecked(connect):
    """The device's own ENOMEM: when it decides, and with the index."""
    pair = connect(max_recv_wr=4, checked=False)
    with pytest.raises(rp.PostError) as caught:
        pair.b.post_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(5000)])
    error = caught.value
    assert error.errno == errno.ENOMEM
    assert error.index == error.posted == pair.b.outstanding.recv
    assert error.index is not None
    assert error.index >= 4
    assert error.wr.wr_id == error.index


def test_unsignaled_work_requests_are_outstanding_until_a_later_completion(connect):
    pair = connect()
    quiet = [pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0, wr_id=i) for i in range(5)]
    pair.a.post_send(quiet)
    assert pair.a.outstanding == (5, 0)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=5))
    assert pair.a.outstanding == (6, 0)
    pair.a.post_send(quiet[:2])
    assert [wc.wr_id for wc in pair.wait(1)] == [5]
    assert pair.a.outstanding == (2, 0)
    assert pair.cq.poll() == []


def test_sq_sig_all_signals_everything(connect):
    pair = connect(sq_sig_all=True)
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0, wr_id=i) for i in (1, 2)])
    assert [wc.wr_id for wc in pair.wait(2)] == [1, 2]
    assert pair.a.outstanding == (0, 0)


def test_receives_are_outstanding_until_they_complete(rc):
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8], wr_id=i) for i in range(3)])
    assert rc.b.outstanding == (0, 3)
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    rc.wait(2)
    assert rc.b.outstanding == (0, 2)
    assert rc.a.outstanding == (0, 0)


@pytest.mark.parametrize("wr_id", [0, 1, (1 << 32) + 1, U64 - 1])
def test_wr_id_comes_back_whole(rc, wr_id):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=wr_id))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=wr_id))
    assert [wc.wr_id for wc in rc.wait(2)] == [wr_id, wr_id]
