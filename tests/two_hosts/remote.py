"""Commands on the other machine, through its agent (tests/virtual_machine/agent.py)."""

from __future__ import annotations

import os
import socket
import time

import pytest
from support import LIMIT, agents

AGENT_PORT = 18700
DEVICE = "rxe0"
"""The device of both machines."""
GID_INDEX = "1"
"""The index of the device's IPv4 GID; GID 0 is link-local."""


def peer_address() -> str:
    """Return the address of the other machine."""
    return os.environ["RDMAPOST_PEER"]


def own_address(peer: str) -> str:
    """Return the address of this machine, which is one of the two."""
    return {"10.0.1.1": "10.0.1.2", "10.0.1.2": "10.0.1.1"}[peer]


class Remote(agents.Remote):
    """A command on the other machine."""

    def __init__(self, *argv: str) -> None:
        super().__init__((peer_address(), AGENT_PORT), *argv)


def wait_for_agent() -> None:
    """Wait until the other machine has booted."""
    end = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((peer_address(), AGENT_PORT), 2).close()
        except OSError as error:
            if time.monotonic() > end:
                pytest.fail(f"no agent at {peer_address()}:{AGENT_PORT}: {error}")
            # The machine is booting, and nothing announces that it is up.
            time.sleep(0.2)
        else:
            return


def wait_for_no_link() -> None:
    """Wait until the other machine is unreachable."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            socket.create_connection((peer_address(), AGENT_PORT), 1.5).close()
        except OSError:
            return
        # Nothing announces this, and each attempt starts a process on the other machine.
        time.sleep(0.1)
    pytest.fail(f"{peer_address()} can be reached for {LIMIT:g} s")


def wait_for_port(port: int) -> None:
    """Wait for a listener on the other machine without connecting: it may accept only once."""
    listens = f"grep -Eqs ':{port:04X} 0+:0000 0A' /proc/net/tcp /proc/net/tcp6"
    said("timeout", f"{LIMIT:g}", "sh", "-c", f"until {listens}; do sleep 0.05; done")


def said(*argv: str) -> str:
    """Run a command on the other machine that must succeed; return its output."""
    with Remote(*argv) as command:
        ended = command.ended()
    assert ended.status == 0, ended
    return ended.out
