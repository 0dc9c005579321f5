"""The requester: sends the requests of the send queue, and processes what comes back.

On a reliable service, when the responder reports a missing packet or stays silent for too long, the
requester retransmits its packets, starting with the oldest unacknowledged one (go-back-N). A READ
resumes where its responses stopped. On an unreliable service, a request is complete when it has
been sent.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...enums import Opcode, QPState, QPType, SendFlags, WCStatus
from ...standard.opcodes import CONSUMES_RECEIVE
from ...standard.timers import RNR_FOREVER, ack_timeout, rnr_timer
from ...standard.wire import ICRC_BYTES
from ..software import requester
from ..software.memory import ErrorStatus, copy, part
from ..software.requester import ATOMICS, READ
from . import packets
from .packets import DEFAULT_PKEY, MIG_REQ, PSN_MASK, SOLICITED_EVENT, Form, Packet, Path, distance
from .qp import HOLD_SECONDS, SendRequest, hold, next_held

if TYPE_CHECKING:
    from ..software.device_queues import WQE
    from ..software.transport_messages import Segments
    from .packets import PacketRow
    from .qp import RoceQueuePair

WINDOW = 64
"""The most packets in flight, including responses to READs."""
READ_PACKETS = 32
"""The most response packets that one READ request asks for: a longer READ is split into several
requests, so that its responses come no faster than they are processed."""
BURST_PACKETS, BURST_BYTES = 32, 60_000
"""The most packets and bytes that one system call sends."""
_ASK_AFTER = 8
"""The number of packets after which the last packet of a burst requests an acknowledgement."""
_SHORTEST_TIMEOUT = 0.004
"""Seconds; a shorter timeout would say nothing about the network."""
_NO_TIMEOUT = 0.1
"""Seconds between attempts if the attribute timeout is 0; their number is then not limited."""

_RTS, _SQD, _UD = QPState.RTS, QPState.SQD, QPType.UD
_FENCE, _SOLICITED = int(SendFlags.FENCE), int(SendFlags.SOLICITED)
_PRIVILEGED_QKEY = 0x8000_0000
_LOCAL = {int(Opcode.LOCAL_INV): requester.local_invalidate, int(Opcode.BIND_MW): requester.bind}
_FLUSH, _ATOMIC_WRITE = int(Opcode.FLUSH), int(Opcode.ATOMIC_WRITE)
_FETCH_AND_ADD = int(Opcode.ATOMIC_FETCH_AND_ADD)
_RESPONDED = ATOMICS | {READ}
"""The opcodes of requests that an ACK does not complete, because they need a response."""
_COUNTED = _RESPONDED | {_ATOMIC_WRITE}
_MASK64 = (1 << 64) - 1

_NAK_STATUS = {
    packets.INVALID_REQUEST: WCStatus.REM_INV_REQ_ERR,
    packets.REMOTE_ACCESS_ERROR: WCStatus.REM_ACCESS_ERR,
    packets.REMOTE_OPERATIONAL_ERROR: WCStatus.REM_OP_ERR,
}


# ---- what goes out ----------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Burst:
    """Packets to one peer that are sent by one call.

    All but the last have headers of one size and `unit` bytes of payload. If this is also true of
    the last, `room` is how many more bytes may be added, else 0.
    """

    path: Path
    headers: list[bytes]
    payload: Segments
    unit: int
    room: int


def send(qp: RoceQueuePair) -> None:
    """Send as many packets as the window allows."""
    if qp.rnr_until:
        return
    pending = qp.sq.pending
    psn = begin = qp.psn
    limit = qp.una + WINDOW
    bursts: list[Burst] = []
    request: SendRequest | None = None
    try:
        while psn < limit:
            if psn < qp.tail:
                request = _request_of(qp, psn)
            else:
                request = None
                if qp.started == len(pending):
                    break
                request = _start(qp, psn, limit)
                if request is None:
                    break
            after = _add(qp, bursts, request, psn, limit)
            if after == psn:
                break
            psn = after
    except ErrorStatus as error:
        # Earlier requests must end first.
        if not qp.requests or request is qp.requests[0]:
            fail(qp, error.status)
            return
    if not bursts:
        return
    if qp.reliable:
        _ask(bursts)
    left = qp.top - begin
    for burst in bursts:
        again = max(0, min(left, len(burst.headers)))
        left -= again
        qp.device.send(qp, burst.path, burst.headers, burst.payload, burst.unit, again)
    qp.psn = psn
    if psn > qp.top:
        qp.top = psn
    if not qp.reliable:
        _advance(qp, psn)
    elif not qp.deadline:
        _restart_timer(qp)


def may_send(qp: RoceQueuePair) -> bool:
    """Whether send() may have something to do."""
    if qp.state is _RTS:
        return qp.psn < qp.tail or qp.started < len(qp.sq.pending)
    return qp.state is _SQD and (qp.psn < qp.tail or qp.read_offset > 0)


def packets_in_burst(size: int) -> int:
    """Return how many packets of a given size (without the ICRC) are sent in one burst."""
    return min(BURST_PACKETS, BURST_BYTES // (size + ICRC_BYTES))


def _ask(bursts: list[Burst]) -> None:
    """Set AckReq in the last packet, and in the last packets of enough earlier bursts."""
    unasked = 0
    for burst in bursts:
        unasked += len(burst.headers)
        if unasked >= _ASK_AFTER or burst is bursts[-1]:
            unasked = 0
            last = burst.headers[-1]
            burst.headers[-1] = last[:8] + b"\x80" + last[9:]


def _request_of(qp: RoceQueuePair, psn: int) -> SendRequest:
    """Return the request that a PSN belongs to."""
    request = qp.requests[-1]
    if psn < request.psn:
        for request in qp.requests:
            if psn < request.end:
                break
    return request


def _start(qp: RoceQueuePair, psn: int, limit: int) -> SendRequest | None:
    """Make the next request; return None if there is none, or if it must wait.

    Raises:
        ErrorStatus: the work request ends with an error status.
    """
    pending = qp.sq.pending
    while qp.started < len(pending):
        if qp.state is not _RTS and not qp.read_offset:
            return None
        wqe = pending[qp.started]
        opcode = wqe.opcode
        faults = qp.context.faults
        if faults.statuses and not qp.read_offset:
            if qp.requests:
                return None
            if (forced := faults.take_status(wqe.wr_id)) is not None:
                if forced:
                    raise ErrorStatus(forced)
                qp.end_first_send(WCStatus.SUCCESS, requester.planned_size(wqe))
                continue
        local = _LOCAL.get(opcode)
        if local is None:
            form = qp.forms.get(opcode)
            if form is None or opcode not in qp.opcodes:
                raise ErrorStatus(WCStatus.LOC_QP_OP_ERR)
            if wqe.flags & _FENCE and qp.reads and not qp.read_offset:
                return None
            return _make(qp, wqe, form, psn, limit)
        if qp.requests:
            return None
        if opcode not in qp.opcodes:
            raise ErrorStatus(WCStatus.LOC_QP_OP_ERR)
        local(qp, wqe)
        qp.end_first_send(WCStatus.SUCCESS)
    return None


def _make(qp: RoceQueuePair, wqe: WQE, form: Form, psn: int, limit: int) -> SendRequest | None:
    opcode = wqe.opcode
    path, mtu, offset, count, last = qp.path, qp.mtu, 0, 1, True
    counts = opcode in _COUNTED
    if counts:
        requester.needs_rd_atomic(qp)
        if qp.reads >= qp.attr["max_rd_atomic"]:
            return None
    if opcode == READ:
        offset = qp.read_offset
        size = requester.room(wqe) - offset
        if size > READ_PACKETS * mtu:
            size, last = READ_PACKETS * mtu, False
        count = -(-size // mtu) or 1
        if psn + count > limit:
            return None
    elif not counts and opcode != _FLUSH:
        size = requester.message_size(wqe)
        if qp.type is _UD:
            to = wqe.ah
            path = Path(to.dgid, to.traffic_class, to.hop_limit, to.flow_label)
            mtu = qp.device.port_mtu.bytes
            if size > mtu:
                raise ErrorStatus(WCStatus.LOC_LEN_ERR)
        count = -(-size // mtu) or 1
    else:
        size = wqe.length if opcode == _FLUSH else 8
        if opcode in ATOMICS and requester.room(wqe) < 8:
            raise ErrorStatus(WCStatus.LOC_LEN_ERR)
    request = SendRequest(wqe, form, path, psn, psn + count, offset, size, counts, last)
    native.put(qp.requests, request)
    qp.tail = psn + count
    if counts:
        qp.reads += 1
    if last:
        qp.started += 1
        if offset:
            qp.read_offset = 0
    else:
        qp.read_offset = offset + size
    return request


def _data(qp: RoceQueuePair, wqe: WQE, offset: int, size: int) -> Segments:
    if not size:
        return []
    if wqe.inline is not None:
        return [wqe.inline[offset : offset + size]]
    return qp.device.memory.local(qp.pd, part(wqe.sges, offset, size), False)


def _add(qp: RoceQueuePair, bursts: list[Burst], request: SendRequest, psn: int, limit: int) -> int:
    """Add a request's packets to the outgoing bursts; return the next PSN.

    Nothing is added if an acknowledgement that is still to come will make room for a longer burst:
    the cost of a burst hardly depends on its length.
    """
    form, wqe = request.form, request.wqe
    if form.middle is form.only or request.end - request.psn == 1:
        _add_only(qp, bursts, request, psn)
        return request.end
    mtu = qp.mtu
    end = min(request.end, psn + packets_in_burst(mtu + form.middle.size))
    if end > limit:
        if psn > qp.una:
            return psn
        end = limit
    if psn == request.psn and form.first.size > form.middle.size:
        # The RETH makes the first packet longer than the others.
        end = psn + 1
    elif end == request.end and end - psn > 1:
        # A last packet that is longer than the others is sent on its own.
        last = request.size - (end - request.psn - 1) * mtu
        if form.last.size - form.middle.size + last > mtu:
            end -= 1
    headers = headers_of_middle(qp, form.middle, psn, end)
    if psn == request.psn:
        headers[0] = _header(qp, request, form.first, psn)
    if end == request.end:
        headers[-1] = _header(qp, request, form.last, end - 1)
    start = (psn - request.psn) * mtu
    size = min((end - psn) * mtu, request.size - start)
    bursts.append(Burst(request.path, headers, _data(qp, wqe, start, size), mtu, 0))
    return end


def headers_of_middle(qp: RoceQueuePair, row: PacketRow, begin: int, end: int) -> list[bytes]:
    """Encode the headers of MIDDLE packets, with the PSNs begin..end-1."""
    pack, number, qpn = row.pack, row.bth_opcode, qp.attr["dest_qp_num"]
    return [pack(number, MIG_REQ, DEFAULT_PKEY, qpn, psn & PSN_MASK) for psn in range(begin, end)]


def _add_only(qp: RoceQueuePair, bursts: list[Burst], request: SendRequest, psn: int) -> None:
    row, wqe, size, payload = request.form.only, request.wqe, 0, []
    if row.operation == _ATOMIC_WRITE:
        size, payload = 8, [wqe.atomic_wr.to_bytes(8, sys.byteorder)]
    elif row.has_payload:
        size = request.size
        payload = _data(qp, wqe, 0, size)
    header = _header(qp, request, row, psn)
    length = len(header) + size
    if bursts:
        burst = bursts[-1]
        if (
            length <= burst.room
            and burst.unit == size
            and len(burst.headers[0]) == len(header)
            and len(burst.headers) < BURST_PACKETS
            and burst.path == request.path
        ):
            burst.headers.append(header)
            burst.payload += payload
            burst.room -= length
            return
    bursts.append(Burst(request.path, [header], payload, size, BURST_BYTES - length))


def _header(qp: RoceQueuePair, request: SendRequest, row: PacketRow, psn: int) -> bytes:
    """Encode the headers of a packet."""
    wqe = request.wqe
    flags = MIG_REQ
    if row.ends and wqe.flags & _SOLICITED and row.operation in CONSUMES_RECEIVE:
        flags |= SOLICITED_EVENT
    qpn = qp.attr["dest_qp_num"] if qp.connected else wqe.remote_qpn & PSN_MASK
    values = [row.bth_opcode, flags, DEFAULT_PKEY, qpn, psn & PSN_MASK]
    for name in row.headers[1:]:
        values += _extension(name, qp, request, psn)
    return row.pack(*values)


def _extension(name: str, qp: RoceQueuePair, request: SendRequest, psn: int) -> tuple[Any, ...]:
    """Return the fields of a packet's extension header."""
    wqe = request.wqe
    match name:
        case "DETH":
            # A Q_Key with the top bit set stands for the sender's own Q_Key.
            qkey = wqe.remote_qkey
            return (qp.attr["qkey"] if qkey & _PRIVILEGED_QKEY else qkey), qp.number
        case "RETH":
            done = (psn - request.psn) * qp.mtu
            addr = wqe.remote_addr + request.offset + done
            return addr & _MASK64, wqe.rkey, request.size - done
        case "AtomicETH":
            if wqe.opcode == _FETCH_AND_ADD:
                return wqe.remote_addr, wqe.atomic_rkey, wqe.compare_add, 0
            return wqe.remote_addr, wqe.atomic_rkey, wqe.swap, wqe.compare_add
        case "ImmDt":
            # A work request holds immediate data in network order.
            return (wqe.imm.to_bytes(4, sys.byteorder),)
        case "IETH":
            return (wqe.imm,)
    level = wqe.level & packets.FLUSH_LEVEL
    return (level << packets.FLUSH_LEVEL_SHIFT | wqe.type & packets.FLUSH_TYPE,)


