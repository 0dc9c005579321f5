"""Time soft0: small round trips, empty polls, columns, and large RDMA writes against memmove.

Run it as ``python tests/bench/soft.py``.  A round trip posts a receive and a
send, and polls both completions.  Every figure is the best of several runs:
disturbances only ever make a run slower.
"""

from __future__ import annotations

import argparse
import array
import time
from collections.abc import Callable

import rdmapost as rp
from rdmapost._binding import ffi

ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
MIB = 1 << 20
OUTSTANDING = 16
"""Large writes posted at once, as bandwidth tests do."""
ROWS = 64
"""Small writes in one call of post_columns."""


def best(runs: int, run: Callable[[], None]) -> float:
    """Return the shortest time of several runs, in seconds."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-d", "--device", default="soft0")
    parser.add_argument("--count", type=int, default=20_000, help="round trips in a run")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with (
        rp.open_device(options.device) as context,
        rp.PD(context) as pd,
        rp.CQ(context, 256) as cq,
        rp.MR(pd, 4 * MIB, ACCESS) as mr,
        rp.QP(pd, rp.QPType.RC, cq) as near,
        rp.QP(pd, rp.QPType.RC, cq) as far,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        out, target = mr[0:8], mr[64:72]

        def round_trips() -> None:
            for _ in range(options.count):
                far.post_recv(rp.RecvWR(target))
                near.post_send(rp.Send(out))
                left = 2
                while left:
                    left -= len(cq.poll())

        large = rp.RdmaWrite(mr[0:MIB], remote_addr=mr.addr + 2 * MIB, rkey=mr.rkey)
        writes = 192

        def large_writes(outstanding: int) -> None:
            wrs = large if outstanding == 1 else [large] * outstanding
            for _ in range(writes // outstanding):
                near.post_send(wrs)
                cq.wait(outstanding)

        source, destination = (ffi.from_buffer(mr.buffer[at:]) for at in (0, 2 * MIB))

        def memmoves() -> None:
            for _ in range(writes):
                ffi.memmove(destination, source, MIB)

        rows = array.array("Q", range(ROWS))
        local, remote = mr.blocks(rows, 8), rp.Blocks(mr.addr + 2 * MIB, rows, 8)
        lists = max(1, options.count // ROWS)

        def columns() -> None:
            for _ in range(lists):
                near.post_columns(
                    rp.RdmaWrite, local, remote_addr=remote, rkey=mr.rkey, signal_every=ROWS
                )
                cq.wait()

        def empty_polls() -> None:
            for _ in range(options.count):
                cq.poll()

        trip = best(options.runs, round_trips) / options.count
        single = best(options.runs, lambda: large_writes(1)) / writes
        write = best(options.runs, lambda: large_writes(OUTSTANDING)) / writes
        move = best(options.runs, memmoves) / writes
        row = best(options.runs, columns) / lists / ROWS
        poll = best(options.runs, empty_polls) / options.count
    print(f"round trip of 8 bytes    {trip * 1e6:8.2f} us   {1 / trip:10,.0f} a second")
    print(f"empty cq.poll()          {poll * 1e6:8.2f} us")
    print(f"write of 8 bytes         {row * 1e6:8.2f} us   in columns of {ROWS} rows")
    print(f"memmove of 1 MiB         {move * 1e6:8.2f} us   {1 / move / 1024:10.2f} GiB/s")
    for title, time_of_one in (("one at a time", single), (f"{OUTSTANDING} outstanding", write)):
        print(
            f"RDMA write of 1 MiB      {time_of_one * 1e6:8.2f} us   "
            f"{1 / time_of_one / 1024:10.2f} GiB/s   {move / time_of_one:.2f} of memmove, {title}"
        )


if __name__ == "__main__":
    main()
