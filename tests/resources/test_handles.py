"""The life of a handle: uses, closes, forks and exits in any order."""

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
from support import ALL, LIMIT, LOSES_MEMORY, needs, prints

import rdmapost as rp
from rdmapost import Access, QPType
from rdmapost._binding import ffi
from rdmapost.resources.resource import Resource, open_children

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
    """What the verbs below are called on, besides the resource being closed."""
    pd, cq = rp.PD(context), rp.CQ(context)
    ud = rp.QP(pd, QPType.UD, cq)
    return {"pd": pd, "cq": cq, "ud": ud, "way": ud.path_to(ud.endpoint())}


Make = Callable[[rp.Context, dict[str, Any]], Any]
Use = Callable[[Any, dict[str, Any]], Any]


def group() -> str:
    """This thread's own multicast group."""
    return f"ff02::{threading.get_ident() % 0xFFFF + 1:x}"


AGAINST_CLOSE: dict[str, tuple[Make, Use]] = {
    "ibv_query_port": (lambda c, _: rp.open_device(c.name), lambda c, _: c.query_port()),
    "ibv_get_async_event": (
        lambda c, _: rp.open_device(c.name),
        lambda c, _: rp.get_async_event(c),
    ),
    "ibv_alloc_pd": (lambda c, _: rp.open_device(c.name), lambda c, _: rp.PD(c).close()),
    "ibv_create_cq": (lambda c, _: rp.open_device(c.name), lambda c, _: rp.CQ(c).close()),
    "ibv_reg_mr": (lambda c, _: rp.PD(c), lambda pd, _: rp.MR(pd, 64).close()),
    "ibv_create_ah": (lambda c, _: rp.PD(c), lambda pd, m: rp.AH(pd, m["way"]).close()),
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
def test_verb_against_close_succeeds_or_raises_closed_error(context, verb):
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
                # They keep making children on it: it is closed once they stop.
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


def test_close_that_waits_can_be_interrupted():
    """The resource is open again then."""
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


def test_refusal_that_was_put_off_is_reported(monkeypatch):
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


def test_second_closer_waits_for_what_comes_of_the_first():
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


def test_constructor_of_an_open_region_cannot_be_called_again(pd):
    with rp.MR(pd, 64) as mr, pytest.raises(RuntimeError, match="has been made"):
        mr.__init__(pd, 4096)  # type: ignore[misc]


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


def test_region_that_cannot_be_deregistered_keeps_its_memory(connect, context):
    """Its last reference is dropped while a window is bound to it and a peer writes through
    that."""
    needs(context.attr.max_mw, "memory windows", context)
    pair = connect()
    mw = rp.MW(pair.pd)
    memory = bytearray(4096)
    mr = rp.MR(pair.pd, memory, ALL | Access.MW_BIND)
    addr, size = mr.addr, mr.length
    rkey = mw.next_rkey()
    bind = rp.BindMW(
        mw=mw, mr=mr, rkey=rkey, addr=addr, length=size, mw_access_flags=Access.REMOTE_WRITE
    )
    pair.a.post_send(bind)
    pair.wait()
    before = {id(r) for r in open_children(pair.pd)}
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        del mr, memory, bind
        gc.collect()
    # It still exists, and its memory has not been reused.
    assert {id(r) for r in open_children(pair.pd)} == before
    others = [bytearray(4096) for _ in range(64)]
    pair.mine.buffer[:5] = b"wrong"
    write = rp.RdmaWrite(pair.mine[:5], remote_addr=addr, rkey=rkey)
    pair.b.post_send(write)
    pair.wait()
    assert not any(any(other) for other in others)
    mw.close()
    for left in open_children(pair.pd):
        if isinstance(left, rp.MR) and left not in (pair.mine, pair.theirs):
            left.close()


@pytest.mark.parametrize("turned", [False, True])
def test_window_and_region_that_are_garbage_go_in_that_order(connect, context, turned):
    needs(context.attr.max_mw, "memory windows", context)
    pair = connect()
    before = len(open_children(pair.pd))
    mr = rp.MR(pair.pd, 64, ALL | Access.MW_BIND)
    mw = rp.MW(pair.pd)
    bind = rp.BindMW(
        mw=mw,
        mr=mr,
        rkey=mw.next_rkey(),
        addr=mr.addr,
        length=64,
        mw_access_flags=Access.REMOTE_WRITE,
    )
    pair.a.post_send(bind)
    pair.wait()
    holder: list[Any] = [mr, mw] if turned else [mw, mr]
    holder.append(holder)
    del mw, mr, bind, holder
    with warnings.catch_warnings(action="error", category=ResourceWarning):
        gc.collect()  # soft0 keeps a region that a window is bound to, and that would be reported
    assert len(open_children(pair.pd)) == before


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


def test_collector_at_every_allocation_leaves_nothing_open(context):
    """Queue pairs, windows and regions die in cycles in the middle of verbs."""
    before = len(open_children(context))
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(20):
            pd, cq = rp.PD(context), rp.CQ(context)
            mr = rp.MR(pd, 4096, ALL)
            a, b = rp.QP(pd, QPType.RC, cq), rp.QP(pd, QPType.RC, cq)
            a.connect(b.endpoint())
            b.connect(a.endpoint())
            b.post_recv([rp.RecvWR(mr[:64], wr_id=i) for i in range(4)])
            a.post_send(rp.Send(mr[:8]))
            holder: list[Any] = [pd, cq, mr, a, b]
            holder.append(holder)
            del pd, cq, mr, a, b, holder
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(open_children(context)) == before


# ---- copies -----------------------------------------------------------------


def test_resource_cannot_be_copied_or_pickled(context, pd, cq):
    with rp.MR(pd, 64) as mr, rp.QP(pd, QPType.RC, cq) as qp:
        for resource in (context, pd, cq, mr, qp):
            name = type(resource).__name__
            for way in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"^cannot copy or pickle '{name}' object"):
                    way(resource)


