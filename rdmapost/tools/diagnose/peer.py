"""Checks of two queue pairs: is each connected to the other, with matching attributes?"""

from __future__ import annotations

from collections.abc import Iterable

from ...enums import Access, QPState, QPType, SendOps
from ...resources.endpoint import Endpoint
from ...resources.qp import QP, chosen_gid, settings
from ...resources.qp_attr import QPAttr
from .finding import Finding, Severity
from .qp_checks import access_refused, has_receive, waiting_sends
from .snapshot import CONNECTED, RECEIVES, Snapshot, worked_in

_ACCESS = (Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC)
_FLUSH_ACCESS = (Access.FLUSH_GLOBAL, Access.FLUSH_PERSISTENT)
_AGAIN = "to_reset() both, then qp.connect(peer.endpoint()) and peer.connect(qp.endpoint())"
"""A reset chooses a new PSN, so resetting one side alone does not help."""


def check_peer(snap: Snapshot) -> Iterable[Finding]:
    """Compare the queue pair with what is known of its peer."""
    peer = snap.peer
    if peer is None:
        if _is_gone(snap):
            yield _closed(f"its peer, QP {snap.attr.dest_qp_num:#x},")
        elif snap.connected:
            path = snap.attr.ah_attr
            yield Finding(
                "peer-unknown",
                "info",
                f"its peer, QP {snap.attr.dest_qp_num:#x} at {path.dgid or path.dlid}, is not open "
                "in this process: its state and its receives are not visible",
                "if it was in this process, it is closed; otherwise diagnose it in its own "
                "process and compare, or call qp.diagnose(its endpoint)",
            )
    elif isinstance(peer, Endpoint):
        yield from _check_endpoint(snap, peer)
    elif snap.local_peer is None:
        yield _closed(f"its peer {peer}")
    else:
        yield from _check_qp(snap, *snap.local_peer)


def _is_gone(snap: Snapshot) -> bool:
    """Whether the queue pair is connected to a peer that is closed.

    No two processes share a software device's address, so a peer at that address is closed if it is
    not found in this process.
    """
    is_software = snap.qp.context.kind in ("soft", "roce")
    is_here = is_software and snap.attr.ah_attr.dgid in [entry.gid for entry in snap.table]
    return snap.connected and is_here and snap.found is None


def _closed(peer: str) -> Finding:
    remedy = "create a new queue pair there, and connect both"
    return Finding("peer-closed", "problem", f"{peer} is closed", remedy)


def _check_endpoint(snap: Snapshot, peer: Endpoint) -> Iterable[Finding]:
    if not snap.connected:
        return
    attr, wrong = snap.attr, []
    if attr.dest_qp_num != peer.qp_num:
        wrong.append(("dest-qp-num", f"dest_qp_num={attr.dest_qp_num:#x}", f"{peer.qp_num:#x}"))
    if attr.ah_attr.dgid not in (None, peer.gid):
        wrong.append(("gid-wrong", f"dgid {attr.ah_attr.dgid}", str(peer.gid)))
    if attr.ah_attr.dgid is None and attr.ah_attr.dlid != peer.lid:
        wrong.append(("lid-wrong", f"dlid={attr.ah_attr.dlid:#x}", f"{peer.lid:#x}"))
    if attr.path_mtu is not None and attr.path_mtu > peer.mtu:
        wrong.append(("mtu-mismatch", f"path_mtu {attr.path_mtu.bytes}", f"{peer.mtu.bytes}"))
    expected = settings(snap.qp).get("rq_psn")
    # If the endpoint is another queue pair's, its PSN differs anyway.
    if not wrong and snap.qp.qp_type is QPType.RC and expected not in (None, peer.psn):
        wrong.append(("psn-mismatch", f"rq_psn={expected:#x}", f"psn={peer.psn:#x}"))
    for name, here, there in wrong:
        evidence = f"{here}, but the peer's endpoint has {there}"
        yield Finding(name, "problem", evidence, _AGAIN)
    if not wrong and _is_gone(snap):
        yield _closed(f"its peer, QP {peer.qp_num:#x},")
    elif not wrong:
        yield Finding(
            "peer", "ok", f"connected to {peer}; its state, dest_qp_num and rq_psn were not checked"
        )
    largest = min(snap.port.active_mtu, peer.mtu)
    if attr.path_mtu is not None and attr.path_mtu < largest:
        # An endpoint has the MTU of its port, not its queue pair's path MTU.
        yield Finding(
            "path-mtu",
            "info",
            f"path_mtu {attr.path_mtu.bytes}, although both ports have {largest.bytes}: if the "
            "peer's differs, messages of several packets end with REM_INV_REQ_ERR",
            "compare the peer's qp.query().path_mtu",
        )


