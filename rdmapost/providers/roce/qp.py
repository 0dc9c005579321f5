"""A queue pair's protocol state, both as requester and as responder.

The requester's PSNs grow without wrapping, so that it is clear which of two is earlier; they are
truncated to 24 bits only in packets. The responder compares PSNs as the specification does.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...enums import QPAttrMask, QPState, WCOpcode, WCStatus
from ..software.completion import NO_TAG
from ..software.device_queues import WQE
from ..software.journaled_dict import JournaledDict
from ..software.qp import QueuePair
from .packets import FORMS, Form, Packet, Path, distance

if TYPE_CHECKING:
    from ..software.responder import Receive
    from .device import RoceDevice

HELD = 64
"""The most packets held on each side until those before them arrive."""
HOLD_SECONDS = 0.02
"""How long packets are held before the missing ones are requested."""

_AH_ATTR = Struct("=16sIxBB").unpack_from
"""The start of struct ibv_ah_attr: dgid, flow_label, sgid_index, hop_limit, traffic_class."""
_RTR, _SQD, _ERR, _FLUSHED = QPState.RTR, QPState.SQD, QPState.ERR, WCStatus.WR_FLUSH_ERR


@dataclass(eq=False, slots=True)
class SendRequest:
    """A request in progress: a work request's message, or a part of a long READ.

    It is immutable.

    Attributes:
        wqe: the work request.
        form: the kinds of its packets.
        path: the path that its packets take.
        psn, end: its packets, or the responses to a READ, have the PSNs psn..end-1.
        offset, size: the range of the work request's bytes that it transfers.
        counts: whether it counts as an outstanding READ or atomic.
        last: whether it is the last request of the work request.
    """

    wqe: WQE
    form: Form
    path: Path
    psn: int
    end: int
    offset: int
    size: int
    counts: bool
    last: bool


class Incoming(native.Record):
    """A message whose first packets have arrived.

    Attributes:
        operation: SEND or RDMA_WRITE.
        done: bytes that have arrived.
        taken: the receive that a SEND fills.
        remote_addr, rkey, size: the memory that a WRITE fills.
    """

    __slots__ = ("done", "operation", "remote_addr", "rkey", "size", "taken")

    def __init__(self, first: Packet, taken: Receive | None) -> None:
        self.operation = first.opcode
        self.done = 0
        self.taken = taken
        self.remote_addr, self.rkey = first.remote_addr, first.rkey
        self.size = 0 if taken else first.dma_length


class Reading(native.Record):
    """A READ request whose responses are being sent.

    Attributes:
        psn: the PSN of the next response.
        remote_addr, rkey, left: the memory that is left to read.
        has_begun: whether the first response has been sent.
        is_duplicate: whether the request was executed before.
    """

    __slots__ = ("has_begun", "is_duplicate", "left", "psn", "remote_addr", "rkey")

    def __init__(self, request: Packet, is_duplicate: bool) -> None:
        self.psn = request.psn
        self.remote_addr, self.rkey, self.left = request.remote_addr, request.rkey, request.length
        self.has_begun = False
        self.is_duplicate = is_duplicate


class RoceQueuePair(QueuePair):
    """A queue pair whose peer is on the network."""

    device: RoceDevice

    def forget(self) -> None:
        super().forget()
        self.forms = FORMS[self.type]
        self.path = Path(bytes(16), 0, 0, 0)
        self.mtu = 0
        self.timer = math.inf
        """When the device will call on_timer."""
        self.draining = False
        # The requester.
        self.una = 0
        """The oldest unacknowledged PSN."""
        self.psn = 0
        """The PSN of the next packet to send; less than `top` during retransmission."""
        self.top = 0
        """The first PSN that has never been sent."""
        self.tail = 0
        """The first PSN that belongs to no request."""
        self._forget_requests()
        # The responder.
        self.epsn = 0
        """The expected PSN."""
        self.msn = 0
        self.atomics: deque[tuple[int, int]] = deque()
        """The PSNs and the results of the last atomics."""
        self.spare: Receive | None = None
        """The receive of a message that was partly lost; the next message takes it (UC)."""
        self._forget_incoming()

    def _forget_requests(self) -> None:
        self.requests: deque[SendRequest] = deque()
        """The requests that are not yet acknowledged."""
        self.started = 0
        """The number of work requests in the send queue whose last request is in `requests`."""
        self.read_offset = 0
        """How many bytes of the next work request, a READ, are already covered by requests."""
        self.reads = 0
        """Outstanding READ requests and atomics."""
        self.una = self.psn = self.tail = self.top
        self.deadline = 0.0
        """When the oldest packet must be acknowledged; 0 if none is outstanding."""
        self.rnr_until = 0.0
        """When to resume after an RNR NAK, or 0."""
        self.nak_psn = -1
        """The PSN of the last sequence error NAK; a repeated NAK says nothing new."""
        self.missing_until = 0.0
        """When to ask again for missing responses, or 0."""
        self.missing_psn = -1
        """The PSN of the last response that was asked for again before the timeout. That is done
        only once for each PSN, because the peer may be slow."""
        self.acked = 0
        """An ACK has acknowledged everything before this PSN, although responses are missing."""
        self.refused: tuple[int, WCStatus] | None = None
        """The PSN that an error NAK has refused, and the status; the request with that PSN fails
        when it is the oldest."""
        self.early: dict[int, Packet] = JournaledDict()
        """Responses that came too early, by PSN."""

    def _forget_incoming(self) -> None:
        self.incoming: Incoming | None = None
        self.reading: Reading | None = None
        self.repeats: deque[Reading] = deque()
        """Duplicate READ requests that wait for the end of `reading`."""
        self.ack_due = False
        """Whether an acknowledgement waits for the end of `reading`."""
        self.held: dict[int, Packet] = JournaledDict()
        """Requests that came too early, by PSN."""
        self.nak_due = 0.0
        """When to ask for a missing packet, or 0."""
        self.nak_sent = False
        """Whether the requester knows that the expected packet is missing."""

    # ---- the state machine --------------------------------------------------

    def modify(self, mask: QPAttrMask, attrs: dict[str, Any]) -> bool:
        if attrs.get("path_mtu", 0) > self.device.port_mtu or not super().modify(mask, attrs):
            return False
        if (address := attrs.get("ah_attr")) is not None:
            dgid, flow_label, hop_limit, traffic_class = _AH_ATTR(address)
            self.path = Path(dgid, traffic_class, hop_limit, flow_label & 0xFFFFF)
        if "path_mtu" in attrs:
            self.mtu = 128 << attrs["path_mtu"]
        if "rq_psn" in attrs:
            self.epsn = attrs["rq_psn"]
        if "sq_psn" in attrs:
            self.top = attrs["sq_psn"]
            self._forget_requests()
        return True

    def enter(self, state: QPState) -> None:
        super().enter(state)
        if state is QPState.RTS:
            self.draining = False

    def drain(self) -> None:
        self.draining = True
        self._check_drained()

    def _check_drained(self) -> None:
        """Report that the send queue has drained, if it has and the event was requested."""
        if self.draining and self.state is _SQD and not self.requests and not self.read_offset:
            self.draining = False
            super().drain()

    # ---- completing -----------------------------------------------------------

    def end_first_send(self, status: WCStatus, byte_len: int = 0) -> None:
        """Complete the first work request of the send queue; its requests have ended."""
        if self.started:
            self.started -= 1
        self.complete_send(self.sq.take(), status, byte_len)
        if self.draining:
            self._check_drained()

    # ---- failing --------------------------------------------------------------

    def drop_queues(self) -> None:
        super().drop_queues()
        self._forget_requests()
        taken = self._give_up_incoming()
        if taken is not None and self.srq is not None:
            # No completion would ever free the receive's slot and memory, so it returns to the SRQ.
            wqe, queue, _, _ = taken
            native.on_commit(queue.pending.appendleft, wqe)
        self.device.set_timer(self, None)

    def _give_up_incoming(self) -> Receive | None:
        """Drop a partly received message; return the receive that it would have filled."""
        taken = self.spare
        if self.incoming is not None and self.incoming.taken is not None:
            taken = self.incoming.taken
        self.spare = None
        self._forget_incoming()
        return taken

    def flush(self) -> None:
        taken = self._give_up_incoming()
        if taken is not None:
            self.end_receive(taken, _FLUSHED)
        super().flush()

    def end_receive(self, taken: Receive, status: WCStatus) -> None:
        """Complete a receive that gets no message."""
        wqe, queue, _, cq = taken
        fields = (wqe.wr_id, status, WCOpcode.RECV, 0, 0, self.number, 0, 0, 0)
        self.push(cq, (fields, queue, 1, False, NO_TAG), wqe)

    def flush_sends(self) -> None:
        self._forget_requests()
        super().flush_sends()

    # ---- time -------------------------------------------------------------------

    def wake_at(self, when: float) -> None:
        """Schedule on_timer for this time, unless it is already scheduled for an earlier one."""
        if when < self.timer:
            self.timer = when
            self.device.set_timer(self, when)


def hold(held: dict[int, Packet], packet: Packet, mtu: int) -> None:
    """Keep a packet that came too early, unless it is too long or too many are held."""
    kept = held.get(packet.psn)
    if kept is not None and kept.count >= packet.count:
        return
    if packet.row.has_payload and packet.length > packet.count * mtu:
        return
    if sum([each.count for each in held.values()]) + packet.count <= HELD:
        held[packet.psn] = packet.held()


def next_held(held: dict[int, Packet], psn: int) -> Packet | None:
    """Remove and return the packet with this PSN, or None; drop those before it."""
    for key in list(held):
        packet = held[key]
        ahead = distance(key, psn)
        if ahead <= 0:
            # pop(), not del: del takes effect only at the end of the step, and until then the
            # packet could be found again.
            held.pop(key)
        if ahead <= 0 < ahead + packet.count:
            return packet.after(-ahead) if ahead else packet
    return None
