"""What is different on a terminal: the width of the output, and colour for what went wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from support.cli_runner import run
from support.roce import skip_unless_free
from support.terminal import terminal

from rdmapost.cli.devices import _text

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


def test_summary_of_doctor_fits_a_narrow_terminal() -> None:
    lines = shown_on_a_terminal(40, "doctor", "-d", "soft0").splitlines()
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("verbose", [False, True])
def test_long_check_shows_its_progress_on_a_terminal_unless_verbose(verbose: bool) -> None:
    program = (
        "from rdmapost.cli import payload\n"
        "payload._PATIENCE_S = 0\n"
        "from rdmapost.cli.app import app\n"
        f"app(['check', '-d', 'soft0', *{['-v'] * verbose!r}])\n"
    )
    with terminal(80) as (fd, shown):
        subprocess.run(
            [sys.executable, "-P", "-c", program],
            stdout=subprocess.DEVNULL,
            stderr=fd,
            env={**os.environ, "TERM": "xterm"},
            timeout=60,
            check=True,
        )
    assert (b" 100%" in shown) == (not verbose)


@pytest.mark.parametrize("args", [PROBLEM, ERROR], ids=["finding", "error"])
def test_errors_are_red_on_a_terminal(args: list[str]) -> None:
    assert RED in shown_on_a_terminal(80, *args)


def test_successful_output_has_no_colour() -> None:
    assert "\x1b" not in shown_on_a_terminal(80, "send", "-d", "soft0")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
@pytest.mark.parametrize("args", [PROBLEM, ERROR], ids=["finding", "error"])
def test_no_colour_on_a_dumb_terminal_or_where_the_environment_forbids_it(
    args: list[str], environment: dict[str, str]
) -> None:
    assert "\x1b" not in shown_on_a_terminal(80, *args, **environment)


@pytest.mark.parametrize("args", [PROBLEM, ERROR], ids=["finding", "error"])
def test_output_in_a_pipe_has_no_colour(args: list[str]) -> None:
    ran = run(*args)
    assert "\x1b" not in ran.out + ran.err


def test_notes_are_wrapped_at_the_width_of_the_terminal() -> None:
    lines = shown_on_a_terminal(70, "send", "-d", "soft0", "-v").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("local "))
    assert lines[start + 1].startswith("  ")
    assert max(map(len, lines)) <= 70


def lined_up(heads: str, row: str) -> bool:
    """Whether a value begins below each head."""
    starts = [found.start() for found in re.finditer(r"\S+(?: \S+)*", heads)]
    padded = f" {row:200}"
    return all(padded[at] == " " and padded[at + 1] != " " for at in starts)


@pytest.mark.parametrize("width", [55, 60, 80])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_columns_of_the_devices_line_up_at_any_width(device: str, width: int) -> None:
    skip_unless_free(device)
    lines = shown_on_a_terminal(width, "devices", "-d", device).splitlines()
    assert max(map(len, lines)) <= width
    (head,) = (place for place, line in enumerate(lines) if "KIND" in line)
    (row,) = (line for line in lines if "ACTIVE" in line)
    assert lined_up(lines[head], row)
    # In a narrow one, the name is on the line above.
    assert lines[0].startswith("DEVICE")
    assert lines[head + 1].startswith(device)


def test_long_names_do_not_make_the_list_of_devices_too_wide() -> None:
    def device(name: str, *gids: str) -> dict[str, Any]:
        port = {"port": 1, "state": "ACTIVE", "link_layer": "INFINIBAND", "lid": 49151}
        port |= {"active_mtu": 4096, "max_mtu": 4096, "gid_index": 0}
        table = [
            {"gid_index": index, "gid": gid, "type": "ROCE_V2", "netdev": None}
            for index, gid in enumerate(gids)
        ]
        place = {"pci_address": None, "numa_node": None}
        return {"name": name, "kind": "verbs", **place, "ports": [{**port, "gids": table}]}

    short, gid, longer = device("mlx5_0", "::1"), "fe80::1234:56ff:fe78:9abc", "rocep129s0f1np1"
    for name in (longer, f"{longer}_{longer}"):
        lines = _text([short, device(name, gid, "::2")]).splitlines()
        assert max(map(len, lines)) <= 80
        (heads,) = (line for line in lines if "KIND" in line)
        rows = [line for line in lines if "ACTIVE" in line]
        assert len(rows) == 2
        assert all(lined_up(heads, row) for row in rows)
        gid_types = [line.index("ROCE_V2") for line in lines if "GID" in line]
        assert len(gid_types) == 3
        assert len(set(gid_types)) == 1
