"""The control verbs of the soft device, behind the C structs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any

from .._binding import address_of, ffi, lib
from ..enums import (
    MTU,
    Access,
    AtomicCap,
    DeviceCap,
    GIDType,
    LinkLayer,
    MWType,
    NodeType,
    PortState,
    QPType,
)
from ..errors import VerbsError
from ..rules import MAX_MSG_SIZE
from ..soft import tags
from ..soft.completion import Channel, CompletionQueue
from ..soft.device import OpenDevice
from ..soft.faults import FaultPlan
from ..soft.memory import ProtectionDomain, Region
from ..soft.offload import MAX_TSO
from .base import DeviceInfo, GIDEntry
from .soft_data import DATA_VERBS
from .soft_queues import MAX_QP_WR, MAX_SGE, MAX_SRQ_WR, Queues
from .soft_state import OpenHandles, context_of, contexts, device, keep, lock, objects, verb

__all__ = ["SoftProvider"]

MAX_CQE = 1 << 20
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


_channels: dict[int, Channel] = {}
"""Completion channels, by file descriptor."""
_extended_cqs: dict[int, Any] = {}
"""The structs of extended CQs, by their handle: a pointer to a part does not keep the whole."""


class SoftProvider(Queues):
    """The soft device's control verbs."""

    kind = "soft"
    spin_ns = 0

    # ---- devices ------------------------------------------------------------

    def list_devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(device.name, self.kind, device.guid, NodeType.CA, "")]

    def found_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(name)

    def open_device(self, name: str) -> Any:
        ops = ffi.new("struct rp_soft_ops *")
        for call in DATA_VERBS:
            setattr(ops, call, getattr(lib, f"soft_{call}"))
        context = lib.rp_soft_open(ops)
        if context == ffi.NULL:
            raise VerbsError("ibv_open_device", ffi.errno)
        opened = OpenDevice()
        context.async_fd = opened.events.fd
        contexts[address_of(context)] = OpenHandles(opened, context)
        return context

    def close_device(self, context: Any) -> None:
        opened = contexts.pop(address_of(context)).opened
        opened.events.close()
        lib.rp_soft_close(context)

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> FaultPlan:
        opened = context_of(context)
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
            raise VerbsError("ibv_query_pkey", errno.EINVAL)
        return PKEY

    def get_async_event(self, context: Any, into: dict[object, Any]) -> None:
        with lock:
            context_of(context).events.take(into, object())

    def read_async_event(self, event: tuple[int, Any]) -> tuple[int, Any]:
        return event

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
        start = 0 if access & Access.ZERO_BASED else address_of(addr)
        with lock:
            memory = memoryview(ffi.buffer(ffi.cast("char *", addr), length))
            region = device.memory.register(objects[pd.handle], start, memory, access)
        mr.lkey, mr.rkey = region.lkey, region.rkey
        return keep(mr, region)

    def dereg_mr(self, mr: Any) -> None:
        with lock:
            region: Region = objects[mr.handle]
            if region.windows:
                raise VerbsError(
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

    # ---- completions --------------------------------------------------------

    def create_comp_channel(self, context: Any) -> Any:
        channel = ffi.new("struct ibv_comp_channel *")
        channel.context = context
        try:
            made = Channel(device)
        except OSError as error:
            raise VerbsError("ibv_create_comp_channel", error.errno or errno.EIO) from None
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
            raise VerbsError("ibv_create_cq", errno.EINVAL)
        return self._create_cq(ffi.new("struct ibv_cq *"), context, cqe, channel)

    def create_cq_ex(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        if not 1 <= cqe <= MAX_CQE or comp_vector:
            raise VerbsError("ibv_create_cq_ex", errno.EINVAL)
        whole = ffi.new("struct rp_soft_cq_ex *")
        lib.rp_soft_cq_ex_init(whole, lib.soft_fill_cq)
        extended = ffi.addressof(whole, "cq")
        cq = self._create_cq(ffi.cast("struct ibv_cq *", extended), context, cqe, channel)
        _extended_cqs[cq.handle] = whole
        return cq

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
                raise VerbsError("ibv_destroy_cq", errno.EBUSY)
            if made.channel is not None:
                events = made.channel.events
                while made in events:
                    events.remove(made)
            del objects[cq.handle]
            _extended_cqs.pop(cq.handle, None)

    def get_cq_event(self, channel: Any) -> Any:
        with verb():
            device.progress()
            made = _channels[channel.fd].take()
        return None if made is None else made.handle

    def drop_cq_event(self, channel: Any) -> None:
        self.get_cq_event(channel)

    def ack_cq_events(self, cq: Any, count: int) -> None:
        pass
