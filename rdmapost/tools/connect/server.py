"""The server with a thread for each client."""

from __future__ import annotations

import _thread
import atexit
import errno
import logging
import mmap
import os
import select
import socket
import threading
import time
import warnings
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from ..._arguments import content, counted, expect, flags, within
from ..._binding import native
from ...enums import Access
from ...errors import RdmaError
from ...resources.address import choose_gid
from ...resources.device import Context
from ...resources.memory import PD
from .acceptor import BACKLOG, Acceptor
from .address import DEFAULT_PORT, check_where, is_loopback, resolve, show_address
from .conversation import Conversation, Reception
from .errors import ConnectError
from .events import OnEvent
from .exposure import EXPOSABLE, Exposure, ServedClient
from .messages import MAX_LINE
from .sockets import NotCopied, drain, errno_of, prepare, refuse_inherited, send_all, stop_listening

__all__ = ["Server", "Serving", "make_exposure", "open_listener", "serve"]

_log = logging.getLogger("rdmapost.tools.connect")

_MAX_LEAVING = 64
"""Threads for connections beyond max_clients, which are being refused or are leaving."""
_MAX_COUNT = 1 << 14
_RECEIVE_SIZE = 1 << 16
_LAST_MOMENT_S = 10.0
_THREAD_END_S = 1.0


def serve(
    context: Context,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    size: int = 4096,
    access: int | None = None,
    count: int = 16,
    receive_size: int | None = None,
    data: bytes = b"",
    shared: bool = False,
    token: str | None = None,
    max_clients: int = 16,
    timeout: float = 5.0,
    idle_timeout: float | None = None,
    port_num: int = 1,
    gid_index: int | None = None,
    on_event: OnEvent | None = None,
) -> Server:
    """Let others connect queue pairs to this device and access its exposed memory.

    It listens on TCP.  Each client that follows the protocol gets a connected queue
    pair, memory, and posted receives, all in a separate protection domain, until it
    leaves.

    Args:
        context: an open device; it cannot be closed before the server.
        host: address to listen on; "0.0.0.0" or "::" for all.  Nothing is
            encrypted: expose it only to a network that may see all traffic, the
            token included.
        port: TCP port; 0 chooses one.
        size: bytes of memory that each client can reach, 1..2^40.
        access: remote access rights granted to each client: REMOTE_READ, REMOTE_WRITE and
            REMOTE_ATOMIC; by default all that the device supports.
        count: receives posted for each client, 0..16384; a used one is posted again.
        receive_size: bytes of message that each takes; size, at most 64 KiB, unless given.
        data: the initial contents of the memory, bytes or another buffer; zeros follow.
        shared: one memory for all clients, instead of one for each.
        token: what a client must know, up to 256 characters; None admits everyone.
            Use a random one: 64 wrong ones a second are checked, 32 from one address.
        max_clients: how many at once.
        timeout: seconds for each step of the exchange; the hello has 5 at most.
        idle_timeout: drop a client that has made no request and sent no message for this
            many seconds, even if its connection is alive.  The server cannot see RDMA
            reads, writes and atomics: keep None, no limit, for clients that do nothing
            else.  Without it a client stays as long as its TCP connection; a host that
            disappears is detected within half a minute.
        port_num, gid_index: port and GID of the queue pairs, as in QP.
        on_event: called with each event (Joined, Arrived, Left, Refused), in the thread of the
            client concerned, or in the one that accepts connections; it must be quick. What it
            raises, SystemExit included, is logged, and the server continues.

    Returns:
        The running server; a context manager.  If it becomes unreachable it ends,
        with a ResourceWarning.

    If a signal handler's exception interrupts the start of the server, what was begun is ended
    first. If it comes as serve() returns, the server is unreachable: it ends, and its device can be
    closed, a moment after the exception has been handled.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range.
        RdmaError: the port has no such GID, or the device has no atomics and they are
            asked for.
        ConnectError: there is no such host; or the address cannot be listened on: it is in
            use (errno EADDRINUSE), not this machine's (EADDRNOTAVAIL), not permitted
            (EACCES), or the process has no file descriptors left (EMFILE).
        ConnectTimeout: the name service did not answer within 5 s.
        VerbsError: the device refused.
        RuntimeError: no thread can be started.
    """
    port = check_where(host, port, 0)
    exposure = make_exposure(
        context,
        size=size,
        access=access,
        count=count,
        receive_size=receive_size,
        data=data,
        shared=shared,
        port_num=port_num,
        gid_index=gid_index,
    )
    reception = Reception(
        context,
        exposure,
        token=token,
        max_clients=max_clients,
        timeout=timeout,
        idle_timeout=idle_timeout,
        on_event=on_event,
    )
    return Server(reception, open_listener(host, port))


