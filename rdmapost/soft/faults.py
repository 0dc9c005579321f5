"""Faults on purpose, for the tests of those who use the library.

A plan belongs to an open device.  Each fault is used up when it strikes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from .._arguments import member, within
from .._binding import door
from ..enums import WCStatus
from .table import Table

__all__ = ["FaultPlan"]

_LARGEST_ERRNO = 4095
"""As the kernel has it."""


class FaultPlan(door.Record):
    """What is to go wrong.

    Args:
        wr_id_of: returns the caller's wr_id of a work request that the device
            knows by another, or None.
    """

    def __init__(self, wr_id_of: Callable[[int], int | None]) -> None:
        self._wr_id_of = wr_id_of
        self.posts: dict[int, int] = {}
        self.statuses: dict[int, WCStatus] = Table()
        self.refusals: dict[int, int] = Table()
        self.posted = [0]
        """How many, counted by C while any is to fail."""

    def clear(self) -> None:
        """Let everything work again."""
        self.posts.clear()
        self.statuses.clear()
        self.refusals.clear()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("cannot copy 'FaultPlan' object: it belongs to an open device")

    # ---- planning -----------------------------------------------------------

    def fail_post(self, errno: int, *, after: int = 0) -> None:
        """Refuse a send work request with an errno.

        Args:
            errno: what the post returns, 1..4095.
            after: how many send work requests are let through before it.

        Raises:
            TypeError: one is not an integer.
            ValueError: one is out of range.
        """
        errno, after = within("errno", errno, 1, _LARGEST_ERRNO), within("after", after, 0)
        door.plan_failure(self.posts, self.posted, after, errno)

    def complete_with(self, wr_id: int, status: WCStatus) -> None:
        """Let a send work request complete with a status.

        Args:
            wr_id: its wr_id, as it is posted.
            status: the status.

        Raises:
            TypeError: one is not an integer.
            ValueError: wr_id is out of range, or there is no such status.
        """
        self.statuses[within("wr_id", wr_id, 0, (1 << 64) - 1)] = member("status", status, WCStatus)

    def not_ready(self, qp_num: int, times: int) -> None:
        """Let a queue pair behave as if no receive were posted.

        Args:
            qp_num: its number.
            times: for how many attempts to send to it.

        Raises:
            TypeError: one is not an integer.
            ValueError: one is out of range.
        """
        self.refusals[within("qp_num", qp_num, 0, (1 << 24) - 1)] = within("times", times, 0)

    # ---- striking -----------------------------------------------------------

    def take_status(self, wr_id: int) -> WCStatus | None:
        """Return the status that a work request is to complete with, or None.

        Args:
            wr_id: as the device knows it.
        """
        theirs = self._wr_id_of(wr_id)
        return None if theirs is None else self.statuses.pop(theirs, None)

    def refuse_receive(self, qp_num: int) -> bool:
        """Whether a queue pair is to behave as if no receive were posted.

        Args:
            qp_num: its number.
        """
        left = self.refusals.pop(qp_num, 0)
        if left > 1:
            self.refusals[qp_num] = left - 1
        return left > 0
