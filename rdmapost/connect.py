"""Connecting the queue pairs of two processes over TCP."""

from .tools import alias
from .tools import connect as _implementation

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Importing all of it would import asyncio.
    from .tools.connect import *  # noqa: F403

alias(__name__, _implementation)
