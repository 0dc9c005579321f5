"""Time posts on a device that executes them: soft0, Soft-RoCE or hardware.

Run it as ``python tests/bench/device.py -d NAME``, and in the virtual machine
as ``tests/guest.py -- python tests/bench/device.py -d rxe0``.  "post" is the
call alone; "done" is the time from the post until the last completion has been
polled.  Both queue pairs are on the same device, in one process.  Every figure
is the lowest of several runs' medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import rdmapost as rp
from rdmapost._binding import ffi

ALL = (
    rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE | rp.Access.REMOTE_READ | rp.Access.REMOTE_ATOMIC
)
KIB, MIB = 1 << 10, 1 << 20
LIST = 32


class Bench:
    """Two connected queue pairs, and the work requests for them.

    Args:
        context: the device.
        stack: closes everything at the end.
    """

    def __init__(self, context: rp.Context, stack: contextlib.ExitStack) -> None:
        enter = stack.enter_context
        pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context, 256))
        self.mr = enter(rp.MR(pd, 4 * MIB, ALL))
        self.near = enter(rp.QP(pd, rp.QPType.RC, self.cq))
        self.far = enter(rp.QP(pd, rp.QPType.RC, self.cq))
        self.near.connect(self.far.endpoint())
        self.far.connect(self.near.endpoint())

    def remote(self, wr_type: Any, size: int, **fields: Any) -> Any:
        """Return a work request from the first half of the memory to the second."""
        mr = self.mr
        return wr_type(mr[0:size], remote_addr=mr.addr + 2 * MIB, rkey=mr.rkey, **fields)

    def drain(self, count: int) -> None:
        """Poll for this many completions."""
        while count:
            for wc in self.cq.poll():
                wc.check()
                count -= 1

    def posted(self, wrs: Callable[[], Any], each: int) -> tuple[float, float]:
        """Post the work requests of ``wrs()``, and poll all; return both times per work request."""
        start = time.perf_counter()
        self.near.post_send(wrs())
        posted = time.perf_counter()
        self.drain(each)
        return (posted - start) / each, (time.perf_counter() - start) / each

    def sent(self, each: int) -> tuple[float, float]:
        """Post receives, then time sends to them as ``posted`` does."""
        target, out = self.mr[2 * MIB : 2 * MIB + 8], self.mr[0:8]
        self.far.post_recv([rp.RecvWR(target) for _ in range(each)])
        start = time.perf_counter()
        self.near.post_send([rp.Send(out) for _ in range(each)])
        posted = time.perf_counter()
        self.drain(2 * each)
        return (posted - start) / each, (time.perf_counter() - start) / each

    def memmove(self, size: int) -> tuple[float, float]:
        """Copy the same bytes without a device."""
        view = self.mr.buffer
        source, target = ffi.from_buffer(view[:size]), ffi.from_buffer(view[2 * MIB :])
        start = time.perf_counter()
        ffi.memmove(target, source, size)
        return 0.0, time.perf_counter() - start

    def cases(self) -> Sequence[tuple[str, Callable[[], tuple[float, float]]]]:
        """Return the cases: each a label, and a function that runs it once."""
        remote = self.remote
        found: list[tuple[str, Callable[[], tuple[float, float]]]] = [
            ("write 8 bytes", lambda: self.posted(lambda: remote(rp.RdmaWrite, 8), 1)),
            (
                "write 8 bytes, list of 32",
                lambda: self.posted(lambda: [remote(rp.RdmaWrite, 8) for _ in range(LIST)], LIST),
            ),
            ("read 8 bytes", lambda: self.posted(lambda: remote(rp.RdmaRead, 8), 1)),
            (
                "fetch and add",
                lambda: self.posted(lambda: remote(rp.AtomicFetchAndAdd, 8, compare_add=1), 1),
            ),
            ("send 8 bytes", lambda: self.sent(1)),
            ("send 8 bytes, list of 32", lambda: self.sent(LIST)),
        ]
        for size, label in ((4 * KIB, "4 KiB"), (64 * KIB, "64 KiB"), (MIB, "1 MiB")):
            found += [
                (
                    f"write {label}",
                    lambda size=size: self.posted(lambda: remote(rp.RdmaWrite, size), 1),
                ),
                (f"memmove {label}", lambda size=size: self.memmove(size)),
            ]
        return found


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-d", "--device", help="default: the first with an active port")
    parser.add_argument("--count", type=int, default=300, help="repetitions of each case in a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(rp.open_device(options.device))
        bench = Bench(context, stack)
        figures: dict[str, dict[str, float]] = {}
        for label, once in bench.cases():
            runs = []
            for _ in range(options.runs):
                times = [once() for _ in range(options.count)]
                # Take a run's median: on a real device the minimum is luck.
                runs.append(
                    [statistics.median(column) * 1e6 for column in zip(*times, strict=True)]
                )
            post, done = (min(column) for column in zip(*runs, strict=True))
            figures[label] = {"post": post, "done": done}
    if options.json:
        json.dump({"device": context.name, "us": figures}, sys.stdout, indent=2)
        print()
        return
    print(f"us on {context.name}, each         post       done")
    for label, figure in figures.items():
        post = f"{figure['post']:10.2f}" if figure["post"] else " " * 10
        print(f"{label:<28}{post} {figure['done']:10.2f}")
    for label in ("4 KiB", "64 KiB", "1 MiB"):
        speed = figures[f"memmove {label}"]["done"] / figures[f"write {label}"]["done"]
        print(f"write {label + ' at':<10}{speed:5.2f} of memmove's speed")


if __name__ == "__main__":
    main()
