"""Events in asyncio tasks: of shared channels, and asynchronous ones; and conflicting waits."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
from support import needs, until
from support.tasks import LIMIT, abandoned, cancelled, run, settle, sharing, waiting, write

import rdmapost as rp
from rdmapost import EventType

# ---- channels that CQs share --------------------------------------------------


@pytest.fixture
def channel(context, stack):
    return stack.enter_context(rp.CompChannel(context))


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


def test_events_of_other_cqs_on_a_channel_are_kept_for_get_cq_event(context, pd, stack, channel):
    (mine, post_mine), (other, post_other) = sharing(context, stack, pd, channel, 2)

    async def main():
        other.req_notify()
        task = await waiting(mine)
        post_other(1)
        assert await channel.cq_event(20) is other
        assert [wc.wr_id for wc in other.poll()] == [1]
        assert await channel.cq_event(0.05) is None
        assert not task.done()
        other.req_notify()
        post_other(2)
        while not channel._events:
            await asyncio.sleep(0)
        post_mine(3)
        assert [wc.wr_id for wc in await task] == [3]

    run(main)
    # The loop took it, but no task asked for it.
    assert channel.get_cq_event(20) is other


def test_thread_that_looks_for_events_at_any_moment_leaves_them_to_the_tasks(
    context, pd, stack, channel
):
    """It must not end the tasks' watch, although each wait is another when it looks again."""
    made = sharing(context, stack, pd, channel, 2)
    tasks_thread = threading.current_thread()

    class Slow(asyncio.SelectorEventLoop):
        def is_closed(self) -> bool:
            # The other thread is slow where it decides whether tasks wait.
            if threading.current_thread() is not tasks_thread:
                time.sleep(0.02)
            return super().is_closed()

    looked: list[Any] = []

    def look() -> None:
        for _ in range(3):
            try:
                looked.append(channel.get_cq_event(0))
            except rp.RdmaError as error:
                looked.append(str(error))

    async def main() -> None:
        done = [0, 0]

        async def take(number: int) -> None:
            async for _ in made[number][0]:
                done[number] += 1

        async with asyncio.timeout(LIMIT):
            tasks = [asyncio.create_task(take(number)) for number in range(2)]
            await settle()
            thread = threading.Thread(target=look)
            thread.start()
            posted = 0
            while thread.is_alive():
                for _, post in made:
                    post(posted)
                posted += 1
                await asyncio.sleep(0.003)
            while done != [posted, posted]:
                await asyncio.sleep(0.001)
            for task in tasks:
                await cancelled(task)

    with contextlib.closing(Slow()) as loop:
        loop.run_until_complete(main())
    refusal = "tasks wait for the events of this completion channel: await its cq_event() there"
    assert looked == [refusal] * 3


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
                cq = await channel.cq_event(20)
                cq.req_notify()
                if wcs := cq.poll():
                    got += wcs
                    left.discard(cq)
        assert len(got) == 3 * rounds

    run(main)


# ---- who may wait -------------------------------------------------------------


def test_closing_a_channel_ends_the_tasks_that_wait_for_its_events(context, channel):
    cqs = rp.CQ(context), rp.CQ(context, channel=channel)

    async def main():
        tasks = [await waiting(cq, count) for cq in cqs for count in (1, 3)]
        for cq in cqs:
            cq.close()
        for task in tasks:
            with pytest.raises(rp.ClosedError, match="is closed"):
                await task
        events = [asyncio.create_task(channel.cq_event(None)) for _ in range(2)]
        await settle()
        channel.close()
        for event in events:
            with pytest.raises(rp.ClosedError, match="is closed"):
                await event
        with pytest.raises(rp.ClosedError, match="is closed"):
            await cqs[0].completions()
        with pytest.raises(rp.ClosedError, match="is closed"):
            async for _ in cqs[0]:
                pass
        with pytest.raises(rp.ClosedError, match="is closed"):
            await channel.cq_event(None)

    run(main)


