"""Ping-pong with ibv_rc_pingpong and its like, and with itself."""

from .tools import alias
from .tools import pingpong as _implementation
from .tools.pingpong import *  # noqa: F403

alias(__name__, _implementation)
