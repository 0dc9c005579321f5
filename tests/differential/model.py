"""Programs of work requests, as values whose repr is the Python code that creates them.

Everything in a program is symbolic, so that it means the same on every device:
memory is a region's name and an offset, a key is the name of what it belongs
to, queue pairs count from 0 (2n and 2n + 1 are the ends of pair n).  A program
that failed can be pasted back into a test as it was printed.

Keys are named ``"b"`` (the region's or window's key as it is now), ``"b:wrong"``
(another low byte), ``"w0:stale"`` (a window's key before its last bind), ``"gone"``
(of a region that has been closed) or ``"none"`` (0).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import NamedTuple

from rdmapost import Access

__all__ = [
    "GRH",
    "REGIONS",
    "WINDOWS",
    "At",
    "End",
    "Move",
    "Pair",
    "Post",
    "Program",
    "R",
    "Recv",
    "RegionSpec",
    "Sge",
    "Step",
    "W",
]

GRH = 40
"""Bytes of the header with which a datagram begins in its receive."""


class RegionSpec(NamedTuple):
    """A region of every program.

    Attributes:
        size: bytes.
        access: an Access.
        pd: which of the two protection domains; the queue pairs are in 0.
    """

    size: int
    access: Access
    pd: int = 0


_LOCAL = Access.LOCAL_WRITE
_ALL = _LOCAL | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC

REGIONS = {
    "a": RegionSpec(8192, _ALL),
    "b": RegionSpec(8192, _ALL | Access.MW_BIND),
    "inbox": RegionSpec(16384, _LOCAL),
    "const": RegionSpec(2048, Access(0)),
    "readable": RegionSpec(2048, _LOCAL | Access.REMOTE_READ),
    "writable": RegionSpec(2048, _LOCAL | Access.REMOTE_WRITE | Access.MW_BIND),
    "counter": RegionSpec(512, _LOCAL | Access.REMOTE_ATOMIC),
    "alien": RegionSpec(2048, _ALL | Access.MW_BIND, pd=1),
}
"""By name.  Local data comes from ``a``, messages go to ``inbox``, remote access to the rest."""

WINDOWS = {"w0": 0, "w1": 0, "v": 1}
"""Memory windows of type 2, by name, and the protection domain of each."""


class _Shown:
    """Its repr is a call of the constructor, without arguments that have the default value."""

    def __repr__(self) -> str:
        shown = []
        named = False
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is not MISSING and value == field.default:
                named = True
                continue
            shown.append(f"{field.name}={value!r}" if named else repr(value))
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Sge(_Shown):
    """A scatter/gather element.

    Attributes:
        region: the region's name.
        offset: bytes from its start.
        length: bytes.
        key: the name of the lkey, if it is not the region's own.
    """

    region: str
    offset: int
    length: int
    key: str = ""


@dataclass(frozen=True, repr=False)
class At(_Shown):
    """Remote memory: a region's name, an offset, and the rkey's name if not the region's own."""

    region: str
    offset: int
    key: str = ""


@dataclass(frozen=True, repr=False)
class W(_Shown):
    """A send work request.

    Attributes:
        op: the name of an Opcode.
        sges: local buffers.
        at: remote memory; for BIND_MW the start of the window.
        flags: names: SOLICITED, FENCE, INLINE, UNSIGNALED, and on UD BAD_QKEY.
        imm, compare, swap: as in the work request.
        key: the name of the key to invalidate.
        mw, length, access: for BIND_MW: the window, its length, and letters out of
            R, W and A for remote reads, writes and atomics.
    """

    op: str
    sges: tuple[Sge, ...] = ()
    at: At | None = None
    flags: tuple[str, ...] = ()
    imm: int = 0
    compare: int = 0
    swap: int = 0
    key: str = ""
    mw: str = ""
    length: int = 0
    access: str = ""

    @property
    def size(self) -> int:
        """Bytes in its local buffers."""
        return sum(sge.length for sge in self.sges)


@dataclass(frozen=True, repr=False)
class R(_Shown):
    """A receive work request."""

    sges: tuple[Sge, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that it has room for."""
        return sum(sge.length for sge in self.sges)


@dataclass(frozen=True, repr=False)
class Post(_Shown):
    """Post a list of sends to a queue pair, in one call."""

    qp: int
    wrs: tuple[W, ...]


@dataclass(frozen=True, repr=False)
class Recv(_Shown):
    """Post a list of receives to a queue pair, or to its SRQ, in one call."""

    qp: int
    wrs: tuple[R, ...]


@dataclass(frozen=True, repr=False)
class Move(_Shown):
    """Bring a queue pair to a state: ERR, SQD, or RTS from SQD or SQE."""

    qp: int
    state: str


Step = Post | Recv | Move


@dataclass(frozen=True, repr=False)
class End(_Shown):
    """What one queue pair of a pair is created with.

    Attributes:
        sq_sig_all, checked: as in QP.
        access: letters out of R, W and A: what the peer may do through it.
        srq: it takes its receives from a shared receive queue of its own.
        depth: max_send_wr, max_recv_wr and the SRQ's max_wr; one less than a power of
            two, because devices round up to that.
        state: the state to which it is moved: RTS, RTR or INIT.
    """

    sq_sig_all: bool = False
    checked: bool = False
    access: str = "RWA"
    srq: bool = False
    depth: int = 15
    state: str = "RTS"


@dataclass(frozen=True, repr=False)
class Pair(_Shown):
    """Two queue pairs that are connected to each other.

    Attributes:
        type: RC, UC or UD.
        a, b: the ends.
        rnr_retry: attempts when the peer has no receive, 0..6.
    """

    type: str
    a: End = End()
    b: End = End()
    rnr_retry: int = 0


@dataclass(frozen=True, repr=False)
class Program:
    """A program: its queue pairs, and its steps in order.

    After every step the run waits until everything that the step has started is over.
    """

    pairs: tuple[Pair, ...]
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        lines = ["Program(", "    pairs=("]
        lines += [f"        {pair!r}," for pair in self.pairs]
        lines += ["    ),", "    steps=("]
        lines += [f"        {step!r}," for step in self.steps]
        return "\n".join([*lines, "    ),", ")"])

    def end(self, qp: int) -> End:
        """What a queue pair was created with."""
        return self.pairs[qp // 2].b if qp % 2 else self.pairs[qp // 2].a

    def type_of(self, qp: int) -> str:
        """RC, UC or UD."""
        return self.pairs[qp // 2].type
