"""The constants of ``<infiniband/verbs.h>``, by the names of the man pages.

Values are written as numbers, because an older header may lack the newer
ones; a test compares them with the header that the module was compiled
against.  They are in one long file because they are one header's list.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

__all__ = [
    "MTU",
    "Access",
    "AtomicCap",
    "DeviceCap",
    "EventType",
    "GIDType",
    "LinkLayer",
    "MWType",
    "MigState",
    "NodeType",
    "Opcode",
    "OpsFlags",
    "OpsOpcode",
    "PortState",
    "QPAttrMask",
    "QPState",
    "QPType",
    "SRQAttrMask",
    "SRQType",
    "SendFlags",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
]


class Opcode(IntEnum):
    """What a send work request does: ``enum ibv_wr_opcode``, ibv_post_send(3)."""

    RDMA_WRITE = 0
    """Write local buffers to remote memory; the remote side sees no completion."""
    RDMA_WRITE_WITH_IMM = 1
    """RDMA_WRITE that also consumes a remote receive and delivers immediate data."""
    SEND = 2
    """Send local buffers into the next receive work request of the remote queue."""
    SEND_WITH_IMM = 3
    """SEND that also delivers 32 bits of immediate data in the remote completion."""
    RDMA_READ = 4
    """Read remote memory into local buffers."""
    ATOMIC_CMP_AND_SWP = 5
    """Replace a remote 64-bit value if it equals a given one; yields the old value."""
    ATOMIC_FETCH_AND_ADD = 6
    """Add to a remote 64-bit value; yields the old value."""
    LOCAL_INV = 7
    """Invalidate a local memory key."""
    BIND_MW = 8
    """Bind a type 2 memory window to a range of a memory region."""
    SEND_WITH_INV = 9
    """SEND that also invalidates a memory key on the remote side."""
    TSO = 10
    """Send a large payload as many frames, each with a copy of a given header."""
    DRIVER1 = 11
    """Reserved for a driver's own use; never posted by this package."""
    FLUSH = 14
    """Exists only in the ibv_wr_* interface; ibv_post_send cannot carry it."""
    ATOMIC_WRITE = 15
    """Exists only in the ibv_wr_* interface; ibv_post_send cannot carry it."""


class SendFlags(IntFlag):
    """Properties of a send work request: ``enum ibv_send_flags``, ibv_post_send(3)."""

    FENCE = 1 << 0
    """Wait for earlier RDMA reads and atomics of the queue to finish (RC, XRC)."""
    SIGNALED = 1 << 1
    """Generate a completion; matters only where sq_sig_all is 0."""
    SOLICITED = 1 << 2
    """Wake a remote waiter that asked for solicited events only."""
    INLINE = 1 << 3
    """Copy the data at the post: no lkey is needed and the buffer is free at once."""
    IP_CSUM = 1 << 4
    """Let the device compute IP and TCP/UDP checksums, where it can."""


class OpsOpcode(IntEnum):
    """What a tag-matching operation does: ``enum ibv_ops_wr_opcode``, ibv_post_srq_ops(3)."""

    TAG_ADD = 0
    """Add a tagged receive buffer to the matching list."""
    TAG_DEL = 1
    """Remove a tagged receive buffer from the matching list."""
    TAG_SYNC = 2
    """Report to the device how many unexpected messages the application has handled."""


class OpsFlags(IntFlag):
    """Properties of a tag-matching operation: ``enum ibv_ops_flags``, ibv_post_srq_ops(3)."""

    SIGNALED = 1 << 0
    """Generate a completion for this operation."""
    TM_SYNC = 1 << 1
    """unexpected_cnt is valid: synchronise it with the device."""


class QPType(IntEnum):
    """Transport service of a queue pair: ``enum ibv_qp_type``, ibv_create_qp(3)."""

    RC = 2
    """Reliable connection: every opcode, acknowledged, in order."""
    UC = 3
    """Unreliable connection: sends and writes, not acknowledged."""
    UD = 4
    """Unreliable datagram: sends up to one MTU, addressed one by one."""
    RAW_PACKET = 8
    """Whole Ethernet frames."""
    XRC_SEND = 9
    """Initiator of an extended reliable connection."""
    XRC_RECV = 10
    """Target of an extended reliable connection."""
    DRIVER = 255
    """Defined by the driver."""


