"""Waiting in asyncio tasks for completions and events, on their file descriptors.

This module implements CQ.completions, ``async for wc in cq``, CompChannel.cq_event and
Context.async_event.

No thread is used, and nothing is polled periodically. A task requests an event, polls again, and
only then sleeps; code that takes an event requests the next one and polls again before it leaves
any task asleep. So no event is missed.

Completions stay in the CQ until a task can take all that it asked for, in a single call, during
which it cannot be cancelled. So cancelling a task loses no completion.

Closing a CQ, a channel or a device, in any thread, raises ClosedError in the
tasks that wait for it.

A signal handler may raise between any two bytecodes here. So one attribute, ``_Waiter.gone``, says
whether a task has stopped waiting, and it is set first when the wait ends. All other state is only
a hint: code that finds that a wait list's tasks are gone, or that their loop is closed, stops the
list.

Between two waits for completions, the wait list keeps its descriptor watched and its timer set:
setting these up costs more than the rest of a wait. It stops when somebody else waits for the CQ,
when an event comes for which nobody is waiting, or when the CQ is closed. Only the resource's
poller has a strong reference to a wait list: the event loop's is weak, and so is the list's
reference to the resource.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import os
import select
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .._arguments import index, seconds
from .._binding import native
from ..errors import ClosedError, RdmaError, VerbsError, WaitCancelled
from .events import AsyncEvent, next_async_event, next_cq_event, timed_out
from .resource import struct_of
from .waitable import EventSource, check_max_entries

if TYPE_CHECKING:
    from .channel import CompChannel
    from .cq import CQ, WC
    from .device import Context

_AnySource = TypeVar("_AnySource", bound=EventSource)
_Event = TypeVar("_Event")


class Completions:
    """An endless iterator over the completions of a CQ (``async for wc in cq``).

    Args:
        cq: the CQ; once it is closed, the next step raises ClosedError.
    """

    __slots__ = ("_cq",)

    def __init__(self, cq: CQ) -> None:
        self._cq = cq

    def __aiter__(self) -> Completions:
        return self

    async def __anext__(self) -> WC:
        return (await completions(self._cq, 1, None, None))[0]


async def completions(
    cq: CQ, count: int, timeout: float | None, max_entries: int | None
) -> list[WC]:
    """Implement CQ.completions."""
    if type(count) is not int:
        count = index("count", count)
    if type(timeout) is not float or timeout != timeout:
        timeout = seconds(timeout)
    if max_entries is not None:
        count, max_entries = check_max_entries(count, max_entries)
    poller = cq._poller
    cancels = poller.cancels
    found: list[WC] = []
    try:
        # Leave the completions that are promised to tasks about to run.
        if poller.wait(cq, count, _promised(cq), 0.0, found) is not None:
            queue = _queue_of(cq)
            waiter = _Waiter(queue.loop, count, cancels)
            try:
                queue.join(waiter, timeout)
                while True:
                    queue.wake_those_with_enough(True)
                    await waiter.woken
                    # First: a cancelled wait takes nothing, even if completions have arrived since.
                    if poller.cancels != cancels:
                        raise WaitCancelled(f"cancel_waits() on this {cq} has ended the wait")
                    if poller.wait(cq, count, 0, 0.0, found) is None:
                        break
                    if waiter.expired:
                        raise timed_out(cq, _rearm(cq, count), count, timeout)
                    # Another thread's poll() has taken the completions.
                    waiter.sleep(queue.loop)
            finally:
                # Set this before any call, and hence before any interrupt.
                waiter.gone = True
                queue.leave(waiter)
        if max_entries is not None:
            _take_more(cq, max_entries, found)
    except BaseException:
        poller.put_back(found)
        raise
    return found


async def cq_event(channel: CompChannel, timeout: float | None) -> CQ | None:
    """Implement CompChannel.cq_event."""
    return await _next_event(channel, timeout, _ChannelWaits, next_cq_event)


async def async_event(context: Context, timeout: float | None) -> AsyncEvent | None:
    """Implement Context.async_event."""
    return await _next_event(context, timeout, _DeviceWaits, next_async_event)


async def _next_event(
    source: _AnySource,
    timeout: float | None,
    make: Callable[[asyncio.AbstractEventLoop, _AnySource], _WaitList],
    take: Callable[[_AnySource], _Event | None],
) -> _Event | None:
    timeout = seconds(timeout)
    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    while True:
        expired = await _sleep_at(_wait_list(source, make), deadline, source._events)
        # Take the event last: an interrupt before this leaves it for the next caller.
        if (event := take(source)) is not None or expired:
            return event


async def _sleep_at(waits: _WaitList, deadline: float | None, taken: dict[Any, Any]) -> bool:
    """Wait until events have been taken, or the timeout expires; return whether it expired."""
    waiter = _Waiter(waits.loop, 1)
    try:
        waits.join(waiter, None if deadline is None else deadline - waits.loop.time())
        waits.deliver()
        if not taken:
            await waiter.woken
    finally:
        # Set this before any call, and hence before any interrupt.
        waiter.gone = True
        waits.leave(waiter)
    return waiter.expired


# ---- who waits --------------------------------------------------------------


def _nothing() -> None:
    """Return None, as a weak reference does when its object is gone."""


def _expire(waits: weakref.ref[_WaitList]) -> None:
    """Call a wait list's expire(); if a signal handler raises during it, call it again later."""
    if (found := waits()) is not None:
        try:
            found.expire()
        except BaseException:
            found.loop.call_soon(_expire, waits)
            raise


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether an event loop is running in this thread."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _rearm(cq: CQ, count: int) -> int:
    """Request the next event, then poll for `count` completions; return how many are available."""
    return cq._poller.fill(cq, count, True)


