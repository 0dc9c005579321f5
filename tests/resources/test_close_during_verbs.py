"""Closing a resource while a verb uses it, in this thread or in another."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import LIMIT, needs, prints

import rdmapost as rp
from rdmapost import QPType
from rdmapost._binding import ffi
from rdmapost.resources.resource import Resource

ROUNDS = int(os.environ.get("RDMAPOST_ROUNDS", "100"))
"""Rounds of a close against a verb, for each kind."""


class Thing(Resource):
    """A resource of no device."""

    __slots__ = ("name",)

    def __init__(
        self, name: str, *parents: Thing, destroy: Callable[[Any], object] = lambda _: None
    ) -> None:
        self.name = name
        self._make(ffi.new, ("char *",), destroy, parents)

    def __str__(self) -> str:
        return self.name


@pytest.fixture
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# ---- a verb and a close -----------------------------------------------------


def made(context: rp.Context) -> dict[str, Any]:
    """The objects that the verbs below use, besides the resource being closed."""
    pd, cq = rp.PD(context), rp.CQ(context)
    ud = rp.QP(pd, QPType.UD, cq)
    return {"pd": pd, "cq": cq, "ud": ud, "path": ud.path_to(ud.endpoint())}


Make = Callable[[rp.Context, dict[str, Any]], Any]
Use = Callable[[Any, dict[str, Any]], Any]


def group() -> str:
    """This thread's own multicast group."""
    return f"ff02::{threading.get_ident() % 0xFFFF + 1:x}"


AGAINST_CLOSE: dict[str, tuple[Make, Use]] = {
    "ibv_query_port": (lambda c, _: rp.open_device(c.name), lambda c, _: c.query_port()),
    "ibv_get_async_event": (lambda c, _: rp.open_device(c.name), lambda c, _: c.get_async_event(0)),
    "ibv_alloc_pd": (lambda c, _: rp.open_device(c.name), lambda c, _: rp.PD(c).close()),
    "ibv_create_cq": (lambda c, _: rp.open_device(c.name), lambda c, _: rp.CQ(c).close()),
    "ibv_reg_mr": (lambda c, _: rp.PD(c), lambda pd, _: rp.MR(pd, 64).close()),
    "ibv_create_ah": (lambda c, _: rp.PD(c), lambda pd, m: rp.AH(pd, m["path"]).close()),
    "ibv_create_qp": (lambda c, _: rp.PD(c), lambda pd, m: rp.QP(pd, QPType.RC, m["cq"]).close()),
    "ibv_query_qp": (lambda c, m: rp.QP(m["pd"], QPType.RC, m["cq"]), lambda qp, _: qp.query()),
    "ibv_modify_qp": (
        lambda c, m: rp.QP(m["pd"], QPType.RC, m["cq"]),
        lambda qp, _: (qp.to_init(), qp.to_reset()),
    ),
    "ibv_attach_mcast": (
        lambda c, m: rp.QP(m["pd"], QPType.UD, m["cq"]),
        lambda qp, _: (qp.attach_mcast(group()), qp.detach_mcast(group())),
    ),
    "ibv_query_srq": (lambda c, m: rp.SRQ(m["pd"]), lambda srq, _: srq.query()),
    "ibv_modify_srq": (lambda c, m: rp.SRQ(m["pd"]), lambda srq, _: srq.arm_limit(3)),
    "ibv_req_notify_cq": (
        lambda c, _: rp.CQ(c, channel=rp.CompChannel(c)),
        lambda cq, _: cq.req_notify(),
    ),
    "rkey": (lambda c, m: rp.MW(m["pd"]), lambda mw, _: mw.rkey),
    "fileno": (lambda c, _: rp.CompChannel(c), lambda channel, _: channel.fileno()),
}


