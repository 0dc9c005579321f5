"""Tag matching: a shared receive queue that finds the buffer for a message by the message's tag.

A message starts with a header (TMH). Its tag is looked up in the matching list. If an entry
matches, the payload goes into the entry's buffers; if none does, the message is unexpected and
goes, with its header, to the queue's next receive.

When software adds an entry, a message that the entry would match may already be waiting among the
unexpected ones, and a later message must not overtake that message. So both sides count unexpected
messages, and entries added while the counts differ are held: they match nothing until an operation
carries a count that agrees with the device's (phase synchronisation, ibv_post_srq_ops(3)).

A rendezvous request has the payload's address (RVH) instead of the payload. The device itself
fetches the payload with an RDMA READ, on the queue pair that received the request, and sends a FIN.
"""

from __future__ import annotations

import copy
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._binding import native
from ...enums import EventType, Opcode, OpsFlags, OpsOpcode, WCFlags, WCOpcode, WCStatus
from ...standard.wire import TMH, TMHOpcode
from ..software.completion import NO_TAG, Entry, tm_info
from ..software.device_queues import WQE, WorkQueue
from ..software.memory import ErrorStatus, gather, part
from ..software.memory import copy as copy_bytes
from ..software.responder import consume_receive, fill, not_ready, refuse
from ..software.transport_messages import ACK, Ack, AckType, Request, Segments, size_of

if TYPE_CHECKING:
    from ..software.completion import CompletionQueue
    from ..software.device_queues import SharedReceiveQueue
    from ..software.memory import ProtectionDomain
    from .qp import SoftQueuePair

MAX_NUM_TAGS = 127
MAX_OPS = 1024
MAX_RNDV_HEADER = 64
"""The most bytes in a rendezvous request, including the sender's own data after the TMH and RVH."""

_RVH = Struct("!QII")  # va, rkey, len
_COUNT_MASK = 0xFFFF
"""The bits of an unexpected_cnt that the device keeps."""
_MAX_UNHANDLED = 0x3FFF
"""With this many unexpected messages unhandled, completions ask for a sync."""

_SIGNALED, _TM_SYNC = int(OpsFlags.SIGNALED), int(OpsFlags.TM_SYNC)
_SYNC_REQ = int(WCFlags.TM_SYNC_REQ)
_MATCH, _DATA_VALID = int(WCFlags.TM_MATCH), int(WCFlags.TM_DATA_VALID)
_COMPLETES_AS = {
    OpsOpcode.TAG_ADD: WCOpcode.TM_ADD,
    OpsOpcode.TAG_DEL: WCOpcode.TM_DEL,
    OpsOpcode.TAG_SYNC: WCOpcode.TM_SYNC,
}
_NOBODYS = (1 << 64) - 1
"""wr_id of the device's own work requests."""


class _Entry(NamedTuple):
    """An entry of the matching list."""

    wr_id: int
    sges: Any
    tag: int
    mask: int


