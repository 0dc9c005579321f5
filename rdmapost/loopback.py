"""Two connected queue pairs of one device."""

from .tools import alias
from .tools import loopback as _room
from .tools.loopback import *  # noqa: F403

alias(__name__, _room)
