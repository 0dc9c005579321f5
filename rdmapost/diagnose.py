"""Why a queue pair, or the machine, does not work."""

import sys

from .tools import diagnose as _itself
from .tools import export

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tools.diagnose import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
