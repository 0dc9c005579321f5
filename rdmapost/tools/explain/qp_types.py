"""Explanations of queue pair types and states, and of send flags."""

from __future__ import annotations

from functools import partial

from ...enums import QPState, QPType, SendFlags
from ...standard.opcodes import OPCODES_BY_QP_TYPE
from .model import Explanation, explanation_of


def _type(
    qp_type: QPType, meaning: str, *look_at: str, soft_roce: str = "", see: tuple[str, ...] = ()
) -> Explanation:
    posts = ", ".join(opcode.name for opcode in sorted(OPCODES_BY_QP_TYPE[qp_type]))
    return explanation_of(
        qp_type,
        meaning,
        *([f"Opcodes: {posts}."] if posts else []),
        *look_at,
        soft_roce=soft_roce,
        see=("ibv_create_qp(3)", "ibv_post_send(3): the table of opcodes", *see),
    )


QP_TYPES: tuple[Explanation, ...] = (
    _type(
        QPType.RC,
        "Reliable connection: one QP here, one there. Messages of 0 to 2^31 bytes arrive once "
        "and in order, or the QP goes to ERR with the cause in a completion. Supports everything "
        "but TSO.",
        "To RTR: ah_attr, path_mtu, dest_qp_num, rq_psn, max_dest_rd_atomic, min_rnr_timer. To "
        "RTS: timeout, retry_cnt, rnr_retry, sq_psn, max_rd_atomic.",
    ),
    _type(
        QPType.UC,
        "Unreliable connection: one QP here, one there, and no acknowledgements. A message that "
        "loses a packet or finds no receive is dropped as a whole; the sender still gets SUCCESS.",
        "To RTR: ah_attr, path_mtu, dest_qp_num, rq_psn. To RTS: sq_psn. No timers.",
        soft_roce="It refuses LOCAL_INV and SEND_WITH_INV on UC. A failed send moves the QP to "
        "ERR, not to SQE.",
    ),
    _type(
        QPType.UD,
        "Unreliable datagram: each message, of up to one path MTU, goes to the address handle, QP "
        "number and Q_Key of its work request, which may name a multicast group. Nothing is "
        "acknowledged.",
        "Receives need 40 more bytes, for the GRH.",
        "The Q_Keys of both sides must agree; a message with a wrong one is silently dropped.",
        soft_roce="A message over the MTU ends with SUCCESS and is not sent.",
        see=("ibv_create_ah(3)",),
    ),
    _type(
        QPType.RAW_PACKET,
        "Whole Ethernet frames, headers and all, past the kernel's network stack. Needs "
        "CAP_NET_RAW, an Ethernet port and a flow rule for the frames to receive.",
        "To INIT: only the port. No addressing, no keys.",
        "EPERM at creation: no CAP_NET_RAW; EOPNOTSUPP: the device does not support the type.",
        soft_roce="rxe has no RAW_PACKET; soft0 does.",
        see=("ibv_create_flow(3)",),
    ),
    _type(
        QPType.XRC_SEND,
        "The initiator of an extended reliable connection: like RC, but every message names a "
        "shared receive queue at the peer (remote_srqn). One connection reaches all processes "
        "that share the peer's XRC domain. It cannot receive.",
        "Acknowledged and retried like RC: timeout, retry_cnt, rnr_retry.",
        soft_roce="rxe has no XRC; soft0 does.",
        see=("ibv_create_qp_ex(3)",),
    ),
    _type(
        QPType.XRC_RECV,
        "The target of an extended reliable connection. It has no work queues: receives come from "
        "the XRC SRQ that a message names, and complete on that SRQ's CQ. Nothing can be posted to "
        "it.",
        "It needs an XRC domain (xrcd) and no PD.",
        soft_roce="rxe has no XRC.",
        see=("ibv_open_xrcd(3)", "ibv_open_qp(3)"),
    ),
    _type(
        QPType.DRIVER,
        "A transport that the driver defines: EFA's SRD, mlx5's DC. Its posts go through the "
        "driver's own interface (mlx5dv, efadv).",
        see=("mlx5dv_create_qp(3)", "efadv_create_driver_qp(3)"),
    ),
)

_state = partial(explanation_of, see=("ibv_modify_qp(3)", "IBA vol. 1, 10.3.1 (QP states)"))

