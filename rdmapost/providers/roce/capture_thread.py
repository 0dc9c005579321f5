"""The thread of a capture, which opens the file, writes the queued blocks, and ends.

While the thread lives, it alone changes the recording's state, and it needs no lock that another
thread may hold, neither the device's nor the user's. So waiting for the thread can never deadlock.
Functions and generators are not created at run time: CPython 3.12 and 3.13 crash if there is no
memory for one.
"""

from __future__ import annotations

import _thread
import atexit
import enum
import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any

from ..._arguments import counted
from ..._binding import native
from ...errors import ClosedError
from . import pcapng

_log = logging.getLogger("rdmapost.roce.capture")

_GATHER = 0.01
"""How long the thread lets packets accumulate, so that it writes them together, in seconds."""
_LOOK = 0.05
"""Seconds between checks, while waiting for the thread, that it still exists."""
_FOR_ANOTHER = 1.0
"""The longest that a capture waits, in seconds, for another capture to the same file that is about
to end."""
_AT_EXIT = 2.0
"""The longest that the process waits for the files when it exits, in seconds."""


class RecordingState(enum.IntEnum):
    """How far a capture has got."""

    OPENING = 0
    """The file is not open yet, or its first blocks are not written yet."""
    OPEN = 1
    FAILED = 2
    ENDED = 3


class Tally(native.Record):
    """What the device has given to a capture; a step that is rolled back does not change it.

    Attributes:
        queued: how many bytes were queued in total.
        dropped: how many packets the capture lacks.
    """

    def __init__(self) -> None:
        self.queued = self.dropped = 0