# ---- what comes back ----------------------------------------------------------------


def receive(qp: RoceQueuePair, packet: Packet) -> bool:
    """Process an acknowledgement or a response; return False if it responds to no packet sent."""
    if qp.state is not _RTS and qp.state is not _SQD:
        return False
    psn = qp.una + distance(packet.psn, qp.una & PSN_MASK)
    if psn + packet.count > qp.top:
        return False
    if packet.row is packets.ACKNOWLEDGE:
        _acknowledgement(qp, packet, psn)
        if may_send(qp):
            send(qp)
        return True
    if psn + packet.count > qp.una:
        _response(qp, packet, psn)
        _fail_refused(qp)
        if may_send(qp):
            # The data that has arrived is in memory only after this step; the next one may send it.
            qp.device.start(qp)
    return True


def _acknowledgement(qp: RoceQueuePair, packet: Packet, psn: int) -> None:
    syndrome, value = packet.aeth >> 29, packet.aeth >> 24 & 0x1F
    if syndrome == packets.ACK:
        _acknowledge(qp, psn + 1)
        return
    if syndrome not in (packets.RNR_NAK, packets.NAK):
        return
    if syndrome == packets.NAK:
        qp.device.counters.naks_received += 1
    else:
        qp.device.counters.rnr_naks_received += 1
    _acknowledge(qp, psn)
    if syndrome == packets.NAK and (status := _NAK_STATUS.get(value)) is not None:
        # A responder in ERR does not send the NAK again.
        if psn >= qp.una:
            qp.refused = psn, status
            _fail_refused(qp)
    elif psn != qp.una or not qp.requests or qp.rnr_until:
        # Responses before the NAK are missing, or it repeats an earlier NAK.
        return
    elif syndrome == packets.RNR_NAK:
        _wait_for_receive(qp, value)
    elif value == packets.PSN_SEQUENCE_ERROR and psn != qp.nak_psn:
        qp.nak_psn = psn
        _try_again(qp, True)


