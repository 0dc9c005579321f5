"""Waiting in asyncio tasks for completions and events, on their file descriptors.

``await cq.completions(n)`` and ``async for wc in cq`` are the public interface;
``get_cq_event`` and ``get_async_event`` here are the awaitable versions of
their namesakes.

There is no thread and no periodic polling.  A task requests an event, polls
again, and only then sleeps; code that takes an event requests the next one and
polls again before any task sleeps on.  So no event is missed.

Completions stay in the CQ until a task takes all that it asked for in one step, during which it
cannot be cancelled. So cancelling loses none.

Closing a CQ, a channel or a device, in any thread, raises ClosedError in the
tasks that wait for it.

A signal handler may raise between any two steps here. So one attribute says whether a task still
waits, ``_Waiter.gone``; it is set first when the wait ends, and all other state is only a hint: any
code that finds a place's tasks gone, or their loop closed, takes the place down. Only the
resource's poller and the event loop refer to a place, so a closed loop leaves only garbage behind.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .._arguments import expect, index, seconds
from ..errors import ClosedError, RdmaError
from .channel import CompChannel, next_event
from .device import Context
from .events import AsyncEvent, next_taken, timed_out
from .resource import struct_of
from .waiting import CompletionSource, EventSource

if TYPE_CHECKING:
    from .cq import CQ, WC

__all__ = ["Completions", "completions", "get_async_event", "get_cq_event"]

_AnySource = TypeVar("_AnySource", bound=EventSource)
_Event = TypeVar("_Event")


class Completions:
    """An endless iterator over the completions of a CQ (``async for wc in cq``).

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
        timeout: seconds; None for no limit.

    Raises:
        WaitTimeout: fewer came; those stay for the next poll or wait.
        TypeError: an argument is of another type.
        ValueError: count is negative, or timeout is NaN.
        RdmaError: a thread or another event loop is already waiting on the same CQ or channel.
        ClosedError: the CQ is closed, or is closed during the wait.
        VerbsError: the device failed.
    """
    # Its module imports this one, so the class itself cannot be imported here.
    if not issubclass(type(cq), CompletionSource):
        raise TypeError(f"cq: expected CQ, got {type(cq).__name__}")
    count, timeout = index("count", count), seconds(timeout)
    # What is promised to tasks that are about to run is theirs.
    if (found := _take(cq, count, _promised(cq))) is not None:
        return found
    waiter, queue = _Waiter(count), _queue_of(cq)
    try:
        try:
            queue.join(waiter, timeout)
            while True:
                queue.deliver()
                await waiter.woken
                if (found := _take(cq, count)) is not None:
                    break
                if waiter.expired:
                    raise timed_out(cq, _rearm(cq, count), count, timeout)
                # Another thread's poll() has taken them.
                waiter.sleep()
        finally:
            # Before any call, hence before any interrupt.
            waiter.gone = True
            queue.leave(waiter)
    except BaseException:
        if found:
            cq._poller.put_back(found)
        raise
    return found


async def get_cq_event(channel: CompChannel, timeout: float | None = None) -> CQ | None:
    """Return the CQ of the next event, and acknowledge it (CompChannel.get_cq_event).

    Events of a CQ whose completions a task waits for are that task's.

    Args:
        channel: the channel.
        timeout: seconds to wait; None for no limit.

    Returns:
        The CQ, or None if no event came in time.

    Raises:
        TypeError: an argument is of another type.
        ValueError: timeout is NaN.
        RdmaError: a thread or another event loop is already waiting on the channel.
        ClosedError: the channel is closed, or is closed during the wait.
        VerbsError: the device failed.

    See ibv_get_cq_event(3).
    """
    expect("channel", channel, CompChannel)
    return await _next_event(channel, timeout, _Channel, next_event)


async def get_async_event(context: Context, timeout: float | None = None) -> AsyncEvent | None:
    """Return the next asynchronous event of a device (events.get_async_event).

    Args:
        context: an open device.
        timeout: seconds to wait for one; None for no limit.

    Returns:
        The event, or None if none came in time.

    Raises:
        TypeError: an argument is of another type.
        ValueError: timeout is NaN.
        RdmaError: a thread or another event loop is already waiting for the device's events.
        ClosedError: the device is closed, or is closed during the wait.
        VerbsError: the device failed.

    See ibv_get_async_event(3).
    """
    expect("context", context, Context)
    return await _next_event(context, timeout, _Device, next_taken)


async def _next_event(
    source: _AnySource,
    timeout: float | None,
    make: Callable[[asyncio.AbstractEventLoop, _AnySource], _Place],
    take: Callable[[_AnySource], _Event | None],
) -> _Event | None:
    timeout = seconds(timeout)
    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    while True:
        expired = await _sleep_at(_place(source, make), deadline, source._events)
        # Last: an interrupt before this leaves the event to the next caller.
        if (event := take(source)) is not None or expired:
            return event


async def _sleep_at(place: _Place, deadline: float | None, taken: dict[Any, Any]) -> bool:
    """Wait until events have been taken, or the timeout expires; return whether it expired."""
    waiter = _Waiter(1)
    try:
        place.join(waiter, None if deadline is None else deadline - place.loop.time())
        place.deliver()
        if not taken:
            await waiter.woken
    finally:
        # Before any call, hence before any interrupt.
        waiter.gone = True
        place.leave(waiter)
    return waiter.expired


# ---- who waits --------------------------------------------------------------


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread runs an event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _rearm(cq: CQ, count: int) -> int:
    """Request the next event, then poll for `count` completions; return how many are available."""
    poller = cq._poller
    poller.notify(cq, False)
    return poller.fill(cq, count)


def _take(cq: CQ, count: int, promised: int = 0) -> list[WC] | None:
    """Return exactly `count` if `promised` more are available too, else None."""
    poller = cq._poller
    found: list[WC] = []
    try:
        missing = poller.wait(cq, count, promised, 0.0, found)
    except BaseException:
        poller.put_back(found)
        raise
    return found if missing is None else None


class _Waiter:
    """A task that waits.

    Attributes:
        count: how many completions it wants.
        woken: done when it should check what is available.
        expired: whether its time is up.
        gone: whether it has stopped waiting; everything else follows from this.
    """

    __slots__ = ("count", "expired", "gone", "timer", "woken")

    def __init__(self, count: int) -> None:
        self.count = count
        self.expired = self.gone = False
        self.timer: asyncio.TimerHandle | None = None
        self.sleep()

    def sleep(self) -> None:
        """Get ready to be woken again."""
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Wake it to check what is available."""
        if not self.woken.done():
            self.woken.set_result(None)

    def expire(self) -> None:
        """Tell it that its time is up."""
        self.expired = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in the task."""
        if not self.woken.done():
            self.woken.set_exception(error)


class _Watch:
    """A descriptor that an event loop watches.

    It uses its own epoll: if the descriptor is closed and its number reused, the new one is not
    watched, and the epoll closes itself when this object is dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None

    def open(self, fd: int, ready: Callable[[], object]) -> None:
        """Start to watch, unless it does already."""
        if self._epoll is not None:
            return
        epoll = select.epoll()
        epoll.register(fd, select.EPOLLIN)
        self._epoll = epoll
        try:
            self._loop.add_reader(epoll.fileno(), ready)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching it; the loop may be closed, or another thread's."""
        if (epoll := self._epoll) is None:
            return
        if not self._loop.is_closed():
            if not _runs(self._loop):
                self._loop.call_soon_threadsafe(self.close)
                return
            self._loop.remove_reader(epoll.fileno())
        self._epoll = None
        epoll.close()


