"""The order in which resources may be closed, by any thread, finalizer or exit."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support import LIMIT, LOSES_MEMORY, needs, prints, until
from support import threads as beside
from support.isolated import isolated
from support.windows import bind_wr

import rdmapost as rp
from rdmapost._binding import ffi, native
from rdmapost.resources.resource import Resource, _open, close_with_all_below, open_children

closed: list[str] = []


class Device:
    """What the device does when a thing is destroyed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken = False
        self.inside: Callable[[], object] = lambda: None

    def destroy(self, _: object) -> None:
        self.inside()
        if self.broken:
            raise rp.VerbsError("ibv_destroy_thing", 16)
        closed.append(self.name)


class Thing(Resource):
    """A resource of no device."""

    __slots__ = ("above", "device", "name", "others")

    def __init__(self, name: str, *parents: Thing) -> None:
        self.name = name
        self.above = parents
        self.others: list[Any] = []
        self.device = Device(name)
        self._make(ffi.new, ("char *",), self.device.destroy, parents)

    def __str__(self) -> str:
        return self.name


class SlowToForget(Thing):
    """Its close waits in the middle, after the thing has been destroyed.

    Attributes:
        forgets: set when the close gets there.
        go_on: lets it go on.
    """

    __slots__ = ("forgets", "go_on")

    def __init__(self, name: str, *parents: Thing) -> None:
        self.forgets, self.go_on = threading.Event(), threading.Event()
        super().__init__(name, *parents)

    def _forget(self) -> None:
        self.forgets.set()
        assert self.go_on.wait(LIMIT)


@pytest.fixture(autouse=True)
def _forget() -> None:
    closed.clear()


@pytest.fixture
def reported(monkeypatch) -> list[Any]:
    """What could not be raised."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: found.append(error.exc_value))
    return found


def tree() -> dict[str, Thing]:
    """A device, a PD and a CQ on it, an MR, and a QP that needs PD and CQ."""
    context = Thing("context")
    pd, cq = Thing("pd", context), Thing("cq", context)
    return {
        "context": context,
        "pd": pd,
        "cq": cq,
        "mr": Thing("mr", pd),
        "qp": Thing("qp", pd, cq),
    }


def all_end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_resource_may_be_closed_twice():
    thing = Thing("pd")
    assert not thing.closed
    thing.close()
    thing.close()
    assert closed == ["pd"]
    assert thing.closed
    assert "(closed)" in repr(thing)


def test_use_after_close_raises_an_error_that_names_the_resource():
    thing = Thing("pd")
    thing.close()
    with pytest.raises(rp.ClosedError, match="pd is closed"):
        thing._open_struct()
    with pytest.raises(rp.ClosedError, match="pd is closed"), thing:
        pass


def test_parent_closes_once_another_thread_is_done_with_its_closed_child():
    parent = Thing("pd")
    child = SlowToForget("qp", parent)
    threads = [threading.Thread(target=child.close), threading.Thread(target=parent.close)]
    threads[0].start()
    assert child.forgets.wait(LIMIT)
    assert child.closed
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    child.go_on.set()
    all_end(threads)
    assert closed == ["qp", "pd"]


@pytest.mark.parametrize("within", [False, True], ids=["alone", "in another close"])
def test_parent_closes_if_its_last_child_finishes_closing_while_it_looks_for_open_children(within):
    class Parent(Thing):
        def _refuse_children(self) -> bool:
            some_closed = super()._refuse_children()
            child.go_on.set()
            all_end([thread])
            return some_closed

    class Closer(Thing):
        def _forget(self) -> None:
            parent.close()

    parent, closer = Parent("pd"), Closer("closer")
    child = SlowToForget("qp", parent)
    thread = threading.Thread(target=child.close)
    thread.start()
    assert child.forgets.wait(LIMIT)
    closer.close() if within else parent.close()
    assert [name for name in closed if name != "closer"] == ["qp", "pd"]
    closer.close()


def test_parent_closes_if_its_last_child_begins_to_close_while_it_looks_for_open_children():
    class Parent(Thing):
        def _refuse_children(self) -> bool:
            if not thread.ident:
                thread.start()
                assert child.forgets.wait(LIMIT)
                threading.Timer(0.05, child.go_on.set).start()
            return super()._refuse_children()

    parent = Parent("pd")
    child = SlowToForget("qp", parent)
    thread = threading.Thread(target=child.close)
    parent.close()
    all_end([thread])
    assert closed == ["qp", "pd"]


def test_parent_whose_child_is_being_created_by_another_thread_is_refused_at_once():
    created, go_on = threading.Event(), threading.Event()

    def create() -> Any:
        created.set()
        assert go_on.wait(10)
        return ffi.new("char *")

    parent, child = Thing("pd"), Thing.__new__(Thing)
    child.name, child.device = "qp", Device("qp")
    with beside.thread(lambda: child._make(create, (), child.device.destroy, (parent,))) as raised:
        assert created.wait(LIMIT)
        with pytest.raises(rp.InUseError) as caught:
            parent.close()
        go_on.set()
    assert not raised
    assert str(caught.value) == ("pd cannot be closed: a resource on it is being created or closed")
    child.close()
    parent.close()
    assert closed == ["qp", "pd"]


def test_old_pd_of_a_region_closes_once_another_thread_is_done_with_its_move():
    moved, go_on = threading.Event(), threading.Event()

    class Slow(rp.MR):
        def _settle(self) -> None:
            moved.set()
            assert go_on.wait(LIMIT)
            super()._settle()

    with rp.open_device("soft0") as context:
        old, new = rp.PD(context), rp.PD(context)
        mr = Slow(old, 64)
        threads = [
            threading.Thread(target=mr.rereg, kwargs={"pd": new}),
            threading.Thread(target=old.close),
        ]
        threads[0].start()
        assert moved.wait(LIMIT)
        assert mr.pd is new
        threads[1].start()
        threads[1].join(0.05)
        assert threads[1].is_alive()
        go_on.set()
        all_end(threads)
        assert old.closed
        mr.close()
        new.close()


def test_parent_that_is_closed_from_within_its_childs_close_is_refused_at_once():
    raised: list[str] = []

    class Closer(Thing):
        def _forget(self) -> None:
            try:
                self.above[0].close()
            except rp.InUseError as error:
                raised.append(str(error))

    parent = Thing("pd")
    Closer("qp", parent).close()
    assert raised == ["pd cannot be closed: a resource on it is being created or closed"]
    parent.close()
    assert closed == ["qp", "pd"]


def test_closed_window_is_named_without_its_key(pd):
    """Its name includes the device's key only while it is open."""
    needs(pd.context.attr.max_mw, "memory windows", pd.context)
    mw = rp.MW(pd)
    assert f"{mw.rkey:#x}" in str(mw)
    mw.close()
    assert str(mw) == "MW"
    with pytest.raises(rp.ClosedError, match=r"^MW is closed$"):
        mw.next_rkey()


