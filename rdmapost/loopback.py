"""Two connected queue pairs on one device."""

from .tools import alias
from .tools import loopback as _implementation
from .tools.loopback import *  # noqa: F403

alias(__name__, _implementation)
