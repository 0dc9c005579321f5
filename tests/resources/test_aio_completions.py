"""Completions in asyncio tasks: exact counts, several tasks, cancelling, wake-ups.

Channels, events and conflicts between waits are in test_aio_events.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import sys
import threading
import time
import warnings
import weakref

import pytest
from support import LIMIT
from support.tasks import cancelled, run, settle, waiting, write

import rdmapost as rp
from rdmapost import WCStatus

# ---- what a wait returns ------------------------------------------------------


def test_await_returns_exactly_as_many_completions_as_asked(rc):
    async def main():
        rc.a.post_send([write(rc, i) for i in range(10)])
        got = [wc.wr_id for wc in await rc.cq.completions(7, 10)]
        assert got == list(range(7))
        assert await rc.cq.completions(0) == []
        assert [wc.wr_id for wc in await rc.cq.completions(3, 10)] == [7, 8, 9]

    run(main)


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_hundreds_of_tasks_each_wait_on_their_own_cq(device):
    """Linux limits how many epolls may refer to the device's timer."""

    async def main(context, pd):
        with contextlib.ExitStack() as stack:
            cqs = [stack.enter_context(rp.CQ(context, 4)) for _ in range(250)]
            qps = [stack.enter_context(rp.QP(pd, rp.QPType.RC, cq)) for cq in cqs]
            waits = [asyncio.ensure_future(cq.completions(1, LIMIT)) for cq in cqs]
            await settle()
            for qp in qps:
                qp.connect(qp.endpoint())
                qp.to_err()
                qp.post_recv(rp.RecvWR(wr_id=7))
            for (wc,) in await asyncio.gather(*waits):
                assert (wc.wr_id, wc.status) == (7, WCStatus.WR_FLUSH_ERR)

    with rp.open_device(device) as context, rp.PD(context) as pd:
        run(lambda: main(context, pd))


def test_task_sleeps_until_enough_completions_have_come(rc):
    """Each of the eight comes on its own, while the task sleeps."""

    async def main():
        task = await waiting(rc.cq, 8)
        for i in range(8):
            assert not task.done()
            rc.a.post_send(write(rc, i))
            await settle()
        assert [wc.wr_id for wc in await task] == list(range(8))

    run(main)


def test_async_for_yields_completions_one_at_a_time(rc):
    async def main():
        got = []

        async def take():
            async for wc in rc.cq:
                got.append(wc.check().wr_id)
                if len(got) == 20:
                    return

        task = asyncio.create_task(take())
        for start in range(0, 20, 5):
            rc.a.post_send([write(rc, start + i) for i in range(5)])
            await settle()
        await task
        assert got == list(range(20))

    run(main)


def test_timed_out_await_says_which_completions_came_and_leaves_them(rc):
    async def main():
        rc.a.post_send([write(rc, i) for i in range(3)])
        await rc.cq.completions(1)
        start = time.monotonic()
        with pytest.raises(rp.WaitTimeout, match=r"2 of 3 completions came within 0\.3 s"):
            await rc.cq.completions(3, timeout=0.3)
        assert time.monotonic() - start >= 0.3
        with pytest.raises(TimeoutError):
            await rc.cq.completions(3, timeout=0)
        assert [wc.wr_id for wc in await rc.cq.completions(2)] == [1, 2]

    run(main)


def test_completions_that_a_timeout_cuts_off_are_there_for_every_other_call(rc):
    async def main():
        for take in (lambda: rc.cq.poll(), lambda: rc.cq.wait(1)):
            rc.a.post_send(write(rc, 7))
            with pytest.raises(rp.WaitTimeout):
                await rc.cq.completions(2, timeout=0.3)
            assert [wc.wr_id for wc in take()] == [7]

    run(main)


def test_the_event_loop_runs_on_while_a_task_waits(rc):
    async def main():
        task = await waiting(rc.cq)
        start, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(0.5)
        assert time.monotonic() - start < 5
        # It sleeps on the descriptor instead of polling it.
        assert time.process_time() - cpu < 0.25
        rc.a.post_send(write(rc, 1))
        assert [wc.wr_id for wc in await task] == [1]

    run(main)