@pytest.mark.usefixtures("_switch_often")
@pytest.mark.parametrize("verb", AGAINST_CLOSE)
def test_verb_beside_a_close_succeeds_or_raises_closed_error(context, verb):
    """Two threads use a resource while another closes it; no other error occurs."""
    make, use = AGAINST_CLOSE[verb]
    if verb == "rkey":
        needs(context.attr.max_mw, "memory windows", context)
    things = made(context)
    turn = threading.Condition()
    current: list[Any] = [None]
    refused: list[Any] = [None]
    used = [0, 0]
    wrong: list[BaseException] = []

    def work(index: int) -> None:
        seen = None
        while True:
            with turn:
                while current[0] is seen:
                    assert turn.wait(LIMIT)
                seen = current[0]
            if seen is StopIteration:
                return
            try:
                while not wrong and refused[0] is not seen:
                    use(seen, things)
                    used[index] += 1
            except rp.ClosedError:
                pass
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT + ROUNDS / 100
    for number in range(ROUNDS):
        if wrong:
            break
        thing = make(context, things)
        before = list(used)
        with turn:
            current[0] = thing
            turn.notify_all()
        while number % 2 and used == before and not wrong:
            assert time.monotonic() < end, f"nobody could use it in round {number}"
        while not thing.closed and not wrong:
            try:
                thing.close()
            except rp.InUseError:
                # Other threads keep creating children on it, so it is closed once they stop.
                refused[0] = thing
                assert time.monotonic() < end, f"not closed in round {number}"
    with turn:
        current[0] = StopIteration
        turn.notify_all()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert wrong == []
    assert sum(used) > 0
    for name in ("ud", "cq", "pd"):
        things[name].close()


def test_close_waits_for_a_verb_of_another_thread():
    thing = Thing("pd")
    inside, go = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(_: object) -> None:
        inside.set()
        assert go.wait(LIMIT)
        order.append("verb")

    def close() -> None:
        thing.close()
        order.append("close")

    verb = threading.Thread(target=thing._verb, args=(slow,))
    verb.start()
    assert inside.wait(LIMIT)
    closing = threading.Thread(target=close)
    closing.start()
    # It has begun as soon as no new use may begin.
    while thing._handle is not None:
        assert closing.is_alive()
    with pytest.raises(rp.ClosedError, match="pd is closed"):
        thing._verb(print)
    assert not thing.closed
    go.set()
    verb.join(LIMIT)
    closing.join(LIMIT)
    assert order == ["verb", "close"]
    assert thing.closed


OPEN: dict[str, Make] = {
    "Context": lambda c, _: rp.open_device(c.name),
    "PD": lambda c, _: rp.PD(c),
    "MR": lambda _, m: rp.MR(m["pd"], 64),
    "MW": lambda _, m: rp.MW(m["pd"]),
    "CompChannel": lambda c, _: rp.CompChannel(c),
    "CQ": lambda c, _: rp.CQ(c),
    "SRQ": lambda _, m: rp.SRQ(m["pd"]),
    "QP": lambda _, m: rp.QP(m["pd"], QPType.RC, m["cq"]),
    "AH": lambda _, m: rp.AH(m["pd"], m["path"]),
}


@pytest.mark.parametrize("kind", OPEN)
def test_verb_while_another_thread_closes_raises_closed_error_at_once(context, kind):
    """Whatever the text of the resource is made of."""
    if kind == "MW":
        needs(context.attr.max_mw, "memory windows", context)
    things = made(context)
    thing = OPEN[kind](context, things)
    inside, go = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        inside.set()
        assert go.wait(LIMIT)

    verb = threading.Thread(target=thing._verb, args=(slow,))
    closing = threading.Thread(target=thing.close)
    verb.start()
    try:
        assert inside.wait(LIMIT)
        closing.start()
        while thing._handle is not None:
            assert closing.is_alive()
        with pytest.raises(rp.ClosedError, match=" is closed") as caught:
            thing._verb(print)
        assert str(caught.value) == f"{thing} is closed"
        assert not thing.closed
    finally:
        go.set()
        verb.join(LIMIT)
        closing.join(LIMIT)
    assert thing.closed
    for name in ("ud", "cq", "pd"):
        things[name].close()


