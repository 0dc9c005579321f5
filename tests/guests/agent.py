#!/usr/bin/env python3
"""Run commands in this machine for the tests in the other one.

    python tests/guest.py --peer 'python tests/guests/agent.py' -- pytest -m two_hosts

A connection is a command: it brings requests and takes answers, one JSON object a line, and when
it is closed the command is killed, with what it started. The requests, by their "do":

    start   argv: the command, run in the current directory with its input and outputs in pipes
    until   stream ("out" or "err"), pattern, timeout: wait for a line in which it is found; the
            answer's "line" is that line, or null when the command is through or the time is up
    write   text: for its standard input
    signal  number
    wait    timeout: for its end; the answer has status, out and err (status null: it still runs)

An answer with "error" says what was wrong with the request. There is no protection at all: it
listens only on the network of the two machines, which nobody else is on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socketserver
import subprocess
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


class Command(socketserver.StreamRequestHandler):
    """One connection."""

    _process: subprocess.Popen[bytes] | None = None
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):
            super().finish()

    def do_start(self, argv: list[str]) -> None:
        """Start the command."""
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
        self._streams = {
            "out": Stream(self._process.stdout),
            "err": Stream(self._process.stderr),
        }

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


class Server(socketserver.ThreadingTCPServer):
    """The agent."""

    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    with Server(ADDRESS, Command) as server:
        server.serve_forever()
