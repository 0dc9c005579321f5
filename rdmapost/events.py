"""Asynchronous events: what happens to a device and its resources beside completions."""

from __future__ import annotations

import time
from typing import NamedTuple

from ._binding import address_of
from ._resource import Resource, resource_at
from .channel import wait_readable
from .device import Context
from .enums import EventType

__all__ = ["AsyncEvent", "get_async_event"]


class AsyncEvent(NamedTuple):
    """An asynchronous event (``struct ibv_async_event``, ibv_get_async_event(3)).

    Attributes:
        event_type: what happened.
        element: the QP, CQ or SRQ that it happened to, or the number of the
            port; None where the resource is closed already, or is the device.
    """

    event_type: EventType
    element: Resource | int | None


def get_async_event(context: Context, timeout: float | None = 0.0) -> AsyncEvent | None:
    """Return the next asynchronous event of a device, and acknowledge it.

    ``context.async_fd`` is readable when there is one.

    Args:
        context: an open device.
        timeout: seconds to wait for one; None waits as long as it takes.

    Returns:
        The event, or None when none came in time.

    Raises:
        ClosedError: the device is closed.
        VerbsError: the device failed.

    See ibv_get_async_event(3).
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if (found := context._verb(context._provider.get_async_event)) is not None:
            event_type, element = found
            if not isinstance(element, int):
                element = resource_at(address_of(element))
            return AsyncEvent(EventType(event_type), element)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        wait_readable(context.async_fd, left)
