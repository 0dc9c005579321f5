"""What every requester does the same way: sizes, limits, and operations that need no peer."""

from __future__ import annotations

from ...enums import Opcode, WCStatus
from ...standard.opcodes import MAX_MSG_SIZE
from .device_queues import WQE
from .memory import ErrorStatus, total_length
from .qp import QueuePair

READ = int(Opcode.RDMA_READ)
ATOMICS = frozenset({int(Opcode.ATOMIC_CMP_AND_SWP), int(Opcode.ATOMIC_FETCH_AND_ADD)})


def room(wqe: WQE) -> int:
    """Return the size of the local buffers of a read or an atomic.

    As on hardware, their keys are checked only when the response arrives, after the responder has
    executed the request.
    """
    if wqe.inline is not None:
        # An inline copy cannot be written to.
        raise ErrorStatus(WCStatus.LOC_QP_OP_ERR)
    size = total_length(wqe.sges)
    if size > MAX_MSG_SIZE:
        raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    return size


def planned_size(wqe: WQE) -> int:
    """Return the byte_len of a work request that a fault plan completes with SUCCESS."""
    if wqe.opcode == READ:
        return room(wqe)
    return 8 if wqe.opcode in ATOMICS else 0


def message_size(wqe: WQE) -> int:
    """Return the size of a request's message, inline or in its SGEs."""
    return room(wqe) if wqe.inline is None else len(wqe.inline)


def needs_rd_atomic(qp: QueuePair) -> None:
    """Raise an ErrorStatus if the queue pair's max_rd_atomic permits no read or atomic."""
    if not qp.attr["max_rd_atomic"]:
        # The request could never start.
        raise ErrorStatus(WCStatus.LOC_QP_OP_ERR)


def local_invalidate(qp: QueuePair, wqe: WQE) -> int:
    """Execute a LOCAL_INV."""
    if not qp.device.memory.invalidate(qp.pd, qp.number, wqe.imm):
        raise ErrorStatus(WCStatus.MW_BIND_ERR)
    return 0


def bind(qp: QueuePair, wqe: WQE) -> int:
    """Execute a BIND_MW."""
    qp.device.memory.bind(
        wqe.window,
        wqe.region,
        wqe.bind_addr,
        wqe.bind_length,
        wqe.bind_access,
        pd=qp.pd,
        qpn=qp.number,
        rkey=wqe.bind_rkey,
    )
    return 0
