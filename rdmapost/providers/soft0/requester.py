"""The requester: executes the send queue, in order, one request at a time.

A request goes out as a message, and its acknowledgement decides how the work request completes.
A queue pair whose request must be retried is parked until the retry is due; then the next post,
poll or wake-up by an event descriptor makes the attempt. FENCE needs no code: a request starts only
when the previous one is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ..._binding import native
from ...enums import Opcode, QPState, QPType, SendFlags, WCStatus
from ...standard.opcodes import MAX_MSG_SIZE
from ...standard.timers import RNR_FOREVER, ack_timeout, rnr_timer
from ..software.device_queues import WQE
from ..software.memory import ErrorStatus, copy, part
from ..software.requester import bind, local_invalidate, needs_rd_atomic, planned_size, room
from ..software.responder import RECEIVES
from ..software.transport_messages import ACK, Ack, AckType, Request, Segments, size_of
from . import datagram, raw
from .qp import SoftQueuePair

_NAK_STATUS = {
    AckType.NAK_INVALID_REQUEST: WCStatus.REM_INV_REQ_ERR,
    AckType.NAK_REMOTE_ACCESS: WCStatus.REM_ACCESS_ERR,
    AckType.NAK_REMOTE_OPERATIONAL: WCStatus.REM_OP_ERR,
}

_SOLICITED = int(SendFlags.SOLICITED)
_WITH_IMM = frozenset({int(Opcode.SEND_WITH_IMM), int(Opcode.RDMA_WRITE_WITH_IMM)})
# Looked up once: before Python 3.12, accessing an Enum member costs as much as a call.
_RTS, _SQE = QPState.RTS, QPState.SQE
_RC, _UD, _RAW_PACKET, _XRC_SEND = QPType.RC, QPType.UD, QPType.RAW_PACKET, QPType.XRC_SEND
_SEND, _SEND_WITH_INV = int(Opcode.SEND), int(Opcode.SEND_WITH_INV)
_SUCCESS, _ACK_TYPE = WCStatus.SUCCESS, AckType.ACK


class _Parked(Exception):
    """The request must be retried later."""


def execute_next(qp: SoftQueuePair) -> bool:
    """Execute the work request at the head of the send queue; return whether to call again."""
    if qp.state >= _SQE:
        qp.flush_posted()
        return False
    pending = qp.sq.pending
    if not pending or qp.state is not _RTS:
        return False
    if qp.due and time.monotonic() < qp.due:
        return False
    wqe = pending[0]
    byte_len = 0
    try:
        byte_len = _carry_out(qp, wqe)
        status = _SUCCESS
    except ErrorStatus as error:
        status = error.status
    except _Parked:
        qp.device.park(qp)
        return False
    _retire(qp, wqe, status, byte_len)
    return bool(pending)


def give_up(qp: SoftQueuePair) -> bool:
    """Fail the request at the head of the send queue, which the device could not execute.

    Return whether to call again.
    """
    if qp.sq.pending:
        _retire(qp, qp.sq.pending[0], WCStatus.FATAL_ERR, 0)
    return bool(qp.sq.pending)


def _retire(qp: SoftQueuePair, wqe: WQE, status: WCStatus, byte_len: int) -> None:
    if qp.due:
        qp.begin_attempts()
    if not qp.sq.pending or qp.sq.pending[0] is not wqe:
        # Loopback to the same QP: the responder's error has already flushed this WQE. Another
        # thread may have posted since.
        return
    qp.sq.take()
    qp.complete_send(wqe, status, byte_len)
    if status:
        qp.fail_send()


def _carry_out(qp: SoftQueuePair, wqe: WQE) -> int:
    """Execute one work request; return how many bytes came back.

    Raises:
        ErrorStatus: it ends with an error status.
        _Parked: it must be retried.
    """
    faults = qp.context.faults
    if faults.statuses and (forced := faults.take_status(wqe.wr_id)) is not None:
        if forced:
            raise ErrorStatus(forced)
        return planned_size(wqe)
    opcode = wqe.opcode
    if opcode not in qp.opcodes:
        raise ErrorStatus(WCStatus.LOC_QP_OP_ERR)
    return _BY_OPCODE[opcode](qp, wqe)


# ---- what goes out ----------------------------------------------------------


def _local_data(qp: SoftQueuePair, wqe: WQE, *, write: bool = False) -> tuple[Segments, int]:
    """Return the local buffers of a work request and their size."""
    if wqe.inline is not None:
        return ([wqe.inline] if wqe.inline else []), len(wqe.inline)
    pd = qp.pd if wqe.owner is None else wqe.owner.pd
    segments = qp.device.memory.local(pd, wqe.sges, write)
    size = size_of(segments)
    if size > MAX_MSG_SIZE:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    return segments, size


def _request(qp: SoftQueuePair, wqe: WQE, data: Segments, size: int) -> Request:
    opcode = wqe.opcode
    request = Request(opcode, qp.type, qp.number, qp.attr["dest_qp_num"], data, size)
    request.psn = qp.attr["sq_psn"]
    if wqe.flags & _SOLICITED:
        request.solicited = True
    if opcode == _SEND:
        pass
    elif opcode in _WITH_IMM:
        request.imm = wqe.imm
    elif opcode == _SEND_WITH_INV:
        request.invalidate_rkey = wqe.imm
    request.remote_addr, request.rkey = wqe.remote_addr, wqe.rkey
    if qp.type is _XRC_SEND:
        request.srqn = wqe.remote_srqn
    return request


def _send_or_write(qp: SoftQueuePair, wqe: WQE) -> int:
    data, size = _local_data(qp, wqe)
    if qp.type is _UD:
        datagram.send(qp, wqe, data, size)
    elif qp.type is _RAW_PACKET:
        raw.send(qp, wqe, data)
    else:
        _exchange(qp, _request(qp, wqe, data, size))
    return 0


def _read(qp: SoftQueuePair, wqe: WQE) -> int:
    size = room(wqe)
    needs_rd_atomic(qp)
    ack = _exchange(qp, _request(qp, wqe, [], size))
    target, _ = _local_data(qp, wqe, write=True)
    if ack.data:
        copy(ack.data, target)
    return size


def _atomic(qp: SoftQueuePair, wqe: WQE) -> int:
    if room(wqe) < 8:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    needs_rd_atomic(qp)
    request = _request(qp, wqe, [], 8)
    request.rkey, request.compare, request.swap = wqe.atomic_rkey, wqe.compare_add, wqe.swap
    old = _exchange(qp, request).value
    # Only the SGEs that receive the value are checked.
    target = qp.device.memory.local(qp.pd, part(wqe.sges, 0, 8), True)
    copy([old.to_bytes(8, sys.byteorder)], target)
    return 8


def _atomic_write(qp: SoftQueuePair, wqe: WQE) -> int:
    needs_rd_atomic(qp)
    _exchange(qp, _request(qp, wqe, [wqe.atomic_wr.to_bytes(8, sys.byteorder)], 8))
    return 0


def _flush(qp: SoftQueuePair, wqe: WQE) -> int:
    request = _request(qp, wqe, [], wqe.length)
    request.flush_type, request.flush_level = wqe.type, wqe.level
    _exchange(qp, request)
    return 0


def _tso(qp: SoftQueuePair, wqe: WQE) -> int:
    data, size = _local_data(qp, wqe)
    if qp.type is _UD:
        datagram.send_segmented(qp, wqe, data, size)
    else:
        raw.send_segmented(qp, wqe, data, size)
    return 0


_BY_OPCODE: dict[int, Callable[[SoftQueuePair, WQE], int]] = {
    int(Opcode.SEND): _send_or_write,
    int(Opcode.SEND_WITH_IMM): _send_or_write,
    int(Opcode.SEND_WITH_INV): _send_or_write,
    int(Opcode.RDMA_WRITE): _send_or_write,
    int(Opcode.RDMA_WRITE_WITH_IMM): _send_or_write,
    int(Opcode.RDMA_READ): _read,
    int(Opcode.ATOMIC_CMP_AND_SWP): _atomic,
    int(Opcode.ATOMIC_FETCH_AND_ADD): _atomic,
    int(Opcode.LOCAL_INV): local_invalidate,
    int(Opcode.BIND_MW): bind,
    int(Opcode.TSO): _tso,
    int(Opcode.FLUSH): _flush,
    int(Opcode.ATOMIC_WRITE): _atomic_write,
}


# ---- what comes back --------------------------------------------------------


def _exchange(qp: SoftQueuePair, request: Request) -> Ack:
    """Send a request and return its acknowledgement.

    Raises:
        ErrorStatus: the responder sent a NAK, or the attempts are used up.
        _Parked: it did not respond, or was not ready, and attempts are left.
    """
    if qp.reliable and qp.retries > qp.attr["retry_cnt"]:
        # The last attempt has timed out too.
        raise ErrorStatus(WCStatus.RETRY_EXC_ERR)
    ack = qp.device.transmit(request, qp.attr["dgid"])
    if not qp.reliable:
        return ACK
    if ack is None:
        timeout = qp.attr["timeout"]
        if not timeout:
            # Wait forever: retry now and then, in case the peer comes up.
            _try_again(qp, 0.1)
        qp.retries += 1
        _try_again(qp, ack_timeout(timeout))
    if ack.type is _ACK_TYPE:
        if qp.sq.fast_path is None and qp.type is _RC:
            _open_fast_path(qp)
        return ack
    if ack.type is AckType.RNR_NAK:
        if qp.rnr_retries == qp.attr["rnr_retry"] != RNR_FOREVER:
            raise ErrorStatus(WCStatus.RNR_RETRY_EXC_ERR)
        qp.rnr_retries += 1
        _try_again(qp, rnr_timer(ack.rnr_timer))
    raise ErrorStatus(_NAK_STATUS[ack.type])


def _open_fast_path(qp: SoftQueuePair) -> None:
    """Have C execute the next common work requests of a queue pair whose peer has responded."""
    peer: SoftQueuePair = qp.device.qps[qp.attr["dest_qp_num"]]
    cqs = qp.send_cq, peer.recv_cq
    if qp.state is not _RTS or peer.state not in RECEIVES:
        return
    if any([cq.has_timestamps for cq in cqs]):
        return
    send_cq, recv_cq = [
        (cq, None, -1) if cq.channel is None else (cq, cq.channel.events, cq.channel.event_fd)
        for cq in cqs
    ]
    memory = qp.device.memory
    qp.sq.fast_path = native.FastPath(
        qp,
        qp.context.faults.statuses,
        peer.context.faults.refusals,
        memory.regions_by_lkey,
        memory.by_index,
        qp.pd,
        peer.pd,
        peer.rq if peer.srq is None else None,
        send_cq,
        recv_cq,
        qp.number,
        peer.number,
        peer.attr["qp_access_flags"],
        bool(qp.attr["max_rd_atomic"] and peer.attr["max_dest_rd_atomic"]),
        qp.sq_sig_all,
    )


def _try_again(qp: SoftQueuePair, seconds: float) -> NoReturn:
    """Have the request at the head of the queue retried later."""
    qp.due = time.monotonic() + seconds
    raise _Parked
