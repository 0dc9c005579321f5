"""Both sides of the protocol as state machines: bytes in, messages out, no I/O.

The caller passes bytes to ``receive``, and takes messages from ``next_message`` until there are
none. Both sides raise ProtocolError at the first byte that violates the protocol, and read nothing
more.
"""

from __future__ import annotations

import hmac
import re
from collections import deque
from enum import Enum, auto
from typing import Any

from .errors import ConnectError, ProtocolError
from .protocol_messages import (
    MAX_LINE,
    VERSION,
    Arrival,
    Bye,
    Error,
    Hello,
    Look,
    Message,
    Nothing,
    Offer,
    Ready,
    Report,
    Seen,
    decode,
    parse_line,
    read_version,
)

_PINGPONG = re.compile(rb"[0-9a-f]{4}:[0-9a-f]{6}:[0-9a-f]{6}:")


def _what_else(data: bytes) -> str:
    """Say what a peer speaks whose first bytes are not those of a line."""
    if _PINGPONG.match(data):
        return (
            "it speaks the protocol of 'rdmapost pingpong' and ibv_rc_pingpong, which need the "
            "same on the other side"
        )
    return f"this is not rdmapost's protocol: {data!r}"


class LineReader:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Feed received bytes, in chunks of any size."""
        self._pending += data

    def next_line(self) -> bytes | None:
        """Return the next whole line, without its newline, or None.

        Raises:
            ProtocolError: the received bytes cannot become a valid line.
        """
        pending = self._pending
        if not pending:
            return None
        if pending[0] != 0x7B:
            # Do not wait for a newline: a peer that speaks another protocol may be waiting for an
            # answer.
            raise ProtocolError(_what_else(bytes(pending[:40])))
        # The bytes already searched contain no newline.
        end = pending.find(b"\n", self._searched, MAX_LINE)
        if end < 0:
            if len(pending) >= MAX_LINE:
                raise ProtocolError(f"a line is longer than {MAX_LINE} bytes")
            self._searched = len(pending)
            return None
        # If memory runs out while the bytearray itself is sliced, Python's error is misleading: it
        # says that the bytearray has exported buffers.
        with memoryview(pending) as view:
            line = bytes(view[:end])
        del pending[: end + 1]
        self._searched = 0
        return line

    @property
    def ready(self) -> bool:
        """Whether next_line has a line to return, or an error to raise."""
        pending = self._pending
        return bool(pending) and (
            pending[0] != 0x7B or len(pending) >= MAX_LINE or pending.find(b"\n") >= 0
        )

    @property
    def partial(self) -> bool:
        """Whether part of a line is pending."""
        return bool(self._pending)


class SessionState(Enum):
    """The states of a connection."""

    HELLO = auto()
    READY = auto()
    OPEN = auto()
    OVER = auto()


def token_matches(given: Any, token: str | None) -> bool:
    """Compare a token with the server's in constant time; accept any if the server has none."""
    if token is None:
        return True
    # An argument or environment variable need not be valid Unicode.
    received, required = [
        text.encode("utf-8", "surrogatepass")
        for text in (given if isinstance(given, str) else "", token)
    ]
    return hmac.compare_digest(received, required) and isinstance(given, str)


class ServerProtocol:
    """The server's side; it requires the token, unless the token is None."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self.lines = LineReader()
        self.state = SessionState.HELLO

    def receive(self, data: bytes) -> None:
        """Take received bytes."""
        if self.state is not SessionState.OVER:
            self.lines.feed(data)

    def next_message(self) -> Message | None:
        """Return the next whole message, or None.

        Raises:
            ProtocolError: the message is unexpected or malformed; the connection is over.
        """
        if self.state is SessionState.OVER:
            return None
        try:
            line = self.lines.next_line()
            return None if line is None else self._read(parse_line(line))
        except ProtocolError:
            self.state = SessionState.OVER
            raise

    def _read(self, fields: dict[str, Any]) -> Message:
        message: Message
        if self.state is SessionState.HELLO:
            # Without the token, a peer learns only the version.
            if (version := read_version(fields)) != VERSION:
                raise ProtocolError(
                    f"this server speaks version {VERSION} of the protocol, but the client speaks "
                    f"version {str(version)[:20]}; use the same rdmapost on both sides",
                    "version",
                )
            if not token_matches(fields.get("token"), self._token):
                raise ProtocolError(
                    "the server requires a token, but the client sent none"
                    if fields.get("token") is None
                    else "wrong token",
                    "token",
                )
            message = decode(fields, Hello)
            self.state = SessionState.READY
        elif self.state is SessionState.READY:
            message = decode(fields, Ready, Bye)
            self.state = SessionState.OPEN
        else:
            message = decode(fields, Report, Look, Bye)
        if isinstance(message, Bye):
            self.state = SessionState.OVER
        return message


_ANSWERS: dict[type, tuple[type, ...]] = {
    Hello: (Offer,),
    Ready: (Ready,),
    Report: (Arrival, Nothing),
    Look: (Seen,),
    Bye: (Bye,),
}


class ClientProtocol:
    """The client's side: it asks, and the server answers, one request at a time.

    A client that was interrupted while it waited for an answer may send another request: the server
    answers both, and the late answer is dropped here.
    """

    def __init__(self) -> None:
        self.lines = LineReader()
        self._asked: deque[type] = deque()
        self._error: Error | None = None

    def ask(self, message: Message) -> None:
        """Record the request being sent, which determines the answers to expect."""
        if self._asked and self._asked[-1] is not Report and not isinstance(message, Bye):
            raise ConnectError("the server has not yet answered the previous request")
        self._asked.append(type(message))

    @property
    def answer_pending(self) -> bool:
        """Whether the answer to a request is still missing."""
        return bool(self._asked)

    @property
    def must_wait(self) -> bool:
        """Whether an answer must come before the next request."""
        return bool(self._asked) and self._asked[-1] is Look

    def receive(self, data: bytes) -> None:
        """Take received bytes."""
        self.lines.feed(data)

    def next_message(self) -> Message | None:
        """Return the answer to the last request, or None if it has not arrived.

        An error message is returned like an answer, no matter when it arrives.
        """
        while self._error is None:
            line = self.lines.next_line()
            if line is None:
                return None
            message = self._read(parse_line(line))
            if not self._asked:
                return message
        return self._error

    def drop_late_answers(self) -> bool:
        """Drop late answers; return whether the server has sent an error."""
        while self._error is None and (message := self.next_message()) is not None:
            if isinstance(message, Error):
                # The next request raises it.
                self._error = message
        return self._error is not None

    def _read(self, fields: dict[str, Any]) -> Message:
        expected = _ANSWERS[self._asked[0]] if self._asked else ()
        if self._asked and self._asked[-1] is Bye:
            # The server answers nothing after a Bye.
            expected = (*expected, Bye)
        message: Message = decode(fields, *dict.fromkeys(expected), Error)
        if isinstance(message, (Bye, Error)):
            self._asked.clear()
        elif self._asked:
            self._asked.popleft()
        return message
