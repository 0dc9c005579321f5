"""Lists that are checked and packed once, and posted many times.

``batch = qp.prepare([...])``, then ``batch.post()`` as often as wanted.  What
differs from post to post is written in place, through ``batch[index]``.
"""

from __future__ import annotations

import copy
import errno
import functools
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any, Self

from ._binding import address_of, door, ffi, lib
from ._resource import Resource, join, leave, let_go
from .enums import SendFlags
from .errors import ClosedError, PostError
from .packing import (
    RECV_SIZE,
    SEND_SIZE,
    SGE_SIZE,
    Refused,
    check_numbers,
    fields_of,
    gather,
    record_size,
)
from .posting import Check, Hint, PostQueue
from .wr import SGE, BindMW

__all__ = ["Batch", "PreparedWR"]

_SGE = Struct("=QII")
_INLINE = int(SendFlags.INLINE)


class _Item:
    """What a batch knows of one of its work requests."""

    __slots__ = ("at", "index", "inline", "others", "wr")

    def __init__(self, index: int, at: int, wr: Any, others: Sequence[Any], inline: bool) -> None:
        self.index = index
        self.at = at
        self.wr = wr
        self.others = others
        """What it refers to besides the SGEs."""
        self.inline = inline
        """Its data may go when the post is done."""


class PreparedWR(door.Patched):
    """One work request of a batch; what is written to its fields counts for the next posts.

    ``batch[index]`` makes it.

    It has those fields of the work request that may differ from post to post.
    A number that does not fit raises ValueError, and so does what the checks of
    the queue pair refuse.  Posts that are outstanding stay as they are.

    Attributes:
        wr_id: comes back in the completion, 0..2^64-1.
        sg_list: local buffers, an SGE or a sequence of them; as many as before.
        imm_data, invalidate_rkey, remote_addr, rkey, compare_add, swap: where the
            opcode has them.
        remote_qpn, remote_qkey, remote_srqn: likewise, and the type of the queue pair.
    """

    __slots__ = ("_item",)

    _batch: Batch

    def __init__(self, batch: Batch, item: _Item) -> None:
        super().__init__(batch, batch._start + item.at)
        self._item = item

    def __repr__(self) -> str:
        return f"<rdmapost.PreparedWR {self._item.index} of a {self._batch}>"

    @property
    def wr_id(self) -> int:
        """Comes back in the completion, 0..2^64-1."""
        return self._batch._wr_ids[self._item.index]

    @wr_id.setter
    def wr_id(self, value: int) -> None:
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise ValueError(f"wr_id={value!r} is not in 0..2^64-1")
        self._batch._own_lists()
        self._batch._wr_ids[self._item.index] = value

    @property
    def sg_list(self) -> tuple[SGE, ...]:
        """Local buffers; as many can be put there as there were."""
        return self._item.wr.sg_list  # type: ignore[no-any-return]

    @sg_list.setter
    def sg_list(self, sg_list: SGE | Sequence[SGE]) -> None:
        batch, item = self._batch, self._item
        sges = self._put(sg_list)
        batch._depend_on(sges)
        if not item.inline:
            batch._own_lists()
            batch._refers_to[item.index] = (*sges, *item.others)

    def _put(self, sg_list: SGE | Sequence[SGE]) -> tuple[SGE, ...]:
        """Check SGEs, and write them to the record."""
        batch, item = self._batch, self._item
        at = item.at + (RECV_SIZE if batch._queue.receives else SEND_SIZE)
        if type(sg_list) is SGE and len(item.wr.sg_list) == 1 and not item.inline:
            one = (sg_list,)
            if batch._queue.put_plain(type(item.wr), one, batch._start + at):
                item.wr.sg_list = one
                return one
        wr = copy.copy(item.wr)
        try:
            sges = tuple(gather(sg_list))
        except TypeError:
            kind = type(sg_list).__name__
            raise TypeError(f"sg_list is a {kind}, not an SGE or a sequence of them") from None
        except Refused as error:
            raise ValueError(str(error)) from None
        if len(sges) != len(wr.sg_list):
            raise ValueError(f"{len(sges)} SGEs, but it was prepared with {len(wr.sg_list)}")
        wr.sg_list = sges
        if reason := check_numbers(wr, sges) or batch._refused(wr, sges):
            raise ValueError(reason)
        item.wr = wr
        for index, sge in enumerate(sges):
            _SGE.pack_into(batch._records, at + SGE_SIZE * index, *sge[:3])
        return sges


def _aligned(address: door.Field) -> property:
    """Make the same field for an address that must be a multiple of 8."""

    def put(self: PreparedWR, value: int) -> None:
        if self._batch._check is not None and isinstance(value, int) and value % 8:
            raise ValueError(f"remote_addr={value:#x} is not a multiple of 8")
        address.__set__(self, value)

    return property(address.__get__, put)


@functools.cache
def _kind_of(wr_type: Any) -> type[PreparedWR]:
    """Return the class for prepared work requests of a class: with the fields that it has."""
    made: dict[str, Any] = {
        name: door.Field(name, at, 8 * size, name == "imm_data")
        for name, (at, size) in fields_of(wr_type).items()
    }
    if "compare_add" in made:
        made["remote_addr"] = _aligned(made["remote_addr"])
    return type(f"Prepared{wr_type.__name__}", (PreparedWR,), {"__slots__": (), **made})


