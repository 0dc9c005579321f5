"""Numbers for a device's objects (queue pairs, keys, handles), unique among those in use."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable

from ..._binding import native
from ...errors import VerbsError


class Numbers(native.Record):
    """The numbers first..last, in order; after the last one, those that have become free.

    Args:
        first, last: the range.
        start: the number to begin with; by default the first.
    """

    __slots__ = ("_next", "first", "last")

    def __init__(self, first: int, last: int, start: int | None = None) -> None:
        self.first = first
        self.last = last
        self._next = first if start is None else start

    def choose(self, call: str, what: str, is_taken: Callable[[int], bool]) -> int:
        """Return a number that is not in use.

        Args:
            call: the verb that needs it.
            what: what the error message calls the numbers, in the plural.
            is_taken: whether a number is in use.

        Raises:
            VerbsError: ENOMEM: all are in use.
        """
        number, first, last = self._start(), self.first, self.last
        for _ in range(first, last + 1):
            following = number + 1 if number < last else first
            if not is_taken(number):
                self._next = following
                return number
            number = following
        raise VerbsError(call, errno.ENOMEM, f"all {what} are in use")

    def _start(self) -> int:
        """Return the number to try first."""
        return self._next


class RandomNumbers(Numbers):
    """Numbers that a stranger on the network cannot guess."""

    __slots__ = ()

    def _start(self) -> int:
        return self.first + secrets.randbelow(self.last - self.first + 1)
