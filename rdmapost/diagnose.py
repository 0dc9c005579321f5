"""Diagnose problems with a queue pair or the machine."""

from .tools import alias
from .tools import diagnose as _implementation
from .tools.diagnose import *  # noqa: F403

alias(__name__, _implementation)
