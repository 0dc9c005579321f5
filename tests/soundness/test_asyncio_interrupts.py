"""An interrupt at each moment of waiting in an asyncio task leaves everything usable."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from support.connected_pair import LIMIT, Rig, until
from support.interrupts import Interrupted, Moment, interrupt_at_each_moment

import rdmapost as rp

RAISES = {"KeyboardInterrupt": KeyboardInterrupt, "Exception": Interrupted}
HERE = "/rdmapost/resources/"


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """An event loop logs what a handler raises in its callbacks."""
    caplog.set_level(logging.CRITICAL, "asyncio")


async def _take(rig: Rig, cq: rp.CQ, qp: rp.QP, first: int) -> None:
    """Wait in two tasks for completions of work posted during the wait."""
    tasks = [asyncio.create_task(cq.completions(count, LIMIT)) for count in (1, 2)]
    try:
        await asyncio.sleep(0)
        qp.post_send([rig.write(first + number) for number in range(3)])
        for wait in tasks:
            rig.found += await wait
    finally:
        for wait in tasks:
            wait.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, list):
                rig.found += [wc for wc in done if wc not in rig.found]


def _shared(rig: Rig) -> tuple[rp.CQ, rp.QP]:
    channel = rp.CompChannel(rig.context)
    cq = rp.CQ(rig.context, 64, channel=channel)
    qp = rp.QP(rig.pd, rp.QPType.RC, cq)
    qp.connect(qp.endpoint())
    rig.more += [channel, cq, qp]
    return cq, qp


def _own(rig: Rig) -> tuple[rp.CQ, rp.QP]:
    return rig.cq, rig.a


@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize("of", [_own, _shared])
def test_interrupt_while_tasks_wait_for_completions_loses_no_completion_and_no_descriptor(
    of, raises
) -> None:
    """The next tasks get theirs, a thread may wait, none is lost, and no descriptor is left."""

    def act(rig: Rig) -> None:
        asyncio.run(_take(rig, *of(rig), 0))

    def check(rig: Rig, moment: Moment) -> None:
        cq, qp = (rig.more[1], rig.more[2]) if rig.more else (rig.cq, rig.a)

        def all_came() -> bool:
            rig.found += cq.poll()
            return not qp.outstanding.send

        until(all_came, "completions of what was posted")
        posted = sorted(wc.wr_id for wc in rig.found)
        assert posted in ([], [0, 1, 2]), posted
        if of is _own:
            qp.post_send(rig.write(9))
            cq.wait(1, LIMIT)
        rig.found.clear()
        asyncio.run(asyncio.wait_for(_take(rig, cq, qp, 3), LIMIT))
        assert sorted(wc.wr_id for wc in rig.found) == [3, 4, 5]
        rig.close()

    interrupt_at_each_moment(Rig, act, check, handler=RAISES[raises], within=HERE, max_moments=60)


@pytest.mark.parametrize("raises", RAISES)
def test_interrupt_while_tasks_wait_for_events_loses_no_event(raises) -> None:
    """An event that was taken is returned to the next who asks, and threads may wait."""

    def make() -> Rig:
        rig = Rig()
        srq = rp.SRQ(rig.pd, 8)
        channel = rp.CompChannel(rig.context)
        cq = rp.CQ(rig.context, 64, channel=channel)
        qp = rp.QP(rig.pd, rp.QPType.RC, cq, srq=srq)
        qp.connect(qp.endpoint())
        rig.more += [channel, cq, srq, qp]
        return rig

    async def take(rig: Rig) -> None:
        channel, cq, srq, qp = rig.more

        async def note(wait: Coroutine[Any, Any, Any]) -> None:
            rig.found.append(await wait)

        tasks = [
            asyncio.create_task(note(channel.cq_event(LIMIT))),
            asyncio.create_task(note(rig.context.async_event(LIMIT))),
        ]
        await asyncio.sleep(0)
        cq.req_notify()
        srq.post_srq_recv([rig.receive(number) for number in range(2)])
        srq.arm_limit(2)
        qp.post_send(rp.Send(rig.mr[:8]))
        await asyncio.gather(*tasks)

    def act(rig: Rig) -> None:
        asyncio.run(take(rig))

    def check(rig: Rig, moment: Moment) -> None:
        channel, cq, srq, qp = rig.more
        announced = qp.outstanding.send > 0
        for event in (channel.get_cq_event(0), rig.context.get_async_event(0)):
            rig.found += [event] if event is not None else []
        if announced:
            assert {cq, (rp.EventType.SRQ_LIMIT_REACHED, srq)} == {*rig.found}
            assert len(rig.found) == 2

        async def again() -> None:
            assert await rig.context.async_event(0.001) is None
            assert await channel.cq_event(0.001) is None

        asyncio.run(again())
        rig.close()

    interrupt_at_each_moment(make, act, check, handler=RAISES[raises], within=HERE, max_moments=60)


class _Looping(Rig):
    """With an event loop in a thread, whose task waits for one completion."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.waiting = asyncio.run_coroutine_threadsafe(self.cq.completions(), self.loop)
        self.turn()

    def turn(self) -> None:
        """Let the event loop do what it has to."""
        for _ in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(LIMIT)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT)
        self.loop.close()
        super().close()


