"""What a status, an errno, an opcode, a state, a flag or an event means, and what to do about it.

The texts are data, one file per kind. ``explain`` looks up a name or number; ``explain_lines``
finds the names and numbers in what programs print.
"""

from __future__ import annotations

from .lookup import UnknownNameError, explain, names
from .messages import Mention, explain_lines
from .model import KINDS, Explanation
from .opcodes import COLUMNS

__all__ = [
    "COLUMNS",
    "KINDS",
    "Explanation",
    "Mention",
    "UnknownNameError",
    "explain",
    "explain_lines",
    "names",
]
