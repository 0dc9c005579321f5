"""What one side must know about the other to connect a queue pair."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._arguments import expect, member, within
from ..enums import MTU
from .gid import GID, GIDLike, gid_argument

_HEX = r"0x[0-9a-f]{1,16}"
_FIELDS = {"qp_num": _HEX, "psn": _HEX, "gid": r"[^\s%]{1,64}", "lid": _HEX, "mtu": r"[0-9]{1,9}"}
"""The form of each field in a line, in order."""
_LINE = re.compile(" ".join(f"{name}=({form})" for name, form in _FIELDS.items()))
_BY_BYTES = {mtu.bytes: mtu for mtu in MTU}
_BITS = {"qp_num": 24, "psn": 24, "lid": 16}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A queue pair's address, as its peer needs it.

    ``str(endpoint)`` is one line of text and ``Endpoint.parse`` reads it back, so any channel can
    carry it.

    Attributes:
        qp_num: number of the queue pair, 0..2^24-1.
        psn: first packet sequence number that it sends, 0..2^24-1.
        gid: its GID; pass a GID, 16 bytes or text.
        lid: its port's LID; 0 on Ethernet.
        mtu: the largest path MTU of its port.

    Raises:
        TypeError: a field has the wrong type; the message names it.
        ValueError: a number is out of range, or gid is not a GID.
    """

    qp_num: int
    psn: int
    gid: GID
    lid: int
    mtu: MTU

    if TYPE_CHECKING:

        def __init__(
            self, qp_num: int, psn: int, gid: GIDLike, lid: int, mtu: MTU | int
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in _BITS:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        object.__setattr__(self, "gid", gid_argument("gid", self.gid))
        object.__setattr__(self, "mtu", member("mtu", self.mtu, MTU))

    def __str__(self) -> str:
        return (
            f"qp_num={self.qp_num:#x} psn={self.psn:#x} gid={self.gid} lid={self.lid:#x} "
            f"mtu={self.mtu.bytes}"
        )

    @classmethod
    def parse(cls, line: str) -> Endpoint:
        """Read an endpoint from the text that ``str`` returns.

        Args:
            line: the text; space around it does not matter.

        Raises:
            TypeError: it is not a str.
            ValueError: line is not an endpoint, or a field is out of range; if the line has any of
                an endpoint's fields, the message names the wrong ones.
        """
        expect("line", line, str)
        match = _LINE.fullmatch(line.strip())
        if match is None:
            why = _why_no_endpoint(line)
            raise ValueError(f"not an endpoint: {line[:120]!r}{'; ' if why else ''}{why}")
        qpn, psn, gid, lid, mtu = match.groups()
        return cls(int(qpn, 16), int(psn, 16), gid, int(lid, 16), _mtu(mtu))


def _number(name: str, given: int) -> int:
    return within(name, given, 0, (1 << _BITS[name]) - 1)


def _mtu(text: str) -> MTU:
    if int(text) not in _BY_BYTES:
        raise ValueError(f"mtu={text} is not one of {', '.join(map(str, _BY_BYTES))}")
    return _BY_BYTES[int(text)]


def _why_no_endpoint(line: str) -> str:
    """Say which fields of a line are wrong; return "" if it has no field of an endpoint."""
    given = [part.partition("=") for part in line.split()]
    names = [name for name, _, _ in given]
    missing = [name for name in _FIELDS if name not in names]
    if len(missing) == len(_FIELDS):
        return ""
    if missing:
        return f"it has no {', '.join(missing)}"
    for at, (name, equals, _) in enumerate(given):
        if name not in _FIELDS or not equals:
            return f"{(name + equals)[:40]!r} is not one of its fields: {', '.join(_FIELDS)}"
        if name in names[:at]:
            return f"{name} is given more than once"
    if wrong := [why for name, _, value in given if (why := _why_not(name, value))]:
        return "; ".join(wrong)
    return f"its fields are {', '.join(_FIELDS)}, in this order, with one space between them"


def _why_not(name: str, value: str) -> str:
    """Return why a field cannot have the value that a line gives it, or "" if it can."""
    shown = f"{name}={value[:40]}"
    try:
        if name == "gid":
            gid_argument(name, value)
        elif not re.fullmatch(_FIELDS[name], value):
            form = "a number of bytes" if name == "mtu" else "a hexadecimal number such as 0x1f"
            return f"{shown} is not {form}"
        elif name == "mtu":
            _mtu(value)
        else:
            _number(name, int(value, 16))
    except ValueError as error:
        return str(error)[:120]
    return "" if re.fullmatch(_FIELDS[name], value) else f"{shown} is not a GID"
