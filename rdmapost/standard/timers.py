"""The times encoded in a queue pair's attributes (ibv_modify_qp(3))."""

from __future__ import annotations

import math

RNR_FOREVER = 7
"""rnr_retry: never give up."""

_RNR_MILLISECONDS = (
    "655.36 0.01 0.02 0.03 0.04 0.06 0.08 0.12 0.16 0.24 0.32 0.48 0.64 0.96 1.28 1.92 2.56 "
    "3.84 5.12 7.68 10.24 15.36 20.48 30.72 40.96 61.44 81.92 122.88 163.84 245.76 327.68 "
    "491.52"
)
"""The values of min_rnr_timer (InfiniBand Architecture Specification, table 45)."""


def ack_timeout(timeout: int) -> float:
    """Return how many seconds a sender waits for an acknowledgement.

    Args:
        timeout: the attribute, 0..31; 0: forever (math.inf).
    """
    return 4.096e-6 * (1 << timeout) if timeout else math.inf


def rnr_timer(min_rnr_timer: int) -> float:
    """Return how many seconds a sender waits after an RNR NAK.

    Args:
        min_rnr_timer: the receiving side's attribute, 0..31.
    """
    return float(_RNR_MILLISECONDS.split()[min_rnr_timer & 31]) / 1000


def until_retry_exc(timeout: int, retry_cnt: int) -> float:
    """Return the number of seconds until an unanswered send fails with RETRY_EXC_ERR.

    Args:
        timeout: the attribute, 0..31; 0: forever (math.inf).
        retry_cnt: attempts after the first, 0..7.
    """
    return ack_timeout(timeout) * (retry_cnt + 1)


def until_rnr_retry_exc(rnr_retry: int, min_rnr_timer: int) -> float:
    """Return the number of seconds until a send that finds no receive fails with RNR_RETRY_EXC_ERR.

    Args:
        rnr_retry: the sender's attribute, 0..7; 7: forever (math.inf).
        min_rnr_timer: the receiver's attribute, 0..31.
    """
    return math.inf if rnr_retry == RNR_FOREVER else rnr_retry * rnr_timer(min_rnr_timer)
