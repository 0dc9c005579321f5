"""Memory behind a valid key is kept: under windows, and if deregistering fails."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support.connected_pair import BINDABLE, LIMIT, Memory, Rig, thread
from support.interrupts import Interrupted
from support.isolated import isolated

import rdmapost as rp
from rdmapost import MWType
from rdmapost.resources.resource import open_handles

SIZE = 100_000
READ_WRITE = rp.Access.REMOTE_READ | rp.Access.REMOTE_WRITE
RXE_DESTROY = 60.0
"""Seconds: rxe waits 50 for a window to let go of its queue pair, then destroys that anyway."""


def post_bind(rig: Rig, mw: rp.MW, mr: rp.MR, **fields: Any) -> None:
    """Post a bind of a window of type 2 to the whole region, on b's side."""
    rig.b.post_send(
        rp.BindMW(
            mw=mw,
            rkey=mw.next_rkey(),
            mr=mr,
            addr=mr.addr,
            length=mr.length,
            mw_access_flags=READ_WRITE,
            **fields,
        )
    )


def bind(rig: Rig, mw: rp.MW, mr: rp.MR) -> None:
    """Bind a window to the whole region, on b's side."""
    if mw.mw_type is MWType.TYPE_1:
        rig.b.bind_mw(mw, mr, mr.addr, mr.length, READ_WRITE)
    else:
        post_bind(rig, mw, mr)
    rig.cq.wait(1)[0].check()


def bind_start(qp: rp.QP, cq: rp.CQ, mw: rp.MW, mr: rp.MR) -> None:
    """Bind a window of type 2 to the first 8 bytes of the region, through any queue pair."""
    qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=8))
    cq.wait(1)[0].check()


def in_a_worker(work: Callable[[], None], timeout: float) -> None:
    """Run a function in another thread while the main one waits; fail if it raises."""
    with thread(work, limit=timeout) as failed:
        pass
    assert not failed, failed


def through(rig: Rig, mw: rp.MW, addr: int) -> rp.WCStatus:
    """Write 64 bytes from a through the window; return how it ended."""
    rig.mr.buffer[:64] = b"\xee" * 64
    rig.a.post_send(rp.RdmaWrite(rig.mr[:64], remote_addr=addr, rkey=mw.rkey))
    return rig.cq.wait(1)[0].status


def bound(device: str, mw_type: str) -> tuple[Rig, rp.MW, int, weakref.ref[Memory]]:
    """Bind a window to memory that nobody else knows, and drop the region."""
    rig = Rig(device)
    mw = rp.MW(rig.pd, MWType[mw_type])
    memory = Memory(SIZE)
    ref = weakref.ref(memory)
    mr = rp.MR(rig.pd, memory, BINDABLE)
    addr = mr.addr
    bind(rig, mw, mr)
    return rig, mw, addr, ref


TYPES = ["TYPE_2", "TYPE_1"]


@pytest.mark.parametrize("mw_type", TYPES)
@isolated(silent=True)
def test_write_through_a_window_of_a_dropped_region_hits_no_other_memory(mw_type, device):
    """The region and its buffer have been dropped, and memory of the same size is asked for."""
    rig, mw, addr, _ = bound(device, mw_type)
    gc.collect()
    others = [bytearray(SIZE) for _ in range(64)]
    through(rig, mw, addr)
    assert not any(any(other) for other in others)


@pytest.mark.parametrize("mw_type", TYPES)
@isolated(silent=True)
def test_window_holds_its_region_until_it_is_closed(mw_type, device):
    """The peer's write arrives in the memory that the window was bound to."""
    rig, mw, addr, ref = bound(device, mw_type)
    gc.collect()
    memory = ref()
    assert memory is not None, "the memory has been let go, and the window is bound to it"
    assert through(rig, mw, addr) is rp.WCStatus.SUCCESS
    assert bytes(memory[:64]) == b"\xee" * 64
    del memory
    mw.close()
    gc.collect()
    assert ref() is None, "the window has been closed, and holds the memory"
    rig.close()


@isolated(warnings="ignore")
def test_dropped_queue_pair_without_a_bind_is_closed_despite_anothers_window(device):
    """A queue pair without a posted bind closes with its last reference."""
    rig, mw, *_ = bound(device, "TYPE_2")
    cq = rp.CQ(rig.context)
    qp = rp.QP(rig.pd, rp.QPType.RC, cq)
    del qp
    cq.close()
    assert cq.closed
    mw.close()
    rig.close()


