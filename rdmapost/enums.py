"""The constants of ``<infiniband/verbs.h>``, under the names that the man pages use.

Values are written as numbers, because an older header may lack the newer
ones; a test compares them with the installed header.  They are in one long
file because they come from one header.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, TypeVar

__all__ = [
    "MTU",
    "Access",
    "AdviseMRAdvice",
    "AdviseMRFlags",
    "AtomicCap",
    "DeviceCap",
    "EventType",
    "FlushLevel",
    "FlushType",
    "GIDType",
    "LinkLayer",
    "MWType",
    "MigState",
    "NodeType",
    "ODPGeneralCap",
    "ODPTransportCap",
    "Opcode",
    "OpsFlags",
    "OpsOpcode",
    "PortCap",
    "PortState",
    "QPAttrMask",
    "QPState",
    "QPType",
    "QueryQPDataInOrderCaps",
    "QueryQPDataInOrderFlags",
    "RawPacketCap",
    "SRQAttrMask",
    "SRQType",
    "SendFlags",
    "SendOps",
    "TMCap",
    "TransportType",
    "WCExFlags",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
]


_NUMERIC = frozenset("bcdoxXneEfFgG%")
"""Format specifications that end in one of these show the number."""


class _Named(IntEnum):
    """An enumeration whose members print as their names and otherwise behave as numbers.

    Every member is truthy, even if its number is 0, unless the class says otherwise.
    """

    def __str__(self) -> str:
        return self._name_

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec[-1:] in _NUMERIC else format(str(self), spec)

    def __bool__(self) -> bool:
        return True


class _Flags(IntFlag):
    """Flags that print as their names, such as LOCAL_WRITE|REMOTE_READ; no flags print as 0."""

    def __str__(self) -> str:
        # A value has no name if it has no bits, or none that are known.
        return self._name_ or (hex(self) if self else "0")

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec[-1:] in _NUMERIC else format(str(self), spec)


class _Reported(_Named):
    """An enumeration of values that a device reports; see ``reported``."""

    def __repr__(self) -> str:
        return super().__repr__() if is_known(self) else int.__repr__(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        # The class itself does not accept an unknown value.
        return reported, (type(self), int(self))


_Enum = TypeVar("_Enum", bound=_Reported)


def reported(enum: type[_Enum], number: int) -> _Enum:
    """Return the member of an enumeration for a value that a device reported; never raise.

    A value that only a newer libibverbs or driver knows becomes an instance of the same class: it
    equals the number and prints as the number, which is also its name.
    """
    # Not enum(number): a ValueError from it could be one that a signal handler raised.
    known = enum._value2member_map_.get(number)
    if known is not None:
        return known  # type: ignore[return-value]
    unknown = int.__new__(enum, number)
    unknown._name_, unknown._value_ = str(number), number
    return unknown


def is_known(member: _Reported) -> bool:
    """Whether a reported value is a member of its enumeration."""
    return member._name_ in type(member).__members__


class Opcode(_Named):
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
    """Make earlier writes visible or persistent (ibv_wr_post(3))."""
    ATOMIC_WRITE = 15
    """Write 8 bytes to remote memory atomically (ibv_wr_post(3))."""


class SendOps(_Flags):
    """Which opcodes a QP is created for: ``enum ibv_qp_create_send_ops_flags``, ibv_wr_post(3).

    Only FLUSH and ATOMIC_WRITE need it.
    """

    RDMA_WRITE = 1 << 0
    """RDMA_WRITE."""
    RDMA_WRITE_WITH_IMM = 1 << 1
    """RDMA_WRITE_WITH_IMM."""
    SEND = 1 << 2
    """SEND."""
    SEND_WITH_IMM = 1 << 3
    """SEND_WITH_IMM."""
    RDMA_READ = 1 << 4
    """RDMA_READ."""
    ATOMIC_CMP_AND_SWP = 1 << 5
    """ATOMIC_CMP_AND_SWP."""
    ATOMIC_FETCH_AND_ADD = 1 << 6
    """ATOMIC_FETCH_AND_ADD."""
    LOCAL_INV = 1 << 7
    """LOCAL_INV."""
    BIND_MW = 1 << 8
    """BIND_MW."""
    SEND_WITH_INV = 1 << 9
    """SEND_WITH_INV."""
    TSO = 1 << 10
    """TSO."""
    FLUSH = 1 << 11
    """FLUSH (libibverbs 45 or later)."""
    ATOMIC_WRITE = 1 << 12
    """ATOMIC_WRITE (libibverbs 44 or later)."""


class FlushType(_Flags):
    """How far a FLUSH pushes the data: ``enum ibv_placement_type``, ibv_wr_post(3)."""

    GLOBAL = 1 << 0
    """Visible to every reader, including the CPU."""
    PERSISTENT = 1 << 1
    """Persistent: it survives a loss of power. (For software devices, see Flush.)"""


class FlushLevel(_Named):
    """What a FLUSH covers: ``enum ibv_selectivity_level``, ibv_wr_post(3)."""

    RANGE = 0
    """The range that the work request names."""
    MR = 1
    """The whole memory region that the rkey names."""


class SendFlags(_Flags):
    """Properties of a send work request: ``enum ibv_send_flags``, ibv_post_send(3)."""

    FENCE = 1 << 0
    """Wait for earlier RDMA reads and atomics on the queue to finish (RC, XRC).

    Needed on a work request that sends or changes the data that those operations read: otherwise
    a retransmitted read may return data that a later write on the same queue has put there.
    """
    SIGNALED = 1 << 1
    """Generate a completion; matters only where sq_sig_all is 0."""
    SOLICITED = 1 << 2
    """Wake a remote waiter that asked for solicited events only."""
    INLINE = 1 << 3
    """Copy the data when posting: no lkey is needed, and the buffer can be reused at once."""
    IP_CSUM = 1 << 4
    """Let the device compute IP and TCP/UDP checksums, where it can."""


class OpsOpcode(_Named):
    """What a tag-matching operation does: ``enum ibv_ops_wr_opcode``, ibv_post_srq_ops(3)."""

    TAG_ADD = 0
    """Add a tagged receive buffer to the matching list."""
    TAG_DEL = 1
    """Remove a tagged receive buffer from the matching list."""
    TAG_SYNC = 2
    """Report to the device how many unexpected messages the application has handled."""


class OpsFlags(_Flags):
    """Properties of a tag-matching operation: ``enum ibv_ops_flags``, ibv_post_srq_ops(3)."""

    SIGNALED = 1 << 0
    """Generate a completion for this operation."""
    TM_SYNC = 1 << 1
    """unexpected_cnt is valid: synchronise it with the device."""


class QPType(_Reported):
    """Transport service of a queue pair: ``enum ibv_qp_type``, ibv_create_qp(3)."""

    RC = 2
    """Reliable connection: every opcode, acknowledged, in order."""
    UC = 3
    """Unreliable connection: sends and writes, not acknowledged."""
    UD = 4
    """Unreliable datagram: sends of up to one MTU, each with its own address."""
    RAW_PACKET = 8
    """Whole Ethernet frames."""
    XRC_SEND = 9
    """Initiator of an extended reliable connection."""
    XRC_RECV = 10
    """Target of an extended reliable connection."""
    DRIVER = 255
    """Defined by the driver."""


class QPState(_Reported):
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


class QPAttrMask(_Flags):
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


class MigState(_Reported):
    """Path migration state: ``enum ibv_mig_state``, ibv_modify_qp(3)."""

    MIGRATED = 0
    """The alternate path is in use, or none is set."""
    REARM = 1
    """A new alternate path has been loaded."""
    ARMED = 2
    """Ready to migrate."""


class Access(_Flags):
    """What may be done with memory: ``enum ibv_access_flags``, ibv_reg_mr(3)."""

    LOCAL_WRITE = 1 << 0
    """The device may write here for local work requests (receives, reads, atomics)."""
    REMOTE_WRITE = 1 << 1
    """A peer may RDMA-write here; needs LOCAL_WRITE."""
    REMOTE_READ = 1 << 2
    """A peer may RDMA-read here."""
    REMOTE_ATOMIC = 1 << 3
    """A peer may perform atomics here; needs LOCAL_WRITE."""
    MW_BIND = 1 << 4
    """Memory windows may be bound to this region."""
    ZERO_BASED = 1 << 5
    """Remote addresses count from the start of the region."""
    ON_DEMAND = 1 << 6
    """Pages are brought in as the device touches them."""
    HUGETLB = 1 << 7
    """The memory is backed by huge pages (with ON_DEMAND)."""
    FLUSH_GLOBAL = 1 << 8
    """A peer may make what it wrote here visible, with a FLUSH."""
    FLUSH_PERSISTENT = 1 << 9
    """A peer may make what it wrote here persistent, with a FLUSH."""
    RELAXED_ORDERING = 1 << 20
    """The device may reorder its accesses on the bus."""


class ReregFlags(_Flags):
    """What a re-registration changes: ``enum ibv_rereg_mr_flags``, ibv_rereg_mr(3)."""

    CHANGE_TRANSLATION = 1 << 0
    CHANGE_PD = 1 << 1
    CHANGE_ACCESS = 1 << 2


class AdviseMRAdvice(_Named):
    """Advice about memory: ``enum ibv_advise_mr_advice``, ibv_advise_mr(3)."""

    PREFETCH = 0
    """Bring the pages in, to be read."""
    PREFETCH_WRITE = 1
    """Bring the pages in, to be written."""
    PREFETCH_NO_FAULT = 2
    """Tell the device about the pages that are present, and bring no others in."""


class AdviseMRFlags(_Flags):
    """How advice is taken: ``enum ib_uverbs_advise_mr_flag``, ibv_advise_mr(3)."""

    FLUSH = 1 << 0
    """Return once the advice has been followed; otherwise that happens in the background."""


class QueryQPDataInOrderFlags(_Flags):
    """What is asked: ``enum ibv_query_qp_data_in_order_flags``, ibv_query_qp_data_in_order(3)."""

    RETURN_CAPS = 1 << 0
    """Return all capabilities, not only WHOLE_MSG."""
    DEVICE_ONLY = 1 << 1
    """Ask about the device alone, whatever the host's CPU does."""


