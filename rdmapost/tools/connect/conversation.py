"""The server's side of one exchange, from its messages to the device; no I/O.

A shell feeds it input (bytes, completions, time) and sends what it returns. A client that dies,
stalls or sends garbage ends at most its own conversation.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Generator, Iterable, Iterator

from ..._arguments import counted, expect, time_limit, within
from ...errors import RdmaError
from ...resources.channel import CompChannel
from ...resources.device import Context
from .errors import ProtocolError
from .events import Arrived, Changed, Event, Joined, Left, OnEvent, Refused
from .exposure import Exposure, ServedClient
from .fabric import fabric_of, why_apart
from .messages import (
    MAX_TOKEN,
    Arrival,
    Bye,
    Error,
    Hello,
    Look,
    Message,
    Nothing,
    Ready,
    Report,
    Seen,
    encode,
)
from .protocol import ServerSession, Step

__all__ = ["HELLO_S", "Conversation", "Reception"]

_log = logging.getLogger("rdmapost.tools.connect")

HELLO_S = 5.0
"""How long a hello may take at most, whatever the timeout for other steps."""
_MAX_CLIENTS = 1 << 16


class Reception:
    """A server's settings, and its clients.

    Args:
        context: an open device.
        exposure: what each client is given.
        token: the token to ask for, or None.
        max_clients: how many at once.
        timeout: seconds for each step of the exchange, and to send each answer.
        idle_timeout: seconds in which a client must send something; None for no limit.
        on_event: gets the events.

    Attributes:
        clients: the connected clients, by number.
        turn: held while one piece of a large memory is read, so that any number of looks keep only
            one core busy.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        context: Context,
        exposure: Exposure,
        *,
        token: str | None,
        max_clients: int,
        timeout: float,
        idle_timeout: float | None,
        on_event: OnEvent | None,
    ) -> None:
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
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._places = threading.Lock()
        self._taken = 0
        self.turn = threading.Lock()
        self.clients: dict[int, ServedClient] = {}

    def admit(self, hello: Hello) -> ServedClient:
        """Give a client its queue pair and its memory.

        Raises:
            ProtocolError: it cannot be reached, or the server is full.
            RdmaError: the device refused.
        """
        if why := why_apart(fabric_of(self.context), hello.fabric):
            raise ProtocolError(why, "device")
        with self._places:
            if self._taken >= self.max_clients:
                raise ProtocolError(self.full, "busy")
            self._taken += 1
            number = next(self._numbers)
        try:
            client = ServedClient(self.context, self.exposure, hello, number)
        except BaseException:
            with self._places:
                self._taken -= 1
            raise
        self.clients[number] = client
        return client

    def dismiss(self, client: ServedClient) -> None:
        """Release what a client has.

        Raises:
            RdmaError: the device refused; the rest is released.
        """
        self.clients.pop(client.number, None)
        try:
            client.close()
        finally:
            with self._places:
                self._taken -= 1

    @property
    def full(self) -> str:
        """What clients are told when the server is full."""
        return f"this server has its {counted(self.max_clients, 'client')}; try again later"

    def tell(self, event: Event) -> None:
        """Tell the owner; failures there do not affect the client."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except BaseException:
                # Including SystemExit, which would end the thread, and with it the client or the
                # acceptor.
                _log.exception("on_event failed")


def check_token(token: str | None) -> None:
    """Raise TypeError or ValueError for an invalid token."""
    expect("token", token, str, None)
    if token is not None and not 1 <= len(token) <= MAX_TOKEN:
        raise ValueError(f"a token has 1 to {MAX_TOKEN} characters, not {len(token)}")


class Conversation:
    """One client, from its first byte: ``receive`` and ``authenticate``, then ``feed``.

    Args:
        reception: the server's.
        address: where the client comes from, HOST:PORT.

    Attributes:
        over: nothing more will be read; send what was returned, then ``close``.
        code: what ended it, one of messages.CODES or "lost".
    """

    def __init__(self, reception: Reception, address: str) -> None:
        self._reception = reception
        self._address = address
        self._session = ServerSession(reception.token)
        self._hello: Hello | None = None
        self._client: ServedClient | None = None
        self._report: Report | None = None
        self._report_until = 0.0
        self._looking: Generator[None, None, Seen] | None = None
        self._heard = time.monotonic()
        self._reason = ""
        self.code = "lost"
        self.over = False

    @property
    def channel(self) -> CompChannel | None:
        """The channel that reports arrivals, once there is a client."""
        return None if self._client is None else self._client.channel

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, by time.monotonic(), or None."""
        if self._looking is not None or (self._client is not None and self._client.more):
            return 0.0
        if self._report is not None:
            # A client waiting for an answer is not idle.
            return self._report_until
        limit = self._limit()
        return None if limit is None else self._heard + limit

    def _limit(self) -> float | None:
        if self._session.step is Step.OPEN:
            return self._reception.idle_timeout
        timeout = self._reception.timeout
        return min(timeout, HELLO_S) if self._session.step is Step.HELLO else timeout

    # ---- what comes -----------------------------------------------------------

    def receive(self, data: bytes) -> bool:
        """Take bytes of the hello; return whether ``authenticate`` can be called."""
        self._session.receive(data)
        return self._session.ready

    def authenticate(self) -> bytes:
        """Check the hello, its token first, and return what to send.

        It creates nothing for the client: the next ``feed`` does that.
        """
        try:
            message = self._session.next_message()
            assert isinstance(message, Hello), "nothing else is let through first"
            self._hello, self._heard = message, time.monotonic()
        except Exception as error:
            return encode(self._fail(error))
        return b""

    def feed(self, data: bytes = b"") -> bytes:
        """Take bytes from the client, and return what to send to it."""
        self._session.receive(data)
        return self._say(self._answers())

    def completions(self) -> bytes:
        """Look for arrivals, and return what to send."""
        return self._say(self._arrivals())

    def tick(self) -> bytes:
        """Check the time, continue long work, and return what to send."""
        if self.over:
            return b""
        if self.deadline == 0.0:
            said = self.completions()
            if self._looking is not None:
                with self._reception.turn:
                    said += self._say(self._seen())
            return said
        now, limit = time.monotonic(), self._limit()
        if self._report is not None:
            if now < self._report_until:
                return b""
            self._report, self._heard = None, now
            return encode(Nothing(0 if self._client is None else self._client.arrived))
        if limit is not None and now >= self._heard + limit:
            what = "half a message" if self._session.partial else "nothing"
            text = f"{what} came from the client within {limit:g} s"
            if self._session.step is not Step.OPEN:
                text += f": its {self._session.step.name.lower()} was to come"
            return self.end("timeout", text)
        return b""

    def lost(self, why: str = "") -> None:
        """The connection is gone."""
        if not self.over:
            self.over = True
            half = " in the middle of a message" if self._session.partial else ""
            self._reason = why or f"the connection ended{half} without a bye"

    def end(self, code: str = "closing", text: str = "the server is shutting down") -> bytes:
        """End the conversation from the server's side, and return what to send."""
        return b"" if self.over else encode(self._fail(ProtocolError(text, code)))

    def close(self) -> None:
        """Release what the client had, and tell the owner; do nothing a second time."""
        self.over = True
        self._release()
        if self._reason:
            self._reception.tell(Refused(self._address, self.code, self._reason))
            self._reason = ""

    # ---- what is done -----------------------------------------------------------

    def _say(self, messages: Iterator[Message]) -> bytes:
        said = b""
        try:
            for message in messages:
                said += encode(message)
        except Exception as error:
            said += encode(self._fail(error))
        return said

    def _answers(self) -> Iterator[Message]:
        hello, self._hello = self._hello, None
        if hello is not None:
            self._client = client = self._reception.admit(hello)
            self._reception.tell(Joined(client.number, self._address, hello.qp_type, client.offer))
            # Creating all that took time that the client is not charged for.
            self._heard = time.monotonic()
            yield client.offer
        while not self.over and (message := self._session.next_message()) is not None:
            # Only whole messages are a sign of life, not single bytes.
            self._heard = time.monotonic()
            yield from self._answer(message)

    def _arrivals(self) -> Iterator[Message]:
        if self._client is not None and not self.over:
            self._take(self._client)
            yield from self._settle()

    def _seen(self) -> Iterator[Message]:
        """Continue a look; at its end, yield what was seen."""
        if self._looking is None or self.over:
            return
        try:
            next(self._looking)
        except StopIteration as end:
            self._looking, self._heard = None, time.monotonic()
            yield end.value

    def _answer(self, message: Message) -> list[Message]:
        if isinstance(message, Ready):
            return [Ready()]
        if isinstance(message, Bye):
            self.over = True
            self._reason = "done"
            self._release()
            return [Bye()]
        assert self._client is not None, "the session lets nothing else come before the hello"
        if self._looking or (isinstance(message, Look) and self._session.partial):
            # So a client that does not listen cannot create work either.
            raise ProtocolError("another question came before the answer to the last one")
        late: list[Message] = []
        if self._report is not None:
            # Nothing is waiting for that answer any longer.
            self._report = None
            late = [Nothing(self._client.arrived)]
        if isinstance(message, Look):
            # If it is long, later ticks do the rest.
            self._looking = self._client.look(message.offset, message.length)
            return [*late, *self._seen()]
        assert isinstance(message, Report)
        # It may have arrived and not have been reported yet.
        self._take(self._client)
        self._report = message
        self._report_until = time.monotonic() + message.timeout_ms / 1000
        return [*late, *self._settle()]

    def _take(self, client: ServedClient) -> None:
        """Tell the owner what has arrived."""
        arrivals = client.take()
        try:
            # First, so that the client does not wait for the owner.
            client.repost()
        finally:
            self._tell(client, arrivals)

    def _tell(self, client: ServedClient, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            self._heard = time.monotonic()
            self._reception.tell(Arrived(client.number, arrival))

    def _settle(self) -> list[Message]:
        """Answer a pending report, if possible."""
        if self._report is None or self._client is None:
            return []
        arrival = self._client.arrival(self._report.index)
        if arrival is None:
            return []
        self._report = None
        return [arrival]

    def _fail(self, error: Exception) -> Error:
        """End the conversation, and return what the client is told."""
        code = error.code if isinstance(error, ProtocolError) else "failed"
        text = str(error) or type(error).__name__
        if not isinstance(error, (RdmaError, OSError, ValueError, MemoryError)):
            _log.error("%s: a fault of the server", self._address, exc_info=error)
            text = f"the server met a fault of its own ({type(error).__name__})"
        self.over = True
        self.code, self._reason = code, text
        return Error(code, text)

    def _release(self) -> None:
        client, self._client, self._looking = self._client, None, None
        if client is None:
            return
        changed, reason = None, self._reason or "the server closed it"
        self._reason = ""
        try:
            # Nothing arrives after this, and nothing in the memory changes.
            self._tell(client, client.stop())
            changed = self._changed(client)
        except Exception:
            _log.exception("client %d: what it has done last is not known", client.number)
        try:
            self._reception.dismiss(client)
        except RdmaError as error:
            _log.error("client %d: not everything could be given back: %s", client.number, error)
            reason = f"{reason}; not everything could be given back: {error}"
        self._reception.tell(Left(client.number, self._address, reason, changed))

    def _changed(self, client: ServedClient) -> Changed | None:
        steps = client.changed()
        while True:
            try:
                with self._reception.turn:
                    next(steps)
            except StopIteration as end:
                changed: Changed | None = end.value
                return changed
