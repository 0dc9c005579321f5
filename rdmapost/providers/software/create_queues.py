"""The control verbs for queue pairs, SRQs and address handles."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from ..._arguments import counted
from ..._binding import ffi, lib, native
from ...enums import MigState, Opcode, QPAttrMask, QPType, SendOps, SRQAttrMask, WCFlags
from ...errors import UnsupportedError, VerbsError
from ...standard.opcodes import CONSUMES_RECEIVE, QP_TYPES_BY_OPCODE, SEND_OPS
from ...standard.qp_states import FIELDS
from ...standard.wire import GRH_BYTES, IPV4, IPV4_MAPPED, IPV6
from .completion import CompletionQueue
from .device_queues import SharedReceiveQueue, WorkQueue, XRCDomain
from .memory import ProtectionDomain
from .qp import ACCESS_FLAGS, QueuePair
from .state import bound, context_of, device_of, drop, keep, verb

MAX_QP_WR = 16384
MAX_SGE = 32
MAX_SRQ_WR = 16384
MAX_INLINE = 1024
MAX_TSO_HEADER = 512
_ANY_HOP_LIMIT = 0xFF

QP_TYPES = frozenset(QPType) - {QPType.DRIVER}
"""The types of soft0's queue pairs; other software devices have fewer."""

_SEGMENTING = frozenset({QPType.UD, QPType.RAW_PACKET})
_SEND_OPS = {
    qp_type: sum(op for op in SendOps if qp_type in QP_TYPES_BY_OPCODE[Opcode[op.name or ""]])
    for qp_type in QPType
}
"""The flags that send_ops_flags may contain, by type."""


class AddressHandle(NamedTuple):
    """The path to a peer."""

    sgid: bytes
    dgid: bytes
    sl: int
    flow_label: int
    hop_limit: int
    traffic_class: int


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


