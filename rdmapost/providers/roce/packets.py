"""The packets of RoCE v2, and the table by which they are encoded and decoded.

A packet is a base transport header (BTH), the extension headers of its opcode, and a payload. The
names are those of the InfiniBand Architecture Specification, chapter 9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

from ..._binding import native
from ...enums import Opcode, QPType
from ...standard.wire import BTH_BYTES, ICRC_BYTES
from ..software.memory import copy
from ..software.requester import ATOMICS
from ..software.transport_messages import Request, Segments

PSN_MASK = 0xFFFFFF
"""PSNs, MSNs and queue pair numbers have 24 bits."""
_HALF = 0x800000


def distance(psn: int, base: int) -> int:
    """Return how far a PSN is ahead of another: -2^23..2^23-1."""
    return ((psn - base + _HALF) & PSN_MASK) - _HALF


class Path(NamedTuple):
    """The path to a peer."""

    dgid: bytes
    traffic_class: int
    hop_limit: int
    flow_label: int


# ---- headers ------------------------------------------------------------------

_HEADERS = {
    "BTH": ("BBHII", "bth_opcode flags pkey qpn psn"),
    "DETH": ("II", "qkey src_qpn"),
    "RETH": ("QII", "remote_addr rkey dma_length"),
    "AETH": ("I", "aeth"),
    "AtomicETH": ("QIQQ", "remote_addr rkey swap_add compare"),
    "AtomicAckETH": ("Q", "value"),
    "ImmDt": ("4s", "immediate"),
    "IETH": ("I", "invalidate_rkey"),
    "FETH": ("I", "feth"),
}
"""The format of each header, and its fields."""

SOLICITED_EVENT, MIG_REQ, TVER = 0x80, 0x40, 0x0F
"""Bits of the BTH's flags; the other two, 0x30, count the bytes of padding."""
DEFAULT_PKEY = 0xFFFF
_PKEY_BASE = 0x7FFF
ACK_REQ = 1 << 31
"""The AckReq bit of the BTH, in the word that ends with the PSN."""

# The types of AETH syndromes, and the codes of NAKs.
ACK, RNR_NAK, NAK = 0, 1, 3
PSN_SEQUENCE_ERROR, INVALID_REQUEST, REMOTE_ACCESS_ERROR, REMOTE_OPERATIONAL_ERROR = range(4)
UNLIMITED_CREDITS = 0x1F
"""The value of an ACK without end-to-end flow control."""


def aeth(syndrome_type: int, value: int, msn: int) -> int:
    """Return an AETH: the syndrome and the MSN."""
    return syndrome_type << 29 | value << 24 | msn & PSN_MASK


FLUSH_TYPE, FLUSH_LEVEL_SHIFT, FLUSH_LEVEL = 0xF, 4, 0x3
"""The placement type and the selectivity level in a FETH."""


# ---- the table ------------------------------------------------------------------

FIRST, MIDDLE_PLACE, LAST, ONLY = 1, 0, 2, 3
"""The position of a packet in its message."""


class PacketRow:
    """A row of the table: the packets with one opcode.

    Attributes:
        bth_opcode, name: the opcode and its name.
        service: the type of the queue pairs that use it.
        operation: the Opcode of the work requests that it belongs to; -1 for a response.
        begins, ends: whether such a packet is the first, or the last, of its message.
        fields: the fields of its headers, in order.
        size: the size of its headers in bytes.
        pack, unpack: encode and decode the headers.
        has_payload: whether a payload may follow.
    """

    def __init__(
        self,
        service: QPType,
        bth_opcode: int,
        name: str,
        operation: int,
        place: int,
        headers: str,
        has_payload: bool,
    ) -> None:
        self.service = service
        self.bth_opcode = bth_opcode
        self.name = f"{service.name}_{name}"
        self.operation = int(operation)
        self.begins, self.ends = bool(place & FIRST), bool(place & LAST)
        self.headers = headers.split()
        layout = Struct("!" + "".join([_HEADERS[each][0] for each in self.headers]))
        self.fields = " ".join([_HEADERS[each][1] for each in self.headers]).split()
        self.size = layout.size
        self.pack, self.unpack = layout.pack, layout.unpack_from
        self.has_payload = has_payload