def test_parent_with_open_children_names_them():
    things = tree()
    with pytest.raises(rp.InUseError, match=r"pd cannot be closed: mr, qp still open"):
        things["pd"].close()
    assert not things["pd"].closed
    # It is as usable as before.
    assert things["pd"]._open_struct()
    Thing("other", things["pd"]).close()
    closed.clear()
    things["qp"].close()
    with pytest.raises(rp.InUseError, match=r"mr still open; close it first"):
        things["pd"].close()
    things["mr"].close()
    things["pd"].close()
    assert closed == ["qp", "mr", "pd"]


def test_refused_close_with_many_open_children_counts_them():
    pd = Thing("pd")
    mrs = [Thing(f"mr{i}", pd) for i in range(7)]
    with pytest.raises(rp.InUseError, match=r"mr0, mr1, mr2, mr3 and 3 more still open"):
        pd.close()
    assert len(mrs) == 7


def test_resource_that_the_device_keeps_stays_open():
    thing = Thing("pd")
    thing.device.broken = True
    with pytest.raises(rp.VerbsError):
        thing.close()
    assert not thing.closed
    thing.device.broken = False
    thing.close()
    assert closed == ["pd"]


def test_error_inside_a_with_block_is_the_one_that_is_raised():
    """The error of the close, an open child, does not hide it."""
    pd = Thing("pd")
    opened: list[Thing] = []

    def use() -> None:
        with pd:
            opened.append(Thing("mr", pd))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        use()
    assert caught.value.__notes__ == ["pd cannot be closed: mr still open; close it first"]
    assert not pd.closed
    opened[0].close()
    pd.close()


class Unwilling(ZeroDivisionError):
    def add_note(self, note: str) -> None:
        raise RuntimeError


class Nameless(Thing):
    def __str__(self) -> str:
        raise RuntimeError


REFUSED = "qp could not be closed: ibv_destroy_thing: EBUSY (16, Device or resource busy)"


@pytest.mark.parametrize(
    ("kind", "error", "notes"),
    [
        (Thing, ZeroDivisionError, [REFUSED]),
        (Thing, KeyboardInterrupt, [REFUSED]),
        (Thing, Unwilling, None),
        (Nameless, ZeroDivisionError, None),
    ],
)
def test_error_inside_a_with_block_notes_what_could_not_be_closed(kind, error, notes):
    """Whatever the note runs into, the body's error is raised."""
    thing = kind("qp")
    thing.device.broken = True

    def use() -> None:
        with thing:
            raise error

    with pytest.raises(error) as caught:
        use()
    assert type(caught.value) is error
    found = getattr(caught.value, "__notes__", None)
    assert (found and [note.split(": see ")[0] for note in found]) == notes
    assert not thing.closed
    thing.device.broken = False
    thing.close()


def test_with_block_closes_its_resource_and_open_children_are_an_error():
    with Thing("pd") as pd:
        pass
    assert pd.closed
    pd = Thing("pd")
    with pytest.raises(rp.InUseError), pd:
        mr = Thing("mr", pd)
    mr.close()


@pytest.mark.parametrize("order", [*itertools.permutations(["context", "pd", "cq", "mr", "qp"])])
def test_resources_dropped_in_any_order_are_all_closed(order):
    """A parent dropped first is closed by its last child."""
    things = tree()
    for name in order:
        del things[name]
    gc.collect()
    assert sorted(closed) == ["context", "cq", "mr", "pd", "qp"]
    assert closed[-1] == "context"
    assert closed.index("qp") < min(closed.index("pd"), closed.index("cq"))
    assert closed.index("mr") < closed.index("pd")


def test_garbage_in_a_cycle_is_closed_children_first():
    """The collector finalises what it finds in any order."""
    for rotation in range(5):
        closed.clear()
        things = list(tree().values())
        things = things[rotation:] + things[:rotation]
        for thing, other in zip(things, things[1:] + things[:1], strict=True):
            thing.others.append(other)
        del things, thing, other
        gc.collect()
        assert sorted(closed) == ["context", "cq", "mr", "pd", "qp"], rotation
        assert closed[-1] == "context"
        assert closed.index("mr") < closed.index("pd")


def test_garbage_that_the_device_keeps_raises_no_error():
    thing = Thing("pd")
    thing.device.broken = True
    with pytest.warns(ResourceWarning, match="pd could not be closed: ibv_destroy_thing: EBUSY"):
        del thing
    gc.collect()
    assert closed == []


