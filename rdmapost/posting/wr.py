"""Work requests as dataclasses, one for every opcode.

A class has exactly the fields that its opcode uses, and accepts no others.  They are named as in
the man pages: ibv_post_send(3), ibv_post_recv(3), ibv_post_srq_ops(3).  All integers are in host
byte order.

Work requests are checked when they are posted, not when they are created: they may
change between posts, and invalid ones are useful for testing devices.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .._binding import native, once
from ..enums import Access, FlushLevel, FlushType, Opcode, OpsFlags, OpsOpcode, SendFlags

if TYPE_CHECKING:
    from .._verbs import TagHandle
    from ..resources.ah import AH
    from ..resources.mr import MR
    from ..resources.mw import MW

__all__ = [
    "SGE",
    "TSO",
    "AtomicCmpAndSwp",
    "AtomicFetchAndAdd",
    "AtomicWrite",
    "BindMW",
    "Flush",
    "LocalInv",
    "OpsWR",
    "RdmaRead",
    "RdmaWrite",
    "RdmaWriteWithImm",
    "RecvWR",
    "Send",
    "SendWR",
    "SendWithImm",
    "SendWithInv",
    "TagAdd",
    "TagDel",
    "TagHandle",
    "TagSync",
]


class SGE(NamedTuple):
    """A scatter/gather element: a range of local memory (``struct ibv_sge``).

    ``mr[64:128]`` creates one; ``SGE.from_buffer`` creates one for inline data. One created from
    numbers is passed on unchanged. For a subclass, the tuple's items are read, not any properties.

    Attributes:
        addr: address of the first byte, 0..2^64-1.
        length: bytes, 1..2^32-1; 0 means 2^31 to some devices and is refused.
        lkey: key of the memory region, 0..2^32-1; ignored for inline data.
        owner: what keeps the memory alive (an MR or a buffer), or None.
    """

    addr: int
    length: int
    lkey: int = 0
    owner: Any = None

    @classmethod
    def from_buffer(cls, data: Any) -> SGE:
        """Make an SGE over any object with a contiguous buffer, for inline data.

        Args:
            data: bytes, bytearray, memoryview, ...; it needs no registration.  It is kept
                alive and cannot be resized as long as the SGE exists (never call
                ctypes.resize or ndarray.resize(refcheck=False) on it: they ignore
                buffer exports).

        Raises:
            TypeError: data has no buffer.
            ValueError: its buffer is not contiguous.
        """
        try:
            owner = native.Buffer(data)
        except BufferError as error:
            raise ValueError(str(error)) from None
        return cls(owner.addr, owner.length, 0, owner)

    def __repr__(self) -> str:
        # Shown in errors about SGEs, whose fields may be any objects.
        addr, lkey = [f"{n:#x}" if isinstance(n, int) else f"{n!r}" for n in (self.addr, self.lkey)]
        return f"SGE(addr={addr}, length={self.length!r}, lkey={lkey})"


@dataclass(slots=True, kw_only=True)
class SendWR(native.WR):
    """Base class of send work requests (ibv_post_send(3)); post one of its subclasses.

    Attributes:
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode: ClassVar[Opcode]

    wr_id: int = 0
    send_flags: int = SendFlags.SIGNALED


@dataclass(slots=True)
class _WithBuffers(SendWR):
    # sg_list: local buffers, an SGE or a sequence of them.
    sg_list: SGE | Sequence[SGE] = ()


@dataclass(slots=True, kw_only=True)
class _Message(_WithBuffers):
    ah: AH | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    remote_srqn: int = 0


@dataclass(slots=True, kw_only=True)
class _Remote(_WithBuffers):
    remote_addr: int = 0
    rkey: int = 0
    remote_srqn: int = 0


@dataclass(slots=True, kw_only=True)
class Send(_Message):
    """Send a message (RC, UC, UD, XRC_SEND, RAW_PACKET).

    Attributes:
        sg_list: local buffers, an SGE or a sequence of them; none for 0 bytes.
        ah: the path to the peer, on UD; ignored elsewhere.
        remote_qpn: number of the peer's queue pair, 0..2^24-1, on UD; ignored elsewhere.
        remote_qkey: the peer's Q_Key, 0..2^32-1, on UD; ignored elsewhere.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.SEND


@dataclass(slots=True, kw_only=True)
class SendWithImm(_Message):
    """Send a message with 32 bits of immediate data (RC, UC, UD, XRC_SEND).

    Attributes:
        imm_data: 0..2^32-1, delivered in the peer's completion.
        sg_list: local buffers, an SGE or a sequence of them; none for 0 bytes.
        ah: the path to the peer, on UD; ignored elsewhere.
        remote_qpn: number of the peer's queue pair, 0..2^24-1, on UD; ignored elsewhere.
        remote_qkey: the peer's Q_Key, 0..2^32-1, on UD; ignored elsewhere.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.SEND_WITH_IMM

    imm_data: int = 0


