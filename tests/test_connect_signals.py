"""Servers and connections under signal handlers that raise, close and ask, at chosen moments."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from support import LIMIT, until

import rdmapost as rp
from rdmapost import connect
from rdmapost.connect import server as module

SOON = 5.0
"""Seconds; what waits in vain for the server waits more than 10."""


@pytest.fixture
def context() -> Iterator[rp.Context]:
    with rp.open_device("soft0") as opened:
        yield opened


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Have a test fail that would wait for ever."""

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
    """Does something before the nth bytecode that this thread runs of some files.

    That is what a signal handler may do, but the moment is known.
    """

    def __init__(self, files: str, nth: int, action: Callable[[], object]) -> None:
        self._files, self._left, self._action = files, nth, action

    @property
    def reached(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> At:
        self._before = sys.gettrace()
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


def server_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("serve ")]


def each_moment(once: Callable[[int], bool], step: int = 1) -> None:
    """Call it with 1, 2, 3, ... until it returns that there is no such moment."""
    nth = 1
    while once(nth):
        nth += step
    assert nth > 20 * step


# ---- a server -----------------------------------------------------------------------


def test_close_interrupted_at_any_moment_can_be_called_again(context: rp.Context) -> None:
    def once(nth: int) -> bool:
        server = connect.serve(context, port=0)
        with At("/connect/", nth, interrupt) as at, contextlib.suppress(Interrupted):
            server.close()
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < SOON
        assert not server_threads()
        return at.reached

    each_moment(once)


@pytest.mark.parametrize("finalizer", ["whole", "interrupted"])
def test_a_server_whose_close_was_interrupted_ends_when_nobody_can_reach_it(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, finalizer: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)

    def once(nth: int) -> bool:
        server = connect.serve(context, port=0)
        with At("/connect/", nth, interrupt) as at, contextlib.suppress(Interrupted):
            server.close()
        if finalizer == "whole":
            del server
        else:
            with At("/connect/", 1, interrupt):
                del server
        until(lambda: not server_threads())
        return at.reached

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        each_moment(once)
    context.close()


def test_a_server_ends_whatever_moment_of_its_finalizer_is_interrupted(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)

    def once(nth: int) -> bool:
        server = connect.serve(context, port=0)
        with At("/connect/", nth, interrupt) as at:
            del server
        until(lambda: not server_threads())
        return at.reached

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        each_moment(once)
    context.close()


def test_a_signal_handler_may_close_a_server_at_any_moment_of_its_close(
    context: rp.Context,
) -> None:
    def once(nth: int) -> bool:
        server = connect.serve(context, port=0, timeout=1.0)
        began = time.monotonic()
        with At("/connect/", nth, server.close) as at:
            server.close()
        assert time.monotonic() - began < SOON
        assert not server_threads()
        return at.reached

    each_moment(once)


def test_a_signal_handler_may_close_a_server_in_the_middle_of_a_verb(
    context: rp.Context,
) -> None:
    server = connect.serve(context, port=0, timeout=1.0)
    peer = connect.dial(context, *server.address)
    pd = rp.PD(context)
    began = time.monotonic()
    # The device holds its lock there.
    with At("/rdmapost/soft/", 1, server.close) as at:
        rp.MR(pd, 64).close()
    assert at.reached
    assert time.monotonic() - began < SOON
    until(lambda: not server_threads())
    assert not server.clients
    with pytest.raises(connect.ConnectError, match="the server ends"):
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
        # The interpreter's exit takes them away, and so do these.
        for name in ("os", "warnings", "show_address"):
            at_exit.setattr(module, name, None)
        del server
    assert failed == []
    until(lambda: not server_threads())


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_serve_raises_where_no_thread_can_be_started(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Unstartable(threading.Thread):
        def start(self) -> None:
            raise error

    said: list[str] = []

    def make() -> None:
        try:
            connect.serve(context, port=0)
        except RuntimeError as raised:
            said.append(str(raised))

    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)
    monkeypatch.setattr(module, "threading", SimpleNamespace(Thread=Unstartable))
    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    maker.join(SOON)
    assert not maker.is_alive()
    assert said[0].startswith("cannot start a thread for the server")
