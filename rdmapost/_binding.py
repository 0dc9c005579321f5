"""The one place that imports the compiled module."""

from ._verbs import ffi, lib

__all__ = ["ffi", "lib"]
