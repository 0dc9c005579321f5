"""Why does it not work?  A checklist for queue pairs in use, and one for the machine.

No check changes the state it inspects, and none raises: what cannot be inspected
is a finding too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...resources.endpoint import Endpoint
from . import addressing, qp_checks
from .finding import Finding, Severity, worst_first
from .machine import diagnose_machine
from .peer import check_peer
from .snapshot import FAILURES, Snapshot, is_queue_pair, name_of, take_snapshot

if TYPE_CHECKING:
    from ...resources.qp import QP

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
        TypeError: the peer is neither.
    """
    if not (peer is None or is_queue_pair(peer) or isinstance(peer, Endpoint)):
        raise TypeError(f"peer: expected QP or Endpoint, got {type(peer).__name__}")
    about = name_of(qp)
    if findings := [*qp_checks.check_process(qp, about)]:
        return findings
    if qp.closed:
        return [
            Finding("qp-closed", "problem", f"{qp} is closed", "create a new queue pair", about)
        ]
    try:
        snap = take_snapshot(qp, peer)
    except FAILURES as error:
        return [
            Finding(
                "not-readable",
                "problem",
                f"its attributes cannot be read: {error}",
                "check that the device still exists ('rdmapost devices')",
                about,
            )
        ]
    for check in _CHECKS:
        try:
            findings += check(snap)
        except FAILURES as error:
            what = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(
                Finding("not-checked", "info", f"{what} could not be checked: {error}", about=about)
            )
    return worst_first(findings)
