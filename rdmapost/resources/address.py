"""Choosing a GID, and address handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._arguments import expect, index, within
from .._binding import ffi
from ..enums import GIDType, LinkLayer
from ..errors import RdmaError, VerbsError
from .device import GID, Context, GIDTableEntry, gid_argument, provider_of
from .memory import PD
from .posted import Postable
from .resource import struct_of


@dataclass(frozen=True, slots=True)
class GIDChoice:
    """A GID and why it was chosen.

    Attributes:
        index: the gid_index to give.
        gid: the GID.
        gid_type: its type, or None if libibverbs does not report it.
        reason: why this one, in a few words.
    """

    index: int
    gid: GID
    gid_type: GIDType | None
    reason: str

    def __str__(self) -> str:
        gid_type = "" if self.gid_type is None else f" ({self.gid_type.name})"
        return f"{self.index}, {self.gid}{gid_type}: {self.reason}"


def choose_gid(context: Context, port_num: int = 1, gid_index: int | None = None) -> GIDChoice:
    """Choose a GID of a port, or describe the one that is given.

    It prefers RoCE v2 to v1, then any address to a link-local one, then IPv4 to
    IPv6 (most RoCE networks use IPv4), then the lower index.

    Args:
        context: an open device.
        port_num: the port, from 1.
        gid_index: take this entry and no other.

    Raises:
        TypeError: an argument is of another type.
        RdmaError: the port has no GID, or no such entry.
        ValueError: the device has no such port.
    """
    expect("context", context, Context)
    if gid_index is not None:
        gid_index = index("gid_index", gid_index)
    table = context.query_gid_table(port_num)
    if gid_index is not None:
        for entry in table:
            if entry.index == gid_index:
                return GIDChoice(entry.index, entry.gid, entry.gid_type, "asked for")
        raise RdmaError(_no_such_gid(context, port_num, gid_index, table))
    if not table:
        raise RdmaError(
            f"{context.name} port {port_num} has no GID; "
            "give its network device an address and bring it up "
            "('ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up')"
        )
    best = max(table, key=lambda entry: (*_score(entry), -entry.index))
    return GIDChoice(best.index, best.gid, best.gid_type, _reason(best, table))


def _no_such_gid(
    context: Context, port_num: int, gid_index: int, table: list[GIDTableEntry]
) -> str:
    valid = ", ".join(str(entry.index) for entry in table) or "none"
    return (
        f"{context.name} port {port_num} has no GID with index {gid_index}; "
        f"the valid ones are: {valid}"
    )


def _score(entry: GIDTableEntry) -> tuple[bool, bool, bool]:
    gid = entry.gid
    return (entry.gid_type is not GIDType.ROCE_V1, not gid.is_link_local, gid.is_ipv4)


def _reason(best: GIDTableEntry, table: list[GIDTableEntry]) -> str:
    if len(table) == 1:
        return "the only GID of the port"
    name = best.gid_type.name if best.gid_type is not None else "a GID"
    if best.gid.is_ipv4:
        return f"{name} with an IPv4 address"
    if not best.gid.is_link_local:
        return f"{name} with an address that is not link-local"
    return f"{name}; the port has only link-local addresses"


_LOCAL = {"port_num": 255, "dlid": 0xFFFF, "sl": 15, "src_path_bits": 255, "static_rate": 255}
_GLOBAL = {"sgid_index": 255, "flow_label": (1 << 20) - 1, "hop_limit": 255, "traffic_class": 255}
"""The largest value of each field, in ``struct ibv_ah_attr`` and in its GRH."""


@dataclass(frozen=True, slots=True)
class AHAttr:
    """An address vector, the path to a peer (``struct ibv_ah_attr``, ibv_create_ah(3)).

    Attributes:
        port_num: local port, from 1.
        dlid: the peer's LID; 0 on Ethernet.
        sl: service level, 0..15.
        src_path_bits: low bits of the source LID.
        static_rate: encoded rate limit; 0 for none.
        dgid: the peer's GID, as a GID, 16 bytes or text; None if the LID is enough (InfiniBand).
        sgid_index: which of the local GIDs is the source.
        flow_label: 0..2^20-1.
        hop_limit: 0..255.
        traffic_class: 0..255.

    AH and QP.modify check the numbers when they use them.

    Raises:
        TypeError: dgid is of another type.
        ValueError: dgid is not a GID.
    """

    port_num: int = 1
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    dgid: GID | None = None
    sgid_index: int = 0
    flow_label: int = 0
    hop_limit: int = 64
    traffic_class: int = 0

    def __post_init__(self) -> None:
        if self.dgid is not None:
            object.__setattr__(self, "dgid", gid_argument("dgid", self.dgid))


def fill_ah_attr(attr: AHAttr, raw: Any) -> None:
    """Write an address vector into a ``struct ibv_ah_attr``; check its numbers."""
    for name, maximum in _LOCAL.items():
        setattr(raw, name, within(name, getattr(attr, name), 0, maximum))
    raw.is_global = attr.dgid is not None
    if attr.dgid is not None:
        raw.grh.dgid.raw = bytes(attr.dgid)
        for name, maximum in _GLOBAL.items():
            setattr(raw.grh, name, within(name, getattr(attr, name), 0, maximum))


def read_ah_attr(raw: Any) -> AHAttr:
    """Return the address vector in a ``struct ibv_ah_attr``."""
    values = {name: getattr(raw, name) for name in _LOCAL}
    values |= {name: getattr(raw.grh, name) for name in _GLOBAL}
    return AHAttr(dgid=GID(bytes(raw.grh.dgid.raw)) if raw.is_global else None, **values)


def why_no_source(context: Context, attr: AHAttr) -> str | None:
    """Say that the port lacks the GID index that an address vector names, or return None."""
    if attr.dgid is None:
        return None
    table = context.query_gid_table(attr.port_num)
    if any(entry.index == attr.sgid_index for entry in table):
        return None
    return _no_such_gid(context, attr.port_num, attr.sgid_index, table)


class AH(Postable, struct="ibv_ah"):
    """An address handle: the path to a UD peer (ibv_create_ah(3)).

    Args:
        pd: the protection domain of the queue pairs that will use it.
        attr: the address vector.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the device has no such port, or a number is out of range.
        ClosedError: the PD is closed.
        VerbsError: the device refused; the text says what to check.
    """

    __slots__ = ("attr",)

    _type_name = "AH"
    _rank = 2

    def __init__(self, pd: PD, attr: AHAttr) -> None:
        expect("pd", pd, PD)
        expect("attr", attr, AHAttr)
        self.pd = pd
        self.attr = attr
        context = pd.context
        struct_of(pd)
        provider = provider_of(context)
        port = context.query_port(attr.port_num)
        if attr.dgid is None and port.link_layer is LinkLayer.ETHERNET:
            raise ValueError(f"{context.name} port {port.port_num} is Ethernet: give the AH a dgid")
        raw = ffi.new("struct ibv_ah_attr *")
        fill_ah_attr(attr, raw)
        try:
            self._make(provider.create_ah, (pd, raw), provider.destroy_ah, (pd,))
        except VerbsError as error:
            error.hint = error.hint or why_no_source(context, attr) or ""
            raise

    def __str__(self) -> str:
        attr = getattr(self, "attr", None)
        return f"AH to {attr.dgid or attr.dlid}" if attr else self._type_name
