"""How a failed command ends: the exit code and the message."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import click

from .exit_codes import FAILED, INTERRUPTED, NO_DEVICE, USAGE
from .output import Output, echo

_UNWRITABLE = (errno.ENOSPC, errno.EBADF, errno.EDQUOT, errno.EFBIG)
"""The errnos of a failed write to standard output; nothing else in a command fails with them."""


def report(error: Exception, out: Output) -> int:
    """Report a command's error on stderr and in the JSON document; return the exit code."""
    out.failure = None
    if isinstance(error, click.exceptions.Abort):
        out.doc["error"] = "interrupted"
        _finish(out)
        return INTERRUPTED
    code, lines = _explain(error)
    out.doc["error"] = lines[0]
    _add_details(error, out)
    name = "rdmapost"
    if isinstance(error, click.UsageError):
        # The parser's errors do not name the command.
        name = error.ctx.command_path if error.ctx is not None else out.command
        lines.append(f"Try '{name} --help'.")
    echo(f"{name}: " + "\n".join(lines), red=f"{name}:", err=True)
    _finish(out)
    return code


def lacks_device(error: Exception) -> bool:
    """Whether the error says that there is no device, or that it cannot be opened or used."""
    from rdmapost.errors import NoDeviceError, NoRdmaError, VerbsError

    if isinstance(error, VerbsError):
        return error.call == "ibv_open_device" or error.errno in (errno.EACCES, errno.EPERM)
    return isinstance(error, (NoRdmaError, NoDeviceError))


def drop_unwritten() -> None:
    """Drop unwritten output; otherwise the interpreter retries at exit, and reports an error."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _finish(out: Output) -> None:
    """Print the document if possible: writing it may be what failed."""
    if out.json:
        with contextlib.suppress(OSError):
            out.finish("")


def _explain(error: Exception) -> tuple[int, list[str]]:
    """Return the exit code and the lines of text for an error."""
    from rdmapost.errors import CompletionError, RdmaError, WaitTimeout, where_explained

    if isinstance(error, click.ClickException):
        # click lists choices one per line.
        text = " ".join(error.format_message().split())
        return (USAGE if isinstance(error, click.UsageError) else FAILED), [text]
    text = str(error) or type(error).__name__
    if lacks_device(error):
        return NO_DEVICE, [text]
    if isinstance(error, CompletionError):
        from rdmapost.explain import explain

        # An unknown status has its number as its name.
        if error.wc.status.name.isdecimal():
            return FAILED, [text, "this version of rdmapost does not know this status"]
        [status] = explain(error.wc.status)
        return FAILED, [text, f"{status.summary}; {where_explained(status.name)}"]
    if isinstance(error, WaitTimeout) and "; " not in text:
        # What follows a semicolon says why already.
        return FAILED, [text, "'rdmapost doctor' with the same -d may say why"]
    if isinstance(error, MemoryError):
        return FAILED, ["out of memory; try a smaller --size or --count"]
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
        return FAILED, [f"cannot write the output: {error.strerror}"]
    if not isinstance(error, (RdmaError, OSError, ValueError)):
        # A bug in this program, not a user's mistake.
        import traceback

        traceback.print_exception(error)
    return FAILED, [text]


def _add_details(error: Exception, out: Output) -> None:
    from rdmapost.errors import PostError, VerbsError

    if isinstance(error, VerbsError) and error.errno:
        out.doc["errno"] = errno.errorcode.get(error.errno, str(error.errno))
    if isinstance(error, PostError):
        out.doc["index"], out.doc["posted"] = error.index, error.posted
