"""Making a resource: what its constructor may do, once, and what others see while it runs."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from support import LOSES_MEMORY, interrupt_everywhere, prints, run_python
from support.threads import thread

import rdmapost as rp
from rdmapost import QPType
from rdmapost._binding import ffi
from rdmapost.resources.resource import Resource, _all_open, _open, open_handles


def _arguments(cls: type, context: Any, pd: Any, cq: Any) -> tuple[Any, ...]:
    """Return the constructor arguments for a public class."""
    ud = next((h for h in open_handles() if isinstance(h, rp.QP)), None)
    given: dict[type, Callable[[], tuple[Any, ...]]] = {
        rp.Context: lambda: (context._provider, _info(context)),
        rp.PD: lambda: (context,),
        rp.CompChannel: lambda: (context,),
        rp.XRCD: lambda: (context,),
        rp.CQ: lambda: (context,),
        rp.MR: lambda: (pd, bytearray(64)),
        rp.MW: lambda: (pd,),
        rp.AH: lambda: (pd, (ud or rp.QP(pd, QPType.UD, cq)).path_to(_endpoint(pd, cq))),
        rp.SRQ: lambda: (pd,),
        rp.QP: lambda: (pd, QPType.RC, cq),
    }
    return given[cls]()


def _info(context: rp.Context) -> rp.DeviceInfo:
    return next(info for info in rp.list_devices() if info.name == context.name)


def _endpoint(pd: rp.PD, cq: rp.CQ) -> rp.Endpoint:
    with rp.QP(pd, QPType.UD, cq) as ud:
        return ud.endpoint()


CLASSES = [
    value
    for value in (getattr(rp, name) for name in rp.__all__)
    if inspect.isclass(value) and issubclass(value, Resource)
]


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        for name in base.__dict__.get("__slots__", ()):
            if name != "__weakref__":
                yield name


@pytest.fixture(params=CLASSES, ids=lambda cls: cls.__name__)
def made(request, context, pd, cq):
    """An instance of each resource class, and its constructor arguments."""
    try:
        arguments = _arguments(request.param, context, pd, cq)
        thing = request.param(*arguments)
    except rp.VerbsError as error:
        pytest.skip(f"no {request.param.__name__} on {context.name}: {error}")
    with thing:
        yield thing, arguments


def test_every_resource_class_has_a_constructor_test():
    assert len(CLASSES) == 10


def test_second_call_of_a_constructor_changes_nothing(made):
    thing, arguments = made
    missing = object()
    before = {name: getattr(thing, name, missing) for name in _slots(type(thing))}
    for again in (arguments, ()):
        with pytest.raises(rp.RdmaError, match="has been made; __init__ is not called again"):
            thing.__init__(*again)
    assert {name: getattr(thing, name, missing) for name in before} == before
    assert not thing.closed


def test_failing_constructor_leaves_what_a_second_constructor_call_makes(context):
    """That one may begin as soon as the first has failed, before its exception is raised."""
    cq = rp.CQ.__new__(rp.CQ)

    def begin_another(_: object, event: str, function: Any) -> None:
        if event == "c_exception" and function.__name__ == "_construct":
            sys.setprofile(None)
            cq.__init__(context, 16)

    sys.setprofile(begin_another)
    try:
        with pytest.raises(ValueError, match="cqe=-1 is not in"):
            cq.__init__(context, -1)
    finally:
        sys.setprofile(None)
    with cq:
        assert cq.cqe >= 16


@pytest.mark.parametrize("name", ["MR", "CQ"])
def test_second_thread_in_the_constructor_of_one_object_is_refused(name, context, pd):
    """Of two threads that construct one object, one is refused, and changes nothing."""

    class Stops:
        """A size that signals when the constructor reads it, and continues when allowed."""

        def __index__(self):
            began.set()
            assert goes_on.wait(20)
            return 64

    began, goes_on = threading.Event(), threading.Event()
    cls = getattr(rp, name)
    of = pd if name == "MR" else context
    thing = cls.__new__(cls)
    first = threading.Thread(target=thing.__init__, args=(of, Stops()))
    first.start()
    try:
        assert began.wait(20)
        with pytest.raises(rp.RdmaError, match="is being made; __init__ is not called again"):
            thing.__init__(of, 4096)
        with pytest.raises(AttributeError, match="cannot be set"):
            setattr(thing, "pd" if name == "MR" else "context", None)
    finally:
        goes_on.set()
        first.join()
    with thing:
        # A device may give a CQ more entries than were asked for.
        assert 64 <= (thing.length if name == "MR" else thing.cqe) < 4096


def test_constructor_that_failed_may_be_called_again(pd):
    mr = rp.MR.__new__(rp.MR)
    with pytest.raises(ValueError, match="at least 1 byte"):
        mr.__init__(pd, 0)
    mr.__init__(pd, 64)
    with mr:
        assert mr.length == 64


def test_region_that_was_posted_before_it_was_made_can_be_closed(rc, pd):
    mr = rp.MR.__new__(rp.MR)
    with pytest.raises(rp.PostError, match="MR is closed"):
        rc.a.post_send(rp.Send(rp.SGE(0, 1, 0, mr)))
    mr.__init__(pd, 64)
    mr.close()
    assert mr.closed


def _no_such_vector(context: rp.Context) -> None:
    struct = context._open_struct()
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise it is refused before the device is called.
        patch.setattr(struct, "num_comp_vectors", (1 << 20) + 1)
        rp.CQ(context, comp_vector=1 << 20)


def _descriptor_that_fails(context: rp.Context) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "set_blocking", Mock(side_effect=OSError(errno.EBADF, "bad")))
        rp.CompChannel(context)


@pytest.mark.parametrize("fail", [_no_such_vector, _descriptor_that_fails])
def test_what_cannot_be_made_leaves_nothing_open_however_long_its_error_is_kept(context, fail):
    handles, descriptors = _all_open(), os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"EINVAL|bad") as caught:
        fail(context)
    assert _all_open() == handles
    assert os.listdir("/proc/self/fd") == descriptors
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_interrupt_of_a_constructor_leaves_nothing_open_however_long_it_is_kept(
    cls, context, pd, cq
):
    arguments = _arguments(cls, context, pd, cq)
    try:
        cls(*arguments).close()
    except rp.VerbsError as error:
        pytest.skip(f"no {cls.__name__} on {context.name}: {error}")
    assert interrupt_everywhere(lambda: cls(*arguments)) > 5


def test_public_attributes_of_a_resource_cannot_be_set(made):
    """close() relies on them."""
    thing, _ = made
    public = [name for name in _slots(type(thing)) if not name.startswith("_")]
    assert public or type(thing) is rp.XRCD
    for name in public:
        before = getattr(thing, name)
        with pytest.raises(AttributeError, match=f"{type(thing).__name__}.{name} cannot be"):
            setattr(thing, name, None)
        with pytest.raises(AttributeError):
            delattr(thing, name)
        assert getattr(thing, name) is before
    thing.close()
    assert thing.closed


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_instance_without_its_struct_is_not_open(cls):
    """Even if a subclass calls something else instead of the constructor."""

    class Skips(cls):
        def __init__(self):
            super(cls, self).__init__()

    class Forges(cls):
        def __init__(self):
            self._make(ffi.new, ("char *",), lambda _: None, ())

    for thing in (Skips(), cls.__new__(cls)):
        assert thing.closed
        with pytest.raises(rp.ClosedError, match="is closed"):
            thing._open_struct()
        assert "(closed)" in repr(thing)
        thing.close()
    with pytest.raises(TypeError, match=f"{cls.__name__}'> is of .*struct ibv_"):
        Forges()


def test_resource_with_a_struct_of_another_type_can_only_be_closed():
    destroyed: list[object] = []
    thing = rp.PD.__new__(rp.PD)
    with pytest.raises(TypeError, match=r"is of .*struct ibv_pd"):
        thing._make(ffi.new, ("char *",), destroyed.append, ())
    for use in (thing.__enter__, lambda: thing._verb(print)):
        with pytest.raises(rp.ClosedError, match="cannot be used: its creation failed; close it"):
            use()
    assert not thing.closed
    thing.close()
    assert thing.closed
    assert len(destroyed) == 1


def test_close_in_the_middle_of_a_constructor_follows_that(context):
    pd, seen = rp.PD(context), []

    class Closes:
        def __index__(self):
            pd.close()
            seen.append(pd.closed)
            return 16

    with rp.CQ(context, Closes()):
        assert pd.closed
    assert set(seen) == {False}


@pytest.mark.parametrize("parent", ["pd", "cq", "only parent"])
@pytest.mark.parametrize("others", [False, True], ids=["its first child", "another child"])
def test_constructor_in_which_a_parent_is_closed_fails_unless_that_stays_open_anyway(
    context, monkeypatch, parent, others
):
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(str(error.exc_value)))
    pd, cq = rp.PD(context), rp.CQ(context)
    closes = cq if parent == "cq" else pd

    class Closes:
        def __index__(self) -> int:
            closes.close()
            return 64

    def make(size: Any) -> Any:
        if parent == "only parent":
            return rp.MR(pd, size)
        return rp.QP(pd, QPType.RC, cq, max_send_wr=size)

    if others:
        with make(64) as other, make(Closes()) as second:
            assert not closes.closed
            assert reported
            assert all(str(one) in reported[0] for one in (other, second))
    else:
        with pytest.raises(rp.ClosedError, match=r"is being closed$"):
            make(Closes())
        assert closes.closed
        assert not reported
    cq.close()
    pd.close()
    assert (cq.closed, pd.closed) == (True, True)


class Late(rp.QP):
    """A queue pair with something to do at the end of its constructor."""

    late: Any

    def _admit_posts(self) -> None:
        super()._admit_posts()
        type(self).late(self)


def test_exception_of_a_constructor_in_which_a_parent_is_closed_is_raised(context, pd):
    cq = rp.CQ(context)

    class Fails(Late):
        def late(self) -> None:
            cq.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Fails(pd, QPType.RC, cq)
    assert cq.closed


def test_what_a_constructor_that_fails_in_the_middle_of_a_verb_leaves_is_closed_after_that(pd, cq):
    made: list[rp.QP] = []

    class Fails(Late):
        def late(self) -> None:
            made.append(self)
            raise ZeroDivisionError

    def verb(_: object) -> bool:
        with pytest.raises(ZeroDivisionError):
            Fails(pd, QPType.RC, cq)
        return made[0].closed

    assert cq._verb(verb) is False
    assert made[0].closed


def test_resource_that_another_thread_closes_at_the_end_of_its_constructor_is_closed(pd, cq):
    class Closed(Late):
        def late(self) -> None:
            with thread(self.close) as raised:
                pass
            assert not raised

    qp = Closed.__new__(Closed)
    with contextlib.suppress(rp.ClosedError):
        qp.__init__(pd, QPType.RC, cq)
    assert qp.closed


def test_constructor_that_failed_for_a_closed_parent_may_be_called_again():
    class Child(Resource):
        def __init__(self, *parents):
            self._make(ffi.new, ("char *",), lambda _: None, parents)

    gone, parent = Child(), Child()
    gone.close()
    child = Child.__new__(Child)
    for _ in range(2):
        with pytest.raises(rp.ClosedError, match="is closed"):
            child.__init__(parent, gone)  # type: ignore[misc]
        assert child._parents == ()
    child.__init__(parent)  # type: ignore[misc]
    assert child._parents == (parent,)
    child.close()
    parent.close()
    assert (child.closed, parent.closed) == (True, True)


def test_region_without_its_struct_cannot_be_posted(rc):
    class Skips(rp.MR):
        def __init__(self):
            super(rp.MR, self).__init__()

    region = Skips()
    for flags in (rp.SendFlags.SIGNALED, rp.SendFlags.SIGNALED | rp.SendFlags.INLINE):
        sge = rp.SGE(rc.mine.addr, 8, rc.mine.lkey, region)
        with pytest.raises((rp.ClosedError, rp.PostError)):
            rc.a.post_send(rc.wr(rp.RdmaWrite, sge, send_flags=flags))
    assert rc.a.outstanding.send == 0


def test_subclass_of_a_resource_may_set_attributes_before_super_init(context):
    class Own(rp.CQ):
        def __init__(self, context):
            self.context, self.note = context, "mine"
            super().__init__(context, 16)

    with Own(context) as cq:
        assert (cq.context, cq.note) == (context, "mine")


def test_diagnose_beside_a_thread_that_makes_queue_pairs(rc, pd):
    """It sees none before its constructor has ended."""
    stop, interval = threading.Event(), sys.getswitchinterval()

    def make():
        while not stop.is_set():
            rp.QP(pd, QPType.RC, rc.cq).close()

    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            rc.a.diagnose()
    finally:
        stop.set()
        thread.join(20)
        sys.setswitchinterval(interval)


def test_resource_is_listed_as_open_once_its_constructor_has_ended(context, pd, cq, monkeypatch):
    found = []

    class Late(rp.QP):
        def _admit_posts(self):
            found.append(self in open_handles())
            super()._admit_posts()

    with Late(pd, QPType.RC, cq) as qp:
        assert found == [False]
        assert qp in open_handles()


def test_constructor_of_an_open_region_cannot_be_called_again(pd):
    with rp.MR(pd, 64) as mr, pytest.raises(rp.RdmaError, match="has been made"):
        mr.__init__(pd, 4096)  # type: ignore[misc]


closed: list[str] = []


def test_resource_that_could_not_be_created_is_not_listed_as_open():
    class Failing(Resource):
        def __init__(self) -> None:
            self._make(lambda: 1 // 0, (), lambda _: None, ())

    before = dict(_open)
    failing = Failing.__new__(Failing)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            failing.__init__()  # type: ignore[misc]
    assert failing._parents == ()
    assert _open == before


def test_exception_in_the_middle_of_set_up_closes_what_was_opened(context):
    opened: list[rp.PD | rp.CQ | rp.MR | rp.QP | rp.Context] = []

    def set_up() -> None:
        with (
            rp.open_device(context.name) as other,
            rp.PD(other) as pd,
            rp.CQ(other) as cq,
            rp.MR(pd, 64) as mr,
            rp.QP(pd, QPType.RC, cq) as qp,
        ):
            opened.extend([other, pd, cq, mr, qp])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        set_up()
    assert len(opened) == 5
    assert all(resource.closed for resource in opened)


def test_interrupt_anywhere_in_making_or_closing_leaves_nothing(context):
    """An exception out of any line that making and closing run, as of a Ctrl-C."""
    said = prints(
        "import gc, os, sys, rdmapost as rp\n"
        "from rdmapost.resources.resource import open_children\n"
        "library = os.path.dirname(rp.__file__)\n"
        "ours = [library, library + '/posting', library + '/resources']\n"
        "def set_up(keep):\n"
        "    pd, channel = keep(rp.PD(context)), keep(rp.CompChannel(context))\n"
        "    cq, mr = keep(rp.CQ(context, channel=channel)), keep(rp.MR(pd, 64))\n"
        "    srq = keep(rp.SRQ(pd))\n"
        "    a, b = (keep(rp.QP(pd, rp.QPType.RC, cq, srq=s)) for s in (srq, None))\n"
        "    a.connect(b.endpoint()), b.connect(a.endpoint())\n"
        "    keep(a.ah_to(b.endpoint()))\n"
        "def interrupted(after):\n"
        "    left, kept = after, []\n"
        "    def trace(frame, event, argument):\n"
        "        nonlocal left\n"
        # Not in the device, whose bugs it would be.
        "        if os.path.dirname(frame.f_code.co_filename) not in ours: return None\n"
        "        left -= 1\n"
        "        if not left: raise KeyboardInterrupt\n"
        "        return trace\n"
        "    sys.settrace(trace)\n"
        "    try:\n"
        "        set_up(lambda made: kept.append(made) or made)\n"
        "        for made in reversed(kept): made.close()\n"
        "        return False\n"
        "    except KeyboardInterrupt: pass\n"
        "    finally: sys.settrace(None)\n"
        # What was under construction is garbage by now.
        "    for made in reversed(kept): made.close()\n"
        "    return True\n"
        "with rp.open_device(sys.argv[1]) as context:\n"
        "    assert not interrupted(100_000)\n"
        "    files = len(os.listdir('/proc/self/fd'))\n"
        "    after = 1\n"
        "    while interrupted(after):\n"
        # Some of the places are enough: a try runs all that comes before, too.
        "        after += 11 if context.kind == 'soft' else 67\n"
        "        gc.collect()\n"
        "        assert not open_children(context), after\n"
        "        assert len(os.listdir('/proc/self/fd')) == files, after\n"
        "print(after > 100)\n",
        context.name,
    )
    assert said == "True"


MADE_WITHOUT_MEMORY = """
import sys, time, _testcapi, rdmapost as rp
burst = int(sys.argv[2])
# Python keeps an int for each small number: the queues below have larger ones.
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    for _ in range(140):
        rp.QP(pd, rp.QPType.RC, cq).close()
