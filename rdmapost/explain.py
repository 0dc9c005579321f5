"""What a status, an errno, an opcode, a state, a flag or an event means."""

from .tools import alias
from .tools import explain as _implementation
from .tools.explain import *  # noqa: F403

alias(__name__, _implementation)
