"""Completions and events in asyncio tasks: exact counts, cancelling, wake-ups, who may wait."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support import ALL, Pair, needs

import rdmapost as rp
from rdmapost import EventType, QPType, WCStatus, aio

LIMIT = 120
"""Seconds that any of these may take; a lost wake-up shows as this."""


def write(pair: Pair, wr_id: int = 0) -> rp.RdmaWrite:
    return pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=wr_id)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function in an event loop of its own, not longer than LIMIT."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT):
            return await main()

    return asyncio.run(limited())


async def settle() -> None:
    """Let every task that can run go on until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting(cq: rp.CQ, count: int = 1) -> asyncio.Task[list[rp.WC]]:
    """Start a task that waits for completions, and return it when it does."""
    task = asyncio.create_task(cq.completions(count))
    await settle()
    assert not task.done()
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ---- what a wait returns ------------------------------------------------------


def test_returns_exactly_as_many_as_asked(rc):
    async def main():
        rc.a.post_send([write(rc, i) for i in range(10)])
        got = [wc.wr_id for wc in await rc.cq.completions(7, 10)]
        assert got == list(range(7))
        assert await rc.cq.completions(0) == []
        assert [wc.wr_id for wc in await rc.cq.completions(3, 10)] == [7, 8, 9]

    run(main)


def test_sleeps_until_enough_have_come(rc):
    """Each of the eight comes on its own, while the task sleeps."""

    async def main():
        task = await waiting(rc.cq, 8)
        for i in range(8):
            assert not task.done()
            rc.a.post_send(write(rc, i))
            await settle()
        assert [wc.wr_id for wc in await task] == list(range(8))

    run(main)


def test_async_for_gives_one_after_another(rc):
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


def test_timeout_says_what_came_and_leaves_it(rc):
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
        # It sleeps on the descriptor, and does not look at it over and over.
        assert time.process_time() - cpu < 0.25
        rc.a.post_send(write(rc, 1))
        assert [wc.wr_id for wc in await task] == [1]

    run(main)


# ---- several tasks ------------------------------------------------------------


def test_one_who_wants_few_does_not_wait_for_one_who_wants_many(rc):
    async def main():
        many, few = await waiting(rc.cq, 20), await waiting(rc.cq, 1)
        rc.a.post_send(write(rc, 0))
        assert [wc.wr_id for wc in await few] == [0]
        rc.a.post_send([write(rc, i) for i in range(1, 21)])
        assert [wc.wr_id for wc in await many] == list(range(1, 21))

    run(main)


def test_tasks_that_want_as_many_get_them_in_the_order_in_which_they_asked(rc):
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
        while len(got) + len(cq._backlog) < total or any(p.a.outstanding.send for p in pairs):
            await asyncio.sleep(0.001)
        for task in takers:
            task.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
        got.extend(wc.check().wr_id for wc in cq.poll(64))
        assert sorted(got) == list(range(total))

    run(main)


# ---- cancelling ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_at_any_point_loses_nothing(rc, seed):
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
        while not rc.cq._backlog:
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


def test_nothing_is_left_behind_by_waits(rc):
    """Neither descriptors nor anything that keeps the CQ from being closed."""
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


# ---- wake-ups -----------------------------------------------------------------


def test_no_wake_up_is_lost(rc):
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


def test_what_soft0_tries_again_later_goes_on_while_a_task_waits(connect):
    """The receiver is not ready; nobody polls, and the attempts are made all the same."""
    pair = connect(rnr_retry=3)

    async def main():
        pair.a.post_send(pair.send(pair.mine[:8], wr_id=1))
        (wc,) = await pair.cq.completions(1, 30)
        assert (wc.wr_id, wc.status) == (1, WCStatus.RNR_RETRY_EXC_ERR)

    run(main)


def test_a_receive_that_is_posted_late_is_used(connect):
    pair = connect(rnr_retry=7)

    async def main():
        pair.a.post_send(pair.send(pair.mine[:8], wr_id=1))
        task = await waiting(pair.cq, 2)
        await asyncio.sleep(0.05)
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=2))
        assert sorted(wc.check().wr_id for wc in await task) == [1, 2]

    run(main)


