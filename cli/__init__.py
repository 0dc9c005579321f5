"""The command line: ``rdmapost``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from .app import app

    app()
