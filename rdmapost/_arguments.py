"""Checking and converting arguments: types, integers, flags, buffers and seconds.

Every integer from a caller goes through ``index`` or a function built on it: cffi would accept
anything with ``__int__``, and would drop fractions.

``name`` is the parameter's name, which every error begins with, and ``given`` is the argument.
"""

from __future__ import annotations

import math
import operator
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

_LONGEST_S = 1e6
_DECIMAL_BELOW = 1 << 20
"""A bound of 2^n or 2^n-1 is shown as such if 2^n is at least this; any other bound, in decimal."""
_MAX_BITS = 14_000
"""For larger integers, only the size is shown: Python prints at most 4300 digits."""

_Member = TypeVar("_Member", bound=IntEnum)
_Flags = TypeVar("_Flags", bound=IntFlag)


def expect(name: str, given: object, *types: type | None) -> None:
    """Raise TypeError unless an argument is of one of the given types.

    Args:
        types: the accepted types; include None to accept None.
    """
    # Not isinstance(), which trusts an object's __class__.
    given_type = type(given)
    for wanted in types:
        if given is None if wanted is None else issubclass(given_type, wanted):
            return
    names = ["None" if wanted is None else wanted.__name__ for wanted in types]
    found = given_type.__name__
    # numpy has its own bool type.
    found = f"{given_type.__module__}.{found}" if found in names else found
    raise TypeError(f"{name}: expected {' or '.join(names)}, got {found}")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 byte", "2 bytes".

    Args:
        number: the number.
        noun: its noun in the singular.
        plural: the plural, if it is not the singular plus an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def index(name: str, given: Any, expected: str = "int") -> int:
    """Return an argument of any integer type as an int.

    Args:
        expected: the type that the error names.

    Raises:
        TypeError: it is not an integer.
    """
    if not hasattr(type(given), "__index__"):
        raise TypeError(f"{name}: expected {expected}, got {type(given).__name__}")
    # Convert to int: numpy's integers overflow where an int would grow, and operator.index()
    # returns a bool unchanged.
    try:
        return int(operator.index(given))
    except TypeError as error:
        # numpy arrays have __index__, but most raise TypeError from it.
        raise TypeError(f"{name}: expected {expected}, got {type(given).__name__}") from error


def within(name: str, given: Any, minimum: int, maximum: int | None = None) -> int:
    """Return an argument of any integer type as an int, after checking its range.

    Args:
        minimum, maximum: the range, inclusive; a maximum of None means no upper bound.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    value = index(name, given)
    if value < minimum or (maximum is not None and value > maximum):
        bound = "" if maximum is None else _bound(maximum)
        raise ValueError(f"{name}={shown(value)} is not in {minimum}..{bound}")
    return value


def shown(number: int) -> str:
    """Show an integer."""
    bits = number.bit_length()
    return str(number) if bits <= _MAX_BITS else f"({bits} bits)"


def _bound(number: int) -> str:
    """Show the upper bound of a range."""
    for below in (0, 1):
        power = number + below
        if power >= _DECIMAL_BELOW and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{'-1' if below else ''}"
    return str(number)


def member(name: str, given: Any, enum: type[_Member]) -> _Member:
    """Return an argument, a member of an enumeration or its number, as a member.

    Args:
        enum: the enumeration.

    Raises:
        TypeError: it is not an integer.
        ValueError: no member has this number.
    """
    if type(given) is enum:
        return given
    number = index(name, given, enum.__name__)
    try:
        return enum(number)
    except ValueError:
        raise ValueError(f"{name}={shown(number)} is not a valid {enum.__name__}") from None


def flags(name: str, given: Any, allowed: _Flags, made_of: str) -> _Flags:
    """Return an argument, a combination of flags or its integer value, as flags.

    Args:
        allowed: all the flags that the argument may have.
        made_of: the names of those flags, for the error message.

    Raises:
        TypeError: it is not an integer.
        ValueError: it has other bits.
    """
    bits = index(name, given)
    if bits < 0 or bits & ~int(allowed):
        raise ValueError(f"{name}={bits:#x} is not a combination of {made_of}")
    return type(allowed)(bits)


def content(name: str, given: Any) -> bytes:
    """Return the bytes of an argument that is a buffer.

    bytes() itself would also accept a list of numbers, or one number n, as n zero bytes.

    Raises:
        TypeError: it is not a buffer.
    """
    try:
        return bytes(memoryview(given))
    except TypeError:
        raise TypeError(f"{name}: expected bytes, got {type(given).__name__}") from None


def seconds(given: Any, name: str = "timeout", expected: str = "seconds or None") -> float | None:
    """Return an argument in seconds as a float; None means no timeout.

    Raises:
        TypeError: it is not a number (for example, a timedelta or text).
        ValueError: it is NaN, or too large for a float.
    """
    if given is None:
        return None
    try:
        # Takes numbers of all types but, unlike float(), does not parse text.
        value = math.ldexp(given, 0)
    except TypeError as error:
        # numpy arrays have __float__, but most raise TypeError from it.
        own = hasattr(type(given), "__float__") or hasattr(type(given), "__index__")
        found = type(given).__name__
        raise TypeError(f"{name}: expected {expected}, got {found}") from (error if own else None)
    except OverflowError:
        raise ValueError(f"{name}: too many seconds for a float") from None
    if math.isnan(value):
        raise ValueError(f"{name}: expected {expected}, got NaN")
    return value


def time_limit(given: Any, name: str = "timeout", expected: str = "seconds") -> float:
    """Return an argument in seconds, positive and finite, as a float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is 0 or less, NaN, or more than a million seconds.
    """
    value = seconds(given, name, expected)
    if value is None:
        raise TypeError(f"{name}: expected seconds, got NoneType")
    if not value > 0:
        raise ValueError(f"{name}={given}: expected more than 0 s")
    if value > _LONGEST_S:
        raise ValueError(f"{name}={given} is more than {_LONGEST_S:,.0f} s")
    return value


def fill(struct: Any, **counts: int) -> None:
    """Set unsigned 32-bit fields of a struct.

    Raises:
        TypeError: a value is not an integer.
        ValueError: a number does not fit.
    """
    for name, value in counts.items():
        setattr(struct, name, within(name, value, 0, (1 << 32) - 1))