class QPState(IntEnum):
    """State of a queue pair: ``enum ibv_qp_state``, ibv_modify_qp(3)."""

    RESET = 0
    """Just created: nothing can be posted."""
    INIT = 1
    """Receives may be posted; nothing is processed."""
    RTR = 2
    """Ready to receive: incoming messages are processed."""
    RTS = 3
    """Ready to send: everything works."""
    SQD = 4
    """Send queue drained or draining: sends may be posted and are held."""
    SQE = 5
    """A send failed on an unreliable queue pair: sends complete with a flush error."""
    ERR = 6
    """Broken: everything posted completes with a flush error."""
    UNKNOWN = 7
    """The device did not say."""


class QPAttrMask(IntFlag):
    """Which attributes ibv_modify_qp(3) changes: ``enum ibv_qp_attr_mask``."""

    STATE = 1 << 0
    """qp_state"""
    CUR_STATE = 1 << 1
    """cur_qp_state"""
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    """en_sqd_async_notify"""
    ACCESS_FLAGS = 1 << 3
    """qp_access_flags"""
    PKEY_INDEX = 1 << 4
    """pkey_index"""
    PORT = 1 << 5
    """port_num"""
    QKEY = 1 << 6
    """qkey"""
    AV = 1 << 7
    """ah_attr"""
    PATH_MTU = 1 << 8
    """path_mtu"""
    TIMEOUT = 1 << 9
    """timeout"""
    RETRY_CNT = 1 << 10
    """retry_cnt"""
    RNR_RETRY = 1 << 11
    """rnr_retry"""
    RQ_PSN = 1 << 12
    """rq_psn"""
    MAX_QP_RD_ATOMIC = 1 << 13
    """max_rd_atomic"""
    ALT_PATH = 1 << 14
    """alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout"""
    MIN_RNR_TIMER = 1 << 15
    """min_rnr_timer"""
    SQ_PSN = 1 << 16
    """sq_psn"""
    MAX_DEST_RD_ATOMIC = 1 << 17
    """max_dest_rd_atomic"""
    PATH_MIG_STATE = 1 << 18
    """path_mig_state"""
    CAP = 1 << 19
    """cap"""
    DEST_QPN = 1 << 20
    """dest_qp_num"""
    RATE_LIMIT = 1 << 25
    """rate_limit"""


class MigState(IntEnum):
    """Path migration state: ``enum ibv_mig_state``, ibv_modify_qp(3)."""

    MIGRATED = 0
    """The alternate path is in use, or none is set."""
    REARM = 1
    """A new alternate path has been loaded."""
    ARMED = 2
    """Ready to migrate."""


class Access(IntFlag):
    """What may be done with memory: ``enum ibv_access_flags``, ibv_reg_mr(3)."""

    LOCAL_WRITE = 1 << 0
    """The device may write here for local work requests (receives, reads, atomics)."""
    REMOTE_WRITE = 1 << 1
    """A peer may RDMA-write here; needs LOCAL_WRITE."""
    REMOTE_READ = 1 << 2
    """A peer may RDMA-read here."""
    REMOTE_ATOMIC = 1 << 3
    """A peer may run atomics here; needs LOCAL_WRITE."""
    MW_BIND = 1 << 4
    """Memory windows may be bound to this region."""
    ZERO_BASED = 1 << 5
    """Remote addresses count from the start of the region."""
    ON_DEMAND = 1 << 6
    """Pages are brought in as the device touches them."""
    HUGETLB = 1 << 7
    """The memory is backed by huge pages (with ON_DEMAND)."""
    RELAXED_ORDERING = 1 << 20
    """The device may reorder its accesses on the bus."""


