"""Explaining the lines in which programs report that a call failed.

Such a line is about the failed call, not about a state or an opcode that it also names.
"""

from __future__ import annotations

import re
from enum import Enum

from .cm_events import CM_EVENTS
from .exceptions import EXCEPTIONS
from .failures import FAILURES
from .findings import FINDINGS
from .model import Explanation


class Rank(Enum):
    """How a failed call ranks against the statuses and errnos in the same line."""

    FIRST = "it comes before them"
    WHOLE = "it replaces them, because they mislead"
    ALONE = "it is left out if there are any but ENOMEM, because they say more"


FAILED = re.compile(
    r"(?<![a-z])(?:fail(?:s|ed|ure|ing)?|error|unable|could(?:n'?t| not)|can(?:'?t|not| not))"
    r"(?![a-z])"
)
"""Words that report a failure, in lower case."""

_FAILED = FAILED.pattern
_STATE = r"(?:state\W+)?(?:ibv?_qps_)?"
_QP = r"(?<![a-z])qps?(?![a-z])"
_MOVES = re.compile(
    # "Failed to modify QP 0x11 to RTR", "ibv_modify_qp(RTS) failed", "modify QP state to RTR".
    r"(?<![a-z])(?:modify|modifying|change|changing|move|moving|transition|transitioning|set|bring)"
    rf"[_ ](?:\S+ )?{_QP}.{{0,40}}?(?:(?<![a-z])to\W+|->\W*|\(){_STATE}(init|rtr|rts)(?![a-z])|"
    # "QP RESET->INIT failed", "failed to move to RTS"; not "to post a send to RTS QP".
    rf"->\W*{_STATE}(init|rtr|rts)(?![a-z])|"
    rf"(?<![a-z])(?:move|transition|go|switch|get) (?:in)?to {_STATE}(rtr|rts)(?![a-z])|"
    # "RTR failed", "failed RTR": of the three names, only RTR and RTS have no other meaning.
    rf"(?<![a-z]){_STATE}(rtr|rts)(?: (?:transition|state change))?:? (?:{_FAILED})|"
    rf"(?:{_FAILED}):? {_STATE}(rtr|rts)\W*$"
)


def _verb(name: str) -> str:
    """Return a pattern for the failure of a verb.

    "ibv_reg_mr failed", "ibv_reg_mr(address=0x7f00, length=64) failed", "ibv_reg_mr: ENOMEM".
    """
    no_memory = r":? +(?:\[errno 12\] +)?(?:enomem|cannot allocate memory)(?![a-z])"
    return rf"\bibv_{name}\b(?:\([^()]*\))?(?:.{{0,12}}(?:{_FAILED})|{no_memory})"


