"""Asynchronous events of soft0: when each is raised."""

from __future__ import annotations

import pytest
from support import async_events, soft_context
from support.async_events import event, events

import rdmapost as rp
from rdmapost import EventType, QPState, QPType

context = soft_context
no_old_events = async_events.no_old_events
pytestmark = pytest.mark.usefixtures("no_old_events")


def test_first_message_in_rtr_raises_comm_est(connect, context):
    """The event is raised once, until the next reset."""
    pair = connect(to=QPState.RESET)
    for _ in range(2):
        pair.b.to_init()
        pair.b.to_rtr(pair.a.endpoint())
        pair.a.connect(pair.b.endpoint())
        assert events(context) == []
        pair.works()
        assert events(context) == [(EventType.COMM_EST, pair.b)]
        pair.works()
        pair.b.to_rts()
        pair.works()
        assert events(context) == []
        pair.a.to_reset()
        pair.b.to_reset()


def test_message_in_rts_raises_no_event(rc, context):
    rc.works()
    assert events(context) == []


def test_error_state_of_a_queue_pair_with_an_srq_raises_last_wqe_reached(
    connect, stack, pd, context
):
    """The queue pair takes no more receives; they stay in the SRQ (ibv_get_async_event(3))."""
    mr = stack.enter_context(rp.MR(pd, 64))
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(b_options={"srq": srq})
    srq.post_srq_recv(rp.RecvWR(mr[:8]))
    pair.b.to_err()
    assert events(context) == [(EventType.QP_LAST_WQE_REACHED, pair.b)]
    # The queue pair is in ERR already.
    pair.b.to_err()
    assert events(context) == []
    assert srq.outstanding == 1
    pair.a.to_err()
    assert events(context) == []


def test_sq_drained_is_raised_only_on_request():
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        while context.get_async_event(0) is not None:
            pass
        qp.to_sqd()
        assert context.get_async_event(0) is None
        qp.to_rts()
        qp.modify(qp_state=QPState.SQD, en_sqd_async_notify=True)
        found = event(context)
        assert (found.event_type, found.element) == (EventType.SQ_DRAINED, qp)
        # The request was for that transition only.
        qp.modify(qp_state=QPState.SQD, timeout=9)
        qp.to_rts()
        qp.to_sqd()
        assert context.get_async_event(0) is None