@isolated(warnings="ignore", timeout=30)
def test_parents_of_a_dropped_queue_pair_with_a_bound_window_can_be_closed(device):
    """By any thread, while the main thread waits and another window is bound."""
    rig, mw, *_ = bound(device, "TYPE_2")

    def use() -> None:
        with rp.CQ(rig.context) as cq, rp.PD(rig.context) as pd:
            with rp.MR(pd, SIZE, BINDABLE) as mr, rp.MW(pd) as own:
                qp, peer = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
                qp.connect(peer.endpoint())
                peer.connect(qp.endpoint())
                bind_start(qp, cq, own, mr)
            del qp, peer

    in_a_worker(use, 20)
    mw.close()
    rig.close()


class Watch:
    """A provider that notes which queue pairs and windows are destroyed, in order."""

    def __init__(self, provider: Any) -> None:
        self.provider, self.destroyed = provider, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)

    def destroy_qp(self, qp: Any) -> Any:
        self.destroyed.append("queue pair")
        return self.provider.destroy_qp(qp)

    def dealloc_mw(self, mw: Any) -> Any:
        self.destroyed.append("window")
        return self.provider.dealloc_mw(mw)


class Finalized:
    def __del__(self) -> None:
        sum(range(100))


@pytest.mark.parametrize("finalizer", [False, True], ids=["", "and an object with a finalizer"])
@pytest.mark.parametrize("order", ["queue pairs first", "windows first"])
@isolated(silent=True)
def test_windows_are_closed_before_the_queue_pairs_of_the_same_garbage_cycle(
    order, finalizer, device
):
    """A device may take minutes to destroy a queue pair through which a window is bound."""
    rig = Rig(device)
    watch = Watch(rig.context._provider)
    rig.context._provider = watch
    mr = rp.MR(rig.pd, SIZE, BINDABLE)
    cycle: list[Any] = [[], Finalized() if finalizer else None, []]
    cycle.append(cycle)
    for _ in range(40):
        qp, mw = rig.queue_pair(), rp.MW(rig.pd)
        qp.connect(qp.endpoint())
        bind_start(qp, rig.cq, mw, mr)
        cycle[0].append(qp)
        cycle[2].append(mw)
    if order == "windows first":
        cycle[0], cycle[2] = cycle[2], cycle[0]
    del qp, mw, cycle
    gc.collect()
    closed = 0
    for what in watch.destroyed:
        closed += 1 if what == "window" else -1
        assert closed >= 0, watch.destroyed
    assert watch.destroyed.count("queue pair") == 40
    mr.close()
    rig.context._provider = watch.provider
    rig.close()


class OwnPD(rp.PD):
    window: rp.MW


class OwnCQ(rp.CQ):
    window: rp.MW


class OwnQP(rp.QP):
    window: rp.MW


class OwnMR(rp.MR):
    window: rp.MW


@pytest.mark.parametrize("owner", ["PD", "CQ", "QP", "MR"])
@isolated(warnings="ignore")
def test_dropped_queue_pair_that_leads_to_its_window_is_collected(owner, device):
    """The window is bound through it, and only what the queue pair uses refers to the window."""
    with rp.open_device(device) as context:

        def drop() -> None:
            pd, cq = OwnPD(context), OwnCQ(context)
            mr = OwnMR(pd, SIZE, BINDABLE)
            qp = OwnQP(pd, rp.QPType.RC, cq)
            qp.connect(qp.endpoint())
            qp.post_recv(rp.RecvWR(mr[:8]))
            mw = rp.MW(pd)
            {"PD": pd, "CQ": cq, "QP": qp, "MR": mr}[owner].window = mw  # type: ignore[attr-defined]
            bind_start(qp, cq, mw, mr)

        soft = device == "soft0"
        with rp.CQ(context) as cq:
            before = len(open_handles())
            for _ in range(3 if soft else 1):
                drop()
            end = time.monotonic() + LIMIT + (0 if soft else RXE_DESTROY)
            while len(open_handles()) > before:
                assert time.monotonic() < end, open_handles()
                gc.collect()
                cq.poll()


