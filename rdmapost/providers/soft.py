"""The control verbs of the soft device, behind the C structs."""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
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
    SRQAttrMask,
    SRQType,
)
from ..errors import UnsupportedError, VerbsError
from ..rules import MAX_MSG_SIZE, OPCODES_BY_QP_TYPE
from ..soft import requester, tags
from ..soft.completion import Channel, CompletionQueue
from ..soft.datagram import AddressHandle
from ..soft.device import OpenDevice
from ..soft.faults import FaultPlan
from ..soft.memory import ProtectionDomain, Region, Window
from ..soft.offload import MAX_TSO
from ..soft.qp import QueuePair
from ..soft.queue import SendWQE, SharedReceiveQueue, WorkQueue, XRCDomain
from ..states import FIELDS
from .base import DeviceInfo, GIDEntry
from .soft_data import DATA_VERBS
from .soft_state import device, keep, lock, objects, tell

__all__ = ["SoftProvider"]

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


def _failed(call: str, code: int, hint: str = "") -> VerbsError:
    return VerbsError(call, code, hint)


@contextlib.contextmanager
def _verb() -> Iterator[None]:
    """Hold the device's lock for a control verb, and tell what went wrong inside."""
    with lock:
        yield
    if tell():
        _thread.interrupt_main()


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
        return [DeviceInfo(device.name, self.kind, device.guid, NodeType.CA, "")]

    def open_device(self, name: str) -> Any:
        ops = ffi.new("struct rp_soft_ops *")
        for call in DATA_VERBS:
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
        owned: bool = lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def query_device(self, context: Any, attr: Any) -> None:
        for name, value in _DEVICE_ATTR.items():
            setattr(attr, name, value)
        attr.fw_ver = b"soft"
        attr.node_guid = attr.sys_image_guid = int.from_bytes(device.guid.to_bytes(8), "little")

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
        attr.max_mtu, attr.active_mtu = MTU.MTU_4096, device.port_mtu
        attr.gid_tbl_len, attr.pkey_tbl_len = len(device.gids), 1
        attr.max_msg_sz = MAX_MSG_SIZE
        attr.phys_state, attr.link_layer = 5, LinkLayer.ETHERNET
        attr.active_speed, attr.active_width = 1, 1

    def query_gid_table(self, context: Any, port_num: int, length: int) -> list[GIDEntry]:
        return [GIDEntry(index, raw, GIDType.ROCE_V2, "") for index, raw in enumerate(device.gids)]

    def query_pkey(self, context: Any, port_num: int, index: int) -> int:
        if index:
            raise _failed("ibv_query_pkey", errno.EINVAL)
        return PKEY

    def get_async_event(self, context: Any) -> tuple[int, Any] | None:
        with lock:
            return _context_of(context).events.take()

    # ---- memory -------------------------------------------------------------

    def alloc_pd(self, context: Any) -> Any:
        pd = ffi.new("struct ibv_pd *")
        pd.context = context
        return keep(pd, ProtectionDomain())

    def dealloc_pd(self, pd: Any) -> None:
        del objects[pd.handle]

    def reg_mr(self, pd: Any, addr: Any, length: int, access: int) -> Any:
        mr = ffi.new("struct ibv_mr *")
        mr.context, mr.pd, mr.addr, mr.length = pd.context, pd, addr, length
        start = 0 if access & Access.ZERO_BASED else int(ffi.cast("uintptr_t", addr))
        with lock:
            memory = memoryview(ffi.buffer(ffi.cast("char *", addr), length))
            region = device.memory.register(objects[pd.handle], start, memory, access)
        mr.lkey, mr.rkey = region.lkey, region.rkey
        return keep(mr, region)

    def dereg_mr(self, mr: Any) -> None:
        with lock:
            region: Region = objects[mr.handle]
            if region.windows:
                raise _failed(
                    "ibv_dereg_mr", errno.EBUSY,
                    f"{region.windows} memory windows are bound to it; invalidate them first",
                )  # fmt: skip
            device.memory.deregister(region)
            del objects[mr.handle]

    def alloc_mw(self, pd: Any, mw_type: int) -> Any:
        mw = ffi.new("struct ibv_mw *")
        mw.context, mw.pd, mw.type = pd.context, pd, mw_type
        with lock:
            window = device.memory.allocate_window(objects[pd.handle], MWType(mw_type))
        mw.rkey = window.rkey
        return keep(mw, window)

    def dealloc_mw(self, mw: Any) -> None:
        with lock:
            device.memory.deallocate_window(objects.pop(mw.handle))

    def bind_mw(self, qp: Any, mw: Any, bind: Any) -> None:
        window: Window = objects[mw.handle]
        if window.type is not MWType.TYPE_1:
            raise _failed("ibv_bind_mw", errno.EINVAL, "only a window of type 1 is bound this way")
        info = bind.bind_info
        wqe = SendWQE(bind.wr_id, Opcode.BIND_MW, bind.send_flags, 0)
        region = objects[info.mr.handle] if info.mr != ffi.NULL else None
        wqe.bind = (window, region, info.addr, info.length, info.mw_access_flags)
        wqe.rkey = mw.rkey & ~0xFF | (mw.rkey + 1) & 0xFF
        with _verb():
            target = device.qps[qp.qp_num]
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
            made = Channel(device)
        except OSError as error:
            raise _failed("ibv_create_comp_channel", error.errno or errno.EIO) from None
        channel.fd = made.fd
        with lock:
            device.channels.add(made)
        _channels[made.fd] = made
        return channel

    def destroy_comp_channel(self, channel: Any) -> None:
        with lock:
            made = _channels.pop(channel.fd)
            device.channels.discard(made)
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
        return keep(cq, made)

    def destroy_cq(self, cq: Any) -> None:
        with lock:
            made: CompletionQueue = objects[cq.handle]
            if made.users:
                raise _failed("ibv_destroy_cq", errno.EBUSY)
            if made.channel is not None:
                events = made.channel.events
                while made in events:
                    events.remove(made)
            del objects[cq.handle]
            _extended_cqs.pop(cq.handle, None)

    def get_cq_event(self, channel: Any) -> Any:
        with _verb():
            device.progress()
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
        made: SharedReceiveQueue = objects[srq.handle]
        with lock:
            if kind == SRQType.XRC:
                made.xrcd = _domain_of(init.xrcd)
                made.xrcd.users += 1
            elif kind == SRQType.TM:
                made.tags = tags.MatchingList(made, cap.max_num_tags, cap.max_ops, MAX_SGE)
            if mask & _SRQ_CQ:
                made.cq = objects[init.cq.handle]
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
        with lock:
            made = SharedReceiveQueue(
                _context_of(context), objects[pd.handle], attr.max_wr, attr.max_sge,
                next(device.numbers),
            )  # fmt: skip
            made.handle = srq
            device.srqs[made.number] = made
        return keep(srq, made)

    def get_srq_num(self, srq: Any) -> int:
        number: int = objects[srq.handle].number
        return number

    def modify_srq(self, srq: Any, attr: Any, mask: int) -> None:
        with lock:
            made: SharedReceiveQueue = objects[srq.handle]
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
        made: SharedReceiveQueue = objects[srq.handle]
        attr.max_wr, attr.max_sge = made.queue.depth, made.queue.max_sge
        attr.srq_limit = made.limit

    def destroy_srq(self, srq: Any) -> None:
        with lock:
            made: SharedReceiveQueue = objects[srq.handle]
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
            del device.srqs[made.number], objects[srq.handle]

    def open_xrcd(self, context: Any, init: Any) -> Any:
        with lock:
            domain = _find_domain(init)
            domain.opened += 1
        # Two opens of one domain are two structs, and both stand for it.
        xrcd = ffi.new("struct rp_soft_xrcd *")
        xrcd.xrcd.context = context
        keep(xrcd, domain)
        _xrcds[xrcd.handle] = xrcd
        return ffi.addressof(xrcd, "xrcd")

    def close_xrcd(self, xrcd: Any) -> None:
        with lock:
            domain = _domain_of(xrcd)
            if domain.opened == 1:
                if domain.users:
                    raise _failed("ibv_close_xrcd", errno.EBUSY)
                if domain.inode is not None:
                    del _domains[domain.inode]
            domain.opened -= 1
            handle = ffi.cast("struct rp_soft_xrcd *", xrcd).handle
            del objects[handle], _xrcds[handle]

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
        objects[qp.handle].max_tso_header = header
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
        srq = objects[init.srq.handle] if init.srq else None
        if srq is not None and srq.tags is not None and init.qp_type != QPType.RC:
            raise _failed("ibv_create_qp", errno.EINVAL, "tag matching is for RC")
        # An XRC queue pair lacks one of them, or both.
        send_cq, recv_cq = (
            objects[cq.handle] if cq else CompletionQueue(1, None)
            for cq in (init.send_cq, init.recv_cq)
        )
        with lock:
            made = QueuePair(
                device, _context_of(context), next(device.numbers) & 0xFFFFFF,
                QPType(init.qp_type), objects[pd.handle] if pd else ProtectionDomain(),
                send_cq, recv_cq, srq,
                WorkQueue(cap.max_send_wr, cap.max_send_sge),
                WorkQueue(cap.max_recv_wr, cap.max_recv_sge),
                cap.max_inline_data, bool(init.sq_sig_all),
            )  # fmt: skip
            made.handle, made.xrcd = qp, domain
            device.qps[made.number] = made
            for user in (send_cq, recv_cq, srq, domain):
                if user is not None:
                    user.users += 1
        qp.qp_num = made.number
        return keep(qp, made)

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
            made: QueuePair = objects[qp.handle]
            if code := made.modify(QPAttrMask(mask), attrs):
                raise _failed("ibv_modify_qp", code)
            qp.state = made.state
            requester.run(made)

    def query_qp(self, qp: Any, attr: Any, mask: int, init: Any) -> None:
        with lock:
            made: QueuePair = objects[qp.handle]
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
        with lock:
            made: QueuePair = objects.pop(qp.handle)
            made.drop_queues()
            for group in list(device.groups):
                device.detach(made, group)
            for user in (made.send_cq, made.recv_cq, made.srq, made.xrcd):
                if user is not None:
                    user.users -= 1
            del device.qps[made.number]

    def create_ah(self, pd: Any, attr: Any) -> Any:
        grh = attr.grh
        if not attr.is_global or attr.port_num != 1 or grh.sgid_index >= len(device.gids):
            raise _failed("ibv_create_ah", errno.EINVAL)
        ah = ffi.new("struct ibv_ah *")
        ah.context, ah.pd = pd.context, pd
        way = AddressHandle(
            device.gids[grh.sgid_index], bytes(grh.dgid.raw), attr.sl,
            grh.flow_label & 0xFFFFF, grh.hop_limit, grh.traffic_class,
        )  # fmt: skip
        return keep(ah, way)

    def destroy_ah(self, ah: Any) -> None:
        del objects[ah.handle]

    def attach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        with lock:
            made: QueuePair = objects[qp.handle]
            if made.type is not QPType.UD or not _is_group(gid):
                raise _failed("ibv_attach_mcast", errno.EINVAL)
            device.attach(made, gid)

    def detach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        with lock:
            if not device.detach(objects[qp.handle], gid):
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
    domain: XRCDomain = objects[ffi.cast("struct rp_soft_xrcd *", xrcd).handle]
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
