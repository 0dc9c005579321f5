"""Finding statuses, errnos and events in the messages of other programs, and in whole logs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ...enums import EventType, PortState, WCStatus
from .cm_events import CM_EVENTS, HARMLESS
from .errnos import ERRNOS, undocumented
from .event_types import EVENTS
from .exceptions import EXCEPTIONS
from .failure_lines import Rank, failed_call
from .findings import FINDINGS
from .link_states import PORT_STATES
from .lookup import PHRASES, of_member
from .model import UNNUMBERED, Explanation
from .statuses import STATUSES
from .terms import AETH_SYNDROME, VENDOR_ERR, VENDOR_ERR_NUMBER, aeth_syndrome

_LONGEST_LINE = 4096

_OTHER_PHRASES: dict[str, WCStatus | EventType | str] = {
    # The kernel (ib_wc_status_msg, ib_event_msg), where its wording differs from libibverbs'.
    "WR flushed": WCStatus.WR_FLUSH_ERR,
    "invalid request error": WCStatus.REM_INV_REQ_ERR,
    "QP fatal error": EventType.QP_FATAL,
    "QP request error": EventType.QP_REQ_ERR,
    "QP access error": EventType.QP_ACCESS_ERR,
    "path migration successful": EventType.PATH_MIG,
    "path migration error": EventType.PATH_MIG_ERR,
    "device fatal error": EventType.DEVICE_FATAL,
    "SRQ error": EventType.SRQ_ERR,
    "client reregister": EventType.CLIENT_REREGISTER,
    "GID changed": EventType.GID_CHANGE,
    # UCX
    "transport retry count exceeded": WCStatus.RETRY_EXC_ERR,
    "receive-no-ready retry count exceeded": WCStatus.RNR_RETRY_EXC_ERR,
    "local QP operation": WCStatus.LOC_QP_OP_ERR,
    "local protection": WCStatus.LOC_PROT_ERR,
    "memory window bind": WCStatus.MW_BIND_ERR,
    "remote OP on": WCStatus.REM_OP_ERR,
    "remote QP on": WCStatus.REM_OP_ERR,
    "bad response on": WCStatus.BAD_RESP_ERR,
    "local access on": WCStatus.LOC_ACCESS_ERR,
    "remote access on": WCStatus.REM_ACCESS_ERR,
    "invalid request on": WCStatus.REM_INV_REQ_ERR,
    "local length on": WCStatus.LOC_LEN_ERR,
    "WR flushed because QP in error state": WCStatus.WR_FLUSH_ERR,
    "destination is unreachable": "ENETUNREACH",
    # Open MPI
    "the InfiniBand retry count between two MPI processes has been exceeded": (
        WCStatus.RETRY_EXC_ERR
    ),
    # rdmapost
    "no RDMA device: using soft0": "NoDeviceError",
    # perftest, ibv_rc_pingpong
    "No IB devices found": "NoDeviceError",
    "unable to find the Infiniband/RoCE device": "NoDeviceError",
    # NCCL
    "NET/IB : No device found": "NoDeviceError",
    # ibv_*_pingpong
    "Couldn't allocate work buf": "ENOMEM",
    # libibverbs
    "libibverbs: Warning: RLIMIT_MEMLOCK": "ENOMEM",
    "no userspace device-specific driver found": "NoDeviceError",
    "couldn't read uverbs ABI version": "NoDeviceError",
    # libmlx5, the kernel's mlx5
    "dump error cqe": "vendor_err",
    "got completion with error": "vendor_err",
    "CQ error on CQN": EventType.CQ_ERR,
    "device's health compromised": EventType.DEVICE_FATAL,
    "will cause a leak of a command resource": "ETIMEDOUT",
}

_COMPLETION = re.compile(
    r"\b(completion|wr_id|wc|cqe?)\b|\b(send|recv) .*\bstatus\b", re.IGNORECASE
)
_OTHER_STATUS = re.compile(r"\b(exit\w*|https?|link|child|signal)\b", re.IGNORECASE)
"""Words before a status that is not RDMA's: a process's, a link's, a web server's."""
_EVENT = re.compile(r"\b(async\w*|events?)\b", re.IGNORECASE)
_VAGUE = {
    **dict.fromkeys(
        ("fatal error", "general error", "aborted error", "tm error", "invalid request error"),
        _COMPLETION,
    ),
    **dict.fromkeys(
        ("cq error", "port active", "port error", "path migrated", "lid change", "sm change"),
        _EVENT,
    ),
}
"""Phrases too common to explain alone, each with a pattern that the line must match too."""

_STATUS_NUMBER = re.compile(
    # "Failed status 12:", "status=0xc", "status number 12";
    # libfabric's "prov_errno 5" and "prov_err: 5".
    r"\b(?:wc[_ ])?status(?: number| code)?(?:\s*[=:]\s*|\s+)\(?"
    r"(0x[\da-f]{1,2}|\d{1,2})\b(?![.:]\d)|"
    r"\bprov_err(?:no)?[ =:]+(\d{1,2})\b|"
    # "Completion with error 12: wr_id 0", NCCL's "completion from peer 10.0.0.2<4791> with error
    # 12", but not "completion with error: ... (err 125".
    r"\bcompletion (?:from peer \S+ )?with error:?\s+\(?(\d{1,2})\b|"
    # ibv_xsrq_pingpong's "Work completion error 12"
    r"\b(?:wc|work completion) error:?\s+(\d{1,2})\b",
    re.IGNORECASE,
)
_ERRNO_NUMBER = re.compile(
    # "[Errno 12]", "errno=12", "errno: 12"; "error -12", "ret=-22", "failed (-110)", rpcrdma's
    # "closed (-103)", but not -1; "ibv_post_send failed: 12", because these verbs return errnos.
    r"(?<![a-z_])errno[ =:]*-?(\d{1,3})\b|"
    r"\b(?:err(?:or)?|ret|rc|res|returned|failed|closed)(?: code)?[ =:]*\(?-(?!1\b)(\d{1,3})\b|"
    # But not "ibv_modify_qp: QP 22 to RTS" or this library's "ibv_post_send: work request 2 of 3".
    r"\bibv_(?:post|modify|query|destroy|dealloc|dereg|req)_\w+(?:"
    r"[^0-9-]{0,20}?\b(?:failed|returned|error|ret|rc)\b(?:[ :=(]|with|code|error)*"
    r"(\d{1,3})\b(?![.:]\d)|"
    r"[ :=()]*[:=] ?(\d{1,3})(?=[,;.)]|$))|"
    # perftest's "Failed to modify QP to INIT, ret=22"; IPoIB's "failed to modify QP to RTR: -110".
    r"\bmodify QP\b.*\bret ?= ?(\d{1,3})\b|"
    r"\bmodify QP\b.* to (?:init|rtr|rts)\b[ :,(]*-?(\d{1,3})\b(?![.:]\d)|"
    # ibv_xsrq_pingpong's "Couldn't Open the XRC Domain 95".
    r"\bopen the XRC domain (\d{1,3})\b",
    re.IGNORECASE,
)
_PORT_STATE = re.compile(
    # ibv_devinfo's "state: PORT_DOWN (1)"; iproute2's "link rxe0/1 state DOWN".
    r"\bstate:\s*PORT_([A-Z_]+)|^\s*link \S+/\d+ state ([A-Z_]+)\b"
)
_FINDING = re.compile(
    # 'rdmapost doctor': "PROBLEM  port-down (rxe0 port 1)". Many names are common words.
    r"^\s*(?:"
    r"(?:PROBLEM|warning|info|ok) {2,}([a-z][a-z0-9-]*) \(|"
    r"([a-z][a-z0-9-]*) \((?:machine|\S+ port \d+|.* QP 0x[0-9a-f]+ on \S+)\)$"
    r")"
)
_PASSED = re.compile(r"\s*ok(?: {2,}\S|: [a-z][a-z0-9-]*: )")
"""A finding that is "ok", or a list of them: as 'rdmapost doctor' prints it, or str(finding)."""
_EVIDENCE = " " * 9
"""The indent of the lines that belong to such a finding in the report of 'rdmapost doctor'."""
_HYPHENATED = re.compile(
    # Not in a list of checks that pass, and not an option or part of a longer word.
    r"(?<![\w/.=-])(?<!, )[a-z]+(?:-[a-z0-9]+)+(?![\w/=,-])"
)
_STATUS_HINTS = ("status", "prov_err", "completion", "wc err")
_ERRNO_HINTS = ("errno", "ibv_", "modify qp", "xrc domain")
_VENDOR_HINTS = ("vendor", "syndrom")
"""Each pattern can match only in a line that, in lower case, contains one of its hints. For the
number of an errno, _NEGATIVE may match instead; it does not match the hyphens of a date."""
_NEGATIVE = re.compile(r"(?<!\d)-\d")


@dataclass(frozen=True, slots=True)
class Mention:
    """A status, errno, event, failed call or finding that lines of text mention.

    Attributes:
        explanation: what it means.
        line: the first of these lines.
        number: the number of that line, from 1.
        count: how many lines mention it.
    """

    explanation: Explanation
    line: str
    number: int
    count: int


def _phrases() -> dict[str, Explanation]:
    """Return the explanation of each phrase; the phrases are in lower case."""
    found = {os.strerror(one.number): one for one in ERRNOS}
    by_name = {one.name: one for one in (*ERRNOS, *EXCEPTIONS, VENDOR_ERR)}
    for phrase, meant in (PHRASES | _OTHER_PHRASES).items():
        (found[phrase],) = [by_name[meant]] if isinstance(meant, str) else of_member(meant)
    return {phrase.lower(): one for phrase, one in found.items()}


def _names() -> dict[str, Explanation]:
    """Return the explanation of each name, in its Python and its C spelling."""
    found: dict[str, Explanation] = {}
    for one in (*EVENTS, *STATUSES, *ERRNOS, *EXCEPTIONS):
        # QP_FATAL and IBV_EVENT_QP_FATAL, for example.
        found |= {one.name: one, one.constant: one}
    # REJECTED alone may be anything.
    return found | {one.constant: one for one in CM_EVENTS}


def _any_of(phrases: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the lower-case phrases, but not inside a longer word.

    Each alternative begins with a literal character, so a search skips all other positions.
    """
    of: dict[str, list[str]] = {}
    # Longest first, so that "local access error" is not matched as "local access".
    for phrase in sorted(phrases, key=len, reverse=True):
        of.setdefault(phrase[0], []).append(re.escape(phrase[1:]))
    return re.compile(
        "|".join(
            rf"{first}(?<![a-z]{first})(?:{'|'.join(rest)})(?![a-z])" for first, rest in of.items()
        )
    )


