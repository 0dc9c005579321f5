"""The command line: ``rdmapost``."""

from __future__ import annotations

import io
import os
import signal
import sys

from .exit_codes import INTERRUPTED

# Like typing.TYPE_CHECKING, but importing typing takes time, in which Ctrl-C has a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import TextIO


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # It is ignored in the background job of a script.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
        if sys.stdout is None:
            sys.stdout = _unwritable(1)
        elif isinstance(sys.stdout, io.TextIOWrapper):
            # What the terminal's encoding lacks is escaped, as on stderr.
            sys.stdout.reconfigure(errors="backslashreplace")
        from .app import app

        app()
    except KeyboardInterrupt:
        # Before the command starts; a running command handles Ctrl-C itself.
        sys.exit(INTERRUPTED)
    finally:
        # The exit code is decided; an interrupt of the interpreter's exit would change it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt the command; on the next Ctrl-C do not wait for its end."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    raise KeyboardInterrupt


def _unwritable(fd: int) -> TextIO:
    """Fill a closed descriptor, so that nothing else gets it, and writing fails as if closed."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), fd)
    return open(fd, "w", closefd=False)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process if an interrupt came in a finalizer, where it would be lost."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)