@dataclass(slots=True, kw_only=True)
class SendWithInv(_WithBuffers):
    """Send a message that invalidates one of the peer's keys (RC, UC, XRC_SEND).

    RoCE and InfiniBand have no such packet on UC, so a device may refuse the work request there,
    perhaps not until its completion (LOC_QP_OP_ERR).

    The peer must keep the window or the region open until its receive completes. If the peer has no
    such key, or the key belongs to a region without remote access, the receive ends with
    REM_INV_REQ_ERR and the peer's queue pair fails, but this work request ends with SUCCESS.

    If an RDMA_READ or an atomic that uses the key may still be in progress, set SendFlags.FENCE:
    the peer would refuse that operation if it had to be retransmitted.

    Attributes:
        invalidate_rkey: the peer's key, 0..2^32-1.
        sg_list: local buffers, an SGE or a sequence of them; none for 0 bytes.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.SEND_WITH_INV

    invalidate_rkey: int = 0
    remote_srqn: int = 0


@dataclass(slots=True, kw_only=True)
class RdmaWrite(_Remote):
    """Write local buffers to remote memory (RC, UC, XRC_SEND).

    Attributes:
        sg_list: local buffers, an SGE or a sequence of them; none for 0 bytes.
        remote_addr: address at the peer, 0..2^64-1.
        rkey: the peer's key, 0..2^32-1.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.RDMA_WRITE


@dataclass(slots=True, kw_only=True)
class RdmaWriteWithImm(_Remote):
    """Write to remote memory and complete a receive there (RC, UC, XRC_SEND).

    Attributes:
        imm_data: 0..2^32-1, delivered in the peer's completion.
        sg_list: local buffers, an SGE or a sequence of them; none for 0 bytes.
        remote_addr: address at the peer, 0..2^64-1.
        rkey: the peer's key, 0..2^32-1.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.RDMA_WRITE_WITH_IMM

    imm_data: int = 0


@dataclass(slots=True, kw_only=True)
class RdmaRead(_Remote):
    """Read remote memory into local buffers (RC, XRC_SEND).

    If the response is lost, the peer reads again, and by then it may have executed later work
    requests from the queue: set SendFlags.FENCE on a later write or atomic to the same bytes.

    Attributes:
        sg_list: local buffers for the data, an SGE or a sequence of them; none for 0 bytes.
        remote_addr: address at the peer, 0..2^64-1.
        rkey: the peer's key, 0..2^32-1.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.RDMA_READ


@dataclass(slots=True, kw_only=True)
class AtomicCmpAndSwp(_Remote):
    """Replace a remote 64-bit value if it equals ``compare_add`` (RC, XRC_SEND).

    The previous value is written to the local buffer, one SGE of 8 bytes.
    ``remote_addr`` must be a multiple of 8.

    Attributes:
        compare_add: the value to compare with, 0..2^64-1.
        swap: the new value, 0..2^64-1.
        sg_list: where the previous value goes: one SGE of 8 bytes.
        remote_addr: address of the value at the peer, a multiple of 8.
        rkey: the peer's key, 0..2^32-1.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.ATOMIC_CMP_AND_SWP

    compare_add: int = 0
    swap: int = 0


@dataclass(slots=True, kw_only=True)
class AtomicFetchAndAdd(_Remote):
    """Add ``compare_add`` to a remote 64-bit value (RC, XRC_SEND).

    The previous value is written to the local buffer, one SGE of 8 bytes.
    ``remote_addr`` must be a multiple of 8.  The sum wraps at 2^64.

    Attributes:
        compare_add: the number to add, 0..2^64-1.
        sg_list: where the previous value goes: one SGE of 8 bytes.
        remote_addr: address of the value at the peer, a multiple of 8.
        rkey: the peer's key, 0..2^32-1.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.ATOMIC_FETCH_AND_ADD

    compare_add: int = 0


