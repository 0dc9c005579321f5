"""Address handles and address vectors."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._arguments import content, counted, expect, index, member, within
from .._binding import ffi
from ..enums import LinkLayer, WCFlags, WCOpcode, WCStatus
from ..errors import VerbsError
from ..standard.wire import GRH_BYTES
from .cq import WC
from .device import Context, provider_of, refuse_beyond
from .gid import GID, GIDLike, gid_argument, no_such_gid
from .grh import GRH
from .pd import PD
from .resource import struct_of
from .work_queues import UsedByWorkRequests

_LOCAL = {"port_num": 255, "dlid": 0xFFFF, "sl": 15, "src_path_bits": 255, "static_rate": 255}
_GLOBAL = {"sgid_index": 255, "flow_label": (1 << 20) - 1, "hop_limit": 255, "traffic_class": 255}
"""The largest value of each field, in ``struct ibv_ah_attr`` and in its GRH."""
_OF_WC = {
    "wc_flags": (1 << 32) - 1,
    "slid": 0xFFFF,
    "sl": 255,
    "dlid_path_bits": 255,
    "src_qp": (1 << 32) - 1,
    "pkey_index": 0xFFFF,
}
"""The largest value of each field of ``struct ibv_wc`` that ibv_init_ah_from_wc(3) reads."""
_NO_PATH = frozenset({errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT})
"""The errnos for a path that the device cannot use."""
_GIDS = "'rdmapost devices -v' lists this machine's"
"""How to find a source GID; ah_to() uses its queue pair's, and AH accepts any."""


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
        sgid_index: index of the source GID in the local port's table.
        flow_label: 0..2^20-1.
        hop_limit: 0..255.
        traffic_class: 0..255.

    AH and QP.modify check the numbers when they use them.

    Raises:
        TypeError: dgid has the wrong type.
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

    if TYPE_CHECKING:

        def __init__(
            self,
            port_num: int = 1,
            dlid: int = 0,
            sl: int = 0,
            src_path_bits: int = 0,
            static_rate: int = 0,
            dgid: GIDLike | None = None,
            sgid_index: int = 0,
            flow_label: int = 0,
            hop_limit: int = 64,
            traffic_class: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        # The attribute is a GID, whatever the argument was.
        if self.dgid is not None:
            object.__setattr__(self, "dgid", gid_argument("dgid", self.dgid))


# For help(): the types that the argument may have.
AHAttr.__init__.__annotations__["dgid"] = "GIDLike | None"


def fill_ah_attr(attr: AHAttr, raw: Any) -> None:
    """Check an address vector's numbers, and write it to a ``struct ibv_ah_attr``."""
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
    dgid = bytes(raw.grh.dgid.raw)
    # Drivers report an unset path as a path to the GID ::, which is not an address.
    return AHAttr(dgid=GID(dgid) if raw.is_global and any(dgid) else None, **values)


def ah_attr_from_wc(context: Context, wc: WC, grh: GRH | None, port_num: int) -> AHAttr:
    """Return the address vector of a datagram's sender (ibv_init_ah_from_wc(3))."""
    expect("wc", wc, WC)
    expect("grh", grh, GRH, None)
    port_num = context.query_port(port_num).port_num
    # Check the fields: a program may have made or changed this WC (_replace).
    wc._replace(status=member("wc.status", wc.status, WCStatus)).check()
    if wc.opcode is None or not index("wc.opcode", wc.opcode) & WCOpcode.RECV:
        raise ValueError(f"wc: {getattr(wc.opcode, 'name', wc.opcode)} received nothing")
    raw, header = ffi.new("struct ibv_wc *"), ffi.new("struct ibv_grh *")
    for name, maximum in _OF_WC.items():
        setattr(raw, name, within(f"wc.{name}", getattr(wc, name), 0, maximum))
    if raw.wc_flags & WCFlags.GRH and grh is None:
        raise ValueError("grh is missing: the datagram has one; pass wc.datagram(...).grh")
    if grh is not None:
        # Unlike memmove(), this checks the length: a subclass may pack fewer bytes.
        ffi.buffer(header)[:] = _packed(grh)
    attr = ffi.new("struct ibv_ah_attr *")
    init = provider_of(context).init_ah_from_wc
    try:
        context._verb(init, port_num, raw, header, attr)
    except VerbsError as error:
        if grh is not None:
            error.hint = error.hint or (
                f"the datagram was sent to the multicast group {grh.dgid}, which cannot be a "
                "source GID; use AH(pd, AHAttr(dgid=grh.sgid, sgid_index=qp.gid.gid_index))"
                if grh.dgid.is_multicast
                else f"{grh.dgid}, which the datagram was sent to, may not be a GID of "
                f"{context.name} port {port_num}"
            )
        raise
    return read_ah_attr(attr)


def _packed(grh: GRH) -> bytes:
    """Return a GRH's bytes, and check that they fill a ``struct ibv_grh``."""
    packed = content("grh", grh.pack())
    if len(packed) != GRH_BYTES:
        raise ValueError(
            f"grh: its pack() returned {counted(len(packed), 'byte')}; a GRH has {GRH_BYTES}"
        )
    return packed


def refuse_missing_source(context: Context, raw: Any) -> None:
    """Check the port and the GID index in a ``struct ibv_ah_attr``.

    Raises:
        ValueError: the device has no such port, or the index is not in the port's table.
    """
    length = context.query_port(raw.port_num).gid_tbl_len
    if raw.is_global:
        refuse_beyond("sgid_index", raw.grh.sgid_index, length, "GID", context, raw.port_num)


def why_no_source(context: Context, attr: AHAttr) -> str | None:
    """Say that a port has no GID at an address vector's sgid_index, or return None."""
    if attr.dgid is None:
        return None
    table = context.query_gid_table(attr.port_num)
    if any([entry.gid_index == attr.sgid_index for entry in table]):
        return None
    return no_such_gid(context.name, attr.port_num, attr.sgid_index, table)


def why_no_path(context: Context, attr: AHAttr, code: int | None, what_to_do: str) -> str:
    """Return a message that a device cannot use a path, or "" if its errno means something else.

    Args:
        context: an open device.
        attr: the path; its source GID is in the port's table.
        code: the device's errno.
        what_to_do: how to choose another source GID.
    """
    if attr.dgid is None or code not in _NO_PATH:
        return ""
    source = context.query_gid(attr.port_num, attr.sgid_index)
    return (
        f"{attr.dgid} cannot be reached from GID {attr.sgid_index} ({source}); both sides need "
        f"GIDs of one kind and one network ({what_to_do})"
    )


class AH(UsedByWorkRequests, struct="ibv_ah"):
    """An address handle: the path to a UD peer (ibv_create_ah(3)).

    Args:
        pd: the protection domain of the queue pairs that will use it.
        attr: the address vector.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the device has no such port, the port has no GID at sgid_index, or a number is
            out of range.
        ClosedError: the PD is closed.
        VerbsError: the device refused; the message says what to check.
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
        refuse_missing_source(context, raw)
        try:
            self._make(provider.create_ah, (pd, raw), provider.destroy_ah, (pd,))
        except VerbsError as error:
            if reason := why_no_source(context, attr):
                raise ValueError(reason) from error
            error.hint = error.hint or why_no_path(context, attr, error.errno, _GIDS)
            raise

    @classmethod
    def from_wc(cls, pd: PD, wc: WC, grh: GRH | None = None, port_num: int = 1) -> AH:
        """Create an address handle to a datagram's sender, from the datagram's completion.

        Post to it with ``remote_qpn=wc.src_qp``.  The source GID is the GID that the datagram was
        sent to, so this fails for a datagram to a multicast group: give AH an AHAttr with
        ``dgid=grh.sgid`` instead.

        Args:
            pd: the protection domain of the queue pairs that will use it.
            wc: the completion of a UD receive.
            grh: the datagram's GRH, ``wc.datagram(...).grh``; not needed if it had none
                (wc_flags lacks GRH; InfiniBand only).
            port_num: the port that the datagram arrived on, from 1.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: wc is not a receive's completion; a number in wc or grh does not fit its
                field; the datagram's GRH is missing; or the device has no such port.
            CompletionError: the receive failed.
            ClosedError: the PD is closed.
            VerbsError: the device refused, or the datagram was not sent to a GID of the port.

        See ibv_create_ah_from_wc(3).
        """
        expect("pd", pd, PD)
        return cls(pd, ah_attr_from_wc(pd.context, wc, grh, port_num))

    def __str__(self) -> str:
        attr = getattr(self, "attr", None)
        return f"AH to {attr.dgid or attr.dlid}" if attr else self._type_name
