"""The responder: executes requests in the order of their PSNs, and acknowledges them.

A request's permissions are checked for each packet, as on all devices. An unreliable service has no
acknowledgements: a request that cannot be executed is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._binding import native
from ...enums import Access, EventType, Opcode, QPState, WCOpcode, WCStatus
from ...standard.opcodes import MAX_MSG_SIZE
from ...standard.wire import GRH_BYTES
from ..software import responder
from ..software.memory import ErrorStatus, RemoteAccessError, part, total_length
from ..software.requester import ATOMICS, READ
from ..software.transport_messages import ACK, Ack, AckType, Segments
from . import packets
from .packets import DEFAULT_PKEY, MIG_REQ, PSN_MASK, Packet, PacketRow, aeth, distance
from .qp import HELD, HOLD_SECONDS, Incoming, Reading, hold, next_held
from .requester import headers_of_middle, packets_in_burst

if TYPE_CHECKING:
    from ..software.responder import Executor, Receive
    from .qp import RoceQueuePair

_AT_ONCE = 32
"""The most READ responses sent in one step."""

_REMOTE_WRITE, _REMOTE_READ = int(Access.REMOTE_WRITE), int(Access.REMOTE_READ)
_EMPTY_RESPONSE = frozenset({int(Opcode.FLUSH), int(Opcode.ATOMIC_WRITE)})
"""The operations whose response is a READ response without data."""
_WRITES = frozenset({int(Opcode.RDMA_WRITE), int(Opcode.RDMA_WRITE_WITH_IMM)})
_ACK, _RNR_NAK = AckType.ACK, AckType.RNR_NAK
_SUCCESS = WCStatus.SUCCESS
_ERR = QPState.ERR
_NAK_CODES = {
    AckType.NAK_INVALID_REQUEST: packets.INVALID_REQUEST,
    AckType.NAK_REMOTE_ACCESS: packets.REMOTE_ACCESS_ERROR,
    AckType.NAK_REMOTE_OPERATIONAL: packets.REMOTE_OPERATIONAL_ERROR,
}


def receive(qp: RoceQueuePair, packet: Packet) -> bool:
    """Execute a request; return False if it is dropped."""
    if qp.state not in responder.RECEIVES:
        return False
    if not qp.connected:
        return _receive_datagram(qp, packet)
    responder.establish(qp)
    if qp.reliable:
        _receive_reliable(qp, packet)
        return True
    return _receive_unreliable(qp, packet)


def execute_next(qp: RoceQueuePair) -> bool:
    """Continue pending work; return whether more is left."""
    if qp.reading is not None:
        _send_responses(qp, None)
        return False
    packet = next_held(qp.held, qp.epsn)
    if packet is not None:
        _execute(qp, packet)
        return qp.reading is None and bool(qp.held)
    if qp.held and not qp.nak_sent:
        _expect_missing(qp)
    return False


def on_timer(qp: RoceQueuePair, now: float) -> None:
    """Ask for a packet that has been missing for too long."""
    if not qp.nak_due:
        return
    if now < qp.nak_due:
        qp.wake_at(qp.nak_due)
        return
    qp.nak_due = 0.0
    if qp.reading is None:
        # An ACK first: without progress, a NAK costs the requester one of its retries.
        _send_ack(qp)
        _send_nak(qp, packets.NAK, packets.PSN_SEQUENCE_ERROR, qp.epsn)


# ---- unreliable services -------------------------------------------------------------


def _receive_datagram(qp: RoceQueuePair, packet: Packet) -> bool:
    if packet.qkey != qp.attr["qkey"]:
        qp.device.count_qkey_violation()
        return False
    if packet.length > qp.device.port_mtu.bytes:
        return False
    responder.establish(qp)
    fits = _fits_next_receive(qp, packet)
    if not fits and qp.srq is None:
        return False
    taken = responder.consume_receive(qp, packet)
    if taken is None:
        return False
    if not fits:
        # Queue pairs share the queue: a receive that is too small must not block them all.
        qp.end_receive(taken, WCStatus.REM_INV_REQ_ERR)
        return True
    assert packet.make_grh is not None
    packet.grh = packet.make_grh()
    responder.fill(qp, packet, taken)
    return True


def _fits_next_receive(qp: RoceQueuePair, packet: Packet) -> bool:
    """Whether a datagram fits into the next receive.

    As with Soft-RoCE, a datagram that is too long does not break the queue pair.
    """
    pending = (qp.rq if qp.srq is None else qp.srq.queue).pending
    if not pending:
        return True
    return GRH_BYTES + packet.length <= total_length(pending[0].sges)


def _receive_unreliable(qp: RoceQueuePair, packet: Packet) -> bool:
    """Execute a packet of a UC request; a lost packet ends its message."""
    if packet.psn != qp.epsn or not _continues(qp.incoming, packet):
        _drop_incoming(qp)
        if not packet.row.begins:
            return False
    qp.epsn = packet.psn + packet.count & PSN_MASK
    ack = responder.execute(qp, packet, _EXECUTORS[packet.opcode])
    if ack is not None and ack.type is _ACK:
        return True
    _drop_incoming(qp)
    # In ERR the packet was not dropped: it ended a receive with an error.
    return qp.state is _ERR


def _drop_incoming(qp: RoceQueuePair) -> None:
    incoming = qp.incoming
    if incoming is not None:
        qp.incoming = None
        if incoming.taken is not None:
            qp.spare = incoming.taken


def _continues(incoming: Incoming | None, packet: Packet) -> bool:
    """Whether a packet may come next in a message that has partly arrived."""
    if incoming is None:
        return packet.row.begins
    writes = incoming.operation in _WRITES
    return not packet.row.begins and writes == (packet.opcode in _WRITES)


# ---- the reliable service --------------------------------------------------------------


def _receive_reliable(qp: RoceQueuePair, packet: Packet) -> None:
    ahead = distance(packet.psn, qp.epsn)
    if ahead + packet.count <= 0:
        _answer_duplicate(qp, packet, -ahead)
    elif ahead > 0 or qp.reading is not None:
        if ahead < HELD:
            hold(qp.held, packet, qp.mtu)
        if qp.reading is None and not qp.nak_sent:
            _expect_missing(qp)
    else:
        _execute(qp, packet.after(-ahead) if ahead else packet)
        if qp.held and qp.reading is None:
            qp.device.start(qp)


def _expect_missing(qp: RoceQueuePair) -> None:
    """Wait a little for a packet that may have been overtaken."""
    if not qp.nak_due:
        qp.nak_due = qp.device.now + HOLD_SECONDS
        qp.wake_at(qp.nak_due)


def _execute(qp: RoceQueuePair, packet: Packet) -> None:
    """Execute the request that is expected next."""
    qp.nak_sent = False
    qp.nak_due = 0.0
    opcode = packet.opcode
    ack: Ack | None
    if _continues(qp.incoming, packet):
        ack = responder.execute(qp, packet, _EXECUTORS[opcode])
    else:
        ack = responder.refuse(qp)
    if ack is None:
        return
    if ack.type is not _ACK:
        if ack.type is _RNR_NAK:
            _send_nak(qp, packets.RNR_NAK, ack.rnr_timer, packet.psn)
        else:
            _send_nak(qp, packets.NAK, _NAK_CODES[ack.type], packet.psn)
        return
    if packet.row.ends:
        qp.msn = qp.msn + 1 & PSN_MASK
    if opcode == READ:
        qp.epsn = packet.psn + (-(-packet.length // qp.mtu) or 1) & PSN_MASK
        qp.reading = Reading(packet, False)
        _send_responses(qp, ack.data)
        return
    qp.epsn = packet.psn + packet.count & PSN_MASK
    if opcode in ATOMICS:
        native.put(qp.atomics, (packet.psn, ack.value))
        if len(qp.atomics) > qp.attr["max_dest_rd_atomic"]:
            native.take(qp.atomics)
        _send(qp, packets.ATOMIC_ACKNOWLEDGE, packet.psn, _aeth(qp), ack.value)
    elif opcode in _EMPTY_RESPONSE:
        _send(qp, packets.READ_RESPONSE_ONLY, packet.psn, _aeth(qp))
    elif packet.ack_req or qp.state is _ERR:
        # A queue pair in ERR will not process the later packet that requests the ACK.
        _send_ack(qp)


def _answer_duplicate(qp: RoceQueuePair, packet: Packet, behind: int) -> None:
    """Acknowledge a request again, and execute it again only if it is a READ."""
    opcode = packet.opcode
    if opcode == READ:
        # All of it must have been read before.
        was_read = qp.attr["max_dest_rd_atomic"] and -(-packet.length // qp.mtu) <= behind
        if was_read and not qp.grants(_REMOTE_READ):
            _refuse_duplicate(qp, packets.INVALID_REQUEST, packet.psn)
        elif was_read:
            _read_again(qp, packet)
    elif qp.reading is not None:
        # An ACK would say that the responses have been sent.
        qp.ack_due = True
    elif opcode in ATOMICS:
        # PSNs wrap, so the latest atomic with this PSN counts.
        for psn, value in reversed(qp.atomics):
            if psn == packet.psn:
                _send(qp, packets.ATOMIC_ACKNOWLEDGE, psn, _aeth(qp), value)
                break
    elif opcode in _EMPTY_RESPONSE:
        _send(qp, packets.READ_RESPONSE_ONLY, packet.psn, _aeth(qp))
    else:
        # Even if the packet does not request an ACK: when a burst overflows the socket's buffer,
        # the last packet, which requests one, may be lost every time.
        _send_ack(qp)


def _read_again(qp: RoceQueuePair, packet: Packet) -> None:
    """Retransmit the responses to a READ, after the responses to the READ in progress."""
    if qp.reading is None:
        qp.reading = Reading(packet, True)
        _send_responses(qp, None)
    elif len(qp.repeats) < qp.attr["max_dest_rd_atomic"] and packet.psn not in [
        each.psn for each in qp.repeats
    ]:
        native.put(qp.repeats, Reading(packet, True))


def _refuse_duplicate(qp: RoceQueuePair, code: int, psn: int) -> None:
    """Send a NAK for a duplicate READ that can no longer be executed.

    The queue pair's state does not change, because the request may be an old copy from the network.
    In that case the requester ignores the NAK.
    """
    qp.device.counters.naks_sent += 1
    _send(qp, packets.ACKNOWLEDGE, psn, aeth(packets.NAK, code, qp.msn))


# ---- what a request does ---------------------------------------------------------------


def _take_receive(qp: RoceQueuePair, packet: Packet) -> Receive | None:
    taken = qp.spare
    if taken is None:
        return responder.consume_receive(qp, packet)
    qp.spare = None
    return taken


def _fits(qp: RoceQueuePair, packet: Packet) -> bool:
    """Whether a packet is as long as its place in the message requires."""
    if packet.row.ends:
        return (packet.row.begins or packet.length > 0) and packet.length <= qp.mtu
    return packet.length == packet.count * qp.mtu


def _send_in(qp: RoceQueuePair, packet: Packet) -> Ack | None:
    """Execute a packet of a SEND."""
    if not _fits(qp, packet):
        return responder.refuse(qp)
    incoming = qp.incoming
    if incoming is None:
        taken = _take_receive(qp, packet)
        if taken is None:
            return responder.not_ready(qp)
        if packet.row.ends:
            return responder.fill(qp, packet, taken)
        incoming = qp.incoming = Incoming(packet, taken)
    taken = incoming.taken
    assert taken is not None
    wqe, _, pd, _ = taken
    done = incoming.done + packet.length
    try:
        sges = part(wqe.sges, incoming.done, packet.length)
        packet.copy_to(qp.device.memory.local(pd, sges, True))
    except ErrorStatus as error:
        qp.incoming = None
        return responder.complete_receive(qp, packet, taken, error.status, done)
    incoming.done = done
    if not packet.row.ends:
        return ACK
    qp.incoming = None
    return responder.complete_receive(qp, packet, taken, _SUCCESS, done)


def _write_in(qp: RoceQueuePair, packet: Packet) -> Ack | None:
    """Execute a packet of a WRITE."""
    if not qp.grants(_REMOTE_WRITE) or not _fits(qp, packet):
        return responder.refuse(qp)
    row, incoming = packet.row, qp.incoming
    if incoming is None:
        incoming = Incoming(packet, None)
    left = incoming.size - incoming.done
    if (packet.length != left if row.ends else packet.length >= left) or left > MAX_MSG_SIZE:
        return responder.refuse(qp)
    target: Segments = []
    if left:
        # For each packet, the key must cover all bytes that are left, but only the packet's own
        # bytes must still be mapped: otherwise the number of pages to check would grow with the
        # square of the length.
        memory, addr = qp.device.memory, incoming.remote_addr + incoming.done
        rkey, size = incoming.rkey, packet.length
        target = [memory.remote(qp.pd, qp.number, rkey, addr, left, _REMOTE_WRITE, size)]
    taken = None
    if packet.imm is not None:
        taken = _take_receive(qp, packet)
        if taken is None:
            return responder.not_ready(qp)
    if packet.length:
        packet.copy_to(target)
    if not row.ends:
        incoming.done += packet.length
        if row.begins:
            qp.incoming = incoming
        return ACK
    if not row.begins:
        qp.incoming = None
    if taken is None:
        return ACK
    return responder.complete_receive(
        qp, packet, taken, _SUCCESS, incoming.size, WCOpcode.RECV_RDMA_WITH_IMM
    )


def _read(qp: RoceQueuePair, packet: Packet) -> Ack | None:
    if packet.length > MAX_MSG_SIZE:
        return responder.refuse(qp)
    return responder.read(qp, packet, _size_at_once(qp, packet.length))


def _atomic_write(qp: RoceQueuePair, packet: Packet) -> Ack | None:
    if packet.length != 8 or packet.dma_length != 8:
        return responder.refuse(qp)
    return responder.atomic_write(qp, packet)


_EXECUTORS: dict[int, Executor] = {
    int(Opcode.SEND): _send_in,
    int(Opcode.SEND_WITH_IMM): _send_in,
    int(Opcode.SEND_WITH_INV): _send_in,
    int(Opcode.RDMA_WRITE): _write_in,
    int(Opcode.RDMA_WRITE_WITH_IMM): _write_in,
    int(Opcode.RDMA_READ): _read,
    int(Opcode.ATOMIC_CMP_AND_SWP): responder.atomic,
    int(Opcode.ATOMIC_FETCH_AND_ADD): responder.atomic,
    int(Opcode.FLUSH): responder.flush,
    int(Opcode.ATOMIC_WRITE): _atomic_write,
}


# ---- what goes out -----------------------------------------------------------------------


def _aeth(qp: RoceQueuePair) -> int:
    return aeth(packets.ACK, packets.UNLIMITED_CREDITS, qp.msn)


def _send(
    qp: RoceQueuePair, row: PacketRow, psn: int, *extensions: int, payload: Any = b""
) -> None:
    qpn = qp.attr["dest_qp_num"]
    header = row.pack(row.bth_opcode, MIG_REQ, DEFAULT_PKEY, qpn, psn & PSN_MASK, *extensions)
    qp.device.send(qp, qp.path, [header], [payload] if payload else [], len(payload))


def _send_ack(qp: RoceQueuePair) -> None:
    """Acknowledge everything that was executed."""
    _send(qp, packets.ACKNOWLEDGE, qp.epsn - 1, _aeth(qp))


def _send_nak(qp: RoceQueuePair, syndrome: int, value: int, psn: int) -> None:
    qp.nak_sent = True
    if syndrome == packets.NAK:
        qp.device.counters.naks_sent += 1
    else:
        qp.device.counters.rnr_naks_sent += 1
    _send(qp, packets.ACKNOWLEDGE, psn, aeth(syndrome, value, qp.msn))


def _size_at_once(qp: RoceQueuePair, left: int) -> int:
    """Return how many of a READ's remaining bytes are sent in one step."""
    return min(left, _AT_ONCE * qp.mtu)


