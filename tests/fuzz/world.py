"""What a program works on, and what must hold whatever it does.

A world has pools of resources, memory that is watched, and ``call``, through
which every call of the public API goes.
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
    "renumber",
    "residue",
    "write",
]

ALPHABET = bytes(range(0xA0, 0xB0)) + b"\0"
"""The only bytes that registered memory and inline data start with."""
_GUARD, _RETIRED = b"\xc5", b"\xd7"
_GUARDED = 64

_PACKAGE = os.path.dirname(rp.__file__) + os.sep

POOL = 10
"""Resources of a kind that are kept; another one pushes one of them out."""


class Hostile(Exception):
    """What hostile objects raise."""


ALLOWED = (
    rp.RdmaError,
    ValueError,
    TypeError,
    IndexError,
    OverflowError,
    Hostile,
    KeyboardInterrupt,
)
"""What a call may raise."""

ORDER = ("Batch", "MW", "QP", "SRQ", "AH", "MR", "CQ", "CompChannel", "XRCD", "PD", "Context")
"""An order in which everything can be closed."""


def filled(size: int) -> bytes:
    """Return so many bytes of the alphabet."""
    return (ALPHABET[:16] * (size // 16 + 1))[:size]


def provider_parts() -> tuple[Any, ...]:
    from rdmapost.providers.soft0 import queue_verbs as soft_queues
    from rdmapost.providers.soft0.device import device as soft_device
    from rdmapost.providers.software import provider as soft
    from rdmapost.providers.software import state as soft_state

    return soft, soft_queues, soft_state, soft_device


def residue() -> dict[str, int]:
    """Count what the process and the soft device hold now."""
    soft, queues, state, device = provider_parts()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(state.objects),
        "contexts": len(state.contexts),
        "regions": len(device.memory.regions_by_lkey),
        "keys": len(device.memory._by_index),
        "queue pairs": len(device.qps),
        "shared receive queues": len(device.srqs),
        "groups": len(device.groups),
        "parked": len(device.parked),
        "XRC domains": len(queues._domains),
        "larger structs": len(state._wholes),
        "completion channels": len(soft._channels),
    }


def renumber() -> None:
    """Have the soft device number things as a new one does, if it is empty.

    A program then does the same by itself as after others.
    """
    _, _, state, device = provider_parts()
    memory = device.memory
    if not (
        state.contexts or device.qps or device.srqs or memory.regions_by_lkey or memory._by_index
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

    What is written after that is a finding.
    """
    where = slice(0, len(data))
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        buffer = region.buffer
        # From here on nothing is allocated, so nothing is finalised and closes it.
        if not region.closed:
            buffer[where] = data


class Memory:
    """Memory that is registered, and watched before, while and after that.

    Args:
        type: what it is.
        size: bytes.

    Attributes:
        given: what the region is made of.
        region: a weak reference to the region, once it is made.
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
            # There is room from now on: it stays where it is when it grows in _retire.
            self.whole.append(0)
            self.whole.pop()
        self._start = address_of(self.whole)

    def given(self) -> Any:
        """Return what a region is made of; nothing here keeps a view of it."""
        if self.type == "int":
            return self.size
        if self.type == "guarded":
            return memoryview(self.whole)[_GUARDED:-_GUARDED]
        if self.type == "numpy":
            return self.whole[_GUARDED:-_GUARDED]
        return self.whole

    def registered(self, region: Any, constant: bool) -> None:
        """Note the region that was made of it."""
        if self.type == "int":
            self.whole = region.buffer
            write(region, filled(self.size))
        self.constant = constant
        self.region = weakref.ref(region)

    def abandoned(self) -> None:
        """Note that no region was made of it after all."""
        if self.type != "int":
            self.region = _none

    def content(self) -> bytes:
        """Return what a region covers."""
        whole = bytes(self.whole)
        return whole[_GUARDED:-_GUARDED] if self.type in ("guarded", "numpy") else whole

    def wrong(self, alphabet: bool) -> str | None:
        """Say what has changed that nobody had a right to change, or None."""
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
        """Overwrite it, if nothing has a view of it any more: Python may free it then."""
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
                # Nothing tells whether it has been closed by now.
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
    """Tells a world what the soft device could not handle."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Hostile | KeyboardInterrupt):
            self._world.found("log", error, record.getMessage())


class World:
    """What one program works on.

    Args:
        seed: of the program.
        log: gets each call as text before it is made, or None.

    Attributes:
        pools: open resources by kind, and what else is kept.
        clean: whether nothing but ALPHABET may be in registered memory.
        checked: how often queue pairs are checked: one in so many is not; 0 is all.
        put_off: resources that were closed in the middle of another call.
        findings: what was found, each a (kind, signature, text).
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
        # One object for all: CPython does not hold a profile function while it runs.
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
        """Do what ``call`` does with what is too little to count, such as a work request."""
        if self.closing or self.findings:
            return None
        local = self.local
        depth = local.depth = getattr(local, "depth", 0) + 1
        # A finalizer of the library's, which is no call of ours, may be what it is inside of.
        nested = depth > 1 or getattr(local, "inside", 0)
        if nested and getattr(what, "__name__", "") == "close":
            self.put_off.add(what.__self__)
        try:
            # It is made even where nobody is told: that is work for the collector, too, and a
            # replay is to be the same.
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
        # The handlers raise only between the two assignments, each at most once: nothing of this
        # file is interrupted outside of the outer try.
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
        # Where CPython looks at signals: at the start of a function, and after one of C.
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
        """Handle a SIGINT: so soft0 delivers a KeyboardInterrupt that was raised inside of it."""
        if self._again:
            self._again = False
            raise KeyboardInterrupt

    act: Callable[[int], Any]
    """Do something with the world from the inside of a call; set by ``programs``."""

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
        # What refuses a close that was put off to the end of a verb can only be told here.
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
        """Look whether any memory has changed that should not have."""
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
        """Put something into a pool; it may push out something else."""
        if thing is None:
            return None
        if type_name in ORDER:
            self.made.append(weakref.ref(thing))
        pool = self.pools[type_name]
        if len(pool) >= POOL:
            # The last reference, perhaps: it is closed by its finalizer.
            with contextlib.suppress(IndexError):
                pool[draw.below(len(pool))] = thing
        else:
            pool.append(thing)
        return thing

    def pick(self, type_name: str, draw: Draw) -> Any:
        """Return something of a pool, or None if there is nothing."""
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
        """Drain and close everything, and look whether anything is left."""
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
            # The library closes what has been dropped: a queue pair after its windows.
            if (thing := ref()) is not None and not getattr(thing, "_abandoned", False):
                alive[type(thing).__name__].append(thing)
        for pool in self.pools.values():
            pool.clear()
        self._drain(alive, draw)
        # A completion that an overrun has lost leaves its windows in use until the queue pair goes.
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
            for name, value in residue().items()
            if value > before[name]
        }
        if left:
            self.found("residue", None, f"{', '.join(left)} left: {left}\n{_descriptors()}")

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
            # What is not signaled is known to be done once something after it is.
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