def test_closing_a_channel_in_another_thread_ends_the_tasks_that_wait(context):
    async def main():
        for _ in range(20):
            cq, channel = rp.CQ(context), rp.CompChannel(context)
            task, event = await waiting(cq, 2), asyncio.create_task(channel.cq_event(None))
            await settle()
            # The loop continues, even if the descriptor's number is reused at once.
            await asyncio.to_thread(cq.close)
            await asyncio.to_thread(channel.close)
            again = await waiting(second := rp.CQ(context))
            for waits in (task, event):
                with pytest.raises(rp.ClosedError, match="is closed"):
                    await waits
            await cancelled(again)
            second.close()

    run(main)


def test_a_thread_may_wait_beside_tasks_that_wait_already(rc):
    async def main():
        task, got = await waiting(rc.cq, 3), []
        thread = threading.Thread(target=lambda: got.extend(rc.cq.wait(2, 30)))
        thread.start()
        for i in range(5):
            rc.a.post_send(write(rc, i))
            await asyncio.sleep(0.005)  # so that both wait when the next one comes
        mine = await task
        await asyncio.to_thread(thread.join, LIMIT)
        assert sorted(wc.wr_id for wc in mine + got) == list(range(5))

    run(main)


def test_a_thread_that_waits_beside_tasks_waits_on_when_they_have_gone(rc):
    async def main():
        task, got = await waiting(rc.cq), []
        thread = threading.Thread(target=lambda: got.extend(rc.cq.wait(1, 30)))
        thread.start()
        await asyncio.to_thread(until, lambda: rc.cq._poller.waiting)
        await cancelled(task)
        rc.a.post_send(write(rc, 4))
        await asyncio.to_thread(thread.join, LIMIT)
        assert [wc.wr_id for wc in got] == [4]

    run(main)


def test_a_task_does_not_wait_where_a_thread_takes_the_events(rc):
    """Its wake-ups would go to the thread: it gets an error, and is not left asleep."""
    thread = threading.Thread(target=lambda: rc.cq.wait(1, 30))
    thread.start()
    until(lambda: rc.cq._poller.waiting)

    async def main():
        with pytest.raises(rp.RdmaError, match="a thread sleeps in wait"):
            await rc.cq.completions()
        rc.a.post_send(write(rc))
        await asyncio.to_thread(thread.join, LIMIT)
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
        await asyncio.to_thread(until, lambda: channel._poller.waiting)
        with pytest.raises(rp.RdmaError, match="a thread waits in get_cq_event"):
            await cq.completions()
        post(2)
        await asyncio.to_thread(thread.join, LIMIT)
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
        await asyncio.to_thread(thread.join, LIMIT)
        assert errors == ["tasks of another event loop are already waiting for the same events"]
        rc.a.post_send(write(rc, 1))
        assert [wc.wr_id for wc in await task] == [1]

    run(main)
    # One after another is fine.
    rc.a.post_send(write(rc, 2))
    assert [wc.wr_id for wc in run(rc.cq.completions)] == [2]


def test_a_loop_closed_around_a_waiting_task_leaves_its_place_to_others(
    rc, context, stack, channel
):
    # The tests' own device may have events of earlier tests.
    device = stack.enter_context(rp.open_device(context.name))
    waits = (rc.cq.completions, lambda: channel.cq_event(None), lambda: device.async_event(None))
    tasks = [abandoned(wait) for wait in waits]

    async def main():
        for wait in waits[1:]:
            event = asyncio.create_task(wait())
            await settle()
            assert not event.done()
            await cancelled(event)
        task = await waiting(rc.cq)
        tasks.clear()
        rc.a.post_send(write(rc, 1))
        assert [wc.wr_id for wc in await task] == [1]

    run(main)


def test_a_loop_closed_around_a_waiting_task_does_not_keep_threads_waiting(rc):
    task = abandoned(lambda: rc.cq.completions(5))
    got = []
    thread = threading.Thread(target=lambda: got.extend(rc.cq.wait(1, LIMIT)))
    thread.start()
    until(lambda: rc.cq._poller.waiting)
    rc.a.post_send(write(rc, 1))
    thread.join(LIMIT)
    assert [wc.wr_id for wc in got] == [1]
    del task


