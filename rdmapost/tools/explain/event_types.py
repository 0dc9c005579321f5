"""Explanations of asynchronous events (ibv_get_async_event(3)) and of completion flags."""

from __future__ import annotations

from functools import partial

from ...enums import EventType, WCFlags
from .model import Explanation, explanation_of

_event = partial(explanation_of, see=("ibv_get_async_event(3), DESCRIPTION",))

EVENTS: tuple[Explanation, ...] = (
    _event(
        EventType.CQ_ERR,
        "A completion queue overran: more completions arrived than it has entries. Completions are "
        "lost, and neither the CQ nor the queue pairs on it can be used again.",
        "cqe of the CQ against the sum of max_send_wr and max_recv_wr of all queue pairs on it.",
        causes=(
            "The CQ is too small for its queue pairs.",
            "The program does not poll it, or polls too slowly.",
        ),
    ),
    _event(
        EventType.QP_FATAL,
        "A queue pair failed in a way that no completion can report: the device could not write "
        "one, or a queue entry was corrupted. The queue pair is in ERR.",
        "dmesg, and whether CQ_ERR came with it.",
        causes=(
            "Its CQ overran or was destroyed.",
            "soft0 and tag matching: the device's own read or FIN failed.",
            "A catastrophic hardware fault.",
        ),
    ),
    _event(
        EventType.QP_REQ_ERR,
        "The responder side of this queue pair received an invalid request, and went to ERR. The "
        "peer's work request ends with REM_INV_REQ_ERR.",
        "qp.query(): qp_access_flags, max_dest_rd_atomic; then what the peer posted.",
        causes=(
            "The QP's access flags do not allow the peer's operation.",
            "An unaligned atomic, or more outstanding reads than max_dest_rd_atomic.",
        ),
    ),
    _event(
        EventType.QP_ACCESS_ERR,
        "A request from the peer was refused for its rkey, range or permission, and the queue pair "
        "went to ERR. The peer gets REM_ACCESS_ERR; this side only sees flushed work requests.",
        "The remote_addr and rkey that the peer used; only the peer knows them.",
        causes=(
            "A stale or mistyped rkey at the peer.",
            "A region that this side deregistered too early, or registered without the remote "
            "access that the peer needs.",
        ),
        soft_roce="It does not raise this event.",
    ),
    _event(
        EventType.COMM_EST,
        "A message arrived in RTR, before the connection was reported as established. All is well: "
        "the QP may go to RTS.",
        causes=("The peer was faster than the last message of the connection manager.",),
    ),
    _event(
        EventType.SQ_DRAINED,
        "The send queue has drained after a move to SQD: attributes can be changed now.",
        "Change the attributes, then qp.to_rts().",
        causes=("The queue pair was moved to SQD with en_sqd_async_notify.",),
    ),
    _event(
        EventType.PATH_MIG,
        "The connection now uses its alternate path; it has no further alternate path until one "
        "is loaded.",
        "The link of the previous path.",
        causes=("The primary path failed, or software asked for the migration (path_mig_state).",),
    ),
    _event(
        EventType.PATH_MIG_ERR,
        "The peer asked for a migration that this side could not follow.",
        "alt_ah_attr, alt_pkey_index and alt_port_num on both sides.",
        causes=("This side has no alternate path loaded, or a different one.",),
    ),
    _event(
        EventType.DEVICE_FATAL,
        "The device is lost to this context: nothing that was created on it works any more.",
        "Close everything, open the device again; dmesg for the reason.",
        causes=(
            "A reset of the device, a removal, a driver reload, a firmware crash.",
            "PCIe errors.",
        ),
    ),
    _event(
        EventType.PORT_ACTIVE,
        "A port has come up: it carries traffic from now on.",
        "Connections that failed with RETRY_EXC_ERR while it was down do not recover.",
        causes=("The link came up, or the subnet manager configured it.",),
    ),
    _event(
        EventType.PORT_ERR,
        "A port went down. Reliable connections survive until their retries are used up.",
        "The port's state in rdmapost devices; ip link; cable and switch.",
        causes=(
            "The link was lost, or the underlying network device was set down.",
            "InfiniBand: the subnet manager took the port out.",
        ),
    ),
    _event(
        EventType.LID_CHANGE,
        "The subnet manager gave the port another LID: the endpoints that peers have are out of "
        "date.",
        "Exchange endpoints again, and create address handles again.",
        causes=("The subnet manager was restarted or replaced.",),
    ),
    _event(
        EventType.PKEY_CHANGE,
        "The port's P_Key table changed: an index may now mean a different partition, or none.",
        "pkey_index of the queue pairs against the table.",
        causes=("Partitions were changed in the subnet manager.",),
    ),
    _event(
        EventType.SM_CHANGE,
        "Another subnet manager is in charge. Only programs that talk to it need to care.",
        causes=("A failover, or a new subnet manager with higher priority.",),
    ),
    _event(
        EventType.SRQ_ERR,
        "A shared receive queue failed; the queue pairs on it can no longer receive.",
        "dmesg. Create it and its queue pairs again.",
        causes=("A fault while the device fetched an entry.",),
    ),
    _event(
        EventType.SRQ_LIMIT_REACHED,
        "A shared receive queue has fewer receives than its limit. The event comes once: set the "
        "limit again to re-arm it.",
        "Post receives, then arm the limit: srq.arm_limit().",
        causes=("Messages arrived faster than receives were posted.",),
    ),
    _event(
        EventType.QP_LAST_WQE_REACHED,
        "A queue pair in ERR that uses an SRQ will consume no more receives from it. Only now is "
        "it safe to destroy: it holds no receive.",
        "Poll the CQ once more before the QP is closed.",
        causes=("The QP went to ERR.",),
    ),
    _event(
        EventType.CLIENT_REREGISTER,
        "The subnet manager has lost subscriptions and multicast joins: make them again.",
        causes=("The subnet manager was restarted.",),
    ),
    _event(
        EventType.GID_CHANGE,
        "The port's GID table changed. An index may now mean a different address, or none.",
        "rdmapost devices: the current table; ip monitor address: what changes it.",
        causes=(
            "RoCE: an IP address was added or removed, or a VLAN or bond was changed.",
            "InfiniBand: the subnet prefix changed.",
        ),
    ),
    _event(
        EventType.WQ_FATAL,
        "A work queue created by ibv_create_wq failed.",
        "The driver's log.",
        causes=("Its CQ overran, or the device could not read an entry.",),
    ),
    _event(
        EventType.DEVICE_SPEED_CHANGE,
        "The effective speed of one or more ports changed while they stayed up. The event does "
        "not say which ports.",
        "context.query_port() of every port: active_speed and active_width.",
        causes=(
            "A member of the bond (LAG) behind a virtual function went down or came back.",
            "The administrator changed the speed or the rate limit of the function.",
        ),
    ),
)

