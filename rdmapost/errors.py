"""Exceptions.  Each says what happened and, if known, why and what to try.

``ClosesOnExit`` decides which error leaves a with block: the block's, or that of closing.
"""

from __future__ import annotations

import contextlib
import copy
import errno as _errno
import operator
import os
import pickle
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

if TYPE_CHECKING:
    from .enums import WCStatus
    from .resources.cq import WC

__all__ = [
    "CloseError",
    "ClosedError",
    "CompletionError",
    "InUseError",
    "NoDeviceError",
    "NoRdmaError",
    "PostError",
    "RdmaError",
    "UnsupportedError",
    "VerbsError",
    "WaitCancelled",
    "WaitTimeout",
]

ADD_SOFT_ROCE = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {}"
"""What to try without a device, given the name of a network device."""
RAISE_MEMLOCK = (
    "ulimit -l unlimited, or permanently: memlock in /etc/security/limits.conf, "
    "LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a container"
)
"""What to try if too little memory may be locked."""


def is_from_system(error: OSError) -> bool:
    """Return whether an error came from a system call; a signal handler's error has no errno."""
    return error.errno is not None


class _SuppressSystemErrors:
    """Suppresses the errors of system calls, but not those that signal handlers raise."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: object, trace: object) -> bool:
        return isinstance(error, OSError) and is_from_system(error)


suppress_system_errors = _SuppressSystemErrors()


class RdmaError(Exception):
    """Base class of every exception in this package.

    Copying and pickling (as a multiprocessing pool does) keep the arguments, the attributes and the
    notes. Pickling does not fail: an argument or attribute that cannot be pickled, such as a work
    request that names a region, arrives as its repr(), a str. A deep copy shares the values that
    cannot be copied.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if type(self).__reduce__ is not RdmaError.__reduce__:
            # A derived class has its own reduction.
            return self.__reduce__()
        return self._reduce(operator.index(protocol))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduce(pickle.DEFAULT_PROTOCOL)

    def _reduce(self, protocol: int) -> tuple[Any, ...]:
        args = tuple([_picklable(value, protocol) for value in self.args])
        state = {
            name: value if value is self else _picklable(value, protocol)
            for name, value in self._state().items()
        }
        return _rebuild, (type(self), args), state

    def __copy__(self) -> Self:
        made: Self = _rebuild(type(self), self.args)
        made.__setstate__(self._state())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made: Self = _rebuild(type(self), tuple([_deep_copy(value, memo) for value in self.args]))
        memo[id(self)] = made
        made.__setstate__({k: _deep_copy(v, memo) for k, v in self._state().items()})
        return made

    def _state(self) -> dict[str, Any]:
        """Return all attributes, including those that an OSError does not keep in its __dict__."""
        state = dict(vars(self))
        for name in _OF_OSERROR:
            value = getattr(self, name, None)
            if value is not None:
                state[name] = value
        return state


class NoRdmaError(RdmaError):
    """The library libibverbs could not be loaded on this machine."""


class NoDeviceError(RdmaError):
    """There is no device of that name, or no device at all."""


class ClosedError(RdmaError, ValueError):
    """A resource was used after it had been closed."""


class InUseError(RdmaError):
    """A resource cannot be closed while others depend on it."""


class CloseError(RdmaError):
    """Context.close_all() could not close some resources; the others are closed.

    Attributes:
        errors: the error of each resource that is still open, the device's last.
    """

    def __init__(self, text: str, errors: tuple[RdmaError, ...]) -> None:
        super().__init__(text)
        self.errors = errors


class VerbsError(RdmaError, OSError):
    """A verbs call failed.

    Attributes:
        errno: the error number, positive.
        strerror: its text.
        call: the verb, as its man page names it.
        hint: the likely cause and what to try, or "".
    """

    errno: int

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
    """The device or the library does not support this call."""

    def __str__(self) -> str:
        return f"{self.call} is not supported{': ' + self.hint if self.hint else ''}"


