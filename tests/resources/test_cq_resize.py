"""CQ.resize: more entries, fewer, and the completions that are in the queue."""

from __future__ import annotations

import errno
import threading
import time

import pytest
from support import MOMENT, Pair, ended, interrupt_everywhere, null_device, write, writes

import rdmapost as rp

null = null_device.null
on_null = null_device.on_null


def test_resized_cq_holds_more_and_keeps_what_is_in_it(context, stack, pd):
    """128 completions fit into what was a CQ of 8, and come in order."""
    cq = stack.enter_context(rp.CQ(context, 8))
    pair = Pair(stack, pd, cq, max_send_wr=256)
    pair.a.post_send(writes(pair, 8))
    cq.resize(256)
    assert cq.cqe >= 256
    assert str(cq) == f"CQ of {cq.cqe} entries"
    pair.a.post_send(writes(pair, 128, start=8))
    assert [wc.check().wr_id for wc in cq.wait(136)] == [*range(136)]


def test_cq_size_is_the_devices_after_two_threads_have_resized_it(context):
    """The second resizes it while the first is about to note the size that it got."""

    class Contested(rp.CQ):
        others = 0

        def _verb(self, function, *args):
            found = super()._verb(function, *args)
            if not args and self.others:
                Contested.others = 0
                other = threading.Thread(target=self.resize, args=(1000,))
                other.start()
                other.join(20)
            return found

    with Contested(context, 64) as cq:
        Contested.others = 1
        cq.resize(10)
        assert Contested.others == 0
        assert cq.cqe >= 1000


def test_cq_can_be_resized_to_fewer_entries(context, stack, pd):
    cq = stack.enter_context(rp.CQ(context, 512))
    cq.resize(16)
    assert 16 <= cq.cqe < 512
    pair = Pair(stack, pd, cq)
    pair.a.post_send(writes(pair, 8))
    assert [wc.check().wr_id for wc in cq.wait(8)] == [*range(8)]


def test_cq_is_not_resized_below_the_completions_in_it(context, stack, pd):
    """It and its completions stay; polled ones are no longer in it."""
    cq = stack.enter_context(rp.CQ(context, 64))
    size = cq.cqe
    pair = Pair(stack, pd, cq)
    pair.a.post_send(writes(pair, 8))
    time.sleep(MOMENT)  # they are there, and not polled
    with pytest.raises(rp.VerbsError, match=r"cqe=1 .*; poll them first$") as refused:
        cq.resize(1)
    assert refused.value.call == "ibv_resize_cq"
    assert refused.value.errno in (errno.EINVAL, errno.EBUSY)
    assert cq.cqe == size
    assert [wc.check().wr_id for wc in cq.wait(8)] == [*range(8)]
    cq.resize(1)
    assert 1 <= cq.cqe < size
    pair.a.post_send(write(pair, 9))
    assert cq.wait()[0].check().wr_id == 9


def test_cq_size_that_the_device_cannot_have_is_refused_with_the_range(context, stack):
    cq = stack.enter_context(rp.CQ(context, 16))
    size, limit = cq.cqe, context.attr.max_cqe
    for wrong in (0, -1, limit + 1, 1 << 40):
        with pytest.raises(ValueError, match=rf"^cqe={wrong} is not in 1\.\.{limit}, the max_cqe"):
            cq.resize(wrong)
    for what in (None, "16", 16.0):
        with pytest.raises(TypeError, match=r"^cqe: expected int, got "):
            cq.resize(what)
    assert cq.cqe == size


def test_closed_cq_cannot_be_resized(context):
    cq = rp.CQ(context, 16)
    cq.close()
    with pytest.raises(rp.ClosedError, match="is closed"):
        cq.resize(32)


def test_cq_is_resized_while_a_thread_waits_for_its_completions(context, stack, pd):
    """None is lost or comes twice."""
    cq = stack.enter_context(rp.CQ(context, 64))
    pair = Pair(stack, pd, cq, max_send_wr=256)
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.extend(wc.wr_id for wc in cq.wait(200, 60)))
    waiter.start()
    for number in range(200):
        pair.a.post_send(write(pair, number))
        cq.resize(256 + number % 7 * 32)
    ended([waiter])
    assert found == [*range(200)]


def test_interrupted_cq_resize_leaves_the_size_that_the_cq_has(soft):
    with rp.open_device(soft) as context, rp.CQ(context, 16) as cq:

        def resize() -> None:
            cq.resize(48 - cq.cqe)

        assert interrupt_everywhere(resize)
        assert cq.cqe in (16, 32)
        assert cq.cqe == cq._handle.cqe


def test_soft0_cq_overruns_at_its_new_size(soft):
    with rp.open_device(soft) as context, rp.CQ(context, 64) as cq:
        cq.resize(2)
        with rp.PD(context) as pd, rp.QP(pd, rp.QPType.RC, cq) as qp:
            qp.connect(qp.endpoint())
            qp.post_send([rp.RdmaWrite(wr_id=n) for n in range(3)])
            with pytest.raises(rp.WaitTimeout, match="the CQ has overrun"):
                cq.wait(3, timeout=0)


def test_cq_resize_on_a_device_without_it_is_an_unsupported_error(on_null):
    """The null device cannot resize CQs."""
    text = on_null("""
    context, pd, cq = resources()
    print(said(lambda: cq.resize(256)))
    """)
    assert text.startswith("UnsupportedError: ibv_resize_cq is not supported")
