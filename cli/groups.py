"""Groups that accept options before the command's name, and suggest a name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from .options import common_options, given
from .output import Output, need_command


class LazyCommand(click.Command):
    """A command whose module is not imported yet, for the list of commands."""

    def __init__(self, module: str, name: str, help: str) -> None:
        super().__init__(name, help=help)
        self._module = module

    def load(self) -> click.Command:
        """Import the command."""
        assert self.name is not None
        module = import_module(f".{self._module}", __package__)
        command: click.Command = getattr(module, self.name.replace("-", "_"))
        return command


class Group(click.Group):
    """A group that suggests a name when a command does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name."""
        if args[0] not in self.commands and not ctx.resilient_parsing and args[0][:1] != "-":
            # click itself has suggested names only since 8.4.
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        if (out := ctx.find_object(Output)) is not None:
            out.command = f"{ctx.command_path} {name}"
        return name, command, rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command; unlike click, do not cut its description short."""
        items = super().shell_complete(ctx, incomplete)
        for item in items:
            command = self.commands.get(item.value)
            if command is not None and command.help:
                item.help = " ".join(command.help.split("\n\n")[0].split())
        return items


def group_options(function: Callable[[], None]) -> Callable[..., None]:
    """Add -d, -p, -g, --json and -v to a group; its commands get them as defaults."""

    @common_options
    @wraps(function)
    def group(**options: Any) -> None:
        ctx = click.get_current_context()
        need_command(ctx)
        # Keep 0, which is a GID index.
        options = {name: x for name, x in options.items() if x is not None and x is not False}
        assert isinstance(ctx.command, click.Group)
        ctx.default_map = dict.fromkeys(ctx.command.commands, options)

    return group


def check_options(ctx: click.Context, command: click.Command) -> None:
    """Refuse options that precede a command's name if the command does not have them."""
    known = {param.name for param in command.params}
    for param in ctx.command.params:
        if param.name not in known and param.name is not None and given(param.name):
            raise click.UsageError(f"'{command.name}' has no option '{param.opts[-1]}'", ctx)
