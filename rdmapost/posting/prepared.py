"""Lists that are checked and packed once, and posted many times.

``batch = qp.prepare([...])``, then ``batch.post()`` any number of times. Change the fields that
differ between posts in place, through ``batch[index]``. The work is done in C
(``_c/posting/prepared.c``).
"""

from __future__ import annotations

import errno
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

from .._arguments import counted
from .._arguments import index as whole_number
from .._binding import native
from ..errors import PostError
from .fields import NUMBER_FIELDS
from .queue import PostQueue
from .rules import too_long_a_list


class PreparedWR(native.PreparedItem):
    """One work request of a batch; changes to its fields take effect from the next post.

    ``batch[index]`` creates it.

    It exposes the fields that can change between posts.
    A value of the wrong type raises TypeError.  A number that does not fit raises
    ValueError, and so does a value that the queue pair's checks refuse, or a region that another
    thread is closing or re-registering.  Outstanding posts do not change.

    Attributes:
        wr_id: comes back in the completion, 0..2^64-1.
        sg_list: local buffers, an SGE or a sequence of them; a new list must have as many SGEs as
            the old one.
        imm_data, invalidate_rkey, remote_addr, rkey: if the opcode has them.
        compare_add, swap, atomic_wr, length, type, level: if the opcode has them.
        remote_qpn, remote_qkey, remote_srqn: if the opcode and the queue pair's type have them.
    """

    __slots__ = ("_batch", "_index")

    # The fields of its opcode are properties of a subclass (_class_for).
    imm_data: int
    invalidate_rkey: int
    remote_addr: int
    rkey: int
    compare_add: int
    swap: int
    atomic_wr: int
    length: int
    type: int
    level: int
    remote_qpn: int
    remote_qkey: int
    remote_srqn: int

    def __init__(self, batch: Batch, index: int) -> None:
        super().__init__(batch, index)
        self._batch, self._index = batch, index

    def __repr__(self) -> str:
        return f"<rdmapost.PreparedWR {self._index} of {self._batch}>"


@functools.cache
def _class_for(wr_type: type) -> type[PreparedWR]:
    """Return the PreparedWR subclass for a work request class, with its numeric fields."""
    numbers = {
        name: native.Number(wr_type, index) for name, index in NUMBER_FIELDS[wr_type].items()
    }
    return type(f"Prepared{wr_type.__name__}", (PreparedWR,), {"__slots__": (), **numbers})


class Batch(native.Prepared):
    """A list of work requests that can be posted repeatedly; ``qp.prepare`` creates it.

    It is checked once, and posting it takes one call.  The memory regions,
    windows and address handles that it uses stay open until it is closed;
    closing the queue pair also closes the batch.

    ``post()`` posts the whole list.  Unlike post_send and post_recv, which post what fits,
    it posts nothing if a checked queue has no room for the whole list: in the PostError,
    posted is 0, and index is that of the first work request without a slot.  If the device refuses
    a work request, those before it are posted, as with post_send.

    ``batch[index]`` is one of its work requests; a negative index counts from the end.
    Slices are not supported.

    Raises:
        IndexError: the list has no such index.
        PostError: a work request cannot be posted; index says which.
        ValueError: the list is empty.
    """

    __slots__ = ("__weakref__",)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"prepared list of {len(self)}"

    def __repr__(self) -> str:
        size = counted(len(self), "work request")
        return f"<rdmapost.Batch of {size}{' (closed)' if self.closed else ''}>"

    def __getitem__(self, index: int) -> PreparedWR:
        """Return one of the list's work requests, whose fields can be changed."""
        if isinstance(index, slice):
            raise TypeError("a prepared list cannot be sliced; index one work request at a time")
        at, count = whole_number("index", index), len(self)
        if not -count <= at < count:
            raise IndexError(f"index {at} is out of range for a {self}")
        at %= count
        return _class_for(self._type_of(at))(self, at)

    def __iter__(self) -> Iterator[PreparedWR]:
        return map(self.__getitem__, range(len(self)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot copy or pickle 'Batch' object")


_numbers = itertools.count()


class OpenBatches:
    """A queue pair's prepared lists, held by weak references."""

    __slots__ = ("_batches", "_enough")

    def __init__(self) -> None:
        self._batches: dict[int, weakref.ref[Batch]] = {}
        self._enough = 1

    def __iter__(self) -> Iterator[Batch]:
        # A copy: other threads, and finalizers that run during this loop, may add lists. (No
        # generator: if there is no memory for one, Python 3.13 crashes.)
        refs = self._batches.copy().values()
        return iter([batch for ref in refs if (batch := ref()) is not None])

    def naming(self, resource: Any) -> list[Batch]:
        """Return the lists that use a resource."""
        return [batch for batch in self if batch._names(resource)]

    def add(self, batch: Batch) -> None:
        """Add a list; now and then, drop the entries of lists that no longer exist."""
        self._batches[next(_numbers)] = weakref.ref(batch)
        if len(self._batches) > self._enough:
            # Not in a weakref callback: an exception that a signal handler raises there is lost.
            for number, ref in self._batches.copy().items():
                if ref() is None:
                    self._batches.pop(number, None)
            self._enough = 2 * len(self._batches)


def prepare(queue: PostQueue, owner: Any, wrs: Any, batches: OpenBatches) -> Batch:
    """Check and pack work requests for a queue, as QP.prepare says.

    Add the list to `batches`, so that closing the queue's owner closes it.
    """
    batch = Batch()
    if not issubclass(type(wrs), queue.wr_type) and issubclass(type(wrs), Iterable):
        wrs = tuple(wrs)
    # Add the list before it uses any resource, so that closing the owner closes the list.
    batches.add(batch)
    batch._prepare(queue, owner, wrs)
    if queue.checked and len(batch) > queue.depth:
        count = len(batch)
        batch.close()
        first = wrs[queue.depth] if queue.depth else wrs
        raise PostError(
            queue.call_for(first),
            errno.ENOMEM,
            too_long_a_list(queue, count),
            index=queue.depth,
            posted=0,
            count=count,
            wr=first,
        )
    return batch
