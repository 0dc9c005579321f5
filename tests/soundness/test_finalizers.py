"""What runs in the middle of a verb (finalizers, callers' objects) may close, post and poll."""

from __future__ import annotations

import contextlib
import cProfile
import gc
import logging
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support import TIMES, run_python
from support.connected_pair import ALL, INLINE, Number, Rig
from support.interrupts import Interrupted, Moment, interrupt_at_each_moment
from support.isolated import isolated

import rdmapost as rp
from rdmapost.loopback import Loopback
from rdmapost.resources.resource import open_handles


def _victims(rig: Rig) -> dict[str, Any]:
    """Create resources that a finalizer may close; none of them depends on another."""
    qp = rig.queue_pair()
    qp.to_init()
    qp.post_recv([rig.receive(1), rig.receive(2)])
    return {
        "qp": qp,
        "mr": rp.MR(rig.pd, bytearray(64), ALL),
        "cq": rp.CQ(rig.context),
        "srq": rp.SRQ(rig.pd),
        "batch": rig.b.prepare(rig.write(5)),
    }


class Nested:
    """An action in the middle of a verb, and the completions still expected from it."""

    def __init__(self, rig: Rig, does: str) -> None:
        self.rig, self.does = rig, does
        self.victims = _victims(rig)
        self.calls = 0
        self.posted = 0

    def __call__(self) -> None:
        self.calls += 1
        rig = self.rig
        if self.does in ("polls", "all"):
            rig.found.extend(rig.cq.poll())
            with contextlib.suppress(rp.WaitTimeout):
                rig.found.extend(rig.cq.wait(1, 0))
        if self.does in ("posts", "all") and self.posted < 8:
            self.posted += 1
            rig.a.post_send(rig.write(100 + self.posted))
            rig.b.post_send(rig.write(200 + self.posted, send_flags=rp.SendFlags.SIGNALED))
        if self.does in ("closes", "all"):
            for thing in self.victims.values():
                with contextlib.suppress(rp.InUseError):
                    thing.close()

    def wanted(self) -> list[int]:
        return [base + number + 1 for base in (100, 200) for number in range(self.posted)]


DOES = ["polls", "posts", "closes", "all"]


def _finish(rig: Rig, nested: Nested, wr_ids: list[int]) -> None:
    """All that was posted has completed once, and everything closes."""
    assert nested.calls, "nothing has run in the middle of the verb"
    rig.drain()
    deadline = time.monotonic() + 2 * TIMES
    while rig.b.outstanding.send and time.monotonic() < deadline:
        rig.found += rig.cq.poll()
    assert sorted(wc.check().wr_id for wc in rig.found) == sorted(wr_ids + nested.wanted())
    for thing in nested.victims.values():
        thing.close()
    rig.works()
    rig.close()


@pytest.mark.parametrize("name", ["mr", "cq", "qp", "srq"])
@isolated(silent=True, timeout=30)
def test_resource_dropped_near_the_recursion_limit_is_closed_later(name, soft):
    """There are no frames left for closing it, so the close is deferred."""
    rig = Rig(soft)
    for room in range(1, 40):
        box = [_victims(rig)[name]]
        gc.collect()
        there = len(open_handles())

        def drop(frames: int, box: list[Any]) -> None:
            if frames:
                drop(frames - 1, box)
            box.clear()

        with contextlib.suppress(RecursionError):
            drop(sys.getrecursionlimit() - room, box)
        box.clear()
        gc.collect()
        assert len(open_handles()) < there, room
    rig.works()
    rig.close()


def _deep(frames: int, call: Callable[[], object]) -> object:
    return _deep(frames - 1, call) if frames else call()


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("hook", ["trace", "profile", "cProfile", "none"])
@isolated(silent=True, timeout=30)
def test_resources_dropped_near_the_recursion_limit_under_a_profiler_are_closed_later(
    hook, count, soft
):
    """Python 3.11 runs a pending call again and again before a traced function begins."""
    profiler = cProfile.Profile()
    start, stop = {
        "trace": (lambda: sys.settrace(lambda *_: None), lambda: sys.settrace(None)),
        "profile": (lambda: sys.setprofile(lambda *_: None), lambda: sys.setprofile(None)),
        "cProfile": (profiler.enable, profiler.disable),
        "none": (lambda: None, lambda: None),
    }[hook]
    context = rp.open_device(soft)
    pd = rp.PD(context)
    held: list[rp.MR] = []

    def leaf() -> None:
        pass

    def drop() -> None:
        try:
            drop()
        except RecursionError:
            held.clear()
            leaf()
            raise

    for _ in range(5):
        held += [rp.MR(pd, 64) for _ in range(count)]
        start()
        with contextlib.suppress(RecursionError):
            drop()
        stop()
    with rp.CQ(context):
        # Each creation and each close has the main thread try again.
        leaf()
    assert open_handles() == [pd, context]
    context.close_all()


