"""The command line: ``rdmapost``."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        from .app import app

        app()
    except KeyboardInterrupt:
        # Before the command starts; a running command handles Ctrl-C itself.
        sys.exit(_INTERRUPTED)
