"""Waiting in asyncio tasks for completions and events, on their file descriptors.

``await cq.completions(n)`` and ``async for wc in cq`` are the front of this;
``get_cq_event`` and ``get_async_event`` here are the awaitable ones of their
namesakes.

There is no thread, and nothing is looked at by the clock.  A task asks for an
event, looks again, and only then sleeps; whatever takes an event asks for the
next one and looks again before anybody sleeps on.  So none is missed.

What completes stays in the CQ until a task takes all that it asked for in one
step, in which it cannot be cancelled.  So cancelling loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ._binding import address_of
from ._resource import Resource
from .errors import RdmaError, WaitTimeout
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
        RdmaError: a thread sleeps on the same CQ or channel, or tasks of another event loop do.
        ClosedError: the CQ is closed.
        VerbsError: the device failed.
    """
    with cq._lock:
        cq._live()
        if count <= 0:
            return []
        # What has been promised to tasks that are about to run is theirs.
        claimed = _claimed(cq)
        cq._fill(cq._backlog, claimed + count)
        if len(cq._backlog) >= claimed + count:
            return _take(cq, count)
        # From here on it cannot be closed.
        cq._waiting += 1
    try:
        waiter, queue = _Waiter(count), _queue_of(cq)
        with _sleeping(queue, waiter, timeout):
            while True:
                queue.look()
                await waiter.woken
                with cq._lock:
                    if len(cq._backlog) >= count:
                        return _take(cq, count)
                    there = len(cq._backlog)
                if waiter.expired:
                    raise WaitTimeout(f"{there} of {count} completions came within {timeout:g} s")
                # Another thread's poll() has taken them.
                waiter.sleep()
    finally:
        with cq._lock:
            cq._waiting -= 1


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
        ClosedError: the channel is closed.
        VerbsError: the device failed.

    See ibv_get_cq_event(3).
    """
    handle, waiter = channel._live(), _Waiter(1)
    fd = handle.fd
    source = _source(fd, lambda loop: _Channel(loop, fd, channel.context, channel, handle))
    with _sleeping(source, waiter, timeout):
        while True:
            source.ready()
            if (cq := channel._kept_event()) is not None:
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
    fd = context.async_fd
    waiter = _Waiter(1)
    with _sleeping(_source(fd, lambda loop: _Device(loop, fd, context)), waiter, timeout):
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
    """A file descriptor that tasks of one event loop sleep on, and those tasks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self.loop = loop
        self.fd = fd
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
        """Cease to watch it."""
        self.loop.remove_reader(self.fd)

    def join(self, waiter: _Waiter) -> None:
        """Let a task sleep on it."""
        self.waiters.append(waiter)

    def leave(self, waiter: _Waiter) -> None:
        """Forget a task that sleeps no longer."""
        self.waiters.remove(waiter)
        _drop_if_idle(self)


class _Channel(_Source):
    """The events of a completion channel: of a CQ's own, or of one that CQs share.

    Args:
        loop, fd: as in _Source.
        context: the device.
        channel: the channel that CQs share, or None.
        handle: its struct.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        context: Context,
        channel: CompChannel | None,
        handle: Any,
    ) -> None:
        super().__init__(loop, fd)
        self.channel = channel
        self._provider = context._provider
        self._handle = handle
        self.queues: dict[int, _Queue] = {}
        """Those that tasks wait for, by their struct's address."""

    def idle(self) -> bool:
        return not self.waiters and not self.queues

    def open(self) -> None:
        if self.channel is not None:
            self.channel._leave_to_tasks()
        super().open()

    def close(self) -> None:
        super().close()
        if self.channel is not None:
            self.channel._take_from_tasks()

    def ready(self) -> None:
        """Take the events; look into the CQs that they are of, if tasks wait for those."""
        provider = self._provider
        heard: list[int] = []
        try:
            # soft0 tries again here what it had to put off.
            while (struct := provider.get_cq_event(self._handle)) is not None:
                provider.ack_cq_events(struct, 1)
                heard.append(address_of(struct))
        except RdmaError as error:
            for waiters in (self.waiters, *(queue.waiters for queue in self.queues.values())):
                for waiter in waiters:
                    waiter.fail(error)
            return
        for address in dict.fromkeys(heard):
            if (queue := self.queues.get(address)) is not None:
                try:
                    queue.look()
                except Exception as error:
                    for waiter in queue.waiters:
                        waiter.fail(error)
            elif self.channel is not None and (cq := self.channel._cq_at(address)) is not None:
                self.channel._kept.append(cq)
        if self.channel is not None and self.channel._kept:
            super().ready()


