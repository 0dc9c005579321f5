"""GIDs: their bytes and text, the entries of a GID table, and which entry is preferred."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any, TypeAlias

from .._arguments import expect
from ..enums import GIDType
from ..standard.wire import is_multicast_gid


class GID(bytes):
    """A global identifier: 16 bytes, shown as an IPv6 address (``union ibv_gid``).

    Args:
        value: 16 bytes (any bytes-like object), or text such as "fe80::1" or "::ffff:10.0.0.1".

    Raises:
        TypeError: value is neither bytes-like nor text.
        ValueError: value is not 16 bytes, or not an IPv6 address.
    """

    def __new__(cls, value: GIDLike) -> GID:
        return super().__new__(cls, _gid_bytes("value", value))

    def __str__(self) -> str:
        address = IPv6Address(bytes(self))
        mapped = address.ipv4_mapped
        return f"::ffff:{mapped}" if mapped else str(address)

    def __repr__(self) -> str:
        return f"GID('{self}')"

    @property
    def is_link_local(self) -> bool:
        """Whether it is a link-local address, made from a MAC or a GUID."""
        return IPv6Address(bytes(self)).is_link_local

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 address mapped into IPv6."""
        return IPv6Address(bytes(self)).ipv4_mapped is not None

    @property
    def is_multicast(self) -> bool:
        """Whether it names a multicast group: ff00::/8, or 224.0.0.0/4 mapped into IPv6."""
        return is_multicast_gid(self)


GIDLike: TypeAlias = GID | bytes | bytearray | memoryview | str
"""What is accepted as a GID: 16 bytes, or text."""


def gid_argument(name: str, given: Any) -> GID:
    """Return an argument or a field as a GID; error messages call it `name`."""
    return bytes.__new__(GID, _gid_bytes(name, given))


def _gid_bytes(name: str, value: Any) -> bytes:
    expect(name, value, GID, bytes, str, bytearray, memoryview)
    if isinstance(value, str):
        try:
            raw = IPv6Address(value).packed
        except ValueError:
            raise ValueError(f"{name}: {value!r} {_why_no_gid(value)}") from None
    else:
        raw = bytes(value)
    if len(raw) != 16:
        raise ValueError(f"{name}: a GID has 16 bytes, not {len(raw)}")
    return raw


def _why_no_gid(text: str) -> str:
    try:
        return f"is an IPv4 address; its GID is '::ffff:{IPv4Address(text)}'"
    except ValueError:
        return "is not an IPv6 address"


@dataclass(frozen=True, slots=True)
class GIDTableEntry:
    """A valid entry of a port's GID table (ibv_query_gid_table(3)).

    Attributes:
        gid_index: its index in the table.
        gid: the GID.
        gid_type: its type, or None if libibverbs does not report it.
        ndev: name of the network device behind it, or "".
    """

    gid_index: int
    gid: GID
    gid_type: GIDType | None
    ndev: str


@dataclass(frozen=True, slots=True)
class GIDChoice:
    """A GID and why it was chosen.

    Attributes:
        gid_index: its index in the table, to be passed as gid_index.
        gid: the GID.
        gid_type: its type, or None if libibverbs does not report it.
        reason: why it was chosen, in a few words.
    """

    gid_index: int
    gid: GID
    gid_type: GIDType | None
    reason: str

    def __str__(self) -> str:
        gid_type = "" if self.gid_type is None else f" ({self.gid_type.name})"
        return f"{self.gid_index}, {self.gid}{gid_type}: {self.reason}"


def preferred_gid(table: list[GIDTableEntry]) -> GIDChoice:
    """Choose an entry of a port's GID table, which must not be empty."""
    best = max(table, key=_score)
    return GIDChoice(best.gid_index, best.gid, best.gid_type, _reason(best, table))


def _score(entry: GIDTableEntry) -> tuple[bool, bool, bool, int]:
    gid, index = entry.gid, entry.gid_index
    return (entry.gid_type is not GIDType.ROCE_V1, not gid.is_link_local, gid.is_ipv4, -index)


def _reason(best: GIDTableEntry, table: list[GIDTableEntry]) -> str:
    if len(table) == 1:
        return "the only GID of the port"
    name = best.gid_type.name if best.gid_type is not None else "a GID"
    if best.gid.is_ipv4:
        return f"{name} with an IPv4 address"
    if not best.gid.is_link_local:
        return f"{name} with an address that is not link-local"
    return f"{name}; the port's GIDs of this type are link-local"


def no_such_gid(device: str, port_num: int, gid_index: int, table: list[GIDTableEntry]) -> str:
    """Say that a port has no GID with this index, and list the indexes of those it has."""
    valid = ", ".join([str(entry.gid_index) for entry in table]) or "none"
    return (
        f"{device} port {port_num} has no GID with index {gid_index}; the valid ones are: {valid}"
    )
