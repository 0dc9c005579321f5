"""Shared receive queues: basic, XRC and tag-matching."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._arguments import counted, expect, fill, member, shown, within
from .._binding import address_of, ffi, lib
from ..enums import DeviceCap, QPType, SRQAttrMask, SRQType, WCExFlags
from ..errors import ClosedError, RdmaError, UnsupportedError, VerbsError, describe_refusal
from ..posting.columns import Column, LocalRows, with_c_methods
from ..posting.fields import Verb
from ..posting.queue import PostQueue, Reasons
from ..posting.rules import Limits
from ..posting.wr import OpsWR, RecvWR
from .cq import CQ, keep_completions
from .device import NO_MORE, no_more, provider_of
from .device_attr import TMCaps, beyond
from .pd import PD
from .resource import struct_of
from .work_queues import HasWorkQueues
from .xrcd import XRCD


@dataclass(frozen=True, slots=True)
class SRQAttr:
    """Attributes of a shared receive queue (ibv_query_srq(3)).

    Attributes:
        max_wr: work requests it can hold.
        max_sge: SGEs per work request.
        srq_limit: the event fires when fewer receives than this remain; 0 if not armed.
    """

    max_wr: int
    max_sge: int
    srq_limit: int


class SRQ(HasWorkQueues, struct="ibv_srq"):
    """A shared receive queue: receives for many queue pairs (ibv_create_srq_ex(3)).

    Args:
        pd: the protection domain.
        max_wr: work requests it must hold, at most the device's max_srq_wr.
        max_sge: SGEs per work request, at most the device's max_srq_sge.  Some devices accept
            0 and round it up.
        srq_type: BASIC, for queue pairs that are created with this SRQ; XRC, for messages
            that name it; or TM, with a matching list.
        xrcd: the XRC domain (XRC).
        cq: where receives (XRC, TM) and operations (TM) complete; a TM SRQ's CQ must have
            been created with WCExFlags.WITH_TM_INFO.
        max_num_tags: entries in the matching list (TM).
        max_ops: operations on the list that may be outstanding at once (TM).
        checked: check work requests before they are posted.

    Attributes:
        max_sge: what the device granted.
        srq_type: its type.
        xrcd: the XRC domain (XRC), or None.
        cq: where receives and operations complete (XRC, TM), or None.
        max_num_tags: entries in the matching list (TM), or 0.
        max_ops: operations that may be outstanding at once (TM), or 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an integer does not fit in 32 bits, max_num_tags or max_ops exceeds the
            device's limit, or an argument that the type needs is missing.
        ClosedError: the PD, the XRCD or the CQ is closed.
        UnsupportedError: the device does not support the type.
        VerbsError: the device refused; the message says which limit was exceeded.
    """

    __slots__ = (
        "_max_wr",
        "_ops",
        "_recv",
        "cq",
        "max_num_tags",
        "max_ops",
        "max_sge",
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
        expect("checked", checked, bool)
        self.context = pd.context
        self.pd, self.xrcd, self.cq = pd, xrcd, cq
        self.srq_type = member("srq_type", srq_type, SRQType)
        tagged = self.srq_type is SRQType.TM
        init = ffi.new("struct ibv_srq_init_attr_ex *")
        fill(init.attr, max_wr=max_wr, max_sge=max_sge)
        fill(init.tm_cap, max_num_tags=max_num_tags, max_ops=max_ops)
        if not tagged:
            fill(init.tm_cap, max_num_tags=0, max_ops=0)
        self.max_num_tags, self.max_ops = init.tm_cap.max_num_tags, init.tm_cap.max_ops
        if reason := self._what_is_missing():
            raise ValueError(reason)
        struct_of(pd)
        tag_sge = self._query_tm() if tagged else 0
        try:
            self._create(init)
        except VerbsError as error:
            if error.errno in NO_MORE:
                error.hint = self._why_not_created(init.attr, error)
            raise
        self._max_wr: int = init.attr.max_wr
        self.max_sge: int = init.attr.max_sge
        domain = address_of(struct_of(pd))
        limits = Limits(QPType.RC, domain, 0, self.max_sge, 0, {})
        self._recv = PostQueue(
            Verb.ibv_post_srq_recv, limits, self.max_wr, _REASONS, checked=checked
        )
        limits = Limits(QPType.RC, domain, 0, tag_sge, 0, {}, max_num_tags=self.max_num_tags)
        self._ops = PostQueue(
            Verb.ibv_post_srq_ops, limits, self.max_ops, _REASONS, checked=checked and tagged
        )
        assert self._ops.tagged is not None
        self._open_queues(self._recv.in_flight, self._ops.in_flight, self._ops.tagged)
        self._recv.set_ready(True)
        self._ops.set_ready(True)

    def __str__(self) -> str:
        if not hasattr(self, "_max_wr"):
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
            if given is not None and given.context is not self.context:
                return f"the {given} and the PD belong to different open devices"
        return None

    def _query_tm(self) -> int:
        """Return how many SGEs a tagged receive may have.

        Raises:
            UnsupportedError: the device has no tag matching.
            ValueError: the CQ does not report tags; or max_num_tags or max_ops exceeds the
                device's limit.
        """
        context = self.context
        caps: TMCaps = context.attr.tm_caps
        if not caps.max_num_tags:
            raise UnsupportedError(
                "ibv_create_srq_ex", errno.EOPNOTSUPP, f"{context.name} has no tag matching"
            )
        assert self.cq is not None
        if not self.cq.wc_flags & WCExFlags.WITH_TM_INFO:
            raise ValueError(
                "an SRQ of type TM needs a CQ that reports tags: "
                "CQ(context, wc_flags=WCExFlags.WITH_TM_INFO)"
            )
        for name in ("max_num_tags", "max_ops"):
            value, limit = getattr(self, name), getattr(caps, name)
            if not 1 <= value <= limit:
                raise ValueError(
                    f"{name}={shown(value)} is not in 1..{limit}, the limit of {context.name}"
                )
        return caps.max_sge

    def _create(self, init: Any) -> None:
        context, pd = self.context, self.pd
        provider = provider_of(context)
        given = (pd, self.xrcd, self.cq)
        parents = tuple([parent for parent in given if parent is not None])
        if self.srq_type is SRQType.BASIC:
            # Every driver supports the older call.
            init_attr = ffi.new("struct ibv_srq_init_attr *")
            init_attr.attr = init.attr
            self._make(provider.create_srq, (pd, init_attr), provider.destroy_srq, parents)
            init.attr = init_attr.attr
            return
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
        self._make(provider.create_srq_ex, (context, init), provider.destroy_srq, parents)

    def _why_not_created(self, asked: Any, error: VerbsError) -> str:
        context = self.context
        if not context.attr.max_srq:
            return f"{context.name} has no shared receive queues"
        return (
            beyond(
                context.attr,
                ("max_wr", asked.max_wr, "max_srq_wr"),
                ("max_sge", asked.max_sge, "max_srq_sge"),
            )
            or error.hint
            or no_more(context, "SRQs", "max_srq", error.errno or 0)
        )

    def _keep_completions(self) -> None:
        if self.cq is not None and any([queue.outstanding for queue in self._in_flight]):
            keep_completions(self.cq)

    @property
    def srq_num(self) -> int:
        """The SRQ's number, which an XRC send names as remote_srqn.

        Raises:
            RdmaError: the SRQ is not of type XRC.
            ClosedError: the SRQ is closed.

        See ibv_get_srq_num(3).
        """
        if self.srq_type is not SRQType.XRC:
            raise RdmaError(f"{self} has no SRQ number; only XRC SRQs have one")
        number: int = self._verb(provider_of(self.context).get_srq_num)
        return number

    @property
    def outstanding(self) -> int:
        """How many receives are posted and not known to be done, not counting the matching list.

        Raises:
            ClosedError: the SRQ was inherited through a fork.
        """
        self._refuse_inherited()
        return self._recv.in_flight.outstanding

    @property
    def outstanding_tags(self) -> int:
        """How many tagged receives are posted, and neither completed nor known to be removed.

        Raises:
            ClosedError: the SRQ was inherited through a fork.
        """
        self._refuse_inherited()
        return 0 if self._ops.tagged is None else self._ops.tagged.outstanding

    @property
    def outstanding_ops(self) -> int:
        """How many operations are posted and not known to be done.

        Unsignaled operations count until a later one completes.

        Raises:
            ClosedError: the SRQ was inherited through a fork.
        """
        self._refuse_inherited()
        return self._ops.in_flight.outstanding

    @property
    def max_wr(self) -> int:
        """How many receives it can hold: at least as many as were last requested."""
        return self._max_wr

    def query(self) -> SRQAttr:
        """Return its current attributes (ibv_query_srq(3))."""
        raw = ffi.new("struct ibv_srq_attr *")
        self._verb(provider_of(self.context).query_srq, raw)
        return SRQAttr(raw.max_wr, raw.max_sge, raw.srq_limit)

    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Change how many receives it can hold, or arm its limit event, or both.

        Posted receives stay posted.

        Args:
            max_wr: receives it must hold: at least as many as are posted, at most the
                device's max_srq_wr.  The device may grant more: see the attribute max_wr.
            srq_limit: as for arm_limit; at most max_wr.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is not in 0..2^32-1, or none is given.
            ClosedError: the SRQ is closed.
            UnsupportedError: the device cannot do this.
            VerbsError: the device refused; the message says which limit was exceeded.

        See ibv_modify_srq(3).
        """
        given = {"max_wr": max_wr, "srq_limit": srq_limit}
        changes = {name: value for name, value in given.items() if value is not None}
        if not changes:
            raise ValueError("pass max_wr, srq_limit or both")
        raw = ffi.new("struct ibv_srq_attr *")
        fill(raw, **changes)
        mask = sum([_MASKS[name] for name in changes])
        try:
            self._verb(provider_of(self.context).modify_srq, raw, mask)
        except VerbsError as error:
            if error.errno in NO_MORE:
                error.hint = self._why_not_modified(mask, raw) or error.hint
            raise
        finally:
            # Record the new size even if a signal handler raised after the call, and record it
            # again if another thread has modified the SRQ since.
            noted = None
            with contextlib.suppress(ClosedError):
                while mask & SRQAttrMask.MAX_WR and noted != (granted := self.query().max_wr):
                    self._max_wr = noted = granted
                    self._recv.resize(granted)

    def _why_not_modified(self, mask: int, asked: Any) -> str | None:
        attr, max_wr = self.context.attr, asked.max_wr
        if not mask & SRQAttrMask.MAX_WR:
            max_wr = self._max_wr
        elif reason := beyond(attr, ("max_wr", max_wr, "max_srq_wr")):
            return reason
        elif not max_wr:
            return f"max_wr=0 is not in 1..{attr.max_srq_wr}"
        elif max_wr < self.outstanding:
            return f"max_wr={max_wr} is less than the {self.outstanding} receives that are posted"
        elif not attr.device_cap_flags & DeviceCap.SRQ_RESIZE:
            return f"{self.context.name} cannot resize an SRQ: it has no DeviceCap.SRQ_RESIZE"
        if mask & SRQAttrMask.LIMIT and asked.srq_limit > max_wr:
            return f"srq_limit={asked.srq_limit} is more than max_wr={max_wr}"
        if (armed := self.query().srq_limit) > max_wr:
            return f"max_wr={max_wr} is less than the armed srq_limit={armed}; arm_limit(0) disarms"
        return None

    def arm_limit(self, srq_limit: int) -> None:
        """Arm the limit event, which fires once when fewer than srq_limit receives remain.

        The event is SRQ_LIMIT_REACHED. soft0, roce devices and Soft-RoCE check the limit only when
        a message takes a receive. If fewer already remain when you arm it, nothing happens until
        the next receive is taken. ibv_modify_srq(3) does not say whether other devices raise the
        event at once.

        Args:
            srq_limit: the limit; 0 disarms the event.

        Raises:
            TypeError: srq_limit is not an integer.
            ValueError: srq_limit is not in 0..2^32-1.
            ClosedError: the SRQ is closed.
            VerbsError: the device refused.

        See ibv_modify_srq(3).
        """
        self.modify(srq_limit=within("srq_limit", srq_limit, 0, (1 << 32) - 1))

    def post_srq_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post receives that any queue pair with this SRQ may use.

        Args:
            wrs: a RecvWR or an iterable of them, read and posted as by QP.post_send.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, or an item is not one.
            ClosedError: the SRQ is closed.

        See ibv_post_srq_recv(3).
        """
        raise NotImplementedError  # in C: _c/posting/post.c

    def post_srq_recv_columns(self, /, sg_list: LocalRows = (), *, wr_id: Column = 0) -> int:
        """Post many receives whose fields are in columns, and return how many were posted.

        It works like QP.post_recv_columns, and raises the same errors.

        Args:
            sg_list, wr_id: as for QP.post_columns.

        See ibv_post_srq_recv(3).
        """
        raise NotImplementedError  # in C: _c/posting/columns.c

    def post_srq_ops(self, wrs: OpsWR | Iterable[OpsWR]) -> None:
        """Post tag-matching operations.

        Posting a TagAdd sets its handle.  A tagged receive's buffers stay alive until
        the completion that has its recv_wr_id and reports all data delivered, or until
        the completion of the TagDel that removed it.

        Args:
            wrs: an OpsWR or an iterable of them, read and posted as by QP.post_send.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, an item is not one, or the device has
                no tag matching.
            ClosedError: the SRQ is closed.

        See ibv_post_srq_ops(3).
        """
        raise NotImplementedError  # in C: _c/posting/post.c


_MASKS = {"max_wr": SRQAttrMask.MAX_WR, "srq_limit": SRQAttrMask.LIMIT}


with_c_methods(SRQ)


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
    return f"{name} refused with {describe_refusal(code)}"


_REASONS = Reasons(_why_refused)
