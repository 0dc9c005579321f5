"""Ethernet frames, for raw packets and segmentation offload."""

from .tools import alias
from .tools import frames as _implementation
from .tools.frames import *  # noqa: F403

alias(__name__, _implementation)