class QueryQPDataInOrderCaps(_Flags):
    """What is in order: ``enum ibv_query_qp_data_in_order_caps``, ibv_query_qp_data_in_order(3)."""

    WHOLE_MSG = 1 << 0
    """The whole message."""
    ALIGNED_128_BYTES = 1 << 1
    """Each aligned block of 128 bytes."""


class MWType(_Named):
    """Type of a memory window: ``enum ibv_mw_type``, ibv_alloc_mw(3)."""

    TYPE_1 = 1
    """Bound with ibv_bind_mw; the device chooses the rkey."""
    TYPE_2 = 2
    """Bound with a BIND_MW work request; the caller chooses the low byte of the rkey."""


class SRQType(_Named):
    """Type of a shared receive queue: ``enum ibv_srq_type``, ibv_create_srq_ex(3)."""

    BASIC = 0
    """Receives shared by the queue pairs created with it."""
    XRC = 1
    """Receives for XRC messages that name this queue."""
    TM = 2
    """Tag matching."""


class SRQAttrMask(_Flags):
    """Which attributes ibv_modify_srq(3) changes: ``enum ibv_srq_attr_mask``."""

    MAX_WR = 1 << 0
    """Resize the queue."""
    LIMIT = 1 << 1
    """Arm the limit event."""


