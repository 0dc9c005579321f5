"""Diagnose why RDMA does not work: checks for live queue pairs, and for the machine.

QP.diagnose checks a queue pair.  Checks never change state and never raise; a check that cannot run
is reported as a finding.
"""

from __future__ import annotations

from .finding import Finding, Severity, worst_first
from .machine_checks import diagnose_machine

__all__ = ["Finding", "Severity", "diagnose_machine", "worst_first"]
