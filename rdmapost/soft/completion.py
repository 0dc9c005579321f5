"""Completion queues, the channels that announce them, and asynchronous events."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

from .._binding import door, lib
from ..enums import EventType

if TYPE_CHECKING:
    from .device import Device
    from .queue import WorkQueue

__all__ = ["NO_TAG", "Channel", "CompletionQueue", "Entry", "EventQueue"]

_NOT_ARMED = 0
_OVERRUN, _ADDED, _ADDED_WITH_EVENT = range(3)


Entry: TypeAlias = "tuple[tuple[int, ...], WorkQueue, int, bool, tuple[int, int]]"
"""A completion queue entry: the fields of ``struct ibv_wc`` (wr_id, status, opcode, vendor_err,
byte_len, imm_data or invalidated_rkey, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
dlid_path_bits); the queue whose slots it frees; how many; whether it was solicited; and the tag
and application context of a tag-matching message."""

NO_TAG = (0, 0)
"""In the entry of what is no tag-matching message."""


class Channel(door.Record):
    """A completion channel: a file descriptor that is readable when an event is there.

    The descriptor is a timer.  It fires at once for an event, and at the time
    when a parked work request is to be tried again: whoever sleeps on it then
    comes back and makes progress, and no thread is needed for that.
    """

    def __init__(self, device: Device) -> None:
        self.fd: int = door.open_timer()
        self._device = device
        self.events = door.Fifo()
        self.users = 0

    def close(self) -> None:
        """Close the descriptor."""
        door.on_commit(os.close, self.fd)

    def signal(self) -> None:
        """Make the descriptor readable now if events are there, else when work is due."""
        ns = 1 if self.events else self._device.nanoseconds_until_due()
        door.on_commit(lib.rp_timer_set, self.fd, ns)

    def take(self) -> CompletionQueue | None:
        """Return the next event's completion queue, or None."""
        event = self.events.popleft() if self.events else None
        self.signal()
        return event

    def forget(self, cq: CompletionQueue) -> None:
        """Drop the events of a completion queue that is being destroyed."""
        if cq in self.events:
            for _ in range(len(self.events)):
                event = self.events.popleft()
                if event is not cq:
                    self.events.append(event)
            self.signal()


class CompletionQueue(door.CompletionRing):
    """Where work requests complete, in order.

    The entries are in C, where a poll takes them, and with them the queue slots that
    they stand for.
    """

    def __init__(self, capacity: int, channel: Channel | None) -> None:
        self.capacity = capacity
        self.channel = channel
        self.handle: Any = None
        self.users = 0

    def add(self, entry: Entry) -> bool:
        """Add an entry; return False if there is no room: the queue overruns."""
        added = self.push(*entry)
        if added == _ADDED_WITH_EVENT:
            self.armed = _NOT_ARMED
            if self.channel is not None:
                self.channel.events.append(self)
                self.channel.signal()
        return added != _OVERRUN

    def forget(self, queue: WorkQueue) -> None:
        """Drop the entries of a queue that is being destroyed or reset."""
        door.forget(self, queue)


class EventQueue(door.Record):
    """The asynchronous events of one open device, behind a file descriptor."""

    def __init__(self) -> None:
        self.fd: int = door.open_semaphore()
        self.events = door.Fifo()

    def close(self) -> None:
        """Close the descriptor."""
        door.on_commit(os.close, self.fd)

    def push(self, event: EventType, element: Any) -> None:
        """Add an event about an object's struct, or a port number."""
        self.events.append((event, element))
        door.on_commit(os.eventfd_write, self.fd, 1)

    def take(self) -> tuple[EventType, Any] | None:
        """Return the next event, or None."""
        if not self.events:
            return None
        event: tuple[EventType, Any] = self.events.popleft()
        door.on_commit(os.eventfd_read, self.fd)
        return event