class Fails:
    """Fails a number of times, each time with the next number."""

    def __init__(self, error: Callable[[int], BaseException], times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error(self.calls)


@pytest.mark.parametrize("times", [1, 2, 3, 100])
def test_destroyed_resource_is_closed_whatever_its_bookkeeping_raises(times):
    """The first exception comes out, and it is tried again until it is over, within reason."""

    class Rude(Thing):
        def _forget(self) -> None:
            forget()

    parent = Thing("context")
    thing, forget = Rude("pd", parent), Fails(LookupError, times)
    with pytest.raises(LookupError) as caught:
        thing.close()
    assert caught.value.args == (1,)
    assert thing.closed
    assert forget.calls == times + 1 if times < 100 else 10 < forget.calls < 30
    parent.close()
    # The next close() handles only what is not forgotten yet.
    while forget.calls <= times:
        with pytest.raises(LookupError):
            thing.close()
    thing.close()
    assert forget.calls == times + 1
    assert closed == ["pd", "context"]


@pytest.mark.parametrize("times", [1, 3, 100])
def test_lack_of_memory_in_the_bookkeeping_of_a_close_comes_out_only_if_it_lasts(times):
    class Rude(Thing):
        def _forget(self) -> None:
            forget()

    thing, forget = Rude("pd"), Fails(MemoryError, times)
    with pytest.raises(MemoryError) if times == 100 else contextlib.nullcontext():
        thing.close()
    assert thing.closed
    forget.times = 0
    thing.close()
    assert closed == ["pd"]


def test_garbage_that_the_device_refuses_twice_is_kept_and_its_memory_too():
    thing, refuses = Thing("pd"), Fails(lambda _: rp.VerbsError("ibv_destroy_thing", 16), 2)
    thing.device.inside = refuses
    alive = weakref.ref(thing)
    with pytest.warns(ResourceWarning, match="pd could not be closed: ibv_destroy_thing: EBUSY"):
        del thing
    gc.collect()
    assert refuses.calls == 2
    assert alive() is not None
    # Its next user's close fails again, which is not reported again.
    refuses.times = 4
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        alive()._verb(lambda _: None)
    assert refuses.calls == 4
    assert warned == []
    alive().close()
    gc.collect()
    assert closed == ["pd"]
    assert alive() is None


def refuse(_: int) -> rp.VerbsError:
    return rp.VerbsError("ibv_destroy_thing", 16)


def raised_by(drop: Callable[[], object]) -> list[Exception]:
    """Drop garbage and go on for a while; return what is raised by that."""
    came = []
    try:
        drop()
        for _ in range(99):
            gc.isenabled()
    except Exception as caught:
        came.append(caught)
    for _ in range(99):
        gc.isenabled()
    return came


@pytest.mark.parametrize(("error", "times"), [(LookupError, 1), (LookupError, 3), (refuse, 1)])
def test_exception_of_a_handler_while_garbage_is_closed_comes_out_once(error, times):
    """The first of them: what is garbage is closed all the same."""
    held = [Thing("pd")]
    held[0].device.inside = Fails(error, times)
    came = raised_by(held.clear)
    assert closed == ["pd"]
    assert [(type(one), one.args) for one in came] == [(type(error(1)), error(1).args)]


def test_warning_of_a_failed_close_turned_into_an_error_is_reported(monkeypatch):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_value))
    thing = Thing("pd")
    thing.device.broken = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del thing
        gc.collect()
    assert [type(error) for error in reported] == [ResourceWarning]


@pytest.mark.parametrize("order", [*itertools.permutations(["context", "pd", "cq", "mr", "qp"])])
def test_closes_in_the_middle_of_a_verb_may_come_in_any_order(order):
    things, other = tree(), Thing("other")
    other._verb(lambda _: [things[name].close() for name in order])
    assert sorted(closed) == ["context", "cq", "mr", "pd", "qp"]
    assert all(thing.closed for thing in things.values())
    other.close()


def test_close_put_off_in_a_verb_and_then_refused_is_reported(monkeypatch):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_value))
    things, other = tree(), Thing("other")
    other._verb(lambda _: [things[name].close() for name in ("pd", "cq", "mr")])
    assert sorted(str(error).split(":")[0] for error in reported) == [
        "cq cannot be closed",
        "pd cannot be closed",
    ]
    assert closed == ["mr"]
    for name in ("qp", "pd", "cq", "context"):
        things[name].close()
    other.close()


def test_exception_of_a_handler_while_a_close_is_refused_for_an_open_child_comes_out():
    """Both were closed in the middle of a verb, the parent first: it waits for its child."""

    class Rude(Thing):
        def _refuse_children(self) -> bool:
            refuse_children()
            return super()._refuse_children()

    refuse_children = Fails(LookupError, 1)
    parent, other = Rude("pd"), Thing("other")
    child = Thing("mr", parent)

    def close_both() -> None:
        other._verb(lambda _: [parent.close(), child.close()])
        for _ in range(99):
            gc.isenabled()

    with pytest.raises(LookupError):
        close_both()
    assert closed == ["mr", "pd"]
    other.close()


def test_exception_of_a_handler_comes_out_although_the_device_refuses_then():
    def error(call: int) -> BaseException:
        return LookupError() if call == 1 else refuse(call)

    thing = Thing("pd")
    thing.device.inside = Fails(error, 3)
    came = []

    def drop() -> None:
        nonlocal thing
        try:
            del thing
            for _ in range(99):
                gc.isenabled()
        except LookupError as caught:
            came.append(caught)

    with pytest.warns(ResourceWarning, match="pd could not be closed"):
        drop()
    assert len(came) == 1
    for one in [*_open.values()]:
        if isinstance(one, Thing) and not one.device.broken:
            one.close()
    assert closed == ["pd"]


@pytest.mark.parametrize("times", [1, 3])
def test_garbage_that_was_in_use_for_a_moment_is_closed_without_a_warning(times):
    class Busy(Thing):
        def _release(self) -> None:
            was_busy()

    was_busy = Fails(lambda _: rp.InUseError("in use"), times)
    busy = Busy("pd")
    del busy
    for _ in range(99):
        gc.isenabled()
    assert closed == ["pd"]
    assert was_busy.calls == times + 1


class Struck(Thing):
    """Something strikes when it is being closed, before it is destroyed."""

    __slots__ = ("strikes",)

    def __init__(self, name: str, *parents: Thing) -> None:
        self.strikes = Fails(LookupError, 1)
        super().__init__(name, *parents)

    def _release(self) -> None:
        self.strikes()


@pytest.mark.parametrize("in_verb", [False, True], ids=["idle", "in a verb"])
@pytest.mark.parametrize("cls", [Thing, Struck])
def test_exception_that_every_close_of_garbage_raises_is_reported_and_not_raised(
    monkeypatch, cls, in_verb
):
    """It is reported, and the resource is kept."""
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_value))
    held, fails, other = [cls("pd")], Fails(LookupError, 1000), Thing("other")
    if cls is Struck:
        held[0].strikes = fails
    else:
        held[0].device.inside = fails
    with pytest.warns(ResourceWarning, match="pd could not be closed"):
        other._verb(lambda _: held.clear()) if in_verb else held.clear()
    for _ in range(99):
        gc.isenabled()
    assert [type(error) for error in reported] == [LookupError]
    assert 10 < fails.calls < 30
    fails.times = 0
    for one in [*_open.values()]:
        if isinstance(one, Thing) and not one.device.broken:
            one.close()
    assert closed == ["pd"]
    other.close()