class MatchingList(native.Record):
    """The matching list of a shared receive queue, and its operations.

    Attributes:
        slots: the list's capacity; a slot is freed by a TAG_DEL, or when the completion of the
            message that consumed its entry has been polled.
        ops: the operations.
    """

    def __init__(
        self,
        srq: SharedReceiveQueue,
        cq: CompletionQueue,
        max_num_tags: int,
        max_ops: int,
        max_sge: int,
    ) -> None:
        self.srq = srq
        self.cq = cq
        self.slots = WorkQueue(max_num_tags, max_sge)
        self.ops = WorkQueue(max_ops, 0)
        self.ops.prompt = True
        self.ops.slots = self.slots
        self._entries: dict[int, _Entry] = {}
        """By handle, in matching order; the dict is replaced, never changed in place."""
        self._held: frozenset[int] = frozenset()
        """The handles of the entries that must not match yet."""
        self._seen = 0
        self._handled = 0

    # ---- operations ---------------------------------------------------------

    def execute_next(self) -> bool:
        """Execute the first posted operation; return whether to call again."""
        if self.ops.pending:
            self._carry_out(self.ops.take())
        return bool(self.ops.pending)

    def give_up(self) -> bool:
        """Fail the first operation, which the device could not execute."""
        if self.ops.pending:
            self._complete_op(self.ops.take(), WCStatus.FATAL_ERR)
        return bool(self.ops.pending)

    def _carry_out(self, op: WQE) -> None:
        if op.flags & _TM_SYNC:
            self._handled = op.unexpected_cnt & _COUNT_MASK
        status = WCStatus.SUCCESS
        if op.opcode == OpsOpcode.TAG_ADD:
            entry = _Entry(op.recv_wr_id, op.sges, op.tag, op.mask)
            self._entries = {**self._entries, op.handle: entry}
            self._held |= {op.handle}
        elif op.opcode == OpsOpcode.TAG_DEL and not self._remove(op.handle):
            # A message has consumed the entry.
            status = WCStatus.TM_ERR
        if not self._behind():
            self._held = frozenset()
        self._complete_op(op, status)

    def _remove(self, handle: int) -> bool:
        if handle not in self._entries:
            return False
        self._drop(handle)
        native.on_commit(self.slots.free_slot)
        return True

    def _drop(self, handle: int) -> None:
        self._entries = {key: entry for key, entry in self._entries.items() if key != handle}
        self._held -= {handle}

    def _behind(self) -> int:
        """Return how many unexpected messages the software has not yet reported as handled."""
        return (self._seen - self._handled) & _COUNT_MASK

    def _complete_op(self, op: WQE, status: WCStatus) -> None:
        if not op.flags & _SIGNALED:
            self.ops.silent += 1
            return
        frees, self.ops.silent = self.ops.silent + 1, 0
        flags = _SYNC_REQ if self._behind() else 0
        opcode = _COMPLETES_AS[OpsOpcode(op.opcode)]
        fields = (op.wr_id, status, opcode, 0, 0, 0, 0, flags, 0)
        self._push((fields, self.ops, frees, False, NO_TAG))

    def _push(self, entry: Entry) -> None:
        if not self.cq.add(entry):
            self.cq.report_overrun()

    # ---- messages -----------------------------------------------------------

    def receive(self, qp: SoftQueuePair, request: Request) -> Ack | None:
        """Handle a message to a queue pair that uses this shared receive queue."""
        head, payload = _split(request.data, TMH.size)
        opcode = head[0] if head else TMHOpcode.NO_TAG
        if opcode in (TMHOpcode.NO_TAG, TMHOpcode.FIN):
            return self._deliver(qp, request, WCOpcode.TM_NO_TAG)
        if opcode not in (TMHOpcode.EAGER, TMHOpcode.RNDV) or len(head) < TMH.size:
            return refuse(qp)
        _, app_ctx, tag = TMH.unpack(head)
        rendezvous = opcode == TMHOpcode.RNDV
        if rendezvous and not TMH.size + _RVH.size <= request.length <= MAX_RNDV_HEADER:
            return refuse(qp)
        handle = self._match(tag)
        if handle is None:
            return self._unexpected(qp, request)
        entry = self._entries[handle]
        self._drop(handle)
        info = tm_info(tag, app_ctx)
        if rendezvous:
            return self._begin_rendezvous(qp, entry, gather(request.data), info)
        return self._eager(qp, entry, request, payload, info)

    def _match(self, tag: int) -> int | None:
        """Return the handle of the first entry that a tag matches."""
        for handle, entry in self._entries.items():
            if handle not in self._held and tag & entry.mask == entry.tag:
                return handle
        return None

    def _deliver(
        self,
        qp: SoftQueuePair,
        request: Request,
        opcode: WCOpcode,
        flags: int = 0,
        tag_info: bytes = NO_TAG,
    ) -> Ack | None:
        taken = consume_receive(qp, request)
        if taken is None:
            return not_ready(qp)
        return fill(qp, request, taken, opcode, flags, tag_info)

    def _unexpected(self, qp: SoftQueuePair, request: Request) -> Ack | None:
        flags = _SYNC_REQ if self._behind() >= _MAX_UNHANDLED else 0
        ack = self._deliver(qp, request, WCOpcode.TM_RECV, flags)
        if ack is ACK:
            self._seen += 1
        return ack

    def _eager(
        self, qp: SoftQueuePair, entry: _Entry, request: Request, payload: Segments, tag_info: bytes
    ) -> Ack | None:
        message = copy.copy(request)
        message.data, message.length = payload, request.length - TMH.size
        flags = _MATCH | _DATA_VALID
        if request.length > 128 << qp.attr["path_mtu"]:
            # The completion of the first packet reports the match, that of the last the data.
            self._complete_match(qp, entry, tag_info)
            flags, tag_info = _DATA_VALID, NO_TAG
        taken = entry, self.slots, self.srq.pd, self.cq
        return fill(qp, message, taken, WCOpcode.TM_RECV, flags, tag_info)

    def _complete_match(self, qp: SoftQueuePair, entry: _Entry, tag_info: bytes) -> None:
        fields = (entry.wr_id, WCStatus.SUCCESS, WCOpcode.TM_RECV, 0, 0, qp.number, 0, _MATCH, 0)
        # The entry keeps its slot until its data has arrived.
        self._push((fields, self.slots, 0, False, tag_info))

    def complete(
        self, qp: SoftQueuePair, entry: _Entry, status: WCStatus, byte_len: int, flags: int
    ) -> None:
        """Complete a tagged receive, however its message ended."""
        fields = (entry.wr_id, status, WCOpcode.TM_RECV, byte_len, 0, qp.number, 0, flags, 0)
        qp.push(self.cq, (fields, self.slots, 1, False, NO_TAG))

    # ---- rendezvous ---------------------------------------------------------

    def _begin_rendezvous(
        self, qp: SoftQueuePair, entry: _Entry, message: bytes, tag_info: bytes
    ) -> Ack:
        va, rkey, size = _RVH.unpack_from(message, TMH.size)
        try:
            segments = qp.device.memory.local(self.srq.pd, entry.sges, True)
        except ErrorStatus as error:
            self.complete(qp, entry, error.status, 0, 0)
            qp.fail()
            return Ack(AckType.NAK_REMOTE_OPERATIONAL)
        room = size_of(segments)
        if size > room:
            # Software fetches the data, using the headers, which go into the buffer.
            headers = message[: min(TMH.size + _RVH.size, room)]
            if headers:
                copy_bytes([headers], segments)
            self.complete(
                qp, entry, WCStatus.TM_RNDV_INCOMPLETE, len(headers), _MATCH | _DATA_VALID
            )
            return ACK
        self._complete_match(qp, entry, tag_info)
        _Rendezvous(self, qp, entry, size).start(va, rkey, message[: TMH.size + _RVH.size])
        return ACK


