"""The control verbs of the soft device, behind the C structs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any

from ..._binding import address_of, ffi, lib, native
from ...enums import (
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
from ...errors import VerbsError
from ...posting.rules import MAX_MSG_SIZE
from ..base import DeviceInfo, GIDEntry
from . import queues
from .engine import tags
from .engine.completion import Channel, CompletionQueue
from .engine.device import OpenDevice
from .engine.faults import FaultPlan
from .engine.memory import ProtectionDomain, Region
from .engine.offload import MAX_TSO
from .queues import MAX_QP_WR, MAX_SGE, MAX_SRQ_WR
from .state import bound, context_of, contexts, device, drop, keep, table, verb

VENDOR_ID = 0x50F700
"""An OUI that the IEEE has not assigned to any vendor."""
MAX_CQE = 1 << 20
_TM_CAP_RC = 1
MAX_RD_ATOMIC = 16
PKEY = 0xFFFF

_CAPS = (
    DeviceCap.RC_RNR_NAK_GEN
    | DeviceCap.MEM_WINDOW
    | DeviceCap.MEM_WINDOW_TYPE_2B
    | DeviceCap.MEM_MGT_EXTENSIONS
    | DeviceCap.XRC
    | DeviceCap.UD_IP_CSUM
    | DeviceCap.RAW_IP_CSUM
    | DeviceCap.RAW_MULTI
    | DeviceCap.PORT_ACTIVE_EVENT
    | DeviceCap.SYS_IMAGE_GUID
    | DeviceCap.SRQ_RESIZE
    | DeviceCap.CURR_QP_STATE_MOD
)

_DEVICE_ATTR = {
    "max_mr_size": 1 << 62,
    "page_size_cap": 0xFFFFF000,
    "vendor_id": VENDOR_ID,
    "vendor_part_id": 1,
    "hw_ver": 1,
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


_channels: dict[int, Channel] = table()
"""Completion channels, by file descriptor."""


class SoftProvider:
    """The soft device's control verbs."""

    kind = "soft"
    spin_ns = 0

    # ---- devices ------------------------------------------------------------

    def list_devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(device.name, self.kind, device.guid, NodeType.CA, "")]

    def found_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(name)

    @verb
    def open_device(name: str) -> Any:
        whole = ffi.new("struct verbs_context *")
        context = lib.rp_soft_context_init(whole)
        try:
            opened = OpenDevice(device, whole)
        except OSError as error:
            raise VerbsError("ibv_open_device", error.errno or errno.EIO) from None
        context.async_fd = opened.events.fd
        device.event_queues |= {opened.events}
        contexts[address_of(context)] = opened
        return context

    @verb
    def close_device(context: Any) -> None:
        events = context_of(context, "ibv_close_device").events
        device.event_queues -= {events}
        events.close()
        del contexts[address_of(context)]

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> FaultPlan:
        opened = context_of(context, "faults")
        opened.faults.wr_id_of = wr_id_of
        return opened.plan

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

    @verb
    def get_async_event(context: Any, events: dict[object, Any]) -> None:
        event = context_of(context, "ibv_get_async_event").events.take()
        if event is not None:
            native.on_commit(events.__setitem__, object(), event)

    def read_async_event(self, event: tuple[int, Any]) -> tuple[int, Any]:
        return event

    # ---- memory -------------------------------------------------------------

    @verb
    def alloc_pd(context: Any) -> Any:
        context_of(context, "ibv_alloc_pd")
        pd = ffi.new("struct ibv_pd *")
        pd.context = context
        return keep(pd, ProtectionDomain())

    @verb
    def dealloc_pd(pd: Any) -> None:
        drop(pd, "ibv_dealloc_pd")

    @verb
    def reg_mr(pd: Any, addr: Any, length: int, access: int) -> Any:
        domain = bound(pd, "ibv_reg_mr")
        mr = ffi.new("struct ibv_mr *")
        mr.context, mr.pd, mr.addr, mr.length = pd.context, pd, addr, length
        start = 0 if access & Access.ZERO_BASED else address_of(addr)
        memory = memoryview(ffi.buffer(ffi.cast("char *", addr), length))
        region = device.memory.register(domain, start, memory, access)
        mr.lkey, mr.rkey = region.lkey, region.rkey
        return keep(mr, region)

    @verb
    def dereg_mr(mr: Any) -> None:
        region: Region = bound(mr, "ibv_dereg_mr")
        if region.windows:
            many = region.windows
            windows = "a memory window is" if many == 1 else f"{many} memory windows are"
            reason = f"{windows} bound to it; invalidate or close first"
            raise VerbsError("ibv_dereg_mr", errno.EBUSY, reason)
        device.memory.deregister(region)
        drop(mr, "ibv_dereg_mr")

    @verb
    def alloc_mw(pd: Any, mw_type: int) -> Any:
        domain = bound(pd, "ibv_alloc_mw")
        mw = ffi.new("struct ibv_mw *")
        mw.context, mw.pd, mw.type = pd.context, pd, mw_type
        window = device.memory.allocate_window(domain, MWType(mw_type))
        mw.rkey = window.rkey
        return keep(mw, window)

    @verb
    def dealloc_mw(mw: Any) -> None:
        device.memory.deallocate_window(drop(mw, "ibv_dealloc_mw"))

    # ---- completions --------------------------------------------------------

    @verb
    def create_comp_channel(context: Any) -> Any:
        context_of(context, "ibv_create_comp_channel")
        channel = ffi.new("struct ibv_comp_channel *")
        channel.context = context
        try:
            made = Channel(device)
        except OSError as error:
            raise VerbsError("ibv_create_comp_channel", error.errno or errno.EIO) from None
        channel.fd = made.fd
        device.channels |= {made}
        _channels[made.fd] = made
        return channel

    @verb
    def destroy_comp_channel(channel: Any) -> None:
        made = _channel_of(channel, "ibv_destroy_comp_channel")
        if made.users:
            reason = f"{made.users} CQs use it"
            raise VerbsError("ibv_destroy_comp_channel", errno.EBUSY, reason)
        del _channels[channel.fd]
        device.channels -= {made}
        made.close()

    @verb
    def create_cq(context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        cq = ffi.new("struct ibv_cq *")
        return _create_cq("ibv_create_cq", cq, context, cqe, channel, comp_vector)

    @verb
    def create_cq_ex(context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        whole = ffi.new("struct rp_soft_cq_ex *")
        lib.rp_soft_cq_ex_init(whole)
        cq = ffi.cast("struct ibv_cq *", ffi.addressof(whole, "cq"))
        return _create_cq("ibv_create_cq_ex", cq, context, cqe, channel, comp_vector, whole)

    @verb
    def destroy_cq(cq: Any) -> None:
        made: CompletionQueue = bound(cq, "ibv_destroy_cq")
        if made.users:
            raise VerbsError("ibv_destroy_cq", errno.EBUSY, f"{made.users} queues complete on it")
        if made.channel is not None:
            made.channel.forget(made)
            made.channel.users -= 1
        made.events.forget(made.handle)
        drop(cq, "ibv_destroy_cq")

    @verb
    def has_overrun(cq: Any) -> bool:
        made: CompletionQueue = bound(cq, "ibv_poll_cq")
        return made.overrun

    @verb
    def get_cq_event(channel: Any, events: dict[int, None]) -> bool | None:
        made = _channel_of(channel, "ibv_get_cq_event").take()
        if made is None:
            return None
        native.on_commit(events.__setitem__, address_of(made.handle), None)
        return True

    # ---- queues -------------------------------------------------------------

    create_srq = queues.create_srq
    create_srq_ex = queues.create_srq_ex
    get_srq_num = queues.get_srq_num
    modify_srq = queues.modify_srq
    query_srq = queues.query_srq
    destroy_srq = queues.destroy_srq
    open_xrcd = queues.open_xrcd
    close_xrcd = queues.close_xrcd
    create_qp = queues.create_qp
    create_qp_ex = queues.create_qp_ex
    modify_qp = queues.modify_qp
    query_qp = queues.query_qp
    sends_for_receive = queues.sends_for_receive
    destroy_qp = queues.destroy_qp
    create_ah = queues.create_ah
    destroy_ah = queues.destroy_ah
    attach_mcast = queues.attach_mcast
    detach_mcast = queues.detach_mcast


def _create_cq(
    name: str, cq: Any, context: Any, cqe: int, channel: Any, comp_vector: int, whole: Any = None
) -> Any:
    if not 1 <= cqe <= MAX_CQE or comp_vector:
        raise VerbsError(name, errno.EINVAL)
    events = context_of(context, name).events
    cq.context, cq.cqe = context, cqe
    behind = None
    if channel:
        cq.channel = channel
        behind = _channel_of(channel, name)
        behind.users += 1
    made = CompletionQueue(cqe, behind, events)
    made.handle = cq
    return keep(cq, made, whole)


def _channel_of(channel: Any, name: str) -> Channel:
    """Return the channel that a struct represents.

    Raises:
        VerbsError: the channel has been destroyed.
    """
    found = _channels.get(channel.fd)
    if found is None:
        raise VerbsError(name, errno.EINVAL, "the completion channel is destroyed")
    return found
