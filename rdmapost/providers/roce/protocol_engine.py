"""The protocol engine: what a queue pair does with a packet, posted work or an expired timer.

It has no sockets and no clock. Packets, posts and times go in; completions come out, and so do
packets, through the device's ``send``. Each call is one step and one transaction, so that a request
sees what earlier ones have written to memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...enums import EventType, QPState, WCStatus
from . import requester, responder

if TYPE_CHECKING:
    from .packets import Packet
    from .qp import RoceQueuePair

_RTR, _SQE, _ERR = QPState.RTR, QPState.SQE, QPState.ERR


def receive(qp: RoceQueuePair, packet: Packet) -> bool:
    """Process a packet, or a run of them, for a queue pair; return False if it is dropped."""
    row = packet.row
    if row.service is not qp.type or (qp.connected and packet.source != qp.path.dgid):
        return False
    if row.operation < 0:
        return requester.receive(qp, packet)
    return responder.receive(qp, packet)


def execute_next(qp: RoceQueuePair) -> bool:
    """Execute posted work requests, and continue pending work; return whether to call again."""
    if qp.state >= _SQE:
        qp.flush_posted()
        return False
    more = False
    if qp.held or qp.reading is not None:
        more = responder.execute_next(qp)
    if requester.may_send(qp):
        requester.send(qp)
    return more or (not qp.reliable and requester.may_send(qp))


def on_timer(qp: RoceQueuePair) -> None:
    """React to a queue pair's timer, which may expire early."""
    qp.timer = math.inf
    if _RTR <= qp.state < _ERR:
        now = qp.device.now
        if qp.state is not _RTR:
            requester.on_timer(qp, now)
        responder.on_timer(qp, now)


def give_up(qp: RoceQueuePair, *, expired: bool) -> bool:
    """Fail the work that could not be done; return whether to call again.

    The oldest work request fails or, if none is left, the queue pair does.

    Args:
        qp: the queue pair.
        expired: whether the work was on_timer's.
    """
    if qp.sq.pending:
        requester.fail(qp, WCStatus.FATAL_ERR)
    elif expired or qp.held or qp.reading is not None:
        qp.fail(EventType.QP_FATAL)
    return bool(qp.sq.pending)
