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
    PortState,
    QPAttrMask,
    QPType,
    SendFlags,
    SRQAttrMask,
    SRQType,
)
from ..errors import UnsupportedError, VerbsError
from ..rules import MAX_MSG_SIZE
from ..soft import requester
from ..soft.completion import Channel, CompletionQueue
from ..soft.datagram import AddressHandle
from ..soft.device import Device, OpenDevice
from ..soft.memory import ProtectionDomain, Region, Window
from ..soft.qp import QueuePair
from ..soft.queue import RecvWQE, SendWQE, SharedReceiveQueue, WorkQueue
from ..states import FIELDS
from .base import DeviceInfo, GIDEntry

__all__ = ["SoftProvider"]

_log = logging.getLogger("rdmapost.soft")

MAX_QP_WR = 16384
MAX_SGE = 32
MAX_INLINE = 1024
MAX_CQE = 1 << 20
MAX_SRQ_WR = 16384
MAX_TSO = 1 << 18
MAX_TSO_HEADER = 512
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
_UNION_AT, _SRQN_AT = 40, 72

_SIGNED_MASK = 0xFFFF_FFFF
_INLINE = int(SendFlags.INLINE)
_OPCODES = {int(opcode): opcode for opcode in Opcode}
_ATOMICS = frozenset({Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD})
_REMOTE = frozenset({Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM, Opcode.RDMA_READ})
_DATAGRAM = frozenset({Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.TSO})

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
    _tell()


def _tell() -> None:
    while _device.errors:
        error = _device.errors.pop()
        if isinstance(error, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            _log.error("the soft device failed; the work request did too", exc_info=error)


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

    # ---- devices ------------------------------------------------------------

    def list_devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(_device.name, self.kind, _device.guid, NodeType.CA, "")]

    def open_device(self, name: str) -> Any:
        ops = ffi.new("struct rp_soft_ops *")
        for call in (
            "post_send", "post_recv", "post_srq_recv", "post_srq_ops", "poll_cq", "req_notify_cq",
        ):  # fmt: skip
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

    def faults(self, context: Any) -> Any:
        return _device.faults

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
        caps.max_rndv_hdr_size, caps.max_num_tags, caps.flags = 64, 127, 1
        caps.max_ops, caps.max_sge = 1024, MAX_SGE

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
            region = _device.memory.register(_objects[pd.handle], start, length, access)
        region.base = ffi.cast("char *", addr)
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
        wqe.rkey = window.rkey & ~0xFF | (window.rkey + 1) & 0xFF
        with _verb():
            target = _device.qps[qp.qp_num]
            if code := target.post_send(wqe):
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
        cq = ffi.new("struct ibv_cq *")
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

    def get_cq_event(self, channel: Any) -> Any:
        with _verb():
            _device.progress()
            made = _channels[channel.fd].take()
        return None if made is None else made.handle

    def ack_cq_events(self, cq: Any, count: int) -> None:
        pass

    # ---- shared receive queues ----------------------------------------------

    def create_srq(self, pd: Any, init: Any) -> Any:
        return self._create_srq(pd.context, pd, init.attr)

    def create_srq_ex(self, context: Any, init: Any) -> Any:
        if init.srq_type == SRQType.TM:
            raise UnsupportedError("ibv_create_srq_ex", errno.EOPNOTSUPP)
        srq = self._create_srq(context, init.pd, init.attr)
        made: SharedReceiveQueue = _objects[srq.handle]
        if init.srq_type == SRQType.XRC:
            made.xrcd = _objects[init.xrcd.handle] if init.xrcd else None
        if init.cq:
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
            del _device.srqs[made.number], _objects[srq.handle]

    def open_xrcd(self, context: Any, init: Any) -> Any:
        xrcd = ffi.new("struct rp_soft_xrcd *")
        xrcd.xrcd.context = context
        _keep(xrcd, xrcd)
        return ffi.addressof(xrcd, "xrcd")

    def close_xrcd(self, xrcd: Any) -> None:
        raise UnsupportedError("ibv_close_xrcd", errno.EOPNOTSUPP)

    # ---- queue pairs --------------------------------------------------------

    def create_qp(self, pd: Any, init: Any) -> Any:
        return self._create_qp(pd.context, pd, init)

    def _create_qp(self, context: Any, pd: Any, init: Any) -> Any:
        cap = init.cap
        wrs_fit = max(cap.max_send_wr, cap.max_recv_wr) <= MAX_QP_WR
        sges_fit = max(cap.max_send_sge, cap.max_recv_sge) <= MAX_SGE
        if not wrs_fit or not sges_fit or cap.max_inline_data > MAX_INLINE:
            raise _failed("ibv_create_qp", errno.EINVAL)
        qp = ffi.new("struct ibv_qp *")
        qp.context, qp.pd, qp.qp_type = context, pd, init.qp_type
        qp.send_cq, qp.recv_cq, qp.srq = init.send_cq, init.recv_cq, init.srq
        srq = _objects[init.srq.handle] if init.srq else None
        send_cq, recv_cq = _objects[init.send_cq.handle], _objects[init.recv_cq.handle]
        with _lock:
            made = QueuePair(
                _device, _context_of(context), next(_device.numbers) & 0xFFFFFF,
                QPType(init.qp_type), _objects[pd.handle], send_cq, recv_cq, srq,
                WorkQueue(cap.max_send_wr, cap.max_send_sge),
                WorkQueue(cap.max_recv_wr, cap.max_recv_sge),
                cap.max_inline_data, bool(init.sq_sig_all),
            )  # fmt: skip
            made.handle = qp
            _device.qps[made.number] = made
            for user in (send_cq, recv_cq, srq):
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
            for group in _device.groups.values():
                group.discard(made)
            for user in (made.send_cq, made.recv_cq, made.srq):
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
            if made.type is not QPType.UD or gid[0] != 0xFF:
                raise _failed("ibv_attach_mcast", errno.EINVAL)
            _device.groups.setdefault(gid, set()).add(made)

    def detach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        with _lock:
            group = _device.groups.get(gid, set())
            made: QueuePair = _objects[qp.handle]
            if made not in group:
                raise _failed("ibv_detach_mcast", errno.EINVAL)
            group.discard(made)


