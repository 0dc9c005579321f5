"""Checks of one queue pair's port, GID and path."""

from __future__ import annotations

from collections.abc import Iterable

from ...enums import QPState, QPType
from ...errors import RdmaError
from ...resources.gid import GID, GIDChoice
from ...resources.qp import asked_gid_index, chosen_gid
from .finding import Finding
from .path import check_gid, check_port, check_route, uses_gids
from .snapshot import Snapshot


def check_ports(snap: Snapshot) -> Iterable[Finding]:
    """Check the port."""
    return check_port(snap.qp.context, snap.port, snap.system)


def check_path_mtu(snap: Snapshot) -> Iterable[Finding]:
    """Check the path MTU."""
    path, active = snap.attr.path_mtu, snap.port.active_mtu
    if not snap.connected or path is None:
        return
    evidence = f"path_mtu {path.bytes}, and the port's active_mtu {active.bytes}"
    if path > active:
        remedy = f"connect again, with path_mtu at most {active.bytes} on both sides"
        yield Finding(
            "mtu-mismatch", "problem", f"{evidence}: larger than the port can send", remedy
        )
    else:
        yield Finding("path-mtu", "ok", evidence)


def check_gids(snap: Snapshot) -> Iterable[Finding]:
    """Check the local GID, and whether the peer's can be reached from it."""
    qp, path = snap.qp, snap.attr.ah_attr
    if not uses_gids(qp.context, snap.port) or qp.qp_type is QPType.RAW_PACKET:
        return
    if not snap.connected:
        # Check the GID that connect() would use.
        yield from _chosen(snap)
        return
    if path.dgid is None:
        evidence = "its path has no dgid, which Ethernet needs as the peer's address"
        remedy = "qp.connect(remote), with the peer's qp.endpoint()"
        yield Finding("gid-wrong", "problem", evidence, remedy)
        return
    source = snap.source_of(snap.attr)
    chosen = chosen_gid(qp)
    if chosen is None or chosen.gid_index != path.sgid_index:
        gid = GID(bytes(16)) if source is None else source.gid
        gid_type = None if source is None else source.gid_type
        chosen = GIDChoice(path.sgid_index, gid, gid_type, "its path's sgid_index")
    yield check_gid(chosen, snap.table, snap.system)
    if source is not None:
        on_soft0 = qp.context.kind == "soft"
        yield check_route(source, path.dgid, snap.table, snap.system, on_soft0=on_soft0)


def _chosen(snap: Snapshot) -> Iterable[Finding]:
    qp = snap.qp
    if snap.attr.qp_state is QPState.ERR and qp.qp_type is not QPType.UD:
        return
    try:
        chosen = chosen_gid(qp) or qp.context.choose_gid(qp.port_num, asked_gid_index(qp))
    except (RdmaError, ValueError) as error:
        wanted = asked_gid_index(qp) is not None
        yield Finding(
            "gid-wrong" if wanted else "gid-none",
            "problem",
            str(error),
            "give a gid_index that 'rdmapost devices' shows"
            if wanted
            else "ip addr add 10.0.0.1/24 dev NETDEV; ip link set NETDEV up",
        )
        return
    yield check_gid(chosen, snap.table, snap.system)
