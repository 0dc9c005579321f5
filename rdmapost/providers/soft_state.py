"""What the control verbs and the data verbs of the soft device have in common.

The device itself, what the C structs stand for, and how an exception inside a
verb is told: it must not cross C.  The device turns one into a completion or an
errno, and it is logged with its traceback; a Ctrl-C is delivered again once the
call has come back.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._binding import address_of, lib
from ..soft.device import Device, OpenDevice

__all__ = [
    "OpenHandles", "context_of", "contexts", "device", "keep", "lock", "objects", "tell", "told",
    "verb",
]  # fmt: skip

_log = logging.getLogger("rdmapost.soft")

device = Device("soft0")
lock = device.lock
objects: dict[int, Any] = {}
"""What the structs stand for, by their handle."""
_handles = itertools.count(1)
_HANDLE_MASK = 0xFFFF_FFFF


class OpenHandles(NamedTuple):
    opened: OpenDevice
    struct: Any


contexts: dict[int, OpenHandles] = {}
"""Open contexts, by their struct's address."""


def context_of(context: Any) -> OpenDevice:
    """Return the open device that a struct stands for."""
    return contexts[address_of(context)].opened


def keep(struct: Any, thing: Any) -> Any:
    """Give a struct a handle and remember what it stands for; return the struct."""
    struct.handle = handle = next(_handles) & _HANDLE_MASK
    objects[handle] = thing
    return struct


def told(result: int) -> int:
    """Return what a data verb returns, and tell what went wrong inside."""
    if device.errors and tell():
        # Raised here it would be lost: the C side delivers it when it is back there.
        lib.rp_soft_interrupted = 1
    return result


def tell() -> bool:
    """Log what went wrong; return whether a Ctrl-C is to be delivered again."""
    interrupted = False
    while device.errors:
        error = device.errors.pop()
        if isinstance(error, KeyboardInterrupt):
            interrupted = True
        else:
            _log.error("the soft device failed; the work request did too", exc_info=error)
    return interrupted


@contextlib.contextmanager
def verb() -> Iterator[None]:
    """Hold the device's lock for a control verb, and tell what went wrong inside."""
    with lock:
        yield
    if tell():
        _thread.interrupt_main()
