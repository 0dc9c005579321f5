"""SIGNALED and sq_sig_all: what completes, and when what is unsignaled is done."""

from __future__ import annotations

import pytest
from support import TYPES, nothing_comes
from support.soft_queues import WRS

import rdmapost as rp
from rdmapost import SendFlags, WCStatus


def test_only_signaled_work_requests_complete(rc):
    """The completion of a signaled send covers the unsignaled ones before it."""
    flags = [0, SendFlags.SIGNALED, 0, 0, SendFlags.SIGNALED, 0]
    rc.a.post_send(
        [rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=i, send_flags=f) for i, f in enumerate(flags)]
    )
    assert [wc.wr_id for wc in rc.wait(2)] == [1, 4]
    assert rc.a.outstanding.send == 1
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=6))
    assert [wc.wr_id for wc in rc.wait()] == [6]
    assert rc.a.outstanding.send == 0
    assert rc.cq.poll() == []


@pytest.mark.parametrize("qp_type", TYPES)
def test_sq_sig_all_makes_every_send_complete(connect, qp_type):
    pair = connect(qp_type, sq_sig_all=True)
    pair.b.post_recv([rp.RecvWR(pair.theirs[:100], wr_id=100 + i) for i in range(3)])
    pair.a.post_send([pair.send(pair.mine[:8], wr_id=i, send_flags=0) for i in range(3)])
    assert [wc.wr_id for wc in pair.wait(6) if wc.wr_id < 100] == [0, 1, 2]
    assert pair.a.outstanding.send == 0


def test_unsignaled_work_request_that_fails_completes(rc):
    """And so do those after it, flushed."""
    wrong = rc.theirs.rkey ^ 0xA5
    rc.a.post_send(
        [
            rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=wrong, send_flags=0, wr_id=1),
            rc.wr(rp.RdmaWrite, rc.mine[:8], send_flags=0, wr_id=2),
        ]
    )
    assert [(wc.wr_id, wc.status) for wc in rc.cq.wait(2)] == [
        (1, WCStatus.REM_ACCESS_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]


@pytest.mark.parametrize("sq_sig_all", [False, True])
def test_full_send_queue_says_that_unsignaled_sends_never_leave_it(connect, sq_sig_all):
    """But not if every send is signaled."""
    pair = connect(max_send_wr=8, sq_sig_all=sq_sig_all)
    depth = pair.a.max_send_wr
    quiet = [pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0) for _ in range(depth + 1)]
    pair.a.post_send(quiet[:depth])
    with pytest.raises(rp.PostError, match="the queue is full") as caught:
        pair.a.post_send(quiet[depth])
    doubt = caught.value.reason.endswith("; if none of them is SIGNALED, no slot is ever freed")
    assert doubt is not sq_sig_all


def test_unsignaled_work_requests_are_outstanding_until_a_later_completion(connect):
    pair = connect()
    quiet = [pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0, wr_id=i) for i in range(5)]
    pair.a.post_send(quiet)
    assert pair.a.outstanding == (5, 0)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=5))
    assert pair.a.outstanding == (6, 0)
    pair.a.post_send(quiet[:2])
    assert [wc.wr_id for wc in pair.wait(1)] == [5]
    assert pair.a.outstanding == (2, 0)
    assert pair.cq.poll() == []


def test_sq_sig_all_signals_everything(connect):
    pair = connect(sq_sig_all=True)
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1], send_flags=0, wr_id=i) for i in (1, 2)])
    assert [wc.wr_id for wc in pair.wait(2)] == [1, 2]
    assert pair.a.outstanding == (0, 0)


def test_send_that_is_not_signaled_has_no_completion_of_its_own(rc):
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], send_flags=0))
    nothing_comes(rc.cq)
    assert rc.a.outstanding == (1, 0)


@pytest.mark.parametrize("kind", WRS.values())
def test_send_work_request_is_signaled_by_default(kind):
    assert kind().send_flags == SendFlags.SIGNALED
    assert kind(send_flags=0).send_flags == 0
    assert isinstance(kind(), rp.SendWR)
