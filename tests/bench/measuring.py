"""Shared by the benchmarks' workers: cases are statements, each timed several times."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LENGTHS = (1, 2, 8, 32, 256)
SGES = (1, 4)
COLUMNS = (1, 32, 256, 4096)
WORK = 4096
"""Work requests in one timed run: enough to measure, few enough to stay in the caches."""


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        name: the case's name, the same in every worker.
        statement: the timed code, inlined into timeit's loop.
        each: how many work requests, or completions, a statement handles; 0 where
            nothing is posted or polled.
        names: the names that it uses.
        before, after: called around each run, untimed; ``before`` takes the
            number of times that the statement will run.
    """

    name: str
    statement: str
    each: int
    names: dict[str, Any]
    before: Callable[[int], object] | None = None
    after: Callable[[], object] | None = None


def pin() -> None:
    """Pin this process to the last CPU, which handles the fewest interrupts."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class NullDevice:
    """The null device's own calls.

    Args:
        path: the library that the binding loads.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.null_posted.restype = ctypes.c_uint64

    def remember(self, on: bool) -> None:
        """Set whether later posts complete, or are only counted."""
        self._library.null_remember(int(on))

    @property
    def posted(self) -> int:
        """The number of work requests posted."""
        posted: int = self._library.null_posted()
        return posted


def best_ns(case: Case, runs: int, null: NullDevice, work: int = WORK) -> float:
    """Return the lowest CPU time in ns per work request, of several runs."""
    number = max(1, work // (case.each or 1))
    timer = timeit.Timer(case.statement, timer=time.process_time, globals=case.names)
    found = []
    for _ in range(runs):
        if case.before is not None:
            case.before(number)
        posted = null.posted
        found.append(timer.timeit(number) / number / (case.each or 1) * 1e9)
        arrived = null.posted - posted
        if arrived != (0 if "poll" in case.statement else number * case.each):
            raise AssertionError(f"{case.name}: {arrived} work requests arrived")
        if case.after is not None:
            case.after()
    return min(found)


def work(cases: Iterator[Case], null: NullDevice) -> None:
    """Run a worker: time the cases, and print their figures as JSON."""
    pin()
    runs = int(sys.argv[1])
    json.dump({case.name: best_ns(case, runs, null) for case in cases}, sys.stdout)
