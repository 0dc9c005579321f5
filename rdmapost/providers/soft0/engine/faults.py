"""Fault injection for your own tests. Each fault fires once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ...._arguments import member, within
from ...._binding import native
from ....enums import WCStatus
from .journaled_dict import JournaledDict

__all__ = ["FaultPlan"]

_LARGEST_ERRNO = 4095
"""As in the kernel."""
_MAX_AFTER = (1 << 63) - 1


class PlannedFaults(native.Record):
    """An open device's faults that have not fired yet, as the device sees them.

    Attributes:
        wr_id_of: returns the caller's wr_id for the device's, or None.
        posts: the errnos that refuse posts; C reads it in the middle of a post.
        statuses: the statuses with which work requests complete, by wr_id.
        refusals: how often queue pairs are not ready, by number.
    """

    __slots__ = ("posts", "refusals", "statuses", "wr_id_of")

    def __init__(self) -> None:
        self.wr_id_of: Callable[[int], int | None] = int
        self.posts = native.PostFaults()
        self.statuses: dict[int, WCStatus] = JournaledDict()
        self.refusals: dict[int, int] = JournaledDict()

    def take_status(self, cookie: int) -> WCStatus | None:
        """Return the status with which a work request must complete, or None."""
        wr_id = self.wr_id_of(cookie)
        return None if wr_id is None else self.statuses.pop(wr_id, None)

    def refuse_receive(self, qp_num: int) -> bool:
        """Whether a queue pair must behave as if no receive were posted."""
        left = self.refusals.pop(qp_num, 0)
        if left > 1:
            self.refusals[qp_num] = left - 1
        return left > 0


class FaultPlan:
    """The faults planned for an open device: its ``faults``.

    Args:
        planned: the faults, as the device reads them.
    """

    __slots__ = ("_planned",)

    def __init__(self, planned: Any) -> None:
        self._planned = planned

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("cannot copy or pickle 'FaultPlan' object: it belongs to an open device")

    def clear(self) -> None:
        """Cancel all planned faults."""
        for faults in (self._planned.posts, self._planned.statuses, self._planned.refusals):
            faults.clear()

    def fail_post(self, errno: int, *, after: int = 0) -> None:
        """Refuse a send work request with an errno.

        Args:
            errno: what the post returns, 1..4095.
            after: how many send work requests to accept first, 0..2^63-1.

        Raises:
            TypeError: one is not an integer.
            ValueError: one is out of range.
        """
        errno = within("errno", errno, 1, _LARGEST_ERRNO)
        self._planned.posts.add(within("after", after, 0, _MAX_AFTER), errno)

    def complete_with(self, wr_id: int, status: WCStatus) -> None:
        """Make a send work request complete with a status.

        Args:
            wr_id: its wr_id, as posted.
            status: the status.

        Raises:
            TypeError: one is not an integer.
            ValueError: wr_id is out of range, or the status is unknown.
        """
        wr_id = within("wr_id", wr_id, 0, (1 << 64) - 1)
        self._planned.statuses[wr_id] = member("status", status, WCStatus)

    def not_ready(self, qp_num: int, times: int) -> None:
        """Make a queue pair behave as if no receive were posted.

        Args:
            qp_num: its number.
            times: how many send attempts to reject.

        Raises:
            TypeError: one is not an integer.
            ValueError: one is out of range.
        """
        qp_num = within("qp_num", qp_num, 0, (1 << 24) - 1)
        self._planned.refusals[qp_num] = within("times", times, 0)