class WCStatus(_Reported):
    """How a work request ended: ``enum ibv_wc_status``, ibv_poll_cq(3).

    Only SUCCESS is false: ``if wc.status:`` tests for a failure, as in C.
    """

    __bool__ = int.__bool__

    SUCCESS = 0
    """Done."""
    LOC_LEN_ERR = 1
    """The message exceeds the receive buffer, the MTU or the port's maximum."""
    LOC_QP_OP_ERR = 2
    """The queue pair could not carry out the work request."""
    LOC_EEC_OP_ERR = 3
    """Reliable datagram only; not seen today."""
    LOC_PROT_ERR = 4
    """A local buffer lies outside its memory region, or the lkey is wrong."""
    WR_FLUSH_ERR = 5
    """The queue pair was in or entered the error state before this work request was executed."""
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
    """No response came in time."""
    GENERAL_ERR = 21
    """Another transport error; vendor_err may say more."""
    TM_ERR = 22
    """A tag-matching operation failed."""
    TM_RNDV_INCOMPLETE = 23
    """A rendezvous message matched, and its data must be fetched by software."""


class WCOpcode(_Reported):
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
    """A FLUSH (ibv_wr_* interface)."""
    ATOMIC_WRITE = 9
    """An ATOMIC_WRITE (ibv_wr_* interface)."""
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


