"""The handshake of ibv_rc_pingpong and its UC and UD versions: addresses, as text over TCP.

The client sends its address, 52 bytes; the server connects its queue pair and answers
with its own address; the client connects its queue pair and sends "done", and the
connection is closed.  If both sides are rdmapost, they compare their settings first (``settings``).

``Address`` and ``Handshake`` are the messages and their order, without a socket;
``HandshakeConnection`` carries the messages over TCP, with a time limit for each.
"""

from __future__ import annotations

import errno
import re
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..._arguments import within
from ...errors import ClosesOnExit
from ...resources.gid import GID
from ...resources.waitable import Waitable, wait_for_descriptor
from .. import tcp
from ..connect.errors import ConnectError
from ..connect.protocol_messages import Error, encode
from ..default_ports import PINGPONG_PORT
from ..tcp import name_of, reason, reason_at
from .settings import MAX_LINE, Settings, decode

_SETTINGS_S = 1.0
"""How long to wait for settings: a peer that is not rdmapost may keep the connection open."""
DONE = b"done\0"
_TEMPLATE = b"0000:000000:000000:" + 32 * b"0" + b"\0"
_MESSAGE = re.compile(rb"([0-9a-f]{4}):([0-9a-f]{6}):([0-9a-f]{6}):([0-9a-f]{32})\0", re.IGNORECASE)
_HEX = frozenset(b"0123456789abcdefABCDEF")
_OF_CONNECT = b'{"rdmapost":'
"""How the first message of 'rdmapost serve' or of its client begins, in every version."""
_ALLOWED = tuple(_HEX if byte == ord("0") else frozenset((byte,)) for byte in _TEMPLATE + DONE)
"""The bytes allowed at each position of the client's address and "done"."""


class PingpongError(ConnectError):
    """The peer could not be reached, broke the handshake, or went away."""


@dataclass(frozen=True, slots=True)
class Address:
    """A queue pair's address in the handshake's format.

    Attributes:
        lid: the port's LID; 0 on Ethernet.
        qp_num: number of the queue pair.
        psn: first packet sequence number that it sends.
        gid: its GID; zero where the LID is enough (InfiniBand).
    """

    lid: int
    qp_num: int
    psn: int
    gid: GID

    def encode(self) -> bytes:
        """Return the handshake message: 52 bytes, with a terminating NUL."""
        return b"%04x:%06x:%06x:%s\0" % (self.lid, self.qp_num, self.psn, self.gid.hex().encode())

    @classmethod
    def decode(cls, message: bytes) -> Address:
        """Read an address from a message in ``encode``'s format.

        Args:
            message: its bytes.

        Raises:
            ValueError: the message is malformed.
        """
        match = _MESSAGE.fullmatch(message)
        if match is None:
            raise ValueError(f"not an address of the pingpong handshake: {message[:60]!r}")
        lid, qpn, psn, gid = match.groups()
        return cls(int(lid, 16), int(qpn, 16), int(psn, 16), GID(bytes.fromhex(gid.decode())))

    def __str__(self) -> str:
        return f"LID {self.lid:#06x}, QPN {self.qp_num:#08x}, PSN {self.psn:#08x}, GID {self.gid}"


class Handshake:
    """What one side receives, in order, without I/O.

    A wrong byte is refused as it arrives, not when the message is complete. The client sends
    its address first, and receives no "done".

    Attributes:
        peer: the peer's address, once received.
        of_connect: whether the peer turned out to be 'rdmapost serve', or a client of it.
    """

    __slots__ = ("_is_client", "_received", "of_connect", "peer")

    def __init__(self, *, is_client: bool) -> None:
        self._is_client = is_client
        self._received = bytearray()
        self.peer: Address | None = None
        self.of_connect = False

    @property
    def needed(self) -> int:
        """Bytes still missing; 0 at the end."""
        whole = len(_TEMPLATE) if self._is_client else len(_TEMPLATE) + len(DONE)
        return whole - len(self._received)

    @property
    def has_nothing(self) -> bool:
        """Whether the peer has sent nothing."""
        return not self._received

    @property
    def stage(self) -> str:
        """What is being waited for, in words."""
        received = len(self._received)
        if received < len(_TEMPLATE):
            partly = f" ({received} of {len(_TEMPLATE)} bytes came)" if received else ""
            return f"its address{partly}"
        return '"done"'

    def feed(self, data: bytes) -> None:
        """Feed bytes from the peer, in chunks of any size."""
        received, before = self._received, bytes(self._received)
        whole = len(received) + self.needed
        if (before + data).startswith(_OF_CONNECT):
            self.of_connect = True
            raise PingpongError(
                "it is 'rdmapost serve': run 'rdmapost pingpong' there, or 'rdmapost send' here"
                if self._is_client
                else "it is a client of 'rdmapost serve': run that here, or 'rdmapost pingpong' "
                "there"
            )
        for byte in data:
            place = len(received)
            if place >= whole or byte not in _ALLOWED[place]:
                start, stage = (
                    (0, "its address") if place < len(_TEMPLATE) else (len(_TEMPLATE), '"done"')
                )
                raise PingpongError(
                    "it does not speak ibv_rc_pingpong's protocol: "
                    f"got {(before + data)[start:][:40]!r} instead of {stage}"
                )
            received.append(byte)
        if self.peer is None and len(received) >= len(_TEMPLATE):
            self.peer = Address.decode(bytes(received[: len(_TEMPLATE)]))


