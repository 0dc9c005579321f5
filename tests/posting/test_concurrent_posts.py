"""Posts within a post, and of several threads: one queue, one post at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import Pair, posting_tap, watching, write
from support.watching import Counted

import rdmapost as rp

watched = watching.watched
tap = posting_tap.tap


def test_post_made_while_another_reads_its_list_is_posted_first(watched):
    """A number's __index__ may post to the same queue: it is read before anything is posted."""
    inner = watched.write(wr_id=1)
    outer = watched.write(
        wr_id=2, rkey=Counted(watched.mr.rkey, lambda: watched.qp.post_send(inner))
    )
    watched.qp.post_send([outer, watched.write(wr_id=3)])
    assert [wc.check().wr_id for wc in watched.cq.wait(3)] == [1, 2, 3]


def in_another_thread(call: Callable[[], Any]) -> None:
    """Call in another thread; fail if the call blocks on a lock that an earlier call has kept."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_queue_is_unlocked_for_other_threads_after_each_call(watched):
    qp, batch = watched.qp, watched.qp.prepare(watched.write(wr_id=1))
    with contextlib.suppress(rp.PostError):
        qp.post_send([watched.write(wr_id=0), watched.write(rkey=None)])
    in_another_thread(batch.post)
    in_another_thread(lambda: qp.post_send(watched.write(wr_id=2)))
    batch.post()
    batch[0].wr_id = 4
    batch[0].sg_list = watched.mr[8:16]
    with pytest.raises(ValueError, match="SGEs"):
        batch[0].sg_list = ()
    in_another_thread(batch.post)
    batch.close()
    with pytest.raises(rp.ClosedError):
        batch.post()
    in_another_thread(lambda: qp.post_send(watched.write(wr_id=5)))
    assert [wc.check().wr_id for wc in watched.cq.wait(6)] == [0, 1, 2, 1, 4, 5]


def test_post_waits_for_that_of_another_thread(watched):
    entered, leave = threading.Event(), threading.Event()

    class Slow(list[Any]):
        """Blocks in the device's call, so that the queue stays busy."""

        def append(self, item: Any) -> None:
            super().append(item)
            entered.set()
            leave.wait(20)

    said: list[BaseException] = []

    def post(wr_id: int) -> None:
        try:
            watched.srq.post_srq_recv(rp.RecvWR(wr_id=wr_id))
        except BaseException as error:
            said.append(error)

    watched.tap.chains = Slow()
    threads = [threading.Thread(target=post, args=(wr_id,), daemon=True) for wr_id in (1, 2)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    assert len(watched.tap.chains) == 1
    leave.set()
    for thread in threads:
        thread.join(20)
    assert said == []
    assert len(watched.tap.chains) == watched.srq.outstanding == 2


def test_device_that_calls_python_cannot_be_posted_to_from_there(watched):
    """It is refused, instead of waiting for its own thread's lock."""
    refused = []

    class Posting(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            if len(self) == 1:
                with pytest.raises(rp.RdmaError, match="in the middle of a post") as caught:
                    watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=2))
                refused.append(caught.value)

    watched.tap.chains = Posting()
    in_another_thread(lambda: watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=1)))
    assert (len(refused), watched.srq.outstanding) == (1, 1)
    in_another_thread(lambda: watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=3)))
    assert watched.srq.outstanding == 2


POLLS: dict[str, Callable[[rp.CQ], object]] = {
    "poll": lambda cq: cq.poll(),
    "poll_into": lambda cq: cq.poll_into(bytearray(48)),
    "wait": lambda cq: cq.wait(),
    "wait_into": lambda cq: cq.wait_into(bytearray(48)),
    "completions": lambda cq: asyncio.run(cq.completions()),
    "cancel_waits": lambda cq: cq.cancel_waits(),
    "claim": lambda cq: cq._poller.claim(print),
    "unclaim": lambda cq: cq._poller.unclaim(print, cq._poller.claims),
    "until": lambda cq: cq._poller.until(cq, -1, print, 0.0, True),
    "until notified": lambda cq: cq._poller.until(cq, -1, print, 0.0, False),
    "first_failed": lambda cq: cq._poller.first_failed(),
}
"""What takes a CQ's lock."""


