"""The soft device behind the C structs: its control verbs, and its data verbs' callbacks.

The posting symbols call the six ``soft_*`` functions below through the
context's table, as they call a NIC's driver.  They read the C structs, hand
the work to ``rdmapost.soft``, and write what comes back.

An exception must not cross C.  The device turns one into a completion or an
errno, and it is logged with its traceback; a Ctrl-C is delivered again once
the call has come back.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, NamedTuple

from .._binding import ffi, lib
from ..enums import (
    MTU,
    Access,
    AtomicCap,
    DeviceCap,
    GIDType,
    LinkLayer,
    MWType,
    NodeType,
    Opcode,
    OpsOpcode,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    SRQAttrMask,
    SRQType,
)
from ..errors import UnsupportedError, VerbsError
from ..rules import MAX_MSG_SIZE, OPCODES_BY_QP_TYPE
from ..soft import requester, tags
from ..soft.completion import Channel, CompletionQueue
from ..soft.datagram import AddressHandle
from ..soft.device import Device, OpenDevice
from ..soft.faults import FaultPlan
from ..soft.memory import ProtectionDomain, Region, Window
from ..soft.offload import MAX_TSO
from ..soft.qp import QueuePair
from ..soft.queue import RecvWQE, SendWQE, SharedReceiveQueue, WorkQueue, XRCDomain
from ..states import FIELDS
from .base import DeviceInfo, GIDEntry

__all__ = ["SoftProvider"]

_log = logging.getLogger("rdmapost.soft")

MAX_QP_WR = 16384
MAX_SGE = lib.RP_SOFT_MAX_SGE
MAX_INLINE = 1024
MAX_CQE = 1 << 20
MAX_SRQ_WR = 16384
MAX_TSO_HEADER = 512
_TM_CAP_RC = 1
MAX_RD_ATOMIC = 16
PKEY = 0xFFFF

_CAPS = (
    DeviceCap.RC_RNR_NAK_GEN | DeviceCap.MEM_WINDOW | DeviceCap.MEM_WINDOW_TYPE_2B
    | DeviceCap.MEM_MGT_EXTENSIONS | DeviceCap.XRC | DeviceCap.UD_IP_CSUM
    | DeviceCap.RAW_IP_CSUM | DeviceCap.RAW_MULTI | DeviceCap.PORT_ACTIVE_EVENT
    | DeviceCap.SYS_IMAGE_GUID | DeviceCap.SRQ_RESIZE | DeviceCap.CURR_QP_STATE_MOD
)  # fmt: skip

_DEVICE_ATTR = {
    "max_mr_size": 1 << 62,
    "page_size_cap": 0xFFFFF000,
    "vendor_id": 0,
    "vendor_part_id": 0,
    "hw_ver": 0,
    "max_qp": 1 << 16,
    "max_qp_wr": MAX_QP_WR,
    "device_cap_flags": int(_CAPS),
    "max_sge": MAX_SGE,
    "max_sge_rd": MAX_SGE,
    "max_cq": 1 << 16,
    "max_cqe": MAX_CQE,
    "max_mr": 1 << 22,
    "max_pd": 1 << 16,
    "max_qp_rd_atom": MAX_RD_ATOMIC,
    "max_qp_init_rd_atom": MAX_RD_ATOMIC,
    "max_res_rd_atom": 1 << 20,
    "atomic_cap": AtomicCap.HCA,
    "max_mw": 1 << 22,
    "max_mcast_grp": 1 << 13,
    "max_mcast_qp_attach": 1 << 8,
    "max_total_mcast_qp_attach": 1 << 16,
    "max_ah": 1 << 22,
    "max_srq": 1 << 16,
    "max_srq_wr": MAX_SRQ_WR,
    "max_srq_sge": MAX_SGE,
    "max_pkeys": 1,
    "local_ca_ack_delay": 1,
    "phys_port_cnt": 1,
}

# The structs as the shim's static assertions pin them down.
_SEND_HEAD = Struct("=Q16xiIII")  # wr_id, num_sge, opcode, send_flags, imm_data
_RDMA = Struct("=QI")
_ATOMIC = Struct("=QQQI")
_UD = Struct("=QII")
_SGE = Struct("=QII")
_WC = Struct("=QiIIIIIIIHHBB2x")
_pack_wc, _WC_SIZE = _WC.pack_into, _WC.size
_TM_INFO = Struct("=QI4x")
_OPS = Struct("=Q8xIiIIQ8xi4xQQ")  # as rdmapost.packing writes it
_UINT32 = Struct("=I")
_RECV = Struct("=Q16xi4x")  # wr_id, num_sge
_SEND_SIZE, _UNION_AT, _SRQN_AT = 128, 40, 72

_SIGNED_MASK = 0xFFFF_FFFF
_INLINE = int(SendFlags.INLINE)
_SEND = int(Opcode.SEND)
_OPCODES = {int(opcode): opcode for opcode in Opcode}
_ATOMICS = frozenset({Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD})
_REMOTE = frozenset({Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM, Opcode.RDMA_READ})
_DATAGRAM = frozenset({Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO})
_SEGMENTING = frozenset({QPType.UD, QPType.RAW_PACKET})
_SRQ_TYPE, _SRQ_PD = lib.IBV_SRQ_INIT_ATTR_TYPE, lib.IBV_SRQ_INIT_ATTR_PD
_SRQ_XRCD, _SRQ_CQ, _SRQ_TM = (
    lib.IBV_SRQ_INIT_ATTR_XRCD, lib.IBV_SRQ_INIT_ATTR_CQ, lib.IBV_SRQ_INIT_ATTR_TM,
)  # fmt: skip
_SRQ_FIELDS: dict[int, int] = {
    SRQType.BASIC: _SRQ_TYPE | _SRQ_PD,
    SRQType.XRC: _SRQ_TYPE | _SRQ_PD | _SRQ_XRCD | _SRQ_CQ,
    SRQType.TM: _SRQ_TYPE | _SRQ_PD | _SRQ_CQ | _SRQ_TM,
}
"""The attributes of ibv_create_srq_ex, by type."""

_IPV4_MAPPED = bytes(10) + b"\xff\xff"

_device = Device("soft0")
_lock = _device.lock
_objects: dict[int, Any] = {}
"""What the structs stand for, by their handle."""
_handles = itertools.count(1)


def _keep(struct: Any, thing: Any) -> Any:
    """Give a struct a handle and remember what it stands for; return the struct."""
    struct.handle = handle = next(_handles) & _SIGNED_MASK
    _objects[handle] = thing
    return struct


def _failed(call: str, code: int, hint: str = "") -> VerbsError:
    return VerbsError(call, code, hint)


@contextlib.contextmanager
def _verb() -> Iterator[None]:
    """Hold the device's lock for a control verb, and tell what went wrong inside."""
    with _lock:
        yield
    if _tell():
        _thread.interrupt_main()


