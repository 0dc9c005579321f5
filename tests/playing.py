"""``rdmapost pingpong`` as a process, and the ports of this machine: helpers of its tests."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

__all__ = ["HOST", "LIMIT", "free_port", "listening", "start", "wait_for_port"]

HOST = "127.0.0.1"
LIMIT = 60
"""Seconds after which something that must come does not come."""

COMMAND = "from rdmapost.cli import main; main()"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def wait_for_port(port: int) -> None:
    """Wait until somebody listens, without connecting: it may take one connection."""
    end = time.monotonic() + LIMIT
    state = f":{port:04X} "
    while time.monotonic() < end:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(FileNotFoundError):
                for line in Path(table).read_text().splitlines()[1:]:
                    # Local address and state, 0A for one that listens.
                    if state in line.split()[1] + " " and line.split()[3] == "0A":
                        return
        time.sleep(0.02)
    pytest.fail(f"nobody listens on {port}")


def start(*args: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, "pingpong", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def listening(server: subprocess.Popen[str]) -> str:
    """Wait until a server says that it listens; return the port."""
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.match(r"waiting for a client on \S+:(\d+)$", line):
            return match[1]
    pytest.fail(f"the server ended with {server.wait()}")
