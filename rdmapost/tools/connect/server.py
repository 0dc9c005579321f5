"""The server with a thread for each client."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..._binding import native
from ...errors import ClosesOnExit
from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.mr import MR
from ...resources.srq import SRQ
from ..default_ports import CONNECT_PORT
from ..resource_stack import NotCopied, refuse_inherited
from ..tcp import TCPError, listen, name_of, stop_listening
from .acceptor import BACKLOG
from .errors import from_tcp
from .exposure import Exposure
from .host_port import check_where, is_loopback
from .qp_options import QPOptions
from .served_client import OnConnect, ServedClient
from .server_events import OnEvent
from .server_state import ServerState, is_coroutine_function
from .server_threads import ServerThreads

_log = logging.getLogger("rdmapost.connect")


def serve(
    context: Context,
    host: str = "127.0.0.1",
    port: int = CONNECT_PORT,
    *,
    size: int | None = None,
    access: int | None = None,
    count: int | None = None,
    receive_size: int | None = None,
    data: bytes = b"",
    shared: bool = False,
    mr: MR | None = None,
    srq: SRQ | None = None,
    cq: CQ | None = None,
    qp_options: QPOptions | None = None,
    private_data: bytes = b"",
    token: str | None = None,
    max_clients: int = 16,
    timeout: float = 5.0,
    idle_timeout: float | None = None,
    port_num: int = 1,
    gid_index: int | None = None,
    on_event: OnEvent | None = None,
    on_connect: OnConnect | None = None,
) -> Server:
    """Let others connect queue pairs to this device and access its exposed memory.

    The server listens on TCP.  Each client that follows the protocol gets a connected queue
    pair, memory, and posted receives, all in a separate protection domain, until it
    leaves.

    Args:
        context: an open device; close() refuses to close it before the server, and close_all()
            closes the server first.
        host: address to listen on; "0.0.0.0" or "::" for all.  Nothing is
            encrypted: expose it only to a network that may see all traffic, the
            token included.
        port: TCP port; 0 chooses one.
        size: bytes of memory that each client can reach, 1..2^40; default: 4096.
        access: remote access rights granted to each client: REMOTE_READ, REMOTE_WRITE and
            REMOTE_ATOMIC; by default all that the device supports, or that mr has. If mr has
            MW_BIND, access cannot restrict it.
        count: receives posted for each client, 0..16384; default: 16. A used receive is posted
            again.
        receive_size: message bytes that each receive can hold; default: size, at most 64 KiB.
        data: the initial contents of the memory, bytes or another buffer; zeros follow.
        shared: one memory for all clients, instead of one for each.
        mr: expose this region instead of allocating memory (size, data, shared). Clients get at
            most the access rights that it has when they connect; mr.rereg changes what later
            clients get, but not the queue pairs of clients already connected. Clients also share
            its protection domain: a client that knows or guesses the key of another region there
            can use that region, too. If it has FLUSH_GLOBAL or FLUSH_PERSISTENT, clients may FLUSH
            it. If it has MW_BIND, the clients' queue pairs permit whatever your windows may grant,
            and so mr's own rkey grants all that mr allows: to restrict clients to your windows,
            give mr only LOCAL_WRITE | MW_BIND.
        srq: take the clients' receives from this SRQ. You post them and poll cq; wc.qp_num tells
            the clients apart. The server posts no receives and reports no arrivals.
            A client's Left event may come while completions of that client are still in cq: empty
            cq before you forget the qp_num.
        cq: the CQ for the work requests that you post to the clients' queue pairs, and for the
            receives of srq; by default each queue pair has its own CQ.
        qp_options: more arguments for the clients' queue pairs: of QP (max_send_wr, max_send_sge,
            max_inline_data, send_ops_flags, sq_sig_all, checked) and of QP.connect (timeout,
            retry_cnt, rnr_retry, min_rnr_timer, max_rd_atomic, max_dest_rd_atomic, sl,
            traffic_class). Their defaults are those of QP and QP.connect, except max_send_wr=16,
            max_send_sge=1 and min_rnr_timer=24 (41 ms: a client's message that finds no receive
            fails after 0.25 s, with the client's default rnr_retry).
        private_data: up to 256 bytes that every client gets in its offer.
        token: what a client must know, up to 256 characters; None admits everyone.
            Use a random one: up to 64 guesses a second are checked, 32 from one address.
        max_clients: how many at once.
        timeout: seconds for each step; at most 5 for the hello.
        idle_timeout: drop a client that has made no request and sent no message for this
            many seconds, even if its connection is alive.  The server cannot see RDMA
            reads, writes and atomics: for clients that do nothing else, keep the default,
            None.  A client then stays as long as its TCP connection; a host that
            disappears is detected within half a minute.
        port_num: the local port, from 1.
        gid_index: the local GID; default: chosen by choose_gid.
        on_event: called with each event (Joined, Arrived, Left, Refused), in the thread of the
            client concerned, or in the one that accepts connections; it must be quick. Its
            exceptions, SystemExit included, are logged, and the server continues.
        on_connect: called with each new client (a ServedClient) in its thread, once its queue pair
            is connected and before the client is told. You can fill its memory there, for example.
            Return private data for this client, or None for private_data. To reject the client,
            raise an RdmaError: dial() raises a ConnectError with its text and the code "rejected".
            Only aserve takes a coroutine function.

    Returns:
        The running server; a context manager.  If it is dropped without close(), it
        ends, with a ResourceWarning.

    If a signal handler's exception interrupts the start of the server, the threads that have
    started end first. If the exception comes as serve() returns, nothing refers to the server, so
    it ends a moment after the exception has been handled; then its device can be closed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or conflicts with another one; or access is
            less than the remote rights of an mr with MW_BIND.
        ClosedError: the device, mr, srq or cq is closed.
        RdmaError: the port has no GID; or access asks for atomics, and the device has none; or
            no thread can be started.
        ConnectError: there is no such host; or the address cannot be listened on: it is in
            use (errno EADDRINUSE), not this machine's (EADDRNOTAVAIL), not permitted
            (EACCES), or the process has no file descriptors left (EMFILE).
        ConnectTimeout: the name service did not answer within 5 s.
        VerbsError: the device refused.
    """
    port = check_where(host, port, 0)
    if is_coroutine_function(on_connect):
        raise TypeError("on_connect: a coroutine function needs an event loop; use aserve")
    server = ServerState(
        context,
        size=size,
        access=access,
        count=count,
        receive_size=receive_size,
        data=data,
        shared=shared,
        mr=mr,
        srq=srq,
        cq=cq,
        qp_options=qp_options,
        private_data=private_data,
        token=token,
        max_clients=max_clients,
        timeout=timeout,
        idle_timeout=idle_timeout,
        port_num=port_num,
        gid_index=gid_index,
        on_event=on_event,
        on_connect=on_connect,
    )
    return Server(server, open_listener(host, port))


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket, or raise the ConnectError of serve()."""
    try:
        return listen(host, port, BACKLOG)
    except TCPError as error:
        raise from_tcp(error) from error


class BaseServer(native.Finalizer, NotCopied):
    """What Server and AsyncServer have in common."""

    # At the interpreter's exit a finalizer may find no globals.
    _getpid, _warn, _suppress = staticmethod(os.getpid), staticmethod(warnings.warn), suppress
    _unclosed = ""

    def __init__(
        self,
        server: ServerState,
        listener: socket.socket,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = server
        self._lifeline: list[socket.socket] = []
        pid = os.getpid()
        try:
            self.address: tuple[Any, ...] = listener.getsockname()
            self._name = name_of(self.address)
            self.warning = self._warning()
            if self.warning is not None:
                _log.warning("%s", self.warning)
            self._threads = ServerThreads(server, listener, before_end)
        except BaseException as error:
            stop_listening(listener)
            if isinstance(error, (OSError, ValueError)):
                # A signal handler may have forked: in the child the listener is closed.
                refuse_inherited("the server", pid)
            raise
        try:
            self._threads.start(self._lifeline)
        except BaseException:
            self._threads.abandon()
            raise

    def _finalize(self) -> None:
        threads: ServerThreads | None = getattr(self, "_threads", None)
        if threads is not None and threads.pid == self._getpid():
            # Before end(), after which the repr says closed.
            if not threads.ended:
                self._unclosed = f"unclosed {self!r}"
            # Not close(): a finalizer may run in any thread, including the server's.
            threads.end()
        for end in getattr(self, "_lifeline", ()):
            # Other code may have closed the descriptor.
            with self._suppress(OSError):
                end.close()
        if unclosed := self._unclosed:
            self._unclosed = ""
            self._warn(unclosed, ResourceWarning, source=self, stacklevel=2)

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else ""
        return f"<rdmapost.connect.{type(self).__name__} {self}{state}>"

    def _warning(self) -> str | None:
        if is_loopback(self.address):
            return None
        token = "" if self._server.token is None else " with the token"
        return f"everyone{token} who reaches {self} gets {self.exposure}"

    def _refuse_inherited(self) -> None:
        refuse_inherited(f"server {self}", self._threads.pid)

    @property
    def closed(self) -> bool:
        """True once it accepts no more clients: it is closed or closing; True in a forked child."""
        return self._threads.ended or self._threads.pid != self._getpid()

    @property
    def exposure(self) -> Exposure:
        """What every client gets: size, access, count, receive_size.

        If mr.rereg changes the owner's region, clients that connect later get what the region has
        by then.
        """
        return self._server.exposure

    @property
    def clients(self) -> list[ServedClient]:
        """The connected clients: their queue pairs, memory and offers."""
        self._refuse_inherited()
        return list(self._server.clients.values())

    @property
    def memory(self) -> memoryview | None:
        """The memory that all clients share, as a memoryview; None if each has its own."""
        self._refuse_inherited()
        if (mr := self._server.exposure.mr) is not None:
            return mr.buffer
        shared = self._server.exposure.memory
        return None if shared is None else memoryview(shared)


class Server(BaseServer, ClosesOnExit):
    """A running server; ``serve`` creates it.

    Attributes:
        address: where it listens, (host, port, ...).
        warning: what it exposes beyond this machine, in one line, or None.
    """

    def close(self) -> None:
        """Notify every client that the server is closing, and release their resources.

        Return when that is done, or after timeout + 10 s. Do nothing if already closed, or in the
        child of a fork: the server belongs to the parent.

        If called in on_event, or in a signal handler or finalizer that interrupts a verb or a wait
        of its thread, start closing and return immediately: the clients' resources are released
        once the callback, the verb or the wait has returned.

        If a signal handler's exception interrupts this call, call it again.
        """
        self._threads.close()
