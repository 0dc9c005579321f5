"""Asynchronous events: what happens to a device and its resources besides completions."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

from .._arguments import expect, seconds
from ..enums import EventType
from ..errors import ClosedError, RdmaError
from .device import Context
from .resource import Resource, resource_at

__all__ = ["OVERRUN", "AsyncEvent", "get_async_event", "has_overrun"]

OVERRUN = (
    "the CQ has overrun: completions are lost (CQ_ERR); create it with more entries, "
    "or poll it more often"
)
"""What to say about a CQ that has overrun."""


class AsyncEvent(NamedTuple):
    """An asynchronous event (``struct ibv_async_event``, ibv_get_async_event(3)).

    Attributes:
        event_type: what happened: an EventType, or the number of one that
            only a newer libibverbs knows.
        element: the QP, CQ or SRQ that it happened to, or the number of the
            port; None if the resource has been closed, the event concerns the
            device as a whole, or its type is unknown.
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
        RdmaError: asyncio tasks wait for the events of the device.
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
    """Return the oldest event taken, and forget it; None if there is none."""
    events = context._events
    for key, taken in events.copy().items():
        found = _read(context, taken)
        if found.event_type is EventType.CQ_ERR and isinstance(found.element, Resource):
            found.element._overrun = True  # type: ignore[attr-defined]
        try:
            # From here no call, and so no interrupt, comes before the caller has it.
            del events[key]
        except KeyError:
            # Another thread returns this one.
            continue
        return found
    return None


def has_overrun(cq: Any) -> bool:
    """Whether a CQ is known to have overrun, without taking an event.

    The software device knows at once. libibverbs reports it only in an event, which belongs to the
    caller: there it is known once get_async_event() has received that.
    """
    context = cq.context
    with contextlib.suppress(ClosedError):
        if cq._overrun or cq._verb(context._provider.has_overrun):
            return True
    taken = [_read(context, event) for event in context._events.copy().values()]
    return any(one.event_type is EventType.CQ_ERR and one.element is cq for one in taken)


def _read(context: Context, taken: Any) -> AsyncEvent:
    number, element = context._provider.read_async_event(taken)
    if element is not None and not isinstance(element, int):
        element = resource_at(element)
    return AsyncEvent(_type_of(number), element)


def _type_of(number: int) -> EventType | int:
    try:
        return EventType(number)
    except ValueError:
        return number
