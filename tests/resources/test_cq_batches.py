"""Completions that come in batches, and several threads that wait for them."""

from __future__ import annotations

import time

import pytest
from support import Pair, needs, prints, until

import rdmapost as rp
from rdmapost.resources.aio import _rearm, _take

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
    needs(context.kind == "soft", "completions that are there when a post returns", context)
    post(many, MANY)
    assert [wc.wr_id for wc in many.cq.poll(asked)] == [*range(asked)]
    assert [wc.wr_id for wc in many.cq.poll(MANY)] == [*range(asked, MANY)]


def test_device_that_refuses_req_notify_is_a_verbs_error():
    """Its CQ is destroyed behind the library's back."""
    code = """
import os
import rdmapost as rp
context = rp.open_device("soft0")
cq = rp.CQ(context, channel=rp.CompChannel(context))
context._provider.destroy_cq(cq._handle)
for call in (cq.req_notify, cq.poll):
    try: call()
    except rp.VerbsError as error: print(str(error).partition(" (")[0], flush=True)
os._exit(0)
"""
    assert prints(code).splitlines() == ["ibv_req_notify_cq: EINVAL", "ibv_poll_cq: EIO"]


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
    with pytest.raises(rp.WaitTimeout, match=r"^0 of 1 completions came within"):
        rc.cq.wait(1, timeout)
    assert time.monotonic() - began < 2
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=3))
    until(lambda: rc.cq._poller.fill(rc.cq, 1))
    assert [wc.wr_id for wc in rc.cq.wait(1, timeout)] == [3]


@pytest.mark.parametrize(
    "call", [rp.CQ.poll, rp.CQ.wait, lambda cq: cq.wait(0), lambda cq: _rearm(cq, 1)]
)
def test_call_on_a_closed_cq_names_it(context, call):
    cq = rp.CQ(context, 16)
    name = str(cq)
    cq.close()
    with pytest.raises(rp.ClosedError, match=f"^{name} is closed$"):
        call(cq)


def test_completions_promised_to_tasks_are_left_to_them(rc):
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=i) for i in range(3)])
    until(lambda: rc.cq._poller.fill(rc.cq, 3) == 3)
    assert _take(rc.cq, 2, promised=2) is None
    assert [wc.wr_id for wc in _take(rc.cq, 1, promised=2)] == [0]
    assert _take(rc.cq, 1, promised=2) is None
    assert [wc.wr_id for wc in _take(rc.cq, 2)] == [1, 2]
