"""The state of a program, and the invariants that must hold whatever it does.

A world has pools of resources, memory that is checked for changes, and ``call``,
through which every call of the public API goes.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import logging
import mmap
import os
import re
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from draw import Draw, mix

import rdmapost as rp

__all__ = [
    "ALPHABET",
    "Hostile",
    "Memory",
    "World",
    "address_of",
    "filled",
    "leftovers",
    "renumber",
    "write",
]

ALPHABET = bytes(range(0xA0, 0xB0)) + b"\0"
"""The only byte values in registered memory and inline data at first."""
_GUARD, _RETIRED = b"\xc5", b"\xd7"
_GUARDED = 64

_PACKAGE = os.path.dirname(rp.__file__) + os.sep

POOL = 10
"""Resources of each kind that are kept; a further one replaces one of them."""


class Hostile(Exception):
    """Raised by hostile objects."""


ALLOWED = (
    rp.RdmaError,
    ValueError,
    TypeError,
    IndexError,
    OverflowError,
    Hostile,
    KeyboardInterrupt,
)
"""The exceptions that a call may raise."""

ORDER = ("Batch", "MW", "QP", "SRQ", "AH", "MR", "CQ", "CompChannel", "XRCD", "PD", "Context")
"""An order in which everything can be closed."""


def filled(size: int) -> bytes:
    """Return this many bytes of the alphabet."""
    return (ALPHABET[:16] * (size // 16 + 1))[:size]


def provider_parts() -> tuple[Any, ...]:
    from rdmapost.providers.soft0 import xrc_domains
    from rdmapost.providers.soft0.device import device as soft_device
    from rdmapost.providers.software import provider as soft
    from rdmapost.providers.software import state as soft_state

    return soft, xrc_domains, soft_state, soft_device


def leftovers() -> dict[str, int]:
    """Count what the process and the soft device hold now."""
    soft, xrc_domains, state, device = provider_parts()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(state.objects),
        "contexts": len(state.contexts),
        "regions": len(device.memory.regions_by_lkey),
        "keys": len(device.memory.by_index),
        "queue pairs": len(device.qps),
        "shared receive queues": len(device.srqs),
        "groups": len(device.groups),
        "parked": len(device.parked),
        "XRC domains": len(xrc_domains.domains),
        "larger structs": len(state._wholes),
        "completion channels": len(soft._channels),
    }


def renumber() -> None:
    """Reset the numbers and keys that the soft device assigns, if it is empty.

    A program then runs in the same way alone as after others.
    """
    _, _, state, device = provider_parts()
    memory = device.memory
    if not (
        state.contexts or device.qps or device.srqs or memory.regions_by_lkey or memory.by_index
    ):
        device.__init__(device.name)


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def write(region: Any, data: bytes) -> None:
    """Write to the start of a region's memory, unless another thread has closed the region.

    A write to the memory after the close is a finding.
    """
    where = slice(0, len(data))
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        buffer = region.buffer
        # Nothing is allocated from here on, so no finalizer runs that could close the region.
        if not region.closed:
            buffer[where] = data


class Memory:
    """Memory that is checked for changes before, while and after it is registered.

    Args:
        type: the type of the object, one of TYPES.
        size: bytes.

    Attributes:
        region: a weak reference to the region, once there is one.
    """

    TYPES = ("guarded", "guarded", "bytearray", "bytearray", "mmap", "numpy", "array", "int")

    def __init__(self, type: str, size: int) -> None:
        self.type = type
        self.size = size
        self.region: Any = None
        self.constant = False
        self.retired = False
        self.dangling = False
        self._start = 0
        self.whole: Any = None
        if type == "int":
            return
        if type == "guarded":
            self.whole = bytearray(_GUARD * _GUARDED + filled(size) + _GUARD * _GUARDED)
        elif type == "numpy":
            whole = np.frombuffer(
                _GUARD * _GUARDED + filled(size) + _GUARD * _GUARDED, dtype=np.uint8
            )
            self.whole = whole.copy()
        elif type == "mmap":
            self.whole = mmap.mmap(-1, size)
            self.whole[:] = filled(size)
        elif type == "array":
            self.size = size = (size + 3) // 4 * 4
            self.whole = array.array("I", filled(size))
        else:
            self.whole = bytearray(filled(size))
        if hasattr(self.whole, "append"):
            # Make spare room, so that append() in _retire does not move the buffer.
            self.whole.append(0)
            self.whole.pop()
        self._start = address_of(self.whole)

    def given(self) -> Any:
        """Return the argument for MR; nothing here keeps a view of it."""
        if self.type == "int":
            return self.size
        if self.type == "guarded":
            return memoryview(self.whole)[_GUARDED:-_GUARDED]
        if self.type == "numpy":
            return self.whole[_GUARDED:-_GUARDED]
        return self.whole

    def registered(self, region: Any, constant: bool) -> None:
        """Note the region on this memory."""
        if self.type == "int":
            self.whole = region.buffer
            write(region, filled(self.size))
        self.constant = constant
        self.region = weakref.ref(region)

    def abandoned(self) -> None:
        """Note that no region was created on this memory after all."""
        if self.type != "int":
            self.region = _none

    def content(self) -> bytes:
        """Return the bytes that a region covers."""
        whole = bytes(self.whole)
        return whole[_GUARDED:-_GUARDED] if self.type in ("guarded", "numpy") else whole

    def wrong(self, alphabet: bool) -> str | None:
        """Describe a forbidden change of the memory or its surroundings; None if there is none."""
        if self.region is None or self.whole is None:
            return None
        if self.dangling:
            return "a key is valid for memory that Python may free"
        if self.retired:
            whole = bytes(self.whole)
            return "memory of a region that is gone was written" if whole.strip(_RETIRED) else None
        region = self.region()
        if region is None or region.closed:
            self._retire()
            return "a key is valid for memory that Python may free" if self.dangling else None
        whole = bytes(self.whole)
        if self.type in ("guarded", "numpy"):
            edge = _GUARD * _GUARDED
            if not whole.startswith(edge) or not whole.endswith(edge):
                return "memory beside a region was written"
            whole = whole[_GUARDED:-_GUARDED]
        if self.constant and whole != filled(self.size):
            return "a region without LOCAL_WRITE was written"
        if alphabet and whole.translate(None, ALPHABET):
            at = next(i for i, byte in enumerate(whole) if byte not in ALPHABET)
            return f"bytes that were never sent arrived: {whole[at : at + 16].hex(' ')}"
        return None

    def _retire(self) -> None:
        """Overwrite the memory if no view of it is left: Python may free it from now on."""
        try:
            if self.type in ("bytearray", "guarded"):
                self.whole.append(0)
                self.whole.pop()
                self.whole[:] = _RETIRED * len(self.whole)
            elif self.type == "array":
                self.whole.append(0)
                self.whole.pop()
                self.whole[:] = array.array("I", _RETIRED * self.size)
            elif self.type == "mmap":
                self.whole.resize(self.size)
                self.whole[:] = _RETIRED * self.size
            elif self.type == "numpy":
                if (region := self.region()) is None or not region.closed:
                    return
                self.whole[:] = _RETIRED[0]
            elif self.region() is None:
                # Without the region, it is unknown whether the region is closed.
                self.whole = None
                return
            else:
                self.whole[:] = _RETIRED * self.size
        except BufferError:
            return
        self.retired = True
        if self._start and any(
            self._start <= address_of(region.memory) < self._start + len(bytes(self.whole))
            for region in list(provider_parts()[3].memory.regions_by_lkey.values())
        ):
            self.dangling = True


def address_of(memory: Any) -> int:
    """Return where a buffer starts."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _none() -> None:
    return None


