"""What a status, an errno, an opcode, a state, a flag or an event means."""

import sys

from .tools import explain as _itself
from .tools import export

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tools.explain import *  # noqa: F403
else:
    # The same module, under the name that its users know.
    export(__name__, vars(_itself))
    sys.modules[__name__] = _itself
