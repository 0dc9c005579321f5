"""The checklist of one queue pair: its state, its timers and its queues."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..._timers import RNR_FOR_EVER, ack_timeout, rnr_timer, until_retry_exc, until_rnr_retry_exc
from ...enums import Access, QPState, QPType
from ...resources.cq import CQ
from ...resources.events import OVERRUN, has_overrun
from ...resources.qp import QP, oldest_send, sends_for_receive
from ...resources.resource import Resource, creator, open_children
from ...resources.srq import SRQ
from .finding import Finding, Severity, duration
from .looking import CONNECTED, Seen, is_queue_pair

__all__ = [
    "check_access",
    "check_completions",
    "check_process",
    "check_rd_atomic",
    "check_receives",
    "check_retries",
    "check_rnr",
    "check_sends",
    "check_state",
    "has_receive",
    "waiting_sends",
]

_LONG_S = 60.0
_RXE_VENDOR = 0xFFFFFF
_NO_RECEIVES = frozenset({QPType.XRC_SEND, QPType.XRC_RECV})
_FAILED = frozenset({QPState.SQE, QPState.ERR})
_LOST = "the CQ has overrun, and their completions may be lost"
_ANEW = "close the queue pairs that complete on the CQ, and the CQ; create them again"

_STATES: dict[QPState, tuple[Severity, str]] = {
    QPState.RESET: ("problem", "nothing can be posted to it, and nothing arrives"),
    QPState.INIT: ("problem", "receives can be posted; nothing arrives, and sends are refused"),
    QPState.RTR: ("warning", "it receives, and does not send"),
    QPState.RTS: ("ok", "it sends and receives"),
    QPState.SQD: ("warning", "its sends are held"),
    QPState.SQE: ("problem", "a send has failed; sends complete with WR_FLUSH_ERR"),
    QPState.ERR: ("problem", "it has failed; all that is posted completes with WR_FLUSH_ERR"),
    QPState.UNKNOWN: ("warning", "the device does not say what it does"),
}


def check_process(qp: QP, about: str) -> Iterable[Finding]:
    """Look at whether it is this process that made it; in any other it cannot be read."""
    maker = creator(qp)
    if maker != os.getpid():
        yield Finding(
            "other-process",
            "problem",
            f"process {maker} made it, and this is its child {os.getpid()}: the memory and the "
            "queues are copies",
            "open the device and create the queue pair after the fork",
            about,
        )


def check_state(seen: Seen) -> Iterable[Finding]:
    """Look at the state."""
    qp, state = seen.qp, seen.attr.qp_state
    severity, what = _STATES[state]
    if state is QPState.RTR and qp.qp_type is QPType.XRC_RECV:
        severity, what = "ok", "it receives; it has no sends of its own"
    connect = "qp.connect(remote)" if qp.qp_type in CONNECTED else "qp.connect()"
    if state in _FAILED and _overrun(qp):
        yield Finding(
            "qp-state",
            severity,
            f"in {state.name}, and its CQ has overrun: the completion that says why may be lost",
            _ANEW,
            seen.about,
        )
        return
    remedy = {
        QPState.RESET: f"{connect}, with what the peer's qp.endpoint() says",
        QPState.INIT: f"{connect}, or qp.to_rtr() and qp.to_rts()",
        QPState.RTR: "qp.to_rts()",
        QPState.SQD: "qp.to_rts()",
        QPState.SQE: "poll send_cq for the first error that is no WR_FLUSH_ERR; then qp.to_rts()",
        QPState.ERR: "poll the CQ: the first error that is no WR_FLUSH_ERR says why "
        f"('rdmapost explain'); then qp.to_reset() and {connect} on both sides",
    }
    if qp.qp_type not in CONNECTED:
        remedy[QPState.RESET] = connect
    fix = "" if severity == "ok" else remedy.get(state, "qp.query() again, or see 'dmesg'")
    yield Finding("qp-state", severity, f"in {state.name}: {what}", fix, seen.about)


def check_retries(seen: Seen) -> Iterable[Finding]:
    """Look at how long a send waits for an acknowledgement."""
    if not seen.requests or seen.qp.qp_type not in (QPType.RC, QPType.XRC_SEND):
        return
    timeout, retry_cnt = seen.attr.timeout, seen.attr.retry_cnt
    if timeout == 0:
        yield Finding(
            "timeout-0",
            "problem",
            "timeout=0: an acknowledgement is waited for for ever, and a send that nothing "
            "answers never ends",
            "connect with timeout=14 (67.1 ms), or in SQD qp.modify(timeout=14)",
            seen.about,
        )
        return
    total = until_retry_exc(timeout, retry_cnt)
    evidence = (
        f"timeout={timeout} ({duration(ack_timeout(timeout))}) x (retry_cnt={retry_cnt} + 1) = "
        f"{duration(total)} until RETRY_EXC_ERR; a device may take up to four times that"
    )
    if retry_cnt == 7 and seen.qp.pd.context.attr.vendor_id == _RXE_VENDOR:
        yield Finding(
            "retry-for-ever",
            "warning",
            "retry_cnt=7: Soft-RoCE takes that for ever, and a send that nothing answers never "
            "ends",
            "connect with retry_cnt=6 or less",
            seen.about,
        )
    elif total > _LONG_S:
        yield Finding(
            "timeout-long", "warning", evidence, "connect with timeout=14 (67.1 ms)", seen.about
        )
    elif retry_cnt == 0:
        yield Finding(
            "retry-cnt-0",
            "warning",
            f"{evidence}; one lost packet is the end",
            "connect with retry_cnt=6",
            seen.about,
        )
    else:
        yield Finding("timeout", "ok", evidence, about=seen.about)


def check_rnr(seen: Seen) -> Iterable[Finding]:
    """Look at how long a send waits for a receive, and how long it lets others wait."""
    qp, attr = seen.qp, seen.attr
    if seen.requests and qp.qp_type in (QPType.RC, QPType.XRC_SEND):
        yield _rnr_retry(seen)
    if seen.connected and qp.qp_type in (QPType.RC, QPType.XRC_RECV):
        timer = f"min_rnr_timer={attr.min_rnr_timer} ({duration(rnr_timer(attr.min_rnr_timer))})"
        if attr.min_rnr_timer == 0:
            yield Finding(
                "min-rnr-timer-0",
                "warning",
                f"{timer}: 0 is the longest that there is; a peer that finds no receive waits it",
                "connect with min_rnr_timer=12 (0.64 ms)",
                seen.about,
            )
        else:
            yield Finding(
                "min-rnr-timer",
                "ok",
                f"{timer} is what a peer waits that finds no receive",
                about=seen.about,
            )


def _rnr_retry(seen: Seen) -> Finding:
    retry, local = seen.attr.rnr_retry, seen.responder
    if retry == RNR_FOR_EVER:
        severity: Severity = "warning"
        evidence = "rnr_retry=7: a send that finds no receive waits for ever"
        if local is not None and not has_receive(local[0]):
            evidence += ", and the peer has none posted"
            sends = waiting_sends(seen)
            if sends:
                evidence += f"; sends outstanding here: {sends}"
                severity = "problem"
        remedy = "post receives at the peer; with rnr_retry=6 it ends with RNR_RETRY_EXC_ERR"
        return Finding("rnr-retry-for-ever", severity, evidence, remedy, seen.about)
    if retry == 0:
        return Finding(
            "rnr-retry-0",
            "warning",
            "rnr_retry=0: the first send that finds no receive ends with RNR_RETRY_EXC_ERR",
            "connect with rnr_retry=6, or post receives before the peer can send",
            seen.about,
        )
    whose, timer = "the peer's", seen.attr.min_rnr_timer
    if local is not None:
        timer = local[1].min_rnr_timer
    elif seen.qp.qp_type is QPType.RC:
        whose = "if the peer has the same"
    else:
        return Finding(
            "rnr-retry",
            "ok",
            f"rnr_retry={retry} x the peer's min_rnr_timer until RNR_RETRY_EXC_ERR",
            about=seen.about,
        )
    total = until_rnr_retry_exc(retry, timer)
    return Finding(
        "rnr-retry",
        "ok",
        f"rnr_retry={retry} x {whose} min_rnr_timer={timer} ({duration(rnr_timer(timer))}) = "
        f"{duration(total)} until RNR_RETRY_EXC_ERR",
        about=seen.about,
    )


def check_rd_atomic(seen: Seen) -> Iterable[Finding]:
    """Look at how many reads and atomics it may have under way."""
    if not seen.requests or seen.qp.qp_type not in (QPType.RC, QPType.XRC_SEND):
        return
    here = seen.attr.max_rd_atomic
    if not here:
        yield Finding(
            "max-rd-atomic-0",
            "warning",
            "max_rd_atomic=0: an RDMA read or atomic fails, or never starts",
            "connect with max_rd_atomic=1 or more",
            seen.about,
        )
        return
    if (local := seen.responder) is not None and here > local[1].max_dest_rd_atomic:
        there = local[1].max_dest_rd_atomic
        yield Finding(
            "rd-atomic-mismatch",
            "problem",
            f"max_rd_atomic={here}, and the peer's max_dest_rd_atomic={there}: it may refuse the "
            f"read or atomic number {there + 1}",
            f"connect here with max_rd_atomic={there}, or there with max_dest_rd_atomic={here}",
            seen.about,
        )
        return
    yield Finding("max-rd-atomic", "ok", f"max_rd_atomic={here}", about=seen.about)


# ---- queues -----------------------------------------------------------------


def check_sends(seen: Seen) -> Iterable[Finding]:
    """Look at what is on the send queue."""
    qp, count = seen.qp, seen.qp.outstanding.send
    if not qp.max_send_wr:
        return
    # Which of them are SIGNALED is not kept.
    unsure = not qp.sq_sig_all
    oldest = oldest_send(qp)
    evidence = f"sends outstanding: {count} of max_send_wr={qp.max_send_wr}"
    if oldest is not None:
        evidence += f", the oldest with wr_id {oldest}"
    failed = seen.attr.qp_state in _FAILED
    if count and failed and qp.send_cq in _overrun(qp):
        yield Finding("outstanding", "info", f"{evidence}; {_LOST}", about=seen.about)
    elif count and failed:
        yield Finding(
            "not-polled",
            "warning",
            f"{evidence}; they have failed, and wait in the CQ",
            "poll send_cq",
            seen.about,
        )
    elif count >= qp.max_send_wr:
        doubt = "; if none of them is SIGNALED, no slot ever comes free" if unsure else ""
        yield Finding(
            "send-queue-full",
            "warning",
            evidence + doubt,
            "poll send_cq: a slot comes free with the completion of a later SIGNALED send"
            + (", so make every n-th one SIGNALED, n below max_send_wr" if unsure else ""),
            seen.about,
        )
    elif count and unsure:
        yield Finding(
            "outstanding",
            "info",
            f"{evidence}: under way, or their completions are not polled; ones without SIGNALED "
            "count until a later SIGNALED one completes",
            "poll send_cq; make every n-th send SIGNALED",
            seen.about,
        )
    elif count:
        yield Finding(
            "outstanding",
            "info",
            f"{evidence}: under way, or their completions are not polled",
            "poll send_cq",
            seen.about,
        )
    else:
        yield Finding("outstanding", "ok", evidence, about=seen.about)


def check_receives(seen: Seen) -> Iterable[Finding]:
    """Look at what is on the receive queue."""
    qp, state = seen.qp, seen.attr.qp_state
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
        yield Finding("receives", "info", f"{evidence}; {_LOST}", about=seen.about)
    elif flushed:
        yield Finding(
            "not-polled",
            "warning",
            f"{evidence}; they have been flushed, and wait in the CQ",
            "poll recv_cq",
            seen.about,
        )
    elif count or state is QPState.ERR:
        yield Finding("receives", "ok", evidence, about=seen.about)
    else:
        what = "makes its sender wait (RNR)" if qp.qp_type is QPType.RC else "is dropped"
        post = "qp.post_recv" if qp.srq is None else "srq.post_srq_recv"
        yield Finding(
            "recv-none-posted",
            "info",
            f"{evidence}; a message that arrives {what}",
            f"{post}(...) before the peer sends",
            seen.about,
        )


def check_completions(seen: Seen) -> Iterable[Finding]:
    """Look at whether the completion queues hold what may complete there."""
    qp = seen.qp
    if qp.qp_type is QPType.XRC_RECV:
        # It uses those of the SRQs.
        return
    for cq in _cqs(qp):
        yield _check_cq(cq, seen)
    for cq in _overrun(qp):
        yield Finding("cq-overrun", "problem", f"{cq}: {OVERRUN}", _ANEW, seen.about)


def _cqs(qp: QP) -> list[CQ]:
    return [qp.send_cq] if qp.send_cq is qp.recv_cq else [qp.send_cq, qp.recv_cq]


def _overrun(qp: QP) -> list[CQ]:
    """Return its CQs that have lost completions."""
    return [cq for cq in _cqs(qp) if has_overrun(cq)]


def _check_cq(cq: CQ, seen: Seen) -> Finding:
    outstanding = capacity = 0
    users = open_children(cq)
    shared: dict[int, SRQ] = {}
    for user in users:
        sends, receives = _what_completes(user, cq, shared)
        outstanding += sends[0] + receives[0]
        capacity += sends[1] + receives[1]
    for srq in shared.values():
        outstanding += srq.outstanding + srq.outstanding_tags + srq.outstanding_ops
        capacity += srq.max_wr + srq.max_num_tags + srq.max_ops
    evidence = (
        f"{cq}; the queues that complete there hold up to {capacity} work requests; "
        f"outstanding: {outstanding}"
    )
    remedy = f"rp.CQ(context, {capacity}), or poll before so many can complete"
    if outstanding > cq.cqe:
        failed = seen.attr.qp_state is QPState.ERR
        return Finding(
            "cq-too-small",
            "problem" if failed else "warning",
            f"{evidence}: when more complete than it holds, it overruns and they fail",
            remedy,
            seen.about,
        )
    if capacity > cq.cqe:
        return Finding("cq-too-small", "info", evidence, remedy, seen.about)
    return Finding("cq", "ok", evidence, about=seen.about)


def _what_completes(
    user: Resource, cq: CQ, shared: dict[int, SRQ]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return outstanding and depth of the send and of the receive queue that complete there."""
    sends = receives = (0, 0)
    if isinstance(user, SRQ):
        shared[id(user)] = user
    if is_queue_pair(user) and user.qp_type is not QPType.XRC_RECV:
        if user.send_cq is cq:
            sends = (user.outstanding.send, user.max_send_wr)
        if user.recv_cq is cq and user.srq is not None:
            shared[id(user.srq)] = user.srq
        elif user.recv_cq is cq:
            receives = (user.outstanding.recv, user.max_recv_wr)
    return sends, receives


