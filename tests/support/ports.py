"""Local ports: free ones, ones in use, and a test's listener."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import LIMIT

HOST = "127.0.0.1"


def free_port() -> int:
    """Return the number of a port with no listener, which no one gets by asking for any port."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port


def wait_for_port(port: int, server: subprocess.Popen[str] | None = None) -> None:
    """Wait for a listener without connecting: it may accept only one connection.

    Args:
        port: its port.
        server: the program that is to listen; fail at once if it ends.
    """
    end = time.monotonic() + LIMIT
    state = f":{port:04X} "
    while time.monotonic() < end:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(FileNotFoundError):
                for line in Path(table).read_text().splitlines()[1:]:
                    # Local address and state; 0A is a listening socket.
                    if state in line.split()[1] + " " and line.split()[3] == "0A":
                        return
        if server is not None and server.poll() is not None:
            pytest.fail(f"the server has ended: {server.communicate()}")
        time.sleep(0.02)
    pytest.fail(f"nothing listens on {port}")


@contextlib.contextmanager
def impostor(respond: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Listen as a foreign service that sends this to the first client; yield the address."""
    with socket.create_server((HOST, 0)) as listener:

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(LIMIT)
                respond(sock)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            thread.join()


def read_to_end(sock: socket.socket) -> None:
    """Read until the other side disconnects."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
