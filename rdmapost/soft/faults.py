"""Faults on purpose, for the tests of those who use the library.

A plan belongs to a device.  Each fault is used up when it strikes.
"""

from __future__ import annotations

from ..enums import WCStatus

__all__ = ["FaultPlan"]


class FaultPlan:
    """What is to go wrong."""

    def __init__(self) -> None:
        self._posts: dict[int, int] = {}
        self._statuses: dict[int, WCStatus] = {}
        self._refusals: dict[int, int] = {}
        self._seen = 0

    def clear(self) -> None:
        """Let everything work again."""
        self.__init__()  # type: ignore[misc]

    # ---- planning -----------------------------------------------------------

    def fail_post(self, errno: int, *, after: int = 0) -> None:
        """Refuse a send work request with an errno.

        Args:
            errno: what the post returns, positive.
            after: how many send work requests are let through before it.
        """
        self._posts[self._seen + after] = errno

    def complete_with(self, wr_id: int, status: WCStatus) -> None:
        """Let the send work request with this wr_id complete with a status."""
        self._statuses[wr_id] = WCStatus(status)

    def not_ready(self, qp_num: int, times: int) -> None:
        """Let a queue pair behave as if no receive were posted, so many times."""
        self._refusals[qp_num] = times

    # ---- striking -----------------------------------------------------------

    def errno_of_post(self) -> int:
        """Return the errno of the send work request that is being posted, or 0."""
        if not self._posts:
            self._seen += 1
            return 0
        self._seen += 1
        return self._posts.pop(self._seen - 1, 0)

    def status_of(self, wr_id: int) -> WCStatus | None:
        """Return the status that a work request is to complete with, or None."""
        if not self._statuses:
            return None
        return self._statuses.pop(wr_id, None)

    def refuse_receive(self, qp_num: int) -> bool:
        """Whether a queue pair is to behave as if no receive were posted."""
        left = self._refusals.get(qp_num, 0)
        if left:
            self._refusals[qp_num] = left - 1
        return left > 0
