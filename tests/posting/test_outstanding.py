"""What is outstanding: how it is counted, what retires it, and what its slots keep."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
from support import ALL, in_flight, nothing_comes, resident
from support.in_flight import gone, why_open, write_from
from support.posting_tap import Tap, open_tap

import rdmapost as rp
from rdmapost import QPType, SendFlags, WCStatus
from rdmapost._binding import native
from rdmapost.posting.fields import TYPE_NUMBERS

pair = in_flight.pair

ENOMEM, U64 = 12, (1 << 64) - 1


def counters(queue: Any) -> Any:
    """Return how many were posted to a queue and how many of these are done, as C counts them."""
    return (ctypes.c_uint64 * 2).from_address(id(queue) + object.__basicsize__)


def test_count_of_outstanding_work_requests_wraps_at_2_to_the_32(pair, context):
    """After 2^32 work requests the cookies start again, and nothing is mixed up."""
    qp = pair.a
    for turn in range(3):
        qp.post_send([write_from(pair, pair.mine, wr_id) for wr_id in range(4)])
        assert [wc.wr_id for wc in pair.wait(4)] == [0, 1, 2, 3]
        counted = counters(qp._send.in_flight)
        assert list(counted) == [4 * turn + 4] * 2
    # This does not really post 2^32: that takes a minute.
    counted[0] = counted[1] = (1 << 32) - 6
    batch = qp.prepare([write_from(pair, pair.mine, wr_id) for wr_id in (20, 21, 22)])
    quiet = write_from(pair, pair.mine, 10)
    quiet.send_flags = SendFlags(0)
    region = rp.MR(pair.pd, 64)
    named = weakref.ref(region)
    qp.post_send([quiet, write_from(pair, region, 11)])
    del region
    batch.post()
    qp.post_send([quiet, quiet, write_from(pair, pair.mine, 12)])
    batch.post()
    assert qp.outstanding.send == 11
    depth = qp.max_send_wr
    with pytest.raises(rp.PostError, match="the queue is full"):
        qp.post_send([quiet] * (depth - 10))
    assert qp.outstanding.send == depth
    for wr_id, done in ((11, 2), (20, 3), (21, 4), (22, 5), (12, 8), (20, 9), (21, 10)):
        assert [wc.wr_id for wc in pair.wait(1)] == [wr_id]
        assert qp.outstanding.send == depth - done
        assert gone(named)
    assert list(counted) == [(1 << 32) + depth - 6, (1 << 32) + 4]
    batch.close()
    qp.to_reset()
    assert qp.outstanding.send == 0


def test_slots_of_a_shared_queue_are_reused_more_often_than_their_cookies_can_count(pair, pd):
    """A cookie says how often its slot was used, in 8 bits.  No more slots are made for it."""
    with (
        rp.SRQ(pd, 16, 1) as srq,
        rp.CQ(pd.context) as cq,
        rp.QP(pd, QPType.RC, cq, srq=srq) as target,
        rp.QP(pd, QPType.RC, cq) as sender,
    ):
        sender.connect(target.endpoint())
        target.connect(sender.endpoint())
        srq.post_srq_recv([rp.RecvWR(wr_id=n) for n in range(3)])

        def receive(numbers: range) -> None:
            for n in numbers:
                srq.post_srq_recv(rp.RecvWR(wr_id=n + 3))
                sender.post_send(rp.Send(send_flags=SendFlags.SIGNALED, wr_id=1 << 40))
                assert {wc.check().wr_id for wc in cq.wait(2)} == {n, 1 << 40}
                assert srq.outstanding == 3

        receive(range(1000))
        growth = []
        for start in (1000, 4000, 7000):
            before = resident()
            receive(range(start, start + 3000))
            growth.append(resident() - before)
        # Once, the kernel may have made a huge page of small ones.
        assert min(growth) < 1 << 18


def test_records_of_a_send_queue_grow_however_many_there_have_been(connect):
    """Only a shared queue, whose slots have numbers, has a limit: 2^24 - 1."""
    pair = connect(max_send_wr=64)
    pair.a.post_send(write_from(pair, pair.mine))
    pair.wait()
    # How many entries have been dropped, completed and made: 16 million posts take half a minute.
    ring = (ctypes.c_size_t * 3).from_address(
        id(pair.a._send.in_flight) + object.__basicsize__ + 12 * 8
    )
    assert list(ring) == [1] * 3
    ring[:] = [(1 << 24) - 4] * 3
    pair.a.post_send([write_from(pair, pair.mine, wr_id) for wr_id in range(40)])
    assert [wc.wr_id for wc in pair.wait(40)] == list(range(40))


class Straying(Tap):
    """Has a device complete other work requests than those that it is handed."""

    stray = 0
    instead: int | None = None

    def _look(self, verb: int, first: int, answer: Any) -> None:
        super()._look(verb, first, answer)
        wr_id = ctypes.c_uint64.from_address(first)
        if self.instead is not None:
            wr_id.value = self.instead
        wr_id.value = wr_id.value & ~0xFFFF_FFFF | (wr_id.value + self.stray) & 0xFFFF_FFFF


@pytest.fixture
def straying(stack) -> Any:
    context = stack.enter_context(rp.open_device("soft0"))
    probe = open_tap(context)  # or the test is skipped
    probe.close()
    tap = Straying(probe._library, context)
    stack.callback(tap.close)
    return tap


@pytest.mark.parametrize("stray", [1, 2, 3, 4, 100, 1 << 31, (1 << 32) - 3, (1 << 32) - 2])
def test_completion_of_a_work_request_that_is_not_outstanding_retires_nothing(
    straying, stack, stray
):
    """The cookie is of one not posted yet, or of one already done: a send queue is in order."""
    pd = stack.enter_context(rp.PD(straying.context))
    cq = stack.enter_context(rp.CQ(straying.context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())
    mr = stack.enter_context(rp.MR(pd, 64, ALL))

    def wr(wr_id: int, flags: SendFlags = SendFlags.SIGNALED) -> rp.RdmaWrite:
        return rp.RdmaWrite((), wr_id=wr_id, send_flags=flags, remote_addr=mr.addr, rkey=mr.rkey)

    qp.post_send([wr(0), wr(1)])
    assert len(cq.wait(2)) == 2
    qp.post_send(wr(2, SendFlags(0)))
    straying.stray = stray
    qp.post_send(wr(3))
    straying.stray = 0
    assert cq.poll() == []
    assert qp.outstanding.send == 2
    qp.post_send(wr(4))
    assert [wc.wr_id for wc in cq.wait(1)] == [4]
    assert qp.outstanding.send == 0


@pytest.fixture
def shared(straying, stack) -> Any:
    """Return an SRQ on such a device, a queue pair that sends to it, and the CQ of both."""
    pd = stack.enter_context(rp.PD(straying.context))
    cq = stack.enter_context(rp.CQ(straying.context))
    srq = stack.enter_context(rp.SRQ(pd, 8, 1))
    target = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    sender = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    sender.connect(target.endpoint())
    target.connect(sender.endpoint())
    return srq, sender, cq


@pytest.mark.parametrize("stray", [-1, 1, 15, 16, 17, 0xFFFF, 1 << 24, 0xFFFFFE, 255 << 24])
def test_completion_for_a_slot_that_does_not_exist_retires_nothing(straying, shared, stray):
    """In any order: an SRQ's receives."""
    srq, sender, cq = shared
    straying.stray = stray
    srq.post_srq_recv(rp.RecvWR(wr_id=1))
    straying.stray = 0
    sender.post_send(rp.Send(wr_id=10))
    assert [wc.wr_id for wc in cq.wait(1)] == [10]
    assert cq.poll() == []
    assert srq.outstanding == 1
    srq.post_srq_recv(rp.RecvWR(wr_id=2))
    sender.post_send(rp.Send(wr_id=11))
    assert {wc.wr_id for wc in cq.wait(2)} == {2, 11}
    assert srq.outstanding == 1


