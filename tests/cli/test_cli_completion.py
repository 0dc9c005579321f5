"""Completion in bash, zsh and fish, requested as these shells do."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import rdmapost as rp

NO_BASH = "bash is not installed"


def answer(shell: str, *words: str) -> list[str]:
    """Return what rdmapost answers a shell about the last of some words, by its protocol.

    The words go in COMP_WORDS; COMP_CWORD is the number of the last of them, and
    for fish that word itself.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost.cli"],
        env={
            **os.environ,
            "COMP_WORDS": " ".join(["rdmapost", *words]),
            "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
            "_RDMAPOST_COMPLETE": f"{shell}_complete",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def values(*words: str) -> list[str]:
    """Return what the last of some words can become."""
    return [line.removeprefix("plain,") for line in answer("bash", *words)]


def test_completion_offers_commands_and_subcommands() -> None:
    assert {"devices", "send", "tag", "completion"} <= set(values(""))
    assert values("in") == ["invalidate"]
    assert values("atomic", "") == ["cas", "fetch-add"]


def test_completion_offers_options() -> None:
    assert values("pingpong", "--tc") == ["--tcp-port"]
    assert {"--imm", "--qp-type", "--device", "--help"} <= set(values("send", "--"))


def test_completion_offers_the_choices_of_an_option() -> None:
    assert values("send", "--qp-type", "") == ["rc", "uc", "ud", "xrc", "raw"]
    assert values("pingpong", "--mtu", "2") == ["256", "2048"]
    assert values("completion", "") == ["bash", "zsh", "fish"]


def test_completion_offers_the_access_that_a_server_can_give() -> None:
    assert values("serve", "--access", "") == ["read", "write", "atomic", "none"]
    assert values("serve", "--access", "read,") == ["read,write", "read,atomic"]
    assert values("serve", "--access", "read,w") == ["read,write"]


def test_completion_offers_device_names() -> None:
    """Those of this machine, soft0 and the roce devices that can be opened."""
    roce = [one.name for one in rp.list_roce_interfaces() if one.obstacle is None]
    assert values("send", "-d", "") == [info.name for info in rp.list_devices()] + roce
    assert values("send", "-d", "roce:l") == ["roce:lo"]
    assert values("check", "--device", "soft") == ["soft0"]


def test_completion_offers_soft0_without_libibverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library the shell shows no error in the middle of a line."""
    monkeypatch.setenv("RDMAPOST_LIBIBVERBS", "/no/such/library")
    assert values("send", "-d", "")[0] == "soft0"


def test_completion_offers_names_that_explain_knows() -> None:
    """Statuses, errnos and opcodes, in any case, and in C after IBV_."""
    assert values("explain", "RNR") == ["RNR_RETRY_EXC_ERR", "RNR"]
    assert values("explain", "rnr") == ["RNR_RETRY_EXC_ERR", "RNR"]
    assert values("explain", "psn-") == ["psn-mismatch"]
    assert values("explain", "waitt") == ["WaitTimeout"]
    assert values("explain", "EINV") == ["EINVAL"]
    assert values("explain", "ibv_wr_send") == [
        "IBV_WR_SEND",
        "IBV_WR_SEND_WITH_IMM",
        "IBV_WR_SEND_WITH_INV",
    ]
    assert values("explain", "") == list(dict.fromkeys(values("explain", "")))


def test_zsh_gets_three_lines_for_each_completion() -> None:
    """Three lines each: the kind, the word, and a description or nothing."""
    assert answer("zsh", "explain", "RETRY") == ["plain", "RETRY_EXC_ERR", "completion status"]
    assert answer("zsh", "send", "--qp-type", "x") == ["plain", "xrc", "_"]


def test_fish_gets_one_line_for_each_completion() -> None:
    """One line each: kind and word, and a description behind a tab."""
    assert answer("fish", "explain", "RETRY") == ["plain,RETRY_EXC_ERR\tcompletion status"]
    assert answer("fish", "send", "-d", "so") == ["plain,soft0"]


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o nosort -F _rdmapost_completion rdmapost"),
        ("zsh", "compdef _rdmapost_completion rdmapost"),
        ("fish", "complete --no-files --command rdmapost"),
    ],
)
def test_script_registers_a_completion_function(shell: str, registers: str) -> None:
    """What 'rdmapost completion' prints registers a function and asks by the same protocol."""
    text = script(shell)
    assert registers in text
    assert f"_RDMAPOST_COMPLETE={shell}_complete" in text


def script(shell: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rdmapost.cli", "completion", shell],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["se"], ["send", "serve"]),
        (["send", "-d", "soft"], ["soft0"]),
        (["explain", "RNR_"], ["RNR_RETRY_EXC_ERR"]),
        (["send", "--qp-type", "r"], ["rc", "raw"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bash_completes_with_the_printed_script(
    tmp_path: pathlib.Path, words: list[str], completed: list[str]
) -> None:
    """The script in a real bash, which calls what it has registered for the command."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip(NO_BASH)
    command = tmp_path / "rdmapost"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m rdmapost.cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "completion").write_text(script("bash"))
    program = """
        source "$1/completion"
        shift
        [[ $(complete -p rdmapost) == *" -F _rdmapost_completion "* ]] || exit 1
        COMP_WORDS=(rdmapost "$@") COMP_CWORD=$#
        _rdmapost_completion rdmapost "${!#}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        [bash, "--norc", "-c", program, "bash", str(tmp_path), *words],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.split() == completed


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_zsh_and_fish_completions_show_the_whole_description_of_a_command(shell: str) -> None:
    whole = "Atomically change 64 bits of a second queue pair, or of HOST."
    assert any(line.endswith(whole) for line in answer(shell, "atomi"))


def test_fish_script_keeps_commas_in_a_description() -> None:
    """The type ends at the first comma; the others are in the description."""
    assert 'string split --max 1 ","' in script("fish")
