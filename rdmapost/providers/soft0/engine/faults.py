"""Fault injection for your own tests.  Each fault fires once."""

from __future__ import annotations

from typing import Any, NoReturn

from ...._arguments import member, within
from ....enums import WCStatus

__all__ = ["FaultPlan"]

_LARGEST_ERRNO = 4095
"""As in the kernel."""
_MOST_BEFORE = (1 << 63) - 1


class FaultPlan:
    """The faults planned for an open device: its ``faults``.

    Args:
        planned: where the device looks for them.
    """

    __slots__ = ("_planned",)

    def __init__(self, planned: Any) -> None:
        self._planned = planned

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("cannot copy or pickle 'FaultPlan' object: it belongs to an open device")

    def clear(self) -> None:
        """Make everything work again."""
        self._planned.clear()

    def fail_post(self, errno: int, *, after: int = 0) -> None:
        """Refuse a send work request with an errno.

        Args:
            errno: what the post returns, 1..4095.
            after: how many send work requests are let through before it, 0..2^63-1.

        Raises:
            TypeError: one is not an integer.
            ValueError: one is out of range.
        """
        errno = within("errno", errno, 1, _LARGEST_ERRNO)
        self._planned.posts.add(within("after", after, 0, _MOST_BEFORE), errno)

    def complete_with(self, wr_id: int, status: WCStatus) -> None:
        """Make a send work request complete with a status.

        Args:
            wr_id: its wr_id, as posted.
            status: the status.

        Raises:
            TypeError: one is not an integer.
            ValueError: wr_id is out of range, or there is no such status.
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
