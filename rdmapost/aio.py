"""Waiting in asyncio tasks for completions and events, on their file descriptors.

``await cq.completions(n)`` and ``async for wc in cq`` are the front of this;
``get_cq_event`` and ``get_async_event`` here are the awaitable ones of their
namesakes.

There is no thread, and nothing is looked at by the clock.  A task asks for an
event, looks again, and only then sleeps; whatever takes an event asks for the
next one and looks again before anybody sleeps on.  So none is missed.

What completes stays in the CQ until a task takes all that it asked for in one
step, in which it cannot be cancelled.  So cancelling loses nothing.

Closing a CQ or a channel, in any thread, raises ClosedError in the tasks that
wait for it.  The event loop watches a duplicate of the descriptor, which it
closes itself, so the number of one that is closed is never watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

from ._resource import Resource
from .errors import ClosedError, RdmaError, WaitTimeout
from .events import AsyncEvent
from .events import get_async_event as take_async_event

if TYPE_CHECKING:
    from .channel import CompChannel
    from .completion import CQ, WC
    from .device import Context

__all__ = ["Completions", "completions", "get_async_event", "get_cq_event"]


class Completions:
    """The completions of a CQ, one after another, without end (``async for wc in cq``).

    Args:
        cq: the CQ; when it is closed the next step raises ClosedError.
    """

    __slots__ = ("_cq",)

    def __init__(self, cq: CQ) -> None:
        self._cq = cq

    def __aiter__(self) -> Completions:
        return self

    async def __anext__(self) -> WC:
        return (await completions(self._cq))[0]


async def completions(cq: CQ, count: int = 1, timeout: float | None = None) -> list[WC]:
    """Wait for completions in a task and return exactly that many (CQ.completions).

    Args:
        cq: the CQ.
        count: how many.
        timeout: seconds; None waits as long as it takes.

    Raises:
        WaitTimeout: fewer came; those stay for the next poll or wait.
        ValueError: count is negative.
        RdmaError: a thread sleeps on the same CQ or channel, or tasks of another event loop do.
        ClosedError: the CQ is closed, now or while it waits.
        VerbsError: the device failed.
    """
    # What has been promised to tasks that are about to run is theirs.
    if (found := cq._take(count, _promised(cq))) is not None:
        return found
    waiter, queue = _Waiter(count), _queue_of(cq)
    with _sleeping(queue, waiter, timeout):
        while True:
            queue.look()
            await waiter.woken
            if (found := cq._take(count)) is not None:
                return found
            if waiter.expired:
                there = cq._look(count)
                raise WaitTimeout(f"{there} of {count} completions came within {timeout:g} s")
            # Another thread's poll() has taken them.
            waiter.sleep()


async def get_cq_event(channel: CompChannel, timeout: float | None = None) -> CQ | None:
    """Return the CQ of the next event, and acknowledge it (CompChannel.get_cq_event).

    Events of a CQ whose completions a task waits for are that task's.

    Args:
        channel: the channel.
        timeout: seconds to wait; None waits as long as it takes.

    Returns:
        The CQ, or None when no event came in time.

    Raises:
        RdmaError: a thread sleeps on the channel, or tasks of another event loop do.
        ClosedError: the channel is closed, now or while it waits.
        VerbsError: the device failed.

    See ibv_get_cq_event(3).
    """
    waiter, source = _Waiter(1), _source(channel, lambda loop: _Shared(loop, channel))
    with _sleeping(source, waiter, timeout):
        while True:
            source.look()
            if (cq := channel._next_event()) is not None:
                return cq
            if waiter.expired:
                return None
            await waiter.woken
            waiter.sleep()


async def get_async_event(context: Context, timeout: float | None = None) -> AsyncEvent | None:
    """Return the next asynchronous event of a device (events.get_async_event).

    Args:
        context: an open device.
        timeout: seconds to wait for one; None waits as long as it takes.

    Returns:
        The event, or None when none came in time.

    Raises:
        RdmaError: tasks of another event loop wait for its events.
        ClosedError: the device is closed.
        VerbsError: the device failed.

    See ibv_get_async_event(3).
    """
    waiter, source = _Waiter(1), _source(context, lambda loop: _Device(loop, context))
    with _sleeping(source, waiter, timeout):
        while True:
            if (event := take_async_event(context)) is not None:
                return event
            if waiter.expired:
                return None
            await waiter.woken
            waiter.sleep()


# ---- who waits --------------------------------------------------------------


class _Waiter:
    """A task that waits.

    Attributes:
        count: how many completions it wants.
        woken: done when it is to look at what there is.
        expired: whether its time is up.
    """

    __slots__ = ("count", "expired", "woken")

    def __init__(self, count: int) -> None:
        self.count = count
        self.expired = False
        self.sleep()

    def sleep(self) -> None:
        """Get ready to be woken once more."""
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Let it look at what there is."""
        if not self.woken.done():
            self.woken.set_result(None)

    def expire(self) -> None:
        """Tell it that its time is up."""
        self.expired = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in it."""
        if not self.woken.done():
            self.woken.set_exception(error)


class _Source:
    """What tasks of one event loop sleep on, and those tasks.

    Args:
        loop: the event loop.
        owner: whose descriptor it is.
        fd: the descriptor.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Resource, fd: int) -> None:
        self.loop = loop
        self.owner = owner
        self.fd = os.dup(fd)
        self.waiters: list[_Waiter] = []

    def idle(self) -> bool:
        """Whether nobody sleeps on it any more."""
        return not self.waiters

    def ready(self) -> None:
        """React to the descriptor: it is readable."""
        for waiter in self.waiters:
            waiter.wake()

    def open(self) -> None:
        """Begin to watch the descriptor."""
        self.loop.add_reader(self.fd, self.ready)

    def close(self) -> None:
        """Cease to watch it; the loop may be closed."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self.fd)
        os.close(self.fd)

    def join(self, waiter: _Waiter) -> None:
        """Let a task sleep on it."""
        self.waiters.append(waiter)

    def leave(self, waiter: _Waiter) -> None:
        """Forget a task that sleeps no longer."""
        self.waiters.remove(waiter)
        if self.idle():
            _drop(self)

    def in_loop(self, function: Callable[[], object]) -> None:
        """Let the event loop call a function soon; in any thread.

        A loop that is closed leaves its place to others: its tasks wait for nothing any more.
        """
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            _drop(self)


class _Events(_Source):
    """The events of CQs that tasks wait for."""

    queues: dict[CQ, _Queue]

    def idle(self) -> bool:
        return not self.waiters and not self.queues

    def heard(self) -> list[CQ]:
        """Take the events that are there; return whose they are."""
        raise NotImplementedError

    def look(self) -> None:
        """Take the events; look into the CQs that they are of, if tasks wait for those."""
        # soft0 tries again here what it had to put off.
        for cq in dict.fromkeys(self.heard()):
            if (queue := self.queues.get(cq)) is not None:
                queue.look_again()

    def ready(self) -> None:
        try:
            self.look()
        except ClosedError:
            self.wake()
        except RdmaError as error:
            for waiters in (self.waiters, *(queue.waiters for queue in self.queues.values())):
                for waiter in waiters:
                    waiter.fail(error)

    def wake(self) -> None:
        """Let all look at what there is."""
        for waiters in (self.waiters, *(queue.waiters for queue in self.queues.values())):
            for waiter in waiters:
                waiter.wake()

    def close(self) -> None:
        for queue in list(self.queues.values()):
            queue.unclaim()
        super().close()


class _Own(_Events):
    """The channel that a CQ has for itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cq: CQ) -> None:
        super().__init__(loop, cq, cq._event_fd)
        self._cq = cq
        self.queues = {}

    def heard(self) -> list[CQ]:
        self._cq._drop_event()
        return [self._cq]


