"""Checks of one queue pair's state, timers and queues."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..._arguments import counted
from ...enums import Access, QPState, QPType
from ...resources.cq import CQ
from ...resources.device import provider_of
from ...resources.events import OVERRUN, has_overrun
from ...resources.qp import QP, oldest_send, sends_for_receive
from ...resources.resource import creator, open_children
from ...resources.srq import SRQ
from ...standard.timers import (
    RNR_FOREVER,
    ack_timeout,
    rnr_timer,
    until_retry_exc,
    until_rnr_retry_exc,
)
from .finding import Finding, Severity, duration
from .snapshot import CONNECTED, Snapshot

_LONG_S = 60.0
_SHORT_S = 2.0
_RETRY_CNT = 6  # the default of connect()
_RXE_VENDOR = 0xFFFFFF
_NO_RECEIVES = frozenset({QPType.XRC_SEND, QPType.XRC_RECV})
_FAILED = frozenset({QPState.SQE, QPState.ERR})
_LOST = "the CQ has overrun, and their completions may be lost"
_RECREATE = (
    "close the CQ and the queue pairs that complete on it, and create them again: a CQ that has "
    "overrun cannot be resized or reused"
)

_STATES: dict[QPState, tuple[Severity, str]] = {
    QPState.RESET: ("problem", "nothing can be posted to it, and nothing arrives"),
    QPState.INIT: ("problem", "receives can be posted; nothing arrives, and sends are refused"),
    QPState.RTR: ("warning", "it receives, but does not send"),
    QPState.RTS: ("ok", "it sends and receives"),
    QPState.SQD: ("warning", "its sends are held"),
    QPState.SQE: ("problem", "a send has failed; sends complete with WR_FLUSH_ERR"),
    QPState.ERR: ("problem", "it has failed; everything posted completes with WR_FLUSH_ERR"),
    QPState.UNKNOWN: ("warning", "the device does not report it"),
}
_UNKNOWN: tuple[Severity, str] = ("warning", "this version of rdmapost does not know this state")


def check_process(qp: QP) -> Iterable[Finding]:
    """Check that this process created the queue pair; no other process can read it."""
    maker = creator(qp)
    if maker != os.getpid():
        yield Finding(
            "other-process",
            "problem",
            f"process {maker} created it, and this is a forked child ({os.getpid()}), which has "
            "only copies of its memory and its queues",
            "open the device and create the queue pair after the fork",
        )


def check_state(snap: Snapshot) -> Iterable[Finding]:
    """Check the state."""
    qp, state = snap.qp, snap.attr.qp_state
    severity, what = _STATES.get(state, _UNKNOWN)
    if state in (QPState.RTR, QPState.RTS) and qp.qp_type is QPType.XRC_RECV:
        severity, what = "ok", "it receives, and has no sends"
    elif state is QPState.RTS and qp.qp_type is QPType.XRC_SEND:
        what = "it sends, and has no receives"
    # Types outside CONNECTED have no connection, so their peer has not failed.
    connect, both, elsewhere = "qp.connect()", "", ""
    if qp.qp_type in CONNECTED:
        connect, both = "qp.connect(remote)", " on both sides"
        elsewhere = "; without one, poll the peer's CQ"
    if state in _FAILED and _overrun(qp):
        yield Finding(
            "qp-state",
            severity,
            f"in {state.name}, and its CQ has overrun: the completion with the cause may be lost",
            _RECREATE,
        )
        return
    remedy = {
        QPState.RESET: f"{connect}, with the peer's qp.endpoint(); first reset a peer that was "
        "connected to it",
        QPState.INIT: f"{connect}, or qp.to_rtr() and qp.to_rts()",
        QPState.RTR: "qp.to_rts()",
        QPState.SQD: "qp.to_rts()",
        QPState.SQE: "poll send_cq for the first error other than WR_FLUSH_ERR; then qp.to_rts()",
        QPState.ERR: "poll the CQ: the first error other than WR_FLUSH_ERR says why "
        f"('rdmapost explain STATUS'){elsewhere}; then qp.to_reset() and {connect}{both}",
    }
    if qp.qp_type not in CONNECTED:
        remedy[QPState.RESET] = connect
    fix = "" if severity == "ok" else remedy.get(state, "qp.query() again, or see 'dmesg'")
    yield Finding("qp-state", severity, f"in {state.name}: {what}", fix)


def check_retries(snap: Snapshot) -> Iterable[Finding]:
    """Check how long a send waits for an acknowledgement."""
    if not snap.requests or snap.qp.qp_type not in (QPType.RC, QPType.XRC_SEND):
        return
    timeout, retry_cnt = snap.attr.timeout, snap.attr.retry_cnt
    if timeout == 0:
        yield Finding(
            "timeout-0",
            "problem",
            "timeout=0: a send waits for its acknowledgement forever, and never fails",
            f"{_better_timers(snap)}, or in SQD qp.modify(timeout={_default_timeout(snap)})",
        )
        return
    total = until_retry_exc(timeout, retry_cnt)
    evidence = (
        f"timeout={timeout} ({duration(ack_timeout(timeout))}) x (retry_cnt={retry_cnt} + 1) = "
        f"{duration(total)} until RETRY_EXC_ERR; a device may take up to four times that"
    )
    if retry_cnt == 7 and snap.qp.context.attr.vendor_id == _RXE_VENDOR:
        yield Finding(
            "retry-forever",
            "warning",
            "retry_cnt=7: Soft-RoCE retries forever, and a send without a response never fails",
            _better_timers(snap),
        )
    elif total > _LONG_S:
        yield Finding("timeout-long", "warning", evidence, _better_timers(snap))
    elif retry_cnt == 0:
        lossy = f"{evidence}; one lost packet breaks the connection"
        yield Finding("retry-cnt-0", "warning", lossy, _better_timers(snap))
    elif _is_short(snap, total):
        yield Finding(
            "timeout-short",
            "info",
            f"{evidence}; the peer of a roce device is a process, which answers late while busy",
            _better_timers(snap),
        )
    else:
        yield Finding("timeout", "ok", evidence)


def _is_short(snap: Snapshot, total: float) -> bool:
    """Whether the time is too short for a roce device: the peer's process may be busy."""
    return snap.qp.context.kind == "roce" and total < _SHORT_S