@dataclass(slots=True, kw_only=True)
class LocalInv(SendWR):
    """Invalidate a local key (RC, UC, XRC_SEND).

    The work request names only the key, and does not keep the window open: if the window is closed
    before the completion, the key is unknown and the status is MW_BIND_ERR.

    Attributes:
        invalidate_rkey: the key, 0..2^32-1.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.LOCAL_INV

    invalidate_rkey: int = 0


@dataclass(slots=True, kw_only=True)
class BindMW(SendWR):
    """Bind a type 2 memory window to a range of a region (RC, UC, XRC_SEND).

    Attributes:
        mw: the window.
        rkey: its new rkey: ``mw.rkey``, usually with different low 8 bits, so that the old key
            becomes invalid; ``mw.next_rkey()`` returns one.
        mr: the region, registered with Access.MW_BIND, without ZERO_BASED, and with LOCAL_WRITE
            if the peer may write or perform atomics; otherwise the bind completes with MW_BIND_ERR.
        addr: address of the first byte of the range.
        length: bytes, at least 1; to unbind the window, post a LocalInv.
        mw_access_flags: what the peer may do through the window: REMOTE_READ, REMOTE_WRITE and
            REMOTE_ATOMIC, and ZERO_BASED for addresses that start at 0.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.BIND_MW

    mw: MW | None = None
    rkey: int = 0
    mr: MR | None = None
    addr: int = 0
    length: int = 0
    mw_access_flags: int = Access(0)


@dataclass(slots=True, kw_only=True)
class TSO(_WithBuffers):
    """Send a payload as many frames, each with the same header (UD, RAW_PACKET).

    Attributes:
        sg_list: the payload, an SGE or a sequence of them.
        hdr: the header, at most 65535 bytes and at most the QP's max_tso_header: on RAW_PACKET an
            Ethernet, IP and TCP (or UDP) header, on UD an IP over InfiniBand header (RFC 4391), as
            rdmapost.frames.tcp makes them. If the device cannot parse it, the TSO ends with
            LOC_QP_OP_ERR.
        mss: payload bytes in each frame, 1..65535.
        ah: the path to the peer, on UD; ignored elsewhere.
        remote_qpn: number of the peer's queue pair, 0..2^24-1, on UD; ignored elsewhere.
        remote_qkey: the peer's Q_Key, 0..2^32-1, on UD; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.TSO

    hdr: bytes = b""
    mss: int = 0
    ah: AH | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0


@dataclass(slots=True, kw_only=True)
class AtomicWrite(SendWR):
    """Write a 64-bit value to remote memory atomically (RC, XRC_SEND; ibv_wr_atomic_write).

    A reader sees the old value or the new one, never a mix of both; an RDMA_WRITE of 8 bytes does
    not guarantee that. ``remote_addr`` must be a multiple of 8. The queue pair must be created with
    ``send_ops_flags=SendOps.ATOMIC_WRITE``. The peer needs REMOTE_WRITE.

    Attributes:
        atomic_wr: the value, 0..2^64-1; it is copied when posted.
        remote_addr: address at the peer, 0..2^64-1, a multiple of 8.
        rkey: the peer's key, 0..2^32-1.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.ATOMIC_WRITE

    atomic_wr: int = 0
    remote_addr: int = 0
    rkey: int = 0
    remote_srqn: int = 0


@dataclass(slots=True, kw_only=True)
class Flush(SendWR):
    """Make earlier writes visible or persistent in remote memory (RC, XRC_SEND; ibv_wr_flush).

    It completes when everything that this queue pair wrote earlier is visible or persistent. On
    software devices the data is only as persistent as the memory: a write to a mapped file outlives
    the process, but not a loss of power, because nothing calls msync().

    The queue pair must be created with ``send_ops_flags=SendOps.FLUSH``. The peer needs
    FLUSH_GLOBAL or FLUSH_PERSISTENT, in the access flags of both its region and its queue pair;
    a window cannot grant them.

    Attributes:
        remote_addr, length: the range, of at most 2^32-1 bytes; ignored with FlushLevel.MR.
        rkey: the peer's key, 0..2^32-1.
        type: FlushType; default: GLOBAL.
        level: FlushLevel; default: RANGE.
        remote_srqn: number of the peer's SRQ, 0..2^24-1, on XRC_SEND; ignored elsewhere.
        wr_id: comes back in the completion, 0..2^64-1.
        send_flags: SendFlags; default: SIGNALED.
    """

    opcode = Opcode.FLUSH

    remote_addr: int = 0
    rkey: int = 0
    length: int = 0
    type: int = FlushType.GLOBAL
    level: int = FlushLevel.RANGE
    remote_srqn: int = 0


@dataclass(slots=True)
class RecvWR(native.WR):
    """A receive: buffers for one incoming message (ibv_post_recv(3)).

    Attributes:
        sg_list: local buffers, an SGE or a sequence of them.
        wr_id: comes back in the completion, 0..2^64-1.
    """

    sg_list: SGE | Sequence[SGE] = ()
    wr_id: int = 0


