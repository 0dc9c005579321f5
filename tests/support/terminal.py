"""Pseudo-terminals for commands to write to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator

__all__ = ["terminal"]


@contextlib.contextmanager
def terminal(width: int = 80) -> Iterator[tuple[int, bytearray]]:
    """Open a pseudo-terminal with that many columns.

    Yields:
        its file descriptor, and the output written to it, which is complete after the block.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(ours, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, shown
    finally:
        os.close(theirs)
        reader.join(10)
        os.close(ours)
