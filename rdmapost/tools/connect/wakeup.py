"""What wakes a thread that waits in poll()."""

from __future__ import annotations

import os
from contextlib import suppress

from ..._binding import native


class Wakeup(native.Finalizer):
    """A descriptor that becomes readable once, in any thread, signal handler or finalizer.

    Nothing closes it explicitly: the last reference does. So no thread can ring a descriptor that
    another has closed, and that something else has by now.

    Attributes:
        fd: the descriptor.
    """

    fd = -1
    _open: bool | None = True

    def __init__(self) -> None:
        self._pid = os.getpid()
        # map calls it in C, so that no signal handler can run before the descriptor has an owner.
        (self.fd,) = map(os.eventfd, (0,), (os.EFD_CLOEXEC | os.EFD_NONBLOCK,))

    def ring(self) -> None:
        """Make it readable; do nothing in the child of a fork, which shares it."""
        if self._pid == os.getpid():
            with suppress(BlockingIOError):
                os.eventfd_write(self.fd, 1)

    def _finalize(self) -> None:
        if self.fd >= 0 and self._open:
            # As above: it is closed once.
            with suppress(OSError):
                (self._open,) = map(os.close, (self.fd,))
