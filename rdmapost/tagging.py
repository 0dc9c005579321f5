"""Posting tag-matching operations: a matching list and what is in flight there.

A TAG_ADD is two things in one: an operation, which completes when the entry is
on the list, and a receive, which completes when a message has come.  So it has
two tickets.  The operations complete in order, the receives in any order; a
receive that a TAG_DEL removed never completes, and is done when the TAG_DEL is.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

from ._binding import door, ffi
from .inflight import Operations, TaggedReceives
from .packing import Refused, pack_ops
from .plain import NONE
from .posting import Check, PostQueue
from .wr import SGE, OpsWR, TagAdd, TagDel, TagHandle

__all__ = ["TagQueue"]

_UINT32 = Struct("=I")
_HANDLE = ffi.offsetof("struct ibv_ops_wr", "tm", "handle")


class TagQueue(PostQueue):
    """The queue that tag-matching operations are posted to.

    Args:
        max_ops: how many operations it holds.
        max_num_tags: how many entries the list holds; 0 where there is none.
        bounded: refuse what does not fit.

    Attributes:
        tagged: the receives on the list.
    """

    def __init__(self, max_ops: int, max_num_tags: int, bounded: bool) -> None:
        self.tagged = TaggedReceives()
        self._max_num_tags = max_num_tags
        self._packed: list[tuple[TagAdd, int, int] | None] = []
        super().__init__(
            "ibv_post_srq_ops", door.submit_srq_ops, OpsWR, _pack_nothing,
            max_ops, "max_ops", bounded, Operations(self.tagged), NONE,
        )  # fmt: skip

    def holds(self, handle: Any) -> bool:
        """Whether something is a handle of this list's at all."""
        return isinstance(handle, TagHandle) and handle._queue is self

    def is_listed(self, handle: Any) -> bool:
        """Whether a handle's entry is on the list, as far as completions have told."""
        return self.tagged.peek(handle._ticket) is not None

    def _pack_all(
        self,
        wrs: Sequence[Any],
        check: Check | None,
    ) -> tuple[int, int, str] | None:
        self._packed.clear()
        try:
            return super()._pack_all(wrs, check)
        except BaseException:
            self._forget_after(0)
            raise

    def _refuse(
        self,
        wr: Any,
        sges: Sequence[SGE],
        check: Check | None,
    ) -> str | None:
        reason = super()._refuse(wr, sges, check)
        if reason is None and isinstance(wr, TagAdd) and self._list_is_full():
            return (
                f"the matching list is full: max_num_tags={self._max_num_tags} and as many "
                "tagged receives are outstanding; poll the CQ, remove some, or create the "
                "SRQ with more"
            )
        return reason

    def _list_is_full(self) -> bool:
        return self._bounded and 0 < self._max_num_tags <= self.tagged.outstanding

    def _pack_one(self, wr: Any, sges: Sequence[SGE]) -> bool:
        at = self._make_room(sges)
        ticket, tagged = self.in_flight.next_ticket(), self.tagged.next_ticket()
        if isinstance(wr, TagDel) and self._max_num_tags and not self.holds(wr.handle):
            # Drivers index an array with the number.
            raise Refused("TAG_DEL needs the handle that a TagAdd of this SRQ was given")
        add = isinstance(wr, TagAdd)
        removed = (wr.handle,) if isinstance(wr, TagDel) and self.holds(wr.handle) else ()
        if add and not 0 <= wr.recv_wr_id < 1 << 64:
            raise Refused(f"recv_wr_id={wr.recv_wr_id} is not in 0..2^64-1")
        self._end, _ = pack_ops(self._records, at, wr, ticket, tagged if add else 0, sges)
        if add:
            self.tagged.add(wr.recv_wr_id, sges)
        self.in_flight.add(wr.wr_id, removed)
        self._packed.append((wr, at, tagged) if add else None)
        return False

    def _bound(self, posted: int) -> None:
        for packed in self._packed[:posted]:
            if packed is not None:
                wr, at, ticket = packed
                (value,) = _UINT32.unpack_from(self._records, at + _HANDLE)
                wr.handle = TagHandle(self, value, ticket)
        self._forget_after(posted)

    def _forget_after(self, posted: int) -> None:
        """Take back the tagged receives of operations that were not posted."""
        self.tagged.forget_last(sum(packed is not None for packed in self._packed[posted:]))


def _pack_nothing(*_: Any) -> tuple[int, tuple[Any, ...]]:
    raise NotImplementedError("TagQueue packs its operations itself")
