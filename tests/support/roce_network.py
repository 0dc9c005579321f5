"""A model of devices on a network: engines joined without sockets, in virtual time.

What the network does to a packet, and when, comes from a seed. Packets are bytes on the way, so
that encoding and decoding take part.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import random
import struct
import zlib
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rdmapost._binding import native
from rdmapost.enums import MTU, Access, EventType, QPAttrMask, QPState, QPType, WCOpcode, WCStatus
from rdmapost.providers.roce import packets, protocol_engine
from rdmapost.providers.roce.qp import RoceQueuePair
from rdmapost.providers.software.completion import CompletionQueue
from rdmapost.providers.software.device import Device as SoftwareDevice
from rdmapost.providers.software.device_queues import SharedReceiveQueue, WorkQueue
from rdmapost.providers.software.journaled_dict import JournaledDict
from rdmapost.providers.software.memory import Memory, ProtectionDomain, Region
from rdmapost.providers.software.planned_faults import PlannedFaults
from rdmapost.standard.wire import ICRC_BYTES

ALL_ACCESS = int(
    Access.LOCAL_WRITE
    | Access.REMOTE_WRITE
    | Access.REMOTE_READ
    | Access.REMOTE_ATOMIC
    | Access.MW_BIND
    | Access.FLUSH_GLOBAL
    | Access.FLUSH_PERSISTENT
)
DEPTH = 1 << 14
_WC = struct.Struct("@QII4x5I4xBx0Q")
_NOT_A_PACKET = 0xFF


class WQE:
    """A work request as the device holds it: native.WQE, which only C can fill."""

    opcode = flags = imm = remote_addr = rkey = atomic_rkey = 0
    remote_qpn = remote_qkey = length = atomic_wr = type = level = 0
    bind_rkey = bind_addr = bind_length = bind_access = compare_add = swap = 0
    inline: bytes | None = None
    ah = window = region = owner = None
    sges: tuple[tuple[int, int, int], ...] = ()

    def __init__(self, wr_id: int, **fields: Any) -> None:
        self.wr_id = wr_id
        self.__dict__.update(fields)


@dataclass
class Completion:
    wr_id: int
    status: WCStatus
    opcode: int
    byte_len: int
    imm: int
    qp_num: int
    src_qp: int
    flags: int
    solicited: bool = False


class Events:
    def __init__(self) -> None:
        self.seen: deque[tuple[EventType, Any]] = deque()

    def push(self, event: EventType, element: Any) -> None:
        native.put(self.seen, (event, element))


class Context:
    device: Device

    def __init__(self) -> None:
        self.faults = PlannedFaults()
        self.events = Events()


class Counters(native.Record):
    def __init__(self) -> None:
        self.sent = self.received = self.retransmitted = 0
        self.naks_sent = self.naks_received = self.rnr_naks_sent = self.rnr_naks_received = 0


class Buffer:
    """Registered memory; its address may have been another buffer's."""

    def __init__(
        self, device: Device, size: int, access: int = ALL_ACCESS, old: Buffer | None = None
    ) -> None:
        self.raw = old.raw if old is not None else ctypes.create_string_buffer(size)
        self.view = memoryview(self.raw).cast("B")
        self.addr = ctypes.addressof(self.raw)
        self.mr: Region = device.memory.register(device.pd, self.addr, self.view, access)

    def sge(self, offset: int, length: int) -> tuple[int, int, int]:
        return self.addr + offset, length, self.mr.lkey


