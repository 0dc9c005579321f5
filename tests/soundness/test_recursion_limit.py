"""Posts near the recursion limit: a RecursionError never hides that something was posted."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from support import LOSES_MEMORY
from support.connected_pair import INLINE, Rig
from support.interrupts import Moment, interrupt_at_each_moment
from support.isolated import isolated
from support.posting_tap import NOWHERE, open_tap
from support.threads import thread

import rdmapost as rp

LIMIT = 400
"""Calls; the last 100 of them are tried, of which a post needs less than half."""

PARTLY = "2 of 3 work requests were posted"


def nested(depth: int, act: Callable[[], object]) -> object:
    return nested(depth - 1, act) if depth else act()


def depths() -> range:
    """Return recursion depths, from one with room for the call to one without."""
    own, frame = 0, sys._getframe()
    while frame.f_back is not None:
        own, frame = own + 1, frame.f_back
    return range(LIMIT - own - 100, LIMIT - own)


def called(method: Callable[[], object]) -> Callable[[], object]:
    """Return a function of Python's: newer Pythons do not count C's towards the limit."""
    return lambda: method()


POSTS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "send": lambda rig: lambda: rig.a.post_send(rig.write(1)),
    "list": lambda rig: lambda: rig.a.post_send([rig.write(1), rig.write(2)]),
    "generator": lambda rig: lambda: rig.a.post_send(rig.write(n) for n in (1, 2)),
    "inline": lambda rig: lambda: rig.a.post_send(rig.write(1, send_flags=INLINE)),
    "prepared": lambda rig: called(rig.a.prepare([rig.write(1), rig.write(2)]).post),
    "bind": lambda rig: (
        lambda: rig.a.bind_mw(rig.more[0], rig.mr, rig.mr.addr, 8, rp.Access.REMOTE_READ)
    ),
    "recv": lambda rig: lambda: rig.b.post_recv(rig.receive(1)),
}


@pytest.mark.parametrize("what", POSTS)
@isolated(silent=True, timeout=30)
def test_post_that_raises_recursion_error_has_posted_nothing(what, soft):
    rig = Rig(soft)
    rig.more.append(rp.MW(rig.pd, rp.MWType.TYPE_1))
    post = POSTS[what](rig)
    tried = depths()
    sys.setrecursionlimit(LIMIT)
    outcomes, wrong = set(), []
    for depth in tried:
        before = sum((*rig.a.outstanding, *rig.b.outstanding))
        raised = None
        try:
            nested(depth, post)
        except RecursionError as error:
            raised = error
        posted = sum((*rig.a.outstanding, *rig.b.outstanding)) - before
        outcomes.add(raised is None)
        if bool(posted) is (raised is not None):
            wrong.append(f"depth {depth}: {posted} posted, {raised!r}")
        rig.cq.wait(rig.a.outstanding.send)
        if rig.b.outstanding.recv == 64:
            rig.drain_receives()
    assert not wrong, "\n".join(wrong)
    assert outcomes == {True, False}, "the limit is not among these depths"
    rig.works()


@isolated(silent=True, timeout=30)
def test_recursion_error_of_a_partly_posted_list_reports_how_many_were_posted(soft):
    rig = Rig(soft)
    refused = rig.write(3, send_flags=1 << 20)
    tried = depths()
    sys.setrecursionlimit(LIMIT)
    outcomes, wrong = set(), []
    for depth in tried:
        try:
            nested(depth, lambda: rig.a.post_send([rig.write(1), rig.write(2), refused]))
        except (RecursionError, rp.PostError) as error:
            raised: Any = error
        posted, said = rig.a.outstanding.send, getattr(raised, "posted", 0)
        outcomes.add((type(raised).__name__, posted))
        notes = getattr(raised, "__notes__", [])
        if said != posted:
            wrong.append(f"depth {depth}: {posted} posted, said to be {said}: {raised!r}")
        if posted and isinstance(raised, RecursionError) and notes != [PARTLY]:
            wrong.append(f"depth {depth}: {notes}")
        rig.cq.wait(posted)
    assert not wrong, "\n".join(wrong)
    assert ("PostError", 2) in outcomes
    assert ("RecursionError", 2) in outcomes, "the limit is not between the post and its error"


@pytest.mark.parametrize(("before", "note"), [(1, "1 of 2 work requests was posted"), (2, PARTLY)])
@isolated(silent=True, timeout=30)
def test_interrupted_error_of_a_partly_posted_list_reports_how_many_were_posted(soft, before, note):
    """By itself, or by the PostError that it interrupted."""
    notes: list[str] = []
    whole: list[int | None] = []

    def act(rig: Rig) -> None:
        refused = rig.write(3, send_flags=1 << 20)
        try:
            rig.a.post_send([*(rig.write(i) for i in range(before)), refused])
        except rp.PostError as error:
            whole.append(error.posted)
        except KeyboardInterrupt as error:
            posted, context = rig.a.outstanding.send, error.__context__
            said = getattr(error, "posted", None) or getattr(context, "posted", 0)
            assert said == posted, f"{posted} posted, said to be {said}"
            notes.extend(getattr(error, "__notes__", []))

    def check(rig: Rig, _: Moment) -> None:
        rig.drain()
        rig.close()

    interrupt_at_each_moment(lambda: Rig(soft), act, check)
    assert set(notes) == {note}
    assert set(whole) == {before}


@pytest.mark.parametrize(
    ("count", "note"),
    [(1, "1 of 1 work request was posted"), (2, "2 of 2 work requests were posted")],
)
@isolated(silent=True, timeout=30)
def test_interrupt_of_a_post_reports_how_many_were_posted(soft, count, note):
    """The interrupt arrives while the device executes them."""
    notes: list[object] = []
    wrong: list[object] = []

    def act(rig: Rig) -> None:
        try:
            rig.a.post_send([rig.write(i) for i in range(count)])
        except KeyboardInterrupt as error:
            if getattr(error, "posted", 0) != rig.a.outstanding.send:
                wrong.append(rig.a.outstanding)
            notes.extend(getattr(error, "__notes__", []))

    def check(rig: Rig, _: Moment) -> None:
        rig.drain()
        rig.close()

    interrupt_at_each_moment(lambda: Rig(soft), act, check, within="/rdmapost/providers/")
    assert not wrong
    assert set(notes) == {note}


@pytest.mark.parametrize(
    ("count", "note"),
    [
        (1, "the work request may have been posted"),
        (3, "some of 3 work requests may have been posted"),
    ],
)
@isolated(silent=True, timeout=30)
def test_interrupt_of_an_error_that_cannot_say_what_was_posted_says_so(soft, count, note):
    """A driver refuses a list, and does not say at which work request it stopped."""
    notes: list[object] = []

    def make() -> tuple[Rig, Any]:
        rig = Rig(soft)
        return rig, open_tap(rig.context)

    def act(made: tuple[Rig, Any]) -> None:
        rig, tap = made
        tap.refuse(rc=5, bad=NOWHERE)
        with contextlib.suppress(rp.PostError):
            try:
                rig.a.post_send([rig.write(i) for i in range(count)])
            except KeyboardInterrupt as error:
                if rig.a.outstanding.send:
                    said = [each for each in (error, error.__context__) if hasattr(each, "posted")]
                    assert [each.posted for each in said] == [None] * len(said)
                    assert said
                    notes.extend(getattr(error, "__notes__", []))

    def check(made: tuple[Rig, Any], _: Moment) -> None:
        made[1].close()
        made[0].a.to_reset()
        made[0].close()

    interrupt_at_each_moment(make, act, check, within="/rdmapost/posting/")
    assert set(notes) == {note}


class Number:
    """Its __index__ is set later."""


AGAIN: dict[str, Callable[[Any, Any], Callable[[], object]]] = {
    "send": lambda rig, number: partial(rig.a.post_send, rig.write(1, wr_id=number)),
    "list": lambda rig, number: partial(
        rig.a.post_send, [rig.write(1), rig.write(2, wr_id=number)]
    ),
    "recv": lambda rig, number: partial(
        rig.b.post_recv, rp.RecvWR(rp.SGE(number, 8, rig.mr.lkey, rig.mr))
    ),
    "columns": lambda rig, number: partial(
        rig.a.post_columns, rp.RdmaWrite, rig.mr[:8], remote_addr=rig.mr.addr, rkey=number
    ),
    "prepared number": lambda rig, number: partial(
        setattr, rig.a.prepare(rig.write(1))[0], "rkey", number
    ),
    "prepared SGE": lambda rig, number: partial(
        setattr, rig.a.prepare(rig.write(1))[0], "sg_list", [rp.SGE(number, 8, 0, rig.mr)]
    ),
}


@pytest.mark.parametrize("what", AGAIN)
@isolated(silent=True, timeout=30)
def test_posts_in_each_other_without_a_python_function_end_with_recursion_error(what, soft):
    """Python 3.13 allows more of them than the stack has room for."""
    rig = Rig(soft)
    again = AGAIN[what](rig, Number())
    Number.__index__ = staticmethod(again)  # type: ignore[attr-defined]
    for run in (again, lambda: _in_a_thread(again)):
        with pytest.raises(RecursionError, match="calls of rdmapost in each other"):
            run()
    Number.__index__ = staticmethod(lambda: 5)  # type: ignore[attr-defined]
    rig.works()


def _in_a_thread(act: Callable[[], object]) -> None:
    before = threading.stack_size(1 << 20)
    with thread(act) as raised:
        pass
    threading.stack_size(before)
    raise raised[0]


WORKS = {
    "soft0": [(1, "SUCCESS"), (2, "SUCCESS")],
    "roce:lo": [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")],
}
"""What becomes of a send without a receive (RNR), or to a queue pair that answers nothing."""

FAILING = [None, *range(22, 64, 3)]
"""Which allocation fails in a poll: none, or one of those of the device's work."""


