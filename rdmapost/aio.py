"""Waiting in asyncio tasks for completions and events."""

from .resources import aio as _implementation
from .resources.aio import *  # noqa: F403
from .tools import alias

alias(__name__, _implementation)
