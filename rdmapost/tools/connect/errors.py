"""Errors between a client and a server."""

from __future__ import annotations

import errno as codes
import os

from ...errors import RdmaError
from ..tcp import TCPError, errno_of, reason_at


class ConnectError(RdmaError, ConnectionError):
    """The other side was unreachable, refused, or went away.

    Attributes:
        code: the type of error: "refused", "unreachable", "lost", or one of
            protocol_messages.CODES, which an error message carries.
        errno: the error number, if the operating system gave one, such as EADDRINUSE; else None.
        strerror: its text, or None.
    """

    def __init__(self, text: str, code: str = "failed", errno: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        if errno is not None:
            self.errno, self.strerror = errno, os.strerror(errno)

    def __str__(self) -> str:
        # OSError.__str__ would show the errno's text instead of the message.
        return str(self.args[0]) if self.args else ""


class ConnectTimeout(ConnectError, TimeoutError):
    """The other side did not answer in time."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "timeout")


class ProtocolError(ConnectError):
    """The other side violated the protocol."""

    def __init__(self, text: str, code: str = "format") -> None:
        super().__init__(text, code)


def from_tcp(error: TCPError) -> ConnectError:
    """Return the error for an unknown host, or for an address that cannot be listened on."""
    if isinstance(error, TimeoutError):
        return ConnectTimeout(str(error))
    return ConnectError(str(error), "unreachable", error.errno)


def not_reached(where: str, error: OSError, timeout: float) -> ConnectError:
    """Return the error for a failed attempt to connect."""
    if isinstance(error, TCPError):
        return from_tcp(error)
    if isinstance(error, TimeoutError):
        return ConnectTimeout(f"{where} did not answer within {timeout:g} s")
    if error.errno == codes.ECONNREFUSED:
        return ConnectError(
            f"{where} refused the connection: start 'rdmapost serve' there, or name its port",
            "refused",
            error.errno,
        )
    return ConnectError(
        f"{where} cannot be reached: {reason_at(where, error)}", "unreachable", errno_of(error)
    )
