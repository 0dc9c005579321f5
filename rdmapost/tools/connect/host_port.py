"""Where a server listens: ``HOST[:PORT]``."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from ..._arguments import expect, within
from ..default_ports import CONNECT_PORT


def parse_address(text: str, default_port: int = CONNECT_PORT) -> tuple[str, int]:
    """Read ``HOST[:PORT]``; an IPv6 address goes in brackets: ``[::1]:18600``.

    Args:
        text: the text.
        default_port: the port if the text has none.

    Raises:
        TypeError: text is not a str.
        ValueError: the text does not have this form.
    """
    expect("text", text, str)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [ADDRESS] or [ADDRESS]:PORT")
        port = rest[1:] if rest else None
        if ":" not in host:
            raise ValueError(f"{text!r}: only an IPv6 address is written in brackets")
    elif text.count(":") > 1:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets: [{text}]")
    else:
        host, colon, after = text.partition(":")
        port = after if colon else None
    if not host or any([c.isspace() or not c.isprintable() for c in host]):
        raise ValueError(f"{text!r} has no host; expected HOST[:PORT]")
    if port is None:
        return host, default_port
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535):
        raise ValueError(f"{port[:20]!r} is not a port: 1..65535")
    return host, int(port)


def check_where(host: str, port: int, minimum: int = 1) -> int:
    """Check where a server listens, and return the port as an int.

    Pass ``minimum=0`` where port 0 stands for any free port.
    """
    expect("host", host, str)
    if not host:
        raise ValueError("host: expected a name or an address, got ''")
    name, _, digits = host.partition(":")
    if name and digits.isdecimal():
        raise ValueError(f"host: {host!r} includes a port; pass it as port={digits}")
    return within("port", port, minimum, 65535)


def is_loopback(address: tuple[Any, ...]) -> bool:
    """Whether only this machine can reach a socket's address."""
    return ip_address(address[0].partition("%")[0]).is_loopback
