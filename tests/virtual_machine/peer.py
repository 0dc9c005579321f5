"""The second machine, run by another guest.py, and the network between the two machines.

The network is a pair of Unix datagram sockets, with one frame per datagram. The machines can start
in either order, and boot again; when one is slow the other blocks, so no frame is lost.
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
"""The first three numbers of the addresses; the last is the host's, 1 or 2."""

# guest.py's exit statuses for a machine that timed out, did not boot, or crashed.
_NO_MACHINE = (124, 125, 126)


class PeerError(Exception):
    """The second machine failed; exit with ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the peer ended with {status}")
        self.status = status


def network_options(directory: Path, host: int) -> str:
    """Return the QEMU options that connect host 1 or 2 to the network."""
    sockets = (
        f"{end}.type=unix,{end}.path={directory / str(number)}"
        for end, number in (("local", host), ("remote", 3 - host))
    )
    # An empty romfile: the default boot ROM is in a separate package.
    return (
        f"-netdev dgram,id=guestnet,{','.join(sockets)} "
        f"-device virtio-net-pci,netdev=guestnet,mac=52:54:00:00:01:0{host},romfile="
    )


class Peer:
    """The second machine; a context manager that stops it.

    Args:
        command: what to run there, split as a shell would.
        options: options for its guest.py.
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
            # Ctrl-C in the terminal goes only to the first guest.py, which stops this one.
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
        """Return the descriptor to watch: readable when there is output for take()."""
        return self._output

    def take(self) -> bool:
        """Forward the peer's output; return whether there may be more."""
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
        """Check how the second machine ended; if only its command failed, report that.

        Raises:
            PeerError: the machine did not boot, crashed or timed out.
        """
        if status := self._process.wait(10):
            self._say([b"ended with %d" % status])
        if status in _NO_MACHINE:
            raise PeerError(status)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        # Nothing reads its output any more, so it must not block on writing.
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.terminate()
        try:
            # On SIGTERM it shuts down its machine, including QEMU.
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()
