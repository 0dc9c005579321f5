#!/usr/bin/env python3
"""Run commands in this machine for the tests in the other one.

    python tests/guest.py --peer 'python tests/guests/agent.py' -- pytest -m two_hosts

Or for tests on the machine itself, with an address and a port (0 for a free one) as arguments. It
says where it listens, and nothing else.

A connection is a command: it brings requests and takes answers, one JSON object a line, and when
it is closed the command is killed, with what it started. The requests, by their "do":

    start   argv: the command, run in the current directory with its input and outputs in pipes
    until   stream ("out" or "err"), pattern, timeout: wait for a line in which it is found; the
            answer's "line" is that line, or null when the command is through or the time is up
    write   text: for its standard input
    signal  number
    wait    timeout: for its end; the answer has status, out and err (status null: it still runs)

An answer with "error" says what was wrong with the request. There is no protection at all: it
listens only on the network of the two machines, which nobody else is on, or where it is told to.

On an emulated machine Python takes seconds to start and to import the library. So `rdmapost ...`
and `python -c CODE ...` are played by a copy of this process, in which all that is done already;
any other command is started as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from typing import IO, Any

ADDRESS = ("10.0.1.2", 18700)


class Stream:
    """What a command writes to one of its outputs, as it comes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._data = b""
        self._seen = 0
        self._through = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self.thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 65536):
                with self._changed:
                    self._data += data
                    self._changed.notify_all()
        with self._changed:
            self._through = True
            self._changed.notify_all()

    def until(self, pattern: str, timeout: float) -> str | None:
        """Wait for a whole line with the pattern, after those seen before."""
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                while (stop := self._data.find(b"\n", self._seen)) >= 0:
                    line = self._data[self._seen : stop].decode(errors="replace")
                    self._seen = stop + 1
                    if re.search(pattern, line):
                        return line
                left = end - time.monotonic()
                if self._through or left <= 0:
                    return None
                self._changed.wait(left)

    def text(self) -> str:
        """Return all of it."""
        with self._changed:
            return self._data.decode(errors="replace")


class Played:
    """A command written in Python, in a copy of this process; what there is to it is Popen's.

    Args:
        argv: ``rdmapost ...``, or ``python -c CODE ...``.
    """

    def __init__(self, argv: list[str]) -> None:
        theirs, ours = zip(
            *(os.pipe() if i == 0 else os.pipe()[::-1] for i in range(3)), strict=True
        )
        self._process = multiprocessing.get_context("fork").Process(
            target=self._play, args=(argv, theirs, ours)
        )
        self._process.start()
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin = os.fdopen(ours[0], "wb")
        self.stdout, self.stderr = (os.fdopen(descriptor, "rb") for descriptor in ours[1:])
        assert self._process.pid is not None
        self.pid = self._process.pid

    @staticmethod
    def _play(argv: list[str], theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
        os.setsid()
        for number, descriptor in enumerate(theirs):
            os.dup2(descriptor, number)
        for descriptor in (*theirs, *ours):
            os.close(descriptor)
        sys.stdin = os.fdopen(0)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1) for number in (1, 2))
        if argv[0] == "rdmapost":
            sys.argv = argv
            importlib.import_module("rdmapost.cli").main()
        else:
            sys.argv = ["-c", *argv[3:]]
            exec(argv[2], {"__name__": "__main__"})

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status, or the negative number of a signal."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a command", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)


class Command(socketserver.StreamRequestHandler):
    """One connection, in a process of its own."""

    _process: subprocess.Popen[bytes] | Played | None = None
    _streams: dict[str, Stream]

    def handle(self) -> None:
        """Answer requests until the connection ends."""
        for line in self.rfile:
            try:
                request = json.loads(line)
                answer = getattr(self, f"do_{request.pop('do')}")(**request) or {}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    def finish(self) -> None:
        """Leave nothing behind."""
        if self._process is not None:
            # The command, which may not lead its group yet, and all that it has started.
            self._process.send_signal(signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):
            super().finish()

    def do_start(self, argv: list[str]) -> None:
        """Start the command."""
        if argv[0] == "rdmapost" or argv[:2] == ["python", "-c"]:
            self._process = Played(argv)
        else:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # The stock programs write what they say at once only to a terminal; Python asks.
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = {"out": Stream(self._process.stdout), "err": Stream(self._process.stderr)}

    def do_until(self, stream: str, pattern: str, timeout: float) -> dict[str, Any]:
        """Wait for a line."""
        return {"line": self._streams[stream].until(pattern, timeout)}

    def do_write(self, text: str) -> None:
        """Write to its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def do_signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def do_wait(self, timeout: float) -> dict[str, Any]:
        """Wait for its end."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"status": None, **{name: s.text() for name, s in self._streams.items()}}
        for stream in self._streams.values():
            stream.thread.join(5)
        return {"status": status, **{name: s.text() for name, s in self._streams.items()}}


class Server(socketserver.ForkingTCPServer):
    """The agent.  It has one thread, so that copies of it are whole."""

    allow_reuse_address = True
    max_children = 1000


if __name__ == "__main__":
    for name in ("cli.app", "cli.serve", "cli.pingpong", "_public", "connect", "pingpong"):
        importlib.import_module(f"rdmapost.{name}")
    address = (sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else ADDRESS
    with Server(address, Command) as server:
        print("agent on", ":".join(map(str, server.server_address)), flush=True)
        server.serve_forever()
