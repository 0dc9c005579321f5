"""Queue pairs of soft0: slots, attributes, states and resets."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import ALL, soft_context
from support.async_events import events

import rdmapost as rp
from rdmapost import EventType, MigState, QPAttrMask, QPState, QPType, SendFlags, WCStatus
from rdmapost._binding import ffi

context = soft_context


def to_state(qp: rp.QP, state: QPState, mask: QPAttrMask = QPAttrMask.STATE) -> None:
    """Move a queue pair with the device's verb, as a program without the library does."""
    attr = ffi.new("struct ibv_qp_attr *", {"qp_state": state, "port_num": 1})
    qp.pd.context._provider.modify_qp(qp._handle, attr, QPAttrMask.STATE | mask)


def test_xrc_initiator_does_not_acknowledge_requests(pd, stack, rc):
    """Only an XRC target accepts requests."""
    a, b = (stack.enter_context(rp.QP(pd, QPType.XRC_SEND, rc.cq)) for _ in range(2))
    b.connect(a.endpoint())
    a.connect(b.endpoint(), timeout=1, retry_cnt=0)
    rc.mine.buffer[:8] = b"12345678"
    a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=rc.theirs.addr, rkey=rc.theirs.rkey))
    assert [wc.status for wc in rc.cq.wait()] == [WCStatus.RETRY_EXC_ERR]
    assert not any(rc.theirs.buffer)


# ---- slots ------------------------------------------------------------------------


def full(post: Callable[[list[Any]], None], wr: Any, depth: int) -> None:
    """Check that a queue accepts exactly `depth` work requests."""
    with pytest.raises(rp.PostError) as caught:
        post([wr] * (depth + 1))
    error = caught.value
    assert (error.errno, error.index, error.posted) == (errno.ENOMEM, depth, depth)


def test_completion_frees_its_slot_and_those_of_earlier_unsignaled_sends(connect):
    pair = connect(max_send_wr=4, checked=False)
    quiet = pair.wr(rp.RdmaWrite, pair.mine[:8], send_flags=0)
    for count in (3, 3, 1, 0, 3):
        pair.a.post_send([quiet] * count + [pair.wr(rp.RdmaWrite, pair.mine[:8])])
        pair.wait(1)
    full(pair.a.post_send, quiet, 4)


@pytest.mark.parametrize("wr_class", [rp.Send, rp.RdmaWriteWithImm])
def test_completion_of_a_receive_frees_its_slot(connect, wr_class):
    pair = connect(max_recv_wr=4, checked=False)
    for _ in range(3):
        pair.b.post_recv([rp.RecvWR(pair.theirs[:8])] * 2)
        pair.a.post_send([pair.wr(wr_class, pair.mine[:8])] * 2)
        pair.wait(4)
    full(pair.b.post_recv, rp.RecvWR(pair.theirs[:8]), 4)


def test_flushed_receive_frees_its_slot(connect):
    pair = connect(max_recv_wr=4, checked=False)
    pair.b.post_recv([rp.RecvWR(pair.theirs[:8])] * 4)
    pair.b.to_err()
    assert [wc.status for wc in pair.cq.wait(4)] == [WCStatus.WR_FLUSH_ERR] * 4
    full(pair.b.post_recv, rp.RecvWR(pair.theirs[:8]), 4)


def test_queue_pair_created_without_tso_refuses_a_header(pd, cq):
    with rp.QP(pd, QPType.RAW_PACKET, cq, checked=False) as qp:
        qp.connect()
        with pytest.raises(rp.PostError) as caught:
            qp.post_send(rp.TSO(hdr=b"x", mss=9))
        assert (caught.value.errno, caught.value.index) == (errno.EINVAL, 0)


# ---- attributes and resets --------------------------------------------------------


def test_query_reports_attributes_only_after_they_are_set(pd, cq):
    """They are unset before that, and after a reset."""
    with rp.QP(pd, QPType.RC, cq) as qp:
        new = qp.query()
        assert (new.qp_access_flags, new.timeout, new.retry_cnt) == (rp.Access(0), 0, 0)
        assert (new.dest_qp_num, new.path_mtu, new.max_rd_atomic) == (0, None, 0)
        qp.connect(qp.endpoint())
        assert qp.query() != new
        qp.to_reset()
        assert qp.query() == new


@pytest.mark.parametrize(("value", "fits"), [(MigState.MIGRATED, True), (MigState.REARM, False)])
def test_path_migration_state_can_only_be_migrated(rc, value, fits):
    if fits:
        rc.a.modify(path_mig_state=value)
    else:
        with pytest.raises(rp.VerbsError) as caught:
            rc.a.modify(path_mig_state=value)
        assert caught.value.errno == errno.EINVAL
    assert rc.a.query().path_mig_state is MigState.MIGRATED
    rc.works()


