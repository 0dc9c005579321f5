"""The threads of a server: one accepts connections, and one talks to each client."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..._binding import native
from ...errors import ClosedError, RdmaError, suppress_system_errors
from ...resources.device import Context
from ...resources.pd import PD
from ..tcp import cannot_listen, drain, name_of, prepare, send_all, stop_listening, unshare
from .acceptor import MEMORY_S, Acceptor
from .errors import from_tcp
from .protocol_messages import MAX_LINE
from .server_session import ServerSession
from .server_state import ServerState
from .wakeup import Wakeup

_log = logging.getLogger("rdmapost.connect")

_MAX_LEAVING = 64
"""Threads for connections beyond max_clients, which are being refused or are leaving."""
_SHUTDOWN_S = 10.0
_THREAD_END_S = 1.0
_LOOK_S = 0.05
"""How often a wait for a thread checks that the thread still exists."""


class _DeviceHold(PD):
    """Keeps a device open while a server uses it, with or without clients."""

    __slots__ = ("_server", "_threads")

    def __init__(self, context: Context, threads: ServerThreads) -> None:
        self._server = str(threads)
        self._threads = weakref.ref(threads)
        super().__init__(context)

    def __str__(self) -> str:
        return f"server {self._server}"

    def _end_user(self) -> None:
        if (threads := self._threads()) is not None:
            threads.close()


class _ReentrantEvent:
    """An event for which a signal handler may wait, even while it interrupts another wait.

    It has no lock that the thread could be holding when the handler runs.
    """

    def __init__(self) -> None:
        self._happened = False
        self._waiters: list[_thread.LockType] = []

    def set(self) -> None:
        """Release all waiters; called in a thread that runs no signal handlers."""
        self._happened = True
        with suppress(IndexError):
            while True:
                self._waiters.pop().release()

    def wait(self, timeout: float, may_happen: Callable[[], bool]) -> bool:
        """Wait while the event may still happen, and return whether it has."""
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiters.append(mine)
        end = time.monotonic() + timeout
        # Test the flag after the append: set() sets the flag before it takes the waiters.
        while not self._happened:
            left = end - time.monotonic()
            if left <= 0 or not may_happen():
                break
            mine.acquire(timeout=min(left, _LOOK_S))
        with suppress(ValueError):
            self._waiters.remove(mine)
        return self._happened


class ServerThread:
    """A thread that may die at any point, for lack of memory, without notifying its waiters.

    threading.Thread.start() waits forever for a thread that dies before it begins. Here, waiters
    call exists(), which tests a weak reference to the call that only the running thread holds.
    """

    def __init__(self) -> None:
        self._call: weakref.ref[Any] | None = None
        self._id = self._pid = 0
        self._began, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        """The thread releases them to wake waiters, which then check has_begun or exists()."""
        self._began.acquire()
        self._ended.acquire()
        self.has_begun = False

    def start(self, function: Callable[..., None], *args: object) -> None:
        """Start the thread, which calls `function(self, *args)`."""
        self._pid = os.getpid()
        # Only the thread may refer to the call: a traceback would keep what this frame refers to.
        # If a signal handler raises once the thread has started, exists() must say so.
        calls = [partial(self._run, function, *args)]
        try:
            self._call = weakref.ref(calls[0])
            _thread.start_new_thread(calls.pop(), ())
        finally:
            calls.clear()

    def begin(self) -> None:
        """Called by the thread: from here on it cleans up after itself."""
        self.has_begun = True
        self._began.release()

    def exists(self) -> bool:
        # In a forked child the call is alive, but the thread does not exist.
        here = self._pid == os.getpid()
        return here and self._call is not None and self._call() is not None

    def is_this(self) -> bool:
        """Whether the calling thread is this one."""
        return self._id == _thread.get_ident() and self.exists()

    def wait_until_begun(self) -> bool:
        """Wait for the thread to call begin(); return whether it has."""
        while not self.has_begun and self.exists():
            self._began.acquire(timeout=_LOOK_S)
        return self.has_begun

    def join(self, timeout: float = float("inf")) -> None:
        end = time.monotonic() + timeout
        returning = False
        while self.exists() and (left := end - time.monotonic()) > 0:
            if returning:
                time.sleep(0)
            elif self._ended.acquire(timeout=min(left, _LOOK_S)):
                self._ended.release()
                # Not for ever: an exception hook may keep the call.
                returning, end = True, min(end, time.monotonic() + _THREAD_END_S)

    def _run(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._id = _thread.get_ident()
            function(self, *args)
        finally:
            self._ended.release()


class ServerThreads:
    """The parts of a server: an acceptor, a thread for each client, and all that they use.

    The threads refer to this, never to the Server, so that an unreachable Server is finalized, and
    ends them. Cleanup runs in threads other than the main one, so that no signal handler can
    interrupt it.

    Args:
        server: the server's settings and its clients.
        listener: a listening socket; closed at the end.
        before_end: close() calls this first, so that no thread waits for the thread that calls
            close().
    """

    # At the interpreter's exit finalizers may find no globals.
    _suppress_errors, _shut_rdwr = suppress_system_errors, socket.SHUT_RDWR

    def __init__(
        self, server: ServerState, listener: socket.socket, before_end: Callable[[], None]
    ) -> None:
        self.server = server
        self._before_end = before_end
        self.pid = os.getpid()
        self.ended = False
        self._name = name_of(listener.getsockname())
        self._listener = listener
        self._stop: socket.socket
        self._lifeline: weakref.ref[socket.socket] | None = None
        # Changed only by single C calls, so it needs no lock.
        self._clients: set[ServerThread] = set()
        self._starter, self._acceptor = ServerThread(), ServerThread()
        self._tried = _ReentrantEvent()
        self._started = False
        # Its holder starts the server, or prevents the start.
        self._start_once = _thread.allocate_lock()
        self._start_error: Exception | None = None
        self._finished = _ReentrantEvent()
        self._device_hold = _DeviceHold(server.context, self)

    def __str__(self) -> str:
        return self._name

    def start(self, lifeline: list[socket.socket]) -> None:
        """Start the threads.

        Args:
            lifeline: a list that the Server owns. One socket of a pair is added to it, and
                nothing else may hold a reference to that socket. The threads end when the socket
                is shut down, or when the interpreter closes it because the Server is gone; so they
                end even if a signal handler interrupts the finalizer.
        """
        # Start them in another thread, which no signal handler interrupts.
        try:
            self._starter.start(self._start_threads, lifeline)
        except (RuntimeError, MemoryError) as error:
            self._start_error = error
            self._release()
        else:
            self._tried.wait(float("inf"), self._starter.exists)
        if not self._started:
            # If the thread could not even record an error, it had no memory.
            why = self._start_error or MemoryError()
            if isinstance(why, OSError):
                raise from_tcp(cannot_listen(self._name, why)) from why
            if isinstance(why, ClosedError):
                raise why
            text = str(why) or type(why).__name__
            raise RdmaError(f"cannot start a thread for the server: {text}")

    def _start_threads(self, _: ServerThread, lifeline: list[socket.socket]) -> None:
        acceptor: Acceptor | None = None
        try:
            if not self._start_once.acquire(blocking=False):
                return
            self._stop, end = socket.socketpair()
            unshare(self._stop)
            unshare(end)
            self._lifeline = weakref.ref(end)
            lifeline.append(end)
            del end
            # Set _lifeline before reading `ended`: end() sets `ended` before reading _lifeline.
            if self.ended:
                self.end()
            _running.add(self)
            # Create this here, not in the thread: it fails if descriptors run out.
            acceptor = Acceptor(
                self.server, self._listener, self._stop.fileno(), self._start_client
            )
            self._acceptor.start(self._accept, acceptor)
            if not self._acceptor.wait_until_begun():
                raise MemoryError
            self._started = True
        except Exception as error:
            self._start_error = error
            if self._acceptor.exists():
                # The acceptor's thread uses the descriptors, and closes them when it ends.
                self.end()
            else:
                if acceptor is not None:
                    acceptor.close()
                self._release()
        finally:
            self._tried.set()

    def _accept(self, this: ServerThread, acceptor: Acceptor) -> None:
        try:
            this.begin()
            try:
                acceptor.run()
            finally:
                # No new clients from here on.
                stop_listening(self._listener)
                with suppress(OSError):
                    self._stop.shutdown(socket.SHUT_RDWR)
                for thread in self._clients.copy():
                    thread.join()
        finally:
            # No other thread releases these resources. The loop is not in a function, because even
            # a call may fail for lack of memory.
            while True:
                try:
                    self._release()
                    break
                except (MemoryError, SystemError):
                    time.sleep(MEMORY_S)

    def _release(self) -> None:
        # The acceptor may have failed without setting this.
        self.ended = True
        _running.discard(self)
        stop_listening(self._listener)
        if hasattr(self, "_stop"):
            self._stop.close()
        # The garbage collector may finalize the lifeline before the Server, with a ResourceWarning.
        if self._lifeline is not None and (lifeline := self._lifeline()) is not None:
            with suppress(OSError):
                lifeline.close()
        self.server.release_rest()
        with suppress(RdmaError):
            self._device_hold.close()
        self._finished.set()

    def end(self) -> None:
        """Signal the threads to end, without waiting; callable from a finalizer.

        If interrupted at any point, it can be called again.
        """
        self.ended = True
        if self._lifeline is not None and (lifeline := self._lifeline()) is not None:
            with self._suppress_errors:
                lifeline.shutdown(self._shut_rdwr)

    def abandon(self) -> None:
        """Clean up after an interrupted or failed start().

        Wait a limited time for the threads to end; in the middle of a verb, do not wait.
        """
        self.end()
        if self._start_once.acquire(blocking=False):
            self._release()
        elif not native.in_verb():
            self._wait_until_finished(_SHUTDOWN_S)

    def close(self) -> None:
        """End the threads, and wait until the clients' resources are released.

        If called in one of the threads, or in the middle of a verb, do not wait: the threads may be
        waiting for that verb to end.
        """
        if self.pid != os.getpid():
            # These threads are the parent's.
            return
        self._before_end()
        self.end()
        acceptor, own = self._acceptor, (self._acceptor, *self._clients)
        if native.in_verb() or any([one.is_this() for one in own]):
            return
        # Not join(): on Python 3.11 and 3.12 it holds a lock that a handler would block on.
        if self._wait_until_finished(self.server.timeout + _SHUTDOWN_S):
            # The thread is about to end; wait briefly, because this may be a signal handler.
            acceptor.join(_THREAD_END_S)

    def _wait_until_finished(self, timeout: float) -> bool:
        """Wait; if the threads died before they released everything, release the rest here."""
        if self._finished.wait(timeout, self._exists):
            return True
        if self._exists():
            return False
        if self._start_once.acquire(blocking=False):
            # A signal handler is closing the server before its threads have been started.
            self._start_error = ClosedError("the server was closed before it had started")
        elif self._exists():
            # The threads were started in the meantime, and release everything themselves.
            return self._finished.wait(timeout, self._exists)
        self._release()
        return True

    def _exists(self) -> bool:
        return self._starter.exists() or self._acceptor.exists()

    # ---- a client ---------------------------------------------------------------

    def _start_client(self, sock: socket.socket, session: ServerSession) -> bool:
        # Not removed by the thread itself: close() waits until it has ended.
        for thread in self._clients.copy():
            if not thread.exists():
                self._clients.discard(thread)
        if len(self._clients) >= self.server.max_clients + _MAX_LEAVING:
            return False
        thread = ServerThread()
        self._clients.add(thread)
        try:
            thread.start(self._serve_client, sock, session)
        except (RuntimeError, MemoryError):
            self._clients.discard(thread)
            return False
        return thread.wait_until_begun()

    def _serve_client(
        self, this: ServerThread, sock: socket.socket, session: ServerSession
    ) -> None:
        try:
            this.begin()
            with sock:
                prepare(sock)
                try:
                    self._run_session(sock, session)
                finally:
                    # As in _accept, no other thread releases these resources.
                    while True:
                        try:
                            session.close()
                            break
                        except (MemoryError, SystemError):
                            time.sleep(MEMORY_S)
                drain(sock)
        except Exception:
            _log.exception("a client's thread failed")

    def _run_session(self, sock: socket.socket, session: ServerSession) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        poller.register(sock, select.POLLIN)
        channel_fd = -1
        wakeup: Wakeup | None = None
        # The hello has arrived, and maybe more.
        answer = session.feed()
        while True:
            answer += session.tick()
            try:
                send_all(sock, answer, self.server.timeout)
            except OSError as error:
                session.lost(error)
            if session.over:
                return
            if wakeup is None and (wakeup := session.wakeup) is not None:
                poller.register(wakeup.fd, select.POLLIN)
            if channel_fd < 0 and session.channel is not None:
                try:
                    channel_fd = session.channel.fileno()
                except ClosedError:
                    answer = b""
                    continue  # another thread closed the client; tick ends the session
                poller.register(channel_fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(_milliseconds(session.deadline))}
            answer = b""
            if self._stop.fileno() in ready:
                answer = session.end()
            if not session.over and channel_fd in ready:
                answer += session.completions()
            if not session.over and sock.fileno() in ready:
                try:
                    data = sock.recv(MAX_LINE)
                except BlockingIOError:
                    pass
                except OSError as error:
                    session.lost(error)
                    return
                else:
                    if not data:
                        session.lost()
                        return
                    answer += session.feed(data)


_running: set[ServerThreads] = set()


@atexit.register
def _end_all() -> None:
    """Close the queue pairs before the devices, however the process ends."""
    for threads in _running.copy():
        threads.close()


def _milliseconds(deadline: float | None) -> float | None:
    # Rounded up, so that the last millisecond is not a busy wait; limited, because poll(2) takes an
    # int.
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    return 0.0 if deadline == 0.0 or left <= 0 else min(left, 3600.0) * 1000 + 1
