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

__all__ = ["HANDLE", "InFlight", "InFlightAny", "Operations", "TaggedReceives"]

_numbers = itertools.count(1)
_COUNT_MASK = 0xFFFF_FFFF

HANDLE = 2
"""Where in the counts the address of the queue's struct stands."""


class InFlight:
    """The work requests of one queue that completes in order.

    An entry is a work request's wr_id and what it refers to, or, for a list
    that was posted in one piece, the list of its wr_ids and a list of what each
    refers to.

    Attributes:
        number: names the queue in its tickets; no two queues of a process share one.
        base: the number's part of a ticket.
        counts: how many have been posted, how many of them are known to be done,
            and the address of the queue's struct while nothing but the work
            request itself can stand against posting it, else 0.
        entries: what is outstanding, the oldest first.
    """

    __slots__ = ("_begun", "base", "counts", "entries", "keep", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.base = self.number << 32
        self.entries: deque[tuple[Any, Sequence[Any]]] = deque()
        self.keep = self.entries.append
        # A list, because the C that posts prepared lists counts there too.
        self.counts = [0, 0, 0]
        self._begun = 0
        """How many work requests of the first entry, a list, are done."""

    @property
    def outstanding(self) -> int:
        """How many work requests are posted and not known to be done."""
        posted, done, _ = self.counts
        return posted - done

    def next_ticket(self) -> int:
        """Return the ticket of the next work request to be recorded."""
        return self.base | self.counts[0] & _COUNT_MASK

    def add(self, wr_id: int, refers_to: Sequence[Any]) -> None:
        """Record a work request about to be posted: keep its entry, and count it."""
        self.keep((wr_id, refers_to))
        self.counts[0] += 1

    def add_list(self, wr_ids: list[int], refers_to: list[Sequence[Any]]) -> None:
        """Record a list about to be posted in one piece; it may be empty."""
        if wr_ids:
            self.entries.append((wr_ids, refers_to))
            self.counts[0] += len(wr_ids)

    def forget_last(self, count: int) -> None:
        """Take back the latest entries: they were not posted after all."""
        self.counts[0] -= count
        entries = self.entries
        while count > 0:
            wr_id, refers_to = entries.pop()
            if type(wr_id) is not list:
                count -= 1
                continue
            if count < len(wr_id):
                left = len(wr_id) - count
                entries.append((wr_id[:left], refers_to[:left]))
            count -= len(wr_id)

    def complete(self, ticket: int) -> int | None:
        """Retire a work request and all before it; return the caller's wr_id.

        A completion of a later work request shows that earlier ones of the
        queue are done (ibv_post_send(3)).  Returns None for a ticket that is
        not outstanding.
        """
        counts = self.counts
        posted, done, _ = counts
        ahead = (ticket - done) & _COUNT_MASK
        if ahead >= posted - done:
            return None
        counts[1] = done + ahead + 1
        entries = self.entries
        try:
            if not ahead and not self._begun:
                # The oldest, as nearly always.
                wr_id, refers_to = entries.popleft()
                if type(wr_id) is not list:
                    return wr_id  # type: ignore[no-any-return]
                entries.appendleft((wr_id, refers_to))
            while True:
                wr_id = entries[0][0]
                if type(wr_id) is not list:
                    entries.popleft()
                    if not ahead:
                        return wr_id  # type: ignore[no-any-return]
                    ahead -= 1
                    continue
                at = self._begun + ahead
                if at < len(wr_id) - 1:
                    self._begun = at + 1
                    return wr_id[at]  # type: ignore[no-any-return]
                ahead -= len(wr_id) - self._begun
                self._begun = 0
                entries.popleft()
                if ahead < 0:
                    return wr_id[at]  # type: ignore[no-any-return]
        except IndexError:
            # Cleared by another thread in this moment.
            return None

    def peek(self, ticket: int) -> int | None:
        """Return the caller's wr_id of an outstanding work request, or None."""
        ahead = (ticket - self.counts[1]) & _COUNT_MASK
        for wr_id, _ in itertools.islice(self.references(), ahead, ahead + 1):
            return wr_id
        return None

    def clear(self) -> None:
        """Forget everything: the queue has been destroyed or reset."""
        self.counts[1] = self.counts[0]
        self.entries.clear()
        self._begun = 0

    def references(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Go through what is outstanding: the wr_id and what it refers to."""
        begun = self._begun
        for wr_id, refers_to in tuple(self.entries):
            if type(wr_id) is list:
                yield from zip(wr_id[begun:], refers_to[begun:], strict=True)
            else:
                yield wr_id, refers_to
            begun = 0


class InFlightAny:
    """The work requests of one queue that completes in any order (an SRQ).

    Attributes:
        number, base, counts: as in InFlight.
    """

    __slots__ = ("_entries", "base", "counts", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.base = self.number << 32
        self._entries: dict[int, tuple[int, Sequence[Any]]] = {}
        self.counts = [0, 0, 0]

    @property
    def outstanding(self) -> int:
        """How many work requests are posted and not known to be done."""
        return len(self._entries)

    def next_ticket(self) -> int:
        """Return the ticket of the next work request to be recorded."""
        return self.base | self.counts[0] & _COUNT_MASK

    def add(self, wr_id: int, refers_to: Sequence[Any]) -> None:
        """Record a work request about to be posted: keep its entry, and count it."""
        self.keep((wr_id, refers_to))
        self.counts[0] += 1

    def add_list(self, wr_ids: list[int], refers_to: list[Sequence[Any]]) -> None:
        """Record a list about to be posted."""
        for wr_id, named in zip(wr_ids, refers_to, strict=True):
            self.add(wr_id, named)

    def keep(self, entry: tuple[int, Sequence[Any]]) -> None:
        """Keep the entry of the work request that is counted next."""
        self._entries[self.counts[0] & _COUNT_MASK] = entry

    def forget_last(self, count: int) -> None:
        """Take back the latest entries: they were not posted after all."""
        for _ in range(count):
            self.counts[0] -= 1
            del self._entries[self.counts[0] & _COUNT_MASK]

    def complete(self, ticket: int) -> int | None:
        """Retire one work request; return the caller's wr_id, or None if it is not here."""
        entry = self._entries.pop(ticket & _COUNT_MASK, None)
        if entry is None:
            return None
        self.counts[1] += 1
        return entry[0]

    def peek(self, ticket: int) -> int | None:
        """Return the caller's wr_id of an outstanding work request, or None."""
        entry = self._entries.get(ticket & _COUNT_MASK)
        return None if entry is None else entry[0]

    def clear(self) -> None:
        """Forget everything: the queue has been destroyed."""
        self.counts[1] = self.counts[0]
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
        ahead = (ticket - self.counts[1]) & _COUNT_MASK
        # A ticket that is not here must not make this go through everything.
        done = list(itertools.islice(self.entries, min(ahead, len(self.entries) - 1) + 1))
        wr_id = super().complete(ticket)
        for _, removed in done:
            for handle in removed:
                self._tagged.release(handle._ticket)
        return wr_id