def test_reset_drops_receives_and_completions(rc):
    """The device drops them; QP.to_reset() would take the completions from the CQ first."""
    depth = rc.b.max_recv_wr
    rc.b.post_recv([rp.RecvWR(rc.theirs[1024:1032], wr_id=i) for i in range(depth)])
    rc.a.post_send(rp.Send(rc.mine[:8]))
    for qp in (rc.a, rc.b):
        to_state(qp, QPState.RESET)
    assert rc.cq.poll() == []
    for qp in (rc.a, rc.b):
        qp.to_reset()
    rc.connect()
    rc.works()
    rc.b.post_recv([rp.RecvWR(rc.theirs[1024:1032], wr_id=i) for i in range(depth)])


def test_reset_forgets_earlier_attempts(rc, context):
    """A request that waits for its next attempt is dropped, and does not delay the next request."""
    for qp in (rc.a, rc.b):
        qp.to_reset()
    rc.a.connect(rc.b.endpoint(), rnr_retry=1)
    # 655 ms.
    rc.b.connect(rc.a.endpoint(), min_rnr_timer=0)
    rc.a.post_send(rp.Send(rc.mine[:8]))
    rc.a.to_reset()
    rc.b.to_reset()
    rc.connect()
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=2))
    context.faults.not_ready(rc.b.qp_num, 1)
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=1))
    assert sorted(wc.wr_id for wc in rc.wait(2)) == [1, 2]


# ---- states -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "mask"),
    [(QPState.INIT, QPAttrMask.PORT | QPAttrMask.PKEY_INDEX), (QPState.RTS, QPAttrMask.SQ_PSN)],
    ids=["lacking", "no step"],
)
def test_invalid_state_transition_is_refused_by_the_device_too(pd, cq, state, mask):
    """The library says which attribute is missing before it asks the device."""
    with rp.QP(pd, QPType.RC, cq) as qp:
        with pytest.raises(rp.VerbsError) as caught:
            to_state(qp, state, mask)
        assert (caught.value.call, caught.value.errno) == ("ibv_modify_qp", errno.EINVAL)
        assert qp.query().qp_state is QPState.RESET


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD])
def test_failed_send_flushes_the_sends_posted_after_it(connect, qp_type):
    """Also on UC and UD, where the queue pair goes to SQE and can still receive."""
    pair = connect(qp_type)
    wrong = rp.SGE(pair.mine.addr, 8, pair.mine.lkey ^ 0xA5)
    pair.a.post_send([pair.send(wrong, wr_id=1), pair.send(pair.mine[:8], wr_id=2)])
    assert [(wc.wr_id, wc.status) for wc in pair.cq.wait(2)] == [
        (1, WCStatus.LOC_PROT_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]
    assert pair.a.query().qp_state is QPState.SQE


def test_queue_pair_connected_to_itself_flushes_the_request_that_breaks_it(pd, cq, context, stack):
    """It is its own peer: its bad request breaks it, and is flushed with the rest of the queue."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    with rp.QP(pd, QPType.RC, cq) as qp:
        for _ in range(2):
            qp.connect(qp.endpoint())
            events(context)
            write = rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey ^ 0xA5)
            qp.post_send([replace(write, wr_id=i) for i in (1, 2)])
            found = [(wc.wr_id, wc.status) for wc in cq.wait(2)]
            assert found == [(i, WCStatus.WR_FLUSH_ERR) for i in (1, 2)]
            assert cq.poll() == []
            assert events(context) == [(EventType.QP_ACCESS_ERR, qp)]
            qp.to_reset()
        qp.connect(qp.endpoint())
        qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey))
        cq.wait()[0].check()


# ---- the send queue ---------------------------------------------------------------


def test_unsignaled_posts_fill_the_send_queue(context):
    """Slots come free only when a later signaled completion is polled."""
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 4096, ALL) as mr,
        rp.QP(pd, QPType.RC, cq, max_send_wr=4, checked=False) as near,
        rp.QP(pd, QPType.RC, cq) as far,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        silent = rp.RdmaWrite(
            mr[0:8], remote_addr=mr.addr + 64, rkey=mr.rkey, send_flags=SendFlags(0)
        )
        near.post_send([silent] * 4)
        with pytest.raises(rp.PostError) as caught:
            near.post_send(silent)
        assert caught.value.errno == 12
