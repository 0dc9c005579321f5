"""``rdmapost help``."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from .groups import LazyCommand


def _commands(ctx: click.Context, name: click.Parameter, text: str) -> list[CompletionItem]:
    """Complete the name of a command, or of a subcommand if its group has been typed."""
    at = ctx.find_root().command
    for word in ctx.params.get("command") or ():
        command = at.commands.get(word) if isinstance(at, click.Group) else None
        if command is None:
            return []
        at = command.load() if isinstance(command, LazyCommand) else command
    commands = at.commands if isinstance(at, click.Group) else {}
    return [
        CompletionItem(name, help=command.help)
        for name, command in commands.items()
        if name.startswith(text)
    ]


@click.command()
@click.argument("command", nargs=-1, shell_complete=_commands)
@click.pass_context
def help(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Show the options of a command.

    'rdmapost help send' is 'rdmapost send --help'.
    """
    root = ctx.find_root()
    # Run COMMAND --help, which also reports a name that does not exist.
    root.command.main([*command, "--help"], root.info_name)
