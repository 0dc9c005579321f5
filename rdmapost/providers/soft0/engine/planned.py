"""What will go wrong on purpose, as the device sees it (users see ``faults``)."""

from __future__ import annotations

from collections.abc import Callable

from ...._binding import native
from ....enums import WCStatus
from .table import Table


class PlannedFaults(native.Record):
    """An open device's faults that have not fired yet.

    Args:
        wr_id_of: returns the caller's wr_id for the device's, or None.

    Attributes:
        posts: the errnos that refuse posts; C reads it in the middle of a post.
        statuses: the statuses with which work requests complete, by wr_id.
        refusals: how often queue pairs are not ready, by number.
    """

    __slots__ = ("_wr_id_of", "posts", "refusals", "statuses")

    def __init__(self, wr_id_of: Callable[[int], int | None]) -> None:
        self._wr_id_of = wr_id_of
        self.posts = native.PostFaults()
        self.statuses: dict[int, WCStatus] = Table()
        self.refusals: dict[int, int] = Table()

    def clear(self) -> None:
        """Make everything work again."""
        self.posts.clear()
        self.statuses.clear()
        self.refusals.clear()

    def take_status(self, wr_id: int) -> WCStatus | None:
        """Return the status with which a work request must complete, or None.

        Args:
            wr_id: as the device knows it.
        """
        theirs = self._wr_id_of(wr_id)
        return None if theirs is None else self.statuses.pop(theirs, None)

    def refuse_receive(self, qp_num: int) -> bool:
        """Whether a queue pair must behave as if no receive were posted.

        Args:
            qp_num: its number.
        """
        left = self.refusals.pop(qp_num, 0)
        if left > 1:
            self.refusals[qp_num] = left - 1
        return left > 0