_flag = partial(explanation_of, see=("ibv_poll_cq(3): wc_flags",))

WC_FLAGS: tuple[Explanation, ...] = (
    _flag(
        WCFlags.GRH,
        "The first 40 bytes of a UD receive hold a GRH. Without the flag they are undefined, and "
        "the payload still starts at byte 40. On RoCE v2 over IPv4 the IP header is in the last 20 "
        "of the 40.",
    ),
    _flag(
        WCFlags.WITH_IMM,
        "imm_data is valid: the message's immediate data. Use it at the receiver only; some "
        "drivers also set the flag at the sender.",
    ),
    _flag(
        WCFlags.IP_CSUM_OK,
        "The device has verified the IPv4 and the TCP or UDP checksum. Without the flag they are "
        "wrong, or were not checked.",
        soft_roce="By mistake, it means WITH_INV.",
    ),
    _flag(
        WCFlags.WITH_INV,
        "invalidated_rkey is a local key that the peer has invalidated.",
        soft_roce="Set as IP_CSUM_OK: the kernel's and the library's numbers differ.",
    ),
    _flag(
        WCFlags.TM_SYNC_REQ,
        "The device's count of unexpected messages differs from software's: post an operation with "
        "TM_SYNC and software's count.",
    ),
    _flag(
        WCFlags.TM_MATCH,
        "A message matched an entry of the matching list: wr_id is the entry's recv_wr_id. Do not "
        "read the buffer before TM_DATA_VALID.",
    ),
    _flag(
        WCFlags.TM_DATA_VALID,
        "The data of a matched message is in its buffer; byte_len says how much. The entry's slot "
        "is free.",
    ),
)