class _Rendezvous:
    """The device's own work requests on a send queue: one fetches the data, one sends the FIN."""

    def __init__(self, tags: MatchingList, qp: SoftQueuePair, entry: _Entry, size: int) -> None:
        self.pd: ProtectionDomain = tags.srq.pd
        self._tags = tags
        self._qp = qp
        self._entry = entry
        self._size = size

    def start(self, va: int, rkey: int, headers: bytes) -> None:
        """Put an RDMA READ and the FIN on the queue pair's send queue.

        They are executed once the request has been acknowledged.
        """
        read, fin = WQE(), WQE()
        read.wr_id = fin.wr_id = _NOBODYS
        read.opcode, fin.opcode = Opcode.RDMA_READ, Opcode.SEND
        read.sges = part(self._entry.sges, 0, self._size)
        read.remote_addr, read.rkey = va, rkey
        # The FIN has the request's headers, except for the opcode.
        fin.inline = bytes([TMHOpcode.FIN]) + headers[1:]
        read.owner = fin.owner = self
        native.on_commit(self._qp.sq.pending.append, read)
        native.on_commit(self._qp.sq.pending.append, fin)
        self._qp.device.start(self._qp)

    def ended(self, wqe: WQE, status: WCStatus) -> None:
        """Handle the end of the RDMA READ or of the FIN."""
        if wqe.opcode == Opcode.RDMA_READ:
            outcome = WCStatus.TM_RNDV_INCOMPLETE if status else WCStatus.SUCCESS
            self._tags.complete(self._qp, self._entry, outcome, self._size, _DATA_VALID)
        if status not in (WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR):
            # No completion would show the consumer why the queue pair broke.
            self._qp.fail(EventType.QP_FATAL)


def _split(data: Segments, size: int) -> tuple[bytes, Segments]:
    """Split a message in two: its first bytes, up to a size, and the rest."""
    head = b""
    rest: Segments = []
    for piece in data:
        taken = size - len(head)
        head += piece[:taken]
        if len(piece) > taken:
            rest.append(piece[taken:])
    return head, rest
