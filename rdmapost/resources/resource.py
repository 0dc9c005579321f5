"""What all resources have in common: creating, using and closing them, in the right order.

A resource holds references to its parents. Closing a parent with open children raises an error that
names them. The garbage collector may finalize a tree in any order; a parent finalized early stays
open until its last child closes it.

This is implemented in C (``_c/handles/``), so no interrupt, thread or finalizer can come between
a device's answer and the record of it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

from .._binding import ffi, native
from ..errors import (
    ClosedError,
    ClosesOnExit,
    InUseError,
    RdmaError,
    UnsupportedError,
    VerbsError,
    WaitCancelled,
)

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


class Resource(native.Handle, ClosesOnExit):
    """A device object that needs to be destroyed explicitly.

    ``class PD(Resource, struct="ibv_pd")`` wraps a struct.  An instance without
    a struct is closed.  The constructor runs once; open_handles lists the instance
    only after that, and its public attributes are then read-only: other code,
    closing included, relies on them.

    A constructor calls ``self._make(create, args, destroy, parents)``: the
    struct is what ``create(*args)`` returned, ``destroy`` destroys it, and the
    resource is closed before its parents.  Resources among the arguments are passed as
    their structs.  ``self._verb(function, *args)`` calls a function with the
    struct, which cannot be destroyed during the call.

    Closing calls these methods of a subclass, if it has them:

    - ``_wake``, once no new verb can begin: it ends the waits in progress;
    - ``_release``, once no verb is in progress either: it does what the device needs done first, or
      raises InUseError;
    - then ``destroy``;
    - ``_forget``, once the struct is gone; called again if an interrupt ended
      it.
    """

    __slots__ = ("__weakref__",)

    _type_name = "resource"
    _undone = "closed"
    _instead = ""
    """What to do instead of closing what was created on it, for messages."""
    _left = "the device keeps it until the process ends"
    """The end of the warning for a resource that a finalizer cannot destroy."""
    _rank = 0
    """Its place in the order of closing at exit: lower ranks first."""
    _inner = False
    """Whether it is part of another resource, which messages name instead."""

    def __init_subclass__(cls, struct: str | None = None) -> None:
        super().__init_subclass__()
        # The class's own finalizer, or that of a base class before Resource.
        finalizer: Any = cls.__del__
        if finalizer is not native.Handle.__del__ and not isinstance(finalizer, native.Finalizing):
            finalizer = native.Finalizing(finalizer, types.MethodType)
            cls.__del__ = finalizer  # type: ignore[method-assign]
        if struct is None:
            return
        _structs[cls] = ffi.typeof(f"struct {struct} *")
        # Use setattr: jedi would take an assignment for the definition, and show no signature.
        fixed: dict[str, Any] = {"__init__": _once(cls.__init__)}
        for base in cls.__mro__[: cls.__mro__.index(Resource)]:
            for name in base.__dict__.get("__slots__", ()):
                if not name.startswith("_"):
                    fixed[name] = _fixed(name, base.__dict__[name])
        for name, member in fixed.items():
            setattr(cls, name, member)

    def _refuse_inherited(self) -> None:
        """Refuse a resource inherited across a fork, in a method that accepts closed ones."""
        if is_closed(self) and self._pid not in (0, os.getpid()):
            self._open_struct()

    def __enter__(self) -> Self:
        self._open_struct()
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"cannot copy or pickle {type(self).__name__!r} object: "
            "closing the copy would close the original"
        )

    def __str__(self) -> str:
        return self._type_name

    def __repr__(self) -> str:
        cls = type(self)
        # "<rdmapost.QP RC 0x11>": most handles' texts contain the type's name.
        named = self._type_name if "_type_name" in vars(cls) else cls.__name__
        words = [word for word in str(self).split() if word not in named.split()]
        words.insert(0, f"rdmapost.{cls.__name__}")
        return f"<{' '.join(words)}{' (closed)' if self.closed else ''}>"

    def _end_user(self) -> None:
        """End the tool whose device this resource keeps open; close_all() calls this first."""

    def _refuse_children(self) -> bool:
        """Close children that nothing refers to; raise InUseError if others are open.

        Returns:
            Whether any were closed; if none were, each child is being created or closed.
        """
        children = open_children(self)
        some_closed = close_dropped(children)
        names = [str(child) for child in children if not is_closed(child)]
        if not names:
            return some_closed
        shown = ", ".join(names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        them = "them" if len(names) > 1 else "it"
        raise InUseError(
            f"{self} cannot be closed: {shown}{more} still open; close {them} first{self._instead}"
        )

    def _warn_kept(self, error: object) -> None:
        warnings.warn(
            f"{self} could not be {self._undone}: {error}; {self._left}",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )

    def _failure_text(self, failure: RdmaError) -> str:
        # An InUseError already names the resource.
        text = str(failure)
        refused = isinstance(failure, InUseError)
        return text if refused else f"{self} could not be {self._undone}: {text}"


is_closed: Callable[[Any], bool] = native.Handle.__dict__["closed"].__get__
"""Whether a resource is closed, even if a subclass has its own attribute ``closed``."""

_structs: dict[type, Any] = {}
"""The cffi type of each class's struct."""


