"""Build ``rdmapost._verbs``, the compiled binding over libibverbs.

The declarations are in ``rdmapost/_c/*.cdef.h`` and the shim in
``rdmapost/_c/*.c``; this file only hands them to cffi and setuptools.

``pip install .`` uses the commands below through pyproject.toml.
``python build_ffi.py`` builds the module in place, beside its sources.
"""

from __future__ import annotations

import pathlib
import sys

from cffi import FFI
from setuptools.command import bdist_wheel as _bdist_wheel
from setuptools.command import build_ext as _build_ext

SOURCES = pathlib.Path(__file__).parent / "rdmapost" / "_c"
MODULE = "rdmapost._verbs"

ffibuilder = FFI()
for declarations in ("verbs.cdef.h", "shim.cdef.h", "soft.cdef.h"):
    ffibuilder.cdef((SOURCES / declarations).read_text())
ffibuilder.set_source(
    MODULE,
    """
    #include "soft.h"
    /* The module's init function is door.c's; it calls cffi's, which nobody else sees. */
    #undef PyMODINIT_FUNC
    #define PyMODINIT_FUNC __attribute__((visibility("hidden"))) PyObject *
    #define PyInit__verbs rp_cffi_init
    """,
)


class build_ext(_build_ext.build_ext):
    """Generate the binding's C from the declarations, then compile it with the shim."""

    def build_extension(self, ext):
        generated = pathlib.Path(self.build_temp) / "_verbs.c"
        generated.parent.mkdir(parents=True, exist_ok=True)
        ffibuilder.emit_c_code(str(generated))
        ext.sources = [*ext.sources, str(generated)]
        super().build_extension(ext)


class bdist_wheel(_bdist_wheel.bdist_wheel):
    """Tag the wheel for the stable ABI of CPython 3.11."""

    def finalize_options(self):
        self.py_limited_api = "cp311"
        super().finalize_options()


if __name__ == "__main__":
    from setuptools import setup

    sys.argv[1:] = ["build_ext", "--inplace", *sys.argv[1:]]
    setup()
