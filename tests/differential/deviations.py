"""Known differences between a real device and the soft one.

Each entry says what differs and why, and has a program that shows the difference,
with the lines of the transcript that differ on each kernel.  A test runs the
program, and fails if the entry is no longer true.

For random programs an entry also says how to change the soft device's results, or
which work requests to leave out: those whose consequences differ too much, or that
would harm the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from . import adaptations
from .model import REGIONS, At, End, Move, Pair, Post, Program, R, Recv, Sge, Step, W
from .races import MTU
from .transcript import Done

if TYPE_CHECKING:
    from .run import Run

__all__ = ["DEVIATIONS", "HARMFUL", "Deviation", "for_kernel", "kernel_of"]

KERNELS = ("6.1", "6.12")


@dataclass(frozen=True)
class Deviation:
    """An entry of the table.

    Attributes:
        name: a few words.
        why: what Soft-RoCE does, what is right, and the source for that.
        program: shows the difference.
        seen: by kernel, the beginnings of the lines that differ in the program's transcript.
        fit: returns the steps to run instead of a step.
        refuses: returns the name of the errno with which this device refuses a work request, or
            None.
        completes: returns this device's completion for the soft device's.
        after: called after each step; makes the soft device change its state as this device does.
    """

    name: str
    why: str
    program: Program | None = None
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fit: Callable[[Run, Step], list[Step]] = lambda run, step: [step]
    refuses: Callable[[Run, int, W], str | None] = lambda run, qp, wr: None
    completes: Callable[[Run, int, W | R, Done], Done] = lambda run, qp, wr, done: done
    after: Callable[[Run], None] = lambda run: None


def kernel_of(release: str) -> str:
    """Return the table's latest kernel that is not newer than a release, or else its oldest."""
    version = tuple(int(part) for part in release.split(".")[:2])
    known = [tuple(int(part) for part in kernel.split(".")) for kernel in KERNELS]
    nearest = max((k for k in known if k <= version), default=known[0])
    return ".".join(map(str, nearest))


def for_kernel(release: str) -> list[Deviation]:
    """Return the entries that apply to a kernel."""
    kernel = kernel_of(release)
    return [*HARMFUL, *(entry for entry in DEVIATIONS if kernel in entry.seen)]


_RC = (Pair("RC"),)
_UC = (Pair("UC"),)
_UD = (Pair("UD"),)

_SOME = (Sge("a", 0, 8),)
_WRONG_KEY = (Sge("a", 0, 8, "a:wrong"),)
_OUTSIDE = (Sge("a", 8190, 8),)
_BIND = W("BIND_MW", at=At("b", 0), mw="w0", length=64, access="RWA")


