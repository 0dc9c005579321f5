"""The thread that processes a device's packets while no other thread does.

Every verb, and so every poll, first receives the packets that have arrived and has the engine
process them. So does a thread that waits for a completion, because the socket is among the
descriptors that it waits on. While no other thread does so, the device's own thread processes
packets.

It sleeps first if another thread waits for completions or events, or has received packets since the
device thread's last turn: the other thread is probably quicker, and two threads that pass the GIL
back and forth are slower than one. It does not sleep if another thread runs Python code all the
time, because getting the GIL back then costs 5 ms (the interpreter's switch interval).
"""

from __future__ import annotations

import _socket
import _thread
import atexit
import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from typing import Any

from ..._binding import native
from .counters import Counted
from .udp_socket import share

_log = logging.getLogger("rdmapost.roce")

_SHORTEST, _LONGEST = 0.0002, 0.002
"""The shortest and the longest sleep that lets other threads go first, in seconds."""
_CONTENDED = 0.001
"""Seconds; getting the GIL back takes longer only if another thread runs Python code."""
_ROUNDS_ALONE = 15
"""The number of rounds without a sleep after it has taken that long to get the GIL back."""
_AFTER_ERROR = 0.1
"""Seconds before the thread tries again."""
_AT_EXIT = 1.0
"""The longest that the process waits for threads when it exits, in seconds."""

_threads: dict[Any, Any] = {}
"""The socket of each device's thread, and a lock that is held until the thread ends."""


def _end_threads() -> None:
    """End the threads: the interpreter would kill them without releasing what they hold."""
    ending = list(_threads.items())
    for stopped, _ in ending:
        # The thread may have ended on its own.
        with contextlib.suppress(OSError):
            stopped.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _AT_EXIT
    for _, running in ending:
        # With a timeout: the thread waits for the device's lock while another thread is in a verb.
        running.acquire(timeout=max(0.0, end - time.monotonic()))


def forget_all() -> None:
    """In the child of a fork, empty the table of threads, which are the parent's."""
    _threads.clear()


os.register_at_fork(after_in_child=forget_all)
atexit.register(_end_threads)


def start(wake_fds: tuple[int, ...], counters: Counted) -> Any:
    """Start a device's thread; return a socket whose shutdown ends the thread.

    A rollback ends the thread, too.

    Args:
        wake_fds: the descriptors that are readable when there is something to do.
        counters: what the device counts.

    Raises:
        OSError: there are too many threads or descriptors.
    """
    watched = select.epoll()
    stop, stopped = _socket.socketpair()
    native.undo(stop.close)
    share(stop)
    for fd in (*wake_fds, stopped.fileno()):
        watched.register(fd, select.EPOLLIN)
    running = threading.Lock()
    running.acquire()
    native.undo(_threads.pop, stopped, None)
    _threads[stopped] = running
    try:
        _thread.start_new_thread(_watch, (watched, counters, stopped, running))
    except RuntimeError:
        # After a MemoryError the thread may be running; it ends when the rollback closes `stop`.
        stopped.close()
        raise OSError(errno.EAGAIN, "pthread_create") from None
    return stop


def _watch(epoll: select.epoll, counters: Counted, stopped: Any, running: Any) -> None:
    """Loop: process packets while no other thread does, until the device is closed."""
    turns: _Turns | None = None
    error: Exception | None = None
    try:
        goes_on = True
        while goes_on:
            # Only closing the device ends the thread; a lack of memory does not.
            try:
                if error is not None:
                    _recover(error)
                    error = None
                turns = turns or _Turns(counters)
                goes_on = _wait_and_look(epoll, stopped.fileno(), turns)
            except Exception as raised:
                error = raised
    finally:
        epoll.close()
        _threads.pop(stopped, None)
        stopped.close()
        running.release()


def _recover(error: Exception) -> None:
    time.sleep(_AFTER_ERROR)
    if not isinstance(error, MemoryError):
        _log.error("the thread of a roce device continues after an error", exc_info=error)


class _Turns:
    """Decides whether the device's thread processes packets now, or lets other threads go first.

    Args:
        counters: the device's counters.
    """

    def __init__(self, counters: Counted) -> None:
        self._counters = counters
        self._received = self._received_so_far()
        self._pause = 0.0
        self._rounds_alone = 0

    def leave_to_others(self) -> bool:
        """Sleep if another thread may be quicker; return whether it slept."""
        if self._rounds_alone:
            self._rounds_alone -= 1
            return False
        if not native.sleeping() and self._received_so_far() == self._received:
            self._pause = 0.0
            return False
        self._pause = min(max(2 * self._pause, _SHORTEST), _LONGEST)
        began = time.monotonic()
        time.sleep(self._pause)
        if time.monotonic() - began > self._pause + _CONTENDED:
            self._rounds_alone = _ROUNDS_ALONE
        return True

    def take(self) -> None:
        """Process packets."""
        native.run_device()
        self._pause, self._received = 0.0, self._received_so_far()

    def _received_so_far(self) -> tuple[int, int] | None:
        # The attribute is missing if opening the device failed and a rollback has removed it.
        return getattr(self._counters, "received", None)


def _wait_and_look(epoll: select.epoll, stop_fd: int, turns: _Turns) -> bool:
    """Wait until there is something to do, and do it unless another thread does.

    Returns:
        Whether the device is still open.
    """
    found = epoll.poll()
    if not _is_stopped(found, stop_fd) and turns.leave_to_others():
        found = epoll.poll(0)
    if _is_stopped(found, stop_fd):
        return False
    if found:
        turns.take()
    return True


def _is_stopped(events: list[tuple[int, int]], stop_fd: int) -> bool:
    return stop_fd in [fd for fd, _ in events]
