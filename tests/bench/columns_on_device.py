"""Compare columns with C on a device that executes them: lists of small RDMA writes.

Run it as ``python tests/bench/columns_on_device.py -d NAME``, and in the virtual machine as
``tests/guest.py --icount -- python tests/bench/columns_on_device.py -d rxe0``: with --icount the
figures are instructions, because an emulator's time per instruction depends on the program.

A program in C and this one take turns.  Each round posts a list of 8-byte writes,
of which the last is signaled, and polls until its completion is there; both queue
pairs are on the same device, in one process.  The figures are nanoseconds of elapsed time per
row; each program's is the median of its runs.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import rdmapost as rp

HERE = pathlib.Path(__file__).parent
ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
BLOCK = 8


class OfC:
    """The program in C, which runs once for each run()."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        return float(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()
        if self._process.returncode:
            raise SystemExit(f"the program in C ended with {self._process.returncode}")


class OfPython:
    """The same lists, posted with post_columns."""

    def __init__(self, context: rp.Context, stack: contextlib.ExitStack, rows: int) -> None:
        enter = stack.enter_context
        pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context, 2 * rows))
        self.mr = enter(rp.MR(pd, 2 * rows * BLOCK, ACCESS))
        self.qp = enter(rp.QP(pd, rp.QPType.RC, self.cq, max_send_wr=rows))
        far = enter(rp.QP(pd, rp.QPType.RC, self.cq))
        self.qp.connect(far.endpoint())
        far.connect(self.qp.endpoint())
        self.rows = rows
        self.index = array.array("Q", [7 * i % rows for i in range(rows)])
        self.mr.buffer[: rows * BLOCK] = b"\x5a" * rows * BLOCK

    def run(self, rounds: int) -> float:
        qp, cq, mr, rows, index = self.qp, self.cq, self.mr, self.rows, self.index
        half = rows * BLOCK
        here, there = mr.blocks(index, BLOCK), rp.Blocks(mr.addr + half, index, BLOCK)
        start = time.perf_counter_ns()
        for _ in range(rounds):
            qp.post_columns(rp.RdmaWrite, here, remote_addr=there, rkey=mr.rkey, signal_every=rows)
            while not (found := cq.poll(1)):
                pass
            found[0].check()
        elapsed = time.perf_counter_ns() - start
        assert mr.buffer[half:] == b"\x5a" * half
        return elapsed / rounds / rows


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-d", "--device", help="default: the first with an active port")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=200, help="lists posted in a run")
    parser.add_argument("--runs", type=int, default=9, help="runs of each program")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        compiled = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "columns"
        source = HERE / "columns_on_device.c"
        compiler = [os.environ.get("CC", "cc"), "-O2", "-std=gnu11", "-Wall", "-Wextra"]
        subprocess.run([*compiler, source, "-o", compiled, "-libverbs"], check=True)
        context = stack.enter_context(rp.open_device(options.device))
        gid_index = context.choose_gid().gid_index
        print(f"ns per row on {context.name}     C   columns   ratio")
        for rows in options.rows:
            of_python = OfPython(context, stack, rows)
            of_c = OfC([str(n) for n in (compiled, context.name, gid_index, rows, options.rounds)])
            # Taking turns, both meet the same load of the machine.
            times = [(of_c.run(), of_python.run(options.rounds)) for _ in range(options.runs)]
            of_c.end()
            c, python = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"lists of {rows:<8} {c:10.0f} {python:9.0f} {python / c:7.3f}")


if __name__ == "__main__":
    main()