# ---- several tasks ------------------------------------------------------------


def test_small_waits_are_not_blocked_by_larger_ones(rc):
    async def main():
        many, few = await waiting(rc.cq, 20), await waiting(rc.cq, 1)
        rc.a.post_send(write(rc, 0))
        assert [wc.wr_id for wc in await few] == [0]
        rc.a.post_send([write(rc, i) for i in range(1, 21)])
        assert [wc.wr_id for wc in await many] == list(range(1, 21))

    run(main)


def test_tasks_awaiting_equal_numbers_of_completions_get_them_in_order(rc):
    async def main():
        tasks = [await waiting(rc.cq, 2) for _ in range(5)]
        rc.a.post_send([write(rc, i) for i in range(10)])
        got = [[wc.wr_id for wc in await task] for task in tasks]
        assert got == [[i, i + 1] for i in range(0, 10, 2)]

    run(main)


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_operations_of_several_tasks_are_all_accounted_for(connect, seed):
    """Tasks post as long as there is room, others take them a few at a time."""
    total, pairs = 10_000, [connect() for _ in range(3)]
    cq, rng = pairs[0].cq, random.Random(seed)
    room = cq.cqe // 4

    async def main():
        numbers, got, took = iter(range(total)), [], asyncio.Event()

        async def post(pair):
            while burst := [n for _, n in zip(range(rng.randint(1, 16)), numbers, strict=False)]:
                while pair.a.outstanding.send + len(burst) > min(room, pair.a.max_send_wr):
                    took.clear()
                    await took.wait()
                pair.a.post_send([write(pair, number) for number in burst])
                await asyncio.sleep(0)

        async def take():
            while len(got) < total:
                # The last ones may be fewer than one task would like.
                got.extend(wc.check().wr_id for wc in await cq.completions(rng.randint(1, 4), 30))
                took.set()

        takers = [asyncio.create_task(take()) for _ in range(4)]
        await asyncio.gather(*(post(pair) for pair in pairs))
        # Nothing signals that the last were polled: no task may want so few.
        while any(pair.a.outstanding.send for pair in pairs):
            await asyncio.sleep(0.001)
        for task in takers:
            task.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
        got.extend(wc.check().wr_id for wc in cq.poll(64))
        assert sorted(got) == list(range(total))

    run(main)


