"""Build ``rdmapost._verbs``, the compiled binding over libibverbs.

The declarations are in ``rdmapost/_c/*/*.cdef.h``, the shim (``ibv_post_send`` and
the like as real symbols) in ``rdmapost/_c/libibverbs/shim.c``, and the rest of the C code
elsewhere in ``rdmapost/_c/``; this file only passes them to cffi and setuptools.

``pip install .`` uses the commands below through pyproject.toml.
``python build_ffi.py`` builds the module in place, next to its sources.

A module, built with the limited API, serves the CPython that it was built with
(3.11 at the earliest) and later ones.  A free-threaded CPython has no limited API
(its objects are laid out differently), so its module and wheel serve only the
version that they were built with.
"""

from __future__ import annotations

import pathlib
import sys
import sysconfig

from cffi import FFI
from setuptools.command import bdist_wheel as _bdist_wheel
from setuptools.command import build_ext as _build_ext

SOURCES = pathlib.Path(__file__).parent / "rdmapost" / "_c"
MODULE = "rdmapost._verbs"
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

ffibuilder = FFI()
for declarations in (
    "libibverbs/verbs.cdef.h",
    "libibverbs/shim.cdef.h",
    "software/soft_device.cdef.h",
):
    ffibuilder.cdef((SOURCES / declarations).read_text())
ffibuilder.set_source(
    MODULE,
    """
    #include "software/soft_device.h"
    /* module.c has the module's init function, which calls cffi's; that one is hidden. */
    #undef PyMODINIT_FUNC
    #define PyMODINIT_FUNC __attribute__((visibility("hidden"))) PyObject *
    #define PyInit__verbs rp_cffi_init
    """,
)


class build_ext(_build_ext.build_ext):
    """Generate the binding's C code from the declarations, then compile all the C code."""

    def finalize_options(self):
        if FREE_THREADED:
            for ext in self.distribution.ext_modules:
                ext.py_limited_api = False
                # cffi defines _CFFI_NO_LIMITED_API by itself.
                ext.define_macros = []
        super().finalize_options()

    def build_extension(self, ext):
        generated = pathlib.Path(self.build_temp) / "_verbs.c"
        generated.parent.mkdir(parents=True, exist_ok=True)
        ffibuilder.emit_c_code(str(generated))
        ext.sources = [*ext.sources, str(generated)]
        super().build_extension(ext)


class bdist_wheel(_bdist_wheel.bdist_wheel):
    """Tag the wheel for this CPython's stable ABI, unless this CPython is free-threaded.

    A module built with the headers of 3.12 or 3.13 may not work on an older one: they rely on an
    immortal None and on new functions, even for the limited API of 3.11.
    """

    def finalize_options(self):
        if not FREE_THREADED:
            self.py_limited_api = f"cp3{sys.version_info.minor}"
        super().finalize_options()


if __name__ == "__main__":
    from setuptools import setup

    sys.argv[1:] = ["build_ext", "--inplace", *sys.argv[1:]]
    setup()
