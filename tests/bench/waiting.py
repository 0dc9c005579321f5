"""Time waiting for completions: in a thread, next to one that keeps the GIL busy, and in asyncio.

Run it as ``python tests/bench/waiting.py``.  Each round posts a list of RDMA writes
and waits for all of them: ``cq.wait`` releases the GIL only when it has to wait for
the device.  With a busy thread, each release costs that thread's switch interval
(sys.getswitchinterval, 5 ms), which dominates the figure; so the number of switches
is printed too.  On a build without a GIL there are none.

In asyncio it is CPU time that counts: that of a task that waits for a write posted
after it has gone to sleep, and that of a task that waits for a plain eventfd instead,
whose reader stays registered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time

import rdmapost as rp

ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
LENGTHS = (1, 16)


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


async def cpu_time_of_an_eventfd(count: int) -> float:
    """Return the CPU time of writing to an eventfd, and of the task that waits for it."""
    loop = asyncio.get_running_loop()
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    woken = loop.create_future()

    def ready() -> None:
        os.eventfd_read(fd)
        woken.set_result(None)

    loop.add_reader(fd, ready)
    start = time.process_time()
    for _ in range(count):
        woken = loop.create_future()
        loop.call_soon(os.eventfd_write, fd, 1)
        await woken
    elapsed = time.process_time() - start
    loop.remove_reader(fd)
    os.close(fd)
    return elapsed / count


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-d", "--device", default="soft0")
    parser.add_argument("--count", type=int, default=200, help="rounds of each")
    options = parser.parse_args()
    stop = threading.Event()

    def keep_busy() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    with (
        rp.open_device(options.device) as context,
        rp.PD(context) as pd,
        rp.CQ(context, 256) as cq,
        rp.MR(pd, 4096, ACCESS) as mr,
        rp.QP(pd, rp.QPType.RC, cq) as near,
        rp.QP(pd, rp.QPType.RC, cq) as far,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        write = rp.RdmaWrite(mr[0:8], remote_addr=mr.addr + 64, rkey=mr.rkey)

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
        rounds = options.count * 25
        awaiting = asyncio.run(cpu_time_of_awaiting(near, write, cq, rounds))
        posting = cpu_time_of_posting(near, write, cq, rounds)
    eventfd = asyncio.run(cpu_time_of_an_eventfd(rounds))
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"us a turn on {options.device}, {'with' if gil else 'without'} a GIL")
    print("writes      alone  beside a busy thread  turns of that thread")
    for length, quiet, loud in zip(LENGTHS, alone, beside, strict=True):
        turns = (loud - quiet) / sys.getswitchinterval()
        print(f"{length:<7}{quiet * 1e6:10.1f}{loud * 1e6:22.1f}{turns:22.1f}")
    print("us of CPU")
    print(f"post, and await cq.completions(1)  {awaiting * 1e6:6.1f}")
    print(f"post, and poll                     {posting * 1e6:6.1f}")
    print(f"an eventfd in asyncio              {eventfd * 1e6:6.1f}")


if __name__ == "__main__":
    main()
