"""Wherever a number is accepted, numbers of all types are, and nothing else."""

from __future__ import annotations

import pytest
from support import ALL, needs

import rdmapost as rp
from rdmapost import QPState, QPType


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
def test_bounds_of_a_slice_are_numbers_of_any_type(pd, start, stop, found):
    with rp.MR(pd, 256) as mr:
        sge = mr[start and Narrow(start) : stop and Narrow(stop)]
        assert (sge.addr - mr.addr, sge.length) == found
        assert {type(sge.addr), type(sge.length)} == {int}


def test_bounds_of_a_slice_that_are_no_whole_numbers_are_refused(pd):
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


def test_size_of_a_region_is_a_number_of_any_type(pd):
    with rp.MR(pd, Narrow(4096), Narrow(1)) as mr:
        assert (mr.length, mr.access) == (4096, rp.Access.LOCAL_WRITE)
    numpy = pytest.importorskip("numpy")
    with rp.MR(pd, numpy.int64(4096)) as mr:
        assert mr.length == 4096
    # An array of one number counts as memory.
    with rp.MR(pd, numpy.array(4096, "i4")) as mr:
        assert mr.length == 4


def test_region_that_no_memory_can_be_had_for(pd):
    for size in (1 << 62, 1 << 70):
        with pytest.raises(MemoryError, match=f"cannot allocate {size} bytes for a region"):
            rp.MR(pd, size)


def test_limits_are_numbers_of_any_type(context, pd):
    with rp.CQ(context, Narrow(5)) as cq:
        assert type(cq.cqe) is int
        limits = dict.fromkeys(("max_send_wr", "max_recv_wr", "max_send_sge"), Narrow(2))
        with rp.QP(pd, QPType.RC, cq, port_num=Narrow(1), gid_index=Narrow(0), **limits) as qp:
            assert qp.max_send_wr >= 2
            assert type(qp.port_num) is int
            assert qp.gid.index == 0
    needs(context.attr.max_srq, "shared receive queues", context)
    with rp.SRQ(pd, Narrow(5)) as srq:
        srq.arm_limit(Narrow(3))
        assert srq.query().srq_limit == 3


def test_limit_that_is_no_whole_number_is_refused_by_name(context, pd, cq):
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
        with pytest.raises(TypeError, match=f"qpn: {words}"):
            rp.Endpoint(wrong, 0, rp.GID("::1"), 0, rp.MTU.MTU_1024)


def test_srq_limit_out_of_range_is_refused_by_name(context, pd):
    needs(context.attr.max_srq, "shared receive queues", context)
    with rp.SRQ(pd) as srq:
        for wrong in (-1, 1 << 32):
            with pytest.raises(ValueError, match=f"srq_limit={wrong} is not in 0..2\\^32-1"):
                srq.arm_limit(wrong)


# ---- endpoints ----------------------------------------------------------------


def test_what_is_no_endpoint_is_refused_in_every_state(connect, pd, cq):
    ready = connect().a
    with rp.QP(pd, QPType.RC, cq) as new, rp.QP(pd, QPType.UD, cq) as ud:
        for wrong in ("garbage", str(ready.endpoint()), ready, 5):
            words = f"remote: expected Endpoint.*, got {type(wrong).__name__}"
            for call in (ready.connect, new.connect, new.to_rtr, new.path_to, ud.ah_to):
                with pytest.raises(TypeError, match=words):
                    call(wrong)
        assert new.state is QPState.RESET
        with pytest.raises(TypeError, match="remote: expected Endpoint, got NoneType"):
            ud.ah_to(None)
    with pytest.raises(TypeError, match="line: expected str, got bytes"):
        rp.Endpoint.parse(str(ready.endpoint()).encode())
    with pytest.raises(TypeError, match="context: expected Context, got str"):
        rp.choose_gid("soft0")


def test_connected_queue_pair_is_not_connected_to_another_peer(connect, pd, cq):
    pair = connect()
    with rp.QP(pd, QPType.RC, cq) as other:
        with pytest.raises(ValueError, match=r"connected to QP .*, not to .*to_reset\(\) first"):
            pair.a.connect(other.endpoint())
        elsewhere = other.endpoint()
        there = rp.Endpoint(
            pair.b.qp_num,
            elsewhere.psn,
            rp.GID("::ffff:192.0.2.77"),
            elsewhere.lid ^ 1,
            elsewhere.mtu,
        )
        with pytest.raises(ValueError, match="connected to QP"):
            pair.a.connect(there)
        assert pair.a.query().dest_qp_num == pair.b.qp_num
    # The same peer again is not another one.
    pair.a.connect(pair.b.endpoint())
    pair.a.connect()
    pair.a.to_reset()
    pair.a.connect(pair.b.endpoint())


@pytest.mark.parametrize("was_connected", [False, True])
def test_failed_queue_pair_is_not_connected_but_reset_first(connect, pd, cq, was_connected):
    pair = connect(to=QPState.RTS if was_connected else QPState.RESET)
    if not was_connected:
        pair.a.to_init()  # rxe takes no queue pair from RESET to ERR
    pair.a.to_err()
    with rp.QP(pd, QPType.RC, cq) as other:
        with pytest.raises(
            ValueError, match=r"0x\w+ is in ERR; take it back with to_reset\(\) first"
        ):
            pair.a.connect(other.endpoint())
        pair.a.to_reset()
        pair.a.connect(other.endpoint())


# ---- who holds a region -------------------------------------------------------


def test_region_that_an_srq_holds_says_to_close_the_srq(context, pd, rc):
    needs(context.attr.max_srq, "shared receive queues", context)
    mr, srq = rp.MR(pd, 64, ALL), rp.SRQ(pd)
    srq.post_srq_recv(rp.RecvWR(mr[:8], wr_id=5))
    with pytest.raises(rp.InUseError, match=r"\(wr_id 5\); .* or close the SRQ first"):
        mr.close()
    rc.b.post_recv(rp.RecvWR(mr[:8], wr_id=6))
    with pytest.raises(rp.InUseError, match="or close the QP or the SRQ first"):
        mr.close()
    srq.close()
    with pytest.raises(rp.InUseError, match="or close the QP first"):
        mr.close()
    rc.b.to_reset()
    mr.close()