def _once(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that runs once, and that C calls."""

    @functools.wraps(init)
    def __init__(self: Resource, /, *args: Any, **options: Any) -> None:
        number = self._begin_making()
        try:
            self._construct(init, (self, *args), options)
        except BaseException:
            # An interrupt may come between the end of that call and this point.
            self._undo_making(number)
            raise

    return __init__


def _fixed(name: str, member: Any) -> property:
    """Return a slot that only the constructor can set."""

    def fix(self: Resource, value: Any) -> None:
        if not self._making:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set")
        member.__set__(self, value)

    return property(member.__get__, fix)


def _failed(function: Callable[..., Any], code: int) -> NoReturn:
    """Raise the error of a libibverbs call that has failed."""
    call = function.__name__.replace("rp_", "ibv_", 1)
    raise (UnsupportedError if code in _UNSUPPORTED else VerbsError)(call, code or errno.EIO)


_open: dict[int, Any] = {}
"""Weak references to the open resources, by address, in creation order; strong ones to those that
a device refused to destroy."""

native.describe_handles(
    ClosedError,
    RdmaError,
    InUseError,
    VerbsError,
    WaitCancelled,
    _failed,
    ffi,
    functools.partial(ffi.cast, ffi.typeof("uintptr_t")),
    _open,
    ffi.typeof,
    _structs,
)


def struct_of(resource: Resource) -> Any:
    """Return the struct of a resource; raise ClosedError if it is closed."""
    return resource._open_struct()


def close_quietly(resource: Resource) -> None:
    """Close a resource that no caller holds, without raising: another error is propagating."""
    with contextlib.suppress(RdmaError):
        native.Handle.close(resource)


def creator(resource: Resource) -> int:
    """Return the ID of the process that opened a resource."""
    return resource._pid


def open_children(resource: Resource) -> list[Any]:
    """Return the resources that must be closed before a given one, oldest first."""
    return [
        handle
        for handle in reversed(open_handles())
        if not handle._inner and any([parent is resource for parent in handle._parents])
    ]


def close_with_all_below(resource: Resource) -> list[tuple[Any, RdmaError]]:
    """Close all descendants of a resource, then the resource, in an order that devices accept.

    Tools that use them from their own threads are stopped first. Windows are closed before queue
    pairs and regions, and children before their parents.

    Returns:
        The resources that could not be closed, each with its error, in the order in which they were
            tried.

    Raises:
        Exception: an exception that a signal handler raised while a resource was being closed;
            everything that could be closed is closed.
    """
    interrupts: list[Exception] = []
    errors = _close_in_order(resource, interrupts)
    try:
        for interrupt in interrupts:
            raise interrupt
    finally:
        interrupts.clear()  # else the exception and this frame would refer to each other
    return errors


def _close_in_order(resource: Resource, interrupts: list[Exception]) -> list[tuple[Any, RdmaError]]:
    for handle in _all_below(resource):
        handle._end_user()
    left: list[Any] = [resource]
    try:
        native.admit_children(left, False)
        left = [*sorted(_all_below(resource), key=_RANK), resource]
        native.admit_children(left, False)
        return _close_listed(left, interrupts)
    finally:
        # One call, which no signal handler interrupts.
        native.admit_children(left, True)


def _close_listed(left: list[Any], interrupts: list[Exception]) -> list[tuple[Any, RdmaError]]:
    resource = left[-1]
    windows = [handle for handle in left if not handle._rank]
    end = time.monotonic() + _WAIT_S
    while True:
        for handle in left:
            if hasattr(handle, "_in_flight"):
                handle._keep_completions()
        windows = [window for window, _ in _close_each(windows, interrupts)]
        # A window with a bind in flight cannot be closed yet; its queue pair may need time.
        if not windows or time.monotonic() > end:
            break
        time.sleep(0.001)
    if native.defer_closes(left):
        return []
    end = time.monotonic() + _WAIT_S
    while left:
        errors = _close_each(left, interrupts)
        if len(errors) < len(left):
            # Some of these were in use by resources that are now closed.
            left = [handle for handle, _ in errors]
            continue
        if time.monotonic() > end:
            return errors
        refused = {id(handle) for handle in left}
        created = [handle for handle in _all_below(resource) if id(handle) not in refused]
        if not created:
            if not any([_may_wait(handle, error, refused) for handle, error in errors]):
                return errors
            time.sleep(0.001)
        left = [*sorted(created, key=_RANK), *left]
    return []


def _may_wait(handle: Any, error: RdmaError, refused: set[int]) -> bool:
    """Whether a close was refused because of what another thread was creating or closing.

    Args:
        handle: what could not be closed.
        error: why.
        refused: the IDs of all the resources that could not be closed.
    """
    children = open_children(handle) if isinstance(error, InUseError) else [handle]
    return not children or any([id(child) not in refused for child in children])


_WAIT_S = 0.5
"""How long to wait for the completions of binds, and for threads that create resources."""
_RANK = operator.attrgetter("_rank")


def _close_each(handles: list[Any], interrupts: list[Exception]) -> list[tuple[Any, RdmaError]]:
    """Close the resources that can be closed; return the others with their errors."""
    errors = []
    for handle in handles:
        try:
            _close_one(handle, interrupts)
        except RdmaError as error:
            # The traceback's frames refer to this list.
            errors.append((handle, error.with_traceback(None)))
    return errors


def _close_one(handle: Any, interrupts: list[Exception]) -> None:
    """Close a resource; append exceptions that did not prevent it, such as a signal handler's.

    Raises:
        RdmaError: it could not be closed, or its class's close() raised twice.
    """
    try:
        handle.close()
    except (RdmaError, MemoryError):
        raise
    except Exception as error:
        interrupts.append(error)
        if is_closed(handle):
            return
    else:
        return
    try:
        handle.close()
    except (RdmaError, MemoryError):
        raise
    except Exception as error:
        if is_closed(handle):
            interrupts.append(error)
            return
        interrupts.pop()
        raise RdmaError(f"its close() raised {type(error).__name__}") from error


def _all_below(resource: Resource) -> list[Any]:
    return [handle for handle in open_handles() if _hangs_on(handle, resource)]


def _hangs_on(handle: Any, resource: Resource) -> bool:
    parents = list(handle._parents)
    while parents:
        if (parent := parents.pop()) is resource:
            return True
        parents += parent._parents
    return False


def open_handles() -> list[Any]:
    """Return the resources that this process has opened and not closed, newest first.

    Resources under construction are not included: only their constructors refer to them.
    """
    return [handle for handle in _all_open() if not handle._unfinished]


def close_dropped(handles: Iterable[Any]) -> bool:
    """Close the handles that nothing refers to any more; return whether any was closed."""
    dropped = [handle for handle in handles if handle._abandoned]
    for handle in dropped:
        close_quietly(handle)
    return any([is_closed(handle) for handle in dropped])


def _all_open() -> list[Any]:
    listed = reversed(_open.copy().values())
    found = [one() if isinstance(one, weakref.ref) else one for one in listed]
    return [handle for handle in found if handle is not None and not is_closed(handle)]


def resource_at(struct: Any) -> Resource | None:
    """Return the open resource that a struct belongs to."""
    for handle in open_handles():
        if handle._handle == struct:
            return handle  # type: ignore[no-any-return]
    return None


def close_all() -> None:
    """Close all open resources: the interpreter is about to tear the modules down.

    Windows are closed before queue pairs and regions, and children before their parents, which are
    older.
    """
    interrupt: BaseException | None = None
    try:
        native.exiting(False)
        for handle in sorted(_all_open(), key=_RANK):
            try:
                handle.close()
            except RdmaError:
                pass
            except BaseException as error:
                interrupt = interrupt or error
                # A subclass's own close() may have raised before it called Resource.close().
                with contextlib.suppress(RdmaError):
                    Resource.close(handle)
    finally:
        native.exiting(True)
    if interrupt is not None:
        raise interrupt
