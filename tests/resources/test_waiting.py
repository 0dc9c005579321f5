"""Why a work request does not complete, or not yet, and that ``outstanding`` shows it."""

from __future__ import annotations

import pytest
from support import GRH, Pair, needs

import rdmapost as rp
from rdmapost import QPState, QPType, WCStatus

MOMENT = 0.2
"""Seconds after which what has not completed is not about to."""


def nothing_comes(cq: rp.CQ) -> None:
    with pytest.raises(rp.WaitTimeout, match="0 of 1 completions came"):
        cq.wait(timeout=MOMENT)


@pytest.fixture
def apart(connect) -> Pair:
    """A pair, neither of which is connected."""
    return connect(to=QPState.RESET)


def test_rnr_retry_7_waits_for_a_receive_for_ever(apart):
    """The default gives up after a moment; 7 never does."""
    apart.a.connect(apart.b.endpoint(), rnr_retry=7)
    apart.b.connect(apart.a.endpoint())
    apart.a.post_send(rp.Send(apart.mine[:8], wr_id=1))
    nothing_comes(apart.cq)
    assert apart.a.outstanding == (1, 0)
    assert apart.a.state is QPState.RTS
    apart.b.post_recv(rp.RecvWR(apart.theirs[:8], wr_id=2))
    assert sorted(wc.wr_id for wc in apart.wait(2)) == [1, 2]
    assert apart.a.outstanding == (0, 0)


def test_rnr_retry_0_to_6_gives_up(apart):
    apart.a.connect(apart.b.endpoint(), rnr_retry=2)
    apart.b.connect(apart.a.endpoint(), min_rnr_timer=1)
    apart.a.post_send(rp.Send(apart.mine[:8], wr_id=1))
    (done,) = apart.cq.wait()
    assert (done.wr_id, done.status) == (1, WCStatus.RNR_RETRY_EXC_ERR)


def test_timeout_0_waits_for_an_answer_for_ever(apart):
    apart.a.connect(apart.b.endpoint(), timeout=0, retry_cnt=0)
    apart.a.post_send(apart.wr(rp.RdmaWrite, apart.mine[:8], wr_id=1))
    nothing_comes(apart.cq)
    assert apart.a.outstanding == (1, 0)
    assert apart.a.state is QPState.RTS
    apart.a.to_err()
    assert [(wc.wr_id, wc.status) for wc in apart.cq.wait()] == [(1, WCStatus.WR_FLUSH_ERR)]


def test_timeout_and_retries_end_without_an_answer(apart):
    apart.a.connect(apart.b.endpoint(), timeout=10, retry_cnt=1)
    apart.a.post_send(apart.wr(rp.RdmaWrite, apart.mine[:8], wr_id=1))
    (done,) = apart.cq.wait()
    assert (done.wr_id, done.status) == (1, WCStatus.RETRY_EXC_ERR)


def test_send_that_is_not_signaled_has_no_completion_of_its_own(rc):
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], send_flags=0))
    nothing_comes(rc.cq)
    assert rc.a.outstanding == (1, 0)


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


@pytest.mark.parametrize("inline", [False, True], ids=["by reference", "inline"])
def test_buffer_belongs_to_the_device_until_the_completion(connect, inline):
    """What is written there before that may be sent; inline data was copied when posted."""
    pair = connect(to=QPState.RESET, max_inline_data=16)
    pair.a.connect(pair.b.endpoint(), rnr_retry=7)
    pair.b.connect(pair.a.endpoint())
    flags = rp.SendFlags.SIGNALED | (rp.SendFlags.INLINE if inline else 0)
    pair.mine.buffer[:6] = b"before"
    pair.a.post_send(rp.Send(pair.mine[:6], send_flags=flags))
    # Nothing receives it yet, so it is retried.
    nothing_comes(pair.cq)
    pair.mine.buffer[:6] = b"after!"
    pair.b.post_recv(rp.RecvWR(pair.theirs[:6]))
    pair.wait(2)
    assert bytes(pair.theirs.buffer[:6]) == (b"before" if inline else b"after!")


def test_an_address_handle_serves_many_posts_and_queue_pairs(connect, stack, cq, pd):
    """Of one domain, and before any of them has completed."""
    pair = connect(QPType.UD)
    second = rp.QP(pd, QPType.UD, cq)
    stack.callback(second.close)
    second.connect()
    pair.b.post_recv([rp.RecvWR(pair.theirs[: GRH + 8], wr_id=7) for _ in range(4)])
    wr = pair.send(pair.mine[:8], wr_id=9)
    pair.a.post_send([wr, wr])
    second.post_send([wr, wr])
    assert sorted(wc.wr_id for wc in pair.wait(8)) == [7] * 4 + [9] * 4


def test_a_full_queue_is_no_reason_to_lose_anything(connect, context):
    """As many as the queue holds, refused by name beyond, and all of them complete."""
    pair = connect(max_send_wr=8)
    depth = pair.a.max_send_wr
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(depth + 3)]
    needs(depth < 1000, "a queue that is small when a small one is asked for", context)
    with pytest.raises(rp.PostError, match=f"cannot fit a queue of max_send_wr={depth}") as caught:
        pair.a.post_send(wrs)
    assert caught.value.posted == depth
    assert [wc.wr_id for wc in pair.wait(depth)] == list(range(depth))
    pair.a.post_send(wrs[depth:])
    assert [wc.wr_id for wc in pair.wait(3)] == [depth, depth + 1, depth + 2]
