"""A thread beside a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from support import LIMIT


@contextlib.contextmanager
def thread(target: Callable[[], object], limit: float = LIMIT) -> Iterator[list[BaseException]]:
    """Run a function in a thread while the block runs; the list holds what it raised.

    Args:
        target: the function.
        limit: seconds after the block within which it must end.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:
            raised.append(error)

    beside = threading.Thread(target=run, daemon=True)
    beside.start()
    yield raised
    beside.join(limit)
    assert not beside.is_alive(), "the thread has not ended"
