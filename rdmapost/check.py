"""Checks that show what a device can do."""

from .tools import alias
from .tools import check as _implementation
from .tools.check import *  # noqa: F403

alias(__name__, _implementation)
