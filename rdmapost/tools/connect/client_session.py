"""The client's side of a connection: its requests and the server's answers, without I/O.

The blocking and asyncio clients drive the same generators: each yielded value is the next I/O
operation, and its outcome is sent back.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from enum import Enum, auto
from typing import TypeAlias

from ..tcp import reason
from .errors import ConnectError, ConnectTimeout, ProtocolError
from .protocol import ClientProtocol
from .protocol_messages import Bye, Error, Message, encode


class NoData(Enum):
    """Why nothing has been sent or received."""

    TIMED_OUT = auto()
    CLOSED_MEANWHILE = auto()


Outcome: TypeAlias = bytes | OSError | NoData
"""The outcome of an I/O request: the bytes received (none after a send), or why it failed."""

IORequests: TypeAlias = Generator[tuple[bytes, float], Outcome, Message]
"""Yields bytes to send, or b"" to receive some, and the deadline (a time.monotonic() value)."""


class ClientSession:
    """Sends requests to a server, HOST:PORT, one at a time; the timeout applies to each step."""

    def __init__(self, where: str, timeout: float) -> None:
        self.where = where
        self.protocol = ClientProtocol()
        self.timeout = timeout
        # Whether both sides have said that they are ready.
        self.established = False
        # Whether the last request ended without an answer; an answer that comes later is dropped.
        self.late = False

    def ask(self, message: Message, more_time: float = 0.0) -> IORequests:
        """Send a message and return the answer; if the answer is an error, raise it.

        The server may take more_time seconds in addition to the timeout.
        """
        self.late = False
        if self.protocol.must_wait and not isinstance(message, Bye):
            # First read the late answer to an interrupted request.
            yield from self._answer(self.timeout)
        data = encode(message)
        self.protocol.ask(message)
        outcome = yield data, time.monotonic() + self.timeout
        if outcome is NoData.TIMED_OUT:
            raise ConnectTimeout(
                f"{self.where} did not accept a request within {self.timeout:g} s, but may have "
                "received part of it, so the connection is closed"
            )
        # Messages that the server sent before it closed the connection may still be unread.
        broken = reason(outcome) if isinstance(outcome, OSError) else ""
        return (yield from self._answer(self.timeout + more_time, broken))

    def _answer(self, limit: float, broken: str = "") -> IORequests:
        deadline = time.monotonic() + limit
        while (answer := self._next_message()) is None:
            outcome = yield b"", deadline
            if outcome is NoData.TIMED_OUT:
                self.late = self.established
                raise self._silent(limit)
            if isinstance(outcome, NoData):
                raise ConnectError("the connection was closed before the answer came", "lost")
            if isinstance(outcome, OSError):
                raise self._ended(reason(outcome))
            if not outcome:
                raise self._ended(broken)
            self.protocol.receive(outcome)
        if isinstance(answer, Error):
            raise ConnectError(f"{self.where} refused: {answer.text}", answer.code)
        return answer

    def _next_message(self) -> Message | None:
        try:
            return self.protocol.next_message()
        except ProtocolError as error:
            text = f"{self.where} is not an 'rdmapost serve': {error}"
            raise ProtocolError(text, error.code) from None

    def _ended(self, why: str) -> ConnectError:
        half = " in the middle of a message" if self.protocol.lines.partial else ""
        how = f" ({why})" if why else half
        hint = "" if self.established else ": is it 'rdmapost serve'?"
        return ConnectError(
            f"{self.where} closed the connection{how} and did not answer{hint}", "lost"
        )

    def _silent(self, seconds: float) -> ConnectTimeout:
        if self.established:
            return ConnectTimeout(
                f"{self.where} did not answer within {seconds:g} s; the connection stays open, and "
                "a late answer is dropped"
            )
        return ConnectTimeout(
            f"{self.where} accepted the connection but did not answer within {seconds:g} s: "
            "is it 'rdmapost serve', or does its on_connect take longer?"
        )

    def survives(self, error: BaseException) -> bool:
        """Whether the connection stays usable after a request that this error ended."""
        return self.late and isinstance(error, ConnectTimeout)

    def is_over(self, data: bytes) -> bool:
        """Handle bytes that came without a request; return whether the connection has ended."""
        if data:
            # This may be a late answer.
            self.protocol.receive(data)
        return not data or self.protocol.drop_late_answers()