def test_device_that_calls_python_cannot_be_polled_from_there(tap):
    """Each call is refused, instead of waiting for its own thread's lock; what was polled stays."""
    refused = []

    def poll(count: int, _: object) -> int:
        tap.on_poll(None)
        for name, call in POLLS.items():
            with pytest.raises(rp.RdmaError, match="this thread is in the middle of"):
                call(cq)
            refused.append(name)
        return count

    with rp.PD(tap.context) as pd, rp.CQ(tap.context) as cq, rp.QP(pd, rp.QPType.RC, cq) as qp:
        qp.connect(qp.endpoint())
        qp.post_send(rp.RdmaWrite(wr_id=7))
        assert cq._poller.claim(print)
        tap.on_poll(poll)
        found: list[rp.WC] = []
        in_another_thread(lambda: found.extend(cq.poll()))
        assert [wc.wr_id for wc in found] == [7]
        assert refused == [*POLLS]
        assert cq._poller.unclaim(print, cq._poller.claims)
        qp.post_send(rp.RdmaWrite(wr_id=8))
        assert [wc.wr_id for wc in cq.wait()] == [8]


def test_prepared_list_cannot_be_changed_or_closed_from_a_device_that_calls_python(watched):
    """The post in progress may not have read it yet."""
    mr, refused = watched.mr, []
    batch = watched.qp.prepare(watched.write(wr_id=1))
    calls = {
        "close": batch.close,
        "wr_id": lambda: setattr(batch[0], "wr_id", 2),
        "sg_list": lambda: setattr(batch[0], "sg_list", mr[8:16]),
    }

    class Changing(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            for name, call in calls.items():
                try:
                    call()
                except rp.RdmaError as error:
                    if "in the middle of a post" in str(error):
                        refused.append(name)

    watched.tap.chains = Changing()
    in_another_thread(batch.post)
    assert refused == list(calls)
    watched.tap.chains = []
    in_another_thread(batch.post)
    assert [wc.check().wr_id for wc in watched.cq.wait(2)] == [1, 1]
    assert watched.tap.last()[0].sges == [(mr.addr, 8, mr.lkey)]


def test_post_of_another_thread_waits_for_its_turn(watched):
    """The device gets one post to a queue at a time, in order."""
    inside, other, found = threading.Event(), threading.Event(), []

    class Waiting(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            if len(self) == 1:
                inside.set()
                found.append(other.wait(0.3))
            else:
                other.set()

    def post(wr_id: int) -> None:
        watched.srq.post_srq_recv(rp.RecvWR(watched.mr[:8], wr_id=wr_id))
        found.append(wr_id)

    watched.tap.chains = Waiting()
    threads = [threading.Thread(target=post, args=(wr_id,), daemon=True) for wr_id in (1, 2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert (found[0], sorted(found[1:]), watched.srq.outstanding) == (False, [1, 2], 2)


def test_threads_post_to_queue_pairs_that_share_a_cq(connect):
    """Each thread posts to its own queue pair; one CQ gets all completions."""
    rounds = 40
    pairs = [connect(max_send_wr=rounds) for _ in range(3)]
    errors: list[BaseException] = []

    def post(pair: Pair, number: int) -> None:
        try:
            for i in range(rounds):
                pair.a.post_send(write(pair, number * 1000 + i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=post, args=(p, n)) for n, p in enumerate(pairs)]
    for thread in threads:
        thread.start()
    got = [wc.check().wr_id for wc in pairs[0].cq.wait(rounds * len(pairs), 60)]
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert sorted(got) == sorted(n * 1000 + i for n in range(len(pairs)) for i in range(rounds))
    for number in range(len(pairs)):
        mine = [wr_id for wr_id in got if wr_id // 1000 == number]
        assert mine == sorted(mine)


def test_lists_of_several_threads_on_one_queue_pair_are_not_mixed(connect):
    """Lists of several threads go in one after another, none is mixed into another."""
    pair = connect(max_send_wr=256)
    lists = [[write(pair, n * 1000 + i) for i in range(10)] for n in range(12)]

    def post(part: list[list[rp.RdmaWrite]]) -> None:
        for wrs in part:
            pair.a.post_send(wrs)

    threads = [threading.Thread(target=post, args=(lists[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    got = [wc.check().wr_id for wc in pair.cq.wait(120, 60)]
    for thread in threads:
        thread.join(10)
    assert len(set(got)) == 120
    for start in range(0, 120, 10):
        assert got[start : start + 10] == list(range(got[start], got[start] + 10))
