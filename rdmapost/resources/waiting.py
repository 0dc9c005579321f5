"""What threads and tasks wait for: the completions of a CQ, the events of a channel or a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from .._arguments import seconds
from .._binding import native
from ..errors import RdmaError
from .resource import Resource

_Event = TypeVar("_Event")


class Waitable(Resource):
    """A resource that threads and tasks wait on."""

    __slots__ = ("_poller",)

    _poller: native.Poller
    """Who waits, and whose turn it is (``_c/polling/cq.c``)."""

    def _event_fd(self) -> int:
        """Return the descriptor that reports its events."""
        raise NotImplementedError

    def _wake(self) -> None:
        if hasattr(self, "_poller"):
            self._poller.release()


class CompletionSource(Waitable):
    """The part of a CQ that its waiters use."""

    __slots__ = ("_drop_event", "_overrun")

    _drop_event: Callable[[], object]
    """Takes an event off its private channel, if one is pending."""
    _overrun: bool
    """An event has reported that it has overrun."""


class EventSource(Waitable):
    """A resource that reports events: a completion channel, or a device."""

    __slots__ = ("_events",)

    _events: dict[Any, Any]
    """Events taken but not yet returned."""

    def _get_event(self) -> object:
        """Take an event from the device, if one is pending; return None if there is none."""
        raise NotImplementedError

    def _take_event(self) -> object:
        """Take an event, unless one is taken already; return None if there is none."""
        if not self._events:
            self._get_event()
        return self._events or None


def wait_for_event(
    source: EventSource, timeout: Any, next_event: Callable[[Any], _Event | None], refused: str
) -> _Event | None:
    """Wait in a thread for the next event.

    Args:
        source: what reports it.
        timeout: as the caller gave it.
        next_event: returns an event of the source that is taken, and forgets it; or None.  It is
            a Python function, so no interrupt comes between it and the return.
        refused: the error where asyncio tasks wait for the events.
    """
    timeout = seconds(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        result = source._poller.until(source, source._event_fd(), source._take_event, left, False)
        if result is NotImplemented:
            raise RdmaError(refused)
        # Another thread may get it instead.
        if (event := next_event(source)) is not None or result is None:
            return event
