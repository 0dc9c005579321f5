"""Memory keys that a stranger on the network cannot guess."""

from __future__ import annotations

import secrets

from ..software.memory import Memory


class RandomKeys(Memory):
    """Memory whose keys cannot be guessed."""

    def new_key(self) -> int:
        # The top bit tells an rkey from the lkey of the same region.
        key = secrets.randbits(31)
        taken = not key or key in self.regions_by_lkey
        # As a window's key, or as a region's.
        taken = taken or self.has_index_of(key) or self.has_index_of(key | 0x8000_0000)
        return self.new_key() if taken else key
