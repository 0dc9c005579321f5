"""Adapting programs and their completions to a device that deviates from the soft one.

The functions are for the entries of deviations.py, which describe the deviations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rdmapost import Access

from .model import REGIONS, Post, R, Recv, Sge, Step, W
from .races import MTU, WRITES_LOCALLY, faulty, faulty_sges, split
from .transcript import Done

if TYPE_CHECKING:
    from .run import Run

_SENDS = ("SEND", "SEND_WITH_IMM", "SEND_WITH_INV")
_LOCAL_STATUSES = frozenset({"LOC_PROT_ERR", "LOC_QP_OP_ERR", "LOC_LEN_ERR", "MW_BIND_ERR"})
_NOT_ON = {
    "RC": frozenset[str](),
    "UC": frozenset({"RDMA_READ", "ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD"}),
    "UD": frozenset[str](),
}


def only(keep: Callable[[Run, int, W], bool]) -> Callable[[Run, Step], list[Step]]:
    """Return a ``fit`` that keeps only the work requests for which keep() is true."""

    def fit(run: Run, step: Step) -> list[Step]:
        if not isinstance(step, Post):
            return [step]
        wrs = tuple(wr for wr in step.wrs if keep(run, step.qp, wr))
        return [Post(step.qp, wrs)] if wrs else []

    return fit


# ---- failures of the sender's own ---------------------------------------------


def flush_local(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    if not isinstance(wr, W) or done.status not in _LOCAL_STATUSES:
        return done
    if wr.op in WRITES_LOCALLY and wr.op not in _NOT_ON[run.program.type_of(qp)]:
        # It fails only when the response arrives, and the device reports that failure.
        return done
    return replace(done, status="WR_FLUSH_ERR")


def split_risky(run: Run, step: Step) -> list[Step]:
    if not isinstance(step, Post):
        return [step]
    not_on = _NOT_ON[run.program.type_of(step.qp)]
    return split(
        step,
        {
            index
            for index, wr in enumerate(step.wrs)
            if wr.op in ("BIND_MW", "LOCAL_INV")
            or wr.op in not_on
            or (faulty_sges(wr) and wr.op not in WRITES_LOCALLY)
        },
    )


def _by_key(sge: Sge) -> bool:
    """Whether a buffer fails because of its key, and not because of its range."""
    return sge.region == "alien" or (bool(sge.key) and sge.key not in ("a", "b"))


def bad_key(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    if not isinstance(wr, W) or done.status != "LOC_PROT_ERR" or wr.op in WRITES_LOCALLY:
        return done
    first = next(sge for sge in wr.sges if faulty(sge))
    return replace(done, status="LOC_QP_OP_ERR") if _by_key(first) else done


def bad_invalidate(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    if isinstance(wr, W) and wr.op == "LOCAL_INV" and done.status == "MW_BIND_ERR":
        return replace(done, status="LOC_QP_OP_ERR")
    return done


def to_error(run: Run) -> None:
    for index, qp in enumerate(run.qps):
        if run.program.type_of(index) != "RC" and qp.state.name == "SQE":
            qp.to_err()


# ---- receives -------------------------------------------------------------------


def receive_fails(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    if isinstance(wr, R) and done.status in ("LOC_LEN_ERR", "LOC_PROT_ERR"):
        return replace(done, status="LOC_QP_OP_ERR")
    return done


def too_small(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    if isinstance(wr, W) and wr.op in _SENDS and done.status == "REM_INV_REQ_ERR":
        return replace(done, status="REM_OP_ERR")
    return done


def datagrams_that_fit(run: Run, step: Step) -> list[Step]:
    if not isinstance(step, Recv) or run.program.type_of(step.qp) != "UD":
        return [step]
    wrs = tuple(wr for wr in step.wrs if wr.size >= 40 + MTU)
    return [Recv(step.qp, wrs)] if wrs else []


def in_order(run: Run, qp: int, wr: W) -> bool:
    """Whether it makes no difference which the device checks first: receive or remote address."""
    at = wr.at
    if wr.op != "RDMA_WRITE_WITH_IMM" or at is None or not 0 < wr.size <= MTU:
        return True
    if run.program.type_of(qp) == "UC" and not run.program.end(qp ^ 1).srq:
        return True
    spec = REGIONS[at.region]
    own = at.key in ("", at.region) and spec.pd == 0
    return own and at.offset + wr.size <= spec.size and bool(spec.access & Access.REMOTE_WRITE)


def unfenced(run: Run, step: Step) -> list[Step]:
    if not isinstance(step, Post):
        return [step]
    wrs = (
        replace(wr, flags=tuple(flag for flag in wr.flags if flag != "FENCE"))
        if any(later.op in WRITES_LOCALLY for later in step.wrs[index:])
        else wr
        for index, wr in enumerate(step.wrs)
    )
    return [Post(step.qp, tuple(wrs))]


def no_inv_flag(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    return replace(done, invalidated="") if done.invalidated else done


def no_receives_in_error(run: Run, step: Step) -> list[Step]:
    if not isinstance(step, Recv):
        return [step]
    lost = not run.program.end(step.qp).srq and run.qps[step.qp].state.name == "ERR"
    return [] if lost else [step]


# ---- posting ----------------------------------------------------------------------


def not_yet(run: Run, step: Step) -> list[Step]:
    if not isinstance(step, Post):
        return [step]
    end = run.program.end(step.qp)
    return [step] if end.state == "RTS" or end.checked else []


def unaligned(run: Run, qp: int, wr: W) -> str | None:
    atomic = wr.op.startswith("ATOMIC")
    return "EINVAL" if atomic and wr.at is not None and wr.at.offset % 8 else None


def short_atomic(run: Run, qp: int, wr: W) -> str | None:
    return "EINVAL" if wr.op.startswith("ATOMIC") and wr.size < 8 else None


def length_of_room(run: Run, qp: int, wr: W | R, done: Done) -> Done:
    atomic = isinstance(wr, W) and wr.op.startswith("ATOMIC")
    return replace(done, byte_len=wr.size) if atomic and done.status == "SUCCESS" else done


def slots(run: Run, step: Step) -> list[Step]:
    if not isinstance(step, Post):
        return [step]
    silent = run.silent[step.qp]
    room = run.program.end(step.qp).depth - silent
    if not silent or len(step.wrs) <= room:
        return [step]
    return [Post(step.qp, step.wrs[:room])] if room else []


# ---- memory windows -----------------------------------------------------------------


def beyond_window(run: Run, qp: int, wr: W) -> bool:
    if wr.at is None or wr.at.key not in run.range_of or wr.op == "BIND_MW":
        return False
    start, length = run.range_of[wr.at.key]
    size = 8 if wr.op.startswith("ATOMIC") else wr.size
    return not start <= wr.at.offset <= wr.at.offset + size <= start + length


def invalidates_unbound(run: Run, step: Step) -> list[Step]:
    """Leave out work requests that would invalidate a window not bound on their queue pair."""
    if not isinstance(step, Post):
        return [step]
    bound = dict(run.bound)
    wrs = []
    for wr in step.wrs:
        if wr.op == "BIND_MW" and bound[wr.mw] is None:
            bound[wr.mw] = step.qp
        elif wr.op in ("LOCAL_INV", "SEND_WITH_INV") and wr.key in bound:
            if bound[wr.key] != (step.qp if wr.op == "LOCAL_INV" else step.qp ^ 1):
                continue
            bound[wr.key] = None
        wrs.append(wr)
    return [Post(step.qp, tuple(wrs))] if wrs else []
