"""Completion channels: a file descriptor that tells which CQs have completions."""

from __future__ import annotations

import atexit
import functools
import operator
import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._arguments import expect
from ._binding import address_of, door
from ._resource import Resource
from .device import Context
from .errors import RdmaError

if TYPE_CHECKING:
    from .completion import CQ

__all__ = ["CompChannel"]

_FD = operator.attrgetter("fd")
_LONGEST_SLEEP_S = 3600
"""poll(2) counts milliseconds in an int."""


class CompChannel(Resource):
    """A completion channel that CQs share (ibv_create_comp_channel(3)).

    ``CQ(context, channel=...)`` announces its completions here, once for each
    ``cq.req_notify()``.  ``fileno()`` is for select, poll and event loops.

    Args:
        context: an open device.

    Raises:
        TypeError: an argument is of another type.
        ClosedError: the device is closed.
        VerbsError: the device has no more.
    """

    __slots__ = ("_cqs", "_get_event", "_kept", "_waiters", "context")

    _kind = "completion channel"
    _rank = 6

    def __init__(self, context: Context) -> None:
        expect("context", context, Context)
        self.context = context
        self._cqs: dict[int, weakref.ref[CQ]] = {}
        self._kept: deque[CQ] = deque()
        """Whose events an event loop has taken, and nobody has asked for yet."""
        self._waiters = door.Waiters()
        provider = context._provider
        handle = self._make(
            provider.create_comp_channel, (context,), provider.destroy_comp_channel, (context,)
        )
        # An event that another thread took must not block this one.
        os.set_blocking(handle.fd, False)
        self._get_event = functools.partial(provider.get_cq_event, handle)

    def _wake(self) -> None:
        if hasattr(self, "_waiters"):
            self._waiters.release()

    def _claim(self, tell: Callable[[], object]) -> None:
        """Let an event loop take all events, for the tasks that wait for them.

        Args:
            tell: called, in any thread, when the channel is closed.
        """
        if not self._waiters.claim(tell):
            raise RdmaError(
                f"a thread waits in get_cq_event() on this {self}, and takes the events that "
                "tasks would wait for: let either threads or tasks wait"
            )

    def _unclaim(self, tell: Callable[[], object]) -> None:
        self._waiters.unclaim(tell)

    def _cq_at(self, address: int) -> CQ | None:
        """Return the CQ whose struct is at an address, if it is still there."""
        found = self._cqs.get(address)
        return None if found is None else found()

    def _keep_events(self, cqs: list[CQ]) -> None:
        """Keep events that an event loop has taken for whoever asks."""
        self._kept.extend(cqs)

    def _kept_event(self) -> CQ | None:
        """Return a CQ whose event an event loop has taken and nobody has asked for."""
        while self._kept:
            cq = self._kept.popleft()
            if not cq.closed:
                return cq
        return None

    def _announced_by(self, cq: CQ) -> None:
        """Know a CQ by its struct, which is all that an event tells."""
        self._cqs[address_of(cq._handle)] = weakref.ref(cq)

    def fileno(self) -> int:
        """Return the file descriptor; it is readable when there is an event.

        Raises:
            ClosedError: the channel is closed.
        """
        fd: int = self._verb(_FD)
        return fd

    def get_cq_event(self, timeout: float | None = 0.0) -> CQ | None:
        """Return the CQ of the next event, and acknowledge it.

        The CQ announces nothing more until its next ``req_notify()``; poll it
        after that call, for what came in between is not announced.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            The CQ, or None when no event came in time.

        Raises:
            RdmaError: tasks wait for its events.
            ClosedError: the channel is closed, or another thread closes it.
            VerbsError: the device failed.

        See ibv_get_cq_event(3).
        """
        event = self._waiters.until(self, self.fileno(), self._take_event, timeout, False)
        if event is NotImplemented:
            raise RdmaError(
                f"tasks wait for the events of this {self}: take them with aio.get_cq_event()"
            )
        return event  # type: ignore[no-any-return]

    def _event_for_tasks(self) -> CQ | None:
        """Return the CQ of the next event that is there, or None."""
        return self._waiters.until(  # type: ignore[no-any-return]
            self, -1, self._take_event, 0.0, True
        )

    def _take_event(self) -> CQ | None:
        while True:
            if (kept := self._kept_event()) is not None:
                return kept
            struct = self._get_event()
            if struct is None:
                return None
            self.context._provider.ack_cq_events(struct, 1)
            if (cq := self._cq_at(address_of(struct))) is not None:
                return cq


class OwnChannel(CompChannel):
    """The completion channel of one CQ that was given none."""

    __slots__ = ()

    _inner = True


# Runs before what closes all resources (_resource.py), because it is registered later.
atexit.register(door.end_waits)


def wait_readable(fd: int, seconds: float | None) -> bool:
    """Sleep until a descriptor is readable; return whether it is.

    Args:
        fd: the descriptor.
        seconds: for how long at most; None for as long as it takes.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    # Rounded up, so that a short wait does not become a busy one.
    return bool(poller.poll(None if seconds is None else min(seconds, _LONGEST_SLEEP_S) * 1000 + 1))