# ---- over TCP ---------------------------------------------------------------


def listen(host: str | None = None, port: int = PINGPONG_PORT) -> socket.socket:
    """Listen for one client.

    Args:
        host: the local address; by default all addresses, like the stock programs, because
            the peer is on another machine, there is only one connection, and no memory is
            exposed.
        port: the TCP port; 0 for any free one.

    Returns:
        The socket, for Pingpong.run_server().

    Raises:
        TypeError: port is not an integer.
        ValueError: port is not in 0..65535.
        PingpongError: the address is not available, or the port is in use.
    """
    port = within("port", port, 0, 65535)
    try:
        listener = tcp.listen(host or None, port, backlog=1)
    except tcp.TCPError as error:
        raise PingpongError(str(error)) from None
    listener.setblocking(True)
    return listener


def accept(
    owner: Waitable, listener: socket.socket, timeout: float, wait: float | None = None
) -> HandshakeConnection:
    """Accept one client, and close the listener.

    Args:
        owner: closing it ends every wait.
        listener: a listening socket.
        timeout: seconds to wait for each of the client's messages.
        wait: seconds to wait for the client; None for no limit.
    """
    try:
        listener.setblocking(False)
        name = name_of(listener.getsockname())
        accepted = wait_for_descriptor(
            owner, listener.fileno(), lambda: _accept_now(listener), wait
        )
    except OSError as error:
        raise PingpongError(f"no client connected: {reason(error)}") from None
    finally:
        tcp.stop_listening(listener)
    if accepted is None:
        raise PingpongError(f"no client connected to {name} within {wait:g} s")
    sock, address = accepted
    return HandshakeConnection(owner, sock, name_of(address), timeout, is_client=False)


def _accept_now(listener: socket.socket) -> tuple[socket.socket, tuple[Any, ...]] | None:
    with suppress(BlockingIOError, ConnectionAbortedError):
        sock, address = listener.accept()
        tcp.unshare(sock)
        return sock, address
    return None


def dial(owner: Waitable, host: str, port: int, timeout: float) -> HandshakeConnection:
    """Connect to a server.

    Args:
        owner: closing it ends every wait.
        host, port: where it listens.
        timeout: seconds for connecting, and for each of the server's messages.
    """

    def wait_writable(sock: socket.socket, left: float) -> bool:
        # wait_for_descriptor() waits until a descriptor is readable; the epoll descriptor becomes
        # readable when the socket is writable.
        with select.epoll() as ready:
            ready.register(sock, select.EPOLLOUT)
            attempt = partial(_ready_now, ready)
            return wait_for_descriptor(owner, ready.fileno(), attempt, left) is not None

    port = within("port", port, 1, 65535)
    who = name_of((host, port))
    try:
        sock = tcp.dial(host, port, timeout, wait_writable)
        return HandshakeConnection(owner, sock, who, timeout, is_client=True)
    except tcp.TCPError as error:
        raise PingpongError(str(error)) from None
    except TimeoutError:
        why = f"no answer within {timeout:g} s; check that the host is up and lets the port through"
    except OSError as error:
        why = reason_at(who, error)
        if error.errno == errno.ECONNREFUSED:
            why += "; start the server there first (rdmapost pingpong, or ibv_rc_pingpong)"
    raise PingpongError(f"cannot connect to {who}: {why}")


def _ready_now(ready: select.epoll) -> bool | None:
    return True if ready.poll(0) else None


