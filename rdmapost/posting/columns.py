"""Columns: buffers that hold one field's numbers for many work requests.

The C code (``_c/posting/columns.c``) does the posting; its methods replace the Python methods of
the same names.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeAlias

from .._binding import native
from .wr import SGE

Column: TypeAlias = Any
"""A number for all rows, or a buffer of integers of 4 or 8 bytes (numpy, array, ctypes, ...)."""


class Blocks(NamedTuple):
    """Addresses by index: row i is at base + index[i] * size.

    Attributes:
        base: the remote address of block 0, 0..2^64-1; in ``mr.blocks(...)``, the region.
        index: a column of integers; a negative index is a block before base.
        size: bytes per block.
    """

    base: Any
    index: Any
    size: int


class Ranges(NamedTuple):
    """Ranges of a region (``mr.ranges``): row i is ``mr[offsets[i] : offsets[i] + lengths[i]]``.

    Attributes:
        mr: the region.
        offsets: a column of integers.
        lengths: a column of integers, or a number for all rows.
    """

    mr: Any
    offsets: Any
    lengths: Any


LocalRows: TypeAlias = Blocks | Ranges | SGE | Sequence[SGE]
"""The rows' SGEs: ``mr.blocks(...)``, ``mr.ranges(...)``, or the same SGEs for all rows."""


def row_of(column: Column, row: int) -> Any:
    """Return a row's value in a column, or the given value itself if it is not a column."""
    if type(column) is Blocks:
        return operator.index(column.base) + operator.index(column.size) * row_of(column.index, row)
    try:
        view = memoryview(column)
    except TypeError:
        return column
    with view:
        if not view.ndim:
            return column
        signed = (view.format or "B")[-1].islower()
        return int.from_bytes(view[row : row + 1].tobytes(), sys.byteorder, signed=signed)


def local_row(rows: LocalRows, row: int) -> Any:
    """Return a row's sg_list."""
    if type(rows) is Blocks:
        mr, offset, length = rows.base, row_of(Blocks(0, *rows[1:]), row), rows.size
    elif type(rows) is Ranges:
        mr, offset, length = rows.mr, row_of(rows.offsets, row), row_of(rows.lengths, row)
    else:
        return rows
    return SGE(mr.addr + offset, length, mr.lkey, mr)


def field_of_row(name: str, given: Any, row: int) -> Any:
    """Return a field's value in a row."""
    if name == "sg_list":
        return local_row(given, row)
    # Flags are never a column.
    return given if name == "send_flags" else row_of(given, row)


def with_c_methods(cls: type) -> None:
    """Replace a class's placeholder methods with those in C, keeping signatures and docstrings.

    The placeholders' Python bodies raise NotImplementedError. This is not a decorator, because
    editors would then lose track of the class. After an interrupted import, this may run again
    with a new class.
    """
    for name, method in tuple(vars(cls).items()):
        if inspect.isfunction(method) and "NotImplementedError" in method.__code__.co_names:
            signature = inspect.signature(method)
            # inspect parses the text, so the defaults are numbers rather than members of
            # enumerations.
            bare = [
                each.replace(
                    annotation=each.empty,
                    default=int(each.default)
                    if isinstance(each.default, IntEnum | IntFlag)
                    else each.default,
                )
                for each in signature.parameters.values()
            ]
            text = str(inspect.Signature(bare)).replace("(self", "($self", 1)
            native.add_method(cls, name, f"{name}{text}\n--\n\n{method.__doc__}")