class QueueVerbs:
    """The control verbs for queue pairs, SRQs and address handles."""

    @verb
    def create_srq(pd: Any, init: Any) -> Any:
        return make_srq(pd.context, pd, init.attr)

    @verb
    def get_srq_num(srq: Any) -> int:
        number: int = bound(srq, "ibv_get_srq_num").number
        return number

    @verb
    def modify_srq(srq: Any, attr: Any, mask: int) -> None:
        made: SharedReceiveQueue = bound(srq, "ibv_modify_srq")
        depth = attr.max_wr if mask & SRQAttrMask.MAX_WR else made.queue.depth
        if not 1 <= depth <= MAX_SRQ_WR or not made.queue.resize(depth):
            raise VerbsError("ibv_modify_srq", errno.EINVAL)
        limit = attr.srq_limit if mask & SRQAttrMask.LIMIT else made.limit
        if limit > depth:
            reason = f"srq_limit={limit} is more than max_wr={depth}"
            raise VerbsError("ibv_modify_srq", errno.EINVAL, reason)
        made.limit = limit

    @verb
    def query_srq(srq: Any, attr: Any) -> None:
        made: SharedReceiveQueue = bound(srq, "ibv_query_srq")
        attr.max_wr, attr.max_sge = made.queue.depth, made.queue.max_sge
        attr.srq_limit = made.limit

    @verb
    def destroy_srq(srq: Any) -> None:
        made: SharedReceiveQueue = bound(srq, "ibv_destroy_srq")
        if made.users:
            raise VerbsError(
                "ibv_destroy_srq", errno.EBUSY, f"in use by {counted(made.users, 'queue pair')}"
            )
        queues = [made.queue]
        if made.tags is not None:
            queues += [made.tags.slots, made.tags.ops]
        for queue in queues:
            if made.cq is not None:
                made.cq.forget(queue)
            queue.clear()
            queue.refuses = errno.EINVAL
        if made.cq is not None:
            made.cq.users -= 1
        if made.xrcd is not None:
            made.xrcd.users -= 1
        del made.device.srqs[made.number]
        made.context.events.forget(made.handle)
        drop(srq, "ibv_destroy_srq")

    @verb
    def modify_qp(qp: Any, attr: Any, mask: int) -> None:
        made: QueuePair = bound(qp, "ibv_modify_qp")
        migrates = mask & QPAttrMask.PATH_MIG_STATE and attr.path_mig_state != MigState.MIGRATED
        if mask & QPAttrMask.ALT_PATH or migrates:
            reason = f"{made.device.name} has no alternate paths"
            raise VerbsError("ibv_modify_qp", errno.EINVAL, reason)
        attrs = {
            name: getattr(attr, name)
            for name, bit in FIELDS.items()
            if bit & mask and name != "ah_attr"
        }
        if mask & QPAttrMask.AV:
            if not attr.ah_attr.is_global:
                raise VerbsError("ibv_modify_qp", errno.EINVAL, "ah_attr has no dgid")
            attrs["ah_attr"] = bytes(ffi.buffer(ffi.addressof(attr, "ah_attr")))
            attrs["dgid"] = bytes(attr.ah_attr.grh.dgid.raw)
        if unknown := attrs.get("qp_access_flags", 0) & ~ACCESS_FLAGS:
            reason = f"qp_access_flags has bits that are not access flags: 0x{unknown:x}"
            raise VerbsError("ibv_modify_qp", errno.EINVAL, reason)
        if not made.modify(QPAttrMask(mask), attrs):
            raise VerbsError("ibv_modify_qp", errno.EINVAL)
        native.on_commit(setattr, qp, "state", made.state)
        made.device.start(made)

    @verb
    def query_qp(qp: Any, attr: Any, mask: int, init: Any) -> None:
        made: QueuePair = bound(qp, "ibv_query_qp")
        for name in FIELDS:
            if name in made.attr and name != "ah_attr":
                setattr(attr, name, made.attr[name])
        attr.qp_state = attr.cur_qp_state = made.state
        if address := made.attr.get("ah_attr"):
            ffi.memmove(ffi.addressof(attr, "ah_attr"), address, len(address))
        for cap in (attr.cap, init.cap):
            cap.max_send_wr, cap.max_send_sge = made.sq.depth, made.sq.max_sge
            cap.max_recv_wr, cap.max_recv_sge = made.rq.depth, made.rq.max_sge
            cap.max_inline_data = made.sq.max_inline
        init.qp_type, init.sq_sig_all = made.type, made.sq_sig_all
        init.send_cq, init.recv_cq, init.srq = qp.send_cq, qp.recv_cq, qp.srq

    @verb
    def query_qp_data_in_order(qp: Any, op: int, flags: int) -> int:
        bound(qp, "ibv_query_qp_data_in_order")
        # The device copies with memmove, which promises no order.
        return 0

    @verb
    def sends_for_receive(qp: Any) -> int:
        made: QueuePair = bound(qp, "ibv_query_qp")
        return sum([wqe.opcode in CONSUMES_RECEIVE for wqe in made.sq.posted()])

    @verb
    def destroy_qp(qp: Any) -> None:
        made: QueuePair = drop(qp, "ibv_destroy_qp")
        made.drop_queues()
        made.context.events.forget(made.handle)
        made.sq.refuses = made.rq.refuses = errno.EINVAL
        for user in (made.send_cq, made.recv_cq, made.srq, made.xrcd):
            if user is not None:
                user.users -= 1
        made.device.remove(made)

    @verb
    def create_ah(pd: Any, attr: Any) -> Any:
        bound(pd, "ibv_create_ah")
        grh, gids = attr.grh, device_of(pd, "ibv_create_ah").gids
        if not attr.is_global or attr.port_num != 1 or grh.sgid_index >= len(gids):
            raise VerbsError("ibv_create_ah", errno.EINVAL)
        ah = ffi.new("struct ibv_ah *")
        ah.context, ah.pd = pd.context, pd
        address = AddressHandle(
            gids[grh.sgid_index],
            bytes(grh.dgid.raw),
            attr.sl,
            grh.flow_label & 0xFFFFF,
            grh.hop_limit,
            grh.traffic_class,
        )
        return keep(ah, address, "ibv_create_ah")

    @verb
    def destroy_ah(ah: Any) -> None:
        drop(ah, "ibv_destroy_ah")

    @verb
    def init_ah_from_wc(context: Any, port_num: int, wc: Any, grh: Any, attr: Any) -> None:
        attr.port_num, attr.dlid, attr.sl = port_num, wc.slid, wc.sl
        attr.src_path_bits = wc.dlid_path_bits
        if not wc.wc_flags & WCFlags.GRH:
            return
        raw = bytes(ffi.buffer(grh))
        if raw[0] >> 4 == 6:
            first, _, _, _, source, target = IPV6.unpack(raw)
            attr.grh.traffic_class, attr.grh.flow_label = first >> 20 & 0xFF, first & 0xFFFFF
        else:
            _, tos, *_, src, dst = IPV4.unpack_from(raw, GRH_BYTES - IPV4.size)
            source, target = IPV4_MAPPED + src, IPV4_MAPPED + dst
            attr.grh.traffic_class = tos
        gids = context_of(context, "ibv_init_ah_from_wc").device.gids
        if target not in gids:
            raise VerbsError("ibv_init_ah_from_wc", errno.ENODATA)
        attr.is_global = 1
        attr.grh.dgid.raw = source
        attr.grh.sgid_index = gids.index(target)
        attr.grh.hop_limit = _ANY_HOP_LIMIT
