"""Connecting the queue pairs of two processes over TCP."""

import sys

from .tools import connect as _itself
from .tools import export

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tools.connect import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