@isolated(warnings="ignore", timeout=60)
def test_dropping_all_resources_near_the_recursion_limit_does_not_hang(soft):
    """No close is retried forever when there is no frame left for it."""
    sys.unraisablehook = lambda _: None
    sys.setrecursionlimit(220)
    for depth in range(140, 219):
        loopback = Loopback(rp.open_device(soft))
        loopback.receive(8, 2)
        loopback.local.qp.post_send(rp.Send(loopback.local.mr[:8]))
        loopback.window()
        box = [loopback]
        del loopback
        with contextlib.suppress(RecursionError):
            _deep(depth, box.clear)
        gc.collect()


@isolated(warnings="ignore", timeout=60)
def test_poll_near_the_recursion_limit_keeps_pending_retries(soft):
    """A thread with frames left makes the device retry a send that found no receive."""
    logging.disable(logging.CRITICAL)
    with rp.open_device(soft) as context:
        for room in range(1, 25):
            with Loopback(context) as loopback:
                loopback.local.qp.post_send(rp.Send(loopback.local.mr[:8]))
                time.sleep(0.03)  # until the device is to try again; nothing tells
                found: list[rp.WC] = []

                def poll(loopback: Loopback = loopback, found: list[rp.WC] = found) -> None:
                    found += loopback.local.cq.poll()

                with contextlib.suppress(RecursionError):
                    _deep(sys.getrecursionlimit() - room, poll)
                loopback.receive(8)
                found += loopback.local.cq.wait(1 - len(found))
                assert found[0].status is rp.WCStatus.SUCCESS, room


@isolated(silent=True, timeout=15)
def test_handler_that_closes_the_resource_its_thread_waits_on_ends_the_wait(soft):
    """Even a wait without a timeout; then the resource is closed."""
    rig = Rig(soft)
    cq, channel = rp.CQ(rig.context), rp.CompChannel(rig.context)
    for thing, wait in (
        (cq, lambda: cq.wait(1, None)),
        (channel, lambda: channel.get_cq_event(None)),
    ):
        signal.signal(signal.SIGALRM, lambda *_, thing=thing: thing.close())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(rp.ClosedError, match="is closed"):
            wait()
        assert thing.closed
    rig.close()


@isolated(silent=True, timeout=15)
def test_handler_may_close_dependent_resources_in_any_order(soft):
    """A region that receives name, then their queue pair, then its domain."""
    rig = Rig(soft)
    pd = rp.PD(rig.context)
    mr, cq = rp.MR(pd, 64), rp.CQ(rig.context)
    qp = rp.QP(pd, rp.QPType.RC, cq)
    qp.to_init()
    qp.post_recv([rp.RecvWR(mr[:8])] * 2)

    def close(*_: object) -> None:
        for thing in (pd, mr, qp):
            thing.close()
        raise Interrupted

    signal.signal(signal.SIGALRM, close)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(Interrupted):
        rig.cq.wait(1, None)
    assert (pd.closed, mr.closed, qp.closed) == (True, True, True)
    cq.close()
    rig.close()


@isolated(warnings="ignore", timeout=30)
def test_library_error_raised_by_a_handler_within_a_finalizer_is_not_lost(soft):
    """As when it polls what has been closed; and what the finalizer closes is closed."""
    rig = Rig(soft)
    left = len(open_handles())

    def act(box: list[rp.QP]) -> None:
        box.clear()

    def check(box: list[rp.QP], moment: Moment) -> None:
        assert moment.raised or not moment.number, "what the handler raised is lost"
        box.clear()
        assert len(open_handles()) == left

    class Late(rp.WaitTimeout, Interrupted):
        pass

    def make() -> list[rp.QP]:
        qp = rp.QP(rig.pd, rp.QPType.UD, rig.cq)
        qp.connect()
        return [qp]

    interrupt_at_each_moment(make, act, check, handler=Late)
    rig.close()