@pytest.mark.parametrize("outstanding", ["bind", "invalidation"])
@isolated(warnings="ignore")
def test_queue_pair_dropped_with_a_window_in_flight_is_collected(outstanding, device):
    rig, mw, *_ = bound(device, "TYPE_2")
    wr: Any = rp.LocalInv(invalidate_rkey=mw.rkey, send_flags=rp.SendFlags(0))
    if outstanding == "bind":
        other = rp.MW(rig.pd)
        wr = rp.BindMW(
            mw=other,
            rkey=other.next_rkey(),
            mr=rig.mr,
            addr=rig.mr.addr,
            length=8,
            send_flags=rp.SendFlags(0),
        )
        del other
    rig.b.post_send(wr)
    del rig.b, mw, wr
    gc.collect()
    rig.b = rig.queue_pair()
    rig.close()


@pytest.mark.parametrize("dropped", ["references", "a reference cycle"])
@isolated(warnings="ignore", timeout=60)
def test_dropped_queue_pair_is_closed_with_its_windows_while_the_main_thread_waits(dropped, device):
    """And everything that it kept open: the worker can close its device."""
    held: list[bool] = []

    def drop(rig: Rig) -> weakref.ref[Memory]:
        memory = Memory(SIZE)
        mr, mw = rp.MR(rig.pd, memory, BINDABLE), rp.MW(rig.pd)
        cq = rp.CQ(rig.context)
        qp, peer = rp.QP(rig.pd, rp.QPType.RC, cq), rp.QP(rig.pd, rp.QPType.RC, cq)
        qp.connect(peer.endpoint())
        peer.connect(qp.endpoint())
        qp.post_recv(rp.RecvWR(mr[:8]))
        bind_start(qp, cq, mw, mr)
        if dropped == "a reference cycle":
            cycle: list[Any] = [qp, mr, mw]
            cycle.append(cycle)
        return weakref.ref(memory)

    def use() -> None:
        rig = Rig(device)
        refs = [drop(rig) for _ in range(3)]
        gc.collect()
        held.extend(ref() is not None for ref in refs)
        rig.close()

    in_a_worker(use, 50)
    assert held == [False] * 3


@isolated(warnings="ignore", timeout=60)
def test_queue_pair_that_waits_for_its_window_survives_an_interrupted_close_of_its_cq(soft):
    """It is closed later: whatever it uses can be closed."""

    def raise_it(number: int, frame: object) -> None:
        raise Interrupted

    def attempt(delay: float) -> None:
        rig = Rig(soft)
        cq, mr, mw = rp.CQ(rig.context), rp.MR(rig.pd, SIZE, BINDABLE), rp.MW(rig.pd)
        qp = rp.QP(rig.pd, rp.QPType.RC, cq)
        qp.connect(qp.endpoint())
        qp.post_recv(rp.RecvWR(mr[:8]))
        bind_start(qp, cq, mw, mr)
        del qp
        # Wait longer than the queue pair does, without a verb that would close it.
        time.sleep(0.51)
        with contextlib.suppress(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, delay)
            cq.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        for resource in (cq, mw, mr):
            resource.close()
        rig.close()

    signal.signal(signal.SIGALRM, raise_it)
    for number in range(24):
        attempt(2e-5 + number * 2.5e-5)


@isolated(warnings="ignore")
def test_cycle_of_queue_pair_and_window_collected_in_a_verb_is_gone_after_it(soft):
    rig = Rig(soft)

    def drop() -> weakref.ref[Memory]:
        memory = Memory(SIZE)
        mr, mw = rp.MR(rig.pd, memory, BINDABLE), rp.MW(rig.pd)
        qp = rig.queue_pair()
        qp.connect(qp.endpoint())
        qp.post_recv(rp.RecvWR(mr[:8]))
        bind_start(qp, rig.cq, mw, mr)
        cycle: list[Any] = [mw, qp]
        cycle.append(cycle)
        return weakref.ref(memory)

    def collect(number: int, frame: object) -> None:
        gc.collect()
        rig.a.post_send(rig.write())

    gc.disable()
    memory = drop()
    signal.signal(signal.SIGALRM, collect)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    rig.cq.wait(1, timeout=LIMIT)[0].check()
    assert memory() is None
    rig.close()


