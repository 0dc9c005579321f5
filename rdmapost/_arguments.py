"""Telling which argument is of the wrong type."""

from __future__ import annotations

__all__ = ["expect"]


def expect(name: str, given: object, *kinds: type | None) -> None:
    """Refuse an argument that is of none of the given types.

    Args:
        name: the parameter's name.
        given: the argument.
        kinds: the types that it may be of; None for one that may be left out.

    Raises:
        TypeError: it is of another type; the text names the argument, what was
            expected, and what was given.
    """
    # Not isinstance(): that believes an object's __class__.
    kind = type(given)
    for wanted in kinds:
        if given is None if wanted is None else issubclass(kind, wanted):
            return
    names = " or ".join("None" if wanted is None else wanted.__name__ for wanted in kinds)
    raise TypeError(f"{name}: expected {names}, got {kind.__name__}")
