"""Shared receive queues."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._binding import ffi, lib
from ._resource import Resource
from .enums import QPType, SRQAttrMask
from .errors import describe_errno
from .inflight import InFlightAny
from .memory import PD
from .packing import pack_ops, pack_recv
from .posting import PostQueue
from .rules import Limits, check_recv
from .wr import SGE, OpsWR, RecvWR

__all__ = ["SRQ", "SRQAttr"]


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


class SRQ(Resource):
    """A shared receive queue: receives for many queue pairs (ibv_create_srq(3)).

    Args:
        pd: the protection domain.
        max_wr: work requests it must hold, 1..the device's max_srq_wr.
        max_sge: SGEs of each, 1..the device's max_srq_sge.
        checked: check work requests before they are posted.

    Attributes:
        max_wr, max_sge: what the device granted.

    Raises:
        ClosedError: the PD is closed.
        UnsupportedError: the device has none.
        VerbsError: the device refused.
    """

    __slots__ = ("_checked", "_ops", "_recv", "max_sge", "max_wr", "pd")

    _kind = "SRQ"

    def __init__(self, pd: PD, max_wr: int = 64, max_sge: int = 1, *, checked: bool = True) -> None:
        self.pd = pd
        context = pd.context
        init = ffi.new("struct ibv_srq_init_attr *")
        init.attr.max_wr, init.attr.max_sge = max_wr, max_sge
        handle = context._provider.create_srq(pd._live(), init)
        self.max_wr: int = init.attr.max_wr
        self.max_sge: int = init.attr.max_sge
        limits = Limits(QPType.RC, pd, 0, self.max_sge, 0, {})
        self._checked = (lambda wr, sges: check_recv(wr, sges, limits)) if checked else None
        self._recv = PostQueue(
            "ibv_post_srq_recv", lib.rp_link_recv, lib.rp_post_srq_recv, RecvWR, pack_recv,
            self.max_wr, "max_wr", checked, InFlightAny(),
        )  # fmt: skip
        self._ops = PostQueue(
            "ibv_post_srq_ops", lib.rp_link_ops, lib.rp_post_srq_ops, OpsWR, _pack_ops,
            self.max_wr, "max_wr", checked, InFlightAny(),
        )  # fmt: skip
        for queue in (self._recv.in_flight, self._ops.in_flight):
            context._queues[queue.number] = queue
        super().__init__(handle, pd)

    def __str__(self) -> str:
        return f"SRQ of {self.max_wr} work requests" if hasattr(self, "max_wr") else self._kind

    def _destroy(self) -> None:
        self.pd.context._provider.destroy_srq(self._handle)
        for queue in (self._recv.in_flight, self._ops.in_flight):
            self.pd.context._queues.pop(queue.number, None)
            queue.clear()

    @property
    def outstanding(self) -> int:
        """How many receives are posted and not completed."""
        return self._recv.in_flight.outstanding

    def query(self) -> SRQAttr:
        """Return its attributes as they are now (ibv_query_srq(3))."""
        raw = ffi.new("struct ibv_srq_attr *")
        self.pd.context._provider.query_srq(self._live(), raw)
        return SRQAttr(raw.max_wr, raw.max_sge, raw.srq_limit)

    def arm_limit(self, srq_limit: int) -> None:
        """Ask for one event when fewer receives than this are left (ibv_modify_srq(3))."""
        raw = ffi.new("struct ibv_srq_attr *")
        raw.srq_limit = srq_limit
        self.pd.context._provider.modify_srq(self._live(), raw, SRQAttrMask.LIMIT)

    def post_srq_recv(self, wrs: RecvWR | Sequence[RecvWR]) -> None:
        """Post receives that any queue pair of this SRQ may use.

        Args:
            wrs: a RecvWR or a sequence of them; the list stops at the first
                that cannot be posted.

        Raises:
            PostError: a work request was refused.
            ClosedError: the SRQ is closed.

        See ibv_post_srq_recv(3).
        """
        self._recv.post(self._live(), wrs, self._checked, self._hint)

    def post_srq_ops(self, wrs: OpsWR | Sequence[OpsWR]) -> None:
        """Post tag-matching operations.

        Args:
            wrs: an OpsWR or a sequence of them; the list stops at the first
                that cannot be posted.

        Raises:
            PostError: a work request was refused, or the device has no tag matching.
            ClosedError: the SRQ is closed.

        See ibv_post_srq_ops(3).
        """
        self._ops.post(self._live(), wrs, None, self._hint)

    def _hint(self, code: int, wr: Any) -> str:
        name = self.pd.context.name
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            what = "tag matching" if isinstance(wr, OpsWR) else "shared receive queues"
            return f"{what} is not supported by {name}"
        if code == errno.ENOMEM:
            return f"{name} says that the queue is full (max_wr={self.max_wr})"
        return f"{name} refused with {describe_errno(code)}"


def _pack_ops(
    out: bytearray, at: int, wr: Any, wr_id: int, sges: Sequence[SGE]
) -> tuple[int, tuple[Any, ...]]:
    return pack_ops(out, at, wr, wr_id, getattr(wr, "recv_wr_id", 0), sges)
