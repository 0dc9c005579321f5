"""A server's settings and its clients."""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..._arguments import counted, expect, time_limit, within
from ...errors import RdmaError
from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.mr import MR
from ...resources.srq import SRQ
from ..reachability import fabric_of, why_unreachable
from .errors import ConnectError, ProtocolError
from .exposure import Exposure, make_exposure
from .protocol_messages import MAX_TOKEN, Hello
from .qp_options import QPOptions, check_given, private_bytes
from .served_client import Place, ServedClient
from .server_events import Event, Joined, Left, OnEvent

_log = logging.getLogger("rdmapost.connect")

MAX_CLIENTS = 1 << 16


Late = Callable[[ServedClient, Any], None]
Ask = Callable[[Any, ServedClient, Late], Any]


class NoAnswer(ConnectError):
    """on_connect did not return: it took longer than the timeout, or the server is closing."""


class ServerState:
    """A server's settings, and its clients.

    The arguments are serve()'s; `call` calls on_event with an event, `ask` calls on_connect with a
    client and returns its result, and `exposed` is passed to make_exposure. If on_connect returns
    after `ask` has raised NoAnswer, its result goes to the third argument of `ask`.
    """

    def __init__(
        self,
        context: Context,
        *,
        mr: MR | None,
        srq: SRQ | None,
        cq: CQ | None,
        qp_options: QPOptions | None,
        token: str | None,
        max_clients: int,
        timeout: float,
        idle_timeout: float | None,
        on_event: OnEvent | None,
        on_connect: Callable[[ServedClient], Any] | None,
        call: Callable[[OnEvent, Event], None] = lambda on_event, event: on_event(event),
        ask: Ask = lambda on_connect, client, late: on_connect(client),
        **exposed: Any,
    ) -> None:
        not_these = ("max_recv_wr", "max_recv_sge")
        given = check_given(context, mr, srq, cq, qp_options, not_these)
        exposed_at_most = make_exposure(context, given, **exposed)
        check_token(token)
        max_clients = within("max_clients", max_clients, 1, MAX_CLIENTS)
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event: expected a callable or None, got {type(on_event).__name__}")
        if is_coroutine_function(on_event):
            raise TypeError(
                "on_event must be a plain function: nothing would await a coroutine function"
            )
        if on_connect is not None and not callable(on_connect):
            raise TypeError(
                f"on_connect: expected a callable or None, got {type(on_connect).__name__}"
            )
        timeout = time_limit(timeout)
        if idle_timeout is not None:
            idle_timeout = time_limit(idle_timeout, "idle_timeout", "seconds or None")
        self.context, self._exposed_at_most, self._given = context, exposed_at_most, given
        self.token, self.max_clients = token, max_clients
        self.timeout, self.idle_timeout = timeout, idle_timeout
        self._on_event, self._call = on_event, call
        self._on_connect, self._ask = on_connect, ask
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # Weak references: a place that is no longer held is removed from this set without running
        # our code, which could run out of memory.
        self._places: set[weakref.ref[Place]] = set()
        # Held while one piece of a large memory region is read, so that concurrent looks, however
        # many, keep only one core busy.
        self.look_lock = threading.Lock()
        # Keyed by number.
        self.clients: dict[int, ServedClient] = {}
        # Clients with a resource that the owner's resources still use.
        self._unreleased: list[ServedClient] = []

    @property
    def exposure(self) -> Exposure:
        """The exposure for a client that connects now."""
        return self._exposed_at_most.now()

    def admit(self, hello: Hello, address: str) -> ServedClient:
        """Give a client its queue pair and memory if it is reachable and the server is not full."""
        if why := why_unreachable(fabric_of(self.context), hello.fabric):
            raise ProtocolError(why, "device")
        with self._lock:
            if len(self._places) >= self.max_clients:
                limit = counted(self.max_clients, "client")
                text = f"this server is full ({limit} at most); try again later"
                raise ProtocolError(text, "busy")
            place = Place()
            self._places.add(weakref.ref(place, self._places.discard))
            number = next(self._numbers)
        try:
            client = ServedClient(self.context, self.exposure, self._given, hello, number, address)
            client._place = place
        finally:
            # Otherwise a logged traceback would keep the place taken.
            del place
        try:
            self._ask_owner(client)
            self.clients[number] = client
        except BaseException:
            with suppress(RdmaError):
                self.release(client)
            raise
        return client

    def _ask_owner(self, client: ServedClient) -> None:
        """Call on_connect, which may reject the client, or give it private data."""
        if self._on_connect is None:
            return
        try:
            self._admitted(client, self._ask(self._on_connect, client, self._came_late))
        except NoAnswer as error:
            raise ProtocolError(str(error), error.code) from None
        except RdmaError as error:
            raise ProtocolError(str(error), "rejected") from error
        except BaseException as error:
            # Including SystemExit, which would end the thread without an answer.
            _log.exception("on_connect failed")
            text = f"the server's on_connect failed ({type(error).__name__})"
            raise ProtocolError(text, "failed") from error

    def _admitted(self, client: ServedClient, answer: Any) -> None:
        if answer is not None:
            client.offer = replace(client.offer, private_data=private_bytes(answer))

    def _came_late(self, client: ServedClient, answer: Any) -> None:
        """Report a client as joined and left: on_connect admitted it after it had been refused."""
        try:
            self._admitted(client, answer)
        except (TypeError, ValueError):
            _log.exception("on_connect failed")
            return
        self.notify_joined(client)
        reason = "on_connect answered too late: the client had been refused"
        self.notify(Left(client.number, client.address, reason, None))

    def release(self, client: ServedClient) -> None:
        """Release a client's resources."""
        self.clients.pop(client.number, None)
        try:
            client.close()
        except Exception:
            self._unreleased.append(client)
            raise
        finally:
            # The session no longer waits for the wakeup.
            client._wakeup = None
            client._place = None

    def release_rest(self) -> None:
        """Retry releasing the resources that could not be released when clients left."""
        # A client that is leaving may be appended in the meantime.
        while self._unreleased:
            with suppress(RdmaError):
                self._unreleased[0].close()
            del self._unreleased[0]

    def notify_joined(self, client: ServedClient) -> None:
        """Report that a client has been admitted."""
        qp_type, offer, data = client.qp.qp_type, client.offer, client.private_data
        self.notify(Joined(client.number, client.address, qp_type, offer, data))

    def notify(self, event: Event) -> None:
        """Call on_event; its failures do not affect the client."""
        if self._on_event is not None:
            try:
                self._call(self._on_event, event)
            except BaseException:
                # Including SystemExit, which would end the thread, and with it the client or the
                # acceptor.
                _log.exception("on_event failed")


def is_coroutine_function(callback: object) -> bool:
    """Whether calling a callback returns a coroutine."""
    # An instance counts, too, if its type's __call__ is a coroutine function.
    method = getattr(type(callback), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(method)


def check_token(token: str | None) -> None:
    """Raise TypeError or ValueError for an invalid token."""
    expect("token", token, str, None)
    if token is not None and not 1 <= len(token) <= MAX_TOKEN:
        raise ValueError(f"a token has 1 to {MAX_TOKEN} characters, not {len(token)}")