def _take_more(cq: CQ, max_entries: int, found: list[WC]) -> None:
    """Take more completions, up to max_entries in all, but leave those that tasks await."""
    poller, wanted = cq._poller, max_entries - len(found)
    queue: _CQWaits | None = poller.tasks
    if queue is not None:
        queue.deliver_or_fail()
    promised = _promised(cq)
    # A failure is left to the next wait: these completions have arrived.
    with contextlib.suppress(ClosedError, VerbsError):
        available = poller.fill(cq, wanted + promised) - promised
        poller.poll(cq, max(0, min(wanted, available)), found)


class _Waiter:
    """A waiting task.

    Attributes:
        count: how many completions it waits for.
        cancels: how many times waits had been cancelled when it began to wait.
        deadline: when its time is up, on the loop's clock, or None.
        woken: a future, done when the task should check what is available.
        expired: whether its time is up.
        gone: whether it has stopped waiting; this alone decides (see the module's docstring).
    """

    __slots__ = ("cancels", "count", "deadline", "expired", "gone", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, cancels: int = 0) -> None:
        self.count, self.cancels = count, cancels
        self.expired = self.gone = False
        self.deadline: float | None = None
        self.woken: asyncio.Future[None] = loop.create_future()

    def sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Get ready to be woken again."""
        self.woken = loop.create_future()

    def wake(self) -> None:
        """Wake the task to check what is available."""
        try:
            self.woken.set_result(None)
        except asyncio.InvalidStateError:
            return  # The task is already awake, or has been cancelled.

    def expire(self) -> None:
        """Wake the task because its time is up."""
        self.expired = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in the task."""
        with contextlib.suppress(asyncio.InvalidStateError):
            self.woken.set_exception(error)


_MANY = (
    "Linux lets about 500 of them share a software device's timer; let several tasks share a CQ, "
    "or several CQs a CompChannel"
)