# ---- asynchronous events ------------------------------------------------------


def test_tasks_wait_for_asynchronous_events(context, pd, connect):
    needs(context.attr.max_srq, "shared receive queues", context)
    while context.get_async_event(0) is not None:
        pass
    with rp.SRQ(pd, 16) as srq:
        pair = connect(b_options={"srq": srq})

        async def main():
            assert await context.async_event(0.05) is None
            task = asyncio.create_task(context.async_event(None))
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


def test_closing_a_device_ends_the_tasks_that_wait_for_its_events(context):
    async def main():
        for close in (lambda other: other.close(), lambda other: asyncio.to_thread(other.close)):
            other = rp.open_device(context.name)
            tasks = [asyncio.create_task(other.async_event(None)) for _ in range(2)]
            await settle()
            if (closing := close(other)) is not None:
                await closing
            for task in tasks:
                with pytest.raises(rp.ClosedError, match="is closed"):
                    await task

    run(main)


def test_threads_and_tasks_do_not_share_the_events_of_a_device(context):
    with rp.open_device(context.name) as other:

        async def main():
            task = asyncio.create_task(other.async_event(None))
            await settle()
            with pytest.raises(rp.RdmaError, match="tasks wait for the events"):
                other.get_async_event(0)
            await cancelled(task)
            thread = threading.Thread(target=lambda: other.get_async_event(0.2))
            thread.start()
            await asyncio.to_thread(until, lambda: other._poller.waiting)
            with pytest.raises(rp.RdmaError, match="a thread waits in get_async_event"):
                await other.async_event(None)
            await asyncio.to_thread(thread.join, LIMIT)
            assert await other.async_event(0.001) is None

        run(main)


# ---- arguments ----------------------------------------------------------------


def test_await_with_a_wrong_argument_leaves_no_waiter(rc, context, channel):
    """It is refused by name, and the next task gets what arrives."""
    calls = {
        "timeout: expected seconds or None, got timedelta": (
            TypeError,
            {"timeout": datetime.timedelta(seconds=1)},
        ),
        "timeout: expected seconds or None, got str": (TypeError, {"timeout": "1"}),
        "timeout: expected seconds or None, got NaN": (ValueError, {"timeout": float("nan")}),
    }

    async def main():
        for words, (error, options) in calls.items():
            for wait in (
                rc.cq.completions,
                lambda **options: channel.cq_event(**options),
                lambda **options: context.async_event(**options),
            ):
                with pytest.raises(error, match=words):
                    await wait(**options)
        for count in ("1", 1.0, None):
            with pytest.raises(TypeError, match="count: expected int"):
                await rc.cq.completions(count)
        task = await waiting(rc.cq)
        rc.a.post_send(write(rc, 1))
        assert [wc.wr_id for wc in await asyncio.wait_for(task, LIMIT)] == [1]

    run(main)
    # Threads may wait again.
    assert channel.get_cq_event(0) is None
    assert rc.cq.wait(0) == []


# ---- what is left -------------------------------------------------------------


def test_waiters_of_a_closed_event_loop_are_collected(context):
    """CQs, channels and devices that tasks waited for when their event loop was closed."""

    def leave(make, wait):
        owner = make()
        abandoned(lambda: wait(owner))
        return weakref.ref(owner)

    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    left = [
        leave(make, wait)
        for make, wait in (
            (lambda: rp.CQ(context), lambda cq: cq.completions(1, None)),
            (
                lambda: rp.CQ(context, channel=rp.CompChannel(context)),
                lambda cq: cq.completions(1, None),
            ),
            (lambda: rp.CompChannel(context), lambda channel: channel.cq_event(None)),
            (lambda: rp.open_device(context.name), lambda device: device.async_event(None)),
        )
        for _ in range(3)
    ]
    gc.collect()
    gc.collect()
    assert [owner() for owner in left] == [None] * len(left)
    # What earlier tests have left may be closed meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before