class WCFlags(_Flags):
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


class WCExFlags(_Flags):
    """What the completions of an extended CQ report: ``enum ibv_create_cq_wc_flags``."""

    WITH_BYTE_LEN = 1 << 0
    """byte_len"""
    WITH_IMM = 1 << 1
    """imm_data or invalidated_rkey"""
    WITH_QP_NUM = 1 << 2
    """qp_num"""
    WITH_SRC_QP = 1 << 3
    """src_qp"""
    WITH_SLID = 1 << 4
    """slid"""
    WITH_SL = 1 << 5
    """sl"""
    WITH_DLID_PATH_BITS = 1 << 6
    """dlid_path_bits"""
    WITH_COMPLETION_TIMESTAMP = 1 << 7
    """completion_ts: when it completed, by the device's clock."""
    WITH_CVLAN = 1 << 8
    """cvlan: the packet's VLAN tag, on devices with RawPacketCap.CVLAN_STRIPPING."""
    WITH_FLOW_TAG = 1 << 9
    """flow_tag: the tag of the flow steering rule that the packet matched."""
    WITH_TM_INFO = 1 << 10
    """tm_tag and tm_priv, of tag matching."""
    WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11
    """completion_wallclock_ns: when it completed, by the system's clock."""


class MTU(_Reported):
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
        """The MTU in bytes; 0 for a value that is not known."""
        return 128 << self.value if is_known(self) else 0


class PortState(_Reported):
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


class PortCap(_Flags):
    """What a port can do: ``enum ibv_port_cap_flags``, ibv_query_port(3)."""

    SM = 1 << 1
    """A subnet manager runs here."""
    NOTICE_SUP = 1 << 2
    """Notices."""
    TRAP_SUP = 1 << 3
    """Traps."""
    OPT_IPD_SUP = 1 << 4
    """Optional inter-packet delays."""
    AUTO_MIGR_SUP = 1 << 5
    """Automatic path migration."""
    SL_MAP_SUP = 1 << 6
    """A table that maps service levels to virtual lanes."""
    MKEY_NVRAM = 1 << 7
    """The M_Key is in non-volatile memory."""
    PKEY_NVRAM = 1 << 8
    """The P_Keys are in non-volatile memory."""
    LED_INFO_SUP = 1 << 9
    """LEDs can be queried."""
    SYS_IMAGE_GUID_SUP = 1 << 11
    """Has a system image GUID."""
    PKEY_SW_EXT_PORT_TRAP_SUP = 1 << 12
    """P_Key traps of external switch ports."""
    EXTENDED_SPEEDS_SUP = 1 << 14
    """Extended speeds, FDR and above."""
    CAP_MASK2_SUP = 1 << 15
    """port_cap_flags2 is valid."""
    CM_SUP = 1 << 16
    """Communication management."""
    SNMP_TUNNEL_SUP = 1 << 17
    """SNMP tunneling."""
    REINIT_SUP = 1 << 18
    """Reinitialization of the port."""
    DEVICE_MGMT_SUP = 1 << 19
    """Device management."""
    VENDOR_CLASS_SUP = 1 << 20
    """Vendor-specific management classes."""
    DR_NOTICE_SUP = 1 << 21
    """Direct route notices."""
    CAP_MASK_NOTICE_SUP = 1 << 22
    """Notices of changed capabilities."""
    BOOT_MGMT_SUP = 1 << 23
    """Boot management."""
    LINK_LATENCY_SUP = 1 << 24
    """Link round-trip latency."""
    CLIENT_REG_SUP = 1 << 25
    """The subnet manager can ask clients to re-register (CLIENT_REREGISTER)."""
    IP_BASED_GIDS = 1 << 26
    """GIDs are made from IP addresses (RoCE)."""


class LinkLayer(_Reported):
    """Link layer of a port, ibv_query_port(3)."""

    UNSPECIFIED = 0
    """The device did not say (old InfiniBand drivers)."""
    INFINIBAND = 1
    """InfiniBand: LIDs address a peer, GIDs optionally."""
    ETHERNET = 2
    """Ethernet (RoCE, iWARP): GIDs address a peer."""