class _Watch:
    """A descriptor that an event loop watches for a wait list.

    The loop watches a duplicate: if the descriptor is closed and its number reused, the new
    descriptor is not watched. An epoll around the original would ensure that, too, but Linux lets
    only 100 epolls, nested three deep, refer to a software device's timer. Only the event loop
    refers to a watch, so the duplicate stays open while the loop watches it, and is closed with the
    loop.

    Attributes:
        duplicate: owns the duplicate; closed once the loop has stopped watching.
    """

    def __init__(self, waits: _WaitList, fd: int) -> None:
        self._loop = waits.loop
        self._waits = weakref.ref(waits)
        # In C, so that no signal handler runs before the new descriptor has an owner.
        self.duplicate = next(map(select.epoll.fromfd, map(os.dup, (fd,))))
        try:
            self._loop.add_reader(self.duplicate.fileno(), self._ready)
        except BaseException as error:
            self._loop.remove_reader(self.duplicate.fileno())
            if isinstance(error, OSError) and error.errno == errno.EINVAL:
                raise RdmaError(
                    f"an event loop cannot wait for more CQs and channels of this device: {_MANY}"
                ) from error
            raise

    def _ready(self) -> None:
        if (waits := self._waits()) is None:
            self.close()
        else:
            waits.ready()

    def close(self) -> None:
        """Stop watching, even if the loop is closed or is running in another thread."""
        if self._loop.is_closed() or self.duplicate.closed:
            return
        if _runs(self._loop):
            self._loop.remove_reader(self.duplicate.fileno())
            self.duplicate.close()
        else:
            with contextlib.suppress(RuntimeError):  # The loop has just been closed.
                self._loop.call_soon_threadsafe(self._close_unused)

    def _close_unused(self) -> None:
        # Tasks may have begun to wait since.
        if (waits := self._waits()) is None or not waits.in_use():
            self.close()


class _WaitList:
    """The tasks of one event loop that wait for a resource's completions or events.

    The resource's poller keeps it as ``tasks``, and calls it to make the loop check again or to
    tell the loop that threads now take the events.

    Args:
        loop: the event loop.
        owner: the resource.

    Attributes:
        waiters: the waiting tasks.
    """

    threads = ""
    """What a thread that waits for the same events does, for error messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Any) -> None:
        self.loop = loop
        self.waiters: list[_Waiter] = []
        self._owner = weakref.ref(owner)
        self._poller: native.Poller = owner._poller
        self._watch: Callable[[], _Watch | None] = _nothing
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    @property
    def owner(self) -> Any:
        """The resource; None only when nobody is waiting."""
        return self._owner()

    def waiting(self) -> list[_Waiter]:
        """Return the waiting tasks, in order of arrival."""
        return [waiter for waiter in self.waiters if not waiter.gone]

    def in_use(self) -> bool:
        """Whether a task waits here, or will."""
        return self.wanted() and not self.loop.is_closed()

    def wanted(self) -> bool:
        """Whether a task is waiting here, or was when the loop was closed."""
        for waiter in self.waiters:
            if not waiter.gone:
                break
        else:
            return False
        return True

    def __call__(self) -> None:
        """Wake the tasks to poll again, or call stop() if none waits; any thread may call this."""
        claims = self._poller.claims
        if self.in_use():
            try:
                self.loop.call_soon_threadsafe(self.deliver_or_fail)
            except RuntimeError:
                # The loop has just been closed.
                pass
            else:
                return
        self.stop(claims)

    def join(self, waiter: _Waiter, timeout: float | None = None) -> None:
        """Add a task, which counts as waiting until leave(), even if this call is interrupted."""
        self.waiters.append(waiter)
        self.start()
        if timeout is not None:
            waiter.deadline = deadline = self.loop.time() + timeout
            # A timer that expires too early sets another one.
            if self._timer_at > deadline:
                self._expire_at(deadline)

    def _expire_at(self, deadline: float) -> None:
        timer = self._timer
        self._timer = self.loop.call_at(deadline, _expire, weakref.ref(self))
        self._timer_at = deadline
        if timer is not None:
            timer.cancel()

    def expire(self) -> None:
        """Wake the tasks whose time is up, and set the timer for the others."""
        self._timer, self._timer_at = None, math.inf
        now, next_deadline = self.loop.time(), math.inf
        for waiter in self.waiting():
            if waiter.deadline is None or waiter.expired:
                continue
            if waiter.deadline <= now:
                waiter.expire()
            else:
                next_deadline = min(next_deadline, waiter.deadline)
        if next_deadline < math.inf:
            self._expire_at(next_deadline)

    def leave(self, waiter: _Waiter) -> None:
        """Remove a task that is gone; the other tasks get what was promised to it."""
        # A new list: another thread may be going through the old one.
        self.waiters = [other for other in self.waiters if not other.gone]
        if self.loop.is_closed():
            self.stop(self._poller.claims)
        elif self.waiters:
            self._try(self.deliver)
        else:
            self.rest()

    def rest(self) -> None:
        """Stop: the last task has left."""
        self.stop(self._poller.claims)

    def start(self) -> None:
        """Claim the events, which threads then leave to the tasks, and watch the descriptor."""
        if not self._poller.claim(self):
            self.refuse()
        if (watch := self._watch()) is None or watch.duplicate.closed:
            self._watch_again()

    def _watch_again(self) -> None:
        try:
            self._watch = weakref.ref(_Watch(self, self.owner._event_fd()))
        except OSError:
            # If another thread has closed the resource, raise ClosedError.
            struct_of(self.owner)
            raise

    def refuse(self) -> None:
        """Raise an RdmaError that says who already takes the events."""
        if self._poller.tasks is None:
            raise RdmaError(
                f"a thread {self.threads} on this {self.owner}, and takes the events that "
                "tasks would wait for: wait in threads or in tasks, not in both"
            )
        raise RdmaError("tasks of another event loop are already waiting for the same events")

    def stop(self, claims: int) -> None:
        """Leave the events to others, unless a task has started to wait since.

        If this is interrupted, the next waiter completes it.
        """
        if self._poller.unclaim(self, claims):
            self._stop_watching()

    def _stop_watching(self) -> None:
        if (watch := self._watch()) is not None:
            watch.close()

    def ready(self) -> None:
        """React to the descriptor becoming readable."""
        if self.wanted():
            self._try(self.on_event)
        else:
            self.stop(self._poller.claims)
            # Stop watching even if another list has claimed the events since.
            self._stop_watching()

    def deliver(self) -> None:
        """Check what is available, and wake the tasks whose waits it satisfies."""
        raise NotImplementedError

    def on_event(self) -> None:
        """Read an event from the descriptor, and call deliver()."""
        self.deliver()

    def deliver_or_fail(self) -> None:
        """Call deliver(); if it raises, raise the exception in the waiting tasks."""
        if self.in_use():
            self._try(self.deliver)

    def _try(self, deliver: Callable[[], object]) -> None:
        try:
            deliver()
        except ClosedError:
            self.wake()
        except Exception as error:
            self.fail(error)
        except BaseException:
            # The exception usually ends the loop; if not, the tasks check again.
            self.wake()
            raise

    def wake(self) -> None:
        """Wake all the waiting tasks to check what is available."""
        for waiter in self.waiting():
            waiter.wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in all the waiting tasks."""
        for waiter in self.waiting():
            waiter.fail(error)


