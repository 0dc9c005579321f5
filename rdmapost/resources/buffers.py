"""Buffers that contain references or pointers, which devices and C code must not overwrite."""

from __future__ import annotations

import gc
import re
import sys
from typing import Any

_FIELD_NAMES = re.compile(":[^:]*:")
"""The field names in a record's format, such as ``T{i:count:O:value:}``."""
_CODES_IN_NAME = re.compile("[<>=@!^]([Oz]|Z(?![fdg]))|&[<>=@!^(TX&]")
"""Codes that show that text between colons is not a field's name: a name may contain a colon."""
_POINTERS = re.compile("[O&Xz]|Z(?![fdg])")
"""Format codes of objects and of ctypes' POINTER, function, c_char_p and c_wchar_p.

``Zf``, ``Zd`` and ``Zg`` are complex numbers.
"""
# A metaclass may define attributes with these names, which may return anything.
_MRO, _DICT = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__


def pointers_in(view: memoryview) -> str | None:
    """Return a description of the references or pointers that Python follows in a buffer, or None.

    Some are not found, and are the caller's responsibility: addresses that are plain numbers
    (``P``); pointers exposed as numbers (``numpy.frombuffer``, ctypes' ``from_buffer``); and
    pointers in packed ctypes structures and unions if the class's ``_fields_`` or ``_type_`` has
    been changed, because nothing else describes what they contain.
    """
    if found := _POINTERS.search(" ".join(_codes_behind(view))):
        objects = found[0] == "O"
        return "references to Python objects" if objects else "pointers that Python follows"
    return None


def _codes_behind(view: memoryview) -> list[str]:
    """Return the codes of a view, of views from a class's ``__buffer__``, and of the exporter.

    The exporter's own view has its own format, whatever this one was cast to.
    """
    codes = _codes_of(view)
    exporter: Any = view.obj
    if _holds_objects(exporter):
        codes.append("O")
    if type(exporter).__name__ == "_buffer_wrapper":
        for behind in gc.get_referents(exporter):
            if isinstance(behind, memoryview):
                codes += _codes_behind(behind)
    elif not isinstance(exporter, (bytes, bytearray)):
        try:
            own = memoryview(exporter)
        except (BufferError, TypeError, ValueError):
            return codes  # numpy has no format for dates, for instance
        with own:
            codes += _codes_of(own)
    return codes


def _holds_objects(exporter: Any) -> bool:
    """Say whether a numpy array or scalar refers to objects.

    Its format may not show this: for a selection of a structured type's fields, it omits the
    others.
    """
    numpy = sys.modules.get("numpy")
    for base in (getattr(numpy, "ndarray", None), getattr(numpy, "generic", None)):
        if isinstance(base, type) and issubclass(type(exporter), base):
            dtype: Any = base.__dict__["dtype"]
            return bool(dtype.__get__(exporter).hasobject)
    return False


def _codes_of(view: memoryview) -> list[str]:
    """Return the codes of one view.

    For a ctypes object, also return those of its type, because the format omits the contents of
    packed structures and unions. The type alone would not do: it may no longer list a field.
    """
    ctypes: Any = sys.modules.get("_ctypes")
    if ctypes is None or not isinstance(view.obj, ctypes.Structure.__base__):
        return [_codes(view.format)]
    with memoryview(view.obj) as own:
        return [_codes(own.format), *_ctypes_codes(ctypes, type(view.obj))]


def _codes(format_: str | None) -> str:
    """Return the codes in a format, without the names of fields."""
    codes, end = "", 0
    for name in _FIELD_NAMES.finditer(format_ or "B"):
        codes += name.string[end : name.start()]
        if _CODES_IN_NAME.search(name[0]):
            codes += name[0]
        end = name.end()
    return codes + (format_ or "B")[end:]


def _ctypes_codes(ctypes: Any, cls: Any) -> list[str]:
    """Return the format codes of the numbers and pointers in a ctypes type."""
    if issubclass(cls, ctypes.Array):
        return _ctypes_codes(ctypes, _attributes(cls, "_type_")[0])
    if issubclass(cls, (ctypes.Structure, ctypes.Union)):
        codes = []
        for fields in _attributes(cls, "_fields_"):
            for _, field, *_ in fields:
                codes += _ctypes_codes(ctypes, field)
        return codes
    if issubclass(cls, ctypes._SimpleCData):
        # c_wchar_p's code, "Z", also begins the codes of numpy's complex numbers.
        code = _attributes(cls, "_type_")[0]
        return ["z" if code == "Z" else code]
    return ["&"]


def _attributes(cls: Any, name: str) -> list[Any]:
    """Return each attribute ``name`` of a class and its bases, whatever a metaclass shows."""
    own = [_DICT(base) for base in _MRO(cls)]
    return [names[name] for names in own if name in names]


def check_rows(view: memoryview) -> None:
    """Raise TypeError for a buffer in which completions would overwrite pointers."""
    if what := pointers_in(view):
        raise TypeError(
            f"completions cannot be written to a buffer of format {view.format!r}: "
            f"they would overwrite {what}"
        )
