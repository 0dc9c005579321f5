"""Completion queues, the channels that announce them, and asynchronous events."""

from __future__ import annotations

import os
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .._binding import door, ffi, lib
from ..enums import EventType

if TYPE_CHECKING:
    from .device import Device
    from .queue import WorkQueue

__all__ = ["NO_TAG", "Channel", "CompletionQueue", "Entry", "EventQueue", "tm_info"]

_TIMER = (lib.CLOCK_MONOTONIC, lib.TFD_CLOEXEC | lib.TFD_NONBLOCK)
_wc = Struct("@QIIIIIIIIHHBB0Q").pack

Entry: TypeAlias = "tuple[tuple[int, ...], WorkQueue, int, bool, bytes]"
"""A completion queue entry: the fields of ``struct ibv_wc`` (wr_id, status, opcode, vendor_err,
byte_len, imm_data or invalidated_rkey, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
dlid_path_bits); the queue whose slots it frees; how many; whether it was solicited; and its
``struct ibv_wc_tm_info``."""

tm_info = Struct("@QI0Q").pack
"""What the entry of a tag-matching message has of its tag and application context."""
NO_TAG = tm_info(0, 0)
"""What another one has."""


_Event = TypeVar("_Event")


class _EventSource(door.Record, Generic[_Event]):
    """Events behind a file descriptor, which is readable when one is there.

    The descriptor is a timer.  It fires at once for an event, and at the time
    when a parked work request is to be tried again: whoever sleeps on it then
    comes back and makes progress, and no thread is needed for that.
    """

    def __init__(self, device: Device) -> None:
        self.fd: int = door.made(os.close, lib.timerfd_create, *_TIMER)
        if self.fd < 0:
            raise OSError(ffi.errno, "timerfd_create")
        self._device = device
        self.events: deque[_Event] = deque()
        self.signal()

    def close(self) -> None:
        """Close the descriptor."""
        door.on_commit(os.close, self.fd)

    def signal(self) -> None:
        """Make the descriptor readable now if events are there, else when work is due."""
        ns = self._device.nanoseconds_until_due()
        door.on_commit(door.set_timer, self.fd, self.events, ns)

    def take(self) -> _Event | None:
        """Return the next event, or None."""
        events = self.events
        event = door.take(events) if events else None
        self.signal()
        return event


class Channel(_EventSource["CompletionQueue"]):
    """A completion channel; an event is the completion queue that it is about."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.users = 0

    def forget(self, cq: CompletionQueue) -> None:
        """Drop the events of a completion queue that is being destroyed."""
        if cq in self.events:
            self.events = deque(event for event in self.events if event is not cq)
            self.signal()


class CompletionQueue(door.DeviceQueue):
    """Where work requests complete, in order.

    Attributes:
        pending: what a poll, in C, takes: the bytes of a completion, the queue whose slots it
            frees, and how many.
        armed: what the next event is for: 0 is nothing, 1 what is solicited, 2 anything.
    """

    def __init__(self, capacity: int, channel: Channel | None) -> None:
        self.capacity = capacity
        self.pending: deque[tuple[bytes, WorkQueue, int]] = deque()
        self.channel = channel
        self.handle: Any = None
        self.users = 0
        self.overrun = False
        """Whether it has had no room for an entry; that is told once."""

    def add(self, entry: Entry) -> bool:
        """Add an entry; return False if there is no room: the queue overruns."""
        entries = self.pending
        if len(entries) >= self.capacity:
            return False
        fields, queue, frees, solicited, tag = entry
        door.add(self, (_wc(*fields) + tag, queue, frees))
        if (channel := self.channel) is not None:
            # Until then the queue may be armed.
            door.at_the_end(
                door.announce, self, channel.events, channel.fd, bool(solicited or fields[1])
            )
        return True

    def forget(self, queue: WorkQueue) -> None:
        """Drop the entries of a queue that is being destroyed or reset."""
        door.on_commit(door.forget, self.pending, queue)


class EventQueue(_EventSource["tuple[EventType, Any]"]):
    """The asynchronous events of one open device."""

    def push(self, event: EventType, element: Any) -> None:
        """Add an event about an object's struct, or a port number."""
        door.put(self.events, (event, element))
        self.signal()

    def tell_overrun(self, cq: CompletionQueue) -> None:
        """Add an event about a completion queue that has had no room, the first time."""
        if not cq.overrun:
            cq.overrun = True
            self.push(EventType.CQ_ERR, cq.handle)
