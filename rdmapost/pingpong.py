"""Ping-pong, compatible with ibv_rc_pingpong and its UC and UD versions."""

from .tools import alias
from .tools import pingpong as _implementation
from .tools.pingpong import *  # noqa: F403

alias(__name__, _implementation)
