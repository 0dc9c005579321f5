"""The settings that both sides of a ping-pong must share, and the line that carries them.

The stock programs do not exchange settings. So rdmapost sends its line only when a stock program
has no more use for the connection: after "done", the server sends its line, and a client that
receives it answers with its own line. A stock client has closed the connection by then, and a stock
server closes it without sending anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...enums import MTU, QPType

MAX_LINE = 256
"""Bytes in a line, including its newline."""
_LINE = re.compile(rb"rdmapost((?: [a-z_]+=[A-Za-z0-9]+)+)\n")


@dataclass(frozen=True, slots=True)
class Settings:
    """One side's settings, which must match the other side's.

    Attributes:
        qp_type: RC, UC or UD.
        size: bytes per message.
        iters: messages each way.
        mtu: the path MTU; None on UD, which has none.
    """

    qp_type: QPType
    size: int
    iters: int
    mtu: MTU | None

    def fields(self) -> dict[str, str]:
        """Return the settings by name, as text."""
        found = {"qp_type": self.qp_type.name}
        if self.mtu is not None:
            found["mtu"] = str(self.mtu.bytes)
        return {**found, "size": str(self.size), "iters": str(self.iters)}

    def encode(self) -> bytes:
        """Return the settings as a line of text."""
        fields = " ".join(f"{name}={value}" for name, value in self.fields().items())
        return f"rdmapost {fields}\n".encode()

    def differences(self, theirs: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Return the fields whose values differ from a peer's: by name, both sides' values.

        Fields that only one side has are not compared.
        """
        return {
            name: (mine, theirs[name])
            for name, mine in self.fields().items()
            if name in theirs and theirs[name] != mine
        }


def decode(line: bytes) -> dict[str, str] | None:
    """Return the fields of a peer's line, even unknown ones; None if it is not a settings line."""
    if (match := _LINE.fullmatch(line)) is None:
        return None
    pairs = (field.partition("=") for field in match[1].decode().split())
    return {name: value for name, _, value in pairs}
