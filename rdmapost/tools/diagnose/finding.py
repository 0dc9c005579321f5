"""What a diagnosis says: one finding for each thing it has looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Severity", "duration", "worst_first"]

Severity = Literal["problem", "warning", "info", "ok"]

_ORDER: dict[Severity, int] = {"problem": 0, "warning": 1, "info": 2, "ok": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a diagnosis has looked at.

    Attributes:
        name: what it is, for programs; it stays the same between versions.
        severity: "problem" (it cannot work like this), "warning" (it works, or it
            may fail later), "info" (worth knowing) or "ok" (looked at, and right).
        evidence: what was seen, with the numbers.
        remedy: what to do, as a command or a call where there is one; "" when
            there is nothing to do.
        about: which object it is about: a queue pair, a port, a file, the machine.
    """

    name: str
    severity: Severity
    evidence: str
    remedy: str = ""
    about: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the problems first; those of one severity keep their order.

    Args:
        findings: in any order.
    """
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])


def duration(seconds: float) -> str:
    """Return a time as a person would say it: "67.1 ms", "0.47 s", "for ever"."""
    if math.isinf(seconds):
        return "for ever"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 120:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
