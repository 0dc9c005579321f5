"""Options before or after the command, names that are mistyped, and help by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.cli_runner import run

import rdmapost as rp


@pytest.mark.parametrize(
    "args",
    [
        ["-d", "soft0", "--json", "atomic", "fetch-add"],
        ["atomic", "-d", "soft0", "--json", "fetch-add"],
        ["atomic", "fetch-add", "-d", "soft0", "--json"],
        ["-d", "soft0", "atomic", "--json", "fetch-add"],
        ["--json", "tag", "-d", "soft0", "add"],
    ],
    ids=" ".join,
)
def test_common_options_go_before_or_after_the_command(args: list[str]) -> None:
    ran = run(*args)
    assert (ran.code, ran.err) == (0, "")
    assert (ran.doc["device"], ran.doc["status"]) == ("soft0", "SUCCESS")


def test_gid_index_0_before_the_command_is_used() -> None:
    assert run("-d", "soft0", "-g", "0", "--json", "send").doc["gid_index"] == 0


def test_verbose_before_the_command_prints_notes() -> None:
    assert run("-v", "send", "-d", "soft0").err.startswith("device   soft0")


def test_option_after_the_command_overrides_one_before_it() -> None:
    assert run("-d", "nosuch0", "send", "-d", "soft0").code == 0


@pytest.mark.parametrize("option", ["--device=soft0", "--port=1", "--gid-index=0", "--verbose"])
def test_option_that_a_command_lacks_is_refused_before_the_command_name(option: str) -> None:
    ran = run(option, "explain", "5")
    assert (ran.code, ran.out) == (2, "")
    assert f"'explain' has no option '{option.partition('=')[0]}'" in ran.err


@pytest.mark.parametrize(
    ("args", "suggestion"),
    [
        (["sned"], "send"),
        (["devcies"], "devices"),
        (["pingpng"], "pingpong"),
        (["atomic", "csa"], "cas"),
        (["tag", "ad"], "add"),
        (["help", "pingpnog"], "pingpong"),
        (["send", "--sise", "3"], "--size"),
    ],
    ids=" ".join,
)
def test_mistyped_name_gets_a_suggestion(args: list[str], suggestion: str) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert f"Did you mean '{suggestion}'?" in ran.err.replace(
        f"Did you mean {suggestion}?", f"Did you mean '{suggestion}'?"
    )


def test_name_like_no_other_gets_no_suggestion() -> None:
    ran = run("xyzzy")
    assert ran.code == 2
    assert ran.err.splitlines()[0] == "rdmapost: No such command 'xyzzy'."


@pytest.mark.parametrize("path", [[], ["send"], ["atomic"], ["atomic", "cas"]], ids=" ".join)
def test_help_command_prints_what_the_option_prints(path: list[str]) -> None:
    asked = run("help", *path)
    assert (asked.code, asked.err) == (0, "")
    assert asked.out == run(*path, "--help").out


@pytest.mark.parametrize("group", [[], ["atomic"]], ids=" ".join)
def test_json_without_a_command_prints_a_document(group: list[str]) -> None:
    ran = run(*group, "--json")
    assert (ran.code, ran.doc) == (2, {"error": "a command is missing"})


def test_python_m_rdmapost_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost", "-V"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"rdmapost {rp.__version__}\n")


def test_devices_command_takes_the_name_of_one_device() -> None:
    ran = run("devices", "soft0", "--json")
    assert ran.code == 0
    assert [device["name"] for device in ran.doc["devices"]] == ["soft0"]
    assert run("devices", "nosuch0").code == 3


def test_devices_command_refuses_two_names() -> None:
    ran = run("devices", "soft0", "-d", "rxe0")
    assert ran.code == 2
    assert "'soft0' and '-d rxe0' name two devices" in ran.err


def test_pingpong_takes_a_port_with_the_host() -> None:
    ran = run("pingpong", "-d", "soft0", "127.0.0.1:1")
    assert ran.code == 1
    assert "cannot connect to 127.0.0.1:1: Connection refused" in ran.err
    ran = run("pingpong", "-d", "soft0", "[::1]:1")
    assert "cannot connect to [::1]:1: " in ran.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["host:1", "--tcp-port", "2"], "'host:1' and '--tcp-port 2' name two ports"),
        (["host:0"], "'0' is not a port"),
        (["host:x"], "'x' is not a port"),
        ([":5"], "':5' has no host"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_pingpong_refuses_a_port_that_cannot_be(args: list[str], says: str) -> None:
    ran = run("pingpong", "-d", "soft0", *args)
    assert ran.code == 2
    assert says in ran.err
