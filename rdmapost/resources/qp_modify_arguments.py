"""The arguments of ``QP.modify`` and ``QP.connect``, which are in ``qp.py``.

This fills in the attributes to modify, and explains a refusal by the device. For the attributes
that each transition requires and allows, see ``standard/qp_states.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

from .._arguments import expect, index, member
from .._binding import ffi
from ..enums import MTU, Access, MigState, QPAttrMask, QPState, QPType
from ..standard.qp_states import FIELDS, OPTIONAL, RANGES, REQUIRED
from .ah import AHAttr, fill_ah_attr, refuse_missing_source
from .device import Context, refuse_beyond
from .device_attr import FLUSH_CAPS, DeviceAttr
from .endpoint import Endpoint
from .qp_attr import QPAttr

INIT_OPTIONS = {"access", "qkey"}
RTR_OPTIONS = {"min_rnr_timer", "max_dest_rd_atomic", "sl", "traffic_class"}
RTS_OPTIONS = {"timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"}
"""The options of connect, by the transition that they belong to."""

_PATH_OPTIONS = {"sl", "traffic_class"}
_ATTRIBUTES = {"access": "qp_access_flags", "sl": "ah_attr", "traffic_class": "ah_attr"}
"""The attribute that an option sets, if their names differ."""
_CLIMB = (QPState.RESET, QPState.INIT, QPState.RTR, QPState.RTS)


def mask_of(attrs: Iterable[str]) -> QPAttrMask:
    """Return the mask of these attributes."""
    mask = QPAttrMask(0)
    for name in attrs:
        mask |= FIELDS[name]
    return mask


def fill_qp_attr(raw: Any, attrs: dict[str, Any]) -> None:
    """Write attributes into a ``struct ibv_qp_attr``, and convert numbers in `attrs` to ints."""
    for name, value in attrs.items():
        if name in ("ah_attr", "alt_ah_attr"):
            expect(name, value, AHAttr)
            fill_ah_attr(value, getattr(raw, name))
            continue
        if name == "en_sqd_async_notify":
            expect(name, value, bool)
        if name in _MEMBERS:
            value = member(name, value, _MEMBERS[name])
        attrs[name] = number = index(name, value, _ENUM_FIELDS.get(name, "int"))
        try:
            setattr(raw, name, number)
        except OverflowError:
            refuse_out_of_range({name: number})
            fields = dict(ffi.typeof("struct ibv_qp_attr").fields)
            bits = 8 * ffi.sizeof(fields[name].type)
            raise ValueError(f"{name}={number} is not in 0..2^{bits}-1") from None


def refuse_missing_entries(
    context: Context, port_num: int, raw: Any, attrs: dict[str, Any]
) -> None:
    """Check the ports that the attributes name, and the indices in the ports' tables.

    Args:
        context: the device.
        port_num: the queue pair's port.
        raw: the attributes as a ``struct ibv_qp_attr``.
        attrs: the attributes, with numbers as ints.

    Raises:
        ValueError: the device has no such port, or the port's table has no such entry.
    """
    for port, pkey, path in _PATHS:
        if path in attrs:
            refuse_missing_source(context, getattr(raw, path))
        if port in attrs or pkey in attrs:
            found = context.query_port(attrs.get(port, port_num))
            number, length = attrs.get(pkey, 0), found.pkey_tbl_len
            refuse_beyond(pkey, number, length, "P_Key", context, found.port_num)


def grantable(access: int, qp_type: QPType, device: DeviceAttr) -> int:
    """Return the requested access flags that the queue pair's type and the device support."""
    if qp_type is QPType.UC:
        # UC has no reads, atomics or flushes, and drivers refuse their flags.
        return access & ~(Access.REMOTE_READ | Access.REMOTE_ATOMIC | sum(FLUSH_CAPS))
    if not device.atomic_cap:
        access &= ~Access.REMOTE_ATOMIC
    for flag, cap in FLUSH_CAPS.items():
        if not device.device_cap_flags_ex & cap:
            access &= ~flag
    return access


