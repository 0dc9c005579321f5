"""Histograms of the latency of RDMA writes, measured by the device's own clock.

Each completion carries a timestamp from the device's clock, so it does not matter how late the
program polls it. Here the program posts bursts, sleeps, and only then polls; the latencies are
still correct. The device must support completion timestamps: mlx5 and soft0 do, Soft-RoCE does not.

    python examples/latency_histogram.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from contextlib import ExitStack

import rdmapost as rp

SIZES, ROUNDS, BURST = (8, 4096, 65536), 20, 16
ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE


class Meter:
    """Writes from one region to another, and measures each write."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.context = context
        self.pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_COMPLETION_TIMESTAMP))
        self.source = enter(rp.MR(self.pd, BURST * max(SIZES)))
        self.target = enter(rp.MR(self.pd, BURST * max(SIZES), ACCESS))
        self.a = enter(rp.QP(self.pd, rp.QPType.RC, self.cq, max_send_wr=BURST))
        self.b = enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        self.a.connect(self.b.endpoint())
        self.b.connect(self.a.endpoint())

    def now(self) -> int:
        """Return the time on the device's clock; on some devices only the low bits are valid."""
        return self.context.query_rt_values() & self.context.attr.completion_timestamp_mask

    def microseconds(self, begun: int, ended: int) -> float:
        ticks = (ended - begun) & self.context.attr.completion_timestamp_mask
        return ticks * 1000 / self.context.attr.hca_core_clock

    def burst(self, size: int) -> list[float]:
        """Write `size` bytes BURST times; return how long each write took, in us."""
        begun = []
        for i in range(BURST):
            place = i * size
            write = rp.RdmaWrite(
                self.source[place : place + size],
                wr_id=i,
                remote_addr=self.target.addr + place,
                rkey=self.target.rkey,
            )
            begun.append(self.now())
            self.a.post_send(write)
        time.sleep(0.002)  # the program is busy with something else
        found = [wc.check() for wc in self.cq.wait(BURST)]
        return [self.microseconds(begun[wc.wr_id], wc.completion_ts or 0) for wc in found]


def bar_chart(latencies: list[float]) -> list[str]:
    """Return a line for each power of two."""
    counts = Counter(int(latency).bit_length() for latency in latencies)
    lines = []
    for bits in range(min(counts), max(counts) + 1):
        share = counts[bits] / len(latencies)
        lines.append(f"  < {1 << bits:7} us {share:7.1%} {'#' * round(40 * share)}".rstrip())
    return lines


def main(device: str = "soft0") -> None:
    generator = random.Random(1)
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        try:
            meter = Meter(context, stack)
        except rp.UnsupportedError as error:
            sys.exit(str(error))
        for size in SIZES:
            latencies = []
            for _ in range(ROUNDS):
                sent = generator.randbytes(BURST * size)
                meter.source.buffer[: len(sent)] = sent
                latencies += meter.burst(size)
                if meter.target.buffer[: len(sent)] != sent:
                    sys.exit(f"damaged: {size} bytes")
            latencies.sort()
            middle, worst = latencies[len(latencies) // 2], latencies[-1]
            print(f"{size} bytes: median {middle:.1f} us, worst {worst:.1f} us")
            print(*bar_chart(latencies), sep="\n")
        print(f"{len(SIZES) * ROUNDS * BURST} writes: intact")


if __name__ == "__main__":
    main(*sys.argv[1:])
