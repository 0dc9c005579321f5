"""Interrupts at each moment where CPython runs the handlers of signals.

CPython runs them in the main thread when it enters a Python function, when a call of C has
returned, and when a loop jumps back.  A profile function sees the first two, and what it raises is
raised there, so a signal that it sends has come at that very moment: ``interrupt_at_each_moment``
runs the same once for each of them.  Loops that call nothing, and what the interpreter does between
the two (``with`` in Python 3.14), are for the timer of ``interrupt_at_random``.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
NUMBER = signal.SIGUSR1
ENOUGH = 4
"""Moments that fail, after which the rest is not tried."""


class Interrupted(Exception):
    """A handler's exception: not a KeyboardInterrupt, an OSError or an error of the library."""


class TooLong(BaseException):
    """A moment took longer than its time limit."""


class Moment:
    """Where the signal came.

    Attributes:
        number: which moment of the run, from 1; 0 before it came.
        where: the functions around it, the innermost last.
        raised: whether the interrupt reached the caller.
    """

    def __init__(self) -> None:
        self.number = 0
        self.where = ""
        self.raised = False

    def __str__(self) -> str:
        return f"moment {self.number} ({self.where})"


def _where(frame: FrameType | None, event: str, arg: Any) -> str:
    names = []
    while frame is not None and frame.f_code is not _run.__code__:
        file = os.path.basename(frame.f_code.co_filename)
        names.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    after = f", after {getattr(arg, '__name__', arg)}()" if event == "c_return" else ", entered"
    return " > ".join(names[:4][::-1]) + after


def _run(
    act: Callable[[T], object], things: T, at: int, max_moments: int, within: str = ""
) -> Moment:
    """Act with a signal at one moment (0: at none); return where it came, or how many there are."""
    moment = Moment()
    seen = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal seen
        if event == "return":
            # The call of a class, which is C, returns after its __init__.
            if frame.f_code.co_name != "__init__":
                return
        elif event not in ("call", "c_return"):
            return
        if frame.f_code is _run.__code__ or within not in frame.f_code.co_filename:
            return
        seen += 1
        if seen == at:
            moment.number = at
            moment.where = _where(frame, event, arg)
            signal.raise_signal(NUMBER)
        elif seen > max_moments:
            raise AssertionError(f"no end after {max_moments} moments")

    sys.setprofile(profile)
    try:
        act(things)
    except (KeyboardInterrupt, Interrupted):
        moment.raised = True
    finally:
        sys.setprofile(None)
    if not at:
        moment.number = seen
    return moment


def interrupt_at_each_moment(
    make: Callable[[], T],
    act: Callable[[T], object],
    check: Callable[[T, Moment], object],
    *,
    handler: Callable[[T], object] | type[BaseException] = KeyboardInterrupt,
    max_moments: int = 120,
    seconds: float = 8,
    within: str = "",
) -> int:
    """Act once for each moment of it, with a signal that comes there; check each time.

    Args:
        make: creates what is acted on, once for each moment.
        act: what is interrupted.
        check: raises if something is wrong afterwards; it must close what make returned.
        handler: what the signal's handler raises; or a function that it calls and that raises
            nothing.
        max_moments: how many moments to try: all, or so many of them at equal distances.
        seconds: how long one moment may take before it has failed.
        within: only moments in files whose path has this.

    Returns:
        How many moments were tried.

    Raises:
        AssertionError: what was wrong at which moments.
    """
    current: list[T] = []

    def handle(*_: object) -> None:
        if isinstance(handler, type):
            raise handler
        handler(current[0])

    def overdue(*_: object) -> None:
        raise TooLong(f"not done in {seconds:g} s")

    before = {
        NUMBER: signal.signal(NUMBER, handle),
        signal.SIGALRM: signal.signal(signal.SIGALRM, overdue),
    }
    collects = gc.isenabled()
    gc.disable()  # The moments must be the same in each run.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    failures: list[str] = []
    tried = 0
    try:
        things = make()
        count = _run(act, things, 0, 100_000, within).number
        check(things, Moment())
        del things
        step = max(1, -(-count // max_moments))
        # If not all are tried, try the first and the last.
        for at in sorted({*range(1, count + 1, step), count}):
            things = make()
            current[:] = [things]
            moment = Moment()
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                moment = _run(act, things, at, 100_000, within)
                check(things, moment)
            except (Exception, TooLong) as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                last = traceback.extract_tb(error.__traceback__)[-1]
                file = os.path.basename(last.filename)
                failures.append(
                    f"{moment if moment.number else f'moment {at}'}:\n    "
                    f"{type(error).__name__}: {error} [{file}:{last.lineno} {last.name}]"
                )
                if isinstance(error, TooLong) or len(failures) == ENOUGH:
                    break
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                tried += 1
            current.clear()
            del things
    finally:
        for number, action in before.items():
            signal.signal(number, action)
        sys.unraisablehook = hook
        if collects:
            gc.enable()
    assert count, "nothing was interrupted"
    if failures:
        shown = "\n  ".join(failures)
        raise AssertionError(
            f"after {len(failures)} of {tried} moments ({count} in all)\n  {shown}"
        )
    return tried


def interrupt_at_random(
    act: Callable[[], object],
    times: int,
    after: Callable[[], object],
    *,
    exception: type[BaseException] = KeyboardInterrupt,
    longest: float = 6e-4,
) -> None:
    """Act again and again under a timer that raises; act is interrupted so many times.

    Args:
        act: what is interrupted.
        times: how often.
        after: what must work after each interrupt.
        exception: what the handler raises.
        longest: seconds until an interrupt comes, at most.
    """

    came = False

    def handle(*_: object) -> None:
        nonlocal came
        came = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise exception

    def act_until_it_came() -> None:
        # A finalizer that the exception interrupts drops it.
        while not came:
            act()

    chance = random.Random(times)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        for _ in range(times):
            came = False
            try:
                # Again after a second: CPython 3.11 may miss a signal that comes while it reckons
                # whether anything is pending, until the next.
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, longest), 1.0)
                # In Python 3.12 and 3.13, `try` does not cover a loop's jump back.
                act_until_it_came()
            except exception:
                pass
            after()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