def _fail_refused(qp: RoceQueuePair) -> None:
    """Fail the oldest request if an error NAK has refused it."""
    if qp.refused is not None and qp.refused[0] == qp.una and qp.requests:
        fail(qp, qp.refused[1])


def _acknowledge(qp: RoceQueuePair, psn: int) -> None:
    """Process an ACK of every packet before a PSN. A READ or atomic still needs its response."""
    reached = psn
    if qp.reads:
        for request in qp.requests:
            if request.psn >= psn:
                break
            if request.wqe.opcode in _RESPONDED:
                reached = max(request.psn, qp.una)
                break
    if reached > qp.una:
        _advance(qp, reached)
    if reached < psn:
        if psn > qp.acked:
            qp.acked = psn
        _expect_missing(qp)


def _advance(qp: RoceQueuePair, psn: int) -> None:
    """Complete the requests before a PSN."""
    qp.una = psn
    if psn > qp.psn:
        # The packets have arrived, and need not be retransmitted.
        qp.psn = psn
    if qp.retries or qp.rnr_retries:
        qp.begin_attempts()
    if qp.missing_until:
        qp.missing_until = 0.0
    requests = qp.requests
    while requests and requests[0].end <= psn:
        request = native.take(requests)
        if request.counts:
            qp.reads -= 1
        if request.last:
            has_response = request.wqe.opcode in _RESPONDED
            byte_len = request.offset + request.size if has_response else 0
            qp.end_first_send(WCStatus.SUCCESS, byte_len)
            # The completion may overrun its queue; an overrun flushes the send queue.
            requests = qp.requests
    if qp.reliable:
        if qp.una < qp.psn:
            _restart_timer(qp)
        else:
            qp.deadline = 0.0


