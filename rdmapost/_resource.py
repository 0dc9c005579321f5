"""What every resource has in common: closing, and the order in which it may happen.

A resource holds its parents, so a parent lives as long as its children do.
Closing a parent with open children is an error that names them.  When the
garbage collector finalises a whole tree at once it does so in any order; a
parent reached first then waits, and its last child closes it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from types import TracebackType
from typing import Any, Protocol, Self

from .errors import ClosedError, InUseError, RdmaError

__all__ = ["Child", "Resource", "join", "leave", "let_go"]


class Child(Protocol):
    """What depends on resources: another resource, or a prepared list."""

    _parents: tuple[Resource, ...]

    def _close_tree(self) -> None: ...
    def _close_quietly(self) -> None: ...


class Resource:
    """Something of the device's that must be given back.

    Subclasses set ``_kind`` and define ``_destroy``, which gives the handle
    back to the provider or raises.
    """

    __slots__ = (
        "__weakref__", "_abandoned", "_children", "_closing", "_handle", "_parents", "_pid",
    )  # fmt: skip

    _kind = "resource"

    _handle: Any
    _parents: tuple[Resource, ...]

    def __init__(self, handle: Any, *parents: Resource) -> None:
        self._parents = parents
        self._children: dict[int, weakref.ref[Child]] = {}
        self._abandoned = False
        self._closing = threading.Lock()
        self._pid = os.getpid()
        # All that closing takes is there: an exception from here on (an interrupt) gives it back.
        self._handle = handle
        if _garbage:
            _collect()
        for parent in parents:
            join(self, parent)
        if not parents:
            _roots.add(self)

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._handle is None

    def close(self) -> None:
        """Give the resource back; do nothing if that has been done.

        Raises:
            InUseError: others that depend on it are open; it stays open too.
            VerbsError: the device refused; it stays open too.
        """
        if getattr(self, "_handle", None) is None:
            if getattr(self, "_parents", ()):
                # Closing it was interrupted at the very end.
                leave(self)
            return
        # Whoever is closing it goes on with that; nothing is destroyed twice.
        if not self._closing.locked():
            with self._closing:
                self._close()

    def _close(self) -> None:
        if self._handle is None:
            return
        if self._children:
            raise InUseError(f"{self} cannot be closed: {self._name_children()}")
        if self._pid == os.getpid():
            self._destroy()
        # After a fork the child has only copies: the objects are its parent's.
        self._handle = None
        leave(self)

    def __enter__(self) -> Self:
        self._live()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The error that is under way matters more than what follows from it.
            self._close_quietly()

    def __del__(self) -> None:
        if _exiting is not False:
            # What could be closed has been; the modules may be in pieces by now.
            return
        self._abandoned = True
        if getattr(self, "_children", None):
            return
        if getattr(self, "_handle", None) is not None and self._inside_verb():
            # The collector has interrupted a device that is written in Python.
            _garbage.append(self)
        else:
            self._close_quietly()

    def _inside_verb(self) -> bool:
        """Whether this thread is in the middle of a verb of the device's."""
        return bool(self._parents) and self._parents[0]._inside_verb()

    def __str__(self) -> str:
        return self._kind

    def __repr__(self) -> str:
        return f"<rdmapost.{type(self).__name__} {self}{' (closed)' if self.closed else ''}>"

    def _destroy(self) -> None:
        raise NotImplementedError

    def _live(self) -> Any:
        """Return the handle, or raise ClosedError."""
        handle = self._handle
        if handle is None:
            raise ClosedError(f"{self} is closed")
        return handle

    def _open_children(self) -> list[Child]:
        found = (ref() for ref in list(self._children.values()))
        return [child for child in found if child is not None]

    def _open_resources(self) -> list[Resource]:
        return [child for child in self._open_children() if isinstance(child, Resource)]

    def _name_children(self) -> str:
        names = [str(child) for child in self._open_children()]
        shown = ", ".join(names[:4]) or f"{len(self._children)} resources"
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"{shown}{more} still open on it; close {'it' if len(names) == 1 else 'them'} first"

    def _close_quietly(self) -> None:
        # If it fails the device keeps it until the process ends: nobody is there to be told.
        with contextlib.suppress(RdmaError):
            self.close()

    def _close_tree(self) -> None:
        # Twice: a region that posted work requests name closes only after their queue pair.
        for _ in range(2):
            for child in self._open_children():
                child._close_tree()
        self._close_quietly()


def join(child: Child, parent: Resource) -> None:
    """Let a child depend on a parent, which cannot be closed before it."""
    parent._children[id(child)] = weakref.ref(child)


def leave(child: Child) -> None:
    """Let a child, closed now, depend on nothing any more."""
    # It has its parents until none knows it: an interrupt may come at any moment.
    for parent in child._parents:
        parent._children.pop(id(child), None)
    parents, child._parents = child._parents, ()
    for parent in parents:
        if parent._abandoned and not parent._children:
            parent._close_quietly()


def let_go(child: Child) -> None:
    """Let a child that is garbage leave, now or when this thread is in no verb of the device's."""
    if _exiting is not False:
        return
    if any(parent._inside_verb() for parent in child._parents):
        _garbage.append(child)
    else:
        leave(child)


_roots: weakref.WeakSet[Resource] = weakref.WeakSet()

_exiting = False

_garbage: list[Child] = []
"""What the collector met at a moment when it could not be closed."""


def _collect() -> None:
    while _garbage:
        _garbage.pop()._close_quietly()


@atexit.register
def _close_all() -> None:
    """Close what is open before the interpreter takes the modules apart."""
    global _exiting
    _collect()
    for root in list(_roots):
        root._close_tree()
    _exiting = True
