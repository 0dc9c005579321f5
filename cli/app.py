"""The top-level command group, and how every command ends.

A command's module is imported when the command is called, and imports the
library when the command runs, so that help and usage errors are fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from rdmapost import __version__

from .failure import drop_unwritten, report
from .groups import Group, LazyCommand, check_options, group_options
from .output import Output

_COMMANDS = {
    "Look": (
        ("devices", "devices", "List devices, their ports and GIDs."),
        ("check", "check", "Post every opcode on every QP type, and verify the result."),
        ("doctor", "doctor", "Find out what keeps RDMA from working on this machine."),
        ("explain", "explain", "Explain a status, an errno or an opcode."),
    ),
    "Post": (
        ("send", "send", "Send a message to a second queue pair, or to HOST."),
        ("write_read", "write", "Write to the memory of a second queue pair, or of HOST."),
        ("write_read", "read", "Read the memory of a second queue pair, or of HOST."),
        ("atomic", "atomic", "Atomically change 64 bits of a second queue pair, or of HOST."),
        ("memory_windows", "bind-mw", "Bind a type 2 memory window, and write data through it."),
        (
            "memory_windows",
            "invalidate",
            "Invalidate the key of a type 2 memory window (LOCAL_INV).",
        ),
        ("tso", "tso", "Let the device segment data (TSO)."),
        ("tag", "tag", "Match messages to buffers by their tags."),
    ),
    "Two hosts": (
        ("serve", "serve", "Let commands in other processes post to this device."),
        ("pingpong", "pingpong", "Send a message back and forth between two hosts, and time it."),
    ),
    "Shell": (
        ("help", "help", "Show the options of a command."),
        ("shell_completion", "completion", "Print the completion script for a shell."),
    ),
}
"""Module, name and summary of every command, in the groups that help shows."""


class App(Group):
    """A group that maps the outcome of a command to its exit code and text."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any
    ) -> NoReturn:
        """Run a command and exit: 0 done, 1 failed, 2 usage, 3 no device, 130 interrupted.

        Args:
            args: the arguments; default: the process's.
            prog_name: the name for help and errors.
            extra: as in click.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        # Used if the arguments cannot be parsed.
        out = Output(json="--json" in arguments)
        extra |= {"obj": out, "standalone_mode": False}
        try:
            # --help and ctx.exit() return a number; commands return None.
            code = super().main(arguments, prog_name or "rdmapost", **extra)
            out.raise_failure()
        except Exception as error:
            code = report(error, out)
            drop_unwritten()
        sys.exit(code or 0)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name, and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name == "serve" and (out := ctx.find_object(Output)) is not None:
            # Set it here, so that a usage error is printed on one line, too.
            out.one_line = True
        if isinstance(command, LazyCommand):
            command = command.load()
        if command is not None and not isinstance(command, click.Group):
            check_options(ctx, command)
        return name, command, rest

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names, in the order in which help lists them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their groups."""
        longest = max(map(len, self.commands))
        for title, commands in _COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), text) for _, name, text in commands])


@click.group(
    cls=App,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 the post or its completion failed, 2 usage, "
    "3 no such device or no permission, 130 interrupted (serve: 0).",
)
@group_options
@click.version_option(__version__, "-V", "--version", message="rdmapost %(version)s")
def app() -> None:
    """Post RDMA work requests and see exactly what the device did with them.

    Without -d, the device is the one named by RDMAPOST_DEVICE, or else the first
    with an active port, or else soft0, the software device in this process
    (unless RDMAPOST_REQUIRE_DEVICE=1).

    These options go before or after the command.  'rdmapost help COMMAND' shows
    all of its options.
    """


for group in _COMMANDS.values():
    for each in group:
        app.add_command(LazyCommand(*each))