def test_interrupted_close_of_a_resource_that_nobody_refers_to_is_made_up_for_by_the_next_verb():
    """By a parent's close: the device had refused the finalizer's, which no verb repeats."""
    parent, other = Thing("pd"), Thing("other")
    held = [Struck("mr", parent)]
    strikes, device = held[0].strikes, held[0].device
    strikes.times, device.broken = 0, True
    with pytest.warns(ResourceWarning, match="mr could not be closed"):
        held.clear()
    with pytest.raises(rp.InUseError, match="mr still open"):
        parent.close()
    calls = strikes.calls
    other._verb(lambda _: None)
    assert strikes.calls == calls
    device.broken, strikes.times = False, calls + 1
    with pytest.raises(LookupError):
        parent.close()
    assert closed == []
    other._verb(lambda _: None)
    assert closed == ["mr"]
    parent.close()
    other.close()


def test_close_begun_in_the_middle_of_a_close_that_is_then_interrupted_takes_place():
    other = Thing("other")

    class Again(Thing):
        def _release(self) -> None:
            other._verb(lambda _: self.close())
            strikes()

    thing, strikes = Again("pd"), Fails(LookupError, 1)
    with pytest.raises(LookupError):
        thing.close()
    assert closed == ["pd"]
    other.close()


def test_parent_is_closed_with_a_child_that_another_thread_has_dropped_in_the_middle_of_a_verb():
    parent, other = Thing("pd"), Thing("other")
    held: list[Any] = [Thing("mr", parent)]
    held[0].others.append(held[0])

    def verb(_: object) -> None:
        held.clear()
        gc.collect()
        with beside.thread(parent.close) as raised:
            pass
        assert not raised
        assert closed == ["mr", "pd"]

    other._verb(verb)
    assert parent.closed
    other.close()


def test_parent_of_garbage_that_the_device_keeps_is_found_by_its_own_parent():
    """Both were in one cycle, of which the collector finalizes the parent first."""
    context = Thing("context")
    held = [Thing("pd", context)]
    held.append(Thing("mr", held[0]))
    held[0].others.append(held[1])
    held[1].device.broken = True

    def drop() -> None:
        held.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="mr could not be closed"):
        drop()
    with pytest.raises(rp.InUseError, match="context cannot be closed: pd still open"):
        context.close()
    (pd,) = open_children(context)
    (mr,) = open_children(pd)
    mr.device.broken = False
    for one in (mr, pd, context):
        one.close()
    assert closed == ["mr", "pd", "context"]


def test_closed_resources_dropped_in_the_middle_of_a_verb_leave_no_record():
    other = Thing("other")
    things = [Thing("pd") for _ in range(9)]
    for thing in things:
        thing.close()
    del thing
    before = len(_open)
    other._verb(lambda _: things.clear())
    assert len(_open) == before
    other.close()


@pytest.mark.parametrize("close", [Thing.close, close_with_all_below])
def test_resource_whose_close_in_the_middle_of_a_verb_was_refused_admits_children(reported, close):
    pd, other = Thing("pd"), Thing("other")
    pd.device.broken = True
    other._verb(lambda _: close(pd))
    assert [str(error).split(" (")[0] for error in reported] == ["ibv_destroy_thing: EBUSY"]
    pd.device.broken = False
    Thing("mr", pd).close()
    pd.close()
    other.close()


def test_parent_of_garbage_that_cannot_be_closed_is_refused_in_the_middle_of_a_verb(reported):
    """Neither is tried again and again."""
    parent, other = Thing("pd"), Thing("other")
    held = [Struck("mr", parent)]
    strikes = held[0].strikes = Fails(lambda _: rp.RdmaError("not now"), 1000)
    with pytest.warns(ResourceWarning, match="mr could not be closed: not now"):
        held.clear()
    other._verb(lambda _: parent.close())
    assert [str(error) for error in reported] == [
        "pd cannot be closed: mr still open; close it first"
    ]
    assert strikes.calls < 30
    strikes.times = 0
    parent.close()
    other.close()
    assert closed == ["mr", "pd", "other"]


# ---- closes that lack memory or stack -------------------------------------------


def garbage(
    times: int, *parents: Thing, count: int = 1, inside: Callable[[], object] = lambda: None
) -> list[Any]:
    """Create resources, called pd, each of which lacks memory for so many closes.

    Args:
        times: how many closes fail.
        parents: their parents.
        count: how many resources.
        inside: called when one is destroyed.
    """
    made = [Struck("pd", *parents) for _ in range(count)]
    for one in made:
        one.strikes, one.device.inside = Fails(MemoryError, times), inside
    return made


