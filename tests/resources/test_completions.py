"""Completion queues: polling, waiting, threads, and completions that outlive their queue pair."""

from __future__ import annotations

import contextlib
import queue
import select
import signal
import threading
import time

import pytest
from support import LIMIT, Pair, needs

import rdmapost as rp
from rdmapost import WCStatus
from rdmapost._binding import lib


def write(pair: Pair, wr_id: int = 0) -> rp.RdmaWrite:
    return pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=wr_id)


def test_poll_returns_at_once_when_there_is_nothing(cq):
    assert cq.poll() == []
    assert cq.poll(0) == []
    assert cq.wait(0) == []


def test_poll_takes_at_most_as_many_as_asked(rc):
    rc.a.post_send([write(rc, i) for i in range(10)])
    got = rc.wait(1)
    while len(got) < 10:
        some = rc.cq.poll(3)
        assert len(some) <= 3
        got += some
    assert [wc.wr_id for wc in got] == list(range(10))


@pytest.mark.parametrize("cqe", [0, -1, 1 << 31])
def test_size_of_a_cq_is_checked(context, cqe):
    with pytest.raises(ValueError, match=f"cqe={cqe} is not in 1.."):
        rp.CQ(context, cqe)


@pytest.mark.parametrize("vector", [-1, 1 << 20, 1 << 40])
def test_completion_vector_that_the_device_lacks_is_refused_with_the_range(context, vector):
    with pytest.raises(ValueError, match=rf"^comp_vector={vector} is not in 0\.\.\d+$"):
        rp.CQ(context, comp_vector=vector)


def test_wait_times_out_and_loses_nothing(rc):
    rc.a.post_send([write(rc, i) for i in range(3)])
    rc.wait(1)
    with pytest.raises(rp.WaitTimeout, match=r"2 of 3 completions came within 0\.3 s"):
        rc.cq.wait(3, timeout=0.3)
    assert [wc.wr_id for wc in rc.cq.wait(2)] == [1, 2]
    with pytest.raises(TimeoutError):
        rc.cq.wait(timeout=0)


def test_wait_takes_any_timeout(rc):
    for timeout in (None, float("inf"), 1e12, 0.001):
        rc.a.post_send(write(rc))
        if timeout == 0.001:
            time.sleep(0)
            rc.wait()
        else:
            rc.cq.wait(timeout=timeout)


def test_wait_sleeps_until_the_completion_comes(rc):
    """The waiter sleeps on the channel, and another thread posts."""
    got: list[rp.WC] = []
    waiter = threading.Thread(target=lambda: got.extend(rc.cq.wait(8, 20)))
    waiter.start()
    for i in range(8):
        rc.a.post_send(write(rc, i))
    waiter.join(20)
    assert [wc.wr_id for wc in got] == list(range(8))


def test_waiters_of_one_cq_all_get_theirs(rc):
    """Each waits for one; none stays asleep while its completion is available."""
    count = 6
    got: queue.Queue[int] = queue.Queue()

    def wait() -> None:
        got.put(rc.cq.wait(1, 30)[0].wr_id)

    waiters = [threading.Thread(target=wait) for _ in range(count)]
    for waiter in waiters:
        waiter.start()
    # Not all at once: each completion after the first needs its own wake-up.
    for i in range(count):
        rc.a.post_send(write(rc, i))
        # Sooner than after the timeout of wait().
        assert got.get(timeout=15) == i
    for waiter in waiters:
        waiter.join(30)


def test_waiter_for_few_completions_is_not_starved_by_one_for_many(rc):
    few, many = [], []
    greedy = threading.Thread(target=lambda: many.extend(rc.cq.wait(50, 30)))
    modest = threading.Thread(target=lambda: few.extend(rc.cq.wait(1, 30)))
    greedy.start()
    modest.start()
    rc.a.post_send(write(rc, 0))
    modest.join(10)
    assert not modest.is_alive()
    assert [wc.wr_id for wc in few] == [0]
    rc.a.post_send([write(rc, i) for i in range(1, 51)])
    greedy.join(20)
    assert [wc.wr_id for wc in many] == list(range(1, 51))


