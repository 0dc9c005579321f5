"""A ctypes structure whose metaclass hides what it contains."""

from __future__ import annotations

import ctypes
from typing import Any


def structure_that_hides(fields: Any) -> Any:
    """Return a packed structure, for which ctypes reports only a format of bytes."""
    shows_nothing = type(
        "ShowsNothing",
        (type(ctypes.Structure),),
        {"__mro__": property(lambda cls: ()), "__dict__": property(lambda cls: {})},
    )
    names = {"_pack_": 1, "_layout_": "ms", "_fields_": fields}
    return shows_nothing("Hidden", (ctypes.Structure,), names)
