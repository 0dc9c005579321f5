"""The responder: executes one request, which is a whole message, and acknowledges it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...enums import Access, Opcode, QPType, WCOpcode, WCStatus
from ..software.memory import copy
from ..software.responder import (
    RECEIVES,
    Executor,
    atomic,
    atomic_write,
    complete_receive,
    consume_receive,
    establish,
    execute,
    fill,
    flush,
    not_ready,
    read,
    refuse,
    shared_queue,
    target_of,
)
from ..software.transport_messages import ACK, Ack, Request

if TYPE_CHECKING:
    from .qp import SoftQueuePair

_REMOTE_WRITE = int(Access.REMOTE_WRITE)
# Looked up once: before Python 3.12, accessing an Enum member costs as much as a call.
_SUCCESS, _UD = WCStatus.SUCCESS, QPType.UD


def receive(qp: SoftQueuePair, request: Request) -> Ack | None:
    """Execute a request; return the acknowledgement, or None if none is sent."""
    if qp.state not in RECEIVES or qp.peer_type is not request.qp_type:
        return None
    if qp.connected:
        if qp.attr["dest_qp_num"] != request.src_qpn:
            return None
        # UC accepts any PSN.
        if qp.reliable and qp.attr["rq_psn"] != request.psn:
            return None
    elif qp.type is _UD and request.qkey != qp.attr["qkey"]:
        qp.device.count_qkey_violation()
        return None
    establish(qp)
    ack = execute(qp, request, BY_OPCODE[request.opcode])
    return ack if qp.reliable else None


def _send(qp: SoftQueuePair, request: Request) -> Ack | None:
    srq = shared_queue(qp, request)
    if srq is not None and srq.tags is not None:
        ack: Ack | None = srq.tags.receive(qp, request)
        return ack
    taken = consume_receive(qp, request)
    if taken is None:
        return not_ready(qp)
    return fill(qp, request, taken)


def _write(qp: SoftQueuePair, request: Request) -> Ack | None:
    if not qp.grants(_REMOTE_WRITE):
        return refuse(qp)
    target = target_of(qp, request, request.length, _REMOTE_WRITE)
    if request.imm is None:
        copy(request.data, target)
        return ACK
    # Without a receive, nothing is written.
    taken = consume_receive(qp, request)
    if taken is None:
        return not_ready(qp)
    copy(request.data, target)
    return complete_receive(
        qp, request, taken, _SUCCESS, request.length, WCOpcode.RECV_RDMA_WITH_IMM
    )


BY_OPCODE: dict[int, Executor] = {
    int(Opcode.SEND): _send,
    int(Opcode.SEND_WITH_IMM): _send,
    int(Opcode.SEND_WITH_INV): _send,
    int(Opcode.RDMA_WRITE): _write,
    int(Opcode.RDMA_WRITE_WITH_IMM): _write,
    int(Opcode.RDMA_READ): read,
    int(Opcode.ATOMIC_CMP_AND_SWP): atomic,
    int(Opcode.ATOMIC_FETCH_AND_ADD): atomic,
    int(Opcode.FLUSH): flush,
    int(Opcode.ATOMIC_WRITE): atomic_write,
}
"""The function that executes a request, by opcode."""
