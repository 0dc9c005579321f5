"""Resources that are created and closed as a unit."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from ..errors import ClosedError, ClosesOnExit, RdmaError
from ..resources.pd import PD
from ..resources.qp import QP
from ..resources.resource import Resource, close_with_all_below


class _Closable(Protocol):
    def close(self) -> Any: ...


_Resource = TypeVar("_Resource", bound=_Closable)


class ResourceStack:
    """Resources in creation order, to be closed in reverse.

    Attributes:
        held: the resources.
        ended: whether close() has been called; what is added afterwards may stay open.

    Unlike an ExitStack, it keeps its resources after ``close()``: the next ``close()`` closes what
    an error or an interrupt left open.
    """

    def __init__(self) -> None:
        self.ended = False
        self.held: list[_Closable] = []
        self._enough = 1

    def add(self, resource: _Resource) -> _Resource:
        """Put a resource, or another stack, on top, and return it."""
        self.held.append(resource)
        if len(self.held) > self._enough:
            self._drop_closed()
        return resource

    def _drop_closed(self) -> None:
        """Drop resources that other code has closed, because they may keep memory alive.

        This is slow, so closed resources may stay until they outnumber the open ones.
        """
        for resource in tuple(self.held):
            if getattr(resource, "closed", False):
                # Another thread may have removed it.
                with suppress(ValueError):
                    self.held.remove(resource)
        self._enough = max(1, 2 * len(self.held))

    def close(self) -> None:
        """Close everything, continuing past failures.

        Raises:
            Exception: the first exception that a close() raised.
        """
        failed: Exception | None = None
        # Set this before the list is read: either the loop below closes what is being added, or
        # the thread that adds it sees this.
        self.ended = True
        # Another thread's add() may shorten the list at the same time.
        for resource in reversed(tuple(self.held)):
            try:
                resource.close()
            except Exception as error:
                failed = failed or error
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # otherwise the exception and this frame refer to each other

    def close_with_all_on(self, pd: PD | None) -> None:
        """Close everything on one of the stack's PDs, even what other code created, then the stack.

        If anything stays open, closing its parent raises an error that names it. Without a PD
        (None), only close the stack.
        """
        with CloseAfterwards(self.close):
            if pd is not None:
                close_with_all_below(pd)

    def closed_on_error(self) -> _ClosedOnError:
        """Close everything if the block raises."""
        return _ClosedOnError(self)


class _ClosedOnError:
    """Closes a stack if the block raises; contextlib's managers would need memory to do so."""

    __slots__ = ("_stack",)

    def __init__(self, stack: ResourceStack) -> None:
        self._stack = stack

    def __enter__(self) -> ResourceStack:
        return self._stack

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        if error_type is not None:
            with suppress(RdmaError):
                self._stack.close()


class CloseAfterwards:
    """A context manager that calls a function at the end.

    If the block raises, its exception is not replaced by an RdmaError from the function.
    """

    __slots__ = ("_close",)

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        if error_type is None:
            self._close()
        else:
            with suppress(RdmaError):
                self._close()


def refuse_inherited(what: str, pid: int) -> None:
    """Raise ClosedError in a forked child, which shares its parent's sockets.

    Raises:
        ClosedError: this is another process.
    """
    if pid != os.getpid():
        raise ClosedError(f"{what} was opened by process {pid}; open the device again")


class NotCopied:
    """A base class whose instances cannot be copied or pickled: closing or dropping a copy would
    close the original, or its descriptors."""

    __reduce_ex__ = Resource.__reduce_ex__


class AsyncClosesOnExit:
    """An asynchronous context manager that closes itself."""

    # Defined by subclasses, as in ClosesOnExit.
    _refuse_inherited: Callable[[], None]
    close: Callable[[], Awaitable[None]]

    async def __aenter__(self) -> Self:
        self._refuse_inherited()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
        else:
            # The original error matters more than its consequences.
            with suppress(RdmaError):
                await self.close()


class ResourceHolder(ClosesOnExit, NotCopied):
    """A base class for objects that hold resources on a stack."""

    def __init__(self) -> None:
        self._stack = ResourceStack()

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__name__}"
        if not hasattr(self, "_stack"):
            # The constructor has failed, and a traceback shows this.
            return f"<{name}>"
        queue_pairs = ", ".join([str(each) for each in self._stack.held if isinstance(each, QP)])
        return f"<{name} of {queue_pairs}{' (closed)' if self._stack.ended else ''}>"

    def close(self) -> None:
        """Close everything, the newest first; do nothing if it is already closed.

        If it was interrupted or failed, call it again: it closes what is still open.

        Raises:
            VerbsError: the device refused; the rest is closed.
        """
        self._stack.close()
