"""Explanations of failed calls, for lines that name the call and no status.

Every verb that this library calls has one, in this module, in QUERIES or in RELEASES.
"""

from __future__ import annotations

from typing import Any

from ...errors import RAISE_MEMLOCK
from .failed_queries import QUERIES
from .failed_releases import RELEASES
from .model import Explanation, failure

_MODIFY = ("ibv_modify_qp(3)",)


def _step(name: str, meaning: str, *look_at: str, **texts: Any) -> Explanation:
    """Explain the failure of what is not a whole verb, or not a verb."""
    return failure(name, meaning, *look_at, constant=name, **texts)


FAILURES: tuple[Explanation, ...] = (
    _step(
        "modify_qp_to_init",
        "ibv_modify_qp could not move the queue pair from RESET to INIT. No peer is involved yet: "
        "an argument is wrong on this side.",
        "The errno: EINVAL or EPERM. dmesg, which may have the driver's reason.",
        "ibv_devinfo -v: the ports and their P_Keys; the attributes that the program sets.",
        causes=(
            "The port number does not exist (perftest: -i), or the pkey_index is not in its table.",
            "The queue pair is not in RESET: it was moved before. The RDMA CM itself moves queue "
            "pairs created by rdma_create_qp.",
            "The mask does not match the QP type: RC and UC take qp_access_flags, UD takes qkey.",
            "An access flag that the device lacks, such as REMOTE_ATOMIC.",
            "EPERM: a Q_Key with its highest bit set, without CAP_NET_RAW.",
        ),
        see=_MODIFY,
    ),
    _step(
        "modify_qp_to_rtr",
        "ibv_modify_qp could not move the queue pair from INIT to RTR: the path to the peer, as "
        "the program describes it (ah_attr, path_mtu, dest_qp_num), does not exist or is not "
        "allowed. Nothing has been sent to the peer's queue pair yet.",
        "The errno, if the line has one: EINVAL is a wrong attribute; ETIMEDOUT, EHOSTUNREACH and "
        "ENETUNREACH are the network.",
        "On both sides, rdmapost devices: the GIDs, their types and network devices, the MTU.",
        "ping -I OWN PEER, with the addresses of the two GIDs; ip route get; ip neigh.",
        "What each program prints about the other: LID, QPN, GID.",
        causes=(
            "RoCE without a GID index: the address needs a GRH (is_global=1 and sgid_index). "
            "ibv_*_pingpong: -g INDEX on both sides; perftest: -x INDEX.",
            "A wrong GID: an empty index, one of another network device, RoCE v1 on one side and "
            "v2 on the other, IPv4 here and IPv6 there. The indexes of two hosts may differ.",
            "The peer's address does not resolve or has no route (ETIMEDOUT, EHOSTUNREACH, "
            "ENETUNREACH): the peer is down, on another VLAN or subnet, or its GID arrived "
            "garbled.",
            "path_mtu is larger than the port's active MTU (ibv_*_pingpong, perftest: -m).",
            "dest_qp_num, the peer's LID or the port number is wrong or 0: the exchange of the "
            "endpoints went wrong.",
            "max_dest_rd_atomic is over the device's max_qp_rd_atom.",
            "An attribute is missing from the mask, or the queue pair is not in INIT.",
            "The port is not active.",
        ),
        see=_MODIFY,
    ),
    _step(
        "modify_qp_to_rts",
        "ibv_modify_qp could not move the queue pair from RTR to RTS. The path has been accepted: "
        "an attribute of the sending side is wrong, or the queue pair is not in RTR.",
        "The line before it: a move to RTR that failed. The errno; qp.state.",
        "ibv_devinfo -v: max_qp_init_rd_atom.",
        causes=(
            "The move to RTR failed before, and the program went on.",
            "max_rd_atomic is over the device's max_qp_init_rd_atom, or the peer's "
            "max_dest_rd_atomic was copied into it.",
            "timeout, retry_cnt or rnr_retry is out of range (31, 7, 7).",
            "An attribute is missing from the mask: RC needs timeout, retry_cnt, rnr_retry, sq_psn "
            "and max_rd_atomic; UC and UD only sq_psn.",
            "The queue pair has gone to ERR in the meantime, or the device is lost.",
        ),
        see=_MODIFY,
    ),
    failure(
        "modify_qp",
        "ibv_modify_qp failed; the line does not name the target state.",
        "rdmapost explain modify_qp_to_rtr, the most frequent; the errno and dmesg.",
        causes=(
            "To RTR: the path to the peer is wrong, such as RoCE without a GID index.",
            "The transition does not exist from the current state, or an attribute is missing.",
        ),
    ),
    failure(
        "create_qp",
        "The queue pair could not be created.",
        "ibv_devinfo -v: max_qp_wr, max_sge, max_qp; rdma resource show; dmesg.",
        "ulimit -l. What the device supports: rdmapost check.",
        causes=(
            "max_send_wr or max_recv_wr is over max_qp_wr, or over what fits with this many SGEs "
            "and inline bytes: ask for less (perftest: -t, -r, -I).",
            "The type is not supported (UC, XRC, RAW_PACKET; EFA has only UD and SRD), or needs "
            "CAP_NET_RAW.",
            "The limit on locked memory is reached, or the device is out of queue pairs (ENOMEM).",
            "ibv_create_qp_ex: the driver lacks a flag or a field that the comp_mask names "
            "(send_ops_flags, TSO, XRC): EOPNOTSUPP or EINVAL.",
        ),
    ),
    failure(
        "create_cq",
        "The completion queue could not be created.",
        "ibv_devinfo -v: max_cqe, max_cq, num_comp_vectors; ulimit -l.",
        causes=(
            "cqe is over the device's max_cqe, or 0.",
            "comp_vector is not below num_comp_vectors.",
            "The limit on locked memory is reached, or the device is out of CQs (ENOMEM).",
            "ibv_create_cq_ex: the driver has no extended CQs, or lacks a field of wc_flags, such "
            "as timestamps (EOPNOTSUPP).",
        ),
    ),
    failure(
        "resize_cq",
        "The completion queue could not be resized. It keeps its size and its completions.",
        "ibv_devinfo -v: max_cqe; cq.cqe, and how many completions have not been polled.",
        causes=(
            "The driver cannot resize a CQ (EOPNOTSUPP, ENOSYS): create it large enough.",
            "cqe is over max_cqe, or less than the completions that are in the CQ (EINVAL).",
            "An extended CQ (ibv_create_cq_ex): some drivers resize only ordinary CQs.",
        ),
    ),
    failure(
        "create_comp_channel",
        "The completion channel could not be created. It takes a file descriptor.",
        "ulimit -n, and ls /proc/PID/fd; dmesg.",
        causes=(
            "The process is out of file descriptors (EMFILE).",
            "The device was reset or removed after it had been opened (EIO).",
        ),
    ),
    failure(
        "get_cq_event",
        "No event could be read from the completion channel.",
        "The errno; whether the channel's file descriptor is still open and non-blocking.",
        causes=(
            "EAGAIN: the channel is non-blocking and has no event; poll its file descriptor.",
            "EINTR: a signal interrupted the call; repeat it.",
            "EIO: the device was removed while the program waited.",
            "EBADF: the channel was destroyed, or something else closed its file descriptor.",
        ),
    ),
    failure(
        "create_srq",
        "The shared receive queue could not be created.",
        "ibv_devinfo -v: max_srq, max_srq_wr, max_srq_sge; dmesg; ulimit -l.",
        causes=(
            "max_wr is 0 or over max_srq_wr, or max_sge is over max_srq_sge (EINVAL).",
            "The device has no SRQs: max_srq is 0 (EOPNOTSUPP).",
            "The limit on locked memory is reached, or the device is out of SRQs (ENOMEM).",
            "ibv_create_srq_ex: an XRC SRQ needs an XRC domain and a CQ; tag matching needs a CQ "
            "and a device that supports it.",
        ),
        see=("ibv_create_srq(3)", "ibv_create_srq_ex(3)"),
    ),
    failure(
        "modify_srq",
        "The shared receive queue could not be modified: neither attribute has changed.",
        "ibv_devinfo -v: SRQ_RESIZE among the device_cap_flags; srq.max_wr.",
        causes=(
            "srq_limit is over the SRQ's max_wr (EINVAL).",
            "max_wr was given, and the device cannot resize an SRQ.",
            "max_wr is over max_srq_wr, or less than the receives in the queue.",
        ),
    ),
    failure(
        "open_xrcd",
        "The XRC domain could not be opened.",
        "ibv_devinfo -v: XRC among the device_cap_flags; the file that fd names.",
        causes=(
            "The device has no XRC (EOPNOTSUPP): Soft-RoCE, EFA, iWARP and many others.",
            "The file has no domain yet, and oflag lacks O_CREAT (EAGAIN); or it has one, and "
            "oflag has O_EXCL (EINVAL).",
            "fd is not an open file (EBADF). -1, for a domain without a file, needs O_CREAT.",
        ),
    ),
    failure(
        "reg_mr",
        "The memory region could not be registered.",
        "The errno; ulimit -l; the access flags; for GPU memory lsmod for nvidia_peermem.",
        causes=(
            f"The limit on locked memory, RLIMIT_MEMLOCK (ENOMEM). To raise it: {RAISE_MEMLOCK}.",
            "The range is not mapped, is read-only, or cannot be pinned (EFAULT).",
            "A remote write or atomic permission without local write (EINVAL); ODP or huge pages "
            "that the device lacks (EOPNOTSUPP).",
        ),
    ),
    failure(
        "reg_dmabuf_mr",
        "The dma-buf, such as GPU memory, could not be registered.",
        "The errno; dmesg. The versions of the kernel (5.12 or later) and of rdma-core (34 or "
        "later), and the GPU driver's support for dma-buf.",
        causes=(
            "The driver does not register dma-bufs (EOPNOTSUPP).",
            "fd is not a dma-buf, or has been closed (EBADF, EINVAL).",
            "offset and length are not within the buffer, or iova and offset differ within a page "
            "(EINVAL).",
            "The exporter does not let this device reach its memory: across PCIe root ports, say.",
        ),
        see=("ibv_reg_mr(3)",),
    ),
    failure(
        "rereg_mr",
        "The memory region could not be changed. ibv_rereg_mr returns its own negative codes "
        "instead of an errno. After -4 or -5 the region must not be used, only deregistered; after "
        "-1 or -2 it is as before; after -3 it has changed.",
        "The code, and with -4 the errno. Alternatively, deregister the region and register it "
        "again.",
        causes=(
            "The driver cannot change a region, or not this part of it (EOPNOTSUPP).",
            "An argument that ibv_reg_mr refuses as well, or no flag at all (EINVAL).",
            "A memory window is bound to the region (EBUSY).",
            "The new memory is over the limit on locked memory (ENOMEM) or not mapped (EFAULT).",
        ),
    ),
    failure(
        "advise_mr",
        "The advice about a region was refused. It is only a hint: RDMA works without it.",
        "Whether the region was registered with ON_DEMAND; the lkeys and ranges of the SGEs.",
        causes=(
            "The driver takes no advice, or not this kind (EOPNOTSUPP); prefetching needs ODP.",
            "A range lies outside its region, is not mapped, or has an invalid lkey (EFAULT).",
            "Prefetching for writes without LOCAL_WRITE, or a region of another PD (EPERM).",
            "The lkeys do not belong to regions of this PD (ENOENT).",
        ),
    ),
    failure(
        "alloc_mw",
        "The memory window could not be allocated.",
        "ibv_devinfo -v: max_mw; MEM_WINDOW, MEM_WINDOW_TYPE_2A and MEM_WINDOW_TYPE_2B among the "
        "device_cap_flags.",
        causes=(
            "The device has no memory windows, or not of this type (EOPNOTSUPP, EINVAL).",
            "The device is out of windows, which share its keys with the regions (ENOMEM).",
        ),
    ),
    failure(
        "bind_mw",
        "The memory window could not be bound: the request was refused when it was posted. A bind "
        "that fails later completes with MW_BIND_ERR.",
        "The errno, which this call returns; the type of the window; the access of the region.",
        causes=(
            "EINVAL: the window is of type 2, which a BIND_MW work request binds; or the queue "
            "pair is not RC, UC or XRC_SEND, or not in RTS.",
            "EPERM: the window and the region have different PDs.",
            "The region lacks MW_BIND, or the window gets REMOTE_WRITE or REMOTE_ATOMIC and the "
            "region lacks LOCAL_WRITE.",
            "ENOMEM: no room in the send queue, where a bind takes a slot, as a send does.",
        ),
        see=("ibv_bind_mw(3)", "ibv_alloc_mw(3)"),
    ),
    failure(
        "alloc_pd",
        "The protection domain could not be allocated.",
        "dmesg; rdma resource show; ibv_devinfo -v: max_pd.",
        causes=(
            "The device is lost or was reset after it had been opened.",
            "The device or the cgroup is out of PDs.",
        ),
    ),
    failure(
        "open_device",
        "The device is listed, but could not be opened.",
        "rdmapost doctor. ls -l /dev/infiniband; id.",
        causes=(
            "/dev/infiniband/uverbsN is missing (container), or this user may not open it.",
            "The user-space driver does not match the kernel's: another version of rdma-core.",
            "The device is being reset.",
        ),
    ),
    _step(
        "get_lid",
        "ibv_rc_pingpong and its relatives: the port has no LID, so a GID index is needed.",
        "ibv_devinfo: link_layer and port_lid.",
        causes=(
            "RoCE has no LIDs: give -g INDEX on both sides.",
            "InfiniBand: no subnet manager has configured the port.",
        ),
        see=("ibv_rc_pingpong(1)",),
    ),
    failure(
        "create_ah",
        "The address handle could not be created: the path to the peer is wrong.",
        "rdmapost explain modify_qp_to_rtr: the same path, the same causes.",
        causes=(
            "RoCE without a GRH, or with a wrong GID index: -g, -x.",
            "The peer's address does not resolve (ETIMEDOUT).",
            "The static rate or the port number does not exist.",
        ),
    ),
    failure(
        "init_ah_from_wc",
        "The address of a datagram's sender could not be derived from its completion.",
        "wc.wc_flags for GRH, and the first 40 bytes of the receive buffer.",
        causes=(
            "The GRH's destination is not in the port's GID table: the address has been removed, "
            "or the buffer does not begin with the GRH.",
            "port_num is not the port at which the datagram arrived.",
            "The completion is not a UD receive's, or is one without a GRH on RoCE.",
        ),
        see=("ibv_create_ah_from_wc(3)",),
    ),
    failure(
        "attach_mcast",
        "The queue pair could not be attached to the multicast group.",
        "ibv_devinfo -v: max_mcast_grp, max_mcast_qp_attach; the type of the queue pair.",
        causes=(
            "The queue pair is not UD (EINVAL).",
            "gid is not a multicast address (ff00::/8), or lid is not a multicast LID (EINVAL).",
            "The device has no multicast (EOPNOTSUPP), or has no room for another group, or for "
            "another queue pair in this one (ENOMEM).",
        ),
    ),
    failure(
        "post_send",
        "A work request was refused when it was posted. It and those after it were not posted.",
        "The errno, which this call returns: explain that. qp.state; qp.outstanding.",
        causes=(
            "ENOMEM: the send queue is full; poll the CQ, and signal one send in every "
            "max_send_wr.",
            "EINVAL: not in RTS; an opcode or flag that the QP's type lacks; too many SGEs or "
            "inline bytes.",
            "EOPNOTSUPP: the device does not have the opcode.",
        ),
    ),
    failure(
        "post_recv",
        "A receive was refused when it was posted.",
        "The errno, which this call returns. A number in ibv_rc_pingpong's 'Couldn't post receive "
        "(N)' is how many were posted.",
        causes=(
            "The receive queue is full: more than max_recv_wr, or max_wr of an SRQ.",
            "The queue pair is in RESET or has an SRQ; or there are more SGEs than max_recv_sge.",
        ),
    ),
    failure(
        "post_srq_ops",
        "A tag-matching operation was refused. It and those after it were not posted.",
        "The errno, which this call returns; how many operations have not completed.",
        causes=(
            "The queue of operations (max_ops) or the tag list (max_num_tags) is full (ENOMEM).",
            "The SRQ was not created for tag matching (EOPNOTSUPP, EINVAL).",
            "TAG_DEL or SYNC with a handle that has been matched or deleted (EINVAL).",
        ),
    ),
    failure(
        "req_notify_cq",
        "The completion queue could not be armed.",
        "dmesg: whether the device was reset.",
        causes=("The device is lost.", "The CQ was created without a completion channel."),
    ),
    failure(
        "poll_cq",
        "ibv_poll_cq returned a negative number: it could not read the completion queue. It does "
        "not set errno, so an errno beside it may be older. A failed work request is another case: "
        "then ibv_poll_cq returns a completion with an error status.",
        "dmesg, and ibv_get_async_event: CQ_ERR or DEVICE_FATAL.",
        "cqe of the CQ against the sum of max_send_wr and max_recv_wr of its queue pairs.",
        causes=(
            "The CQ overran: it is too small, or was polled too slowly.",
            "The device was reset or removed.",
            "A completion names a queue pair that the library does not know: it was destroyed "
            "before its completions were polled, or the program has overwritten memory.",
            "The CQ was used by several threads on a context without locks, or was destroyed.",
        ),
    ),
    _step(
        "parse_wc",
        "ibv_rc_pingpong: a completion was not what the program expects. The line before it says "
        "why. The number is how many completions it had polled: not an errno, and not a status.",
        "The line before: explain that.",
        causes=(
            "A work request failed: 'Failed status ... for wr_id N'.",
            "A receive could not be posted again: 'Couldn't post receive (N)'.",
        ),
        see=("ibv_rc_pingpong(1)",),
    ),
    _step(
        "completion",
        "perftest: a work request ended with an error. The line after it names the status.",
        "'Failed status N: wr_id N syndrom 0xN', the line after it: explain that.",
        "The other side's output: it may have ended first.",
        causes=("A work request failed, here or at the peer; only the status says how.",),
        see=("ibv_poll_cq(3)",),
    ),
    _step(
        "exchange",
        "The two programs could not exchange their endpoints over TCP. RDMA is not involved yet.",
        "The other side's output first: it ended, or reports the cause.",
        "ss -ltnp on the server; the same options and versions on both sides.",
        causes=(
            "The other side has ended: it failed during its own set-up, such as a move to RTR.",
            "The server is not running, or listens on another port (-p); or a firewall is in the "
            "way.",
            "The two sides have different options or versions, so their messages differ in length.",
            "Listening: another program has the port.",
        ),
        see=("ibv_rc_pingpong(1)", "ib_send_bw(1)"),
    ),
    _step(
        "load_driver",
        "libibverbs could not load a user-space driver that its configuration names. Only this "
        "driver's devices are missing; others work.",
        "The name in the message: librxe is Soft-RoCE's driver, libmlx5 mlx5's; rdmav34 and "
        "the like are the ABI of rdma-core.",
        "ls /etc/libibverbs.d; dpkg -S or rpm -qf on the file; ldconfig -p | grep ibverbs; "
        "LD_LIBRARY_PATH.",
        causes=(
            "The driver's package is not installed: apt-get install ibverbs-providers (dnf install "
            "libibverbs).",
            "Two versions of libibverbs: one is from MLNX_OFED, conda, a wheel or /usr/local, and "
            "the drivers belong to the other.",
            "A container image with libibverbs and without its drivers, or a leftover file in "
            "/etc/libibverbs.d.",
        ),
        see=("rdma-core: Documentation/libibverbs.md",),
    ),
    _step(
        "rdma_cm",
        "librdmacm could not start: the kernel's RDMA CM is not reachable.",
        "lsmod | grep rdma_ucm; ls -l /dev/infiniband/rdma_cm.",
        causes=(
            "rdma_ucm is not loaded: modprobe rdma_ucm, on the host.",
            "A container without /dev/infiniband/rdma_cm, or this user may not open it.",
        ),
        see=("rdma_cm(7)",),
    ),
    _step(
        "rdma_connect",
        "The connection of the RDMA CM was not established.",
        "The RDMA CM event printed before it (RDMA_CM_EVENT_...): explain that.",
        "The other side's output.",
        causes=(
            "The peer refused, or nobody listens there: REJECTED.",
            "The peer did not answer: UNREACHABLE. This side gave up: CONNECT_ERROR.",
        ),
        see=("rdma_connect(3)",),
    ),
    *QUERIES,
    *RELEASES,
)

SAME_CALL = {
    "create_ah_from_wc": "create_ah",
    "create_cq_ex": "create_cq",
    "create_qp_ex": "create_qp",
    "create_srq_ex": "create_srq",
    "next_poll": "poll_cq",
    "post_srq_recv": "post_recv",
    "query_device": "query_device_ex",
    "query_gid_ex": "query_gid",
    "query_gid_table": "query_gid",
    "reg_mr_iova": "reg_mr",
    "reg_mr_iova2": "reg_mr",
    "exp_reg_mr": "reg_mr",
    "start_poll": "poll_cq",
    "wr_atomic_write": "post_send",
    "wr_complete": "post_send",
    "wr_flush": "post_send",
}
"""Verbs that fail for the same reasons as another verb, and that other verb."""