def attempt(at):
    # Whether it was made.
    context = rp.open_device("soft0")
    pd, cq = rp.PD(context), rp.CQ(context)
    make = {
        "CQ": lambda: rp.CQ(context), "PD": lambda: rp.PD(context), "MR": lambda: rp.MR(pd, 64),
        "MW": lambda: rp.MW(pd), "SRQ": lambda: rp.SRQ(pd),
        "QP": lambda: rp.QP(pd, rp.QPType.RC, cq),
    }[sys.argv[1]]
    made = None
    try:
        _testcapi.set_nomemory(at, at + burst)
        try: made = make()
        finally:
            while True:
                try:
                    _testcapi.remove_mem_hooks()
                    break
                except MemoryError: pass
    except MemoryError: pass
    if made is not None:
        made.close()
    # What was left to the main thread has been closed by now.
    for parent in (cq, pd, context):
        parent.close()
    return made is not None
for at in range(900):
    if attempt(at): break
print(at > 5, at < 899)
"""


@pytest.mark.parametrize("burst", [1, 5, 20, 50, 100, 300])
@pytest.mark.parametrize("what", ["CQ", "PD", "MR", "MW", "SRQ", "QP"])
def test_constructor_without_memory_leaves_nothing_that_keeps_its_parents_open(what, burst):
    """Wherever it runs out, and however many allocations fail after that."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    done = run_python(MADE_WITHOUT_MEMORY, what, str(burst), **LOSES_MEMORY)
    assert done.stdout.strip() == "True True", done.stderr


