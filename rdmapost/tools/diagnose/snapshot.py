"""What the checks of a queue pair look at: everything is read once, and nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from ...enums import QPState, QPType
from ...errors import RdmaError
from ...resources.device import GIDTableEntry, PortAttr
from ...resources.endpoint import Endpoint
from ...resources.memory import PD
from ...resources.qp_attr import QPAttr
from ...resources.qp_transitions import Steps
from .system import System

if TYPE_CHECKING:
    from ...resources.qp import QP

__all__ = [
    "CONNECTED",
    "FAILURES",
    "RECEIVES",
    "Snapshot",
    "is_queue_pair",
    "name_of",
    "take_snapshot",
]

FAILURES = (RdmaError, OSError, ValueError)
"""What reading an object may raise: it has gone, or the device does not answer."""

CONNECTED = frozenset({QPType.RC, QPType.UC, QPType.XRC_SEND, QPType.XRC_RECV})
RECEIVES = frozenset({QPState.RTR, QPState.RTS, QPState.SQD, QPState.SQE})
_OTHER_SIDE = {QPType.XRC_SEND: QPType.XRC_RECV, QPType.XRC_RECV: QPType.XRC_SEND}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A queue pair as it is now.

    Attributes:
        qp: the queue pair.
        attr: its attributes.
        port: its port.
        table: the GIDs of its port.
        peer: the other side: a queue pair of this process, or what it said of itself.
        peer_attr: the attributes of such a queue pair.
        given: the peer was named by the caller, and not found by its number.
        system: the machine around it.
        about: its name.
    """

    qp: QP
    attr: QPAttr
    port: PortAttr
    table: list[GIDTableEntry]
    peer: QP | Endpoint | None
    peer_attr: QPAttr | None
    given: bool
    system: System
    about: str

    @property
    def connected(self) -> bool:
        """Whether it knows its peer: what says so is set on the way to RTR."""
        return self.qp.qp_type in CONNECTED and _knows_peer(self.attr)

    @property
    def requests(self) -> bool:
        """Whether its attributes as a requester mean something: they are set on the way to RTS."""
        attr = self.attr
        if attr.qp_state is QPState.ERR:
            return bool(attr.timeout or attr.retry_cnt or attr.rnr_retry or attr.max_rd_atomic)
        return attr.qp_state in RECEIVES and attr.qp_state is not QPState.RTR

    @property
    def local_peer(self) -> tuple[QP, QPAttr] | None:
        """The peer with its attributes, if it is a queue pair of this process."""
        if is_queue_pair(self.peer) and self.peer_attr is not None:
            return self.peer, self.peer_attr
        return None

    @property
    def peer_type(self) -> QPType:
        """The type that the peer must have."""
        return _OTHER_SIDE.get(self.qp.qp_type, self.qp.qp_type)

    @property
    def responder(self) -> tuple[QP, QPAttr] | None:
        """The peer with its attributes, if those of a responder mean something."""
        local = self.local_peer
        if local is None or local[0].qp_type is not self.peer_type:
            return None
        return local if local[1].qp_state in RECEIVES else None

    @property
    def source(self) -> GIDTableEntry | None:
        """The entry of the GID table that its packets come from, if it is there."""
        index = self.attr.ah_attr.sgid_index
        return next((entry for entry in self.table if entry.index == index), None)


def take_snapshot(qp: QP, peer: QP | Endpoint | None) -> Snapshot:
    """Read a queue pair and its surroundings.

    Args:
        qp: the queue pair.
        peer: its peer, if the caller knows it.

    Raises:
        RdmaError, OSError, ValueError: it cannot be read.
    """
    context = qp.pd.context
    attr = qp.query()
    port = context.query_port(qp.port_num)
    table = context.query_gid_table(qp.port_num)
    given = peer is not None
    if peer is None and qp.qp_type in CONNECTED and _knows_peer(attr):
        peer = _find(qp, attr, port, table)
    peer_attr = None
    if is_queue_pair(peer) and not peer.closed:
        peer_attr = peer.query()
    return Snapshot(qp, attr, port, table, peer, peer_attr, given, System(), name_of(qp))


def is_queue_pair(thing: object) -> TypeGuard[QP]:
    """Whether it is a queue pair; only those have steps, and QP itself calls these checks."""
    return isinstance(thing, Steps)


def name_of(qp: QP) -> str:
    """Name a queue pair, as findings are about it."""
    return f"{qp} on {qp.pd.context.name}"


def _knows_peer(attr: QPAttr) -> bool:
    if attr.qp_state is QPState.ERR:
        # It may have come here from any state.
        return bool(attr.dest_qp_num)
    return attr.qp_state in RECEIVES


def _find(qp: QP, attr: QPAttr, port: PortAttr, table: list[GIDTableEntry]) -> QP | None:
    """Return the peer if it is a queue pair of this process, on the same open device."""
    path = attr.ah_attr
    if path.dgid is None:
        here = path.dlid == port.lid
    else:
        here = path.dgid in [entry.gid for entry in table]
    if not here:
        return None
    for pd in qp.pd.context._open_children():
        for child in pd._open_children() if isinstance(pd, PD) else ():
            if is_queue_pair(child) and child.qp_num == attr.dest_qp_num:
                return child
    return None
