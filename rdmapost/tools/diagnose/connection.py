"""The checklist of one queue pair: its port, its GID, its path."""

from __future__ import annotations

from collections.abc import Iterable

from ...enums import QPState, QPType
from ...errors import RdmaError
from ...resources.address import GIDChoice, choose_gid
from ...resources.device import GID
from ...resources.qp import asked_gid_index, chosen_gid
from .finding import Finding
from .looking import Seen
from .path import check_gid, check_port, check_way, uses_gids

__all__ = ["check_gids", "check_path_mtu", "check_ports"]


def check_ports(seen: Seen) -> Iterable[Finding]:
    """Look at the port."""
    return check_port(seen.qp.pd.context, seen.port, seen.system)


def check_path_mtu(seen: Seen) -> Iterable[Finding]:
    """Look at the path MTU."""
    path, active = seen.attr.path_mtu, seen.port.active_mtu
    if not seen.connected or path is None:
        return
    evidence = f"path_mtu {path.bytes}, and the port's active_mtu {active.bytes}"
    if path > active:
        yield Finding(
            "mtu-mismatch",
            "problem",
            f"{evidence}: larger packets than the port sends",
            f"connect again, with path_mtu at most {active.bytes} on both sides",
            seen.about,
        )
    else:
        yield Finding("path-mtu", "ok", evidence, about=seen.about)


def check_gids(seen: Seen) -> Iterable[Finding]:
    """Look at the local GID, and at whether the peer's can be reached from it."""
    qp, path = seen.qp, seen.attr.ah_attr
    if not uses_gids(qp.pd.context, seen.port) or qp.qp_type is QPType.RAW_PACKET:
        return
    if not seen.connected:
        # What it would use.
        yield from _chosen(seen)
        return
    if path.dgid is None:
        yield Finding(
            "gid-wrong",
            "problem",
            "its path has no dgid, and on Ethernet the GID is the address",
            "qp.connect(remote), with what the peer's qp.endpoint() says",
            seen.about,
        )
        return
    source = seen.source
    chosen = chosen_gid(qp)
    if chosen is None or chosen.index != path.sgid_index:
        gid = GID(bytes(16)) if source is None else source.gid
        kind = None if source is None else source.gid_type
        chosen = GIDChoice(path.sgid_index, gid, kind, "what its path names")
    yield from check_gid(chosen, seen.table, seen.system, seen.about)
    if source is not None:
        yield from check_way(
            source, path.dgid, seen.table, qp.pd.context.kind, seen.system, seen.about
        )


def _chosen(seen: Seen) -> Iterable[Finding]:
    qp = seen.qp
    if seen.attr.qp_state is QPState.ERR and qp.qp_type is not QPType.UD:
        return
    try:
        chosen = chosen_gid(qp) or choose_gid(qp.pd.context, qp.port_num, asked_gid_index(qp))
    except RdmaError as error:
        wanted = asked_gid_index(qp) is not None
        yield Finding(
            "gid-wrong" if wanted else "gid-none",
            "problem",
            str(error),
            "give a gid_index that 'rdmapost devices' shows"
            if wanted
            else "ip addr add 10.0.0.1/24 dev NETDEV; ip link set NETDEV up",
            seen.about,
        )
        return
    yield from check_gid(chosen, seen.table, seen.system, seen.about)
