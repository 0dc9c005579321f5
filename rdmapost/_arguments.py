"""Checking and converting arguments: types, integers, and seconds."""

from __future__ import annotations

import math
import operator
from typing import Any

__all__ = ["expect", "index", "seconds", "time_limit"]

_LONGEST_S = 1e6


def expect(name: str, given: object, *kinds: type | None) -> None:
    """Raise TypeError unless an argument is of one of the given types.

    Args:
        name: the parameter's name.
        given: the argument.
        kinds: the accepted types; None accepts None.

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


def index(name: str, given: Any) -> int:
    """Return an integer argument of any type as an int.

    Args:
        name: the parameter's name.
        given: the argument.

    Raises:
        TypeError: it is not an integer; the text names the argument.
    """
    if not hasattr(type(given), "__index__"):
        raise TypeError(f"{name}: expected int, got {type(given).__name__}")
    # numpy's numbers wrap where an int grows, and keep their type in whatever is made of them.
    return operator.index(given)


def seconds(given: Any, name: str = "timeout") -> float | None:
    """Return an argument in seconds as a float; None means no timeout.

    Args:
        given: the argument.
        name: the parameter's name.

    Raises:
        TypeError: it is not a number (a timedelta, text); the text names the argument.
        ValueError: it is NaN, or too large for a float.
    """
    if given is None:
        return None
    try:
        # Takes numbers of all types, and does not read text, as float() does.
        value = math.ldexp(given, 0)
    except TypeError:
        if hasattr(type(given), "__float__") or hasattr(type(given), "__index__"):
            raise
        kind = type(given).__name__
        raise TypeError(f"{name}: expected seconds or None, got {kind}") from None
    except OverflowError:
        raise ValueError(f"{name}: so many seconds do not fit into a float") from None
    if math.isnan(value):
        raise ValueError(f"{name}: expected seconds or None, got NaN")
    return value


def time_limit(given: Any, name: str = "timeout") -> float:
    """Return an argument in seconds, positive and finite, as a float.

    Args:
        given: the argument.
        name: the parameter's name.

    Raises:
        TypeError: it is not a number; the text names the argument.
        ValueError: it is 0 or less, or too long.
    """
    value = seconds(given, name)
    if value is None:
        raise TypeError(f"{name}: expected seconds, got NoneType")
    if not 0 < value <= _LONGEST_S:
        raise ValueError(f"{name}={given} is not a time of more than 0 s")
    return value