def check_access(seen: Seen) -> Iterable[Finding]:
    """Look at what a peer may do."""
    if not seen.connected or seen.qp.qp_type is QPType.XRC_SEND:
        return
    flags = seen.attr.qp_access_flags
    allowed = [flag.name or "" for flag in Access if flag & flags and "REMOTE" in (flag.name or "")]
    if allowed:
        evidence = f"qp_access_flags: a peer may {', '.join(allowed)}, where the region permits it"
        yield Finding("access", "ok", evidence, about=seen.about)
    else:
        yield Finding(
            "access-none",
            "info",
            "qp_access_flags has no REMOTE_WRITE, REMOTE_READ or REMOTE_ATOMIC: a peer can send, "
            "and its writes, reads and atomics end with REM_ACCESS_ERR",
            "connect with access=Access.REMOTE_WRITE | Access.REMOTE_READ",
            seen.about,
        )


def waiting_sends(seen: Seen) -> int | None:
    """Count the pending sends that consume a receive; None where the device cannot tell."""
    qp = seen.qp
    if not qp.outstanding.send or seen.attr.qp_state in _FAILED:
        return 0
    return sends_for_receive(qp)


def has_receive(qp: QP) -> bool:
    """Whether a message to a queue pair finds a receive, as far as is known here."""
    if qp.qp_type in _NO_RECEIVES:
        # It takes those of the SRQ that the message names.
        return True
    if qp.srq is not None:
        return bool(qp.srq.outstanding + qp.srq.outstanding_tags)
    return bool(qp.outstanding.recv)
