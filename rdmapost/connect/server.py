"""The server with a thread for each client."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import select
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

from ..address import choose_gid
from ..device import Context
from ..enums import Access
from ..errors import RdmaError
from .acceptor import BACKLOG, Acceptor
from .address import DEFAULT_PORT, is_loopback, resolve, show_address
from .conversation import Conversation, Reception
from .errors import ConnectError
from .events import OnEvent
from .exposure import EXPOSABLE, Exposure, ServedClient
from .messages import MAX_LINE
from .sockets import drain, prepare, send_all

__all__ = ["Server", "Serving", "make_exposure", "open_listener", "serve"]

_log = logging.getLogger("rdmapost.connect")

_MAX_LEAVING = 64
"""Threads of clients besides those who have a place: they are told so, or leave."""
_MAX_COUNT = 1 << 14
_RECEIVE_SIZE = 1 << 16
_LAST_MOMENT_S = 10.0


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
    """Let others connect queue pairs to this device, and use its memory as far as they may.

    It listens on TCP; each client that keeps to the exchange gets a queue pair
    connected to its own, memory, and posted receives, all in a protection
    domain of its own, until it goes.

    Args:
        context: an open device; it stays open as long as the server.
        host: address to listen on; "0.0.0.0" or "::" for all.  Nothing is
            encrypted: expose it only to a network that may see everything, the
            token included.
        port: TCP port; 0 chooses one.
        size: bytes of memory that each client can reach.
        access: what it may do with it, of REMOTE_READ, REMOTE_WRITE and
            REMOTE_ATOMIC; all that the device can do unless given.
        count: receives posted for each client, 0..16384; a used one is posted again.
        receive_size: bytes of message that each takes; size, at most 64 KiB, unless given.
        data: what the memory holds at first; zeros follow.
        shared: one memory for all clients, instead of one for each.
        token: what a client must know, up to 256 characters; None lets in everyone.
            Take a random one: 64 wrong ones a second are looked at, 32 from one address.
        max_clients: how many at once.
        timeout: seconds for each step of the exchange; the hello has 5 at most.
        idle_timeout: seconds after which a client is dismissed that has neither asked
            anything nor sent anything that arrives in a receive, alive or not.  The
            server cannot see RDMA reads, writes and atomics: leave it at None, no
            limit, for clients that do nothing else.  Without it a client stays as long
            as its TCP connection; one whose host is gone is noticed in half a minute.
        port_num, gid_index: port and GID of the queue pairs, as in QP.
        on_event: called with each event (Joined, Arrived, Left, Refused), in the
            thread of the client that it is about, or in the one that accepts
            connections; it must be quick.

    Returns:
        The server, at work; a context manager.

    Raises:
        ValueError: an argument is out of range.
        RdmaError: the port has no such GID, or the device has no atomics and they are
            asked for.
        ConnectError: there is no such host.
        OSError: the address is in use, or is not this machine's.
    """
    exposure = make_exposure(
        context, size=size, access=access, count=count, receive_size=receive_size, data=data,
        shared=shared, port_num=port_num, gid_index=gid_index,
    )  # fmt: skip
    reception = Reception(
        context, exposure, token=token, max_clients=max_clients, timeout=timeout,
        idle_timeout=idle_timeout, on_event=on_event,
    )  # fmt: skip
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
    """Check what is to be exposed; the arguments are serve()'s."""
    receive_size = min(size, _RECEIVE_SIZE) if receive_size is None else receive_size
    for name, value, least, most in (
        ("size", size, 1, 1 << 40), ("count", count, 0, _MAX_COUNT),
        ("receive_size", receive_size, 0, 1 << 31),
    ):  # fmt: skip
        if not least <= value <= most:
            raise ValueError(f"{name}={value} is not in {least}..{most}")
    if len(data) > size:
        raise ValueError(f"{len(data)} bytes of data are more than size={size}")
    has_atomics = bool(context.attr.atomic_cap)
    if access is None:
        access = EXPOSABLE if has_atomics else EXPOSABLE & ~Access.REMOTE_ATOMIC
    if access & ~EXPOSABLE:
        raise ValueError(
            f"access={Access(access)!r} is not made of REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC"
        )
    if access & Access.REMOTE_ATOMIC and not has_atomics:
        raise RdmaError(f"{context.name} has no atomics (atomic_cap is NONE)")
    # What is wrong with these is said now, and not to the first client.
    choose_gid(context, port_num, gid_index)
    if count > context.attr.max_qp_wr:
        raise ValueError(f"count={count} is more than max_qp_wr={context.attr.max_qp_wr}")
    memory = None
    if shared:
        memory = mmap.mmap(-1, size)
        memory[: len(data)] = data
    return Exposure(
        size, Access(access), count, receive_size, bytes(data), memory, port_num, gid_index
    )


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ConnectError: there is no such host.
        OSError: it cannot be listened on; the text says where.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port} is not in 0..65535")
    family, kind, proto, _, address = resolve(host, port, 5.0)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConnectError(
            f"cannot listen on {show_address(address)}: {error.strerror or error}", "unreachable"
        ) from error
    return listener