def options_of_type(qp_type: QPType, options: dict[str, int]) -> dict[str, int]:
    """Return the options that apply to a queue pair of this type."""
    climb = QPAttrMask(0)
    for start, end in itertools.pairwise(_CLIMB):
        climb |= REQUIRED[qp_type][start, end]
    return {
        option: value
        for option, value in options.items()
        if FIELDS[_ATTRIBUTES.get(option, option)] & climb
    }


def _fixed(qp_type: QPType, state: QPState, options: Iterable[str]) -> list[str]:
    """Return the options that cannot change in this state."""
    to = QPState.SQD if state is QPState.SQD else QPState.RTS
    changeable = OPTIONAL[qp_type].get((state, to), QPAttrMask(0))
    return [
        option for option in options if not FIELDS[_ATTRIBUTES.get(option, option)] & changeable
    ]


def refuse_late_options(qp: str, qp_type: QPType, state: QPState, options: Iterable[str]) -> None:
    """Raise ValueError for options of an earlier transition that cannot change in this state."""
    if not (refused := _fixed(qp_type, state, options)):
        return
    drains = state is QPState.RTS and not _fixed(qp_type, QPState.SQD, options)
    drain = "to_sqd() first, or " if drains else ""
    raise ValueError(
        f"{qp} is in {state.name}, where {', '.join(refused)} cannot be changed "
        f"(ibv_modify_qp(3)): {drain}reset it with to_reset() and connect it again"
    )


def late_attributes(options: dict[str, int], now: Callable[[], QPAttr]) -> dict[str, Any]:
    """Return the attributes that set these options; the options belong to an earlier transition.

    Args:
        options: the options.
        now: a function that queries the current attributes.
    """
    attrs: dict[str, Any] = {
        _ATTRIBUTES.get(option, option): value
        for option, value in options.items()
        if option not in _PATH_OPTIONS
    }
    path: dict[str, Any] = {option: options[option] for option in _PATH_OPTIONS & options.keys()}
    if path:
        attrs["ah_attr"] = dataclasses.replace(now().ah_attr, **path)
    return attrs


def refuse_another_peer(qp: str, now: QPAttr, remote: Endpoint) -> None:
    """Raise ValueError for a peer other than the one set in the transition to RTR."""
    path = now.ah_attr
    by_gid = path.dgid is not None
    if now.dest_qp_num == remote.qp_num and (
        path.dgid == remote.gid if by_gid else path.dlid == remote.lid
    ):
        return
    if now.qp_state is QPState.ERR:
        raise ValueError(f"{qp} is in ERR; call to_reset() first")
    where = f"GID {path.dgid}" if by_gid else f"LID {path.dlid:#x}"
    raise ValueError(
        f"{qp} is in {now.qp_state.name}, connected to QP {now.dest_qp_num:#x} at {where}, "
        f"not to {remote}; call to_reset() first"
    )


def refuse_out_of_range(attrs: dict[str, Any]) -> None:
    """Raise ValueError for a number that is out of range on every device."""
    if reason := _outside(attrs, RANGES):
        raise ValueError(f"{reason} (ibv_modify_qp(3))")


def beyond_the_device(attrs: dict[str, Any], device: DeviceAttr) -> str | None:
    """Say which attribute exceeds the device's limit; return None if none does."""
    limits = {
        "max_rd_atomic": (0, device.max_qp_init_rd_atom),
        "max_dest_rd_atomic": (0, device.max_qp_rd_atom),
    }
    reason = _outside(attrs, limits)
    return f"{reason}, the device's limit" if reason else None


def _outside(attrs: dict[str, Any], ranges: dict[str, tuple[int, int]]) -> str | None:
    for name, (low, high) in ranges.items():
        if name in attrs and not low <= attrs[name] <= high:
            return f"{name}={attrs[name]} is not in {low}..{high}"
    return None


_PATHS = (("port_num", "pkey_index", "ah_attr"), ("alt_port_num", "alt_pkey_index", "alt_ah_attr"))
"""The attributes of the path, and of the alternate path."""
_MEMBERS: dict[str, type[IntEnum]] = {
    "qp_state": QPState,
    "cur_qp_state": QPState,
    "path_mig_state": MigState,
}
_ENUM_FIELDS = {"path_mtu": MTU.__name__, "qp_access_flags": Access.__name__}
