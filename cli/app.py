"""The group of all commands, and how each of them ends.

The modules of the commands import the library only when a command runs, so
that help and usage errors are quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from rdmapost import __version__

from .atomic import atomic
from .check import check
from .devices import devices
from .failure import report
from .keys import bind_mw, invalidate
from .offload import tso
from .output import Output
from .rdma import read, write
from .send import send
from .tag import tag

__all__ = ["app"]


class App(click.Group):
    """A group that turns every end of a command into the exit code and text it promises."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run a command and exit: 0 done, 1 failed, 2 usage, 3 no device, 130 interrupted.

        Args:
            args: the arguments; those of the process unless given.
            prog_name: the name for help and errors.
            complete_var: as in click.
            standalone_mode, windows_expand_args: taken as click calls it, and not used.
            extra: passed to the context.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        # Should the arguments not be understood, this is all there is to go by.
        extra["obj"] = out = Output(json="--json" in arguments)
        try:
            # --help and ctx.exit() come back as a number, commands as None.
            code = super().main(
                arguments, prog_name or "rdmapost", complete_var, standalone_mode=False, **extra
            )
        except Exception as error:
            code = report(error, out)
        sys.exit(code or 0)


@click.group(
    cls=App,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 the post or its completion failed, 2 usage, "
    "3 no such device or no permission.",
)
@click.version_option(__version__, "-V", "--version", message="rdmapost %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Post RDMA work requests and see exactly what the device did with them.

    Without -d, the device is what RDMAPOST_DEVICE names, else the first one
    that has an active port.  Where there is none it is soft0, the software
    device of this process, unless RDMAPOST_REQUIRE_DEVICE=1 forbids that.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


for command in (devices, send, write, read, atomic, bind_mw, invalidate, tso, tag, check):
    app.add_command(command)