class Recording:
    """The state of a capture, which the device, the user and the thread share.

    Attributes:
        path: the file's path.
        interface: the device's name.
        tally: the device's counts.
        queue: tuples (number of packets, their blocks); any other object ends the capture.
        packets: how many packets are in the file.
        taken: bytes that the thread has taken from the queue, in all.
        state: how far the capture has got; the thread sets it.
        error: why the capture ended early, or the exception raised if it never began.
        is_stopping: whether the device must not queue anything more.
        is_awaited: whether a thread is waiting for the end and will report the error.
        user: a weak reference to the user's object. When the object is dropped, the reference puts
            itself into the queue; no signal handler can interrupt this.
        file: the file, while it is open.
    """

    def __init__(self, path: str | bytes, interface: str) -> None:
        self.path = path
        self.interface = interface
        self.tally = Tally()
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.packets = self.taken = 0
        self.state = RecordingState.OPENING
        self.error: BaseException | None = None
        self.is_stopping = self.is_awaited = False
        self.user: weakref.ref[Any] | None = None
        self.file: IO[bytes] | None = None
        self._whole = 0
        """The size of the file up to its last whole block."""
        self._pid = os.getpid()
        self._thread_id = 0
        self._thread: weakref.ref[Any] | None = None
        """A weak reference to the thread's function, which lives as long as the thread."""
        self._began, self._ended = _held_lock(), _held_lock()
        """Locks that the thread releases when it has begun and when it has ended. That wakes the
        waiting threads, which then check its state."""

    # ---- for waiting threads -----------------------------------------------------

    def start(self) -> None:
        """Start the thread, and wait until the file is open and its first blocks are written.

        Raises:
            OSError: there are too many threads.
            ClosedError: this process is now the child of a fork.
            BaseException: whatever the thread raised.
        """
        # Do this before the thread starts. The reference removes itself when the recording is gone.
        _known.append(weakref.ref(self, _known.remove))
        run = self._run
        self._thread = weakref.ref(run)
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:
            raise OSError(errno.EAGAIN, "cannot start a thread for the capture") from None
        del run
        self._wait(self._has_begun, self._began, float("inf"))
        self.check_process()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Tell the thread to end; after this, nothing more is queued."""
        if not self.has_ended():
            # Set this first: a signal handler may raise before the next statement.
            self.is_stopping = True
            self.queue.put(None)

    def wait_until_ended(self, timeout: float) -> bool:
        """Wait for the thread; return whether it ended in time.

        In the child of a fork and in the thread itself, this does not wait.
        """
        return self._wait(self.has_ended, self._ended, timeout)

    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        # The order matters: the thread records how it ended before it is gone.
        is_gone = self._thread is not None and self._thread() is None
        if is_gone and self.state < RecordingState.FAILED:
            # The thread did not even have enough memory to set its state.
            self._become(RecordingState.FAILED, _out_of_memory())
        return self.state >= RecordingState.FAILED

    def is_inherited(self) -> bool:
        """Whether this process is a forked child and the recording is its parent's."""
        return os.getpid() != self._pid

    def must_not_wait(self) -> bool:
        """Whether the calling thread is in a device's step, or is the capture's own thread."""
        return native.in_step() or self._is_own_thread()

    def _is_own_thread(self) -> bool:
        return _thread.get_ident() == self._thread_id

    def check_process(self) -> None:
        """Raise ClosedError in the child of a fork."""
        if self.is_inherited():
            raise ClosedError(
                f"the capture to {os.fsdecode(self.path)} was started by process {self._pid}; "
                "open the device again"
            )

    def failure(self) -> str:
        """Say why the capture has ended early."""
        error = self.error
        why = (isinstance(error, OSError) and error.strerror) or error
        count = counted(self.packets, "packet")
        return f"the capture to {os.fsdecode(self.path)} ended after {count}: {why}"

    def _has_begun(self) -> bool:
        return self.has_ended() or self.state is not RecordingState.OPENING

    def _wait(self, is_over: Callable[[], bool], bell: Any, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not is_over():
            left = end - time.monotonic()
            # A signal handler may have forked, and nobody releases the child's copy of a lock.
            if left <= 0 or self.is_inherited() or self._is_own_thread():
                return False
            if bell.acquire(timeout=min(left, _LOOK)):
                bell.release()
        return True

    def flush(self, timeout: float) -> None:
        """At exit, let the thread write the queued blocks."""
        if self.state is not RecordingState.OPENING and not self.is_inherited():
            self._ended.acquire(timeout=timeout)

    # ---- the thread -------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._thread_id = _thread.get_ident()
            # A signal handler may have forked in start(): then this thread is the child's.
            self.check_process()
            self._record()
        except BaseException as raised:
            error = raised
        self._end(error)

    def _record(self) -> None:
        with open(self.path, "wb", buffering=0, opener=_open_whole) as self.file:
            try:
                self._claim()
                self._write(pcapng.beginning(self.interface), 0)
                self._become(RecordingState.OPEN, None)
                self._began.release()
                while self._write_some():
                    time.sleep(_GATHER)
            finally:
                _unlock(self.file.fileno())

    def _claim(self) -> None:
        """Empty the file, unless another capture, in this or another process, is writing to it."""
        assert self.file is not None
        descriptor = self.file.fileno()
        status = os.fstat(descriptor)
        mode = status.st_mode
        if stat.S_ISCHR(mode):
            # A character device, such as /dev/null: several captures may write to it.
            return
        # A capture that was dropped, or closed in the middle of a step, ends soon.
        deadline = time.monotonic() + _FOR_ANOTHER
        while not _lock(descriptor):
            if time.monotonic() >= deadline:
                raise OSError(
                    errno.EBUSY, "another capture is writing to this file", os.fsdecode(self.path)
                )
            time.sleep(_GATHER)
        if self.is_stopping or (self.user is not None and self.user() is None):
            # Its user has given up, and another capture may have written to the file since.
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if stat.S_ISREG(mode):
            if not os.path.samestat(status, os.stat(self.path)):
                raise OSError(
                    errno.EBUSY, "the file was replaced in the meantime", os.fsdecode(self.path)
                )
            os.ftruncate(descriptor, 0)

    def _become(self, state: RecordingState, error: BaseException | None) -> None:
        self.error = error
        self.state = state

    def _end(self, error: BaseException | None) -> None:
        """Record how the capture ended, before anything that could wait for another thread."""
        has_begun = self.state is not RecordingState.OPENING
        if error is None:
            self._become(RecordingState.ENDED, None)
        else:
            # The traceback's frames would keep objects alive.
            error = error.with_traceback(None)
            self._become(RecordingState.FAILED, _as_os_error(error) if has_begun else error)
        if not has_begun:
            self._began.release()
        elif error is not None and not self.is_awaited:
            # A waiting thread reports the error itself; it may hold one of logging's locks.
            _log.error("%s", self.failure())
        self._ended.release()
        self._take()

    def _write_some(self) -> bool:
        """Wait for blocks, and write them; return False at the end."""
        taken = [self.queue.get(), *self._take()]
        count, blocks, goes_on = 0, [], True
        for each in taken:
            if isinstance(each, tuple):
                count += each[0]
                blocks.append(each[1])
                self.taken += len(each[1])
            else:
                goes_on = False
        if not goes_on:
            self.is_stopping = True
            seen = self.packets + count + self.tally.dropped
            blocks.append(pcapng.end(time.time_ns(), seen, self.tally.dropped))
        self._write(b"".join(blocks), count)
        return goes_on

    def _take(self) -> list[Any]:
        return [self.queue.get() for _ in range(self.queue.qsize())]

    def _write(self, data: bytes, count: int) -> None:
        """Write the blocks of packets.

        If that fails, truncate the file, if possible, so that none of these blocks are left in it.
        """
        assert self.file is not None
        left = memoryview(data)
        try:
            while left:
                left = left[self.file.write(left) :]
        except BaseException:
            self._cut()
            raise
        self._whole += len(data)
        self.packets += count

    def _cut(self) -> None:
        assert self.file is not None
        try:
            os.ftruncate(self.file.fileno(), self._whole)
        except OSError:
            # It is a pipe or a device.
            return


def _open_whole(path: str | bytes, flags: int) -> int:
    """Open a file as open() does, but without truncating it or waiting for a FIFO's reader."""
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            raise OSError(errno.ENXIO, "the FIFO has no reader", os.fsdecode(path)) from None
        raise
    try:
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; return False if someone else has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        # SMB reports EACCES for a lock that is held.
        return False
    except OSError:
        # A file system without locks.
        return True
    return True


def _unlock(descriptor: int) -> None:
    """Unlock a file that a forked child may still have open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
        return


def _held_lock() -> Any:
    try:
        lock = _thread.allocate_lock()
    except RuntimeError:
        # "can't allocate lock"
        raise MemoryError from None
    lock.acquire()
    return lock


def _out_of_memory() -> OSError:
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _as_os_error(error: BaseException) -> OSError:
    if isinstance(error, OSError):
        return error
    if isinstance(error, MemoryError):
        return _out_of_memory()
    made = OSError(errno.EIO, f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


# ---- the end of the process, and forks ---------------------------------------------------


_known: list[weakref.ref[Recording]] = []
"""All recordings; each thread keeps its own alive."""


def _finish() -> None:
    """Let the threads write the queued blocks, before the interpreter stops them."""
    left = [recording for each in _known.copy() if (recording := each()) is not None]
    for recording in left:
        recording.queue.put(None)
    end = time.monotonic() + _AT_EXIT
    for recording in left:
        recording.flush(max(0.0, end - time.monotonic()))


def _leave_to_parent() -> None:
    """In the child of a fork, close the files: only the parent has the threads that write them."""
    for each in _known.copy():
        recording = each()
        if recording is not None and recording.file is not None:
            try:
                recording.file.close()
            except OSError:
                continue


atexit.register(_finish)
os.register_at_fork(after_in_child=_leave_to_parent)