def test_second_completion_of_a_receive_does_not_retire_the_next_in_its_slot(straying, shared):
    srq, sender, cq = shared
    srq.post_srq_recv(rp.RecvWR(wr_id=1))
    first = straying.last()[0].wr.wr_id
    sender.post_send(rp.Send(wr_id=10))
    assert {wc.wr_id for wc in cq.wait(2)} == {1, 10}
    straying.instead = first
    srq.post_srq_recv(rp.RecvWR(wr_id=2))
    straying.instead = None
    sender.post_send(rp.Send(wr_id=11))
    assert [wc.wr_id for wc in cq.wait(1)] == [11]
    assert cq.poll() == []
    assert srq.outstanding == 1


def test_outstanding_records_grow_with_the_queue(connect, stack):
    """Their room grows: in a queue used before, and in any order."""
    pair = connect(max_send_wr=200)
    for count in (1, 10, 30, 100, 7, 150):
        regions = [stack.enter_context(rp.MR(pair.pd, 64)) for _ in range(count)]
        wrs = [write_from(pair, mr, wr_id) for wr_id, mr in enumerate(regions)]
        if count == 100:
            for wr in wrs:
                pair.a.post_send(wr)
        else:
            pair.a.post_send(wrs)
        assert pair.a.outstanding.send == count
        assert f"wr_id {count - 1}" in why_open(regions[-1].close)
        assert [wc.wr_id for wc in pair.wait(count)] == list(range(count))
        for mr in regions:
            mr.close()