_channels: dict[int, Channel] = {}
"""Completion channels, by file descriptor."""


# ---- data verbs --------------------------------------------------------------


def _sges(wr: Any, count: int) -> list[tuple[int, int, int]]:
    return list(_SGE.iter_unpack(ffi.buffer(wr.sg_list, count * 16))) if count else []


def _read_send(qp: QueuePair, wr: Any) -> tuple[SendWQE | None, int]:
    """Read a send work request; return it, or None and an errno."""
    raw = ffi.buffer(wr)
    wr_id, num_sge, opcode, flags, imm = _SEND_HEAD.unpack_from(raw)
    if not 0 <= num_sge <= qp.sq.max_sge:
        return None, errno.EINVAL
    wqe = SendWQE(wr_id, _OPCODES.get(opcode, opcode), flags, imm)
    if num_sge:
        wqe.sges = _sges(wr, num_sge)
    if flags & _INLINE:
        if sum(length for _, length, _ in wqe.sges) > qp.max_inline:
            return None, errno.EINVAL
        data = b"".join(
            bytes(ffi.buffer(ffi.cast("char *", addr), length)) for addr, length, _ in wqe.sges
        )
        wqe.inline = ffi.from_buffer(data)
        wqe.sges = ()
    if opcode in _REMOTE:
        wqe.remote_addr, wqe.rkey = _RDMA.unpack_from(raw, _UNION_AT)
    elif opcode in _ATOMICS:
        (wqe.remote_addr, wqe.compare_add, wqe.swap, wqe.rkey) = _ATOMIC.unpack_from(raw, _UNION_AT)
    elif opcode in _DATAGRAM and qp.type is QPType.UD:
        ah, wqe.remote_qpn, wqe.remote_qkey = _UD.unpack_from(raw, _UNION_AT)
        if not ah:
            return None, errno.EINVAL
        wqe.ah = _objects[wr.wr.ud.ah.handle]
    elif opcode == Opcode.BIND_MW:
        bind = wr.bind_mw
        if not bind.mw or not bind.bind_info.mr:
            return None, errno.EINVAL
        info = bind.bind_info
        wqe.rkey = bind.rkey
        wqe.bind = (
            _objects[bind.mw.handle], _objects[info.mr.handle], info.addr, info.length,
            info.mw_access_flags,
        )  # fmt: skip
    if opcode == Opcode.TSO:
        tso = wr.tso
        if tso.hdr_sz > MAX_TSO_HEADER or (tso.hdr_sz and not tso.hdr):
            return None, errno.EINVAL
        wqe.hdr = bytes(ffi.buffer(ffi.cast("char *", tso.hdr), tso.hdr_sz))
        wqe.mss = tso.mss
    if qp.type is QPType.XRC_SEND:
        wqe.remote_srqn = wr.qp_type.xrc.remote_srqn
    return wqe, 0


