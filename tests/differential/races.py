"""Keeping a step free of races: what two devices may rightly do differently is not compared.

A list of work requests goes to the device in one call, so its parts overlap in
time.  Where that leaves open what happens, by the specification, the list is cut
into several steps, each of which waits for the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .model import GRH, REGIONS, Post, Recv, Sge, Step, W

if TYPE_CHECKING:
    from .run import Run

__all__ = ["MTU", "WRITES_LOCALLY", "faulty", "faulty_sges", "header_of", "split", "without_races"]

MTU = 1024
"""No message is one packet on one device and two on the other: none has a smaller path MTU."""

WRITES_LOCALLY = frozenset({"RDMA_READ", "ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD"})
_TO_RECEIVES = frozenset({"SEND", "SEND_WITH_IMM", "SEND_WITH_INV"})
_WRITES = frozenset({"RDMA_WRITE", "RDMA_WRITE_WITH_IMM"})

_Range = tuple[str, int, int]


def faulty(sge: Sge, *, write: bool = False) -> bool:
    """Whether a device must refuse to use a local buffer."""
    spec = REGIONS[sge.region]
    if sge.key and sge.key != sge.region:
        # The key of some other region does not cover it either.
        return True
    if spec.pd != 0 or sge.offset + sge.length > spec.size:
        return True
    return write and sge.region == "const"


def faulty_sges(wr: W) -> bool:
    """Whether a send work request has a local buffer that cannot be used."""
    if "INLINE" in wr.flags:
        return False
    return any(faulty(sge, write=wr.op in WRITES_LOCALLY) for sge in wr.sges)


def header_of(sges: tuple[Sge, ...]) -> list[Sge]:
    """Return the parts of a receive's buffers that the header of a datagram goes to."""
    found: list[Sge] = []
    left = GRH
    for sge in sges:
        found.append(replace(sge, length=min(left, sge.length)))
        left -= found[-1].length
    return found


def split(step: Post, begins: set[int]) -> list[Step]:
    """Cut a list before each of these indexes."""
    pieces: list[Step] = []
    start = 0
    for end in [*sorted(begins - {0}), len(step.wrs)]:
        if end > start:
            pieces.append(Post(step.qp, step.wrs[start:end]))
        start = end
    return pieces


def without_races(run: Run, step: Step) -> list[Step]:
    """Return a step as steps that leave nothing open."""
    if isinstance(step, Recv):
        return [step] if step.wrs else []
    if not isinstance(step, Post):
        return [step]
    wrs = [wr for wr in (_tidy(run, step.qp, wr) for wr in step.wrs) if wr is not None]
    step = Post(step.qp, tuple(wrs))
    begins: set[int] = set()
    since = 0
    for index, wr in enumerate(wrs):
        earlier = wrs[since:index]
        if any(_races(run, step.qp, one, wr) for one in earlier):
            begins.add(index)
            since = index
    return split(step, begins)


def _tidy(run: Run, qp: int, wr: W) -> W | None:
    """Return a work request, or None for one that says nothing certain by itself."""
    if "INLINE" in wr.flags and any(
        sge.offset + sge.length > REGIONS[sge.region].size for sge in wr.sges
    ):
        # The copy is made in this process.
        return None
    if faulty_sges(wr) and wr.size > MTU:
        # Some packets of it may go out before the buffer is met that cannot be used.
        return None
    unreceived = wr.op == "RDMA_WRITE_WITH_IMM" and len(run.receives[qp ^ 1]) == 0
    if unreceived and wr.size > MTU and run.program.type_of(qp) == "UC":
        # All but the last packet of it may be written before the receive is missed.
        return None
    return wr


def _races(run: Run, qp: int, one: W, other: W) -> bool:
    """Whether it is open what happens when a work request follows another in a list."""
    if one.op in WRITES_LOCALLY and faulty_sges(one):
        # It fails when the answer comes back; what follows may have been carried out by then.
        return True
    if one.op == other.op == "BIND_MW" and one.mw == other.mw:
        # The window's struct must hold the key that the first one gives it.
        return True
    to_receives = one.op in _TO_RECEIVES and other.op in _TO_RECEIVES
    if to_receives and run.program.type_of(qp) == "UD" and _headers_overlap(run, qp):
        # The header is blanked when its completion is taken: before what comes next, or after.
        return True
    fenced = "FENCE" in other.flags and one.op in WRITES_LOCALLY
    if fenced and run.program.type_of(qp) == "RC":
        return False
    reads, writes = _touched(run, qp, one)
    other_reads, other_writes = _touched(run, qp, other)
    if _overlap(reads, other_writes):
        return True
    if _is_remote_write(one):
        # The peer carries out in order what comes to it; this side's own memory is another matter.
        return _overlap(writes, _ranges(other.sges))
    return _overlap(writes, other_reads) or _overlap(writes, other_writes)


def _is_remote_write(wr: W) -> bool:
    return wr.op in _WRITES or wr.op in _TO_RECEIVES


def _ranges(sges: Iterable[Sge]) -> list[_Range]:
    return [(sge.region, sge.offset, sge.length) for sge in sges]


def _touched(run: Run, qp: int, wr: W) -> tuple[list[_Range], list[_Range]]:
    """Return what memory a work request reads, and what it writes."""
    local = _ranges(wr.sges)
    if wr.op in _TO_RECEIVES:
        return local, _ranges(sge for _, receive in run.receives[qp ^ 1] for sge in receive.sges)
    if wr.at is None or wr.op == "BIND_MW":
        return [], []
    remote = [(wr.at.region, wr.at.offset, 8 if wr.op.startswith("ATOMIC") else wr.size)]
    if wr.op in _WRITES:
        return local, remote
    if wr.op == "RDMA_READ":
        return remote, local
    return remote, remote + local


def _headers_overlap(run: Run, qp: int) -> bool:
    """Return whether a datagram's header lies where another datagram goes."""
    receives = [receive.sges for _, receive in run.receives[qp ^ 1]]
    return any(
        _overlap(_ranges(header_of(sges)), _ranges(others))
        for sges in receives
        for others in receives
        if others is not sges
    )


def _overlap(ones: list[_Range], others: list[_Range]) -> bool:
    return any(
        region == other and start < other_start + other_length and other_start < start + length
        for region, start, length in ones
        for other, other_start, other_length in others
    )