def test_close_that_waits_can_be_interrupted():
    """After the interrupt the resource is open again."""
    thing = Thing("pd")
    inside, go = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        inside.set()
        assert go.wait(LIMIT)

    def interrupt() -> None:
        while thing._handle is not None:
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def handler(*_: object) -> None:
        raise InterruptedError("now")

    before = signal.signal(signal.SIGUSR1, handler)
    verb = threading.Thread(target=thing._verb, args=(slow,))
    waker = threading.Thread(target=interrupt)
    try:
        verb.start()
        assert inside.wait(LIMIT)
        waker.start()
        with pytest.raises(InterruptedError, match="now"):
            thing.close()
    finally:
        go.set()
        signal.signal(signal.SIGUSR1, before)
        verb.join(LIMIT)
        waker.join(LIMIT)
    assert not thing.closed
    assert thing._verb(lambda _: "open") == "open"
    thing.close()


def test_close_inside_a_verb_of_the_same_thread_is_put_off():
    """A signal handler or a finalizer does not wait; what it opened is closed in order."""
    gone: list[str] = []
    context = Thing("context", destroy=lambda _: gone.append("context"))
    pd = Thing("pd", context, destroy=lambda _: gone.append("pd"))
    other = Thing("other")

    def verb(_: object) -> None:
        pd.close()
        context.close()
        assert not pd.closed
        other._verb(lambda _: None)
        assert gone == []

    pd._verb(verb)
    assert gone == ["pd", "context"]
    assert pd.closed
    assert context.closed


def test_close_put_off_while_a_child_is_closed_follows_that_close(monkeypatch):
    """A signal handler closes a child and its parents in the middle of the child's close."""
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    context, other = Thing("context"), Thing("other")
    pd = Thing("pd", context)
    child = Thing("child", pd)

    def verb(_: object) -> None:
        for one in (child, pd, context):
            one.close()

    monkeypatch.setattr(Thing, "_release", lambda self: self is child and other._verb(verb))
    child.close()
    assert (child.closed, pd.closed, context.closed) == (True, True, True)
    assert not reported


def test_refusal_of_a_close_that_was_put_off_is_reported(monkeypatch):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    pd = Thing("pd")
    mr = Thing("mr", pd)
    mr._verb(lambda _: pd.close())
    assert [str(one.exc_value) for one in reported] == [
        "pd cannot be closed: mr still open; close it first"
    ]
    assert not pd.closed
    mr.close()
    pd.close()


def test_second_thread_that_closes_waits_for_the_result_of_the_first():
    inside, go = threading.Event(), threading.Event()

    def refuse(_: object) -> None:
        if not go.is_set():
            inside.set()
            assert go.wait(LIMIT)
            raise rp.VerbsError("ibv_dealloc_pd", 16)

    thing = Thing("pd", destroy=refuse)
    failed: list[BaseException] = []

    def first() -> None:
        try:
            thing.close()
        except rp.VerbsError as error:
            failed.append(error)

    one = threading.Thread(target=first)
    one.start()
    assert inside.wait(LIMIT)
    two = threading.Thread(target=thing.close)
    two.start()
    go.set()
    for thread in (one, two):
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert len(failed) == 1
    assert thing.closed


def test_destroy_that_returns_an_error_names_the_verb(pd):
    """As libibverbs does: an errno, or its negative."""
    for code in (16, -16):
        returned = [code, 0]

        def ibv_dealloc_thing(_: object, returned: list[int] = returned) -> int:
            return returned.pop(0)

        thing = Thing("thing", destroy=ibv_dealloc_thing)
        with pytest.raises(rp.VerbsError, match="ibv_dealloc_thing: EBUSY") as caught:
            thing.close()
        assert caught.value.errno == 16
        assert not thing.closed
        thing.close()
        assert thing.closed


