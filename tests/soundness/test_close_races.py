"""close() in one thread against a verb in another, and in the middle of one: nobody crashes."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support import TIMES
from support.connected_pair import LIMIT, Number, Rig, thread, until
from support.interrupts import Moment, interrupt_at_each_moment
from support.isolated import isolated
from support.threads import repeating

import rdmapost as rp
from rdmapost import QPType

ROUNDS = 1000
SECONDS = 0.4 * TIMES
"""How many rounds of a race at most, and how long."""


def _pd(rig: Rig) -> Any:
    return rp.PD(rig.context)


def _ud(rig: Rig) -> rp.QP:
    qp = rp.QP(rig.pd, QPType.UD, rig.cq, max_send_wr=512)
    qp.connect()
    return qp


def _made(make: Callable[[], Any]) -> None:
    """Create a resource and close it; another thread may use it meanwhile."""
    make().close()


def _channel_cq(rig: Rig) -> rp.CQ:
    channel = rp.CompChannel(rig.context)
    rig.more.append(channel)
    return rp.CQ(rig.context, channel=channel)


def _post_and_poll(rig: Rig) -> Callable[[rp.QP], None]:
    wr = rp.Send(rig.mr[:8], send_flags=0)

    def use(qp: rp.QP) -> None:
        try:
            qp.post_send([wr, wr])
        except rp.PostError as error:
            if error.errno != 12:
                raise
        rig.cq.poll()

    return use


def _use_batch(rig: Rig) -> Callable[[rp.Batch], None]:
    def use(batch: rp.Batch) -> None:
        batch.post()
        rig.drain()

    return use


def _make_handles(rig: Rig) -> Callable[[rp.PD], None]:
    attr = _attr(rig)
    return lambda pd: _made(lambda: rp.AH(pd, attr))


VERBS: dict[str, tuple[Callable[[Rig], Any], Callable[[Rig], Callable[[Any], object]]]] = {
    # What is closed, and what another thread does with it at the same time, repeatedly.
    "req_notify": (_channel_cq, lambda rig: lambda cq: cq.req_notify()),
    "poll": (lambda rig: rp.CQ(rig.context), lambda rig: lambda cq: cq.poll()),
    "get_cq_event": (
        lambda rig: rp.CompChannel(rig.context),
        lambda rig: lambda channel: channel.get_cq_event(0),
    ),
    "create_cq": (
        lambda rig: rp.CompChannel(rig.context),
        lambda rig: lambda channel: _made(lambda: rp.CQ(rig.context, channel=channel)),
    ),
    "create_ah": (_pd, _make_handles),
    "reg_mr": (_pd, lambda rig: lambda pd: _made(lambda: rp.MR(pd, 64))),
    "alloc_mw": (_pd, lambda rig: lambda pd: _made(lambda: rp.MW(pd))),
    "create_qp": (_pd, lambda rig: lambda pd: _made(lambda: rp.QP(pd, QPType.RC, rig.cq))),
    "query_qp": (lambda rig: rig.queue_pair(), lambda rig: lambda qp: qp.query()),
    "modify_qp": (
        lambda rig: rig.queue_pair(),
        lambda rig: lambda qp: (qp.to_init(), qp.to_reset()),
    ),
    "post_send": (lambda rig: _rts(rig), _post_and_poll),
    "prepared": (lambda rig: rig.a.prepare([rig.write(1), rig.write(2)]), _use_batch),
    "query_srq": (lambda rig: rp.SRQ(rig.pd), lambda rig: lambda srq: srq.query()),
    "post_srq_recv": (
        lambda rig: rp.SRQ(rig.pd),
        lambda rig: lambda srq: _tolerant(lambda: srq.post_srq_recv(rig.receive(1))),
    ),
    "query_port": (
        lambda rig: rp.open_device(rig.context.name),
        lambda rig: lambda context: context.query_port(),
    ),
    "alloc_pd": (
        lambda rig: rp.open_device(rig.context.name),
        lambda rig: lambda context: _made(lambda: rp.PD(context)),
    ),
    "bind_mw": (
        lambda rig: rp.MW(rig.pd, rp.MWType.TYPE_1),
        lambda rig: (
            lambda mw: (
                rig.a.bind_mw(mw, rig.mr, rig.mr.addr, 64, rp.Access.REMOTE_READ),
                rig.drain(),
            )
        ),
    ),
}


def _attr(rig: Rig) -> rp.AHAttr:
    with rig.a.ah_to(rig.b.endpoint()) as ah:
        return ah.attr


def _rts(rig: Rig) -> rp.QP:
    qp = rig.queue_pair(max_send_wr=16)
    qp.connect(qp.endpoint())
    return qp


def _tolerant(post: Callable[[], object]) -> None:
    try:
        post()
    except rp.PostError as error:
        if error.errno != 12:
            raise


@pytest.mark.parametrize("verb", VERBS)
@isolated(silent=True, timeout=30)
def test_verb_racing_a_close_raises_closed_error(verb, device):
    """The close succeeds, or its error names what uses the resource."""
    sys.setswitchinterval(1e-6)
    rig = Rig(device)
    if verb == "bind_mw" and not rig.context.attr.device_cap_flags & rp.DeviceCap.MEM_WINDOW:
        return
    make, use_of = VERBS[verb]
    use = use_of(rig)
    finished = time.monotonic() + SECONDS
    for _ in range(ROUNDS):
        thing = make(rig)
        barrier = threading.Barrier(2)

        def loop(thing: Any = thing, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            while True:
                use(thing)

        with thread(loop) as raised:
            barrier.wait()
            deadline = time.monotonic() + LIMIT
            closed = False
            while not closed:
                try:
                    thing.close()
                    closed = True
                except rp.InUseError as error:
                    # A window has another key after each bind.
                    assert str(thing).split(" (")[0] in str(error)  # noqa: PT017
                    assert time.monotonic() < deadline, "it is refused again and again"
        assert len(raised) == 1
        error = raised[0]
        if isinstance(error, rp.PostError):
            assert "closed" in str(error), repr(error)
        else:
            assert isinstance(error, rp.ClosedError), repr(error)
        if time.monotonic() > finished:
            break
    rig.drain()
    rig.works()
    rig.close()


@pytest.mark.parametrize("verb", VERBS)
@isolated(silent=True, timeout=30)
def test_close_at_any_moment_of_another_threads_verb_waits_or_wins(verb, soft):
    """The close waits for the verb or precedes it; the verb succeeds or raises ClosedError."""
    make_one, use_of = VERBS[verb]

    def make() -> Rig:
        rig = Rig(soft)
        rig.more.append(make_one(rig))
        rig.use = use_of(rig)  # type: ignore[attr-defined]
        rig.closers = []  # type: ignore[attr-defined]
        return rig

    def close(rig: Any) -> None:
        def run() -> None:
            for _ in range(2000):
                try:
                    rig.more[-1].close()
                    return
                except rp.InUseError:
                    time.sleep(0.001)
                except BaseException as error:
                    rig.found.append(error)
                    return

        rig.closers.append(threading.Thread(target=run, daemon=True))
        rig.closers[0].start()
        # The close may wait until the verb returns.
        rig.closers[0].join(0.02)

    def act(rig: Any) -> None:
        try:
            rig.use(rig.more[-1])
        except rp.ClosedError:
            pass
        except rp.PostError as error:
            assert "closed" in str(error), error  # noqa: PT017

    def check(rig: Any, _: Moment) -> None:
        for closer in rig.closers:
            closer.join(LIMIT)
            assert not closer.is_alive(), "close() waits forever"
            assert rig.more[-1].closed if hasattr(rig.more[-1], "closed") else True
        assert not [error for error in rig.found if isinstance(error, BaseException)], rig.found
        rig.found.clear()
        rig.drain()
        rig.works()
        rig.close()

    interrupt_at_each_moment(make, act, check, handler=close, max_moments=30, seconds=6)


@pytest.mark.parametrize("field", ["wr_id", "remote_qpn", "remote_qkey", "send_flags"])
@isolated(silent=True)
def test_field_that_closes_the_address_handle_of_its_post_causes_no_post_of_a_destroyed_one(
    field, device
):
    """Whichever read of the field closes it; the work request before it names the handle too."""
    rig = Rig(device)
    sender, receiver = _ud(rig), _ud(rig)
    for turn in range(1, 7):
        ah = sender.ah_to(receiver.endpoint())
        receiver.post_recv(rp.RecvWR(rig.mr[2048:2148], wr_id=5))
        reads = 0
        gone = False

        def close(turn: int = turn, ah: rp.AH = ah) -> None:
            nonlocal reads, gone
            reads += 1
            if reads == turn:
                try:
                    ah.close()
                except rp.InUseError:
                    return
                gone = ah.closed

        fields: dict[str, Any] = {
            "wr_id": 7,
            "remote_qpn": receiver.qp_num,
            "remote_qkey": rp.resources.qp.DEFAULT_QKEY,
            "send_flags": int(rp.SendFlags.SIGNALED),
        }
        odd = {**fields, field: Number(fields[field], close)}
        try:
            sender.post_send([rp.Send(rig.mr[:8], ah=ah, **odd)])
        except (rp.PostError, rp.ClosedError, TypeError):
            assert sender.outstanding.send == 0
            sender.post_send(
                rp.Send(rig.mr[:8], ah=(other := sender.ah_to(receiver.endpoint())), **fields)
            )
            rig.more.append(other)
        else:
            assert not gone, "a destroyed address handle has been posted"
        done = [wc.check().wr_id for wc in rig.cq.wait(2)]
        assert all(type(wr_id) is int for wr_id in done)
        assert sorted(done) == [5, 7]
        ah.close()
    rig.more += [receiver, sender]
    rig.close()


# ---- copies -----------------------------------------------------------------------

MAKERS: dict[str, Callable[[Rig], Any]] = {
    "Context": lambda rig: rig.context,
    "PD": lambda rig: rig.pd,
    "CQ": lambda rig: rig.cq,
    "MR": lambda rig: rig.mr,
    "QP": lambda rig: rig.a,
    "MW": lambda rig: rp.MW(rig.pd),
    "AH": lambda rig: rig.a.ah_to(rig.b.endpoint()),
    "SRQ": lambda rig: rp.SRQ(rig.pd),
    "CompChannel": lambda rig: rp.CompChannel(rig.context),
    "Batch": lambda rig: rig.a.prepare(rig.write(1)),
}


@pytest.mark.parametrize("type_name", MAKERS)
@isolated(silent=True)
def test_copying_a_resource_is_refused_and_names_its_type(type_name, device):
    """copy, deepcopy, and pickle in each protocol: a second owner would close it twice."""
    rig = Rig(device)
    thing = MAKERS[type_name](rig)
    if thing not in (rig.context, rig.pd, rig.cq, rig.mr, rig.a):
        rig.more.append(thing)
    copiers: list[Callable[[Any], object]] = [copy.copy, copy.deepcopy]
    copiers += [
        lambda thing, protocol=protocol: pickle.dumps(thing, protocol)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for copier in copiers:
        for value in (thing, [thing], {"it": (thing,)}):
            if copier is copy.copy and value is not thing:
                continue
            with pytest.raises(TypeError, match=rf"\b{type_name}\b") as caught:
                copier(value)
            said = str(caught.value)
            assert "cdata" not in said
            assert "_thread" not in said
            assert "reducer" not in said
    gc.collect()
    rig.works()
    rig.close()


@isolated(silent=True, timeout=60)
def test_prepare_racing_a_close_of_its_resources_leaves_no_list_open(device):
    """A refused close names the open lists; closing the queue pair closes them."""
    end = time.monotonic() + SECONDS
    for _ in range(ROUNDS):
        rig = Rig(device)
        qp = rig.queue_pair()
        made: list[Any] = []
        first = qp.prepare(rig.write())

        def prepare(rig=rig, qp=qp, made=made):
            with contextlib.suppress(rp.ClosedError, rp.PostError):
                while True:
                    made.append(qp.prepare(rig.write()))
                    if len(made) > 20:
                        made.pop(0).close()

        with thread(prepare):
            until(lambda made=made: len(made) > 5, "lists are prepared")
            for _ in range(5):
                with pytest.raises(rp.InUseError, match="prepared list"):
                    rig.mr.close()
            qp.close()
        assert first.closed
        assert all(batch.closed for batch in made)
        rig.close()
        if time.monotonic() > end:
            break


# ---- waits that are released ------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 1000.0])
@isolated(silent=True, timeout=20)
def test_closing_a_cq_wakes_its_waiters_with_closed_error(timeout, device):
    """Any number of threads: each gets ClosedError, and the queue is closed."""
    rig = Rig(device)
    cq = rp.CQ(rig.context)

    def wait() -> None:
        cq.wait(1, timeout)

    with thread(wait) as one, thread(wait) as two, thread(wait) as three:
        until(lambda: cq._poller.waiting == 3, "the threads wait")
        cq.close()
        assert cq.closed
    for raised in (one, two, three):
        assert [type(error) for error in raised] == [rp.ClosedError]
    rig.close()


@isolated(silent=True, timeout=20)
def test_cq_closed_as_a_wait_starts_ends_the_wait_with_closed_error(device):
    """Closed at once after the start of the wait, hundreds of times: at each moment of it."""
    sys.setswitchinterval(1e-5)
    rig = Rig(device)
    for _ in range(100 // TIMES):
        cq = rp.CQ(rig.context)
        started = threading.Event()

        def wait(cq: rp.CQ = cq, started: threading.Event = started) -> None:
            started.set()
            cq.wait(1, None)

        with thread(wait) as raised:
            started.wait()
            cq.close()
        assert [type(error) for error in raised] == [rp.ClosedError]
    rig.close()


@isolated(silent=True, timeout=20)
def test_closing_a_channel_wakes_its_waiters(device):
    rig = Rig(device)
    channel = rp.CompChannel(rig.context)
    with thread(lambda: channel.get_cq_event(None)) as raised:
        until(lambda: channel._poller.waiting, "the thread waits")
        channel.close()
        assert channel.closed
    assert [type(error) for error in raised] == [rp.ClosedError]
    rig.close()


@isolated(silent=True, timeout=20)
def test_thread_that_keeps_polling_for_events_does_not_block_closing_the_channel(device):
    """close() is not refused, and takes no second."""
    rig = Rig(device)
    for _ in range(5):
        channel = rp.CompChannel(rig.context)
        with repeating(partial(channel.get_cq_event, 0), LIMIT) as raised:
            start = time.monotonic()
            channel.close()
            assert time.monotonic() - start < TIMES
        assert [type(error) for error in raised] == [rp.ClosedError]
    rig.close()


@isolated(silent=True, timeout=20)
def test_wait_in_another_thread_returns_its_completions(device):
    """That waits can be released takes none from those that are not."""
    rig = Rig(device)
    with thread(lambda: rig.found.extend(rig.cq.wait(2, None))) as raised:
        until(lambda: rig.cq._poller.waiting, "the thread waits")
        rig.a.post_send([rig.write(1), rig.write(2)])
        until(lambda: len(rig.found) == 2, "the completions")
    assert not raised
    assert [wc.wr_id for wc in rig.found] == [1, 2]
    rig.close()


# ---- closes in the middle of a close ----------------------------------------------


class Nested(rp.PD):
    """Does something in the middle of its close()."""

    __slots__ = ("step", "within")

    def _run(self, step: str) -> None:
        if self.step == step:
            self.within()

    def _wake(self) -> None:
        self._run("wake")

    def _release(self) -> None:
        self._run("release")

    def _forget(self) -> None:
        self._run("forget")


def _nested(rig: Rig, step: str = "release") -> Any:
    pd = Nested(rig.context)
    pd.step = step
    return pd


@pytest.mark.parametrize("step", ["wake", "release", "forget"])
@pytest.mark.parametrize("count", [2, 3])
@isolated(silent=True, timeout=20)
def test_closes_that_wait_for_each_other_in_a_ring_of_threads_all_return(count, step, device):
    """Each thread is in the middle of one close and begins that of the next thread's."""
    rig = Rig(device)
    inside = threading.Barrier(count)
    pds = [_nested(rig, step) for _ in range(count)]
    for number, pd in enumerate(pds):

        def close_next(following: Any = pds[(number + 1) % count]) -> None:
            inside.wait(LIMIT)
            following.close()

        pd.within = close_next
    with contextlib.ExitStack() as threads:
        raised = [threads.enter_context(thread(pd.close)) for pd in pds]
    assert not any(raised), raised
    assert all(pd.closed for pd in pds)
    rig.close()


