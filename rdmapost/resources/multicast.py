"""Multicast groups that a queue pair is attached to."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import TypeAlias

from ..errors import RdmaError
from .device import GID, Context

Group: TypeAlias = tuple[GID, int]
"""A group's GID and its LID."""

_numbers = itertools.count()


class MulticastGroups:
    """The groups that a queue pair is or may be attached to.

    Between a verb and the record of it another thread may do the opposite, so a call takes out only
    what had come to an end before its verb began: the verb came after those.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Group, bool | None]] = {}
        """By the number of the call that attached it: the group, and True once the call has
        returned, False where it was interrupted, None while it runs."""

    def attach(self, verb: Callable[[GID, int], object], group: Group) -> None:
        """Call the verb that attaches to a group, and record whether it succeeded."""
        before = self._ended(group)
        number = next(_numbers)
        # Before the call, which an interrupt may end.
        self._calls[number] = group, None
        try:
            verb(*group)
        except RdmaError:
            self._calls.pop(number, None)
            raise
        except BaseException:
            self._calls[number] = group, False
            raise
        self._calls[number] = group, True
        self._take_out(before)

    def detach(self, verb: Callable[[GID, int], object], group: Group) -> None:
        """Call the verb that detaches from a group, and record it."""
        before = self._ended(group)
        verb(*group)
        self._take_out(before)

    def attached(self) -> set[Group]:
        """Return the groups that it is attached to."""
        return {group for group, on in self._calls.copy().values() if on}

    def all(self) -> set[Group]:
        """Return these, and those that it may be attached to."""
        return {group for group, _ in self._calls.copy().values()}

    def _ended(self, group: Group) -> list[int]:
        """Return the numbers of the calls that have attached it to a group, and have ended."""
        calls = self._calls.copy().items()
        return [number for number, (noted, on) in calls if on is not None and noted == group]

    def _take_out(self, numbers: list[int]) -> None:
        for number in numbers:
            self._calls.pop(number, None)


def why_not_attached(context: Context, code: int | None) -> str:
    """Say what a device may have refused about a group."""
    attr, name = context.attr, context.name
    if not attr.max_mcast_grp:
        return f"{name} has no multicast"
    if code == errno.ENOMEM:
        return (
            f"{name} has at most {attr.max_mcast_grp} groups (max_mcast_grp), with "
            f"{attr.max_mcast_qp_attach} queue pairs each (max_mcast_qp_attach)"
        )
    return f"{name} does not take this GID and LID; on InfiniBand a group has a LID"
