"""The arguments of ``QP(...)``, which is in ``qp.py``.

This checks them, chooses the call, and explains a refusal by the device.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from .._arguments import expect
from .._binding import ffi, lib
from ..enums import DeviceCap, Opcode, QPType, SendOps, SRQType
from ..errors import UnsupportedError
from ..standard.opcodes import QP_TYPES_BY_OPCODE
from .cq import CQ
from .device import Context, provider_of
from .device_attr import beyond
from .pd import PD
from .resource import struct_of
from .srq import SRQ
from .xrcd import XRCD

NOT_PERMITTED = frozenset({errno.EPERM, errno.EACCES})
"""The errnos that a device returns if the process may not create RAW_PACKET queue pairs."""

XRC = frozenset({QPType.XRC_SEND, QPType.XRC_RECV})
"""The types whose receives come from the SRQ that a message names."""


_SEND_OPS_CAPS = {
    SendOps.FLUSH: DeviceCap.FLUSH_GLOBAL | DeviceCap.FLUSH_PERSISTENT,
    SendOps.ATOMIC_WRITE: DeviceCap.ATOMIC_WRITE,
}
"""For each operation, its capabilities, any one of which is enough."""
_SEND_OPS = tuple(SendOps)


def _ops_in(flags: SendOps) -> list[SendOps]:
    return [op for op in _SEND_OPS if op & flags]


_SEND_OPS_SINCE = {SendOps.ATOMIC_WRITE: 44, SendOps.FLUSH: 45}
"""For each newer operation, the first release of libibverbs that has it."""


def device_of(
    qp_type: QPType, pd: PD | None, send_cq: CQ | None, recv_cq: CQ | None, xrcd: XRCD | None
) -> Context:
    """Check the arguments of a new queue pair, and return the open device that they belong to.

    Raises:
        TypeError: the PD or the CQ is missing.
        ValueError: the type needs an argument that is missing, or does not allow one that is
            given; or the CQs and the PD belong to different open devices.
    """
    name = qp_type.name
    if qp_type is QPType.XRC_RECV:
        if xrcd is None:
            raise ValueError(f"{name} queue pairs need an XRC domain (xrcd=...)")
        if pd is not None or send_cq is not None or recv_cq is not None:
            raise ValueError(
                f"{name} queue pairs have no PD and no CQs, but use those of the SRQ that a "
                f"message names: QP(None, QPType.{name}, xrcd=xrcd)"
            )
        return xrcd.context
    if xrcd is not None:
        raise ValueError(f"xrcd is only for XRC_RECV queue pairs, not {name}")
    expect("pd", pd, PD)
    expect("send_cq", send_cq, CQ)
    assert pd is not None
    if any([cq is not None and cq.context is not pd.context for cq in (send_cq, recv_cq)]):
        raise ValueError("the CQ and the PD belong to different open devices")
    return pd.context


def unsuitable_argument(
    qp_type: QPType, context: Context, srq: SRQ | None, max_tso_header: int, send_ops_flags: SendOps
) -> str | None:
    """Say which argument the type does not support; return None if all are valid."""
    name = qp_type.name
    if srq is not None and srq.pd.context is not context:
        return "the SRQ and the PD belong to different open devices"
    if srq is not None and (qp_type in XRC or srq.srq_type is SRQType.XRC):
        return (
            "XRC receives belong to the SRQ that a message names (remote_srqn), not to a queue pair"
        )
    if srq is not None and srq.srq_type is SRQType.TM and qp_type is not QPType.RC:
        return f"tag matching requires an RC queue pair, not {name}"
    if max_tso_header and qp_type not in QP_TYPES_BY_OPCODE[Opcode.TSO]:
        return f"{name} queue pairs have no TSO, so max_tso_header cannot be given"
    if not 0 <= max_tso_header <= 0xFFFF:
        return f"max_tso_header={max_tso_header} is not in 0..65535"
    for op in _ops_in(send_ops_flags):
        if qp_type not in QP_TYPES_BY_OPCODE[Opcode[op.name or ""]]:
            return f"{name} queue pairs have no {op.name}, so send_ops_flags cannot name it"
    return None


def create_call(
    context: Context,
    pd: PD | None,
    xrcd: XRCD | None,
    init: Any,
    max_tso_header: int,
    send_ops_flags: SendOps,
    *,
    checked: bool,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the provider's function that creates such a queue pair, and the function's arguments.

    Args:
        context: the open device.
        pd: the protection domain; None for XRC_RECV.
        xrcd: the XRC domain of an XRC_RECV queue pair.
        init: a struct ibv_qp_init_attr_ex; its type, queues and capabilities are set, and the
            function replaces the capabilities with those granted.
        max_tso_header: the largest TSO header in bytes; 0 for no TSO.
        send_ops_flags: the opcodes that ibv_wr_*() is to post; 0 for none.
        checked: refuse operations for which the device reports no capability.

    Raises:
        ClosedError: the PD or the XRC domain is closed.
        UnsupportedError: the device has no capability for one of send_ops_flags, or no TSO.
    """
    provider = provider_of(context)
    if xrcd is not None:
        init.xrcd, init.comp_mask = struct_of(xrcd), lib.IBV_QP_INIT_ATTR_XRCD
        return provider.create_qp_ex, (context, init)
    assert pd is not None
    if max_tso_header or send_ops_flags or init.qp_type == QPType.XRC_SEND:
        init.pd, init.comp_mask = struct_of(pd), lib.IBV_QP_INIT_ATTR_PD
        if max_tso_header:
            if checked and not context.attr.tso_caps.supports(QPType(init.qp_type)):
                raise _incapable(
                    f"max_tso_header={max_tso_header}",
                    f"{context.name} has no TSO on {QPType(init.qp_type).name} (see its "
                    "attr.tso_caps)",
                )
            init.max_tso_header = max_tso_header
            init.comp_mask |= lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        if send_ops_flags:
            # A driver may create the queue pair anyway: Soft-RoCE in Linux 6.1 then fails every
            # ATOMIC_WRITE with LOC_QP_OP_ERR.
            if checked and (lacking := _lacking(context, send_ops_flags)):
                raise _incapable(
                    f"send_ops_flags={lacking[0]}",
                    f"{context.name} has no {lacking[0]} (see its attr.device_cap_flags_ex)",
                )
            init.send_ops_flags = send_ops_flags
            init.comp_mask |= lib.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
        return provider.create_qp_ex, (context, init)
    # The extended struct begins with the older one. The cast does not keep the struct alive; the
    # caller does.
    return provider.create_qp, (pd, ffi.cast("struct ibv_qp_init_attr *", init))


