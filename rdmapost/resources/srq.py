"""Shared receive queues: basic ones, XRC, and tag matching."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._arguments import counted, expect, fill, index, member
from .._binding import address_of, ffi, lib
from ..enums import QPType, SRQAttrMask, SRQType
from ..errors import RdmaError, UnsupportedError, describe_errno, where_explained
from ..posting.fields import Verb
from ..posting.queue import PostQueue, Reasons
from ..posting.rules import Limits
from ..posting.wr import OpsWR, RecvWR
from .cq import CQ, keep_completions
from .device import provider_of, query_device_ex
from .memory import PD
from .posted import PostTarget
from .resource import struct_of
from .xrcd import XRCD


@dataclass(frozen=True, slots=True)
class SRQAttr:
    """Attributes of a shared receive queue (ibv_query_srq(3)).

    Attributes:
        max_wr: work requests it holds.
        max_sge: SGEs of each.
        srq_limit: the limit event fires when fewer are left; 0 when not armed.
    """

    max_wr: int
    max_sge: int
    srq_limit: int


class SRQ(PostTarget, struct="ibv_srq"):
    """A shared receive queue: receives for many queue pairs (ibv_create_srq_ex(3)).

    Args:
        pd: the protection domain.
        max_wr: work requests it must hold, at most the device's max_srq_wr.
        max_sge: SGEs of each, at most the device's max_srq_sge.  Some devices accept
            0 for these, and grant more.
        srq_type: BASIC, for queue pairs created with it; XRC, for messages that
            name it; or TM, with a matching list.
        xrcd: the XRC domain (XRC).
        cq: where receives complete (XRC, TM), and operations (TM); for TM it is
            created with tm_info=True.
        max_num_tags: entries of the matching list (TM).
        max_ops: operations on the list that are outstanding at once (TM).
        checked: check work requests before they are posted.

    Attributes:
        max_wr, max_sge: what the device granted.
        srq_type, xrcd, cq, max_num_tags, max_ops: as given.

    Raises:
        TypeError: an argument is of another type.
        ValueError: max_wr or max_sge does not fit 32 bits, the device has fewer tags or
            operations, or what the type needs is missing.
        ClosedError: the PD, the XRCD or the CQ is closed.
        UnsupportedError: the device does not support the type.
        VerbsError: the device refused: a number is too large, or 0.
    """

    __slots__ = (
        "_ops",
        "_recv",
        "cq",
        "max_num_tags",
        "max_ops",
        "max_sge",
        "max_wr",
        "srq_type",
        "xrcd",
    )

    _type_name = "SRQ"
    _rank = 3

    def __init__(
        self,
        pd: PD,
        max_wr: int = 64,
        max_sge: int = 1,
        *,
        srq_type: SRQType = SRQType.BASIC,
        xrcd: XRCD | None = None,
        cq: CQ | None = None,
        max_num_tags: int = 64,
        max_ops: int = 64,
        checked: bool = True,
    ) -> None:
        expect("pd", pd, PD)
        expect("xrcd", xrcd, XRCD, None)
        expect("cq", cq, CQ, None)
        self.pd, self.xrcd, self.cq = pd, xrcd, cq
        self.srq_type = member("srq_type", srq_type, SRQType)
        tagged = self.srq_type is SRQType.TM
        max_num_tags, max_ops = index("max_num_tags", max_num_tags), index("max_ops", max_ops)
        self.max_num_tags = max_num_tags if tagged else 0
        self.max_ops = max_ops if tagged else 0
        if reason := self._what_is_missing():
            raise ValueError(reason)
        struct_of(pd)
        tag_sge = self._query_tm() if tagged else 0
        init = ffi.new("struct ibv_srq_init_attr_ex *")
        fill(init.attr, max_wr=max_wr, max_sge=max_sge)
        fill(init.tm_cap, max_num_tags=self.max_num_tags, max_ops=self.max_ops)
        self._create(init)
        self.max_wr: int = init.attr.max_wr
        self.max_sge: int = init.attr.max_sge
        domain = address_of(struct_of(pd))
        limits = Limits(QPType.RC, domain, 0, self.max_sge, 0, {})
        self._recv = PostQueue(
            Verb.ibv_post_srq_recv, limits, self.max_wr, _REASONS, checked=bool(checked)
        )
        limits = Limits(QPType.RC, domain, 0, tag_sge, 0, {}, max_num_tags=self.max_num_tags)
        self._ops = PostQueue(
            Verb.ibv_post_srq_ops, limits, self.max_ops, _REASONS, checked=bool(checked) and tagged
        )
        assert self._ops.tagged is not None
        self._open_queues(self._recv.in_flight, self._ops.in_flight, self._ops.tagged)
        self._recv.set_ready(True)
        self._ops.set_ready(True)

    def __str__(self) -> str:
        if not hasattr(self, "max_wr"):
            return self._type_name
        prefix = "" if self.srq_type is SRQType.BASIC else f"{self.srq_type.name} "
        return f"{prefix}SRQ of {counted(self.max_wr, 'work request')}"

    def _what_is_missing(self) -> str | None:
        srq_type, name = self.srq_type, self.srq_type.name
        for what, given, wanted in (
            ("an XRC domain (xrcd=...)", self.xrcd, srq_type is SRQType.XRC),
            ("a CQ (cq=...)", self.cq, srq_type is not SRQType.BASIC),
        ):
            if (given is not None) != wanted:
                return f"an SRQ of type {name} {'needs' if wanted else 'has no use for'} {what}"
            if given is not None and given.context is not self.pd.context:
                return f"the {given} was created on another open device than the PD"
        if srq_type is SRQType.TM and self.cq is not None and not self.cq._extended:
            return "an SRQ of type TM needs a CQ that reports tags: CQ(context, tm_info=True)"
        return None

    def _query_tm(self) -> int:
        """Return how many SGEs a tagged receive may have.

        Raises:
            UnsupportedError: the device has no tag matching.
            ValueError: more is requested than it has.
        """
        context = self.pd.context
        caps = query_device_ex(context).tm_caps
        if not caps.max_num_tags:
            raise UnsupportedError(
                "ibv_create_srq_ex", errno.EOPNOTSUPP, f"{context.name} has no tag matching"
            )
        for name in ("max_num_tags", "max_ops"):
            value, limit = getattr(self, name), getattr(caps, name)
            if not 1 <= value <= limit:
                raise ValueError(f"{name}={value} is not in 1..{limit}, what {context.name} has")
        max_sge: int = caps.max_sge
        return max_sge

    def _create(self, init: Any) -> Any:
        context, pd = self.pd.context, self.pd
        provider = provider_of(context)
        given = (pd, self.xrcd, self.cq)
        parents = tuple(parent for parent in given if parent is not None)
        if self.srq_type is SRQType.BASIC:
            # Use the older call, which every driver has.
            init_attr = ffi.new("struct ibv_srq_init_attr *")
            init_attr.attr = init.attr
            handle = self._make(provider.create_srq, (pd, init_attr), provider.destroy_srq, parents)
            init.attr = init_attr.attr
            return handle
        assert self.cq is not None
        init.srq_type, init.pd, init.cq = self.srq_type, struct_of(pd), struct_of(self.cq)
        init.comp_mask = (
            lib.IBV_SRQ_INIT_ATTR_TYPE | lib.IBV_SRQ_INIT_ATTR_PD | lib.IBV_SRQ_INIT_ATTR_CQ
        )
        if self.xrcd is not None:
            init.xrcd = struct_of(self.xrcd)
            init.comp_mask |= lib.IBV_SRQ_INIT_ATTR_XRCD
        else:
            init.comp_mask |= lib.IBV_SRQ_INIT_ATTR_TM
        return self._make(provider.create_srq_ex, (context, init), provider.destroy_srq, parents)

    def _keep_completions(self) -> None:
        if self.cq is not None and any(queue.outstanding for queue in self._in_flight):
            keep_completions(self.cq)

    @property
    def srq_num(self) -> int:
        """Its number, which a message to it carries as remote_srqn (XRC).

        Raises:
            RdmaError: it is not of type XRC.
            ClosedError: the SRQ is closed.

        See ibv_get_srq_num(3).
        """
        if self.srq_type is not SRQType.XRC:
            raise RdmaError(f"{self} has no number that a message could name; XRC has")
        number: int = self._verb(provider_of(self.pd.context).get_srq_num)
        return number

    @property
    def outstanding(self) -> int:
        """How many receives are posted and not completed, not counting the matching list.

        Raises:
            ClosedError: another process opened the SRQ, and forked this one.
        """
        self._refuse_inherited()
        return self._recv.in_flight.outstanding

    @property
    def outstanding_tags(self) -> int:
        """How many tagged receives are posted, and neither completed nor known to be removed.

        Raises:
            ClosedError: another process opened the SRQ, and forked this one.
        """
        self._refuse_inherited()
        return 0 if self._ops.tagged is None else self._ops.tagged.outstanding

    @property
    def outstanding_ops(self) -> int:
        """How many operations are posted and not known to be done.

        Unsignaled ones count until a later one completes.

        Raises:
            ClosedError: another process opened the SRQ, and forked this one.
        """
        self._refuse_inherited()
        return self._ops.in_flight.outstanding

    def query(self) -> SRQAttr:
        """Return its attributes as they are now (ibv_query_srq(3))."""
        raw = ffi.new("struct ibv_srq_attr *")
        self._verb(provider_of(self.pd.context).query_srq, raw)
        return SRQAttr(raw.max_wr, raw.max_sge, raw.srq_limit)

    def arm_limit(self, srq_limit: int) -> None:
        """Arm a single event for when fewer than srq_limit receives remain.

        The event is SRQ_LIMIT_REACHED.

        Args:
            srq_limit: the limit; 0 disarms.

        Raises:
            TypeError: srq_limit is not an integer.
            ValueError: srq_limit is not in 0..2^32-1.
            ClosedError: the SRQ is closed.
            VerbsError: the device refused.

        See ibv_modify_srq(3).
        """
        raw = ffi.new("struct ibv_srq_attr *")
        fill(raw, srq_limit=srq_limit)
        self._verb(provider_of(self.pd.context).modify_srq, raw, SRQAttrMask.LIMIT)

    def post_srq_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post receives that any queue pair of this SRQ may use.

        Args:
            wrs: a RecvWR or an iterable of them, read and posted as by QP.post_send.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, or an item is not one.
            ClosedError: the SRQ is closed.

        See ibv_post_srq_recv(3).
        """
        self._recv.post(self, wrs)

    def post_srq_ops(self, wrs: OpsWR | Iterable[OpsWR]) -> None:
        """Post tag-matching operations.

        The post gives each TagAdd its handle.  The buffers of a tagged receive
        stay alive until the completion that carries its recv_wr_id and all of
        the data, or that of the TagDel that removed it.

        Args:
            wrs: an OpsWR or an iterable of them, read and posted as by QP.post_send.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, an item is not one, or the device has
                no tag matching.
            ClosedError: the SRQ is closed.

        See ibv_post_srq_ops(3).
        """
        self._ops.post(self, wrs)


def _why_refused(srq: SRQ, code: int, wr: Any) -> str:
    name = srq.pd.context.name
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        what = "tag matching" if isinstance(wr, OpsWR) else "shared receive queues"
        return f"{what} is not supported by {name}"
    if code == errno.EINVAL and isinstance(wr, OpsWR) and srq.srq_type is not SRQType.TM:
        return f"{srq} has no matching list; create it with srq_type=SRQType.TM"
    if code == errno.ENOMEM and isinstance(wr, OpsWR):
        return (
            f"{name} says that the queue of operations or the matching list is full "
            f"(max_ops={srq.max_ops}, max_num_tags={srq.max_num_tags})"
        )
    if code == errno.ENOMEM:
        return f"{name} says that the queue is full (max_wr={srq.max_wr})"
    return f"{name} refused with {describe_errno(code)}; {where_explained(code)}"


_REASONS = Reasons(_why_refused)
