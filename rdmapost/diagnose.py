"""Why a queue pair, or the machine, does not work."""

from .tools import alias
from .tools import diagnose as _implementation
from .tools.diagnose import *  # noqa: F403

alias(__name__, _implementation)