_MESSAGES = (
    (0x00, "SEND_FIRST", Opcode.SEND, FIRST, ""),
    (0x01, "SEND_MIDDLE", Opcode.SEND, MIDDLE_PLACE, ""),
    (0x02, "SEND_LAST", Opcode.SEND, LAST, ""),
    (0x03, "SEND_LAST_WITH_IMMEDIATE", Opcode.SEND_WITH_IMM, LAST, "ImmDt"),
    (0x04, "SEND_ONLY", Opcode.SEND, ONLY, ""),
    (0x05, "SEND_ONLY_WITH_IMMEDIATE", Opcode.SEND_WITH_IMM, ONLY, "ImmDt"),
    (0x06, "RDMA_WRITE_FIRST", Opcode.RDMA_WRITE, FIRST, "RETH"),
    (0x07, "RDMA_WRITE_MIDDLE", Opcode.RDMA_WRITE, MIDDLE_PLACE, ""),
    (0x08, "RDMA_WRITE_LAST", Opcode.RDMA_WRITE, LAST, ""),
    (0x09, "RDMA_WRITE_LAST_WITH_IMMEDIATE", Opcode.RDMA_WRITE_WITH_IMM, LAST, "ImmDt"),
    (0x0A, "RDMA_WRITE_ONLY", Opcode.RDMA_WRITE, ONLY, "RETH"),
    (0x0B, "RDMA_WRITE_ONLY_WITH_IMMEDIATE", Opcode.RDMA_WRITE_WITH_IMM, ONLY, "RETH ImmDt"),
)
_RELIABLE_MESSAGES = (
    (0x16, "SEND_LAST_WITH_INVALIDATE", Opcode.SEND_WITH_INV, LAST, "IETH"),
    (0x17, "SEND_ONLY_WITH_INVALIDATE", Opcode.SEND_WITH_INV, ONLY, "IETH"),
    (0x1D, "ATOMIC_WRITE", Opcode.ATOMIC_WRITE, ONLY, "RETH"),
)
_REQUESTS_WITHOUT_PAYLOAD = (
    (0x0C, "RDMA_READ_REQUEST", Opcode.RDMA_READ, ONLY, "RETH"),
    (0x13, "COMPARE_SWAP", Opcode.ATOMIC_CMP_AND_SWP, ONLY, "AtomicETH"),
    (0x14, "FETCH_ADD", Opcode.ATOMIC_FETCH_AND_ADD, ONLY, "AtomicETH"),
    (0x1C, "FLUSH", Opcode.FLUSH, ONLY, "FETH RETH"),
)
_READ_RESPONSES = (
    (0x0D, "RDMA_READ_RESPONSE_FIRST", -1, FIRST, "AETH"),
    (0x0E, "RDMA_READ_RESPONSE_MIDDLE", -1, MIDDLE_PLACE, ""),
    (0x0F, "RDMA_READ_RESPONSE_LAST", -1, LAST, "AETH"),
    (0x10, "RDMA_READ_RESPONSE_ONLY", -1, ONLY, "AETH"),
)
_ACKS = (
    (0x11, "ACKNOWLEDGE", -1, ONLY, "AETH"),
    (0x12, "ATOMIC_ACKNOWLEDGE", -1, ONLY, "AETH AtomicAckETH"),
)
_UC, _UD = 0x20, 0x60
"""The high bits of the opcodes of these services."""


