"""Fault injection: the ``faults`` of an open soft0 or roce device, for its users' tests."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from .._arguments import expect, member, seconds, time_limit, within
from ..enums import WCStatus

_LARGEST_ERRNO = 4095
"""As in the kernel."""
_MAX_AFTER = (1 << 63) - 1


class PacketFaults(NamedTuple):
    """What happens to packets, and how often; the fields are named as in FaultPlan.packets."""

    drop: float
    duplicate: float
    delay: float
    reorder: float
    corrupt: float
    delay_by: float
    seed: int


class FaultPlan:
    """The faults planned for an open device, its ``faults``; opening the device creates it.

    Each call to ``fail_post`` or ``complete_with`` fails one work request, so three calls fail
    three; a call to ``not_ready`` replaces an earlier one for the same queue pair.

    Args:
        planned: the faults, as the device reads them.
        device: the device.
    """

    __slots__ = ("_device", "_planned")

    def __init__(self, planned: Any, device: Any) -> None:
        self._planned = planned
        self._device = device

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("cannot copy or pickle 'FaultPlan' object: it belongs to an open device")

    def __repr__(self) -> str:
        return f"<rdmapost.FaultPlan of {self._device.name}>"

    def clear(self) -> None:
        """Cancel all planned faults."""
        for faults in (self._planned.posts, self._planned.statuses, self._planned.refusals):
            faults.clear()
        self._device.plan_packets(None, True, True)

    def fail_post(self, errno: int, *, after: int = 0) -> None:
        """Refuse a send work request with an errno.

        If another fault already refuses that work request, this fault refuses the next one that no
        other fault refuses.

        Args:
            errno: the errno that the post returns, 1..4095.
            after: how many send work requests to let pass first, 0..2^63-1, including those that
                other faults refuse.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: an argument is out of range.
        """
        errno = within("errno", errno, 1, _LARGEST_ERRNO)
        self._planned.posts.add(within("after", after, 0, _MAX_AFTER), errno)

    def complete_with(self, wr_id: int, status: WCStatus) -> None:
        """Make a send work request complete with a status, without being executed.

        Several statuses planned for one wr_id apply to as many work requests, in order.  With
        SUCCESS, a work request completes as if it had been executed, but nothing arrives at the
        peer.

        Args:
            wr_id: its wr_id, as posted.
            status: the status.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: wr_id is out of range, or the status is unknown.
        """
        wr_id = within("wr_id", wr_id, 0, (1 << 64) - 1)
        planned = self._planned.statuses
        planned[wr_id] = (*planned.get(wr_id, ()), member("status", status, WCStatus))

    def not_ready(self, qp_num: int, times: int) -> None:
        """Make a queue pair behave as if no receive were posted.

        Args:
            qp_num: its number.
            times: how many send attempts to reject.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: an argument is out of range.
        """
        qp_num = within("qp_num", qp_num, 0, (1 << 24) - 1)
        self._planned.refusals[qp_num] = within("times", times, 0)

    def packets(
        self,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        delay_by: float = 0.005,
        seed: int = 0,
        sent: bool = True,
        received: bool = True,
    ) -> None:
        """Treat the device's packets as a bad network would, from now on (roce devices only).

        Each rate is the probability, 0..1, with which something happens to a packet, whatever else
        happens to it.  What happens to the nth packet depends only on the seed and the rates.  The
        plan replaces any earlier one; without rates, it affects no packets.  It covers all queue
        pairs of the device, in all its open contexts.

        Args:
            drop: rate of packets that are lost.
            duplicate: rate of packets that arrive twice.
            delay: rate of packets that arrive ``delay_by`` later.
            reorder: rate of packets that the next packet overtakes; if none follows, they arrive
                2 ms later.
            corrupt: rate of packets in which a bit is flipped.  The ICRC reveals this, so the
                receiver drops them.
            delay_by: seconds, more than 0.
            seed: chooses the packets, 0..2^64-1.
            sent: apply the plan to packets that the device sends; if False, an earlier plan for
                them stays in force.
            received: the same for packets that the device receives.

        Raises:
            TypeError: a rate, delay_by or seed is not a number, or sent or received is not a bool.
            ValueError: an argument is out of range.
            UnsupportedError: the device is soft0, which has no packets.
        """
        rates = {
            "drop": drop,
            "duplicate": duplicate,
            "delay": delay,
            "reorder": reorder,
            "corrupt": corrupt,
        }
        plan = PacketFaults(
            **{name: _rate(name, rate) for name, rate in rates.items()},
            delay_by=time_limit(delay_by, "delay_by"),
            seed=within("seed", seed, 0, (1 << 64) - 1),
        )
        expect("sent", sent, bool)
        expect("received", received, bool)
        self._device.plan_packets(plan, sent, received)


def _rate(name: str, given: Any) -> float:
    rate = seconds(given, name, "number")
    if rate is None:
        raise TypeError(f"{name}: expected number, got NoneType")
    if not 0 <= rate <= 1:
        raise ValueError(f"{name}={given} is not in 0..1")
    return rate
