"""A program that floods a server with connections, as fast as a separate process can.

    connection_flood.py HOST PORT BEHAVIOUR COUNT SOURCES [HELLO]

Opens COUNT connections (from 127.0.0.2 and up, if SOURCES is more than 0). By BEHAVIOUR, each one

    idle     sends nothing, and reconnects as soon as it is closed;
    half     sends half a hello, and reconnects as soon as it is closed;
    churn    disconnects and reconnects at once, as often as it can;
    guess    sends HELLO with another token each time, reads the answer, and reconnects.

Prints a line when all are connected. At end of file on its input, prints how many times the
server closed or answered them, by code, and the elapsed seconds.
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
    host, port, behaviour, count, sources = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    hello = json.loads(sys.argv[6]) if behaviour == "guess" else {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    held: collections.deque[socket.socket] = collections.deque()
    answers: collections.Counter[str] = collections.Counter()
    opened = 0

    def reconnect() -> None:
        nonlocal opened
        opened += 1
        sock = socket.socket()
        if int(sources):
            sock.bind((f"127.0.0.{2 + opened % int(sources)}", 0))
        sock.connect((host, port))
        if behaviour == "half":
            sock.send(b'{"rdmapost":2,"type":"hello","tok')
        elif behaviour == "guess":
            sock.send(json.dumps({**hello, "token": f"guess {opened}"}).encode() + b"\n")
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        held.append(sock)

    def disconnect(sock: socket.socket) -> None:
        selector.unregister(sock)
        sock.close()

    for _ in range(int(count)):
        reconnect()
    print("connected", flush=True)
    started = time.monotonic()
    while True:
        for key, _ in selector.select(0 if behaviour == "churn" else None):
            if key.fileobj == 0:
                # The input before end of file; it may be a terminal's line break.
                if not os.read(0, 4096):
                    print(json.dumps({"answers": answers, "seconds": time.monotonic() - started}))
                    return
                continue
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            received = b""
            with contextlib.suppress(OSError):
                received = sock.recv(4096)
            answers[json.loads(received)["code"] if received else "closed"] += 1
            held.remove(sock)
            disconnect(sock)
            reconnect()
        if behaviour == "churn":
            disconnect(held.popleft())
            reconnect()


if __name__ == "__main__":
    main()
