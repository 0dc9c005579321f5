"""Commands in the other machine, by way of its agent (tests/guests/agent.py)."""

from __future__ import annotations

import json
import os
import socket
import time
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest

AGENT_PORT = 18700
DEVICE = "rxe0"
"""The device of either machine."""
GID_INDEX = "1"
"""Its GID that is the IPv4 address; the one before it is link-local."""
LIMIT = 60.0
"""Seconds after which something that must come does not come."""


class Ended(NamedTuple):
    """How a command ended: its exit status, or the negative number of a signal."""

    status: int
    out: str
    err: str


def peer_address() -> str:
    """Return the address of the other machine."""
    return os.environ["RDMAPOST_PEER"]


def wait_for_agent() -> None:
    """Wait until the other machine is there."""
    end = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((peer_address(), AGENT_PORT), 2).close()
        except OSError as error:
            if time.monotonic() > end:
                pytest.fail(f"no agent at {peer_address()}:{AGENT_PORT}: {error}")
            # It still boots: nothing tells when it is through.
            time.sleep(0.2)
        else:
            return


class Remote:
    """A command in the other machine; a context manager that kills what is left of it."""

    def __init__(self, *argv: str) -> None:
        self._socket = socket.create_connection((peer_address(), AGENT_PORT), LIMIT)
        # Longer than whatever it is asked to wait for.
        self._socket.settimeout(2 * LIMIT)
        self._file = self._socket.makefile("rb")
        try:
            self._ask("start", argv=argv)
        except BaseException:
            self.close()
            raise

    def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        self._socket.sendall(json.dumps({"do": what, **fields}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._file.readline())
        assert "error" not in answer, f"{what}: {answer['error']}"
        return answer

    def until(self, stream: str, pattern: str) -> str:
        """Wait for a line of "out" or "err" in which the pattern is found; return the line."""
        line = self._ask("until", stream=stream, pattern=pattern, timeout=LIMIT)["line"]
        if line is None:
            pytest.fail(f"no {pattern!r} came: {self._ask('wait', timeout=0)}")
        assert isinstance(line, str)
        return line

    def write(self, text: str) -> None:
        """Write to its standard input."""
        self._ask("write", text=text)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._ask("signal", number=int(number))

    def ended(self) -> Ended:
        """Wait for its end."""
        answer = self._ask("wait", timeout=LIMIT)
        assert answer["status"] is not None, f"it does not end; it said {answer}"
        return Ended(answer["status"], answer["out"], answer["err"])

    def close(self) -> None:
        """Let the agent end it."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def wait_for_port(port: int) -> None:
    """Wait until something there listens, without connecting: it may take one connection."""
    listens = f"grep -Eqs ':{port:04X} 0+:0000 0A' /proc/net/tcp /proc/net/tcp6"
    said("timeout", f"{LIMIT:g}", "sh", "-c", f"until {listens}; do sleep 0.05; done")


def said(*argv: str) -> str:
    """Run a command there that must end well; return its output."""
    with Remote(*argv) as command:
        ended = command.ended()
    assert ended.status == 0, ended
    return ended.out