def go_on(holds: Callable[[], object], seconds: float = LIMIT) -> None:
    """Run Python code until something holds; use no resource."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        gc.isenabled()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "thread"])
def test_garbage_whose_close_lacks_memory_for_a_moment_is_closed_by_the_main_thread(
    reported, in_thread, count
):
    """Soon, whatever that does, and without a word; three rounds of closes are needed."""
    by: list[Any] = []
    held = garbage(40, count=count, inside=lambda: by.append(threading.current_thread()))
    if in_thread:
        with beside.thread(held.clear) as raised:
            pass
        assert not raised
    held.clear()
    go_on(lambda: len(closed) == count, 10)
    assert closed == ["pd"] * count
    assert by == [threading.main_thread()] * count
    assert reported == []
    # What a handler raises comes out as ever.
    struck = [Struck("mr")]
    assert [type(one) for one in raised_by(struck.clear)] == [LookupError]


def test_garbage_whose_close_lacks_memory_for_long_is_reported_and_kept(reported):
    held = garbage(10**9)
    strikes = held[0].strikes

    def drop() -> None:
        held.clear()
        go_on(lambda: reported, 20)

    with pytest.warns(ResourceWarning, match="pd could not be closed"):
        drop()
    assert [type(error) for error in reported] == [MemoryError]
    calls = strikes.calls
    go_on(lambda: strikes.calls > calls, 0.05)
    assert strikes.calls == calls
    strikes.times = 0
    for one in [*_open.values()]:
        if isinstance(one, Struck):
            one.close()
    assert closed == ["pd"]


def test_garbage_that_is_used_while_it_is_left_to_the_main_thread_is_closed_once(reported):
    parent = Thing("context")
    held = garbage(40, parent)

    def drop_and_use() -> None:
        held.clear()
        # Not while the main thread, which waits for this one, has not closed it.
        open_children(parent)[0]._verb(lambda _: None)

    with beside.thread(drop_and_use) as raised:
        pass
    go_on(lambda: closed, 10)
    parent.close()
    assert not raised
    assert closed == ["pd", "context"]
    assert reported == []


def left_to_a_main_thread_that_cannot_be_told(testing: Any) -> None:
    held = garbage(20)

    def drop() -> None:
        for _ in range(10_000):
            if not testing._pending_threadfunc(lambda: None):
                break
        held.clear()

    with beside.thread(drop) as raised:
        pass
    assert not raised
    Thing("other").close()
    go_on(lambda: "pd" in closed, 10)
    assert sorted(closed) == ["other", "pd"]


def test_garbage_left_to_a_main_thread_that_cannot_be_told_is_closed_at_the_next_chance(reported):
    """Other code has queued as many calls for that thread as it takes."""
    reason = "this Python has no _testcapi"
    left_to_a_main_thread_that_cannot_be_told(pytest.importorskip("_testcapi", reason=reason))
    assert reported == []


def test_garbage_that_lacks_memory_in_the_middle_of_another_close_is_closed_after_it(reported):
    """However long that takes: it is not tried again there, where memory is lacking."""
    other, lacks = Thing("other"), garbage(10**9)
    strikes = lacks[0].strikes
    releases: list[int] = []

    class Outer(Thing):
        def _release(self) -> None:
            releases.append(1)
            lacks.clear()
            go_on(lambda: False, 0.6)
            strikes.times = 0

    held = [Outer("outer")]
    other._verb(lambda _: held.clear())
    go_on(lambda: "pd" in closed, 10)
    assert closed == ["outer", "pd"]
    assert releases == [1]
    assert reported == []
    other.close()


@isolated(silent=True)
def test_closes_are_left_to_the_main_thread_again_and_again():
    """In a process that was not forked, as a test may have forked that of the others."""
    for _ in range(2):
        for test, arguments in (
            (
                test_garbage_whose_close_lacks_memory_for_a_moment_is_closed_by_the_main_thread,
                (0, 3),
            ),
            (test_garbage_that_lacks_memory_in_the_middle_of_another_close_is_closed_after_it, ()),
        ):
            test([], *arguments)
            closed.clear()
        if importlib.util.find_spec("_testcapi"):
            left_to_a_main_thread_that_cannot_be_told(importlib.import_module("_testcapi"))
            closed.clear()


@isolated(silent=True, timeout=20)
def test_garbage_left_to_a_main_thread_that_is_traced_is_closed_at_the_next_chance():
    """Python 3.11 runs a pending call again and again before a traced function begins."""
    held = garbage(100)
    sys.settrace(lambda *_: None)
    held.clear()
    go_on(lambda: False, 0.01)
    sys.settrace(None)
    Thing("other").close()
    go_on(lambda: "pd" in closed, 10)
    assert sorted(closed) == ["other", "pd"]


@pytest.mark.parametrize("gettrace", [None, lambda: None, hash], ids=["none", "own", "hash"])
def test_garbage_left_to_the_main_thread_is_closed_although_gettrace_has_been_replaced(
    reported, monkeypatch, gettrace
):
    """At the next chance: it is not known whether that thread's functions are traced."""
    held = garbage(40)
    with monkeypatch.context() as patch:
        if gettrace is None:
            patch.delattr(sys, "gettrace")
        else:
            patch.setattr(sys, "gettrace", gettrace)
        held.clear()
        go_on(lambda: closed, 0.05)
        Thing("other").close()
    go_on(lambda: "pd" in closed, 10)
    assert sorted(closed) == ["other", "pd"]
    assert reported == []


KEPT_WITHOUT_MEMORY = """
import sys, warnings, weakref, _testcapi, rdmapost as rp
from rdmapost._binding import ffi
from rdmapost.resources.resource import Resource

class Thing(Resource):
    def __init__(self):
        self._make(ffi.new, ("char *",), refuse, ())

def refuse(_):
    raise refusal

refusal = rp.VerbsError("ibv_destroy_thing", 16)
warnings.simplefilter("ignore")
sys.unraisablehook = lambda error: None
for at in range(100):
    thing = Thing()
    kept = weakref.ref(thing)
    _testcapi.set_nomemory(at, at + 1)
    del thing
    _testcapi.remove_mem_hooks()
    assert kept() is not None, at
"""


def test_garbage_that_the_device_refuses_is_kept_whatever_lacks_memory():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(KEPT_WITHOUT_MEMORY, **LOSES_MEMORY) == ""


def test_resource_whose_constructor_failed_is_collected_without_a_warning():
    """A constructor that fails leaves an object that was never made: there is nothing to do."""

    class Half(Thing):
        def __init__(self) -> None:
            raise rp.VerbsError("ibv_alloc_pd", 12)

        def _forget(self) -> None:
            forgotten.append(self)

    forgotten: list[Thing] = []
    with pytest.raises(rp.VerbsError):
        Half()
    half = Half.__new__(Half)
    half.close()
    del half
    gc.collect()
    assert not forgotten


def test_close_of_a_resource_that_has_not_been_made_does_not_prevent_that():
    thing = Thing.__new__(Thing)
    thing.close()
    thing.__init__("pd")  # type: ignore[misc]
    thing.close()
    assert closed == ["pd"]


