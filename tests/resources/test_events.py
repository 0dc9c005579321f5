"""Shared completion channels, asynchronous events, and deliberate faults."""

from __future__ import annotations

import datetime
import errno
import select
import threading

import pytest
from support import ALL, needs, until

import rdmapost as rp
from rdmapost import EventType, QPType, SendFlags, WCStatus


@pytest.fixture
def channel(context, stack):
    return stack.enter_context(rp.CompChannel(context))


@pytest.fixture(autouse=True)
def no_old_events(context):
    """Take what earlier tests have left."""
    while rp.get_async_event(context) is not None:
        pass


@pytest.fixture
def mr(pd, stack):
    return stack.enter_context(rp.MR(pd, 4096, ALL))


def connected(stack, pd, near_cq, far_cq):
    """Make two connected RC queue pairs, each with its own CQ."""
    near = stack.enter_context(rp.QP(pd, QPType.RC, near_cq))
    far = stack.enter_context(rp.QP(pd, QPType.RC, far_cq))
    far.connect(near.endpoint())
    near.connect(far.endpoint(), rnr_retry=1)
    return near, far


def test_an_event_names_the_cq_that_has_completions(context, pd, channel, cq, mr, stack):
    quiet = stack.enter_context(rp.CQ(context, 8, channel=channel))
    busy = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, busy)
    far.post_recv(rp.RecvWR(mr[64:128], wr_id=3))
    quiet.req_notify()
    busy.req_notify()
    assert channel.get_cq_event(0) is None
    near.post_send(rp.Send(mr[0:8]))
    assert channel.get_cq_event(5) is busy
    assert [wc.wr_id for wc in busy.poll()] == [3]
    # One event for one request; nothing was asked for again.
    assert channel.get_cq_event(0) is None


def test_the_descriptor_is_readable_when_there_is_an_event(context, pd, channel, cq, mr, stack):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv([rp.RecvWR(mr[64:128])] * 2)
    far_cq.req_notify()
    assert select.select([channel], [], [], 0)[0] == []
    near.post_send(rp.Send(mr[0:8]))
    assert select.select([channel], [], [], 5)[0] == [channel]
    assert channel.get_cq_event(0) is far_cq