# ---- cancelling ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_an_await_at_any_point_loses_no_completion(rc, seed):
    """Takers are cancelled, time out and give up at random; others take their place."""
    rng, rounds = random.Random(seed), 400

    async def main():
        got: list[int] = []
        posted = 0

        async def take(count, timeout):
            got.extend(wc.wr_id for wc in await rc.cq.completions(count, timeout))

        tasks: list[asyncio.Task[None]] = []
        for _ in range(rounds):
            for _ in range(rng.randint(0, 3)):
                timeout = rng.choice([None, None, 0, 0.0001, 0.002])
                tasks.append(asyncio.create_task(take(rng.randint(1, 5), timeout)))
            burst = rng.randint(0, 6)
            if burst and rc.a.outstanding.send + burst <= rc.a.max_send_wr:
                rc.a.post_send([write(rc, posted + i) for i in range(burst)])
                posted += burst
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, min(len(tasks), rng.randint(0, 2))):
                task.cancel()
            if rng.random() < 0.1:
                got.extend(wc.wr_id for wc in rc.cq.poll(rng.randint(1, 3)))
            tasks = [task for task in tasks if not task.done() or failed(task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        got.extend(wc.wr_id for wc in await rc.cq.completions(posted - len(got), 20))
        assert sorted(got) == list(range(posted))
        assert posted > rounds

    def failed(task):
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, rp.WaitTimeout)
        return False

    run(main)


def test_a_task_cancelled_when_it_has_been_woken_leaves_its_completions_to_the_next(rc):
    async def main():
        first, second = await waiting(rc.cq), await waiting(rc.cq)
        rc.a.post_send(write(rc, 5))
        # The first is cancelled in the very pass of the event loop that wakes it, or around it.
        while rc.a.outstanding.send:
            await asyncio.sleep(0)
        await cancelled(first)
        assert [wc.wr_id for wc in await second] == [5]

    run(main)


def test_polling_what_a_task_was_woken_for_lets_it_wait_on(rc):
    async def main():
        task = await waiting(rc.cq)
        rc.a.post_send(write(rc, 1))
        taken: list[rp.WC] = []
        while not taken:
            taken = rc.cq.poll()
        await settle()
        assert not task.done()
        rc.a.post_send(write(rc, 2))
        assert [wc.wr_id for wc in taken + await task] == [1, 2]

    run(main)


def test_waits_of_tasks_leave_no_descriptor_open(rc):
    """Neither descriptors nor anything that prevents closing the CQ."""
    before = len(os.listdir("/proc/self/fd"))

    async def main():
        for i in range(50):
            task = await waiting(rc.cq)
            if i % 2:
                rc.a.post_send(write(rc))
                await task
            else:
                await cancelled(task)

    run(main)
    assert len(os.listdir("/proc/self/fd")) == before
    rc.a.close()
    rc.b.close()
    rc.cq.close()


def test_cq_dropped_after_waits_is_closed_at_once_although_the_loop_runs_on(context):
    """The loop still watches its descriptor then, but does not keep it."""

    async def main():
        before = len(os.listdir("/proc/self/fd"))
        cq = rp.CQ(context, 16)
        for _ in range(2):
            with pytest.raises(rp.WaitTimeout):
                await cq.completions(1, timeout=0.01)
        place = weakref.ref(cq)
        del cq
        assert place() is None
        assert len(os.listdir("/proc/self/fd")) == before

    run(main)


def test_loops_that_end_while_they_watch_a_cq_leave_nothing_open(context):
    """Neither a descriptor nor a warning, whether the loop or the CQ is closed first."""
    before = len(os.listdir("/proc/self/fd"))

    async def main():
        for _ in range(2):
            with pytest.raises(rp.WaitTimeout):
                await cq.completions(1, timeout=0.001)

    async def close():
        await main()
        watched = len(os.listdir("/proc/self/fd"))
        cq.close()
        # The CQ's channel has one, and the loop's watch of it another.
        assert len(os.listdir("/proc/self/fd")) <= watched - 2
        await settle()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cq = rp.CQ(context, 16)
        for _ in range(3):
            run(main)
        run(close)
        gc.collect()
    assert not [str(warning.message) for warning in caught]
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptor_reused_by_another_cq_is_watched_again(rc, context):
    async def main():
        for i in range(20):
            with rp.CQ(context, 16) as other, pytest.raises(rp.WaitTimeout):
                await other.completions(1, timeout=0.001)
            task = await waiting(rc.cq)
            rc.a.post_send(write(rc, i))
            assert [wc.wr_id for wc in await task] == [i]

    run(main)


def test_event_that_no_task_waits_for_wakes_the_loop_once(rc):
    """Otherwise it would find the descriptor readable again and again."""

    async def main():
        turns = 0
        loop = asyncio.get_running_loop()
        await cancelled(await waiting(rc.cq))
        rc.a.post_send(write(rc))
        woken = asyncio.Event()
        loop.call_later(0.2, woken.set)
        real = loop._run_once

        def counted():
            nonlocal turns
            turns += 1
            real()

        loop._run_once = counted
        await woken.wait()
        del loop._run_once
        assert turns < 20
        assert len(rc.cq.poll()) == 1
        task = await waiting(rc.cq)
        rc.a.post_send(write(rc, 7))
        assert [wc.wr_id for wc in await task] == [7]

    run(main)


def test_event_loops_of_two_threads_take_turns(rc):
    """While one's task waits, another is refused; no completion is missed."""
    refused = []

    def take(number):
        async def main():
            for _ in range(200):
                try:
                    await rc.cq.completions(1, timeout=LIMIT)
                except rp.RdmaError as error:
                    refused.append(str(error))
                    await asyncio.sleep(0)

        run(main)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        posted = 0
        while any(thread.is_alive() for thread in threads):
            if rc.a.outstanding.send < 8:
                rc.a.post_send(write(rc, posted))
                posted += 1
            time.sleep(0.0001)
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert set(refused) <= {"tasks of another event loop are already waiting for the same events"}
    assert posted - len(rc.cq.poll(64)) == 400 - len(refused)


# ---- timeouts -----------------------------------------------------------------


def test_each_of_several_awaits_times_out_at_its_own_time(rc):
    async def main():
        ended = []

        async def ends_after(timeout):
            start = time.monotonic()
            with pytest.raises(rp.WaitTimeout):
                await rc.cq.completions(1, timeout)
            assert timeout - 0.001 <= time.monotonic() - start < timeout + 5
            ended.append(timeout)

        await asyncio.gather(*map(ends_after, [0.6, 0.2, 1.2, 0.2, 0.4]))
        assert ended == [0.2, 0.2, 0.4, 0.6, 1.2]
        # Shorter than one that has ended, and longer.
        await ends_after(0.05)
        await ends_after(0.15)

    run(main)


def test_timers_of_waits_that_have_ended_do_not_pile_up(rc):
    async def main():
        timers = weakref.WeakSet()
        loop = asyncio.get_running_loop()
        real = loop.call_at

        def call_at(*args, **kwargs):
            timer = real(*args, **kwargs)
            timers.add(timer)
            return timer

        loop.call_at = call_at
        for i in range(100):
            task = asyncio.create_task(rc.cq.completions(1, timeout=3600))
            await settle()
            rc.a.post_send(write(rc, i))
            await task
        del loop.call_at
        assert len(timers) == 1

    run(main)


# ---- wake-ups -----------------------------------------------------------------


def test_no_wake_up_of_a_task_that_awaits_completions_is_lost(rc):
    """A thread posts one at a time, at moments all over the wait; each needs its own wake-up."""
    rounds, rng = 1500, random.Random(1)
    go = threading.Semaphore(0)

    def post():
        for i in range(rounds):
            go.acquire()
            # From before the wait begins until after it sleeps.
            end = time.perf_counter() + rng.random() * 0.0004
            while time.perf_counter() < end:
                pass
            rc.a.post_send(write(rc, i))

    poster = threading.Thread(target=post)
    poster.start()

    async def main():
        for i in range(rounds):
            go.release()
            assert (await rc.cq.completions(1, 30))[0].wr_id == i

    run(main)
    poster.join(10)


def test_retry_on_soft0_is_made_while_a_task_awaits_completions(connect):
    """The receiver is not ready; nothing polls, yet the attempts are made."""
    pair = connect(rnr_retry=3)

    async def main():
        pair.a.post_send(pair.send(pair.mine[:8], wr_id=1))
        (wc,) = await pair.cq.completions(1, 30)
        assert (wc.wr_id, wc.status) == (1, WCStatus.RNR_RETRY_EXC_ERR)

    run(main)


def test_receive_posted_while_a_task_awaits_completions_is_used(connect):
    pair = connect(rnr_retry=7)

    async def main():
        pair.a.post_send(pair.send(pair.mine[:8], wr_id=1))
        task = await waiting(pair.cq, 2)
        await asyncio.sleep(0.05)
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=2))
        assert sorted(wc.check().wr_id for wc in await task) == [1, 2]

    run(main)


def test_close_while_a_task_begins_to_wait_is_a_closed_error(context: rp.Context) -> None:
    """Also between the task's check of the descriptor and the event loop's."""

    async def consume(cq: rp.CQ) -> None:
        while True:
            with contextlib.suppress(rp.WaitTimeout):
                await cq.completions(1, timeout=0)

    ended: list[str] = []
    for number in range(300):
        cq = rp.CQ(context, 8)
        closer = threading.Timer(0.0005 + number % 7 * 0.0003, cq.close)
        closer.start()
        with pytest.raises(rp.ClosedError) as caught:
            asyncio.run(consume(cq))
        ended.append(type(caught.value).__name__)
        closer.join()
    assert ended == ["ClosedError"] * 300