# ---- fork and exit ----------------------------------------------------------

IN_CHILD = """
import os, sys, warnings, rdmapost as rp
warnings.simplefilter("ignore", DeprecationWarning)

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            sys.stdout.flush()
        except BaseException as error:
            print("wrong", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_error_in_the_child_of_a_fork_names_the_process_that_opened_the_resource(context):
    said = prints(
        IN_CHILD + "context = rp.open_device(sys.argv[1])\n"
        "pd, cq, channel = rp.PD(context), rp.CQ(context), rp.CompChannel(context)\n"
        "mr, qp, srq = rp.MR(pd, 64), rp.QP(pd, rp.QPType.RC, cq), rp.SRQ(pd)\n"
        "opener = os.getpid()\n"
        "def use():\n"
        "    for verb in (\n"
        "        context.query_port, lambda: context.async_fd, lambda: rp.PD(context),\n"
        "        lambda: rp.CQ(context), lambda: rp.MR(pd, 64), lambda: rp.MW(pd),\n"
        "        lambda: rp.QP(pd, rp.QPType.RC, cq), lambda: rp.get_async_event(context),\n"
        "        channel.fileno, qp.query, qp.to_init, srq.query, lambda: srq.arm_limit(1),\n"
        "        cq.poll, cq.wait, lambda: qp.post_send(rp.Send(mr[:8])),\n"
        "        lambda: qp.post_recv(rp.RecvWR(mr[:8])), lambda: srq.post_srq_recv(rp.RecvWR()),\n"
        "    ):\n"
        "        try: verb()\n"
        "        except rp.ClosedError as error:\n"
        "            text = f'was opened by process {opener}; open the device again'\n"
        "            assert str(error).endswith(text), error\n"
        "        else: raise AssertionError(verb)\n"
        "    for resource in (context, pd, cq, mr, qp, srq, channel):\n"
        "        resource.close()\n"
        "        assert resource.closed\n"
        "    with rp.open_device('soft0') as other, rp.PD(other) as own, rp.MR(own, 64) as fresh:\n"
        "        print(len(fresh), other.query_port().port_num)\n"
        "in_child(use)\n"
        "print(qp.query().qp_state.name, context.closed)\n",
        context.name,
        **LOSES_MEMORY,
    )
    assert said.splitlines() == ["64 1", "0", "RESET False"]


def test_child_of_a_fork_ends_at_once_beside_threads(context):
    """Other threads were in the middle of verbs and closes; they do not exist in the child."""
    said = prints(
        IN_CHILD + "import signal, threading\n"
        "context = rp.open_device(sys.argv[1])\n"
        "pd, cq = rp.PD(context), rp.CQ(context)\n"
        "qp = rp.QP(pd, rp.QPType.RC, cq)\n"
        "end = threading.Event()\n"
        "def use():\n"
        "    while not end.is_set():\n"
        "        qp.query()\n"
        "        with rp.MR(pd, 64), rp.CQ(context): pass\n"
        "threads = [threading.Thread(target=use) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for _ in range(10):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        signal.alarm(60)\n"
        "        sys.exit(0)\n"
        "    assert not os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 'the child hangs'\n"
        "end.set()\n"
        "for thread in threads: thread.join()\n"
        "print('ends')\n",
        context.name,
        **LOSES_MEMORY,
    )
    assert said == "ends"


def test_everything_goes_at_exit_in_an_order_that_devices_accept():
    """Windows before queue pairs and regions: some devices wait for them, others refuse."""
    said = prints(
        "import atexit, rdmapost as rp\n"
        "from rdmapost.providers.soft0.provider import SoftProvider\n"
        "for name in [*dir(SoftProvider)]:\n"
        "    if name.startswith(('de', 'close_')) and not name.startswith('detach'):\n"
        "        def noted(struct, name=name, call=getattr(SoftProvider, name)):\n"
        "            print(name)\n"
        "            return call(struct)\n"
        "        setattr(SoftProvider, name, staticmethod(noted))\n"
        "context = rp.open_device('soft0')\n"
        "pd, xrcd = rp.PD(context), rp.XRCD(context)\n"
        "channel = rp.CompChannel(context)\n"
        "mw = rp.MW(pd)\n"
        "cq = rp.CQ(context, channel=channel)\n"
        "ALL = rp.Access.LOCAL_WRITE | rp.Access.MW_BIND | rp.Access.REMOTE_WRITE\n"
        "mr, srq = rp.MR(pd, 64, ALL), rp.SRQ(pd)\n"
        "a, b = (rp.QP(pd, rp.QPType.RC, cq, srq=srq) for _ in 'ab')\n"
        "a.connect(b.endpoint()), b.connect(a.endpoint())\n"
        "ah = a.ah_to(b.endpoint())\n"
        "a.post_send(rp.BindMW(mw=mw, mr=mr, rkey=mw.next_rkey(), addr=mr.addr, length=64,\n"
        "                      mw_access_flags=rp.Access.REMOTE_WRITE))\n"
        "assert cq.poll()[0].status == 0\n"
    )
    assert said.split() == [
        "dealloc_mw",
        "destroy_qp",
        "destroy_qp",
        "destroy_ah",
        "destroy_srq",
        "dereg_mr",
        "destroy_cq",
        "destroy_comp_channel",
        "close_xrcd",
        "dealloc_pd",
        "close_device",
    ]


def test_exit_does_not_wait_for_a_verb_of_a_daemon_thread():
    said = prints(
        "import threading, rdmapost as rp\n"
        "context = rp.open_device('soft0')\n"
        "inside = threading.Event()\n"
        "def verb(_):\n"
        "    inside.set()\n"
        "    threading.Event().wait(600)\n"
        "threading.Thread(target=context._verb, args=(verb,), daemon=True).start()\n"
        "assert inside.wait(60)\n"
        "print('ends')\n",
        **LOSES_MEMORY,
    )
    assert said == "ends"
