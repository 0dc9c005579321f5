"""Events that were read from a device or a completion channel, and how they are removed."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

from ..enums import EventType, reported
from ..errors import ClosedError, RdmaError, WaitTimeout, note_status
from .resource import Resource, resource_at
from .waitable import CompletionSource

if TYPE_CHECKING:
    from .channel import CompChannel
    from .cq import CQ
    from .device import Context

OVERRUN = (
    "the CQ has overrun: completions are lost (CQ_ERR); create it with more entries, "
    "or poll it more often"
)
"""What an error message says about a CQ that has overrun."""


class AsyncEvent(NamedTuple):
    """An asynchronous event (``struct ibv_async_event``, ibv_get_async_event(3)).

    Attributes:
        event_type: what happened; a number if only a newer libibverbs knows it.
        element: the QP, CQ or SRQ that the event concerns, or the port's
            number; None if the resource has been closed, the event concerns the
            device as a whole, or its type is unknown.
    """

    event_type: EventType
    element: Resource | int | None


def next_cq_event(channel: CompChannel, cqs: Container[CQ] | None = None) -> CQ | None:
    """Remove an event that was read, and return its CQ; None if there is none.

    Args:
        channel: the channel.
        cqs: return only an event of one of these; None for any.
    """
    for address in channel._events.copy():
        known = channel._cqs.get(address)
        cq = None if known is None else known()
        if cq is not None and cq.closed:
            cq = None
        if cq is not None and cqs is not None and cq not in cqs:
            continue
        try:
            # No call follows, so no interrupt can come before the caller has it.
            del channel._events[address]
        except KeyError:
            # Another thread has taken it.
            continue
        if cq is not None:
            return cq
    return None


def next_async_event(context: Context) -> AsyncEvent | None:
    """Remove and return the oldest event that was read; None if there is none."""
    for key, taken in context._events.copy().items():
        found = _read(context, taken)
        if found.event_type is EventType.CQ_ERR and isinstance(found.element, CompletionSource):
            found.element._overrun = True
        try:
            # No call follows, so no interrupt can come before the caller has it.
            del context._events[key]
        except KeyError:
            # Another thread has taken it.
            continue
        return found
    return None


def has_overrun(cq: Any) -> bool:
    """Whether a CQ is known to have overrun. This takes no event.

    On soft0, an overrun is known at once. libibverbs reports an overrun only in an event, and
    events belong to the caller, so on its devices an overrun is known only once get_async_event()
    has returned that event.
    """
    context = cq.context
    with contextlib.suppress(ClosedError):
        if cq._overrun or cq._verb(context._provider.has_overrun):
            return True
    taken = [_read(context, event) for event in context._events.copy().values()]
    return any([one.event_type is EventType.CQ_ERR and one.element is cq for one in taken])


def timed_out(cq: Any, available: int, count: int, timeout: float | None) -> WaitTimeout:
    """Return the error for a wait in which too few completions came."""
    text = f"{available} of {count} completions came within {max(0.0, timeout or 0.0):g} s"
    failed = cq._poller.first_failed()
    if failed is not None:
        text += f"; {failed._ending()}"
    overrun = False
    # soft0 cannot be asked in the middle of another verb.
    with contextlib.suppress(RdmaError):
        overrun = has_overrun(cq)
    if overrun:
        text += f"; {OVERRUN}"
    error = WaitTimeout(text, failed=failed)
    if failed is not None:
        note_status(error, failed.status)
    elif not overrun:
        error.add_note("qp.diagnose() says what a queue pair waits for")
    return error


def _read(context: Context, taken: Any) -> AsyncEvent:
    number, element = context._provider.read_async_event(taken)
    if element is not None and not isinstance(element, int):
        element = resource_at(element)
    return AsyncEvent(reported(EventType, number), element)