@pytest.mark.parametrize("first", ["later", "earlier"])
@isolated(silent=True)
def test_window_bound_by_two_queue_pairs_holds_its_current_region(first, soft):
    """Whichever of the two completions is polled first."""
    rig = Rig(soft)
    cqs = [rp.CQ(rig.context), rp.CQ(rig.context)]
    pairs = [(rp.QP(rig.pd, rp.QPType.RC, cq), rp.QP(rig.pd, rp.QPType.RC, cq)) for cq in cqs]
    for qp, peer in pairs:
        qp.connect(peer.endpoint())
        peer.connect(qp.endpoint())
    mw = rp.MW(rig.pd, MWType.TYPE_1)
    memories = []
    for qp, _ in pairs:
        memory = Memory(SIZE)
        memories.append(weakref.ref(memory))
        mr = rp.MR(rig.pd, memory, BINDABLE)
        qp.bind_mw(mw, mr, mr.addr, mr.length, READ_WRITE)
    del memory, mr
    for cq in cqs if first == "earlier" else cqs[::-1]:
        cq.wait(1)[0].check()
    gc.collect()
    assert memories[1]() is not None, "the memory has been let go, and the window is bound to it"
    mw.close()
    gc.collect()
    assert [memory() for memory in memories] == [None, None]
    for pair in pairs:
        for qp in pair:
            qp.close()
    for cq in cqs:
        cq.close()
    rig.close()


@pytest.mark.parametrize("first", ["later", "earlier"])
@isolated(silent=True)
def test_window_holds_the_region_of_the_bind_that_was_carried_out_last(first, soft):
    """The bind waits behind a message that finds no receive at the peer."""
    rig = Rig(soft)
    cqs = [rp.CQ(rig.context) for _ in range(3)]
    pairs = [(rp.QP(rig.pd, rp.QPType.RC, cq), rp.QP(rig.pd, rp.QPType.RC, cqs[2])) for cq in cqs]
    for qp, peer in pairs:
        qp.connect(peer.endpoint(), rnr_retry=7)
        peer.connect(qp.endpoint(), min_rnr_timer=1)
    mw = rp.MW(rig.pd, MWType.TYPE_1)
    memories = []
    pairs[0][0].post_send(rp.Send(rig.mr[:8]))
    for qp, _ in pairs[:2]:
        memory = Memory(SIZE)
        memories.append(weakref.ref(memory))
        mr = rp.MR(rig.pd, memory, BINDABLE)
        qp.bind_mw(mw, mr, mr.addr, mr.length, READ_WRITE)
    del memory, mr
    pairs[0][1].post_recv(rp.RecvWR(rig.mr[:8]))
    polled = [(cqs[0], 2), (cqs[1], 1), (cqs[2], 1)]
    for cq, count in polled if first == "earlier" else polled[::-1]:
        for wc in cq.wait(count):
            wc.check()
    gc.collect()
    assert memories[0]() is not None, "the memory has been let go, and the window is bound to it"
    mw.close()
    gc.collect()
    assert [memory() for memory in memories] == [None, None]
    for thing in (*[qp for pair in pairs for qp in pair], *cqs):
        thing.close()
    rig.close()


@isolated(silent=True)
def test_window_bound_to_another_region_releases_the_first(device):
    """A window of type 1 is bound again without an invalidation."""
    rig, mw, _, ref = bound(device, "TYPE_1")
    bind(rig, mw, rig.mr)
    gc.collect()
    assert ref() is None
    mw.close()
    rig.close()


def held_until_closed(rig: Rig, mw: rp.MW, ref: weakref.ref[Memory]) -> None:
    """Take the last completion; the memory stays until the window is closed, and no longer."""
    rig.cq.wait(1)[0].check()
    gc.collect()
    assert ref() is not None
    mw.close()
    gc.collect()
    assert ref() is None
    rig.close()


