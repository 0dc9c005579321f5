"""The permissions and effects of requests on the responder's side, and how a receive completes.

An unreliable service has no acknowledgements: a request that cannot be executed is dropped
silently.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import setitem
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeAlias

from ..._binding import native
from ...enums import (
    Access,
    EventType,
    FlushLevel,
    FlushType,
    Opcode,
    QPState,
    QPType,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from ...standard.wire import GRH_BYTES
from .completion import NO_TAG
from .device_queues import SharedReceiveQueue, WorkQueue
from .memory import ErrorStatus, RemoteAccessError, contents, copy, replace, total_length
from .transport_messages import ACK, Ack, AckType, Request, Segments

if TYPE_CHECKING:
    from .completion import CompletionQueue
    from .memory import ProtectionDomain
    from .qp import QueuePair

RECEIVES = frozenset({QPState.RTR, QPState.RTS, QPState.SQD, QPState.SQE})
"""The states in which a queue pair executes requests."""

_INVALID_REQUEST = Ack(AckType.NAK_INVALID_REQUEST)
_REMOTE_ACCESS = Ack(AckType.NAK_REMOTE_ACCESS)
_REMOTE_OPERATIONAL = Ack(AckType.NAK_REMOTE_OPERATIONAL)

_MASK64 = (1 << 64) - 1
_UINT64 = Struct("=Q")
# As numbers: arithmetic on a Flag costs more than the rest of a small write.
_REMOTE_WRITE = int(Access.REMOTE_WRITE)
_REMOTE_READ = int(Access.REMOTE_READ)
_REMOTE_ATOMIC = int(Access.REMOTE_ATOMIC)
_FLUSH_ACCESS = {
    FlushType.GLOBAL: int(Access.FLUSH_GLOBAL),
    FlushType.PERSISTENT: int(Access.FLUSH_PERSISTENT),
}
_FLUSH_LEVELS = frozenset(FlushLevel)
_WITH_IMM, _WITH_INV, _GRH = int(WCFlags.WITH_IMM), int(WCFlags.WITH_INV), int(WCFlags.GRH)
# Looked up once: before Python 3.12, accessing an Enum member costs as much as a call.
_RTR, _SUCCESS = QPState.RTR, WCStatus.SUCCESS
_UD, _RAW_PACKET, _XRC_RECV = QPType.UD, QPType.RAW_PACKET, QPType.XRC_RECV


def establish(qp: QueuePair) -> None:
    """Report the first message that arrives before the queue pair can send."""
    if qp.state is _RTR and not qp.established:
        qp.established = True
        qp.context.events.push(EventType.COMM_EST, qp.handle)


def execute(qp: QueuePair, request: Request, function: Executor) -> Ack | None:
    """Call the function that executes a request; return its acknowledgement, if any."""
    try:
        return function(qp, request)
    except RemoteAccessError:
        if not qp.reliable:
            return None
        qp.fail(EventType.QP_ACCESS_ERR)
        return _REMOTE_ACCESS


Executor: TypeAlias = "Callable[[Any, Any], Ack | None]"
"""Executes a request on a queue pair."""


def refuse(qp: QueuePair) -> Ack:
    """Return the NAK for an invalid request; the NAK breaks the connection."""
    if qp.reliable:
        qp.fail(EventType.QP_REQ_ERR)
    return _INVALID_REQUEST


# ---- receives ---------------------------------------------------------------


Receive: TypeAlias = "tuple[Any, WorkQueue, ProtectionDomain, CompletionQueue]"
"""A receive work request taken off a queue (an object with wr_id and sges); the queue; the domain
of its memory; and the CQ on which it completes."""


def not_ready(qp: QueuePair) -> Ack | None:
    """Return the RNR NAK, or None on an unreliable service."""
    return Ack(AckType.RNR_NAK, rnr_timer=qp.attr["min_rnr_timer"]) if qp.reliable else None


def shared_queue(qp: QueuePair, request: Request) -> SharedReceiveQueue | None:
    """Return the SRQ that a request draws from, or None if it draws from the QP's own queue.

    Raises:
        RemoteAccessError: the XRC domain has no SRQ with the number that an XRC request names.
    """
    if qp.type is not _XRC_RECV:
        return qp.srq
    srq: SharedReceiveQueue | None = qp.device.srqs.get(request.srqn)
    if srq is None or srq.xrcd is not qp.xrcd:
        raise RemoteAccessError("no such XRC SRQ in this domain")
    return srq


def consume_receive(qp: QueuePair, request: Request) -> Receive | None:
    """Remove and return the next receive; None if none is posted."""
    srq = shared_queue(qp, request)
    queue = qp.rq if srq is None else srq.queue
    faults = qp.context.faults
    if not queue.pending or (faults.refusals and faults.refuse_receive(qp.number)):
        return None
    wqe = queue.take()
    if srq is None:
        return wqe, qp.rq, qp.pd, qp.recv_cq
    if len(queue.pending) < srq.limit:
        srq.limit = 0
        srq.context.events.push(EventType.SRQ_LIMIT_REACHED, srq.handle)
    return wqe, srq.queue, srq.pd, qp.recv_cq if srq.cq is None else srq.cq


def fill(
    qp: QueuePair,
    request: Request,
    taken: Receive,
    opcode: WCOpcode = WCOpcode.RECV,
    flags: int = 0,
    tag_info: bytes = NO_TAG,
) -> Ack | None:
    """Write a message into a receive's buffers and complete the receive."""
    wqe, _, pd, _ = taken
    status = _SUCCESS
    byte_len = request.length
    datagrams = qp.type is _UD
    if datagrams:
        byte_len += GRH_BYTES
    try:
        segments = qp.device.memory.local(pd, wqe.sges, True, byte_len)
        if datagrams:
            copy([request.grh, *request.data], segments)
            flags = _GRH | qp.checksum_flags(request)
        elif request.data:
            copy(request.data, segments)
            if qp.type is _RAW_PACKET:
                flags = qp.checksum_flags(request)
    except ErrorStatus as error:
        # Whether the message fits is determined before any of it is written.
        fits = byte_len <= total_length(wqe.sges)
        status = error.status if fits else WCStatus.LOC_LEN_ERR
    return complete_receive(qp, request, taken, status, byte_len, opcode, flags, tag_info)


