"""Finding explanations by any name or number that a program may print."""

from __future__ import annotations

import difflib
import errno
import os
import re
from enum import Enum

from ..._arguments import index, shown
from ...enums import EventType, WCStatus
from ...errors import RdmaError
from .access_flags import ACCESS_FLAGS, OPS_FLAGS
from .cm_events import CM_EVENTS
from .errnos import ALIASES, ERRNOS, undocumented
from .event_types import EVENTS, WC_FLAGS
from .exceptions import EXCEPTIONS
from .failed_verbs import FAILURES, SAME_CALL
from .findings import FINDINGS
from .link_states import MIGRATION_STATES, PORT_STATES
from .model import ENUMERATIONS, KINDS, Explanation
from .opcodes import OPCODES
from .qp_types import QP_STATES, QP_TYPES, SEND_FLAGS
from .statuses import STATUSES
from .terms import TERMS, VENDOR_ERR, VENDOR_ERR_NUMBER
from .wc_opcodes import WC_OPCODES

_ALL = (
    *STATUSES,
    *ERRNOS,
    *OPCODES,
    *WC_OPCODES,
    *QP_TYPES,
    *QP_STATES,
    *PORT_STATES,
    *MIGRATION_STATES,
    *SEND_FLAGS,
    *OPS_FLAGS,
    *ACCESS_FLAGS,
    *WC_FLAGS,
    *EVENTS,
    *CM_EVENTS,
    *FAILURES,
    *EXCEPTIONS,
    *FINDINGS,
    *TERMS,
)
"""All explanations, in the order of KINDS."""
_SHOWN = 40
"""How many characters of an unknown name an error shows."""
_NUMBERED = ("status", "errno")
"""The kinds that programs print as bare numbers."""


PHRASES: dict[str, WCStatus | EventType] = {
    # ibv_wc_status_str()
    "transport retry counter exceeded": WCStatus.RETRY_EXC_ERR,
    "memory management operation error": WCStatus.MW_BIND_ERR,
    "Work Request Flushed Error": WCStatus.WR_FLUSH_ERR,
    "local length error": WCStatus.LOC_LEN_ERR,
    "local QP operation error": WCStatus.LOC_QP_OP_ERR,
    "local EE context operation error": WCStatus.LOC_EEC_OP_ERR,
    "local protection error": WCStatus.LOC_PROT_ERR,
    "bad response error": WCStatus.BAD_RESP_ERR,
    "local access error": WCStatus.LOC_ACCESS_ERR,
    "remote invalid request error": WCStatus.REM_INV_REQ_ERR,
    "remote access error": WCStatus.REM_ACCESS_ERR,
    "remote operation error": WCStatus.REM_OP_ERR,
    "RNR retry counter exceeded": WCStatus.RNR_RETRY_EXC_ERR,
    "local RDD violation error": WCStatus.LOC_RDD_VIOL_ERR,
    "remote invalid RD request": WCStatus.REM_INV_RD_REQ_ERR,
    "aborted error": WCStatus.REM_ABORT_ERR,
    "invalid EE context number": WCStatus.INV_EECN_ERR,
    "invalid EE context state": WCStatus.INV_EEC_STATE_ERR,
    "fatal error": WCStatus.FATAL_ERR,
    "response timeout error": WCStatus.RESP_TIMEOUT_ERR,
    "general error": WCStatus.GENERAL_ERR,
    "TM error": WCStatus.TM_ERR,
    "TM software rendezvous": WCStatus.TM_RNDV_INCOMPLETE,
    # ibv_event_type_str()
    "CQ error": EventType.CQ_ERR,
    "local work queue catastrophic error": EventType.QP_FATAL,
    "invalid request local work queue error": EventType.QP_REQ_ERR,
    "local access violation work queue error": EventType.QP_ACCESS_ERR,
    "communication established": EventType.COMM_EST,
    "send queue drained": EventType.SQ_DRAINED,
    "path migrated": EventType.PATH_MIG,
    "path migration request error": EventType.PATH_MIG_ERR,
    "local catastrophic error": EventType.DEVICE_FATAL,
    "port active": EventType.PORT_ACTIVE,
    "port error": EventType.PORT_ERR,
    "LID change": EventType.LID_CHANGE,
    "P_Key change": EventType.PKEY_CHANGE,
    "SM change": EventType.SM_CHANGE,
    "SRQ catastrophic error": EventType.SRQ_ERR,
    "SRQ limit reached": EventType.SRQ_LIMIT_REACHED,
    "last WQE reached": EventType.QP_LAST_WQE_REACHED,
    "client reregistration": EventType.CLIENT_REREGISTER,
    "GID table change": EventType.GID_CHANGE,
    "WQ fatal": EventType.WQ_FATAL,
    "Device link speed change": EventType.DEVICE_SPEED_CHANGE,
}
"""libibverbs' texts for statuses and events, which most programs print."""
_OF_VENDOR_ERR = ("vendor err", "vendor error", "vendor code", "vendor syndrome", "syndrome")


class UnknownNameError(RdmaError, LookupError):
    """There is no explanation of this name.

    Attributes:
        nearest: the most similar names.
    """

    def __init__(self, text: str, nearest: tuple[str, ...]) -> None:
        super().__init__(text)
        self.nearest = nearest


def _key(name: str) -> str:
    """Return a name in upper case, without punctuation."""
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def of_member(member: WCStatus | EventType) -> list[Explanation]:
    """Return the explanations of a status or an event."""
    ones = STATUSES if isinstance(member, WCStatus) else EVENTS
    return [one for one in ones if one.number == member]


