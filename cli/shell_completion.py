"""``rdmapost completion``."""

from __future__ import annotations

import click

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what lets a shell complete rdmapost.

    It completes commands, options and their values: the devices of this machine
    after -d, and what 'rdmapost explain' knows.  For every new shell put it into
    its start-up file, or for fish into a file of its own:

    \b
      ~/.bashrc  eval "$(rdmapost completion bash)"
      ~/.zshrc   eval "$(rdmapost completion zsh)"   (below compinit)
      fish       rdmapost completion fish \\
                   > ~/.config/fish/completions/rdmapost.fish
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None, "click has these three"
    # The variable is the one that click looks for.
    script = complete(ctx.find_root().command, {}, "rdmapost", "_RDMAPOST_COMPLETE")
    click.echo(script.source())
