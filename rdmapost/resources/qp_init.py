"""Creating queue pairs: what each type needs, which call creates it, and why one is refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from .._binding import ffi, lib
from ..enums import Opcode, QPType, SRQType
from ..posting.rules import QP_TYPES_BY_OPCODE
from .device import provider_of
from .memory import PD
from .resource import struct_of
from .srq import SRQ
from .xrcd import XRCD

NOT_PERMITTED = frozenset({errno.EPERM, errno.EACCES})
"""What a device returns without permission for RAW_PACKET queue pairs."""

XRC = frozenset({QPType.XRC_SEND, QPType.XRC_RECV})
"""The types whose receives come from the SRQ that a message names."""


def why_misfit(
    qp_type: QPType, pd: PD, srq: SRQ | None, xrcd: XRCD | None, max_tso_header: int
) -> str | None:
    """Say which argument the type does not support or lacks; return None if they all suit it."""
    name, elsewhere = qp_type.name, "on another open device than the PD"
    if srq is not None and srq.pd.context is not pd.context:
        return f"the SRQ was created {elsewhere}"
    if (xrcd is not None) != (qp_type is QPType.XRC_RECV):
        return (
            f"{name} queue pairs need an XRC domain (xrcd=...)"
            if xrcd is None
            else f"{name} queue pairs have no use for an XRC domain; XRC_RECV ones have"
        )
    if xrcd is not None and xrcd.context is not pd.context:
        return f"the XRCD was opened {elsewhere}"
    if srq is not None and (qp_type in XRC or srq.srq_type is SRQType.XRC):
        return (
            "receives of XRC belong to the SRQ that a message names (remote_srqn), not to "
            "a queue pair"
        )
    if srq is not None and srq.srq_type is SRQType.TM and qp_type is not QPType.RC:
        return f"tag matching requires an RC queue pair, not {name}"
    if max_tso_header and qp_type not in QP_TYPES_BY_OPCODE[Opcode.TSO]:
        return f"{name} queue pairs have no TSO, so max_tso_header cannot be given"
    if not 0 <= max_tso_header <= 0xFFFF:
        return f"max_tso_header={max_tso_header} is not in 0..65535"
    return None


def how_to_create(
    pd: PD, xrcd: XRCD | None, init: Any, max_tso_header: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the call that can create a queue pair's type, and its arguments.

    Args:
        pd: the protection domain.
        xrcd: the XRC domain of an XRC_RECV queue pair.
        init: a struct ibv_qp_init_attr_ex; its type, queues and capabilities are
            set, and the capabilities become what was granted.
        max_tso_header: bytes of a TSO's header, 0 for no TSO.

    Raises:
        ClosedError: the PD or the XRC domain is closed.
    """
    provider, context, pd_handle = provider_of(pd.context), pd.context, struct_of(pd)
    if xrcd is not None:
        init.xrcd, init.comp_mask = struct_of(xrcd), lib.IBV_QP_INIT_ATTR_XRCD
        init.send_cq = init.recv_cq = ffi.NULL
        return provider.create_qp_ex, (context, init)
    if max_tso_header or init.qp_type == QPType.XRC_SEND:
        init.pd, init.comp_mask = pd_handle, lib.IBV_QP_INIT_ATTR_PD
        if max_tso_header:
            init.max_tso_header = max_tso_header
            init.comp_mask |= lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        return provider.create_qp_ex, (context, init)
    # The extended struct begins with the older one. The cast does not keep the struct alive; the
    # caller does.
    return provider.create_qp, (pd, ffi.cast("struct ibv_qp_init_attr *", init))


def why_not_created(code: int | None, pd: PD, init: Any, max_tso_header: int) -> str:
    """Say what the device may have refused, and which limit was exceeded."""
    attr, device = pd.context.attr, pd.context.name
    if init.qp_type == QPType.RAW_PACKET and code in NOT_PERMITTED:
        return "RAW_PACKET queue pairs need CAP_NET_RAW: run as root"
    for name, limit_name in (
        ("max_send_wr", "max_qp_wr"),
        ("max_recv_wr", "max_qp_wr"),
        ("max_send_sge", "max_sge"),
        ("max_recv_sge", "max_sge"),
    ):
        value, limit = getattr(init.cap, name), getattr(attr, limit_name)
        if value > limit:
            return f"{name}={value}, but the device's {limit_name} is {limit}"
    if max_tso_header:
        return f"max_tso_header={max_tso_header}, but {device} may have no TSO"
    if init.cap.max_inline_data:
        return f"max_inline_data={init.cap.max_inline_data} may be more than {device} can take"
    return f"{device} may not have {QPType(init.qp_type).name} queue pairs, or no more of them"