_BY_PHRASE = _phrases()
_BY_NAME = _names()
_BY_FINDING = {one.name: one for one in FINDINGS}
_BY_PORT_STATE = {one.name: one for one in PORT_STATES}
_STATUS = {one.number: one for one in STATUSES}
_ERRNO = {one.number: one for one in ERRNOS}
_OURS = {one.name for one in EXCEPTIONS if one.constant == f"rdmapost.{one.name}"}
_OURS |= {"PingpongError"}
"""Exceptions that no other library has; others count only with their module."""
_WORDS = _any_of(_BY_PHRASE)
_NAME = re.compile(r"(?<![A-Za-z0-9_])(?:[A-Z][A-Z0-9_]{3,}|(?:[A-Z][a-z]+){2,})(?![A-Za-z0-9_])")
_CONNECT_TEXT = (
    r"(?:\S+:\d+ (?:refused|closed the connection|cannot be reached|did not answer)|"
    # Without the port, only texts that other libraries do not have.
    r"\S+ (?:refused(?:: | the connection: start )|cannot be reached: |"
    r"(?:accepted the connection but )?did not (?:answer within|accept a request within) |"
    r"closed the connection.* and did not answer)|"
    r"host \S+ cannot be (?:found|looked up): |host \S+: the name service did not answer|"
    r"other threads' requests to |"
    r"the (?:connection is closed|connection was closed|server is shutting down|server has not))"
)
_CONNECT_ERROR = re.compile(rf"(?<!\.)(?:ConnectError|ConnectTimeout): {_CONNECT_TEXT}")
"""ConnectError and ConnectTimeout without their module, followed by this library's text: httpx has
exceptions of the same names."""
_COMMAND_ERROR = re.compile(
    rf"^\s*rdmapost: {_CONNECT_TEXT}|"
    # What the server says of it, and the message alone.
    r"(?:\brefused \S+:\d+|^\s*(?:\S+ )?refused): "
    r"(?:wrong token|the server requires a token|this server gets too many wrong tokens)\b"
)
"""The same text, as the command prints it: without the exception's name."""
_TOO_LATE = re.compile(r"(?<! and)(?: did not (?:answer|accept)| took more than) ")
"""What in that text distinguishes ConnectTimeout from ConnectError."""
_TOO_FEW = re.compile(r"\b\d+ of \d+ completions? came within ")
"""The message of WaitTimeout."""


