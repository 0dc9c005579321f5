"""The findings of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["problem", "warning", "info", "ok"]

_ORDER: dict[Severity, int] = {"problem": 0, "warning": 1, "info": 2, "ok": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: identifies it to programs; stable across versions.
        severity: "problem" (it cannot work), "warning" (it works, but may fail
            later), "info" (worth knowing) or "ok" (checked and correct).
        evidence: what was seen, with the numbers.
        remedy: what to do, as a command or a call where possible; "" if there is
            nothing to do.
        about: the object that it concerns: a queue pair, a port, a file, the machine.
    """

    name: str
    severity: Severity
    evidence: str
    remedy: str = ""
    about: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.severity}: {self.name}: {self.evidence}{remedy}"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by severity, problems first; the order within a severity is kept.

    Args:
        findings: in any order.
    """
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])


def attribute(findings: Iterable[Finding], about: str) -> list[Finding]:
    """Return findings, with ``about`` set in those that name no object."""
    return [finding if finding.about else replace(finding, about=about) for finding in findings]


def duration(seconds: float) -> str:
    """Format a time for people: "67.1 ms", "0.47 s", "forever"."""
    if math.isinf(seconds):
        return "forever"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 120:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
