"""Completion channels: file descriptors that report which CQs have completions."""

from __future__ import annotations

import functools
import operator
import os
import weakref
from typing import TYPE_CHECKING, Any

from .._arguments import expect
from .._binding import address_of, native
from .device import Context, provider_of
from .events import next_cq_event
from .waitable import EventSource, wait_for_event

if TYPE_CHECKING:
    from .cq import CQ

_FD = operator.attrgetter("fd")


class CompChannel(EventSource, struct="ibv_comp_channel"):
    """A completion channel that CQs share (ibv_create_comp_channel(3)).

    ``CQ(context, channel=...)`` reports its completions here, once for each
    ``cq.req_notify()``.  ``fileno()`` is for select, poll and event loops.

    Args:
        context: an open device.

    Raises:
        TypeError: an argument has the wrong type.
        ClosedError: the device is closed.
        VerbsError: the device has no more channels.
    """

    __slots__ = ("_cqs", "_get", "context")

    _type_name = "completion channel"
    _rank = 6

    def __init__(self, context: Context) -> None:
        expect("context", context, Context)
        self.context = context
        self._cqs: dict[int, weakref.ref[CQ]] = {}
        # Keyed by the address of the CQ's struct.
        self._events = {}
        self._poller = native.Poller(None, {}, {}, 0, 0, -1, None)
        provider = provider_of(context)
        handle = self._make(
            provider.create_comp_channel, (context,), provider.destroy_comp_channel, (context,)
        )
        self._verb(_do_not_block)
        self._get = functools.partial(provider.get_cq_event, handle, self._events)

    def _event_fd(self) -> int:
        return self.fileno()

    def _get_event(self) -> object:
        return self._get()

    def fileno(self) -> int:
        """Return the file descriptor; it is readable when there is an event.

        On soft0 it is also readable when a retry is due: get_cq_event(0) then performs the
        retry, and returns None.

        Raises:
            ClosedError: the channel is closed.
        """
        fd: int = self._verb(_FD)
        return fd

    def get_cq_event(self, timeout: float | None = 5.0) -> CQ | None:
        """Return the CQ of the next event, and acknowledge it.

        The CQ reports nothing more until its next ``req_notify()``.  Poll it after
        that call: completions that come in between are not reported.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The CQ, or None if no event came in time.

        Raises:
            TypeError: timeout is not a number.
            ValueError: timeout is NaN.
            RdmaError: asyncio tasks are waiting for the channel's events.
            ClosedError: the channel is closed, or is closed during the wait.
            VerbsError: the device failed.

        See ibv_get_cq_event(3).
        """
        return wait_for_event(
            self,
            timeout,
            next_cq_event,
            f"tasks wait for the events of this {self}: await its cq_event() there",
        )

    async def cq_event(self, timeout: float | None = 5.0) -> CQ | None:
        """Wait in an asyncio task for the next event: get_cq_event for asyncio.

        If a task waits for a CQ's completions, that task gets the CQ's events.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The CQ, or None if no event came in time.

        Raises:
            TypeError: timeout is not a number.
            ValueError: timeout is NaN.
            RdmaError: a thread or another event loop is already waiting on the channel.
            ClosedError: the channel is closed, or is closed during the wait.
            VerbsError: the device failed.

        See ibv_get_cq_event(3).
        """
        from .aio import cq_event  # asyncio is slow to import

        return await cq_event(self, timeout)


class OwnChannel(CompChannel):
    """The private completion channel of a CQ that was created without one."""

    __slots__ = ()

    _inner = True


def _do_not_block(channel: Any) -> None:
    """Make a channel non-blocking, because another thread may read the event first."""
    os.set_blocking(channel.fd, False)


def announce_on(channel: CompChannel, cq: CQ, struct: Any) -> None:
    """Register a CQ by its struct, which is all that an event carries."""
    address = address_of(struct)
    # A closed CQ at the same address may have left an event.
    channel._events.pop(address, None)
    channel._cqs[address] = weakref.ref(cq)
