"""The control verbs for queues that only soft0 has: XRC, tag matching, multicast."""

from __future__ import annotations

import errno
import os
from typing import Any

from ..._binding import ffi, lib
from ...enums import QPType, SRQType
from ...errors import VerbsError
from ...standard.wire import is_multicast_gid
from ..software.create_queues import MAX_SGE, make_qp, make_qp_ex, make_srq
from ..software.device_queues import SharedReceiveQueue, XRCDomain
from ..software.state import bound, context_of, drop, keep, table, verb
from . import tags
from .qp import SoftQueuePair

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


_domains: dict[tuple[int, int], XRCDomain] = table()
"""The XRC domains that are associated with a file, by the file's inode."""


def _domain_of(xrcd: Any, name: str) -> XRCDomain:
    domain: XRCDomain = bound(ffi.cast("struct rp_soft_xrcd *", xrcd), name)
    return domain


def _find_domain(init: Any) -> XRCDomain:
    """Return the existing XRC domain to open, or a new one (ibv_open_xrcd(3))."""
    if init.fd == -1:
        return XRCDomain(None)
    try:
        status = os.fstat(init.fd)
    except OSError as error:
        raise VerbsError("ibv_open_xrcd", error.errno or errno.EBADF) from None
    inode = status.st_dev, status.st_ino
    if inode in _domains:
        if init.oflags & os.O_EXCL:
            raise VerbsError("ibv_open_xrcd", errno.EINVAL, "the file already has an XRC domain")
    elif not init.oflags & os.O_CREAT:
        raise VerbsError("ibv_open_xrcd", errno.EAGAIN, "the file has no XRC domain; pass O_CREAT")
    else:
        _domains[inode] = XRCDomain(inode)
    return _domains[inode]


class SoftQueueVerbs:
    """The control verbs for queues that only soft0 has."""

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
            made.xrcd = _domain_of(init.xrcd, name)
            made.xrcd.users += 1
        else:
            made.tags = tags.MatchingList(made, cq, cap.max_num_tags, cap.max_ops, MAX_SGE)
            made.ops = made.tags.ops
        return srq

    @verb
    def open_xrcd(context: Any, init: Any) -> Any:
        context_of(context, "ibv_open_xrcd")
        domain = _find_domain(init)
        domain.opened += 1
        # Each time a domain is opened, another struct is created.
        xrcd = ffi.new("struct rp_soft_xrcd *")
        xrcd.xrcd.context = context
        keep(xrcd, domain, "ibv_open_xrcd", whole=xrcd)
        return ffi.addressof(xrcd, "xrcd")

    @verb
    def close_xrcd(xrcd: Any) -> None:
        domain = _domain_of(xrcd, "ibv_close_xrcd")
        if domain.opened == 1:
            if domain.users:
                reason = f"{domain.users} queues are in the domain"
                raise VerbsError("ibv_close_xrcd", errno.EBUSY, reason)
            if domain.inode is not None:
                del _domains[domain.inode]
        domain.opened -= 1
        drop(ffi.cast("struct rp_soft_xrcd *", xrcd), "ibv_close_xrcd")

    @verb
    def create_qp(pd: Any, init: Any) -> Any:
        return make_qp(pd.context, pd, init)

    @verb
    def create_qp_ex(context: Any, init: Any) -> Any:
        has_xrcd = init.comp_mask & lib.IBV_QP_INIT_ATTR_XRCD
        domain = _domain_of(init.xrcd, "ibv_create_qp_ex") if has_xrcd else None
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
