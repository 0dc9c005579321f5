"""Checks that show what a device can do."""

import sys

from .tools import check as _itself
from .tools import export

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tools.check import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