def _default_timeout(snap: Snapshot) -> int:
    return provider_of(snap.qp.context).default_timeout


def _better_timers(snap: Snapshot) -> str:
    """Say which options of connect() would satisfy check_retries()."""
    timeout, retry_cnt = snap.attr.timeout, snap.attr.retry_cnt
    total = until_retry_exc(timeout, _RETRY_CNT)
    better = []
    if total > _LONG_S or _is_short(snap, total):
        timeout = _default_timeout(snap)
        better.append(f"timeout={timeout} ({duration(ack_timeout(timeout))})")
    if retry_cnt != _RETRY_CNT:
        better.append(f"retry_cnt={_RETRY_CNT}")
    return f"connect with {' and '.join(better)}"


def check_rnr(snap: Snapshot) -> Iterable[Finding]:
    """Check how long a send waits for a receive, and how long this side makes a peer wait."""
    qp, attr = snap.qp, snap.attr
    if snap.requests and qp.qp_type in (QPType.RC, QPType.XRC_SEND):
        yield _rnr_retry(snap)
    if snap.connected and qp.qp_type in (QPType.RC, QPType.XRC_RECV):
        timer = f"min_rnr_timer={attr.min_rnr_timer} ({duration(rnr_timer(attr.min_rnr_timer))})"
        if attr.min_rnr_timer == 0:
            evidence = f"{timer}: 0 is the longest wait for a peer that gets an RNR NAK"
            remedy = "connect with min_rnr_timer=12 (0.64 ms)"
            yield Finding("min-rnr-timer-0", "warning", evidence, remedy)
        else:
            yield Finding(
                "min-rnr-timer", "ok", f"{timer}: how long a peer that gets an RNR NAK waits"
            )


def _rnr_retry(snap: Snapshot) -> Finding:
    retry, local = snap.attr.rnr_retry, snap.responder
    if retry == RNR_FOREVER:
        severity: Severity = "warning"
        evidence = "rnr_retry=7: a send that finds no receive waits forever"
        if local is not None and not has_receive(local[0]):
            evidence += ", and the peer has none posted"
            sends = waiting_sends(snap)
            if sends:
                evidence += f"; sends outstanding here: {sends}"
                severity = "problem"
        remedy = "post receives at the peer; with rnr_retry=6 the send fails with RNR_RETRY_EXC_ERR"
        return Finding("rnr-retry-forever", severity, evidence, remedy)
    if retry == 0:
        evidence = "rnr_retry=0: the first send that finds no receive fails with RNR_RETRY_EXC_ERR"
        remedy = "connect with rnr_retry=6, or post receives before the peer can send"
        return Finding("rnr-retry-0", "warning", evidence, remedy)
    whose, condition, timer = "the peer's ", "", snap.attr.min_rnr_timer
    if local is not None:
        timer = local[1].min_rnr_timer
    elif snap.qp.qp_type is QPType.RC:
        whose, condition = "", ", if the peer has the same min_rnr_timer"
    else:
        evidence = f"rnr_retry={retry} x the peer's min_rnr_timer until RNR_RETRY_EXC_ERR"
        return Finding("rnr-retry", "ok", evidence)
    total = until_rnr_retry_exc(retry, timer)
    return Finding(
        "rnr-retry",
        "ok",
        f"rnr_retry={retry} x {whose}min_rnr_timer={timer} ({duration(rnr_timer(timer))}) = "
        f"{duration(total)} until RNR_RETRY_EXC_ERR{condition}",
    )


