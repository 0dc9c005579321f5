"""The data of a post, generated in pieces, so that large data is in memory only once."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

import click

_PIECE = 1 << 20
_PATIENCE_S = 1.0
"""How long a command may take before it shows a progress bar."""


class Payload:
    """Bytes, or a pattern that is repeated up to a length.

    Args:
        data: the bytes, or the pattern.
        length: the length, if data is a pattern.
    """

    def __init__(self, data: bytes, length: int | None = None) -> None:
        self._data = data
        self._repeated = length is not None
        self._length = len(data) if length is None else length
        if self._repeated:
            # A whole number of patterns, so that every piece begins with the pattern's first byte.
            self._data = data * max(1, min(_PIECE, self._length + len(data)) // len(data))

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces()) if self._repeated else self._data

    def head(self, length: int) -> bytes:
        """Return the first bytes."""
        return self._data[: min(length, self._length)]

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces."""
        step = len(self._data) if self._repeated else _PIECE
        for start in range(0, self._length, step):
            stop = min(start + step, self._length)
            at = 0 if self._repeated else start
            yield self._data[at : at + stop - start]

    def digest(self) -> str:
        """Return the SHA-256 of the bytes."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def write_to(self, memory: memoryview, progress: Progress | None = None) -> None:
        """Write the bytes to the start of memory."""
        at = 0
        for piece in self.pieces():
            memory[at : at + len(piece)] = piece
            at += len(piece)
            if progress is not None:
                progress.add(len(piece))

    def is_in(self, memory: memoryview, progress: Progress | None = None) -> bool:
        """Whether memory holds exactly these bytes."""
        if len(memory) != self._length:
            return False
        at = 0
        for piece in self.pieces():
            # Comparing bytes is many times faster than comparing a memoryview.
            if bytes(memory[at : at + len(piece)]) != piece:
                return False
            at += len(piece)
            if progress is not None:
                progress.add(len(piece))
        return True


def touch(memory: memoryview, progress: Progress) -> None:
    """Write zeros to memory, in pieces.

    Otherwise the kernel would provide all of the memory's pages while soft0 copies the data in one
    call, during which Ctrl-C has no effect.
    """
    Payload(b"\0", len(memory)).write_to(memory, progress)


class Progress:
    """A context manager that shows a progress bar after a second if stderr is a terminal.

    Args:
        total: how many bytes to touch, write and verify in total; or how many checks to run.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = time.monotonic() + _PATIENCE_S
        self._bar: Any = None
        self._possible = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def add(self, count: int) -> None:
        """Count bytes that have been touched, written or verified, or checks that have run."""
        self._done += count
        if self._bar is None and self._possible and time.monotonic() > self._start:
            self._bar = click.progressbar(length=self._total, file=sys.stderr).__enter__()
        if self._bar is not None:
            self._bar.update(self._done - self._bar.pos)
