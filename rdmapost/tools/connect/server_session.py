"""The server's side of one session, from its messages to the device; no I/O.

The caller feeds it input (bytes, completions, time) and sends what it returns. A client that dies,
stalls or sends garbage can end only its own session.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator

from ...errors import ClosedError, RdmaError
from ...resources.channel import CompChannel
from ..tcp import reason
from .errors import ProtocolError
from .protocol import ServerProtocol, SessionState
from .protocol_messages import (
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
    printable,
)
from .served_client import ServedClient
from .server_events import Arrived, Changed, Left, Refused
from .server_state import ServerState
from .wakeup import Wakeup

_log = logging.getLogger("rdmapost.connect")
_CLOSED_BY_SERVER = "the server closed the connection"

HELLO_S = 5.0
"""How many seconds a hello may take at most, whatever the timeout for other steps."""


class ServerSession:
    """One client, from its first byte: ``receive`` and ``authenticate``, then ``feed``."""

    def __init__(self, server: ServerState, address: str) -> None:
        self._server = server
        self._address = address
        self._protocol = ServerProtocol(server.token)
        self._hello: Hello | None = None
        self._client: ServedClient | None = None
        self._report: Report | None = None
        self._report_until = 0.0
        self._look: Generator[None, None, Seen] | None = None
        # Whether the client sent more before it had the answer to a Look.
        self._hurried = False
        self._last_message_at = time.monotonic()
        self._reason = ""
        # Why the session ended: one of protocol_messages.CODES, or "lost".
        self.code = "lost"
        # If True, nothing more will be read: send what was returned, then call close().
        self.over = False

    @property
    def channel(self) -> CompChannel | None:
        """The channel that reports arrivals, once there is a client."""
        return None if self._client is None else self._client.channel

    @property
    def wakeup(self) -> Wakeup | None:
        """The wakeup that rings when the owner closes the client, once there is a client."""
        return None if self._client is None else self._client._wakeup

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due (a time.monotonic() value), or None."""
        if self._look is not None or (self._client is not None and self._client.may_have_more):
            return 0.0
        if self._report is not None:
            # A client waiting for an answer is not idle.
            return self._report_until
        limit = self._limit()
        return None if limit is None else self._last_message_at + limit

    def _limit(self) -> float | None:
        if self._protocol.state is SessionState.OPEN:
            return self._server.idle_timeout
        timeout = self._server.timeout
        return min(timeout, HELLO_S) if self._protocol.state is SessionState.HELLO else timeout

    # ---- input ----------------------------------------------------------------

    def receive(self, data: bytes) -> bool:
        """Take bytes of the hello; return whether ``authenticate`` can be called."""
        self._protocol.receive(data)
        return self._protocol.lines.ready

    def authenticate(self) -> bytes:
        """Check the hello, its token first, and return what to send.

        This creates nothing for the client: the next ``feed`` does that.
        """
        try:
            message = self._protocol.next_message()
            assert isinstance(message, Hello), "nothing else is let through first"
            self._hello, self._last_message_at = message, time.monotonic()
        except Exception as error:
            return encode(self._fail(error))
        return b""

    def feed(self, data: bytes = b"") -> bytes:
        """Take bytes from the client, and return what to send to it."""
        self._protocol.receive(data)
        return self._encode(self._handle_input())

    def completions(self) -> bytes:
        """Poll for arrivals, and return what to send."""
        return self._encode(self._poll_client())

    def tick(self) -> bytes:
        """Check the time, continue long work, and return what to send."""
        if self.over:
            return b""
        if self._owner_closed():
            return self.end(text=_CLOSED_BY_SERVER)
        if self.deadline == 0.0:
            data = self.completions()
            if self._look is not None:
                with self._server.look_lock:
                    data += self._encode(self._continue_look())
            return data
        now, limit = time.monotonic(), self._limit()
        if self._report is not None:
            if now < self._report_until:
                return b""
            self._report, self._last_message_at = None, now
            return encode(Nothing(0 if self._client is None else self._client.arrived))
        if limit is not None and now >= self._last_message_at + limit:
            what = "half a message" if self._protocol.lines.partial else "nothing"
            text = f"{what} came from the client within {limit:g} s"
            if self._protocol.state is not SessionState.OPEN:
                text += f": its {self._protocol.state.name.lower()} was expected"
            return self.end("timeout", text)
        return b""

    def _owner_closed(self) -> bool:
        """Return whether the owner has closed the client, or its queue pair."""
        client = self._client
        return client is not None and (client._close_called or client.closed)

    def lost(self, error: OSError | None = None) -> None:
        """End the session because the connection is gone, whether or not there was an error."""
        if not self.over:
            self.over = True
            partial, what = self._protocol.lines.partial, "a message"
            self._reason = "disconnected without close()"
            if self._protocol.state is SessionState.HELLO:
                what, self._reason = "its hello", "disconnected before its hello"
            if partial:
                self._reason = f"disconnected in the middle of {what}"
            if error is not None:
                self._reason = f"the connection broke: {reason(error)}"

    def end(self, code: str = "closing", text: str = "the server is shutting down") -> bytes:
        """End the session from the server's side, and return what to send."""
        return b"" if self.over else encode(self._fail(ProtocolError(text, code)))

    def close(self) -> None:
        """Release the client's resources, and report that it has left; a second call does nothing.

        If memory runs out, call it again.
        """
        self.over = True
        self._release()
        if self._reason:
            self._server.notify(Refused(self._address, self.code, self._reason))
            self._reason = ""

    # ---- actions ----------------------------------------------------------------

    def _encode(self, messages: Iterator[Message]) -> bytes:
        data = b""
        try:
            for message in messages:
                data += encode(message)
        except Exception as error:
            data += encode(self._fail(error))
        return data

    def _handle_input(self) -> Iterator[Message]:
        hello, self._hello = self._hello, None
        if hello is not None:
            self._client = client = self._server.admit(hello, self._address)
            self._server.notify_joined(client)
            # Do not charge the client for the time that admission took.
            self._last_message_at = time.monotonic()
            yield client.offer
        while not self.over and (message := self._protocol.next_message()) is not None:
            # Only whole messages are a sign of life, not single bytes.
            self._last_message_at = time.monotonic()
            yield from self._answer(message)

    def _poll_client(self) -> Iterator[Message]:
        if self._client is not None and not self.over:
            self._poll(self._client)
            yield from self._answer_report()

    def _continue_look(self) -> Iterator[Message]:
        """Read the next piece of memory for a Look request; after the last, yield the answer."""
        if self._look is None or self.over:
            return
        try:
            next(self._look)
        except StopIteration as end:
            self._look, self._last_message_at = None, time.monotonic()
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
        if self._look or self._hurried:
            # This also prevents clients from creating more work without reading the answers. Only a
            # Bye may come early: the client may have been interrupted in a request.
            raise ProtocolError("another request came before the answer to the last one")
        late: list[Message] = []
        if self._report is not None:
            # The client no longer waits for the answer to its report.
            self._report = None
            late = [Nothing(self._client.arrived)]
        if isinstance(message, Look):
            self._hurried = self._protocol.lines.partial
            # If the memory is large, later ticks read the rest.
            self._look = self._client.look(message.offset, message.length)
            return [*late, *self._continue_look()]
        assert isinstance(message, Report)
        # The message may have arrived without having been reported.
        self._poll(self._client)
        self._report = message
        self._report_until = time.monotonic() + message.timeout_ms / 1000
        return [*late, *self._answer_report()]

    def _poll(self, client: ServedClient) -> None:
        """Report the messages that have arrived."""
        arrivals = client.poll()
        try:
            # Before on_event, so that the client does not wait for the owner.
            client.repost()
        finally:
            self._notify_arrivals(client, arrivals)

    def _notify_arrivals(self, client: ServedClient, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            self._last_message_at = time.monotonic()
            self._server.notify(Arrived(client.number, arrival))

    def _answer_report(self) -> list[Message]:
        """Answer a pending report, if possible."""
        if self._report is None or self._client is None:
            return []
        arrival = self._client.arrival(self._report.index)
        if arrival is None:
            return []
        self._report = None
        return [arrival]

    def _fail(self, error: Exception) -> Error:
        """End the session, and return the error for the client."""
        code = error.code if isinstance(error, ProtocolError) else "failed"
        text = str(error) or type(error).__name__
        if isinstance(error, ClosedError) and self._owner_closed():
            code, text = "closing", _CLOSED_BY_SERVER
        if not isinstance(error, (RdmaError, OSError, ValueError, MemoryError)):
            _log.error("%s: the server has failed", self._address, exc_info=error)
            text = f"the server has failed ({type(error).__name__})"
        self.over = True
        self.code, self._reason = code, printable(text)
        if code == "failed" and isinstance(error, (ClosedError, OSError, MemoryError)):
            # Say on which side, because the client has regions and descriptors, too.
            text = f"on the server: {text}"
        return Error(code, text)

    def _release(self) -> None:
        client, self._look = self._client, None
        if client is None:
            return
        changed, reason = None, self._reason or "the server closed it"
        try:
            # Nothing arrives after this, and nothing in the memory changes.
            self._notify_arrivals(client, client.stop())
            changed = self._changed(client)
        except Exception:
            _log.exception("client %d: its last messages and writes are unknown", client.number)
        finally:
            # In finally, because even logging fails when memory runs out.
            reason += self._release_client(client)
        left = Left(client.number, self._address, reason, changed)
        # Only now, so that another close() repeats all this if memory ran out above.
        self._client, self._reason = None, ""
        self._server.notify(left)

    def _release_client(self, client: ServedClient) -> str:
        try:
            self._server.release(client)
        except RdmaError as error:
            _log.error("client %d: not everything could be released: %s", client.number, error)
            return f"; not everything could be released: {error}"
        return ""

    def _changed(self, client: ServedClient) -> Changed | None:
        pieces = client.changed()
        while True:
            try:
                with self._server.look_lock:
                    next(pieces)
            except StopIteration as end:
                changed: Changed | None = end.value
                return changed