class PostError(VerbsError):
    """A work request could not be posted.

    Attributes:
        index: which work request of the list failed, from 0; None if the
            device did not say.
        posted: how many were posted before it; None if the device did not say.
        count: the length of the list.
        wr: the failing work request; None if the device did not say.  If it
            names resources, pickling replaces it with its repr(), a str.
        reason: the cause, if known.
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
        which = ""
        if self.count == 1:
            pass
        elif self.index is None:
            which = f"one of {self.count} work requests: "
        else:
            # An index counts from 0 and a reader from 1: give both.
            which = f"work request {self.index + 1} of {self.count} (index {self.index}): "
        name = _errno.errorcode.get(self.errno or 0, self.errno)
        return f"{self.call}: {which}{self.reason} [{name}]"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r}, index={self.index}, posted={self.posted})"


class CompletionError(RdmaError):
    """A work request completed with an error status.

    Attributes:
        wc: the completion.
    """

    def __init__(self, wc: WC, text: str) -> None:
        super().__init__(text)
        self.wc = wc
        note_status(self, wc.status)


class WaitTimeout(RdmaError, TimeoutError):
    """Fewer completions arrived than requested.

    Those that arrived are not lost: the next poll or wait returns them.

    Attributes:
        failed: the first WC to arrive with an error status, or None.
    """

    def __init__(self, text: str = "", *, failed: WC | None = None) -> None:
        super().__init__(text)
        self.failed = failed


class WaitCancelled(RdmaError):
    """CQ.cancel_waits() has ended a wait; the next poll or wait returns its completions."""


class ClosesOnExit:
    """A context manager that closes itself."""

    __slots__ = ()

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    def _refuse_inherited(self) -> None:
        """Raise ClosedError in a forked child, which must not use the resource."""

    def __enter__(self) -> Self:
        self._refuse_inherited()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RdmaError as failure:
            if error is None:
                raise
            # The original error matters more than its consequences. Nothing may hide it:
            # neither a subclass's message nor its add_note().
            with contextlib.suppress(Exception):
                error.add_note(" ".join(self._failure_text(failure).split()))

    def _failure_text(self, failure: RdmaError) -> str:
        """Say what could not be closed, and why."""
        return str(failure)


_OF_OSERROR = ("errno", "strerror", "filename", "filename2")


def _rebuild(cls: Any, args: tuple[Any, ...]) -> Any:
    """Make an exception from its args without its constructor, which may not accept them."""
    made = cls.__new__(cls, *args)
    (OSError if issubclass(cls, OSError) else BaseException).__init__(made, *args)
    return made


def _picklable(value: Any, protocol: int) -> Any:
    """Return the value, or its repr if it cannot be pickled and unpickled."""
    try:
        # Unpickle it, too: a pool hangs if its parent cannot load a result.
        pickle.loads(pickle.dumps(value, protocol))
    except Exception:
        return _text_of(value)
    return value


def _text_of(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, or the value itself if (like a resource) it cannot be copied."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def note_status(error: Exception, status: WCStatus) -> None:
    """Add a note that says where a status is explained, unless only a newer libibverbs knows it."""
    if not status.name.isdigit():
        error.add_note(where_explained(status.name))


def where_explained(what: str | int) -> str:
    """Return where a status (given by name) or an errno (given by number) is explained."""
    name = _errno.errorcode.get(what, what) if isinstance(what, int) else what
    return f"see 'rdmapost explain {name}'"


def describe_refusal(errno: int) -> str:
    """Say what an error number is and, if it has a name, where it is explained."""
    if errno not in _errno.errorcode:
        return describe_errno(errno)
    return f"{describe_errno(errno)}; {where_explained(errno)}"


def describe_errno(errno: int) -> str:
    """Name an error number: ``EINVAL (22, Invalid argument)``."""
    name = _errno.errorcode.get(errno)
    return f"{name} ({errno}, {os.strerror(errno)})" if name else f"errno {errno}"
