"""What both sides do with their TCP sockets."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress

__all__ = [
    "LINGER_BYTES",
    "LINGER_S",
    "drain",
    "errno_of",
    "prepare",
    "reason",
    "send_all",
    "stop_listening",
]

LINGER_S = 0.5
LINGER_BYTES = 1 << 16
"""How long, and for how many bytes, to read on after the last message, so that it is not lost."""

_KEEPALIVE = (
    ("TCP_KEEPIDLE", 15),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)


def prepare(sock: socket.socket) -> None:
    """Set a socket's options for short messages and a peer that may vanish."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def errno_of(error: OSError) -> int | None:
    """Return an error's errno; None if it has none, as getaddrinfo's EAI_ codes are not."""
    return None if isinstance(error, socket.gaierror) else error.errno


def reason(error: Exception) -> str:
    """Say what went wrong, without the error's number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def stop_listening(listener: socket.socket) -> None:
    """Close a listening socket, and let others have its port.

    close() alone leaves it listening as long as the child of a fork has a copy of it.
    """
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def send_all(sock: socket.socket, data: bytes, timeout: float) -> None:
    """Send on a non-blocking socket, in bounded time.

    Raises:
        TimeoutError: the other side did not receive it.
        OSError: the connection is gone.
    """
    deadline = time.monotonic() + timeout
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            left = deadline - time.monotonic()
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            if left <= 0 or not poller.poll(left * 1000 + 1):
                raise TimeoutError(f"it did not take its answers within {timeout:g} s") from None


def drain(sock: socket.socket) -> None:
    """Shut down sending, and read on for a moment.

    A socket closed with unread bytes discards what it has not yet delivered, and with it the error
    that its peer should see.
    """
    deadline, left = time.monotonic() + LINGER_S, LINGER_BYTES
    poller = select.poll()
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        poller.register(sock, select.POLLIN)
        while left > 0 and (wait := deadline - time.monotonic()) > 0:
            if not poller.poll(wait * 1000 + 1):
                break
            data = sock.recv(4096)
            if not data:
                break
            left -= len(data)
