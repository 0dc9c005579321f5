"""Queue pairs: the state machine, the queues, and how work requests complete."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...enums import EventType, Opcode, QPAttrMask, QPState, QPType, SendFlags, WCOpcode, WCStatus
from ...standard.opcodes import OPCODES_BY_QP_TYPE, SEND_OPS
from ...standard.qp_states import OPTIONAL, RANGES, REQUIRED
from .completion import NO_TAG, CompletionQueue, Entry
from .device_queues import WQE, SharedReceiveQueue, WorkQueue

if TYPE_CHECKING:
    from .device import Device
    from .memory import ProtectionDomain
    from .transport_messages import Request

_COMPLETES_AS: dict[int, WCOpcode] = {
    int(Opcode.RDMA_WRITE): WCOpcode.RDMA_WRITE,
    int(Opcode.RDMA_WRITE_WITH_IMM): WCOpcode.RDMA_WRITE,
    int(Opcode.RDMA_READ): WCOpcode.RDMA_READ,
    int(Opcode.ATOMIC_CMP_AND_SWP): WCOpcode.COMP_SWAP,
    int(Opcode.ATOMIC_FETCH_AND_ADD): WCOpcode.FETCH_ADD,
    int(Opcode.LOCAL_INV): WCOpcode.LOCAL_INV,
    int(Opcode.BIND_MW): WCOpcode.BIND_MW,
    int(Opcode.TSO): WCOpcode.TSO,
    int(Opcode.FLUSH): WCOpcode.FLUSH,
    int(Opcode.ATOMIC_WRITE): WCOpcode.ATOMIC_WRITE,
}
"""SENDs are reported as SEND. So is any other opcode: its completion has failed, so the opcode is
not valid."""

_SIGNALED = int(SendFlags.SIGNALED)
_PEER_TYPE = {QPType.XRC_RECV: QPType.XRC_SEND, QPType.XRC_SEND: QPType.XRC_RECV}
_RELIABLE = frozenset({QPType.RC, QPType.XRC_SEND, QPType.XRC_RECV})
# Looked up once: before Python 3.12, accessing an Enum member costs as much as a call.
_RTS, _SQE, _ERR, _WC_SEND = QPState.RTS, QPState.SQE, QPState.ERR, WCOpcode.SEND

ACCESS_FLAGS = 0x3FF003FF
"""The access flags of the kernel's ABI (enum ib_uverbs_access_flags). A queue pair accepts any of
them; those that grant a peer nothing have no effect."""

_ATTRIBUTE_RANGES: dict[str, tuple[int, int]] = {
    **RANGES,
    "port_num": (1, 1),
    "pkey_index": (0, 0),
    "max_rd_atomic": (0, 16),
    "max_dest_rd_atomic": (0, 16),
    "path_mig_state": (0, 0),
}
"""The lowest and highest values that ibv_modify_qp accepts."""


class QueuePair(native.Record):
    """A queue pair; a device's own class may extend any method."""

    def __init__(
        self,
        device: Device,
        context: Any,
        number: int,
        qp_type: QPType,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        srq: SharedReceiveQueue | None,
        send_queue: WorkQueue,
        recv_queue: WorkQueue,
        sq_sig_all: bool,
    ) -> None:
        self.device = device
        self.context = context
        self.number = number
        self.type = qp_type
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.srq = srq
        self.sq = send_queue
        self.sq.prompt = True
        self.sq.faults = context.faults.posts
        self.rq = recv_queue
        self.sq_sig_all = sq_sig_all
        self.xrcd: Any = None
        self.handle: Any = None
        self.opcodes = frozenset(map(int, OPCODES_BY_QP_TYPE[qp_type] - SEND_OPS.keys()))
        self.reliable = qp_type in _RELIABLE
        self.connected = qp_type not in (QPType.UD, QPType.RAW_PACKET)
        self.peer_type = _PEER_TYPE.get(qp_type, qp_type)
        self._set_state(QPState.RESET)
        self.forget()

    def forget(self) -> None:
        """Set everything to its value in RESET."""
        self.attr: dict[str, Any] = {}
        """Set by modify, which requires all attributes that the new state needs."""
        self.begin_attempts()
        self.established = False

    # ---- the state machine --------------------------------------------------

    def modify(self, mask: QPAttrMask, attrs: dict[str, Any]) -> bool:
        """Change attributes and the state; return False, changing nothing, if that is not
        allowed."""
        old = self.state
        new = QPState(attrs.get("qp_state", old))
        if "cur_qp_state" in attrs and attrs["cur_qp_state"] != old:
            return False
        required = REQUIRED[self.type].get((old, new))
        if required is None or required & ~mask:
            return False
        allowed = required | OPTIONAL[self.type].get((old, new), QPAttrMask(0))
        if mask & ~(allowed | QPAttrMask.STATE | QPAttrMask.CUR_STATE):
            return False
        for name, value in attrs.items():
            low, high = _ATTRIBUTE_RANGES.get(name, (value, value))
            if not low <= value <= high:
                return False
        self.attr = {**self.attr, **attrs}
        self.enter(new)
        if attrs.get("en_sqd_async_notify"):
            self.drain()
        return True

    def drain(self) -> None:
        """Report that the send queue has drained.

        If posted work requests are executed at once, it has already drained.
        """
        self.context.events.push(EventType.SQ_DRAINED, self.handle)

    def enter(self, state: QPState) -> None:
        """Move to a state, as modify does."""
        failed = self.state is _ERR
        self._set_state(state)
        if state is QPState.RESET:
            self.drop_queues()
            self.forget()
        elif state is _ERR and not failed:
            self.flush()

    def _set_state(self, state: QPState) -> None:
        self.state = state
        self.sq.refuses = 0 if state >= _RTS else errno.EINVAL
        if self.srq is not None or state is QPState.RESET:
            self.rq.refuses = errno.EINVAL
        else:
            self.rq.refuses = 0
        self.rq.prompt = state is _ERR

    def drop_queues(self) -> None:
        """Drop the posted work requests, and the completions that have not been polled."""
        for wqe in self.sq.posted():
            if wqe.owner is not None:
                wqe.owner.ended(wqe, WCStatus.WR_FLUSH_ERR)
        for queue, cq in ((self.sq, self.send_cq), (self.rq, self.recv_cq)):
            queue.clear()
            cq.forget(queue)

    # ---- attempts of the request at the head of the send queue --------------

    def begin_attempts(self) -> None:
        """Reset the retry counts for the next request."""
        self.retries = 0
        self.rnr_retries = 0

    # ---- completing ---------------------------------------------------------

    def complete_send(self, wqe: WQE, status: WCStatus, byte_len: int = 0) -> None:
        """Retire a send work request, with a completion if one is due."""
        if wqe.owner is not None:
            wqe.owner.ended(wqe, status)
            return
        queue = self.sq
        if not (status or self.sq_sig_all or wqe.flags & _SIGNALED):
            queue.silent += 1
            return
        frees = queue.silent + 1
        if queue.silent:
            queue.silent = 0
        opcode = _COMPLETES_AS.get(wqe.opcode, _WC_SEND)
        fields = (wqe.wr_id, status, opcode, byte_len, 0, self.number, 0, 0, 0)
        self.push(self.send_cq, (fields, queue, frees, False, NO_TAG))

    def push(self, cq: CompletionQueue, entry: Entry, received: Any = None) -> None:
        """Put an entry on a completion queue; an overrun breaks the queue pair.

        Args:
            cq: the completion queue.
            entry: the entry.
            received: the receive that it completes, if that can return to an SRQ.
        """
        if cq.add(entry):
            return
        if received is not None and entry[1] is not self.rq:
            # No completion would ever free the receive's slot and memory, so it returns to the SRQ.
            native.on_commit(entry[1].pending.appendleft, received)
        cq.report_overrun()
        self.fail(EventType.QP_FATAL)

    # ---- failing ------------------------------------------------------------

    def fail(self, event: EventType | None = None) -> None:
        """Move the queue pair to ERR, and report the asynchronous event, if any."""
        if self.state is _ERR:
            return
        self._set_state(_ERR)
        if event is not None:
            self.context.events.push(event, self.handle)
        self.flush()

    def fail_send(self) -> None:
        """React to a failed send: an unreliable queue pair can still receive."""
        if self.reliable:
            self.fail()
        elif self.state is not QPState.ERR:
            self._set_state(QPState.SQE)
            self.flush_sends()

    def flush(self) -> None:
        """Complete all posted work requests, with a flush error."""
        self.flush_sends()
        if self.srq is None:
            self.flush_receives()
        else:
            self.context.events.push(EventType.QP_LAST_WQE_REACHED, self.handle)

    def flush_posted(self) -> None:
        """Complete the work requests that were posted in ERR or SQE, with flush errors."""
        self.flush_sends()
        if self.state is _ERR and self.srq is None:
            self.flush_receives()

    def flush_sends(self) -> None:
        """Complete the send queue with flush errors."""
        while self.sq.pending:
            self.complete_send(self.sq.take(), WCStatus.WR_FLUSH_ERR)

    def flush_receives(self) -> None:
        """Complete the receive queue with flush errors."""
        while self.rq.pending:
            wr_id = self.rq.take().wr_id
            fields = (wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.RECV, 0, 0, self.number, 0, 0, 0)
            self.push(self.recv_cq, (fields, self.rq, 1, False, NO_TAG))

    def grants(self, access: int) -> bool:
        """Whether the queue pair allows the peer all of this access."""
        return not access & ~self.attr["qp_access_flags"]

    def checksum_flags(self, request: Request) -> int:
        """Return IP_CSUM_OK if the device has checked a message's checksums, else 0."""
        return 0
