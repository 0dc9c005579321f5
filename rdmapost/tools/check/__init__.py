"""Loopback checks: post every opcode on every QP type and verify the result.

A check passes only if the bytes arrive where they should and nowhere else, an
atomic's values are right, or a key grants or denies access as it must; a
completion alone proves nothing.  A check is unsupported only if the device lacks
the feature; any other problem is a failure, a timeout included.
"""

from .registry import Failed, Result, Row, Trial, Unsupported
from .runner import ROWS, run_checks

__all__ = ["ROWS", "Failed", "Result", "Row", "Trial", "Unsupported", "run_checks"]