def _spellings(one: Explanation) -> list[str]:
    """Return all spellings of an explained name: in Python, in C, and in programs' output."""
    of = ENUMERATIONS.get(one.kind, one.kind)
    spellings = [one.name, one.constant, f"{of}.{one.name}"]
    if one.kind == "errno":
        spellings.append(os.strerror(one.number))
        spellings += [alias for alias, name in ALIASES.items() if name == one.name]
    if one.kind == "failure":
        spellings += [f"ibv_{verb}" for verb, name in SAME_CALL.items() if name == one.name]
    if one.kind == "port_state":
        # ibv_port_state_str()
        spellings.append(f"PORT_{one.name}")
    return spellings


def _index() -> dict[str, list[Explanation]]:
    found: dict[str, list[Explanation]] = {}
    for one in _ALL:
        if one.kind == "finding":
            # Without its hyphens, rnr-retry would be another name of RNR_RETRY_EXC_ERR.
            continue
        for key in {_key(spelling) for spelling in _spellings(one)}:
            found.setdefault(key, []).append(one)
    for text, member in PHRASES.items():
        known = found.setdefault(_key(text), [])
        known += [one for one in of_member(member) if one not in known]
    found |= {_key(text): [VENDOR_ERR] for text in _OF_VENDOR_ERR}
    return found


_BY_KEY = _index()
_FINDING = {one.name: one for one in FINDINGS}


def names() -> dict[str, list[str]]:
    """Return all names with an explanation, by kind."""
    return {kind: [one.name for one in _ALL if one.kind == kind] for kind in KINDS}


def explain(what: str | int | Enum) -> tuple[Explanation, ...]:
    """Explain a name or number: meaning, usual causes, what to check next.

    Args:
        what: a completion status, an errno, an opcode, a QP type or state, a
            flag or an event: a member of an enumeration; its name in Python
            or in C, in any case (``rnr_retry_exc_err``, ``IBV_WR_SEND``, ``EINVAL``);
            a text that ibv_wc_status_str, ibv_event_type_str or strerror returns; or the
            number, of any integer type, of a status or errno; a negative number is an errno.
            Also an event of the RDMA CM, a failed verb (``ibv_create_srq``) or a part of one
            (``modify_qp_to_rtr``), an exception of this library, the name of a Finding, and a few
            terms (``vendor_err``, ``PSN``).

    Returns:
        every explanation of this name or number: 13 is both a status and an errno, and SEND is
        both a send opcode and a completion opcode.

    Raises:
        TypeError: what is neither text, nor an integer, nor a member of an enumeration.
        UnknownNameError: this name or number has no explanation.
    """
    if not isinstance(what, str | Enum):
        return _by_number(index("what", what, "a name or a number"))
    text = f"{type(what).__name__}.{what.name}" if isinstance(what, Enum) else what.strip()
    if re.fullmatch(r"-?\d{1,9}|0[xX][0-9a-fA-F]{1,8}", text):
        numbered = _by_number(int(text, 16 if text[:2].lower() == "0x" else 10))
        # In a program's output, 129 is more likely mlx5's vendor_err than an opcode.
        return (*numbered, VENDOR_ERR) if numbered[0].kind == "wc_opcode" else numbered
    found = _BY_KEY.get(_key(text), [])
    if finding := _FINDING.get(text.lower()):
        found = [finding, *found]
    if found:
        # CONNECT_ERROR is an event, and ConnectError an exception.
        exact = [one for one in found if text in _spellings(one)]
        if not text.startswith("ibv_") and all(one.kind == "failure" for one in exact):
            # bind_mw is a verb, and an opcode in lower case.
            exact = found
        # PORT_ACTIVE is the name of an event, and a spelling of a state.
        return tuple(sorted(exact, key=lambda one: one.name != text)) or tuple(found)
    if VENDOR_ERR_NUMBER.fullmatch(text):
        return (VENDOR_ERR,)
    number = getattr(errno, text.upper(), None)
    if isinstance(number, int):
        # Negated, as the kernel prints errnos, so that no status matches.
        return _by_number(-number)
    near = _nearest(text)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UnknownNameError(
        f"{shown!r} is not a status, errno, opcode, state, flag, event, verb, exception or "
        f"finding{hint}",
        near,
    )


def _by_number(number: int) -> tuple[Explanation, ...]:
    kinds = _NUMBERED if number >= 0 else ("errno",)
    found = tuple(one for one in _ALL if one.number == abs(number) and one.kind in kinds)
    if not found and number >= 0:
        found = tuple(one for one in _ALL if one.number == number and one.kind == "wc_opcode")
    if found:
        return found
    if abs(number) in errno.errorcode:
        return (undocumented(errno.errorcode[abs(number)]),)
    raise UnknownNameError(
        f"{shown(number)} is not the number of a status or an errno"
        + ("; the meaning of a vendor_err is known only to the driver" if number > 0 else ""),
        (),
    )


def _nearest(text: str) -> tuple[str, ...]:
    key = _key(text)
    if "-" in text:
        return tuple(difflib.get_close_matches(text.lower(), _FINDING, cutoff=0.62))
    close = difflib.get_close_matches(key, _BY_KEY, n=6, cutoff=0.62)
    close = difflib.get_close_matches(key, close, n=1, cutoff=0.9) or close
    if not close and len(key) > 2:
        close = [known for known in _BY_KEY if key in known][:6]
    if not close:
        # The text may be a message that contains an exception's name.
        words = map(_key, re.findall(r"[A-Za-z]+", text))
        close = [
            word for word in words if any(one.kind == "exception" for one in _BY_KEY.get(word, ()))
        ]
    near = dict.fromkeys(one.name for known in close for one in _BY_KEY[known])
    if (hyphenated := text.replace("_", "-")) in _FINDING:
        near = {hyphenated: None, **near}
    return tuple(near)[:3]
