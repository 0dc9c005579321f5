"""Random programs, one for every seed.

Most of a program can succeed, because a queue pair that has failed only
flushes: mistakes are in one step, and not in every program.  (Hypothesis
could draw and shrink programs, too, but takes longer to draw one than an
emulated machine takes to run it.)
"""

from __future__ import annotations

from random import Random
from typing import Any

from .model import GRH, REGIONS, At, End, Move, Pair, Post, Program, R, Recv, Sge, Step, W

__all__ = ["program_of"]

_MAX_UD = 1024
"""The most bytes of a datagram; nearly every receive for a datagram has room for them."""

_SIZES = (1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64, 65, 100, 255, 1000, 1024)
_LONG = (1025, 1500, 2048, 2049, 3000, 4096)
_NUMBERS = (0, 1, 2, 3, (1 << 64) - 1, 0x0123456789ABCDEF)
_IMM = (0, 1, 0xFFFFFFFF, 0x01020304)

_OPS = {
    "RC": (
        *["SEND"] * 3,
        *["RDMA_WRITE"] * 3,
        *["RDMA_READ"] * 3,
        "SEND_WITH_IMM",
        *["RDMA_WRITE_WITH_IMM"] * 2,
        "ATOMIC_CMP_AND_SWP",
        *["ATOMIC_FETCH_AND_ADD"] * 2,
    ),
    "UC": (*["SEND"] * 3, *["RDMA_WRITE"] * 3, "SEND_WITH_IMM", "RDMA_WRITE_WITH_IMM"),
    "UD": ("SEND", "SEND_WITH_IMM"),
}
_WRONG_OPS = {
    "RC": ("BIND_MW", "LOCAL_INV", "SEND_WITH_INV"),
    "UC": ("RDMA_READ", "ATOMIC_FETCH_AND_ADD", "BIND_MW"),
    "UD": ("RDMA_WRITE", "LOCAL_INV"),
}
_CONSUMING = frozenset({"SEND", "SEND_WITH_IMM", "SEND_WITH_INV", "RDMA_WRITE_WITH_IMM"})


