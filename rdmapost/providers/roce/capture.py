"""Captures: the packets that a device sends and receives, in a file.

Each step of the device creates the blocks for its packets, and queues them when the step is
committed. A thread writes them (capture_thread.py), so that a slow file does not delay a step; if
the thread falls too far behind, packets are dropped and counted.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from ..._binding import native
from ...errors import RdmaError
from ..base import Capture
from .capture_thread import Recording

_MAX_QUEUED = 1 << 26
"""The most bytes that may be queued for the thread."""
_AT_CLOSE = 30.0
"""The longest that close() waits for the file, in seconds."""


class RoceCapture(Capture):
    """A capture of a roce device's packets."""

    __slots__ = ("_is_reported", "_recording")

    def __init__(self, path: str | bytes | os.PathLike[Any], device: Any) -> None:
        self._is_reported = False
        self._recording = recording = Recording(os.fspath(path), device.name)
        if recording.must_not_wait():
            # This raises an exception before a file is created.
            native.verb(capture, device, recording)
        recording.user = weakref.ref(self, recording.queue.put)
        try:
            recording.start()
            native.verb(capture, device, recording)
        except BaseException:
            # The traceback may keep this object alive for a long time.
            recording.stop()
            raise

    @property
    def path(self) -> str | bytes:
        return self._recording.path

    @property
    def packets(self) -> int:
        return self._recording.packets

    @property
    def dropped(self) -> int:
        return self._recording.tally.dropped

    @property
    def error(self) -> OSError | None:
        recording = self._recording
        if not recording.is_inherited():
            recording.has_ended()
        error = recording.error
        return error if isinstance(error, OSError) else None

    def close(self) -> None:
        recording = self._recording
        if recording.is_inherited():
            return
        recording.stop()
        if not recording.has_ended():
            if recording.must_not_wait():
                return
            self._wait()
        # A signal handler may have forked in the meantime.
        if recording.error is None or self._is_reported or recording.is_inherited():
            return
        self._is_reported = True
        raise RdmaError(recording.failure()) from recording.error

    def _wait(self) -> None:
        recording = self._recording
        recording.is_awaited = True
        try:
            has_ended = recording.wait_until_ended(_AT_CLOSE)
        finally:
            recording.is_awaited = False
        if not has_ended and not recording.is_inherited():
            raise RdmaError(
                f"the capture to {os.fsdecode(recording.path)} could not be ended: its last "
                f"packets were still unwritten after {_AT_CLOSE:g} s; check the program that "
                "reads the file"
            )


# ---- in the device's steps -----------------------------------------------------------


def in_progress(device: Any) -> list[Recording]:
    """Return a device's captures in progress, and remove those that have ended."""
    going_on = [each for each in device.recordings if not each.has_ended()]
    if len(going_on) < len(device.recordings):
        device.recordings = tuple(going_on)
    return [each for each in going_on if not each.is_stopping]


def put(recording: Recording, count: int, blocks: bytes) -> None:
    """On commit, queue the blocks of packets."""
    tally = recording.tally
    if tally.queued - recording.taken + len(blocks) > _MAX_QUEUED:
        tally.dropped += count
        return
    tally.queued += len(blocks)
    native.on_commit(recording.queue.put, (count, blocks))


def end_all(recordings: tuple[Recording, ...]) -> None:
    """On commit, end the captures of a device that is being closed."""
    for each in recordings:
        native.on_commit(each.queue.put, None)


def capture(device: Any, recording: Recording) -> None:
    """Give a device's packets to a capture; error messages contain this function's name."""
    recording.check_process()
    device.recordings = (*in_progress(device), recording)
