"""The one place that imports the compiled module."""

import sys
from collections.abc import Callable
from typing import Any

from . import _verbs as native
from ._verbs import ffi, lib

native.importing()

__all__ = ["address_of", "ffi", "lib", "native", "once", "start_of"]

if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
    # cffi resolves a struct's fields on first use; without a GIL, two threads doing so at once
    # dereference NULL.
    for _prefix, _names in zip(("", "struct ", "union "), ffi.list_types(), strict=True):
        for _name in _names:
            _type = ffi.typeof(_prefix + _name)
            _fields = _type.kind in ("struct", "union") and _type.fields


_results: dict[object, Any] = {}


def once(function: Callable[..., Any], key: object, *args: object) -> Any:
    """Call a function of C unless it has been called with this key; return what it returned.

    For what C accepts once in a process, while an interrupted import is repeated.  Call it where
    the modules of the arguments are complete (a package's ``__init__``): an incomplete one is run
    again, and creates its classes a second time.
    """
    called = function, key
    if called not in _results:
        # No Python code, and so no interrupt, comes between the call and storing its result.
        _results.update(zip((called,), map(function, *zip(args, strict=True)), strict=True))
    return _results[called]


_UINTPTR = ffi.typeof("uintptr_t")


def address_of(cdata: object) -> int:
    """Return the address in a cffi pointer, as the functions of ``native`` take it."""
    return int(ffi.cast(_UINTPTR, cdata))


def start_of(view: memoryview) -> int:
    """Return the address of the first byte of a view.

    Keep the view, not its cdata: if the collector clears both in one cycle, Python 3.11 and 3.12
    dereference a NULL pointer.

    Raises:
        ValueError: the memory behind it is not contiguous.
    """
    with ffi.from_buffer("char[]", view) as start:
        return address_of(start)