@pytest.mark.skipif(not find_spec("_testcapi"), reason="this Python has no _testcapi")
@pytest.mark.parametrize("threads", [True, False], ids=["threads", "no threads"])
@pytest.mark.parametrize("device", WORKS)
@isolated(silent=True, timeout=60, **LOSES_MEMORY)
def test_work_that_a_verb_lacks_stack_or_memory_for_is_done_later(device, threads):
    """If another thread can be started, it does the work on its own stack."""
    import _testcapi as memory

    with (
        rp.open_device(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, rp.QPType.RC, cq) as silent,
        rp.QP(pd, rp.QPType.RC, cq) as qp,
    ):
        peer = silent.endpoint() if device.startswith("roce") else None

        def poll(failing: int | None) -> list[rp.WC]:
            if failing is not None:
                memory.set_nomemory(failing, failing + 1)
            try:
                return cq.poll(2)
            finally:
                memory.remove_mem_hooks()

        tried = depths()[-24:-4]
        for depth, failing in itertools.product(tried, FAILING):
            qp.to_reset()
            qp.connect(peer or qp.endpoint(), min_rnr_timer=12, timeout=8, retry_cnt=0)
            sys.setrecursionlimit(LIMIT)
            threading.stack_size(0 if threads else 1 << 46)
            switch = sys.getswitchinterval()
            # The device's own thread would find the work first.
            sys.setswitchinterval(30)
            qp.post_send(rp.Send(wr_id=1))
            if peer is None:
                qp.post_recv(rp.RecvWR(wr_id=2))
            else:
                qp.post_send(rp.Send(wr_id=2))
            begin = time.monotonic()
            while time.monotonic() < begin + 0.002:
                pass
            wcs = []
            with contextlib.suppress(RecursionError, MemoryError):
                wcs += nested(depth, lambda failing=failing: poll(failing))
            left = 2 - len(wcs)
            with contextlib.suppress(RecursionError):
                wcs += nested(depth, lambda left=left: cq.wait(left, 5) if left else [])
            threading.stack_size(0)
            sys.setswitchinterval(switch)
            sys.setrecursionlimit(1000)
            wcs += cq.wait(2 - len(wcs), 5) if len(wcs) < 2 else []
            found = [(wc.wr_id, wc.status.name) for wc in wcs]
            assert sorted(found) == WORKS[device], f"depth {depth}, allocation {failing}"
