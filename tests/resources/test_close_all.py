"""Context.close_all: the device and all that hangs on it, in an order that devices accept."""

from __future__ import annotations

import array
import asyncio
import gc
import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support import ALL, LIMIT, ended, interrupt_everywhere, null_device, waiting
from support.threads import repeating
from support.windows import bind_wr

import rdmapost as rp
from rdmapost.resources.resource import Resource, _all_open, open_children

null = null_device.null
on_null = null_device.on_null


@pytest.fixture
def opened(context):
    """The same device, opened again for a test that closes it."""
    with rp.open_device(context.name) as another:
        yield another


def populate(context: rp.Context) -> list[Any]:
    """Make one of everything that the device has, with work in flight and a bound window."""
    caps = context.attr.device_cap_flags
    channel = rp.CompChannel(context)
    pd, cq, shared = rp.PD(context), rp.CQ(context), rp.CQ(context, channel=channel)
    a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, shared)
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mr = rp.MR(pd, 4096, ALL | rp.Access.MW_BIND)
    ud = rp.QP(pd, rp.QPType.UD, cq)
    ud.connect()
    made = [channel, pd, cq, shared, a, b, mr, ud, ud.ah_to(ud.endpoint())]
    b.post_recv([rp.RecvWR(mr[:64])] * 4)
    a.post_send([rp.Send(mr[:8])] * 2)
    if context.attr.max_srq:
        srq = rp.SRQ(pd)
        srq.post_srq_recv(rp.RecvWR(mr[64:128]))
        made += [srq, rp.QP(pd, rp.QPType.RC, cq, srq=srq)]
    if caps & rp.DeviceCap.XRC:
        xrcd = rp.XRCD(context)
        made += [xrcd, rp.SRQ(pd, srq_type=rp.SRQType.XRC, xrcd=xrcd, cq=cq)]
        made += [rp.QP(None, rp.QPType.XRC_RECV, xrcd=xrcd)]
    if caps & rp.DeviceCap.MEM_WINDOW_TYPE_2B:
        mw = rp.MW(pd, rp.MWType.TYPE_2)
        bind = bind_wr(mw, mr, rp.Access.REMOTE_READ)
        a.post_send(bind)
        made.append(mw)
    batch = a.prepare([rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey)])
    assert not batch.closed
    return made


def test_close_all_closes_everything_on_the_device(context, opened):
    """However it was made, and whatever is in flight; a second device is left alone."""
    before = set(_all_open())
    made = populate(opened)
    with pytest.raises(rp.InUseError):
        opened.close()
    opened.close_all()
    assert [thing for thing in [*made, opened] if not thing.closed] == []
    assert set(_all_open()) == before - {opened}
    assert not context.closed
    context.query_port(1)
    opened.close_all()  # nothing is left


def test_close_all_closes_resources_that_nobody_refers_to(opened):
    populate(opened)
    opened.close_all()
    assert opened.closed
    assert open_children(opened) == []


def test_threads_and_tasks_that_wait_beside_close_all_get_a_closed_error(opened):
    cq, raised = rp.CQ(opened), []

    def wait() -> None:
        try:
            cq.wait(1, None)
        except rp.RdmaError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting(cq, [thread])
    opened.close_all()
    ended([thread])
    assert [type(error) for error in raised] == [rp.ClosedError]

    async def task() -> None:
        with rp.open_device(opened.name) as another:
            waiter = asyncio.ensure_future(rp.CQ(another).completions(1, LIMIT))
            await asyncio.sleep(0)
            another.close_all()
            with pytest.raises(rp.ClosedError):
                await waiter

    asyncio.run(task())


