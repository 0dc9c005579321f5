"""How waits end: with at most so many completions, with one that failed, or cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import LIMIT, MOMENT, ended, interrupt_everywhere, waiting, write, writes

import rdmapost as rp

# ---- at least so many, at most so many ---------------------------------------------------


def by_thread(cq: rp.CQ, *args: Any, **options: Any) -> list[rp.WC]:
    return cq.wait(*args, **options)


def by_task(cq: rp.CQ, *args: Any, **options: Any) -> list[rp.WC]:
    return asyncio.run(cq.completions(*args, **options))


HOW = pytest.mark.parametrize("wait", [by_thread, by_task])


@HOW
@pytest.mark.parametrize(
    ("count", "max_entries", "gets"),
    [(1, 3, 3), (2, 2, 2), (5, 5, 5), (1, 100, 5), (0, 4, 4), (0, 0, 0), (5, None, 5)],
)
def test_wait_returns_available_completions_up_to_max_entries(rc, wait, count, max_entries, gets):
    rc.a.post_send(writes(rc, 5))
    time.sleep(MOMENT)  # all have come
    found = wait(rc.cq, count, 5, max_entries=max_entries)
    assert [wc.check().wr_id for wc in found] == [*range(gets)]
    assert [wc.wr_id for wc in rc.wait(5 - gets)] == [*range(gets, 5)]


@HOW
def test_wait_for_a_range_of_completions_waits_for_the_least_only(rc, wait):
    """Three of a hundred are enough."""
    rc.a.post_send(writes(rc, 2))
    third = threading.Timer(MOMENT, lambda: rc.a.post_send(write(rc, 2)))
    third.start()
    found = wait(rc.cq, 3, LIMIT, max_entries=100)
    ended([third])
    assert [wc.wr_id for wc in found] == [0, 1, 2]


@HOW
def test_wait_that_gets_fewer_than_the_least_times_out_and_takes_nothing(rc, wait):
    rc.a.post_send(writes(rc, 2))
    with pytest.raises(rp.WaitTimeout, match="2 of 3 completions came"):
        wait(rc.cq, 3, MOMENT, max_entries=8)
    assert len(rc.wait(2)) == 2


@HOW
def test_wait_with_max_entries_less_than_count_is_refused(cq, wait):
    with pytest.raises(ValueError, match=r"^max_entries=2 is less than count=3$"):
        wait(cq, 3, 0, max_entries=2)
    with pytest.raises(ValueError, match=r"^count=-1 is negative"):
        wait(cq, -1, 0, max_entries=2)
    with pytest.raises(TypeError, match=r"^max_entries: expected int, got str$"):
        wait(cq, 1, 0, max_entries="2")


def test_tasks_that_wait_get_theirs_before_a_range_takes_the_rest(rc):
    async def both() -> tuple[list[rp.WC], list[rp.WC]]:
        small = asyncio.ensure_future(rc.cq.completions(3, LIMIT))
        await asyncio.sleep(0)
        rc.a.post_send(writes(rc, 5))
        time.sleep(MOMENT)
        greedy = await rc.cq.completions(1, 5, max_entries=64)
        return await small, greedy

    first, rest = asyncio.run(both())
    assert sorted(wc.wr_id for wc in [*first, *rest]) == [*range(5)]
    assert len(first) == 3


# ---- a completion that has failed --------------------------------------------------------


def wrong_key(pair: Any, wr_id: int) -> rp.RdmaWrite:
    """Make a write that the peer refuses."""
    return rp.RdmaWrite(
        pair.mine[:8], wr_id=wr_id, remote_addr=pair.theirs.addr, rkey=pair.theirs.rkey ^ 0x5A5A00
    )


WAITS_FOR_3: dict[str, Callable[[rp.CQ], object]] = {
    "wait": lambda cq: cq.wait(3, MOMENT),
    "wait_into": lambda cq: cq.wait_into(bytearray(48 * 8), 3, MOMENT),
    "completions": lambda cq: by_task(cq, 3, MOMENT),
}


@pytest.mark.parametrize("wait_for_3", WAITS_FOR_3)
def test_wait_timeout_names_the_completion_that_failed(rc, wait_for_3):
    """It is not taken, nor is what came before it."""
    rc.a.post_send(write(rc, 1))
    rc.a.post_send(wrong_key(rc, 2))
    text = (
        f"2 of 3 completions came within .* s; the work request with wr_id 2 on "
        f"QP {rc.a.qp_num:#x} ended with REM_ACCESS_ERR"
    )
    for _ in range(2):
        with pytest.raises(rp.WaitTimeout, match=text) as caught:
            WAITS_FOR_3[wait_for_3](rc.cq)
        failed = caught.value.failed
        assert isinstance(failed, rp.WC)
        assert (failed.wr_id, failed.status) == (2, rp.WCStatus.REM_ACCESS_ERR)
        assert "see 'rdmapost explain REM_ACCESS_ERR'" in caught.value.__notes__
        copied = pickle.loads(pickle.dumps(caught.value))
        assert (copied.failed, str(copied)) == (failed, str(caught.value))
    assert [wc.wr_id for wc in rc.cq.wait(2)] == [1, 2]


def test_wait_timeout_without_a_failure_names_no_completion(rc):
    rc.a.post_send(write(rc, 1))
    with pytest.raises(rp.WaitTimeout) as caught:
        rc.cq.wait(2, MOMENT)
    assert str(caught.value) == "1 of 2 completions came within 0.2 s"
    assert caught.value.failed is None
    assert caught.value.__notes__ == ["qp.diagnose() says what a queue pair waits for"]
    for copied in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert (str(copied), copied.failed) == (str(caught.value), None)
        assert copied.__notes__ == caught.value.__notes__
    rc.wait()


def test_wait_timeout_names_a_failed_completion_that_was_put_back(rc):
    """An interrupt has left it undelivered, as a WC."""
    rc.a.post_send(wrong_key(rc, 7))
    (failed,) = rc.cq.wait(1)
    rc.cq._poller.put_back([failed])
    with pytest.raises(rp.WaitTimeout, match=r"wr_id 7 .* REM_ACCESS_ERR") as caught:
        rc.cq.wait(2, 0)
    assert caught.value.failed is failed
    assert rc.cq.poll() == [failed]


# ---- cancelled ---------------------------------------------------------------------------


def outcomes(cq: rp.CQ, calls: list[Callable[[], object]]) -> list[Any]:
    """Start the calls in threads that all wait, cancel them, and return what they raised."""
    found: list[Any] = []

    def run(call: Callable[[], object]) -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    waiting(cq, threads)
    cq.cancel_waits()
    ended(threads)
    return found


def test_cancel_waits_ends_the_threads_that_wait(rc):
    """However many they wait for; what came stays, and the CQ is as it was."""
    rc.a.post_send(write(rc, 5))
    cq = rc.cq
    raised = outcomes(
        cq,
        [
            lambda: cq.wait(2, None),
            lambda: cq.wait(3, LIMIT),
            lambda: cq.wait_into(bytearray(48 * 8), 4, None),
            lambda: cq.wait(2, None, max_entries=9),
        ],
    )
    assert [type(error) for error in raised] == [rp.WaitCancelled] * 4
    assert {str(error) for error in raised} == {f"cancel_waits() on this {cq} has ended the wait"}
    assert cq._poller.waiting == 0
    assert [wc.wr_id for wc in cq.wait(1)] == [5]
    rc.works()


def test_cancel_waits_does_not_affect_later_waits(rc):
    for _ in range(3):
        rc.cq.cancel_waits()
    rc.a.post_send(write(rc, 1))
    assert [wc.wr_id for wc in rc.cq.wait(1)] == [1]
    with pytest.raises(rp.WaitTimeout):
        rc.cq.wait(1, 0)


def test_waits_cancelled_for_good_end_every_later_wait(rc):
    """A loop needs no flag, wherever it is when cancel_waits() is called; polls go on."""
    cq = rc.cq
    rc.a.post_send(writes(rc, 2))
    cq.cancel_waits(for_good=True)
    cq.cancel_waits()

    for wait in (
        lambda: cq.wait(1),
        lambda: cq.wait(0, None),
        lambda: cq.wait_into(bytearray(48), 1, None),
        lambda: asyncio.run(cq.completions(1, None)),
        lambda: asyncio.run(expect_none(cq)),
    ):
        with pytest.raises(rp.WaitCancelled, match="has ended the wait"):
            wait()
    found: list[int] = []
    while len(found) < 2:
        found.extend(wc.wr_id for wc in cq.poll())
    assert found == [0, 1]


def test_wait_that_is_about_to_begin_does_not_miss_its_cancellation(rc):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turns in range(200):
            with rp.CQ(rc.a.context, 8) as cq:

                def wait(cq: rp.CQ = cq) -> None:
                    with contextlib.suppress(rp.WaitCancelled):
                        cq.wait(1, None)

                thread = threading.Thread(target=wait)
                thread.start()
                for _ in range(turns):
                    pass
                cq.cancel_waits(for_good=True)
                ended([thread])
    finally:
        sys.setswitchinterval(before)


def test_signal_handler_cancels_the_wait_that_it_interrupts(rc):
    before = signal.signal(signal.SIGALRM, lambda *_: rc.cq.cancel_waits())
    signal.setitimer(signal.ITIMER_REAL, MOMENT)
    try:
        with pytest.raises(rp.WaitCancelled):
            rc.cq.wait(1, LIMIT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    rc.works()


async def expect_none(cq: rp.CQ) -> None:
    async for wc in cq:
        raise AssertionError(wc)


def test_cancel_waits_ends_the_tasks_that_wait(rc):
    """Those of completions() and of async for; the loop and the CQ go on."""
    cq = rc.cq

    async def run() -> list[Any]:
        tasks = [
            asyncio.ensure_future(expect_none(cq)),
            asyncio.ensure_future(cq.completions(2, LIMIT)),
            asyncio.ensure_future(cq.completions(3, LIMIT, max_entries=4)),
        ]
        await asyncio.sleep(0)
        await asyncio.to_thread(cq.cancel_waits)
        raised = await asyncio.gather(*tasks, return_exceptions=True)
        rc.a.post_send(writes(rc, 2))
        assert [wc.wr_id for wc in await cq.completions(2, LIMIT)] == [0, 1]
        return raised

    raised = asyncio.run(run())
    assert [type(error) for error in raised] == [rp.WaitCancelled] * 3
    assert {str(error) for error in raised} == {f"cancel_waits() on this {cq} has ended the wait"}
    with pytest.raises(rp.WaitTimeout):
        cq.wait(1, 0.01)


@pytest.mark.parametrize("first", ["post", "cancel"])
def test_cancelled_task_takes_nothing_that_comes_at_the_same_time(rc, first):
    """A loop of waits, or async for, would go on forever."""
    cq = rc.cq

    async def run() -> list[Any]:
        tasks = [
            asyncio.ensure_future(expect_none(cq)),
            asyncio.ensure_future(cq.completions(1, LIMIT)),
            asyncio.ensure_future(cq.completions(2, LIMIT, max_entries=3)),
        ]
        await asyncio.sleep(0)
        if first == "cancel":
            cq.cancel_waits()
        rc.a.post_send(writes(rc, 3))
        time.sleep(MOMENT)
        if first == "post":
            cq.cancel_waits()
        # A later wait is not cancelled, and has what the others did not take.
        later = asyncio.ensure_future(cq.completions(3, LIMIT))
        raised = await asyncio.gather(*tasks, return_exceptions=True)
        assert [wc.wr_id for wc in await later] == [0, 1, 2]
        return raised

    assert [type(error) for error in asyncio.run(run())] == [rp.WaitCancelled] * 3


@pytest.mark.parametrize("first", ["post", "cancel"])
def test_cancelled_thread_takes_nothing_that_comes_at_the_same_time(rc, first):
    cq = rc.cq
    calls = [lambda: cq.wait(1, LIMIT), lambda: cq.wait_into(bytearray(48 * 8), 1, LIMIT)]
    for call in calls:
        raised: list[Any] = []

        def run(call: Callable[[], object] = call, raised: list[Any] = raised) -> None:
            try:
                raised.append(call())
            except rp.WaitCancelled as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        waiting(cq, [thread])
        # It does not run between the two.
        before = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:
            if first == "cancel":
                cq.cancel_waits()
            rc.a.post_send(write(rc, 1))
            if first == "post":
                cq.cancel_waits()
        finally:
            sys.setswitchinterval(before)
        ended([thread])
        (outcome,) = raised
        if isinstance(outcome, rp.WaitCancelled):
            assert [wc.wr_id for wc in cq.wait(1, LIMIT)] == [1]
        else:
            # A verb lets other threads run.
            assert first == "post"


def test_tasks_on_a_shared_channel_are_cancelled_by_cq(context, stack):
    channel = stack.enter_context(rp.CompChannel(context))
    one, other = [stack.enter_context(rp.CQ(context, channel=channel)) for _ in range(2)]

    async def run() -> list[Any]:
        tasks = [asyncio.ensure_future(cq.completions(1, MOMENT)) for cq in (one, other)]
        await asyncio.sleep(0)
        one.cancel_waits()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(run())] == [rp.WaitCancelled, rp.WaitTimeout]


def test_thread_beside_tasks_is_cancelled_with_them(rc):
    cq = rc.cq

    async def run() -> list[Any]:
        task = asyncio.ensure_future(cq.completions(1, LIMIT))
        await asyncio.sleep(0)
        raised = await asyncio.to_thread(outcomes, cq, [lambda: cq.wait(2, None)])
        return [*raised, *(await asyncio.gather(task, return_exceptions=True))]

    assert [type(error) for error in asyncio.run(run())] == [rp.WaitCancelled] * 2


def test_waits_of_a_closed_cq_cannot_be_cancelled(context):
    cq = rp.CQ(context)
    cq.close()
    with pytest.raises(rp.ClosedError, match="is closed"):
        cq.cancel_waits()


def test_cancelling_often_while_completions_come_loses_none(rc):
    """Each wait gets its completion or is cancelled, never both."""
    found: list[int] = []

    def wait() -> None:
        while len(found) < 300:
            try:
                found.extend(wc.wr_id for wc in rc.cq.wait(1, LIMIT))
            except rp.WaitCancelled:
                continue

    waiter = threading.Thread(target=wait)
    waiter.start()
    for number in range(300):
        rc.a.post_send(write(rc, number))
        rc.cq.cancel_waits()
        while rc.a.outstanding.send > 32:
            time.sleep(0)
    ended([waiter])
    assert found == [*range(300)]


def test_interrupted_wait_for_a_range_loses_no_completion(soft):
    """Wherever it is interrupted, before its caller has the list."""
    with (
        rp.open_device(soft) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, rp.QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        qp.post_send([rp.RdmaWrite(wr_id=n) for n in range(8)])
        found: list[rp.WC] = []

        def wait() -> None:
            found[:] = cq.wait(2, 5, max_entries=4)

        assert interrupt_everywhere(wait)
        assert [wc.wr_id for wc in [*found, *cq.poll()]] == [*range(8)]


def test_cancel_waits_refuses_a_timeout_as_for_good(context):
    with rp.CQ(context) as cq, pytest.raises(TypeError, match="for_good: expected bool, got float"):
        cq.cancel_waits(5.0)  # type: ignore[arg-type]
