"""The one place that imports the compiled module."""

from . import _verbs as door
from ._verbs import ffi, lib

__all__ = ["address_of", "door", "ffi", "lib"]


def address_of(cdata: object) -> int:
    """Return what a pointer of cffi's points to, as the functions of ``door`` take it."""
    return int(ffi.cast("uintptr_t", cdata))
