"""soft0's control verbs: the shared ones, and those for XRC, tag matching and multicast."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from ..._binding import ffi, lib
from ...enums import DeviceCap, QPType, RawPacketCap, SRQType
from ...errors import UnsupportedError, VerbsError
from ...standard.wire import is_multicast_gid
from ..base import Counters, DeviceInfo
from ..software.create_queues import MAX_SGE, make_qp, make_qp_ex, make_srq
from ..software.device_queues import SharedReceiveQueue
from ..software.provider import SoftwareProvider, open_context
from ..software.state import bound, context_of, drop, keep, verb
from . import tags
from .device import MAX_MCAST_GRP, MAX_MCAST_QP_ATTACH, NO_PACKETS, device
from .offload import MAX_TSO
from .qp import SoftQueuePair
from .xrc_domains import domain_of, domains, find_domain

_TM_CAP_RC = 1
_SRQ_TYPE, _SRQ_PD = lib.IBV_SRQ_INIT_ATTR_TYPE, lib.IBV_SRQ_INIT_ATTR_PD
_SRQ_XRCD, _SRQ_CQ, _SRQ_TM = (
    lib.IBV_SRQ_INIT_ATTR_XRCD,
    lib.IBV_SRQ_INIT_ATTR_CQ,
    lib.IBV_SRQ_INIT_ATTR_TM,
)
_SRQ_FIELDS: dict[int, int] = {
    SRQType.BASIC: _SRQ_TYPE | _SRQ_PD,
    SRQType.XRC: _SRQ_TYPE | _SRQ_PD | _SRQ_XRCD | _SRQ_CQ,
    SRQType.TM: _SRQ_TYPE | _SRQ_PD | _SRQ_CQ | _SRQ_TM,
}
"""The attributes that ibv_create_srq_ex takes, by SRQ type."""


class SoftProvider(SoftwareProvider):
    """soft0's control verbs."""

    kind = "soft"
    caps = (
        SoftwareProvider.caps
        | DeviceCap.XRC
        | DeviceCap.UD_IP_CSUM
        | DeviceCap.RAW_IP_CSUM
        | DeviceCap.RAW_MULTI
    )
    vendor_part_id = 1

    def list_devices(self) -> list[DeviceInfo]:
        return [self.info(device.name, device.guid)]

    @verb
    def open_device(name: str) -> Any:
        return open_context(device)

    def query_device_ex(self, context: Any, attr: Any) -> None:
        super().query_device_ex(context, attr)
        orig = attr.orig_attr
        orig.max_mcast_grp = MAX_MCAST_GRP
        orig.max_mcast_qp_attach = MAX_MCAST_QP_ATTACH
        orig.max_total_mcast_qp_attach = MAX_MCAST_GRP * MAX_MCAST_QP_ATTACH
        attr.raw_packet_caps = RawPacketCap.IP_CSUM
        attr.tso_caps.max_tso = MAX_TSO
        attr.tso_caps.supported_qpts = 1 << QPType.UD | 1 << QPType.RAW_PACKET
        caps = attr.tm_caps
        caps.max_rndv_hdr_size = tags.MAX_RNDV_HEADER
        caps.max_num_tags, caps.max_ops = tags.MAX_NUM_TAGS, tags.MAX_OPS
        caps.max_sge, caps.flags = MAX_SGE, _TM_CAP_RC

    def capture(self, context: Any, path: Any, wr_id_of: Callable[[int], Any]) -> Any:
        raise UnsupportedError("Context.capture", errno.EOPNOTSUPP, NO_PACKETS)

    @verb
    def counters(context: Any) -> Counters:
        raise UnsupportedError("Context.counters", errno.EOPNOTSUPP, NO_PACKETS)

    @verb
    def create_srq_ex(context: Any, init: Any) -> Any:
        name, mask = "ibv_create_srq_ex", init.comp_mask
        srq_type = init.srq_type if mask & _SRQ_TYPE else SRQType.BASIC
        if mask | _SRQ_TYPE != _SRQ_FIELDS.get(srq_type):
            raise VerbsError(name, errno.EINVAL, "comp_mask does not fit srq_type")
        cap = init.tm_cap
        if srq_type == SRQType.TM and not (
            1 <= cap.max_num_tags <= tags.MAX_NUM_TAGS and 1 <= cap.max_ops <= tags.MAX_OPS
        ):
            limits = f"max_num_tags must be in 1..{tags.MAX_NUM_TAGS}, max_ops in 1..{tags.MAX_OPS}"
            raise VerbsError(name, errno.EINVAL, limits)
        srq = make_srq(context, init.pd, init.attr)
        made: SharedReceiveQueue = bound(srq, name)
        if srq_type == SRQType.BASIC:
            return srq
        made.cq = cq = bound(init.cq, name)
        cq.users += 1
        if srq_type == SRQType.XRC:
            made.xrcd = domain_of(init.xrcd, name)
            made.xrcd.users += 1
        else:
            made.tags = tags.MatchingList(made, cq, cap.max_num_tags, cap.max_ops, MAX_SGE)
            made.ops = made.tags.ops
        return srq

    @verb
    def open_xrcd(context: Any, init: Any) -> Any:
        context_of(context, "ibv_open_xrcd")
        domain = find_domain(init)
        domain.opened += 1
        # Each time a domain is opened, another struct is created.
        xrcd = ffi.new("struct rp_soft_xrcd *")
        xrcd.xrcd.context = context
        keep(xrcd, domain, "ibv_open_xrcd", whole=xrcd)
        return ffi.addressof(xrcd, "xrcd")

    @verb
    def close_xrcd(xrcd: Any) -> None:
        domain = domain_of(xrcd, "ibv_close_xrcd")
        if domain.opened == 1:
            if domain.users:
                reason = f"{domain.users} queues are in the domain"
                raise VerbsError("ibv_close_xrcd", errno.EBUSY, reason)
            if domain.inode is not None:
                del domains[domain.inode]
        domain.opened -= 1
        drop(ffi.cast("struct rp_soft_xrcd *", xrcd), "ibv_close_xrcd")

    @verb
    def create_qp(pd: Any, init: Any) -> Any:
        return make_qp(pd.context, pd, init)

    @verb
    def create_qp_ex(context: Any, init: Any) -> Any:
        has_xrcd = init.comp_mask & lib.IBV_QP_INIT_ATTR_XRCD
        domain = domain_of(init.xrcd, "ibv_create_qp_ex") if has_xrcd else None
        return make_qp_ex(context, init, domain)

    @verb
    def attach_mcast(qp: Any, gid: bytes, lid: int) -> None:
        made: SoftQueuePair = bound(qp, "ibv_attach_mcast")
        if made.type is not QPType.UD or not is_multicast_gid(gid):
            raise VerbsError("ibv_attach_mcast", errno.EINVAL)
        if not made.device.attach(made, gid):
            raise VerbsError("ibv_attach_mcast", errno.ENOMEM)

    @verb
    def detach_mcast(qp: Any, gid: bytes, lid: int) -> None:
        made: SoftQueuePair = bound(qp, "ibv_detach_mcast")
        if not made.device.detach(made, gid):
            raise VerbsError("ibv_detach_mcast", errno.EINVAL)