class Device(native.Record):
    """The parts of a device that the engine uses."""

    def __init__(self, network: Network, gid: bytes) -> None:
        self.network = network
        self.gid = gid
        self.gids = (gid,)
        self.port_mtu = MTU.MTU_4096
        self.memory = Memory()
        self.qps: dict[int, RoceQueuePair] = {}
        self.srqs: dict[int, SharedReceiveQueue] = {}
        self.counters = Counters()
        self.context = Context()
        self.context.device = self
        self.pd = ProtectionDomain()
        self.qkey_violations = 0
        self.timers: dict[RoceQueuePair, float] = JournaledDict()
        self.numbers = itertools.count(len(network.devices) << 16 | 0x11)
        network.devices[gid] = self

    @property
    def now(self) -> float:
        return self.network.now

    def send(
        self,
        qp: RoceQueuePair,
        path: packets.Path,
        headers: list[bytes],
        payload: Any = (),
        mtu: int = 0,
        again: int = 0,
    ) -> None:
        size = sum([len(piece) for piece in payload])
        assert size <= mtu * len(headers)
        cut = [max(0, min(mtu, size - n * mtu)) for n in range(len(headers))]
        sizes = [
            len(header) + n + -n % 4 + ICRC_BYTES for header, n in zip(headers, cut, strict=True)
        ]
        assert len(set(sizes[:-1])) <= 1
        assert sizes[-1] <= sizes[0]
        assert sum(sizes) <= 60_000
        self.counters.sent += len(headers)
        self.counters.retransmitted += again
        native.on_commit(self._carry, path, headers, payload, mtu)

    def _carry(self, path: packets.Path, headers: list[bytes], payload: Any, mtu: int) -> None:
        data = b"".join(payload)
        made = []
        for n, header in enumerate(headers):
            part = data[n * mtu : (n + 1) * mtu]
            padding = -len(part) % 4
            flags = header[1] | padding << 4
            packet = header[:1] + bytes((flags,)) + header[2:] + part + bytes(padding)
            made.append(packet + zlib.crc32(packet).to_bytes(ICRC_BYTES))
        self.network.carry(self.gid, path.dgid, made)

    count_qkey_violation = SoftwareDevice.count_qkey_violation

    def set_timer(self, qp: RoceQueuePair, when: float | None) -> None:
        if when is None:
            self.timers.pop(qp, None)
        else:
            self.timers[qp] = when
            native.on_commit(self.network.at, when, self, None)

    def start(self, qp: RoceQueuePair) -> None:
        native.on_commit(self.network.ready.append, qp)

    def unpark(self, qp: RoceQueuePair) -> None:
        pass

    # ---- for tests ----------------------------------------------------------

    def cq(self) -> CompletionQueue:
        return CompletionQueue(DEPTH, None, self.context.events)  # type: ignore[arg-type]

    def srq(self) -> SharedReceiveQueue:
        return SharedReceiveQueue(self.context, self.pd, DEPTH, 16, next(self.numbers))

    def qp(
        self,
        qp_type: QPType = QPType.RC,
        cq: CompletionQueue | None = None,
        srq: SharedReceiveQueue | None = None,
    ) -> RoceQueuePair:
        made = RoceQueuePair(
            self,  # type: ignore[arg-type]
            self.context,
            next(self.numbers),
            qp_type,
            self.pd,
            cq or self.cq(),
            cq or self.cq(),
            srq,
            WorkQueue(DEPTH, 16),
            WorkQueue(DEPTH, 16),
            True,
        )
        made.handle = made.number
        if qp_type is QPType.RC:
            made.opcodes |= {14, 15}
        self.qps[made.number] = made
        return made

    def receive(self, source: bytes, data: bytes, segment: int) -> None:
        """Process a datagram: packets that the kernel has joined."""
        view = memoryview(data)
        at = 0
        while at < len(data):
            size = min(segment, len(data) - at)
            count = 1
            if data[at] in packets.MIDDLE:
                count = native.roce_run(data, len(data), segment, at)
            packet = packets.parse(view, at, size, count, source, _grh)
            at += segment * count
            qp = None if packet is None else self.qps.get(packet.qpn)
            if packet is not None and qp is not None:
                self.network.step(protocol_engine.receive, qp, packet)
                self.network.run_ready()


def _grh() -> bytes:
    return bytes(40)