# ---- channels that CQs share --------------------------------------------------


@pytest.fixture
def channel(context, stack):
    return stack.enter_context(rp.CompChannel(context))


def sharing(context, stack, pd, channel, count):
    """Make queue pairs that are connected to themselves, each with a CQ on the channel."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    made = []
    for _ in range(count):
        cq = stack.enter_context(rp.CQ(context, 64, channel=channel))
        qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
        qp.connect(qp.endpoint())

        def post(wr_id, qp=qp):
            qp.post_send(rp.RdmaWrite(mr[:8], wr_id=wr_id, remote_addr=mr.addr + 32, rkey=mr.rkey))

        made.append((cq, post))
    return made


def test_tasks_wait_for_cqs_that_share_a_channel(context, pd, stack, channel):
    made, rounds = sharing(context, stack, pd, channel, 4), 200

    async def main():
        async def use(cq, post, number):
            for i in range(rounds):
                post(number * 1000 + i)
                (wc,) = await cq.completions(1, 30)
                assert wc.check().wr_id == number * 1000 + i

        await asyncio.gather(*(use(*pair, number) for number, pair in enumerate(made)))

    run(main)


def test_events_of_the_other_cqs_of_a_channel_are_kept_for_those_who_ask(
    context, pd, stack, channel
):
    (mine, post_mine), (other, post_other) = sharing(context, stack, pd, channel, 2)

    async def main():
        other.req_notify()
        task = await waiting(mine)
        post_other(1)
        assert await aio.get_cq_event(channel, 20) is other
        assert [wc.wr_id for wc in other.poll()] == [1]
        assert await aio.get_cq_event(channel, 0.05) is None
        assert not task.done()
        other.req_notify()
        post_other(2)
        await asyncio.sleep(0.05)
        post_mine(3)
        assert [wc.wr_id for wc in await task] == [3]

    run(main)
    # The loop took it, and nobody asked.
    assert channel.get_cq_event(20) is other


def test_tasks_ask_for_the_events_of_a_channel(context, pd, stack, channel):
    made, rounds = sharing(context, stack, pd, channel, 3), 50

    async def main():
        got = []
        for cq, _ in made:
            cq.req_notify()
        for i in range(rounds):
            for _, post in made:
                post(i)
            left = {cq for cq, _ in made}
            while left:
                cq = await aio.get_cq_event(channel, 20)
                cq.req_notify()
                if wcs := cq.poll():
                    got += wcs
                    left.discard(cq)
        assert len(got) == 3 * rounds

    run(main)


# ---- who may wait -------------------------------------------------------------


def test_closing_under_a_waiting_task_is_refused(context, channel):
    cqs = rp.CQ(context), rp.CQ(context, channel=channel)

    async def main():
        tasks = [await waiting(cq) for cq in cqs]
        for cq in cqs:
            with pytest.raises(rp.InUseError, match="a thread or task waits for its completions"):
                cq.close()
        for task in tasks:
            await cancelled(task)
        event = asyncio.create_task(aio.get_cq_event(channel))
        await settle()
        cqs[1].close()
        with pytest.raises(rp.InUseError, match="a thread or task waits for its events"):
            channel.close()
        await cancelled(event)
        channel.close()
        cqs[0].close()
        with pytest.raises(rp.ClosedError, match="is closed"):
            await cqs[0].completions()
        with pytest.raises(rp.ClosedError, match="is closed"):
            async for _ in cqs[0]:
                pass
        with pytest.raises(rp.ClosedError, match="is closed"):
            await aio.get_cq_event(channel)

    run(main)


def test_a_thread_may_wait_beside_tasks_that_wait_already(rc):
    async def main():
        task, got = await waiting(rc.cq, 3), []
        thread = threading.Thread(target=lambda: got.extend(rc.cq.wait(2, 30)))
        thread.start()
        for i in range(5):
            rc.a.post_send(write(rc, i))
            await asyncio.sleep(0.005)
        mine = await task
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert sorted(wc.wr_id for wc in mine + got) == list(range(5))

    run(main)


def test_a_thread_that_waits_beside_tasks_waits_on_when_they_have_gone(rc):
    async def main():
        task, got = await waiting(rc.cq), []
        thread = threading.Thread(target=lambda: got.extend(rc.cq.wait(1, 30)))
        thread.start()
        while rc.cq._waiting < 2:
            await asyncio.sleep(0.001)
        await cancelled(task)
        rc.a.post_send(write(rc, 4))
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert [wc.wr_id for wc in got] == [4]

    run(main)


def test_a_task_does_not_wait_where_a_thread_takes_the_events(rc):
    """Its wake-ups would go to the thread: it is told, and not left asleep."""
    thread = threading.Thread(target=lambda: rc.cq.wait(1, 30))
    thread.start()
    while not rc.cq._sleeping:
        time.sleep(0.001)

    async def main():
        with pytest.raises(rp.RdmaError, match="a thread sleeps in wait"):
            await rc.cq.completions()
        rc.a.post_send(write(rc))
        while thread.is_alive():
            await asyncio.sleep(0.001)
        task = await waiting(rc.cq)
        rc.a.post_send(write(rc, 2))
        assert [wc.wr_id for wc in await task] == [2]

    run(main)


def test_threads_and_tasks_do_not_share_the_events_of_a_channel(context, pd, stack, channel):
    ((cq, post),) = sharing(context, stack, pd, channel, 1)

    async def main():
        task = await waiting(cq)
        with pytest.raises(rp.RdmaError, match="tasks wait for the events"):
            channel.get_cq_event(0)
        post(1)
        await task
        cq.req_notify()
        found = []
        thread = threading.Thread(target=lambda: found.append(channel.get_cq_event(30)))
        thread.start()
        while not channel._threads:
            await asyncio.sleep(0.001)
        with pytest.raises(rp.RdmaError, match="a thread waits in get_cq_event"):
            await cq.completions()
        post(2)
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert found == [cq]
        assert [wc.wr_id for wc in await cq.completions()] == [2]

    run(main)


def test_two_event_loops_do_not_wait_for_one_cq(rc):
    async def main():
        task = await waiting(rc.cq)
        errors = []

        def other():
            try:
                asyncio.run(rc.cq.completions(1, 5))
            except rp.RdmaError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert errors == ["tasks of another event loop wait for the same events"]
        rc.a.post_send(write(rc, 1))
        assert [wc.wr_id for wc in await task] == [1]

    run(main)
    # One after another is fine.
    rc.a.post_send(write(rc, 2))
    assert [wc.wr_id for wc in run(rc.cq.completions)] == [2]


# ---- asynchronous events ------------------------------------------------------


def test_tasks_wait_for_asynchronous_events(context, pd, connect):
    needs(context.attr.max_srq, "shared receive queues", context)
    while rp.get_async_event(context) is not None:
        pass
    with rp.SRQ(pd, 16) as srq:
        pair = connect(b_options={"srq": srq})

        async def main():
            assert await aio.get_async_event(context, 0.05) is None
            task = asyncio.create_task(aio.get_async_event(context))
            await settle()
            assert not task.done()
            srq.post_srq_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(4)])
            srq.arm_limit(4)
            pair.a.post_send(pair.send(pair.mine[:8]))
            event = await task
            assert event.event_type is EventType.SRQ_LIMIT_REACHED
            assert event.element is srq

        run(main)
        pair.a.close()
        pair.b.close()


def test_a_device_stays_open_while_a_task_waits_for_its_events(context):
    async def main():
        other = rp.open_device(context.name)
        task = asyncio.create_task(aio.get_async_event(other))
        await settle()
        with pytest.raises(rp.InUseError, match="task that waits for events"):
            other.close()
        await cancelled(task)
        other.close()

    run(main)
