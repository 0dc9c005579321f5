"""``rdmapost completion``."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    It completes commands, options and their values: devices after -d, and the
    names that 'rdmapost explain' knows.  To enable it in every new shell, add it
    to the start-up file, or for fish to a separate file:

    \b
      ~/.bashrc  eval "$(rdmapost completion bash)"
      ~/.zshrc   eval "$(rdmapost completion zsh)"   (below compinit)
      fish       rdmapost completion fish \\
                   > ~/.config/fish/completions/rdmapost.fish
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None, "click has these three"
    # The variable that click looks for.
    script = complete(ctx.find_root().command, {}, "rdmapost", "_RDMAPOST_COMPLETE")
    # click's script for fish cuts a description at its first comma.
    click.echo(script.source().replace('string split ","', 'string split --max 1 ","'))