def test_close_all_reports_what_cannot_be_closed_and_closes_the_rest(on_null):
    """The device keeps a region; a queue pair, a CQ and another PD go."""
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        qp, mr, other = rp.QP(pd, rp.QPType.RC, cq), rp.MR(pd, 64), rp.PD(context)
        try: context.close_all()
        except rp.CloseError as error: caught = error
        print(caught)
        print([type(each).__name__ for each in caught.errors], caught.__cause__ is caught.errors[0])
        print([each.closed for each in (qp, cq, other, mr, pd, context)])
        print(context.query_port().state.name)
        """,
        NULL_REFUSES="ibv_dereg_mr=16",
    )
    said, errors, closed, state = text.splitlines()
    assert "could not be deregistered: ibv_dereg_mr: EBUSY" in said
    assert said.endswith("(and 2 more: see errors)")
    assert errors == "['VerbsError', 'InUseError', 'InUseError'] True"
    assert closed == "[True, True, True, False, False, False]"
    assert state == "ACTIVE"


def test_close_that_fails_once_succeeds_when_it_is_called_again(soft, monkeypatch):
    with rp.open_device(soft) as context:
        pd = rp.PD(context)
        thing = rp.MR(pd, 64)
        monkeypatch.setattr(
            type(thing), "close", lambda self: (_ for _ in ()).throw(rp.InUseError("not yet"))
        )
        with pytest.raises(rp.CloseError, match=r"^not yet \(and 2 more") as caught:
            context.close_all()
        assert str(caught.value.errors[0]) == "not yet"
        monkeypatch.undo()
        context.close_all()
        assert (thing.closed, pd.closed, context.closed) == (True, True, True)


def test_interrupted_close_all_can_be_called_again(soft):
    def close() -> None:
        context = rp.open_device(soft)
        try:
            pd = rp.PD(context)
            rp.MR(pd, 64)
        finally:
            try:
                context.close_all()
            except BaseException:
                context.close_all()
                raise

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert interrupt_everywhere(close)


def _posts(pd: rp.PD, cq: rp.CQ) -> dict[str, Callable[[], object]]:
    """Return calls that post, some of them in vain, on a pair of queue pairs."""
    a, b = (rp.QP(pd, rp.QPType.RC, cq, max_inline_data=8) for _ in "ab")
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mr = rp.MR(pd, 64)
    there: dict[str, Any] = {"remote_addr": mr.addr, "rkey": mr.rkey}
    write, inline = rp.RdmaWrite, rp.SendFlags.INLINE
    index = array.array("q", [0, 1])
    rows, outside = mr.blocks(index, 8), mr.blocks(index, 64)
    other, elsewhere = rp.MR(pd, 64), rp.MR(rp.PD(pd.context), 64)
    batch = a.prepare(write(mr[:8], **there))
    return {
        "post_send": lambda: a.post_send(write(mr[:8], **there)),
        "post_send of INLINE": lambda: a.post_send(write(mr[:8], send_flags=inline, **there)),
        "post_send that is refused": lambda: a.post_send(write([mr[:8]] * 99, **there)),
        "post_columns": lambda: a.post_columns(write, rows, **there),
        "post_columns that is refused": lambda: a.post_columns(write, outside, **there),
        "prepare": lambda: a.prepare(write(mr[:8], **there)),
        "prepare that is refused": lambda: a.prepare(write([mr[:8]] * 99, **there)),
        "sg_list": lambda: setattr(batch[0], "sg_list", other[:8]),
        "sg_list that is refused": lambda: setattr(batch[0], "sg_list", elsewhere[:8]),
    }


def _makers(context: rp.Context, pd: rp.PD, cq: rp.CQ) -> dict[str, Callable[[], Any]]:
    return {
        "PD": lambda: rp.PD(context),
        "CQ": lambda: rp.CQ(context),
        "MR": lambda: rp.MR(pd, 64),
        "QP": lambda: rp.QP(pd, rp.QPType.RC, cq),
        "SRQ": lambda: rp.SRQ(pd),
        "MW": lambda: rp.MW(pd),
        "CompChannel": lambda: rp.CompChannel(context),
    }


def _closes_at_every_moment(
    soft: str, monkeypatch: pytest.MonkeyPatch, close_at: Callable[..., bool], *args: Any
) -> int:
    """Check that close_at(moment, context, ...) closes the device, until it reaches no moment.

    Returns:
        the first moment that is not reached.
    """
    reports: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    for moment in itertools.count(1):
        context = rp.open_device(soft)
        reached = close_at(moment, context, *args)
        if reached:
            assert (context.closed, reports) == (True, []), moment
        context.close_all()
        if not reached:
            break
    return moment


def _close_all_at(moment: int, context: rp.Context, name: str, raises: bool) -> bool:
    """Make and close a resource, or post; at that moment a signal handler closes all.

    Returns:
        whether the moment was reached.
    """
    pd, cq = rp.PD(context), rp.CQ(context)
    call = _makers(context, pd, cq).get(name) or _posts(pd, cq)[name]
    seen = 0

    def handle(_: object, event: str, __: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_return")
        if seen == moment:
            sys.setprofile(None)
            context.close_all()
            if raises:
                raise SystemExit

    gc.disable()
    sys.setprofile(handle)
    try:
        made = call()
        if isinstance(made, Resource):
            made.close()
    except (rp.RdmaError, ValueError, SystemExit):
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen >= moment


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *["PD", "CQ", "MR", "QP", "SRQ", "MW", "CompChannel"],
        *["post_send", "post_send of INLINE", "post_send that is refused"],
        *["post_columns", "post_columns that is refused"],
        *["prepare", "prepare that is refused", "sg_list", "sg_list that is refused"],
    ],
)
def test_close_all_in_a_signal_handler_closes_the_device_whatever_it_interrupts(
    name, raises, soft, monkeypatch
):
    """It takes effect when the constructor, the close or the post ends, even by an exception."""
    assert _closes_at_every_moment(soft, monkeypatch, _close_all_at, name, raises) > 3


def _close_all_when_collecting(moment: int, context: rp.Context, name: str) -> bool:
    """Post or prepare; the collection of that number closes all.

    Returns:
        whether there were so many collections.
    """
    call = _posts(rp.PD(context), rp.CQ(context))[name]
    thresholds = gc.get_threshold()
    seen = 0

    def collect(phase: str, _: object) -> None:
        nonlocal seen
        seen += phase == "start"
        if seen == moment and phase == "start":
            gc.set_threshold(0)
            context.close_all()

    gc.callbacks.append(collect)
    gc.set_threshold(1)
    try:
        call()
    except (rp.RdmaError, ValueError):
        pass
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collect)
    return seen >= moment


@pytest.mark.parametrize("name", ["post_columns", "prepare", "sg_list", "sg_list that is refused"])
def test_close_all_by_the_garbage_collector_closes_the_device_whatever_it_interrupts(
    name, soft, monkeypatch
):
    """Up to Python 3.11 it may run whenever an object is created."""
    _closes_at_every_moment(soft, monkeypatch, _close_all_when_collecting, name)


def test_refused_close_all_that_is_interrupted_leaves_the_device_usable(soft):
    refusing = [True]

    class Refusing(rp.CQ):
        def close(self):
            if refusing[0]:
                raise rp.RdmaError("not yet")
            super().close()

    context = rp.open_device(soft)
    kept = Refusing(context)

    def close() -> None:
        try:
            made = rp.MR(rp.PD(context), 64)
            context.close_all()
        except rp.CloseError:
            assert made.closed
        except BaseException:
            rp.CQ(context).close()
            with pytest.raises(rp.CloseError):
                context.close_all()
            raise

    assert interrupt_everywhere(close)
    refusing[0] = False
    assert not kept.closed
    context.close_all()


@pytest.mark.parametrize("call", ["MR(pd, 64)", "MW(pd)", "CQ(opened)"])
def test_thread_that_creates_resources_all_the_time_does_not_keep_the_device_open(context, call):
    create = compile(f"rp.{call}", call, "eval")
    for _ in range(20):
        opened = rp.open_device(context.name)
        names = {"rp": rp, "opened": opened, "pd": rp.PD(opened)}
        made = []
        with repeating(lambda made=made, names=names: made.append(eval(create, names))) as raised:
            opened.close_all()
        assert [type(error) for error in raised] == [rp.ClosedError]
        assert opened.closed


def test_close_all_that_a_resource_refuses_once_leaves_nothing_to_the_garbage_collector(opened):
    failed = []

    class Reluctant(rp.QP):
        def close(self):
            if not failed:
                failed.append(self.qp_num)
                raise rp.RdmaError("not yet")
            super().close()

    pd, cq = rp.PD(opened), rp.CQ(opened)
    kept = weakref.ref(qp := Reluctant(pd, rp.QPType.RC, cq))
    # Closing another resource is progress, after which the queue pair is closed again.
    rest = rp.MR(pd, 64)
    gc.disable()
    try:
        opened.close_all()
        assert failed
        assert rest.closed
        assert qp.closed
        del qp
        assert kept() is None
    finally:
        gc.enable()


def test_close_all_closes_resources_that_compare_equal_to_others(opened):
    """A class with __eq__ has no hash."""

    class Equal(rp.MW):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, rp.MW)

    pd, cq = rp.PD(opened), rp.CQ(opened)
    a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mr = rp.MR(pd, 4096, ALL | rp.Access.MW_BIND)
    windows = [Equal(pd, rp.MWType.TYPE_1) for _ in range(2)]
    for mw in windows:
        a.bind_mw(mw, mr, mr.addr, 8, rp.Access.REMOTE_WRITE)
    opened.close_all()
    assert all(one.closed for one in (*windows, mr, a, b, cq, pd, opened))
