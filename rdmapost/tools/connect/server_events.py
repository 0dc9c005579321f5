"""The events that a server reports to its owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...enums import QPType
from .protocol_messages import Arrival, Offer


@dataclass(frozen=True, slots=True)
class Joined:
    """A client has received its queue pair and its memory.

    Attributes:
        client: its number, from 1.
        address: its address, HOST:PORT.
        qp_type: type of its queue pair.
        offer: the server's offer to it: the exposed address, rkey, size, access, receives.
        private_data: bytes that it sent when it connected.
    """

    client: int
    address: str
    qp_type: QPType
    offer: Offer
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message has arrived in one of a client's receives, or its queue pair has failed.

    Attributes:
        client: its number.
        arrival: the message; for a failure, only index and status are valid.
    """

    client: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class Changed:
    """How a client's memory differs from its initial contents.

    With ``shared``, the initial contents are those when the server started, so other clients'
    writes count.

    Attributes:
        offset, length: the range from the first changed byte to the last.
        data: the first bytes of that range, at most 1024.
    """

    offset: int
    length: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """A client has left, and its resources have been released.

    Attributes:
        client: its number.
        address: its address, HOST:PORT.
        reason: why, in one line.
        changed: the changes to the memory that the client could write to, or None.
    """

    client: int
    address: str
    reason: str
    changed: Changed | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A connection was refused, or dropped before it became a client.

    Attributes:
        address: the peer's address, HOST:PORT.
        code: the type of error, one of protocol_messages.CODES or "lost".
        text: the error sent to the client, in one line.
    """

    address: str
    code: str
    text: str


Event = Joined | Arrived | Left | Refused
OnEvent = Callable[[Event], None]
