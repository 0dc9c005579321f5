"""Signal handlers that raise, close or ask at chosen moments of a server or a connection."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from support import LIMIT, until
from support.serving import Served, server_threads, servers

import rdmapost as rp
from rdmapost import connect
from rdmapost.tools.connect import server as server_module
from rdmapost.tools.connect import server_threads as threads_module

serve = servers
SOON = 5.0
"""Seconds; a wait for a server that cannot end takes more than 10."""


@pytest.fixture
def context() -> Iterator[rp.Context]:
    with rp.open_device("soft0") as opened:
        yield opened


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Fail a test that would wait forever."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError("this test hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT / 2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Interrupted(BaseException):
    pass


def interrupt() -> None:
    raise Interrupted


class At:
    """Calls action before the nth bytecode that this thread runs from some files.

    It stands for a signal handler that runs at a known moment.
    """

    def __init__(self, files: str, nth: int, action: Callable[[], object]) -> None:
        self._files, self._left, self._action = files, nth, action

    @property
    def reached(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> At:
        self._before = sys.gettrace()
        # CPython 3.12 traces bytecodes only if the frame that starts the tracing asks for it.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._files not in frame.f_code.co_filename or self.reached:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self.reached:
                self._action()
        return self._trace


def come_by() -> None:
    """Run some bytecode, so that the interpreter runs pending signal handlers in this thread."""
    for _ in range(10):
        pass


def closes(context: rp.Context) -> bool:
    """Close a device, unless something on it is open."""
    with contextlib.suppress(rp.InUseError):
        context.close()
    return context.closed


def is_asking(peer: connect.Connection) -> bool:
    """Whether a request has been sent, and its answer has not come."""
    return peer._session.protocol.answer_pending


def each_moment(once: Callable[[int], bool], step: int = 1) -> None:
    """Call it with 1, 2, 3, ... until it reports that it ended before that moment."""
    nth = 1
    while once(nth):
        nth += step
    assert nth > 20 * step


def each_moment_of_a_thread(once: Callable[[int], bool], step: int = 1) -> None:
    """Call each_moment() in a separate thread.

    On CPython 3.11, a trace function that raises may leave its exception in the thread's
    sys.exc_info(), and so in the __context__ of later exceptions.
    """
    with ThreadPoolExecutor(1) as executor:
        each_moment(lambda nth: executor.submit(once, nth).result(), step)


def each_moment_of_an_unclosed_one(once: Callable[[int], bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        each_moment(once)


# ---- a server -----------------------------------------------------------------------


def test_close_interrupted_at_any_moment_can_be_called_again(context: rp.Context) -> None:
    def once(nth: int) -> bool:
        server = connect.serve(context, port=0)
        with At("/rdmapost/tools/connect/", nth, interrupt) as at, contextlib.suppress(Interrupted):
            server.close()
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < SOON
        assert not server_threads()
        return at.reached

    each_moment(once)


def test_serve_interrupted_while_it_starts_leaves_a_device_that_can_be_closed() -> None:
    """It can be closed in the except clause already, while the exception still holds the frames."""
    interrupted = 0

    def once(nth: int) -> bool:
        nonlocal interrupted
        server, context = None, rp.open_device("soft0")
        at = At("/rdmapost/tools/connect/server", nth, interrupt)
        try:
            with at:
                server = connect.serve(context, port=0)
        except Interrupted as error:
            if "start" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]:
                interrupted += 1
                context.close()
        if server is not None:
            server.close()
        until(lambda: closes(context))
        return at.reached

    each_moment_of_an_unclosed_one(once)
    assert interrupted > 20


def test_serve_interrupted_as_it_has_started_a_thread_ends_that_thread_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the thread uses descriptors that are closed, or another file's by then."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: ignored.append(error.exc_value))

    def once(steps: int) -> None:
        def profile(frame: FrameType, event: str, arg: object) -> None:
            if event == "c_return" and arg is _thread.start_new_thread:
                sys.setprofile(None)
                # The thread gets on with its work.
                for _ in range(steps):
                    time.sleep(0)
                raise Interrupted

        with rp.open_device("soft0") as context:
            sys.setprofile(profile)
            try:
                with pytest.raises(Interrupted):
                    connect.serve(context, port=0)
            finally:
                sys.setprofile(None)
            until(lambda: closes(context))
            until(lambda: not server_threads())

    for steps in range(60):
        once(steps)
    assert ignored == []


@pytest.mark.parametrize("finalizer", ["whole", "interrupted"])
def test_a_server_whose_close_was_interrupted_ends_when_it_is_unreachable(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, finalizer: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)

    def once(nth: int) -> bool:
        server = connect.serve(context, port=0)
        with At("/rdmapost/tools/connect/", nth, interrupt) as at, contextlib.suppress(Interrupted):
            server.close()
        if finalizer == "whole":
            del server
        else:
            with contextlib.suppress(Interrupted), At("/rdmapost/tools/connect/", 1, interrupt):
                del server
                come_by()
        until(lambda: not server_threads())
        return at.reached

    each_moment_of_an_unclosed_one(once)
    context.close()


@pytest.mark.parametrize("made", ["server", "connection"])
def test_interrupt_of_a_finalizer_is_raised_afterwards_and_everything_is_released(
    context: rp.Context, made: str
) -> None:
    with connect.serve(context, port=0) as other:

        def once(nth: int) -> bool:
            one = (
                connect.serve(context, port=0)
                if made == "server"
                else connect.dial(context, *other.address)
            )
            at, raised = At("/rdmapost/tools/connect/", nth, interrupt), False
            try:
                with at:
                    del one
                    come_by()
            except Interrupted:
                raised = True
            assert raised == at.reached
            until(lambda: len(server_threads()) == 1 and not other.clients)
            return at.reached

        each_moment_of_an_unclosed_one(once)
    context.close()


def test_a_signal_handler_may_close_a_server_at_any_moment_of_its_close(
    context: rp.Context,
) -> None:
    def once(nth: int) -> bool:
        server = connect.serve(context, port=0, timeout=1.0)
        began = time.monotonic()
        with At("/rdmapost/tools/connect/", nth, server.close) as at:
            server.close()
        assert time.monotonic() - began < SOON
        assert not server_threads()
        return at.reached

    each_moment(once)


def test_a_signal_handler_may_close_the_device_before_the_servers_threads_start(
    soft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """serve() raises ClosedError, and no thread is left that fails on a closed socket."""
    reports: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    context = rp.open_device(soft)

    def handle(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code is threads_module.ServerThreads.start.__code__:
            sys.setprofile(None)
            context.close_all()

    sys.setprofile(handle)
    try:
        with pytest.raises(rp.ClosedError, match="the server was closed before it had started"):
            connect.serve(context, "127.0.0.1", 0)
    finally:
        sys.setprofile(None)
    assert (context.closed, reports) == (True, [])


def test_a_signal_handler_may_close_a_server_in_the_middle_of_a_verb(context: rp.Context) -> None:
    server = connect.serve(context, port=0, timeout=1.0)
    peer = connect.dial(context, *server.address)
    pd = rp.PD(context)
    began = time.monotonic()
    # In the middle of the verb, the device holds its lock.
    with At("/rdmapost/providers/", 1, server.close) as at:
        rp.MR(pd, 64).close()
    assert at.reached
    assert time.monotonic() - began < SOON
    until(lambda: not server_threads())
    assert not server.clients
    with pytest.raises(connect.ConnectError, match="the server is shutting down"):
        peer.look()
    peer.close()
    pd.close()
    context.close()


def test_callbacks_of_two_clients_that_close_the_server_do_not_wait_for_each_other(
    context: rp.Context,
) -> None:
    took: list[float] = []
    both = threading.Barrier(2)

    def close(event: connect.Event) -> None:
        if isinstance(event, connect.Arrived):
            both.wait(LIMIT)
            began = time.monotonic()
            server.close()
            took.append(time.monotonic() - began)

    server = connect.serve(context, port=0, timeout=1.0, on_event=close)
    peers = [connect.dial(context, *server.address) for _ in range(2)]
    for peer in peers:
        peer.qp.post_send(rp.Send(peer.mr[:1]))
    until(lambda: len(took) == 2)
    assert max(took) < SOON
    server.close()
    assert not server_threads()
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("closed", [True, False])
def test_the_finalizer_of_a_server_needs_no_globals(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    failed: list[Any] = []
    server = connect.serve(context, port=0)
    if closed:
        server.close()
    warns = contextlib.nullcontext() if closed else pytest.warns(ResourceWarning, match="unclosed")
    with monkeypatch.context() as at_exit, warns:
        at_exit.setattr(sys, "unraisablehook", lambda error: failed.append(error.exc_value))
        # The interpreter clears module globals when it exits.
        for name in ("os", "warnings", "name_of"):
            at_exit.setattr(server_module, name, None)
            at_exit.setattr(threads_module, name, None, raising=False)
        del server
    assert failed == []
    until(lambda: not server_threads())


@pytest.mark.parametrize("started", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_serve_raises_at_once_where_no_more_threads_can_be_started(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, error: Exception, started: int
) -> None:
    start, numbers = _thread.start_new_thread, itertools.count()

    def may_start(*args: Any) -> object:
        if next(numbers) >= started:
            # The traceback must not keep the call, as one of C's does not.
            del args
            raise error
        return start(*args)

    messages: list[str] = []

    def make() -> None:
        try:
            connect.serve(context, port=0)
        except rp.RdmaError as raised:
            messages.append(str(raised))

    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)
    monkeypatch.setattr(_thread, "start_new_thread", may_start)
    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    maker.join(SOON)
    assert not maker.is_alive()
    assert messages[0].startswith("cannot start a thread for the server")


# ---- a connection -------------------------------------------------------------------


@contextlib.contextmanager
def handling(action: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Handle SIGUSR1 with action; yield a function that sends the signal to this thread."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: action())
    ident = threading.get_ident()
    try:
        yield lambda: signal.pthread_kill(ident, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def when_asked(peer: connect.Connection, action: Callable[[], None]) -> threading.Thread:
    """Call action once a request has been sent and its thread waits for the answer."""

    def wait() -> None:
        until(lambda: is_asking(peer) and peer._consistent)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("then", ["returns", "raises"])
def test_a_signal_handler_may_close_the_connection_that_it_interrupts(
    serve: Callable[..., Served], then: str
) -> None:
    served = serve()
    peer = served.dial()
    took: list[float] = []

    def close() -> None:
        began = time.monotonic()
        peer.close()
        took.append(time.monotonic() - began)
        if then == "raises":
            raise Interrupted

    with handling(close) as send:
        helper = when_asked(peer, send)
        if then == "raises":
            with pytest.raises(Interrupted):
                peer.report(1, timeout=30)
        else:
            with pytest.raises(connect.ConnectError, match="closed before the answer came"):
                peer.report(1, timeout=30)
        helper.join(LIMIT)
    assert took[0] < SOON
    assert peer.closed
    assert peer.qp.closed
    assert peer._socket is None
    assert served.until(connect.Left).reason == "done"
    with pytest.raises(connect.ConnectError, match="the connection is closed"):
        peer.look()
    peer.close()


@pytest.mark.parametrize("what", ["look", "close"])
def test_descriptors_stay_open_for_a_thread_that_uses_them(
    serve: Callable[..., Served], what: str
) -> None:
    """Another thread's close() does not wait longer than the timeout for a request to end."""
    served = serve(timeout=1.0)

    def once(nth: int) -> bool:
        peer = served.dial(timeout=2.0)
        peer.timeout = 0.05

        def close_elsewhere() -> None:
            # In another thread: in this one, close() would end the interrupted request.
            sys.settrace(None)
            closer = threading.Thread(target=peer.close)
            closer.start()
            closer.join(LIMIT)
            assert not closer.is_alive()

        with (
            At("/rdmapost/tools/connect/client.py", nth, close_elsewhere) as at,
            contextlib.suppress(connect.ConnectError),
        ):
            if what == "look":
                peer.look(0, 4)
            else:
                peer.close()
        peer.close()
        assert peer._socket is None
        served.until(connect.Left)
        return at.reached

    each_moment_of_a_thread(once, 7)