def _lacking(context: Context, send_ops_flags: SendOps) -> list[SendOps]:
    """Return the operations for which the device has no capability."""
    has = context.attr.device_cap_flags_ex
    return [op for op, caps in _SEND_OPS_CAPS.items() if op & send_ops_flags and not caps & has]


def _incapable(given: str, reason: str) -> UnsupportedError:
    text = f"{given}: {reason}; checked=False leaves it to the driver"
    return UnsupportedError("ibv_create_qp_ex", errno.EOPNOTSUPP, text)


def why_not_created(
    code: int | None, context: Context, init: Any, max_tso_header: int, send_ops_flags: SendOps
) -> str:
    """Guess why the device refused, and say which limit was exceeded."""
    attr, device = context.attr, context.name
    if init.qp_type == QPType.RAW_PACKET and code in NOT_PERMITTED:
        return "RAW_PACKET queue pairs need CAP_NET_RAW: run as root"
    cap = init.cap
    if reason := beyond(
        attr,
        ("max_send_wr", cap.max_send_wr, "max_qp_wr"),
        ("max_recv_wr", cap.max_recv_wr, "max_qp_wr"),
        ("max_send_sge", cap.max_send_sge, "max_sge"),
        ("max_recv_sge", cap.max_recv_sge, "max_sge"),
    ):
        return reason
    if send_ops_flags:
        names = "|".join([op.name or "" for op in _ops_in(send_ops_flags)])
        lacking = [op.name or "" for op in _lacking(context, send_ops_flags)]
        needs = ", ".join(
            [
                f"{op.name} needs libibverbs {since} or later"
                for op, since in _SEND_OPS_SINCE.items()
                if op & send_ops_flags
            ]
        )
        if lacking:
            return f"send_ops_flags={names}: {device} has no {' and no '.join(lacking)}"
        return (
            f"send_ops_flags={names}: not {device}, but the installed libibverbs or its driver for "
            f"the device lacks it{'; ' if needs else ''}{needs}"
        )
    if max_tso_header:
        return f"max_tso_header={max_tso_header}, but {device} may have no TSO"
    if cap.max_inline_data:
        return (
            f"max_inline_data={cap.max_inline_data} may be more than {device} can take; "
            "in Python, rdmapost.max_inline() finds the largest"
        )
    type_name = QPType(init.qp_type).name
    return (
        f"{device} may not have {type_name} queue pairs, or no more of them (max_qp={attr.max_qp})"
    )
