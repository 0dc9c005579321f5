"""Error completions: what the device or the peer refuses, and the status that says why."""

from __future__ import annotations

import pytest
from support import LOCAL_ERROR

import rdmapost as rp
from rdmapost import WCStatus


@pytest.mark.parametrize("what", ["rkey", "range", "permission"])
@pytest.mark.parametrize("kind", [rp.RdmaWrite, rp.RdmaRead])
def test_access_that_the_peer_did_not_grant_ends_with_an_error_completion(connect, what, kind):
    pair = connect()
    with rp.MR(pair.pd, 64, rp.Access.LOCAL_WRITE) as closed_to_peers:
        fields = {
            "rkey": {"rkey": pair.theirs.rkey ^ 0xA5},
            "range": {"remote_addr": pair.theirs.addr + len(pair.theirs) - 7},
            "permission": {"remote_addr": closed_to_peers.addr, "rkey": closed_to_peers.rkey},
        }[what]
        pair.a.post_send(pair.wr(kind, pair.mine[:8], wr_id=1, **fields))
        (done,) = pair.cq.wait()
        assert (done.wr_id, done.status) == (1, WCStatus.REM_ACCESS_ERR)
        assert not any(closed_to_peers.buffer)
    assert not any(pair.theirs.buffer)


def test_access_that_the_queue_pair_did_not_grant_ends_with_an_error_completion(connect):
    """The region allows the write, but the peer's queue pair does not."""
    pair = connect(access=rp.Access.REMOTE_READ)
    pair.a.post_send(pair.wr(rp.RdmaRead, pair.mine[:8]))
    pair.wait()
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    (done,) = pair.cq.wait()
    # IBTA: REM_ACCESS_ERR; rxe calls a request that the QP does not take invalid.
    assert done.status in (WCStatus.REM_ACCESS_ERR, WCStatus.REM_INV_REQ_ERR)


@pytest.mark.parametrize("kind", [rp.Send, rp.RdmaWrite, rp.RdmaRead])
def test_wrong_lkey_is_a_local_error(connect, kind):
    """An lkey given as a number is passed on, and the device detects that it is wrong."""
    pair = connect()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
    pair.a.post_send(pair.wr(kind, rp.SGE(pair.mine.addr, 8, pair.mine.lkey ^ 0xA5), wr_id=1))
    (done,) = [wc for wc in pair.cq.wait() if wc.wr_id == 1]
    assert done.status in LOCAL_ERROR


def test_wrong_lkey_of_a_receive_fails_on_both_sides(rc):
    rc.b.post_recv(rp.RecvWR(rp.SGE(rc.theirs.addr, 8, rc.theirs.lkey ^ 0xA5), wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(2)}
    assert done[9] is WCStatus.REM_OP_ERR
    # IBTA: LOC_PROT_ERR; rxe calls it LOC_QP_OP_ERR.
    assert done[7] in (WCStatus.LOC_PROT_ERR, WCStatus.LOC_QP_OP_ERR)


def test_receive_that_is_too_small_fails_on_both_sides(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:4], wr_id=7))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=9))
    done = {wc.wr_id: wc.status for wc in rc.cq.wait(2)}
    # IBTA: REM_INV_REQ_ERR and LOC_LEN_ERR; rxe takes the receive for malformed, or, when the
    # message has several packets, reports the requester's status on both sides.
    assert (done[9], done[7]) in (
        (WCStatus.REM_INV_REQ_ERR, WCStatus.LOC_LEN_ERR),
        (WCStatus.REM_OP_ERR, WCStatus.LOC_QP_OP_ERR),
        (WCStatus.REM_INV_REQ_ERR, WCStatus.REM_INV_REQ_ERR),
    )
    assert not any(rc.theirs.buffer[4:])


def test_error_completion_has_only_what_is_valid(rc):
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8], rkey=rc.theirs.rkey ^ 0xA5, wr_id=3))
    (done,) = rc.cq.wait()
    assert (done.wr_id, done.qp_num) == (3, rc.a.qp_num)
    assert (done.opcode, done.byte_len, done.imm_data, done.invalidated_rkey) == (
        None,
        0,
        None,
        None,
    )