def explain_lines(lines: Iterable[str]) -> tuple[Mention, ...]:
    """Explain the statuses, errnos, events, failed calls and findings that lines of text name.

    It reads what programs print when a work request or a verb fails: ibv_rc_pingpong, perftest,
    NCCL, UCX, Open MPI, libfabric, the kernel, Python, and this library; and the report of
    ``rdmapost doctor``.

    Args:
        lines: lines of text, such as a log's.

    Returns:
        the names in the lines, in order of first appearance. WR_FLUSH_ERR, the RDMA CM's
        DISCONNECTED and perftest's "Completion with error at client" come last, because another
        error causes them; SUCCESS, events that every connection has (ESTABLISHED) and what findings
        that are "ok" say are left out unless the lines name nothing else.
    """
    failed: dict[tuple[str, str], Mention] = {}
    harmless: dict[tuple[str, str], Mention] = {}
    passed = False
    for number, line in enumerate(lines, 1):
        passed = bool(_PASSED.match(line)) or (passed and line.startswith(_EVIDENCE))
        for one in _in_line(line[:_LONGEST_LINE]):
            found = harmless if passed or _is_harmless(one) else failed
            key = one.kind, one.name
            first = found.get(key) or Mention(one, line.strip(), number, 0)
            found[key] = replace(first, count=first.count + 1)
    return tuple(sorted((failed or harmless).values(), key=_follows))


