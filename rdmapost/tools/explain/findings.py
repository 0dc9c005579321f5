"""Explanations of the findings of qp.diagnose(), diagnose_machine() and 'rdmapost doctor'."""

from __future__ import annotations

from functools import partial

from .model import Explanation, named


def _finding(where: str, name: str, meaning: str, look_at: str) -> Explanation:
    see = f"{where}, with the numbers and the remedy"
    return named("finding", name, meaning, look_at, see=(see,))


_qp = partial(_finding, "qp.diagnose()")
_machine = partial(_finding, "'rdmapost doctor'")
_both = partial(_finding, "qp.diagnose() and 'rdmapost doctor'")

FINDINGS: tuple[Explanation, ...] = (
    # The machine.
    _machine(
        "libibverbs",
        "The library is installed.",
        "The devices in the evidence. A device of the kernel that is not among them needs its "
        "user-space driver.",
    ),
    _machine(
        "libibverbs-missing",
        "libibverbs cannot be loaded; software devices work.",
        "apt install libibverbs1 ibverbs-providers, or dnf install libibverbs. "
        "RDMAPOST_LIBIBVERBS can name a library in another place.",
    ),
    _machine(
        "devices-not-listed",
        "The library failed to list the devices.",
        "/sys must be mounted: libibverbs reads it. In a container, mount it there, too.",
    ),
    _machine(
        "no-rdma-device",
        "The kernel has no RDMA device.",
        "lspci: is there a NIC that can do RDMA? Its Ethernet driver alone makes no RDMA device; "
        "mlx5, for example, also needs mlx5_ib.",
    ),
    _machine(
        "no-such-device",
        "No device has the name that was given.",
        "'rdmapost devices' lists the names. A udev rule may rename a device after the boot: "
        "mlx5_0 becomes rocep1s0f0.",
    ),
    _machine(
        "no-such-port",
        "The device has no port of that number.",
        "Ports count from 1, and a NIC with two connectors often has two devices of one port.",
    ),
    _machine(
        "not-opened",
        "The device is listed, but opening it failed.",
        "A real device: can ibv_devinfo -d DEVICE open it? A roce device: has another process its "
        "address (ss -lunp)?",
    ),
    _machine(
        "module-missing",
        "A kernel module that RDMA needs is not loaded.",
        "modprobe loads it until the next boot; a file in /etc/modules-load.d, at every boot. A "
        "container uses the modules of its host.",
    ),
    _machine(
        "modules",
        "The kernel modules that RDMA needs are loaded.",
        "The drivers in the evidence: each makes devices of one kind only.",
    ),
    _machine(
        "provider-missing",
        "The kernel has a device whose user-space driver is not installed.",
        "libibverbs needs a user-space driver besides the kernel's, of the same version as itself: "
        "in a mix of distribution and vendor packages some are missing.",
    ),
    _machine(
        "node-missing",
        "The kernel has a device, but /dev/infiniband has no file for it.",
        "udev makes the file once ib_uverbs is loaded; a container has only the files that it is "
        "given.",
    ),
    _machine(
        "node-broken",
        "A file in /dev/infiniband exists, but does not work.",
        "A file that was copied, or was left from a device that is gone, opens nothing: compare "
        "its numbers with /sys/class/infiniband_verbs/uverbs0/dev.",
    ),
    _machine(
        "no-permission",
        "This user may not open a file in /dev/infiniband.",
        "ls -l /dev/infiniband: the owner, the group and the mode. A new group counts only after "
        "the next login.",
    ),
    _machine(
        "permission",
        "This user may open the device's file.",
        "The same for the user under which a service runs: it may not be in the group.",
    ),
    _machine(
        "memlock",
        "How much memory the process may lock, and so register.",
        "ulimit -l, in the shell or service that starts the program: a process inherits the limit "
        "and cannot raise it beyond the hard one.",
    ),
    _machine(
        "files-low",
        "The process may open too few file descriptors.",
        "ls -l /proc/PID/fd shows what is open; ulimit -n raises the limit.",
    ),
    _machine(
        "firewall",
        "What may drop RoCE v2's packets, UDP port 4791.",
        "A rule for TCP does not cover them: a connection then succeeds over TCP, and its first "
        "work request fails with RETRY_EXC_ERR. Let both hosts receive UDP 4791.",
    ),
    _machine(
        "nat",
        "An address that NAT might change, which RoCE does not survive.",
        "Whether the peer sees the same address: compare 'ip addr' here with the source of the "
        "packets in a capture there. Without NAT between the two, nothing is wrong.",
    ),
    _machine(
        "rmem-max",
        "How many packets the socket of a roce device can hold.",
        "rcvbuf_errors in context.counters(): if it grows, the buffer is too small; if not, leave "
        "it.",
    ),
    _machine(
        "message",
        "Whether a message that the device sent to itself has arrived.",
        "If it failed, the other problems in the list come first: it is usually their result. If "
        "it arrived, what fails between two hosts is the network or the other host.",
    ),
    # Ports and GIDs.
    _both(
        "port-active",
        "The port can carry traffic.",
        "Nothing to do. A port is active as soon as its link is, whether or not the peer is there.",
    ),
    _both(
        "port-down",
        "The port carries no traffic.",
        "The physical state in the evidence: Disabled or Polling means no link (cable, switch, "
        "'ip link'); LinkUp with INIT means InfiniBand without a subnet manager.",
    ),
    _both(
        "netdev-hidden",
        "The port's network device is in another network namespace.",
        "'rdma system': in shared mode each container sees the RDMA device, but its GIDs are "
        "usable only where the network device is.",
    ),
    _both(
        "netdev-down",
        "The port's network device is down.",
        "'ip link': DOWN was set by an administrator, and NO-CARRIER is a cable or switch.",
    ),
    _both(
        "mtu",
        "The network device can carry the port's MTU.",
        "Switches between the two hosts must carry it, too: ping -M do -s 4130 tests for 4096.",
    ),
    _both(
        "gid",
        "The GID in use, and why it was chosen.",
        "If the peer is in another network, choose a gid_index whose address reaches it.",
    ),
    _both(
        "gid-none",
        "The port has no GID.",
        "RoCE takes its GIDs from the addresses of the network device: one without an address has "
        "none, or only a link-local one.",
    ),
    _both(
        "gid-wrong",
        "The GID does not exist, does not reach the peer, or is not the peer's.",
        "A GID works like an IP address: compare family, network and type on both sides. If it "
        "changed after the endpoints were exchanged, exchange them again.",
    ),
    _both(
        "gid-stale",
        "The GID has changed or disappeared since it was chosen.",
        "Who changed the address (NetworkManager, DHCP, 'ip addr'). A queue pair keeps the GID of "
        "its connect(): only a new connection takes the new one.",
    ),
    _both(
        "gid-roce-v1",
        "A RoCE v1 GID, which is not routed and does not reach RoCE v2.",
        "The same address usually has a RoCE v2 GID, too, with another index.",
    ),
    _both(
        "gid-link-local",
        "A link-local GID, which reaches only its own Ethernet segment.",
        "Between two hosts on one switch it works. Elsewhere, give the network device a "
        "routable address.",
    ),
    _qp(
        "gid-type-mismatch",
        "The two sides' GIDs are of different types.",
        "RoCE v1 and v2 are different protocols: packets of one are not seen by the other, and "
        "sends end with RETRY_EXC_ERR.",
    ),
    _qp(
        "lid-wrong",
        "The path's LID is not the peer's.",
        "The subnet manager may have assigned new ones: exchange the endpoints again.",
    ),
    _qp(
        "route",
        "The route from the GID's address to the peer's.",
        "It is the kernel's, of this moment; a RoCE NIC looks it up when the queue pair connects, "
        "and does not follow later changes.",
    ),
    # The queue pair.
    _qp(
        "qp-state",
        "The state of the queue pair, and what it means.",
        "RESET, INIT, RTR and RTS follow one another; connect() does all steps. A failure "
        "usually leads to ERR, and from there only to_reset() leads on.",
    ),
    _qp(
        "qp-closed",
        "The queue pair is closed.",
        "Who closed it: its with block, context.close_all(), or the end of a connection of "
        "rdmapost.connect that owns it.",
    ),
    _qp(
        "other-process",
        "The queue pair belongs to the parent process.",
        "With multiprocessing, use the start method 'spawn', and open devices in the child.",
    ),
    _qp(
        "not-readable",
        "The device does not report the queue pair's attributes.",
        "context.get_async_event(): DEVICE_FATAL means that the device was removed or reset, and "
        "everything on it must be closed and created again.",
    ),
    _both(
        "not-checked",
        "A check that could not be made, and why.",
        "It says nothing about whether RDMA works; the other findings do.",
    ),
    _qp(
        "path-mtu",
        "The path MTU fits the port.",
        "It must be the same on both sides; the peer's cannot be read from here.",
    ),
    _both(
        "mtu-mismatch",
        "The path MTU is larger than a port's, or not the peer's.",
        "Short messages pass, and those longer than one packet fail: take the smaller of the two "
        "MTUs as path_mtu on both sides.",
    ),
    _qp(
        "timeout",
        "How long a send waits for its acknowledgement before RETRY_EXC_ERR.",
        "A timeout is 4.096 us x 2^timeout, so one more doubles it. A wait in your program must be "
        "longer than the total, or it ends before the error is known.",
    ),
    _qp(
        "timeout-0",
        "timeout=0: a send without an acknowledgement waits forever.",
        "A peer that has gone is never noticed. Set a timeout, unless your own protocol notices.",
    ),
    _qp(
        "timeout-long",
        "A send without an acknowledgement fails only after a minute or more.",
        "It suits a network that fails over. Elsewhere the program appears to hang when its peer "
        "has gone.",
    ),
    _qp(
        "timeout-short",
        "A busy peer may answer later than the timeouts allow.",
        "RETRY_EXC_ERR under load, with a peer that is alive, is the symptom.",
    ),
    _qp(
        "retry-cnt-0",
        "retry_cnt=0: one lost packet breaks the connection.",
        "It suits tests that look for lost packets; RoCE networks lose some.",
    ),
    _qp(
        "retry-forever",
        "retry_cnt=7, with which Soft-RoCE never gives up.",
        "Elsewhere 7 means seven retries: a program that ends on a NIC hangs on Soft-RoCE.",
    ),
    _qp(
        "rnr-retry",
        "How long a send that finds no receive waits before RNR_RETRY_EXC_ERR.",
        "The peer must post its next receive within that time, even when it is busy.",
    ),
    _qp(
        "rnr-retry-0",
        "rnr_retry=0: the first send that finds no receive fails.",
        "It breaks the connection, unless your own protocol counts the peer's receives (credits).",
    ),
    _qp(
        "rnr-retry-forever",
        "rnr_retry=7: a send that finds no receive waits forever.",
        "A peer that is alive but never posts a receive is not noticed: limit the wait for the "
        "completion.",
    ),
    _qp(
        "min-rnr-timer",
        "How long a peer that finds no receive here waits before it retries.",
        "A long one makes a burst slow as soon as the receives run out; a short one uses up the "
        "peer's rnr_retry sooner.",
    ),
    _qp(
        "min-rnr-timer-0",
        "min_rnr_timer=0 means the longest wait, not the shortest.",
        "It is 655.36 ms; the shortest, 0.01 ms, is 1.",
    ),
    _qp(
        "max-rd-atomic",
        "How many reads and atomics may be in flight.",
        "More may be posted: the device holds them back. The peer's max_dest_rd_atomic must be at "
        "least as large.",
    ),
    _qp(
        "max-rd-atomic-0",
        "max_rd_atomic=0: reads and atomics fail, or never start.",
        "Writes and sends are not affected. connect() sets it from its own argument, with a "
        "default that allows reads.",
    ),
    _qp(
        "access",
        "What a peer may do through the queue pair (qp_access_flags).",
        "The region must allow it, too: REM_ACCESS_ERR comes from the region or its key, and "
        "REM_INV_REQ_ERR from the queue pair.",
    ),
    _qp(
        "access-none",
        "A peer may only send through the queue pair (qp_access_flags).",
        "If the peer only sends, that is right, and safest. Otherwise name what it may do when you "
        "connect: a region's own flags are not enough.",
    ),
    _qp(
        "outstanding",
        "How many sends are not known to be done.",
        "If the number stays the same although you poll, the sends wait for the peer (see its "
        "findings), or have succeeded without SIGNALED, and count until a later send completes.",
    ),
    _qp(
        "send-queue-full",
        "As many sends are outstanding as the queue holds.",
        "The next post fails with ENOMEM. A slot is free only when its completion, or a later one, "
        "has been polled; a larger max_send_wr only delays that.",
    ),
    _qp(
        "receives",
        "How many receives are posted.",
        "Each message takes one, and so does a write with immediate data: post again after each "
        "completion.",
    ),
    _qp(
        "recv-none-posted",
        "No receive is posted for a message.",
        "If the peer only writes and reads, none is needed. Otherwise post receives before the "
        "peer learns your endpoint: in INIT they can be posted.",
    ),
    _qp(
        "not-polled",
        "The queue pair has failed, and completions of its work requests wait in the CQ.",
        "cq.poll(): of their statuses only the first one other than SUCCESS and WR_FLUSH_ERR is "
        "the cause; the rest follow from it.",
    ),
    _qp(
        "cq",
        "The CQ can hold all that may complete there.",
        "Another queue pair or a larger SRQ on the same CQ needs more room.",
    ),
    _qp(
        "cq-too-small",
        "More may complete in the CQ than it holds: it overruns unless polled.",
        "Room for the max_send_wr and max_recv_wr of every queue pair on it is always enough.",
    ),
    _qp(
        "cq-overrun",
        "The CQ has lost completions.",
        "What was posted may or may not have been carried out: agree with the peer on what to "
        "repeat. Make the new CQ larger.",
    ),
    # Its peer.
    _qp(
        "peer",
        "This queue pair is connected to its peer.",
        "The evidence says how much of the peer was checked: an endpoint has no state, dest_qp_num "
        "or rq_psn. If sends fail all the same, check the network between the two: the ports, GIDs "
        "and routes on both sides.",
    ),
    _qp(
        "peer-unknown",
        "The peer is in another process, so only this side was checked.",
        "Run the diagnosis there, too; given the other side's endpoint, it also finds numbers that "
        "do not match.",
    ),
    _qp(
        "peer-closed",
        "The peer is closed.",
        "Sends to it end with RETRY_EXC_ERR, after the timeouts. A new queue pair has a new "
        "number, so this side must connect again.",
    ),
    _qp(
        "peer-state",
        "The peer is in a state in which it does not receive.",
        "In RESET or INIT it was never connected; in ERR it failed, and its own CQ has the cause. "
        "Until it is in RTR or RTS, sends to it end with RETRY_EXC_ERR.",
    ),
    _qp(
        "peer-access",
        "The peer's qp_access_flags lack what some work requests need.",
        "Only if you post such work requests is it a mistake. The peer grants them when it "
        "connects; nothing on this side can.",
    ),
    _qp(
        "other-pd",
        "The two queue pairs are on different PDs, each with its own rkeys.",
        "Each side's rkeys must be of regions on that side's PD; across processes it is always so.",
    ),
    _qp(
        "qp-type-mismatch",
        "The peer is of another type.",
        "RC talks to RC, UC to UC, UD to UD, and XRC_SEND to XRC_RECV.",
    ),
    _qp(
        "qkey-mismatch",
        "The peer has a different Q_Key, which messages to it must carry.",
        "The receiver drops what carries another one, and neither side gets an error.",
    ),
    _qp(
        "dest-qp-num",
        "A queue pair's dest_qp_num is not its peer's number.",
        "One side has connected to another queue pair, or to an endpoint of an earlier run. Sends "
        "end with RETRY_EXC_ERR, or reach the wrong queue pair.",
    ),
    _qp(
        "psn-mismatch",
        "One side does not send from the PSN that the other expects.",
        "One side was reset, or connected again, without the other. Take the PSNs from both "
        "endpoints after both have been reset.",
    ),
    _qp(
        "rd-atomic-mismatch",
        "More reads and atomics may be in flight than the peer takes.",
        "As many at once as the peer's max_dest_rd_atomic succeed, none if it is 0; more may end "
        "with REM_INV_REQ_ERR.",
    ),
)