@pytest.mark.parametrize("timeout", [None, 0, 0.001], ids=["poll", "look", "wait"])
def test_interrupt_at_any_moment_keeps_no_lock(context, timeout):
    """It comes between any two steps of a poll or wait, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def again_and_again(cq: rp.CQ) -> None:
        while True:
            if timeout is None:
                cq.poll()
            else:
                with contextlib.suppress(rp.WaitTimeout):
                    cq.wait(1, timeout)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with rp.CQ(context) as cq:
            for index in range(300):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 2e-4 + index * 1e-6)
                    again_and_again(cq)
                # Another thread would wait for ever.
                other = threading.Thread(target=cq.poll, daemon=True)
                other.start()
                other.join(LIMIT)
                assert not other.is_alive()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_interrupted_wait_loses_nothing(rc):
    """A signal whose handler raises arrives in the middle of a wait."""

    class Enough(Exception):
        pass

    def handler(*_: object) -> None:
        raise Enough

    rc.a.post_send([write(rc, i) for i in range(3)])
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Enough):
            rc.cq.wait(4, 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [wc.wr_id for wc in rc.cq.wait(3)] == [0, 1, 2]


def test_send_and_receive_with_one_wr_id_on_one_cq(connect):
    """Both queues of both sides complete here, all with wr_id 5."""
    pair = connect()
    for _ in range(3):
        pair.a.post_recv(rp.RecvWR(pair.mine[100:200], wr_id=5))
        pair.b.post_recv(rp.RecvWR(pair.theirs[100:200], wr_id=5))
        pair.a.post_send(rp.Send(pair.mine[:8], wr_id=5))
        pair.b.post_send(rp.Send(pair.theirs[:8], wr_id=5))
        done = pair.wait(4)
        assert {(wc.wr_id, wc.qp_num, wc.opcode) for wc in done} == {
            (5, qp.qp_num, opcode)
            for qp in (pair.a, pair.b)
            for opcode in (rp.WCOpcode.SEND, rp.WCOpcode.RECV)
        }
    assert pair.a.outstanding == pair.b.outstanding == (0, 0)


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
    assert select.select([cq._channel.fd], [], [], 10)[0]


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


def test_queue_pairs_of_several_threads(connect):
    """Each thread posts to its own queue pair; one CQ gets all completions."""
    rounds = 40
    pairs = [connect(max_send_wr=rounds) for _ in range(3)]
    errors: list[BaseException] = []

    def post(pair: Pair, number: int) -> None:
        try:
            for i in range(rounds):
                pair.a.post_send(write(pair, number * 1000 + i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=post, args=(p, n)) for n, p in enumerate(pairs)]
    for thread in threads:
        thread.start()
    got = [wc.check().wr_id for wc in pairs[0].cq.wait(rounds * len(pairs), 60)]
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert sorted(got) == sorted(n * 1000 + i for n in range(len(pairs)) for i in range(rounds))
    for number in range(len(pairs)):
        mine = [wr_id for wr_id in got if wr_id // 1000 == number]
        assert mine == sorted(mine)


def test_one_queue_pair_of_several_threads(connect):
    """Lists of several threads go in one after another, none is mixed into another."""
    pair = connect(max_send_wr=256)
    lists = [[write(pair, n * 1000 + i) for i in range(10)] for n in range(12)]

    def post(part: list[list[rp.RdmaWrite]]) -> None:
        for wrs in part:
            pair.a.post_send(wrs)

    threads = [threading.Thread(target=post, args=(lists[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    got = [wc.check().wr_id for wc in pair.cq.wait(120, 60)]
    for thread in threads:
        thread.join(10)
    assert len(set(got)) == 120
    for start in range(0, 120, 10):
        assert got[start : start + 10] == list(range(got[start], got[start] + 10))
