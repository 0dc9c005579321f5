"""Ethernet frames, for raw packets and segmentation offload."""

from .tools import alias
from .tools import frames as _room
from .tools.frames import *  # noqa: F403

alias(__name__, _room)