def _response(qp: RoceQueuePair, packet: Packet, psn: int) -> None:
    """Process the response to a READ, an atomic, a FLUSH or an ATOMIC_WRITE."""
    # A response implies that every earlier packet has arrived.
    _acknowledge(qp, psn)
    if psn > qp.una:
        hold(qp.early, packet, qp.mtu)
        _expect_missing(qp)
        return
    if not qp.requests:
        # The completion of an earlier request overran the completion queue.
        return
    if psn < qp.una:
        packet = packet.after(qp.una - psn)
    _accept(qp, packet)
    while qp.acked > qp.una or qp.early:
        if qp.acked > qp.una:
            _acknowledge(qp, qp.acked)
        early = next_held(qp.early, qp.una & PSN_MASK)
        if early is None:
            break
        _accept(qp, early)
    if qp.early:
        _expect_missing(qp)


def _accept(qp: RoceQueuePair, packet: Packet) -> None:
    """Process a packet as the response to the oldest request, if it fits."""
    request = qp.requests[0]
    wqe, row = request.wqe, packet.row
    done = (qp.una - request.psn) * qp.mtu
    end = qp.una + packet.count
    value = b""
    if wqe.opcode == READ and row in packets.READ_RESPONSES:
        # Each packet is as long as the MTU, except the last, whose opcode says that it is the last.
        size = min(packet.count * qp.mtu, request.size - done)
        fits = end <= request.end and packet.length == size and row.ends == (end == request.end)
    elif wqe.opcode in ATOMICS and row is packets.ATOMIC_ACKNOWLEDGE:
        value = packet.value.to_bytes(8, sys.byteorder)
        size, fits = 8, True
    else:
        size = 0
        fits = wqe.opcode in (_FLUSH, _ATOMIC_WRITE) and row is packets.READ_RESPONSE_ONLY
    if not fits:
        # It is not a response to this request.
        return
    if size:
        sges = part(wqe.sges, request.offset + done, size)
        try:
            target = qp.device.memory.local(qp.pd, sges, True)
        except ErrorStatus as error:
            fail(qp, error.status)
            return
        if value:
            copy([value], target)
        else:
            packet.copy_to(target)
    _advance(qp, end)


