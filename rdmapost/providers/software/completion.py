"""Completion queues, their channels, and asynchronous events."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ..._binding import native
from ...enums import EventType

if TYPE_CHECKING:
    from .device import Device
    from .device_queues import WorkQueue

_wc = Struct("@QII4x5I4xBx0Q").pack  # the other members are always 0

Entry: TypeAlias = "tuple[tuple[int, ...], WorkQueue, int, bool, bytes]"
"""A completion queue entry: the fields of ``struct ibv_wc`` that the device sets (wr_id, status,
opcode, byte_len, imm_data or invalidated_rkey, qp_num, src_qp, wc_flags, sl); the queue whose slots
it frees; how many; whether it was solicited; and its ``struct ibv_wc_tm_info``."""

tm_info = Struct("@QI0Q").pack
"""The tag and application context in a tag-matching message's entry."""
NO_TAG = tm_info(0, 0)
"""The tm_info of any other entry."""
_timestamps = Struct("@QQ").pack
clock = time.monotonic_ns
"""The device's clock."""


_Event = TypeVar("_Event")


class _EventSource(native.Record, Generic[_Event]):
    """Events behind a file descriptor, which is readable when an event is pending.

    The descriptor is an epoll instance for an eventfd and Device.wake_fds, so a sleeping thread
    wakes up when the device has work, and does the work.
    """

    def __init__(self, device: Device) -> None:
        self.event_fd = native.made(os.close, os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        for fd in (self.event_fd, *device.wake_fds):
            # A child that a signal handler has forked in the meantime shares the epoll, and may
            # have registered the descriptor already.
            with contextlib.suppress(FileExistsError):
                self._epoll.register(fd, select.EPOLLIN)
        self.events: deque[_Event] = deque()

    def close(self) -> None:
        """Close the descriptors."""
        native.on_commit(os.close, self.event_fd)
        native.on_commit(self._epoll.close)

    def signal(self) -> None:
        """Make the descriptor readable if events are pending."""
        native.on_commit(native.signal, self.event_fd, self.events)

    def about(self, event: _Event) -> object:
        """Return the object that an event is about."""
        return event

    def forget(self, thing: object) -> None:
        """Drop the pending events of an object that is being destroyed, as the kernel does."""
        # No lambda or generator: if there is no memory for its function, Python 3.13 crashes.
        kept: deque[_Event] = deque()
        for event in self.events:
            if self.about(event) is not thing:
                kept.append(event)
        if len(kept) != len(self.events):
            self.events = kept
            self.signal()

    def take(self) -> _Event | None:
        """Return the next event, or None."""
        events = self.events
        event = native.take(events) if events else None
        self.signal()
        return event


class Channel(_EventSource["CompletionQueue"]):
    """A completion channel; each event is a completion queue."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.users = 0


class CompletionQueue(native.DeviceQueue):
    """Where work requests complete, in order.

    Attributes:
        pending: the entries, each with the completion's bytes, the queue whose slots it frees, and
            how many slots. The C code of a poll removes them.
        armed: which completions generate an event: 0 none, 1 solicited ones, 2 any.
        has_timestamps: whether completions carry the time at which they were added.
    """

    def __init__(self, capacity: int, channel: Channel | None, events: EventQueue) -> None:
        self.depth = capacity
        self.pending: deque[tuple[bytes, WorkQueue, int]] = deque()
        self.channel = channel
        self.events = events
        """The events of the context that created it; with XRC, queue pairs of other contexts
        complete here too."""
        self.handle: Any = None
        self.users = 0
        self.has_timestamps = False
        self.overrun = False
        """Whether there was no room for an entry."""

    def add(self, entry: Entry) -> bool:
        """Add an entry; return False if the queue overruns."""
        entries = self.pending
        if len(entries) >= self.depth:
            return False
        fields, queue, frees, solicited, tag = entry
        if self.has_timestamps:
            tag += _timestamps(clock(), time.time_ns())
        native.add(self, (_wc(*fields) + tag, queue, frees))
        if (channel := self.channel) is not None:
            # At the end of the verb, because the queue may be armed until then.
            urgent = bool(solicited or fields[1])
            native.at_the_end(self.announce, channel.events, channel.event_fd, urgent)
        return True

    def report_overrun(self) -> None:
        """Add an asynchronous event on the first overrun."""
        if not self.overrun:
            self.overrun = True
            self.events.push(EventType.CQ_ERR, self.handle)

    def forget(self, queue: WorkQueue) -> None:
        """Drop the entries of a queue that is being destroyed or reset."""
        native.on_commit(native.forget, self.pending, queue)


class EventQueue(_EventSource["tuple[EventType, Any]"]):
    """The asynchronous events of one open device."""

    def push(self, event: EventType, element: Any) -> None:
        """Add an event about an object's struct, or a port number."""
        native.put(self.events, (event, element))
        self.signal()

    def about(self, event: tuple[EventType, Any]) -> object:
        return event[1]