def test_handle_of_a_tagged_receive_does_not_match_the_next_in_its_slot(stack):
    """Many times over: no receive is removed by the handle of another."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    srq = stack.enter_context(rp.SRQ(pd, srq_type=rp.SRQType.TM, cq=cq))
    stale: list[Any] = []
    for tag in range(40):
        add = rp.TagAdd(tag=tag, flags=0)
        srq.post_srq_ops(add)
        for handle in stale:
            with pytest.raises(rp.PostError, match="no longer on the list"):
                srq.post_srq_ops(rp.TagDel(handle=handle))
        assert srq.outstanding_tags == 1
        srq.post_srq_ops(rp.TagDel(handle=add.handle))
        [wc] = cq.wait(1)
        assert wc.status is WCStatus.SUCCESS
        stale.append(add.handle)
    assert srq.outstanding_tags == 0


# ---- what only the library itself calls ----------------------------------------------


def queue(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "verb": 0,
        "in_flight": native.InFlight(),
        "checked": True,
        "pd": 0,
        "room": 1,
        "datagram": False,
        "xrc": False,
        "binds": False,
        "builds": False,
        "max_sge": 1,
        "max_msg_size": 1,
        "max_inline_data": 0,
        "max_tso_header": 0,
        "max_num_tags": 0,
        "wr_types": (),
    }
    return native.Queue(**{**given, **changed})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"verb": -1}, "there is no such verb"),
        ({"verb": 4}, "there is no such verb"),
        ({"wr_types": ((-1, 0),)}, "no such class"),
        ({"wr_types": ((0, 0), (99, 0))}, "no such class"),
        ({"wr_types": ((len(TYPE_NUMBERS), 0),)}, "no such class"),
        ({"wr_types": ((1,),)}, "argument"),
        ({"wr_types": 5}, "tuple"),
        ({"in_flight": None}, "InFlight"),
    ],
)
def test_internal_queue_of_wrong_arguments_is_refused(wrong, error):
    with pytest.raises((TypeError, ValueError), match=error):
        queue(**wrong)
    for verb in range(4):
        queue(verb=verb, wr_types=((0, 0), (len(TYPE_NUMBERS) - 1, 0)))


def test_internal_queue_can_be_initialised_only_once():
    made = queue()
    with pytest.raises(TypeError, match="it has already been initialised"):
        made.__init__(
            verb=0,
            in_flight=native.InFlight(),
            checked=True,
            pd=0,
            room=1,
            datagram=False,
            xrc=False,
            binds=False,
            max_sge=1,
            max_msg_size=1,
            max_inline_data=0,
            max_tso_header=0,
            max_num_tags=0,
            wr_types=(),
        )


def test_internal_queue_takes_posts_of_its_owner_only(pair):
    """Both before and after its owner's first post."""
    wr, unmade = rp.Send(), rp.QP.__new__(rp.QP)
    for _ in range(2):
        for wrong in ((), (pair.a,), (pair.a, wr, wr), (wr, wr), (None, wr)):
            with pytest.raises(TypeError):
                rp.QP.post_send(*wrong)
        for wrong in ((), (pair.a, wr), (None, wr, True), (wr, wr, True)):
            with pytest.raises(TypeError):
                pair.a._send.bind_mw(*wrong)
        with pytest.raises(rp.ClosedError):
            unmade.post_send(wr)
        unmade._send = native.Queue.__new__(native.Queue)
        with pytest.raises(TypeError, match="has not been initialised"):
            unmade.post_send(wr)
        del unmade._send
        assert pair.a.outstanding == (0, 0)
        pair.a.post_send(write_from(pair, pair.mine))
        pair.wait()


