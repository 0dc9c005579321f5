"""Explanations of the findings of qp.diagnose(), diagnose_machine() and 'rdmapost doctor'."""

from __future__ import annotations

from .model import Explanation

_QP = "qp.diagnose()"
_MACHINE = "'rdmapost doctor'"
_BOTH = "qp.diagnose() and 'rdmapost doctor'"

_MEANINGS: dict[str, tuple[str, str]] = {
    # The machine.
    "libibverbs": (_MACHINE, "The library is installed."),
    "libibverbs-missing": (_MACHINE, "libibverbs cannot be loaded; software devices work."),
    "devices-not-listed": (_MACHINE, "The library failed to list the devices."),
    "no-rdma-device": (_MACHINE, "The kernel has no RDMA device."),
    "no-such-device": (_MACHINE, "No device has the name that was given."),
    "no-such-port": (_MACHINE, "The device has no port of that number."),
    "not-opened": (_MACHINE, "The device is listed, but opening it failed."),
    "module-missing": (_MACHINE, "A kernel module that RDMA needs is not loaded."),
    "modules": (_MACHINE, "The kernel modules that RDMA needs are loaded."),
    "provider-missing": (
        _MACHINE,
        "The kernel has a device whose user-space driver is not installed.",
    ),
    "node-missing": (_MACHINE, "The kernel has a device, but /dev/infiniband has no file for it."),
    "node-broken": (_MACHINE, "A file in /dev/infiniband exists, but does not work."),
    "no-permission": (_MACHINE, "This user may not open a file in /dev/infiniband."),
    "permission": (_MACHINE, "This user may open the device's file."),
    "memlock": (_MACHINE, "How much memory the process may lock, and so register."),
    "files-low": (_MACHINE, "The process may open too few file descriptors."),
    "firewall": (_MACHINE, "What may drop RoCE v2's packets, UDP port 4791."),
    "nat": (_MACHINE, "An address that NAT might change, which RoCE does not survive."),
    "rmem-max": (_MACHINE, "How many packets the socket of a roce device can hold."),
    "message": (_MACHINE, "Whether a message that the device sent to itself has arrived."),
    # Ports and GIDs.
    "port-active": (_BOTH, "The port can carry traffic."),
    "port-down": (_BOTH, "The port carries no traffic."),
    "netdev-hidden": (_BOTH, "The port's network device is in another network namespace."),
    "netdev-down": (_BOTH, "The port's network device is down."),
    "mtu": (_BOTH, "The network device can carry the port's MTU."),
    "gid": (_BOTH, "The GID in use, and why it was chosen."),
    "gid-none": (_BOTH, "The port has no GID."),
    "gid-wrong": (_BOTH, "The GID does not exist, does not reach the peer, or is not the peer's."),
    "gid-stale": (_BOTH, "The GID has changed or disappeared since it was chosen."),
    "gid-roce-v1": (_BOTH, "A RoCE v1 GID, which is not routed and does not reach RoCE v2."),
    "gid-link-local": (_BOTH, "A link-local GID, which reaches only its own Ethernet segment."),
    "gid-type-mismatch": (_QP, "The two sides' GIDs are of different types."),
    "lid-wrong": (_QP, "The path's LID is not the peer's."),
    "route": (_QP, "The route from the GID's address to the peer's."),
    # The queue pair.
    "qp-state": (_QP, "The state of the queue pair, and what it means."),
    "qp-closed": (_QP, "The queue pair is closed."),
    "other-process": (_QP, "The queue pair belongs to the parent process."),
    "not-readable": (_QP, "The device does not report the queue pair's attributes."),
    "not-checked": (_BOTH, "A check that could not be made, and why."),
    "path-mtu": (_QP, "The path MTU fits the port."),
    "mtu-mismatch": (_BOTH, "The path MTU is larger than a port's, or not the peer's."),
    "timeout": (_QP, "How long a send waits for its acknowledgement before RETRY_EXC_ERR."),
    "timeout-0": (_QP, "timeout=0: a send without an acknowledgement waits forever."),
    "timeout-long": (_QP, "A send without an acknowledgement fails only after a minute or more."),
    "timeout-short": (_QP, "A busy peer may answer later than the timeouts allow."),
    "retry-cnt-0": (_QP, "retry_cnt=0: one lost packet breaks the connection."),
    "retry-forever": (_QP, "retry_cnt=7, with which Soft-RoCE never gives up."),
    "rnr-retry": (_QP, "How long a send that finds no receive waits before RNR_RETRY_EXC_ERR."),
    "rnr-retry-0": (_QP, "rnr_retry=0: the first send that finds no receive fails."),
    "rnr-retry-forever": (_QP, "rnr_retry=7: a send that finds no receive waits forever."),
    "min-rnr-timer": (_QP, "How long a peer that finds no receive here waits before it retries."),
    "min-rnr-timer-0": (_QP, "min_rnr_timer=0 means the longest wait, not the shortest."),
    "max-rd-atomic": (_QP, "How many reads and atomics may be in flight."),
    "max-rd-atomic-0": (_QP, "max_rd_atomic=0: reads and atomics fail, or never start."),
    "access": (_QP, "What a peer may do through the queue pair (qp_access_flags)."),
    "access-none": (_QP, "A peer may only send through the queue pair (qp_access_flags)."),
    "outstanding": (_QP, "How many sends are not known to be done."),
    "send-queue-full": (_QP, "As many sends are outstanding as the queue holds."),
    "receives": (_QP, "How many receives are posted."),
    "recv-none-posted": (_QP, "No receive is posted for a message."),
    "not-polled": (_QP, "Work requests have failed, and their completions wait in the CQ."),
    "cq": (_QP, "The CQ can hold all that may complete there."),
    "cq-too-small": (_QP, "More may complete in the CQ than it holds: it overruns unless polled."),
    "cq-overrun": (_QP, "The CQ has lost completions."),
    # Its peer.
    "peer": (_QP, "Each queue pair names the other, and the peer receives."),
    "peer-unknown": (_QP, "The peer is in another process, so only this side was checked."),
    "peer-closed": (_QP, "The peer is closed."),
    "peer-state": (_QP, "The peer is in a state in which it does not receive."),
    "peer-access": (_QP, "The peer's qp_access_flags lack what some work requests need."),
    "other-pd": (_QP, "The two queue pairs are on different PDs, each with its own rkeys."),
    "qp-type-mismatch": (_QP, "The peer is of another type."),
    "qkey-mismatch": (_QP, "The peer has a different Q_Key, which messages to it must carry."),
    "dest-qp-num": (_QP, "A queue pair's dest_qp_num is not its peer's number."),
    "psn-mismatch": (_QP, "One side does not send from the PSN that the other expects."),
    "rd-atomic-mismatch": (_QP, "More reads and atomics may be in flight than the peer takes."),
}

FINDINGS: tuple[Explanation, ...] = tuple(
    Explanation(
        kind="finding",
        name=name,
        number=0,
        constant=name,
        meaning=meaning,
        look_at=(f"{where}: the evidence with its numbers, and the remedy for '{name}'.",),
    )
    for name, (where, meaning) in _MEANINGS.items()
)
