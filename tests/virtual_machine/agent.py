#!/usr/bin/env python3
"""Run commands on this machine for tests that run on the other machine.

    python tests/guest.py --peer 'python tests/virtual_machine/agent.py' -- pytest -m two_hosts

For tests on one machine, give an address and a port (0 for a free one) as arguments. The agent
prints the address it listens on, and nothing else.

Each connection runs one command: it carries requests and responses, one JSON object per line, and
closing it kills the command and everything that it started. The requests, by their "do" field:

    start   argv: the command, run in the current directory with pipes for its standard streams
    until   stream ("out" or "err"), pattern, timeout: wait for a line that matches; the response's
            "line" is that line, or null at end of file or on timeout
    write   text: for its standard input
    signal  number
    wait    timeout: wait for it to exit; the response has status, out and err (status is null if
            it is still running)

A response with "error" says what was wrong with the request. Nothing is authenticated: the agent
listens only on the two machines' private network, or at the given address.

On an emulated machine Python takes seconds to start and to import the library. So `rdmapost ...`
and `python -c CODE ...` run in a fork of this process, which has imported it already; any other
command is started normally.
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
    """Collects what a command writes to one of its output streams."""

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
        """Wait for the next whole line that matches the pattern."""
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
        """Return everything that has been written."""
        with self._changed:
            return self._data.decode(errors="replace")


class Played:
    """A Python command run in a fork of this process, with the part of Popen's interface in use.

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
        """Wait for the command to exit; return its exit status, or a negative signal number."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a command", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send the command a signal, unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)


class Command(socketserver.StreamRequestHandler):
    """One connection, handled in a separate process."""

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
        """Kill the command and everything that it started."""
        if self._process is not None:
            # First the command itself, which may not lead its process group yet.
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
                # Python buffers what it prints into a pipe.
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = {"out": Stream(self._process.stdout), "err": Stream(self._process.stderr)}

    def do_until(self, stream: str, pattern: str, timeout: float) -> dict[str, Any]:
        """Wait for a line."""
        return {"line": self._streams[stream].until(pattern, timeout)}

    def do_write(self, text: str) -> None:
        """Write to the command's standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def do_signal(self, number: int) -> None:
        """Send the command a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def do_wait(self, timeout: float) -> dict[str, Any]:
        """Wait for the command to exit."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"status": None, **{name: s.text() for name, s in self._streams.items()}}
        for stream in self._streams.values():
            stream.thread.join(5)
        return {"status": status, **{name: s.text() for name, s in self._streams.items()}}


class Server(socketserver.ForkingTCPServer):
    """The agent.  It is single-threaded, so that it can fork safely."""

    allow_reuse_address = True
    max_children = 1000


if __name__ == "__main__":
    for name in ("cli.app", "cli.serve", "cli.pingpong", "_public", "connect", "pingpong"):
        importlib.import_module(f"rdmapost.{name}")
    address = (sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else ADDRESS
    with Server(address, Command) as server:
        print("agent on", ":".join(map(str, server.server_address)), flush=True)
        server.serve_forever()
