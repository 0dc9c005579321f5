"""Random choices, all derived from one number, so that the number replays them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Draw", "mix"]

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return 64 bits that depend on all of the numbers (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class Draw:
    """A source of choices.

    Args:
        seed: 64 bits.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed

    def bits(self) -> int:
        """Return 64 random bits."""
        self._state = state = self._state + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        return state ^ state >> 29

    def below(self, end: int) -> int:
        """Return a number in 0..end-1."""
        return (self.bits() >> 20) % end

    def one_in(self, count: int) -> bool:
        """Return True once in `count` times."""
        return (self.bits() >> 20) % count == 0

    def of(self, choices: Sequence[Any]) -> Any:
        """Return one of a sequence."""
        return choices[(self.bits() >> 20) % len(choices)]

    def among(self, *choices: Any) -> Any:
        """Return one of the arguments."""
        return choices[(self.bits() >> 20) % len(choices)]
