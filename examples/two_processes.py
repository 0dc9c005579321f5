"""Connect two processes over a TCP socket, then write from one into the other's memory.

The two sides exchange the addresses of their queue pairs and memory as lines of JSON. An RDMA write
does not notify the server, so the client says over TCP when it has finished.

    python examples/two_processes.py -d roce:lo              in one terminal
    python examples/two_processes.py -d roce:lo 127.0.0.1    in another

On two hosts, name an RDMA device (rxe0) or a network interface (roce:eth0), and the first host's
address. soft0, the default, exists only within its process: with it, both sides are threads.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from typing import NamedTuple

import rdmapost as rp

PORT = 18700
ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE


class Side(NamedTuple):
    """One side's resources."""

    cq: rp.CQ
    mr: rp.MR
    qp: rp.QP


@contextmanager
def opened(context: rp.Context) -> Iterator[Side]:
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 4096, ACCESS) as mr,
        rp.QP(pd, rp.QPType.RC, cq) as qp,
    ):
        yield Side(cq, mr, qp)


def send(line: BufferedRWPair, text: str) -> None:
    line.write(text.encode() + b"\n")
    line.flush()


def exchange(side: Side, line: BufferedRWPair) -> tuple[int, int]:
    """Connect to the other side's queue pair, and return the address and rkey of its memory."""
    mine = {"endpoint": str(side.qp.endpoint()), "addr": side.mr.addr, "rkey": side.mr.rkey}
    send(line, json.dumps(mine))
    theirs = json.loads(line.readline())
    side.qp.connect(rp.Endpoint.parse(theirs["endpoint"]))
    # Neither side may send before the other side's queue pair can receive.
    send(line, "ready")
    assert line.readline() == b"ready\n"
    return theirs["addr"], theirs["rkey"]


def server(context: rp.Context, listener: socket.socket) -> None:
    sock, _ = listener.accept()
    with sock, sock.makefile("rwb") as line, opened(context) as side:
        exchange(side, line)
        assert line.readline() == b"done\n"
        print("server: memory holds", bytes(side.mr.buffer[:5]))


def client(context: rp.Context, host: str, port: int) -> None:
    with (
        socket.create_connection((host, port), timeout=10) as sock,
        sock.makefile("rwb") as line,
        opened(context) as side,
    ):
        addr, rkey = exchange(side, line)
        side.mr.buffer[:5] = b"hello"
        side.qp.post_send(rp.RdmaWrite(side.mr[:5], remote_addr=addr, rkey=rkey))
        wc = side.cq.wait(1)[0].check()
        print("client:", wc.status.name)
        send(line, "done")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("host", nargs="?", help="the server's address; without it, be the server")
    parser.add_argument("-d", "--device", default="soft0")
    parser.add_argument("-p", "--port", type=int, default=PORT)
    args = parser.parse_args()
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(args.device))
        if args.host is not None:
            client(context, args.host, args.port)
            return
        listener = stack.enter_context(socket.create_server(("", args.port)))
        if context.kind != "soft":
            server(context, listener)
            return
        with ThreadPoolExecutor() as pool:
            serving = pool.submit(server, context, listener)
            client(context, "127.0.0.1", args.port)
            serving.result()


if __name__ == "__main__":
    main()