def make_exposure(
    context: Context,
    *,
    size: int,
    access: int | None,
    count: int,
    receive_size: int | None,
    data: bytes,
    shared: bool,
    port_num: int,
    gid_index: int | None,
) -> Exposure:
    """Check what will be exposed; the arguments are serve()'s."""
    expect("context", context, Context)
    size = within("size", size, 1, 1 << 40)
    count = within("count", count, 0, _MAX_COUNT)
    if receive_size is None:
        receive_size = min(size, _RECEIVE_SIZE)
    receive_size = within("receive_size", receive_size, 0, 1 << 31)
    data = content("data", data)
    if len(data) > size:
        raise ValueError(f"data: {counted(len(data), 'byte')} do not fit into size={size}")
    has_atomics = bool(context.attr.atomic_cap)
    if access is None:
        access = EXPOSABLE if has_atomics else EXPOSABLE & ~Access.REMOTE_ATOMIC
    access = flags("access", access, EXPOSABLE, "REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC")
    if access & Access.REMOTE_ATOMIC and not has_atomics:
        raise RdmaError(f"{context.name} has no atomics (atomic_cap is NONE)")
    # Report what is wrong with these now, not to the first client.
    choose_gid(context, port_num, gid_index)
    if count > context.attr.max_qp_wr:
        raise ValueError(f"count={count} is more than max_qp_wr={context.attr.max_qp_wr}")
    memory = None
    if shared:
        memory = mmap.mmap(-1, size)
        memory[: len(data)] = data
    return Exposure(size, access, count, receive_size, data, memory, port_num, gid_index)


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ConnectError: there is no such host, or the address cannot be listened on; the text names
            it, and errno is the operating system's.
    """
    family, kind, proto, _, address = resolve(host, port, 5.0)[0]
    listener = None
    try:
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException as error:
        if listener is not None:
            listener.close()
        if not isinstance(error, OSError):
            raise
        raise _not_listening(show_address(address), error) from error
    return listener


def _not_listening(where: str, error: OSError) -> ConnectError:
    remedy = ""
    if error.errno == errno.EADDRINUSE:
        remedy = "; give another port, or 0 for a free one"
    return ConnectError(
        f"cannot listen on {where}: {error.strerror or error}{remedy}",
        "unreachable",
        errno_of(error),
    )


class _AtWork(PD):
    """Keeps a device open while a server uses it, with or without clients."""

    __slots__ = ("_server",)

    def __init__(self, context: Context, server: str) -> None:
        self._server = server
        super().__init__(context)

    def __str__(self) -> str:
        return f"server {self._server}"


class _Event:
    """An event that a thread can wait for, and so can a signal handler in the middle of that wait.

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

    def wait(self, timeout: float) -> bool:
        """Wait, and return whether it has happened."""
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiters.append(mine)
        # After the append: set() does these in the other order.
        return self._happened or mine.acquire(timeout=timeout)


