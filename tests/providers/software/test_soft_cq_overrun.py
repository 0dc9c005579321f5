"""CQ overruns on soft0: the events, the queue pairs that break, and the errors of waits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

import pytest
from support import soft_context, until
from support.async_events import event
from support.findings import named

import rdmapost as rp
from rdmapost import EventType, QPState, QPType, WCStatus

context = soft_context


@contextlib.contextmanager
def small_cq(qp_type):
    """Open a device; yield it, a CQ for one completion, memory, and a queue pair."""
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context, 1) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, qp_type, cq) as qp,
    ):
        yield context, cq, mr, qp


def test_cq_overrun_breaks_its_queue_pair():
    """A completion without room is lost, and its queue pair breaks."""
    with small_cq(QPType.UD) as (context, cq, mr, qp):
        qp.connect()
        while context.get_async_event(0) is not None:
            pass
        ah = qp.ah_to(qp.endpoint())
        send = rp.Send(mr[:8], ah=ah, remote_qpn=1, remote_qkey=1)
        qp.post_send([send, send])
        types = [event(context).event_type for _ in range(2)]
        assert types == [EventType.CQ_ERR, EventType.QP_FATAL]
        assert qp.state is QPState.ERR
        # The queue pair breaks only once.
        qp.post_send(send)
        assert "the CQ has overrun" in named(qp.diagnose(), "cq-overrun").evidence
        assert context.get_async_event(0) is None
        assert [wc.status for wc in cq.poll()] == [WCStatus.SUCCESS]
        assert_points_at_the_overrun(qp)
        with pytest.raises(rp.VerbsError, match="the CQ has overrun; destroy it") as refused:
            cq.resize(16)
        assert refused.value.errno == errno.EINVAL
        qp.close()
        ah.close()


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_receive_whose_completion_is_lost_returns_to_the_srq(device, qp_type):
    """Otherwise each overrun would cost a shared receive queue one of its slots, for good."""
    with (
        rp.open_device(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.SRQ(pd, 2) as srq,
    ):
        for _ in range(3):
            with (
                rp.CQ(context, 1) as small,
                rp.QP(pd, qp_type, cq) as sender,
                rp.QP(pd, qp_type, cq, small, srq=srq) as receiver,
            ):
                sender.connect(receiver.endpoint())
                receiver.connect(sender.endpoint())
                srq.post_srq_recv([rp.RecvWR(mr[:8])] * (2 - srq.outstanding))
                sender.post_send([rp.Send(mr[:8])] * 2)
                cq.wait(2, 5)
                until(lambda receiver=receiver: receiver.query().qp_state is QPState.ERR)
                assert len(small.poll()) == 1
                assert srq.outstanding == 1


def assert_points_at_the_overrun(qp):
    findings = qp.diagnose()
    # One remedy, although the CQ is also too small.
    assert "cq-too-small" not in [finding.name for finding in findings]
    assert "resize(" not in " ".join(finding.remedy for finding in findings)
    (remedy,) = {finding.remedy for finding in findings if finding.severity == "problem"}
    assert remedy == named(findings, "cq-overrun").remedy
    assert remedy.startswith("close the CQ and the queue pairs that complete on it, and")
    assert not [finding for finding in findings if finding.name == "not-polled"]
    state = named(findings, "qp-state")
    assert "its CQ has overrun" in state.evidence
    assert "poll" not in state.remedy


def test_timeout_of_a_wait_for_lost_completions_names_the_overrun():
    """The wait leaves the event for get_async_event()."""
    with small_cq(QPType.RC) as (context, cq, mr, qp):
        qp.to_init()
        qp.post_recv([rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8])])
        with pytest.raises(rp.WaitTimeout) as caught:
            cq.wait(3, timeout=0)
        assert str(caught.value) == "0 of 3 completions came within 0 s"
        qp.to_err()
        words = r"1 of 3 completions came within 0 s; .*; the CQ has overrun"
        with pytest.raises(rp.WaitTimeout, match=words):
            cq.wait(3, timeout=0)
        with pytest.raises(rp.WaitTimeout, match=words):
            asyncio.run(cq.completions(3, timeout=0))
        assert_points_at_the_overrun(qp)
        found = event(context)
        assert (found.event_type, found.element) == (EventType.CQ_ERR, cq)


@pytest.mark.parametrize("returned", [False, True], ids=["taken", "returned"])
def test_overrun_reported_only_by_an_event_is_known_after_the_event(monkeypatch, returned):
    """libibverbs, for instance, reports an overrun only with the event."""
    with small_cq(QPType.RC) as (context, cq, mr, qp):
        monkeypatch.setattr(context._provider, "has_overrun", lambda *_: False)
        qp.to_init()
        qp.post_recv([rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8])])
        qp.to_err()
        with pytest.raises(rp.WaitTimeout, match="ended with WR_FLUSH_ERR") as known:
            cq.wait(2, timeout=0)
        assert "overrun" not in str(known.value)
        if returned:
            assert event(context).event_type == EventType.CQ_ERR
        else:
            # As if a signal handler had ended get_async_event().
            assert context._take_event()
        with pytest.raises(rp.WaitTimeout, match="the CQ has overrun"):
            cq.wait(2, timeout=0)


def test_cq_overrun_by_a_flush_is_reported():
    with small_cq(QPType.RC) as (context, cq, mr, qp):
        qp.to_init()
        qp.post_recv([rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8]), rp.RecvWR(mr[:8])])
        qp.to_err()
        found = event(context)
        assert (found.event_type, found.element) == (EventType.CQ_ERR, cq)
        assert context.get_async_event(0) is None
        assert [wc.status for wc in cq.poll()] == [WCStatus.WR_FLUSH_ERR]


def test_overrun_of_an_xrc_srqs_cq_is_reported_to_the_device_that_has_the_cq(tmp_path):
    """The queue pair whose message overruns the CQ is on another open device."""
    file = os.open(tmp_path / "domain", os.O_CREAT | os.O_RDWR)
    with (
        rp.open_device("soft0") as near,
        rp.open_device("soft0") as far,
        contextlib.ExitStack() as on,
    ):
        pd, far_pd = on.enter_context(rp.PD(near)), on.enter_context(rp.PD(far))
        xrcd = on.enter_context(rp.XRCD(near, file))
        far_xrcd = on.enter_context(rp.XRCD(far, file))
        cq, small = on.enter_context(rp.CQ(near, 64)), on.enter_context(rp.CQ(far, 2))
        mr, far_mr = on.enter_context(rp.MR(pd, 64)), on.enter_context(rp.MR(far_pd, 64))
        srq = on.enter_context(rp.SRQ(far_pd, srq_type=rp.SRQType.XRC, xrcd=far_xrcd, cq=small))
        sender = on.enter_context(rp.QP(pd, QPType.XRC_SEND, cq))
        target = on.enter_context(rp.QP(None, QPType.XRC_RECV, xrcd=xrcd))
        sender.connect(target.endpoint())
        target.connect(sender.endpoint())
        for _ in range(3):
            srq.post_srq_recv(rp.RecvWR(far_mr[:8]))
            sender.post_send(rp.Send(mr[:8], remote_srqn=srq.srq_num))
        found = event(far)
        assert (found.event_type, found.element) == (EventType.CQ_ERR, small)
        assert event(near).event_type is EventType.QP_FATAL
        assert near.get_async_event(0) is None
    os.close(file)
