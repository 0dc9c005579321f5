"""Commands that an agent runs (tests/virtual_machine/agent.py), on this machine or on another."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest

from support import LIMIT

__all__ = ["Ended", "Remote", "local_agent"]


class Ended(NamedTuple):
    """How a command ended: its exit status, or a negative signal number."""

    status: int
    out: str
    err: str


class Remote:
    """A command that an agent runs; a context manager that kills it if it is still running.

    Args:
        agent: where the agent is.
        argv: the command.
    """

    def __init__(self, agent: tuple[str, int], *argv: str) -> None:
        self._socket = socket.create_connection(agent, LIMIT)
        # Longer than any wait requested of the agent.
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
        """Wait for a line of "out" or "err" that matches the pattern; return the line."""
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
        """Wait for it to exit."""
        answer = self._ask("wait", timeout=LIMIT)
        assert answer["status"] is not None, f"the command did not exit: {answer}"
        return Ended(answer["status"], answer["out"], answer["err"])

    def close(self) -> None:
        """Make the agent kill it."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def local_agent(
    address: str = "127.0.0.1", wrapper: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Run an agent on this machine; yield its address.

    Its commands skip Python's start-up, which takes seconds on an emulated machine.

    Args:
        address: where it listens.
        wrapper: a command that runs it, such as ``ip netns exec NAME``.
    """
    program = Path(__file__).parent.parent / "virtual_machine" / "agent.py"
    with subprocess.Popen(
        [*wrapper, sys.executable, "-P", str(program), address, "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield address, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()
