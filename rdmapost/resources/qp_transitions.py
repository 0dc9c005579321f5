"""Queue pair transitions: compute their attributes, and explain why one is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._arguments import expect, index
from ..enums import MTU, Access, QPAttrMask, QPState, QPType
from ..standard.qp_states import FIELDS, RANGES
from .address import AHAttr, fill_ah_attr
from .device import DeviceAttr
from .endpoint import Endpoint
from .qp_attr import QPAttr

RTR_OPTIONS = {"min_rnr_timer", "max_dest_rd_atomic", "sl", "traffic_class"}
RTS_OPTIONS = {"timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"}
"""The options of to_rtr and to_rts, which connect passes on."""


def mask_of(attrs: Iterable[str]) -> QPAttrMask:
    """Return the mask of attributes; raise TypeError for one that there is not."""
    mask = QPAttrMask(0)
    for name in attrs:
        if name not in FIELDS:
            raise TypeError(f"struct ibv_qp_attr has no field {name}")
        mask |= FIELDS[name]
    return mask


def fill_attributes(raw: Any, attrs: dict[str, Any]) -> None:
    """Write attributes into a ``struct ibv_qp_attr``; in `attrs` numbers become ints."""
    for name, value in attrs.items():
        if name in ("ah_attr", "alt_ah_attr"):
            expect(name, value, AHAttr)
            fill_ah_attr(value, getattr(raw, name))
            continue
        attrs[name] = number = index(name, value, _ENUM_FIELDS.get(name, "int"))
        try:
            setattr(raw, name, number)
        except OverflowError:
            raise ValueError(f"{name}={value!r} does not fit struct ibv_qp_attr") from None


def grantable(access: int, qp_type: QPType, device: DeviceAttr) -> int:
    """Return the requested access flags that the queue pair's type and the device support."""
    if qp_type is QPType.UC:
        # UC has no reads and atomics, and drivers refuse their flags.
        return access & ~(Access.REMOTE_READ | Access.REMOTE_ATOMIC)
    if not device.atomic_cap:
        return access & ~Access.REMOTE_ATOMIC
    return access


def refuse_another_peer(qp: str, now: QPAttr, remote: Endpoint) -> None:
    """Raise ValueError for a peer other than the one set in the transition to RTR."""
    path = now.ah_attr
    by_gid = path.dgid is not None
    if now.dest_qp_num == remote.qpn and (
        path.dgid == remote.gid if by_gid else path.dlid == remote.lid
    ):
        return
    if now.qp_state is QPState.ERR:
        raise ValueError(f"{qp} is in ERR; take it back with to_reset() first")
    where = f"GID {path.dgid}" if by_gid else f"LID {path.dlid:#x}"
    raise ValueError(
        f"{qp} is in {now.qp_state.name}, connected to QP {now.dest_qp_num:#x} at {where}, "
        f"not to {remote}; take it back with to_reset() first"
    )


def out_of_range(attrs: dict[str, Any], device: DeviceAttr) -> str | None:
    """Name an attribute that is out of range for this device, or for any."""
    ranges = {
        **RANGES,
        "max_rd_atomic": (0, device.max_qp_init_rd_atom),
        "max_dest_rd_atomic": (0, device.max_qp_rd_atom),
    }
    for name, (low, high) in ranges.items():
        if name in attrs and not low <= attrs[name] <= high:
            return f"{name}={attrs[name]} is not in {low}..{high} (ibv_modify_qp(3))"
    return None


_ENUM_FIELDS = {
    "qp_state": QPState.__name__,
    "cur_qp_state": QPState.__name__,
    "path_mtu": MTU.__name__,
    "qp_access_flags": Access.__name__,
}