@isolated(silent=True)
def test_window_whose_bind_fails_holds_its_previous_region(device):
    """A window of type 2 that is bound cannot be bound again; the other region is released."""
    rig, mw, _, ref = bound(device, "TYPE_2")
    memory = Memory(SIZE)
    other = weakref.ref(memory)
    post_bind(rig, mw, rp.MR(rig.pd, memory, BINDABLE))
    del memory
    gc.collect()
    assert ref() is not None
    assert other() is not None
    status = rig.cq.wait(1)[0].status
    assert status is not rp.WCStatus.SUCCESS
    gc.collect()
    assert ref() is not None, "the window is bound to it still"
    # Soft-RoCE flushes the bind, which may have been executed or not, so both regions are held.
    assert (other() is None) is (status is not rp.WCStatus.WR_FLUSH_ERR)
    mw.close()
    gc.collect()
    assert (ref(), other()) == (None, None)
    rig.close()


@isolated(silent=True)
def test_window_holds_both_regions_after_a_bind_with_unknown_outcome(device):
    """The bind waits behind a message that finds no receive, and the queue pair is reset."""
    rig, mw, _, ref = bound(device, "TYPE_1")
    memory = Memory(SIZE)
    other = weakref.ref(memory)
    mr = rp.MR(rig.pd, memory, BINDABLE)
    rig.b.post_send(rp.Send(rig.mr[:8]))
    rig.b.bind_mw(mw, mr, mr.addr, mr.length, READ_WRITE)
    rig.b.to_reset()
    del memory, mr
    gc.collect()
    assert ref() is not None
    assert other() is not None
    mw.close()
    gc.collect()
    assert ref() is None
    assert other() is None
    rig.close()


@isolated(silent=True)
def test_unsignaled_bind_is_retired_by_a_later_completion(device):
    """The window of type 2 was bound without a completion; a write after it completes."""
    rig = Rig(device)
    mw, memory = rp.MW(rig.pd, MWType.TYPE_2), Memory(SIZE)
    ref = weakref.ref(memory)
    post_bind(rig, mw, rp.MR(rig.pd, memory, BINDABLE), send_flags=0)
    del memory
    rig.b.post_send(rig.write())
    held_until_closed(rig, mw, ref)


@isolated(silent=True)
def test_unbound_window_releases_its_region(device):
    """A window of type 1 is unbound by a bind of no bytes, when that has completed."""
    rig, mw, _, ref = bound(device, "TYPE_1")
    rig.b.bind_mw(mw, rig.mr, rig.mr.addr, 0)
    gc.collect()
    assert ref() is not None
    rig.cq.wait(1)[0].check()
    gc.collect()
    assert ref() is None
    mw.close()
    rig.close()


@isolated(silent=True)
def test_region_under_an_invalidated_window_can_be_closed(device):
    """It is held until the window is closed or bound again, and can be closed."""
    rig, mw, _, ref = bound(device, "TYPE_2")
    rig.b.post_send(rp.LocalInv(invalidate_rkey=mw.rkey))
    held_until_closed(rig, mw, ref)


@pytest.mark.parametrize("mw_type", TYPES)
@isolated(silent=True)
def test_closing_a_region_with_a_bound_window_is_refused(mw_type, device):
    """The region stays usable, and can be closed after the window."""
    rig = Rig(device)
    mw = rp.MW(rig.pd, MWType[mw_type])
    bind(rig, mw, rig.mr)
    with pytest.raises((rp.InUseError, rp.VerbsError)):
        rig.mr.close()
    assert not rig.mr.closed
    assert through(rig, mw, rig.mr.addr + 512) is rp.WCStatus.SUCCESS
    assert bytes(rig.mr.buffer[512:576]) == b"\xee" * 64
    mw.close()
    rig.close()


class Refuses:
    """Wraps a provider, and refuses to destroy until a test allows it."""

    def __init__(self, provider: Any, *verbs: str) -> None:
        self._provider, self._verbs = provider, verbs

    def __getattr__(self, name: str) -> Any:
        if name in self._verbs:

            def refuse(*_: object) -> None:
                raise rp.VerbsError(f"ibv_{name}", 16)

            return refuse
        return getattr(self._provider, name)


