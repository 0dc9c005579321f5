"""Explaining the lines in which programs report that a call failed.

Such a line is about the failed call, not about a state or an opcode that it also names.
"""

from __future__ import annotations

import re
from enum import Enum

from .cm_events import CM_EVENTS
from .exceptions import EXCEPTIONS
from .failed_verbs import FAILURES, SAME_CALL
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


_NAMED = {one.name: one for one in (*FINDINGS, *EXCEPTIONS, *CM_EVENTS, *FAILURES)}
_VERBS = {
    one.constant.removeprefix("ibv_"): one for one in FAILURES if one.constant.startswith("ibv_")
}
_VERBS |= {verb: _NAMED[name] for verb, name in SAME_CALL.items()}
_VERB = (
    # "ibv_reg_mr failed", "ibv_reg_mr(address=0x7f00, length=64) failed", "ibv_reg_mr: ENOMEM", and
    # this library's "... needs LOCAL_WRITE too (ibv_reg_mr(3))".
    rf"\bibv_(?P<verb>{'|'.join(sorted(_VERBS))})\b"
    rf"(?:\(3\)\)|(?:\([^()]*\))?(?:.{{0,12}}(?:{_FAILED})|"
    r":? +(?:\[errno 12\] +)?(?:enomem|cannot allocate memory)(?![a-z])))"
)
_A = r"(?:an? |the )?"
_MR = rf"{_A}(?:mr|memory region)\b"
_MW = rf"{_A}(?:mws?|memory window)\b"
_SIDE = r"(?:send |receive |recv |ini |tgt )?"
_CQ = rf"{_A}{_SIDE}cqs?\b"
_SRQ = rf"{_A}(?:xrc )?(?:srqs?|shared receive queue)\b"
_XRCD = rf"{_A}(?:xrc domain|xrcd)\b"
_CHANNEL = rf"{_A}(?:completion channel|comp_channel)\b"
_GROUP = rf"{_A}(?:multicast|mcast|mcg)"
_FAILED_TO: dict[Rank, dict[str, str]] = {
    # The text after "Failed to", "Couldn't" and the like, and the name of its explanation.
    Rank.FIRST: {
        r"poll(?:ing)?(?: the)? cq\b": "poll_cq",
        # ibv_xsrq_pingpong: "Couldn't Open the XRC Domain 95".
        rf"open {_XRCD}": "open_xrcd",
    },
    Rank.ALONE: {
        r"get (?:the )?(?:ib |rdma )?devices? list": "get_device_list",
        r"get context for|open (?:the )?(?:rdma |ib |infiniband )?device": "open_device",
        r"release context|close (?:the )?device": "close_device",
        r"query (?:the )?device\b|get device attributes": "query_device_ex",
        r"(?:get|query) port (?:info|attr)|query port\b": "query_port",
        r"(?:read|query|get) (?:the )?s?gid\b": "query_gid",
        r"(?:read|query|get) (?:the )?pkey\b": "query_pkey",
        r"get local lid\b": "get_lid",
        rf"get {_A}async[_ ]event": "get_async_event",
        rf"(?:allocate|create|alloc) {_A}pd\b": "alloc_pd",
        rf"(?:deallocate|dealloc|destroy) {_A}pd\b": "dealloc_pd",
        rf"(?:register|allocate|create|reg) {_MR}": "reg_mr",
        rf"(?:reregister|re-register|rereg) {_MR}": "rereg_mr",
        rf"(?:deregister|dereg) {_MR}": "dereg_mr",
        rf"prefetch {_MR}": "advise_mr",
        rf"(?:allocate|create|alloc) {_MW}": "alloc_mw",
        rf"bind {_MW}": "bind_mw",
        rf"(?:deallocate|dealloc|destroy) {_MW}": "dealloc_mw",
        rf"(?:create|allocate) {_CHANNEL}": "create_comp_channel",
        rf"get {_A}(?:cq[_ ]event|completion event)": "get_cq_event",
        rf"destroy {_CHANNEL}": "destroy_comp_channel",
        rf"create {_CQ}": "create_cq",
        rf"resize {_CQ}": "resize_cq",
        r"request cq notification": "req_notify_cq",
        rf"destroy {_CQ}": "destroy_cq",
        rf"create {_SRQ}": "create_srq",
        rf"(?:modify|resize|arm) {_SRQ}": "modify_srq",
        rf"query {_SRQ}": "query_srq",
        rf"get {_A}srq num": "get_srq_num",
        rf"destroy {_SRQ}": "destroy_srq",
        rf"close {_XRCD}": "close_xrcd",
        rf"create {_A}(?:rc |uc |ud |xrc )?{_SIDE}qps?\b": "create_qp",
        # ibv_*_pingpong and perftest print the last two after a failed move to RTR or RTS.
        r"(?:modify|modifying) (?:\S+ )?qp\b|connect to remote qp\b|"
        r"connect the hca's\b": "modify_qp",
        rf"query {_A}qp\b": "query_qp",
        rf"destroy {_A}{_SIDE}qps?\b": "destroy_qp",
        rf"attach (?:\S+ )?(?:qps? )?to {_GROUP}": "attach_mcast",
        rf"detach (?:\S+ )?(?:qps? )?from {_GROUP}": "detach_mcast",
        rf"create {_A}ah\b": "create_ah",
        rf"destroy {_A}ah\b": "destroy_ah",
        r"post (?:a )?(?:recv|receive)": "post_recv",
        r"post (?:an? )?(?:send|(?:ibv_wr_)?rdma[_ ](?:read|write))": "post_send",
        r"connect to \S+:\d+|listen to port \d|"
        r"(?:read|write|read/write|send|send/recv) (?:remote|local) address|"
        r"(?:read remote|send) termination ack|"
        r"exchange data between server and client|init the socket connection|"
        r"open file descriptor for socket connection": "exchange",
    },
}
_OTHER_LINES: dict[Rank, dict[str, str]] = {
    # A pattern for the line in lower case, and the name of its explanation.
    Rank.WHOLE: {
        # The dynamic loader's reason may name an errno.
        r"couldn't load driver '|could not load driver '": "load_driver",
        r"\blibibverbs cannot be loaded\b": "NoRdmaError",
    },
    Rank.FIRST: {
        # ibv_*_pingpong: "poll CQ failed -1"; others: "ibv_poll_cq failed with error 22".
        rf"poll[_ ]?cq\b.{{0,12}}(?:{_FAILED})": "poll_cq",
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
        _VERB: "",
        r"\bthere is no rdma device \S+: |"
        r"\bib device \S+ (?:wasn't|not) found|librdmacm: fatal: no rdma devices found|"
        r"\bdid not detect devices\b": "NoDeviceError",
        # perftest, ibv_*_pingpong
        r"\bport number \d+ state is (?:down|init|armed)": "port-down",
        r"\bparse wc failed\b": "parse_wc",
        r"\bcompletion with error at (?:client|server)\b": "completion",
        r"^\s*accept\(\) failed(?: for client \d+)?\s*$": "exchange",
        r"\brxe_cq_chk_attr: cqe": "create_cq",
        r"\brequested sq size might be too big|"
        r"\brxe_qp_chk_(?:cap|init): (?:invalid|missing)": "create_qp",
        # rping and its relatives
        r"\bwait(?:ing)? for connected state \d|"
        r"\bconnect error -1\b|\bfail(?:ing|ure) connect": "rdma_connect",
        r"\bwaiting for addr/route resolution state": "ADDR_ERROR",
        r"\bdisconnect event\.\.\.": "DISCONNECTED",
    },
}