ROWS: dict[int, PacketRow] = {
    base + number: PacketRow(
        service, base + number, name, operation, place, f"{header} {headers}", has_payload
    )
    for service, base, header, has_payload, rows in (
        (QPType.RC, 0, "BTH", True, (*_MESSAGES, *_RELIABLE_MESSAGES, *_READ_RESPONSES)),
        (QPType.RC, 0, "BTH", False, (*_REQUESTS_WITHOUT_PAYLOAD, *_ACKS)),
        (QPType.UC, _UC, "BTH", True, _MESSAGES),
        (QPType.UD, _UD, "BTH DETH", True, _MESSAGES[4:6]),
    )
    for number, name, operation, place, headers in rows
}
"""The table: each opcode's row."""

MIDDLE = frozenset({row.bth_opcode for row in ROWS.values() if not row.begins and not row.ends})
"""Opcodes of packets that come in runs."""
READ_RESPONSE_FIRST, READ_RESPONSE_MIDDLE, READ_RESPONSE_LAST, READ_RESPONSE_ONLY = [
    ROWS[each[0]] for each in _READ_RESPONSES
]
READ_RESPONSES = frozenset([ROWS[each[0]] for each in _READ_RESPONSES])
ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE = [ROWS[each[0]] for each in _ACKS]


class Form(NamedTuple):
    """The kinds of packets that make up a work request's message."""

    first: PacketRow
    middle: PacketRow
    last: PacketRow
    only: PacketRow


def _form(service: QPType, operation: Opcode) -> Form:
    base = {
        Opcode.SEND_WITH_IMM: Opcode.SEND,
        Opcode.SEND_WITH_INV: Opcode.SEND,
        Opcode.RDMA_WRITE_WITH_IMM: Opcode.RDMA_WRITE,
    }.get(operation, operation)
    by_place = {
        (row.operation, row.begins, row.ends): row
        for row in ROWS.values()
        if row.service is service
    }
    only = by_place[operation, True, True]
    return Form(
        by_place.get((base, True, False), only),
        by_place.get((base, False, False), only),
        by_place.get((operation, False, True), only),
        only,
    )


FORMS: dict[QPType, dict[int, Form]] = {
    service: {
        row.operation: _form(service, Opcode(row.operation))
        for row in ROWS.values()
        if row.service is service and row.operation >= 0
    }
    for service in (QPType.RC, QPType.UC, QPType.UD)
}
"""For each service, the packets of each work request that it supports, by Opcode."""


# ---- decoding ---------------------------------------------------------------------


class Packet(Request):
    """A packet that was received, or a run of MIDDLE packets with consecutive PSNs.

    It is a Request, so the functions that all devices share can execute it.

    Attributes:
        row: the table's row; each field that it names is an attribute of the packet.
        count: the number of packets; more than 1 only for MIDDLE ones.
        psn: the PSN of the first packet.
        ack_req: whether any of the packets requests an acknowledgement.
        source: the sender's GID.
        length: bytes of payload; for a request without a payload, the length that it names.
        data: the payload. Prefer `copy_to`: the payload of a run is assembled only when needed.
        run: where a run's packets are, as the arguments that native.roce_gather takes after the
            target; None for a single packet.
    """

    row: PacketRow
    bth_opcode: int
    flags: int
    pkey: int
    qpn: int
    aeth: int
    dma_length: int
    value: int
    immediate: bytes
    swap_add: int
    feth: int
    ack_req = False

    def __init__(self, row: PacketRow, values: Any, count: int, source: bytes) -> None:
        self.__dict__.update(zip(row.fields, values, strict=True))
        self.row = row
        self.opcode = row.operation
        self.count = count
        self.source = source
        self.run: tuple[Any, int, int, int, int] | None = None
        self.make_grh: Callable[[], bytes] | None = None

    def copy_to(self, target: Segments) -> None:
        """On commit, copy the payload to memory that has room for it."""
        if self.run is None:
            copy(self.data, target)
        elif len(target) == 1 and isinstance(target[0], memoryview):
            native.on_commit(native.roce_gather, target[0], *self.run)
        else:
            copy(self.pieces(), target)

    def pieces(self) -> Segments:
        """Return the payload."""
        if self.run is None:
            return self.data
        buffer, at, segment, count, skip = self.run
        begin, end = at + skip, at + segment - ICRC_BYTES
        return [buffer[begin + n : end + n] for n in range(0, count * segment, segment)]

    def held(self) -> Packet:
        """Return a copy that stays valid after this step."""
        kept = self._copied()
        kept.data, kept.run = [b"".join(self.pieces())], None
        return kept

    def _copied(self) -> Packet:
        copied: Packet = object.__new__(Packet)
        copied.__dict__.update(self.__dict__)
        return copied

    def after(self, packets: int) -> Packet:
        """Return a run without its first packets."""
        rest = self._copied()
        each = self.length // self.count
        if self.run is None:
            rest.data = [memoryview(self.data[0])[each * packets :]]
        else:
            buffer, at, segment, count, skip = self.run
            rest.run = buffer, at + packets * segment, segment, count - packets, skip
        rest.count -= packets
        rest.length -= each * packets
        rest.psn = self.psn + packets & PSN_MASK
        return rest


