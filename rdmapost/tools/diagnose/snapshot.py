"""The state that the checks of a queue pair inspect, read once and never changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...enums import MTU, Access, QPState, QPType
from ...errors import RdmaError
from ...resources.device_attr import PortAttr
from ...resources.endpoint import Endpoint
from ...resources.gid import GIDTableEntry
from ...resources.qp import QP, settings
from ...resources.qp_attr import QPAttr
from ...resources.resource import open_handles
from .sysfs import System

FAILURES = (RdmaError, OSError, ValueError)
"""The errors raised if an object being read is gone, or a device does not respond."""

CONNECTED = frozenset({QPType.RC, QPType.UC, QPType.XRC_SEND, QPType.XRC_RECV})
RECEIVES = frozenset({QPState.RTR, QPState.RTS, QPState.SQD, QPState.SQE})
_NOT_TERMS = frozenset({"qp_state", "cur_qp_state", "path_mig_state"})
"""The arguments of modify() that are states, not settings to compare."""
_OTHER_SIDE = {QPType.XRC_SEND: QPType.XRC_RECV, QPType.XRC_RECV: QPType.XRC_SEND}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a queue pair and its surroundings.

    Attributes:
        qp: the queue pair.
        attr: its attributes; in ERR, those from before it failed.
        port: its port.
        table: the GIDs of its port.
        peer: the other side: a queue pair in this process, or its endpoint.
        found: the queue pair in this process that it is connected to.
        peer_attr: the peer's attributes, if it is in this process; in ERR, as in ``attr``.
        system: the machine's files.
    """

    qp: QP
    attr: QPAttr
    port: PortAttr
    table: list[GIDTableEntry]
    peer: QP | Endpoint | None
    found: QP | None
    peer_attr: QPAttr | None
    system: System

    @property
    def connected(self) -> bool:
        """Whether it is connected to a peer: the transition to RTR connects it."""
        return self.qp.qp_type in CONNECTED and worked_in(self.qp, self.attr) in RECEIVES

    @property
    def requests(self) -> bool:
        """Whether its requester attributes are valid: the transition to RTS sets them."""
        state = worked_in(self.qp, self.attr)
        return state in RECEIVES and state is not QPState.RTR

    @property
    def local_peer(self) -> tuple[QP, QPAttr] | None:
        """The peer and its attributes, if it is in this process."""
        if isinstance(self.peer, QP) and self.peer_attr is not None:
            return self.peer, self.peer_attr
        return None

    @property
    def peer_type(self) -> QPType:
        """The type that the peer must have."""
        return _OTHER_SIDE.get(self.qp.qp_type, self.qp.qp_type)

    @property
    def responder(self) -> tuple[QP, QPAttr] | None:
        """The peer and its attributes, if its responder attributes are valid."""
        local = self.local_peer
        if local is None or local[0].qp_type is not self.peer_type:
            return None
        return local if worked_in(*local) in RECEIVES else None

    def source_of(self, attr: QPAttr) -> GIDTableEntry | None:
        """Return the GID table entry for the source address of packets, if there is one."""
        index = attr.ah_attr.sgid_index
        return next((entry for entry in self.table if entry.gid_index == index), None)


def take_snapshot(qp: QP, peer: QP | Endpoint | None) -> Snapshot:
    """Read a queue pair and its surroundings, including its peer if one is given or found.

    Raises:
        RdmaError, OSError, ValueError: it cannot be read.
    """
    context = qp.context
    attr = _attributes(qp)
    port = context.query_port(qp.port_num)
    table = context.query_gid_table(qp.port_num)
    found = None
    if qp.qp_type in CONNECTED and worked_in(qp, attr) in RECEIVES:
        found = _find(qp, attr, port, table)
    if peer is None:
        peer = found
    peer_attr = None
    if isinstance(peer, QP) and not peer.closed:
        peer_attr = _attributes(peer)
    return Snapshot(qp, attr, port, table, peer, found, peer_attr, System())


def worked_in(qp: QP, attr: QPAttr) -> QPState:
    """Return the state of a queue pair; in ERR, the state in which it failed."""
    if attr.qp_state is not QPState.ERR:
        return attr.qp_state
    return QPState(settings(qp).get("qp_state", QPState.RESET))


def _attributes(qp: QP) -> QPAttr:
    """Return the attributes of a queue pair; in ERR, those from before it failed.

    In ERR a query returns mostly invalid attributes (ibv_query_qp(3)), and the earlier ones may be
    the reason for the failure.
    """
    attr = qp.query()
    if attr.qp_state is not QPState.ERR:
        return attr
    types: dict[str, Any] = {"path_mtu": MTU, "qp_access_flags": Access}
    kept = {
        name: types[name](value) if name in types else value
        for name, value in settings(qp).items()
        if name not in _NOT_TERMS
    }
    return replace(attr, **kept)


def _find(qp: QP, attr: QPAttr, port: PortAttr, table: list[GIDTableEntry]) -> QP | None:
    """Return the peer if it is in this process, on the same device."""
    path = attr.ah_attr
    if path.dgid is None:
        here = path.dlid == port.lid
    else:
        here = path.dgid in [entry.gid for entry in table]
    if not here:
        return None
    for each in open_handles():
        # Another Context may have opened the device; queue pair numbers are the same in both.
        if (
            isinstance(each, QP)
            and each.qp_num == attr.dest_qp_num
            and (each.context.kind, each.context.name) == (qp.context.kind, qp.context.name)
        ):
            return each
    return None