def _on_both(*lines: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(KERNELS, lines)


HARMFUL = (
    Deviation(
        "a window that is not bound is invalidated",
        "rxe_do_invalidate_mw drops references to the window's queue pair and region without "
        "checking whether it has any: the kernel crashes. A window bound on another queue pair is "
        "also invalidated without a check. No program may do that.",
        fit=adaptations.invalidates_unbound,
    ),
)
"""What no program may do on Soft-RoCE, because the kernel would crash."""


DEVIATIONS = (
    Deviation(
        "local failures are reported as flushed",
        "rxe_requester puts the queue pair into the error state before the "
        "completer has seen the failure, which then flushes the failed work request with the "
        "rest. The first one that fails must carry the status (ibv_poll_cq(3)).",
        Program(_RC, (Post(0, (W("RDMA_WRITE", _OUTSIDE, At("b", 0)),)),)),
        {"6.12": ("qp0.send 0: LOC_PROT_ERR -> WR_FLUSH_ERR",)},
        completes=adaptations.flush_local,
    ),
    Deviation(
        "a local failure behind a request that nobody answers",
        "Work requests complete in the order of their posts, however late the first is answered. "
        "rxe of 6.1 stops its requester at the failure, so that the request before it is not sent "
        "again, and neither ever completes.",
        Program(_RC, (Move(1, "ERR"), Post(0, (W("SEND", _SOME), W("SEND", _OUTSIDE))))),
        {
            "6.1": (
                "qp0.send 100: RETRY_EXC_ERR -> nothing",
                "qp0.send 101: WR_FLUSH_ERR -> nothing",
                "qp0 ends in ERR -> RTS",
            ),
            "6.12": ("qp0.send 100: RETRY_EXC_ERR -> WR_FLUSH_ERR",),
        },
        fit=adaptations.split_risky,
    ),
    Deviation(
        "an unknown lkey of a send or write",
        "rxe reports LOC_QP_OP_ERR for a key that it does not find; a protection error is right, "
        "and is what it reports where the key is known and the range is wrong.",
        Program(
            (Pair("RC"), Pair("RC")),
            (
                Post(0, (W("RDMA_WRITE", _WRONG_KEY, At("b", 0)),)),
                Post(2, (W("RDMA_WRITE", _OUTSIDE, At("b", 0)),)),
            ),
        ),
        {"6.1": ("qp0.send 0: LOC_PROT_ERR -> LOC_QP_OP_ERR",)},
        completes=adaptations.bad_key,
    ),
    Deviation(
        "a LOCAL_INV that fails",
        "rxe reports LOC_QP_OP_ERR; right is MW_BIND_ERR, the status of failed memory management "
        "operations, as for a bind.",
        Program(_RC, (Post(0, (W("LOCAL_INV", key="gone"),)),)),
        {"6.1": ("qp0.send 0: MW_BIND_ERR -> LOC_QP_OP_ERR",)},
        completes=adaptations.bad_invalidate,
    ),
    Deviation(
        "an error of an unreliable sender",
        "A failed send on UC and UD leads to SQE, where the queue pair still receives "
        "(ibv_modify_qp(3)); rxe goes to ERR and flushes the receives.",
        Program(
            (Pair("UC"), Pair("UD")),
            (
                Recv(0, (R(_SOME),)),
                Post(0, (W("RDMA_READ", _SOME, At("b", 0)),)),
                Post(2, (W("SEND", _OUTSIDE),)),
            ),
        ),
        {
            "6.1": (
                "qp0.recv 0: nothing -> WR_FLUSH_ERR",
                "qp0 ends in SQE -> ERR",
                "qp2 ends in SQE -> ERR",
            ),
            "6.12": (
                "qp0.recv 0: nothing -> WR_FLUSH_ERR",
                "qp0.send 100: LOC_QP_OP_ERR -> WR_FLUSH_ERR",
                "qp2.send 200: LOC_PROT_ERR -> WR_FLUSH_ERR",
                "qp0 ends in SQE -> ERR",
                "qp2 ends in SQE -> ERR",
            ),
        },
        after=adaptations.to_error,
    ),
    Deviation(
        "a receive that is too small",
        "The responder refuses an invalid request and says how long the message was "
        "(REM_INV_REQ_ERR, LOC_LEN_ERR; so does hardware); rxe takes the receive for malformed.",
        Program(_RC, (Recv(1, (R((Sge("inbox", 0, 7),)),)), Post(0, (W("SEND", _SOME),)))),
        _on_both(
            "qp0.send 100: REM_INV_REQ_ERR -> REM_OP_ERR",
            "qp1.recv 0: LOC_LEN_ERR -> LOC_QP_OP_ERR",
        ),
        completes=adaptations.too_small,
    ),
    Deviation(
        "a receive whose buffer cannot be used",
        "rxe reports LOC_QP_OP_ERR at the receiver; hardware reports the protection error.",
        Program(
            _RC, (Recv(1, (R((Sge("inbox", 0, 8, "inbox:wrong"),)),)), Post(0, (W("SEND", _SOME),)))
        ),
        _on_both("qp1.recv 0: LOC_PROT_ERR -> LOC_QP_OP_ERR"),
        completes=adaptations.receive_fails,
    ),
    Deviation(
        "a write with immediate data to where it may not write",
        "A refused write consumes no receive. For a write of a single packet, rxe takes a receive "
        "before it checks the remote address: without a receive it sends an RNR NAK, and otherwise "
        "the receive fails, too.",
        Program(
            (Pair("RC"), Pair("RC")),
            (
                Post(0, (W("RDMA_WRITE_WITH_IMM", _SOME, At("counter", 0)),)),
                Recv(3, (R(),)),
                Post(2, (W("RDMA_WRITE_WITH_IMM", _SOME, At("counter", 0)),)),
            ),
        ),
        _on_both(
            "qp0.send 0: REM_ACCESS_ERR -> RNR_RETRY_EXC_ERR",
            "qp3.recv 100: WR_FLUSH_ERR -> REM_ACCESS_ERR",
            "qp1 ends in ERR -> RTS",
        ),
        fit=adaptations.only(adaptations.in_order),
    ),
    Deviation(
        "the flag of an invalidated key",
        "The kernel's IB_WC_WITH_INVALIDATE is the library's IBV_WC_IP_CSUM_OK, and rxe hands "
        "the kernel's number to the process: the completion does not name the key.",
        Program(
            _RC,
            (
                Post(1, (_BIND,)),
                Recv(1, (R((Sge("inbox", 0, 8),)),)),
                Post(0, (W("SEND_WITH_INV", _SOME, key="w0"),)),
            ),
        ),
        _on_both("qp1.recv 100: RECV, 8 bytes, invalidated w0#1 -> RECV, 8 bytes"),
        completes=adaptations.no_inv_flag,
    ),
    Deviation(
        "invalidation on UC",
        "ibv_post_send(3) allows LOCAL_INV and SEND_WITH_INV on UC; rxe does not.",
        Program(
            (Pair("UC"), Pair("UC")),
            (
                Post(0, (_BIND,)),
                Post(0, (W("LOCAL_INV", key="w0"),)),
                Post(3, (replace(_BIND, mw="w1"),)),
                Recv(3, (R((Sge("inbox", 0, 8),)),)),
                Post(2, (W("SEND_WITH_INV", _SOME, key="w1"),)),
            ),
        ),
        {
            "6.1": (
                "qp0.send 100: LOCAL_INV -> LOC_QP_OP_ERR",
                "qp2.send 400: SEND -> LOC_QP_OP_ERR",
                "qp3.recv 300: RECV, 8 bytes, invalidated w1#1 -> nothing",
                "qp0 ends in RTS -> ERR",
                "qp2 ends in RTS -> ERR",
                "inbox[0:8]",
            ),
            "6.12": (
                "qp0.send 100: LOCAL_INV -> WR_FLUSH_ERR",
                "qp2.send 400: SEND -> WR_FLUSH_ERR",
                "qp3.recv 300: RECV, 8 bytes, invalidated w1#1 -> nothing",
                "qp0 ends in RTS -> ERR",
                "qp2 ends in RTS -> ERR",
                "inbox[0:8]",
            ),
        },
        fit=adaptations.only(
            lambda run, qp, wr: (
                run.program.type_of(qp) != "UC" or wr.op not in ("LOCAL_INV", "SEND_WITH_INV")
            )
        ),
    ),
    Deviation(
        "an atomic at an odd address",
        "rxe's library refuses the post; the responder must refuse the request.",
        Program(_RC, (Post(0, (W("ATOMIC_FETCH_AND_ADD", _SOME, At("b", 4)),)),)),
        _on_both(
            "step 0: posted -> EINVAL at index 0",
            "qp0.send 0: REM_INV_REQ_ERR -> nothing",
            "qp0 ends in ERR -> RTS",
            "qp1 ends in ERR -> RTS",
        ),
        refuses=adaptations.unaligned,
    ),
    Deviation(
        "an atomic with less than 8 bytes of room",
        "rxe's library refuses the post; elsewhere the answer does not fit (LOC_LEN_ERR).",
        Program(_RC, (Post(0, (W("ATOMIC_FETCH_AND_ADD", (Sge("a", 0, 4),), At("b", 0)),)),)),
        _on_both(
            "step 0: posted -> EINVAL at index 0",
            "qp0.send 0: LOC_LEN_ERR -> nothing",
            "qp0 ends in ERR -> RTS",
        ),
        refuses=adaptations.short_atomic,
    ),
    Deviation(
        "the length of an atomic",
        "An atomic returns 8 bytes, and byte_len is the number of bytes transferred "
        "(ibv_poll_cq(3)); rxe reports the size of the buffers.",
        Program(_RC, (Post(0, (W("ATOMIC_FETCH_AND_ADD", (Sge("a", 0, 16),), At("b", 0)),)),)),
        _on_both("qp0.send 0: FETCH_ADD, 8 bytes -> FETCH_ADD, 16 bytes"),
        completes=adaptations.length_of_room,
    ),
    Deviation(
        "a send posted before RTS",
        "rxe refuses with EINVAL and without naming a work request. The work request stays in the "
        "queue, and is carried out when the queue pair reaches RTS.",
        Program((Pair("RC", End(state="RTR")),), (Post(0, (W("RDMA_WRITE", _SOME, At("b", 0)),)),)),
        _on_both("step 0: EINVAL at index 0 -> EINVAL at index None"),
        fit=adaptations.not_yet,
    ),
    Deviation(
        "a receive posted in ERR",
        "It must be flushed (ibv_post_recv(3)); rxe's library puts it into the queue without "
        "notifying the kernel, so nothing flushes it until something else happens to the queue "
        "pair.",
        # The completion of the first receive shows that the flush is over.
        Program(_RC, (Recv(0, (R(_SOME),)), Move(0, "ERR"), Recv(0, (R(_SOME),)))),
        _on_both("qp0.recv 200: WR_FLUSH_ERR -> nothing"),
        fit=adaptations.no_receives_in_error,
    ),
    Deviation(
        "a fenced work request that is sent again",
        "rxe checks before each attempt whether reads are outstanding. Before a second attempt "
        "these may be later reads, or the work request itself: it never completes.",
        Program(_RC, (Move(1, "ERR"), Post(0, (W("RDMA_READ", _SOME, At("b", 0), ("FENCE",)),)))),
        _on_both("qp0.send 100: RETRY_EXC_ERR -> nothing", "qp0 ends in ERR -> RTS"),
        fit=adaptations.unfenced,
    ),
    Deviation(
        "slots of unsignaled work requests",
        "A slot of the send queue is free when a completion of it or of a later one has been "
        "polled (ibv_post_send(3)), as in the drivers of hardware; rxe frees it when the work "
        "request is done.",
        Program(
            (Pair("RC", End(depth=3)),),
            (
                Post(0, (W("RDMA_WRITE", _SOME, At("b", 0), ("UNSIGNALED",)),) * 3),
                Post(0, (W("RDMA_WRITE", _SOME, At("b", 8)),)),
            ),
        ),
        _on_both(
            "step 1: ENOMEM at index 0 -> posted", "qp0.send 100: nothing -> RDMA_WRITE", "b[8:16]"
        ),
        fit=adaptations.slots,
    ),
    Deviation(
        "the bounds of a window",
        "rxe compares an access through a window with the bounds of the region behind it.",
        Program(_RC, (Post(1, (_BIND,)), Post(0, (W("RDMA_WRITE", _SOME, At("b", 60, "w0")),)))),
        _on_both(
            "qp0.send 100: REM_ACCESS_ERR -> RDMA_WRITE",
            "qp0 ends in ERR -> RTS",
            "qp1 ends in ERR -> RTS",
            "b[60:68]",
        ),
        fit=adaptations.only(lambda run, qp, wr: not adaptations.beyond_window(run, qp, wr)),
    ),
    Deviation(
        "a region that is invalidated",
        "LOCAL_INV invalidates any key of the process; rxe only those of fast registrations, "
        "which user-space programs cannot create.",
        Program(_RC, (Post(0, (W("LOCAL_INV", key="readable"),)),)),
        {
            "6.1": ("qp0.send 0: LOCAL_INV -> LOC_QP_OP_ERR", "qp0 ends in RTS -> ERR"),
            "6.12": ("qp0.send 0: LOCAL_INV -> WR_FLUSH_ERR", "qp0 ends in RTS -> ERR"),
        },
        fit=adaptations.only(lambda run, qp, wr: wr.op != "LOCAL_INV" or wr.key not in REGIONS),
    ),
    Deviation(
        "an SGE of no bytes",
        "Some hardware takes length 0 for 2^31, and so does soft0, to show the mistake; to rxe "
        "it is 0.",
        Program(_RC, (Post(0, (W("RDMA_WRITE", (Sge("a", 0, 0),), At("b", 0)),)),)),
        _on_both("qp0.send 0: LOC_PROT_ERR -> RDMA_WRITE", "qp0 ends in ERR -> RTS"),
        fit=adaptations.only(lambda run, qp, wr: all(sge.length for sge in wr.sges)),
    ),
    Deviation(
        "a datagram longer than the MTU",
        "Hardware reports LOC_LEN_ERR. rxe reports success and sends nothing, which is what "
        "IBA C10-93.1.1 has.",
        Program(
            _UD,
            (
                Recv(1, (R((Sge("inbox", 0, 2048),)),)),
                Post(0, (W("SEND", (Sge("a", 0, MTU + 1),)),)),
            ),
        ),
        _on_both("qp0.send 100: LOC_LEN_ERR -> SEND", "qp0 ends in SQE -> RTS"),
        fit=adaptations.only(lambda run, qp, wr: run.program.type_of(qp) != "UD" or wr.size <= MTU),
    ),
    Deviation(
        "a datagram that does not fit into its receive",
        "The receive ends with LOC_LEN_ERR on hardware. rxe of 6.1 takes it for malformed; rxe "
        "of 6.12 drops the datagram and keeps the receive, or, if it is from an SRQ, ends it with "
        "REM_INV_REQ_ERR.",
        Program(
            (Pair("UD"), Pair("UD", b=End(srq=True))),
            (
                Recv(1, (R((Sge("inbox", 0, 47),)),)),
                Post(0, (W("SEND", _SOME),)),
                Recv(3, (R((Sge("inbox", 64, 47),)),)),
                Post(2, (W("SEND", _SOME),)),
            ),
        ),
        {
            "6.1": (
                "qp1.recv 0: LOC_LEN_ERR -> LOC_QP_OP_ERR",
                "qp3.recv 200: LOC_LEN_ERR -> LOC_QP_OP_ERR",
            ),
            "6.12": (
                "qp1.recv 0: LOC_LEN_ERR -> nothing",
                "qp3.recv 200: LOC_LEN_ERR -> REM_INV_REQ_ERR",
                "qp1 ends in ERR -> RTS",
                "qp3 ends in ERR -> RTS",
            ),
        },
        fit=adaptations.datagrams_that_fit,
    ),
)
"""The table."""