class MWType(IntEnum):
    """Type of a memory window: ``enum ibv_mw_type``, ibv_alloc_mw(3)."""

    TYPE_1 = 1
    """Bound with ibv_bind_mw; the device chooses the rkey."""
    TYPE_2 = 2
    """Bound with a BIND_MW work request; the caller chooses the low byte of the rkey."""


class SRQType(IntEnum):
    """Type of a shared receive queue: ``enum ibv_srq_type``, ibv_create_srq_ex(3)."""

    BASIC = 0
    """Receives shared by the queue pairs created with it."""
    XRC = 1
    """Receives for XRC messages that name this queue."""
    TM = 2
    """Tag matching."""


class SRQAttrMask(IntFlag):
    """Which attributes ibv_modify_srq(3) changes: ``enum ibv_srq_attr_mask``."""

    MAX_WR = 1 << 0
    """Resize the queue."""
    LIMIT = 1 << 1
    """Arm the limit event."""


class WCStatus(IntEnum):
    """How a work request ended: ``enum ibv_wc_status``, ibv_poll_cq(3)."""

    SUCCESS = 0
    """Done."""
    LOC_LEN_ERR = 1
    """The message does not fit: the receive buffer, the MTU or the port's maximum."""
    LOC_QP_OP_ERR = 2
    """The queue pair could not carry out the work request."""
    LOC_EEC_OP_ERR = 3
    """Reliable datagram only; not seen today."""
    LOC_PROT_ERR = 4
    """A local buffer lies outside its memory region, or the lkey is wrong."""
    WR_FLUSH_ERR = 5
    """The queue pair was, or went, into the error state before this one ran."""
    MW_BIND_ERR = 6
    """Binding a memory window failed."""
    BAD_RESP_ERR = 7
    """The responder sent something unexpected."""
    LOC_ACCESS_ERR = 8
    """A local buffer could not be written on behalf of an incoming message."""
    REM_INV_REQ_ERR = 9
    """The responder found the request invalid (too long, misaligned, not allowed)."""
    REM_ACCESS_ERR = 10
    """The responder refused access: rkey, range or permission."""
    REM_OP_ERR = 11
    """The responder could not complete the request because of an internal error."""
    RETRY_EXC_ERR = 12
    """No acknowledgement came within timeout times retry_cnt."""
    RNR_RETRY_EXC_ERR = 13
    """The responder had no receive posted, for rnr_retry attempts."""
    LOC_RDD_VIOL_ERR = 14
    """Reliable datagram only; not seen today."""
    REM_INV_RD_REQ_ERR = 15
    """Reliable datagram only; not seen today."""
    REM_ABORT_ERR = 16
    """The responder aborted the operation."""
    INV_EECN_ERR = 17
    """Reliable datagram only; not seen today."""
    INV_EEC_STATE_ERR = 18
    """Reliable datagram only; not seen today."""
    FATAL_ERR = 19
    """The device failed."""
    RESP_TIMEOUT_ERR = 20
    """The responder did not answer in time."""
    GENERAL_ERR = 21
    """Another transport error; vendor_err may say more."""
    TM_ERR = 22
    """A tag-matching operation failed."""
    TM_RNDV_INCOMPLETE = 23
    """A rendezvous message matched, and its data must be fetched by software."""


class WCOpcode(IntEnum):
    """What completed: ``enum ibv_wc_opcode``, ibv_poll_cq(3)."""

    SEND = 0
    """A SEND of any kind."""
    RDMA_WRITE = 1
    """An RDMA_WRITE of either kind."""
    RDMA_READ = 2
    """An RDMA_READ."""
    COMP_SWAP = 3
    """An ATOMIC_CMP_AND_SWP."""
    FETCH_ADD = 4
    """An ATOMIC_FETCH_AND_ADD."""
    BIND_MW = 5
    """A BIND_MW."""
    LOCAL_INV = 6
    """A LOCAL_INV."""
    TSO = 7
    """A TSO."""
    FLUSH = 8
    """A FLUSH, of the ibv_wr_* interface."""
    ATOMIC_WRITE = 9
    """An ATOMIC_WRITE, of the ibv_wr_* interface."""
    RECV = 128
    """A receive, filled by a SEND."""
    RECV_RDMA_WITH_IMM = 129
    """A receive, consumed by an RDMA_WRITE_WITH_IMM."""
    TM_ADD = 130
    """A TAG_ADD."""
    TM_DEL = 131
    """A TAG_DEL."""
    TM_SYNC = 132
    """A TAG_SYNC."""
    TM_RECV = 133
    """A message of the tag-matching protocol."""
    TM_NO_TAG = 134
    """A message without a tag on a tag-matching queue."""
    DRIVER1 = 135
    """Defined by the driver."""
    DRIVER2 = 136
    """Defined by the driver."""
    DRIVER3 = 137
    """Defined by the driver."""


