"""Memory keys that a stranger on the network cannot guess."""

from __future__ import annotations

import secrets

from ..software.memory import INDICES, Memory
from ..software.numbers import RandomNumbers


class RandomKeys(Memory):
    """Memory whose keys cannot be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.indices = RandomNumbers(*INDICES)

    def _new_tag(self) -> int:
        return secrets.randbits(8)
