"""The server for asyncio.

It uses threads here too, because drivers may take their time; only the owner's on_event runs in
the event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress

from ...resources.device import Context
from ..resource_stack import AsyncClosesOnExit
from ..tcp import stop_listening
from .host_port import DEFAULT_PORT, check_where
from .server import BaseServer, open_listener
from .server_events import Event, OnEvent
from .server_state import ServerState


async def aserve(
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
) -> AsyncServer:
    """Let others connect queue pairs to this device: ``serve`` for asyncio.

    Args:
        context, host, port, size, access, count, receive_size, data, shared: as in serve.
        token, max_clients, timeout, idle_timeout, port_num, gid_index: likewise.
        on_event: called with each event, in the event loop's thread. What it raises goes to the
            loop's exception handler; SystemExit and KeyboardInterrupt end the loop, as in any
            callback. After SystemExit it is not called again, so that tasks can clean up.

    Returns:
        The running server; an asynchronous context manager.  If it becomes unreachable
        it ends, with a ResourceWarning.

    Raises:
        TypeError, ValueError, RdmaError, ConnectError: as in serve.
        ConnectTimeout, VerbsError, RuntimeError: as in serve.
    """
    port = check_where(host, port, 0)
    loop = asyncio.get_running_loop()
    exiting = False

    def call_now(on_event: OnEvent, event: Event) -> None:
        nonlocal exiting
        if exiting:
            return
        try:
            on_event(event)
        except SystemExit:
            # A second one would end the cleanup of the loop's tasks.
            exiting = True
            raise

    def call_in_loop(on_event: OnEvent, event: Event) -> None:
        # A closed loop takes no more events.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(call_now, on_event, event)

    server = ServerState(
        context,
        size=size,
        access=access,
        count=count,
        receive_size=receive_size,
        data=data,
        shared=shared,
        token=token,
        max_clients=max_clients,
        timeout=timeout,
        idle_timeout=idle_timeout,
        port_num=port_num,
        gid_index=gid_index,
        on_event=on_event,
        call=call_in_loop,
    )
    opening = _Opening(host, port)
    try:
        await asyncio.to_thread(opening.run)
    except BaseException:
        opening.give_up()
        raise
    return AsyncServer(server, opening.listener)


class _Opening:
    """Opens a listener in a thread, and closes it if the caller has given up waiting."""

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

    It ends with the event loop at the latest.

    Attributes:
        address, warning: as in Server.
    """

    def __init__(self, server: ServerState, listener: socket.socket) -> None:
        super().__init__(server, listener)
        # Shutting down an event loop cancels its tasks.
        self._life = asyncio.create_task(asyncio.Event().wait(), name=f"serve {self}")
        threads, self._loop = self._threads, asyncio.get_running_loop()
        self._life.add_done_callback(lambda task: threads.close())

    def _finalize(self) -> None:
        if hasattr(self, "_loop") and not self._life.done():
            # Any thread may run a finalizer, and a closed loop has cancelled it.
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
            # A closed loop has cancelled it.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._life.cancel)
