"""Polling a CQ and waiting for completions: how many come, timeouts, and several waiters."""

from __future__ import annotations

import asyncio
import queue
import threading
import time

import pytest
from support import Pair, needs, until, write

import rdmapost as rp


def test_poll_returns_at_once_when_there_is_nothing(cq):
    assert cq.poll() == []
    assert cq.poll(0) == []
    assert cq.wait(0) == []


def test_poll_takes_at_most_as_many_as_asked(rc):
    rc.a.post_send([write(rc, i) for i in range(10)])
    got = rc.wait(1)
    while len(got) < 10:
        some = rc.cq.poll(3)
        assert len(some) <= 3
        got += some
    assert [wc.wr_id for wc in got] == list(range(10))


def test_wait_that_times_out_loses_no_completion(rc):
    rc.a.post_send([write(rc, i) for i in range(3)])
    rc.wait(1)
    with pytest.raises(rp.WaitTimeout, match=r"2 of 3 completions came within 0\.3 s"):
        rc.cq.wait(3, timeout=0.3)
    assert [wc.wr_id for wc in rc.cq.wait(2)] == [1, 2]
    with pytest.raises(TimeoutError):
        rc.cq.wait(timeout=0)


def test_wait_accepts_none_infinite_huge_and_short_timeouts(rc):
    for timeout in (None, float("inf"), 1e12):
        rc.a.post_send(write(rc))
        rc.cq.wait(timeout=timeout)
    with pytest.raises(rp.WaitTimeout, match=r"within 0\.001 s"):
        rc.cq.wait(timeout=0.001)


def test_wait_sleeps_until_the_completion_comes(rc):
    """The waiter sleeps on the channel, and another thread posts."""
    got: list[rp.WC] = []
    waiter = threading.Thread(target=lambda: got.extend(rc.cq.wait(8, 20)))
    waiter.start()
    for i in range(8):
        rc.a.post_send(write(rc, i))
    waiter.join(20)
    assert [wc.wr_id for wc in got] == list(range(8))


def test_each_of_several_threads_waiting_on_one_cq_gets_a_completion(rc):
    """Each waits for one; none stays asleep while its completion is available."""
    count = 6
    got: queue.Queue[int] = queue.Queue()

    def wait() -> None:
        got.put(rc.cq.wait(1, 30)[0].wr_id)

    waiters = [threading.Thread(target=wait) for _ in range(count)]
    for waiter in waiters:
        waiter.start()
    # Not all at once: each completion after the first needs its own wake-up.
    for i in range(count):
        rc.a.post_send(write(rc, i))
        # Sooner than after the timeout of wait().
        assert got.get(timeout=15) == i
    for waiter in waiters:
        waiter.join(30)


def test_waiter_for_few_completions_is_not_starved_by_one_for_many(rc):
    few, many = [], []
    greedy = threading.Thread(target=lambda: many.extend(rc.cq.wait(50, 30)))
    modest = threading.Thread(target=lambda: few.extend(rc.cq.wait(1, 30)))
    greedy.start()
    modest.start()
    rc.a.post_send(write(rc, 0))
    modest.join(10)
    assert not modest.is_alive()
    assert [wc.wr_id for wc in few] == [0]
    rc.a.post_send([write(rc, i) for i in range(1, 51)])
    greedy.join(20)
    assert [wc.wr_id for wc in many] == list(range(1, 51))


MANY = 200
"""More than one call polls at a time (64)."""


@pytest.fixture
def many(context, pd, stack) -> Pair:
    cq = stack.enter_context(rp.CQ(context, 2 * MANY))
    return Pair(stack, pd, cq, max_send_wr=MANY + 56)


def post(pair: Pair, count: int, first: int = 0) -> None:
    """Post writes; their completions are there, and nobody has polled, when this returns."""
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=first + i) for i in range(count)])


@pytest.mark.parametrize("asked", [1, 63, 64, 65, 127, 128, 129, MANY, MANY + 1, 1 << 40])
def test_poll_returns_as_many_as_are_asked_for_of_any_number(many, asked):
    post(many, MANY)
    until(lambda: many.cq._poller.fill(many.cq, MANY) == MANY)
    first = [wc.wr_id for wc in many.cq.poll(asked)]
    assert first == [*range(min(asked, MANY))]
    assert [wc.wr_id for wc in many.cq.poll(MANY)] == [*range(min(asked, MANY), MANY)]
    assert many.cq.poll() == []
    assert many.a.outstanding.send == 0


