"""Asynchronous events: what happens to a device and its resources apart from completions."""

from __future__ import annotations

import time
from typing import NamedTuple

from ._arguments import expect, seconds
from ._resource import Resource, resource_at
from .device import Context
from .enums import EventType
from .errors import RdmaError

__all__ = ["AsyncEvent", "get_async_event"]


class AsyncEvent(NamedTuple):
    """An asynchronous event (``struct ibv_async_event``, ibv_get_async_event(3)).

    Attributes:
        event_type: what happened: an EventType, or the number of one that
            only a newer libibverbs knows.
        element: the QP, CQ or SRQ that it happened to, or the number of the
            port; None if the resource has been closed, if the event is the
            device's own, and for a type that is not known.
    """

    event_type: EventType | int
    element: Resource | int | None


def get_async_event(context: Context, timeout: float | None = 0.0) -> AsyncEvent | None:
    """Return the next asynchronous event of a device, and acknowledge it.

    ``context.async_fd`` is readable when there is one.  If a signal handler
    raises (KeyboardInterrupt) after an event was taken and before it is
    returned, the next call returns it.

    Args:
        context: an open device.
        timeout: seconds to wait for one; None waits as long as it takes.

    Returns:
        The event, or None when none came in time.

    Raises:
        TypeError: an argument is of another type.
        ValueError: timeout is NaN.
        RdmaError: tasks wait for the events of the device.
        ClosedError: the device is closed, or another thread closes it.
        VerbsError: the device failed.

    See ibv_get_async_event(3).
    """
    expect("context", context, Context)
    timeout = seconds(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        there = context._poller.until(context, context.async_fd, context._take_event, left, False)
        if there is NotImplemented:
            raise RdmaError(
                f"tasks wait for the events of {context}: take them with aio.get_async_event()"
            )
        # Another thread may return it instead.
        if (found := next_taken(context)) is not None or there is None:
            return found


def next_taken(context: Context) -> AsyncEvent | None:
    """Return the oldest of the events that are taken, and forget it; None if there is none."""
    events = context._events
    for key, taken in events.copy().items():
        number, element = context._provider.read_async_event(taken)
        if element is not None and not isinstance(element, int):
            element = resource_at(element)
        found = AsyncEvent(_type_of(number), element)
        try:
            # After this there is no call, hence no interrupt, until the caller has it.
            del events[key]
        except KeyError:
            # Another thread returns this one.
            continue
        return found
    return None


def _type_of(number: int) -> EventType | int:
    try:
        return EventType(number)
    except ValueError:
        return number
