"""Records of the groups a queue pair is attached to; QP.attach_mcast (qp.py) calls the verb."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import TypeAlias

from ..errors import RdmaError
from .device import Context
from .gid import GID

Group: TypeAlias = tuple[GID, int]
"""A group's GID and its LID."""

_numbers = itertools.count()


class MulticastGroups:
    """The groups that a queue pair is or may be attached to.

    Threads may attach and detach concurrently. A call removes only the records of calls that had
    ended before its own verb began: if two verbs overlap, it is unknown which took effect last.
    """

    __slots__ = ("_calls", "_seen")

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Group, bool | None]] = {}
        """For each attach call, by number: the group, and True once the call has returned, False if
        it was interrupted, None while it runs."""
        self._seen: set[Group] = set()
        """Groups that may have a record already; a group that is not here has none."""

    def attach(self, verb: Callable[[GID, int], object], group: Group) -> None:
        """Call the verb that attaches to a group, and record whether it succeeded."""
        before = self._ended(group) if group in self._seen else []
        self._seen.add(group)
        number = next(_numbers)
        # Record the call first: an interrupt may end it.
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
        """Call the verb that detaches from a group, and remove the group's records."""
        before = self._ended(group)
        verb(*group)
        self._take_out(before)
        self._seen.discard(group)

    def attached(self) -> set[Group]:
        """Return the groups that the queue pair is attached to."""
        return {group for group, on in self._calls.copy().values() if on}

    def all(self) -> set[Group]:
        """Return the groups that the queue pair is or may be attached to."""
        return {group for group, _ in self._calls.copy().values()}

    def _ended(self, group: Group) -> list[int]:
        """Return the keys of those of a group's attach calls that have finished or been
        interrupted."""
        calls = self._calls.copy().items()
        return [number for number, (noted, on) in calls if on is not None and noted == group]

    def _take_out(self, numbers: list[int]) -> None:
        for number in numbers:
            self._calls.pop(number, None)


def why_not_attached(context: Context, code: int | None) -> str:
    """Say why a device may have refused a group."""
    attr, name = context.attr, context.name
    if not attr.max_mcast_grp:
        return f"{name} has no multicast"
    if code == errno.ENOMEM:
        return (
            f"{name} has at most {attr.max_mcast_grp} groups (max_mcast_grp), with "
            f"{attr.max_mcast_qp_attach} queue pairs each (max_mcast_qp_attach)"
        )
    return f"{name} does not accept this GID and LID; on InfiniBand, a group has a LID"
