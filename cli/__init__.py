"""The command line: ``rdmapost``."""

from __future__ import annotations

import io
import os
import signal
import sys

from .exit_codes import INTERRUPTED

# Do not import typing for this: it takes time, and until main() runs, Ctrl-C prints a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import TextIO


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # SIGINT is ignored in a script's background jobs; leave it ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
        if sys.stdout is None:
            sys.stdout = _unwritable(1)
        elif isinstance(sys.stdout, io.TextIOWrapper):
            # Characters that the terminal's encoding lacks are escaped, as on stderr.
            sys.stdout.reconfigure(errors="backslashreplace")
        from .app import app

        app()
    except KeyboardInterrupt:
        # Ctrl-C came before the command started; a running command handles it itself.
        sys.exit(INTERRUPTED)
    finally:
        # The exit code is decided; Ctrl-C while the interpreter exits must not change it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt the command; on the next Ctrl-C, exit at once."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    raise KeyboardInterrupt


def _unwritable(fd: int) -> TextIO:
    """Open a closed descriptor, so that no other file gets it and writing fails with EBADF."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), fd)
    return open(fd, "w", closefd=False)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process if Ctrl-C came in a finalizer, where KeyboardInterrupt would be lost."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)
