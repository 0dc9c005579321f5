"""Loopback checks: post every opcode on every QP type and verify the result.

A check passes only if the bytes arrive where they should and nowhere else, an
atomic's values are right, or a key grants or denies access as it must; a
completion alone proves nothing.  A check is unsupported only if the device lacks
the feature; any other problem is a failure, a timeout included.

A check of your own is a function that takes a Trial.  It returns what it has verified, or
raises Failed or Unsupported.  Call it, or append a Row to ROWS, and run_checks runs it too::

    def empty_send(trial: Trial) -> str:
        with trial.loopback() as pair:
            pair.receive(0)
            pair.local.qp.post_send(rdmapost.Send(**pair.address))
            pair.sent()[0].check()
            if pair.arrived()[0].byte_len != pair.headroom:
                raise Failed("an empty message arrived with data")
        return "an empty message arrived"

    ROWS.append(Row("EMPTY_SEND", (QPType.RC, QPType.UD), empty_send))
"""

from .registry import Failed, Result, Row, Trial, Unsupported
from .runner import ROWS, run_checks

__all__ = ["ROWS", "Failed", "Result", "Row", "Trial", "Unsupported", "run_checks"]
