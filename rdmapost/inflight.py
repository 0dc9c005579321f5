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
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["InFlight", "InFlightAny", "Operations", "TaggedReceives"]

_numbers = itertools.count(1)
_COUNT_MASK = 0xFFFF_FFFF


class InFlight:
    """The work requests of one queue that completes in order.

    Attributes:
        number: names the queue in its tickets; no two queues of a process share one.
        outstanding: how many work requests are posted and not known to be done.
    """

    __slots__ = ("_done", "_entries", "_posted", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._entries: deque[tuple[int, Sequence[Any]]] = deque()
        self._posted = 0
        self._done = 0

    @property
    def outstanding(self) -> int:
        return len(self._entries)

    def next_ticket(self) -> int:
        """Return the ticket of the next work request to be recorded."""
        return self.number << 32 | self._posted & _COUNT_MASK

    def add(self, wr_id: int, refers_to: Sequence[Any]) -> None:
        """Record a work request about to be posted."""
        self._posted += 1
        self._entries.append((wr_id, refers_to))

    def forget_last(self, count: int) -> None:
        """Take back the latest entries: they were not posted after all."""
        self._posted -= count
        for _ in range(count):
            self._entries.pop()

    def complete(self, ticket: int) -> int | None:
        """Retire a work request and all before it; return the caller's wr_id.

        A completion of a later work request shows that earlier ones of the
        queue are done (ibv_post_send(3)).  Returns None for a ticket that is
        not outstanding.
        """
        ahead = (ticket - self._done) & _COUNT_MASK
        entries = self._entries
        if ahead >= len(entries):
            return None
        self._done += ahead + 1
        try:
            for _ in range(ahead):
                entries.popleft()
            return entries.popleft()[0]
        except IndexError:
            # Cleared by another thread in this moment.
            return None

    def peek(self, ticket: int) -> int | None:
        """Return the caller's wr_id of an outstanding work request, or None."""
        ahead = (ticket - self._done) & _COUNT_MASK
        return self._entries[ahead][0] if ahead < len(self._entries) else None

    def clear(self) -> None:
        """Forget everything: the queue has been destroyed or reset."""
        self._done = self._posted
        self._entries.clear()

    def references(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Go through what is outstanding: the wr_id and what it refers to."""
        return iter(tuple(self._entries))


class InFlightAny:
    """The work requests of one queue that completes in any order (an SRQ)."""

    __slots__ = ("_entries", "_posted", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._entries: dict[int, tuple[int, Sequence[Any]]] = {}
        self._posted = 0

    @property
    def outstanding(self) -> int:
        return len(self._entries)

    def next_ticket(self) -> int:
        """Return the ticket of the next work request to be recorded."""
        return self.number << 32 | self._posted & _COUNT_MASK

    def add(self, wr_id: int, refers_to: Sequence[Any]) -> None:
        """Record a work request about to be posted."""
        self._entries[self._posted & _COUNT_MASK] = (wr_id, refers_to)
        self._posted += 1

    def forget_last(self, count: int) -> None:
        """Take back the latest entries: they were not posted after all."""
        for _ in range(count):
            self._posted -= 1
            del self._entries[self._posted & _COUNT_MASK]

    def complete(self, ticket: int) -> int | None:
        """Retire one work request; return the caller's wr_id, or None if it is not here."""
        entry = self._entries.pop(ticket & _COUNT_MASK, None)
        return None if entry is None else entry[0]

    def peek(self, ticket: int) -> int | None:
        """Return the caller's wr_id of an outstanding work request, or None."""
        entry = self._entries.get(ticket & _COUNT_MASK)
        return None if entry is None else entry[0]

    def clear(self) -> None:
        """Forget everything: the queue has been destroyed."""
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
        super().__init__()
        self._tagged = tagged

    def complete(self, ticket: int) -> int | None:
        """Retire an operation and all before it; return its wr_id, or None if it is not here."""
        ahead = (ticket - self._done) & _COUNT_MASK
        # A ticket that is not here must not make this go through everything.
        done = list(itertools.islice(self._entries, min(ahead, len(self._entries) - 1) + 1))
        wr_id = super().complete(ticket)
        for _, removed in done:
            for handle in removed:
                self._tagged.release(handle._ticket)
        return wr_id
