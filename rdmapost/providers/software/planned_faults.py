"""The faults that a device has to inject."""

from __future__ import annotations

from collections.abc import Callable

from ..._binding import native
from ...enums import WCStatus
from .journaled_dict import JournaledDict


class PlannedFaults(native.Record):
    """An open device's faults that have not fired yet, as the device sees them.

    Attributes:
        wr_id_of: maps the device's wr_id to the caller's, or to None.
        posts: the errnos with which posts fail; C reads them in the middle of a post.
        statuses: the statuses with which work requests complete, in order, by wr_id.
        refusals: how many more times a queue pair must behave as if no receive were posted, by the
            queue pair's number.
    """

    __slots__ = ("posts", "refusals", "statuses", "wr_id_of")

    def __init__(self) -> None:
        self.wr_id_of: Callable[[int], int | None] = int
        self.posts = native.PostFaults()
        self.statuses: dict[int, tuple[WCStatus, ...]] = JournaledDict()
        self.refusals: dict[int, int] = JournaledDict()

    def take_status(self, cookie: int) -> WCStatus | None:
        """Return the status with which a work request must complete, or None."""
        wr_id = self.wr_id_of(cookie)
        if wr_id is None:
            return None
        planned = self.statuses.pop(wr_id, ())
        if len(planned) > 1:
            self.statuses[wr_id] = planned[1:]
        return planned[0] if planned else None

    def refuse_receive(self, qp_num: int) -> bool:
        """Whether a queue pair must behave as if no receive were posted."""
        left = self.refusals.pop(qp_num, 0)
        if left > 1:
            self.refusals[qp_num] = left - 1
        return left > 0
