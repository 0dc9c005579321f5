"""Random programs on two devices, over a network that loses, repeats, delays and reorders packets.

What must hold: every work request completes exactly once, in order, with SUCCESS or the status that
names what went wrong; what succeeded has moved every byte, and nothing else has changed; nothing
hangs. ``RDMAPOST_PROGRAMS`` says how many run, ``RDMAPOST_FIRST_SEED`` where their seeds start. A
program that fails prints its seed, and the command that runs it alone:

    python tests/providers/roce/test_roce_model_network.py SEED 1
"""

from __future__ import annotations

import collections
import itertools
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from support.roce_network import (
    WQE,
    Buffer,
    Completion,
    Device,
    Network,
    Weather,
    connect,
    gid,
    polled,
    start_ud,
)

from rdmapost.enums import (
    MTU,
    FlushType,
    MWType,
    Opcode,
    QPState,
    QPType,
    SendFlags,
    WCOpcode,
    WCStatus,
)
from rdmapost.providers.roce.qp import RoceQueuePair
from rdmapost.providers.software.device_queues import AddressHandle

COUNT = int(os.environ.get("RDMAPOST_PROGRAMS", "2000"))
FIRST = int(os.environ.get("RDMAPOST_FIRST_SEED", "0"))
SIZE = 1 << 22
GROUND = random.Random(0).randbytes(SIZE)
LONGEST_RUN = 3600.0
"""Virtual seconds after which a program is said to hang."""
OK, FLUSHED = WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR
CONSUMING = {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV, Opcode.RDMA_WRITE_WITH_IMM}
FENCE = int(SendFlags.FENCE)


@dataclass
class Area:
    """Bytes of one side's memory."""

    buffer: Buffer
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def addr(self) -> int:
        return self.buffer.addr + self.start

    def bytes(self) -> bytes:
        return bytes(self.buffer.view[self.start : self.end])


