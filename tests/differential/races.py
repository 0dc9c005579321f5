"""Keeping steps free of races, so that only results which the specification fixes are compared.

A list of work requests goes to the device in one call, so they may overlap in
time.  Where the specification does not define the result, the list is cut into
several steps, each of which waits for the one before.
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
"""No device has a smaller path MTU, so a message of this size is one packet on both devices."""

WRITES_LOCALLY = frozenset({"RDMA_READ", "ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD"})
_TO_RECEIVES = frozenset({"SEND", "SEND_WITH_IMM", "SEND_WITH_INV"})
_WRITES = frozenset({"RDMA_WRITE", "RDMA_WRITE_WITH_IMM"})

_Range = tuple[str, int, int]


def faulty(sge: Sge, *, write: bool = False) -> bool:
    """Whether a device must refuse to use a local buffer."""
    spec = REGIONS[sge.region]
    if sge.key and sge.key != sge.region:
        # Another region's key does not cover this one, either.
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
    """Return the parts of a receive's buffers into which the header of a datagram goes."""
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
    """Cut a step into steps whose results are all defined."""
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
    """Return a work request, or None if its own result is undefined."""
    if "INLINE" in wr.flags and any(
        sge.offset + sge.length > REGIONS[sge.region].size for sge in wr.sges
    ):
        # This process copies inline data itself, and would read beyond the region.
        return None
    if faulty_sges(wr) and wr.size > MTU:
        # Some packets may go out before the device reaches the faulty buffer.
        return None
    unreceived = wr.op == "RDMA_WRITE_WITH_IMM" and len(run.receives[qp ^ 1]) == 0
    if unreceived and wr.size > MTU and run.program.type_of(qp) == "UC":
        # All packets but the last may be written before the device finds that it has no receive.
        return None
    return wr


def _races(run: Run, qp: int, one: W, other: W) -> bool:
    """Whether the result is undefined if `other` follows `one` in a list."""
    if one.op in WRITES_LOCALLY and faulty_sges(one):
        # It fails when the response arrives; later work requests may have been executed by then.
        return True
    if one.op == other.op == "BIND_MW" and one.mw == other.mw:
        # The second bind needs the key that the first one puts into the window's struct.
        return True
    to_receives = one.op in _TO_RECEIVES and other.op in _TO_RECEIVES
    if to_receives and run.program.type_of(qp) == "UD" and _headers_overlap(run, qp):
        # run.py blanks the header when it polls the completion: before or after the next datagram.
        return True
    fenced = "FENCE" in other.flags and one.op in WRITES_LOCALLY
    if fenced and run.program.type_of(qp) == "RC":
        return False
    reads, writes = _touched(run, qp, one)
    other_reads, other_writes = _touched(run, qp, other)
    if _overlap(reads, other_writes):
        return True
    if _is_remote_write(one):
        # The peer executes requests in order, but the device uses `other`'s buffers at any time.
        return _overlap(writes, _ranges(other.sges))
    return _overlap(writes, other_reads) or _overlap(writes, other_writes)


def _is_remote_write(wr: W) -> bool:
    return wr.op in _WRITES or wr.op in _TO_RECEIVES


def _ranges(sges: Iterable[Sge]) -> list[_Range]:
    return [(sge.region, sge.offset, sge.length) for sge in sges]


def _touched(run: Run, qp: int, wr: W) -> tuple[list[_Range], list[_Range]]:
    """Return the memory that a work request reads, and the memory that it writes."""
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
    """Return whether the header of one datagram overlaps the buffers of another."""
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