def _is_harmless(one: Explanation) -> bool:
    harmless = (("status", WCStatus.SUCCESS), ("port_state", PortState.ACTIVE))
    return (one.kind, one.number) in harmless or (one.kind == "cm_event" and one.name in HARMLESS)


def _follows(mention: Mention) -> bool:
    """Whether another error, or the end of a run, has caused the one mentioned."""
    one = mention.explanation
    return (one.kind, one.number) == ("status", WCStatus.WR_FLUSH_ERR) or (
        (one.kind, one.name) in (("cm_event", "DISCONNECTED"), ("failure", "completion"))
    )


# A program that fails prints the same line again and again.
@lru_cache(maxsize=1024)
def _in_line(line: str) -> tuple[Explanation, ...]:
    """Explain the names in a line, each once, in the order of their first occurrence."""
    port = _PORT_STATE.search(line) if "state" in line else None
    if port and (state := _BY_PORT_STATE.get(port[1] or port[2])):
        # PORT_ACTIVE alone is an event.
        return (state,)
    if (named := _FINDING.match(line)) and (finding := _BY_FINDING.get(named[1] or named[2])):
        return (finding,)
    lower = line.lower()
    if len(lower) != len(line):
        # A non-ASCII letter has become two: convert only ASCII ones, so that offsets stay the same.
        lower = "".join(letter.lower() if letter.isascii() else letter for letter in line)
    at: list[tuple[int, Explanation]] = []
    for match in _NAME.finditer(line):
        one = _BY_NAME.get(match[0]) or _other_errno(match[0])
        if one and (
            one.kind != "exception"
            or match[0] in _OURS
            or one.constant in line
            or _CONNECT_ERROR.match(line, match.start())
        ):
            at.append((match.start(), one))
    for match in _WORDS.finditer(lower):
        phrase = match[0]
        if phrase not in _VAGUE or _VAGUE[phrase].search(line):
            at.append((match.start(), _BY_PHRASE[phrase]))
    patterns = []
    if any(hint in lower for hint in _STATUS_HINTS):
        patterns.append((_STATUS_NUMBER, _STATUS))
    if any(hint in lower for hint in _ERRNO_HINTS) or _NEGATIVE.search(line):
        patterns.append((_ERRNO_NUMBER, _ERRNO))
    for pattern, numbers in patterns:
        for match in pattern.finditer(line):
            if numbers is _STATUS and _OTHER_STATUS.search(line, 0, match.start()):
                continue
            text = next(filter(None, match.groups()))
            if one := numbers.get(int(text, 16 if text[:2].lower() == "0x" else 10)):
                at.append((match.start(), one))
    if "completion" in lower and (timeout := _TOO_FEW.search(line)):
        at.append((timeout.start(), _BY_NAME["WaitTimeout"]))
    if ("rdmapost" in lower or "refused" in lower) and (lost := _COMMAND_ERROR.search(line)):
        late = _TOO_LATE.search(line, lost.start())
        at.append((lost.start(), _BY_NAME["ConnectTimeout" if late else "ConnectError"]))
    failed = None
    if call := failed_call(lower):
        failed, rank = call
        if rank is Rank.WHOLE:
            return (failed,)
        says = {one.name for _, one in at if one.kind not in UNNUMBERED}
        if at and rank is Rank.ALONE and says != {"ENOMEM"}:
            failed = None
    elif not at and any(hint in lower for hint in _VENDOR_HINTS):
        if packet := AETH_SYNDROME.search(line):
            return (aeth_syndrome(int(packet[1], 16)),)
        at += [(vendor.start(), VENDOR_ERR) for vendor in VENDOR_ERR_NUMBER.finditer(line)]
    if not at and failed is None and "-" in lower:
        words = _HYPHENATED.finditer(lower)
        at = [(word.start(), _BY_FINDING[word[0]]) for word in words if word[0] in _BY_FINDING]
    found = {(one.kind, one.name): one for _, one in sorted(at, key=_place)}.values()
    # The status or errno in an exception's text says more than the exception's name; a status says
    # more than its vendor_err.
    said = tuple(one for one in found if one.kind not in UNNUMBERED) or tuple(found)
    return said if failed is None else (failed, *(one for one in said if one != failed))


def _place(found: tuple[int, Explanation]) -> tuple[bool, int]:
    """Return a sort key that puts statuses and RDMA CM events before errnos, which say less.

    For example, in libfabric's "err: 5 (Input/output error), prov_err: 12", the status is 12.
    """
    at, one = found
    return one.kind not in ("status", "cm_event"), at


def _other_errno(name: str) -> Explanation | None:
    """Explain an errno by its second name (EWOULDBLOCK), or one that no verb documents."""
    number = getattr(errno, name, None)
    if not isinstance(number, int):
        return None
    return _ERRNO.get(number) or undocumented(name)