class _Log(logging.Handler):
    """Reports the errors that the soft device logs as findings."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Hostile | KeyboardInterrupt):
            self._world.found("log", error, record.getMessage())


class World:
    """The state of one program.

    Args:
        seed: the program's seed.
        log: gets each call as text before it is made, or None.

    Attributes:
        pools: open resources by kind, and other objects for later use.
        clean: whether registered memory may hold only bytes of ALPHABET.
        put_off: resources that were closed in the middle of another call.
        findings: the failures, each a (kind, signature, text).
        count: calls made by each thread.
    """

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.log = log
        self.pools: dict[str, list[Any]] = {
            type_name: []
            for type_name in (
                *ORDER,
                "wrs",
                "recvs",
                "sges",
                "targets",
                "pairs",
                "tags",
                "buffers",
                "lists",
            )
        }
        self.memories: list[Memory] = []
        self.made: list[weakref.ref[Any]] = []
        self.findings: list[tuple[str, str, str]] = []
        self.clean = True
        self.serial = True
        self.interrupts = ""
        self.overrun = False
        self.put_off: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closing = False
        self.local = threading.local()
        self.counts: dict[int, int] = {}
        self._armed = self._again = False
        self._raises: list[int] = []
        self._log = _Log(self)
        self._countdown = 0
        # Keep one bound method: CPython holds no reference to a profile function that is running.
        self._profiler = self._profile

    # ---- calls --------------------------------------------------------------

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def call(self, what: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make one call of the public API; return what it returns, or None if it raised."""
        ident = threading.get_ident()
        self.counts[ident] = self.counts.get(ident, 0) + 1
        return self.build(what, *args, **options)

    def build(self, what: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call as ``call`` does, but do not count it: creating a work request, say."""
        if self.closing or self.findings:
            return None
        local = self.local
        depth = local.depth = getattr(local, "depth", 0) + 1
        # `inside`: act() may run in one of the library's finalizers, which `depth` does not count.
        nested = depth > 1 or getattr(local, "inside", 0)
        if nested and getattr(what, "__name__", "") == "close":
            self.put_off.add(what.__self__)
        try:
            # Built even without a log: it allocates objects, which affect when the garbage
            # collector runs, and a replay must be the same.
            said = f"{'  ' * depth}{_name(what)}({_shown(args, options)})"
            if self.log is not None:
                self.log(said)
            try:
                if depth == 1 and self.interrupts and threading.current_thread() is _main:
                    return self._interruptible(what, args, options)
                return what(*args, **options)
            except ALLOWED as error:
                said = f"{'  ' * depth}-> {type(error).__name__}: {str(error)[:100]}"
                if self.log is not None:
                    self.log(said)
            except Exception as error:
                self.found("exception", error, f"{_name(what)}({_shown(args, options)})")
            return None
        finally:
            local.depth = depth - 1

    def _interruptible(self, what: Callable[..., Any], args: Any, options: Any) -> Any:
        # The handlers raise only between the two assignments, each at most once, so this file's
        # code is interrupted only within the outer try.
        draw = Draw(mix(self.seed, self.count))
        if not draw.one_in(4):
            return what(*args, **options)
        self._raises = [draw.below(2), draw.bits()]
        self._countdown = draw.below(draw.among(30, 200))
        try:
            try:
                self._armed = self._again = True
                if self.interrupts == "timer":
                    signal.setitimer(signal.ITIMER_REAL, (1 + draw.below(300)) * 1e-6)
                else:
                    sys.setprofile(self._profiler)
                return what(*args, **options)
            finally:
                self._armed = self._again = False
                sys.setprofile(None)
                if self.interrupts == "timer":
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            sys.setprofile(None)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        # CPython checks for signals when a function starts, and when a C function has returned.
        if event in ("call", "c_return") and _PACKAGE in frame.f_code.co_filename:
            self._countdown -= 1
            if self._countdown < 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGALRM)

    def on_signal(self, number: int, frame: Any) -> None:
        """Handle a signal: raise, or use the library."""
        if not self._armed:
            return
        self._armed = False
        raises, seed = self._raises
        if self.log is not None:
            self.log(f"    signal: {'raises' if raises else 'acts'}")
        if raises:
            raise KeyboardInterrupt
        self.act(seed)

    def on_interrupt(self, number: int, frame: Any) -> None:
        """Handle SIGINT, with which soft0 delivers a KeyboardInterrupt raised inside it."""
        if self._again:
            self._again = False
            raise KeyboardInterrupt

    act: Callable[[int], Any]
    """Do an operation from within a call; set by ``programs``."""

    # ---- findings -----------------------------------------------------------

    def found(self, kind: str, error: BaseException | None, text: str) -> None:
        """Note a finding."""
        where = ""
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            inside = [f for f in frames if "rdmapost" in f.filename and "fuzz" not in f.filename]
            where = f"{type(error).__name__} in {inside[-1].name}" if inside else repr(error)
            if isinstance(error, rp.RdmaError):
                where += f": {error}"
            text += "\n" + "".join(traceback.format_exception(error))
        where = re.sub(r"0x[0-9a-f]+|\d+", "N", where or text.splitlines()[0])
        self.findings.append((kind, where, text))

    def on_unraisable(self, raised: Any) -> None:
        error = raised.exc_value
        # A refused close that was deferred to the end of a verb can only be reported here.
        refusal = isinstance(error, rp.InUseError) or (
            isinstance(error, rp.VerbsError) and error.errno == errno.EBUSY
        )
        late = refusal and raised.object in self.put_off
        if not late and not isinstance(error, Hostile | KeyboardInterrupt):
            self.found("unraisable", error, f"{raised.err_msg} {raised.object!r:.100}")

    def note(self, event: rp.AsyncEvent) -> None:
        """Note an asynchronous event: an overrun loses completions."""
        self.overrun = self.overrun or event.event_type is rp.EventType.CQ_ERR

    def look(self) -> None:
        """Check that no memory has changed that must not change."""
        for memory in list(self.memories):
            if reason := memory.wrong(self.clean):
                self.found("memory", None, f"{reason} ({memory.type}, {memory.size} bytes)")
                return

    def retire(self, thing: Any) -> None:
        """Overwrite the memory of a region that has just been closed."""
        for memory in list(self.memories) if self.serial and isinstance(thing, rp.MR) else ():
            mine = memory.region is not None and memory.region() is thing
            if mine and (reason := memory.wrong(False)):
                self.found("memory", None, f"{reason} ({memory.type})")

    # ---- pools --------------------------------------------------------------

    def keep(self, type_name: str, thing: Any, draw: Draw) -> Any:
        """Put an object into a pool, if it is full in place of another object."""
        if thing is None:
            return None
        if type_name in ORDER:
            self.made.append(weakref.ref(thing))
        pool = self.pools[type_name]
        if len(pool) >= POOL:
            # Perhaps this drops the last reference to the other, and its finalizer closes it.
            with contextlib.suppress(IndexError):
                pool[draw.below(len(pool))] = thing
        else:
            pool.append(thing)
        return thing

    def pick(self, type_name: str, draw: Draw) -> Any:
        """Return an object from a pool, or None if the pool is empty."""
        pool = self.pools[type_name]
        try:
            return pool[draw.below(len(pool))] if pool else None
        except IndexError:
            # Another thread has taken the last.
            return None

    # ---- the beginning and the end ------------------------------------------

    def __enter__(self) -> World:
        logging.getLogger("rdmapost.soft").addHandler(self._log)
        logging.getLogger("rdmapost.soft").propagate = False
        sys.unraisablehook = self.on_unraisable
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGALRM, self.on_signal)
        signal.signal(signal.SIGINT, self.on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger("rdmapost.soft").removeHandler(self._log)
        sys.unraisablehook = sys.__unraisablehook__

    def end(self, before: dict[str, int]) -> None:
        """Drain and close everything, and check that nothing is left."""
        draw = Draw(mix(self.seed, 99))
        self.look()
        if self.findings:
            return
        self.closing = True
        for name in ("pairs", "wrs", "recvs", "sges", "lists", "buffers", "tags"):
            self.pools[name].clear()
        gc.collect()
        alive: dict[str, list[Any]] = {type_name: [] for type_name in ORDER}
        for ref in self.made:
            # The library closes dropped resources itself: a queue pair after its windows.
            if (thing := ref()) is not None and not getattr(thing, "_abandoned", False):
                alive[type(thing).__name__].append(thing)
        for pool in self.pools.values():
            pool.clear()
        self._drain(alive, draw)
        # A lost completion (CQ overrun) keeps its windows in use until the queue pair is closed.
        order = ("Batch", "QP", "MW", *ORDER[3:])
        if draw.one_in(2) and not self.overrun:
            order = ORDER
        for type_name in order:
            for thing in alive[type_name]:
                try:
                    thing.close()
                except Exception as error:
                    self.found("close", error, f"a {type_name} cannot be closed: {error}")
                    return
        thing = ref = None
        alive.clear()
        gc.collect()
        self.look()
        left = {
            name: f"{before[name]} -> {value}"
            for name, value in leftovers().items()
            if value > before[name]
        }
        if left:
            self.found("leftovers", None, f"{', '.join(left)} left: {left}\n{_descriptors()}")

    def _drain(self, alive: dict[str, list[Any]], draw: Draw) -> None:
        for batch in alive["Batch"]:
            batch.close()
        qps = [qp for qp in alive["QP"] if not qp.closed]
        reset = draw.one_in(2)
        for qp in qps:
            try:
                if reset:
                    qp.to_reset()
                else:
                    qp.to_err()
            except Exception as error:
                self.found("drain", error, f"{qp} cannot be drained: {error}")
                return
        for context in alive["Context"]:
            while not context.closed and (event := context.get_async_event(0)) is not None:
                self.note(event)
        cqs = [cq for cq in alive["CQ"] if not cq.closed]
        for _ in range(1000):
            if not sum(len(cq.poll()) for cq in cqs):
                break
        if self.overrun:
            return
        for qp in [] if reset else qps:
            # Unsignaled work requests are known to be done once a later one is.
            if qp.outstanding.send:
                with contextlib.suppress(rp.PostError):
                    qp.post_send(rp.LocalInv())
                    while qp.send_cq.poll():
                        pass
                    continue
                qp.to_reset()
        for qp in qps:
            if any(qp.outstanding):
                self.found(
                    "drain",
                    None,
                    f"outstanding forever after {'reset' if reset else 'ERR'}"
                    f": {qp} checked={qp.checked} {qp.outstanding}",
                )
                return


_main = threading.main_thread()


def _name(what: Any) -> str:
    owner = getattr(what, "__self__", None)
    prefix = f"{owner}." if isinstance(owner, rp.PD | rp.QP | rp.CQ | rp.MR | rp.SRQ) else ""
    try:
        return f"{prefix}{getattr(what, '__name__', what)}"
    except Exception:
        return str(getattr(what, "__name__", "?"))


def _shown(args: Any, options: Any) -> str:
    try:
        parts = [repr(arg) for arg in args] + [f"{k}={v!r}" for k, v in options.items()]
    except Exception as error:
        return f"<{type(error).__name__} in repr>"
    return ", ".join(parts)[:400]
