"""Explanations of this library's exceptions, for messages that name no status or errno."""

from __future__ import annotations

from typing import Any

from .model import Explanation, named


def _exception(name: str, meaning: str, *, module: str = "rdmapost", **texts: Any) -> Explanation:
    return named("exception", name, meaning, constant=f"{module}.{name}", **texts)


EXCEPTIONS: tuple[Explanation, ...] = (
    _exception(
        "RdmaError",
        "The base of all exceptions of this library: 'except rp.RdmaError' catches them.",
        look_at=("The class that was raised, which says more, and the message.",),
    ),
    _exception(
        "VerbsError",
        "A verb failed. It is also an OSError.",
        look_at=(
            "error.call: which verb; error.errno: why. The message names both; explain the errno.",
            "error.hint: what this library knows about the cause; also at the end of the message.",
        ),
    ),
    _exception(
        "WaitTimeout",
        "Fewer completions arrived in time than were waited for. Those that arrived are not lost: "
        "the next poll or wait returns them.",
        causes=(
            "A work request without SIGNALED produces no completion when it succeeds.",
            "A receive completes only when the peer sends; the peer may be dead or not connected.",
            "The sender is still retrying: RETRY_EXC_ERR comes after retry_cnt + 1 times its "
            "timeout, which may be longer than the wait; with rnr_retry=7 RNR retries never end.",
            "The completion went to another CQ (recv_cq), or another thread has taken it.",
        ),
        look_at=(
            "Its attribute failed: the first error completion among those that arrived.",
            "qp.outstanding, qp.state, and qp.diagnose().",
        ),
    ),
    _exception(
        "WaitCancelled",
        "CQ.cancel_waits() ended the wait. No completion is lost.",
        causes=(
            "Another thread, task or signal handler wanted the waits to end; after "
            "cancel_waits(for_good=True) every later wait ends in the same way.",
        ),
    ),
    _exception(
        "ClosedError",
        "A resource was used after it had been closed, or in the child of a fork.",
        causes=(
            "A 'with' block has ended, or another thread has called close() or close_all().",
            "The process has forked: open the device again in the child.",
        ),
        look_at=("The message names the resource.",),
    ),
    _exception(
        "InUseError",
        "A resource cannot be closed or changed while others depend on it. It stays open.",
        causes=(
            "Work requests in flight use the region, window or address handle: poll their "
            "completions first.",
            "Resources created on it are open: close them first, in the reverse order of creation, "
            "as 'with' blocks do.",
        ),
        look_at=(
            "The message names what uses it.",
            "context.close_all() closes a device and everything on it.",
        ),
    ),
    _exception(
        "CloseError",
        "Context.close_all() could not close everything. It closed the rest.",
        look_at=("Its attribute errors: the exception of each resource that is still open.",),
    ),
    _exception(
        "PostError",
        "A work request was refused when it was posted, by this library or by the device. It and "
        "those after it were not posted; those before it were.",
        look_at=(
            "error.reason: why; error.index and error.wr: which one; error.posted: how many were.",
            "The errno, in brackets at the end of the message: rdmapost explain EINVAL.",
        ),
    ),
    _exception(
        "CompletionError",
        "WC.check() found an error status.",
        look_at=("The message names the status; explain that.",),
    ),
    _exception(
        "UnsupportedError",
        "The device, its driver or the installed libibverbs does not support the request.",
        look_at=(
            "rdmapost check: what the device can do.",
            "The message says which of the three does not support it, if known.",
        ),
    ),
    _exception(
        "NoDeviceError",
        "There is no RDMA device of this name, or none at all.",
        causes=(
            "The device's user-space driver is not installed (libibverbs warns about it): "
            "apt-get install ibverbs-providers.",
            "The kernel's driver or ib_uverbs is not loaded, or the container or network namespace "
            "does not have the device.",
        ),
        look_at=("rdmapost devices: the devices found. rdmapost doctor: why there is none.",),
    ),
    _exception(
        "NoRdmaError",
        "libibverbs could not be loaded. soft0 and roce devices work without it.",
        causes=("It is not installed: apt-get install ibverbs-providers.",),
        look_at=("The variable RDMAPOST_LIBIBVERBS names the library to load.",),
    ),
    _exception(
        "ConnectError",
        "The TCP connection to the server could not be established, or has ended.",
        module="rdmapost.connect",
        causes=(
            "Nothing listens at this address and TCP port, or a firewall drops the packets.",
            "The server has ended, or dropped this client.",
            "'wrong token': the client gave no token, or not the server's (token=, --token).",
        ),
        look_at=("The message names the address and what the other side said.",),
    ),
    _exception(
        "ConnectTimeout",
        "The other side did not answer in time. It is a ConnectError. An established connection "
        "stays usable, and a late answer is dropped.",
        module="rdmapost.connect",
        causes=(
            "dial: the program that listens there is not a server of this library, or the server's "
            "on_connect takes longer.",
            "look, report: the server's host is busy, or its thread is (in on_event, for "
            "instance); or the host is gone, which is detected within half a minute.",
        ),
        look_at=("The timeout argument of dial, and connection.closed.",),
    ),
    _exception(
        "ProtocolError",
        "The other side sent something that is not rdmapost's protocol. It is a ConnectError.",
        module="rdmapost.connect",
        causes=(
            "Another program listens on this TCP port.",
            "The two sides have different versions of rdmapost.",
        ),
        look_at=("The message quotes what came. On that host, ss -ltnp: which program listens.",),
    ),
    _exception(
        "PingpongError",
        "The other side of a pingpong ended, or is not compatible with this one. It is a "
        "ConnectError.",
        module="rdmapost.pingpong",
        look_at=("The message, and the other side's.",),
    ),
    _exception(
        "UnknownNameError",
        "explain() has no explanation of a name.",
        module="rdmapost.explain",
        look_at=("Its attribute nearest: similar names.", "rdmapost explain: all names, listed."),
    ),
)