def check_rd_atomic(snap: Snapshot) -> Iterable[Finding]:
    """Check how many reads and atomics may be in flight."""
    if not snap.requests or snap.qp.qp_type not in (QPType.RC, QPType.XRC_SEND):
        return
    here = snap.attr.max_rd_atomic
    if not here:
        evidence = "max_rd_atomic=0: an RDMA read or atomic fails, or never starts"
        remedy = "connect with max_rd_atomic=1 or more"
        yield Finding("max-rd-atomic-0", "warning", evidence, remedy)
        return
    if (local := snap.responder) is not None and here > local[1].max_dest_rd_atomic:
        there = local[1].max_dest_rd_atomic
        yield Finding(
            "rd-atomic-mismatch",
            "problem",
            f"max_rd_atomic={here}, but the peer's max_dest_rd_atomic={there}: it may refuse read "
            f"or atomic number {there + 1}",
            # With max_rd_atomic=0 a read fails here.
            (f"connect here with max_rd_atomic={there}, or there" if there else "connect the peer")
            + f" with max_dest_rd_atomic={here}",
        )
        return
    yield Finding("max-rd-atomic", "ok", f"max_rd_atomic={here}")


# ---- queues -----------------------------------------------------------------


def check_sends(snap: Snapshot) -> Iterable[Finding]:
    """Check the send queue."""
    qp, count = snap.qp, snap.qp.outstanding.send
    if not qp.max_send_wr:
        return
    # Which of them are SIGNALED is not recorded.
    unsure = not qp.sq_sig_all
    oldest = oldest_send(qp)
    evidence = f"sends outstanding: {count} of max_send_wr={qp.max_send_wr}"
    if oldest is not None:
        evidence += f", the oldest with wr_id {oldest}"
    failed = snap.attr.qp_state in _FAILED
    if count and failed and qp.send_cq in _overrun(qp):
        yield Finding("outstanding", "info", f"{evidence}; {_LOST}")
    elif count and failed and unsure:
        # Those that succeeded unsignaled have no completion.
        full = "only qp.to_reset() clears a full queue"
        retire = "post a SIGNALED send: its flush retires the others"
        yield Finding(
            "outstanding",
            "info",
            f"{evidence}: not yet polled, or done without SIGNALED; those count until a later "
            "send completes",
            f"poll send_cq; if it is empty, {full if count >= qp.max_send_wr else retire}",
        )
    elif count and failed:
        yield Finding(
            "not-polled", "warning", f"{evidence}; their completions are in the CQ", "poll send_cq"
        )
    elif count >= qp.max_send_wr:
        doubt = "; if none of them is SIGNALED, no slot is ever freed" if unsure else ""
        yield Finding(
            "send-queue-full",
            "warning",
            evidence + doubt,
            "poll send_cq: the completion of a later SIGNALED send frees the slot"
            + (
                ", so make every n-th send SIGNALED, with n below max_send_wr; if none of these "
                "is, qp.to_reset()"
                if unsure
                else ""
            ),
        )
    elif count and unsure:
        yield Finding(
            "outstanding",
            "info",
            f"{evidence}: in flight, or not yet polled; sends without SIGNALED "
            "count until a later SIGNALED send completes",
            "poll send_cq; make every n-th send SIGNALED",
        )
    elif count:
        yield Finding(
            "outstanding", "info", f"{evidence}: in flight, or not yet polled", "poll send_cq"
        )
    else:
        yield Finding("outstanding", "ok", evidence)


def check_receives(snap: Snapshot) -> Iterable[Finding]:
    """Check the receive queue."""
    qp, state = snap.qp, snap.attr.qp_state
    if qp.qp_type in _NO_RECEIVES or state is QPState.RESET:
        return
    count = qp.outstanding.recv
    if qp.srq is not None:
        count = qp.srq.outstanding + qp.srq.outstanding_tags
        evidence = f"receives posted to its {qp.srq}: {count}"
    else:
        evidence = f"receives posted: {count} of max_recv_wr={qp.max_recv_wr}"
    flushed = count and state is QPState.ERR and qp.srq is None
    if flushed and qp.recv_cq in _overrun(qp):
        yield Finding("receives", "info", f"{evidence}; {_LOST}")
    elif flushed:
        yield Finding(
            "not-polled",
            "warning",
            f"{evidence}; they failed or were flushed, and their completions are in the CQ",
            "poll recv_cq",
        )
    elif count or state is QPState.ERR:
        yield Finding("receives", "ok", evidence)
    else:
        what = "makes its sender wait (RNR)" if qp.qp_type is QPType.RC else "is dropped"
        post = "qp.post_recv" if qp.srq is None else "srq.post_srq_recv"
        evidence = f"{evidence}; an incoming message {what}"
        yield Finding("recv-none-posted", "info", evidence, f"{post}(...) before the peer sends")


