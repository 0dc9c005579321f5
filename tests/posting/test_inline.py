"""INLINE: data copied at the post, its limit, and memory that needs no registration."""

from __future__ import annotations

import array
import errno
import gc
from typing import Any

import pytest
from support import ALL, GRH, TYPES, in_flight, refused, soft_queues
from support.in_flight import why_open, write_from
from support.posting_tap import open_tap
from support.soft_queues import reason
from support.windows import bind_wr

import rdmapost as rp
from rdmapost import QPType, SendFlags

soft = soft_queues.soft
unchecked = soft_queues.unchecked
pair = in_flight.pair

INLINE = SendFlags.INLINE | SendFlags.SIGNALED


@pytest.mark.parametrize("qp_type", TYPES)
def test_inline_data_of_every_length_may_be_overwritten_after_the_post(connect, qp_type):
    """Up to what the queue pair was granted, from memory that is not registered."""
    pair = connect(qp_type, max_inline_data=64)
    grh = GRH if qp_type is QPType.UD else 0
    granted = pair.a.max_inline_data
    for size in sorted({0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, granted - 1, granted}):
        data = bytearray(i % 251 + 1 for i in range(size))
        sent = bytes(data)
        pair.theirs.buffer[:] = bytes(len(pair.theirs))
        pair.b.post_recv(rp.RecvWR(pair.theirs[: grh + granted], wr_id=7))
        sges = rp.SGE.from_buffer(data) if size else ()
        pair.a.post_send(pair.send(sges, send_flags=INLINE, wr_id=9))
        data[:] = b"\xff" * size
        del sges
        data.clear()
        assert {wc.wr_id: wc.byte_len for wc in pair.wait(2)}[7] == grh + size
        assert bytes(pair.theirs.buffer[grh : grh + granted]) == sent + bytes(granted - size)


@pytest.mark.parametrize("wr_type", [rp.Send, rp.SendWithImm, rp.RdmaWrite, rp.RdmaWriteWithImm])
def test_inline_gathers_registered_and_unregistered_buffers(connect, wr_type):
    pair = connect(max_inline_data=64)
    pair.mine.buffer[:6] = b"region"
    loose = bytearray(b"loose ")
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64], wr_id=7))
    sges = [rp.SGE.from_buffer(loose), pair.mine[:6], rp.SGE.from_buffer(b" bytes")]
    pair.a.post_send(pair.wr(wr_type, sges, send_flags=INLINE, wr_id=9))
    loose[:] = pair.mine.buffer[:6] = b"xxxxxx"
    if wr_type is rp.RdmaWrite:
        pair.a.post_send(rp.Send(wr_id=9))
    assert [wc.wr_id for wc in pair.wait(3 if wr_type is rp.RdmaWrite else 2)].count(7) == 1
    assert bytes(pair.theirs.buffer[:19]) == b"loose region bytes\0"


def test_inline_ignores_the_lkey(connect, context):
    """It also ignores the PD, and whether the device could read the memory."""
    pair = connect(max_inline_data=64)
    with rp.PD(context) as other, rp.MR(other, bytearray(b"foreign!")) as mr:
        for sge in (mr[:], mr[:]._replace(lkey=mr.lkey ^ 0xA5)):
            pair.a.post_send(pair.wr(rp.RdmaWrite, sge, send_flags=INLINE))
            pair.wait()
            assert bytes(pair.theirs.buffer[:8]) == b"foreign!"
            pair.theirs.buffer[:8] = bytes(8)


def test_unchecked_inline_reads_the_address_of_an_sge_of_numbers(connect):
    pair = connect(max_inline_data=64, checked=False)
    pair.mine.buffer[:8] = b"numbers!"
    pair.a.post_send(pair.wr(rp.RdmaWrite, rp.SGE(pair.mine.addr, 8), send_flags=INLINE))
    pair.wait()
    assert bytes(pair.theirs.buffer[:8]) == b"numbers!"