@isolated(silent=True, timeout=20)
def test_close_within_another_waits_for_a_thread_that_closes_the_same_resource(device):
    """The other thread waits for no close, so its close ends."""
    rig = Rig(device)
    inside, go = threading.Event(), threading.Event()
    inner, outer = _nested(rig), _nested(rig)
    closed = []

    def stop() -> None:
        inside.set()
        go.wait(LIMIT)

    def close_inner() -> None:
        threading.Timer(0.05, go.set).start()
        inner.close()
        closed.append(inner.closed)

    inner.within, outer.within = stop, close_inner
    with thread(inner.close) as raised:
        inside.wait(LIMIT)
        outer.close()
    assert not raised
    assert closed == [True]
    rig.close()


@isolated(silent=True, timeout=30)
def test_child_created_by_a_handler_never_outlives_its_closing_parent(soft):
    """At each moment of its close(): one of the two is refused."""

    def make() -> Any:
        rig: Any = Rig(soft)
        rig.srq, rig.made = rp.SRQ(rig.pd), []
        return rig

    def make_on_it(rig: Any) -> None:
        with contextlib.suppress(rp.ClosedError):
            rig.made.append(rp.QP(rig.pd, QPType.RC, rig.cq, srq=rig.srq))

    def act(rig: Any) -> None:
        try:
            rig.srq.close()
        except rp.InUseError as error:
            assert str(rig.made[0]) in str(error)  # noqa: PT017

    def check(rig: Any, _: Moment) -> None:
        assert not (rig.srq.closed and rig.made)
        for thing in (*rig.made, rig.srq):
            thing.close()
        rig.close()

    interrupt_at_each_moment(
        make, act, check, handler=make_on_it, within="/rdmapost/resources/srq.py"
    )
