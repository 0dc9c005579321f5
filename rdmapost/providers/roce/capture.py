"""Captures: what a device sends and receives, in a file.

A step of the device makes the blocks of its packets, and queues them when it is committed. A thread
writes them, so that a slow file delays no step; what it does not keep up with is dropped and
counted.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from queue import SimpleQueue
from typing import IO, Any

from ..._binding import native
from ...errors import RdmaError
from ..base import Capture
from . import pcapng

_log = logging.getLogger("rdmapost.roce")

_MOST_WAITING = 1 << 26
"""Bytes that wait for the thread at most."""
_GATHER = 0.01
"""Seconds in which the thread lets packets gather, to write them at once."""
_AT_CLOSE, _AT_EXIT = 30.0, 2.0
"""Seconds that closing and the exit of the process wait for the file at most."""


class Recording(native.Record):
    """A device's side of a capture, and the thread's.

    Attributes:
        path: the file's path.
        packets, dropped, error: as in Capture.
        is_inherited: whether it is the parent's, in the child of a fork.
    """

    def __init__(self, path: str | bytes, device: Any) -> None:
        self.path = path
        self.packets = self.dropped = 0
        self.error: OSError | None = None
        self.is_inherited = False
        self.device = device
        self.queue: SimpleQueue[Any] = SimpleQueue()
        """Counts of packets and their blocks, as tuples; anything else is the end."""
        self.user: weakref.ref[RoceCapture] | None = None
        """Puts itself into the queue when the user has dropped the capture: no signal handler
        runs in the middle."""
        self.queued = self.taken = 0
        """Bytes, in all."""
        self.file: IO[bytes] | None = None
        self._opening, self._running = threading.Lock(), threading.Lock()
        """Held until the file is open, and until the thread has ended."""

    def start(self) -> None:
        """Start the thread, which opens the file: it also closes it.

        Raises:
            OSError: the file cannot be created, or the thread cannot be started.
        """
        self._opening.acquire()
        self._running.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            raise OSError(errno.EAGAIN, "cannot start a thread for the capture") from None
        self._opening.acquire()
        if self.error is not None:
            raise self.error
        native.verb(_attach, self)

    def has_ended(self, timeout: float) -> bool:
        """Wait for the thread; return whether it has ended in time."""
        ended = self._running.acquire(timeout=timeout)
        if ended:
            self._running.release()
        return ended

    def failure(self) -> str:
        """Say why the capture has ended early."""
        assert self.error is not None
        return (
            f"the capture to {os.fsdecode(self.path)} ended after {self.packets} packets: "
            f"{self.error.strerror}"
        )

    # ---- the thread -------------------------------------------------------------

    def _run(self) -> None:
        _running.append(self)
        try:
            try:
                self.file = open(self.path, "wb", buffering=0)  # noqa: SIM115
            except OSError as error:
                self.error = error
                return
            except MemoryError:
                # Before the constructor goes on.
                self.error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                return
            finally:
                self._opening.release()
            with self.file:
                self._write(pcapng.beginning("rdmapost", self.device.name), 0)
                while self._write_some():
                    time.sleep(_GATHER)
        except MemoryError:
            self._fail(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        finally:
            _running.remove(self)
            self._running.release()

    def _write_some(self) -> bool:
        """Wait for blocks, and write them; return False at the end."""
        first = self.queue.get()
        taken = [first, *self._rest()]
        goes_on = all(isinstance(each, tuple) for each in taken)
        ending = b""
        if not goes_on:
            native.verb(_detach, self)
            taken += self._rest()
        found = [each for each in taken if isinstance(each, tuple)]
        count = sum([each for each, _ in found])
        blocks = [each for _, each in found]
        self.taken += sum(map(len, blocks))
        if not goes_on:
            seen = self.packets + count + self.dropped
            ending = pcapng.end(time.time_ns(), seen, self.dropped)
        if self.error is None:
            self._write(b"".join([*blocks, ending]), count)
        return goes_on

    def _rest(self) -> list[Any]:
        return [self.queue.get() for _ in range(self.queue.qsize())]

    def _write(self, data: bytes, count: int) -> None:
        """Write the blocks of packets, or end the capture."""
        assert self.file is not None
        left = memoryview(data)
        try:
            while left:
                left = left[self.file.write(left) :]
            self.packets += count
        except OSError as error:
            # The file ends with a whole block, if it is one that can be cut.
            with contextlib.suppress(OSError):
                self.file.truncate(self.file.tell() - (len(data) - len(left)))
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = error
        _log.error("%s", self.failure())
        native.verb(_detach, self)


class RoceCapture(Capture):
    """A capture of a roce device's packets."""

    __slots__ = ("_is_reported", "_recording")

    def __init__(self, path: str | bytes | os.PathLike[Any], device: Any) -> None:
        self._is_reported = False
        self._recording = recording = Recording(os.fspath(path), device)
        recording.user = weakref.ref(self, recording.queue.put)
        try:
            recording.start()
        except BaseException:
            # The traceback may keep it alive for long.
            self._end()
            raise

    @property
    def path(self) -> str | bytes:
        return self._recording.path

    @property
    def packets(self) -> int:
        return self._recording.packets

    @property
    def dropped(self) -> int:
        return self._recording.dropped

    @property
    def error(self) -> OSError | None:
        return self._recording.error

    def close(self) -> None:
        recording = self._recording
        if recording.is_inherited:
            return
        self._end()
        if not recording.has_ended(_AT_CLOSE):
            raise RdmaError(
                f"the capture to {os.fsdecode(recording.path)} cannot be ended: the file has not "
                f"been written for {_AT_CLOSE:g} s; see what reads it"
            )
        if recording.error is not None and not self._is_reported:
            self._is_reported = True
            raise RdmaError(recording.failure()) from recording.error

    def _end(self) -> None:
        self._recording.queue.put(None)


# ---- in the device's steps -----------------------------------------------------------


def put(recording: Recording, count: int, blocks: bytes) -> None:
    """On commit, queue the blocks of packets."""
    if recording.queued - recording.taken + len(blocks) > _MOST_WAITING:
        recording.dropped += count
        return
    recording.queued += len(blocks)
    native.on_commit(recording.queue.put, (count, blocks))


def end_all(recordings: tuple[Recording, ...]) -> None:
    """End captures, when their device is closed."""
    for each in recordings:
        native.on_commit(each.queue.put, None)


def _attach(recording: Recording) -> None:
    device = recording.device
    device.recordings = (*device.recordings, recording)


def _detach(recording: Recording) -> None:
    device = recording.device
    device.recordings = tuple([each for each in device.recordings if each is not recording])


# ---- the end of the process, and forks ---------------------------------------------------


_running: list[Recording] = []


def _finish() -> None:
    """Let the threads write what they have, before the interpreter stops them."""
    left = list(_running)
    for each in left:
        each.queue.put(None)
    end = time.monotonic() + _AT_EXIT
    for each in left:
        each.has_ended(max(0.0, end - time.monotonic()))


def _leave_to_parent() -> None:
    """In the child of a fork, close the files: their threads are the parent's."""
    while _running:
        each = _running.pop()
        each.is_inherited = True
        if each.file is not None:
            each.file.close()


atexit.register(_finish)
os.register_at_fork(after_in_child=_leave_to_parent)
