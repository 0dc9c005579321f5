"""Where a server listens: ``HOST[:PORT]``."""

from __future__ import annotations

import socket
import threading
from ipaddress import ip_address
from typing import Any

from ..._arguments import expect, within
from ..tcp import reason
from .failures import ConnectError, ConnectTimeout

__all__ = ["DEFAULT_PORT", "check_where", "is_loopback", "parse_address", "resolve", "show_address"]

DEFAULT_PORT = 18600
"""TCP port of the exchange; ibv_rc_pingpong has 18515."""


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Read ``HOST[:PORT]``; an IPv6 address goes in brackets: ``[::1]:18600``.

    Args:
        text: the text.
        default_port: the port if the text has none.

    Raises:
        TypeError: text is not a str.
        ValueError: it is not of this form.
    """
    expect("text", text, str)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [ADDRESS] or [ADDRESS]:PORT")
        port = rest[1:] if rest else None
        if ":" not in host:
            raise ValueError(f"{text!r}: only an IPv6 address stands in brackets")
    elif text.count(":") > 1:
        raise ValueError(f"{text!r}: an IPv6 address stands in brackets: [{text}]")
    else:
        host, colon, after = text.partition(":")
        port = after if colon else None
    if not host or any(c.isspace() or not c.isprintable() for c in host):
        raise ValueError(f"{text!r} has no host: it is HOST[:PORT]")
    if port is None:
        return host, default_port
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535):
        raise ValueError(f"{port[:20]!r} is not a port: 1..65535")
    return host, int(port)


def check_where(host: str, port: int, least: int = 1) -> int:
    """Check the arguments that say where a server listens.

    Args:
        host: a name or an address.
        port: the port.
        least: the lowest port: 0 if that means any free one.

    Returns:
        The port, as an int.

    Raises:
        TypeError: one of them is of another type.
        ValueError: host is empty, or there is no such port.
    """
    expect("host", host, str)
    if not host:
        raise ValueError("host: expected a name or an address, got ''")
    return within("port", port, least, 65535)


def show_address(address: tuple[Any, ...]) -> str:
    """Write a socket's address as ``HOST:PORT``, an IPv6 one in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: tuple[Any, ...]) -> bool:
    """Whether only this machine can reach a socket's address."""
    return ip_address(address[0].partition("%")[0]).is_loopback


def resolve(host: str, port: int, timeout: float) -> list[tuple[Any, ...]]:
    """Look up a host in bounded time.

    Args:
        host: a name or an address.
        port: the port.
        timeout: seconds.

    Returns:
        What getaddrinfo returns for it.

    Raises:
        ConnectError: there is no such host, or it cannot be looked up, for lack of file
            descriptors for instance.
        ConnectTimeout: the name service did not answer.
    """
    found: list[Any] = []

    def look_up(flags: int = 0) -> None:
        try:
            found[:] = [socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
        except (OSError, UnicodeError) as error:
            found[:] = [error]

    # An address needs no name service.
    look_up(socket.AI_NUMERICHOST)
    if not isinstance(found[0], list):
        del found[:]
        # The resolver's own time limits are too long.
        thread = threading.Thread(target=look_up, name=f"look up {host}", daemon=True)
        thread.start()
        thread.join(timeout)
    if not found:
        raise ConnectTimeout(f"host {host}: the name service did not answer within {timeout:g} s")
    if isinstance(found[0], list):
        return found[0]
    error = found[0]
    if isinstance(error, socket.gaierror):
        # The resolver does not say if it had no file descriptors.
        try:
            socket.socket().close()
        except OSError as cause:
            error = cause
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
        raise ConnectError(
            f"host {host} cannot be looked up: {reason(error)}",
            "unreachable",
            error.errno,
        )
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise ConnectError(f"host {host} cannot be found: {why}", "unreachable")