@pytest.mark.parametrize("asked", [64, 65, 128, MANY])
def test_one_poll_takes_more_than_the_device_is_asked_for_at_a_time(many, context, asked):
    needs(context.kind == "soft", "completions before a post returns", context)
    post(many, MANY)
    assert [wc.wr_id for wc in many.cq.poll(asked)] == [*range(asked)]
    assert [wc.wr_id for wc in many.cq.poll(MANY)] == [*range(asked, MANY)]


def test_completions_that_alternate_between_queues_come_in_the_order_of_each(many):
    """Each of them is of another queue than the one before."""
    queues = many.a, many.b
    for i in range(MANY):
        queues[i % 2].post_send(many.wr(rp.RdmaWrite, many.mine[:1], wr_id=i))
    found = many.cq.wait(MANY)
    for first, qp in enumerate(queues):
        wr_ids = [wc.check().wr_id for wc in found if wc.qp_num == qp.qp_num]
        assert wr_ids == [*range(first, MANY, 2)]


@pytest.mark.parametrize("count", [64, 65, 128, 129, MANY])
def test_wait_returns_as_many_as_are_asked_for_of_any_number(many, count):
    post(many, MANY)
    assert [wc.wr_id for wc in many.cq.wait(count)] == [*range(count)]
    assert [wc.wr_id for wc in many.cq.wait(MANY - count)] == [*range(count, MANY)]
    with pytest.raises(rp.WaitTimeout, match=r"^0 of 1 "):
        many.cq.wait(1, 0)


@pytest.mark.parametrize("timeout", [-1, -1.0, -1e-9, 0])
def test_wait_without_time_polls_once(rc, timeout):
    began = time.monotonic()
    with pytest.raises(rp.WaitTimeout, match=r"^0 of 1 completions came within 0 s"):
        rc.cq.wait(1, timeout)
    assert time.monotonic() - began < 2
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=3))
    until(lambda: rc.cq._poller.fill(rc.cq, 1))
    assert [wc.wr_id for wc in rc.cq.wait(1, timeout)] == [3]


def test_completions_promised_to_tasks_are_left_to_them(rc):
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=i) for i in range(3)])
    until(lambda: rc.cq._poller.fill(rc.cq, 3) == 3)

    def take(count, promised):
        found = []
        rc.cq._poller.wait(rc.cq, count, promised, 0.0, found)
        return [wc.wr_id for wc in found]

    assert take(2, promised=2) == []
    assert take(1, promised=2) == [0]
    assert take(1, promised=2) == []
    assert take(2, promised=0) == [1, 2]


@pytest.mark.parametrize("call", ["poll", "wait", "completions"])
def test_polling_for_a_negative_number_of_completions_is_refused(cq, call):
    def in_a_loop(count: int) -> list[rp.WC]:
        return asyncio.run(cq.completions(count))

    function = {"poll": cq.poll, "wait": cq.wait, "completions": in_a_loop}[call]
    with pytest.raises(ValueError, match="=-1 is negative"):
        function(-1)


@pytest.mark.parametrize("kind", ["context", "channel"])
@pytest.mark.parametrize(
    "call",
    [
        lambda other: rp.CQ.poll(other),
        lambda other: rp.CQ.wait(other, 1, 0),
        lambda other: rp.CQ.wait_into(other, bytearray(48), 1, 0),
        lambda other: rp.CQ.poll_into(other, bytearray(48)),
        lambda other: asyncio.run(rp.CQ.completions(other, 1, 0.1)),
    ],
    ids=["poll", "wait", "wait_into", "poll_into", "completions"],
)
def test_polling_what_is_no_cq_is_refused(context, kind, call):
    """The device would take the struct of another resource for one."""

    class Channel(rp.CompChannel):
        channel = None

    with Channel(context) as channel, pytest.raises((TypeError, AttributeError)):
        call({"context": context, "channel": channel}[kind])
