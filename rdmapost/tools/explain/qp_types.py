"""The texts about types and states of queue pairs, and about send flags."""

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
        "and in order, or the QP breaks and says why. Everything can be posted but TSO.",
        "To RTR: ah_attr, path_mtu, dest_qp_num, rq_psn, max_dest_rd_atomic, min_rnr_timer. To "
        "RTS: timeout, retry_cnt, rnr_retry, sq_psn, max_rd_atomic.",
    ),
    _type(
        QPType.UC,
        "Unreliable connection: one QP here, one there, and no acknowledgements. A message that "
        "loses a packet or finds no receive is dropped as a whole; the sender still gets SUCCESS.",
        "To RTR: ah_attr, path_mtu, dest_qp_num, rq_psn. To RTS: sq_psn. No timers.",
        soft_roce="It refuses LOCAL_INV and SEND_WITH_INV here. A failed send moves the QP to ERR, "
        "not to SQE.",
    ),
    _type(
        QPType.UD,
        "Unreliable datagram: each message goes to the address handle, QP number and Q_Key of "
        "its work request, up to one path MTU, also to multicast groups. Nothing is "
        "acknowledged.",
        "Receives need 40 bytes more, for the GRH.",
        "The Q_Keys of both sides must agree; a message with a wrong one is silently dropped.",
        soft_roce="A message over the MTU ends with SUCCESS and is not sent.",
        see=("ibv_create_ah(3)",),
    ),
    _type(
        QPType.RAW_PACKET,
        "Whole Ethernet frames, headers and all, past the kernel's network stack. Needs "
        "CAP_NET_RAW, an Ethernet port and a flow rule for what is to be received.",
        "To INIT: only the port. No addressing, no keys.",
        "EPERM at creation: the capability; EOPNOTSUPP: the device.",
        soft_roce="rxe has no RAW_PACKET; soft0 has.",
        see=("ibv_create_flow(3)",),
    ),
    _type(
        QPType.XRC_SEND,
        "The initiator of an extended reliable connection: as RC, but every message names a "
        "shared receive queue of the peer's (remote_srqn). One connection reaches all processes "
        "that share the peer's XRC domain. It cannot receive.",
        "Acknowledged and retried like RC: timeout, retry_cnt, rnr_retry.",
        soft_roce="rxe has no XRC; soft0 has.",
        see=("ibv_create_qp_ex(3)",),
    ),
    _type(
        QPType.XRC_RECV,
        "The target of an extended reliable connection. It has no queues of its own: receives "
        "come from the XRC SRQ that a message names, and complete on that one's CQ. Nothing can "
        "be posted to it.",
        "It needs an XRC domain (xrcd) and no PD.",
        soft_roce="Not in rxe.",
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
            "Being connected; stuck here if the transition to RTR failed: its address could not be "
            "resolved.",
        ),
    ),
    _state(
        QPState.RTR,
        "Ready to receive: messages are received, the peer's reads and writes are served and "
        "acknowledged. Sends are still refused. A passive side can stay here.",
        "qp.to_rts() for sends.",
        "The event COMM_EST: a message has arrived before RTS.",
        causes=("Being connected; the connection manager's last message (RTU) has not come.",),
        soft_roce="A send that is posted here returns EINVAL, and is carried out later, in RTS.",
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
        "sq_draining in qp.query(), or the event SQ_DRAINED: whether it has finished.",
        causes=("You moved it there: qp.to_sqd().",),
    ),
    _state(
        QPState.SQE,
        "A send failed on UC or UD. Sends complete with WR_FLUSH_ERR; receiving continues. RC "
        "never comes here: it goes to ERR.",
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
        "context.get_async_event(), if there is none: the peer's request broke it.",
        "To use it again: poll all completions, qp.to_reset(), reconnect both sides.",
        causes=(
            "A send failed on RC or XRC.",
            "A request of the peer's was refused: bad rkey, invalid request.",
            "A receive failed: too small, or its buffer.",
            "You or the connection manager moved it there.",
        ),
        soft_roce="A receive that is posted to a QP in ERR is not flushed.",
    ),
    _state(
        QPState.UNKNOWN,
        "The device or the kernel could not say. Not a state of the specification.",
        "Whether the device is still there: rdmapost devices, dmesg.",
    ),
)

_flag = partial(explanation_of, see=("ibv_post_send(3): send_flags",))

SEND_FLAGS: tuple[Explanation, ...] = (
    _flag(
        SendFlags.FENCE,
        "Do not start before all earlier RDMA reads and atomics of this queue are complete. On "
        "RC and XRC. Sends and writes need it when they use or announce what a read fetched; "
        "they do not wait for one another's completion, only for reads.",
        soft_roce="A fenced work request that has to be sent again may never complete.",
    ),
    _flag(
        SendFlags.SIGNALED,
        "Make a completion when it is done. Without it there is one only on failure, unless the "
        "QP was created with sq_sig_all.",
        "Signal at least one in every max_send_wr: unsignaled work requests hold their slots "
        "until a later signaled one has been polled.",
        causes=("ENOMEM after max_send_wr posts: none was signaled, or nobody polled.",),
        soft_roce="It frees slots at once, and so hides the mistake.",
    ),
    _flag(
        SendFlags.SOLICITED,
        "Wake a peer that sleeps until a solicited event (cq.req_notify(solicited_only=True)). "
        "For sends and RDMA_WRITE_WITH_IMM: what has a completion at the peer.",
        "A peer that waits for any event is woken without it too.",
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
        "max_inline_data is asked for at creation; qp.max_inline_data is what was granted; "
        "max_inline() finds the largest that a device grants.",
        causes=("EINVAL or ENOMEM: more bytes than were granted.",),
    ),
    _flag(
        SendFlags.IP_CSUM,
        "Let the device compute the IPv4 and the TCP or UDP checksum of what is sent.",
        "device_cap_flags: UD_IP_CSUM, RC_IP_CSUM, RAW_IP_CSUM, by QP type.",
        soft_roce="No device capability, so checked QPs refuse it.",
    ),
)
