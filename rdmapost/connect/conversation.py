"""The server's side of one exchange, from its messages to the device; no input or output.

A shell gives it what comes (bytes, completions, the passing of time) and sends
what it returns.  Whatever a client does ends at most this conversation.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import suppress

from ..channel import CompChannel
from ..device import Context
from ..errors import RdmaError
from .errors import ProtocolError
from .events import Arrived, Event, Joined, Left, OnEvent, Refused
from .exposure import Exposure, ServedClient
from .fabric import fabric_of, why_apart
from .messages import (
    MAX_TOKEN,
    Bye,
    Error,
    Hello,
    Look,
    Message,
    Nothing,
    Ready,
    Report,
    encode,
)
from .protocol import ServerSession, Step

__all__ = ["Conversation", "Reception"]

_log = logging.getLogger("rdmapost.connect")

_LAST_ROUNDS = 16


class Reception:
    """What a server has, and who is there.

    Args:
        context: an open device.
        exposure: what each client is given.
        token: the token to ask for, or None.
        max_clients: how many at once.
        timeout: seconds for each step of the exchange, and for each answer to be taken.
        idle_timeout: seconds in which a client must be heard of; None for no limit.
        on_event: gets the events.

    Attributes:
        clients: those who are there, by number.

    Raises:
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
        if max_clients < 1:
            raise ValueError(f"max_clients={max_clients} is not at least 1")
        for name, value in (("timeout", timeout), ("idle_timeout", idle_timeout)):
            if value is not None and not 0 < value <= 1e6:
                raise ValueError(f"{name}={value} is not a time of more than 0 s")
        self.context, self.exposure = context, exposure
        self.token, self.max_clients = token, max_clients
        self.timeout, self.idle_timeout = timeout, idle_timeout
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._places = threading.Lock()
        self._taken = 0
        self.clients: dict[int, ServedClient] = {}

    def admit(self, hello: Hello) -> ServedClient:
        """Give a client its queue pair and its memory.

        Raises:
            ProtocolError: it cannot be reached, or there are enough clients.
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
        """Take back what a client has.

        Raises:
            RdmaError: the device refused; the rest is taken back.
        """
        self.clients.pop(client.number, None)
        try:
            client.close()
        finally:
            with self._places:
                self._taken -= 1

    @property
    def full(self) -> str:
        """What those are told for whom there is no place."""
        return f"this server has its {self.max_clients} clients; try again later"

    def tell(self, event: Event) -> None:
        """Tell the owner; what goes wrong there is none of the client's business."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                _log.exception("on_event failed")


def check_token(token: str | None) -> None:
    """Raise ValueError unless a token can be one."""
    if token is not None and not 1 <= len(token) <= MAX_TOKEN:
        raise ValueError(f"a token has 1 to {MAX_TOKEN} characters, not {len(token)}")