def test_requests_of_two_threads_take_turns_from_any_moment(serve: Callable[..., Served]) -> None:
    """Answers carry no request number: two requests at once could swap their answers."""
    served = serve(data=b"abcd", timeout=2.0)
    reported: list[object] = []
    with served.dial() as peer:

        def report() -> None:
            # No message has arrived, so the request waits at the server.
            reported.append(peer.report(1, 0.03))

        def once(nth: int) -> bool:
            other = threading.Thread(target=report)

            def begin() -> None:
                other.start()
                other.join(0.01)

            with At("/rdmapost/tools/connect/client.py", nth, begin) as at:
                assert peer.look(0, 4).data == b"abcd"
            if at.reached:
                other.join(LIMIT)
            return at.reached and nth < 150

        each_moment_of_a_thread(once, 2)
    assert set(reported) == {None}


@pytest.mark.parametrize("body_fails", [False, True], ids=["", "body fails"])
def test_interrupt_of_a_close_is_not_replaced_by_an_in_use_error(
    serve: Callable[..., Served], body_fails: bool
) -> None:
    """The caller's queue pair on another PD uses the connection's CQ."""
    served = serve(timeout=1.0)
    with rp.PD(served.context) as pd:

        def once(nth: int) -> bool:
            peer = served.dial(timeout=2.0)
            qp = rp.QP(pd, rp.QPType.RC, peer.cq)
            at, raised = At("/rdmapost/tools/", nth, interrupt), False
            try:
                with at, contextlib.suppress(rp.InUseError, LookupError):
                    if body_fails:
                        with peer:
                            raise LookupError
                    peer.close()
                come_by()
            except Interrupted:
                raised = True
            assert raised == at.reached
            qp.close()
            peer.close()
            served.until(connect.Left)
            return at.reached

        each_moment_of_a_thread(once, 3)