class _DeviceWaits(_WaitList):
    """The asynchronous events of a device."""

    threads = "waits in get_async_event()"

    def deliver(self) -> None:
        owner: Context = self.owner
        if owner._poller.until(owner, -1, owner._take_event, 0.0, True) is not None:
            self.wake()


class _CQWaits(_WaitList):
    """The completions of a CQ with a private channel."""

    threads = "sleeps in wait()"

    def rest(self) -> None:
        """Keep watching: a task will probably wait again."""

    def deliver(self) -> None:
        """Request the next event, then poll, and wake the tasks whose waits are satisfied."""
        self.wake_those_with_enough(True)

    def on_event(self) -> None:
        # Usually no task stays asleep, and no other event is needed.
        if not self.wake_those_with_enough(False):
            self.deliver()

    def wake_those_with_enough(self, arm: bool) -> bool:
        """Poll, wake the tasks whose waits are satisfied, and return whether all are.

        Args:
            arm: True to request the next event first; False to take one off the channel first.
        """
        wanted = 0
        for waiter in self.waiters:
            if not waiter.gone:
                wanted += waiter.count
        # A larger wait does not block smaller ones.
        available = self._poller.fill(self._owner(), wanted, arm)
        cancels = self._poller.cancels
        asleep = []
        for waiter in self.waiters:
            if waiter.gone:
                continue
            if not waiter.woken.done():
                asleep.append(waiter)
            elif waiter.cancels == cancels:
                available -= waiter.count
        everyone = True
        for waiter in asleep:
            if waiter.cancels != cancels:
                waiter.wake()
            elif waiter.count <= available:
                available -= waiter.count
                waiter.wake()
            else:
                everyone = False
        return everyone

    def promised(self) -> int:
        """Return how many completions are promised to tasks that are about to run."""
        count, cancels = 0, self._poller.cancels
        for waiter in self.waiters:
            if not waiter.gone and waiter.woken.done() and waiter.cancels == cancels:
                count += waiter.count
        return count