@pytest.mark.parametrize("verb", ["poll", "wait"])
@pytest.mark.parametrize("does", DOES)
@isolated(silent=True, timeout=15)
def test_finalizer_run_by_a_polled_completion_may_use_the_library(does, verb, device):
    """The region is dropped, and its last reference goes with the completion that is polled."""
    rig = Rig(device)
    nested = Nested(rig, does)
    mr = rp.MR(rig.pd, 64, ALL)
    weakref.finalize(mr, nested)
    rig.a.post_send(
        [
            rp.RdmaWrite(mr[:1], remote_addr=rig.mr.addr + 64, rkey=rig.mr.rkey, wr_id=1),
            rig.write(2),
            rig.write(3),
        ]
    )
    del mr
    assert not nested.calls
    if verb == "wait":
        rig.found += rig.cq.wait(1)
    while not nested.calls:
        rig.found += rig.cq.poll()
    _finish(rig, nested, [1, 2, 3])


@pytest.mark.parametrize("does", DOES)
@pytest.mark.parametrize("verb", ["reset", "close"])
@isolated(silent=True, timeout=15)
def test_finalizer_run_by_a_closing_queue_pair_may_use_the_library(verb, does, device):
    """Its receives are outstanding, and with them goes the last reference to a region."""
    rig = Rig(device)
    nested = Nested(rig, does)
    qp = rig.queue_pair()
    qp.to_init()
    mr = rp.MR(rig.pd, 64, ALL)
    weakref.finalize(mr, nested)
    qp.post_recv(rp.RecvWR(mr[:8], wr_id=9))
    del mr
    qp.to_reset() if verb == "reset" else qp.close()
    gc.collect()
    rig.more.append(qp)
    _finish(rig, nested, [])


class Sges(Sequence[rp.SGE]):
    """Runs something when its SGE is asked for."""

    def __init__(self, sge: rp.SGE, run: Callable[[], object]) -> None:
        self.sge, self.run = sge, run

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        self.run()
        return (self.sge,)[index]


def _wrs(wr: rp.SendWR, run: Callable[[], object]) -> Iterator[rp.SendWR]:
    run()
    yield wr
    run()


HOSTS: dict[str, Callable[[Rig, Callable[[], object]], None]] = {
    # Each runs the caller's code in the middle of the post of a write with the wr_id 1.
    "sequence": lambda rig, run: rig.a.post_send(_write(rig, Sges(rig.mr[:1], run))),
    "sequence-inline": lambda rig, run: rig.a.post_send(
        _write(rig, Sges(rig.mr[:1], run), send_flags=INLINE)
    ),
    "number": lambda rig, run: rig.a.post_send(
        _write(rig, rig.mr[:1], rkey=Number(rig.mr.rkey, run))
    ),
    "list": lambda rig, run: rig.a.post_send(_wrs(_write(rig, rig.mr[:1]), run)),  # type: ignore[arg-type]
    "prepare": lambda rig, run: _prepared(rig, _write(rig, Sges(rig.mr[:1], run))),
}


def _write(rig: Rig, sges: Any, **fields: Any) -> rp.RdmaWrite:
    to = {"remote_addr": rig.mr.addr + 64, "rkey": rig.mr.rkey, **fields}
    return rp.RdmaWrite(sges, wr_id=1, **to)


def _prepared(rig: Rig, wr: rp.SendWR) -> None:
    batch = rig.a.prepare(wr)
    batch.post()
    batch.close()


@pytest.mark.parametrize("does", DOES)
@pytest.mark.parametrize("host", HOSTS)
@isolated(silent=True, timeout=15)
def test_callers_code_run_by_a_post_may_use_the_library(host, does, device):
    rig = Rig(device)
    nested = Nested(rig, does)
    try:
        HOSTS[host](rig, nested)
    except TypeError:
        # A type that is not taken is refused, and nothing of it is posted.
        posted = []
    except rp.PostError as error:
        assert error.posted == 0  # noqa: PT017
        posted = []
    else:
        posted = [1]
    if host in ("sequence", "sequence-inline", "prepare"):
        assert posted, "SGEs may be any sequence"
    if not nested.calls:
        nested()
    _finish(rig, nested, posted)


