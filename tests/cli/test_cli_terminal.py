"""What is different on a terminal: the width of the output, and colour for what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.cli_runner import run
from support.terminal import terminal

RED = "\x1b[31m"
PROBLEM = ["doctor", "-d", "soft0", "-g", "250"]
ERROR = ["send", "-d", "nosuch0"]


def shown_on_a_terminal(width: int, *args: str, **environment: str) -> str:
    """Run a command with its output and errors on a terminal."""
    given = {"TERM": "xterm", **environment}
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with terminal(width) as (fd, shown):
        subprocess.run(
            [sys.executable, "-P", "-m", "rdmapost.cli", *args],
            stdout=fd,
            stderr=fd,
            env={**kept, **given},
            timeout=60,
            check=False,
        )
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize(
    "args", [["explain", "RETRY_EXC_ERR"], ["send", "-d", "soft0", "--size", "4K"]]
)
def test_output_takes_the_width_of_the_terminal(args: list[str], width: int) -> None:
    lines = shown_on_a_terminal(width, *args).splitlines()
    assert width - 20 < max(map(len, lines)) <= width


@pytest.mark.parametrize("args", [PROBLEM, ERROR], ids=["finding", "error"])
def test_what_went_wrong_is_red_on_a_terminal(args: list[str]) -> None:
    assert RED in shown_on_a_terminal(80, *args)


def test_what_is_right_has_no_colour() -> None:
    assert "\x1b" not in shown_on_a_terminal(80, "send", "-d", "soft0")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
@pytest.mark.parametrize("args", [PROBLEM, ERROR], ids=["finding", "error"])
def test_no_colour_where_it_is_not_wanted(args: list[str], environment: dict[str, str]) -> None:
    assert "\x1b" not in shown_on_a_terminal(80, *args, **environment)


@pytest.mark.parametrize("args", [PROBLEM, ERROR], ids=["finding", "error"])
def test_no_colour_in_a_pipe(args: list[str]) -> None:
    ran = run(*args)
    assert "\x1b" not in ran.out + ran.err


def test_notes_are_wrapped_at_the_width_of_the_terminal() -> None:
    lines = shown_on_a_terminal(70, "send", "-d", "soft0", "-v").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("local "))
    assert lines[start + 1].startswith("  ")
    assert max(map(len, lines)) <= 70