def check_completions(snap: Snapshot) -> Iterable[Finding]:
    """Check that the completion queues can hold all that may complete there."""
    for cq in _cqs(snap.qp):
        yield _check_cq(cq, snap)


def _cqs(qp: QP) -> list[CQ]:
    """Return the queue pair's own CQs; an XRC_RECV queue pair uses those of the SRQs."""
    return [cq for cq in dict.fromkeys((qp.send_cq, qp.recv_cq)) if cq is not None]


def _overrun(qp: QP) -> list[CQ]:
    """Return the queue pair's CQs that have lost completions."""
    return [cq for cq in _cqs(qp) if has_overrun(cq)]


def _check_cq(cq: CQ, snap: Snapshot) -> Finding:
    outstanding = capacity = 0
    shared: dict[int, SRQ] = {}
    for user in open_children(cq):
        if isinstance(user, SRQ):
            shared[id(user)] = user
        if not isinstance(user, QP):
            continue
        if user.send_cq is cq:
            outstanding += user.outstanding.send
            capacity += user.max_send_wr
        if user.recv_cq is cq and user.srq is not None:
            shared[id(user.srq)] = user.srq
        elif user.recv_cq is cq:
            outstanding += user.outstanding.recv
            capacity += user.max_recv_wr
    for srq in shared.values():
        outstanding += srq.outstanding + srq.outstanding_tags + srq.outstanding_ops
        capacity += srq.max_wr + srq.max_num_tags + srq.max_ops
    room = counted(capacity, "work request")
    evidence = f"{cq}; its queues hold up to {room}; outstanding: {outstanding}"
    if has_overrun(cq):
        # Its size no longer matters, because a CQ in error cannot be resized.
        return Finding("cq-overrun", "problem", f"{evidence}: {OVERRUN}", _RECREATE)
    remedy = f"cq.resize({capacity}), or poll before the CQ can fill up"
    if outstanding > cq.cqe:
        failed = snap.attr.qp_state is QPState.ERR
        return Finding(
            "cq-too-small",
            "problem" if failed else "warning",
            f"{evidence}; if more complete than the CQ holds, it overruns and its queue pairs fail",
            remedy,
        )
    if capacity > cq.cqe:
        return Finding("cq-too-small", "info", evidence, remedy)
    return Finding("cq", "ok", evidence)


def check_access(snap: Snapshot) -> Iterable[Finding]:
    """Check the access that a peer has."""
    if not snap.connected or snap.qp.qp_type is QPType.XRC_SEND:
        return
    flags = snap.attr.qp_access_flags
    remote = ("REMOTE", "FLUSH")
    allowed = [str(flag) for flag in Access if flag & flags and str(flag).startswith(remote)]
    if allowed:
        evidence = f"qp_access_flags: a peer may {', '.join(allowed)}, if the region permits it"
        yield Finding("access", "ok", evidence)
    else:
        unreliable = snap.qp.qp_type is QPType.UC
        refused = "writes" if unreliable else "writes, reads and atomics"
        lacks = "REMOTE_WRITE" if unreliable else "REMOTE_WRITE, REMOTE_READ or REMOTE_ATOMIC"
        grant = "Access.REMOTE_WRITE" + ("" if unreliable else " | Access.REMOTE_READ")
        yield Finding(
            "access-none",
            "info",
            f"qp_access_flags has no {lacks}: a peer can send, but its {refused} "
            f"{access_refused(snap.qp.qp_type)}",
            f"connect with access={grant}",
        )


def access_refused(qp_type: QPType) -> str:
    """Say what happens to work requests that the peer's qp_access_flags do not allow."""
    return "are dropped" if qp_type is QPType.UC else "end with REM_INV_REQ_ERR"


def waiting_sends(snap: Snapshot) -> int | None:
    """Count the outstanding sends that consume a receive; None if the device cannot tell."""
    qp = snap.qp
    if not qp.outstanding.send or snap.attr.qp_state in _FAILED:
        return 0
    return sends_for_receive(qp)


def has_receive(qp: QP) -> bool:
    """Whether this process has posted a receive that a message to a queue pair can consume."""
    if qp.qp_type in _NO_RECEIVES:
        # On XRC each message takes a receive from the SRQ that it names.
        return True
    if qp.srq is not None:
        return bool(qp.srq.outstanding + qp.srq.outstanding_tags)
    return bool(qp.outstanding.recv)