_NAMED = {one.name: one for one in (*FINDINGS, *EXCEPTIONS, *CM_EVENTS, *FAILURES)}
_WORDS = rf"(?:{_FAILED})(?: to)? "
_ROWS: tuple[tuple[str, Rank, str], ...] = tuple(
    # A pattern for the line in lower case, and the name of its explanation.
    (pattern, rank, name)
    for rank, rows in {
        Rank.WHOLE: {r"couldn't load driver '|could not load driver '": "load_driver"},
        Rank.FIRST: {
            # ibv_*_pingpong: "poll CQ failed -1"; others: "ibv_poll_cq failed with error 22".
            rf"poll[_ ]?cq\b.{{0,12}}(?:{_FAILED})|{_WORDS}poll(?: the)? cq\b": "poll_cq",
            r"\blibibverbs: warning: rlimit_memlock\b": "reg_mr",
            # The errno in such a line is an earlier call's.
            r"^\s*(?:client|server) (?:read|write|read/write): ": "exchange",
            # rping, udaddy and their relatives
            rf"\brdma_resolve_addr(?:\(\))?(?:: | {_FAILED})": "ADDR_ERROR",
            rf"\brdma_resolve_route(?:\(\))?(?:: | {_FAILED})": "ROUTE_ERROR",
            r"librdmacm: (?:fatal: )?(?:couldn't|unable to) open (?:rdma device|rdma_cm)|"
            r"(?:unable to|couldn't) open /dev/infiniband/rdma_cm|\brdma_create_event_channel: |"
            r"librdmacm: (?:warning: |fatal: )?couldn't read abi version": "rdma_cm",
        },
        Rank.ALONE: {
            r"\bib device \S+ not found|librdmacm: fatal: no rdma devices found|"
            r"\bdid not detect devices\b": "NoDeviceError",
            # perftest, ibv_*_pingpong
            r"\bport number \d+ state is (?:down|init|armed)": "port-down",
            rf"{_WORDS}(?:get context for|open (?:the )?(?:rdma |ib |infiniband )?device)|"
            rf"{_verb('open_device')}": "open_device",
            rf"{_WORDS}(?:allocate|create|alloc) (?:a )?pd\b|"
            rf"{_verb('alloc_pd')}": "alloc_pd",
            rf"{_WORDS}(?:register|allocate|create|reg) (?:an? )?(?:mr|memory region)\b|"
            rf"{_verb('(?:exp_)?reg_(?:dmabuf_)?mr(?:_iova2?)?')}": "reg_mr",
            rf"{_WORDS}create (?:an? |the )?(?:send |receive |recv )?cqs?\b|\brxe_cq_chk_attr: cqe|"
            rf"{_verb('create_cq(?:_ex)?')}": "create_cq",
            rf"{_WORDS}create (?:an? |the )?(?:rc |uc |ud |xrc )?qps?\b|"
            rf"{_verb('create_qp(?:_ex)?')}|\brequested sq size might be too big|"
            r"\brxe_qp_chk_(?:cap|init): (?:invalid|missing)": "create_qp",
            rf"{_WORDS}(?:modify|modifying) (?:\S+ )?qp\b|"
            rf"\bibv_modify_qp\b.{{0,12}}(?:{_FAILED})": "modify_qp",
            rf"{_WORDS}(?:get|query) port (?:info|attr)|{_WORDS}query port\b|"
            rf"\bibv_query_port\b.{{0,12}}(?:{_FAILED})": "query_port",
            rf"{_WORDS}(?:read|query|get) (?:the )?s?gid\b|"
            rf"\bibv_query_gid\b.{{0,12}}(?:{_FAILED})": "query_gid",
            rf"{_WORDS}get local lid\b": "get_lid",
            rf"{_WORDS}create (?:an? )?ah\b|{_verb('create_ah')}": "create_ah",
            rf"{_WORDS}post (?:a )?(?:recv|receive)|"
            rf"\bibv_post_recv\b.{{0,12}}(?:{_FAILED})": "post_recv",
            rf"{_WORDS}post (?:an? )?(?:send|(?:ibv_wr_)?rdma[_ ](?:read|write))|"
            rf"\bibv_post_send\b.{{0,12}}(?:{_FAILED})": "post_send",
            rf"{_WORDS}request cq notification": "req_notify_cq",
            rf"{_WORDS}connect to \S+:\d+|{_WORDS}listen to port \d|"
            rf"{_WORDS}(?:read|write|read/write) (?:remote|local) address|"
            rf"{_WORDS}exchange data between server and client|"
            rf"{_WORDS}init the socket connection": "exchange",
            # rping and its relatives
            r"\bwait(?:ing)? for connected state \d|"
            r"\bconnect error -1\b|\bfail(?:ing|ure) connect": "rdma_connect",
            r"\bwaiting for addr/route resolution state": "ADDR_ERROR",
            r"\bdisconnect event\.\.\.": "DISCONNECTED",
        },
    }.items()
    for pattern, name in rows.items()
)
_ROW = re.compile("|".join(f"(?P<r{at}>{pattern})" for at, (pattern, _, _) in enumerate(_ROWS)))
_HINTS = (
    "fail",
    "error",
    "unable",
    "could",
    "can't",
    "cannot",
    "can not",
    "not found",
    "state is",
    "wait",
    "event",
    "rdma",
    "rxe_",
    "requested sq",
    "enomem",
    "rlimit_memlock",
    "did not",
    "client ",
    "server ",
)
"""Every line that _ROW or _MOVES matches contains one of these."""


def is_failure(text: str) -> bool:
    """Tell whether text says that something failed."""
    return FAILED.search(text.lower()) is not None


def failed_call(line: str) -> tuple[Explanation, Rank] | None:
    """Explain the failed call that a line in lower case names."""
    if not any(hint in line for hint in _HINTS):
        return None
    if (move := _MOVES.search(line)) and FAILED.search(line):
        state = next(filter(None, move.groups()))
        return _NAMED[f"modify_qp_to_{state}"], Rank.FIRST
    if (row := _ROW.search(line)) is None:
        return None
    _, rank, name = _ROWS[int((row.lastgroup or "r0")[1:])]
    return _NAMED[name], rank
