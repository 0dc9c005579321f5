"""Tests that may crash or hang a process run in a Python of their own.

``@isolated`` goes around a test function.  pytest collects it as any other; its arguments (strings
and numbers: a device's name, a parameter) are handed to a new Python, which runs the body.  The
test fails with what that process wrote, when it does not end with 0 or is not done in time; it
then has said where each of its threads was.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support import TIMES

FAKE_PYTEST = pathlib.Path(__file__).resolve().parent / "fake_pytest"

_BOOT = """
import faulthandler, gc, json, os, sys, time
path, name, arguments, seconds, fake_pytest = sys.argv[1:]
faulthandler.enable()
end = time.monotonic() + float(seconds)
watch = lambda: faulthandler.dump_traceback_later(max(0.1, end - time.monotonic()), exit=True)
watch()
# At its end a child would wait for the thread that watches, which it does not have.
os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=watch)
here = path.rpartition("/")[0]
sys.path[:0] = [fake_pytest, here, here.rpartition("/")[0]]
module = __import__(path.rpartition("/")[2].removesuffix(".py"))
gc.freeze()  # What has been imported is not looked at by the many collections of a test.
getattr(module, name).__wrapped__(**json.loads(arguments))
sys.stdout.flush()
"""


def isolated(
    *, timeout: float = 40, warnings: str = "error", silent: bool = False, **env: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a separate Python process.

    Args:
        timeout: seconds; the process ends by then, with the stacks of its threads.
        warnings: what Python is to do with warnings (-W).
        silent: fail if anything is written to standard error.
        env: variables of its environment.
    """

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        path = str(pathlib.Path(test.__code__.co_filename).resolve())

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            __tracebackhide__ = True
            seconds = timeout * TIMES
            passed = (path, test.__name__, json.dumps(arguments), seconds, FAKE_PYTEST)
            status, out, err = run_python(["-W", warnings, "-c", _BOOT, *passed], seconds + 10, env)
            if status:
                pytest.fail(f"it {how(status)}\n{out}{err}", pytrace=False)
            if silent and err:
                pytest.fail(f"it wrote\n{err}", pytrace=False)

        return run

    return wrap


def run_python(arguments: list[Any], seconds: float, env: dict[str, str]) -> tuple[int, str, str]:
    """Run Python in a new session; all of its processes have ended when this returns.

    Returns:
        The exit status, negative for a signal; standard output; standard error.
    """
    with subprocess.Popen(
        # -P: test the installed package, not one in the current directory.
        [sys.executable, "-P", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out = err = ""
            # A descendant in another session may still hold the pipes.
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=10)
            err += f"\nkilled after {seconds:g} s\n"
    return process.returncode, out, err


def how(status: int) -> str:
    """Say how a process ended."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with {status}"
