"""The one place that imports the compiled module."""

from . import _verbs as door
from ._verbs import ffi, lib

__all__ = ["address_of", "door", "ffi", "lib", "start_of"]


def address_of(cdata: object) -> int:
    """Return what a pointer of cffi's points to, as the functions of ``door`` take it."""
    return int(ffi.cast("uintptr_t", cdata))


def start_of(view: memoryview) -> int:
    """Return the address of the first byte of a view.

    It is the view that has to be kept, not the cdata of it: where the collector
    takes both in one cycle, Python 3.11 and 3.12 follow a pointer that is NULL.

    Raises:
        ValueError: the memory behind it is not contiguous.
    """
    with ffi.from_buffer("char[]", view) as start:
        return address_of(start)