def _send_responses(qp: RoceQueuePair, data: Segments | None) -> None:
    """Send responses to the READ request in progress.

    Args:
        data: the data to send in this step, if it has already been fetched.
    """
    reading = qp.reading
    assert reading is not None
    mtu, left = qp.mtu, reading.left
    size = _size_at_once(qp, left)
    source: Any = b""
    if data:
        source = data[0]
    elif size:
        addr, rkey = reading.remote_addr, reading.rkey
        try:
            source = qp.device.memory.remote(qp.pd, qp.number, rkey, addr, size, _REMOTE_READ)
        except RemoteAccessError:
            if reading.is_duplicate:
                _refuse_duplicate(qp, packets.REMOTE_ACCESS_ERROR, reading.psn)
                _end_reading(qp)
            else:
                qp.fail(EventType.QP_ACCESS_ERR)
                _send_nak(qp, packets.NAK, packets.REMOTE_ACCESS_ERROR, reading.psn)
            return
    psn, count, is_last = reading.psn, -(-size // mtu) or 1, size == left
    begin, end = 0, count
    if not reading.has_begun:
        row = packets.READ_RESPONSE_ONLY if is_last and count == 1 else packets.READ_RESPONSE_FIRST
        _send(qp, row, psn, _aeth(qp), payload=source[:mtu])
        begin = 1
    if is_last and begin < end:
        end -= 1
    row = packets.READ_RESPONSE_MIDDLE
    burst = packets_in_burst(mtu + row.size)
    for n in range(begin, end, burst):
        stop = min(n + burst, end)
        headers = headers_of_middle(qp, row, psn + n, psn + stop)
        qp.device.send(qp, qp.path, headers, [source[n * mtu : stop * mtu]], mtu)
    if end < count:
        row = packets.READ_RESPONSE_LAST
        _send(qp, row, psn + end, _aeth(qp), payload=source[end * mtu :])
    if not is_last:
        reading.psn, reading.left = psn + count & PSN_MASK, left - size
        reading.remote_addr += size
        reading.has_begun = True
        qp.device.start(qp)
        return
    _end_reading(qp)


def _end_reading(qp: RoceQueuePair) -> None:
    """End the READ in progress, and continue with the work that was waiting for that."""
    if qp.repeats:
        qp.reading = native.take(qp.repeats)
        qp.device.start(qp)
        return
    qp.reading = None
    if qp.ack_due:
        qp.ack_due = False
        _send_ack(qp)
    if qp.held:
        qp.device.start(qp)