@pytest.mark.parametrize("what", ["look", "report", "closed", "close"])
def test_a_signal_handler_may_close_the_connection_at_any_moment(
    serve: Callable[..., Served], what: str
) -> None:
    served = serve(timeout=1.0)
    actions: dict[str, Callable[[connect.Connection], object]] = {
        "look": lambda peer: peer.look(0, 4),
        "report": lambda peer: peer.report(1, 0.0),
        "closed": lambda peer: peer.closed,
        "close": connect.Connection.close,
    }

    def once(nth: int) -> bool:
        peer = served.dial(timeout=2.0)
        began = time.monotonic()
        with (
            At("/rdmapost/tools/connect/client", nth, peer.close) as at,
            contextlib.suppress(connect.ConnectError),
        ):
            actions[what](peer)
        if at.reached:
            assert peer.closed
            assert peer._socket is None
            assert peer.qp.closed
        peer.close()
        assert time.monotonic() - began < SOON
        served.until(connect.Left)
        return at.reached

    each_moment(once, 3)


def test_a_request_in_a_signal_handler_that_interrupts_a_request_is_refused_at_once(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    messages: list[str] = []

    def ask() -> None:
        try:
            peer.look(0, 4)
        except connect.ConnectError as error:
            messages.append(str(error))
        assert not peer.closed
        # What the interrupted request waits for.
        peer.qp.post_send(rp.Send(peer.mr[:7]))

    with served.dial() as peer, handling(ask) as send:
        helper = when_asked(peer, send)
        arrival = peer.report(1, timeout=30)
        helper.join(LIMIT)
        assert messages == ["this thread is in the middle of another request to the server"]
        assert arrival is not None
        assert arrival.byte_len == 7
        assert peer.look(0, 4).data == bytes(4)


def test_a_request_interrupted_at_any_moment_does_not_block_the_next(
    serve: Callable[..., Served],
) -> None:
    served = serve()

    def once(nth: int) -> bool:
        with served.dial() as peer:
            with (
                At("/rdmapost/tools/connect/client", nth, interrupt) as at,
                contextlib.suppress(Interrupted),
            ):
                peer.look(0, 4)
            answers: list[object] = []

            def ask() -> None:
                try:
                    answers.append(peer.look(0, 4).data)
                except connect.ConnectError as error:
                    answers.append(str(error))

            # In another thread, which does not hold the turn.
            asker = threading.Thread(target=ask)
            asker.start()
            asker.join(LIMIT)
            assert answers[0] in (
                bytes(4),
                "the connection is closed: Interrupted interrupted a request",
            )
        return at.reached

    each_moment_of_a_thread(once, 3)


def test_a_request_interrupted_as_it_gets_its_turn_does_not_block_the_next(
    serve: Callable[..., Served],
) -> None:
    """Even while the caller keeps the exception and its traceback."""

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and getattr(function, "__self__", None) is peer._turns:
            sys.setprofile(None)
            raise Interrupted

    with serve().dial(timeout=1.0) as peer:
        kept: list[BaseException] = []
        sys.setprofile(profile)
        try:
            peer.look(0, 4)
        except Interrupted as error:
            kept.append(error)
        finally:
            sys.setprofile(None)
        assert kept
        answers: list[bytes] = []
        asker = threading.Thread(target=lambda: answers.append(peer.look(0, 4).data))
        asker.start()
        asker.join(LIMIT)
        assert answers == [bytes(4)]


def test_a_request_waits_for_those_of_other_threads_no_longer_than_its_timeout(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    with served.dial() as peer:
        peer.timeout = 0.2
        asker = threading.Thread(target=lambda: peer.report(1, timeout=30))
        asker.start()
        until(lambda: is_asking(peer))
        with pytest.raises(connect.ConnectTimeout, match="other threads' requests"):
            peer.look()
        peer.qp.post_send(rp.Send(peer.mr[:1]))
        asker.join(LIMIT)
        assert peer.look(0, 1).data == b"\0"


def test_a_signal_handler_may_close_a_connection_in_the_middle_of_a_verb(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    peer = served.dial()
    with rp.PD(served.context) as pd:
        began = time.monotonic()
        with At("/rdmapost/providers/", 1, peer.close) as at:
            rp.MR(pd, 64).close()
        assert at.reached
        assert time.monotonic() - began < SOON
    assert peer.qp.closed
    assert served.until(connect.Left).reason == "done"


@pytest.mark.parametrize("raised", [TimeoutError, OSError, StopIteration])
def test_exception_of_a_handler_that_interrupts_dial_propagates_unchanged(
    context: rp.Context, raised: type[Exception]
) -> None:
    """It is not mistaken for the socket's error or the server's answer."""

    def handle(*_: object) -> None:
        raise raised("a handler's")

    before = signal.signal(signal.SIGALRM, handle)
    # The kernel accepts the connection, and nothing answers.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(raised, match="a handler's"):
                connect.dial(context, *mute.getsockname(), timeout=20.0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_dropped_connection_leaves_the_server_although_a_forked_child_has_a_copy(
    context: rp.Context,
) -> None:
    with connect.serve(context, port=0) as server:
        peer = connect.dial(context, *server.address)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        try:
            with pytest.warns(ResourceWarning, match="was not closed"):
                del peer
            until(lambda: not server.clients)
        finally:
            os.close(writing)
            os.close(reading)
            os.waitpid(child, 0)
