"""Base classes for what threads and tasks wait on: CQs, completion channels and devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from .._arguments import index, seconds
from .._binding import native
from ..errors import RdmaError
from .resource import Resource

_Event = TypeVar("_Event")
_Result = TypeVar("_Result")


class Waitable(Resource):
    """A resource that threads and tasks wait on."""

    __slots__ = ("_poller",)

    _poller: native.Poller
    """Records the waiters, and which one sleeps on the descriptor (``_c/polling/poller.h``)."""

    def _event_fd(self) -> int:
        """Return the descriptor that reports its events."""
        raise NotImplementedError

    def _wake(self) -> None:
        if hasattr(self, "_poller"):
            self._poller.wake_all()


class CompletionSource(Waitable):
    """The part of a CQ that its waiters use."""

    __slots__ = ("_drop_event", "_overrun")

    _drop_event: Callable[[], object]
    """Read and acknowledge a pending event of the CQ's own channel."""
    _overrun: bool
    """Whether an event has reported an overrun."""


class EventSource(Waitable):
    """A resource that reports events: a completion channel, or a device."""

    __slots__ = ("_events",)

    _events: dict[Any, Any]
    """Events read but not yet returned."""

    def _get_event(self) -> object:
        """Read an event from the device, if one is pending; otherwise return None."""
        raise NotImplementedError

    def _take_event(self) -> object:
        """Return the events already read, or one read now; return None if none is pending."""
        if not self._events:
            self._get_event()
        return self._events or None


def check_max_entries(count: Any, max_entries: Any) -> tuple[int, int]:
    """Return the minimum and maximum number of completions that a wait returns, as ints."""
    count, max_entries = index("count", count), index("max_entries", max_entries)
    if max_entries < count:
        raise ValueError(f"max_entries={max_entries} is less than count={count}")
    return count, max_entries


def wait_for_descriptor(
    owner: Waitable, descriptor: int, attempt: Callable[[], _Result | None], timeout: float | None
) -> _Result | None:
    """Wait in a thread for a descriptor that is not the device's, such as a socket's.

    Args:
        owner: closing it ends the wait.
        descriptor: sleep until it is readable.
        attempt: called first, and whenever the descriptor is readable; it must not block.  Its
            result ends the wait unless it is None.
        timeout: seconds; None for no limit.

    Returns:
        The attempt's result, or None if there was none in time.

    Raises:
        ClosedError: the owner is closed, or is closed during the wait.
    """
    return owner._poller.until(owner, descriptor, attempt, timeout, False)  # type: ignore[no-any-return]


def wait_for_event(
    source: EventSource, timeout: Any, next_event: Callable[[Any], _Event | None], refused: str
) -> _Event | None:
    """Wait in a thread for the next event.

    Args:
        source: the resource that reports the event.
        timeout: seconds, not checked yet.
        next_event: removes and returns an event that the source has read, or returns None. It must
            be a Python function, so that no interrupt comes between the removal and the return.
        refused: the error message if asyncio tasks are waiting for the events.
    """
    timeout = seconds(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        result = source._poller.until(source, source._event_fd(), source._take_event, left, False)
        if result is NotImplemented:
            raise RdmaError(refused)
        # Another thread may get the event instead.
        if (event := next_event(source)) is not None or result is None:
            return event