class _Threads:
    """The parts of a server: an acceptor, a thread for each client, and all that they use.

    The threads refer to this, never to the Server, so that an unreachable Server is finalized, and
    ends them. Cleanup runs in threads other than the main one, so that no signal handler can
    interrupt it.

    Args:
        reception: the server's.
        listener: a listening socket.
    """

    # At the interpreter's exit finalizers may find no globals.
    _suppress, _both_ways = suppress, socket.SHUT_RDWR

    def __init__(self, reception: Reception, listener: socket.socket) -> None:
        self.reception = reception
        self.address: tuple[Any, ...] = listener.getsockname()
        self.pid = os.getpid()
        self.ended = False
        self._name = show_address(self.address)
        self._listener = listener
        self._stop: socket.socket
        self._lifeline: weakref.ref[socket.socket] | None = None
        # Changed only by single C calls, so it needs no lock.
        self._clients: set[threading.Thread] = set()
        self._acceptor: threading.Thread | None = None
        self._started = False
        # Its holder starts the server, or prevents the start.
        self._first = _thread.allocate_lock()
        self._why: Exception | None = None
        self._over = _Event()
        self._at_work = _AtWork(reception.context, self._name)

    def __str__(self) -> str:
        return self._name

    def start(self, lifeline: list[socket.socket]) -> None:
        """Start the threads.

        Args:
            lifeline: where to put one end of a socket pair, which only the Server keeps. The
                threads end when that is shut down, or when C closes it because the Server is gone,
                even if a signal handler interrupts the finalizer.
        """
        # Thread.start() waits, and what a signal handler raises there may be lost; so another
        # thread does that.
        begun = _thread.allocate_lock()
        begun.acquire()
        try:
            _thread.start_new_thread(self._begin, (begun, lifeline))
        except (RuntimeError, MemoryError) as error:
            self._why = error
            self._give_back()
        else:
            begun.acquire()
        if not self._started:
            why = self._why
            if isinstance(why, OSError):
                raise _not_listening(self._name, why) from why
            text = str(why) or type(why).__name__
            raise RuntimeError(f"cannot start a thread for the server: {text}")

    def _begin(self, begun: _thread.LockType, lifeline: list[socket.socket]) -> None:
        acceptor: Acceptor | None = None
        try:
            if not self._first.acquire(blocking=False):
                return
            self._stop, end = socket.socketpair()
            self._lifeline = weakref.ref(end)
            lifeline.append(end)
            del end
            # In this order: end() does these in the other order.
            if self.ended:
                self.end()
            _running.add(self)
            # Here, not in the thread: for lack of descriptors it cannot be made.
            acceptor = Acceptor(
                self.reception, self._listener, self._stop.fileno(), self._start_client
            )
            self._acceptor = threading.Thread(
                target=self.run, args=(acceptor,), name=f"serve {self}", daemon=True
            )
            self._acceptor.start()
            self._started = True
        except Exception as error:
            self._why = error
            if acceptor is not None:
                acceptor.close()
            self._give_back()
        finally:
            begun.release()

    def run(self, acceptor: Acceptor) -> None:
        try:
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
            self._give_back()

    def _give_back(self) -> None:
        try:
            _running.discard(self)
            stop_listening(self._listener)
            if hasattr(self, "_stop"):
                self._stop.close()
            with suppress(RdmaError):
                self._at_work.close()
        finally:
            self._over.set()

    def end(self) -> None:
        """Tell the threads to end, without waiting; callable from a finalizer.

        If interrupted at any point, it can be called again.
        """
        self.ended = True
        if self._lifeline is not None and (lifeline := self._lifeline()) is not None:
            with self._suppress(OSError):
                lifeline.shutdown(self._both_ways)

    def abandon(self) -> None:
        """End what an interrupted or failed start() has begun.

        Wait until it has ended, but not for ever, and not in the middle of a verb.
        """
        self.end()
        if self._first.acquire(blocking=False):
            self._give_back()
        elif not native.in_verb():
            self._over.wait(_LAST_MOMENT_S)

    def close(self) -> None:
        """End the threads, and wait until what the clients had is released.

        Do not wait in one of the threads, or in the middle of a verb, whose end the threads may be
        waiting for.
        """
        if self.pid != os.getpid():
            # These are the parent's; a child has none.
            return
        self.end()
        this, acceptor = threading.current_thread(), self._acceptor
        if acceptor is None or this is acceptor or this in self._clients or native.in_verb():
            return
        # Not join(): on Python 3.11 and 3.12 it holds a lock that a handler would block on.
        if self._over.wait(self.reception.timeout + _LAST_MOMENT_S):
            # It has no more to do; a handler waits this long at most.
            acceptor.join(_THREAD_END_S)

    # ---- a client ---------------------------------------------------------------

    def _start_client(self, sock: socket.socket, conversation: Conversation) -> bool:
        thread = threading.Thread(
            target=self._talk,
            args=(sock, conversation),
            name=f"serve {self}: a client",
            daemon=True,
        )
        if len(self._clients) >= self.reception.max_clients + _MAX_LEAVING:
            return False
        self._clients.add(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            self._clients.discard(thread)
            return False
        return True

    def _talk(self, sock: socket.socket, conversation: Conversation) -> None:
        try:
            with sock:
                prepare(sock)
                try:
                    self._exchange(sock, conversation)
                finally:
                    conversation.close()
                drain(sock)
        except Exception:
            _log.exception("a client's thread failed")
        finally:
            self._clients.discard(threading.current_thread())

    def _exchange(self, sock: socket.socket, conversation: Conversation) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        poller.register(sock, select.POLLIN)
        channel_fd = -1
        # The hello has arrived, and maybe more.
        answer = conversation.feed()
        while True:
            answer += conversation.tick()
            try:
                send_all(sock, answer, self.reception.timeout)
            except OSError as error:
                conversation.lost(f"the connection broke: {error.strerror or error}")
            if conversation.over:
                return
            if channel_fd < 0 and conversation.channel is not None:
                channel_fd = conversation.channel.fileno()
                poller.register(channel_fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(_milliseconds(conversation.deadline))}
            answer = b""
            if self._stop.fileno() in ready:
                answer = conversation.end()
            if not conversation.over and channel_fd in ready:
                answer += conversation.completions()
            if not conversation.over and sock.fileno() in ready:
                try:
                    data = sock.recv(MAX_LINE)
                except BlockingIOError:
                    pass
                except OSError as error:
                    conversation.lost(f"the connection broke: {error.strerror or error}")
                    return
                else:
                    if not data:
                        conversation.lost()
                        return
                    answer += conversation.feed(data)


_running: set[_Threads] = set()


@atexit.register
def _end_all() -> None:
    """Close the queue pairs before the devices, however the process ends."""
    for threads in _running.copy():
        threads.close()


class Serving(NotCopied):
    """What Server and AsyncServer have in common."""

    # At the interpreter's exit a finalizer may find no globals.
    _getpid, _warn, _suppress = staticmethod(os.getpid), staticmethod(warnings.warn), suppress

    def __init__(self, reception: Reception, listener: socket.socket) -> None:
        self._reception = reception
        self._lifeline: list[socket.socket] = []
        try:
            self.address: tuple[Any, ...] = listener.getsockname()
            self._name = show_address(self.address)
            self.warning = self._warning()
            if self.warning is not None:
                _log.warning("%s", self.warning)
            self._threads = _Threads(reception, listener)
        except BaseException:
            stop_listening(listener)
            raise
        try:
            self._threads.start(self._lifeline)
        except BaseException:
            self._threads.abandon()
            raise

    def __del__(self) -> None:
        threads: _Threads | None = getattr(self, "_threads", None)
        if threads is not None and threads.pid == self._getpid():
            # Before end(), after which it calls itself closed.
            unclosed = "" if threads.ended else f"unclosed {self!r}"
            # Not close(): a finalizer may run in any thread, including the server's.
            threads.end()
            if unclosed:
                self._warn(unclosed, ResourceWarning, source=self, stacklevel=2)
        for end in getattr(self, "_lifeline", ()):
            end.close()

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        state = " (closed)" if self._threads.ended else ""
        return f"<rdmapost.tools.connect.{type(self).__name__} {self}{state}>"

    def _warning(self) -> str | None:
        if is_loopback(self.address):
            return None
        token = "" if self._reception.token is None else " with the token"
        return f"everyone{token} who reaches {self} gets {self.exposure}"

    def _refuse_inherited(self) -> None:
        refuse_inherited(f"server {self}", self._threads.pid)

    @property
    def exposure(self) -> Exposure:
        """What every client is given: size, access, count, receive_size."""
        return self._reception.exposure

    @property
    def clients(self) -> list[ServedClient]:
        """The connected clients: their queue pairs, memory and offers."""
        self._refuse_inherited()
        return list(self._reception.clients.values())

    @property
    def memory(self) -> memoryview | None:
        """The memory that all clients share, as a writable memoryview; None if each has its own."""
        self._refuse_inherited()
        shared = self._reception.exposure.memory
        return None if shared is None else memoryview(shared)

    def _end(self) -> None:
        self._threads.close()


class Server(Serving):
    """A running server; ``serve`` makes it.

    Attributes:
        address: where it listens, (host, port, ...).
        warning: what it exposes beyond this machine, in one line, or None.
    """

    def close(self) -> None:
        """Tell every client that the server is closing, and release what they have.

        Return when that is done, or after timeout + 10 s; do nothing if already closed, or in the
        child of a fork, whose parent has the server.

        In on_event, and in a signal handler or finalizer in the middle of its thread's verb or
        wait, start closing and return at once: what the clients have is released after the
        callback, or the verb, has returned.

        If a signal handler's exception interrupts it, call it again.
        """
        self._end()

    def __enter__(self) -> Self:
        self._refuse_inherited()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _milliseconds(deadline: float | None) -> float | None:
    # Rounded up, so that the last moment is not a busy wait; and poll(2) takes an int.
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    return 0.0 if deadline == 0.0 or left <= 0 else min(left, 3600.0) * 1000 + 1