class _Place:
    """Where tasks of one event loop wait for a resource's completions or events.

    The resource's poller has it as ``tasks``, and calls it when the loop should check again, or
    step down.

    Args:
        loop: the event loop.
        owner: the resource.
    """

    threads = ""
    """What threads waiting for the same are doing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Any) -> None:
        self.loop = loop
        self.owner = owner
        self.waiters: list[_Waiter] = []
        self._watch = _Watch(loop)

    def waiting(self) -> list[_Waiter]:
        """Return the waiting tasks, in order of arrival."""
        return [waiter for waiter in self.waiters if not waiter.gone]

    def in_use(self) -> bool:
        """Whether a task waits here, or will."""
        return not self.loop.is_closed() and bool(self.waiting())

    def __call__(self) -> None:
        """Wake the tasks to poll again, from any thread; stop() if none is waiting."""
        if self.in_use():
            try:
                self.loop.call_soon_threadsafe(self.deliver_or_fail)
            except RuntimeError:
                # It has just been closed.
                pass
            else:
                return
        self.stop()

    def join(self, waiter: _Waiter, timeout: float | None = None) -> None:
        """Let a task wait, until leave(), even if this is interrupted."""
        self.waiters.append(waiter)
        self.start()
        if timeout is not None:
            waiter.timer = self.loop.call_later(timeout, waiter.expire)

    def leave(self, waiter: _Waiter) -> None:
        """Forget a task that is gone; what it leaves is for the others."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        self.waiters[:] = self.waiting()
        if self.in_use():
            self.deliver_or_fail()
        else:
            self.stop()

    def start(self) -> None:
        """Take the events from now on, unless it does already."""
        self.claim()
        try:
            self._watch.open(self.owner._event_fd(), self.ready)
        except OSError:
            # Another thread may have closed it meanwhile: then say so.
            struct_of(self.owner)
            raise

    def claim(self) -> None:
        """Make threads that arrive from now on leave the events to the tasks."""
        poller = self.owner._poller
        if poller.claim(self):
            return
        if poller.tasks is None:
            raise RdmaError(
                f"a thread {self.threads} on this {self.owner}, and takes the events that "
                "tasks would wait for: let either threads or tasks wait"
            )
        raise RdmaError("tasks of another event loop wait for the same events")

    def stop(self) -> None:
        """Leave the events to others. If this is interrupted, the next to want them finishes it."""
        self._watch.close()
        self.owner._poller.unclaim(self)

    def ready(self) -> None:
        """React to the descriptor becoming readable."""
        if self.in_use():
            self._try(self.on_event)
        else:
            self.stop()

    def deliver(self) -> None:
        """Take what is available, and wake the tasks that it is for."""
        raise NotImplementedError

    def on_event(self) -> None:
        """Take an event off the descriptor, and deliver."""
        self.deliver()

    def deliver_or_fail(self) -> None:
        """Deliver to sleeping tasks, and raise in them what that raises."""
        self._try(self.deliver)

    def _try(self, deliver: Callable[[], object]) -> None:
        try:
            deliver()
        except ClosedError:
            self.wake()
        except Exception as error:
            self.fail(error)
        except BaseException:
            # It ends the loop; or the loop's caller continues, and then the tasks check again.
            self.wake()
            raise

    def wake(self) -> None:
        """Wake all of them to check what is available."""
        for waiter in self.waiting():
            waiter.wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in all of them."""
        for waiter in self.waiting():
            waiter.fail(error)


class _Device(_Place):
    """The asynchronous events of a device."""

    threads = "waits in get_async_event()"

    def deliver(self) -> None:
        owner: Context = self.owner
        if owner._poller.until(owner, -1, owner._take_event, 0.0, True) is not None:
            self.wake()


class _Queue(_Place):
    """The completions of a CQ with a private channel."""

    threads = "sleeps in wait()"

    def deliver(self) -> None:
        """Ask for the next event, then poll, and wake the tasks that can have enough."""
        waiting = self.waiting()
        available = _rearm(self.owner, sum(waiter.count for waiter in waiting))
        # Small waits are not blocked by larger ones.
        available -= self.promised()
        for waiter in waiting:
            if not waiter.woken.done() and waiter.count <= available:
                available -= waiter.count
                waiter.wake()

    def on_event(self) -> None:
        cq: CQ = self.owner
        cq._poller.until(cq, -1, cq._drop_event, 0.0, True)
        self.deliver()

    def promised(self) -> int:
        """Return how many completions are promised to tasks that are about to run."""
        return sum(waiter.count for waiter in self.waiting() if waiter.woken.done())


class _SharedQueue(_Queue):
    """The completions of a CQ on a shared channel.

    Args:
        loop: the event loop.
        cq: the CQ.
        channel: the place of its channel.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cq: CQ, channel: _Channel) -> None:
        super().__init__(loop, cq)
        self.channel = channel

    def start(self) -> None:
        self.claim()
        self.channel.queues[self.owner] = self
        self.channel.start()

    def stop(self) -> None:
        queues = self.channel.queues
        if queues.get(self.owner) is self:
            queues.pop(self.owner, None)
        if not self.channel.in_use():
            self.channel.stop()
        self.owner._poller.unclaim(self)


