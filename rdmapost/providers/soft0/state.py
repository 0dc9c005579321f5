"""What all verbs of the soft device have in common.

The device itself, and what the C structs stand for.  ``verb`` makes a control
verb of a function: it holds the device's lock, and all that it changes in the
device is done when it returns, or undone if it raises
(``_c/soft0/verb.c``).  The data verbs are in C (``_c/soft0/context.c``).
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..._binding import address_of, native
from ...errors import VerbsError
from .engine.device import Device, OpenDevice, ready
from .engine.table import Table

_log = logging.getLogger("rdmapost.soft")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def verb(function: _Function) -> _Function:
    """Make a control verb of a function.

    That is C from its first instruction to its last, so no signal handler runs between the end of
    a verb and its return.
    """
    return functools.partial(native.verb, function)  # type: ignore[return-value]


_tables: list[dict[Any, Any]] = []


def table() -> dict[Any, Any]:
    """Make a table that is empty after a fork."""
    made: dict[Any, Any] = Table()
    _tables.append(made)
    return made


device = Device("soft0")
objects: dict[int, Any] = table()
"""What the structs stand for, by their handle."""
_handles = itertools.count(1)
_HANDLE_MASK = 0xFFFF_FFFF


class OpenHandles(NamedTuple):
    opened: OpenDevice
    struct: Any


contexts: dict[int, OpenHandles] = table()
"""Open contexts, by their struct's address."""


def context_of(context: Any, name: str) -> OpenDevice:
    """Return the open device that a struct stands for.

    Args:
        context: the struct.
        name: the call that asks.

    Raises:
        VerbsError: it is closed.
    """
    found = contexts.get(address_of(context))
    if found is None:
        raise VerbsError(name, errno.EINVAL, "the context is closed")
    return found.opened


def bound(struct: Any, name: str) -> Any:
    """Return what a struct stands for.

    Args:
        struct: the struct, with a handle.
        name: the call that asks.

    Raises:
        VerbsError: it has been destroyed, or is another process's.
    """
    found = objects.get(struct.handle)
    if found is None:
        raise VerbsError(name, errno.EINVAL, f"soft0 has no object of the handle {struct.handle}")
    return found


def keep(struct: Any, thing: Any) -> Any:
    """Give a struct a handle and remember what it stands for; return the struct."""
    struct.handle = handle = next(_handles) & _HANDLE_MASK
    objects[handle] = thing
    return struct


def drop(struct: Any, name: str) -> Any:
    """Forget what a struct stands for, and return it.

    Raises:
        VerbsError: it has been destroyed, or is another process's.
    """
    found = bound(struct, name)
    del objects[struct.handle]
    return found


# ---- what C calls -----------------------------------------------------------


_faults: list[BaseException] = []


def _give_up(worker: Any, error: BaseException) -> int:
    if worker is None and isinstance(error, MemoryError):
        # What is due has no end of its own.
        return -1
    _faults.append(error)
    try:
        return device.give_up(worker)
    except MemoryError:
        _faults.remove(error)
        raise


def _log_faults() -> None:
    while True:
        try:
            fault = _faults.pop()
        except IndexError:  # another thread may have been here
            return
        _log.error("the soft device failed; the work request did too", exc_info=fault)


_kept: list[Any] = []


def _reset() -> bool:
    """Start over after a fork: all of it belongs to the parent process.

    It is kept, for structs of it may still be referred to, and its descriptors stay open.
    """
    _kept.append(dict(vars(device)))
    device.__init__(device.name)  # type: ignore[misc]
    for each in _tables:
        _kept.append(dict(each))
        for key in list(each):
            del each[key]
    return True


def _refuse(function: Callable[..., Any], *_: Any) -> None:
    raise VerbsError(
        f"ibv_{function.__name__}",
        errno.EBUSY,
        "this thread is in the middle of a verb of soft0 (this is a finalizer or a signal "
        "handler); do it when that is over",
    )


os.register_at_fork(after_in_child=native.after_fork)

native.soft_device(
    objects, ready, device.step, _give_up, _log_faults, _reset, _refuse, setattr, delattr, deque.pop
)
