"""Runs the command line, in this process or in another, and captures what it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

import rdmapost as rp
from rdmapost.cli.app import app

__all__ = ["Ran", "done", "on", "process", "run"]


class Ran(NamedTuple):
    """How a command ended.

    Attributes:
        code: the exit code.
        out, err: standard output and standard error.
    """

    code: object
    out: str
    err: str

    @property
    def doc(self) -> dict[str, Any]:
        """The JSON document on standard output."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


def run(*args: str) -> Ran:
    """Run ``rdmapost`` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        app(list(args))
    return Ran(end.value.code, out.getvalue(), err.getvalue())


def on(context: rp.Context, *args: str) -> Ran:
    """Run a command on a device."""
    return run(*args, "-d", context.name)


def done(context: rp.Context, *args: str) -> dict[str, Any]:
    """Run a command that must succeed on a device; return its JSON document."""
    ran = on(context, *args, "--json")
    assert ran.err == ""
    assert ran.code == 0, ran.out
    return ran.doc


def process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a separate process."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost.cli", *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
