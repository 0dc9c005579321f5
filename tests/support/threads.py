"""A thread beside a test."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rdmapost as rp
from support import LIMIT


@contextlib.contextmanager
def thread(target: Callable[[], object], limit: float = LIMIT) -> Iterator[list[BaseException]]:
    """Run a function in a thread while the block runs; the list holds what it raised.

    Args:
        target: the function.
        limit: seconds after the block within which it must end.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:
            raised.append(error)

    beside = threading.Thread(target=run, daemon=True)
    beside.start()
    yield raised
    beside.join(limit)
    assert not beside.is_alive(), "the thread has not ended"


@contextlib.contextmanager
def repeating(call: Callable[[], object], limit: float = LIMIT) -> Iterator[list[BaseException]]:
    """Repeat a call in a thread, at least once before the block, until it raises; see thread()."""
    called = threading.Event()

    def repeat() -> None:
        while True:
            call()
            called.set()

    with thread(repeat, limit) as raised:
        assert called.wait(limit)
        yield raised


@contextlib.contextmanager
def posting(qp: rp.QP, mr: rp.MR) -> Iterator[list[BaseException]]:
    """Post receives in a thread, from the start of the block until one is refused; see thread().

    Both threads run in turns that are as short as possible.

    Args:
        qp: a queue pair; full queues are waited for.
        mr: the receives' memory.
    """

    def post() -> None:
        try:
            qp.post_recv(rp.RecvWR(mr[:8]))
        except rp.PostError as error:
            if error.errno != errno.ENOMEM:
                raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with repeating(post) as raised:
            yield raised
    finally:
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def stopped(
    target: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    verb: str,
    *,
    after: bool = False,
) -> Iterator[list[BaseException]]:
    """Run a function in a thread that stops at a verb while the block runs; see thread().

    Args:
        target: the function.
        monkeypatch: pytest's.
        owner, verb: the verb, a method; the main thread does not stop at it.
        after: stop when the verb has been carried out, instead of before.
    """
    call = getattr(owner, verb)
    reached, continues = threading.Event(), threading.Event()

    def stop(*args: Any) -> Any:
        result = call(*args) if after else None
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert continues.wait(LIMIT)
        return result if after else call(*args)

    monkeypatch.setattr(owner, verb, stop)
    with thread(target) as raised:
        try:
            assert reached.wait(LIMIT)
            yield raised
        finally:
            continues.set()
