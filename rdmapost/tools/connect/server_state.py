"""A server's settings and its clients."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from ..._arguments import counted, expect, time_limit, within
from ...resources.device import Context
from ..fabric import fabric_of, why_unreachable
from .exposure import ServedClient, make_exposure
from .failures import ProtocolError
from .protocol_messages import MAX_TOKEN, Hello
from .server_events import Event, OnEvent

_log = logging.getLogger("rdmapost.connect")

_MAX_CLIENTS = 1 << 16


class ServerState:
    """A server's settings, and its clients.

    The arguments are serve()'s; `call` calls on_event with an event, and `exposed` is what
    make_exposure takes.
    """

    def __init__(
        self,
        context: Context,
        *,
        token: str | None,
        max_clients: int,
        timeout: float,
        idle_timeout: float | None,
        on_event: OnEvent | None,
        call: Callable[[OnEvent, Event], None] = lambda on_event, event: on_event(event),
        **exposed: Any,
    ) -> None:
        exposure = make_exposure(context, **exposed)
        check_token(token)
        max_clients = within("max_clients", max_clients, 1, _MAX_CLIENTS)
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event: expected a callable or None, got {type(on_event).__name__}")
        timeout = time_limit(timeout)
        if idle_timeout is not None:
            idle_timeout = time_limit(idle_timeout, "idle_timeout")
        self.context, self.exposure = context, exposure
        self.token, self.max_clients = token, max_clients
        self.timeout, self.idle_timeout = timeout, idle_timeout
        self._on_event, self._call = on_event, call
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._admitted = 0
        # Held while one piece of a large memory is read, so that any number of looks keep only one
        # core busy.
        self.look_lock = threading.Lock()
        # By number.
        self.clients: dict[int, ServedClient] = {}

    def admit(self, hello: Hello) -> ServedClient:
        """Give a client its queue pair and its memory, if it can be reached and there is room."""
        if why := why_unreachable(fabric_of(self.context), hello.fabric):
            raise ProtocolError(why, "device")
        with self._lock:
            if self._admitted >= self.max_clients:
                text = f"this server has its {counted(self.max_clients, 'client')}; try again later"
                raise ProtocolError(text, "busy")
            self._admitted += 1
            number = next(self._numbers)
        try:
            client = ServedClient(self.context, self.exposure, hello, number)
        except BaseException:
            with self._lock:
                self._admitted -= 1
            raise
        self.clients[number] = client
        return client

    def release(self, client: ServedClient) -> None:
        """Release what a client has."""
        self.clients.pop(client.number, None)
        try:
            client.close()
        finally:
            with self._lock:
                self._admitted -= 1

    def notify(self, event: Event) -> None:
        """Call on_event; its failures do not affect the client."""
        if self._on_event is not None:
            try:
                self._call(self._on_event, event)
            except BaseException:
                # Including SystemExit, which would end the thread, and with it the client or the
                # acceptor.
                _log.exception("on_event failed")


def check_token(token: str | None) -> None:
    """Raise TypeError or ValueError for an invalid token."""
    expect("token", token, str, None)
    if token is not None and not 1 <= len(token) <= MAX_TOKEN:
        raise ValueError(f"a token has 1 to {MAX_TOKEN} characters, not {len(token)}")