def _told(result: int) -> int:
    """Return what a data verb returns, and tell what went wrong inside."""
    if _device.errors and _tell():
        # Raised here it would be lost: the C side delivers it when it is back there.
        lib.rp_soft_interrupted = 1
    return result


def _tell() -> bool:
    """Log what went wrong; return whether a Ctrl-C is to be delivered again."""
    interrupted = False
    while _device.errors:
        error = _device.errors.pop()
        if isinstance(error, KeyboardInterrupt):
            interrupted = True
        else:
            _log.error("the soft device failed; the work request did too", exc_info=error)
    return interrupted


class _OpenHandles(NamedTuple):
    opened: OpenDevice
    struct: Any


_contexts: dict[int, _OpenHandles] = {}
"""Open contexts, by their struct's address."""


def _context_of(context: Any) -> OpenDevice:
    return _contexts[int(ffi.cast("uintptr_t", context))].opened


class SoftProvider:
    """The soft device's control verbs."""

    kind = "soft"
    spin_ns = 0

    # ---- devices ------------------------------------------------------------

    def list_devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(_device.name, self.kind, _device.guid, NodeType.CA, "")]

    def open_device(self, name: str) -> Any:
        ops = ffi.new("struct rp_soft_ops *")
        for call in ("send", "recv", "srq_recv", "post_srq_ops", "poll_cq", "req_notify_cq"):
            setattr(ops, call, getattr(lib, f"soft_{call}"))
        context = lib.rp_soft_open(ops)
        if context == ffi.NULL:
            raise _failed("ibv_open_device", ffi.errno)
        opened = OpenDevice()
        context.async_fd = opened.events.fd
        _contexts[int(ffi.cast("uintptr_t", context))] = _OpenHandles(opened, context)
        return context

    def close_device(self, context: Any) -> None:
        opened = _contexts.pop(int(ffi.cast("uintptr_t", context))).opened
        opened.events.close()
        lib.rp_soft_close(context)

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> FaultPlan:
        opened = _context_of(context)
        opened.wr_id_of = wr_id_of
        return opened.faults

    def inside_verb(self) -> bool:
        # Only the thread that asks matters: does it hold the device's lock?
        owned: bool = _lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def query_device(self, context: Any, attr: Any) -> None:
        for name, value in _DEVICE_ATTR.items():
            setattr(attr, name, value)
        attr.fw_ver = b"soft"
        attr.node_guid = attr.sys_image_guid = int.from_bytes(_device.guid.to_bytes(8), "little")

    def query_device_ex(self, context: Any, attr: Any) -> None:
        self.query_device(context, attr.orig_attr)
        attr.tso_caps.max_tso = MAX_TSO
        attr.tso_caps.supported_qpts = 1 << QPType.UD | 1 << QPType.RAW_PACKET
        caps = attr.tm_caps
        caps.max_rndv_hdr_size = tags.MAX_RNDV_HEADER
        caps.max_num_tags, caps.max_ops = tags.MAX_NUM_TAGS, tags.MAX_OPS
        caps.max_sge, caps.flags = MAX_SGE, _TM_CAP_RC

    def query_port(self, context: Any, port_num: int, attr: Any) -> None:
        attr.state = PortState.ACTIVE
        attr.max_mtu, attr.active_mtu = MTU.MTU_4096, _device.port_mtu
        attr.gid_tbl_len, attr.pkey_tbl_len = len(_device.gids), 1
        attr.max_msg_sz = MAX_MSG_SIZE
        attr.phys_state, attr.link_layer = 5, LinkLayer.ETHERNET
        attr.active_speed, attr.active_width = 1, 1

    def query_gid_table(self, context: Any, port_num: int, length: int) -> list[GIDEntry]:
        return [GIDEntry(index, raw, GIDType.ROCE_V2, "") for index, raw in enumerate(_device.gids)]

    def query_pkey(self, context: Any, port_num: int, index: int) -> int:
        if index:
            raise _failed("ibv_query_pkey", errno.EINVAL)
        return PKEY

    def get_async_event(self, context: Any) -> tuple[int, Any] | None:
        with _lock:
            return _context_of(context).events.take()

    # ---- memory -------------------------------------------------------------

    def alloc_pd(self, context: Any) -> Any:
        pd = ffi.new("struct ibv_pd *")
        pd.context = context
        return _keep(pd, ProtectionDomain())

    def dealloc_pd(self, pd: Any) -> None:
        del _objects[pd.handle]

    def reg_mr(self, pd: Any, addr: Any, length: int, access: int) -> Any:
        mr = ffi.new("struct ibv_mr *")
        mr.context, mr.pd, mr.addr, mr.length = pd.context, pd, addr, length
        start = 0 if access & Access.ZERO_BASED else int(ffi.cast("uintptr_t", addr))
        with _lock:
            memory = memoryview(ffi.buffer(ffi.cast("char *", addr), length))
            region = _device.memory.register(_objects[pd.handle], start, memory, access)
        mr.lkey, mr.rkey = region.lkey, region.rkey
        return _keep(mr, region)

    def dereg_mr(self, mr: Any) -> None:
        with _lock:
            region: Region = _objects[mr.handle]
            if region.windows:
                raise _failed(
                    "ibv_dereg_mr", errno.EBUSY,
                    f"{region.windows} memory windows are bound to it; invalidate them first",
                )  # fmt: skip
            _device.memory.deregister(region)
            del _objects[mr.handle]

    def alloc_mw(self, pd: Any, mw_type: int) -> Any:
        mw = ffi.new("struct ibv_mw *")
        mw.context, mw.pd, mw.type = pd.context, pd, mw_type
        with _lock:
            window = _device.memory.allocate_window(_objects[pd.handle], MWType(mw_type))
        mw.rkey = window.rkey
        return _keep(mw, window)

    def dealloc_mw(self, mw: Any) -> None:
        with _lock:
            _device.memory.deallocate_window(_objects.pop(mw.handle))

    def bind_mw(self, qp: Any, mw: Any, bind: Any) -> None:
        window: Window = _objects[mw.handle]
        if window.type is not MWType.TYPE_1:
            raise _failed("ibv_bind_mw", errno.EINVAL, "only a window of type 1 is bound this way")
        info = bind.bind_info
        wqe = SendWQE(bind.wr_id, Opcode.BIND_MW, bind.send_flags, 0)
        region = _objects[info.mr.handle] if info.mr != ffi.NULL else None
        wqe.bind = (window, region, info.addr, info.length, info.mw_access_flags)
        wqe.rkey = mw.rkey & ~0xFF | (mw.rkey + 1) & 0xFF
        with _verb():
            target = _device.qps[qp.qp_num]
            faults = target.context.faults
            code = faults.errno_of_post() if faults.posts else 0
            if code := code or target.post_send(wqe):
                raise _failed("ibv_bind_mw", code)
            mw.rkey = wqe.rkey
            requester.run(target)

    # ---- completions --------------------------------------------------------

    def create_comp_channel(self, context: Any) -> Any:
        channel = ffi.new("struct ibv_comp_channel *")
        channel.context = context
        try:
            made = Channel(_device)
        except OSError as error:
            raise _failed("ibv_create_comp_channel", error.errno or errno.EIO) from None
        channel.fd = made.fd
        with _lock:
            _device.channels.add(made)
        _channels[made.fd] = made
        return channel

    def destroy_comp_channel(self, channel: Any) -> None:
        with _lock:
            made = _channels.pop(channel.fd)
            _device.channels.discard(made)
            made.close()

    def create_cq(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        if not 1 <= cqe <= MAX_CQE or comp_vector:
            raise _failed("ibv_create_cq", errno.EINVAL)
        return self._create_cq(ffi.new("struct ibv_cq *"), context, cqe, channel)

    def create_cq_ex(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        if not 1 <= cqe <= MAX_CQE or comp_vector:
            raise _failed("ibv_create_cq_ex", errno.EINVAL)
        whole = ffi.new("struct rp_soft_cq_ex *")
        lib.rp_soft_cq_ex_init(whole, lib.soft_fill_cq)
        extended = ffi.addressof(whole, "cq")
        cq = self._create_cq(ffi.cast("struct ibv_cq *", extended), context, cqe, channel)
        _extended_cqs[cq.handle] = whole
        return extended

    def _create_cq(self, cq: Any, context: Any, cqe: int, channel: Any) -> Any:
        cq.context, cq.cqe = context, cqe
        behind = None
        if channel:
            cq.channel = channel
            behind = _channels[channel.fd]
        made = CompletionQueue(cqe, behind)
        made.handle = cq
        return _keep(cq, made)

    def destroy_cq(self, cq: Any) -> None:
        with _lock:
            made: CompletionQueue = _objects[cq.handle]
            if made.users:
                raise _failed("ibv_destroy_cq", errno.EBUSY)
            if made.channel is not None:
                events = made.channel.events
                while made in events:
                    events.remove(made)
            del _objects[cq.handle]
            _extended_cqs.pop(cq.handle, None)

    def get_cq_event(self, channel: Any) -> Any:
        with _verb():
            _device.progress()
            made = _channels[channel.fd].take()
        return None if made is None else made.handle

    def drop_cq_event(self, channel: Any) -> None:
        self.get_cq_event(channel)

    def ack_cq_events(self, cq: Any, count: int) -> None:
        pass

    # ---- shared receive queues ----------------------------------------------

    def create_srq(self, pd: Any, init: Any) -> Any:
        return self._create_srq(pd.context, pd, init.attr)

    def create_srq_ex(self, context: Any, init: Any) -> Any:
        mask, kind = init.comp_mask, init.srq_type if init.comp_mask & _SRQ_TYPE else SRQType.BASIC
        if mask | _SRQ_TYPE != _SRQ_FIELDS.get(kind):
            raise _failed("ibv_create_srq_ex", errno.EINVAL, "comp_mask does not fit the type")
        cap = init.tm_cap
        if kind == SRQType.TM and not (
            1 <= cap.max_num_tags <= tags.MAX_NUM_TAGS and 1 <= cap.max_ops <= tags.MAX_OPS
        ):
            raise _failed(
                "ibv_create_srq_ex", errno.EINVAL,
                f"max_num_tags is in 1..{tags.MAX_NUM_TAGS} and max_ops in 1..{tags.MAX_OPS}",
            )  # fmt: skip
        srq = self._create_srq(context, init.pd, init.attr)
        made: SharedReceiveQueue = _objects[srq.handle]
        with _lock:
            if kind == SRQType.XRC:
                made.xrcd = _domain_of(init.xrcd)
                made.xrcd.users += 1
            elif kind == SRQType.TM:
                made.tags = tags.MatchingList(made, cap.max_num_tags, cap.max_ops, MAX_SGE)
            if mask & _SRQ_CQ:
                made.cq = _objects[init.cq.handle]
                made.cq.users += 1
        return srq

    def _create_srq(self, context: Any, pd: Any, attr: Any) -> Any:
        if not 1 <= attr.max_wr <= MAX_SRQ_WR or not 1 <= attr.max_sge <= MAX_SGE:
            raise _failed(
                "ibv_create_srq", errno.EINVAL,
                f"max_wr is in 1..{MAX_SRQ_WR} and max_sge in 1..{MAX_SGE}",
            )  # fmt: skip
        srq = ffi.new("struct ibv_srq *")
        srq.context, srq.pd = context, pd
        with _lock:
            made = SharedReceiveQueue(
                _context_of(context), _objects[pd.handle], attr.max_wr, attr.max_sge,
                next(_device.numbers),
            )  # fmt: skip
            made.handle = srq
            _device.srqs[made.number] = made
        return _keep(srq, made)

    def get_srq_num(self, srq: Any) -> int:
        number: int = _objects[srq.handle].number
        return number

    def modify_srq(self, srq: Any, attr: Any, mask: int) -> None:
        with _lock:
            made: SharedReceiveQueue = _objects[srq.handle]
            depth = attr.max_wr if mask & SRQAttrMask.MAX_WR else made.queue.depth
            if not max(1, made.queue.used) <= depth <= MAX_SRQ_WR:
                raise _failed("ibv_modify_srq", errno.EINVAL)
            if mask & SRQAttrMask.LIMIT:
                if attr.srq_limit > depth:
                    raise _failed(
                        "ibv_modify_srq", errno.EINVAL,
                        f"srq_limit={attr.srq_limit} is more than max_wr={depth}",
                    )  # fmt: skip
                made.limit = attr.srq_limit
            made.queue.depth = depth

    def query_srq(self, srq: Any, attr: Any) -> None:
        made: SharedReceiveQueue = _objects[srq.handle]
        attr.max_wr, attr.max_sge = made.queue.depth, made.queue.max_sge
        attr.srq_limit = made.limit

    def destroy_srq(self, srq: Any) -> None:
        with _lock:
            made: SharedReceiveQueue = _objects[srq.handle]
            if made.users:
                raise _failed("ibv_destroy_srq", errno.EBUSY)
            if made.cq is not None:
                made.cq.users -= 1
                made.cq.forget(made.queue)
                if made.tags is not None:
                    made.cq.forget(made.tags.slots)
                    made.cq.forget(made.tags.ops)
            if made.xrcd is not None:
                made.xrcd.users -= 1
            del _device.srqs[made.number], _objects[srq.handle]

    def open_xrcd(self, context: Any, init: Any) -> Any:
        with _lock:
            domain = _find_domain(init)
            domain.opened += 1
        # Two opens of one domain are two structs, and both stand for it.
        xrcd = ffi.new("struct rp_soft_xrcd *")
        xrcd.xrcd.context = context
        _keep(xrcd, domain)
        _xrcds[xrcd.handle] = xrcd
        return ffi.addressof(xrcd, "xrcd")

    def close_xrcd(self, xrcd: Any) -> None:
        with _lock:
            domain = _domain_of(xrcd)
            if domain.opened == 1:
                if domain.users:
                    raise _failed("ibv_close_xrcd", errno.EBUSY)
                if domain.inode is not None:
                    del _domains[domain.inode]
            domain.opened -= 1
            handle = ffi.cast("struct rp_soft_xrcd *", xrcd).handle
            del _objects[handle], _xrcds[handle]

    # ---- queue pairs --------------------------------------------------------

    def create_qp(self, pd: Any, init: Any) -> Any:
        return self._create_qp(pd.context, pd, init)

    def create_qp_ex(self, context: Any, init: Any) -> Any:
        mask = init.comp_mask
        header = init.max_tso_header if mask & lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER else 0
        if header > MAX_TSO_HEADER or (header and init.qp_type not in _SEGMENTING):
            raise _failed(
                "ibv_create_qp_ex", errno.EINVAL,
                f"max_tso_header is for UD and RAW_PACKET, and at most {MAX_TSO_HEADER}",
            )  # fmt: skip
        pd = init.pd if mask & lib.IBV_QP_INIT_ATTR_PD else ffi.NULL
        domain = _domain_of(init.xrcd) if mask & lib.IBV_QP_INIT_ATTR_XRCD else None
        qp = self._create_qp(context, pd, init, domain)
        _objects[qp.handle].max_tso_header = header
        return qp

    def _create_qp(self, context: Any, pd: Any, init: Any, domain: XRCDomain | None = None) -> Any:
        if init.qp_type not in OPCODES_BY_QP_TYPE or init.qp_type == QPType.DRIVER:
            raise UnsupportedError("ibv_create_qp", errno.EOPNOTSUPP, "there is no such QP type")
        target = init.qp_type == QPType.XRC_RECV
        if (domain is not None, bool(pd)) != (target, not target):
            raise _failed("ibv_create_qp", errno.EINVAL, "XRC_RECV takes an XRCD, others a PD")
        needs_recv_cq = init.qp_type not in (QPType.XRC_SEND, QPType.XRC_RECV)
        if (not init.send_cq and not target) or (not init.recv_cq and needs_recv_cq):
            raise _failed("ibv_create_qp", errno.EINVAL, "a CQ is missing")
        cap = init.cap
        wrs_fit = max(cap.max_send_wr, cap.max_recv_wr) <= MAX_QP_WR
        sges_fit = max(cap.max_send_sge, cap.max_recv_sge) <= MAX_SGE
        if not wrs_fit or not sges_fit or cap.max_inline_data > MAX_INLINE:
            raise _failed("ibv_create_qp", errno.EINVAL)
        qp = ffi.new("struct ibv_qp *")
        qp.context, qp.pd, qp.qp_type = context, pd, init.qp_type
        qp.send_cq, qp.recv_cq, qp.srq = init.send_cq, init.recv_cq, init.srq
        srq = _objects[init.srq.handle] if init.srq else None
        if srq is not None and srq.tags is not None and init.qp_type != QPType.RC:
            raise _failed("ibv_create_qp", errno.EINVAL, "tag matching is for RC")
        # An XRC queue pair lacks one of them, or both.
        send_cq, recv_cq = (
            _objects[cq.handle] if cq else CompletionQueue(1, None)
            for cq in (init.send_cq, init.recv_cq)
        )
        with _lock:
            made = QueuePair(
                _device, _context_of(context), next(_device.numbers) & 0xFFFFFF,
                QPType(init.qp_type), _objects[pd.handle] if pd else ProtectionDomain(),
                send_cq, recv_cq, srq,
                WorkQueue(cap.max_send_wr, cap.max_send_sge),
                WorkQueue(cap.max_recv_wr, cap.max_recv_sge),
                cap.max_inline_data, bool(init.sq_sig_all),
            )  # fmt: skip
            made.handle, made.xrcd = qp, domain
            _device.qps[made.number] = made
            for user in (send_cq, recv_cq, srq, domain):
                if user is not None:
                    user.users += 1
        qp.qp_num = made.number
        return _keep(qp, made)

    def modify_qp(self, qp: Any, attr: Any, mask: int) -> None:
        attrs = {
            name: getattr(attr, name)
            for name, bit in FIELDS.items()
            if bit & mask and name != "ah_attr" and not name.startswith("alt_")
        }
        if mask & QPAttrMask.AV:
            if not attr.ah_attr.is_global:
                raise _failed("ibv_modify_qp", errno.EINVAL, "ah_attr has no dgid")
            attrs["ah_attr"] = bytes(ffi.buffer(ffi.addressof(attr, "ah_attr")))
            attrs["dgid"] = bytes(attr.ah_attr.grh.dgid.raw)
            attrs["sl"] = attr.ah_attr.sl
        with _verb():
            made: QueuePair = _objects[qp.handle]
            if code := made.modify(QPAttrMask(mask), attrs):
                raise _failed("ibv_modify_qp", code)
            qp.state = made.state
            requester.run(made)

    def query_qp(self, qp: Any, attr: Any, mask: int, init: Any) -> None:
        with _lock:
            made: QueuePair = _objects[qp.handle]
            for name in FIELDS:
                if name in made.attr and name != "ah_attr":
                    setattr(attr, name, made.attr[name])
            attr.qp_state = attr.cur_qp_state = made.state
            if made.attr["ah_attr"]:
                ffi.memmove(ffi.addressof(attr, "ah_attr"), made.attr["ah_attr"],
                            len(made.attr["ah_attr"]))  # fmt: skip
            for cap in (attr.cap, init.cap):
                cap.max_send_wr, cap.max_send_sge = made.sq.depth, made.sq.max_sge
                cap.max_recv_wr, cap.max_recv_sge = made.rq.depth, made.rq.max_sge
                cap.max_inline_data = made.max_inline
            init.qp_type, init.sq_sig_all = made.type, made.sq_sig_all
            init.send_cq, init.recv_cq, init.srq = qp.send_cq, qp.recv_cq, qp.srq

    def destroy_qp(self, qp: Any) -> None:
        with _lock:
            made: QueuePair = _objects.pop(qp.handle)
            made.drop_queues()
            for group in list(_device.groups):
                _device.detach(made, group)
            for user in (made.send_cq, made.recv_cq, made.srq, made.xrcd):
                if user is not None:
                    user.users -= 1
            del _device.qps[made.number]

    def create_ah(self, pd: Any, attr: Any) -> Any:
        grh = attr.grh
        if not attr.is_global or attr.port_num != 1 or grh.sgid_index >= len(_device.gids):
            raise _failed("ibv_create_ah", errno.EINVAL)
        ah = ffi.new("struct ibv_ah *")
        ah.context, ah.pd = pd.context, pd
        way = AddressHandle(
            _device.gids[grh.sgid_index], bytes(grh.dgid.raw), attr.sl,
            grh.flow_label & 0xFFFFF, grh.hop_limit, grh.traffic_class,
        )  # fmt: skip
        return _keep(ah, way)

    def destroy_ah(self, ah: Any) -> None:
        del _objects[ah.handle]

    def attach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        with _lock:
            made: QueuePair = _objects[qp.handle]
            if made.type is not QPType.UD or not _is_group(gid):
                raise _failed("ibv_attach_mcast", errno.EINVAL)
            _device.attach(made, gid)

    def detach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        with _lock:
            if not _device.detach(_objects[qp.handle], gid):
                raise _failed("ibv_detach_mcast", errno.EINVAL)


def _is_group(gid: bytes) -> bool:
    """Whether a GID names a multicast group, of IPv6 or of IPv4 (224.0.0.0/4)."""
    return gid[0] == 0xFF or (gid[:12] == _IPV4_MAPPED and gid[12] >> 4 == 0xE)


_channels: dict[int, Channel] = {}
"""Completion channels, by file descriptor."""

# A pointer to a part of a struct does not keep the whole: these do.
_extended_cqs: dict[int, Any] = {}
"""The structs of extended CQs, by their handle."""
_xrcds: dict[int, Any] = {}
"""The structs of XRC domains, by their handle."""
_domains: dict[tuple[int, int], XRCDomain] = {}
"""XRC domains that a file names, by its inode."""


def _domain_of(xrcd: Any) -> XRCDomain:
    domain: XRCDomain = _objects[ffi.cast("struct rp_soft_xrcd *", xrcd).handle]
    return domain


def _find_domain(init: Any) -> XRCDomain:
    """Return the XRC domain that is to be opened, or a new one (ibv_open_xrcd(3))."""
    if init.fd == -1:
        return XRCDomain(None)
    try:
        status = os.fstat(init.fd)
    except OSError as error:
        raise _failed("ibv_open_xrcd", error.errno or errno.EBADF) from None
    inode = status.st_dev, status.st_ino
    if inode in _domains:
        if init.oflags & os.O_EXCL:
            raise _failed("ibv_open_xrcd", errno.EINVAL, "the file has an XRC domain already")
    elif not init.oflags & os.O_CREAT:
        raise _failed("ibv_open_xrcd", errno.EAGAIN, "the file has no XRC domain; give O_CREAT")
    else:
        _domains[inode] = XRCDomain(inode)
    return _domains[inode]


# ---- data verbs --------------------------------------------------------------


class _Refused(Exception):
    """A work request that the device does not take."""

    def __init__(self, code: int) -> None:
        self.errno = code


def _read_sges(raw: Any, at: int, count: int) -> Any:
    """Read the SGEs of a record: (addr, length, lkey) each."""
    if count == 1:
        return (_SGE.unpack_from(raw, at),)
    return tuple(_SGE.iter_unpack(raw[at : at + count * _SGE.size]))


def _add_sends(qp: QueuePair, records: Any, size: int, count: int) -> int:
    """Put send work requests on the queue; return what soft_send returns."""
    raw, at, taken = ffi.buffer(records, size), 0, 0
    faults = qp.context.faults
    try:
        while taken < count:
            if faults.posts and (code := faults.errno_of_post()):
                raise _Refused(code)
            wr_id, num_sge, opcode, flags, imm = _SEND_HEAD.unpack_from(raw, at)
            if not 0 <= num_sge <= qp.sq.max_sge:
                raise _Refused(errno.EINVAL)
            wqe = SendWQE(wr_id, _OPCODES.get(opcode, opcode), flags, imm)
            record, at = at, at + _SEND_SIZE
            if num_sge:
                wqe.sges = _read_sges(raw, at, num_sge)
                at += num_sge * _SGE.size
            if opcode != _SEND or flags & _INLINE or not qp.reads_only_the_head:
                _read_more(qp, wqe, raw, record, records)
            if code := qp.post_send(wqe):
                raise _Refused(code)
            taken += 1
    except _Refused as refused:
        return refused.errno << 32 | taken
    return taken


def _read_more(qp: QueuePair, wqe: SendWQE, raw: Any, at: int, records: Any) -> None:
    """Read what depends on the opcode, the flags and the type of the queue pair."""
    opcode, flags, union = wqe.opcode, wqe.flags, at + _UNION_AT
    if flags & _INLINE:
        if sum(length for _, length, _ in wqe.sges) > qp.max_inline:
            raise _Refused(errno.EINVAL)
        wqe.inline = b"".join(
            ffi.buffer(ffi.cast("char *", addr), length) for addr, length, _ in wqe.sges
        )
        wqe.sges = ()
    if opcode in _REMOTE:
        wqe.remote_addr, wqe.rkey = _RDMA.unpack_from(raw, union)
    elif opcode in _ATOMICS:
        wqe.remote_addr, wqe.compare_add, wqe.swap, wqe.rkey = _ATOMIC.unpack_from(raw, union)
    elif opcode in _DATAGRAM and qp.type is QPType.UD:
        ah, wqe.remote_qpn, wqe.remote_qkey = _UD.unpack_from(raw, union)
        if not ah:
            raise _Refused(errno.EINVAL)
        wqe.ah = _objects[ffi.cast("struct ibv_ah *", ah).handle]
    elif opcode == Opcode.BIND_MW:
        bind = _struct(records, at).bind_mw
        if not bind.mw or not bind.bind_info.mr:
            raise _Refused(errno.EINVAL)
        info = bind.bind_info
        wqe.rkey = bind.rkey
        wqe.bind = (
            _objects[bind.mw.handle], _objects[info.mr.handle], info.addr, info.length,
            info.mw_access_flags,
        )  # fmt: skip
    if opcode == Opcode.TSO:
        tso = _struct(records, at).tso
        if tso.hdr_sz > qp.max_tso_header or (tso.hdr_sz and not tso.hdr):
            raise _Refused(errno.EINVAL)
        wqe.hdr = bytes(ffi.buffer(ffi.cast("char *", tso.hdr), tso.hdr_sz))
        wqe.mss = tso.mss
    if qp.type is QPType.XRC_SEND:
        (wqe.remote_srqn,) = _UINT32.unpack_from(raw, at + _SRQN_AT)


def _struct(records: Any, at: int) -> Any:
    """Return the struct of a record, for its less usual parts."""
    return ffi.cast("struct ibv_send_wr *", records + at)


def _guarded(error: int) -> Callable[[Any, Any, Any], Any]:
    """Make what a callback returns when it raised; the exception is kept to be told."""

    def onerror(kind: Any, value: BaseException, trace: Any) -> int:
        _device.report(value.with_traceback(trace))
        return _told(error)

    return onerror


@ffi.def_extern(onerror=_guarded(errno.EIO << 32))  # type: ignore[untyped-decorator]
def soft_send(qp_num: int, records: Any, size: int, count: int) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        qp = _device.qps[qp_num]
        result = _add_sends(qp, records, size, count)
        requester.run(qp)
    return _told(result)


def _add_receives(queue: WorkQueue, records: Any, size: int, count: int) -> int:
    """Put receive work requests on a queue; return what soft_recv returns."""
    raw, at, taken = ffi.buffer(records, size), 0, 0
    while taken < count:
        wr_id, num_sge = _RECV.unpack_from(raw, at)
        if not 0 <= num_sge <= queue.max_sge:
            return errno.EINVAL << 32 | taken
        at += _RECV.size
        if code := queue.add(RecvWQE(wr_id, _read_sges(raw, at, num_sge))):
            return code << 32 | taken
        at += num_sge * _SGE.size
        taken += 1
    return taken


@ffi.def_extern(onerror=_guarded(errno.EIO << 32))  # type: ignore[untyped-decorator]
def soft_recv(qp_num: int, records: Any, size: int, count: int) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        qp = _device.qps[qp_num]
        if qp.state is QPState.RESET or qp.srq is not None:
            result = errno.EINVAL << 32
        else:
            result = _add_receives(qp.rq, records, size, count)
            if qp.state is QPState.ERR:
                qp.flush_receives()
    return _told(result)


@ffi.def_extern(onerror=_guarded(errno.EIO << 32))  # type: ignore[untyped-decorator]
def soft_srq_recv(handle: int, records: Any, size: int, count: int) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        srq: SharedReceiveQueue = _objects[handle]
        result = _add_receives(srq.queue, records, size, count)
    return _told(result)


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_post_srq_ops(srq_struct: Any, op: Any, bad_op: Any) -> int:
    code = 0
    with _lock:
        if _device.parked:
            _device.progress()
        matching: tags.MatchingList | None = _objects[srq_struct.handle].tags
        while op:
            code = errno.EINVAL
            if matching is not None:
                wqe = _read_op(matching, op)
                code = errno.EINVAL if wqe is None else matching.post(wqe)
            if code:
                bad_op[0] = op
                break
            if wqe is not None and wqe.opcode == OpsOpcode.TAG_ADD:
                op.tm.handle = wqe.handle
            op = op.next
    return _told(code)


def _read_op(matching: tags.MatchingList, op: Any) -> tags.TagWQE | None:
    """Read a tag-matching operation; None where its SGEs cannot be."""
    wr_id, opcode, flags, count, handle, recv_wr_id, num_sge, tag, mask = _OPS.unpack_from(
        ffi.buffer(op)
    )
    wqe = tags.TagWQE(wr_id, opcode, flags, count, handle)
    if opcode == OpsOpcode.TAG_ADD:
        if not 0 <= num_sge <= matching.slots.max_sge:
            return None
        wqe.recv_wr_id, wqe.tag, wqe.mask = recv_wr_id, tag, mask
        wqe.sges = _read_sges(ffi.buffer(op.tm.add.sg_list, num_sge * _SGE.size), 0, num_sge)
    return wqe


@ffi.def_extern(onerror=_guarded(-1))  # type: ignore[untyped-decorator]
def soft_poll_cq(cq_struct: Any, most: int, wc: Any) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        cq: CompletionQueue = _objects[cq_struct.handle]
        if not cq.entries:
            return _told(0)
        entries = cq.poll(most)
        raw = ffi.buffer(wc, len(entries) * _WC.size)
        at = 0
        for fields, _, _, _, _ in entries:
            _pack_wc(raw, at, *fields)
            at += _WC_SIZE
    return _told(len(entries))


@ffi.def_extern(onerror=_guarded(-1))  # type: ignore[untyped-decorator]
def soft_fill_cq(cq_struct: Any, most: int, wc: Any, tm: Any) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        entries = _objects[cq_struct.handle].poll(most)
        if entries:
            raw = ffi.buffer(wc, len(entries) * _WC.size)
            infos = ffi.buffer(tm, len(entries) * _TM_INFO.size)
            for index, (fields, _, _, _, tm_info) in enumerate(entries):
                _WC.pack_into(raw, index * _WC.size, *fields)
                _TM_INFO.pack_into(infos, index * _TM_INFO.size, *tm_info)
    return _told(len(entries))


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_req_notify_cq(cq_struct: Any, solicited_only: int) -> int:
    with _lock:
        _objects[cq_struct.handle].arm(bool(solicited_only))
    return 0
