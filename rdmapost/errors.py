"""Exceptions.  Every one says what happened, and where known why and what to try."""

from __future__ import annotations

import errno as _errno
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .completion import WC

__all__ = [
    "ClosedError",
    "CompletionError",
    "InUseError",
    "NoDeviceError",
    "NoRdmaError",
    "PostError",
    "RdmaError",
    "UnsupportedError",
    "VerbsError",
    "WaitTimeout",
]


class RdmaError(Exception):
    """Base of every exception of this package."""


class NoRdmaError(RdmaError):
    """The library libibverbs could not be loaded on this machine."""


class NoDeviceError(RdmaError):
    """The named device does not exist, or no device is there to choose."""


class ClosedError(RdmaError, ValueError):
    """A resource was used after it had been closed."""


class InUseError(RdmaError):
    """A resource cannot be closed while others depend on it."""


class VerbsError(RdmaError, OSError):
    """A verbs call failed.

    Attributes:
        errno: the error number, positive.
        strerror: its text.
        call: the verb, by its man page's name.
        hint: what is likely wrong and what to try, or "".
    """

    def __init__(self, call: str, errno: int, hint: str = "") -> None:
        super().__init__(errno, os.strerror(errno))
        self.call = call
        self.hint = hint

    def __str__(self) -> str:
        number = self.errno or 0
        hint = self.hint or (where_explained(number) if number in _errno.errorcode else "")
        text = f"{self.call}: {describe_errno(number)}"
        return f"{text}: {hint}" if hint else text


class UnsupportedError(VerbsError):
    """The device or the library does not have this call."""

    def __str__(self) -> str:
        return f"{self.call} is not supported{': ' + self.hint if self.hint else ''}"


class PostError(VerbsError):
    """A work request could not be posted.

    Attributes:
        index: which work request of the list failed, from 0; None where the
            device did not say.
        posted: how many went in before it; None where the device did not say.
        wr: the failing work request; None where the device did not say.
        reason: the cause, from what the library knows.
    """

    def __init__(
        self,
        call: str,
        errno: int,
        reason: str,
        *,
        index: int | None,
        posted: int | None,
        count: int,
        wr: Any = None,
    ) -> None:
        super().__init__(call, errno, reason)
        self.index = index
        self.posted = posted
        self.count = count
        self.wr = wr
        self.reason = reason

    def __str__(self) -> str:
        if self.index is None:
            where = f"one of {self.count} work requests" if self.count > 1 else "the work request"
        elif self.count == 1:
            where = "the work request"
        else:
            where = f"work request {self.index + 1} of {self.count}"
        # An index counts from 0 and a reader from 1: say both.
        at = f" (index {self.index})" if self.index is not None and self.count > 1 else ""
        return f"{where}{at}: {self.reason} [{_errno.errorcode.get(self.errno or 0, self.errno)}]"


class CompletionError(RdmaError):
    """A work request completed with an error status.

    Attributes:
        wc: the completion.
    """

    def __init__(self, wc: WC, text: str) -> None:
        super().__init__(text)
        self.wc = wc
        self.add_note(where_explained(wc.status.name))


class WaitTimeout(RdmaError, TimeoutError):
    """Fewer completions came than were waited for.

    Those that came are not lost: the next poll or wait returns them.
    """


def where_explained(what: str | int) -> str:
    """Say where to read about a status, by name, or an errno, by number."""
    name = _errno.errorcode.get(what, what) if isinstance(what, int) else what
    return f"see 'rdmapost explain {name}'"


def describe_errno(errno: int) -> str:
    """Name an error number: ``EINVAL (22, Invalid argument)``."""
    name = _errno.errorcode.get(errno)
    return f"{name} ({errno}, {os.strerror(errno)})" if name else f"errno {errno}"