class _Step:
    """Draws the parts of one step.

    Args:
        random: the source of random numbers.
        pair: the pair of queue pairs.
        end: the queue pair that sends.
        risk: the percentage with which each choice is wrong.
    """

    def __init__(self, random: Random, pair: Pair, end: End, risk: int) -> None:
        self._random = random
        self._type = pair.type
        self._end = end
        self._risk = risk

    def _chance(self, percent: int) -> bool:
        return self._random.randrange(100) < percent

    def _wrong(self) -> bool:
        return self._chance(self._risk)

    def _one_of(self, *values: Any) -> Any:
        return self._random.choice(values)

    def _number(self, limit: int) -> int:
        return self._random.randint(0, max(0, limit))

    # ---- memory -------------------------------------------------------------

    def sge(self, region: str, size: int) -> Sge:
        """Draw a buffer of this many bytes."""
        room = REGIONS[region].size - size
        sge = Sge(region, 0 if self._chance(30) else self._number(room), size)
        if not self._wrong():
            return sge
        fault = self._one_of("wrong", "gone", "other", "alien", "end", "none")
        if fault == "end":
            return Sge(region, room + 1 + self._number(size - 1), size)
        if fault == "alien":
            return Sge("alien", 0, min(size, 1024))
        key = {"wrong": f"{region}:wrong", "other": "a" if region != "a" else "b"}.get(fault, fault)
        return Sge(region, sge.offset, size, key)

    def sges(self, region: str, limit: int) -> tuple[Sge, ...]:
        """Draw a list of buffers."""
        count = self._one_of(1, 1, 1, 1, 2, 2, 3, 4, 0)
        if self._wrong():
            count = 5
        found: list[Sge] = []
        for _ in range(count):
            size = self._one_of(*(_LONG if self._chance(15) else _SIZES))
            size = min(size, limit - sum(sge.length for sge in found))
            if size:
                found.append(self.sge(region, size))
        return tuple(found)

    def at(self, op: str, size: int) -> At:
        """Draw remote memory for an operation, right or wrong."""
        atomic = op.startswith("ATOMIC")
        right = "counter" if atomic else "readable" if op == "RDMA_READ" else "writable"
        region = self._one_of("b", "b", "b", "a" if atomic else "b", right)
        key = ""
        if self._wrong():
            region = self._one_of("readable", "writable", "counter", "const", "inbox", "alien")
        elif self._wrong():
            key = self._one_of("b:wrong", "gone", "none", "a", "alien", "w0", "w1")
        if REGIONS[region].size < size:
            region = "b"
        room = REGIONS[region].size - size
        offset = self._number(room)
        if atomic:
            offset = offset // 8 * 8 + (1 + self._number(6) if self._wrong() else 0)
        elif self._wrong():
            offset = room + 1 + self._number(7)
        return At(region, offset, key)

    # ---- sends --------------------------------------------------------------

    def flags(self, op: str, size: int) -> tuple[str, ...]:
        """Draw flags."""
        flags = [flag for flag in ("UNSIGNALED", "SOLICITED", "FENCE") if self._chance(15)]
        if op.startswith(("SEND", "RDMA_WRITE")) and (
            self._wrong() if size > 64 else self._chance(30)
        ):
            flags.append("INLINE")
        if self._type == "UD" and self._wrong():
            flags.append("BAD_QKEY")
        return tuple(flags)

    def send(self) -> W:
        """Draw a send work request."""
        op = self._one_of(*_OPS[self._type])
        if self._wrong():
            op = self._one_of(*_WRONG_OPS[self._type])
        if op == "BIND_MW":
            return self.bind(self._one_of("w0", "w1", "v"))
        if op == "LOCAL_INV":
            return W(op, key=self._one_of("w0", "w1", "w0:stale", "w0:wrong", "gone", "none"))
        atomic = op.startswith("ATOMIC")
        writes = atomic or op == "RDMA_READ"
        local = "a" if writes != self._wrong() else self._one_of("a", "a", "a", "const")
        limit = min(REGIONS[local].size, _MAX_UD if self._type == "UD" else 8192)
        if atomic and not self._wrong():
            sges: tuple[Sge, ...] = (self.sge(local, 8),)
        else:
            sges = self.sges(local, limit)
        size = sum(sge.length for sge in sges)
        fields: dict[str, Any] = {"flags": self.flags(op, size)}
        if op.startswith(("RDMA", "ATOMIC")):
            fields["at"] = self.at(op, 8 if atomic else size)
        if op.endswith("WITH_IMM"):
            fields["imm"] = self._one_of(*_IMM)
        if op == "SEND_WITH_INV":
            fields["key"] = self._one_of("w0", "w1", "w0:wrong", "gone")
        if atomic:
            fields["compare"] = self._one_of(*_NUMBERS)
        if op == "ATOMIC_CMP_AND_SWP":
            fields["swap"] = self._one_of(*_NUMBERS)
        return W(op, sges, **fields)

    # ---- windows ------------------------------------------------------------

    def bind(self, window: str) -> W:
        """Draw a BIND_MW of a window to the first 4096 bytes of b, or a wrong one."""
        at, length, access = At("b", 0), 4096, self._access()
        if self._wrong():
            at = At(self._one_of("b", "readable", "writable", "alien"), self._one_of(0, 64, 8000))
        if self._wrong():
            length = self._one_of(0, 1, 512, 9000)
        return W("BIND_MW", at=at, mw=window, length=length, access=access)

    def _access(self) -> str:
        return str(self._one_of("R", "W", "A", "RW", "") if self._wrong() else "RWA")

    def through(self, window: str) -> W:
        """Draw a work request that uses a window."""
        op = self._one_of("RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD")
        if self._type == "UC":
            op = "RDMA_WRITE"
        if op.startswith("ATOMIC"):
            offset = 8 * self._number(511)
            return W(op, (self.sge("a", 8),), At("b", offset, window), compare=1)
        sges = self.sges("a", 4096)
        size = sum(sge.length for sge in sges)
        offset = self._number(4096 - size)
        if self._wrong():
            window += self._one_of(":stale", ":wrong")
        return W(op, sges, At("b", offset, window), flags=self.flags(op, size))

    # ---- receives -----------------------------------------------------------

    def receive(self, size: int) -> R:
        """Draw a receive with room for this many bytes, or a wrong one."""
        if self._type == "UD":
            if self._wrong():
                return R((self.sge("inbox", GRH + size - 1),))
            size = _MAX_UD
            first = self._one_of(0, 0, 1, 39, 40, 41, 100)
            room = GRH + size + self._one_of(0, 60) - first
            return R(tuple(self.sge("inbox", length) for length in (first, room) if length))
        if self._wrong():
            return R(self.sges("inbox", 4096))
        room = size + self._one_of(0, 0, 1, 100)
        pieces = self._one_of(1, 1, 2, 3) if room > 3 else min(1, room)
        sges = []
        for piece in range(pieces):
            length = room // pieces if piece else room - room // pieces * (pieces - 1)
            sges.append(self.sge("inbox", length))
        return R(tuple(sges))

    def receives_for(self, wrs: tuple[W, ...]) -> tuple[R, ...]:
        """Draw the receives that sends need; writes with immediate data need no room."""
        return tuple(
            self.receive(0 if wr.op.startswith("RDMA") else wr.size)
            for wr in wrs
            if wr.op in _CONSUMING and not self._wrong()
        )

    # ---- whole steps --------------------------------------------------------

    def steps(self, qp: int) -> list[Step]:
        """Draw the posts of one queue pair, and the receives and binds that its peer needs."""
        if self._type != "UD" and self._chance(20):
            return self._window_steps(qp)
        if self._chance(8):
            count, size = self._one_of(1, 2, 4, 8), self._one_of(*_SIZES)
            return [Recv(qp, tuple(self.receive(size) for _ in range(count)))]
        count = 8 if self._wrong() else self._one_of(1, 1, 2, 3, 4)
        wrs = tuple(self.send() for _ in range(count))
        receives = self.receives_for(wrs)
        return [*([Recv(qp ^ 1, receives)] if receives else []), Post(qp, wrs)]

    def _window_steps(self, qp: int) -> list[Step]:
        window = self._one_of("w0", "w0", "w1")
        steps: list[Step] = []
        if not self._chance(20):
            steps.append(Post(qp ^ 1, (self.bind(window),)))
        count = self._one_of(1, 2, 3)
        steps.append(Post(qp, tuple(self.through(window) for _ in range(count))))
        if self._chance(40):
            steps.append(Post(qp ^ 1, (W("LOCAL_INV", key=window),)))
        elif self._type == "RC" and self._chance(50):
            send = W("SEND_WITH_INV", self.sges("a", 1024), key=window)
            steps += [Recv(qp ^ 1, self.receives_for((send,))), Post(qp, (send,))]
        if self._wrong():
            steps.append(Post(qp, (self.through(window),)))
        return steps