class _Shared(_Events):
    """A completion channel that CQs share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: CompChannel) -> None:
        super().__init__(loop, channel, channel.fileno())
        self._channel = channel
        self._tell = self.tell
        self.queues = {}

    def tell(self) -> None:
        """Let the tasks look, in any thread: the channel is being closed."""
        self.in_loop(self.wake)

    def open(self) -> None:
        self._channel._claim(self._tell)
        super().open()

    def close(self) -> None:
        super().close()
        self._channel._unclaim(self._tell)

    def heard(self) -> list[CQ]:
        self._channel._take_all_events()
        heard = []
        while (cq := self._channel._next_event(self.queues)) is not None:
            heard.append(cq)
        if self._channel._events:
            for waiter in self.waiters:
                waiter.wake()
        return heard


class _Device(_Source):
    """The asynchronous events of a device."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        super().__init__(loop, context, context.async_fd)
        self._watch = _Watch(self.fd, context)

    def close(self) -> None:
        super().close()
        self._watch.close()


class _Queue:
    """A CQ, and the tasks that wait for its completions, in the order in which they came."""

    def __init__(self, cq: CQ, source: _Events) -> None:
        self.cq = cq
        self.source = source
        self.waiters: list[_Waiter] = []
        self._tell = self.tell

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its tasks."""
        return self.source.loop

    def tell(self) -> None:
        """Let the tasks look, in any thread: another waits too, or the CQ is being closed."""
        self.source.in_loop(self.look_again)

    def unclaim(self) -> None:
        """Leave the CQ's events to others."""
        self.cq._unclaim(self._tell)

    def join(self, waiter: _Waiter) -> None:
        """Let a task wait."""
        if not self.waiters:
            # Threads that come now let the tasks' event loop take the events.
            if not self.cq._claim(self._tell):
                if self.source.idle():
                    _drop(self.source)
                raise RdmaError(
                    f"a thread sleeps in wait() on this {self.cq}, and takes the events that "
                    "tasks would wait for: let either threads or tasks wait"
                )
            self.source.queues[self.cq] = self
        self.waiters.append(waiter)

    def leave(self, waiter: _Waiter) -> None:
        """Forget a task that waits no longer; what it leaves is for the others."""
        self.waiters.remove(waiter)
        if self.waiters:
            self.look_again()
            return
        del self.source.queues[self.cq]
        self.unclaim()
        if self.source.idle():
            _drop(self.source)

    def look(self) -> None:
        """Ask for the next event, then take what there is, and wake those who have enough."""
        there = self.cq._look(sum(waiter.count for waiter in self.waiters))
        # One who wants few need not wait for one who wants many.
        there -= self.promised()
        for waiter in self.waiters:
            if not waiter.woken.done() and waiter.count <= there:
                there -= waiter.count
                waiter.wake()

    def look_again(self) -> None:
        """Look for those who sleep already, and let them know what is raised."""
        try:
            self.look()
        except ClosedError:
            for waiter in self.waiters:
                waiter.wake()
        except Exception as error:
            for waiter in self.waiters:
                waiter.fail(error)

    def promised(self) -> int:
        """Return how many completions are promised to tasks that are about to run."""
        return sum(waiter.count for waiter in self.waiters if waiter.woken.done())


