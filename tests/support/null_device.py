"""The benchmarks' null device in place of libibverbs: it fails and misreports on demand."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap

import pytest
from bench.null import compile_c

from support import prints

SETUP = """
import errno, rdmapost as rp

def said(call):
    "Return what an error of the library says."
    try: call()
    except rp.RdmaError as error: return f"{type(error).__name__}: {error}"

def resources():
    context = rp.open_device("null0")
    pd, cq = rp.PD(context), rp.CQ(context)
    return context, pd, cq
"""

LIES = """
import ctypes, os, sys
# Every work request completes, and nothing is carried out.
ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"]).null_remember(1)
"""

COMMAND = """
from rdmapost.cli import main
sys.stderr = sys.stdout
sys.argv[1:] = os.environ["COMMAND"].split()
try: main()
except SystemExit as end: print("exit", end.code)
"""


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The null device, compiled."""
    if shutil.which(os.environ.get("CC", "cc").split()[0]) is None:
        pytest.skip("there is no C compiler")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Ignore the compiler's own leaks under .ci/sanitize.
            patch.setenv("ASAN_OPTIONS", "detect_leaks=0")
            library, _ = compile_c(tmp_path_factory.mktemp("null"))
    except subprocess.CalledProcessError:
        pytest.skip("the null device does not compile here: are libibverbs' headers there?")
    return str(library)


@pytest.fixture
def on_null(null):
    """Run a program on the null device; return its output."""

    def run(code: str, **env: str) -> str:
        # No leak check: the null device never frees its allocations.
        env = {"RDMAPOST_LIBIBVERBS": null, "ASAN_OPTIONS": "detect_leaks=0", **env}
        return prints(SETUP + textwrap.dedent(code), **env)

    return run
