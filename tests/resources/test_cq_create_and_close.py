"""Completion queues (CQ): their size and vector, and closing them."""

from __future__ import annotations

import contextlib
import select
import threading
from typing import Any

import pytest
from support import ended, needs, waiting, write

import rdmapost as rp
from rdmapost import WCStatus
from rdmapost._binding import lib
from rdmapost.resources.aio import _rearm


@pytest.mark.parametrize("cqe", [0, -1, 1 << 31])
def test_cq_of_a_size_out_of_range_is_refused(context, cqe):
    with pytest.raises(ValueError, match=f"cqe={cqe} is not in 1.."):
        rp.CQ(context, cqe)


@pytest.mark.parametrize("vector", [-1, 1 << 20, 1 << 40])
def test_completion_vector_that_the_device_lacks_is_refused_with_the_range(context, vector):
    with pytest.raises(ValueError, match=rf"^comp_vector={vector} is not in 0\.\.\d+$"):
        rp.CQ(context, comp_vector=vector)


def test_every_completion_vector_of_the_device_can_be_used(context):
    assert context.num_comp_vectors >= 1
    for vector in range(context.num_comp_vectors):
        rp.CQ(context, 8, comp_vector=vector).close()
    with pytest.raises(ValueError, match=rf"is not in 0\.\.{context.num_comp_vectors - 1}$"):
        rp.CQ(context, comp_vector=context.num_comp_vectors)


def test_cq_that_another_thread_closes_while_it_is_made_raises_closed_error(context):
    class Closed(rp.CQ):
        def _create(self, *args: Any) -> None:
            super()._create(*args)
            closer = threading.Thread(target=self.close)
            closer.start()
            ended([closer])

    with rp.CompChannel(context) as channel:
        with pytest.raises(rp.ClosedError):
            Closed(context, channel=channel)
        assert not channel._cqs


def test_sends_and_receives_complete_on_their_own_cqs(context, connect):
    with rp.CQ(context) as recv_cq:
        pair = connect(b_options={"recv_cq": recv_cq})
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=1))
        pair.a.post_send(rp.Send(pair.mine[:8], wr_id=2))
        assert [wc.wr_id for wc in recv_cq.wait()] == [1]
        assert [wc.wr_id for wc in pair.wait()] == [2]
        pair.a.close()
        pair.b.close()


def completed(cq: rp.CQ) -> None:
    """Wait until a completion is in the queue, and leave it there; armed() came before."""
    assert select.select([cq._event_fd()], [], [], 10)[0]


def armed(cq: rp.CQ) -> None:
    assert lib.ibv_req_notify_cq(cq._handle, 0) == 0


@pytest.mark.parametrize("how", ["close", "drop", "reset"])
def test_completions_are_kept_when_the_queue_pair_goes_before_polling(connect, stack, how):
    """Devices differ in what they do with them; here all devices deliver them."""
    pair = connect()
    third = rp.QP(pair.pd, rp.QPType.RC, pair.cq)
    pair.b.to_reset()
    third.connect(pair.b.endpoint())
    pair.b.connect(third.endpoint())
    armed(pair.cq)
    third.post_send(write(pair, 21))
    completed(pair.cq)
    if how == "close":
        third.close()
    elif how == "reset":
        third.to_reset()
        assert third.outstanding == (0, 0)
        third.close()
    else:
        del third
    assert [(wc.wr_id, wc.status) for wc in pair.cq.poll()] == [(21, WCStatus.SUCCESS)]
    assert pair.cq.poll() == []


def test_completions_of_a_shared_receive_queue_are_kept_too(connect, context, pd):
    needs(context.attr.max_srq, "shared receive queues", context)
    with rp.SRQ(pd) as srq, rp.CQ(context) as recv_cq:
        pair = connect(b_options={"srq": srq, "recv_cq": recv_cq})
        srq.post_srq_recv(rp.RecvWR(pair.theirs[:8], wr_id=7))
        armed(recv_cq)
        pair.a.post_send(rp.Send(pair.mine[:8]))
        completed(recv_cq)
        pair.a.close()
        pair.b.close()
        assert [wc.wr_id for wc in recv_cq.poll()] == [7]
        assert srq.outstanding == 0


def test_poll_and_wait_on_a_closed_cq_raise_closed_error(context):
    cq = rp.CQ(context)
    cq.close()
    for call in (cq.poll, cq.wait):
        with pytest.raises(rp.ClosedError, match="is closed"):
            call()


def test_cq_with_open_queue_pairs_cannot_be_closed(rc):
    with pytest.raises(rp.InUseError, match=r"RC QP 0x.* still open"):
        rc.cq.close()
    rc.works()


@pytest.mark.parametrize(
    "call", [rp.CQ.poll, rp.CQ.wait, lambda cq: cq.wait(0), lambda cq: _rearm(cq, 1)]
)
def test_call_on_a_closed_cq_raises_an_error_that_names_the_cq(context, call):
    cq = rp.CQ(context, 16)
    name = str(cq)
    cq.close()
    with pytest.raises(rp.ClosedError, match=f"^{name} is closed$"):
        call(cq)


def test_closing_a_cq_ends_the_threads_that_wait_for_it(context):
    """However many they wait for, and without a timeout."""
    for _ in range(10):
        cq, errors = rp.CQ(context), []

        def wait(count: int, cq: rp.CQ = cq, errors: list[str] = errors) -> None:
            try:
                cq.wait(count, None)
            except rp.ClosedError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=wait, args=(n,)) for n in (1, 2, 1, 50)]
        for thread in threads:
            thread.start()
        waiting(cq, threads)
        cq.close()
        ended(threads)
        assert cq.closed
        assert errors == [f"CQ of {cq.cqe} entries is closed"] * len(threads)


CALLS = {
    "poll": lambda cq: cq.poll(),
    "wait": lambda cq: cq.wait(1, 0.001),
    "wait without end": lambda cq: cq.wait(1, None),
    "req_notify": lambda cq: cq.req_notify(),
}


@pytest.mark.parametrize("call", CALLS)
def test_closing_against_threads_that_use_the_cq(context, stack, call):
    """Latecomers get an error; nothing crashes, and the close succeeds."""
    channel = stack.enter_context(rp.CompChannel(context)) if call == "req_notify" else None
    for _ in range(50):
        cq, others = rp.CQ(context, 8, channel=channel), []
        started = threading.Semaphore(0)

        def use(cq: rp.CQ = cq, started=started, others: list[str] = others) -> None:
            started.release()
            try:
                while True:
                    with contextlib.suppress(rp.WaitTimeout):
                        CALLS[call](cq)
            except rp.ClosedError:
                pass
            except BaseException as error:
                others.append(repr(error))

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            started.acquire()
        cq.close()
        ended(threads)
        assert others == []
