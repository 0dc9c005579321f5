"""Stands in for pytest in a process that runs one test (``support.isolated``).

It has what the bodies of such tests use. pytest itself takes longer to import than most of them to
run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any


class _Mark:
    """Decorators that change nothing here: which tests run was decided by pytest."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: lambda test: test


mark = _Mark()


def fixture(*arguments: Any, **_: Any) -> Any:
    """Leave a fixture as it is; no body asks for one."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


def param(*values: Any, **_: Any) -> tuple[Any, ...]:
    return values


class raises:
    """Hold that the block raises one of these, with a text that matches."""

    value: BaseException

    def __init__(self, types: Any, *, match: str | None = None) -> None:
        self.types, self.match = types, match

    def __enter__(self) -> raises:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        assert error is not None, f"DID NOT RAISE {self.types}"
        if not isinstance(error, self.types):
            return False
        self.value = error
        said = str(error)
        assert self.match is None or re.search(self.match, said), (
            f"{said!r} does not match {self.match!r}"
        )
        return True
