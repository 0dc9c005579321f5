"""Dictionaries whose changes are rolled back with the verb that made them."""

from __future__ import annotations

from typing import Any

from ..._binding import native

_ABSENT = object()


class JournaledDict(dict[Any, Any]):
    """A dictionary that journals item assignment, del and pop.

    Another thread may clear it in the middle of any of these.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        old = self.get(key, _ABSENT)
        if old is _ABSENT:
            native.undo(dict.pop, self, key, None)
        else:
            native.undo(native.set_item, self, key, old)
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self.discard(key)

    def discard(self, key: Any) -> None:
        """On commit, remove a key, if present: undoing a removal made earlier might need memory."""
        native.on_commit(native.discard, self, key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a key; return its value, or the default."""
        old = self.get(key, _ABSENT)
        if old is not _ABSENT:
            native.undo(native.set_item, self, key, old)
        return dict.pop(self, key, *default)