@dataclass
class Weather:
    """What the network does to packets, each with a probability."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    """Flips a bit. The device drops the packet, as its checksum is wrong."""
    delay: float = 10e-6
    jitter: float = 0.0
    late: float = 2e-3
    """How much later a packet that is reordered or duplicated arrives, at most."""
    outages: list[tuple[float, float]] = field(default_factory=list)


class Interrupted(Exception):
    """What a signal handler raises."""


def _interrupted(function: Any, arguments: Any) -> None:
    function(*arguments)
    raise Interrupted


_ATOMS = (int, float, str, bytes, frozenset, type(None), type, Enum, ProtectionDomain, WQE)
_ATOMS += (packets.PacketRow, packets.Form, packets.Path)
_MANY = (tuple, list, deque)


def _first(item: tuple[Any, Any]) -> int:
    return item[0] if isinstance(item[0], int) else id(item[0])


def state_of(*roots: Any, max_bytes: int = 1 << 16) -> tuple[dict[int, Any], list[Any]]:
    """Return everything reachable from objects, to compare; and them, to keep them.

    Args:
        max_bytes: how many bytes of each memory to compare.
    """
    found: dict[int, Any] = {}
    left: list[Any] = list(roots)
    kept: list[Any] = []
    while left:
        each = left.pop()
        if id(each) in found:
            continue
        kept.append(each)
        if isinstance(each, _ATOMS):
            found[id(each)] = each if isinstance(each, (int, float)) else None
            continue
        if isinstance(each, memoryview):
            found[id(each)] = zlib.crc32(each[:max_bytes])
            continue
        if isinstance(each, _MANY):
            parts = list(each)
        elif isinstance(each, dict):
            # Their order may change, by a rollback.
            parts = [part for item in sorted(each.items(), key=_first) for part in item]
        elif callable(each) or type(each).__module__ == "itertools":
            parts = []
        else:
            names = [*getattr(each, "__dict__", ())]
            for cls in type(each).__mro__:
                names += getattr(cls, "__slots__", ())
            if isinstance(each, native.DeviceQueue):
                names += ["pending", "used", "silent", "refuses", "prompt", "depth", "armed"]
            parts = [part for name in names for part in (name, getattr(each, name, None))]
        # Reading a number makes a new object.
        found[id(each)] = [
            part if isinstance(part, (int, float, str)) else id(part) for part in parts
        ]
        left += [part for part in parts if not isinstance(part, (int, float, str))]
    return found, kept


class Network:
    """Time, and what is on its way."""

    def __init__(self, seed: int = 0, weather: Weather | None = None) -> None:
        self.random = random.Random(seed)
        self.weather = weather or Weather()
        self.now = 1000.0
        self.devices: dict[bytes, Device] = {}
        self.ready: deque[RoceQueuePair] = deque()
        self._events: list[tuple[float, int, Any, Any]] = []
        self._count = itertools.count()
        self.log: list[tuple[bytes, bytes]] | None = None
        """The senders and packets, if a test wants them."""
        self.drop: Any = None
        """Called with each packet; drops it if it returns true."""
        self.interrupts = True
        """Whether each step is interrupted at its end, rolled back, and repeated."""

    def at(self, when: float, device: Any, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._count), device, what))

    def carry(self, source: bytes, target: bytes, made: list[bytes]) -> None:
        """Send packets on their way."""
        weather, draw = self.weather, self.random.random
        device = self.devices.get(target)
        arrival = self.now + weather.delay + draw() * weather.jitter
        for packet in made:
            if self.log is not None:
                self.log.append((source, packet))
            if device is None or (self.drop is not None and self.drop(packet)):
                continue
            if any(begin <= self.now < end for begin, end in weather.outages):
                continue
            if weather.loss and draw() < weather.loss:
                continue
            if weather.corrupt and draw() < weather.corrupt:
                packet = self.corrupted(packet)
            when = arrival
            if weather.reorder and draw() < weather.reorder:
                when += draw() * weather.late
            self.at(when, device, (source, packet))
            if weather.duplicate and draw() < weather.duplicate:
                self.at(when + draw() * weather.late, device, (source, packet))

    def corrupted(self, packet: bytes) -> bytes:
        damaged = bytearray(packet)
        damaged[self.random.randrange(len(packet))] ^= 1 << self.random.randrange(8)
        return bytes(damaged)

    def step(self, function: Any, *arguments: Any) -> Any:
        """Call the engine, in a transaction."""
        if self.interrupts:
            before, kept = self.state(arguments)
            with contextlib.suppress(Interrupted):
                native.verb(_interrupted, function, arguments)
            after, _ = self.state(arguments)
            if before != after:
                changed = [
                    (type(each), before[id(each)], after.get(id(each)))
                    for each in kept
                    if before[id(each)] != after.get(id(each))
                ] or (before[0], after[0])
                raise AssertionError(f"{function} left a trace: {changed}")
        return native.verb(function, *arguments)

    def state(self, arguments: Any) -> tuple[dict[int, Any], list[Any]]:
        """Return the state of the devices, and of what is on its way."""
        parts: list[Any] = [self.ready]
        for device in self.devices.values():
            parts += [device.memory, device.qps, device.srqs, device.counters, device.timers]
            parts += [device.context.faults, device.context.events.seen]
        parts += [each for each in arguments if isinstance(each, RoceQueuePair)]
        found, kept = state_of(*parts)
        found[0] = len(self._events)
        return found, kept

    def run_ready(self) -> None:
        """Go on with the queue pairs that asked for it."""
        while self.ready:
            qp = self.ready.popleft()
            while self.step(protocol_engine.execute_next, qp):
                pass

    def post(self, qp: RoceQueuePair, *wqes: WQE) -> None:
        qp.sq.pending.extend(wqes)  # type: ignore[arg-type]
        self.ready.append(qp)
        self.run_ready()

    def post_recv(self, queue: RoceQueuePair | SharedReceiveQueue, *wqes: WQE) -> None:
        receives = queue.queue if isinstance(queue, SharedReceiveQueue) else queue.rq
        receives.pending.extend(wqes)  # type: ignore[arg-type]
        if isinstance(queue, RoceQueuePair) and queue.state is QPState.ERR:
            self.step(protocol_engine.execute_next, queue)

    def call_at(self, when: float, function: Any) -> None:
        """Call a function at a time."""
        self.at(when, function, None)

    def run(self, until: float = float("inf")) -> None:
        """Let time pass until nothing is on its way any more."""
        self.run_ready()
        events = self._events
        while events and events[0][0] <= until:
            when, _, device, what = heapq.heappop(events)
            self.now = max(self.now, when)
            if not isinstance(device, Device):
                device()
            elif what is None:
                for qp, due in list(device.timers.items()):
                    if due <= self.now:
                        del device.timers[qp]
                        self.step(protocol_engine.on_timer, qp)
                        self.run_ready()
            else:
                self._deliver(when, device, *what)
            self.run_ready()
        if until != float("inf"):
            self.now = max(self.now, until)

    def _deliver(self, when: float, device: Device, source: bytes, packet: bytes) -> None:
        """Deliver a packet, and those of its size that arrive at the same time with it."""
        joined = [packet]
        events = self._events
        while (
            events
            and events[0][0] == when
            and events[0][2] is device
            and events[0][3] is not None
            and events[0][3][0] == source
            and len(events[0][3][1]) <= len(packet)
            and len(joined) < 64
        ):
            other = heapq.heappop(events)[3][1]
            joined.append(other)
            if len(other) < len(packet):
                break
        device.counters.received += len(joined)
        for n, each in enumerate(joined):
            if zlib.crc32(each[:-ICRC_BYTES]) != int.from_bytes(each[-ICRC_BYTES:]):
                joined[n] = bytes((_NOT_A_PACKET,)) + each[1:]
        device.receive(source, b"".join(joined), len(packet))


def gid(n: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes((10, 0, 0, n))


def ah_attr(dgid: bytes) -> bytes:
    return dgid + struct.pack("=IBBB", 0, 0, 64, 0) + bytes(9)


def connect(
    qp: RoceQueuePair,
    dgid: bytes,
    dest_qp_num: int,
    sq_psn: int = 0,
    rq_psn: int = 0,
    **options: Any,
) -> None:
    """Bring a connected queue pair to RTS, or with to_rts=False to RTR."""
    reliable = qp.type is QPType.RC
    to_rts = options.pop("to_rts", True)
    chosen = {
        "qp_access_flags": ALL_ACCESS,
        "path_mtu": MTU.MTU_1024,
        "max_dest_rd_atomic": 16,
        "min_rnr_timer": 12,
        "timeout": 14,
        "retry_cnt": 7,
        "rnr_retry": 7,
        "max_rd_atomic": 16,
    } | options
    M, S = QPAttrMask, QPState
    access = {"qp_access_flags": chosen["qp_access_flags"]}
    assert qp.modify(
        M.STATE | M.PKEY_INDEX | M.PORT | M.ACCESS_FLAGS,
        {"qp_state": S.INIT, "pkey_index": 0, "port_num": 1} | access,
    )
    mask = M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN
    names = ["path_mtu"]
    if reliable:
        mask |= M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
        names += ["max_dest_rd_atomic", "min_rnr_timer"]
    attrs = {name: chosen[name] for name in names} | {
        "qp_state": S.RTR,
        "ah_attr": ah_attr(dgid),
        "dgid": dgid,
        "dest_qp_num": dest_qp_num,
        "rq_psn": rq_psn,
    }
    assert qp.modify(mask, attrs)
    if to_rts:
        rts(qp, sq_psn, **chosen)


def rts(qp: RoceQueuePair, sq_psn: int = 0, **chosen: Any) -> None:
    M = QPAttrMask
    mask, names = M.STATE | M.SQ_PSN, []
    if qp.type is QPType.RC:
        mask |= M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC
        names = ["timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"]
    attrs = {name: chosen[name] for name in names}
    assert qp.modify(mask, {"qp_state": QPState.RTS, "sq_psn": sq_psn} | attrs)


def start_ud(qp: RoceQueuePair, qkey: int = 0x1234, sq_psn: int = 0) -> None:
    M, S = QPAttrMask, QPState
    attrs = {"qp_state": S.INIT, "pkey_index": 0, "port_num": 1, "qkey": qkey}
    assert qp.modify(M.STATE | M.PKEY_INDEX | M.PORT | M.QKEY, attrs)
    assert qp.modify(M.STATE, {"qp_state": S.RTR})
    assert qp.modify(M.STATE | M.SQ_PSN, {"qp_state": S.RTS, "sq_psn": sq_psn})


def polled(cq: CompletionQueue) -> list[Completion]:
    """Remove and return the completions."""
    found = []
    while cq.pending:
        raw, _, _ = cq.pending.popleft()
        wr_id, status, opcode, byte_len, imm, qp_num, src_qp, flags, _ = _WC.unpack_from(raw)
        found.append(
            Completion(
                wr_id, WCStatus(status), WCOpcode(opcode), byte_len, imm, qp_num, src_qp, flags
            )
        )
    return found


class PairOf:
    """Two devices with a connected queue pair each, and memory."""

    def __init__(
        self,
        network: Network | None = None,
        qp_type: QPType = QPType.RC,
        size: int = 1 << 20,
        psns: tuple[int, int] = (0x111111, 0xFFFFF0),
        srq: bool = False,
        **options: Any,
    ) -> None:
        self.network = network or Network()
        self.devices = Device(self.network, gid(1)), Device(self.network, gid(2))
        self.srqs = [device.srq() if srq else None for device in self.devices]
        self.a, self.b = [
            device.qp(qp_type, srq=each)
            for device, each in zip(self.devices, self.srqs, strict=True)
        ]
        self.mine, self.theirs = [Buffer(device, size) for device in self.devices]
        connect(self.a, gid(2), self.b.number, *psns, **options)
        connect(self.b, gid(1), self.a.number, *reversed(psns), **options)


class Stranger(Device):
    """A peer without an engine: a test reads what it gets, and sends what it likes."""

    def __init__(self, network: Network, address: bytes) -> None:
        super().__init__(network, address)
        self.got: list[packets.Packet] = []

    def receive(self, source: bytes, data: bytes, segment: int) -> None:
        for at in range(0, len(data), segment):
            size = min(segment, len(data) - at)
            packet = packets.parse(memoryview(data), at, size, 1, source, _grh)
            assert packet is not None
            self.got.append(packet)

    def take(self) -> list[packets.Packet]:
        """Let what is on its way arrive; return it."""
        self.network.run(self.network.now + 1e-3)
        got, self.got = self.got, []
        return got

    def inject(self, qp: RoceQueuePair, *made: bytes) -> None:
        """Send packets, each by itself, to a queue pair's device, at once."""
        for packet in made:
            qp.device.receive(self.gid, packet, len(packet))  # type: ignore[attr-defined]