def test_closing_from_two_threads_destroys_once():
    """The second thread finds it closed or being closed; nothing is freed twice."""
    inside, go = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go.wait(10)

    thing = Thing("pd")
    thing.device.inside = slow
    first = threading.Thread(target=thing.close)
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=thing.close)
    second.start()
    second.join(0.2)
    go.set()
    first.join(10)
    second.join(10)
    assert not first.is_alive()
    assert not second.is_alive()
    assert closed == ["pd"]


def test_close_waits_for_what_another_close_does_after_the_destruction():
    class Slow(Thing):
        def _forget(self) -> None:
            forgotten.append(self)
            inside.set()
            assert go.wait(10)

    forgotten: list[Thing] = []
    inside, go = threading.Event(), threading.Event()
    thing = Slow("pd")
    threads = [threading.Thread(target=thing.close) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    go.set()
    all_end(threads)
    assert closed == ["pd"]
    assert forgotten == [thing]
    with pytest.raises(rp.ClosedError, match=r"^pd is closed$"):
        thing._open_struct()


def test_closed_resource_is_not_used_by_callbacks_of_its_close():
    class Curious(Thing):
        def _forget(self) -> None:
            with pytest.raises(rp.ClosedError, match="pd is closed"):
                self._open_struct()
            with pytest.raises(rp.ClosedError, match="pd is closed"):
                Thing("mr", self)
            seen.append(self.closed)

    seen: list[bool] = []
    Curious("pd").close()
    assert seen == [True]
    assert closed == ["pd"]


def test_only_the_thread_that_closes_a_resource_uses_it_then_and_creates_nothing_on_it():
    class Used(Thing):
        def _release(self) -> None:
            seen.append(self._verb(lambda struct: struct is not None))
            with pytest.raises(rp.ClosedError, match="pd is closed"):
                Thing("mr", self)
            with beside.thread(self._open_struct) as raised:
                pass
            seen.extend(map(str, raised))

    seen: list[object] = []
    pd = Used("pd")
    pd.close()
    assert seen == [True, "pd is closed"]
    assert closed == ["pd"]


def test_verb_that_is_refused_for_a_closed_resource_keeps_none_of_its_arguments():
    class Held:
        pass

    one, two, held = Thing("one"), Thing("two"), Held()
    two.close()
    with pytest.raises(rp.ClosedError, match=r"^two is closed$"):
        one._verb(print, held, two)
    ref = weakref.ref(held)
    del held
    assert ref() is None
    one.close()
    assert closed == ["two", "one"]


def test_closes_in_the_middle_of_a_verb_follow_it_in_their_order_and_once(reported):
    one, two, three = Thing("one"), Thing("two"), Thing("three")

    def verb(_: object) -> None:
        for thing in (one, two, one, three, three, two):
            thing.close()
        assert closed == []

    one._verb(verb)
    assert closed == ["one", "two", "three"]
    one.close()
    Thing("four").close()
    assert closed == ["one", "two", "three", "four"]
    assert reported == []


def test_closing_releases_all_that_the_resource_held():
    class Kept:
        def __call__(self, *_: object) -> None:
            pass

    class Holder(Resource):
        def __init__(self) -> None:
            parent, struct, destroy, memory = Thing("pd"), ffi.new("char *"), Kept(), Kept()
            held.extend(map(weakref.ref, (parent, struct, destroy, memory)))
            self._make(lambda: struct, (), destroy, (parent,), memory)

    held: list[Any] = []
    holder = Holder()
    gc.collect()
    assert all(one() is not None for one in held)
    holder.close()
    gc.collect()
    assert [one() for one in held] == [None] * 4
    assert closed == ["pd"]


def test_constructor_that_creates_its_handle_twice_is_refused():
    class Again(Thing):
        def __init__(self) -> None:
            self.name = "again"
            self._make(self.create, (), lambda _: closed.append("again"), ())

        def create(self) -> Any:
            with pytest.raises(rp.RdmaError, match=r"^again is being made"):
                self._make(ffi.new, ("char *",), lambda _: None, ())
            return ffi.new("char *")

    thing = Again()
    with pytest.raises(rp.RdmaError, match=r"^again has been made"):
        thing._make(ffi.new, ("char *",), lambda _: None, ())
    thing.close()
    assert closed == ["again"]
    with pytest.raises(rp.RdmaError, match=r"^again has been made"):
        thing._make(ffi.new, ("char *",), lambda _: None, ())


def test_close_waits_for_a_verb_of_another_thread_as_long_as_it_takes():
    inside, go = threading.Event(), threading.Event()

    def verb(_: object) -> None:
        inside.set()
        assert go.wait(20)

    thing = Thing("pd")
    threads = [threading.Thread(target=thing._verb, args=(verb,))]
    threads[0].start()
    assert inside.wait(10)
    threads.append(threading.Thread(target=thing.close))
    threads[1].start()
    # Longer than at exit.
    threads[1].join(1.3)
    assert threads[1].is_alive()
    go.set()
    all_end(threads)
    assert closed == ["pd"]


def test_close_after_one_that_failed_admits_no_use_before_it_has_waited_for_verbs():
    """Neither by its own thread."""

    class Woken(Struck):
        def _wake(self) -> None:
            with pytest.raises(rp.ClosedError, match=r"^pd is closed$"):
                self._open_struct()

    thing = Woken("pd")
    with pytest.raises(LookupError):
        thing.close()
    thing.close()
    assert closed == ["pd"]


@pytest.mark.parametrize("hook", ["_wake", "_release"])
def test_close_that_an_exception_ends_before_the_destruction_can_be_called_again(hook):
    class Struck(Thing):
        pass

    strikes = Fails(LookupError, 1)
    setattr(Struck, hook, lambda self: strikes())
    thing = Struck("pd")
    with pytest.raises(LookupError):
        thing.close()
    assert thing._verb(lambda _: "used") == "used"
    assert closed == []
    thing.close()
    assert closed == ["pd"]
    assert thing.closed


@pytest.mark.parametrize("hook", ["_wake", "_release", "_forget"])
def test_close_in_the_middle_of_the_same_close_returns(hook):
    class Nested(Thing):
        pass

    setattr(Nested, hook, lambda self: self.close())
    thing = Nested("pd")
    thread = threading.Thread(target=thing.close, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert closed == ["pd"]


def test_close_waits_for_a_close_that_waits_for_another():
    """Also in the middle of a close, once what that one waited for is done."""

    class Hooked(Thing):
        hook: Callable[[], object] = staticmethod(lambda: None)

        def _release(self) -> None:
            self.hook()

    def start(thing: Thing) -> threading.Thread:
        thread = threading.Thread(target=thing.close, daemon=True)
        thread.start()
        return thread

    def first_hook() -> None:
        second.close()
        waited.set()
        assert go[1].wait(10)

    go, inside, waited = (
        [threading.Event(), threading.Event()],
        threading.Event(),
        threading.Event(),
    )
    first, second, third = Hooked("first"), Hooked("second"), Hooked("third")
    first.hook = first_hook
    second.hook = lambda: (inside.set(), go[0].wait(10))
    third.hook = first.close
    threads = [start(second)]
    assert inside.wait(10)
    threads += [start(first), start(first)]
    threads[2].join(0.2)
    assert threads[2].is_alive()
    go[0].set()
    assert waited.wait(10)
    threads.append(start(third))
    threads[3].join(0.2)
    assert threads[3].is_alive()
    go[1].set()
    all_end(threads)
    assert closed == ["second", "first", "third"]


def test_close_in_a_forked_child_destroys_nothing():
    """The objects are the parent's: the child only forgets them."""
    things = tree()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for name in ("qp", "mr", "cq", "pd", "context"):
                things[name].close()
            os.write(writing, repr((closed, things["pd"].closed)).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == "([], True)"
    for name in ("qp", "mr", "cq", "pd", "context"):
        things[name].close()
    assert len(closed) == 5


@pytest.mark.parametrize(
    ("at", "calls", "raised"),
    [
        ("_wake", ["_release"], None),
        ("_release", [], None),
        ("destroy", ["_forget"], LookupError),
        ("_forget", [], LookupError),
    ],
)
def test_close_that_a_handler_forks_in_the_middle_destroys_nothing_in_the_child(at, calls, raised):
    """What begins there is tried once, because it might wait for threads of the parent."""
    parent, called = os.getpid(), list[str]()

    def call(name: str) -> None:
        called.append(name)
        if name == at and os.getpid() == parent and not os.fork():
            called.clear()
        if os.getpid() != parent:
            if name == "_release" != at:
                thing._open_struct()
            elif name == "_forget":
                raise LookupError

    class Hooked(Thing):
        def _wake(self) -> None:
            call("_wake")

        def _release(self) -> None:
            call("_release")

        def _forget(self) -> None:
            call("_forget")

    thing = Hooked("pd")
    thing.device.inside = lambda: call("destroy")
    error: BaseException | None = None
    try:
        thing.close()
    except BaseException as caught:
        error = caught
    finally:
        if os.getpid() != parent:
            os._exit(called != calls or (error and type(error)) is not raised)
    assert os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) == 0
    assert error is None
    assert called == ["_wake", "_release", "destroy", "_forget"]
    assert closed == ["pd"]


@pytest.mark.parametrize("where", ["class", "mixin"])
@pytest.mark.parametrize("calls", ["nothing", "super", "close", "raises"])
def test_a_finalizer_of_a_subclass_does_not_keep_the_resource(context, monkeypatch, calls, where):
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)

    class Finalized:
        def __del__(self) -> None:
            if calls == "super":
                super().__del__()  # type: ignore[misc]
            elif calls == "close":
                self.close()  # type: ignore[attr-defined]
            elif calls == "raises":
                raise KeyError("on purpose")

    if where == "mixin":

        class Own(Finalized, rp.PD):
            pass
    else:

        class Own(rp.PD):  # type: ignore[no-redef]
            __del__ = Finalized.__del__

    with rp.open_device(context.name) as device:
        Own(device)
        gc.collect()
        device.close()
        assert device.closed


def test_finalizer_of_a_resource_that_another_thread_is_closing_does_not_wait_for_that():
    inside, go = threading.Event(), threading.Event()

    class Own(Thing):
        def _release(self) -> None:
            inside.set()
            assert go.wait(10)

        def __del__(self) -> None:
            pass

    own = Own("pd")
    with beside.thread(own.close) as raised:
        assert inside.wait(LIMIT)
        own.__del__()
        go.set()
    assert not raised
    assert closed == ["pd"]


def test_finalizer_of_a_subclass_is_called_with_the_resource_and_can_be_called_by_hand(context):
    called: list[Any] = []

    class Own(rp.PD):
        def __del__(self, *more: object) -> None:
            called.append((type(self).__name__, more))

    with rp.open_device(context.name) as device:
        Own(device)
        gc.collect()
        assert called == [("Own", ())]
        assert open_children(device) == []
        own = Own(device)
        Own.__del__(own)
        assert own.closed
        Own.__del__(5)  # type: ignore[arg-type]
        Own.__del__(5, 6)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            Own.__del__()  # type: ignore[call-arg]
        assert called[1:] == [("Own", ()), ("int", ()), ("int", (6,))]
        del own


@pytest.mark.parametrize(
    ("error", "times", "calls", "raises", "reports"),
    [
        (LookupError, 0, 1, [], []),
        # As of a signal handler: the first comes out later.
        (LookupError, 1, 2, [LookupError], []),
        (LookupError, 3, 4, [LookupError], []),
        # Of the finalizer itself.
        (LookupError, 100, 16, [], [LookupError]),
        # As of warnings.warn() with the filter "error".
        (ResourceWarning, 1, 1, [], [ResourceWarning]),
        # There was room at the next attempt.
        (MemoryError, 1, 2, [], []),
        (RecursionError, 1, 2, [], []),
        (SystemError, 1, 2, [], []),
    ],
)
def test_finalizer_written_in_python_runs_until_it_is_through(
    monkeypatch, error, times, calls, raises, reports
):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_value))
    finalize = Fails(error, times)

    class Own(native.Finalizer):
        def _finalize(self) -> None:
            finalize()

    held = [Own()]
    came = raised_by(held.clear)
    assert finalize.calls == calls
    assert [type(one) for one in came] == raises
    assert [type(one) for one in reported] == reports
    assert all(one.args == (1,) for one in (*came, *reported))


