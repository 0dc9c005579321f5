"""The server for asyncio.

Like the threaded server, it has one thread for each client, because verbs may block. Only the
owner's on_event and on_connect run in the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial

from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.mr import MR
from ...resources.srq import SRQ
from ..default_ports import CONNECT_PORT
from ..resource_stack import AsyncClosesOnExit
from ..tcp import stop_listening
from .host_port import check_where
from .qp_options import QPOptions
from .served_client import AsyncOnConnect, ServedClient
from .server import BaseServer, open_listener
from .server_events import Event, OnEvent
from .server_state import Late, NoAnswer, ServerState
from .server_threads import ServerThreads


async def aserve(
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
    on_connect: AsyncOnConnect | None = None,
) -> AsyncServer:
    """Let others connect queue pairs to this device: ``serve`` for asyncio.

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
        on_event: called with each event, in the event loop's thread. Its exceptions go to the
            loop's exception handler; SystemExit and KeyboardInterrupt end the loop, as in any
            callback. After SystemExit it is not called again, so that tasks can clean up.
        on_connect: as for serve, but called in the event loop; it may be a coroutine function. If
            it takes longer than timeout seconds, the client is dropped.

    Returns:
        The running server; an asynchronous context manager.  If it is dropped without
        close(), it ends, with a ResourceWarning.

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
    in_loop = _InLoop(asyncio.get_running_loop())
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
        call=in_loop.call,
        ask=in_loop.ask,
    )
    in_loop.timeout = server.timeout
    opening = _Opening(host, port)
    try:
        await asyncio.to_thread(opening.run)
    except BaseException:
        opening.give_up()
        raise
    return AsyncServer(server, opening.listener, in_loop)


class _Question:
    """A call to on_connect for a client; done once it returns or the server stops waiting for it.

    Attributes:
        answer: what on_connect returned.
    """

    __slots__ = ("_first", "answer")

    def __init__(self) -> None:
        self._first: dict[str, bool] = {}
        self.answer: bytes | None = None

    @property
    def given_up(self) -> bool:
        """Whether the server no longer waits."""
        return not self._first.get("returned", True)

    def decide(self, *, returned: bool) -> bool:
        """Record that on_connect has returned or that the server has given up.

        Return True if on_connect returned first, False if the server gave up first.

        A single dict operation decides, so the event loop and the client's thread cannot race.
        """
        return self._first.setdefault("returned", returned)


async def _ask(
    on_connect: AsyncOnConnect, client: ServedClient, question: _Question, late: Late
) -> None:
    if question.given_up:
        return
    try:
        answer = on_connect(client)
        question.answer = await answer if isinstance(answer, Awaitable) else answer
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Something that on_connect awaited was cancelled, not this task: on_connect has failed.
        raise concurrent.futures.CancelledError from error
    if not question.decide(returned=True):
        late(client, question.answer)


class _InLoop:
    """Calls on_event and on_connect in the event loop, on behalf of the server's threads."""

    timeout: float

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._exiting = False
        # The calls to on_connect that threads are waiting for.
        self._pending: set[concurrent.futures.Future[None]] = set()
        self._ended = False

    def call(self, on_event: OnEvent, event: Event) -> None:
        # A closed loop takes no more events.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call_now, on_event, event)

    def _call_now(self, on_event: OnEvent, event: Event) -> None:
        if self._exiting:
            return
        try:
            on_event(event)
        except SystemExit:
            # A second SystemExit would end the cleanup of the loop's tasks.
            self._exiting = True
            raise

    def ask(self, on_connect: AsyncOnConnect, client: ServedClient, late: Late) -> bytes | None:
        question = _Question()
        asking = _ask(on_connect, client, question, late)
        try:
            asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:
            asking.close()
            raise NoAnswer("the server is shutting down", "closing") from None
        self._add(asked)
        try:
            asked.result(self.timeout)
        except concurrent.futures.CancelledError:
            if not question.decide(returned=False):
                raise NoAnswer("the server is shutting down", "closing") from None
        except TimeoutError:
            if not question.decide(returned=False):
                # on_connect itself may have raised it.
                if asked.done():
                    raise
                asked.cancel()
                text = f"the server's on_connect took longer than {self.timeout:g} s"
                raise NoAnswer(text, "timeout") from None
        return question.answer

    def _add(self, asked: concurrent.futures.Future[None]) -> None:
        self._pending.add(asked)
        asked.add_done_callback(self._pending.discard)
        if self._ended:
            asked.cancel()

    def end(self) -> None:
        """Cancel all pending calls, and any added later: the server is closing."""
        self._ended = True
        for asked in self._pending.copy():
            asked.cancel()


def _close(threads: ServerThreads, _: object) -> None:
    threads.close()


class _Opening:
    """Opens a listener in a thread, and closes it if the caller is no longer waiting for it."""

    listener: socket.socket

    def __init__(self, host: str, port: int) -> None:
        self._where = host, port
        self._lock = threading.Lock()
        self._given_up = False

    def run(self) -> None:
        listener = open_listener(*self._where)
        with self._lock:
            self.listener = listener
            if self._given_up:
                stop_listening(listener)

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if hasattr(self, "listener"):
                stop_listening(self.listener)


class AsyncServer(BaseServer, AsyncClosesOnExit):
    """A running server; ``aserve`` creates it.

    It ends no later than the event loop.

    Attributes:
        address: where it listens, (host, port, ...).
        warning: what it exposes beyond this machine, in one line, or None.
    """

    def __init__(self, server: ServerState, listener: socket.socket, in_loop: _InLoop) -> None:
        # No thread may wait for the event loop while the loop waits for the threads.
        super().__init__(server, listener, in_loop.end)
        # A loop that shuts down cancels its tasks; the end of this task closes the server.
        self._life = asyncio.create_task(asyncio.Event().wait(), name=f"serve {self}")
        self._loop = asyncio.get_running_loop()
        self._life.add_done_callback(partial(_close, self._threads))

    def _finalize(self) -> None:
        if hasattr(self, "_loop") and not self._life.done():
            # Any thread may run a finalizer. A closed loop has already cancelled the task.
            with self._suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._life.cancel)
        super()._finalize()

    async def close(self) -> None:
        """Notify every client that the server is closing, and release their resources.

        Do nothing if already closed, or in the child of a fork: the server belongs to the parent.
        """
        if self._threads.pid != os.getpid():
            return
        await asyncio.to_thread(self._threads.close)
        if self._loop is asyncio.get_running_loop():
            self._life.cancel()
        else:
            # A closed loop has already cancelled the task.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._life.cancel)
