"""A descriptor that wakes a thread in poll()."""

from __future__ import annotations

import os
from contextlib import suppress

from ..._binding import native
from ..resource_stack import NotCopied


class Wakeup(native.Finalizer, NotCopied):
    """A descriptor that any thread, signal handler or finalizer can make readable, once.

    It is closed with its last reference, never explicitly, so that no thread can ring a descriptor
    that another thread has closed and whose number now belongs to another file.

    Attributes:
        fd: the descriptor.
    """

    fd = -1
    _open: bool | None = True

    def __init__(self) -> None:
        self._pid = os.getpid()
        # map() calls eventfd in C, so that no signal handler runs before the descriptor has an
        # owner.
        (self.fd,) = map(os.eventfd, (0,), (os.EFD_CLOEXEC | os.EFD_NONBLOCK,))

    def ring(self) -> None:
        """Make the descriptor readable; do nothing in the child of a fork, which shares it."""
        if self._pid == os.getpid():
            with suppress(BlockingIOError):
                os.eventfd_write(self.fd, 1)

    def _finalize(self) -> None:
        if self.fd >= 0 and self._open:
            # In one C call, as above, so that the descriptor is closed only once.
            with suppress(OSError):
                (self._open,) = map(os.close, (self.fd,))
