"""Explanations of other words in errors, logs and completions."""

from __future__ import annotations

import re
from functools import partial

from ...standard.timers import rnr_timer
from .model import Explanation, named

VENDOR_ERR_NUMBER = re.compile(
    r"\b(?:vendor[_ ]?(?:err(?:or)?|code|syndrome)|syndrome?)[ =:]*(?:0x[\da-f]+|\d+)\b",
    re.IGNORECASE,
)
"""How programs print a vendor_err: perftest's "syndrom 0x81", NCCL's "vendor err 129"."""
AETH_SYNDROME = re.compile(
    r"(?:\bPSN \d+ .*|\bAETH\b.*)\bsyndrome[ =:]+(0x(?:[0-3]?[\da-f]|6[0-4]))\b", re.IGNORECASE
)
"""The syndrome of an answer, in a line that describes a packet."""
_NAKS = (
    "PSN sequence error: a packet is missing, and the requester resends from there",
    "invalid request: the requester completes with REM_INV_REQ_ERR",
    "remote access error: the requester completes with REM_ACCESS_ERR",
    "remote operational error: the requester completes with REM_OP_ERR",
    "invalid RD request: only on RD queue pairs",
)


_term = partial(named, "term")


def aeth_syndrome(value: int) -> Explanation:
    """Explain the first byte of an answer's AETH, which is that of an ACK, RNR NAK or NAK."""
    low = value & 0x1F
    if value >= 0x60:
        meaning = f"NAK, {_NAKS[low]}."
    elif value >= 0x20:
        wait = f"min_rnr_timer={low}, {rnr_timer(low) * 1000:g} ms"
        meaning = f"RNR NAK: no receive is posted; the requester waits ({wait}) and retries."
    else:
        meaning = (
            "ACK: all up to this PSN has arrived. The low 5 bits are credits; 0x1f: not in use."
        )
    return _term(f"AETH syndrome {value:#x}", meaning, see=("IBA vol. 1, 9.7.5 (responses)",))


VENDOR_ERR = _term(
    "vendor_err",
    "A number from the driver or the device that says more about a failed work request than the "
    "status does. Each driver has its own numbers, and only the driver knows their meaning. It is "
    "also called vendor error, vendor code or syndrome; the syndromes of failed commands in dmesg "
    "are different numbers.",
    "The status of the same completion: explain that. It decides what to do.",
    "The documentation of the device, or its vendor: neither libibverbs nor the sources of mlx5 "
    "have a list.",
    see=("ibv_poll_cq(3): vendor_err",),
)

TERMS: tuple[Explanation, ...] = (
    VENDOR_ERR,
    _term(
        "RNR",
        "Receiver not ready: a message came for which no receive was posted. On RC the receiver "
        "says so (RNR NAK), the sender waits for the receiver's min_rnr_timer and tries again, "
        "rnr_retry times, and then fails with RNR_RETRY_EXC_ERR.",
        "rdmapost explain RNR_RETRY_EXC_ERR.",
    ),
    _term(
        "PSN",
        "Packet sequence number, 24 bits: the receiver drops a packet whose number is ahead of the "
        "one it expects, and takes one that is behind for a duplicate. Each side's rq_psn must be "
        "the other's sq_psn.",
        "qp.psn and qp.endpoint(), which qp.connect() uses; qp.diagnose() compares both sides.",
        see=("ibv_modify_qp(3): rq_psn, sq_psn",),
    ),
    _term(
        "lkey",
        "The key with which this side's work requests use a region: mr[start:stop] has it. With a "
        "wrong one they complete with LOC_PROT_ERR.",
        "mr.lkey, and whether the region is open and on the PD of the queue pair.",
        see=("ibv_reg_mr(3)",),
    ),
    _term(
        "rkey",
        "The key with which peers' work requests access a region or window; they also need the "
        "address. With a wrong key they complete with REM_ACCESS_ERR.",
        "mr.rkey and mr.access of the region, and the key that its owner gave to the peer.",
        see=("ibv_reg_mr(3)", "ibv_bind_mw(3)"),
    ),
)
