"""Threads that post, poll and wait at the same time on ``soft0``: nothing is lost or counted wrong.

A queue of the device's is shared by the threads that post to it, those that poll and the one that
runs the device.  Without a GIL all of these run at once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable

from support import TIMES
from support.connected_pair import Rig, thread
from support.isolated import isolated

import rdmapost as rp

SECONDS = 1.0 * TIMES
"""How long a race goes on."""
LATE = 10.0 * TIMES
"""Seconds after which what must come does not come."""


def _rounds(least: int = 20) -> Callable[[], bool]:
    """Return a function that says whether the race goes on."""
    end, left = time.monotonic() + SECONDS, [least]

    def more() -> bool:
        left[0] -= 1
        return time.monotonic() < end or left[0] >= 0

    return more


@isolated(timeout=90)
def test_completions_are_returned_once_and_in_order_while_another_thread_posts() -> None:
    rig = Rig(max_send_wr=256)
    posted, ends = [0], [False]
    to = {"remote_addr": rig.mr.addr + 1024, "rkey": rig.mr.rkey}

    def post() -> None:
        more = _rounds()
        while more():
            while rig.a.outstanding.send > 200:
                time.sleep(0)
            rig.a.post_send([rp.RdmaWrite(rig.mr[:1], wr_id=posted[0] + i, **to) for i in range(8)])
            posted[0] += 8
        ends[0] = True

    found: list[int] = []
    with thread(post) as raised:
        while not ends[0] and not raised:
            found += [wc.check().wr_id for wc in rig.cq.poll(3)]
    assert not raised, raised
    while done := rig.cq.poll():
        found += [wc.check().wr_id for wc in done]
    assert found == list(range(posted[0]))
    assert rig.a.outstanding == (0, 0)
    rig.close()


@isolated(timeout=90)
def test_receive_slots_are_all_freed_while_another_thread_posts() -> None:
    depth = 64
    rig = Rig()
    receiver = rp.QP(rig.pd, rp.QPType.RC, rp.CQ(rig.context, 4096), max_recv_wr=depth)
    sender = rig.queue_pair(max_send_wr=depth)
    sender.connect(receiver.endpoint(), rnr_retry=1)
    receiver.connect(sender.endpoint(), rnr_retry=1)
    rig.more += [receiver.recv_cq, receiver, sender]
    receive = rig.receive(1)

    def post() -> None:
        # As many as have been polled, as soon as they have been.
        left = depth
        deadline = time.monotonic() + LATE
        while left:
            assert time.monotonic() < deadline, f"no room for {left} receives"
            room = depth - receiver.outstanding.recv
            for _ in range(min(room, left)):
                receiver.post_recv(receive)
                left -= 1

    more = _rounds()
    receiver.post_recv([receive] * depth)
    while more():
        sender.post_send([rp.Send(rig.mr[:8])] * depth)
        rig.cq.wait(depth, LATE)
        polled = 0
        with thread(post) as raised:
            while polled < depth and not raised:
                polled += len(receiver.recv_cq.poll(1))
        assert not raised, raised
    assert receiver.outstanding.recv == depth
    rig.close()


@isolated(timeout=90)
def test_posted_work_is_carried_out_while_another_thread_polls() -> None:
    rig = Rig()
    other, ends = rp.CQ(rig.context), threading.Event()
    rig.more.append(other)

    def poll() -> None:
        while not ends.is_set():
            other.poll()

    more, wr = _rounds(), rig.write(3)
    with thread(poll) as raised:
        while more() and not raised:
            rig.a.post_send(wr)
            [wc] = rig.cq.wait(1, LATE)
            assert wc.check().wr_id == 3
        ends.set()
    assert not raised, raised
    rig.close()


@isolated(timeout=90)
def test_completion_racing_req_notify_is_polled_or_announced() -> None:
    rig = Rig()
    channel = rp.CompChannel(rig.context)
    cq = rp.CQ(rig.context, channel=channel)
    a, b = rp.QP(rig.pd, rp.QPType.RC, cq), rig.queue_pair()
    rig.more += [channel, cq, a, b]
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    wr, turn, ends = rig.write(), threading.Semaphore(0), threading.Event()

    def post() -> None:
        while turn.acquire(timeout=LATE) and not ends.is_set():
            a.post_send(wr)

    more = _rounds()
    with thread(post) as raised:
        while more() and not raised:
            turn.release()
            cq.req_notify()
            while not cq.poll():
                # It may be that of the round before, whose completion was polled first.
                assert channel.get_cq_event(LATE) is cq, "neither a completion nor its event"
        ends.set()
        turn.release()
    assert not raised, raised
    rig.close()


@isolated(timeout=60)
def test_traced_thread_beside_signals_in_the_main_thread_does_not_stop_both() -> None:
    """In Python 3.11 a traced function waits for the main thread to notice a signal."""
    more = _rounds()
    signal.signal(signal.SIGALRM, lambda *_: None)
    with rp.open_device("soft0") as context:

        def traced() -> None:
            sys.settrace(lambda *_: None)
            while more():
                rp.CQ(context, 16).close()

        with thread(traced):
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            try:
                while more():
                    rp.CQ(context, 16).close()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
