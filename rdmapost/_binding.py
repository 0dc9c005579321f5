"""The one place that imports the compiled module."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

try:
    from . import _verbs as native
    from ._verbs import ffi, lib
except ImportError as error:
    if error.name == __package__:
        error.add_note(
            "This is rdmapost's source folder, without its compiled module: run 'pip install -e .' "
            "there, or start Python in another directory."
        )
    raise

native.importing()

__all__ = ["address_of", "ffi", "lib", "native", "once", "start_of"]


def _complete() -> None:
    """Have cffi look up everything now.

    Otherwise it looks up each type, struct and function on first use. If the collector runs a
    finalizer during a lookup, and the finalizer starts the same lookup, the process aborts.
    Without a GIL, two threads that start the same lookup dereference NULL.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        for prefix, names in zip(("", "struct ", "union "), ffi.list_types(), strict=True):
            for name in names:
                found = ffi.typeof(f"{prefix}{name} *").item
                if found.kind in ("struct", "union"):
                    # An opaque struct has neither a size nor fields.
                    with contextlib.suppress(ffi.error):
                        ffi.sizeof(found)
                        found.fields  # noqa: B018
        for name in dir(lib):
            getattr(lib, name)
    finally:
        if is_enabled:
            gc.enable()


_complete()


_results: dict[object, Any] = {}


def once(function: Callable[..., Any], key: object, *args: object) -> Any:
    """Call a C function unless it has been called with this key; return its result.

    The C code accepts such a call only once per process, but an interrupted import is repeated.
    Call this only after the modules that define the arguments have been imported completely (in a
    package's ``__init__``): an interrupted module runs again, and creates its classes a second
    time.
    """
    called = function, key
    if called not in _results:
        # No Python code, and so no interrupt, comes between the call and storing its result.
        _results.update(zip((called,), map(function, *zip(args, strict=True)), strict=True))
    return _results[called]


_UINTPTR = ffi.typeof("uintptr_t")


def address_of(cdata: object) -> int:
    """Return the address in a cffi pointer, in the form that ``native``'s functions take."""
    return int(ffi.cast(_UINTPTR, cdata))


def start_of(view: memoryview) -> int:
    """Return the address of the first byte of a view.

    Keep the view, not its cdata: if the collector clears both in one cycle, Python 3.11 and 3.12
    dereference a NULL pointer.

    Raises:
        ValueError: the view's memory is not contiguous.
    """
    with ffi.from_buffer("char[]", view) as start:
        return address_of(start)