def _check_qp(snap: Snapshot, peer: QP, there: QPAttr) -> Iterable[Finding]:
    qp = snap.qp
    if peer.qp_type is not snap.peer_type:
        evidence = f"it is {qp.qp_type.name}, but its peer is {peer.qp_type.name}"
        remedy = f"create the peer with type {snap.peer_type.name}"
        yield Finding("qp-type-mismatch", "problem", evidence, remedy)
        return
    if there.qp_state not in RECEIVES:
        does_not = "send" if peer.qp_type is QPType.XRC_SEND else "receive"
        evidence = f"its peer {peer} is in {there.qp_state.name}: it does not {does_not}"
        remedy = _how_to_receive(snap, peer, there.qp_state)
        yield Finding("peer-state", "problem", evidence, remedy)
    if None not in (qp.pd, peer.pd) and qp.pd is not peer.pd:
        evidence = f"its peer {peer} is on another PD"
        remedy = "a region's rkey works only through queue pairs on the same PD"
        yield Finding("other-pd", "info", evidence, remedy)
    if snap.connected:
        yield from _check_crossing(snap, peer, there)
        yield from _check_terms(snap, peer, there)
    elif (
        qp.qp_type is QPType.UD
        and _has_qkey(snap.attr)
        and _has_qkey(there)
        and snap.attr.qkey != there.qkey
    ):
        yield Finding(
            "qkey-mismatch",
            "warning",
            f"qkey={snap.attr.qkey:#x}, but the peer's qkey={there.qkey:#x}: a message must carry "
            "the peer's Q_Key, or it is dropped",
            f"Send(..., remote_qkey={there.qkey:#x})",
        )
    if qp.qp_type is not QPType.XRC_SEND and not has_receive(peer):
        yield from _check_no_receive(snap, peer)


def _how_to_receive(snap: Snapshot, peer: QP, state: QPState) -> str:
    if peer.qp_type not in CONNECTED:
        return "peer.connect()" if state < QPState.RTR else "peer.to_reset() and peer.connect()"
    expected = settings(snap.qp).get("rq_psn", peer.psn)
    usable = snap.attr.qp_state is not QPState.ERR and expected == peer.psn
    return "peer.connect(qp.endpoint())" if usable and state < QPState.RTR else _AGAIN


def _has_qkey(attr: QPAttr) -> bool:
    """Whether its qkey is valid: the transition to INIT sets it, but ERR may come before that."""
    return attr.qp_state is QPState.INIT or attr.qp_state in RECEIVES


def _check_no_receive(snap: Snapshot, peer: QP) -> Iterable[Finding]:
    """Check whether a send waits for a receive that the peer has not posted."""
    # On UD every opcode consumes a receive, and a message that finds none is dropped.
    datagram = snap.qp.qp_type is QPType.UD
    sends = snap.qp.outstanding.send if datagram else waiting_sends(snap)
    if sends == 0:
        return
    severity: Severity = "problem"
    evidence = f"its peer {peer} has no receive posted; sends outstanding here: "
    if datagram or sends is None:
        severity = "warning"
    if sends is None:
        evidence += f"{snap.qp.outstanding.send}; a SEND or RDMA_WRITE_WITH_IMM among them waits"
    else:
        evidence += str(sends)
    remedy = "peer.post_recv(...)" if peer.srq is None else "srq.post_srq_recv(...)"
    yield Finding("recv-none-posted", severity, evidence, remedy)


