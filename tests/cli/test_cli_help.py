"""The help of every command: it fits 80 columns, is complete and in order."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from support.cli_runner import run

from rdmapost.cli.app import app
from rdmapost.cli.groups import LazyCommand


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a group and all that is below it, with the words that lead there."""
    yield path, group
    for name, command in group.commands.items():
        loaded = command.load() if isinstance(command, LazyCommand) else command
        if isinstance(loaded, click.Group):
            yield from commands(loaded, *path, name)
        else:
            yield (*path, name), loaded


ALL = dict(commands(app))
every = pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "rdmapost")


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@every
def test_help_of_every_command_fits_80_columns(path: tuple[str, ...]) -> None:
    ran = run(*path, "--help")
    assert ran.code == 0
    assert ran.err == ""
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []


@every
def test_help_of_every_command_begins_with_one_sentence(path: tuple[str, ...]) -> None:
    """A sentence that the list of commands shows whole, and a page that starts with it."""
    command = ALL[path]
    assert command.help
    first = command.help.split("\n\n")[0]
    assert first[0].isupper()
    assert first.endswith(".")
    assert first in run(*path, "--help").out
    if path:
        assert f"  {first}\n" in run(*path[:-1], "--help").out


@every
def test_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    options = [option for option in ALL[path].params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []
    for option in options:
        assert option.help is not None
        assert option.help[0].isupper(), option.name
        # What is in brackets follows the sentence: two spaces, as click has them.
        assert " [" not in option.help.replace("  [", ""), option.name


def test_help_groups_the_commands() -> None:
    """The usual starting points come first, and no command is missing."""
    text = run("--help").out
    heads = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads == ["Options:", "Look:", "Post:", "Two hosts:", "Shell:"]
    for name in app.commands:
        assert f"\n  {name} " in text
    assert list(app.commands) == app.list_commands(click.Context(app))


def test_help_lists_every_exit_code() -> None:
    text = " ".join(run("--help").out.split())
    codes = ("0 done", "1 the post", "2 usage", "3 no such device", "130 interrupted (serve: 0)")
    assert [code for code in codes if code not in text.partition("Exit codes: ")[2]] == []


def test_help_of_write_says_where_each_of_the_writes_goes() -> None:
    words = "Post N work requests in one list, to N consecutive places."
    assert words in " ".join(run("write", "--help").out.split())
    assert "consecutive" not in run("read", "--help").out


def test_help_offers_the_device_between_processes() -> None:
    words = "Device, such as mlx5_0, rxe0, roce:lo or soft0."
    assert words in " ".join(run("send", "--help").out.split())
