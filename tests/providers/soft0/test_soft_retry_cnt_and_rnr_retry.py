"""How often the software device sends a request, and when it gives up."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable

import pytest
from support import Pair, async_events, soft_context

import rdmapost as rp
from rdmapost import EventType, QPState, QPType, WCStatus

context = soft_context
no_old_events = async_events.no_old_events
pytestmark = pytest.mark.usefixtures("no_old_events")


@pytest.fixture
def deaf(connect) -> Pair:
    """A pair whose b has a receive but sends no acknowledgements, because it is not in RTR yet."""
    pair = connect(to=QPState.RESET)
    pair.b.to_init()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64], wr_id=2))
    return pair


def post(pair: Pair, timeout: int, retry_cnt: int) -> None:
    pair.a.connect(pair.b.endpoint(), timeout=timeout, retry_cnt=retry_cnt)
    pair.a.post_send(rp.Send(pair.mine[:8], wr_id=1))


def reconnect(pair: Pair, rnr_retry: int, min_rnr_timer: int) -> None:
    pair.a.to_reset()
    pair.b.to_reset()
    pair.a.connect(pair.b.endpoint(), rnr_retry=rnr_retry)
    pair.b.connect(pair.a.endpoint(), min_rnr_timer=min_rnr_timer)


def test_request_is_retried_until_it_is_acknowledged(deaf):
    post(deaf, timeout=12, retry_cnt=7)
    deaf.b.to_rtr(deaf.a.endpoint())
    assert sorted(wc.wr_id for wc in deaf.wait(2)) == [1, 2]


def test_each_attempt_waits_for_the_ack_timeout(deaf):
    """The first and retry_cnt more, of 4.096 us * 2^14 each."""
    begun = time.monotonic()
    post(deaf, timeout=14, retry_cnt=2)
    assert [wc.status for wc in deaf.cq.wait()] == [WCStatus.RETRY_EXC_ERR]
    assert time.monotonic() - begun >= 3 * 4.096e-6 * 2**14


def test_request_is_not_sent_again_after_its_last_timeout(deaf):
    """retry_cnt 0 is one attempt: a peer that comes up later receives nothing."""
    post(deaf, timeout=16, retry_cnt=0)
    deaf.b.to_rtr(deaf.a.endpoint())
    assert [wc.status for wc in deaf.cq.wait()] == [WCStatus.RETRY_EXC_ERR]
    assert deaf.b.outstanding.recv == 1


def test_timeout_of_0_retries_forever(deaf):
    """The peer may come up at any time."""
    post(deaf, timeout=0, retry_cnt=0)
    with pytest.raises(rp.WaitTimeout):
        deaf.cq.wait(timeout=0.5)
    deaf.b.to_rtr(deaf.a.endpoint())
    assert sorted(wc.wr_id for wc in deaf.wait(2)) == [1, 2]


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_rnr_nak_is_retried_rnr_retry_times(rc, context, tries):
    """The first attempt and rnr_retry more; the next request has all of them again."""
    reconnect(rc, rnr_retry=tries, min_rnr_timer=1)
    for _ in range(2):
        context.faults.not_ready(rc.b.qp_num, tries)
        rc.works()
    context.faults.not_ready(rc.b.qp_num, tries + 1)
    rc.b.post_recv(rp.RecvWR(rc.theirs[:64]))
    rc.a.post_send(rp.Send(rc.mine[:8]))
    assert [wc.status for wc in rc.cq.wait()] == [WCStatus.RNR_RETRY_EXC_ERR]
    context.faults.clear()


def test_rnr_retry_of_7_retries_forever(rc, context):
    reconnect(rc, rnr_retry=7, min_rnr_timer=1)
    context.faults.not_ready(rc.b.qp_num, 50)
    rc.works()


def test_rnr_retry_waits_for_the_receivers_rnr_timer(rc, context):
    """min_rnr_timer 24 is 40.96 ms (IBA, table 45)."""
    reconnect(rc, rnr_retry=6, min_rnr_timer=24)
    context.faults.not_ready(rc.b.qp_num, 3)
    begun = time.monotonic()
    rc.works()
    assert time.monotonic() - begun >= 3 * 0.04096


def test_queue_pair_of_another_type_does_not_acknowledge(pd, cq, stack):
    mr = stack.enter_context(rp.MR(pd, 64))
    near = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    far = stack.enter_context(rp.QP(pd, QPType.UC, cq))
    far.connect(near.endpoint())
    near.connect(far.endpoint(), timeout=10, retry_cnt=1)
    far.post_recv(rp.RecvWR(mr[:8]))
    near.post_send(rp.Send(mr[8:16]))
    assert [wc.status for wc in cq.wait()] == [WCStatus.RETRY_EXC_ERR]
    assert far.outstanding.recv == 1


# ---- the descriptor of asynchronous events ------------------------------------


def readable(context: rp.Context, timeout: float = 0) -> bool:
    return bool(select.select([context.async_fd], [], [], timeout)[0])


def in_a_task(context: rp.Context) -> rp.AsyncEvent | None:
    return asyncio.run(context.async_event(30))


def in_a_thread(context: rp.Context) -> rp.AsyncEvent | None:
    return context.get_async_event(None)


def by_select(context: rp.Context) -> rp.AsyncEvent | None:
    while (event := context.get_async_event(0)) is None:
        assert readable(context, 30)
    return event


@pytest.mark.parametrize("take", [in_a_task, in_a_thread, by_select])
def test_event_at_the_end_of_the_retries_wakes_a_waiter(
    context, connect, pd, stack, take: Callable[[rp.Context], rp.AsyncEvent | None]
):
    """The last attempt fails while the program only waits for the event."""
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(to=QPState.RESET, srq=srq, b_options={"srq": None})
    begun = time.monotonic()
    post(pair, timeout=14, retry_cnt=7)
    assert take(context) == (EventType.QP_LAST_WQE_REACHED, pair.a)
    # A thread that polls once a second would take longer.
    assert time.monotonic() - begun < 5
    assert [wc.status for wc in pair.cq.poll()] == [WCStatus.RETRY_EXC_ERR]
    assert not readable(context)


def test_wake_up_for_a_retry_does_not_end_a_wait_for_an_event(context, deaf):
    """The attempts never end; there are ten a second."""
    post(deaf, timeout=0, retry_cnt=0)
    for wait in (
        lambda: context.get_async_event(0.3),
        lambda: asyncio.run(context.async_event(0.3)),
    ):
        begun = time.monotonic()
        assert wait() is None
        assert time.monotonic() - begun >= 0.3


def test_event_loop_is_woken_exactly_once_for_each_attempt(context, deaf):
    woken = 0

    def wake() -> None:
        nonlocal woken
        woken += 1
        context.get_async_event(0)

    async def main() -> tuple[int, int]:
        asyncio.get_running_loop().add_reader(context.async_fd, wake)
        post(deaf, timeout=0, retry_cnt=0)
        await asyncio.sleep(0.55)
        with_attempts = woken
        deaf.a.to_err()
        await asyncio.sleep(0.3)
        return with_attempts, woken - with_attempts

    with_attempts, without = asyncio.run(main())
    assert 1 <= with_attempts <= 6
    assert without == 0


def test_descriptor_is_not_readable_after_another_call_made_the_attempt(context, deaf):
    post(deaf, timeout=0, retry_cnt=0)
    assert readable(context, 10)
    assert deaf.cq.poll() == []
    assert not readable(context)
    deaf.a.to_reset()
    assert not readable(context, 0.2)


def test_descriptor_of_a_device_opened_later_wakes_for_attempts_too(context, deaf):
    post(deaf, timeout=0, retry_cnt=0)
    with rp.open_device("soft0") as other:
        assert readable(other, 10)
        assert other.get_async_event(0) is None
        assert not readable(other)
        assert not readable(context)
