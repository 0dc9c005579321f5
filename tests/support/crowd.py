"""A program that crowds a server with connections, as fast as a separate process can.

    crowd.py HOST PORT KIND MANY SOURCES [HELLO]

Each of MANY connections, from 127.0.0.2 on if SOURCES is more than 0, is one of a stranger that

    idle     says nothing, and comes again as soon as it is cut off;
    half     says half a hello, and comes again as soon as it is cut off;
    churn    hangs up and comes again at once, as often as it can;
    guess    says HELLO with another token each time, reads the answer, and comes again.

It prints a line when all have come, and at the end of its input how often the server has cut them
off or answered, by code, and for how many seconds.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import selectors
import socket
import sys
import time


def main() -> None:
    host, port, kind, many, sources = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    hello = json.loads(sys.argv[6]) if kind == "guess" else {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    held: collections.deque[socket.socket] = collections.deque()
    told: collections.Counter[str] = collections.Counter()
    came = 0

    def come() -> None:
        nonlocal came
        came += 1
        sock = socket.socket()
        if int(sources):
            sock.bind((f"127.0.0.{2 + came % int(sources)}", 0))
        sock.connect((host, port))
        if kind == "half":
            sock.send(b'{"rdmapost":1,"type":"hello","tok')
        elif kind == "guess":
            sock.send(json.dumps({**hello, "token": f"guess {came}"}).encode() + b"\n")
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        held.append(sock)

    def go(sock: socket.socket) -> None:
        selector.unregister(sock)
        sock.close()

    for _ in range(int(many)):
        come()
    print("here", flush=True)
    started = time.monotonic()
    while True:
        for key, _ in selector.select(0 if kind == "churn" else None):
            if key.fileobj == 0:
                # What came before the end; it may be a terminal's line break.
                if not os.read(0, 4096):
                    print(json.dumps({"told": told, "seconds": time.monotonic() - started}))
                    return
                continue
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            heard = b""
            with contextlib.suppress(OSError):
                heard = sock.recv(4096)
            told[json.loads(heard)["code"] if heard else "cut off"] += 1
            held.remove(sock)
            go(sock)
            come()
        if kind == "churn":
            go(held.popleft())
            come()


if __name__ == "__main__":
    main()
