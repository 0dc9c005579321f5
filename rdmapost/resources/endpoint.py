"""What one side must know about the other to connect a queue pair."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._arguments import expect, member, within
from ..enums import MTU
from .gid import GID, GIDLike, gid_argument

_LINE = re.compile(
    r"qp_num=(0x[0-9a-f]{1,16}) psn=(0x[0-9a-f]{1,16}) gid=([^\s%]{1,64}) "
    r"lid=(0x[0-9a-f]{1,16}) mtu=([0-9]{1,9})"
)
_BY_BYTES = {mtu.bytes: mtu for mtu in MTU}

_FIELDS = ("qp_num", "psn", "gid", "lid", "mtu")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A queue pair's address, as its peer needs it.

    ``str(endpoint)`` is one line of text and ``Endpoint.parse`` reads it back,
    so any channel carries it.

    Attributes:
        qp_num: number of the queue pair, 0..2^24-1.
        psn: first packet sequence number that it sends, 0..2^24-1.
        gid: its GID; given as a GID, 16 bytes or text.
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
        for name, bits in (("qp_num", 24), ("psn", 24), ("lid", 16)):
            value = within(name, getattr(self, name), 0, (1 << bits) - 1)
            object.__setattr__(self, name, value)
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
            ValueError: line is not an endpoint, or a field is out of range; the message
                names the field.
        """
        expect("line", line, str)
        match = _LINE.fullmatch(line.strip())
        if match is None:
            missing = [name for name in _FIELDS if f"{name}=" not in line]
            lacks = f"; it has no {', '.join(missing)}" if len(missing) < len(_FIELDS) else ""
            raise ValueError(f"not an endpoint: {line[:120]!r}{lacks if missing else ''}")
        qpn, psn, gid, lid, mtu = match.groups()
        if int(mtu) not in _BY_BYTES:
            raise ValueError(f"mtu={mtu} is not one of {', '.join(map(str, _BY_BYTES))}")
        return cls(int(qpn, 16), int(psn, 16), gid, int(lid, 16), _BY_BYTES[int(mtu)])
