"""What has been posted and not completed yet.

A device gives back only the wr_id of a work request, and in an error
completion not even which queue it was on.  So what the device gets as wr_id is
a ticket of ours, (queue number << 32 | count), and the caller's wr_id comes
back through the queue's own records.  Those also hold what the work request
refers to: memory, windows and address handles stay alive until the completion
that shows that the device is done with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ._binding import door

__all__ = ["InFlight", "InFlightAny", "Operations", "TaggedReceives"]

_COUNT_MASK = 0xFFFF_FFFF


class InFlight(door.InFlight):
    """The work requests of one queue that completes in order.

    Recording and completing are in C (``_c/inflight.c``), because posting and
    polling do them there.

    Attributes:
        base: the queue's number, as a part of its tickets; no two queues of a
            process share one.
        posted: how many have been posted.
        done: how many of them are known to be done.
        handle: the address of the queue's struct while nothing but the work
            request itself can stand against posting it, else 0.
        overridden: a subclass has other methods, and they are called.
    """

    __slots__ = ()

    @property
    def number(self) -> int:
        """What names the queue in its tickets."""
        return self.base >> 32

    def next_ticket(self) -> int:
        """Return the ticket of the next work request to be recorded."""
        return self.base | self.posted & _COUNT_MASK

    def match(self, ticket: int) -> None:
        """Note that a message has matched, and its data will follow: of interest to a list."""

    def peek(self, ticket: int) -> int | None:
        """Return the caller's wr_id of an outstanding work request, or None."""
        ahead = (ticket - self.done) & _COUNT_MASK
        for wr_id, _ in itertools.islice(self.references(), ahead, ahead + 1):
            return wr_id
        return None

    def references(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Go through what is outstanding: the wr_id and what it refers to."""
        begun, *flat = self.entries()
        for wr_id, refers_to, count in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            if type(wr_id) is list:
                yield from zip(wr_id[begun:count], refers_to[begun:count], strict=True)
            else:
                yield wr_id, refers_to
            begun = 0


class InFlightAny(InFlight):
    """The work requests of one queue that completes in any order (an SRQ)."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self.overridden = True
        self._entries: dict[int, tuple[int, Sequence[Any]]] = {}

    @property
    def outstanding(self) -> int:
        """How many work requests are posted and not known to be done."""
        return len(self._entries)

    def add(self, wr_id: int, refers_to: Sequence[Any]) -> None:
        """Record a work request about to be posted: keep its entry, and count it."""
        self._entries[self.posted & _COUNT_MASK] = wr_id, refers_to
        self.posted += 1

    def add_list(self, wr_ids: list[int], refers_to: list[Sequence[Any]]) -> None:
        """Record a list about to be posted."""
        for wr_id, named in zip(wr_ids, refers_to, strict=True):
            self.add(wr_id, named)

    def forget_last(self, count: int) -> None:
        """Take back the latest entries: they were not posted after all."""
        for _ in range(count):
            self.posted -= 1
            del self._entries[self.posted & _COUNT_MASK]

    def complete(self, ticket: int) -> int | None:
        """Retire one work request; return the caller's wr_id, or None if it is not here."""
        entry = self._entries.pop(ticket & _COUNT_MASK, None)
        if entry is None:
            return None
        self.done += 1
        return entry[0]

    def peek(self, ticket: int) -> int | None:
        """Return the caller's wr_id of an outstanding work request, or None."""
        entry = self._entries.get(ticket & _COUNT_MASK)
        return None if entry is None else entry[0]

    def clear(self) -> None:
        """Forget everything: the queue has been destroyed."""
        self.done = self.posted
        self._entries.clear()

    def references(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Go through what is outstanding: the wr_id and what it refers to."""
        return iter(tuple(self._entries.values()))


class TaggedReceives(InFlightAny):
    """The entries of a matching list that no message has taken yet, or not all of it."""

    __slots__ = ("_early", "_matched")

    def __init__(self) -> None:
        super().__init__()
        self._matched: set[int] = set()
        self._early: set[int] = set()

    def match(self, ticket: int) -> None:
        """Note that a message has matched, and that its next completion is not the last."""
        if self.peek(ticket) is not None:
            self._matched.add(ticket)
            self._early.add(ticket)

    def complete(self, ticket: int) -> int | None:
        """Retire an entry at its last completion; return its wr_id, or None if it is not here."""
        if ticket in self._early:
            self._early.discard(ticket)
            return self.peek(ticket)
        self._matched.discard(ticket)
        return super().complete(ticket)

    def release(self, ticket: int) -> None:
        """Retire an entry whose TAG_DEL is done, unless a message was faster.

        The completion of that message comes before that of the TAG_DEL.
        """
        if ticket not in self._matched:
            super().complete(ticket)

    def clear(self) -> None:
        """Forget everything: the queue has been destroyed."""
        self._matched.clear()
        self._early.clear()
        super().clear()


class Operations(InFlight):
    """Operations that are posted and not known to be done.

    Args:
        tagged: the receives that TAG_DELs remove.
    """

    __slots__ = ("_tagged",)

    def __init__(self, tagged: TaggedReceives) -> None:
        self.overridden = True
        self._tagged = tagged

    def complete(self, ticket: int) -> int | None:
        """Retire an operation and all before it; return its wr_id, or None if it is not here."""
        ahead = (ticket - self.done) & _COUNT_MASK
        done = list(itertools.islice(self.references(), min(ahead, self.outstanding - 1) + 1))
        wr_id = super().complete(ticket)
        for _, removed in done:
            for handle in removed:
                self._tagged.release(handle._ticket)
        return wr_id