def test_what_a_failed_constructor_leaves_open_is_named(monkeypatch):
    """The device has refused to destroy it, and a traceback still refers to it."""
    with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        provider, answers = context._provider, [errno.EBUSY]
        destroy = provider.destroy_qp

        def destroy_qp(qp: Any) -> Any:
            return answers[0] if answers else destroy(qp)

        monkeypatch.setattr(provider, "destroy_qp", destroy_qp)
        monkeypatch.setattr(rp.QP, "_admit_posts", Mock(side_effect=ZeroDivisionError))
        with (
            pytest.raises(ZeroDivisionError) as raised,
            pytest.warns(ResourceWarning, match="RC QP"),
        ):
            rp.QP(pd, QPType.RC, cq)
        monkeypatch.undo()
        answers.clear()
        with pytest.raises(rp.InUseError, match=r": RC QP 0x.* still open; close it first"):
            cq.close()
        del raised
        context.close_all()


CLOSED_BY_A_THREAD = """
import gc, threading
import rdmapost as rp

context = rp.open_device("soft0")
target = None
ask, done = threading.Event(), threading.Event()

class Dropped:
    "In a cycle: the collector finalizes it, in the middle of the constructor."
    def __init__(self):
        self.me = self

    def __del__(self):
        if stop:
            return
        pd = target
        if pd is not None and not pd.closed and not ask.is_set():
            ask.set()
            done.wait(2)
        Dropped()

stop = False

def closer():
    while True:
        ask.wait()
        target.close()
        done.set()
        while ask.is_set():
            pass

class PD(rp.PD):
    def __init__(self, context):
        global target
        target = self
        gc.set_threshold(1, 1, 1)
        Dropped()
        try:
            super().__init__(context)
        finally:
            gc.set_threshold(0)

threading.Thread(target=closer, daemon=True).start()
gc.freeze()
gc.collect()
for _ in range(20):
    ask.clear()
    done.clear()
    try:
        pd = PD(context)
    except BaseException:
        pd = target
    target = None
    try:
        rp.MR(pd, 64).close()
    except rp.ClosedError:
        assert pd.closed
stop = True
print("ok")
"""


def test_close_by_another_thread_in_the_middle_of_a_constructor():
    """The resource is whole, or it is closed."""
    assert prints(CLOSED_BY_A_THREAD) == "ok"