if not TYPE_CHECKING:
    TagHandle = native.TagHandle


@dataclass(slots=True, kw_only=True)
class OpsWR:
    """Base class of tag-matching operations (ibv_post_srq_ops(3)); post one of its subclasses.

    Attributes:
        wr_id: comes back in the completion, 0..2^64-1.
        flags: OpsFlags; default: SIGNALED.
        unexpected_cnt: unexpected messages seen so far, with OpsFlags.TM_SYNC.
    """

    opcode: ClassVar[OpsOpcode]

    wr_id: int = 0
    flags: int = OpsFlags.SIGNALED
    unexpected_cnt: int = 0


@dataclass(slots=True, kw_only=True)
class TagAdd(OpsWR):
    """Add a tagged receive to the matching list.

    Attributes:
        recv_wr_id: wr_id in the completion of the message that matches, 0..2^64-1.
        sg_list: local buffers, an SGE or a sequence of them.
        tag: the tag to match, 0..2^64-1.
        mask: which bits of the tag count, 0..2^64-1; default: all.
        handle: set by the post; a TagDel names it.
        wr_id: comes back in the completion, 0..2^64-1.
        flags: OpsFlags; default: SIGNALED.
        unexpected_cnt: unexpected messages seen so far, with OpsFlags.TM_SYNC.
    """

    opcode = OpsOpcode.TAG_ADD

    recv_wr_id: int = 0
    sg_list: SGE | Sequence[SGE] = ()
    tag: int = 0
    mask: int = (1 << 64) - 1
    handle: TagHandle | None = None


@dataclass(slots=True, kw_only=True)
class TagDel(OpsWR):
    """Remove a tagged receive from the matching list.

    Attributes:
        handle: the handle that was set when the TagAdd was posted.
        wr_id: comes back in the completion, 0..2^64-1.
        flags: OpsFlags; default: SIGNALED.
        unexpected_cnt: unexpected messages seen so far, with OpsFlags.TM_SYNC.
    """

    opcode = OpsOpcode.TAG_DEL

    handle: TagHandle | None = None


@dataclass(slots=True, kw_only=True)
class TagSync(OpsWR):
    """Tell the device how many unexpected messages have been handled.

    New entries do not match until this count equals the number of unexpected messages that the
    device has delivered. A completion with WCFlags.TM_SYNC_REQ asks for a TagSync.

    Attributes:
        flags: OpsFlags; default: SIGNALED and TM_SYNC.  Without TM_SYNC it would do nothing,
            and a checked SRQ refuses it.
        wr_id: comes back in the completion, 0..2^64-1.
        unexpected_cnt: the unexpected messages handled since the SRQ was created, 0..2^32-1.
    """

    opcode = OpsOpcode.TAG_SYNC

    flags: int = OpsFlags.SIGNALED | OpsFlags.TM_SYNC


class _Signature:
    """The signature of a class whose __init__ is in C; a subclass's own __init__ overrides it.

    Args:
        wr_type: the class.
        signature: that of its __init__.
    """

    def __init__(self, wr_type: type, signature: inspect.Signature) -> None:
        self._wr_type, self._signature = wr_type, signature

    def __get__(self, wr: object, owner: type) -> inspect.Signature:
        for cls in owner.__mro__:
            if cls is self._wr_type:
                return self._signature
            if "__init__" in vars(cls) or "__new__" in vars(cls):
                break
        # inspect.signature() then uses the class's own __init__.
        raise AttributeError(f"{owner.__name__} has no __signature__")


_FAST: tuple[Any, ...] = (
    RdmaWrite,
    Send,
    RecvWR,
    RdmaRead,
    SendWithImm,
    RdmaWriteWithImm,
    SendWithInv,
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    LocalInv,
    BindMW,
    TSO,
    AtomicWrite,
    Flush,
    _Message,
    _Remote,
    _WithBuffers,
    SendWR,
)
"""Derived classes before their bases."""


def use_fast_init() -> None:
    """Let C do the work of a dataclass's __init__ (``_c/posting/wr_init.c``), in half the time."""
    for wr_type in _FAST:
        # An interrupted import may have removed it already.
        if "__init__" not in vars(wr_type):
            continue
        wr_type.__signature__ = _Signature(wr_type, inspect.signature(wr_type))
        # Positional arguments come first.
        ordered = sorted(fields(wr_type), key=operator.attrgetter("kw_only"))
        once(
            native.quick_init,
            wr_type,
            wr_type,
            wr_type.__init__,
            sum([not field.kw_only for field in ordered]),
            tuple([(field.name, field.default) for field in ordered]),
        )
        del wr_type.__init__
