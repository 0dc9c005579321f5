"""Find diagnosis findings by name."""

from __future__ import annotations

import rdmapost as rp
from rdmapost.diagnose import Finding

__all__ = ["named", "problems", "wrong"]


def named(findings: list[Finding], name: str) -> Finding:
    """Return the only finding with that name."""
    found = [finding for finding in findings if finding.name == name]
    assert len(found) == 1, [finding.name for finding in findings]
    return found[0]


def problems(findings: list[Finding]) -> list[str]:
    """Return the names of the problems."""
    return [finding.name for finding in findings if finding.severity == "problem"]


def wrong(qp: rp.QP, *peer: rp.QP | rp.Endpoint) -> list[str]:
    """Return the names of the problems of a queue pair."""
    return problems(qp.diagnose(*peer))