def test_create_that_returns_null_names_the_verb():
    pd = Thing("pd")

    def ibv_alloc_thing() -> Any:
        ffi.errno = 12
        return ffi.NULL

    thing = Thing.__new__(Thing)
    thing.name = "thing"
    with pytest.raises(rp.VerbsError, match="ibv_alloc_thing: ENOMEM"):
        thing._make(ibv_alloc_thing, (), print, (pd,))
    assert thing.closed
    pd.close()


def test_closed_parent_has_no_children():
    pd = Thing("pd")
    pd.close()
    with pytest.raises(rp.ClosedError, match="pd is closed"):
        Thing("mr", pd)


# ---- finalizers -------------------------------------------------------------


def test_finalizer_inside_a_verb_is_put_off():
    gone: list[str] = []
    pd = Thing("pd")
    doomed = [Thing("mr", pd, destroy=lambda _: gone.append("mr"))]
    doomed.append(doomed)  # type: ignore[arg-type]

    def verb(_: object) -> None:
        nonlocal doomed
        del doomed
        gc.collect()
        assert gone == []

    pd._verb(verb)
    assert gone == ["mr"]
    pd.close()


def test_resource_that_the_device_keeps_is_reported_and_keeps_its_parents_open(pd):
    """A finalizer reports it in a warning, and the parent stays open."""
    parent = Thing("pd")
    with pytest.warns(ResourceWarning) as caught:
        Thing("mr", parent, destroy=lambda _: 22)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("mr could not be closed: <lambda>: EINVAL")
    assert str(caught[0].message).endswith("; the device keeps it until the process ends")
    with pytest.raises(rp.InUseError, match="mr still open"):
        parent.close()


def test_finalizer_tries_again_where_the_last_user_left_while_it_was_refused():
    """The user did not close it, because another thread was closing it."""
    gone, refused = [], []

    class Used(Thing):
        __slots__ = ()

        def _release(self) -> None:
            if not refused:
                refused.append(self.name)
                raise rp.InUseError(f"{self} is in use")

    with warnings.catch_warnings(action="error", category=ResourceWarning):
        Used("mr", destroy=lambda _: gone.append("mr"))
    assert (refused, gone) == (["mr"], ["mr"])


# ---- copies -----------------------------------------------------------------


def test_resource_cannot_be_copied_or_pickled(context, pd, cq):
    with rp.MR(pd, 64) as mr, rp.QP(pd, QPType.RC, cq) as qp:
        for resource in (context, pd, cq, mr, qp):
            name = type(resource).__name__
            for copies in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"^cannot copy or pickle '{name}' object"):
                    copies(resource)


# ---- interrupts ---------------------------------------------------------------


def test_interrupted_close_destroys_its_resource_once(verbs_context):
    """A Ctrl-C during the device's call is raised after it; what it freed is not freed again."""
    said = prints(
        "import contextlib, signal, sys, rdmapost as rp\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, interrupt)\n"
        "def closed(resource, after):\n"
        "    with contextlib.suppress(KeyboardInterrupt):\n"
        "        signal.setitimer(signal.ITIMER_REAL, after)\n"
        "        resource.close()\n"
        "        while True: pass\n"
        "    resource.close()\n"
        "    return resource.closed\n"
        "with rp.open_device(sys.argv[1]) as context:\n"
        "    for index in range(40):\n"
        "        after = (1 + index) * 25e-6\n"
        "        pd, cq = rp.PD(context), rp.CQ(context)\n"
        "        mr, qp = rp.MR(pd, 64), rp.QP(pd, rp.QPType.RC, cq)\n"
        "        assert all(closed(resource, after) for resource in (qp, mr, cq, pd))\n"
        "print('ends')\n",
        verbs_context.name,
    )
    assert said == "ends"
