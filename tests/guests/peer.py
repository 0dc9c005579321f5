"""The second machine of guest.py: a guest.py of its own, and the network between the two.

The network is a pair of Unix datagram sockets, one frame a datagram: neither machine has to be
there first, either may boot twice, and when one is slow the other waits, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["NETWORK", "Peer", "PeerError", "network_options"]

NETWORK = "10.0.1."
"""The hosts are 1 and 2."""

# The exit statuses of guest.py for a machine that ran out of time, did not boot, or went down.
_NO_MACHINE = (124, 125, 126)


class PeerError(Exception):
    """The second machine is not there; the status is the one to exit with."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the peer ended with {status}")
        self.status = status


def network_options(directory: Path, host: int) -> str:
    """Return the options of QEMU that put host 1 or 2 on the network."""
    sockets = (
        f"{end}.type=unix,{end}.path={directory / str(number)}"
        for end, number in (("local", host), ("remote", 3 - host))
    )
    # Without romfile it looks for a boot ROM, which is in a package of its own.
    return (
        f"-netdev dgram,id=guestnet,{','.join(sockets)} "
        f"-device virtio-net-pci,netdev=guestnet,mac=52:54:00:00:01:0{host},romfile="
    )


class Peer:
    """The second machine; a context manager that ends it.

    Args:
        command: what to run there, as a shell would read it.
        options: the options of guest.py for it.
    """

    def __init__(self, command: str, options: list[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rdmapost-network-")
        self._line = b""
        self._process = subprocess.Popen(
            [
                sys.executable,
                sys.argv[0],
                *options,
                "--network",
                self._directory.name,
                "--host",
                "2",
                "--",
                *shlex.split(command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A Ctrl-C on the terminal is for the first; this one is ended by it.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)

    @property
    def network(self) -> Path:
        """The directory of the network's sockets."""
        return Path(self._directory.name)

    def fileno(self) -> int:
        """Return the descriptor to watch: readable when there is something to take."""
        return self._output

    def take(self) -> bool:
        """Pass on what the peer says; return whether there may be more."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 65536):
                *lines, self._line = (self._line + data).split(b"\n")
                self._say(lines)
            self._say([self._line] if self._line else [])
            self._line = b""
            return False
        return True

    def _say(self, lines: list[bytes]) -> None:
        for line in lines:
            print("peer:", line.decode(errors="replace"), file=sys.stderr, flush=True)

    def check(self) -> None:
        """See how it ended; a command that failed there is only told.

        Raises:
            PeerError: it was the machine that did not boot, went down, or ran out of time.
        """
        if status := self._process.wait(10):
            self._say([b"ended with %d" % status])
        if status in _NO_MACHINE:
            raise PeerError(status)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        # Nobody reads on, and it must not wait for that.
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.terminate()
        try:
            # It ends its machine, QEMU included.
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()
