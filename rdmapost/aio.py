"""Waiting in asyncio tasks for completions and events."""

import sys

from .resources import aio as _itself
from .tools import export

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .resources.aio import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