def _check_crossing(snap: Snapshot, peer: QP, there: QPAttr) -> Iterable[Finding]:
    """Check that each queue pair is connected to the other."""
    qp, here = snap.qp, snap.attr
    crossed = True
    for side, attr, other in ((qp, here, peer), (peer, there, qp)):
        # Before RTR a queue pair has no peer.
        if worked_in(side, attr) in RECEIVES and attr.dest_qp_num != other.qp_num:
            crossed = False
            yield Finding(
                "dest-qp-num",
                "problem",
                f"{side} has dest_qp_num={attr.dest_qp_num:#x}, not {other.qp_num:#x}, the "
                f"number of {other}",
                _AGAIN,
            )
    chosen = chosen_gid(peer)
    gid = None if chosen is None else chosen.gid
    if crossed and gid is not None and here.ah_attr.dgid not in (None, gid):
        crossed = False
        yield Finding(
            "gid-wrong", "problem", f"dgid {here.ah_attr.dgid}, but {peer} has {gid}", _AGAIN
        )
    if crossed and there.qp_state in RECEIVES:
        yield Finding("peer", "ok", f"{peer} in {there.qp_state.name}; each names the other")


def _check_terms(snap: Snapshot, peer: QP, there: QPAttr) -> Iterable[Finding]:
    """Check the attributes that must match."""
    qp, here = snap.qp, snap.attr
    if worked_in(peer, there) not in RECEIVES:
        return
    if here.path_mtu != there.path_mtu and here.path_mtu and there.path_mtu:
        evidence = f"path_mtu {here.path_mtu.bytes}, but the peer's is {there.path_mtu.bytes}"
        yield Finding("mtu-mismatch", "problem", evidence, _AGAIN)
    for sender, expecting, side in (
        (qp, peer, f"{qp} sends"),
        (peer, qp, f"its peer {peer} sends"),
    ):
        # Compare the PSNs as they were set: some devices report the current PSN, some the first.
        sent, expected = settings(sender).get("sq_psn"), settings(expecting).get("rq_psn")
        if qp.qp_type is QPType.UC or None in (sent, expected):
            # UC accepts any PSN.
            continue
        if sent != expected:
            yield Finding(
                "psn-mismatch",
                "problem",
                f"{side} from sq_psn={sent:#x}, but the receiver expects rq_psn={expected:#x}: "
                "packets are dropped, or are taken for duplicates and acknowledged with nothing "
                "written",
                _AGAIN,
            )
    sources = (snap.source_of(here), snap.source_of(there))
    gid_types = [source.gid_type for source in sources if source and source.gid_type is not None]
    if qp.context.name == peer.context.name and len(set(gid_types)) > 1:
        yield Finding(
            "gid-type-mismatch",
            "problem",
            f"its GID is {gid_types[0].name}, but the peer's is {gid_types[1].name}: they cannot "
            "reach each other",
            "give both a gid_index of the same type ('rdmapost devices')",
        )
    if qp.qp_type is not QPType.XRC_RECV:
        lacking = [
            flag.name or ""
            for flag in _ACCESS + _FLUSH_ACCESS * bool(qp.send_ops_flags & SendOps.FLUSH)
            if not flag & there.qp_access_flags
            and not (qp.qp_type is QPType.UC and flag is not Access.REMOTE_WRITE)
        ]
        if lacking:
            yield Finding(
                "peer-access",
                "info",
                f"its peer {peer} does not allow {', '.join(lacking)}: such work requests "
                f"{access_refused(qp.qp_type)}",
                "connect the peer with access=...",
            )