QP_STATES: tuple[Explanation, ...] = (
    _state(
        QPState.RESET,
        "The initial state of a queue pair. Nothing can be posted: neither sends nor receives. "
        "Moving back to RESET drops what is posted, without completions.",
        "qp.to_init(): port_num, pkey_index, and qp_access_flags (RC, UC) or qkey (UD).",
        causes=("Just created.", "Reset by you, to use it again after ERR."),
    ),
    _state(
        QPState.INIT,
        "Receives may be posted, and wait. Sends are refused. Incoming messages are silently "
        "dropped, so a peer that sends now gets RETRY_EXC_ERR.",
        "Post receives here. Then qp.to_rtr(endpoint of the peer).",
        causes=(
            "It is being connected; or the transition to RTR failed, because the peer's address "
            "could not be resolved.",
        ),
    ),
    _state(
        QPState.RTR,
        "Ready to receive: messages are received, the peer's reads and writes are served and "
        "acknowledged. Sends are still refused. A passive side can stay here.",
        "qp.to_rts() for sends.",
        "The event COMM_EST: a message has arrived before RTS.",
        causes=("Being connected; the connection manager's last message (RTU) has not arrived.",),
        soft_roce="A send posted in RTR returns EINVAL, but is executed later, in RTS.",
    ),
    _state(
        QPState.RTS,
        "Ready to send: everything works, in both directions.",
        "qp.query(): timeout, retry_cnt and rnr_retry.",
        causes=("The normal state of a connected queue pair.",),
    ),
    _state(
        QPState.SQD,
        "The send queue drains: sends in progress finish; those posted now are held until the QP "
        "is in RTS again. Receiving continues. Attributes of the connection can be changed.",
        "sq_draining in qp.query(), or the event SQ_DRAINED: whether draining has finished.",
        causes=("You moved it there: qp.to_sqd().",),
    ),
    _state(
        QPState.SQE,
        "A send failed on UC or UD. Sends complete with WR_FLUSH_ERR; receiving continues. RC "
        "never enters SQE: it goes to ERR.",
        "The first send completion that is not WR_FLUSH_ERR.",
        "qp.to_rts() resumes.",
        causes=("A local failure of a send: a bad SGE, a message over the MTU.",),
        soft_roce="It goes to ERR instead, and flushes the receives.",
    ),
    _state(
        QPState.ERR,
        "Broken. Everything outstanding, and everything posted later, completes with WR_FLUSH_ERR; "
        "messages from the peer are dropped. The only ways out are RESET and destruction.",
        "The first completion of this QP that is not a flush, on both CQs.",
        "context.get_async_event(), if there is no such completion: a request from the peer broke "
        "it.",
        "To use it again: poll all completions, qp.to_reset(), reconnect both sides.",
        causes=(
            "A send failed on RC or XRC.",
            "A request from the peer was refused: bad rkey, invalid request.",
            "A receive failed: it was too small, or its buffer could not be written.",
            "You or the connection manager moved it there.",
        ),
        soft_roce="A receive posted to a QP in ERR is not flushed.",
    ),
    _state(
        QPState.UNKNOWN,
        "The device or the kernel could not report the state. Not a state of the specification.",
        "Whether the device is still there: rdmapost devices, dmesg.",
    ),
)

_flag = partial(explanation_of, see=("ibv_post_send(3): send_flags",))

SEND_FLAGS: tuple[Explanation, ...] = (
    _flag(
        SendFlags.FENCE,
        "Do not start before all earlier RDMA reads and atomics of this queue are complete. On RC "
        "and XRC. Sends and writes need it when they use or announce what a read fetched; writes "
        "and atomics need it when they change what an earlier read fetches, because a read that "
        "is retransmitted may see the change. A fenced work request waits for reads and atomics "
        "only, not for other sends and writes.",
        soft_roce="A fenced work request that must be retransmitted may never complete.",
    ),
    _flag(
        SendFlags.SIGNALED,
        "Generate a completion when the work request is done. Without the flag, only a failure "
        "generates one, unless the QP was created with sq_sig_all.",
        "Signal at least one in every max_send_wr: unsignaled work requests hold their slots "
        "until a later signaled one has been polled.",
        causes=("ENOMEM after max_send_wr posts: none was signaled, or none was polled.",),
        soft_roce="It frees slots without a poll, and so hides the mistake.",
    ),
    _flag(
        SendFlags.SOLICITED,
        "Wake a peer that sleeps until a solicited event (cq.req_notify(solicited_only=True)). "
        "For sends and RDMA_WRITE_WITH_IMM, which complete a receive at the peer.",
        "A peer that waits for any event is also woken without it.",
        causes=(
            "A peer that never wakes up: it asked for solicited events, and no message has "
            "the flag.",
        ),
    ),
    _flag(
        SendFlags.INLINE,
        "Copy the data into the work request: the buffer needs no registration, its lkey is "
        "ignored, and it can be reused when the post returns. For sends and writes, up to "
        "max_inline_data of the QP.",
        "Request max_inline_data at creation; qp.max_inline_data is the size granted; "
        "max_inline() finds the largest size that a device grants.",
        causes=("EINVAL or ENOMEM: more bytes than were granted.",),
    ),
    _flag(
        SendFlags.IP_CSUM,
        "Let the device compute the IPv4 and the TCP or UDP checksum of the packets sent.",
        "device_cap_flags: UD_IP_CSUM, RC_IP_CSUM, RAW_IP_CSUM, by QP type.",
        soft_roce="No device capability, so checked QPs refuse it.",
    ),
)
