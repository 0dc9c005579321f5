"""The checklist of QP.diagnose."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...resources.endpoint import Endpoint
from ...resources.qp import QP
from . import port_checks, qp_checks
from .finding import Finding, attribute, worst_first
from .peer import check_peer
from .snapshot import FAILURES, Snapshot, take_snapshot

_CHECKS: tuple[Callable[[Snapshot], Iterable[Finding]], ...] = (
    qp_checks.check_state,
    port_checks.check_ports,
    port_checks.check_gids,
    port_checks.check_path_mtu,
    check_peer,
    qp_checks.check_retries,
    qp_checks.check_rnr,
    qp_checks.check_rd_atomic,
    qp_checks.check_sends,
    qp_checks.check_receives,
    qp_checks.check_completions,
    qp_checks.check_access,
)


def run_checklist(qp: QP, peer: QP | Endpoint | None) -> list[Finding]:
    """Do QP.diagnose's work."""
    if not (peer is None or isinstance(peer, QP | Endpoint)):
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
