"""Helpers for the ping-pong tests: both sides in this process, or the command in another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType
from rdmapost.pingpong import Pingpong, Result, listen
from support.ports import HOST

COMMAND = "from rdmapost.cli import main; main()"
TYPES = pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD], ids=lambda t: t.name)
MESSAGE = b"0000:000011:abcdef:00000000000000000000ffff0a000001\0"
"""What ibv_rc_pingpong sends for QP 0x11 with the GID ::ffff:10.0.0.1."""

IN_ONE_PROCESS = {"events": True, "timeout": 20.0}
"""Sleep when both sides are in this process: two threads that poll slow each other down."""


class Ends:
    """The outcome on each side: a Result or an exception."""

    client: Any = None
    server: Any = None


def run_pair(
    context: rp.Context,
    qp_type: QPType = QPType.RC,
    client: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **both: Any,
) -> Ends:
    """Run each side in its own thread, and return both outcomes."""
    ends = Ends()
    options = {**IN_ONE_PROCESS, "qp_type": qp_type, **both}
    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            try:
                with Pingpong(context, **{**options, **(server or {})}) as side:
                    ends.server = side.run_server(listener, timeout=20)
            except Exception as error:
                ends.server = error
                listener.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with Pingpong(context, **{**options, **(client or {})}) as side:
                ends.client = side.run_client(HOST, port)
        except Exception as error:
            ends.client = error
        thread.join(60)
    assert not thread.is_alive()
    return ends


def done(ends: Ends) -> tuple[Result, Result]:
    """Return both results of a successful run."""
    for end in (ends.client, ends.server):
        if isinstance(end, Exception):
            raise end
    return ends.client, ends.server


def start(*args: str) -> subprocess.Popen[str]:
    """Start the command in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, "pingpong", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def listening(server: subprocess.Popen[str]) -> str:
    """Wait until a server reports that it is listening; return the port."""
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.match(r"waiting for a client on \S+:(\d+)$", line):
            return match[1]
    pytest.fail(f"the server ended with {server.wait()}")