class _Channel(_Place):
    """The events of a completion channel that CQs share."""

    threads = "waits in get_cq_event()"

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: CompChannel) -> None:
        super().__init__(loop, channel)
        self.queues: dict[CQ, _SharedQueue] = {}

    def in_use(self) -> bool:
        return super().in_use() or any(queue.in_use() for queue in list(self.queues.values()))

    def deliver(self) -> None:
        """Collect pending events; poll the CQs they belong to, if tasks wait for those."""
        channel: CompChannel = self.owner
        try:
            # soft0 retries here what it had to put off.
            while channel._poller.until(channel, -1, channel._get_event, 0.0, True) is not None:
                pass
            reported = {}
            while (cq := next_event(channel, self.queues)) is not None:
                reported[cq] = self.queues.get(cq)
            for queue in reported.values():
                if queue is not None:
                    queue.deliver_or_fail()
        except BaseException:
            # An event may have been taken without any task knowing.
            self.wake()
            raise
        if channel._events:
            super().wake()

    def wake(self) -> None:
        super().wake()
        for queue in list(self.queues.values()):
            queue.wake()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        for queue in list(self.queues.values()):
            queue.fail(error)


_AnyPlace = TypeVar("_AnyPlace", bound=_Place)


def _place(owner: Any, make: Callable[[asyncio.AbstractEventLoop, Any], _AnyPlace]) -> _AnyPlace:
    """Return where tasks of this event loop wait for a resource."""
    loop = asyncio.get_running_loop()
    place: _AnyPlace | None = owner._poller.tasks
    # Another loop's is refused when this one claims the events.
    return place if place is not None and place.loop is loop else make(loop, owner)


def _queue_of(cq: CQ) -> _Queue:
    """Return this event loop's wait queue for a CQ."""
    if cq.channel is None:
        return _place(cq, _Queue)
    channel = _place(cq.channel, _Channel)

    def make(loop: asyncio.AbstractEventLoop, cq: CQ) -> _Queue:
        return _SharedQueue(loop, cq, channel)

    queue = _place(cq, make)
    # The channel's place that it was made with may have been replaced.
    if isinstance(queue, _SharedQueue):
        queue.channel = channel
    return queue


def _promised(cq: CQ) -> int:
    """Return how many completions are promised to tasks."""
    queue: _Queue | None = cq._poller.tasks
    return 0 if queue is None else queue.promised()
