"""Deliberate faults: each fires once, keeps nothing alive, and works while its device is open."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import pickle
import weakref
from collections.abc import Iterator

import pytest
from support import ALL, connected, needs

import rdmapost as rp
from rdmapost import QPType, WCStatus


@pytest.fixture
def mr(pd, stack):
    return stack.enter_context(rp.MR(pd, 4096, ALL))


class TestFaults:
    """A planned fault fires once."""

    @pytest.fixture
    def faults(self, context):
        needs(context.kind == "soft", "fault injection", context)
        yield context.faults
        context.faults.clear()

    def test_planned_fault_refuses_a_post(self, faults, pd, cq, mr, stack):
        near, _ = connected(stack, pd, cq, cq)
        write = rp.RdmaWrite(mr[0:8], remote_addr=mr.addr + 64, rkey=mr.rkey)
        faults.fail_post(errno.ENOMEM, after=2)
        with pytest.raises(rp.PostError) as caught:
            near.post_send([write] * 4)
        assert (caught.value.errno, caught.value.index, caught.value.posted) == (errno.ENOMEM, 2, 2)
        near.post_send([write] * 2)
        assert [wc.status for wc in cq.wait(4)] == [WCStatus.SUCCESS] * 4

    def test_planned_fault_completes_a_work_request_with_its_status(
        self, faults, pd, cq, mr, stack
    ):
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
    def test_planned_fault_makes_a_receiver_not_ready(
        self, faults, pd, cq, mr, stack, times, status
    ):
        """rnr_retry is 1 here: the second refusal is one too many."""
        near, far = connected(stack, pd, cq, cq)
        far.post_recv(rp.RecvWR(mr[64:128], wr_id=1))
        faults.not_ready(far.qp_num, times)
        near.post_send(rp.Send(mr[0:8], wr_id=2))
        sent = cq.wait(2 if status is WCStatus.SUCCESS else 1)
        assert {wc.wr_id: wc.status for wc in sent}[2] is status


def test_faults_of_a_real_device_are_refused_with_the_devices_that_have_them(context):
    if context.kind == "soft":
        context.faults.clear()
        return
    with pytest.raises(rp.UnsupportedError, match="only soft0 and roce devices"):
        _ = context.faults


def test_device_whose_faults_were_used_is_collected() -> None:
    context = rp.open_device("soft0")
    plan = context.faults
    plan.complete_with(7, WCStatus.RETRY_EXC_ERR)
    gone, descriptor = weakref.ref(context), context.async_fd
    del context
    gc.collect()
    assert gone() is None
    # The garbage collector has also closed the device.
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        os.fstat(descriptor)
    assert caught.value.errno == errno.EBADF


def test_fault_plan_works_after_its_context_variable_is_gone() -> None:
    """A queue pair holds the device open, and the plan fires on it."""
    context = rp.open_device("soft0")
    context.faults.complete_with(7, WCStatus.RETRY_EXC_ERR)
    cq, pd = rp.CQ(context), rp.PD(context)
    gone = weakref.ref(context)
    del context
    gc.collect()
    with cq, pd, rp.MR(pd, 64, rp.Access.LOCAL_WRITE) as mr, rp.QP(pd, QPType.RC, cq) as qp:
        qp.connect(qp.endpoint())
        qp.post_recv(rp.RecvWR(mr[8:16]))
        qp.post_send(rp.Send(mr[:8], wr_id=7))
        found = {wc.wr_id: wc.status for wc in cq.wait(2)}
        assert found[7] is WCStatus.RETRY_EXC_ERR
    del cq, pd, mr, qp
    gc.collect()
    assert gone() is None


def test_fault_plan_cannot_be_copied_or_pickled() -> None:
    with rp.open_device("soft0") as context:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"^cannot copy or pickle 'FaultPlan' object"):
                duplicate(context.faults)


def test_invalid_fault_is_refused_and_leaves_the_plan_unchanged() -> None:
    with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        plan = context.faults
        refused = [
            lambda: plan.fail_post(-1),
            lambda: plan.fail_post(0),
            lambda: plan.fail_post(1 << 20),
            lambda: plan.fail_post(errno.ENOMEM, after=-1),
            lambda: plan.fail_post(errno.ENOMEM, after=1 << 63),
            lambda: plan.complete_with(-1, WCStatus.LOC_PROT_ERR),
            lambda: plan.complete_with(1 << 64, WCStatus.LOC_PROT_ERR),
            lambda: plan.complete_with(1, 99),
            lambda: plan.not_ready(1, -1),
            lambda: plan.not_ready(-1, 1),
        ]
        for plans in refused:
            with pytest.raises(ValueError, match=r"is not in \S+\.\.|is not a valid WCStatus"):
                plans()
        for plans in (
            lambda: plan.fail_post("ENOMEM"),
            lambda: plan.complete_with("1", WCStatus.SUCCESS),
            lambda: plan.not_ready("qp", 1),
            lambda: plan.not_ready(1, 1.0),
            lambda: plan.complete_with(1, "LOC_PROT_ERR"),
            lambda: plan.complete_with(1, 4.0),
        ):
            with pytest.raises(TypeError, match=r"expected (int|WCStatus), got"):
                plans()
        access = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
        with rp.MR(pd, 64, access) as mr, rp.QP(pd, QPType.RC, cq) as qp:
            qp.connect(qp.endpoint())
            write = rp.RdmaWrite(mr[:8], wr_id=1, remote_addr=mr.addr + 8, rkey=mr.rkey)
            qp.post_send(write)
            assert cq.wait(1)[0].status is WCStatus.SUCCESS


def test_fault_plan_survives_a_later_failing_verb() -> None:
    """Only the failing verb's own changes are rolled back."""
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        context.faults.complete_with(7, WCStatus.RETRY_EXC_ERR)
        context.faults.not_ready(qp.qp_num, 1)
        with pytest.raises(rp.VerbsError, match="ibv_create_srq: EINVAL"):
            rp.SRQ(pd, 1 << 20)
        qp.post_recv(rp.RecvWR(mr[8:16]))
        qp.post_send(rp.Send(mr[:8], wr_id=7))
        assert cq.wait(1)[0].status is WCStatus.RETRY_EXC_ERR


