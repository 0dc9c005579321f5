"""Objects that lie, change and act while the library looks at them."""

from __future__ import annotations

import array
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from draw import Draw
from world import Hostile

import rdmapost as rp

__all__ = [
    "Acting",
    "Changing",
    "Counting",
    "Fake",
    "Finalizer",
    "Lying",
    "OnDemand",
    "header",
    "number",
    "posing",
    "property_class",
    "sge_class",
]

Act = Callable[[], Any]

_WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64)


class Lying(int):
    """An int whose conversions and comparisons use another number."""

    other: int = 0

    def __index__(self) -> int:
        return self.other

    def __int__(self) -> int:
        return self.other

    def __lt__(self, than: Any) -> bool:
        return False

    def __gt__(self, than: Any) -> bool:
        return False

    def __le__(self, than: Any) -> bool:
        return True

    def __ge__(self, than: Any) -> bool:
        return True

    def __and__(self, mask: Any) -> int:
        return self.other & mask

    __rand__ = __and__
    __hash__ = int.__hash__


class Acting:
    """A number that does something whenever it is asked for its value."""

    def __init__(self, value: int, act: Act) -> None:
        self.value = value
        self.act = act

    def __index__(self) -> int:
        self.act()
        return self.value

    def __int__(self) -> int:
        self.act()
        return self.value

    def _compared(self, other: Any) -> bool:
        self.act()
        return True

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __add__(self, other: Any) -> int:
        self.act()
        return self.value + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> int:
        self.act()
        return self.value - other

    def __rsub__(self, other: Any) -> int:
        self.act()
        return other - self.value

    def __and__(self, other: Any) -> int:
        self.act()
        return self.value & other

    __rand__ = __and__

    def __repr__(self) -> str:
        return f"Acting({self.value})"


class ActingInt(int):
    """An int that does something whenever it is asked for its value."""

    act: Act

    def __index__(self) -> int:
        self.act()
        return int.__add__(self, 0)

    __int__ = __index__

    def __and__(self, mask: Any) -> int:
        self.act()
        return int.__and__(self, mask)

    __hash__ = int.__hash__


class Changing:
    """A number with a different value each time."""

    def __init__(self, *values: int) -> None:
        self.values = values
        self.at = 0

    def __index__(self) -> int:
        self.at += 1
        return self.values[self.at % len(self.values)]

    __int__ = __index__

    def __and__(self, other: int) -> int:
        return self.__index__() & other

    __rand__ = __and__

    def __invert__(self) -> int:
        return ~self.__index__()


class _Strange(enum.IntFlag):
    BIT = 1 << 40


def number(draw: Draw, value: int, other: int, act: Act) -> Any:
    """Return a hostile object in place of a number.

    Args:
        draw: for choices.
        value: the right number.
        other: the number that it may return instead.
        act: called, by some objects, when they are asked for their value.
    """
    choice = draw.below(12)
    if choice < 3:
        try:
            return draw.of(_WIDTHS)(value)
        except OverflowError:
            return np.uint64(value & (1 << 64) - 1)
    if choice == 3:
        lying = Lying(value)
        lying.other = other
        return lying
    if choice == 4:
        lying = Lying(other)
        lying.other = value
        return lying
    if choice < 7:
        return Acting(value, act)
    if choice == 7:
        acting = ActingInt(value)
        acting.act = act
        return acting
    if choice == 8:
        return Changing(value, other)
    if choice == 9:
        return draw.among(None, "1", 1.0, b"1", [], object(), float("nan"), 1j, _Strange.BIT)
    if choice == 10:
        return draw.among(
            -1,
            1 << 31,
            1 << 32,
            (1 << 32) - 1,
            1 << 63,
            (1 << 64) - 1,
            1 << 64,
            1 << 200,
            True,
            -(1 << 63),
            -(1 << 64),
        )
    return np.asarray(value & (1 << 63) - 1)


class OnDemand(Sequence[Any]):
    """A sequence that makes its elements when it is asked for them, and may lie.

    Args:
        make: makes an element.
        length: how many there are.
        counts: the lengths that it reports, in turn.
        act: called for every element but the first, or None.
    """

    def __init__(
        self, make: Callable[[], Any], length: int, counts: Sequence[int], act: Act | None
    ) -> None:
        self.make, self.length, self.counts, self.act = make, length, counts, act
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return self.counts[self.asked % len(self.counts)]

    def __getitem__(self, index: Any) -> Any:
        if index >= self.length:
            raise IndexError(index)
        if self.act is not None and index:
            self.act()
        return self.make()


class Iterating:
    """Something that can only be iterated, and acts between its elements."""

    def __init__(self, make: Callable[[], Any], length: int, act: Act | None) -> None:
        self.make, self.length, self.act = make, length, act

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield self.make()
            if self.act is not None:
                self.act()


class Fake:
    """An object with the attributes of a region, which is not an MR."""

    closed = False
    writable = True
    access = 1

    def __init__(self, pd: Any, addr: int, length: int, lkey: int) -> None:
        self.pd, self.addr, self.length, self.lkey, self.rkey = pd, addr, length, lkey, lkey
        self.end = addr + length
        self._handle = 0x41414141


def posing(cls: type, pd: Any = None) -> Any:
    """Return an object that claims to be an instance of a class.

    Args:
        cls: the class.
        pd: the protection domain that it claims to have.
    """

    class Posing:
        __slots__ = ("a", "b", "c", "d", "e", "f", "g", "h")

        @property
        def __class__(self) -> Any:
            return cls

        def __getattr__(self, name: str) -> Any:
            return {"closed": False, "pd": pd, "_handle": 0x41414141, "type": 2}.get(name, 0)

    made = Posing()
    for name in "abcdefgh":
        setattr(made, name, 0x4141414141414141)
    return made


class Finalizer:
    """Acts when the garbage collector finalizes it."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.cycle = self

    def __del__(self) -> None:
        self.act()


class Counting(bytearray):
    """A header whose length is different each time."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return self.asked % 7 * 40


def header(draw: Draw, size: int, data: bytes) -> Any:
    """Return the header of a TSO, in one of many forms."""
    data = (data * (size // max(1, len(data)) + 1))[:size]
    choice = draw.below(11)
    if choice < 3:
        return data
    if choice == 3:
        return bytearray(data)
    if choice == 4:
        return memoryview(data)
    if choice == 5:
        return array.array("I", bytes(size // 4 * 4))
    if choice == 6:
        return Counting(data)
    if choice == 7:
        return np.zeros(size, np.uint64)
    if choice == 8:
        return memoryview(bytearray(2 * size))[::2]
    if choice == 9:
        return memoryview(bytes(size // 4 * 4)).cast("I")
    return draw.among(None, "text", 5, [1, 2], object(), posing(bytes))


def property_class(base: type, field: str, act: Act, values: Sequence[Any]) -> Any:
    """Return a work request class with a property as one field, which acts and changes."""
    state = {"at": 0}

    def read(self: Any) -> Any:
        state["at"] += 1
        act()
        return values[state["at"] % len(values)]

    def write(self: Any, value: Any) -> None:
        pass

    return type(f"Property{base.__name__}", (base,), {field: property(read, write)})


class LyingSGE(rp.SGE):
    """An SGE whose attributes differ from the numbers that it holds."""

    @property
    def addr(self) -> int:  # type: ignore[override]
        return 8

    @property
    def length(self) -> int:  # type: ignore[override]
        return 1 << 20

    def __getitem__(self, index: Any) -> Any:
        raise Hostile("no element")


def sge_class() -> type:
    """Return a subclass of SGE that lies."""
    return LyingSGE
