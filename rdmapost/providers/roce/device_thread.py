"""The thread that processes a device's packets while no other thread does.

Every verb, and so every poll, first receives the packets that have arrived and has the engine
process them. So does a thread that waits for a completion, because the socket is among the
descriptors that it waits for. While no thread does either, the device's own thread looks for
packets. It sleeps first if another thread may be quicker, because two threads that take turns with
the GIL are slower than one. It does not sleep for a while if no other thread came during a sleep,
or if another thread runs Python code all the time: then taking the GIL again costs 5 ms (the
interpreter's switch interval).
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
from .udp_socket import share

_log = logging.getLogger("rdmapost.roce")

_SHORTEST, _LONGEST = 0.0002, 0.002
"""The shortest and the longest sleep in which other threads may be quicker, in seconds."""
_CONTENDED = 0.001
"""Seconds; taking the GIL again takes longer only if another thread runs Python code."""
_ROUNDS_LEFT_OUT = 15
"""The number of rounds without a pause, after one in which no other thread came or after taking
the GIL again took long. That is not timed in them: timing it means taking the GIL once more."""
_AFTER_ERROR = 0.1
"""Seconds before the thread tries again."""
_AT_EXIT = 1.0
"""The longest that the exit of the process waits for threads, in seconds."""

_threads: dict[Any, Any] = {}
"""The socket of each device's thread, and a lock that is held until the thread ends."""


def _end_threads() -> None:
    """End the threads: the interpreter would kill them without releasing what they hold."""
    ending = list(_threads.items())
    for stopped, _ in ending:
        # It may have ended by itself.
        with contextlib.suppress(OSError):
            stopped.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _AT_EXIT
    for _, running in ending:
        # A thread waits for the device's lock if another one stays in a verb.
        running.acquire(timeout=max(0.0, end - time.monotonic()))


def forget_all() -> None:
    """In the child of a fork, forget the threads, which are the parent's."""
    _threads.clear()


os.register_at_fork(after_in_child=forget_all)
atexit.register(_end_threads)


def start(wake_fds: tuple[int, ...]) -> Any:
    """Start a device's thread; return a socket whose shutdown ends the thread.

    A rollback ends the thread, too.

    Args:
        wake_fds: the descriptors that are readable when there is something to do.

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
        _thread.start_new_thread(_watch, (watched, stopped, running))
    except RuntimeError:
        # After a MemoryError the thread may run: it ends when the rollback closes `stop`.
        stopped.close()
        raise OSError(errno.EAGAIN, "pthread_create") from None
    return stop


def _watch(epoll: select.epoll, stopped: Any, running: Any) -> None:
    """Process packets while no other thread does, until the device is closed: the thread's loop."""
    pauses = _Pauses()
    error: Exception | None = None
    try:
        goes_on = True
        while goes_on:
            # Only the end of the device ends the thread; a lack of memory does not.
            try:
                if error is not None:
                    _recover(error)
                    error = None
                goes_on = _wait_and_look(epoll, stopped.fileno(), pauses)
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
        _log.error("the thread of a roce device goes on after an error", exc_info=error)


class _Pauses:
    """How long the thread leaves packets to other threads."""

    def __init__(self) -> None:
        self.length = 0.0
        self._left_out = 0

    def after_others(self) -> None:
        """Sleep longer: another thread was quicker, and probably will be again."""
        self.length = min(2 * self.length, _LONGEST)

    def sleep(self) -> None:
        """Pause; if taking the GIL again took long, leave out the next pauses."""
        began = time.monotonic()
        time.sleep(self.length)
        if time.monotonic() - began > self.length + _CONTENDED:
            self.leave_out()

    def after_work(self, epoll: select.epoll) -> None:
        """Make the next pause short, or none: no other thread was quicker."""
        if self._left_out:
            self._left_out -= 1
            return
        began = time.monotonic()
        found = epoll.poll(0)
        self.length = 0.0 if found else _SHORTEST
        if time.monotonic() - began > _CONTENDED:
            self.leave_out()

    def leave_out(self) -> None:
        """Make no pause in the next rounds."""
        self.length, self._left_out = 0.0, _ROUNDS_LEFT_OUT


def _wait_and_look(epoll: select.epoll, stop_fd: int, pauses: _Pauses) -> bool:
    """Wait until there is something to do, pause, and do it unless another thread has done it.

    Returns:
        Whether the device is still open.
    """
    if _is_stopped(epoll.poll(), stop_fd):
        return False
    if pauses.length:
        pauses.sleep()
        found = epoll.poll(0)
        if _is_stopped(found, stop_fd):
            return False
        if not found:
            pauses.after_others()
            return True
        pauses.leave_out()
    native.run_device()
    pauses.after_work(epoll)
    return True


def _is_stopped(events: list[tuple[int, int]], stop_fd: int) -> bool:
    return stop_fd in [fd for fd, _ in events]