def complete_receive(
    qp: QueuePair,
    request: Request,
    taken: Receive,
    status: WCStatus,
    byte_len: int,
    opcode: WCOpcode = WCOpcode.RECV,
    flags: int = 0,
    tag_info: bytes = NO_TAG,
) -> Ack:
    """Complete a receive whose message has arrived or cannot be stored; return the
    acknowledgement."""
    wqe, queue, _, cq = taken
    ack = ACK
    imm = 0
    if status:
        ack = _INVALID_REQUEST if status is WCStatus.LOC_LEN_ERR else _REMOTE_OPERATIONAL
    if request.imm is not None:
        imm, flags = request.imm, flags | _WITH_IMM
    elif request.invalidate_rkey is not None and not status:
        imm, flags = request.invalidate_rkey, flags | _WITH_INV
        if not qp.device.memory.invalidate(_domain(qp, request), qp.number, imm, True):
            # The message itself succeeded and is acknowledged; only the responder's QP fails.
            status = WCStatus.REM_INV_REQ_ERR
    src_qp = request.src_qpn if qp.type is _UD else 0
    fields = (wqe.wr_id, status, opcode, byte_len, imm, qp.number, src_qp, flags, request.sl)
    # A tagged buffer would not return to its SRQ's queue.
    received = None if opcode is WCOpcode.TM_RECV else wqe
    qp.push(cq, (fields, queue, 1, request.solicited, tag_info), received)
    if status:
        qp.fail()
    return ack


# ---- remote memory ----------------------------------------------------------


def target_of(
    qp: QueuePair, request: Request, length: int, access: int, size: int | None = None
) -> Segments:
    """Return the memory that a request names, after checking that its key grants the access.

    Args:
        size: how many bytes of it to return. Default: all.
    """
    if not length:
        # An empty message accesses no memory, so its key is not checked.
        return []
    memory, pd = qp.device.memory, _domain(qp, request)
    addr, rkey = request.remote_addr, request.rkey
    return [memory.remote(pd, qp.number, rkey, addr, length, access, size)]


def _domain(qp: QueuePair, request: Request) -> ProtectionDomain:
    srq = shared_queue(qp, request) if qp.type is _XRC_RECV else None
    return qp.pd if srq is None else srq.pd


def read(qp: QueuePair, request: Request, size: int | None = None) -> Ack | None:
    """Execute an RDMA_READ; the acknowledgement carries the data.

    Args:
        size: how many bytes of the data to return; the key is checked for all. Default: all.
    """
    if not qp.grants(_REMOTE_READ) or not qp.attr["max_dest_rd_atomic"]:
        return refuse(qp)
    source = target_of(qp, request, request.length, _REMOTE_READ, size)
    return Ack(AckType.ACK, data=source)


def atomic(qp: QueuePair, request: Request) -> Ack | None:
    """Execute an atomic operation."""
    if not qp.grants(_REMOTE_ATOMIC) or not qp.attr["max_dest_rd_atomic"]:
        return refuse(qp)
    if request.remote_addr % 8:
        return refuse(qp)
    [target] = target_of(qp, request, 8, _REMOTE_ATOMIC)
    # The device's lock makes this atomic.
    old: int
    (old,) = _UINT64.unpack(contents(target))
    if request.opcode == Opcode.ATOMIC_FETCH_AND_ADD:
        replace(_UINT64.pack((old + request.compare) & _MASK64), target)
    elif old == request.compare:
        replace(_UINT64.pack(request.swap), target)
    return Ack(AckType.ACK, value=old)


def atomic_write(qp: QueuePair, request: Request) -> Ack | None:
    """Execute an ATOMIC_WRITE."""
    if not qp.grants(_REMOTE_WRITE) or not qp.attr["max_dest_rd_atomic"]:
        return refuse(qp)
    if request.remote_addr % 8:
        return refuse(qp)
    [target] = target_of(qp, request, 8, _REMOTE_WRITE)
    if isinstance(target, native.Room):
        # The kernel copies it in one piece, because it is aligned.
        copy(request.data, [target])
    else:
        # As one number: a reader of the memory must not see half of it.
        native.on_commit(setitem, target.cast("Q"), 0, *_UINT64.unpack(request.data[0]))
    return ACK


def flush(qp: QueuePair, request: Request) -> Ack | None:
    """Execute a FLUSH."""
    access = sum([_FLUSH_ACCESS[flag] for flag in _FLUSH_ACCESS if flag & request.flush_type])
    if not access or request.flush_level not in _FLUSH_LEVELS:
        return refuse(qp)
    if not qp.grants(access) or not qp.attr["max_dest_rd_atomic"]:
        return refuse(qp)
    whole = request.flush_level == FlushLevel.MR
    # Earlier requests are done, and their data is visible: only the key is left to check.
    qp.device.memory.check_remote(
        _domain(qp, request),
        qp.number,
        request.rkey,
        None if whole else request.remote_addr,
        request.length,
        access,
    )
    return ACK
