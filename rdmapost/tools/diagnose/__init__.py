"""Diagnose why RDMA does not work: checks for live queue pairs, and for the machine.

Checks never change state and never raise; a check that cannot run is reported as a
finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..._arguments import expect
from ...resources.endpoint import Endpoint
from ...resources.qp import QP
from . import addressing, qp_checks
from .finding import Finding, Severity, attribute, worst_first
from .machine_checks import diagnose_machine
from .peer import check_peer
from .snapshot import FAILURES, Snapshot, is_queue_pair, take_snapshot

__all__ = ["Finding", "Severity", "diagnose", "diagnose_machine", "worst_first"]

_CHECKS: tuple[Callable[[Snapshot], Iterable[Finding]], ...] = (
    qp_checks.check_state,
    addressing.check_ports,
    addressing.check_gids,
    addressing.check_path_mtu,
    check_peer,
    qp_checks.check_retries,
    qp_checks.check_rnr,
    qp_checks.check_rd_atomic,
    qp_checks.check_sends,
    qp_checks.check_receives,
    qp_checks.check_completions,
    qp_checks.check_access,
)


def diagnose(qp: QP, peer: QP | Endpoint | None = None) -> list[Finding]:
    """Run the checklist for a queue pair; see QP.diagnose.

    Args:
        qp: the queue pair.
        peer: the other side, or its endpoint().

    Returns:
        findings, problems first.

    Raises:
        TypeError: qp is not a QP, or the peer neither a QP nor an Endpoint.
    """
    expect("qp", qp, QP)
    if not (peer is None or is_queue_pair(peer) or isinstance(peer, Endpoint)):
        raise TypeError(f"peer: expected QP or Endpoint, got {type(peer).__name__}")
    findings = _check(qp, peer)
    return worst_first(attribute(findings, f"{qp} on {qp.context.name}"))


def _check(qp: QP, peer: QP | Endpoint | None) -> Iterable[Finding]:
    if findings := [*qp_checks.check_process(qp)]:
        yield from findings
        return
    if qp.closed:
        yield Finding("qp-closed", "problem", f"{qp} is closed", "create a new queue pair")
        return
    try:
        snap = take_snapshot(qp, peer)
    except FAILURES as error:
        evidence = f"its attributes cannot be read: {error}"
        remedy = "check that the device still exists ('rdmapost devices')"
        yield Finding("not-readable", "problem", evidence, remedy)
        return
    for check in _CHECKS:
        try:
            yield from check(snap)
        except FAILURES as error:
            what = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding("not-checked", "info", f"{what} could not be checked: {error}")