# ---- attempts -------------------------------------------------------------------------


def on_timer(qp: RoceQueuePair, now: float) -> None:
    """Do what is due by now."""
    if qp.rnr_until:
        if now < qp.rnr_until:
            qp.wake_at(qp.rnr_until)
        else:
            qp.rnr_until = 0.0
            send(qp)
        return
    is_limited = qp.attr["timeout"] > 0
    if qp.missing_until and now >= qp.missing_until:
        qp.missing_psn = qp.una
        _try_again(qp, is_limited)
        send(qp)
    elif qp.deadline and now >= qp.deadline:
        qp.nak_psn = qp.missing_psn = -1
        _try_again(qp, is_limited)
        send(qp)
    if qp.missing_until:
        qp.wake_at(qp.missing_until)
    if qp.deadline:
        qp.wake_at(qp.deadline)


def fail(qp: RoceQueuePair, status: WCStatus) -> None:
    """End the oldest work request with an error status."""
    wqe = qp.sq.take()
    qp.complete_send(wqe, status)
    qp.fail_send()


def _restart_timer(qp: RoceQueuePair) -> None:
    timeout = qp.attr["timeout"]
    qp.deadline = qp.device.now + (
        max(ack_timeout(timeout), _SHORTEST_TIMEOUT) if timeout else _NO_TIMEOUT
    )
    qp.wake_at(qp.deadline)


def _expect_missing(qp: RoceQueuePair) -> None:
    """Wait a little for responses that may have been overtaken.

    Before the timeout, wait only once for each PSN.
    """
    if not qp.missing_until and qp.una != qp.missing_psn:
        qp.missing_until = qp.device.now + HOLD_SECONDS
        qp.wake_at(qp.missing_until)


def _try_again(qp: RoceQueuePair, counts: bool) -> None:
    """Go back to the oldest unacknowledged packet, if any attempts are left."""
    qp.missing_until = qp.deadline = 0.0
    if counts:
        if qp.retries >= qp.attr["retry_cnt"]:
            fail(qp, WCStatus.RETRY_EXC_ERR)
            return
        qp.retries += 1
    qp.psn = qp.una


def _wait_for_receive(qp: RoceQueuePair, timer: int) -> None:
    """Pause after an RNR NAK, which also shows that the peer is reachable."""
    qp.retries = 0
    if qp.rnr_retries >= qp.attr["rnr_retry"] != RNR_FOREVER:
        fail(qp, WCStatus.RNR_RETRY_EXC_ERR)
        return
    qp.rnr_retries += 1
    qp.psn = qp.una
    qp.missing_until = qp.deadline = 0.0
    qp.rnr_until = qp.device.now + rnr_timer(timer)
    qp.wake_at(qp.rnr_until)