@pytest.mark.parametrize("host", HOSTS)
@isolated(silent=True, timeout=15)
def test_callers_code_run_by_a_post_may_close_the_posts_resources(host, device):
    """The queue pair, its CQ, the region: then the post is refused, or it closes afterwards."""
    for victim in ("a", "mr", "cq"):
        rig = Rig(device)

        def close(rig: Rig = rig, victim: str = victim) -> None:
            with contextlib.suppress(rp.InUseError):
                getattr(rig, victim).close()

        try:
            HOSTS[host](rig, close)
        except (TypeError, rp.ClosedError):
            pass
        except rp.PostError as error:
            assert error.posted == 0  # noqa: PT017
            assert "closed" in str(error)  # noqa: PT017
        for thing in (rig.a, rig.b, rig.mr, rig.cq, rig.pd, rig.context):
            thing.close()


class Cycle:
    """Garbage that the collector finds in the middle of whatever runs then, and that acts."""

    def __init__(self, thing: Any, act: Callable[[Any], object]) -> None:
        self.itself, self.thing, self.act = self, thing, act

    def __del__(self) -> None:
        self.act(self.thing)


@pytest.mark.parametrize("verb", ["poll", "post", "inline", "wait", "prepared", "recv", "make"])
@isolated(silent=True, timeout=30)
def test_garbage_collector_within_a_verb_may_close_post_and_poll(verb, device):
    """The collector runs at every allocation, and finds queue pairs, regions and finalizers."""
    rig = Rig(device, max_send_wr=512, max_recv_wr=512)
    wrs = [rig.write(number) for number in range(4)]
    inline = [rig.write(number, send_flags=INLINE) for number in range(4)]
    batch = rig.a.prepare(wrs)

    def work() -> None:
        if verb == "poll":
            rig.cq.poll()
        elif verb == "post":
            rig.a.post_send(wrs)
        elif verb == "inline":
            rig.a.post_send(inline)
        elif verb == "wait":
            with contextlib.suppress(rp.WaitTimeout):
                rig.cq.wait(1, 0)
        elif verb == "prepared":
            batch.post()
        elif verb == "recv":
            rig.a.post_recv([rig.receive(number) for number in range(2)])
        else:
            rp.MR(rig.pd, bytearray(64)).close()
            rig.queue_pair().close()

    def act(qp: rp.QP) -> None:
        qp.close()
        rig.found.extend(rig.cq.poll())
        rig.a.post_send(rig.write(7))

    deadline = time.monotonic() + 1.5 * TIMES
    for _ in range(120):
        qp = rig.queue_pair()
        qp.to_init()
        qp.post_recv(rp.RecvWR(rp.MR(rig.pd, bytearray(64), ALL)[:8]))
        Cycle(qp, act)
        dropped = rig.queue_pair()
        dropped.to_init()
        dropped.post_recv(rig.receive(1))
        knot: list[Any] = [dropped]
        knot.append(knot)
        del qp, dropped, knot
        before = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        work()
        gc.set_threshold(*before)
        rig.found += rig.cq.poll(512)
        if verb == "recv" and rig.a.outstanding.recv > 400:
            break
        if time.monotonic() > deadline:
            break
    gc.collect()
    rig.drain()
    rig.works()
    batch.close()
    rig.close()


# From 3.12 on, a waiting thread collects only if it happens to allocate; on 3.14 it does not.
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the collector runs between calls only")
@isolated(warnings="ignore", timeout=60)
def test_what_the_collector_finds_in_a_waiting_thread_can_be_closed_by_another(soft):
    """Before that wait has ended."""
    waiting = Rig(soft)
    pd, cq = rp.PD(waiting.context), rp.CQ(waiting.context)
    waiter = threading.Thread(target=waiting.cq.wait, args=(2,))
    gc.disable()
    waiter.start()

    def drop() -> Callable[[], object]:
        cycle: list[Any] = [rp.MR(pd, 64), rp.QP(pd, rp.QPType.RC, cq)]
        cycle.append(cycle)
        return weakref.ref(cycle[1])

    queue_pair = drop()
    gc.set_threshold(1, 1, 1)
    # The thread waits for two completions; the first wakes it, and it collects garbage.
    waiting.a.post_send(waiting.write())
    gc.enable()
    end = time.monotonic() + 3
    while time.monotonic() < end and queue_pair() is not None:
        time.sleep(0.01)
    gc.disable()
    cq.close()
    pd.close()
    waiting.a.post_send(waiting.write())
    waiter.join()
    waiting.close()


