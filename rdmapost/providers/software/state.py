"""The object behind each C struct, the transactions, and the functions that C calls.

``verb`` turns a function into a control verb: it holds the device's lock, and
its changes to the device are committed when it returns, or rolled back if it
raises (``_c/software/transaction.c``).  The data verbs are in C (``_c/software/data_verbs.c``).
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..._binding import address_of, native
from ...errors import VerbsError
from .device import Device, OpenDevice, open_devices, permanent, ready, run_due, wires
from .journaled_dict import JournaledDict
from .numbers import Numbers

_log = logging.getLogger("rdmapost.soft")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def verb(function: Callable[_P, _R]) -> staticmethod[_P, _R]:
    """Make a control verb of a function in a provider's class.

    It is a static method, so the function has no ``self``: the structs that it is passed lead to
    the device. C calls the function, so no signal handler runs between the function's return and
    the verb's.
    """
    return staticmethod(functools.partial(native.verb, function))


_tables: list[dict[Any, Any]] = []


def table() -> JournaledDict:
    """Return a new table, which is emptied in the child of a fork."""
    made = JournaledDict()
    _tables.append(made)
    return made


objects: dict[int, Any] = table()
"""The object behind each struct, by the struct's handle."""
_handles = Numbers(1, 0xFFFF_FFFF)


_wholes = table()
"""The structs around those with a handle: a pointer to a part does not keep the whole alive."""
contexts: dict[int, OpenDevice] = table()
"""Open contexts, by their struct's address."""


def context_of(context: Any, name: str) -> OpenDevice:
    """Return the open device behind a context, for the named verb.

    Raises:
        VerbsError: the context is closed.
    """
    found = contexts.get(address_of(context))
    if found is None:
        raise VerbsError(name, errno.EINVAL, "the context is closed")
    return found


def device_of(struct: Any, name: str) -> Device:
    """Return the device that a struct belongs to, on behalf of the named verb.

    Raises:
        VerbsError: its context is closed.
    """
    device: Device = context_of(struct.context, name).device
    return device


def bound(struct: Any, name: str) -> Any:
    """Return the object behind a struct, for the named verb.

    Raises:
        VerbsError: it has been destroyed, or belongs to another process.
    """
    found = objects.get(struct.handle)
    if found is None:
        raise VerbsError(
            name, errno.EINVAL, f"the device has no object with the handle {struct.handle}"
        )
    return found


def keep(struct: Any, thing: Any, name: str, whole: Any = None) -> Any:
    """Give a struct a new handle that identifies the object behind it; return the struct.

    Args:
        name: the verb.
        whole: the larger struct that the struct is part of, if any.

    Raises:
        VerbsError: ENOMEM: all handles are in use.
    """
    struct.handle = handle = _handles.choose(name, "handles", objects.__contains__)
    objects[handle] = thing
    if whole is not None:
        _wholes[handle] = whole
    return struct


def drop(struct: Any, name: str) -> Any:
    """Remove the object behind a struct, and return it.

    Raises:
        VerbsError: it has been destroyed, or belongs to another process.
    """
    found, handle = bound(struct, name), struct.handle
    del objects[handle]
    _wholes.discard(handle)
    return found


# ---- what C calls -----------------------------------------------------------


_reports: list[tuple[str, BaseException | None]] = []
"""What to log after the verb."""
_REPORT_PAUSE = 10.0
"""Seconds before the same problem is reported again."""
_reported: dict[str, float] = {}
"""When each problem (a device's lack of memory, or a bug in it) was last reported."""
_LACK = MemoryError, RecursionError, SystemError
"""Lack of memory or stack. CPython 3.11 raises SystemError when it cannot allocate a frame."""


def _execute_next(worker: Any, is_late: bool) -> int:
    """Do one part of a worker's pending work.

    Args:
        worker: None for the work that is due.
        is_late: whether this verb has run for so long that other verbs should do the rest.

    Returns:
        0 at the end; 1 to be called again; -2 to be called again in a later verb.
    """
    if worker is None:
        run_due()
        return False
    if not hasattr(worker, "device"):
        # A signal handler posted to it while it was being created; its creation has been undone.
        return False
    if is_late and worker.device.put_off():
        return -2
    more: int = worker.device.execute_next(worker)
    return more


def _give_up(worker: Any, error: BaseException | None) -> int:
    """Fail a worker's work, or the work that is due (None), after two exceptions.

    Returns:
        what _execute_next returns, or -1 if a later verb must retry the work.
    """
    device = None if worker is None else worker.device
    name = "a software device" if device is None else device.name
    lacks = error is None or isinstance(error, _LACK)
    if lacks:
        if not isinstance(error, RecursionError):
            _report_rarely(f"{name} lacks memory, and will try again", None)
    elif worker is device:
        _report_rarely(f"{name} has a bug", error)
    else:
        text = f"{name} failed to execute a work request, which ends with FATAL_ERR"
        native.on_commit(_reports.append, (text, error))
    if device is None:
        return -1 if lacks else 0
    if lacks and worker is not device:
        # A work request does not fail for lack of memory: it waits until memory is available.
        return -1
    # A device that lacks memory loses a packet, as a network may.
    more: int = device.give_up(worker)
    return more


def _report_rarely(text: str, error: BaseException | None) -> None:
    now = time.monotonic()
    if now >= _reported.get(text, -math.inf) + _REPORT_PAUSE:
        native.on_commit(_reported.__setitem__, text, now)
        native.on_commit(_reports.append, (text, error))


def _log_reports() -> None:
    while True:
        try:
            text, error = _reports.pop()
        except IndexError:  # none is left: another thread may have taken it
            return
        _log.log(logging.ERROR if error else logging.WARNING, text, exc_info=error)


_kept: list[Any] = []


def _reset() -> bool:
    """Start over after a fork, because everything belongs to the parent process.

    The old state is kept, as its structs may still be referred to; its descriptors stay open.
    """
    for one in {*permanent, *open_devices.values()}:
        _kept.append(dict(vars(one)))
        one.start_over()
    wires.clear()
    for each in (*_tables, open_devices):
        _kept.append(dict(each))
        for key in list(each):
            del each[key]
    return True


def _refuse(function: Callable[..., Any], *_: Any) -> None:
    raise VerbsError(
        f"ibv_{function.__name__}",
        errno.EBUSY,
        "this thread is in the middle of a verb of a software device (this is a finalizer or a "
        "signal handler); call it when that verb has ended",
    )


os.register_at_fork(after_in_child=native.after_fork)

parts = (
    objects,
    open_devices,
    ready,
    wires,
    _execute_next,
    _give_up,
    _log_reports,
    _reset,
    _refuse,
    setattr,
    delattr,
    deque.pop,
)
"""The parts of the device that C uses."""