class _Device(_Source):
    """The asynchronous events of a device."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, context: Context) -> None:
        super().__init__(loop, fd)
        self._watch = _Watch(fd, context)

    def close(self) -> None:
        super().close()
        self._watch.close()


class _Queue:
    """A CQ, and the tasks that wait for its completions, in the order in which they came."""

    def __init__(self, cq: CQ, source: _Channel) -> None:
        self.cq = cq
        self.source = source
        self.waiters: list[_Waiter] = []
        self.address = cq._address

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its tasks."""
        return self.source.loop

    def join(self, waiter: _Waiter) -> None:
        """Let a task wait; the CQ cannot be closed from now on."""
        if not self.waiters:
            cq = self.cq
            with cq._lock:
                asleep = cq._sleeping
                # Threads that come now let the tasks' event loop take the events.
                cq._sleeping = asleep or cq.channel is None
            if asleep:
                _drop_if_idle(self.source)
                raise RdmaError(
                    f"a thread sleeps in wait() on this {cq}, and takes the events that tasks "
                    "would wait for: let either threads or tasks wait"
                )
            self.source.queues[self.address] = self
        self.waiters.append(waiter)

    def leave(self, waiter: _Waiter) -> None:
        """Forget a task that waits no longer; what it leaves is for the others."""
        self.waiters.remove(waiter)
        cq = self.cq
        if self.waiters:
            with cq._lock:
                there = len(cq._backlog)
            self._wake(there)
            return
        del self.source.queues[self.address]
        with cq._lock:
            cq._sleeping = False
            cq._awake.notify_all()
        _drop_if_idle(self.source)

    def look(self) -> None:
        """Ask for the next event, then take what there is, and wake those who have enough."""
        cq = self.cq
        with cq._lock:
            cq._live()
            cq._arm()
            cq._fill(cq._backlog, sum(waiter.count for waiter in self.waiters))
            there = len(cq._backlog)
            cq._awake.notify_all()
        self._wake(there)

    def claimed(self) -> int:
        """Return how many completions are promised to tasks that are about to run."""
        return sum(waiter.count for waiter in self.waiters if waiter.woken.done())

    def _wake(self, there: int) -> None:
        # One who wants few need not wait for one who wants many.
        there -= self.claimed()
        for waiter in self.waiters:
            if not waiter.woken.done() and waiter.count <= there:
                there -= waiter.count
                waiter.wake()


class _Watch(Resource):
    """Keeps a device open while tasks wait for its events."""

    __slots__ = ()

    _kind = "task that waits for events"

    def _destroy(self) -> None:
        pass


_sources: dict[int, _Source] = {}
"""What tasks sleep on, by file descriptor."""

_lock = threading.Lock()


_AnySource = TypeVar("_AnySource", bound=_Source)


def _source(fd: int, make: Callable[[asyncio.AbstractEventLoop], _AnySource]) -> _AnySource:
    """Return what tasks of this event loop sleep on for a descriptor."""
    loop = asyncio.get_running_loop()
    with _lock:
        source = _sources.get(fd)
        if source is None:
            source = make(loop)
            source.open()
            _sources[fd] = source
        elif source.loop is not loop:
            raise RdmaError("tasks of another event loop wait for the same events")
    return cast(_AnySource, source)


def _drop_if_idle(source: _Source) -> None:
    with _lock:
        if source.idle() and _sources.get(source.fd) is source:
            del _sources[source.fd]
            source.close()


def _queue_of(cq: CQ) -> _Queue:
    """Return the tasks that wait for a CQ, and let them be found by its events."""
    channel = cq._channel
    fd = channel.fd
    source = _source(fd, lambda loop: _Channel(loop, fd, cq.context, cq.channel, channel))
    return source.queues.get(cq._address) or _Queue(cq, source)


def _claimed(cq: CQ) -> int:
    """Return how many completions tasks have been promised; the CQ's lock is held."""
    source = _sources.get(cq._channel.fd) if _sources else None
    queue = source.queues.get(cq._address) if isinstance(source, _Channel) else None
    return 0 if queue is None else queue.claimed()


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


def _take(cq: CQ, count: int) -> list[WC]:
    return [cq._backlog.popleft() for _ in range(count)]
