"""Asynchronous events: what happens to a device and its resources besides completions."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from .._arguments import expect
from ..enums import EventType
from ..errors import ClosedError, RdmaError, WaitTimeout
from .device import Context, provider_of
from .resource import Resource, resource_at
from .waiting import CompletionSource, wait_for_event

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
    returned, the next call returns it.  Events of a resource that is closed before
    they are taken are dropped; others are kept until they are taken.

    Args:
        context: an open device.
        timeout: seconds to wait for one; None for no limit.

    Returns:
        The event, or None if none came in time.

    Raises:
        TypeError: an argument is of another type.
        ValueError: timeout is NaN.
        RdmaError: asyncio tasks wait for the events of the device.
        ClosedError: the device is closed, or is closed during the wait.
        VerbsError: the device failed.

    See ibv_get_async_event(3).
    """
    expect("context", context, Context)
    return wait_for_event(
        context,
        timeout,
        next_taken,
        f"tasks wait for the events of {context}: take them with aio.get_async_event()",
    )


def next_taken(context: Context) -> AsyncEvent | None:
    """Return the oldest event taken, and forget it; None if there is none."""
    for key, taken in context._events.copy().items():
        found = _read(context, taken)
        if found.event_type is EventType.CQ_ERR and isinstance(found.element, CompletionSource):
            found.element._overrun = True
        try:
            # From here no call, and so no interrupt, comes before the caller has it.
            del context._events[key]
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
        if cq._overrun or cq._verb(provider_of(context).has_overrun):
            return True
    taken = [_read(context, event) for event in context._events.copy().values()]
    return any(one.event_type is EventType.CQ_ERR and one.element is cq for one in taken)


def timed_out(cq: Any, available: int, count: int, timeout: float | None) -> WaitTimeout:
    """Return the error of a wait for completions that was too short."""
    text = f"{available} of {count} completions came within {timeout:g} s"
    # soft0 does not know in the middle of another verb.
    with contextlib.suppress(RdmaError):
        if has_overrun(cq):
            text += f"; {OVERRUN}"
    return WaitTimeout(text)


def _read(context: Context, taken: Any) -> AsyncEvent:
    number, element = provider_of(context).read_async_event(taken)
    if element is not None and not isinstance(element, int):
        element = resource_at(element)
    return AsyncEvent(_type_of(number), element)


def _type_of(number: int) -> EventType | int:
    try:
        return EventType(number)
    except ValueError:
        return number