@pytest.mark.parametrize("verb", ["poll", "wait"])
def test_task_gets_the_completion_that_an_interrupted_thread_put_back(verb: str) -> None:
    """The event loop looked while the thread had the completion, and found none."""

    def act(rig: _Looping) -> None:
        rig.a.post_send(rig.write(7))
        rig.found += rig.cq.poll() if verb == "poll" else rig.cq.wait(1, 0)

    def check(rig: _Looping, moment: Moment) -> None:
        if rig.found or not rig.written():
            rig.a.post_send(rig.write(7))
        until(rig.waiting.done, "the completion of the task that waits")
        assert [wc.wr_id for wc in rig.waiting.result()] == [7]
        rig.drain()
        rig.close()

    def interrupt(rig: _Looping) -> None:
        rig.turn()
        raise Interrupted

    interrupt_at_each_moment(_Looping, act, check, handler=interrupt, within=HERE, max_moments=60)


def test_task_gets_the_completion_that_an_interrupted_task_put_back() -> None:
    """One of two tasks is interrupted while it has the only completion."""

    async def both(rig: Rig) -> None:
        tasks = [asyncio.create_task(rig.cq.completions()) for _ in range(2)]
        try:
            await asyncio.sleep(0)
            rig.a.post_send(rig.write(7))
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if waiting and isinstance(done.pop().exception(), Interrupted):
                await asyncio.wait(waiting, timeout=LIMIT)
            there = rig.cq.poll()
            assert not there or all(one.done() for one in tasks), "a task sleeps beside its own"
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def act(rig: Rig) -> None:
        asyncio.run(both(rig))

    def check(rig: Rig, moment: Moment) -> None:
        rig.drain()
        rig.close()

    interrupt_at_each_moment(Rig, act, check, handler=Interrupted, within=HERE, max_moments=60)


def test_signal_handler_that_cancels_one_task_leaves_the_other_its_completion() -> None:
    """Even in the middle of waking the first."""

    class Two(Rig):
        tasks: list[asyncio.Task[list[rp.WC]]]

        def __init__(self) -> None:
            super().__init__()
            self.tasks = []

    async def both(rig: Two) -> None:
        rig.tasks += [asyncio.create_task(rig.cq.completions(1, LIMIT)) for _ in range(2)]
        await asyncio.sleep(0)
        rig.a.post_send([rig.write(7), rig.write(8)])
        got = await asyncio.gather(*rig.tasks, return_exceptions=True)
        rig.found += [wc for wcs in got if isinstance(wcs, list) for wc in wcs]
        assert isinstance(got[1], list), got
        assert isinstance(got[0], list | asyncio.CancelledError), got

    def act(rig: Two) -> None:
        asyncio.run(both(rig))

    def check(rig: Two, moment: Moment) -> None:
        rig.found += rig.cq.poll()
        assert sorted(wc.wr_id for wc in rig.found) == [7, 8]
        rig.drain()
        rig.close()

    def cancel(rig: Two) -> None:
        # asyncio drops the result of a task that is cancelled while it runs.
        if rig.tasks and asyncio.current_task() is not rig.tasks[0]:
            rig.tasks[0].cancel()

    interrupt_at_each_moment(Two, act, check, handler=cancel, within=HERE)