class Conversation:
    """One client, from its first byte on.

    Args:
        reception: the server's.
        address: where the client comes from, HOST:PORT.

    Attributes:
        over: nothing more is to be read; what was returned is still to be sent, then
            comes ``close``.
    """

    def __init__(self, reception: Reception, address: str) -> None:
        self._reception = reception
        self._address = address
        self._session = ServerSession(reception.token)
        self._client: ServedClient | None = None
        self._report: Report | None = None
        self._report_until = 0.0
        self._heard = time.monotonic()
        self._reason = ""
        self._code = "lost"
        # A shell may close it from elsewhere while it is at work.
        self._lock = threading.RLock()
        self.over = False

    @property
    def admitted(self) -> bool:
        """Whether it has got what clients get."""
        return self._client is not None

    @property
    def channel(self) -> CompChannel | None:
        """What announces arrivals, once there is a client."""
        return None if self._client is None else self._client.channel

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, by time.monotonic(), or None."""
        if self._client is not None and self._client.more:
            return 0.0
        if self._report is not None:
            # Whoever waits for an answer is not idle.
            return self._report_until
        limit = self._limit()
        return None if limit is None else self._heard + limit

    def _limit(self) -> float | None:
        opened = self._session.step is Step.OPEN
        return self._reception.idle_timeout if opened else self._reception.timeout

    # ---- what comes -----------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the client, and return what is to be sent to it."""
        with self._lock:
            out: list[Message] = []
            try:
                self._session.receive(data)
                while not self.over and (message := self._session.next_message()) is not None:
                    # Single bytes are not a sign of life, whole messages are.
                    self._heard = time.monotonic()
                    out += self._answer(message)
            except Exception as error:
                out.append(self._fail(error))
            return b"".join(map(encode, out))

    def completions(self) -> bytes:
        """Look for what has arrived, and return what is to be sent."""
        with self._lock:
            out: list[Message] = []
            try:
                if self._client is not None and not self.over:
                    self._take(self._client)
                    out = self._settle()
            except Exception as error:
                out.append(self._fail(error))
            return b"".join(map(encode, out))

    def tick(self) -> bytes:
        """Look at the time, and return what is to be sent."""
        with self._lock:
            if self.over:
                return b""
            if self._client is not None and self._client.more:
                return self.completions()
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
                return encode(self._fail(ProtocolError(text, "timeout")))
            return b""

    def lost(self, why: str = "") -> None:
        """The connection is gone."""
        with self._lock:
            if not self.over:
                self.over = True
                half = " in the middle of a message" if self._session.partial else ""
                self._reason = why or f"the connection ended{half} without a bye"

    def stop(self) -> bytes:
        """End the conversation for the server's sake, and return what is to be sent."""
        with self._lock:
            if self.over:
                return b""
            return encode(self._fail(ProtocolError("the server ends", "closing")))

    def close(self) -> None:
        """Take back what the client had, and tell the owner; do nothing a second time."""
        with self._lock:
            self.over = True
            self._release()
            if self._reason:
                self._reception.tell(Refused(self._address, self._code, self._reason))
                self._reason = ""

    # ---- what is done -----------------------------------------------------------

    def _answer(self, message: Message) -> list[Message]:
        if isinstance(message, Hello):
            self._client = client = self._reception.admit(message)
            self._reception.tell(
                Joined(client.number, self._address, message.qp_type, client.offer)
            )
            # Making all that has taken its time, and that was not the client's.
            self._heard = time.monotonic()
            return [client.offer]
        if isinstance(message, Ready):
            return [Ready()]
        if isinstance(message, Bye):
            self.over = True
            self._reason = "done"
            self._release()
            return [Bye()]
        assert self._client is not None, "the session lets nothing else come before the hello"
        if self._report is not None or self._session.partial:
            # So a client that does not listen cannot make work either.
            raise ProtocolError("another question came before the answer to the last one")
        if isinstance(message, Look):
            return [self._client.look(message.offset, message.length)]
        assert isinstance(message, Report)
        # It may be there, and not have been announced yet.
        self._take(self._client)
        self._report = message
        self._report_until = time.monotonic() + message.timeout_ms / 1000
        return self._settle()

    def _take(self, client: ServedClient) -> None:
        """Tell the owner what has arrived."""
        for arrival in client.take():
            self._heard = time.monotonic()
            self._reception.tell(Arrived(client.number, arrival))

    def _settle(self) -> list[Message]:
        """Answer the question what has arrived, if it can be answered."""
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
        self._code, self._reason = code, text
        return Error(code, text)

    def _release(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        # What nobody has asked for; a client that goes on sending is not waited for.
        with suppress(RdmaError):
            for _ in range(_LAST_ROUNDS):
                self._take(client)
                if not client.more:
                    break
        changed, reason = client.changed(), self._reason or "the server closed it"
        self._reason = ""
        try:
            self._reception.dismiss(client)
        except RdmaError as error:
            _log.error("client %d: not everything could be given back: %s", client.number, error)
            reason = f"{reason}; not everything could be given back: {error}"
        self._reception.tell(Left(client.number, self._address, reason, changed))
