"""Time waiting for completions: in a thread, next to one that keeps the GIL busy, and in asyncio.

Run it as ``python tests/bench/waiting.py``.  Each round posts a list of RDMA writes
and waits for all of them: ``cq.wait`` releases the GIL only when it has to wait for
the device.  With a busy thread, each release costs that thread's switch interval
(sys.getswitchinterval, 5 ms), which dominates the figure; so the number of switches
is printed too.  On a build without a GIL there are none.

In asyncio the figures are CPU time: for a task that waits for a write posted after
the task has gone to sleep, and for a task that instead waits for a plain eventfd,
whose reader stays registered.  A third figure is the least that a wait for a write
can cost: the write is posted and polled, and the event loop has a timer, but the task
waits for the eventfd.  All are measured on the null device (null.c) too, where the
device itself costs nothing.  Every figure is the best of several runs: disturbances
only ever make a run slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import measuring
from null import compile_c

import rdmapost as rp

ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
LENGTHS = (1, 16)
RUNS = 7
GOAL = 1.5
"""The target ratio of an await to an eventfd."""


@contextmanager
def pair(device: str) -> Iterator[tuple[rp.QP, rp.RdmaWrite, rp.CQ]]:
    """Open a device; yield a connected queue pair, a write for it, and its CQ."""
    with ExitStack() as stack:
        opened = stack.enter_context
        context = opened(rp.open_device(device))
        pd, cq = opened(rp.PD(context)), opened(rp.CQ(context, 256))
        mr = opened(rp.MR(pd, 4096, ACCESS))
        near, far = (opened(rp.QP(pd, rp.QPType.RC, cq)) for _ in range(2))
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        yield near, rp.RdmaWrite(mr[0:8], remote_addr=mr.addr + 64, rkey=mr.rkey), cq


async def cpu_time_of_awaiting(near: rp.QP, write: rp.RdmaWrite, cq: rp.CQ, count: int) -> float:
    """Return the CPU time of a post and a wait that begins before it, in seconds."""
    loop = asyncio.get_running_loop()
    start = time.process_time()
    for _ in range(count):
        loop.call_soon(near.post_send, write)
        await cq.completions(1)
    return (time.process_time() - start) / count


def cpu_time_of_posting(near: rp.QP, write: rp.RdmaWrite, cq: rp.CQ, count: int) -> float:
    """Return the CPU time of a post and of polling its completion, in seconds."""
    start = time.process_time()
    for _ in range(count):
        near.post_send(write)
        while not cq.poll():
            pass
    return (time.process_time() - start) / count


async def cpu_time_of_an_eventfd(
    count: int, before: Callable[[], object] | None, after: Callable[[], object] | None
) -> float:
    """Return the CPU time of writing to an eventfd, and of the task that waits for it.

    Args:
        count: how many writes.
        before: called before each write to the eventfd; if given, the loop has a timer.
        after: called by the task when it has been woken.
    """
    loop = asyncio.get_running_loop()
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    woken = loop.create_future()

    def ready() -> None:
        os.eventfd_read(fd)
        woken.set_result(None)

    loop.add_reader(fd, ready)
    # A timer makes each turn of the event loop cost more.
    timer = None if before is None else loop.call_later(3600, woken.cancel)
    start = time.process_time()
    for _ in range(count):
        woken = loop.create_future()
        if before is not None:
            loop.call_soon(before)
        loop.call_soon(os.eventfd_write, fd, 1)
        await woken
        if after is not None:
            after()
    elapsed = time.process_time() - start
    if timer is not None:
        timer.cancel()
    loop.remove_reader(fd)
    os.close(fd)
    return elapsed / count


def in_asyncio(device: str, count: int) -> dict[str, float]:
    """Return the CPU times of waiting in asyncio on a device, in seconds."""
    measuring.pin()
    if device == "null0":
        measuring.NullDevice(os.environ["RDMAPOST_LIBIBVERBS"]).remember(True)
    best: dict[str, float] = {}
    with pair(device) as (near, write, cq):
        for _ in range(RUNS):
            for name, taken in (
                ("await", asyncio.run(cpu_time_of_awaiting(near, write, cq, count))),
                (
                    "by hand",
                    asyncio.run(
                        cpu_time_of_an_eventfd(count, lambda: near.post_send(write), cq.poll)
                    ),
                ),
                ("poll", cpu_time_of_posting(near, write, cq, count)),
                ("eventfd", asyncio.run(cpu_time_of_an_eventfd(count, None, None))),
            ):
                best[name] = min(taken, best.get(name, taken))
    return best


def on_null(count: int) -> dict[str, float] | None:
    """Return in_asyncio() of the null device, in another process; None without a compiler."""
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        null, _ = compile_c(pathlib.Path(directory))
        done = subprocess.run(
            [sys.executable, __file__, "--device", "null0", "--figures", str(count)],
            env={**os.environ, "RDMAPOST_LIBIBVERBS": str(null)},
            stdout=subprocess.PIPE,
            check=True,
            timeout=600,
        )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def print_in_asyncio(figures: dict[str, dict[str, float]]) -> None:
    """Print the CPU times of waiting in asyncio, a column for each device."""
    print(f"{'us of CPU':<35}" + "".join(f"{device:>8}" for device in figures))
    for label, name in (
        ("post, and await cq.completions(1)", "await"),
        ("post, await an eventfd, and poll", "by hand"),
        ("post, and poll", "poll"),
        ("an eventfd in asyncio", "eventfd"),
    ):
        print(f"{label:<35}" + "".join(f"{of[name] * 1e6:8.1f}" for of in figures.values()))
    for label, name in (("with a post", "by hand"), ("alone", "eventfd")):
        print(
            f"{f'ratio to an eventfd {label}':<35}"
            + "".join(f"{of['await'] / of[name]:8.2f}" for of in figures.values())
            + (f"  goal {GOAL}" if name == "eventfd" else "")
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-d", "--device", default="soft0")
    parser.add_argument("--count", type=int, default=200, help="rounds of each")
    parser.add_argument("--figures", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.figures:
        json.dump(in_asyncio(options.device, options.figures), sys.stdout)
        return
    stop = threading.Event()

    def keep_busy() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    with pair(options.device) as (near, write, cq):

        def median(length: int) -> float:
            """Return the median time of a round, in seconds."""
            wrs, times = [write] * length, []
            for _ in range(options.count):
                start = time.perf_counter()
                near.post_send(wrs)
                cq.wait(length)
                times.append(time.perf_counter() - start)
            return sorted(times)[options.count // 2]

        alone = [median(length) for length in LENGTHS]
        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            beside = [median(length) for length in LENGTHS]
        finally:
            stop.set()
            busy.join()
    rounds = options.count * 10
    figures = {options.device: in_asyncio(options.device, rounds)}
    if (null := on_null(rounds)) is not None:
        figures["null"] = null
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"us a turn on {options.device}, {'with' if gil else 'without'} a GIL")
    print("writes      alone  beside a busy thread  turns of that thread")
    for length, quiet, loud in zip(LENGTHS, alone, beside, strict=True):
        turns = (loud - quiet) / sys.getswitchinterval()
        print(f"{length:<7}{quiet * 1e6:10.1f}{loud * 1e6:22.1f}{turns:22.1f}")
    print_in_asyncio(figures)


if __name__ == "__main__":
    main()
