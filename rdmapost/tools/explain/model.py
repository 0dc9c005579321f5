"""The explanation of one name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from typing import Any

from ...enums import (
    Access,
    EventType,
    MigState,
    Opcode,
    OpsFlags,
    OpsOpcode,
    PortState,
    QPState,
    QPType,
    SendFlags,
    WCFlags,
    WCOpcode,
    WCStatus,
)

KINDS = {
    "status": "completion status",
    "errno": "errno",
    "opcode": "send opcode",
    "ops_opcode": "tag-matching opcode",
    "wc_opcode": "completion opcode",
    "qp_type": "QP type",
    "qp_state": "QP state",
    "port_state": "port state",
    "mig_state": "path migration state",
    "send_flag": "send flag",
    "ops_flag": "tag-matching flag",
    "access": "access flag",
    "wc_flag": "completion flag",
    "event": "asynchronous event",
    "cm_event": "RDMA CM event",
    "failure": "failure",
    "exception": "exception",
    "finding": "finding of a diagnosis",
    "term": "term",
}
"""The kinds of names, in output order, with the words for them in the output."""

UNNUMBERED = frozenset({"failure", "exception", "finding", "term"})
"""The kinds whose names have no number."""

_SENTENCE_END = re.compile(r"(?<=\.)\s")
_MEMBERS: dict[type[Enum], tuple[str, str]] = {
    WCStatus: ("status", "IBV_WC_"),
    Opcode: ("opcode", "IBV_WR_"),
    OpsOpcode: ("ops_opcode", "IBV_WR_"),
    WCOpcode: ("wc_opcode", "IBV_WC_"),
    QPType: ("qp_type", "IBV_QPT_"),
    QPState: ("qp_state", "IBV_QPS_"),
    PortState: ("port_state", "IBV_PORT_"),
    MigState: ("mig_state", "IBV_MIG_"),
    SendFlags: ("send_flag", "IBV_SEND_"),
    OpsFlags: ("ops_flag", "IBV_OPS_"),
    Access: ("access", "IBV_ACCESS_"),
    WCFlags: ("wc_flag", "IBV_WC_"),
    EventType: ("event", "IBV_EVENT_"),
}
"""The kind of each enumeration, and the prefix of its constants in C."""

ENUMERATIONS = {kind: cls.__name__ for cls, (kind, _) in _MEMBERS.items()}
"""The enumeration of each kind; errnos and exceptions have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a name means, its usual causes, and what to look at next.

    Attributes:
        kind: "status", "errno", "opcode", "ops_opcode", "wc_opcode", "qp_type",
            "qp_state", "port_state", "mig_state", "send_flag", "ops_flag", "access",
            "wc_flag", "event", "cm_event", "failure", "exception", "finding" or "term".
        name: as in this package's enumerations or in errno(3); an exception's class; a
            Finding's name; a failed call without its prefix.
        number: its value; 0 for a failure, an exception, a finding or a term.
        constant: its name in C; an exception's name with its module.
        meaning: what it means, and the resulting state.
        causes: its causes, the usual ones first; for an opcode, how it fails.
        look_at: what to look at next: attributes, commands, counters, logs.
        soft_roce: how Soft-RoCE (rdma_rxe) differs, or "".
        see: man pages, and chapters of the InfiniBand specification (IBA); for a finding, what
            reports it.
        qp_types: for an opcode: its row of the table in ibv_post_send(3).
        flags: for an opcode: the flags that apply to it.
        fields: for an opcode: the fields of its work request.
        far_side: for an opcode: what the peer sees.
    """

    kind: str
    name: str
    number: int
    constant: str
    meaning: str
    causes: tuple[str, ...] = ()
    look_at: tuple[str, ...] = ()
    soft_roce: str = ""
    see: tuple[str, ...] = ()
    qp_types: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    far_side: str = ""

    @property
    def summary(self) -> str:
        """The first sentence of the meaning, without its full stop."""
        return _SENTENCE_END.split(self.meaning, maxsplit=1)[0].rstrip(".")


def named(kind: str, name: str, meaning: str, *look_at: str, **texts: Any) -> Explanation:
    """Build a name's explanation; `texts` are its other attributes.

    Unless they say otherwise, its number is 0, and its name in C is the same.
    """
    texts = {"number": 0, "constant": name, "look_at": look_at, **texts}
    return Explanation(kind=kind, name=name, meaning=meaning, **texts)


def explanation_of(
    member: IntEnum | IntFlag, meaning: str, *look_at: str, **texts: Any
) -> Explanation:
    """Build an enum member's explanation; `texts` are its other attributes."""
    kind, prefix = _MEMBERS[type(member)]
    name = member.name or ""
    texts |= {"number": member.value, "constant": prefix + name}
    return named(kind, name, meaning, *look_at, **texts)


def failure(name: str, meaning: str, *look_at: str, **texts: Any) -> Explanation:
    """Make the explanation of a failed call, by default of the verb ``ibv_NAME``."""
    texts = {"constant": f"ibv_{name}", "see": (f"ibv_{name}(3)",), **texts}
    return named("failure", name, meaning, *look_at, **texts)
