"""Time roce between two processes: round trips beside plain UDP, bandwidth, and a busy target.

Run it as ``python tests/bench/roce.py``.  The second process is this program with ``--far``; both
exchange a line for each case on its standard input and output.

- A round trip is a SEND of 64 bytes each way, both sides blocking in ``cq.wait`` or both polling,
  and is compared with datagrams of that size between two plain Python processes.
- The bandwidth is that of RDMA writes of 1 MiB, one at a time, at two path MTUs.
- The sleeping target does nothing; its device's thread answers.  The busy target runs a Python
  loop, which that thread has to interrupt.
- Many queue pairs on one device each complete a write.

``--device NAME`` puts both processes on another device, for comparison: with Soft-RoCE in the
virtual machine, ``tests/guest.py -- python tests/bench/roce.py --device rxe0``.

A figure that misses the project's goal is marked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import rdmapost as rp

NEAR, FAR = "127.0.0.91", "127.0.0.92"
"""The addresses of the two processes."""
SIZE = 64
MIB = 1 << 20
ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
QUEUE_PAIRS = 256
BLOCKING, POLLING, FAST, SLOW, BUSY_MS = 6, 5, 400, 200, 10
"""Goals: times a UDP round trip, MB/s at MTU 4096 and 1024, milliseconds."""


class Side:
    """One end: a device, and queue pairs that share a CQ and a region."""

    def __init__(self, stack: ExitStack, device: str, count: int = 1) -> None:
        enter = stack.enter_context
        context = enter(rp.open_device(device))
        pd, self.cq = enter(rp.PD(context)), enter(rp.CQ(context, 2 * QUEUE_PAIRS))
        self.mr = enter(rp.MR(pd, MIB, ALL))
        self.qps = [enter(rp.QP(pd, rp.QPType.RC, self.cq)) for _ in range(count)]
        self.offer: dict[str, Any] = {
            "endpoints": [str(qp.endpoint()) for qp in self.qps],
            "remote_addr": self.mr.addr,
            "rkey": self.mr.rkey,
        }

    def connect(self, offer: dict[str, Any], mtu: int) -> None:
        for qp, endpoint in zip(self.qps, offer["endpoints"], strict=True):
            qp.connect(replace(rp.Endpoint.parse(endpoint), mtu=rp.MTU[f"MTU_{mtu}"]))

    def receive(self) -> None:
        self.qps[0].post_recv(rp.RecvWR(self.mr[SIZE : 2 * SIZE]))

    def send(self) -> None:
        self.qps[0].post_send(rp.Send(self.mr[:SIZE]))

    def done(self, count: int, polling: bool) -> None:
        """Wait for completions."""
        while count and polling:
            for wc in self.cq.poll(count):
                wc.check()
                count -= 1
        if count:
            for wc in self.cq.wait(count, timeout=60):
                wc.check()


def say(stream: Any, answer: Any) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


# ---- the second process ---------------------------------------------------------------------


def far(device: str) -> None:
    """Run the case that each line of standard input names."""
    for line in sys.stdin:
        case = json.loads(line)
        with ExitStack() as stack:
            if case["do"] == "datagrams":
                echo(case["count"])
                continue
            side = Side(stack, device, case["queue_pairs"])
            side.connect(case["offer"], case["mtu"])
            side.receive()
            say(sys.stdout, side.offer)
            if case["do"] == "round trips":
                for _ in range(case["count"]):
                    side.done(1, case["polling"])
                    side.receive()
                    side.send()
                    side.done(1, case["polling"])
            elif case["do"] == "busy":
                end = time.monotonic() + case["seconds"]
                while time.monotonic() < end:
                    sum(range(1000))
            sys.stdin.readline()


def echo(count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((FAR, 0))
        say(sys.stdout, sock.getsockname()[1])
        for _ in range(count):
            data, sender = sock.recvfrom(2048)
            sock.sendto(data, sender)


# ---- the first ----------------------------------------------------------------------------------


class Peer:
    """The second process.

    Args:
        cpu: the CPU that it runs on.
        device: this process's device.
        far_device: that process's.
    """

    def __init__(self, cpu: int, device: str, far_device: str) -> None:
        self._device = device
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--far", str(cpu), "--device", far_device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **case: Any) -> Any:
        say(self._process.stdin, case)
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def go_on(self) -> None:
        say(self._process.stdin, None)

    def close(self) -> None:
        self._process.communicate(timeout=60)

    @contextlib.contextmanager
    def connected(
        self, do: str, mtu: int = 4096, queue_pairs: int = 1, **case: Any
    ) -> Iterator[tuple[Side, dict[str, Any]]]:
        with ExitStack() as stack:
            side = Side(stack, self._device, queue_pairs)
            offer = self.ask(do=do, offer=side.offer, mtu=mtu, queue_pairs=queue_pairs, **case)
            side.connect(offer, mtu)
            yield side, {"remote_addr": offer["remote_addr"], "rkey": offer["rkey"]}
            self.go_on()


def datagrams(peer: Peer, count: int) -> float:
    """Return the seconds of a round trip of plain datagrams."""
    port = peer.ask(do="datagrams", count=count)
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((NEAR, 0))
        sock.connect((FAR, port))
        for _ in range(count):
            start = time.perf_counter()
            sock.send(bytes(SIZE))
            sock.recv(2048)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def round_trips(peer: Peer, count: int, polling: bool) -> float:
    """Return the seconds of a round trip of SENDs."""
    times = []
    with peer.connected("round trips", count=count, polling=polling) as (side, _):
        for _ in range(count):
            start = time.perf_counter()
            side.receive()
            side.send()
            side.done(2, polling)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth(peer: Peer, mtu: int, count: int) -> float:
    """Return the MB/s of RDMA writes of 1 MiB."""
    with peer.connected("nothing", mtu) as (side, target):
        write = rp.RdmaWrite(side.mr[:], **target)
        return MIB / 1e6 / statistics.median([timed(side, write) for _ in range(count)])


def sleeping_target(peer: Peer, count: int) -> list[float]:
    """Return the seconds for each write to a process that sleeps."""
    with peer.connected("nothing") as (side, target):
        write = rp.RdmaWrite(side.mr[:SIZE], **target)
        return [timed(side, write) for _ in range(count)]


def busy_target(peer: Peer, seconds: float) -> list[float]:
    """Return the seconds for each write to a process that runs a Python loop."""
    times = []
    with peer.connected("busy", seconds=seconds) as (side, target):
        write = rp.RdmaWrite(side.mr[:SIZE], **target)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            times.append(timed(side, write))
    return times


def timed(side: Side, write: rp.RdmaWrite) -> float:
    """Return the seconds of a write."""
    start = time.perf_counter()
    side.qps[0].post_send(write)
    side.done(1, False)
    return time.perf_counter() - start


def many(peer: Peer) -> float:
    """Return the seconds for a write on each of many queue pairs."""
    with peer.connected("nothing", queue_pairs=QUEUE_PAIRS) as (side, target):
        start = time.perf_counter()
        for qp in side.qps:
            qp.post_send(rp.RdmaWrite(side.mr[:SIZE], **target))
        side.done(QUEUE_PAIRS, False)
        return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--far", type=int, metavar="CPU", help=argparse.SUPPRESS)
    parser.add_argument("--device", metavar="NAME", help="of both processes")
    parser.add_argument("--count", type=int, default=2000, help="round trips")
    parser.add_argument("--writes", type=int, default=100, help="large writes")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the busy target")
    options = parser.parse_args()
    if options.far is not None:
        os.sched_setaffinity(0, {options.far})
        far(options.device)
        return
    # Pin each process to its own CPU, as if they were on two machines.
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    near_device = options.device or f"roce:{NEAR}"
    peer = Peer(max(cpus), near_device, options.device or f"roce:{FAR}")
    try:
        udp = datagrams(peer, options.count)
        print(f"{'UDP round trip of 64 bytes':44} {udp * 1e6:9.1f} us")
        for polling, goal in ((False, BLOCKING), (True, POLLING)):
            took = round_trips(peer, options.count, polling)
            name = f"SEND round trip, both sides {'polling' if polling else 'blocking'}"
            row(name, took * 1e6, "us", took / udp <= goal, f"{took / udp:.1f} x UDP", goal)
        for mtu, goal in ((4096, FAST), (1024, SLOW)):
            rate = bandwidth(peer, mtu, options.writes)
            row(f"RDMA_WRITE of 1 MiB, path MTU {mtu}", rate, "MB/s", rate >= goal, "", goal)
        took = statistics.median(sleeping_target(peer, options.count))
        print(f"{'RDMA_WRITE to a sleeping target':44} {took * 1e6:9.1f} us")
        times = busy_target(peer, options.seconds)
        middle = statistics.median(times) * 1e3
        more = f"slowest of {len(times)}: {max(times) * 1e3:.0f} ms"
        row("RDMA_WRITE to a busy target", middle, "ms", middle <= BUSY_MS, more, BUSY_MS)
        took = many(peer)
        print(f"{f'a write on each of {QUEUE_PAIRS} queue pairs':44} {took * 1e3:9.1f} ms")
    finally:
        peer.close()


def row(name: str, figure: float, unit: str, reached: bool, more: str, goal: int) -> None:
    missed = "" if reached else f"  missed: goal {goal}"
    print(f"{name:44} {figure:9.1f} {unit:5} {more}{missed}")


if __name__ == "__main__":
    main()
