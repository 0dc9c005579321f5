"""Why a post crashes a program in C, five ways, and what it does here: an exception, and no harm.

The five are those that the well-known tutorial of ibv_post_send gives for a
segmentation fault.  Each is tried with and without the library's checks, and
the queue pair works afterwards.
"""

from __future__ import annotations

import array
import gc

import pytest
from support import ALL, Pair

import rdmapost as rp
from rdmapost import QPType, SendFlags

INLINE = SendFlags.INLINE | SendFlags.SIGNALED

pytestmark = pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])


def refused(pair: Pair, wr: rp.SendWR, words: str) -> None:
    with pytest.raises(rp.PostError, match=words) as caught:
        pair.a.post_send(wr)
    assert caught.value.wr is wr
    assert pair.a.outstanding.send == 0


def test_sg_list_of_anything_but_sges_is_refused(connect, checked):
    """A list takes only SGEs, is copied, and knows its own length."""
    pair = connect(checked=checked)
    for wrong, words in (
        (None, "sg_list: expected SGEs, got NoneType"),
        (0x1000, "sg_list: expected SGEs, got int"),
        (object(), "sg_list: expected SGEs, got object"),
        (pair.mine, r"sg_list: expected SGEs, got MR; use mr\[:\]"),
        ([None], "sg_list holds NoneType"),
        ([pair.mine[:8], 0x1000], "sg_list holds int"),
        ([(pair.mine.addr, 8, pair.mine.lkey)], "sg_list holds tuple"),
        (b"bytes", "sg_list holds int"),
        ([rp.SGE(pair.mine.addr, 8, 1 << 32)], "an SGE's lkey=4294967296 is not in"),
        ([rp.SGE("x", 8, 1)], "an SGE's addr: expected int, got str"),
    ):
        refused(pair, rp.Send(wrong), words)
    sges = [pair.mine[:8]]
    wr = pair.wr(rp.RdmaWrite, sges)
    pair.mine.buffer[:8] = b"as then!"
    pair.a.post_send(wr)
    sges.clear()
    wr.sg_list = None
    pair.wait()
    assert bytes(pair.theirs.buffer[:8]) == b"as then!"
    pair.works()


def test_inline_buffer_at_an_illegal_address(connect, checked):
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
        refused(pair, rp.Send(rp.SGE(0x10, 8), send_flags=INLINE), "this SGE is only numbers")
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


def test_work_request_takes_no_next(connect, checked):
    """A work request has no next: the chain is made from a Python list."""
    pair = connect(checked=checked)
    wr = pair.wr(rp.RdmaWrite, pair.mine[:1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'next'"):
        rp.Send(next=wr)
    with pytest.raises(AttributeError):
        wr.next = wr
    # In C a work request that is its own next never ends.
    pair.a.post_send([wr, wr, wr])
    pair.wait(3)
    tail: list[object] = [wr]
    tail.append(tail)
    with pytest.raises(rp.PostError, match=r"2 of 2 .*expected SendWR, got list") as caught:
        pair.a.post_send(tail)
    assert caught.value.posted == 1
    pair.wait()
    for wrong in (None, 0x1000, object()):
        with pytest.raises(TypeError, match="expected SendWR or an iterable of them"):
            pair.a.post_send(wrong)
        with pytest.raises(rp.PostError, match=f"expected SendWR, got {type(wrong).__name__}"):
            pair.a.post_send([wrong])
    pair.works()


def test_error_in_the_middle_of_a_list_names_the_work_request(connect, checked):
    """A failure in the middle has somewhere to go: the exception says which one it was."""
    pair = connect(checked=checked, max_recv_wr=4)
    wr = pair.wr(rp.RdmaWrite, pair.mine[:1])
    too_many = pair.wr(rp.RdmaWrite, [pair.mine[:1]] * (pair.a.max_send_sge + 1))
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([wr, too_many, wr])
    assert (caught.value.index, caught.value.posted, caught.value.wr) == (1, 1, too_many)
    pair.wait()
    # A full queue is the other failure; unchecked the device says when it is full.
    receives = [rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(5000)]
    with pytest.raises(rp.PostError) as caught:
        pair.b.post_recv(receives)
    at = caught.value.index
    assert at is not None
    assert at >= 4
    assert (caught.value.posted, caught.value.wr) == (at, receives[at])
    assert pair.b.outstanding.recv == at
    pair.a.post_send(rp.Send(pair.mine[:8], wr_id=9000))
    assert {wc.wr_id for wc in pair.wait(2)} == {0, 9000}


def test_ud_send_without_an_address_handle_is_refused(connect, context, checked):
    """Drivers follow the pointer unchecked."""
    pair = connect(QPType.UD, checked=checked)
    assert pair.ah is not None
    with pair.a.ah_to(pair.b.endpoint()) as ah:
        pass
    with (
        rp.open_device(context.name) as other,
        rp.PD(other) as pd,
        rp.AH(pd, pair.ah.attr) as foreign,
        rp.MR(pair.pd, 64, ALL) as mr,
    ):
        for wrong, words in (
            (None, "needs an address handle"),
            (ah, "AH to .* is closed"),
            (foreign, "belongs to another"),
            (mr, "ah: expected AH, got MR"),
            (0x1000, "ah: expected AH, got int"),
            (object(), "ah: expected AH, got object"),
        ):
            for kind in (rp.Send, rp.SendWithImm):
                refused(pair, pair.wr(kind, pair.mine[:8], ah=wrong), words)
    pair.works()
