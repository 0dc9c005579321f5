"""Two connected queue pairs of one device."""

import sys

from .tools import export
from .tools import loopback as _itself

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tools.loopback import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