class WCFlags(IntFlag):
    """What a completion carries: ``enum ibv_wc_flags``, ibv_poll_cq(3)."""

    GRH = 1 << 0
    """The receive buffer starts with a 40-byte GRH (UD)."""
    WITH_IMM = 1 << 1
    """imm_data is valid."""
    IP_CSUM_OK = 1 << 2
    """The device found the checksums right."""
    WITH_INV = 1 << 3
    """invalidated_rkey is valid."""
    TM_SYNC_REQ = 1 << 4
    """The device asks for a TAG_SYNC."""
    TM_MATCH = 1 << 5
    """A tagged buffer matched."""
    TM_DATA_VALID = 1 << 6
    """The data of the tagged buffer is in place."""


class MTU(IntEnum):
    """A path MTU as the device encodes it: ``enum ibv_mtu``."""

    MTU_256 = 1
    """256 bytes"""
    MTU_512 = 2
    """512 bytes"""
    MTU_1024 = 3
    """1024 bytes"""
    MTU_2048 = 4
    """2048 bytes"""
    MTU_4096 = 5
    """4096 bytes"""

    @property
    def bytes(self) -> int:
        """The MTU in bytes."""
        return 128 << self.value


class PortState(IntEnum):
    """State of a port: ``enum ibv_port_state``, ibv_query_port(3)."""

    NOP = 0
    """No state: the device did not say."""
    DOWN = 1
    """No link."""
    INIT = 2
    """Link up, not configured yet (InfiniBand: no subnet manager)."""
    ARMED = 3
    """Configured, not active yet."""
    ACTIVE = 4
    """Ready for traffic."""
    ACTIVE_DEFER = 5
    """Active, with a link error that may heal."""


class LinkLayer(IntEnum):
    """Link layer of a port, ibv_query_port(3)."""

    UNSPECIFIED = 0
    """The device did not say (old InfiniBand drivers)."""
    INFINIBAND = 1
    """InfiniBand: LIDs address a peer, GIDs optionally."""
    ETHERNET = 2
    """Ethernet (RoCE, iWARP): GIDs address a peer."""


class GIDType(IntEnum):
    """Type of a GID table entry: ``enum ibv_gid_type``, ibv_query_gid_ex(3)."""

    IB = 0
    """InfiniBand."""
    ROCE_V1 = 1
    """RoCE v1: Ethernet frames, one broadcast domain."""
    ROCE_V2 = 2
    """RoCE v2: UDP/IP, routable."""


class NodeType(IntEnum):
    """Type of a device: ``enum ibv_node_type``, ibv_get_device_list(3)."""

    UNKNOWN = -1
    """Not known to the library."""
    CA = 1
    """Channel adapter: InfiniBand or RoCE."""
    SWITCH = 2
    """InfiniBand switch."""
    ROUTER = 3
    """InfiniBand router."""
    RNIC = 4
    """iWARP NIC."""
    USNIC = 5
    """Cisco usNIC."""
    USNIC_UDP = 6
    """Cisco usNIC over UDP."""
    UNSPECIFIED = 7
    """Another type."""


class AtomicCap(IntEnum):
    """How far atomics are atomic: ``enum ibv_atomic_cap``, ibv_query_device(3)."""

    NONE = 0
    """No atomics."""
    HCA = 1
    """Between the queue pairs of this device."""
    GLOB = 2
    """Between this device and the CPUs too."""


