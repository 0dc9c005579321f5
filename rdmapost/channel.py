"""Completion channels: a file descriptor that tells which CQs have completions."""

from __future__ import annotations

import operator
import os
import select
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from ._arguments import expect
from ._binding import address_of
from ._resource import Resource
from .device import Context
from .errors import InUseError, RdmaError

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

    __slots__ = ("_cqs", "_kept", "_lock", "_tasks_wait", "_threads", "context")

    _kind = "completion channel"
    _rank = 6

    def __init__(self, context: Context) -> None:
        expect("context", context, Context)
        self.context = context
        self._cqs: dict[int, weakref.ref[CQ]] = {}
        self._kept: deque[CQ] = deque()
        """Whose events an event loop has taken, and nobody has asked for yet."""
        self._lock = threading.Lock()
        self._threads = 0
        self._tasks_wait = False
        provider = context._provider
        self._make(
            provider.create_comp_channel, (context,), provider.destroy_comp_channel, (context,)
        )
        # An event that another thread took must not block this one.
        os.set_blocking(self.fileno(), False)

    def _release(self) -> None:
        with self._lock:
            if self._threads or self._tasks_wait:
                raise InUseError(f"{self} cannot be closed: a thread or task waits for its events")

    def _leave_to_tasks(self) -> None:
        """Let an event loop take all events, for the tasks that wait for them."""
        with self._lock:
            self._live()
            if self._threads:
                raise RdmaError(
                    f"a thread waits in get_cq_event() on this {self}, and takes the events that "
                    "tasks would wait for: let either threads or tasks wait"
                )
            self._tasks_wait = True

    def _take_from_tasks(self) -> None:
        with self._lock:
            self._tasks_wait = False

    def _cq_at(self, address: int) -> CQ | None:
        """Return the CQ whose struct is at an address, if it is still there."""
        found = self._cqs.get(address)
        return None if found is None else found()

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
            ClosedError: the channel is closed.
            VerbsError: the device failed.

        See ibv_get_cq_event(3).
        """
        with self._lock:
            self._live()
            if self._tasks_wait:
                raise RdmaError(
                    f"tasks wait for the events of this {self}: take them with aio.get_cq_event()"
                )
            self._threads += 1
        try:
            return self._next_event(timeout)
        finally:
            with self._lock:
                self._threads -= 1

    def _next_event(self, timeout: float | None) -> CQ | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        provider = self.context._provider
        while True:
            if (kept := self._kept_event()) is not None:
                return kept
            struct = provider.get_cq_event(self._live())
            if struct is not None:
                provider.ack_cq_events(struct, 1)
                if (cq := self._cq_at(address_of(struct))) is not None:
                    return cq
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            wait_readable(self.fileno(), left)


class OwnChannel(CompChannel):
    """The completion channel of one CQ that was given none."""

    __slots__ = ()

    _inner = True


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