class _SharedCQWaits(_CQWaits):
    """The completions of a CQ on a shared channel.

    Args:
        loop: the event loop.
        cq: the CQ.
        channel: the wait list for the CQ's channel.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cq: CQ, channel: _ChannelWaits) -> None:
        super().__init__(loop, cq)
        self.channel = channel

    def rest(self) -> None:
        self.stop(self._poller.claims)

    def start(self) -> None:
        if not self._poller.claim(self):
            self.refuse()
        self.channel.queues[self.owner] = self
        self.channel.start()

    def stop(self, claims: int) -> None:
        channel = self.channel
        of_channel = channel._poller.claims
        if not self._poller.unclaim(self, claims):
            return
        if channel.queues.get(self.owner) is self:
            channel.queues.pop(self.owner, None)
        if not channel.in_use():
            channel.stop(of_channel)


class _ChannelWaits(_WaitList):
    """The events of a completion channel that CQs share."""

    threads = "waits in get_cq_event()"

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: CompChannel) -> None:
        super().__init__(loop, channel)
        self.queues: dict[CQ, _SharedCQWaits] = {}

    def wanted(self) -> bool:
        return super().wanted() or any([queue.wanted() for queue in list(self.queues.values())])

    def deliver(self) -> None:
        """Collect pending events, and poll those of their CQs that tasks wait for."""
        channel: CompChannel = self.owner
        try:
            # The loops are in another function: in Python 3.12 and 3.13, `try` does not cover a
            # loop's jump back, where a signal handler may raise.
            for queue in self._read_events():
                if queue is not None:
                    queue.deliver_or_fail()
        except BaseException:
            # An event may have been read, and no task woken.
            self.wake()
            raise
        if channel._events:
            super().wake()

    def _read_events(self) -> list[_SharedCQWaits | None]:
        """Read all pending events; return the waits of their CQs."""
        channel: CompChannel = self.owner
        # When an event is read, soft0 performs the retries that are due.
        while channel._poller.until(channel, -1, channel._get_event, 0.0, True) is not None:
            pass
        reported = {}
        while (cq := next_cq_event(channel, self.queues)) is not None:
            reported[cq] = self.queues.get(cq)
        return list(reported.values())

    def rest(self) -> None:
        if self.wanted():
            self._try(self.deliver)
        else:
            super().rest()

    def wake(self) -> None:
        super().wake()
        for queue in list(self.queues.values()):
            queue.wake()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        for queue in list(self.queues.values()):
            queue.fail(error)


_AnyWaitList = TypeVar("_AnyWaitList", bound=_WaitList)


def _wait_list(
    owner: Any, make: Callable[[asyncio.AbstractEventLoop, Any], _AnyWaitList]
) -> _AnyWaitList:
    """Return the wait list in which tasks of this event loop wait for a resource."""
    loop = asyncio.get_running_loop()
    waits: _AnyWaitList | None = owner._poller.tasks
    # If another loop has one, claim() will fail.
    return waits if waits is not None and waits.loop is loop else make(loop, owner)


def _queue_of(cq: CQ) -> _CQWaits:
    """Return this event loop's wait list for a CQ."""
    if cq.channel is None:
        waits: _CQWaits | None = cq._poller.tasks
        loop = asyncio.get_running_loop()
        # If another loop has one, claim() will fail.
        return waits if waits is not None and waits.loop is loop else _CQWaits(loop, cq)
    channel = _wait_list(cq.channel, _ChannelWaits)
    queue: _CQWaits = _wait_list(cq, functools.partial(_SharedCQWaits, channel=channel))
    # The channel's wait list may have been replaced since.
    if isinstance(queue, _SharedCQWaits):
        queue.channel = channel
    return queue


def _promised(cq: CQ) -> int:
    queue: _CQWaits | None = cq._poller.tasks
    return queue.promised() if queue is not None and queue.waiters else 0
