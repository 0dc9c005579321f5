"""How queue pairs and SRQs are created, and their limits."""

from __future__ import annotations

import errno
from typing import Any

from ..._binding import ffi, lib
from ...enums import Opcode, QPType, SendOps
from ...errors import UnsupportedError, VerbsError
from ...standard.opcodes import QP_TYPES_BY_OPCODE, SEND_OPS
from .completion import CompletionQueue
from .device_queues import SharedReceiveQueue, WorkQueue, XRCDomain
from .memory import ProtectionDomain
from .qp import QueuePair
from .state import bound, context_of, keep

MAX_QP_WR = 16384
MAX_SGE = 32
MAX_SRQ_WR = 16384
MAX_INLINE = 1024
MAX_TSO_HEADER = 512

QP_TYPES = frozenset(QPType) - {QPType.DRIVER}
"""The types of soft0's queue pairs; other software devices have fewer."""

_SEGMENTING = frozenset({QPType.UD, QPType.RAW_PACKET})
_SEND_OPS = {
    qp_type: sum(op for op in SendOps if qp_type in QP_TYPES_BY_OPCODE[Opcode[op.name or ""]])
    for qp_type in QPType
}
"""The flags that send_ops_flags may contain, by type."""


def make_srq(context: Any, pd: Any, attr: Any) -> Any:
    """Create a shared receive queue; call this inside a verb."""
    limits = ("max_wr", attr.max_wr, MAX_SRQ_WR), ("max_sge", attr.max_sge, MAX_SGE)
    for name, value, limit in limits:
        if not 1 <= value <= limit:
            text = f"{name}={value} is not in 1..{limit}"
            raise VerbsError("ibv_create_srq", errno.EINVAL, text)
    srq = ffi.new("struct ibv_srq *")
    srq.context, srq.pd = context, pd
    opened = context_of(context, "ibv_create_srq")
    number = opened.device.new_number("ibv_create_srq")
    made = SharedReceiveQueue(
        opened, bound(pd, "ibv_create_srq"), attr.max_wr, attr.max_sge, number
    )
    made.handle = srq
    opened.device.srqs[made.number] = made
    return keep(srq, made, "ibv_create_srq")


def make_qp_ex(context: Any, init: Any, domain: XRCDomain | None = None) -> Any:
    """Create a queue pair as ibv_create_qp_ex does; call this inside a verb."""
    mask = init.comp_mask
    header = init.max_tso_header if mask & lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER else 0
    if header > MAX_TSO_HEADER or (header and init.qp_type not in _SEGMENTING):
        reason = f"max_tso_header is only for UD and RAW_PACKET, and at most {MAX_TSO_HEADER}"
        raise VerbsError("ibv_create_qp_ex", errno.EINVAL, reason)
    pd = init.pd if mask & lib.IBV_QP_INIT_ATTR_PD else ffi.NULL
    ops = init.send_ops_flags if mask & lib.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS else 0
    if ops & ~_SEND_OPS.get(init.qp_type, 0):
        reason = "send_ops_flags contains operations that the QP type does not support"
        raise UnsupportedError("ibv_create_qp_ex", errno.EOPNOTSUPP, reason)
    qp = make_qp(context, pd, init, domain, extended=bool(ops))
    made: QueuePair = bound(qp, "ibv_create_qp_ex")
    made.sq.max_tso_header = header
    made.opcodes |= {int(opcode) for opcode, op in SEND_OPS.items() if ops & op}
    return qp


def make_qp(
    context: Any, pd: Any, init: Any, domain: XRCDomain | None = None, *, extended: bool = False
) -> Any:
    """Create a queue pair; call this inside a verb."""
    if init.qp_type not in QP_TYPES:
        text = f"soft0 has no {QPType(init.qp_type).name} queue pairs"
        raise UnsupportedError("ibv_create_qp", errno.EOPNOTSUPP, text)
    target = init.qp_type == QPType.XRC_RECV
    if (domain is not None, bool(pd)) != (target, not target):
        raise VerbsError("ibv_create_qp", errno.EINVAL, "XRC_RECV takes an XRCD; others take a PD")
    needs_recv_cq = init.qp_type not in (QPType.XRC_SEND, QPType.XRC_RECV)
    if (not init.send_cq and not target) or (not init.recv_cq and needs_recv_cq):
        raise VerbsError("ibv_create_qp", errno.EINVAL, "a CQ is missing")
    cap = init.cap
    wrs_fit = max(cap.max_send_wr, cap.max_recv_wr) <= MAX_QP_WR
    sges_fit = max(cap.max_send_sge, cap.max_recv_sge) <= MAX_SGE
    if not wrs_fit or not sges_fit or cap.max_inline_data > MAX_INLINE:
        raise VerbsError("ibv_create_qp", errno.EINVAL)
    name = "ibv_create_qp"
    whole = ffi.new("struct rp_soft_qp_ex *") if extended else None
    qp = lib.rp_soft_qp_ex_init(whole) if extended else ffi.new("struct ibv_qp *")
    qp.context, qp.pd, qp.qp_type = context, pd, init.qp_type
    qp.send_cq, qp.recv_cq, qp.srq = init.send_cq, init.recv_cq, init.srq
    srq = bound(init.srq, name) if init.srq else None
    if srq is not None and srq.tags is not None and init.qp_type != QPType.RC:
        raise VerbsError("ibv_create_qp", errno.EINVAL, "tag matching requires RC")
    opened = context_of(context, name)
    # An XRC queue pair lacks one or both CQs.
    send_cq, recv_cq = [
        bound(cq, name) if cq else CompletionQueue(1, None, opened.events)
        for cq in (init.send_cq, init.recv_cq)
    ]
    device = opened.device
    made = device.queue_pair(
        device,
        opened,
        device.new_number(name),
        QPType(init.qp_type),
        bound(pd, name) if pd else ProtectionDomain(),
        send_cq,
        recv_cq,
        srq,
        WorkQueue(cap.max_send_wr, cap.max_send_sge),
        WorkQueue(cap.max_recv_wr, cap.max_recv_sge),
        bool(init.sq_sig_all),
    )
    made.sq.max_inline = cap.max_inline_data
    made.handle, made.xrcd = qp, domain
    device.qps[made.number] = made
    for user in (send_cq, recv_cq, srq, domain):
        if user is not None:
            user.users += 1
    qp.qp_num = made.number
    return keep(qp, made, name, whole)