def test_fault_plan_has_no_settable_attributes() -> None:
    """A post reads the plan, and must not run the caller's code there."""
    with rp.open_device("soft0") as context:
        plan = context.faults
        names = [name for name in dir(plan) if not name.startswith("_")]
        assert names == ["clear", "complete_with", "fail_post", "not_ready", "packets"]
        for name in (*names, "posts", "posted"):
            with pytest.raises(AttributeError):
                setattr(plan, name, {})
        assert context.faults is plan


@contextlib.contextmanager
def writing() -> Iterator[tuple[rp.Context, rp.CQ, rp.QP, rp.RdmaWrite]]:
    """Yield a device, and a queue pair connected to itself with a write to post to it."""
    access = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64, access) as mr,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        yield context, cq, qp, rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey)


def refused_of(posts: int, plans: list[tuple[int, int]], *, clear: bool = False) -> list[int]:
    """Post writes with planned (errno, after) faults; return the errno of each post, or 0."""
    with writing() as (context, cq, qp, write):
        for code, after in plans:
            context.faults.fail_post(code, after=after)
        if clear:
            context.faults.clear()
        refused = []
        for _ in range(posts):
            try:
                qp.post_send(write)
                refused.append(0)
                assert cq.wait(1)[0].status is WCStatus.SUCCESS
            except rp.PostError as error:
                refused.append(error.errno)
        return refused


def test_posts_fail_in_the_order_of_their_numbers_whatever_the_order_of_planning() -> None:
    plans = [(12, 3), (5, 0), (4095, 1), (1, (1 << 63) - 1), (7, 5), (11, 4)]
    assert refused_of(8, plans) == [5, 4095, 0, 12, 11, 7, 0, 0]


def test_faults_planned_for_the_same_post_fail_it_and_those_that_follow() -> None:
    assert refused_of(5, [(12, 0), (11, 0), (5, 0)]) == [12, 11, 5, 0, 0]
    assert refused_of(5, [(12, 1), (5, 2), (11, 1)]) == [0, 12, 5, 11, 0]


def test_statuses_planned_for_one_wr_id_complete_one_work_request_each() -> None:
    planned = [WCStatus.RETRY_EXC_ERR, WCStatus.REM_OP_ERR, WCStatus.RETRY_EXC_ERR]
    with writing() as (context, cq, qp, write):
        for status in planned:
            context.faults.complete_with(0, status)
        found = []
        for _ in range(4):
            qp.post_send(write)
            found.append(cq.wait(1)[0].status)
            qp.to_reset()
            qp.connect(qp.endpoint())
        assert found == [*planned, WCStatus.SUCCESS]


def test_each_of_a_thousand_planned_posts_fails() -> None:
    plans = [(number % 4095 + 1, number) for number in range(1000)]
    assert refused_of(1001, [*plans[::2], *plans[1::2]]) == [*range(1, 1001), 0]


def test_cleared_fault_plan_fails_no_post() -> None:
    assert refused_of(2, [(5, 0), (5, 1)], clear=True) == [0, 0]


def test_fault_planned_after_others_counts_from_the_next_post_and_shifts_none() -> None:
    with writing() as (context, _, qp, write):
        context.faults.fail_post(errno.EIO, after=3)
        qp.post_send(write)
        context.faults.fail_post(errno.EACCES, after=0)
        with pytest.raises(rp.PostError) as second:
            qp.post_send(write)
        qp.post_send(write)
        with pytest.raises(rp.PostError) as fourth:
            qp.post_send(write)
        assert (second.value.errno, fourth.value.errno) == (errno.EACCES, errno.EIO)


def test_faults_are_counted_from_the_post_after_planning() -> None:
    with writing() as (context, cq, qp, write):
        for _ in range(2):
            qp.post_send(write)
            context.faults.fail_post(errno.EIO, after=1)
            qp.post_send(write)
            with pytest.raises(rp.PostError):
                qp.post_send(write)
        assert [wc.status for wc in cq.wait(4)] == [WCStatus.SUCCESS] * 4