def _end(random: Random) -> End:
    def chance(percent: int) -> bool:
        return random.randrange(100) < percent

    return End(
        sq_sig_all=chance(15),
        checked=chance(20),
        access=random.choice(["R", "W", "A", "RW", ""]) if chance(6) else "RWA",
        srq=chance(12),
        depth=random.choice([15, 15, 7]),
        state=random.choice(["RTR", "INIT"]) if chance(3) else "RTS",
    )


def program_of(seed: int) -> Program:
    """Return the program that belongs to a seed: one or two pairs and a few steps."""
    random = Random(seed)
    pairs = []
    for _ in range(random.choice([1, 1, 1, 2])):
        qp_type = random.choice(["RC", "RC", "RC", "RC", "UC", "UD"])
        rnr_retry = random.choice([0, 0, 0, 1]) if qp_type == "RC" else 0
        pairs.append(Pair(qp_type, _end(random), _end(random), rnr_retry))
    count = random.randint(1, 5)
    wrong = random.randrange(count) if random.random() < 0.65 else None
    steps: list[Step] = []
    for index in range(count):
        qp = random.randrange(2 * len(pairs))
        pair = pairs[qp // 2]
        end = pair.b if qp % 2 else pair.a
        if index == wrong and random.random() < 0.08:
            steps.append(Move(qp, "ERR"))
        else:
            steps += _Step(random, pair, end, 12 if index == wrong else 0).steps(qp)
    return Program(tuple(pairs), tuple(steps))