def test_finalizer_that_fails_after_everything_has_been_closed_at_exit_says_nothing():
    said = prints(
        "import sys\n"
        "from rdmapost._binding import native\n"
        "import rdmapost as rp\n"
        "rp.open_device('soft0')\n"
        "class Own(native.Finalizer):\n"
        "    def _finalize(self, write=sys.stdout.write):\n"
        "        write('finalized\\n')\n"
        "        raise LookupError\n"
        "own = Own()\n"
    )
    assert set(said.splitlines()) == {"finalized"}


def test_resources_open_at_exit_are_closed_children_first():
    """At exit the whole tree is closed, children first."""
    said = prints(
        "from rdmapost.resources.resource import Resource\n"
        "from rdmapost._binding import ffi\n"
        "class Thing(Resource):\n"
        "    def __init__(self, name, *above):\n"
        "        destroy = lambda _: print(name, flush=True)\n"
        "        self._make(ffi.new, ('char *',), destroy, above)\n"
        "context = Thing('context'); pd = Thing('pd', context)\n"
        "mr = Thing('mr', pd); qp = Thing('qp', pd)\n"
        "cycle = [mr]; cycle.append(cycle)\n"
    )
    assert sorted(said.split()) == ["context", "mr", "pd", "qp"]
    assert said.split()[-2:] == ["pd", "context"]


