"""The command line: ``rdmapost``."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        # It is ignored in the background job of a script.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
        from .app import app

        app()
    except KeyboardInterrupt:
        # Before the command starts; a running command handles Ctrl-C itself.
        sys.exit(_INTERRUPTED)
    finally:
        # The exit code is decided; an interrupt of the interpreter's exit would change it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt the command; on the next Ctrl-C do not wait for its end."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    raise KeyboardInterrupt


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process if an interrupt came in a finalizer, where it would be lost."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(_INTERRUPTED)
    sys.__unraisablehook__(unraisable)
