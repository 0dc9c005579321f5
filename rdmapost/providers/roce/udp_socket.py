"""The devices' sockets: their options, and which process closes them after a fork."""

from __future__ import annotations

import _socket
import errno
import os
import socket
import struct
from typing import Any

from ..._binding import native
from ...errors import suppress_system_errors
from ...standard.wire import ROCE_V2_PORT
from .addresses import LocalAddress, candidates

_SOCKET_BUFFER = 1 << 22
"""The buffer size to request. Without CAP_NET_ADMIN the kernel may grant less
(net.core.rmem_max)."""

# Not every socket module has these (linux/in.h, linux/in6.h, linux/udp.h).
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_UDP_GRO = 104
_UDP_NO_CHECK6_RX = 102
_IPV6_DONTFRAG = 62
_BUFFERS = ((32, socket.SO_SNDBUF), (33, socket.SO_RCVBUF))
"""SO_SNDBUFFORCE and SO_RCVBUFFORCE (asm-generic/socket.h), and the options for processes without
the privilege."""
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("=9I")
"""The counters of linux/sock_diag.h; the last one is SK_MEMINFO_DROPS."""
_OPTIONS = {
    socket.AF_INET: (
        (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE),
        (socket.IPPROTO_IP, socket.IP_RECVTOS, 1),
        (socket.IPPROTO_IP, socket.IP_RECVTTL if hasattr(socket, "IP_RECVTTL") else 12, 1),
    ),
    socket.AF_INET6: (
        (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1),
        (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE),
        (socket.IPPROTO_IPV6, _IPV6_DONTFRAG, 1),
        # Soft-RoCE sends no UDP checksum, which IPv6 usually requires: the ICRC covers the packet.
        (socket.SOL_UDP, _UDP_NO_CHECK6_RX, 1),
        (socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1),
        (socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1),
    ),
}
"""With PROBE, an unconnected socket sends IPv4 packets with identification 0 and "don't fragment",
which the ICRC covers."""

_TTL = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TTL),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS),
}

_shared: list[Any] = []
"""The sockets that the child of a fork closes at once."""


def share(made: Any) -> None:
    """Have the child of a fork close a socket; a rollback undoes this."""
    native.undo(_shared.remove, made)
    _shared.append(made)


def close(made: Any) -> None:
    """On commit, close a socket that was passed to share()."""
    native.on_commit(made.close)
    native.on_commit(_shared.remove, made)


def close_all() -> None:
    """In the child of a fork, close the sockets, so that the parent can free their addresses.

    This takes no lock: a thread that does not exist in the child might hold it.
    """
    while _shared:
        _shared.pop().close()


os.register_at_fork(after_in_child=close_all)


def bind(place: str) -> tuple[LocalAddress, Any]:
    """Open a socket on the first free address; return the address and the socket.

    Args:
        place: a network device or an address.

    Raises:
        OSError: no address is free.
        LookupError: this machine has no such address.
    """
    error: OSError | None = None
    for address in candidates(place):
        socket_type = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        made = native.made(_socket.socket.close, _socket.socket, address.family, socket_type)
        # Share it before it has the address.
        share(made)
        try:
            prepare(made, address)
        except OSError as refused:
            error = refused
            made.close()
            _shared.remove(made)
            if refused.errno != errno.EADDRINUSE:
                break
        else:
            return address, made
    assert error is not None
    raise error


def hop_limit(made: Any, address: LocalAddress) -> int:
    """Return the time to live, or the hop limit, of the packets that a socket sends."""
    limit: int = made.getsockopt(*_TTL[address.family])
    return limit


def dropped(made: Any) -> int:
    """Return how many packets the kernel has dropped because the receive buffer was full."""
    info = made.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    counted: int = _MEMINFO.unpack(info)[-1]
    return counted


def prepare(made: Any, address: LocalAddress) -> None:
    """Set a socket's options, and bind it."""
    for level, option, value in _OPTIONS[address.family]:
        made.setsockopt(level, option, value)
    with suppress_system_errors:
        # Since Linux 5.0; without it, packets are received one at a time.
        made.setsockopt(socket.SOL_UDP, _UDP_GRO, 1)
    for forced, limited in _BUFFERS:
        try:
            made.setsockopt(socket.SOL_SOCKET, forced, _SOCKET_BUFFER)
        except PermissionError:
            made.setsockopt(socket.SOL_SOCKET, limited, _SOCKET_BUFFER)
    scope = (0, address.scope) if address.family is socket.AF_INET6 else ()
    made.bind((address.host, ROCE_V2_PORT, *scope))
