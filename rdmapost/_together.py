"""Resources that are made together and closed together."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

__all__ = ["Together"]


class Together:
    """A base class that holds resources on a stack and closes them, the latest first.

    Subclasses set ``_stack`` when everything is there.
    """

    _stack: ExitStack

    def close(self) -> None:
        """Close everything; do nothing if that has been done.

        Raises:
            VerbsError: the device refused.
        """
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