def test_readiness_of_a_queue_must_be_true_or_false():
    class Odd:
        def __bool__(self) -> bool:
            raise ArithmeticError("odd")

    with pytest.raises(ArithmeticError, match="odd"):
        queue().set_ready(Odd())


def test_cookie_of_no_outstanding_work_request_is_not_found(pair, pd):
    """In a send queue, and among the slots of an SRQ."""
    sends, queues = pair.a._send.in_flight, pd.context._queues

    def find(numbers: set[int], cookies: Iterable[int]) -> dict[int, int]:
        return {
            cookie: wr_id
            for cookie in cookies
            for number in numbers
            if (wr_id := native.peek_queues(queues, number << 32 | cookie)) is not None
        }

    before = set(queues)
    pair.a.post_send([write_from(pair, pair.mine, wr_id) for wr_id in (1, 2)])
    pair.wait(2)
    silent = write_from(pair, pair.mine, 3)
    silent.send_flags = SendFlags(0)
    pair.a.post_send([silent] * 2)
    cookies = [*range(8), 1 << 31, *range((1 << 32) - 3, 1 << 32)]
    assert find(before, cookies) == {2: 3, 3: 3}
    assert [sends.entry(i) is None for i in (0, 1, 2, 3, U64)] == [False, False, True, True, True]
    with rp.SRQ(pd, 4, 1) as srq:
        receives = srq._recv.in_flight
        added = set(queues) - before
        assert find(added, range(100)) == {}
        srq.post_srq_recv([rp.RecvWR(wr_id=70), rp.RecvWR(wr_id=71)])
        assert find(added, (*range(100), 1 << 24 | 1, 0xFFFFFF)) == {1: 70, 2: 71}
        assert find({max(queues) + 1}, range(100)) == {}
        assert [receives.entry(i) for i in (0, 1, 2, U64)] == [(70, None), (71, None), None, None]
    for wrong in ("x", -1, 1 << 64):
        with pytest.raises((TypeError, OverflowError)):
            sends.entry(wrong)


def test_cookie_is_looked_up_only_in_its_own_queue(pair, pd):
    """No matter what the dict of queues contains."""
    queues = pd.context._queues
    before = set(queues)
    with rp.SRQ(pd, 4, 1) as srq, rp.SRQ(pd, 4, 1) as other_srq:
        srq.post_srq_recv(rp.RecvWR(wr_id=70))
        other_srq.post_srq_recv(rp.RecvWR(wr_id=71))
        found = {native.peek_queues(queues, one << 32 | 1): one for one in set(queues) - before}
        number, other = found[70], found[71]
        cookie = number << 32 | 1
        for wrong in ({}, {number: queues[other]}, {other: queues[number]}, {number: object()}):
            assert native.peek_queues(wrong, cookie) is None
        assert native.peek_queues({number: queues[number]}, cookie) == 70
    for wrong_arguments in ((), (queues,), ([], 1), (queues, "x")):
        with pytest.raises(TypeError):
            native.peek_queues(*wrong_arguments)


def test_internal_queue_is_enrolled_only_once_and_only_in_dicts(pair):
    for wrong in ((), ({},), ([], {}), ({}, [])):
        with pytest.raises(TypeError):
            native.InFlight().enroll(*wrong)
    with pytest.raises(TypeError, match="enrolled already"):
        pair.a._send.in_flight.enroll({}, {})
    pair.works()


