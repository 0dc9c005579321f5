"""Intercept a device's posting calls: record what is posted, and refuse it on demand.

It compiles ``posting_tap.c``, and reads the chains through cffi's definitions of the structs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rdmapost as rp
from rdmapost._binding import address_of, ffi

SEND, RECV, SRQ_RECV, SRQ_OPS = range(4)
STRUCTS = ("struct ibv_send_wr", "struct ibv_recv_wr", "struct ibv_recv_wr", "struct ibv_ops_wr")
NULL, LEFT_ALONE, NAMED, NOWHERE = range(4)


class _Answer(ctypes.Structure):
    _fields_ = (
        ("refuse", ctypes.c_int),
        ("passed", ctypes.c_uint32),
        ("rc", ctypes.c_int),
        ("bad", ctypes.c_int),
    )


_See = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Answer))
_SeePoll = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


class Record:
    """A work request as the device received it: a copy, and its address.

    Attributes:
        wr: the struct, in cffi; its pointers are the ones that the device saw.
        address: its address.
        data: its bytes.
        sges: (addr, length, lkey) of each of its SGEs.
        hdr: the header of a TSO, or None.
    """

    def __init__(self, verb: int, at: Any) -> None:
        ctype = STRUCTS[verb]
        self.address = address_of(at)
        self.data = bytes(ffi.buffer(at, ffi.sizeof(ctype)))
        self.wr = ffi.new(f"{ctype} *")
        ffi.memmove(self.wr, self.data, len(self.data))
        holder = at.tm.add if verb == SRQ_OPS else at
        # Other operations do not use this member of the union.
        count = holder.num_sge if verb != SRQ_OPS or at.opcode == rp.OpsOpcode.TAG_ADD else 0
        sges = [holder.sg_list[i] for i in range(count)]
        self.sges = [(sge.addr, sge.length, sge.lkey) for sge in sges]
        tso = verb == SEND and at.opcode == rp.Opcode.TSO
        self.hdr = bytes(ffi.buffer(at.tso.hdr, at.tso.hdr_sz)) if tso and at.tso.hdr_sz else None


class Tap:
    """Intercepts an open device's posts.

    Attributes:
        context: the device.
        chains: (verb, records) of each post, in order.
        answer: the result of the next posts: None to pass them to the device, or how many work
            requests to pass to it, what to return, and what to store in ``*bad``.
    """

    def __init__(self, library: Any, context: rp.Context) -> None:
        self._library, self.context = library, context
        self.chains: list[tuple[int, list[Record]]] = []
        self.answer: tuple[int, int, int] | None = None
        self._see = _See(self._look)
        self._kept: list[Any] = []
        library.tap_open(ctypes.c_void_p(address_of(context._handle)), self._see)

    def _look(self, verb: int, first: int, answer: Any) -> None:
        records = []
        at = ffi.cast(f"{STRUCTS[verb]} *", first)
        while at != ffi.NULL:
            records.append(Record(verb, at))
            at = at.next
        self.chains.append((verb, records))
        if self.answer is not None:
            answer[0].refuse = 1
            answer[0].passed, answer[0].rc, answer[0].bad = self.answer

    def refuse(self, passed: int = 0, rc: int = 22, bad: int = NAMED) -> None:
        """Give the following posts this result."""
        self.answer = passed, rc, bad

    def on_poll(self, see: Callable[[int, Any], int] | None) -> None:
        """Call a function in the middle of each poll, after the device has answered.

        Args:
            see: called with the device's answer, which is how many completions there are, and with
                their structs, in cffi. It may change these, and returns the poll's answer. None
                for no function.
        """

        def call(count: int, wc: int) -> int:
            assert see is not None
            return see(count, ffi.cast("struct ibv_wc *", wc))

        # The one before may be running.
        self._kept.append(_SeePoll(call) if see else _SeePoll())
        self._library.tap_polled(self._kept[-1])

    def last(self) -> list[Record]:
        """Return the records of the last post."""
        return self.chains[-1][1]

    def close(self) -> None:
        self._library.tap_close(ctypes.c_void_p(address_of(self.context._handle)))


@functools.cache
def _compiled() -> Any:
    cc = os.environ.get("CC", "cc").split()
    source = pathlib.Path(__file__).with_name("posting_tap.c")
    if shutil.which(cc[0]) is None:
        return "there is no C compiler"
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/posting_tap.so"
        done = subprocess.run(
            [
                *cc,
                "-O2",
                "-std=gnu11",
                "-Wall",
                "-Wextra",
                "-shared",
                "-fPIC",
                "-o",
                library,
                str(source),
            ],
            capture_output=True,
            text=True,
            check=False,
            # Ignore the compiler's own leaks under .ci/sanitize.
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        )
        if done.returncode:
            return (
                f"posting_tap.c does not compile here: are libibverbs' headers there? {done.stderr}"
            )
        # It stays mapped after its file is deleted.
        return ctypes.CDLL(library)


def open_tap(context: rp.Context) -> Tap:
    """Intercept a device's posts; skip the test, with the reason, if that cannot be compiled."""
    library = _compiled()
    if isinstance(library, str):
        pytest.skip(library)
    return Tap(library, context)


class PolledCQ:
    """A completion queue without a device, which returns given results to polls.

    Its completions have the ``wr_id`` 0, 1, 2, ...; the odd ones have failed.

    Args:
        extended: whether it is a ``struct ibv_cq_ex``.
        answers: how many completions each successive poll returns; -1 if it fails, and -1 - n if
            an extended queue fails behind n completions. Later polls return none.
        reports_more: whether it reports tags and timestamps, too.

    Attributes:
        address: the address of its struct.
    """

    def __init__(self, extended: bool, answers: list[int], reports_more: bool = True) -> None:
        self._library = _compiled()
        if isinstance(self._library, str):
            pytest.skip(self._library)
        self._library.tap_cq.restype = ctypes.c_void_p
        self._library.tap_asked.restype = ctypes.POINTER(ctypes.c_int)
        given = (ctypes.c_int * len(answers))(*answers)
        self.address: int = self._library.tap_cq(extended, reports_more, given, len(answers))

    @property
    def polls(self) -> int:
        """The number of polls."""
        return int(self._library.tap_polls())

    @property
    def asked(self) -> list[int]:
        """How many completions each poll requested; for an extended queue, its comp_mask."""
        return list(self._library.tap_asked()[: self.polls])

    @property
    def ended(self) -> int:
        """The number of calls to ibv_end_poll()."""
        return int(self._library.tap_ended())


@pytest.fixture
def tap() -> Iterator[Tap]:
    """A tap on a separate soft0: ``tap.context``."""
    with rp.open_device("soft0") as context:
        tapped = open_tap(context)
        yield tapped
        tapped.close()
