"""Running the checks, each on all of its QP types."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Literal

from ..._arguments import expect, time_limit
from ...enums import DeviceCap, QPType
from ...errors import RdmaError, UnsupportedError, VerbsError
from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.pd import PD
from ...resources.qp import QP
from ...resources.qp_create_arguments import NOT_PERMITTED
from .memory_windows import ROWS as MEMORY_WINDOWS
from .receives import ROWS as RECEIVES
from .registry import QP_TYPES, Result, Row, Trial, Unsupported
from .remote_memory import ROWS as REMOTE_MEMORY
from .segmentation import ROWS as SEGMENTATION
from .sends import ROWS as SENDS
from .tag_matching import ROWS as TAG_MATCHING

_NOT_THERE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_NOT_CREATED = _NOT_THERE | {errno.EINVAL, errno.EPROTONOSUPPORT}

ROWS: list[Row] = [*SENDS, *REMOTE_MEMORY, *MEMORY_WINDOWS, *SEGMENTATION, *RECEIVES, *TAG_MATCHING]
"""Every check, in the order in which they run."""


def run_checks(
    context: Context, *, port_num: int = 1, gid_index: int | None = None, timeout: float = 5.0
) -> Iterator[Result]:
    """Run every check, and yield each result as it comes.

    Args:
        context: an open device.
        port_num: the port, from 1.
        gid_index: the GID; default: chosen by choose_gid.
        timeout: seconds for each check.

    Returns:
        An iterator over the results, row by row.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the device has no such port, the port has no GID at gid_index, or timeout is
            not positive.
        ClosedError: the device is closed.
        VerbsError: the port cannot be queried.
    """
    expect("context", context, Context)
    timeout = time_limit(timeout)
    if gid_index is not None:
        gid_index = context.choose_gid(port_num, gid_index).gid_index
    # A separate generator, so that the checks above raise at once, not with the first result.
    return _results({t: Trial(context, t, port_num, gid_index, timeout) for t in QP_TYPES})


def _results(trials: dict[QPType, Trial]) -> Iterator[Result]:
    missing = {t: _attempt(_require_type, trials[t]) for t in QP_TYPES}
    for row in ROWS:
        for qp_type in row.qp_types:
            status, detail = missing[qp_type]
            if status == "pass":
                status, detail = _attempt(row.run, trials[qp_type])
            yield Result(row.opcode, qp_type.name, status, detail)


def _attempt(
    run: Callable[[Trial], str], trial: Trial
) -> tuple[Literal["pass", "fail", "unsupported"], str]:
    """Run one check; an error in it does not stop the others."""
    try:
        return "pass", run(trial)
    except Unsupported as why:
        return "unsupported", str(why)
    except UnsupportedError as error:
        return "unsupported", error.hint or str(error)
    except VerbsError as error:
        unsupported = error.errno in _NOT_THERE
        return "unsupported" if unsupported else "fail", str(error)
    except RdmaError as error:
        return "fail", str(error)
    except Exception as error:
        return "fail", f"{type(error).__name__}: {error}"


def _require_type(trial: Trial) -> str:
    """Raise Unsupported if the device has no queue pairs of this type."""
    name, qp_type = trial.context.name, trial.qp_type
    if qp_type is QPType.XRC_SEND and not trial.caps & DeviceCap.XRC:
        raise Unsupported(f"{name} has no XRC queue pairs")
    try:
        with PD(trial.context) as pd, CQ(trial.context, 2) as cq:
            QP(
                pd,
                qp_type,
                cq,
                max_send_wr=1,
                max_recv_wr=1,
                max_send_sge=1,
                max_recv_sge=1,
                port_num=trial.port_num,
            ).close()
    except VerbsError as error:
        code = error.errno or 0
        created = error.call in ("ibv_create_qp", "ibv_create_qp_ex")
        if created and qp_type is QPType.RAW_PACKET and code in NOT_PERMITTED:
            raise Unsupported(error.hint) from None
        if created and code in _NOT_CREATED:
            raise Unsupported(
                f"{name} has no {qp_type.name} queue pairs "
                f"({error.call}: {errno.errorcode.get(code, code)})"
            ) from None
        raise
    return f"{name} has {qp_type.name} queue pairs"
