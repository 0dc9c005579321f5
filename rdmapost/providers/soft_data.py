"""The data verbs of the soft device: what the posting symbols call.

They call the seven ``soft_*`` functions below through the context's table, as
they call a NIC's driver.  These read the C structs, hand the work to
``rdmapost.soft``, and write what comes back.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from struct import Struct
from typing import Any

from .._binding import ffi
from ..enums import Opcode, OpsOpcode, QPState, QPType, SendFlags
from ..soft import requester, tags
from ..soft.completion import CompletionQueue
from ..soft.qp import QueuePair
from ..soft.queue import RecvWQE, SendWQE, SharedReceiveQueue, WorkQueue
from .soft_state import device, lock, objects, told

__all__ = ["DATA_VERBS"]

# The structs as the shim's static assertions pin them down.
_SEND_HEAD = Struct("=Q16xiIII")  # wr_id, num_sge, opcode, send_flags, imm_data
_RDMA = Struct("=QI")
_ATOMIC = Struct("=QQQI")
_UD = Struct("=QII")
_SGE = Struct("=QII")
_WC = Struct("=QiIIIIIIIHHBB2x")
_pack_wc, _WC_SIZE = _WC.pack_into, _WC.size
_TM_INFO = Struct("=QI4x")
_OPS = Struct("=Q8xIiIIQ8xi4xQQ")  # as rdmapost.packing writes it
_UINT32 = Struct("=I")
_RECV = Struct("=Q16xi4x")  # wr_id, num_sge
_SEND_SIZE, _UNION_AT, _SRQN_AT = 128, 40, 72

_INLINE = int(SendFlags.INLINE)
_SEND = int(Opcode.SEND)
_OPCODES = {int(opcode): opcode for opcode in Opcode}
_ATOMICS = frozenset({Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD})
_REMOTE = frozenset({Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM, Opcode.RDMA_READ})
_DATAGRAM = frozenset({Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO})
# Looked up once: before Python 3.12 a member of an Enum costs as much as a call.
_BIND_MW, _TSO = Opcode.BIND_MW, Opcode.TSO
_DATAGRAMS, _XRC_SEND, _RESET, _ERR = QPType.UD, QPType.XRC_SEND, QPState.RESET, QPState.ERR


class _Refused(Exception):
    """A work request that the device does not take."""

    def __init__(self, code: int) -> None:
        self.errno = code


def _read_sges(raw: Any, at: int, count: int) -> Any:
    """Read the SGEs of a record: (addr, length, lkey) each."""
    if count == 1:
        return (_SGE.unpack_from(raw, at),)
    return tuple(_SGE.iter_unpack(raw[at : at + count * _SGE.size]))


def _add_sends(qp: QueuePair, records: Any, size: int, count: int) -> int:
    """Put send work requests on the queue; return what soft_send returns."""
    raw, at, taken = ffi.buffer(records, size), 0, 0
    faults = qp.context.faults
    try:
        while taken < count:
            if faults.posts and (code := faults.errno_of_post()):
                raise _Refused(code)
            wr_id, num_sge, opcode, flags, imm = _SEND_HEAD.unpack_from(raw, at)
            if not 0 <= num_sge <= qp.sq.max_sge:
                raise _Refused(errno.EINVAL)
            wqe = SendWQE(wr_id, _OPCODES.get(opcode, opcode), flags, imm)
            record, at = at, at + _SEND_SIZE
            if num_sge:
                wqe.sges = _read_sges(raw, at, num_sge)
                at += num_sge * _SGE.size
            if opcode != _SEND or flags & _INLINE or not qp.reads_only_the_head:
                _read_more(qp, wqe, raw, record, records)
            if code := qp.post_send(wqe):
                raise _Refused(code)
            taken += 1
    except _Refused as refused:
        return refused.errno << 32 | taken
    return taken


def _read_more(qp: QueuePair, wqe: SendWQE, raw: Any, at: int, records: Any) -> None:
    """Read what depends on the opcode, the flags and the type of the queue pair."""
    opcode, flags, union = wqe.opcode, wqe.flags, at + _UNION_AT
    if flags & _INLINE:
        if sum(length for _, length, _ in wqe.sges) > qp.max_inline:
            raise _Refused(errno.EINVAL)
        wqe.inline = b"".join(
            ffi.buffer(ffi.cast("char *", addr), length) for addr, length, _ in wqe.sges
        )
        wqe.sges = ()
    if opcode in _REMOTE:
        wqe.remote_addr, wqe.rkey = _RDMA.unpack_from(raw, union)
    elif opcode in _ATOMICS:
        wqe.remote_addr, wqe.compare_add, wqe.swap, wqe.rkey = _ATOMIC.unpack_from(raw, union)
    elif opcode in _DATAGRAM and qp.type is _DATAGRAMS:
        ah, wqe.remote_qpn, wqe.remote_qkey = _UD.unpack_from(raw, union)
        if not ah:
            raise _Refused(errno.EINVAL)
        wqe.ah = objects[ffi.cast("struct ibv_ah *", ah).handle]
    elif opcode is _BIND_MW:
        bind = _struct(records, at).bind_mw
        if not bind.mw or not bind.bind_info.mr:
            raise _Refused(errno.EINVAL)
        info = bind.bind_info
        wqe.rkey = bind.rkey
        wqe.bind = (
            objects[bind.mw.handle], objects[info.mr.handle], info.addr, info.length,
            info.mw_access_flags,
        )  # fmt: skip
    if opcode is _TSO:
        tso = _struct(records, at).tso
        if tso.hdr_sz > qp.max_tso_header or (tso.hdr_sz and not tso.hdr):
            raise _Refused(errno.EINVAL)
        wqe.hdr = bytes(ffi.buffer(ffi.cast("char *", tso.hdr), tso.hdr_sz))
        wqe.mss = tso.mss
    if qp.type is _XRC_SEND:
        (wqe.remote_srqn,) = _UINT32.unpack_from(raw, at + _SRQN_AT)


def _struct(records: Any, at: int) -> Any:
    """Return the struct of a record, for its less usual parts."""
    return ffi.cast("struct ibv_send_wr *", records + at)


def _guarded(error: int) -> Callable[[Any, Any, Any], Any]:
    """Make what a callback returns when it raised; the exception is kept to be told."""

    def onerror(kind: Any, value: BaseException, trace: Any) -> int:
        device.report(value.with_traceback(trace))
        return told(error)

    return onerror


@ffi.def_extern(onerror=_guarded(errno.EIO << 32))  # type: ignore[untyped-decorator]
def soft_send(qp_num: int, records: Any, size: int, count: int) -> int:
    with lock:
        if device.parked:
            device.progress()
        qp = device.qps[qp_num]
        result = _add_sends(qp, records, size, count)
        requester.run(qp)
    return told(result)


def _add_receives(queue: WorkQueue, records: Any, size: int, count: int) -> int:
    """Put receive work requests on a queue; return what soft_recv returns."""
    raw, at, taken = ffi.buffer(records, size), 0, 0
    while taken < count:
        wr_id, num_sge = _RECV.unpack_from(raw, at)
        if not 0 <= num_sge <= queue.max_sge:
            return errno.EINVAL << 32 | taken
        at += _RECV.size
        if code := queue.add(RecvWQE(wr_id, _read_sges(raw, at, num_sge))):
            return code << 32 | taken
        at += num_sge * _SGE.size
        taken += 1
    return taken


@ffi.def_extern(onerror=_guarded(errno.EIO << 32))  # type: ignore[untyped-decorator]
def soft_recv(qp_num: int, records: Any, size: int, count: int) -> int:
    with lock:
        if device.parked:
            device.progress()
        qp = device.qps[qp_num]
        if qp.state is _RESET or qp.srq is not None:
            result = errno.EINVAL << 32
        else:
            result = _add_receives(qp.rq, records, size, count)
            if qp.state is _ERR:
                qp.flush_receives()
    return told(result)


@ffi.def_extern(onerror=_guarded(errno.EIO << 32))  # type: ignore[untyped-decorator]
def soft_srq_recv(handle: int, records: Any, size: int, count: int) -> int:
    with lock:
        if device.parked:
            device.progress()
        srq: SharedReceiveQueue = objects[handle]
        result = _add_receives(srq.queue, records, size, count)
    return told(result)


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_post_srq_ops(srq_struct: Any, op: Any, bad_op: Any) -> int:
    code = 0
    with lock:
        if device.parked:
            device.progress()
        matching: tags.MatchingList | None = objects[srq_struct.handle].tags
        while op:
            code = errno.EINVAL
            if matching is not None:
                wqe = _read_op(matching, op)
                code = errno.EINVAL if wqe is None else matching.post(wqe)
            if code:
                bad_op[0] = op
                break
            if wqe is not None and wqe.opcode == OpsOpcode.TAG_ADD:
                op.tm.handle = wqe.handle
            op = op.next
    return told(code)


def _read_op(matching: tags.MatchingList, op: Any) -> tags.TagWQE | None:
    """Read a tag-matching operation; None where its SGEs cannot be."""
    wr_id, opcode, flags, count, handle, recv_wr_id, num_sge, tag, mask = _OPS.unpack_from(
        ffi.buffer(op)
    )
    wqe = tags.TagWQE(wr_id, opcode, flags, count, handle)
    if opcode == OpsOpcode.TAG_ADD:
        if not 0 <= num_sge <= matching.slots.max_sge:
            return None
        wqe.recv_wr_id, wqe.tag, wqe.mask = recv_wr_id, tag, mask
        wqe.sges = _read_sges(ffi.buffer(op.tm.add.sg_list, num_sge * _SGE.size), 0, num_sge)
    return wqe


@ffi.def_extern(onerror=_guarded(-1))  # type: ignore[untyped-decorator]
def soft_poll_cq(cq_struct: Any, most: int, wc: Any) -> int:
    with lock:
        if device.parked:
            device.progress()
        cq: CompletionQueue = objects[cq_struct.handle]
        if not cq.entries:
            return told(0)
        entries = cq.poll(most)
        raw = ffi.buffer(wc, len(entries) * _WC.size)
        at = 0
        for fields, _, _, _, _ in entries:
            _pack_wc(raw, at, *fields)
            at += _WC_SIZE
    return told(len(entries))


@ffi.def_extern(onerror=_guarded(-1))  # type: ignore[untyped-decorator]
def soft_fill_cq(cq_struct: Any, most: int, wc: Any, tm: Any) -> int:
    with lock:
        if device.parked:
            device.progress()
        entries = objects[cq_struct.handle].poll(most)
        if entries:
            raw = ffi.buffer(wc, len(entries) * _WC.size)
            infos = ffi.buffer(tm, len(entries) * _TM_INFO.size)
            for index, (fields, _, _, _, tm_info) in enumerate(entries):
                _WC.pack_into(raw, index * _WC.size, *fields)
                _TM_INFO.pack_into(infos, index * _TM_INFO.size, *tm_info)
    return told(len(entries))


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_req_notify_cq(cq_struct: Any, solicited_only: int) -> int:
    with lock:
        objects[cq_struct.handle].arm(bool(solicited_only))
    return 0


DATA_VERBS = ("send", "recv", "srq_recv", "post_srq_ops", "poll_cq", "req_notify_cq")
"""The members of ``struct rp_soft_ops``, each set to the function soft_..."""