def _rows(of: dict[Rank, dict[str, str]], letter: str) -> dict[str, tuple[str, Rank, str]]:
    """Return a table's rows (pattern, rank, name), each under the name of its group in a regex."""
    flat = [(pattern, rank, name) for rank, rows in of.items() for pattern, name in rows.items()]
    return {f"{letter}{at}": row for at, row in enumerate(flat)}


def _any_of(rows: dict[str, tuple[str, Rank, str]]) -> str:
    return "|".join(f"(?P<{group}>{pattern})" for group, (pattern, _, _) in rows.items())


_FAILED_TO_ROWS, _OTHER_ROWS = _rows(_FAILED_TO, "f"), _rows(_OTHER_LINES, "o")
_ROWS = _FAILED_TO_ROWS | _OTHER_ROWS
_ROW = re.compile(rf"{_any_of(_OTHER_ROWS)}|(?:{_FAILED})(?: to)? (?:{_any_of(_FAILED_TO_ROWS)})")
_HINTS = (
    "fail",
    "error",
    "unable",
    "could",
    "can't",
    "cannot",
    "can not",
    "not found",
    "wasn't found",
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
    """Explain the failed call that a line names; the line must be in lower case."""
    if not any(hint in line for hint in _HINTS):
        return None
    if (move := _MOVES.search(line)) and FAILED.search(line):
        state = next(filter(None, move.groups()))
        return _NAMED[f"modify_qp_to_{state}"], Rank.FIRST
    if (row := _ROW.search(line)) is None:
        return None
    _, rank, name = _ROWS[row.lastgroup or ""]
    return _NAMED[name] if name else _VERBS[row["verb"]], rank
