"""Ping-pong with ibv_rc_pingpong and its like, and with itself."""

import sys

from .tools import export
from .tools import pingpong as _itself

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tools.pingpong import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
