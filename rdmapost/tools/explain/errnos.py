"""Explanations of the error numbers that posting and the calls around it return."""

from __future__ import annotations

import errno
import os
from typing import Any

from ...errors import RAISE_MEMLOCK
from .model import Explanation, named

_RETURN = "ibv_post_send(3), RETURN VALUE"
_ENOTSUPP = 524


def _errno(name: str, meaning: str, **texts: Any) -> Explanation:
    number = _ENOTSUPP if name == "ENOTSUPP" else getattr(errno, name)
    return named("errno", name, meaning, number=number, **{"see": ("errno(3)",), **texts})


ERRNOS: tuple[Explanation, ...] = (
    _errno(
        "EINVAL",
        "An argument is invalid, alone or in combination with others. From a post: this work "
        "request and those after it were not posted; those before it were. EINVAL does not say "
        "which argument; work through the list below.",
        causes=(
            "A post before RTS (sends) or in RESET (receives), if the driver checks the state. If "
            "it does not, the post succeeds, and nothing happens.",
            "More SGEs than max_send_sge or max_recv_sge (some drivers say ENOMEM), or more "
            "bytes inline than max_inline_data.",
            "The QP type does not support the opcode, or a flag does not apply to it.",
            "An atomic without exactly one SGE of 8 bytes, or at an address that is not a "
            "multiple of 8.",
            "From ibv_modify_qp: an attribute is missing for the transition, or out of range; the "
            "transition does not exist; the GID index is empty; max_rd_atomic is over the device's "
            "max_qp_init_rd_atom.",
            "From ibv_create_qp, ibv_create_cq, ibv_create_srq: a capability is over the "
            "device's limit, or 0 where one is needed.",
            "From ibv_reg_mr: REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, an unknown "
            "flag, an address range that wraps.",
            "From ibv_rereg_mr: what ibv_reg_mr refuses; no flag, or an unknown one; or the "
            "region's keys were invalidated (LOCAL_INV, SEND_WITH_INV): on soft0 and roce, only "
            "mr.rereg(memory=...) gives it new ones.",
        ),
        look_at=(
            "error.index and error.wr: which work request; error.reason: the cause, if known.",
            "A QP with checked=True names most of these before the device sees them.",
            "qp.state, qp.query() and the attributes granted at creation (qp.max_send_sge ...).",
            "ibv_devinfo -v: max_qp_wr, max_sge, max_cqe, max_qp_rd_atom and the others.",
            "dmesg: many drivers log the reason.",
        ),
        soft_roce="Posting an atomic at an unaligned address or with fewer than 8 bytes returns "
        "EINVAL. A send before RTS returns EINVAL without naming a work request, and stays in the "
        "queue: it is executed when the QP reaches RTS. Checked QPs refuse it first.",
        see=(_RETURN, "ibv_modify_qp(3), NOTES", "ibv_reg_mr(3), RETURN VALUE", "ibv_rereg_mr(3)"),
    ),
    _errno(
        "ENOMEM",
        "From a post: the queue is full. From a registration or a creation: memory could not be "
        "allocated, nearly always because of a limit, not a lack of RAM.",
        causes=(
            "A post: as many work requests are outstanding as the queue holds. A slot of the send "
            "queue is freed only when the completion of that work request, or of a later signaled "
            "one, has been polled. A program that posts only unsignaled sends fills the queue "
            "permanently.",
            "ibv_reg_mr: the limit on locked memory (RLIMIT_MEMLOCK, often 8 MiB or 64 KiB).",
            "A post on mlx5, too: more SGEs than max_send_sge, or more inline data than fits.",
            "ibv_create_*: the device's limit is reached (max_qp, max_mr, max_cq), or the queue "
            "does not fit into its memory.",
            "Queue memory counts as locked memory too, on older kernels and some drivers. A "
            "container's memory cgroup may also be at its limit.",
        ),
        look_at=(
            "qp.outstanding against qp.max_send_wr and qp.max_recv_wr; poll the CQ. Signal at "
            "least one send in every max_send_wr.",
            f"ulimit -l, or 'Max locked memory' in /proc/PID/limits. To raise it: {RAISE_MEMLOCK}.",
            "VmLck and VmPin in /proc/PID/status.",
            "rdma resource show: how many QPs, CQs and MRs are in use; ibv_devinfo -v: the limits.",
            "dmesg for failed allocations; hugepages where HUGETLB is used.",
        ),
        soft_roce="It frees a slot when the work request is done, polled or not: a program that "
        "forgets to poll runs on rxe and fails on hardware.",
        see=("ibv_post_send(3)", "ibv_reg_mr(3)", "getrlimit(2): RLIMIT_MEMLOCK"),
    ),
    _errno(
        "EFAULT",
        "The kernel could not access an address in this process.",
        causes=(
            "ibv_reg_mr of a range that is not fully mapped: freed memory, a wrong length, a guard "
            "page.",
            "ibv_reg_mr with a write permission over memory that is mapped read-only (a string "
            "literal, a read-only mmap of a file, bytes).",
            "ibv_reg_mr of memory that cannot be pinned: a device's mapped registers, GPU memory "
            "without its peer-memory module (use dma-buf).",
            "Memory that an allocator or a sanitizer has mapped PROT_NONE.",
        ),
        look_at=(
            "/proc/PID/maps: the range must be covered without gaps, with 'rw'.",
            "For GPU memory: lsmod for nvidia_peermem, or ibv_reg_dmabuf_mr.",
            "The access flags: read-only memory can be registered without write permissions.",
        ),
        see=("ibv_reg_mr(3)", "mmap(2)"),
    ),
    _errno(
        "EOPNOTSUPP",
        "The device, its driver or the library does not support this operation. Nothing was posted "
        "or created. ENOTSUP is the same number.",
        causes=(
            "An opcode that the driver does not support: TSO, BIND_MW, atomics, tag matching.",
            "A QP or SRQ type that the device does not support: XRC, RAW_PACKET, tag matching.",
            "A verb that this driver does not implement (libibverbs then returns the error), or "
            "that an older libibverbs lacks.",
            "ibv_rereg_mr of a dma-buf region, or with a driver that lacks the verb (Soft-RoCE's).",
            "ON_DEMAND or another access flag that the device lacks; memory of a file system that "
            "cannot be pinned for long (DAX).",
            "The kernel is older than the library.",
        ),
        look_at=(
            "rdmapost check: which opcodes work on which QP types of this device.",
            "context.attr.device_cap_flags and the other attributes; ibv_devinfo -v.",
            "dpkg -l libibverbs1 ibverbs-providers (rpm -q libibverbs), uname -r.",
            "soft0 supports everything that the three posting calls can post: try it there.",
        ),
        soft_roce="It has no XRC, no RAW_PACKET, no tag matching and no TSO.",
        see=(_RETURN, "ibv_query_device_ex(3)"),
    ),
    _errno(
        "ENOSYS",
        "The kernel or the driver does not implement this call.",
        causes=(
            "No RDMA in this kernel: ib_uverbs is not loaded, or not built (containers, WSL, "
            "gVisor). ibv_get_device_list then sets this errno.",
            "A driver with a dummy function for a verb that it does not implement.",
            "A seccomp filter that returns it.",
        ),
        look_at=(
            "lsmod | grep ib_uverbs; ls /dev/infiniband; ls /sys/class/infiniband_verbs.",
            "modprobe ib_uverbs, on the host and not in the container.",
            "strace -f -e trace=ioctl,openat on the program.",
        ),
        soft_roce="It needs two modules: modprobe rdma_rxe, and ib_uverbs for programs.",
        see=("ibv_get_device_list(3)",),
    ),
    _errno(
        "EPERM",
        "The process may not do this, whatever the file permissions say: a capability is missing.",
        causes=(
            "A RAW_PACKET queue pair, or flow steering, without CAP_NET_RAW.",
            "A UD Q_Key with its highest bit set, which is privileged (CAP_NET_RAW).",
            "ibv_reg_mr with a limit of 0 on locked memory and no CAP_IPC_LOCK.",
            "A device in another network namespace (rdma system show: exclusive mode).",
        ),
        look_at=(
            "CapEff in /proc/self/status, decoded by capsh --decode=...",
            "Containers: --cap-add=NET_RAW --cap-add=IPC_LOCK; a program: setcap cap_net_raw+ep.",
            "ulimit -l, and ip netns identify.",
        ),
        see=("capabilities(7)", "ibv_create_qp(3)"),
    ),
    _errno(
        "EACCES",
        "Permission was refused, most often for a device file.",
        causes=(
            "/dev/infiniband/uverbsN cannot be opened for reading and writing by this user.",
            "A container without the device: --device=/dev/infiniband is missing, or the device "
            "cgroup refuses it.",
            "SELinux or AppArmor denies it; for InfiniBand also SELinux rules on P_Keys (ibpkey), "
            "on ibv_modify_qp.",
        ),
        look_at=(
            "ls -l /dev/infiniband; id. uverbs files usually have mode 0666; a container has its "
            "own nodes.",
            "ausearch -m avc, or dmesg for 'apparmor'.",
            "rdmapost devices, as root and as this user.",
        ),
        see=("ibv_open_device(3)", "rdma-core: Documentation/udev.md"),
    ),
    _errno(
        "EAGAIN",
        "Try again later: a resource is exhausted for the moment, or nothing is available yet.",
        causes=(
            "A non-blocking channel has no event yet. That is not a failure: wait for its file "
            "descriptor and call again.",
            "The rdma cgroup is at its limit for HCA objects (ibv_open_device, ibv_create_*).",
            "The firmware is out of that resource (mlx5: 'no resources').",
        ),
        look_at=(
            "rdma.max and rdma.current of the cgroup in /sys/fs/cgroup.",
            "rdma resource show; programs that do not close what they create.",
            "dmesg for failed firmware commands.",
        ),
        see=("ibv_get_cq_event(3)", "cgroups(7)"),
    ),
    _errno(
        "EBUSY",
        "The object cannot be closed or changed: something else still depends on it.",
        causes=(
            "ibv_dealloc_pd, ibv_destroy_cq, ibv_destroy_srq while a QP, MR, AH or MW uses them.",
            "ibv_dereg_mr or ibv_rereg_mr while a memory window is bound to the region.",
            "A QP that is still attached to a multicast group or a flow.",
            "mlx5: the firmware is still using the object.",
        ),
        look_at=(
            "Close in the reverse order of creation, as 'with' blocks do.",
            "This library's error, which names the children that are open.",
            "rdma resource show qp (mr, cq, pd): what this process holds.",
        ),
        see=("ibv_dealloc_pd(3)", "ibv_dereg_mr(3), NOTES"),
    ),
    _errno(
        "ENODEV",
        "The device does not exist, or no longer exists.",
        causes=(
            "It was unplugged, its module was removed, or the virtual function was taken away.",
            "rdma link delete rxe0, or its network device is gone.",
            "The name or the port does not exist.",
        ),
        look_at=(
            "rdmapost devices, ls /sys/class/infiniband, rdma link.",
            "dmesg: removal, reset, PCIe errors.",
            "context.get_async_event(): DEVICE_FATAL came before.",
        ),
        soft_roce="The rxe device disappears with its network device and does not come back by "
        "itself: rdma link add rxe0 type rxe netdev IF.",
        see=("ibv_open_device(3)",),
    ),
    _errno(
        "ENXIO",
        "The device file exists, but no device is behind it.",
        causes=(
            "A stale node in /dev/infiniband, of a device that has been removed or renumbered; "
            "typical of containers that were given the node and not the directory.",
            "The device is being taken down at this moment.",
        ),
        look_at=(
            "ls -l /dev/infiniband against cat /sys/class/infiniband_verbs/uverbs*/dev.",
            "Restart the container after a device was added or reset.",
        ),
    ),
    _errno(
        "ENOENT",
        "A named object does not exist.",
        causes=(
            "No node /dev/infiniband/uverbsN: ib_uverbs is not loaded, or udev has not run.",
            "ibv_get_device_list on a machine without the sysfs directories.",
            "An object handle that the kernel has already dropped (destroyed twice).",
            "ibv_start_poll on an empty completion queue: not a failure, it means no completions.",
        ),
        look_at=(
            "ls /dev/infiniband /sys/class/infiniband.",
            "modprobe ib_uverbs; udevadm trigger.",
        ),
        see=("ibv_create_cq_ex(3)", "ibv_get_device_list(3)"),
    ),
    _errno(
        "ETIMEDOUT",
        "An answer did not arrive in time. From ibv_modify_qp on RoCE: the peer's link address was "
        "not resolved. A work request that times out completes with RETRY_EXC_ERR instead.",
        causes=(
            "INIT to RTR, or an address handle: the GID's IP address does not resolve (ARP, ND) "
            "because the peer is down or on another VLAN, or the wrong GID index was chosen.",
            "A firmware command that was not answered: the device hangs.",
            "A librdmacm event with status -110: rdmapost explain UNREACHABLE, ADDR_ERROR or "
            "ROUTE_ERROR.",
            "This library's WaitTimeout is a TimeoutError: no completion arrived in time, and the "
            "work request is still outstanding.",
        ),
        look_at=(
            "ip neigh show ADDRESS, and ping it from the address of the chosen GID.",
            "rdmapost devices: GID, its type and network device; try -g INDEX.",
            "dmesg: mlx5 logs 'timeout. Will cause a leak of a command resource'.",
        ),
        see=("ibv_modify_qp(3)", "ibv_create_ah(3)"),
    ),
    _errno(
        "EHOSTUNREACH",
        "The peer's network is known, but no host answers at its address.",
        causes=(
            "The neighbour does not resolve (host down, cable, VLAN), or its entry is FAILED.",
            "An 'unreachable' route, or a firewall that rejects with this error.",
            "A link-local GID (fe80::) of another link: it is valid only on its own link.",
        ),
        look_at=(
            "ip route get ADDRESS from SOURCE; ip neigh.",
            "Which GID each side uses: both IPv4-mapped (::ffff:a.b.c.d) or both IPv6.",
        ),
        see=("ibv_modify_qp(3): ah_attr", "ip-route(8)"),
    ),
    _errno(
        "ENETUNREACH",
        "There is no route from the chosen GID's address to the peer's network.",
        causes=(
            "GIDs of two types: an IPv4 address here and an IPv6 one there, or a link-local one "
            "against a global one.",
            "The network device of this GID is down, or has lost its address.",
            "No gateway for the peer's network, or policy routing that excludes this source.",
            "UCX's 'Destination is unreachable': the two sides have no transport or device in "
            "common (UCX_TLS, UCX_NET_DEVICES).",
        ),
        look_at=(
            "ip route get PEER from OWN; ip rule; ip -br addr.",
            "rdmapost send -v: which GID is chosen, and why.",
        ),
        soft_roce="It routes each packet by the kernel's tables: a route that disappears later "
        "causes RETRY_EXC_ERR.",
        see=("ibv_modify_qp(3): ah_attr", "ip-rule(8)"),
    ),
    _errno(
        "EIO",
        "The call failed in the device or on the path to it, without more detail. Often the first "
        "sign that the device has been reset.",
        causes=(
            "The device was disassociated while the program used it: reset, removed, driver "
            "reloaded. Every call on the open context then fails with EIO.",
            "A firmware command failed (internal error, wrong length: versions that do not match).",
            "ibv_poll_cq returned a negative number: the CQ overran or is corrupt, and no errno "
            "was set.",
        ),
        look_at=(
            "dmesg, first.",
            "context.get_async_event(): DEVICE_FATAL, CQ_ERR. Open the device again afterwards.",
            "cqe of the CQ against all work requests that can complete there at once.",
        ),
        see=("ibv_poll_cq(3), NOTES", "ibv_get_async_event(3)"),
    ),
    _errno(
        "ENOSPC",
        "A table or a buffer is full.",
        causes=(
            "The device's table of keys, QPs, multicast members or flows is full.",
            "The kernel's answer is larger than an older library's buffer.",
            "A tag list or steering table that was created too small.",
        ),
        look_at=(
            "rdma resource show, against the limits in ibv_devinfo -v (max_mcast_grp, "
            "max_mcast_qp_attach, max_qp).",
            "Whether the kernel is much newer than rdma-core.",
        ),
        see=("ibv_attach_mcast(3)",),
    ),
    _errno(
        "EBADF",
        "The file descriptor of the device or of a channel is closed, or was never open.",
        causes=(
            "Something closed all file descriptors: daemonising, a subprocess helper, "
            "os.closerange, close() of a number that had been reused.",
            "The program forked, and the child used the parent's resources after closing them.",
            "The context or channel was closed before.",
        ),
        look_at=(
            "ls -l /proc/PID/fd: the uverbs and anon_inode entries.",
            "strace -f -e trace=close.",
            "Open the device after daemonising and after fork.",
        ),
        see=("ibv_fork_init(3)",),
    ),
    _errno(
        "EMFILE",
        "The process has no file descriptors left.",
        causes=(
            "Every open device and every channel uses one or two, and the limit is often 1024; a "
            "CQ that is created without a channel creates its own.",
            "Contexts or CQs that are never closed.",
        ),
        look_at=(
            "ulimit -n; ls /proc/PID/fd | wc -l.",
            "Share one CompChannel among CQs; use 'with', or close().",
        ),
        see=("getrlimit(2): RLIMIT_NOFILE",),
    ),
    _errno(
        "EINTR",
        "A signal interrupted a blocking call.",
        causes=(
            "A signal with a handler (a timer, SIGCHLD, a profiler) during ibv_get_cq_event or "
            "ibv_get_async_event.",
            "A debugger or strace was attached.",
        ),
        look_at=(
            "Call again. This library's waits do so automatically, unless the handler raised.",
            "SA_RESTART in the program's own handlers.",
        ),
        see=("signal(7)", "ibv_get_cq_event(3)"),
    ),
    _errno(
        "ENODATA",
        "The table entry is empty: there is no GID at this index.",
        causes=(
            "ibv_query_gid_ex of an empty index: RoCE fills entries as the network device gets "
            "addresses.",
            "ibv_modify_qp (to RTR) or ibv_create_ah with an empty sgid_index; older kernels "
            "return EINVAL.",
            "An address was removed and its GID with it: indexes are not stable.",
        ),
        look_at=(
            "rdmapost devices: the indexes that are in use.",
            "/sys/class/infiniband/DEV/ports/N/gids and gid_attrs/types.",
        ),
        see=("ibv_query_gid_ex(3)",),
    ),
    _errno(
        "EADDRINUSE",
        "The address is in use. No verb returns this; opening a roce device or listening on a TCP "
        "port can.",
        causes=(
            "roce: another process has UDP port 4791 on this address, or Soft-RoCE (rdma_rxe) has "
            "it on every address of this network namespace.",
            "serve, pingpong: another program listens on this TCP port.",
        ),
        look_at=(
            "ss -lunp 'sport = 4791', ss -ltnp: who has it.",
            "rdma link: a Soft-RoCE device, which has the port; use it, or another namespace.",
        ),
        see=("bind(2)", "udp(7)"),
    ),
    _errno(
        "EADDRNOTAVAIL",
        "No interface of this machine, or of this network namespace, has the address. No verb "
        "returns it; listening on a TCP port and opening a roce device do.",
        causes=(
            "serve --bind, pingpong --bind: the address is another machine's, or misspelt.",
            "The address was removed, or its interface is in another network namespace.",
        ),
        look_at=("ip -br addr: the addresses there are. 0.0.0.0 stands for all of them.",),
        see=("bind(2)", "ip-address(8)"),
    ),
    _errno(
        "ECONNABORTED",
        "The connection was given up on this side. The kernel's NFS over RDMA prints -103 when the "
        "queue pair has failed.",
        causes=(
            "A work request failed, or the peer went away.",
            "The program was told to close the connection.",
        ),
        look_at=("The lines before it in the log, on both sides: the first error is the cause.",),
    ),
    _errno(
        "EREMOTEIO",
        "The device's firmware refused a command. Despite the errno's text, no peer is involved.",
        causes=(
            "mlx5: a DEVX command (UCX, DPDK, DOCA) with a status other than success, often for a "
            "feature or limit that the firmware does not have.",
        ),
        look_at=(
            "dmesg, or the program's log: the command's status and syndrome.",
            "The firmware's version (fw_ver in ibv_devinfo) against what the program needs.",
        ),
    ),
    _errno(
        "ECONNREFUSED",
        "Nothing listens at the peer's address and TCP port, which is where two programs exchange "
        "their endpoints. The errno says nothing about RDMA, unless an event of the RDMA CM has "
        "it.",
        causes=(
            "The server is not running, has ended, or listens on another address or port.",
            "A firewall refuses the connection.",
            "librdmacm: RDMA_CM_EVENT_REJECTED on iWARP. It is about a port of the RDMA CM: "
            "rdmapost explain REJECTED.",
        ),
        look_at=("ss -ltnp on the peer; ping, and the address that was given.",),
        see=("connect(2)",),
    ),
    _errno(
        "ECONNRESET",
        "The peer's program closed the TCP connection, or died. A queue pair connected to it gets "
        "RETRY_EXC_ERR.",
        causes=(
            "The other program has ended: its own output has the reason.",
            "It refused this side, for example because of its token or its version.",
        ),
        look_at=("The other side's messages and exit status.",),
        see=("tcp(7)",),
    ),
    _errno(
        "ENOTCONN",
        "The queue pair is not connected: it is not in RTS. siw (software iWARP) returns this "
        "where others return EINVAL.",
        causes=(
            "A post to an iWARP queue pair before rdma_connect or rdma_accept has finished.",
            "The TCP connection below it has ended.",
        ),
        look_at=(
            "iWARP needs the connection manager (librdmacm): moving the queue pair through INIT, "
            "RTR and RTS by hand does not connect it.",
            "ss -tn for its TCP connection; qp.state.",
        ),
        see=("rdma_connect(3)",),
    ),
    _errno(
        "EMSGSIZE",
        "The message is longer than the device accepts.",
        causes=(
            "cxgb4 (iWARP): too many inline bytes, where others return EINVAL or ENOMEM.",
            "A driver that compares a message with the port's max_msg_sz at the post.",
        ),
        look_at=(
            "INLINE, and qp.max_inline_data; max_msg_sz of the port in ibv_devinfo -v.",
            "The sum of the SGEs; split the message.",
        ),
        see=("ibv_query_port(3)",),
    ),
    _errno(
        "ENOTSUPP",
        "A kernel-internal number (524) that should not reach programs; strerror knows it only as "
        "'Unknown error 524'. It means what EOPNOTSUPP means.",
        causes=("A driver that returns it for a type, flag or attribute that it lacks.",),
        look_at=(
            "What 'rdmapost explain EOPNOTSUPP' lists.",
            "The driver's version: a newer one may have corrected this.",
        ),
    ),
)


def undocumented(name: str) -> Explanation:
    """Explain an errno that no man page of a verb lists."""
    return _errno(
        name,
        f"{os.strerror(getattr(errno, name))}. No man page of a verb lists this errno: the kernel "
        "or the driver returned it for a reason of its own.",
        look_at=("dmesg: many drivers log the reason.", f"Where the driver returns -{name}."),
    )


ALIASES = {"ENOTSUP": "EOPNOTSUPP", "EWOULDBLOCK": "EAGAIN"}
"""Second names of errnos, and the names under which they are explained."""
