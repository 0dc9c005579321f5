"""Explanations of failed calls, for lines that name the call and no status."""

from __future__ import annotations

from typing import Any

from .model import Explanation


def _failure(
    name: str, meaning: str, *look_at: str, constant: str = "", **texts: Any
) -> Explanation:
    return Explanation(
        kind="failure",
        name=name,
        number=0,
        constant=constant or f"ibv_{name}",
        meaning=meaning,
        look_at=look_at,
        **{"see": (f"ibv_{name}(3)",), **texts},
    )


_MODIFY = ("ibv_modify_qp(3)",)

FAILURES: tuple[Explanation, ...] = (
    _failure(
        "modify_qp_to_init",
        "ibv_modify_qp could not move the queue pair from RESET to INIT. No peer is involved yet: "
        "an argument is wrong on this side.",
        "The errno: EINVAL or EPERM. dmesg, which may have the driver's reason.",
        "ibv_devinfo -v: the ports and their P_Keys; the attributes that the program sets.",
        constant="modify_qp_to_init",
        causes=(
            "The port number does not exist (perftest: -i), or the pkey_index is not in its table.",
            "The queue pair is not in RESET: it was moved before. The RDMA CM itself moves queue "
            "pairs created by rdma_create_qp.",
            "The mask does not fit the type: RC and UC take qp_access_flags, UD takes qkey.",
            "An access flag that the device lacks, as for atomics.",
            "EPERM: a Q_Key with its highest bit set, without CAP_NET_RAW.",
        ),
        see=_MODIFY,
    ),
    _failure(
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
            "An attribute is missing in the mask, or the queue pair is not in INIT.",
            "The port is not active.",
        ),
        constant="modify_qp_to_rtr",
        see=_MODIFY,
    ),
    _failure(
        "modify_qp_to_rts",
        "ibv_modify_qp could not move the queue pair from RTR to RTS. The path has been accepted: "
        "an attribute of the sending side is wrong, or the queue pair is not in RTR.",
        "The line before it: a move to RTR that failed. The errno; qp.state.",
        "ibv_devinfo -v: max_qp_init_rd_atom.",
        constant="modify_qp_to_rts",
        causes=(
            "The move to RTR failed before, and the program went on.",
            "max_rd_atomic is over the device's max_qp_init_rd_atom, or the peer's "
            "max_dest_rd_atomic was copied into it.",
            "timeout, retry_cnt or rnr_retry is out of range (31, 7, 7).",
            "An attribute is missing in the mask: RC needs timeout, retry_cnt, rnr_retry, sq_psn "
            "and max_rd_atomic; UC and UD only sq_psn.",
            "The queue pair has gone to ERR in the meantime, or the device is lost.",
        ),
        see=_MODIFY,
    ),
    _failure(
        "modify_qp",
        "ibv_modify_qp failed; the line does not name the target state.",
        "rdmapost explain modify_qp_to_rtr, the most frequent; the errno and dmesg.",
        causes=(
            "To RTR: the path to the peer is wrong, such as RoCE without a GID index.",
            "The transition does not exist from the present state, or an attribute is missing.",
        ),
    ),
    _failure(
        "create_qp",
        "The queue pair could not be created.",
        "ibv_devinfo -v: max_qp_wr, max_sge, max_qp; rdma resource show; dmesg.",
        "ulimit -l. What the device supports: rdmapost check.",
        causes=(
            "max_send_wr or max_recv_wr is over max_qp_wr, or over what fits with this many SGEs "
            "and inline bytes: ask for less (perftest: -t, -r, -I).",
            "The type is not supported (UC, XRC, RAW_PACKET; EFA has only UD and SRD), or needs "
            "CAP_NET_RAW.",
            "The limit on locked memory, or the device is out of queue pairs (ENOMEM).",
        ),
    ),
    _failure(
        "create_cq",
        "The completion queue could not be created.",
        "ibv_devinfo -v: max_cqe, max_cq, num_comp_vectors; ulimit -l.",
        causes=(
            "cqe is over the device's max_cqe, or 0.",
            "comp_vector is not below num_comp_vectors.",
            "The limit on locked memory, or the device is out of CQs (ENOMEM).",
        ),
    ),
    _failure(
        "reg_mr",
        "The memory region could not be registered.",
        "The errno; ulimit -l; the access flags; for GPU memory lsmod for nvidia_peermem.",
        causes=(
            "The limit on locked memory, RLIMIT_MEMLOCK (ENOMEM): raise it with ulimit -l "
            "unlimited, in /etc/security/limits.conf, or in a unit with LimitMEMLOCK=infinity.",
            "The range is not mapped, is read-only, or cannot be pinned (EFAULT).",
            "A remote write or atomic permission without local write (EINVAL); ODP or huge pages "
            "that the device lacks (EOPNOTSUPP).",
        ),
    ),
    _failure(
        "alloc_pd",
        "The protection domain could not be allocated.",
        "dmesg; rdma resource show; ibv_devinfo -v: max_pd.",
        causes=(
            "The device is lost or was reset after it had been opened.",
            "The device or the cgroup is out of PDs.",
        ),
    ),
    _failure(
        "open_device",
        "The device is listed, but could not be opened.",
        "rdmapost doctor. ls -l /dev/infiniband; id.",
        causes=(
            "/dev/infiniband/uverbsN is missing (container), or this user may not open it.",
            "The user-space driver does not fit the kernel's: another version of rdma-core.",
            "The device is being reset.",
        ),
    ),
    _failure(
        "query_port",
        "The port could not be queried.",
        "rdmapost devices: the ports of each device.",
        causes=("The port number does not exist (-i).", "The device is lost: dmesg."),
    ),
    _failure(
        "query_gid",
        "The GID could not be read.",
        "rdmapost devices: the GIDs, with their indexes.",
        causes=(
            "The index is empty or over the port's gid_tbl_len (ibv_*_pingpong -g, perftest -x).",
            "The network device has no address yet, or is in another network namespace.",
        ),
    ),
    _failure(
        "get_lid",
        "ibv_rc_pingpong and its relatives: the port has no LID, so a GID index is needed.",
        "ibv_devinfo: link_layer and port_lid.",
        constant="get_lid",
        causes=(
            "RoCE has no LIDs: give -g INDEX on both sides.",
            "InfiniBand: no subnet manager has configured the port.",
        ),
        see=("ibv_rc_pingpong(1)",),
    ),
    _failure(
        "create_ah",
        "The address handle could not be created: the path to the peer is wrong.",
        "rdmapost explain modify_qp_to_rtr: the same path, the same causes.",
        causes=(
            "RoCE without a GRH, or with a wrong GID index: -g, -x.",
            "The peer's address does not resolve (ETIMEDOUT).",
            "The static rate or the port number does not exist.",
        ),
    ),
    _failure(
        "post_send",
        "A work request was refused when it was posted. It and those after it were not posted.",
        "The errno, which this call returns: explain that. qp.state; qp.outstanding.",
        causes=(
            "ENOMEM: the send queue is full: poll the CQ, and signal one in every max_send_wr.",
            "EINVAL: not in RTS; an opcode or flag that the QP's type lacks; too many SGEs or "
            "inline bytes.",
            "EOPNOTSUPP: the device does not have the opcode.",
        ),
    ),
    _failure(
        "post_recv",
        "A receive was refused when it was posted.",
        "The errno, which this call returns. A number in ibv_rc_pingpong's 'Couldn't post receive "
        "(N)' is how many were posted.",
        causes=(
            "The receive queue is full: more than max_recv_wr.",
            "The queue pair is in RESET, has an SRQ, or the SGEs are more than max_recv_sge.",
        ),
    ),
    _failure(
        "req_notify_cq",
        "The completion queue could not be armed.",
        "dmesg: whether the device was reset.",
        causes=("The device is lost.", "The CQ was created without a completion channel."),
    ),
    _failure(
        "poll_cq",
        "ibv_poll_cq returned a negative number: it could not read the completion queue. It does "
        "not set errno, so an errno beside it may be older. A failed work request is another case: "
        "then ibv_poll_cq returns a completion with an error status.",
        "dmesg, and ibv_get_async_event: CQ_ERR or DEVICE_FATAL.",
        "cqe of the CQ against the sum of max_send_wr and max_recv_wr of its queue pairs.",
        causes=(
            "The CQ overran: it is too small, or was polled too slowly.",
            "The device was reset or removed.",
            "A completion of a queue pair that the library does not know: destroyed before its "
            "completions were polled, or memory that the program has overwritten.",
            "The CQ was used by several threads on a context without locks, or was destroyed.",
        ),
    ),
    _failure(
        "exchange",
        "The two programs could not exchange their endpoints over TCP. RDMA is not involved yet.",
        "The other side's output first: it ended, or reports the cause.",
        "ss -ltnp on the server; the same options and versions on both sides.",
        constant="exchange",
        causes=(
            "The other side has ended: it failed at its own set-up, such as a move to RTR.",
            "The server is not running, or listens on another port (-p); or a firewall.",
            "The two sides have different options or versions, so their messages differ in length.",
            "Listening: another program has the port.",
        ),
        see=("ibv_rc_pingpong(1)", "ib_send_bw(1)"),
    ),
    _failure(
        "load_driver",
        "libibverbs could not load a user-space driver that its configuration names. Only this "
        "driver's devices are missing; others work.",
        "The name in the message: librxe is Soft-RoCE's driver, libmlx5 mlx5's; rdmav34 and "
        "the like are the ABI of rdma-core.",
        "ls /etc/libibverbs.d; dpkg -S or rpm -qf on the file; ldconfig -p | grep ibverbs; "
        "LD_LIBRARY_PATH.",
        constant="load_driver",
        causes=(
            "The driver's package is not installed: apt-get install ibverbs-providers (dnf install "
            "libibverbs).",
            "Two versions of libibverbs: one from MLNX_OFED, conda, a wheel or /usr/local, and the "
            "drivers of the other.",
            "A container image with libibverbs and without its drivers, or a leftover file in "
            "/etc/libibverbs.d.",
        ),
        see=("rdma-core: Documentation/libibverbs.md",),
    ),
    _failure(
        "rdma_cm",
        "librdmacm could not start: the kernel's RDMA CM is not reachable.",
        "lsmod | grep rdma_ucm; ls -l /dev/infiniband/rdma_cm.",
        constant="rdma_cm",
        causes=(
            "rdma_ucm is not loaded: modprobe rdma_ucm, on the host.",
            "A container without /dev/infiniband/rdma_cm, or this user may not open it.",
        ),
        see=("rdma_cm(7)",),
    ),
    _failure(
        "rdma_connect",
        "The connection of the RDMA CM was not established.",
        "The RDMA CM event printed before it (RDMA_CM_EVENT_...): explain that.",
        "The other side's output.",
        constant="rdma_connect",
        causes=(
            "The peer refused, or nobody listens there: REJECTED.",
            "The peer did not answer: UNREACHABLE. This side gave up: CONNECT_ERROR.",
        ),
        see=("rdma_connect(3)",),
    ),
)