class HandshakeConnection(ClosesOnExit):
    """A TCP connection to a peer, and the handshake over it.

    The timeout applies to each message; closing the owner ends any wait for a message.
    """

    def __init__(
        self, owner: Waitable, sock: socket.socket, who: str, timeout: float, *, is_client: bool
    ) -> None:
        sock.setblocking(False)
        self.who = who
        self._owner = owner
        self._sock = sock
        self._timeout = timeout
        self._is_client = is_client
        self._handshake = Handshake(is_client=is_client)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def send(self, message: bytes) -> None:
        """Send a message, in one piece: the stock programs read it with one read(2)."""
        try:
            tcp.send_all(self._sock, message, self._timeout)
        except OSError as error:
            raise self._closed_error(reason(error)) from None

    def peer(self) -> Address:
        """Wait for the peer's address, and return it."""
        # Leave "done" unread until the answer has been sent.
        self._read(0 if self._is_client else len(DONE))
        assert self._handshake.peer is not None
        return self._handshake.peer

    def done(self) -> None:
        """Wait for the client's "done"."""
        self._read(0)

    def compare(self, mine: Settings) -> bool:
        """Compare the settings of both sides, after "done".

        Returns:
            Whether that was possible: the stock programs do not send theirs.

        Raises:
            PingpongError: they differ; both sides raise it.
        """
        if not self._is_client:
            self._say(mine)
        theirs = decode(self._line())
        if theirs is None:
            return False
        if self._is_client:
            self._say(mine)
        if different := mine.differences(theirs):
            here, there = (
                ", ".join(f"{name}={values[side]}" for name, values in different.items())
                for side in (0, 1)
            )
            raise PingpongError(
                f"{self.who} has {there}, and this side has {here}: give both sides the same"
            )
        return True

    def _say(self, settings: Settings) -> None:
        # A stock client has already disconnected.
        with suppress(OSError):
            tcp.send_all(self._sock, settings.encode(), self._timeout)

    def _line(self) -> bytes:
        """Receive one line, or the part of it that arrives in time."""
        line = b""
        end = time.monotonic() + min(self._timeout, _SETTINGS_S)
        with suppress(OSError):
            while not line.endswith(b"\n") and len(line) < MAX_LINE:
                data = self._receive(MAX_LINE - len(line), end)
                if not data:
                    break
                line += data
        return line

    def _read(self, leave: int) -> None:
        """Receive until only `leave` bytes are missing."""
        handshake = self._handshake
        end = time.monotonic() + self._timeout
        while (needed := handshake.needed - leave) > 0:
            try:
                # One limit for the whole message, so that a peer that sends a byte now and then is
                # dropped too.
                data = self._receive(needed, end)
            except OSError as error:
                raise self._closed_error(reason(error)) from None
            if data is None:
                raise PingpongError(
                    f"{self.who} did not send {handshake.stage} within {self._timeout:g} s"
                )
            if not data:
                raise self._closed_error("")
            try:
                handshake.feed(data)
            except PingpongError as error:
                if handshake.of_connect and not self._is_client:
                    self._refuse_client_of_connect()
                raise PingpongError(f"{self.who}: {error}") from None

    def _refuse_client_of_connect(self) -> None:
        """Tell a client of 'rdmapost serve', in its own protocol, what it has reached."""
        text = "it is 'rdmapost pingpong': run 'rdmapost serve' there, or 'rdmapost pingpong' here"
        with suppress(OSError):
            tcp.send_all(self._sock, encode(Error("format", text)), self._timeout)
            tcp.drain(self._sock)

    def _receive(self, limit: int, end: float) -> bytes | None:
        """Wait for bytes; return None if none came in time, or b"" at the end of the stream."""
        left = max(0.0, end - time.monotonic())
        return wait_for_descriptor(
            self._owner, self._sock.fileno(), partial(self._receive_now, limit), left
        )

    def _receive_now(self, limit: int) -> bytes | None:
        try:
            return self._sock.recv(limit)
        except BlockingIOError:
            return None

    def _closed_error(self, why: str) -> PingpongError:
        why = f" ({why})" if why else ""
        hint = ": its own output may say why"
        if self._is_client:
            hint += "; on RoCE a stock server has to be started with -g INDEX"
        elif self._handshake.has_nothing:
            # A port scanner, perhaps.
            hint = ""
        return PingpongError(
            f"{self.who} closed the connection{why} instead of sending {self._handshake.stage}"
            f"{hint}"
        )
