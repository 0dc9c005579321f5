"""Long lines on standard error: wrapped on a terminal, whole in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.cli_runner import process
from support.terminal import terminal

LIMIT = 60
LIBRARY = "/a-directory/that_is-not/there/and-has/a_long-name/with-hyphens/libibverbs.so.1"
LACKING = {"RDMAPOST_LIBIBVERBS": LIBRARY}
DEVICES = ["-m", "rdmapost.cli", "devices", "-d", "mlx5_0"]
COMMAND = "'modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0'"
QUOTING = [
    "-c",
    "from rdmapost.cli.output import echo\n"
    f"echo(\"the peer's device needs it; run {COMMAND}, the host's administrator may\", err=True)",
]


def lines_on_a_terminal(width: int, program: list[str]) -> list[str]:
    """Run a program with standard error on a terminal; return the lines that it shows there."""
    with terminal(width) as (stderr, shown):
        subprocess.run(
            [sys.executable, "-P", *program],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **LACKING, "NO_COLOR": "1"},
            timeout=LIMIT,
            check=False,
        )
    return shown.decode().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_error_is_wrapped_at_the_width_of_the_terminal(width):
    whole = process(*DEVICES[2:], **LACKING).stderr
    lines = lines_on_a_terminal(width, DEVICES)
    assert len(lines) > 1
    for line in lines:
        # The path alone may be longer.
        assert len(line) <= width or LIBRARY in line.split()[0], line
    assert re.sub(r"\s+", " ", " ".join(lines)) == whole.strip()


def test_wrapping_breaks_no_word():
    assert any(LIBRARY in line for line in lines_on_a_terminal(60, DEVICES))


def test_wrapping_breaks_no_quoted_command():
    lines = lines_on_a_terminal(70, QUOTING)
    assert len(lines) > 2
    assert any(COMMAND in line for line in lines), lines


def test_terminal_of_unknown_width_wraps_at_80_columns():
    assert lines_on_a_terminal(0, DEVICES) == lines_on_a_terminal(80, DEVICES)


def test_error_in_a_pipe_is_one_line():
    [line] = process(*DEVICES[2:], **LACKING).stderr.splitlines()
    assert len(line) > 200