class Serving:
    """What Server and AsyncServer have in common: an acceptor, and a thread for each client."""

    def __init__(self, reception: Reception, listener: socket.socket) -> None:
        self._reception = reception
        self.address: tuple[Any, ...] = listener.getsockname()
        self.warning = self._warning()
        if self.warning is not None:
            _log.warning("%s", self.warning)
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closing = False
        # Readable from the moment when the server ends, for everyone who polls it.
        self._stop_fd, self._stop = os.pipe()
        acceptor = Acceptor(reception, listener, self._stop_fd, self._start_client)
        self._acceptor = threading.Thread(target=acceptor.run, name=f"serve {self}", daemon=True)
        # The queue pairs go before the devices, however the process ends.
        atexit.register(self._end)
        self._acceptor.start()

    def __str__(self) -> str:
        return show_address(self.address)

    def _warning(self) -> str | None:
        if is_loopback(self.address):
            return None
        token = "" if self._reception.token is None else " with the token"
        return f"everyone{token} who reaches {self} gets {self.exposure}"

    @property
    def exposure(self) -> Exposure:
        """What every client is given: size, access, count, receive_size."""
        return self._reception.exposure

    @property
    def clients(self) -> list[ServedClient]:
        """Those who are there: their queue pairs, memory and offers."""
        return list(self._reception.clients.values())

    @property
    def memory(self) -> memoryview | None:
        """The memory that all clients share, or None if each has its own."""
        shared = self._reception.exposure.memory
        return None if shared is None else memoryview(shared)

    def _end(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self._end)
        os.close(self._stop)
        deadline = time.monotonic() + self._reception.timeout + _LAST_MOMENT_S
        # The acceptor first: after it there are no new ones.
        ended = self._join([self._acceptor], deadline)
        with self._lock:
            threads = list(self._threads)
        if self._join(threads, deadline) and ended:
            os.close(self._stop_fd)

    @staticmethod
    def _join(threads: list[threading.Thread], deadline: float) -> bool:
        for thread in threads:
            # A callback may close the server in one of them.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # ---- a client ---------------------------------------------------------------

    def _start_client(self, sock: socket.socket, conversation: Conversation) -> bool:
        thread = threading.Thread(
            target=self._talk, args=(sock, conversation), name=f"serve {self}: a client",
            daemon=True,
        )  # fmt: skip
        with self._lock:
            if len(self._threads) >= self._reception.max_clients + _MAX_LEAVING:
                return False
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads.discard(thread)
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
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _exchange(self, sock: socket.socket, conversation: Conversation) -> None:
        poller = select.poll()
        poller.register(self._stop_fd, select.POLLIN)
        poller.register(sock, select.POLLIN)
        channel_fd = -1
        # The hello is there, and what came with it.
        answer = conversation.feed()
        while True:
            answer += conversation.tick()
            try:
                send_all(sock, answer, self._reception.timeout)
            except OSError as error:
                conversation.lost(f"the connection broke: {error.strerror or error}")
            if conversation.over:
                return
            if channel_fd < 0 and conversation.channel is not None:
                channel_fd = conversation.channel.fileno()
                poller.register(channel_fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(_milliseconds(conversation.deadline))}
            answer = b""
            if self._stop_fd in ready:
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


class Server(Serving):
    """A server at work; ``serve`` makes it.

    Attributes:
        address: where it listens, (host, port, ...).
        warning: what it exposes to others than this machine, in one line, or None.
    """

    def close(self) -> None:
        """Tell every client that the server ends, and take back what they have.

        Returns when that is done; do nothing if it has been done.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _milliseconds(deadline: float | None) -> float | None:
    # Rounded up, so that the last moment is not a busy one; and poll(2) takes an int.
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    return 0.0 if deadline == 0.0 or left <= 0 else min(left, 3600.0) * 1000 + 1
