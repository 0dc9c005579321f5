"""What a status, an errno, an opcode, a state, a flag or an event means, and what to do about it.

The texts are data, one file per kind; ``explain`` finds them by name or number.
"""

from __future__ import annotations

from .lookup import UnknownNameError, explain, names
from .model import KINDS, Explanation
from .opcodes import COLUMNS

__all__ = ["COLUMNS", "KINDS", "Explanation", "UnknownNameError", "explain", "names"]