@isolated(warnings="ignore", timeout=60)
def test_interrupt_as_a_subclass_with_a_finalizer_is_dropped_leaves_nothing_open(soft):
    class Region(rp.MR):
        def __del__(self) -> None:
            pass

    def raise_it(number: int, frame: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, raise_it)
    sys.unraisablehook = lambda unraisable: None
    rig, numbers = Rig(soft), random.Random(1)
    for _ in range(1500):
        pd = rp.PD(rig.context)
        try:
            signal.setitimer(signal.ITIMER_REAL, numbers.uniform(5e-6, 150e-6))
            for _ in range(6):
                Region(pd, 64)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        pd.close()
    rig.close()


@pytest.mark.parametrize(("verb", "threshold"), [("query", 13), ("query_port", 2), ("connect", 35)])
def test_collector_may_finalize_in_the_middle_of_the_first_use_of_a_verb(
    device: str, verb: str, threshold: int
) -> None:
    """cffi looked up a struct then, and aborted the process if a finalizer needed it, too."""
    run = run_python(
        "import gc, sys, rdmapost as rp\n"
        "name, verb, threshold = sys.argv[1], sys.argv[2], int(sys.argv[3])\n"
        "context = rp.open_device(name)\n"
        "pd, cq = rp.PD(context), rp.CQ(context)\n"
        "qp = rp.QP(pd, rp.QPType.RC, cq)\n"
        "def act():\n"
        "    if verb == 'connect': qp.connect(qp.endpoint())\n"
        "    elif verb == 'query': qp.query()\n"
        "    else: context.query_port(1)\n"
        "class Finalized:\n"
        "    busy = False\n"
        "    def __del__(self):\n"
        "        if Finalized.busy: return\n"
        "        Finalized.busy = True\n"
        "        try: act()\n"
        "        except (rp.RdmaError, ValueError): pass\n"
        "        finally: Finalized.busy = False\n"
        "def leave_garbage(phase, info):\n"
        "    if phase == 'start' and not Finalized.busy:\n"
        "        garbage = Finalized()\n"
        "        garbage.me = garbage\n"
        "gc.collect(); gc.disable()\n"
        "gc.callbacks.append(leave_garbage)\n"
        "gc.set_threshold(threshold); gc.enable()\n"
        "try: act()\n"
        "except (rp.RdmaError, ValueError): pass\n"
        "gc.callbacks.clear()\n"
        "gc.set_threshold(700)\n"
        "qp.close(); cq.close(); pd.close(); context.close()\n",
        *(device, verb, str(threshold)),
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kind", ["CompChannel", "CQ", "QP"])
def test_resource_closed_by_another_thread_during_its_constructor_raises_closed_error(
    context: rp.Context, kind: str
) -> None:
    """It reads no struct that has been destroyed."""
    before, latest, ended = sys.getswitchinterval(), list[Any](), threading.Event()

    def close() -> None:
        while not ended.is_set():
            for resource in latest[-1:]:
                with contextlib.suppress(rp.RdmaError):
                    resource.close()

    closer = threading.Thread(target=close)
    sys.setswitchinterval(1e-6)
    closer.start()
    try:
        with rp.PD(context) as pd, rp.CQ(context) as cq:
            arguments = (pd, rp.QPType.RC, cq) if kind == "QP" else (context,)
            cls = getattr(rp, kind)
            for _ in range(500):
                resource = cls.__new__(cls)
                latest.append(resource)
                with contextlib.suppress(rp.ClosedError):
                    resource.__init__(*arguments)
                latest.clear()
                resource.close()
    finally:
        ended.set()
        closer.join()
        sys.setswitchinterval(before)