class Batch(door.Prepared):
    """A list of work requests that is posted again and again; ``qp.prepare`` makes it.

    It is checked once, and a post of it costs one call.  The memory regions,
    windows and address handles that it names stay open until it is closed;
    closing its queue pair closes it.

    ``post()`` posts the whole list, as post_send or post_recv does.

    Raises:
        PostError: a work request cannot be posted; index says which.
        ValueError: there is none.
    """

    __slots__ = (
        "__weakref__", "_check", "_copied", "_held", "_hint", "_items", "_live_queue",
        "_parents", "_queue", "_records", "_start", "_why_not",
    )  # fmt: skip

    def __init__(
        self,
        queue: PostQueue,
        live: Callable[[], Any],
        wrs: Sequence[Any],
        check: Check | None,
        why_not: Callable[[], str | None],
        hint: Hint,
    ) -> None:
        self._check, self._hint, self._why_not = check, hint, why_not
        self._queue, self._live_queue = queue, live
        self._parents: tuple[Resource, ...] = ()
        live()
        if not wrs:
            raise ValueError("a prepared list has at least one work request")
        self._records = bytearray()
        self._items: list[_Item] = []
        refers_to: list[Sequence[Any]] = []
        for index, wr in enumerate(wrs):
            try:
                refers_to.append(self._pack(queue, index, wr))
            except Refused as error:
                raise PostError(
                    queue.call, errno.EINVAL, str(error),
                    index=index, posted=0, count=len(wrs), wr=wr,
                ) from None  # fmt: skip
        # Holds the buffer: it stays where it is.
        self._held = ffi.from_buffer("char[]", self._records)
        self._start = address_of(self._held)
        link = lib.rp_link_recv if queue.receives else lib.rp_link_send
        if link(self._held, len(self._records), len(wrs)):
            raise AssertionError("packed records do not add up")
        self._copied = -1
        super().__init__(
            queue.lock, queue.in_flight, [wr.wr_id for wr in wrs], refers_to,
            self._start, queue.room, queue.receives,
        )  # fmt: skip
        for item in self._items:
            self._depend_on((*getattr(item.wr, "sg_list", ()), getattr(item.wr, "ah", None)))

    def _pack(self, queue: PostQueue, index: int, wr: Any) -> Sequence[Any]:
        """Check and pack one work request; return what it refers to while it is outstanding.

        Raises:
            Refused: it cannot be posted.
        """
        if not isinstance(wr, queue.wr_type):
            raise Refused(f"{queue.call} takes a {queue.wr_type.__name__}, not {wr!r}")
        if isinstance(wr, BindMW):
            raise Refused("a BIND_MW changes the window's key, so it cannot be posted again")
        own, at = copy.copy(wr), len(self._records)
        try:
            sges = gather(getattr(wr, "sg_list", ()))
            reason = check_numbers(wr, sges) or self._refused(wr, sges)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            reason = str(error)
        if reason is not None:
            raise Refused(reason)
        if hasattr(own, "sg_list"):
            own.sg_list = sges
        self._records.extend(bytes(record_size(len(sges))))
        end, others = queue.pack(self._records, at, own, 0, sges)
        del self._records[end:]
        inline = bool(int(getattr(wr, "send_flags", 0)) & _INLINE)
        self._items.append(_Item(index, at, own, others, inline))
        return others if inline else (*sges, *others)

    def _refused(self, wr: Any, sges: Sequence[SGE]) -> str | None:
        return None if self._check is None else self._check(wr, sges)

    def _depend_on(self, named: Sequence[Any]) -> None:
        """Keep open what work requests name, besides what they named before."""
        for one in named:
            owner = one.owner if type(one) is SGE else one
            if isinstance(owner, Resource) and owner not in self._parents:
                self._parents += (owner,)
                join(self, owner)

    def _own_lists(self) -> None:
        """Make the wr_ids and what is referred to writable: no post has them after that."""
        posted = self._queue.in_flight.posted
        if posted != self._copied:
            self._copied = posted
            self._wr_ids, self._refers_to = self._wr_ids.copy(), self._refers_to.copy()

    def _failed(self, result: int | None) -> None:
        """Say why the list was not posted, or not all of it.

        Args:
            result: what the shim returned, with the queue's lock held; None where
                the list has not been posted.
        """
        wrs = [item.wr for item in self._items]
        if result is not None:
            self._queue.fail(result, wrs, len(wrs), self._hint)
        self._live_queue()
        if self.closed:
            raise ClosedError(f"the {self} is closed")
        self._queue.refuse_whole(wrs, self._why_not())

    # ---- closing ------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._held is None

    def close(self) -> None:
        """Let go of what the list names; what is outstanding stays so."""
        if not self.closed:
            self._drop()
            self._held = None
            leave(self)

    def _close_tree(self) -> None:
        self.close()

    def _close_quietly(self) -> None:
        leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_held", None) is not None:
            # Without the lock: nobody can post it, but the collector may have interrupted
            # this very thread in a post to the same queue.
            self._held = None
            let_go(self)

    def __str__(self) -> str:
        return f"prepared list of {len(self._items)}"

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> PreparedWR:
        item = self._items[index]
        # Made anew each time: a batch that held it would be a cycle.
        wr_type: Any = type(item.wr)
        return _kind_of(wr_type)(self, item)

    def __iter__(self) -> Iterator[PreparedWR]:
        return (self[index] for index in range(len(self)))
