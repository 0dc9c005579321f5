"""The output of a command: one JSON document or text on stdout, notes on stderr."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO

import click

_QUOTED = re.compile(r"(?<!\w)'[^']+'(?!\w)")
_NO_BREAK = "\u00a0"
_WIDTH = 80
"""The width of a file or pipe, and of a terminal that does not report one."""


def width(stream: TextIO | None = None) -> int:
    """Return the width of a stream's terminal (default: stdout's); 80 if it is not a terminal."""
    stream = sys.stdout if stream is None else stream
    if not _is_terminal(stream):
        return _WIDTH
    return os.get_terminal_size(stream.fileno()).columns or _WIDTH


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return text coloured if the stream (default: stdout) is a terminal and NO_COLOR is unset."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not _is_terminal(stream):
        return text
    return click.style(text, colour)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


@dataclass(slots=True)
class Output:
    """Collects the output of a command.

    Attributes:
        json: print the document instead of text.
        one_line: print the document on one line, as one of several.
        verbose: print notes.
        command: the full name of the command, for errors in its arguments.
        doc: the JSON document, filled in as the command runs, so that a failure
            shows how far it got.
        failure: the error to report after the result, if the command failed but has a result.
    """

    json: bool = False
    one_line: bool = False
    verbose: bool = False
    command: str = "rdmapost"
    doc: dict[str, Any] = field(default_factory=dict)
    failure: Exception | None = None

    def note(self, text: str) -> None:
        """Print a note on stderr, if verbose."""
        if self.verbose:
            echo(text, err=True)

    def raise_failure(self) -> None:
        """Raise ``failure``, if it is set."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def finish(self, text: str) -> None:
        """Print the result."""
        import json

        if self.json and self.failure is not None:
            # report() adds the error to the document, and prints it.
            return
        click.echo(json.dumps(self.doc, indent=None if self.one_line else 2) if self.json else text)


def quoted(text: str) -> str:
    """Return text in quotes; escape characters that stdout's encoding cannot represent."""
    import json

    shown = json.dumps(text, ensure_ascii=False)
    try:
        shown.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return json.dumps(text)
    return shown


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def fields(pairs: Sequence[tuple[str, object]]) -> str:
    """Lay out names and values, one pair per line, cut to the width of the output."""
    limit = width()
    lines = columns([("", name, str(value)) for name, value in pairs])
    return "\n".join(
        line if len(line) <= limit else line[: limit - 4] + " ..." for line in lines.splitlines()
    )


def wrapped(text: str, first: str) -> str:
    """Wrap a paragraph after ``first``, but not at hyphens; indent later lines by its length."""
    rest = " " * len(first)
    return textwrap.fill(
        text, width(), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def echo(text: str, *, err: bool = False, red: str = "") -> None:
    """Print text on stdout or stderr; on a terminal, wrap it, and show the prefix ``red`` in red.

    Words and commands in single quotes stay whole, so that they can be copied.
    """
    stream = sys.stderr if err else sys.stdout
    if _is_terminal(stream):
        text = "\n".join(_for_terminal(line, stream) for line in text.splitlines())
    if red and text.startswith(red):
        text = coloured(red, "red", stream) + text.removeprefix(red)
    click.echo(text, err=err)


def _for_terminal(line: str, stream: TextIO) -> str:
    # textwrap does not break at a no-break space.
    kept = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _NO_BREAK), line)
    filled = textwrap.fill(
        kept, width(stream), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return filled.replace(_NO_BREAK, " ")


def usage_error(text: str) -> NoReturn:
    """End the command with a usage error."""
    raise click.UsageError(text, click.get_current_context())


def need_command(ctx: click.Context) -> None:
    """If no command was given, print the group's help (an error with --json), and exit with 2."""
    if ctx.invoked_subcommand is None:
        out = ctx.find_object(Output)
        if out is not None and out.json:
            usage_error("a command is missing")
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
