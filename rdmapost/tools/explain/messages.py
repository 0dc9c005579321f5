"""Finding statuses, errnos and events in the messages of other programs, and in whole logs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...enums import EventType, WCStatus
from .errnos import ERRNOS, undocumented
from .event_types import EVENTS
from .exceptions import EXCEPTIONS
from .lookup import PHRASES, of_member
from .model import UNNUMBERED, Explanation
from .qp_types import QP_STATES
from .statuses import STATUSES
from .terms import VENDOR_ERR, VENDOR_ERR_NUMBER

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
    # perftest, ibv_rc_pingpong
    "No IB devices found": "NoDeviceError",
    "unable to find the Infiniband/RoCE device": "NoDeviceError",
    # NCCL
    "NET/IB : No device found": "NoDeviceError",
    # libibverbs
    "libibverbs: Warning: RLIMIT_MEMLOCK": "ENOMEM",
    "no userspace device-specific driver found": "NoDeviceError",
    # librdmacm
    "RDMA_CM_EVENT_REJECTED": "ECONNREFUSED",
    "RDMA_CM_EVENT_UNREACHABLE": "ETIMEDOUT",
    # libmlx5, the kernel's mlx5
    "dump error cqe": "vendor_err",
    "got completion with error": "vendor_err",
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
"""Phrases too common to explain alone, and what else the line must contain."""

_STATUS_NUMBER = re.compile(
    # "Failed status 12:", "status=0xc", "status number 12";
    # libfabric's "prov_errno 5" and "prov_err: 5".
    r"\b(?:wc[_ ])?status(?: number| code)?(?:\s*[=:]\s*|\s+)\(?"
    r"(0x[\da-f]{1,2}|\d{1,2})\b(?![.:]\d)|"
    r"\bprov_err(?:no)?[ =:]+(\d{1,2})\b|"
    # "Completion with error 12: wr_id 0", NCCL's "completion from peer 10.0.0.2<4791> with error
    # 12", but not "completion with error: ... (err 125".
    r"\bcompletion (?:from peer \S+ )?with error:?\s+\(?(\d{1,2})\b|"
    r"\bwc error:?\s+(\d{1,2})\b",
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
    # perftest's "Failed to modify QP to INIT, ret=22".
    r"\bmodify QP\b.*\bret=(\d{1,3})\b",
    re.IGNORECASE,
)


_QP_MOVE = re.compile(r"\bmodify QP\b.* to (INIT|RTR|RTS)\b", re.IGNORECASE)
"""perftest's "Failed to modify QP 0x11 to RTR", which names no errno."""


@dataclass(frozen=True, slots=True)
class Mention:
    """A status, errno or event that lines of text mention.

    Attributes:
        explanation: what it means.
        line: the first of these lines.
        number: which line that is, from 1.
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
        if one.kind != "wc_flag":
            # QP_FATAL and the like are found in IBV_EVENT_QP_FATAL, too.
            found |= {one.name: one, one.constant: one}
    return found


_BY_PHRASE = _phrases()
_BY_NAME = _names()
_STATUS = {one.number: one for one in STATUSES}
_ERRNO = {one.number: one for one in ERRNOS}
_STATE = {one.name: one for one in QP_STATES}
_OURS = {one.name for one in EXCEPTIONS if one.constant == f"rdmapost.{one.name}"} - {"RdmaError"}
"""Exceptions that no other library has; others count only with their module."""
_WORDS = re.compile(
    # Longest first, so that "local access error" is not matched as "local access".
    r"(?<![a-z])(?:"
    + "|".join(map(re.escape, sorted(_BY_PHRASE, key=len, reverse=True)))
    + r")(?![a-z])",
    re.IGNORECASE,
)
_NAME = re.compile(r"(?<![A-Za-z0-9_])(?:[A-Z][A-Z0-9_]{3,}|(?:[A-Z][a-z]+){2,})(?![A-Za-z0-9_])")
_TOO_FEW = re.compile(r"\b\d+ of \d+ completions? came within ")
"""The message of WaitTimeout."""


def explain_lines(lines: Iterable[str]) -> tuple[Mention, ...]:
    """Explain the statuses, errnos and events that lines of text name.

    It reads what programs print when a work request or a verb fails: ibv_rc_pingpong, perftest,
    NCCL, UCX, Open MPI, libfabric, the kernel, Python, and this library.

    Args:
        lines: the lines, such as a log.

    Returns:
        what the lines name, in order of first appearance. WR_FLUSH_ERR comes last, because
        another error causes it; SUCCESS is left out unless the lines name nothing else.
    """
    found: dict[tuple[str, str], Mention] = {}
    for number, line in enumerate(lines, 1):
        for one in _in_line(line[:_LONGEST_LINE]):
            key = one.kind, one.name
            old = found.get(key, Mention(one, line.strip(), number, 0))
            found[key] = Mention(one, old.line, old.number, old.count + 1)
    if len(found) > 1:
        found.pop(("status", WCStatus.SUCCESS.name), None)
    return tuple(sorted(found.values(), key=_follows))


def _follows(mention: Mention) -> bool:
    one = mention.explanation
    return (one.kind, one.number) == ("status", WCStatus.WR_FLUSH_ERR)


def _in_line(line: str) -> list[Explanation]:
    """Explain the names in a line, each once, in the order of their first occurrence."""
    at: list[tuple[int, Explanation]] = []
    for match in _NAME.finditer(line):
        one = _BY_NAME.get(match[0]) or _other_errno(match[0])
        if one and (one.kind != "exception" or match[0] in _OURS or one.constant in line):
            at.append((match.start(), one))
    for match in _WORDS.finditer(line):
        phrase = match[0].lower()
        if phrase not in _VAGUE or _VAGUE[phrase].search(line):
            at.append((match.start(), _BY_PHRASE[phrase]))
    for pattern, numbers in ((_STATUS_NUMBER, _STATUS), (_ERRNO_NUMBER, _ERRNO)):
        for match in pattern.finditer(line):
            if numbers is _STATUS and _OTHER_STATUS.search(line, 0, match.start()):
                continue
            text = next(filter(None, match.groups()))
            if one := numbers.get(int(text, 16 if text[:2].lower() == "0x" else 10)):
                at.append((match.start(), one))
    if not at and (move := _QP_MOVE.search(line)):
        at.append((move.start(), _STATE[move[1].upper()]))
    if not at and (vendor := VENDOR_ERR_NUMBER.search(line)):
        at.append((vendor.start(), VENDOR_ERR))
    if timeout := _TOO_FEW.search(line):
        at.append((timeout.start(), _BY_NAME["WaitTimeout"]))
    found = {(one.kind, one.name): one for _, one in sorted(at, key=_place)}.values()
    # An exception says less than the status or errno in its text, and a vendor_err less than the
    # status beside it.
    return [one for one in found if one.kind not in UNNUMBERED] or list(found)


def _place(found: tuple[int, Explanation]) -> tuple[bool, int]:
    """Put statuses first: libfabric's "err: 5 (Input/output error), prov_err: 12" has both."""
    at, one = found
    return one.kind != "status", at


def _other_errno(name: str) -> Explanation | None:
    """Return the explanation of an errno by its second name (EWOULDBLOCK), or that no verb has."""
    number = getattr(errno, name, None)
    if not isinstance(number, int):
        return None
    return _ERRNO.get(number) or undocumented(name)