@pytest.mark.parametrize("wr_type", [rp.Send, rp.RdmaWrite])
def test_inline_longer_than_granted_is_refused(connect, wr_type):
    """The limit is on the sum of all SGEs; unchecked, the device enforces it."""
    for checked, words in ((True, "bytes inline, but"), (False, "refused")):
        pair = connect(max_inline_data=32, checked=checked)
        granted = pair.a.max_inline_data
        sges = [rp.SGE.from_buffer(bytes(granted)), rp.SGE.from_buffer(b"1")]
        with pytest.raises(rp.PostError, match=words) as caught:
            pair.a.post_send(pair.wr(wr_type, sges, send_flags=INLINE))
        assert caught.value.errno in (errno.EINVAL, errno.ENOMEM)
        if checked:
            assert f"max_inline_data={granted}" in str(caught.value)
        assert pair.cq.poll() == []


@pytest.mark.parametrize("wr_type", [rp.RdmaRead, rp.AtomicFetchAndAdd, rp.AtomicCmpAndSwp])
def test_inline_is_refused_on_opcodes_that_fetch_data(rc, wr_type):
    with pytest.raises(rp.PostError, match=f"INLINE has no meaning on {wr_type.opcode.name}"):
        rc.a.post_send(rc.wr(wr_type, rc.mine[:8], send_flags=INLINE))


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_inline_data_needs_no_region_and_is_free_after_the_post(connect, qp_type):
    """The data is as it was when posted, whatever happens to the buffer later."""
    pair = connect(qp_type, max_inline_data=64)
    for kind in (rp.Send, rp.SendWithImm, rp.RdmaWrite):
        data = bytearray(b"inline data")
        pair.theirs.buffer[:11] = bytes(11)
        pair.b.post_recv(rp.RecvWR(() if kind is rp.RdmaWrite else pair.theirs[:64]))
        flags = SendFlags.INLINE | SendFlags.SIGNALED
        pair.a.post_send(pair.wr(kind, rp.SGE.from_buffer(data), send_flags=flags))
        data[:] = b"overwritten"
        data.clear()  # no work request holds it any more
        if kind is rp.RdmaWrite:
            # A message after it shows when a UC write has arrived.
            pair.a.post_send(rp.Send())
        pair.wait(3 if kind is rp.RdmaWrite else 2)
        assert bytes(pair.theirs.buffer[:12]) == b"inline data\0"


def test_inline_that_is_too_long_is_refused(connect):
    pair = connect(max_inline_data=32)
    granted = pair.a.max_inline_data
    assert granted >= 32
    data = rp.SGE.from_buffer(bytes(granted + 1))
    with pytest.raises(rp.PostError, match=f"max_inline_data={granted}") as caught:
        pair.a.post_send(rp.Send(data, send_flags=SendFlags.INLINE))
    assert caught.value.errno == errno.EINVAL
    pair.works()


def test_unregistered_buffer_without_inline_is_refused(rc):
    with pytest.raises(rp.PostError, match=r"can only be sent with SendFlags\.INLINE"):
        rc.a.post_send(rp.Send(rp.SGE.from_buffer(array.array("B", b"abc"))))
    with pytest.raises(rp.PostError, match=r"SendFlags\.INLINE"):
        rc.b.post_recv(rp.RecvWR(rp.SGE.from_buffer(bytearray(8))))


F = SendFlags
SIGNALED_INLINE = F.SIGNALED | F.INLINE


def inline(*sges: Any) -> rp.Send:
    return rp.Send(sges, send_flags=SIGNALED_INLINE)


BIG = 1 << 31


def test_inline_needs_no_registration(soft):
    data = rp.SGE.from_buffer(b"x" * 64)
    soft.qp().post_send(rp.Send(data, send_flags=SIGNALED_INLINE))
    assert "can only be sent with SendFlags.INLINE" in reason(soft.qp().post_send, rp.Send(data))


def test_unchecked_inline_data_of_up_to_32_bits_is_left_to_the_device(unchecked):
    memory = unchecked.region(BIG)
    said = reason(unchecked.qp().post_send, inline(memory[:], memory[1:]))
    assert "soft0" in said
    assert "2^32" not in said


