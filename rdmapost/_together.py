"""Resources that are made together and closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from .errors import RdmaError

__all__ = ["ClosedAtTheEnd", "ResourceStack", "Together"]


class _Closable(Protocol):
    def close(self) -> Any: ...


_Resource = TypeVar("_Resource", bound=_Closable)


class ResourceStack:
    """Resources in the order of making, to be closed in the opposite order.

    Unlike an ExitStack, it keeps what it has closed: what an error or an
    interrupt left open is closed by the next ``close()``.
    """

    def __init__(self) -> None:
        self._closers: list[Callable[[], object]] = []

    def add(self, resource: _Resource) -> _Resource:
        """Put a resource, or another stack, on top, and return it."""
        self._closers.append(resource.close)
        return resource

    def before_closing(self, function: Callable[[], object]) -> None:
        """Call a function before what is on the stack now is closed.

        It is called by each close(), so it must bear repetition.
        """
        self._closers.append(function)

    def close(self) -> None:
        """Close everything; one that cannot be closed does not keep the others open.

        Raises:
            Exception: the first that one of them raised.
        """
        failed: Exception | None = None
        for close in reversed(self._closers):
            try:
                close()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    @contextmanager
    def closed_on_error(self) -> Iterator[Self]:
        """Close everything if the block raises."""
        try:
            yield self
        except BaseException:
            with suppress(RdmaError):
                self.close()
            raise


class ClosedAtTheEnd:
    """A context manager that closes itself."""

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RdmaError as failure:
            if error is None:
                raise
            # The error under way matters more than what follows from it.
            with suppress(Exception):
                error.add_note(str(failure))


class Together(ClosedAtTheEnd):
    """A base class for what holds resources on a stack."""

    def __init__(self) -> None:
        self._stack = ResourceStack()

    def close(self) -> None:
        """Close everything, the latest first; do nothing if that has been done.

        If it was interrupted or failed, call it again: it closes what is still open.

        Raises:
            VerbsError: the device refused; the rest is closed.
        """
        self._stack.close()