def test_handle_takes_records_of_queues_once_and_nothing_else(pair):
    unmade = rp.QP.__new__(rp.QP)
    queue = native.InFlight()
    for wrong in ((), (unmade,), (unmade, [queue]), (queue, (queue,))):
        with pytest.raises(TypeError):
            native.own_queues(*wrong)
    for owner, queues in ((unmade, (queue, 5)), (unmade, (5, queue)), (pair.a, (queue,))):
        with pytest.raises(TypeError, match="not queues, or the handle already has some"):
            native.own_queues(owner, queues)
    native.own_queues(unmade, (queue, queue))
    pair.works()


def test_records_are_forgotten_only_up_to_a_number(pair):
    sends = pair.a._send.in_flight
    pair.a.post_send([write_from(pair, pair.mine, wr_id) for wr_id in range(3)])
    for wrong in ("x", -1, 1 << 64):
        with pytest.raises((TypeError, OverflowError)):
            sends.clear_until(wrong)
    assert sends.outstanding == 3
    sends.clear_until(2)
    assert (sends.outstanding, sends.entry(0)) == (1, (2, pair.mine))
    assert [wc.wr_id for wc in pair.wait(1)] == [2]
    native.InFlight().clear_until(U64)


def test_entry_of_a_prepared_list_is_that_of_its_work_request(pair, pd):
    """Of the first still outstanding."""
    sends = pair.a._send.in_flight
    regions = [rp.MR(pd, 64) for _ in range(3)]
    wrs = [write_from(pair, mr, wr_id) for wr_id, mr in enumerate(regions)]
    wrs[1].send_flags = wrs[2].send_flags = SendFlags(0)
    pair.a.prepare(wrs).post()
    assert [sends.entry(i) for i in range(4)] == [
        (0, regions[0]),
        (1, regions[1]),
        (2, regions[2]),
        None,
    ]
    pair.wait(1)
    assert [sends.entry(i) for i in range(3)] == [(1, regions[1]), (2, regions[2]), None]
    pair.a.to_reset()


def test_tagged_receives_are_of_an_inflight():
    for wrong in ({"tagged": 5}, {"tagged": object()}, {"other": 1}):
        with pytest.raises(TypeError):
            native.InFlight(**wrong)
    assert native.InFlight(tagged=native.InFlight(in_order=False)).outstanding == 0


@pytest.mark.parametrize("name", ["Sent", "TagHandle"])
def test_types_that_only_a_post_makes_cannot_be_instantiated(name):
    with pytest.raises(TypeError, match="cannot create"):
        getattr(native, name)()


# ---- what is counted --------------------------------------------------------------


def test_receive_waits_for_a_message_that_takes_one(rc):
    """A write or a read does not."""
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=1))
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8]), rc.wr(rp.RdmaRead, rc.mine[:8])])
    rc.wait(2)
    nothing_comes(rc.cq)
    assert rc.b.outstanding == (0, 1)


def test_outstanding_counts_each_queue_down_as_it_is_polled(rc):
    """An unpolled completion is not known yet."""
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8], wr_id=10 + i) for i in range(5)])
    assert (rc.a.outstanding, rc.b.outstanding) == ((0, 0), (0, 5))
    rc.a.post_send([rp.Send(rc.mine[:8], wr_id=i) for i in range(3)])
    assert (rc.a.outstanding, rc.b.outstanding) == ((3, 0), (0, 5))
    counts = []
    for _ in range(6):
        rc.wait(1)
        counts.append(rc.a.outstanding.send + rc.b.outstanding.recv)
    assert counts == [7, 6, 5, 4, 3, 2]
    assert (rc.a.outstanding, rc.b.outstanding) == ((0, 0), (0, 2))


def test_outstanding_counts_what_was_posted_and_nothing_that_was_refused(rc):
    bad = rp.Send([rc.mine[:1]] * (rc.a.max_send_sge + 1))
    with pytest.raises(rp.PostError):
        rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:8], send_flags=0)] * 2 + [bad])
    assert rc.a.outstanding == (2, 0)


def test_receives_are_outstanding_until_they_complete(rc):
    rc.b.post_recv([rp.RecvWR(rc.theirs[:8], wr_id=i) for i in range(3)])
    assert rc.b.outstanding == (0, 3)
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    rc.wait(2)
    assert rc.b.outstanding == (0, 2)
    assert rc.a.outstanding == (0, 0)