def test_inline_by_number_is_refused(soft):
    """It would read arbitrary memory of this process."""
    said = reason(soft.qp().post_send, inline(rp.SGE(5, 5, 5)))
    assert "SGE.from_buffer" in said


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_inline_buffer_at_an_illegal_address_is_refused(connect, checked):
    """A driver copies from there when posting, so the memory must exist."""
    pair = connect(checked=checked, max_inline_data=64)
    with rp.MR(pair.pd, 64) as mr:
        closed = mr[:8]
    zero_based = pair.mine[:8]._replace(addr=0)
    for sge, words in (
        (closed, "MR of 64 bytes .* is closed"),
        (zero_based, "lies outside MR"),
        (pair.mine[:]._replace(length=1 << 31), "lies outside MR"),
        (pair.mine[8:16]._replace(addr=pair.mine.addr - 1), "lies outside MR"),
        (pair.mine[:8]._replace(owner=object()), "owner: expected MR or a buffer, got object"),
    ):
        refused(pair, rp.Send(sge, send_flags=INLINE), words)
    if checked:
        # Unchecked, the caller vouches for the memory.
        refused(pair, rp.Send(rp.SGE(0x10, 8), send_flags=INLINE), "this SGE was made from numbers")
    # A buffer cannot be freed or moved while an SGE names it.
    data = array.array("B", b"held")
    wr = pair.wr(rp.RdmaWrite, rp.SGE.from_buffer(data), send_flags=INLINE)
    with pytest.raises(BufferError):
        data.extend(b"more than before")
    del data
    gc.collect()
    pair.a.post_send(wr)
    pair.wait()
    assert bytes(pair.theirs.buffer[:5]) == b"held\0"
    pair.works()


def test_memory_of_inline_data_is_free_when_the_post_returns(connect, pd):
    """Memory of the other work requests in the list is not."""
    pair = connect(max_inline_data=64)
    inline, gathered = rp.MR(pd, 64), rp.MR(pd, 64)
    wrs = [write_from(pair, inline, 1), write_from(pair, gathered, 2), write_from(pair, inline, 3)]
    for wr in (wrs[0], wrs[2]):
        wr.send_flags = SendFlags.INLINE
    wrs[1].send_flags = SendFlags(0)
    pair.a.post_send(wrs)
    assert pair.a.outstanding.send == 3
    inline.close()
    assert "wr_id 2" in why_open(gathered.close)
    pair.a.to_reset()
    gathered.close()


def test_flags_that_only_resemble_inline_release_no_memory(stack):
    """The flag of a tagged receive that has the value of INLINE, and INLINE on a bind."""
    context = stack.enter_context(rp.open_device("soft0"))
    tap = open_tap(context)
    stack.callback(tap.close)
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    srq = rp.SRQ(pd, srq_type=rp.SRQType.TM, cq=cq, checked=False)
    qp = rp.QP(pd, QPType.RC, cq, checked=False)
    qp.connect(qp.endpoint())
    mr = rp.MR(pd, 64, ALL | rp.Access.MW_BIND)
    mw = rp.MW(pd, rp.MWType.TYPE_2)
    # It reports them as posted, and never completes them.
    tap.refuse(rc=0, bad=0)
    srq.post_srq_ops(rp.TagAdd(sg_list=mr[:8], recv_wr_id=5, flags=int(SendFlags.INLINE)))
    assert "wr_id 5" in why_open(mr.close)
    srq.close()
    assert why_open(mr.close) == ""
    mr = rp.MR(pd, 64, ALL | rp.Access.MW_BIND)
    qp.post_send(bind_wr(mw, mr, rp.Access(0), wr_id=6, send_flags=SendFlags.INLINE))
    assert "wr_id 6" in why_open(mr.close)
    assert "wr_id 6" in why_open(mw.close)
    qp.close()
    mw.close()
    mr.close()


def test_inline_work_request_does_not_keep_its_region(connect):
    pair = connect(max_inline_data=64)
    mr = rp.MR(pair.pd, 64)
    flags = rp.SendFlags.INLINE
    pair.a.post_send(pair.wr(rp.RdmaWrite, mr[:8], send_flags=flags))
    mr.close()
    pair.works()
