"""Wherever a number is accepted, numbers of all types are, and nothing else."""

from __future__ import annotations

import datetime

import pytest
from support import needs

import rdmapost as rp
from rdmapost import QPType


class Narrow:
    """A number with fixed-width arithmetic, like numpy's."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value

    def __lt__(self, other):
        return self.value < other

    def __add__(self, other):
        raise OverflowError("too narrow")

    __radd__ = __sub__ = __rsub__ = __iadd__ = __add__


@pytest.mark.parametrize(
    ("start", "stop", "found"),
    [(64, None, (64, 192)), (-64, None, (192, 64)), (None, -1, (0, 255)), (8, 16, (8, 8))],
)
def test_bounds_of_a_region_slice_may_be_numbers_of_any_type(pd, start, stop, found):
    with rp.MR(pd, 256) as mr:
        sge = mr[start and Narrow(start) : stop and Narrow(stop)]
        assert (sge.addr - mr.addr, sge.length) == found
        assert {type(sge.addr), type(sge.length)} == {int}


def test_bounds_of_a_region_slice_that_are_no_whole_numbers_are_refused(pd):
    with rp.MR(pd, 256) as mr:
        for bound in (1.0, 1.5, "1", (1,)):
            with pytest.raises(
                TypeError, match=f"start of an SGE: expected int, got {type(bound).__name__}"
            ):
                mr[bound:]
            with pytest.raises(
                TypeError, match=f"end of an SGE: expected int, got {type(bound).__name__}"
            ):
                mr[:bound]


def test_size_of_a_region_may_be_a_number_of_any_type(pd):
    with rp.MR(pd, Narrow(4096), Narrow(1)) as mr:
        assert (mr.length, mr.access) == (4096, rp.Access.LOCAL_WRITE)
    numpy = pytest.importorskip("numpy")
    with rp.MR(pd, numpy.int64(4096)) as mr:
        assert mr.length == 4096
    # An array of one number counts as memory.
    with rp.MR(pd, numpy.array(4096, "i4")) as mr:
        assert mr.length == 4


def test_queue_limits_may_be_numbers_of_any_type(context, pd):
    with rp.CQ(context, Narrow(5)) as cq:
        assert type(cq.cqe) is int
        limits = dict.fromkeys(("max_send_wr", "max_recv_wr", "max_send_sge"), Narrow(2))
        with rp.QP(pd, QPType.RC, cq, port_num=Narrow(1), gid_index=Narrow(0), **limits) as qp:
            assert qp.max_send_wr >= 2
            assert type(qp.port_num) is int
            assert qp.gid.gid_index == 0
    needs(context.attr.max_srq, "shared receive queues", context)
    with rp.SRQ(pd, Narrow(5)) as srq:
        srq.arm_limit(Narrow(3))
        assert srq.query().srq_limit == 3


def test_queue_limit_that_is_no_whole_number_is_refused_by_name(context, pd, cq):
    for wrong in (1.0, "1", None):
        words = f"expected int, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=f"cqe: {words}"):
            rp.CQ(context, wrong)
        with pytest.raises(TypeError, match=f"max_send_wr: {words}"):
            rp.QP(pd, QPType.RC, cq, max_send_wr=wrong)
        with pytest.raises(TypeError, match=f"port_num: {words}"):
            rp.QP(pd, QPType.RC, cq, port_num=wrong)
        with pytest.raises(TypeError, match=f"max_wr: {words}"):
            rp.SRQ(pd, wrong)
        with pytest.raises(TypeError, match=f"access: {words}"):
            rp.MR(pd, 10, wrong)
        with pytest.raises(TypeError, match=f"qp_num: {words}"):
            rp.Endpoint(wrong, 0, rp.GID("::1"), 0, rp.MTU.MTU_1024)


@pytest.fixture
def channel(context, stack):
    return stack.enter_context(rp.CompChannel(context))


def test_timeout_that_is_no_number_of_seconds_is_refused_by_name(context, cq, stack):
    channel = stack.enter_context(rp.CompChannel(context))
    waits = (
        lambda timeout: cq.wait(1, timeout),
        channel.get_cq_event,
        lambda timeout: context.get_async_event(timeout),
    )
    for wait in waits:
        for wrong in (datetime.timedelta(seconds=1), "1", b"1", [1]):
            words = f"timeout: expected seconds or None, got {type(wrong).__name__}"
            with pytest.raises(TypeError, match=words):
                wait(wrong)
        for wrong in (float("nan"), 10**400):
            with pytest.raises(ValueError, match="timeout: "):
                wait(wrong)


def test_timeout_may_be_a_number_of_any_type(cq):
    class Seconds:
        def __float__(self):
            return 0.002

    for timeout in (Seconds(), 0, 0.002, False, -1):
        with pytest.raises(rp.WaitTimeout, match="0 of 1 completions came within"):
            cq.wait(1, timeout)