class GIDType(_Reported):
    """Type of a GID table entry: ``enum ibv_gid_type``, ibv_query_gid_ex(3)."""

    IB = 0
    """InfiniBand."""
    ROCE_V1 = 1
    """RoCE v1: Ethernet frames, one broadcast domain."""
    ROCE_V2 = 2
    """RoCE v2: UDP/IP, routable."""


class TransportType(_Reported):
    """Transport of a device: ``enum ibv_transport_type``, ibv_get_device_list(3)."""

    UNKNOWN = -1
    """Not known to the library."""
    IB = 0
    """InfiniBand, or RoCE."""
    IWARP = 1
    """iWARP."""
    USNIC = 2
    """Cisco usNIC."""
    USNIC_UDP = 3
    """Cisco usNIC over UDP."""
    UNSPECIFIED = 4
    """Another transport."""


class NodeType(_Reported):
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


class AtomicCap(_Reported):
    """How far atomics are atomic: ``enum ibv_atomic_cap``, ibv_query_device(3).

    Only NONE is false.
    """

    __bool__ = int.__bool__

    NONE = 0
    """No atomics."""
    HCA = 1
    """Between the queue pairs of this device."""
    GLOB = 2
    """Also between this device and the CPUs."""


class DeviceCap(_Flags):
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
    RAW_SCATTER_FCS = 1 << 34
    """Receives raw packets with their frame check sequence; only in device_cap_flags_ex."""
    PCI_WRITE_END_PADDING = 1 << 36
    """Pads writes to the end of a cache line; only in device_cap_flags_ex."""
    FLUSH_GLOBAL = 1 << 38
    """FLUSH for visibility; only in device_cap_flags_ex."""
    FLUSH_PERSISTENT = 1 << 39
    """FLUSH for persistence; only in device_cap_flags_ex."""
    ATOMIC_WRITE = 1 << 40
    """ATOMIC_WRITE; only in device_cap_flags_ex."""


class ODPGeneralCap(_Flags):
    """On-demand paging: ``enum ibv_odp_general_caps``, ibv_query_device_ex(3)."""

    SUPPORT = 1 << 0
    """Regions may be registered with Access.ON_DEMAND."""
    SUPPORT_IMPLICIT = 1 << 1
    """A region may cover the whole address space."""


class ODPTransportCap(_Flags):
    """Operations on on-demand regions, on one transport: ``enum ibv_odp_transport_cap_bits``."""

    SUPPORT_SEND = 1 << 0
    """Sends."""
    SUPPORT_RECV = 1 << 1
    """Receives."""
    SUPPORT_WRITE = 1 << 2
    """RDMA writes."""
    SUPPORT_READ = 1 << 3
    """RDMA reads."""
    SUPPORT_ATOMIC = 1 << 4
    """Atomics."""
    SUPPORT_SRQ_RECV = 1 << 5
    """Receives on shared receive queues."""
    SUPPORT_FLUSH = 1 << 6
    """Flushes."""
    SUPPORT_ATOMIC_WRITE = 1 << 7
    """ATOMIC_WRITEs."""


class RawPacketCap(_Flags):
    """What RAW_PACKET queue pairs can do: ``enum ibv_raw_packet_caps``, ibv_query_device_ex(3)."""

    CVLAN_STRIPPING = 1 << 0
    """Strips customer VLAN tags."""
    SCATTER_FCS = 1 << 1
    """Delivers the frame check sequence."""
    IP_CSUM = 1 << 2
    """Checksums."""
    DELAY_DROP = 1 << 3
    """Waits for a receive before it drops a frame."""


class TMCap(_Flags):
    """Which transports have tag matching: ``enum ibv_tm_cap_flags``, ibv_query_device_ex(3)."""

    RC = 1 << 0
    """RC queue pairs."""


class EventType(_Reported):
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
    """A queue pair has consumed its last receive from a shared receive queue."""
    CLIENT_REREGISTER = 17
    """The subnet manager asks clients to re-register."""
    GID_CHANGE = 18
    """A port's GID table changed."""
    WQ_FATAL = 19
    """A work queue failed."""
    DEVICE_SPEED_CHANGE = 20
    """The speed of one or more ports of the device changed."""