_SMALLEST = BTH_BYTES + ICRC_BYTES
_FETCH_AND_ADD = int(Opcode.ATOMIC_FETCH_AND_ADD)


def parse(
    buffer: memoryview,
    at: int,
    size: int,
    count: int = 1,
    source: bytes = b"",
    make_grh: Callable[[], bytes] | None = None,
) -> Packet | None:
    """Decode a packet, or a run of them; return None if it is not a valid packet.

    Args:
        buffer: the buffer that holds it.
        at: the offset of its BTH.
        size: its size in bytes, including the ICRC, which the caller has checked.
        count: the number of packets in the run, each of this size.
        source: the sender's GID.
        make_grh: returns the 40 bytes that precede a datagram's payload.
    """
    row = ROWS.get(buffer[at]) if size >= _SMALLEST else None
    if row is None:
        return None
    payload = size - row.size - ICRC_BYTES
    if payload < 0:
        return None
    packet = Packet(row, row.unpack(buffer, at), count, source)
    flags: int = packet.flags
    padding = flags >> 4 & 3
    if flags & TVER or packet.pkey & _PKEY_BASE != _PKEY_BASE or padding > payload:
        return None
    payload -= padding
    if payload and not row.has_payload:
        return None
    packet.qpn &= PSN_MASK
    packet.ack_req = packet.psn >= ACK_REQ
    packet.psn &= PSN_MASK
    if flags & SOLICITED_EVENT:
        packet.solicited = True
    begin = at + row.size
    if count > 1:
        if padding:
            return None
        packet.run = buffer, at, size, count, row.size
        packet.data = []
        packet.length = payload * count
        packet.ack_req = max(bytes(buffer[at + 8 : at + size * count : size])) >= ACK_REQ >> 24
    else:
        packet.data = [buffer[begin : begin + payload]] if payload else []
        packet.length = payload
    if len(row.fields) > 5:
        _decode_extensions(packet, row, make_grh)
    return packet


def _decode_extensions(
    packet: Packet, row: PacketRow, make_grh: Callable[[], bytes] | None
) -> None:
    """Convert the fields that a Request represents differently."""
    headers = row.headers
    if "ImmDt" in headers:
        # A work request holds immediate data in network order.
        packet.imm = int.from_bytes(packet.immediate, sys.byteorder)
    if row.operation in ATOMICS:
        if row.operation == _FETCH_AND_ADD:
            packet.compare = packet.swap_add
        else:
            packet.swap = packet.swap_add
        packet.length = 8
    elif row.operation >= 0 and not row.has_payload:
        packet.length = packet.dma_length
        if "FETH" in headers:
            packet.flush_type = packet.feth & FLUSH_TYPE
            packet.flush_level = packet.feth >> FLUSH_LEVEL_SHIFT & FLUSH_LEVEL
    elif row.service is QPType.UD:
        packet.src_qpn &= PSN_MASK
        packet.make_grh = make_grh