def _guarded(error: int) -> Callable[[Any, Any, Any], Any]:
    """Make what a callback returns when it raised; the exception is kept to be told."""

    def onerror(kind: Any, value: BaseException, trace: Any) -> int:
        _device.report(value.with_traceback(trace))
        _tell()
        return error

    return onerror


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_post_send(qp_struct: Any, wr: Any, bad_wr: Any) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        qp = _device.qps[qp_struct.qp_num]
        code = 0
        while wr:
            code = _device.faults.errno_of_post()
            if not code:
                wqe, code = _read_send(qp, wr)
                if wqe is not None:
                    code = qp.post_send(wqe)
            if code:
                bad_wr[0] = wr
                break
            wr = wr.next
        requester.run(qp)
    if _device.errors:
        _tell()
    return code


def _post_receives(post: Callable[[RecvWQE], int], max_sge: int, wr: Any, bad_wr: Any) -> int:
    code = 0
    with _lock:
        if _device.parked:
            _device.progress()
        while wr:
            count = wr.num_sge
            code = errno.EINVAL
            if 0 <= count <= max_sge:
                code = post(RecvWQE(wr.wr_id, _sges(wr, count)))
            if code:
                bad_wr[0] = wr
                break
            wr = wr.next
    if _device.errors:
        _tell()
    return code


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_post_recv(qp_struct: Any, wr: Any, bad_wr: Any) -> int:
    qp = _device.qps[qp_struct.qp_num]
    return _post_receives(qp.post_recv, qp.rq.max_sge, wr, bad_wr)


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_post_srq_recv(srq_struct: Any, wr: Any, bad_wr: Any) -> int:
    srq: SharedReceiveQueue = _objects[srq_struct.handle]
    return _post_receives(srq.post_recv, srq.queue.max_sge, wr, bad_wr)


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_post_srq_ops(srq_struct: Any, op: Any, bad_op: Any) -> int:
    bad_op[0] = op
    return errno.EOPNOTSUPP


@ffi.def_extern(onerror=_guarded(-1))  # type: ignore[untyped-decorator]
def soft_poll_cq(cq_struct: Any, most: int, wc: Any) -> int:
    with _lock:
        if _device.parked:
            _device.progress()
        entries = _objects[cq_struct.handle].poll(most)
        if entries:
            raw = ffi.buffer(wc, len(entries) * _WC.size)
            at = 0
            for entry in entries:
                _WC.pack_into(raw, at, *entry.fields)
                at += _WC.size
    if _device.errors:
        _tell()
    return len(entries)


@ffi.def_extern(onerror=_guarded(errno.EIO))  # type: ignore[untyped-decorator]
def soft_req_notify_cq(cq_struct: Any, solicited_only: int) -> int:
    with _lock:
        _objects[cq_struct.handle].arm(bool(solicited_only))
    return 0