class _Watch(Resource):
    """Keeps a device open while tasks wait for its events."""

    __slots__ = ()

    _kind = "task that waits for events"

    def _destroy(self) -> None:
        pass


_sources: dict[Resource, _Source] = {}
"""What tasks sleep on, by whose descriptor it is."""

_AnySource = TypeVar("_AnySource", bound=_Source)


def _source(owner: Resource, make: Callable[[asyncio.AbstractEventLoop], _AnySource]) -> _AnySource:
    """Return what tasks of this event loop sleep on for a resource."""
    loop = asyncio.get_running_loop()
    source = _sources.get(owner)
    if source is not None and source.loop.is_closed():
        _drop(source)
        source = None
    if source is None:
        made = make(loop)
        source = _sources.setdefault(owner, made)
        if source is made:
            try:
                made.open()
            except BaseException:
                _drop(made)
                raise
        else:
            os.close(made.fd)
    if source.loop is not loop:
        raise RdmaError("tasks of another event loop wait for the same events")
    return cast(_AnySource, source)


def _drop(source: _Source) -> None:
    # Whoever takes it out closes it; where the loop was closed, that may have been another thread.
    if _sources.get(source.owner) is source and _sources.pop(source.owner, None) is source:
        source.close()


def _queue_of(cq: CQ) -> _Queue:
    """Return the tasks that wait for a CQ, and let them be found by its events."""
    source: _Events
    if (channel := cq.channel) is None:
        source = _source(cq, lambda loop: _Own(loop, cq))
    else:
        source = _source(channel, lambda loop: _Shared(loop, channel))
    return source.queues.get(cq) or _Queue(cq, source)


def _promised(cq: CQ) -> int:
    """Return how many completions tasks have been promised."""
    source = _sources.get(cq.channel or cq) if _sources else None
    queue = source.queues.get(cq) if isinstance(source, _Events) else None
    return 0 if queue is None else queue.promised()


@contextlib.contextmanager
def _sleeping(place: _Source | _Queue, waiter: _Waiter, timeout: float | None) -> Iterator[None]:
    """Let a task wait at a place while the block runs."""
    place.join(waiter)
    timer = None if timeout is None else place.loop.call_later(timeout, waiter.expire)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        place.leave(waiter)