class Alone:
    """A connected queue pair whose peer is a Stranger."""

    def __init__(self, qp_type: QPType = QPType.RC, size: int = 1 << 20, **options: Any) -> None:
        self.network = Network()
        self.device = Device(self.network, gid(1))
        self.peer = Stranger(self.network, gid(2))
        self.srq = self.device.srq() if options.pop("srq", False) else None
        self.qp = self.device.qp(qp_type, srq=self.srq)
        self.memory = Buffer(self.device, size)
        options.setdefault("sq_psn", SQ_PSN)
        options.setdefault("rq_psn", RQ_PSN)
        if qp_type is QPType.UD:
            start_ud(self.qp, sq_psn=SQ_PSN)
        else:
            connect(self.qp, gid(2), PEER_QPN, **options)

    def packet(
        self,
        name: str,
        psn: int,
        *extensions: Any,
        payload: bytes = b"",
        flags: int = 0,
        **bth: Any,
    ) -> bytes:
        """Encode a packet to the queue pair."""
        row = ROWS_BY_NAME[name]
        padding = -len(payload) % 4
        word = psn & packets.PSN_MASK | (packets.ACK_REQ if bth.pop("ack_req", False) else 0)
        header = row.pack(
            row.bth_opcode,
            flags | padding << 4,
            bth.pop("pkey", packets.DEFAULT_PKEY),
            bth.pop("qpn", self.qp.number),
            word,
            *extensions,
        )
        assert not bth
        return header + payload + bytes(padding + ICRC_BYTES)

    def inject(self, name: str, psn: int, *extensions: Any, **rest: Any) -> None:
        """Have the peer send a packet."""
        self.peer.inject(self.qp, self.packet(name, psn, *extensions, **rest))

    def ack(self, psn: int) -> None:
        """Have the peer acknowledge all up to a PSN."""
        self.inject("RC_ACKNOWLEDGE", psn, packets.aeth(packets.ACK, 31, 0))

    def nak(self, psn: int, code: int) -> None:
        """Have the peer send a NAK."""
        self.inject("RC_ACKNOWLEDGE", psn, packets.aeth(packets.NAK, code, 0))

    def sends(self) -> list[Completion]:
        return polled(self.qp.send_cq)

    def receives(self) -> list[Completion]:
        return polled(self.qp.recv_cq)

    def events(self) -> list[EventType]:
        """Return the asynchronous events since the last call."""
        seen = self.device.context.events.seen
        found = [event for event, _ in seen]
        seen.clear()
        return found


SQ_PSN, RQ_PSN, PEER_QPN = 0x123456, 0xFFFFFE, 0xABCDEF
"""Those of an Alone; the PSNs of what it receives wrap soon."""
ROWS_BY_NAME = {row.name: row for row in packets.ROWS.values()}
