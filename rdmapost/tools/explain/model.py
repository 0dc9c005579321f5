"""What there is to say about one name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from ...enums import Opcode, OpsOpcode, QPState, QPType, WCOpcode, WCStatus

__all__ = ["KINDS", "Explanation", "constant_of"]

KINDS = {
    "status": "completion status",
    "errno": "errno",
    "opcode": "send opcode",
    "ops_opcode": "tag-matching opcode",
    "wc_opcode": "completion opcode",
    "qp_type": "QP type",
    "qp_state": "QP state",
    "send_flag": "send flag",
    "wc_flag": "completion flag",
    "event": "asynchronous event",
}
"""The kinds of names, in the order in which they are shown, and what they are called."""

_SENTENCE_END = re.compile(r"(?<=\.)\s")
_PREFIXES: dict[type[IntEnum], str] = {
    WCStatus: "IBV_WC_",
    Opcode: "IBV_WR_",
    OpsOpcode: "IBV_WR_",
    WCOpcode: "IBV_WC_",
    QPType: "IBV_QPT_",
    QPState: "IBV_QPS_",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a name means, why one meets it, and what to look at next.

    Attributes:
        kind: "status", "errno", "opcode", "ops_opcode", "wc_opcode", "qp_type",
            "qp_state", "send_flag", "wc_flag" or "event".
        name: as in the enumerations of this package, or of errno(3).
        number: its value.
        constant: its name in C.
        meaning: what it says, and what state things are in then.
        causes: why it comes, the usual ones first; of an opcode, how it fails.
        look_at: what to look at next: attributes, commands, counters, logs.
        soft_roce: what Soft-RoCE (rdma_rxe) does otherwise, or "".
        see: man pages, and chapters of the InfiniBand specification (IBA).
        qp_types: of an opcode: its row of the table in ibv_post_send(3).
        flags: of an opcode: the flags that mean something on it.
        fields: of an opcode: the fields of its work request.
        far_side: of an opcode: what the peer sees of it.
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


def constant_of(member: IntEnum) -> str:
    """Return the name in C of a member of an enumeration."""
    return _PREFIXES[type(member)] + member.name
