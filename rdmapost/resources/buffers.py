"""Buffers that contain references or pointers: devices and C must not overwrite these."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Iterator
from typing import Any

_FIELD_NAMES = re.compile(":[^:]*:")
"""The field names in a record's format, such as ``T{i:count:O:value:}``."""
_CODES_IN_NAME = re.compile("[<>=@!^]([Oz]|Z(?![fdg]))|&[<>=@!^(TX&]")
"""What is not a field's name, but codes between two names of which one has a colon."""
_POINTERS = re.compile("[O&Xz]|Z(?![fdg])")
"""Format codes of objects and of ctypes' POINTER, function, c_char_p and c_wchar_p.

``Zf``, ``Zd`` and ``Zg`` are complex numbers.
"""


def pointers_in(view: memoryview) -> str | None:
    """Return a description of the references or pointers in a buffer that Python follows, or None.

    Not found, and left to the caller: addresses that are plain numbers (``P``); pointers exposed as
    numbers (``numpy.frombuffer``, ctypes' ``from_buffer``); and pointers in packed ctypes
    structures and unions whose class has had its ``_fields_`` changed, because only ``_fields_``
    describes their contents.
    """
    ctypes = sys.modules.get("_ctypes")
    for behind in _views_behind(view):
        codes = _codes(behind.format)
        if ctypes is not None and isinstance(behind.obj, ctypes.Structure.__base__):
            # ctypes' own format, which a class cannot change; but it omits the contents of packed
            # structures and of unions.
            codes = "".join((_own_codes(behind.obj), *_ctypes_codes(ctypes, type(behind.obj))))
        if found := _POINTERS.search(codes):
            objects = found[0] == "O"
            return "references to Python objects" if objects else "pointers that Python follows"
    return None


def _codes(format_: str | None) -> str:
    """Return the codes in a format, without the names of fields."""
    return _FIELD_NAMES.sub(
        lambda name: name[0] if _CODES_IN_NAME.search(name[0]) else "", format_ or "B"
    )


def _views_behind(view: memoryview) -> Iterator[memoryview]:
    """Yield a view, the views behind it that a class's ``__buffer__`` returned, and the exporter's.

    The exporter's own view has its own format, whatever this one was cast to.
    """
    yield view
    exporter: Any = view.obj
    if type(exporter).__name__ == "_buffer_wrapper":
        for behind in gc.get_referents(exporter):
            if isinstance(behind, memoryview):
                yield from _views_behind(behind)
    elif not isinstance(exporter, (bytes, bytearray)):
        # numpy has no format for dates, for instance.
        with contextlib.suppress(BufferError, TypeError, ValueError), memoryview(exporter) as own:
            yield own


def _own_codes(exporter: Any) -> str:
    """Return a ctypes object's own format codes, whatever format a view of it has."""
    return _codes(memoryview(exporter).format)


def _ctypes_codes(ctypes: Any, cls: Any) -> Iterator[str]:
    """Yield the format codes of the numbers and pointers in a ctypes type."""
    if issubclass(cls, ctypes.Array):
        yield from _ctypes_codes(ctypes, cls._type_)
    elif issubclass(cls, (ctypes.Structure, ctypes.Union)):
        for base in cls.__mro__:
            for _, field, *_ in base.__dict__.get("_fields_", ()):
                yield from _ctypes_codes(ctypes, field)
    elif issubclass(cls, ctypes._SimpleCData):
        # c_wchar_p's code, "Z", also begins the codes of numpy's complex numbers.
        yield "z" if cls._type_ == "Z" else cls._type_
    else:
        yield "&"


def check_rows(view: memoryview) -> None:
    """Raise TypeError for a buffer in which completions would overwrite pointers."""
    if what := pointers_in(view):
        raise TypeError(
            f"completions cannot be written to a buffer of format {view.format!r}: "
            f"they would overwrite {what}"
        )