class DeviceCap(IntFlag):
    """What a device can do: ``enum ibv_device_cap_flags``, ibv_query_device(3)."""

    RESIZE_MAX_WR = 1 << 0
    """Queues can be resized."""
    BAD_PKEY_CNTR = 1 << 1
    """Counts bad P_Keys."""
    BAD_QKEY_CNTR = 1 << 2
    """Counts bad Q_Keys."""
    RAW_MULTI = 1 << 3
    """Raw packet multicast."""
    AUTO_PATH_MIG = 1 << 4
    """Automatic path migration."""
    CHANGE_PHY_PORT = 1 << 5
    """The primary port of a queue pair can change."""
    UD_AV_PORT_ENFORCE = 1 << 6
    """Enforces the port of address handles."""
    CURR_QP_STATE_MOD = 1 << 7
    """Honours cur_qp_state."""
    SHUTDOWN_PORT = 1 << 8
    """Ports can be shut down."""
    INIT_TYPE = 1 << 9
    """Reports the init type."""
    PORT_ACTIVE_EVENT = 1 << 10
    """Reports a port that becomes active."""
    SYS_IMAGE_GUID = 1 << 11
    """Has a system image GUID."""
    RC_RNR_NAK_GEN = 1 << 12
    """Generates RNR NAKs."""
    SRQ_RESIZE = 1 << 13
    """Shared receive queues can be resized."""
    N_NOTIFY_CQ = 1 << 14
    """Notifies after N completions."""
    MEM_WINDOW = 1 << 17
    """Memory windows of type 1."""
    UD_IP_CSUM = 1 << 18
    """Checksums on UD."""
    XRC = 1 << 20
    """Extended reliable connections."""
    MEM_MGT_EXTENSIONS = 1 << 21
    """Invalidation and fast registration."""
    MEM_WINDOW_TYPE_2A = 1 << 23
    """Memory windows of type 2A."""
    MEM_WINDOW_TYPE_2B = 1 << 24
    """Memory windows of type 2B."""
    RC_IP_CSUM = 1 << 25
    """Checksums on RC."""
    RAW_IP_CSUM = 1 << 26
    """Checksums on raw packets."""
    MANAGED_FLOW_STEERING = 1 << 29
    """Flow steering."""


class EventType(IntEnum):
    """Asynchronous events: ``enum ibv_event_type``, ibv_get_async_event(3)."""

    CQ_ERR = 0
    """A completion queue overran."""
    QP_FATAL = 1
    """A queue pair failed."""
    QP_REQ_ERR = 2
    """An invalid request reached a queue pair."""
    QP_ACCESS_ERR = 3
    """An access violation reached a queue pair."""
    COMM_EST = 4
    """A message arrived before the queue pair was in RTS."""
    SQ_DRAINED = 5
    """A send queue has drained."""
    PATH_MIG = 6
    """A connection migrated to its alternate path."""
    PATH_MIG_ERR = 7
    """A connection could not migrate."""
    DEVICE_FATAL = 8
    """The device failed."""
    PORT_ACTIVE = 9
    """A port became active."""
    PORT_ERR = 10
    """A port went down."""
    LID_CHANGE = 11
    """A port's LID changed."""
    PKEY_CHANGE = 12
    """A port's P_Key table changed."""
    SM_CHANGE = 13
    """A port's subnet manager changed."""
    SRQ_ERR = 14
    """A shared receive queue failed."""
    SRQ_LIMIT_REACHED = 15
    """A shared receive queue fell below its limit."""
    QP_LAST_WQE_REACHED = 16
    """A queue pair has consumed its last receive of a shared queue."""
    CLIENT_REREGISTER = 17
    """The subnet manager asks clients to register again."""
    GID_CHANGE = 18
    """A port's GID table changed."""
    WQ_FATAL = 19
    """A work queue failed."""
    DEVICE_SPEED_CHANGE = 20
    """The speed of one or more ports of the device changed."""
