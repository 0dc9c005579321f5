"""Loopback checks: post every opcode on every QP type and look at what it did.

A row passes only when the bytes arrived where they should and nowhere else, an
atomic's values are right, or a key works or is refused as it must be; a
completion alone proves nothing.  A row is unsupported only for what the device
cannot do; everything else that goes wrong is a failure, a wait that ends
without a result too.
"""

from .registry import Failed, Result, Row, Trial, Unsupported
from .runner import ROWS, run_checks

__all__ = ["ROWS", "Failed", "Result", "Row", "Trial", "Unsupported", "run_checks"]
