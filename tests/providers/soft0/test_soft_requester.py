"""What the software device requires of a send's local memory and queue pair."""

from __future__ import annotations

import sys
import threading

import pytest
from support import ALL, soft_context

import rdmapost as rp
from rdmapost import Access, QPState, QPType, SendFlags, WCStatus

context = soft_context


def test_sends_and_writes_may_read_memory_without_local_write(connect, stack):
    """A read or atomic may not write to it, although the peer has carried out the request."""
    pair = connect(checked=False)
    mr = stack.enter_context(rp.MR(pair.pd, 64, Access.REMOTE_READ))
    mr.buffer[:8] = b"12345678"
    pair.a.post_send(pair.wr(rp.RdmaWrite, mr[:8]))
    pair.wait()
    assert bytes(pair.theirs.buffer[:8]) == b"12345678"
    pair.theirs.buffer[:8] = (10).to_bytes(8, sys.byteorder)
    pair.a.post_send(pair.wr(rp.AtomicFetchAndAdd, mr[:8], compare_add=5))
    assert [wc.status for wc in pair.cq.wait()] == [WCStatus.LOC_PROT_ERR]
    assert int.from_bytes(pair.theirs.buffer[:8], sys.byteorder) == 15
    assert bytes(mr.buffer[:8]) == b"12345678"


def test_rdma_read_into_memory_without_local_write_fails(connect, stack):
    pair = connect(checked=False)
    mr = stack.enter_context(rp.MR(pair.pd, 64, Access.REMOTE_READ))
    pair.theirs.buffer[:8] = b"12345678"
    pair.a.post_send(pair.wr(rp.RdmaRead, mr[:8]))
    assert [wc.status for wc in pair.cq.wait()] == [WCStatus.LOC_PROT_ERR]
    assert not any(mr.buffer)


@pytest.mark.parametrize("wr_class", [rp.RdmaRead, rp.AtomicFetchAndAdd, rp.AtomicCmpAndSwp])
def test_reads_and_atomics_fail_with_max_rd_atomic_0(connect, wr_class):
    """With max_rd_atomic 0 none can start."""
    pair = connect(to=QPState.RESET)
    pair.a.connect(pair.b.endpoint(), max_rd_atomic=0)
    pair.b.connect(pair.a.endpoint())
    pair.theirs.buffer[:8] = b"12345678"
    pair.a.post_send(pair.wr(wr_class, pair.mine[:8]))
    assert [wc.status for wc in pair.cq.wait()] == [WCStatus.LOC_QP_OP_ERR]
    assert bytes(pair.theirs.buffer[:8]) == b"12345678"
    assert not any(pair.mine.buffer)


@pytest.mark.parametrize("size", [7, 8, 16])
def test_atomic_needs_8_local_bytes(connect, size):
    pair = connect(checked=False)
    pair.theirs.buffer[:8] = b"12345678"
    pair.a.post_send(pair.wr(rp.AtomicFetchAndAdd, pair.mine[:size], compare_add=1))
    status = WCStatus.LOC_LEN_ERR if size < 8 else WCStatus.SUCCESS
    assert [wc.status for wc in pair.cq.wait()] == [status]
    assert bytes(pair.mine.buffer[:16]) == (b"" if size < 8 else b"12345678").ljust(16, b"\0")
    value = int.from_bytes(b"12345678", sys.byteorder) + (0 if size < 8 else 1)
    assert int.from_bytes(pair.theirs.buffer[:8], sys.byteorder) == value


@pytest.mark.parametrize(
    ("lengths", "status"), [([0], WCStatus.REM_ACCESS_ERR), ([0, 1], WCStatus.LOC_LEN_ERR)]
)
def test_rdma_read_with_an_sge_of_length_0_reads_2_to_the_31_bytes(connect, lengths, status):
    """The longest allowed message: it goes out, but the peer does not have that much room."""
    pair = connect(checked=False)
    sges = [rp.SGE(pair.mine.addr, length, pair.mine.lkey) for length in lengths]
    pair.a.post_send(pair.wr(rp.RdmaRead, sges))
    assert [wc.status for wc in pair.cq.wait()] == [status]


@pytest.mark.parametrize("wr_class", [rp.RdmaRead, rp.AtomicFetchAndAdd])
def test_read_or_atomic_with_inline_fails(connect, wr_class):
    pair = connect(checked=False, max_inline_data=64)
    pair.theirs.buffer[:8] = b"12345678"
    wr = pair.wr(wr_class, pair.mine[:8], send_flags=SendFlags.SIGNALED | SendFlags.INLINE)
    pair.a.post_send(wr)
    assert [wc.status for wc in pair.cq.wait()] == [WCStatus.LOC_QP_OP_ERR]
    assert not any(pair.mine.buffer)
    assert bytes(pair.theirs.buffer[:8]) == b"12345678"


def test_local_inv_of_an_unknown_key_fails(connect):
    pair = connect(checked=False)
    pair.a.post_send(rp.LocalInv(invalidate_rkey=pair.mine.rkey ^ 0xA5))
    assert [wc.status for wc in pair.cq.wait()] == [WCStatus.MW_BIND_ERR]
    assert pair.a.query().qp_state is QPState.ERR


def test_unregistered_memory_is_never_accessed(context):
    """A wrong numeric address leads to an error status on both sides."""
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 4096, ALL) as mr,
        rp.QP(pd, QPType.UC, cq, checked=False) as near,
        rp.QP(pd, QPType.UC, cq, checked=False) as far,
    ):
        for addr, length in ((8, 8), (mr.addr - 1, 8), (mr.addr + 4090, 8), (mr.addr, 0)):
            near.to_reset()
            far.to_reset()
            near.connect(far.endpoint())
            far.connect(near.endpoint())
            sge = rp.SGE(addr, length, mr.lkey)
            near.post_send(rp.RdmaWrite(sge, remote_addr=mr.addr, rkey=mr.rkey))
            assert cq.wait(1)[0].status is WCStatus.LOC_PROT_ERR
            near.to_reset()
            near.connect(far.endpoint())
            # UC silently drops a write that is not allowed.
            near.post_send(
                rp.RdmaWrite(mr[0:8], remote_addr=addr - (length == 0) * 4, rkey=mr.rkey)
            )
            assert cq.wait(1)[0].status is WCStatus.SUCCESS


def test_posts_while_a_queue_pair_connected_to_itself_fails_all_complete(context):
    """Another thread's post may come when the responder has just flushed the send queue."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with rp.PD(context) as pd, rp.MR(pd, 4096) as mr:
            for _ in range(200):
                with rp.CQ(context) as cq, rp.QP(pd, QPType.RC, cq, max_send_wr=64) as qp:
                    qp.connect(qp.endpoint())
                    go = threading.Event()

                    def post(qp: rp.QP = qp, go: threading.Event = go) -> None:
                        go.wait()
                        for wr_id in range(8):
                            qp.post_send(rp.Send(mr[:8], wr_id=wr_id))

                    thread = threading.Thread(target=post)
                    thread.start()
                    go.set()
                    # The region does not allow it: both ends fail, which are one.
                    qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey, wr_id=8))
                    thread.join()
                    assert sorted(wc.wr_id for wc in cq.wait(9)) == list(range(9))
                    assert qp.outstanding == (0, 0)
    finally:
        sys.setswitchinterval(interval)