BINDABLE = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE | rp.Access.MW_BIND
HELD_S = 0.5
"""How long a dropped queue pair waits for its windows."""


class OwnQP(rp.QP):
    """A queue pair whose finalizer can be called by hand, so that a test can see it wait."""

    def __del__(self) -> None:
        pass


class Binder:
    """Creates queue pairs on soft0, each with a window that is bound through it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        context = stack.enter_context(rp.open_device("soft0"))
        self.pd, self.cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
        self.mr = stack.enter_context(rp.MR(self.pd, 64, BINDABLE))

    def __call__(self, cls: type[rp.QP] = rp.QP) -> tuple[rp.QP, rp.MW]:
        qp, mw = cls(self.pd, rp.QPType.RC, self.cq), rp.MW(self.pd)
        qp.connect(qp.endpoint())
        qp.post_send(bind_wr(mw, self.mr))
        self.cq.wait()[0].check()
        return qp, mw


@pytest.fixture
def bind(stack) -> Binder:
    return Binder(stack)


def waits_since(begun: float, qp: rp.QP | None) -> bool:
    """Whether a dropped queue pair is open, or has waited for long enough."""
    return (qp is not None and not qp.closed) or time.monotonic() - begun >= HELD_S


def test_dropped_queue_pair_waits_for_its_window_and_no_longer(bind):
    for in_cycle in (False, True):
        qp, mw = bind()
        begun, ref, held = time.monotonic(), weakref.ref(qp), [qp]
        if in_cycle:
            held.append(held)  # type: ignore[arg-type]
        del qp, held
        gc.collect()
        bind.cq.poll()
        (found,) = [one for one in open_children(bind.cq) if isinstance(one, rp.QP)] or [None]
        assert waits_since(begun, found)
        del found
        mw.close()
        assert not open_children(bind.cq)
        assert ref() is None


def test_queue_pair_and_window_that_are_garbage_in_a_verb_are_closed_after_it(bind):
    garbage: list[Any] = [*bind()]
    garbage.append(garbage)

    def verb(_: object) -> None:
        nonlocal garbage
        del garbage
        gc.collect()
        assert open_children(bind.cq)

    bind.cq._verb(verb)
    assert not open_children(bind.cq)


def test_dropped_queue_pair_whose_window_has_been_closed_is_closed_at_once(bind):
    qp, mw = bind()
    mw.close()
    del qp
    assert not open_children(bind.cq)


def test_closed_queue_pair_through_which_a_window_is_bound_is_not_kept(bind):
    qp, mw = bind()
    ref = weakref.ref(qp)
    qp.close()
    before = len(_open)
    del qp
    assert ref() is None
    assert len(_open) == before
    mw.close()


def test_queue_pair_that_waits_for_its_window_is_closed_with_its_cq_and_not_kept(bind):
    qp, mw = bind()
    ref = weakref.ref(qp)
    del qp
    bind.cq.close()
    mw.close()
    assert ref() is None


def test_region_in_receives_of_a_queue_pair_that_waits_for_its_window_can_be_closed(bind):
    qp, mw = bind()
    mr = rp.MR(bind.pd, 64)
    qp.post_recv(rp.RecvWR(mr[:8]))
    del qp
    mr.close()
    assert mr.closed
    mw.close()


def test_queue_pair_that_is_used_while_it_waits_for_its_window_goes_on_waiting(bind):
    """Its last user closes it, if the window has been closed by then."""
    qp, mw = bind(OwnQP)
    begun = time.monotonic()
    qp.__del__()
    qp.query()
    assert waits_since(begun, qp)
    inside, go = threading.Event(), threading.Event()

    def use(_: object) -> None:
        inside.set()
        assert go.wait(LIMIT)

    with beside.thread(lambda: qp._verb(use)) as raised:
        assert inside.wait(LIMIT)
        mw.close()
        go.set()
    assert not raised
    assert qp.closed


def test_queue_pair_that_is_finalized_again_while_it_waits_for_its_window_is_closed_once(bind):
    qp, mw = bind(OwnQP)
    ref = weakref.ref(qp)
    qp.__del__()
    qp.__del__()
    mw.close()
    assert qp.closed
    del qp
    assert ref() is None


def test_dropped_queue_pair_through_which_a_window_is_bound_is_closed(context, pd):
    """It waits a moment for the window, which may be garbage too."""
    needs(context.attr.max_mw, "memory windows", context)
    remote = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE | rp.Access.MW_BIND
    with rp.CQ(context) as cq, rp.MR(pd, 64, remote) as mr, rp.MW(pd) as mw:
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.connect(qp.endpoint())
        qp.post_send(bind_wr(mw, mr))
        cq.wait()[0].check()
        del qp

        def gone() -> bool:
            cq.poll()
            return not any(isinstance(child, rp.QP) for child in open_children(pd))

        until(gone)
