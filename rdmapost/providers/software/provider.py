"""The control verbs that the software devices share; they take and return C structs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any

from ..._arguments import counted
from ..._binding import address_of, ffi, lib, native, start_of
from ...enums import (
    MTU,
    Access,
    AdviseMRAdvice,
    AtomicCap,
    DeviceCap,
    GIDType,
    LinkLayer,
    MigState,
    MWType,
    NodeType,
    PortCap,
    PortState,
    QPAttrMask,
    ReregFlags,
    SRQAttrMask,
    TransportType,
    WCExFlags,
    WCFlags,
)
from ...errors import UnsupportedError, VerbsError, is_from_system
from ...standard.opcodes import CONSUMES_RECEIVE, MAX_MSG_SIZE
from ...standard.qp_states import FIELDS
from ...standard.wire import GRH_BYTES, IPV4, IPV4_MAPPED, IPV6
from ..base import DeviceInfo, GIDEntry
from ..fault_plan import FaultPlan
from . import completion
from .completion import Channel, CompletionQueue
from .create_queues import MAX_QP_WR, MAX_SGE, MAX_SRQ_WR, make_srq
from .device import Device, OpenDevice
from .device_queues import AddressHandle, SharedReceiveQueue
from .mapped_memory import check_mapped, map_dmabuf, may_shrink
from .memory import ProtectionDomain, Region
from .qp import ACCESS_FLAGS, QueuePair
from .state import bound, context_of, contexts, device_of, drop, keep, table, verb

VENDOR_ID = 0x50F700
"""An OUI that the IEEE has not assigned to any vendor."""
MAX_CQE = 1 << 20
_NOT_REPORTED = WCExFlags.WITH_CVLAN | WCExFlags.WITH_FLOW_TAG
"""Packets keep their VLAN tags, and no rule steers them."""
_TIMESTAMPS = WCExFlags.WITH_COMPLETION_TIMESTAMP | WCExFlags.WITH_COMPLETION_TIMESTAMP_WALLCLOCK
_CLOCK_KHZ = 1_000_000
"""The clock counts nanoseconds."""
_ADVICE = frozenset(AdviseMRAdvice)
_PREFETCH_WRITE = AdviseMRAdvice.PREFETCH_WRITE
MAX_RD_ATOMIC = 16
PKEY = 0xFFFF
_ANY_HOP_LIMIT = 0xFF

_LIMITS = {
    "max_mr_size": 1 << 62,
    "page_size_cap": 0xFFFFF000,
    "vendor_id": VENDOR_ID,
    "hw_ver": 1,
    "max_qp": 1 << 16,
    "max_qp_wr": MAX_QP_WR,
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


def open_context(device: Device) -> Any:
    """Open a device and return its context; call this inside a verb."""
    whole = ffi.new("struct verbs_context *")
    context = lib.rp_soft_context_init(whole)
    try:
        device.open()
        opened = OpenDevice(device, whole)
    except OSError as error:
        raise _failed("ibv_open_device", error) from None
    context.async_fd = opened.events.fd
    contexts[address_of(context)] = opened
    return context


def _failed(verb_name: str, error: OSError) -> OSError:
    """Return the exception that a verb raises after a system call has failed."""
    if not is_from_system(error):
        return error
    return VerbsError(verb_name, error.errno or errno.EIO)


class SoftwareProvider:
    """The control verbs that the software devices share."""

    kind: str
    spin_ns = 0
    default_timeout = 14
    caps = (
        DeviceCap.RC_RNR_NAK_GEN
        | DeviceCap.MEM_WINDOW
        | DeviceCap.MEM_WINDOW_TYPE_2B
        | DeviceCap.MEM_MGT_EXTENSIONS
        | DeviceCap.PORT_ACTIVE_EVENT
        | DeviceCap.SYS_IMAGE_GUID
        | DeviceCap.SRQ_RESIZE
        | DeviceCap.CURR_QP_STATE_MOD
    )
    caps_ex = DeviceCap.FLUSH_GLOBAL | DeviceCap.FLUSH_PERSISTENT | DeviceCap.ATOMIC_WRITE
    """The capabilities that do not fit into device_cap_flags."""
    vendor_part_id: int

    # ---- devices ------------------------------------------------------------

    def info(self, name: str, guid: int) -> DeviceInfo:
        """Describe a device."""
        return DeviceInfo(name, self.kind, guid, NodeType.CA, "", TransportType.IB)

    def found_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(name)

    @verb
    def close_device(context: Any) -> None:
        opened = context_of(context, "ibv_close_device")
        opened.events.close()
        opened.device.close()
        del contexts[address_of(context)]

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> FaultPlan:
        opened = context_of(context, "faults")
        opened.faults.wr_id_of = wr_id_of
        return opened.plan

    def lacks(self, call: str) -> bool:
        return False

    def query_device_ex(self, context: Any, attr: Any) -> None:
        device, orig = context_of(context, "ibv_query_device_ex").device, attr.orig_attr
        for name, value in _LIMITS.items():
            setattr(orig, name, value)
        orig.vendor_part_id = self.vendor_part_id
        orig.device_cap_flags = int(self.caps)
        orig.fw_ver = b"soft"
        orig.node_guid = orig.sys_image_guid = int.from_bytes(device.guid.to_bytes(8), "little")
        attr.phys_port_cnt_ex = orig.phys_port_cnt
        attr.completion_timestamp_mask = (1 << 64) - 1
        attr.hca_core_clock = _CLOCK_KHZ
        attr.device_cap_flags_ex = int(self.caps | self.caps_ex)

    def query_rt_values(self, context: Any) -> int:
        return completion.clock()

    def query_port(self, context: Any, port_num: int, attr: Any) -> int:
        device = context_of(context, "ibv_query_port").device
        attr.state = PortState.ACTIVE
        attr.max_mtu, attr.active_mtu = MTU.MTU_4096, device.port_mtu
        attr.gid_tbl_len, attr.pkey_tbl_len = len(device.gids), 1
        attr.max_msg_sz = MAX_MSG_SIZE
        attr.phys_state, attr.link_layer = 5, LinkLayer.ETHERNET
        attr.active_speed, attr.active_width = 1, 1
        attr.port_cap_flags = PortCap.IP_BASED_GIDS
        attr.qkey_viol_cntr = device.qkey_violations
        return 1

    def query_gid_table(self, context: Any, port_num: int, length: int) -> list[GIDEntry]:
        device = context_of(context, "ibv_query_gid_table").device
        return [
            GIDEntry(index, raw, GIDType.ROCE_V2, device.netdev)
            for index, raw in enumerate(device.gids)
        ]

    def query_gid_ex(self, context: Any, port_num: int, index: int) -> GIDEntry:
        entries = self.query_gid_table(context, port_num, 0)
        if index >= len(entries):
            raise VerbsError("ibv_query_gid_ex", errno.EINVAL)
        return entries[index]

    def query_pkey(self, context: Any, port_num: int, index: int) -> int:
        if index:
            raise VerbsError("ibv_query_pkey", errno.EINVAL)
        return PKEY

    @verb
    def get_async_event(context: Any, events: dict[object, Any]) -> None:
        event = context_of(context, "ibv_get_async_event").events.take()
        if event is not None:
            # Not on commit: by then, no memory may be left for adding to the dict.
            native.undo(events.pop, key := object(), None)
            events[key] = event

    def read_async_event(self, event: tuple[int, Any]) -> tuple[int, Any]:
        return event

    # ---- memory -------------------------------------------------------------

    @verb
    def alloc_pd(context: Any) -> Any:
        context_of(context, "ibv_alloc_pd")
        pd = ffi.new("struct ibv_pd *")
        pd.context = context
        return keep(pd, ProtectionDomain(), "ibv_alloc_pd")

    @verb
    def dealloc_pd(pd: Any) -> None:
        drop(pd, "ibv_dealloc_pd")

    @verb
    def reg_mr(pd: Any, addr: Any, length: int, access: int) -> Any:
        return _register(pd, addr, length, access, _sure)

    @verb
    def reg_mr_at(pd: Any, addr: Any, length: int, access: int) -> Any:
        return _register(pd, addr, length, access, _mapped)

    @verb
    def reg_mr_mmap(pd: Any, addr: Any, length: int, access: int) -> Any:
        return _register(pd, addr, length, access, _of_file)

    @verb
    def reg_dmabuf_mr(pd: Any, offset: int, length: int, iova: int, fd: int, access: int) -> Any:
        name = "ibv_reg_dmabuf_mr"
        domain = bound(pd, name)
        _refuse_on_demand(name, access)
        memory = map_dmabuf(fd, offset, length, iova, access)
        keys = device_of(pd, name).memory
        region = keys.register(domain, iova, memory, access, start_of(memory), call=name)
        mr = ffi.new("struct ibv_mr *")
        # The addr that ibv_reg_dmabuf_mr returns.
        mr.addr = ffi.cast("char *", offset)
        return _describe(name, mr, pd, length, region)

    @verb
    def rereg_mr(mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int) -> None:
        _reregister(mr, flags, pd, addr, length, access, _sure)

    @verb
    def rereg_mr_at(mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int) -> None:
        _reregister(mr, flags, pd, addr, length, access, _mapped)

    @verb
    def rereg_mr_mmap(mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int) -> None:
        _reregister(mr, flags, pd, addr, length, access, _of_file)

    @verb
    def advise_mr(pd: Any, advice: int, flags: int, sges: Any, count: int) -> None:
        domain, name = bound(pd, "ibv_advise_mr"), "ibv_advise_mr"
        memory = device_of(pd, name).memory
        if advice not in _ADVICE:
            raise VerbsError(name, errno.ENOTSUP)
        for sge in ffi.unpack(sges, count) if count else ():
            region = memory.find_region(sge.lkey)
            if region is None or region.pd is not domain:
                raise VerbsError(
                    name, errno.ENOENT, f"the PD has no region with lkey {sge.lkey:#x}"
                )
            start = sge.addr - region.addr
            if start < 0 or start + sge.length > region.length:
                raise VerbsError(name, errno.EFAULT, "an SGE lies outside its region")
            if advice == _PREFETCH_WRITE and not region.access & Access.LOCAL_WRITE:
                raise VerbsError(name, errno.EPERM, "a region lacks LOCAL_WRITE access")

    @verb
    def dereg_mr(mr: Any) -> None:
        region: Region = bound(mr, "ibv_dereg_mr")
        if region.windows:
            many = region.windows
            windows = "a memory window is" if many == 1 else f"{many} memory windows are"
            reason = f"{windows} bound to it; first invalidate or close every bound window"
            raise VerbsError("ibv_dereg_mr", errno.EBUSY, reason)
        device_of(mr, "ibv_dereg_mr").memory.deregister(region)
        drop(mr, "ibv_dereg_mr")

    @verb
    def alloc_mw(pd: Any, mw_type: int) -> Any:
        domain = bound(pd, "ibv_alloc_mw")
        mw = ffi.new("struct ibv_mw *")
        mw.context, mw.pd, mw.type = pd.context, pd, mw_type
        window = device_of(pd, "ibv_alloc_mw").memory.allocate_window(domain, MWType(mw_type))
        mw.rkey = window.rkey
        return keep(mw, window, "ibv_alloc_mw")

    @verb
    def dealloc_mw(mw: Any) -> None:
        keys = device_of(mw, "ibv_dealloc_mw").memory
        keys.deallocate_window(drop(mw, "ibv_dealloc_mw"))

    # ---- completions --------------------------------------------------------

    @verb
    def create_comp_channel(context: Any) -> Any:
        device = context_of(context, "ibv_create_comp_channel").device
        channel = ffi.new("struct ibv_comp_channel *")
        channel.context = context
        try:
            made = Channel(device)
        except OSError as error:
            raise _failed("ibv_create_comp_channel", error) from None
        channel.fd = made.fd
        _channels[made.fd] = made
        return channel

    @verb
    def destroy_comp_channel(channel: Any) -> None:
        made = _channel_of(channel, "ibv_destroy_comp_channel")
        if made.users:
            reason = f"{made.users} CQs use it"
            raise VerbsError("ibv_destroy_comp_channel", errno.EBUSY, reason)
        del _channels[channel.fd]
        made.close()

    @verb
    def create_cq(context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        cq = ffi.new("struct ibv_cq *")
        return _create_cq("ibv_create_cq", cq, context, cqe, channel, comp_vector)

    @verb
    def create_cq_ex(context: Any, cqe: int, channel: Any, comp_vector: int, wc_flags: int) -> Any:
        if wc_flags & _NOT_REPORTED:
            raise VerbsError("ibv_create_cq_ex", errno.EOPNOTSUPP)
        whole = ffi.new("struct rp_soft_cq_ex *")
        lib.rp_soft_cq_ex_init(whole, wc_flags)
        cq = ffi.cast("struct ibv_cq *", ffi.addressof(whole, "cq"))
        _create_cq("ibv_create_cq_ex", cq, context, cqe, channel, comp_vector, whole)
        bound(cq, "ibv_create_cq_ex").has_timestamps = bool(wc_flags & _TIMESTAMPS)
        return cq

    @verb
    def resize_cq(cq: Any, cqe: int) -> None:
        made: CompletionQueue = bound(cq, "ibv_resize_cq")
        if not 1 <= cqe <= MAX_CQE:
            raise VerbsError("ibv_resize_cq", errno.EINVAL)
        if made.overrun:
            reason = "the CQ has overrun; destroy it and create another"
            raise VerbsError("ibv_resize_cq", errno.EINVAL, reason)
        if (there := len(made.pending)) > cqe:
            reason = f"cqe={cqe} is less than the {there} completions in it; poll them first"
            raise VerbsError("ibv_resize_cq", errno.EINVAL, reason)
        made.depth = cqe
        native.on_commit(setattr, cq, "cqe", cqe)

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
        # Not on commit: by then, no memory may be left for adding to the dict.
        if (address := address_of(made.handle)) not in events:
            native.undo(events.pop, address, None)
            events[address] = None
        return True

    # ---- shared receive queues ----------------------------------------------

    @verb
    def create_srq(pd: Any, init: Any) -> Any:
        return make_srq(pd.context, pd, init.attr)

    @verb
    def get_srq_num(srq: Any) -> int:
        number: int = bound(srq, "ibv_get_srq_num").number
        return number

    @verb
    def modify_srq(srq: Any, attr: Any, mask: int) -> None:
        made: SharedReceiveQueue = bound(srq, "ibv_modify_srq")
        depth = attr.max_wr if mask & SRQAttrMask.MAX_WR else made.queue.depth
        if not 1 <= depth <= MAX_SRQ_WR or not made.queue.resize(depth):
            raise VerbsError("ibv_modify_srq", errno.EINVAL)
        limit = attr.srq_limit if mask & SRQAttrMask.LIMIT else made.limit
        if limit > depth:
            reason = f"srq_limit={limit} is more than max_wr={depth}"
            raise VerbsError("ibv_modify_srq", errno.EINVAL, reason)
        made.limit = limit

    @verb
    def query_srq(srq: Any, attr: Any) -> None:
        made: SharedReceiveQueue = bound(srq, "ibv_query_srq")
        attr.max_wr, attr.max_sge = made.queue.depth, made.queue.max_sge
        attr.srq_limit = made.limit

    @verb
    def destroy_srq(srq: Any) -> None:
        made: SharedReceiveQueue = bound(srq, "ibv_destroy_srq")
        if made.users:
            raise VerbsError(
                "ibv_destroy_srq", errno.EBUSY, f"in use by {counted(made.users, 'queue pair')}"
            )
        queues = [made.queue]
        if made.tags is not None:
            queues += [made.tags.slots, made.tags.ops]
        for queue in queues:
            if made.cq is not None:
                made.cq.forget(queue)
            queue.clear()
            queue.refuses = errno.EINVAL
        if made.cq is not None:
            made.cq.users -= 1
        if made.xrcd is not None:
            made.xrcd.users -= 1
        del made.device.srqs[made.number]
        made.context.events.forget(made.handle)
        drop(srq, "ibv_destroy_srq")

    # ---- queue pairs --------------------------------------------------------

    @verb
    def modify_qp(qp: Any, attr: Any, mask: int) -> None:
        made: QueuePair = bound(qp, "ibv_modify_qp")
        migrates = mask & QPAttrMask.PATH_MIG_STATE and attr.path_mig_state != MigState.MIGRATED
        if mask & QPAttrMask.ALT_PATH or migrates:
            reason = f"{made.device.name} has no alternate paths"
            raise VerbsError("ibv_modify_qp", errno.EINVAL, reason)
        attrs = {
            name: getattr(attr, name)
            for name, bit in FIELDS.items()
            if bit & mask and name != "ah_attr"
        }
        if mask & QPAttrMask.AV:
            if not attr.ah_attr.is_global:
                raise VerbsError("ibv_modify_qp", errno.EINVAL, "ah_attr has no dgid")
            attrs["ah_attr"] = bytes(ffi.buffer(ffi.addressof(attr, "ah_attr")))
            attrs["dgid"] = bytes(attr.ah_attr.grh.dgid.raw)
        if unknown := attrs.get("qp_access_flags", 0) & ~ACCESS_FLAGS:
            reason = f"qp_access_flags has bits that are not access flags: 0x{unknown:x}"
            raise VerbsError("ibv_modify_qp", errno.EINVAL, reason)
        if not made.modify(QPAttrMask(mask), attrs):
            raise VerbsError("ibv_modify_qp", errno.EINVAL)
        native.on_commit(setattr, qp, "state", made.state)
        made.device.start(made)

    @verb
    def query_qp(qp: Any, attr: Any, mask: int, init: Any) -> None:
        made: QueuePair = bound(qp, "ibv_query_qp")
        for name in FIELDS:
            if name in made.attr and name != "ah_attr":
                setattr(attr, name, made.attr[name])
        attr.qp_state = attr.cur_qp_state = made.state
        if address := made.attr.get("ah_attr"):
            ffi.memmove(ffi.addressof(attr, "ah_attr"), address, len(address))
        for cap in (attr.cap, init.cap):
            cap.max_send_wr, cap.max_send_sge = made.sq.depth, made.sq.max_sge
            cap.max_recv_wr, cap.max_recv_sge = made.rq.depth, made.rq.max_sge
            cap.max_inline_data = made.sq.max_inline
        init.qp_type, init.sq_sig_all = made.type, made.sq_sig_all
        init.send_cq, init.recv_cq, init.srq = qp.send_cq, qp.recv_cq, qp.srq

    @verb
    def query_qp_data_in_order(qp: Any, op: int, flags: int) -> int:
        bound(qp, "ibv_query_qp_data_in_order")
        # The device copies with memmove, which promises no order.
        return 0

    @verb
    def sends_for_receive(qp: Any) -> int:
        made: QueuePair = bound(qp, "ibv_query_qp")
        return sum([wqe.opcode in CONSUMES_RECEIVE for wqe in made.sq.posted()])

    @verb
    def destroy_qp(qp: Any) -> None:
        made: QueuePair = drop(qp, "ibv_destroy_qp")
        made.drop_queues()
        made.context.events.forget(made.handle)
        made.sq.refuses = made.rq.refuses = errno.EINVAL
        for user in (made.send_cq, made.recv_cq, made.srq, made.xrcd):
            if user is not None:
                user.users -= 1
        made.device.remove(made)

    # ---- address handles ----------------------------------------------------

    @verb
    def create_ah(pd: Any, attr: Any) -> Any:
        bound(pd, "ibv_create_ah")
        grh, gids = attr.grh, device_of(pd, "ibv_create_ah").gids
        if not attr.is_global or attr.port_num != 1 or grh.sgid_index >= len(gids):
            raise VerbsError("ibv_create_ah", errno.EINVAL)
        ah = ffi.new("struct ibv_ah *")
        ah.context, ah.pd = pd.context, pd
        address = AddressHandle(
            gids[grh.sgid_index],
            bytes(grh.dgid.raw),
            attr.sl,
            grh.flow_label & 0xFFFFF,
            grh.hop_limit,
            grh.traffic_class,
        )
        return keep(ah, address, "ibv_create_ah")

    @verb
    def destroy_ah(ah: Any) -> None:
        drop(ah, "ibv_destroy_ah")

    @verb
    def init_ah_from_wc(context: Any, port_num: int, wc: Any, grh: Any, attr: Any) -> None:
        attr.port_num, attr.dlid, attr.sl = port_num, wc.slid, wc.sl
        attr.src_path_bits = wc.dlid_path_bits
        if not wc.wc_flags & WCFlags.GRH:
            return
        raw = bytes(ffi.buffer(grh))
        if raw[0] >> 4 == 6:
            first, _, _, _, source, target = IPV6.unpack(raw)
            attr.grh.traffic_class, attr.grh.flow_label = first >> 20 & 0xFF, first & 0xFFFFF
        else:
            _, tos, *_, src, dst = IPV4.unpack_from(raw, GRH_BYTES - IPV4.size)
            source, target = IPV4_MAPPED + src, IPV4_MAPPED + dst
            attr.grh.traffic_class = tos
        gids = context_of(context, "ibv_init_ah_from_wc").device.gids
        if target not in gids:
            raise VerbsError("ibv_init_ah_from_wc", errno.ENODATA)
        attr.is_global = 1
        attr.grh.dgid.raw = source
        attr.grh.sgid_index = gids.index(target)
        attr.grh.hop_limit = _ANY_HOP_LIMIT


_Unsure = Callable[[str, int, int, int], int | None]
"""Takes a verb's name, an address, a length and an Access; returns the address if the memory may
vanish, else None."""


def _sure(name: str, start: int, length: int, access: int) -> None:
    return None


def _mapped(name: str, start: int, length: int, access: int) -> int:
    check_mapped(name, start, length, bool(access & Access.LOCAL_WRITE))
    return start


def _of_file(name: str, start: int, length: int, access: int) -> int | None:
    return start if may_shrink(start, length) else None


def _refuse_on_demand(name: str, access: int) -> None:
    """Refuse on-demand paging, which odp_caps does not report either."""
    if access & Access.ON_DEMAND:
        raise UnsupportedError(name, errno.EOPNOTSUPP)


def _register(pd: Any, addr: Any, length: int, access: int, unsure: _Unsure) -> Any:
    domain = bound(pd, "ibv_reg_mr")
    _refuse_on_demand("ibv_reg_mr", access)
    at = unsure("ibv_reg_mr", address_of(addr), length, access)
    start = 0 if access & Access.ZERO_BASED else address_of(addr)
    keys = device_of(pd, "ibv_reg_mr").memory
    region = keys.register(domain, start, _memory_at(addr, length), access, at)
    mr = ffi.new("struct ibv_mr *")
    mr.addr = addr
    return _describe("ibv_reg_mr", mr, pd, length, region)


def _describe(name: str, mr: Any, pd: Any, length: int, region: Region) -> Any:
    mr.context, mr.pd, mr.length = pd.context, pd, length
    mr.lkey, mr.rkey = region.lkey, region.rkey
    return keep(mr, region, name)


def _memory_at(addr: Any, length: int) -> memoryview:
    return memoryview(ffi.buffer(ffi.cast("char *", addr), length))


def _reregister(
    mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int, unsure: _Unsure
) -> None:
    name = "ibv_rereg_mr"
    region: Region = bound(mr, name)
    if region.windows:
        raise VerbsError(name, errno.EBUSY, "a memory window is bound to it")
    if not region.valid and not flags & ReregFlags.CHANGE_TRANSLATION:
        reason = "its keys were invalidated; only rereg(memory=...) gives it new ones"
        raise VerbsError(name, errno.EINVAL, reason)
    changed: dict[str, Any] = {}
    if flags & ReregFlags.CHANGE_ACCESS:
        _refuse_on_demand(name, access)
        region.access = access
    if flags & ReregFlags.CHANGE_TRANSLATION:
        start = address_of(addr)
        at = unsure(name, start, length, region.access)
        device_of(mr, name).memory.move(region, start, _memory_at(addr, length), at)
        changed.update(addr=addr, length=length, lkey=region.lkey, rkey=region.rkey)
    elif region.unsure is not None:
        writes = bool(region.access & Access.LOCAL_WRITE)
        check_mapped(name, region.unsure, region.length, writes)
    if flags & ReregFlags.CHANGE_PD:
        region.pd = bound(pd, name)
        changed.update(pd=pd)
    for member, value in changed.items():
        native.on_commit(setattr, mr, member, value)


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
    return keep(cq, made, name, whole)


def _channel_of(channel: Any, name: str) -> Channel:
    """Return the channel that a struct represents.

    Raises:
        VerbsError: the channel has been destroyed.
    """
    found = _channels.get(channel.fd)
    if found is None:
        raise VerbsError(name, errno.EINVAL, "the completion channel has been destroyed")
    return found
