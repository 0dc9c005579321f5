"""TCP for the tools: addresses as text, listening and connecting, and their errors."""

from __future__ import annotations

# Import this now, not at the first getaddrinfo(): Python 3.12 and 3.13 crash if an import
# runs out of memory.
import encodings.idna  # noqa: F401
import errno
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import RdmaError

LINGER_S = 0.5
LINGER_BYTES = 1 << 16
"""After sending the last message, how long and how many bytes to keep reading: closing a socket
with unread data resets the connection, and the peer may lose the message."""

_LOOK_UP_S = 5.0
_REMEDIES = {
    errno.EADDRINUSE: "; give another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "; give an address of this machine ('ip -br addr')",
}
"""The remedies for addresses that cannot be listened on, by errno."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


_unshared: set[weakref.ref[socket.socket]] = set()
"""The sockets that the child of a fork closes at once."""


def unshare(sock: socket.socket) -> None:
    """Have a forked child close its copy of a socket at once.

    A signal handler may fork in the middle of a request. If the child returns to the request, it
    must not read the parent's answers, or shut the connection down as it unwinds.
    """
    _unshared.add(weakref.ref(sock, _unshared.discard))


def _close_unshared() -> None:
    for reference in _unshared.copy():
        if (sock := reference()) is not None:
            with suppress(OSError):
                sock.close()


os.register_at_fork(after_in_child=_close_unshared)


class TCPError(RdmaError, OSError):
    """A host that cannot be found, or an address that cannot be listened on."""

    def __init__(self, text: str, errno: int | None = None) -> None:
        super().__init__(text)
        self.errno = errno


class TCPTimeout(TCPError, TimeoutError):
    """The name service did not answer."""


def errno_of(error: OSError) -> int | None:
    """Return an error's errno, or None: getaddrinfo's EAI_ codes are not errnos."""
    return None if isinstance(error, socket.gaierror) else error.errno


def reason(error: Exception) -> str:
    """Say what went wrong, without the error's number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def reason_at(where: str, error: OSError) -> str:
    """Say what went wrong at an address that ``name_of`` names, with a hint if there is one."""
    text = reason(error)
    if error.errno == errno.EINVAL and where.lower().startswith("[fe80:") and "%" not in where:
        text += "; a link-local address needs its interface, as in fe80::1%eth0"
    return text


def name_of(address: tuple[Any, ...]) -> str:
    """Return a socket's address as ``HOST:PORT``, an IPv6 address in brackets.

    Args:
        address: as ``getsockname()`` returns it.
    """
    host, port = address[:2]
    # How an IPv6 socket shows an IPv4 peer.
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(host: str, port: int, timeout: float) -> list[tuple[Any, ...]]:
    """Look up a host in bounded time; return getaddrinfo's result."""
    found: list[Any] = []
    # An address needs no name service.
    _look_up(found, host, port, socket.AI_NUMERICHOST)
    if not isinstance(found[0], list):
        del found[:]
        # The resolver's own time limits are too long.
        thread = threading.Thread(
            target=_look_up, args=(found, host, port), name=f"look up {host}", daemon=True
        )
        thread.start()
        thread.join(timeout)
    if not found:
        raise TCPTimeout(f"host {host}: the name service did not answer within {timeout:g} s")
    if isinstance(found[0], list):
        return found[0]
    error = found[0]
    if isinstance(error, socket.gaierror):
        # The resolver does not report that it lacked file descriptors; creating a socket does.
        try:
            socket.socket().close()
        except OSError as cause:
            error = cause
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
        raise TCPError(f"host {host} cannot be looked up: {reason(error)}", error.errno)
    raise TCPError(f"host {host} cannot be found: {reason(error)}")


def _look_up(found: list[Any], host: str, port: int, flags: int = 0) -> None:
    """Put getaddrinfo's result, or its exception, into the list."""
    try:
        found[:] = [socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
    except (OSError, UnicodeError) as error:
        found[:] = [error]


def _wait_writable(sock: socket.socket, timeout: float) -> bool:
    """Wait until a socket can send, but no longer than timeout; return whether it can."""
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    return bool(poller.poll(timeout * 1000))


def dial(
    host: str,
    port: int,
    timeout: float,
    wait_writable: Callable[[socket.socket, float], bool] = _wait_writable,
) -> socket.socket:
    """Connect to a host, trying all of its addresses; return a non-blocking socket.

    Args:
        host, port: the address to connect to.
        timeout: seconds, for all of the host's addresses.
        wait_writable: waits up to a given number of seconds for a socket to become writable, and
            returns whether it did; may raise to give up.

    Raises:
        TCPError, TCPTimeout: the host cannot be found.
        OSError: it cannot be reached; this is the error from the last address tried.
    """
    deadline = time.monotonic() + timeout
    last: OSError = OSError(f"{host} has no address")
    for family, socket_type, proto, _, address in _resolve(host, port, timeout):
        try:
            sock = socket.socket(family, socket_type, proto)
        except OSError as error:
            last = error
            continue
        try:
            unshare(sock)
            wrong = _connect(sock, address, deadline, wait_writable)
            if wrong is None:
                prepare(sock)
                return sock
        except BaseException:
            sock.close()
            raise
        sock.close()
        last = wrong
    raise last


def _connect(
    sock: socket.socket,
    address: tuple[Any, ...],
    deadline: float,
    wait_writable: Callable[[socket.socket, float], bool],
) -> OSError | None:
    """Connect a socket and leave it non-blocking; return the error, or None.

    An OSError that this raises comes from a signal handler.
    """
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        if not wait_writable(sock, max(0.001, deadline - time.monotonic())):
            return TimeoutError("timed out")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return OSError(code, os.strerror(code)) if code else None


def listen(host: str | None, port: int, backlog: int) -> socket.socket:
    """Open a non-blocking listening socket, on all local addresses if host is None.

    Raises:
        TCPError, TCPTimeout: the host cannot be found, or listening on the address fails.
    """
    if host is None:
        if socket.has_dualstack_ipv6():
            with suppress(OSError):
                return _listen_on(socket.AF_INET6, ("::", port), backlog)
        family, address, where = socket.AF_INET, ("", port), f"TCP port {port}"
    else:
        family, _, _, _, address = _resolve(host, port, _LOOK_UP_S)[0]
        where = name_of(address)
    try:
        return _listen_on(family, address, backlog)
    except OSError as error:
        raise cannot_listen(where, error) from error


def _listen_on(family: int, address: tuple[Any, ...], backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        unshare(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def cannot_listen(where: str, error: OSError) -> TCPError:
    """Return the error of a failed listen, with a remedy if there is one."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return TCPError(f"cannot listen on {where}: {reason_at(where, error)}{remedy}", errno_of(error))


def prepare(sock: socket.socket) -> None:
    """Set a socket's options for short messages and a peer that may vanish."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def stop_listening(listener: socket.socket) -> None:
    """Close a listening socket, and let others have its port.

    close() alone leaves it listening as long as another process has a copy of it.
    """
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def send_all(sock: socket.socket, data: bytes, timeout: float) -> None:
    """Send on a non-blocking socket, in bounded time.

    Raises:
        TCPTimeout: the other side did not receive the data.
        OSError: the connection is gone.
    """
    deadline = time.monotonic() + timeout
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0 or not _wait_writable(sock, left):
                raise TCPTimeout(f"it did not read the answers within {timeout:g} s") from None


def drain(sock: socket.socket) -> None:
    """Shut down sending, and keep reading for a moment.

    Closing a socket with unread bytes discards data that it has not yet delivered, such as the
    error that the peer should see.
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