def test_solicited_only_wakes_for_solicited_messages_alone(context, pd, channel, cq, mr, stack):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv([rp.RecvWR(mr[64:128], wr_id=n) for n in range(2)])
    far_cq.req_notify(solicited_only=True)
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(1)
    assert channel.get_cq_event(0) is None
    near.post_send(rp.Send(mr[0:8], send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    assert channel.get_cq_event(5) is far_cq
    assert [wc.wr_id for wc in far_cq.poll()] == [0, 1]
    # It was asked for one event.
    far.post_recv(rp.RecvWR(mr[64:128]))
    near.post_send(rp.Send(mr[0:8], send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    cq.wait(2)
    assert channel.get_cq_event(0) is None


def test_a_thread_asleep_on_the_channel_wakes(context, pd, channel, cq, mr, stack):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv(rp.RecvWR(mr[64:128]))
    far_cq.req_notify()
    woken = []
    sleeper = threading.Thread(target=lambda: woken.append(channel.get_cq_event(10)))
    sleeper.start()
    near.post_send(rp.Send(mr[0:8]))
    sleeper.join(10)
    assert woken == [far_cq]


def test_misuse_of_channels_is_refused_with_advice(context, pd, channel, cq, stack):
    shared = stack.enter_context(rp.CQ(context, 8, channel=channel))
    with pytest.raises(rp.RdmaError, match="channel that it shares"):
        shared.wait(1, 0)
    with pytest.raises(rp.RdmaError, match="no channel"):
        cq.req_notify()
    with pytest.raises(rp.InUseError, match="CQ of"):
        channel.close()
    shared.close()
    channel.close()
    with pytest.raises(rp.ClosedError):
        channel.fileno()


def test_an_access_error_is_an_event_of_the_responder(context, pd, cq, mr, stack):
    needs(context.kind == "soft", "an asynchronous event on an access error", context)
    near, far = connected(stack, pd, cq, cq)
    near.post_send(rp.RdmaWrite(mr[0:8], remote_addr=mr.addr, rkey=mr.rkey ^ 1))
    assert cq.wait(1)[0].status is WCStatus.REM_ACCESS_ERR
    event = rp.get_async_event(context, 5)
    assert event == rp.AsyncEvent(EventType.QP_ACCESS_ERR, far)
    assert rp.get_async_event(context) is None


def test_the_limit_of_an_srq_is_an_event(context, pd, cq, mr, stack):
    srq = stack.enter_context(rp.SRQ(pd, 8))
    near = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    far = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    far.connect(near.endpoint())
    near.connect(far.endpoint())
    srq.post_srq_recv([rp.RecvWR(mr[64:128])] * 4)
    srq.arm_limit(3)
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(2)
    assert rp.get_async_event(context) is None
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(2)
    assert rp.get_async_event(context, 5) == rp.AsyncEvent(EventType.SRQ_LIMIT_REACHED, srq)
    assert srq.query().srq_limit == 0


class TestFaults:
    """A planned fault fires, once."""

    @pytest.fixture
    def faults(self, context):
        needs(context.kind == "soft", "fault injection", context)
        yield context.faults
        context.faults.clear()

    def test_a_post_is_refused(self, faults, pd, cq, mr, stack):
        near, _ = connected(stack, pd, cq, cq)
        write = rp.RdmaWrite(mr[0:8], remote_addr=mr.addr + 64, rkey=mr.rkey)
        faults.fail_post(errno.ENOMEM, after=2)
        with pytest.raises(rp.PostError) as caught:
            near.post_send([write] * 4)
        assert (caught.value.errno, caught.value.index, caught.value.posted) == (errno.ENOMEM, 2, 2)
        near.post_send([write] * 2)
        assert [wc.status for wc in cq.wait(4)] == [WCStatus.SUCCESS] * 4

    def test_a_work_request_completes_with_a_status(self, faults, pd, cq, mr, stack):
        near, _ = connected(stack, pd, cq, cq)
        write = {"remote_addr": mr.addr + 64, "rkey": mr.rkey}
        faults.complete_with(7, WCStatus.RETRY_EXC_ERR)
        near.post_send([rp.RdmaWrite(mr[0:8], wr_id=n, **write) for n in (6, 7, 8)])
        assert [(wc.wr_id, wc.status) for wc in cq.wait(3)] == [
            (6, WCStatus.SUCCESS),
            (7, WCStatus.RETRY_EXC_ERR),
            (8, WCStatus.WR_FLUSH_ERR),
        ]

    @pytest.mark.parametrize(
        ("times", "status"), [(1, WCStatus.SUCCESS), (2, WCStatus.RNR_RETRY_EXC_ERR)]
    )
    def test_a_receiver_is_not_ready(self, faults, pd, cq, mr, stack, times, status):
        """rnr_retry is 1 here: the second refusal is one too many."""
        near, far = connected(stack, pd, cq, cq)
        far.post_recv(rp.RecvWR(mr[64:128], wr_id=1))
        faults.not_ready(far.qp_num, times)
        near.post_send(rp.Send(mr[0:8], wr_id=2))
        sent = cq.wait(2 if status is WCStatus.SUCCESS else 1)
        assert {wc.wr_id: wc.status for wc in sent}[2] is status


def test_only_the_software_device_can_inject_faults(context):
    if context.kind == "soft":
        context.faults.clear()
        return
    with pytest.raises(rp.UnsupportedError, match="only the software device"):
        _ = context.faults


def test_closing_a_device_wakes_a_thread_that_waits_for_its_events(context):
    other, raised = rp.open_device(context.name), []

    def wait():
        try:
            rp.get_async_event(other, None)
        except rp.ClosedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: other._poller.waiting)
    other.close()
    thread.join(20)
    assert raised == [f"device {other.name} is closed"]


def test_timeout_that_is_no_number_of_seconds_is_refused_by_name(context, cq, stack):
    channel = stack.enter_context(rp.CompChannel(context))
    waits = (
        lambda timeout: cq.wait(1, timeout),
        channel.get_cq_event,
        lambda timeout: rp.get_async_event(context, timeout),
    )
    for wait in waits:
        for wrong in (datetime.timedelta(seconds=1), "1", b"1", [1]):
            words = f"timeout: expected seconds or None, got {type(wrong).__name__}"
            with pytest.raises(TypeError, match=words):
                wait(wrong)
        for wrong in (float("nan"), 10**400):
            with pytest.raises(ValueError, match="timeout: "):
                wait(wrong)
    with pytest.raises(TypeError, match="context: expected Context, got CQ"):
        rp.get_async_event(cq)


def test_timeout_is_a_number_of_any_type(cq):
    class Seconds:
        def __float__(self):
            return 0.002

    for timeout in (Seconds(), 0, 0.002, False, -1):
        with pytest.raises(rp.WaitTimeout, match="0 of 1 completions came within"):
            cq.wait(1, timeout)