@isolated(silent=True, warnings="always")
def test_collected_region_that_cannot_be_deregistered_keeps_its_memory_and_warns(soft):
    """It is collected, the device refuses, and its key still leads to its memory."""
    rig = Rig(soft)
    memory = Memory(SIZE)
    ref = weakref.ref(memory)
    rig.context._provider = Refuses(rig.context._provider, "dereg_mr")
    mr = rp.MR(rig.pd, memory, BINDABLE)
    addr, rkey = mr.addr, mr.rkey
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del memory, mr
        gc.collect()
    kept = ref()
    assert kept is not None, "the memory has been let go, and its key is valid"
    rig.a.post_send(rp.RdmaWrite(rig.mr[:64], remote_addr=addr, rkey=rkey))
    rig.mr.buffer[:64] = b"\xee" * 64
    rig.cq.wait(1)[0].check()
    assert len(kept) == SIZE
    assert [w.category for w in said] == [ResourceWarning], said
    assert "MR" in str(said[0].message)


@isolated(silent=True, warnings="always")
def test_collected_queue_pair_that_cannot_be_destroyed_keeps_its_memory(soft):
    """It is collected with a receive outstanding: a message may still come into that."""
    rig = Rig(soft)
    memory = Memory(SIZE)
    ref = weakref.ref(memory)
    mr = rp.MR(rig.pd, memory, BINDABLE)
    rig.context._provider = Refuses(rig.context._provider, "destroy_qp")
    rig.b = rig.queue_pair()
    rig.a.to_reset()
    rig.a.connect(rig.b.endpoint(), rnr_retry=1)
    rig.b.connect(rig.a.endpoint(), rnr_retry=1)
    rig.b.post_recv(rp.RecvWR(mr[:64]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del memory, mr
        rig.b = None  # type: ignore[assignment]
        gc.collect()
    kept = ref()
    assert kept is not None, "the memory has been let go, and the queue pair writes there"
    rig.mr.buffer[:8] = b"the mail"
    rig.a.post_send(rp.Send(rig.mr[:8]))
    rig.cq.wait(1)
    assert bytes(kept[:8]) == b"the mail"
    assert any(issubclass(w.category, ResourceWarning) for w in said), said


@isolated(silent=True)
def test_dropped_queue_pair_with_a_bound_window_releases_the_regions_of_its_receives(device):
    """Its close is left to the main thread, which may not come to it."""
    rig = Rig(device)
    mr = rp.MR(rig.pd, SIZE)
    closed: list[bool] = []
    mw = rp.MW(rig.pd)

    def use() -> None:
        bind(rig, mw, rig.mr)
        rig.b.post_recv(rp.RecvWR(mr[:]))
        rig.b = None  # type: ignore[assignment]
        mr.close()
        closed.append(mr.closed)

    worker = threading.Thread(target=use)
    worker.start()
    worker.join()
    assert closed == [True]
    for thing in (mw, rig.a, rig.mr, rig.cq, rig.pd, rig.context):
        thing.close()


class HidesSize(rp.CQ):
    """Its size cannot be read while a queue pair is being forgotten."""

    __slots__ = ("dying",)

    @property
    def cqe(self) -> int:
        if self.dying.closed:
            raise ZeroDivisionError
        return super().cqe


class Stubborn(rp.QP):
    """A queue pair whose close always fails in Python."""

    __slots__ = ()

    def _forget(self) -> None:
        raise ZeroDivisionError


@isolated(silent=True)
@pytest.mark.parametrize("fails", ["the CQ's size", "_forget"])
def test_destroyed_queue_pair_has_no_records_whatever_fails(fails):
    """Otherwise dropping its last reference would bind a window through a destroyed queue."""
    rig = Rig("soft0")
    qp_class, cq_class = (Stubborn, rp.CQ) if fails == "_forget" else (rp.QP, HidesSize)
    rig.a.close()
    with cq_class(rig.context, 64) as cq:
        qp = qp_class(rig.pd, rp.QPType.RC, cq)
        if cq_class is HidesSize:
            cq.dying = qp
        rig.b.to_reset()
        rig.b.connect(qp.endpoint())
        qp.connect(rig.b.endpoint(), rnr_retry=7)
        mr, mw = rp.MR(rig.pd, SIZE, BINDABLE), rp.MW(rig.pd)
        qp.post_send(rp.Send(mr[:8]))  # nobody receives it
        qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=8))
        assert qp.outstanding.send == 2
        with contextlib.suppress(ZeroDivisionError):
            qp.close()
        assert qp.closed
        assert qp.outstanding.send == 0
        del qp
        if cq_class is HidesSize:
            cq.dying = rig.b
        gc.collect()
        gc.collect()  # walks over the window
        mw.close()
        mr.close()