class Memory:
    """One side's memory: areas in it that no two operations share."""

    unused: ClassVar[list[Buffer]] = []
    """Those of earlier programs, which hold what is in them at the beginning."""

    def __init__(self, device: Device, rng: random.Random) -> None:
        if self.unused:
            self.buffer = Buffer(device, SIZE, old=self.unused.pop())
        else:
            self.buffer = Buffer(device, SIZE)
            self.buffer.view[:] = GROUND
        self.rng = rng
        self.expected: list[tuple[Area, bytes]] = []
        self.unknown: list[Area] = []
        self._next = 0

    def take(self, size: int, align: int = 1) -> Area:
        start = -(-self._next // align) * align
        self._next = start + size + self.rng.randrange(1, 9)
        assert self._next <= SIZE
        return Area(self.buffer, start, size)

    def sges(self, area: Area) -> tuple[tuple[int, int, int], ...]:
        """Cut an area into SGEs."""
        cuts = sorted({self.rng.randrange(1, area.size) for _ in range(2)} if area.size > 2 else ())
        if self.rng.random() < 0.6:
            cuts = []
        bounds = [area.start, *[area.start + cut for cut in cuts], area.end]
        return tuple(
            self.buffer.sge(begin, end - begin)
            for begin, end in itertools.pairwise(bounds)
            if end > begin
        )

    def check(self) -> None:
        """Compare all bytes with what they must be."""
        end, view = self._next, self.buffer.view
        expected = bytearray(GROUND[:end])
        for area, data in self.expected:
            expected[area.start : area.end] = data
        for area in self.unknown:
            expected[area.start : area.end] = area.bytes()
        # A view compares byte by byte.
        if expected != bytes(view[:end]):
            bad = [i for i in range(end) if expected[i] != view[i]]
            raise AssertionError(f"{len(bad)} bytes differ, from {bad[0]} to {bad[-1]}")
        assert bytes(view[end:]) == GROUND[end:]
        view[:end] = GROUND[:end]
        self.unused.append(self.buffer)


@dataclass
class Operation:
    """A work request, and what it does if it succeeds."""

    wqe: WQE
    source: Area | None = None
    target: tuple[Memory, Area] | None = None
    data: bytes | None = None
    """What the target must hold afterwards, if that is not what the source held."""
    imm: int | None = None
    size: int = 0
    invalidates: Any = None
    fails_with: WCStatus | None = None


class Side:
    """One queue pair and what it posts."""

    def __init__(self, qp: RoceQueuePair, memory: Memory) -> None:
        self.qp = qp
        self.memory = memory
        self.operations: list[Operation] = []
        self.receives: dict[int, Area] = {}
        self.read_back: list[tuple[Area, bytes | None]] = []
        self.counter = memory.take(8, 8)
        self.counter_value = int.from_bytes(self.counter.bytes(), sys.byteorder)
        self.other: Side

    def consuming(self) -> list[Operation]:
        return [each for each in self.operations if each.wqe.opcode in CONSUMING]


class Program:
    """What a seed stands for."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.service = rng.choices([QPType.RC, QPType.UC, QPType.UD], [8, 1, 1])[0]
        self.network = Network(seed, self.make_weather())
        self.network.interrupts = rng.random() < 0.03
        self.devices = [Device(self.network, gid(n)) for n in (1, 2)]
        self.memories = [Memory(device, rng) for device in self.devices]
        self.mtu = rng.choice([1, 1, 2, 3, 3, 5])
        self.options = {
            "path_mtu": MTU(self.mtu),
            "max_rd_atomic": rng.choice([1, 2, 16]),
            "timeout": rng.choice([8, 10, 12, 14]),
            "retry_cnt": rng.choice([0, 1, 7, 7, 7, 7]),
            "rnr_retry": rng.choice([0, 3, 7, 7, 7]),
            "min_rnr_timer": rng.choice([1, 5, 12, 20]),
        }
        self.sides: list[Side] = []
        self.sharing = self.service is QPType.RC and rng.random() < 0.15
        self.srqs = [device.srq() if self.sharing else None for device in self.devices]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            self.add_pair()
        self.bad = self.service is QPType.RC and not self.sharing and rng.random() < 0.2
        for side in self.sides:
            self.fill(side)
        self.short = False
        for side in self.sides:
            self.add_receives(side)
        self.schedule()

    def make_weather(self) -> Weather:
        rng = self.rng
        self.calm = False
        kind = rng.choices(["calm", "bad", "reordering", "storm", "outage"], [2, 4, 2, 1, 1])[0]
        weather = Weather(delay=rng.choice([1e-6, 2e-5, 1e-3]), jitter=rng.choice([0, 1e-5, 3e-4]))
        if kind == "calm":
            self.calm = True
            weather.jitter = 0
        elif kind == "bad":
            weather.loss = rng.choice([0.01, 0.02, 0.05])
            weather.duplicate = rng.choice([0, 0.05])
            weather.reorder = rng.choice([0, 0.02])
            weather.corrupt = rng.choice([0, 0.03])
        elif kind == "reordering":
            weather.reorder, weather.duplicate = 0.3, 0.1
            weather.late = rng.choice([1e-4, 5e-3, 3e-2])
        elif kind == "storm":
            weather.loss, weather.duplicate, weather.reorder = 0.3, 0.3, 0.3
            weather.late, weather.corrupt = 5e-2, 0.1
        else:
            begin = 1000 + rng.random() * 0.02
            weather.outages = [(begin, begin + rng.choice([0.01, 0.1, 5.0]))]
        return weather

    # ---- making it ----------------------------------------------------------

    def psn(self) -> int:
        return self.rng.choice(
            [0, 0xFFFFFF, 0xFFFFFF - self.rng.randrange(80), self.rng.randrange(1 << 24)]
        )

    def add_pair(self) -> None:
        qps = [
            device.qp(self.service, srq=srq)
            for device, srq in zip(self.devices, self.srqs, strict=True)
        ]
        a, b = [Side(qp, memory) for qp, memory in zip(qps, self.memories, strict=True)]
        a.other, b.other = b, a
        if self.service is QPType.UD:
            for qp in qps:
                start_ud(qp, sq_psn=self.psn())
        else:
            psns = self.psn(), self.psn()
            connect(a.qp, gid(2), b.qp.number, *psns, **self.options)
            connect(b.qp, gid(1), a.qp.number, *reversed(psns), **self.options)
        self.sides += [a, b]

    def size(self) -> int:
        rng, mtu = self.rng, 128 << self.mtu
        kind = rng.random()
        if self.service is QPType.UD:
            return rng.choice([0, 1, 100, 4096, rng.randrange(4096)])
        if self.sharing or kind < 0.4:
            return rng.choice([0, 1, 3, 4, 8, 64, 200])
        if kind < 0.7:
            return rng.choice([mtu, mtu + 1, 2 * mtu, 2 * mtu - 1, 3 * mtu + 5])
        if kind < 0.95:
            return rng.randrange(1, 6 * mtu)
        return rng.randrange(1, min(90 * mtu, 100_000))

    def fill(self, side: Side) -> None:
        choices = {
            QPType.RC: [self.send, self.write, self.read, self.atomic, self.local, self.flush],
            QPType.UC: [self.send, self.write],
            QPType.UD: [self.send],
        }[self.service]
        weights = [6, 6, 5, 4, 1, 2][: len(choices)]
        for n in range(self.rng.choice([0, 1, 2, 5, 10, 20])):
            make = self.rng.choices(choices, weights)[0]
            made = make(side, n)
            made.wqe.flags |= FENCE if self.rng.random() < 0.1 else 0
            side.operations.append(made)
        if self.bad and self.rng.random() < 0.5:
            side.operations.append(self.bad_operation(side, len(side.operations)))

    def wqe(self, side: Side, n: int, opcode: Opcode, **fields: Any) -> WQE:
        if self.service is QPType.UD:
            to = side.other.qp
            me = side.qp.device.gid  # type: ignore[attr-defined]
            handle = AddressHandle(me, to.device.gid, 0, 0, 64, 0)  # type: ignore[attr-defined]
            fields |= {"ah": handle, "remote_qpn": to.number, "remote_qkey": 0x1234}
        fields.setdefault("flags", int(self.rng.choice([0, SendFlags.SIGNALED])))
        return WQE(n, opcode=int(opcode), **fields)

    def local_data(self, side: Side, size: int) -> tuple[Area, dict[str, Any]]:
        area = side.memory.take(size)
        if size <= 200 and self.rng.random() < 0.3:
            return area, {"inline": area.bytes()}
        return area, {"sges": side.memory.sges(area)}

    def send(self, side: Side, n: int) -> Operation:
        opcodes = [Opcode.SEND, Opcode.SEND_WITH_IMM]
        if self.service is QPType.RC:
            opcodes.append(Opcode.SEND_WITH_INV)
        opcode = self.rng.choice(opcodes)
        size = self.size()
        area, fields = self.local_data(side, size)
        made = Operation(self.wqe(side, n, opcode, **fields), source=area, size=size)
        if opcode is Opcode.SEND_WITH_IMM:
            made.imm = made.wqe.imm = self.rng.randrange(1 << 32)
        elif opcode is Opcode.SEND_WITH_INV:
            device = side.other.qp.device
            made.invalidates = Buffer(device, 8).mr  # type: ignore[arg-type]
            made.wqe.imm = made.invalidates.rkey
        return made

    def write(self, side: Side, n: int) -> Operation:
        size = self.size()
        opcode = self.rng.choice([Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM])
        target = side.other.memory.take(size)
        if self.service is QPType.RC and self.rng.random() < 0.2 and side.read_back:
            # What an earlier READ has fetched: it must have ended.
            area, data = self.rng.choice(side.read_back)
            size, fields = area.size, {"sges": side.memory.sges(area), "flags": FENCE}
            target = side.other.memory.take(size)
        else:
            area, fields = self.local_data(side, size)
            data = None
        wqe = self.wqe(
            side, n, opcode, remote_addr=target.addr, rkey=target.buffer.mr.rkey, **fields
        )
        made = Operation(wqe, area, (side.other.memory, target), data, size=size)
        if opcode is Opcode.RDMA_WRITE_WITH_IMM:
            made.imm = wqe.imm = self.rng.randrange(1 << 32)
        return made

    def read(self, side: Side, n: int) -> Operation:
        size = self.size()
        written = [
            each
            for each in side.operations
            if each.wqe.opcode in (Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM) and each.size
        ]
        if written and self.rng.random() < 0.3:
            earlier = self.rng.choice(written)
            assert earlier.target is not None
            assert earlier.source is not None
            source = earlier.target[1]
            data = earlier.data if earlier.data is not None else earlier.source.bytes()
        else:
            source = side.other.memory.take(size)
            data = source.bytes()
        target = side.memory.take(source.size)
        side.read_back.append((target, data))
        wqe = self.wqe(
            side,
            n,
            Opcode.RDMA_READ,
            sges=side.memory.sges(target),
            remote_addr=source.addr,
            rkey=source.buffer.mr.rkey,
        )
        return Operation(wqe, None, (side.memory, target), data, size=source.size)

    def atomic(self, side: Side, n: int) -> Operation:
        rng, other = self.rng, side.other
        if rng.random() < 0.3:
            target = other.memory.take(8, 8)
            value = rng.randrange(1 << 64)
            wqe = self.wqe(
                side,
                n,
                Opcode.ATOMIC_WRITE,
                remote_addr=target.addr,
                rkey=target.buffer.mr.rkey,
                atomic_wr=value,
            )
            data = value.to_bytes(8, sys.byteorder)
            return Operation(wqe, None, (other.memory, target), data, size=8)
        opcode = rng.choice([Opcode.ATOMIC_FETCH_AND_ADD, Opcode.ATOMIC_CMP_AND_SWP])
        result = side.memory.take(8)
        old = other.counter_value
        compare, swap = rng.randrange(1 << 64), rng.randrange(1 << 64)
        if opcode is Opcode.ATOMIC_FETCH_AND_ADD:
            other.counter_value = old + compare & (1 << 64) - 1
        elif rng.random() < 0.7:
            compare, other.counter_value = old, swap
        wqe = self.wqe(
            side,
            n,
            opcode,
            remote_addr=other.counter.addr,
            atomic_rkey=other.counter.buffer.mr.rkey,
            compare_add=compare,
            swap=swap,
            sges=side.memory.sges(result),
        )
        data = old.to_bytes(8, sys.byteorder)
        return Operation(wqe, None, (side.memory, result), data, size=8)

    def local(self, side: Side, n: int) -> Operation:
        if self.rng.random() < 0.5:
            region = Buffer(side.qp.device, 8).mr  # type: ignore[arg-type]
            return Operation(
                self.wqe(side, n, Opcode.LOCAL_INV, imm=region.lkey), invalidates=region
            )
        window = side.qp.device.memory.allocate_window(side.qp.pd, MWType.TYPE_2)
        region = side.memory.buffer.mr
        wqe = self.wqe(
            side,
            n,
            Opcode.BIND_MW,
            window=window,
            region=region,
            bind_addr=region.addr,
            bind_length=8,
            bind_rkey=7,
        )
        return Operation(wqe)

    def flush(self, side: Side, n: int) -> Operation:
        buffer = side.other.memory.buffer
        wqe = self.wqe(
            side,
            n,
            Opcode.FLUSH,
            remote_addr=buffer.addr,
            rkey=buffer.mr.rkey,
            length=100,
            type=int(FlushType.GLOBAL),
            level=self.rng.choice([0, 1]),
        )
        return Operation(wqe)

    def bad_operation(self, side: Side, n: int) -> Operation:
        """Make an operation that fails."""
        rng, other = self.rng, side.other.memory.buffer
        kind = rng.choice(["rkey", "range", "lkey", "opcode", "atomic", "forced", "read"])
        remote = {"remote_addr": other.addr, "rkey": other.mr.rkey}
        sges = (side.memory.buffer.sge(0, 8),)
        long = (side.memory.buffer.sge(0, 5 * (128 << self.mtu)),)
        if kind == "rkey":
            remote["rkey"] ^= 0x100
            wqe = self.wqe(side, n, Opcode.RDMA_WRITE, sges=rng.choice([sges, long]), **remote)
            return Operation(wqe, fails_with=WCStatus.REM_ACCESS_ERR)
        if kind == "range":
            remote["remote_addr"] += SIZE - 7
            wqe = self.wqe(side, n, Opcode.RDMA_WRITE, sges=rng.choice([sges, long]), **remote)
            return Operation(wqe, fails_with=WCStatus.REM_ACCESS_ERR)
        if kind == "read":
            remote["remote_addr"] -= 1
            wqe = self.wqe(side, n, Opcode.RDMA_READ, sges=long, **remote)
            return Operation(wqe, fails_with=WCStatus.REM_ACCESS_ERR)
        if kind == "lkey":
            bad = tuple((addr, length, 0x77) for addr, length, _ in sges)
            opcode = rng.choice([Opcode.RDMA_WRITE, Opcode.SEND])
            return Operation(
                self.wqe(side, n, opcode, sges=bad, **remote), fails_with=WCStatus.LOC_PROT_ERR
            )
        if kind == "atomic":
            atomic = {"remote_addr": other.addr + 4, "atomic_rkey": other.mr.rkey}
            wqe = self.wqe(side, n, Opcode.ATOMIC_FETCH_AND_ADD, sges=sges, **atomic)
            return Operation(wqe, fails_with=WCStatus.REM_INV_REQ_ERR)
        if kind == "forced":
            number = n | side.qp.number << 20
            side.qp.context.faults.statuses[number] = (WCStatus.GENERAL_ERR,)
            wqe = self.wqe(side, number, Opcode.RDMA_WRITE, sges=sges, **remote)
            return Operation(wqe, fails_with=WCStatus.GENERAL_ERR)
        return Operation(self.wqe(side, n, Opcode.TSO), fails_with=WCStatus.LOC_QP_OP_ERR)

    def add_receives(self, side: Side) -> None:
        rng = self.rng
        header = 40 if self.service is QPType.UD else 0
        for n, operation in enumerate(side.other.consuming()):
            size = 200 if self.sharing else operation.size
            if self.service is not QPType.RC:
                # Some are lost, so any may take any.
                size = max(each.size for each in side.other.consuming())
            if self.bad and size and rng.random() < 0.02 and operation.wqe.opcode != 1:
                size = rng.randrange(operation.size)
                operation.fails_with = WCStatus.REM_INV_REQ_ERR
                self.short = True
            number = n | side.qp.number << 20
            side.receives[number] = side.memory.take(
                header + size + rng.randrange(3) * (not self.short)
            )

    def schedule(self) -> None:
        """Spread the posts over time."""
        rng, network = self.rng, self.network
        for side, srq in zip(self.sides, itertools.cycle(self.srqs)):
            queue = srq or side.qp
            wqes = []
            for number, area in side.receives.items():
                wqes.append(WQE(number, sges=side.memory.sges(area)))
                side.memory.unknown.append(area)
            soon = rng.choice([len(wqes), len(wqes), rng.randrange(len(wqes) + 1)])
            Post(network, queue, wqes[:soon])()
            for n, wqe in enumerate(wqes[soon:]):
                self.calm = False
                network.call_at(1000.02 + n * 1e-3, Post(network, queue, [wqe]))
        for side in self.sides:
            rest = [each.wqe for each in side.operations]
            when = 1000.0
            while rest:
                count = rng.choice([1, 2, 5, 20])
                network.call_at(when, Post(network, side.qp, rest[:count], True))
                rest = rest[count:]
                when += rng.choice([0, 1e-5, 1e-3, 2e-2])

    # ---- checking it ----------------------------------------------------------

    def run(self) -> set[str]:
        network = self.network
        network.run(1000 + LONGEST_RUN)
        assert not network._events, "it hangs"
        results = [self.check_sends(side) for side in self.sides]
        for side in self.sides:
            self.check_receives(side, results[self.sides.index(side.other)])
        for memory in self.memories:
            memory.check()
        statuses = {wc.status for done in results for wc in done} - {OK, FLUSHED}
        if self.calm and not self.bad:
            assert not statuses
        return {status.name for status in statuses} or {"SUCCESS"}

    def check_sends(self, side: Side) -> list[Completion]:
        done = polled(side.qp.send_cq)
        operations = side.operations
        assert [wc.wr_id for wc in done] == [each.wqe.wr_id for each in operations]
        good = list(itertools.takewhile(lambda wc: wc.status is OK, done))
        rest = done[len(good) :]
        if rest and self.service is QPType.RC:
            assert side.qp.state is QPState.ERR
            named = operations[len(good)].fails_with
            allowed = {WCStatus.RETRY_EXC_ERR, WCStatus.RNR_RETRY_EXC_ERR, FLUSHED, named}
            if self.calm and named and not any(each.fails_with for each in side.other.operations):
                allowed = {named}
            assert rest[0].status in allowed
            if FLUSHED is rest[0].status:
                # Its own responder broke.
                assert self.bad
            if rest[0].status is WCStatus.RNR_RETRY_EXC_ERR:
                assert self.options["rnr_retry"] < 7
        else:
            assert not rest
        assert all(wc.status is FLUSHED for wc in rest[1:])
        for wc, operation in zip(good, operations, strict=False):
            assert operation.fails_with is None
            assert wc.byte_len == (
                operation.size
                if wc.opcode in (WCOpcode.RDMA_READ, WCOpcode.FETCH_ADD, WCOpcode.COMP_SWAP)
                else 0
            )
            if operation.invalidates is not None:
                assert not operation.invalidates.valid
        for n, operation in enumerate(operations):
            if operation.target is None:
                continue
            memory, area = operation.target
            if n < len(good) and self.service is QPType.RC:
                data = operation.data
                if data is None:
                    assert operation.source is not None
                    data = operation.source.bytes()
                memory.expected.append((area, data))
            else:
                memory.unknown.append(area)
        counter = side.other.counter
        if len(good) == len(operations):
            value = side.other.counter_value.to_bytes(8, sys.byteorder)
            side.other.memory.expected.append((counter, value))
        else:
            side.other.memory.unknown.append(counter)
        return done

    def check_receives(self, side: Side, sent: list[Completion]) -> None:
        first = self.sides[self.devices.index(side.qp.device)]  # type: ignore[arg-type]
        if self.sharing and side is not first:
            return
        done = polled(side.qp.recv_cq)
        if not self.sharing:
            assert [wc.wr_id for wc in done] == list(side.receives)[: len(done)]
            left = [wqe.wr_id for wqe in side.qp.rq.pending]
            incoming = side.qp.incoming
            # One may wait for the rest of a message.
            taken = side.qp.spare or (incoming and incoming.taken)
            assert len(done) + len(left) + (taken is not None) == len(side.receives)
            if side.qp.state is QPState.ERR:
                assert not left
        good = [wc for wc in done if wc.status is OK]
        for wc in done[len(good) :]:
            assert wc.status in (FLUSHED, WCStatus.LOC_LEN_ERR)
            assert wc.status is FLUSHED or self.short
        if self.sharing:
            return
        operations = side.other.consuming()
        if self.service is QPType.RC:
            by_id = {wc.wr_id: wc for wc in sent}
            succeeded = [each for each in operations if by_id[each.wqe.wr_id].status is OK]
            assert len(succeeded) <= len(good) <= len(operations)
        for n, wc in enumerate(good):
            area = side.receives[wc.wr_id]
            candidates = operations[n : n + 1] if self.service is QPType.RC else operations
            assert any(self.matches(wc, area, each) for each in candidates)

    def matches(self, wc: Completion, area: Area, operation: Operation) -> bool:
        header = 40 if self.service is QPType.UD else 0
        written = operation.wqe.opcode == Opcode.RDMA_WRITE_WITH_IMM
        if wc.byte_len != operation.size + header or (wc.opcode == WCOpcode.RECV) is written:
            return False
        if operation.imm is not None and wc.imm != operation.imm:
            return False
        assert operation.source is not None
        got = area.bytes()[header : header + operation.size]
        return written or got == operation.source.bytes()


class Post:
    def __init__(
        self, network: Network, queue: Any, wqes: list[WQE], is_send: bool = False
    ) -> None:
        self.network, self.queue, self.wqes, self.is_send = network, queue, wqes, is_send

    def __call__(self) -> None:
        post = self.network.post if self.is_send else self.network.post_recv
        post(self.queue, *self.wqes)


def run(first: int, count: int) -> collections.Counter[str]:
    """Run programs; return how often they ended how."""
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        try:
            outcomes.update(Program(seed).run())
        except Exception:
            print(f"program {seed}: python {__file__} {seed} 1")
            raise
    return outcomes


@pytest.mark.slow
def test_random_programs_over_lossy_networks_end_as_specified():
    print(f"programs {FIRST}..{FIRST + COUNT - 1}")
    # In most of them everything succeeds.
    assert run(FIRST, COUNT)["SUCCESS"] > COUNT / 2


def main() -> None:
    first, count = (int(each) for each in sys.argv[1:3])
    begin = time.monotonic()
    outcomes = run(first, count)
    took = time.monotonic() - begin
    print(f"{count} programs from {first} on in {took:.0f} s: {dict(outcomes.most_common())}")


if __name__ == "__main__":
    main()
