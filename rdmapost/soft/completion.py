"""Completion queues, the channels that announce them, and asynchronous events."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from .._binding import ffi, lib
from ..enums import EventType

if TYPE_CHECKING:
    from .device import Device
    from .queue import WorkQueue

__all__ = ["NO_TAG", "Channel", "CompletionQueue", "Entry", "EventQueue"]

_NOT_ARMED, _ARMED_SOLICITED, _ARMED_NEXT = range(3)


Entry: TypeAlias = "tuple[tuple[int, ...], WorkQueue, int, bool, tuple[int, int]]"
"""A completion queue entry: the fields of ``struct ibv_wc`` (wr_id, status, opcode, vendor_err,
byte_len, imm_data or invalidated_rkey, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
dlid_path_bits); the queue whose slots it frees; how many; whether it was solicited; and the tag
and application context of a tag-matching message.  A plain tuple, for there are many."""

NO_TAG = (0, 0)
"""In the entry of what is no tag-matching message."""


class Channel:
    """A completion channel: a file descriptor that is readable when an event is there.

    The descriptor is a timer.  It fires at once for an event, and at the time
    when a parked work request is to be tried again: whoever sleeps on it then
    comes back and makes progress, and no thread is needed for that.
    """

    def __init__(self, device: Device) -> None:
        self.fd: int = lib.rp_timer_open()
        if self.fd < 0:
            raise OSError(ffi.errno, os.strerror(ffi.errno))
        self._device = device
        self.events: deque[CompletionQueue] = deque()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def signal(self) -> None:
        """Make the descriptor readable now if events are there, else when work is due."""
        if self.events:
            lib.rp_timer_set(self.fd, 1)
        else:
            lib.rp_timer_set(self.fd, self._device.nanoseconds_until_due())

    def take(self) -> CompletionQueue | None:
        """Return the next event's completion queue, or None."""
        event = self.events.popleft() if self.events else None
        self.signal()
        return event


class CompletionQueue:
    """Where work requests complete, in order."""

    __slots__ = ("_armed", "capacity", "channel", "entries", "handle", "users")

    def __init__(self, capacity: int, channel: Channel | None) -> None:
        self.capacity = capacity
        self.channel = channel
        self.entries: deque[Entry] = deque()
        self.handle: Any = None
        self.users = 0
        self._armed = _NOT_ARMED

    def push(self, entry: Entry) -> bool:
        """Add an entry; return False if there is no room: the queue overruns."""
        if len(self.entries) >= self.capacity:
            return False
        self.entries.append(entry)
        if self._armed:
            self._notify(entry)
        return True

    def _notify(self, entry: Entry) -> None:
        (_, status, *_), _, _, solicited, _ = entry
        if self._armed == _ARMED_SOLICITED and not (solicited or status):
            return
        self._armed = _NOT_ARMED
        if self.channel is not None:
            self.channel.events.append(self)
            self.channel.signal()

    def poll(self, most: int) -> list[Entry]:
        """Take up to so many entries; the queue slots that they stand for are free then."""
        entries = self.entries
        taken: list[Entry] = []
        while entries and len(taken) < most:
            entry = entries.popleft()
            _, queue, frees, _, _ = entry
            queue.used -= frees
            taken.append(entry)
        return taken

    def arm(self, solicited_only: bool) -> None:
        """Ask for an event at the next entry, or the next solicited one."""
        wanted = _ARMED_SOLICITED if solicited_only else _ARMED_NEXT
        # A pending wish for any entry is not narrowed.
        self._armed = max(self._armed, wanted)

    def forget(self, queue: WorkQueue) -> None:
        """Drop the entries of a queue that is being destroyed or reset."""
        self.entries = deque(entry for entry in self.entries if entry[1] is not queue)


class EventQueue:
    """The asynchronous events of one open device, behind a file descriptor."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self.events: deque[tuple[EventType, Any]] = deque()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def push(self, event: EventType, element: Any) -> None:
        """Add an event about an object's struct, or a port number."""
        self.events.append((event, element))
        os.eventfd_write(self.fd, 1)

    def take(self, into: dict[object, Any], key: object) -> None:
        """Move the next event, if there is one."""
        if self.events:
            # Python looks at signals after calls.  Up to the read there is none, so that an
            # interrupt finds the event in one of the two places.
            into[key] = self.events[0]
            del self.events[0]
            os.eventfd_read(self.fd)
