"""retry_cnt and rnr_retry: when the sender gives up an unanswered request."""

from __future__ import annotations

import pytest
from support import Pair, nothing_comes

import rdmapost as rp
from rdmapost import QPState, WCStatus


@pytest.fixture
def unconnected(connect) -> Pair:
    """Two queue pairs that are not yet connected."""
    return connect(to=QPState.RESET)


def test_rnr_retry_7_waits_for_a_receive_forever(unconnected):
    """The default gives up after a moment; 7 never does."""
    unconnected.a.connect(unconnected.b.endpoint(), rnr_retry=7)
    unconnected.b.connect(unconnected.a.endpoint())
    unconnected.a.post_send(rp.Send(unconnected.mine[:8], wr_id=1))
    nothing_comes(unconnected.cq)
    assert unconnected.a.outstanding == (1, 0)
    assert unconnected.a.state is QPState.RTS
    unconnected.b.post_recv(rp.RecvWR(unconnected.theirs[:8], wr_id=2))
    assert sorted(wc.wr_id for wc in unconnected.wait(2)) == [1, 2]
    assert unconnected.a.outstanding == (0, 0)


def test_rnr_retry_0_to_6_gives_up(unconnected):
    unconnected.a.connect(unconnected.b.endpoint(), rnr_retry=2)
    unconnected.b.connect(unconnected.a.endpoint(), min_rnr_timer=1)
    unconnected.a.post_send(rp.Send(unconnected.mine[:8], wr_id=1))
    (done,) = unconnected.cq.wait()
    assert (done.wr_id, done.status) == (1, WCStatus.RNR_RETRY_EXC_ERR)


def test_timeout_0_waits_for_an_answer_forever(unconnected):
    unconnected.a.connect(unconnected.b.endpoint(), timeout=0, retry_cnt=0)
    unconnected.a.post_send(unconnected.wr(rp.RdmaWrite, unconnected.mine[:8], wr_id=1))
    nothing_comes(unconnected.cq)
    assert unconnected.a.outstanding == (1, 0)
    assert unconnected.a.state is QPState.RTS
    unconnected.a.to_err()
    assert [(wc.wr_id, wc.status) for wc in unconnected.cq.wait()] == [(1, WCStatus.WR_FLUSH_ERR)]


def test_timeout_and_retries_end_a_request_that_nobody_answers(unconnected):
    unconnected.a.connect(unconnected.b.endpoint(), timeout=10, retry_cnt=1)
    unconnected.a.post_send(unconnected.wr(rp.RdmaWrite, unconnected.mine[:8], wr_id=1))
    (done,) = unconnected.cq.wait()
    assert (done.wr_id, done.status) == (1, WCStatus.RETRY_EXC_ERR)


def test_no_receive_ends_with_rnr_retry_exceeded(rc):
    """rnr_retry is small here; 7 would be forever."""
    rc.a.post_send([rp.Send(rc.mine[:4], wr_id=1), rc.wr(rp.RdmaWrite, rc.mine[:4], wr_id=2)])
    done = rc.cq.wait(2)
    assert [(wc.wr_id, wc.status) for wc in done] == [
        (1, WCStatus.RNR_RETRY_EXC_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]
    assert rc.a.state is rp.QPState.ERR
    assert rc.a.outstanding == (0, 0)
    with pytest.raises(rp.CompletionError, match="RNR_RETRY_EXC_ERR"):
        done[0].check()


def test_unreachable_peer_ends_with_retry_exceeded(connect):
    """A queue pair that was closed does not answer."""
    pair = connect(to=QPState.RESET)
    remote = pair.b.endpoint()
    pair.b.close()
    pair.a.connect(remote, timeout=8, retry_cnt=1)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1]))
    assert pair.cq.wait()[0].status is WCStatus.RETRY_EXC_ERR
