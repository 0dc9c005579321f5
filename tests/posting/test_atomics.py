"""ATOMIC_CMP_AND_SWP and ATOMIC_FETCH_AND_ADD: 64-bit values at aligned addresses."""

from __future__ import annotations

import struct

import pytest
from support import needs, soft_queues
from support.soft_queues import reason

import rdmapost as rp
from rdmapost import WCOpcode

soft = soft_queues.soft
unchecked = soft_queues.unchecked

U64 = 1 << 64


def value_at(mr: rp.MR, offset: int = 0) -> int:
    return struct.unpack_from("=Q", mr.buffer, offset)[0]


def put(mr: rp.MR, value: int, offset: int = 0) -> None:
    struct.pack_into("=Q", mr.buffer, offset, value)


@pytest.mark.parametrize(("compare", "after"), [(1000, 2000), (1001, 1000)])
def test_compare_and_swap_returns_the_old_value_and_swaps_only_when_equal(
    rc, context, compare, after
):
    """ATOMIC_CMP_AND_SWP: the old value comes back, and is replaced only if equal."""
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, 1000, 64)
    wr = rc.wr(
        rp.AtomicCmpAndSwp,
        rc.mine[8:16],
        remote_addr=rc.theirs.addr + 64,
        compare_add=compare,
        swap=2000,
        wr_id=9,
    )
    rc.a.post_send(wr)
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.COMP_SWAP)
    assert value_at(rc.mine, 8) == 1000
    assert value_at(rc.theirs, 64) == after


def test_fetch_and_add_returns_the_old_value_and_stores_the_sum(rc, context):
    """ATOMIC_FETCH_AND_ADD: the old value comes back, the sum stays there."""
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, 10)
    rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], compare_add=5, wr_id=9))
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (9, WCOpcode.FETCH_ADD)
    assert (value_at(rc.mine), value_at(rc.theirs)) == (10, 15)


def test_atomics_wrap_at_2_to_the_64(rc, context):
    needs(context.attr.atomic_cap, "atomics", context)
    put(rc.theirs, U64 - 1)
    rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], compare_add=2))
    rc.wait()
    assert (value_at(rc.mine), value_at(rc.theirs)) == (U64 - 1, 1)
    rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], compare_add=U64 - 1))
    rc.wait()
    assert (value_at(rc.mine), value_at(rc.theirs)) == (1, 0)
    rc.a.post_send(rc.wr(rp.AtomicCmpAndSwp, rc.mine[:8], compare_add=0, swap=U64 - 1))
    rc.wait()
    assert (value_at(rc.mine), value_at(rc.theirs)) == (0, U64 - 1)


def test_misaligned_atomic_is_refused_by_post_send(rc, context):
    needs(context.attr.atomic_cap, "atomics", context)
    with pytest.raises(rp.PostError, match="is not a multiple of 8"):
        rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:8], remote_addr=rc.theirs.addr + 4))
    with pytest.raises(rp.PostError, match="one SGE of 8 bytes"):
        rc.a.post_send(rc.wr(rp.AtomicFetchAndAdd, rc.mine[:4]))


@pytest.mark.parametrize(("reached", "status"), [(8, "SUCCESS"), (7, "LOC_PROT_ERR")])
def test_atomic_checks_only_the_sges_that_its_8_bytes_reach(unchecked, reached, status):
    mr, qp = unchecked.mr, unchecked.qp()
    sges = [mr[:reached], rp.SGE(mr.addr + 8, 1, mr.lkey ^ 0xFF00)]
    qp.post_send(rp.AtomicFetchAndAdd(sges, remote_addr=mr.addr + 64, rkey=mr.rkey, compare_add=1))
    assert unchecked.cq.wait(1)[0].status.name == status


ATOMICS = (rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd)


@pytest.mark.parametrize("kind", ATOMICS)
def test_atomic_takes_8_aligned_bytes(soft, kind):
    post = soft.qp().post_send
    assert "one SGE of 8 bytes" in reason(post, kind(soft.mr[:4]))
    assert "not a multiple of 8" in reason(post, kind(soft.mr[:8], remote_addr=4))
    post(kind(soft.mr[:8], remote_addr=16))
