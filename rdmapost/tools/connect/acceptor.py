"""Accept and authenticate connections, in one thread of a server.

A connection without a verified token has no thread and no device resources, only a descriptor and a
buffer of at most two lines. The number of such connections is bounded. At the limit, a new
connection replaces one from the address with the most connections: the oldest that has not sent its
hello. So the limit does not keep out connections that send their hello immediately, as clients do,
or connections from other addresses.

Wrong tokens are rate-limited, for each address and in total. Above the limit, hellos are queued,
and the addresses' queues are served in turn. Hellos are queued before their tokens are checked:
otherwise the timing or absence of an answer would reveal the token.
"""

from __future__ import annotations

import logging
import resource
import select
import selectors
import socket
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Any

from ..tcp import LINGER_BYTES, LINGER_S, name_of, reason, stop_listening, unshare
from .protocol_messages import MAX_LINE, Error, encode
from .server_session import HELLO_S, ServerSession
from .server_state import ServerState

_log = logging.getLogger("rdmapost.connect")

BACKLOG = 1024
GUESSES, GUESSES_TOTAL = 32, 64
"""Wrong tokens per second, from one address and in total, after a burst of one second's worth."""
_MAX_PENDING = 256
_MAX_QUEUED = 128
"""Queued hellos from one address; few enough that the last is served within HELLO_S."""
_MAX_ACCEPTS = 32
MEMORY_S = 0.01
"""How many seconds to wait for memory."""
_TOO_MANY = "too many pending connections at this server; try again later"
_TOO_FAST = "this server gets too many wrong tokens; try again later"


class _RateLimit:
    """A limit on events per second, which allows a burst of one second's events at the start."""

    def __init__(self, per_second: int) -> None:
        self._interval = 1 / per_second
        # When the full burst is available again.
        self.due = 0.0

    def count(self, now: float) -> None:
        self.due = max(self.due, now) + self._interval

    def left(self, now: float) -> float:
        """Return how many seconds must pass before another event is within the limit."""
        return max(0.0, self.due - 1.0 - now)


class _Pending:
    """A connection that is not yet, or no longer, a client's."""

    def __init__(self, sock: socket.socket, address: tuple[Any, ...], server: ServerState) -> None:
        self.sock = sock
        self.session = ServerSession(server, name_of(address))
        # Rates are limited for each source.
        self.source = _source(address[0])
        self.deadline = time.monotonic() + min(server.timeout, HELLO_S)
        # Whether its hello has arrived and is waiting for authentication.
        self.queued = False
        # Bytes that may still be discarded after a refusal.
        self.unread = LINGER_BYTES


def _source(host: str) -> str:
    """Return an IPv4 address, or the /64 of an IPv6 address: one host may use the whole /64."""
    ip = ip_address(host.partition("%")[0])
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped) if ip.ipv4_mapped else ip.exploded[:19]
    return host


class Acceptor:
    """Accepts connections, and hands over those with the correct token.

    Args:
        server: the server's settings and its clients.
        listener: a non-blocking listening socket; closed at the end.
        stop_fd: readable when the server ends.
        start_client: takes over a socket and its session; returns False if it cannot.
    """

    def __init__(
        self,
        server: ServerState,
        listener: socket.socket,
        stop_fd: int,
        start_client: Callable[[socket.socket, ServerSession], bool],
    ) -> None:
        self._server, self._listener, self._stop_fd = server, listener, stop_fd
        self._start_client = start_client
        # Both are in deadline order.
        self._pending: dict[_Pending, None] = {}
        self._lingering: dict[_Pending, None] = {}
        self._per_source: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[_Pending]] = OrderedDict()
        self._guesses: dict[str, _RateLimit] = {}
        self._total = _RateLimit(GUESSES_TOTAL)
        # Clients need descriptors too.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_pending = _MAX_PENDING
        if soft != resource.RLIM_INFINITY:
            self._max_pending = max(16, min(_MAX_PENDING, soft // 4))
        self._selector = selectors.DefaultSelector()
        self._warned_at = 0.0
        # Whether the records of the connections, or their registrations with the selector, may be
        # incomplete, because nothing is registered yet or memory ran out.
        self._incomplete = True

    def close(self) -> None:
        """Close the selector; call this only if run() was never called."""
        self._selector.close()

    def run(self) -> None:
        """Accept until the server ends."""
        try:
            self._accept_all()
        finally:
            stop_listening(self._listener)
            self._selector.close()
            for peer in (*self._pending, *self._lingering):
                peer.session.close()
                peer.sock.close()

    def _accept_all(self) -> None:
        while self._go_on():
            pass
        self._selector.unregister(self._stop_fd)
        self._selector.unregister(self._listener)
        for peer in list(self._pending):
            self._refuse(peer, "closing", "the server is shutting down")
        self._empty_backlog()
        while self._lingering:
            self._poll()

    def _go_on(self) -> bool:
        """Poll; if memory runs out, drop only the connections that are not clients."""
        try:
            if self._incomplete:
                self._start_over()
            return self._poll()
        except (MemoryError, SystemError):
            # CPython turns some MemoryErrors into SystemErrors.
            self._incomplete = True
            time.sleep(MEMORY_S)
            return True

    def _start_over(self) -> None:
        for peer in (*self._pending, *self._lingering):
            peer.session.close()
            peer.sock.close()
        for each in (self._pending, self._lingering, self._per_source, self._queues):
            each.clear()
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stop_fd, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._incomplete = False

    def _empty_backlog(self) -> None:
        # Closing the listener would reset these connections without an error message.
        with suppress(OSError):
            for _ in range(BACKLOG):
                sock, _ = self._listener.accept()
                with sock, suppress(OSError):
                    sock.send(encode(Error("closing", "the server is shutting down")))

    def _poll(self) -> bool:
        """Wait for events and deadlines, and handle them; return False when the server ends."""
        new = False
        for key, _ in self._selector.select(self._timeout()):
            if key.fileobj is self._listener:
                new = True
            elif key.data is None:
                return False
            elif key.data in self._pending:
                self._read(key.data)
            elif key.data in self._lingering:
                self._discard(key.data)
        self._authenticate()
        if new:
            # Accept after handling the pending connections: their hellos may have arrived by now.
            self._accept()
            self._authenticate()
        self._expire()
        return True

    def _timeout(self) -> float | None:
        """Return the number of seconds until the next deadline, or None."""
        now = time.monotonic()
        times = [
            next(iter(some)).deadline - now for some in (self._pending, self._lingering) if some
        ]
        if self._queues:
            times.append(min([self._delay(source, now) for source in self._queues]))
        return max(0.0, min(times)) + 0.001 if times else None

    # ---- accepting ---------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                self._free_descriptor(error)
                return
            unshare(sock)
            sock.setblocking(False)
            if len(self._pending) >= self._max_pending:
                self._evict()
            peer = _Pending(sock, address, self._server)
            self._pending[peer] = None
            self._per_source[peer.source] += 1
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._read(peer)

    def _free_descriptor(self, error: OSError) -> None:
        now = time.monotonic()
        if now >= self._warned_at + 1.0:
            self._warned_at = now
            _log.warning("cannot accept: %s", error)
        if self._lingering:
            self._close(next(iter(self._lingering)))
        elif self._pending:
            why = reason(error)
            self._evict(f"the server cannot accept connections: {why}; try again later")
        else:
            # Give the clients time to close descriptors, unless the server ends.
            poller = select.poll()
            poller.register(self._stop_fd, select.POLLIN)
            poller.poll(100)

    def _evict(self, why: str = "") -> None:
        """Refuse one connection from the address that has the most."""
        source = max(self._per_source, key=self._per_source.__getitem__)
        for peer in [one for one in self._pending if one.source == source]:
            if not peer.queued:
                # Its hello may have arrived since the last poll.
                self._read(peer)
                if not peer.queued and peer in self._pending:
                    self._refuse(peer, "busy", why or _TOO_MANY)
                if peer not in self._pending:
                    return
        # All hellos are queued; refuse the connection that has waited least.
        self._refuse(peer, "busy", why or _TOO_FAST)

    # ---- hellos --------------------------------------------------------

    def _read(self, peer: _Pending) -> None:
        session = peer.session
        try:
            data = peer.sock.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError as error:
            session.lost(error)
            data = b""
        if not data:
            session.lost()
            self._remove(peer)
            session.close()
            peer.sock.close()
        elif session.receive(data):
            self._selector.unregister(peer.sock)
            peer.queued = True
            queue = self._queues.setdefault(peer.source, deque())
            queue.append(peer)
            if len(queue) > _MAX_QUEUED:
                self._refuse(peer, "busy", _TOO_FAST)

    def _authenticate(self) -> None:
        """Serve the queued hellos, as far as the rate limits allow."""
        now = time.monotonic()
        for source in list(self._queues):
            while source in self._queues and not self._delay(source, now):
                peer = self._queues[source][0]
                answer = peer.session.authenticate()
                self._remove(peer)
                if peer.session.code == "token":
                    self._count(source, now)
                if peer.session.over:
                    self._finish(peer, answer)
                elif not self._start(peer):
                    self._finish(peer, peer.session.end("busy", _TOO_MANY))
                if self._total.left(now) and source in self._queues:
                    # Another address is next.
                    self._queues.move_to_end(source)

    def _start(self, peer: _Pending) -> bool:
        try:
            return self._start_client(peer.sock, peer.session)
        except MemoryError:
            peer.session.close()
            peer.sock.close()
            raise

    def _delay(self, source: str, now: float) -> float:
        """Return the number of seconds until a hello from this source may be served."""
        rate = self._guesses.get(source)
        return max(self._total.left(now), 0.0 if rate is None else rate.left(now))

    def _count(self, source: str, now: float) -> None:
        self._total.count(now)
        self._guesses.setdefault(source, _RateLimit(GUESSES)).count(now)
        # Drop sources that are within the limit again, so that the dict stays small.
        self._guesses = {name: rate for name, rate in self._guesses.items() if rate.due > now}

    # ---- closing ----------------------------------------------------------------

    def _refuse(self, peer: _Pending, code: str, text: str) -> None:
        self._remove(peer)
        self._finish(peer, peer.session.end(code, text))

    def _remove(self, peer: _Pending) -> None:
        del self._pending[peer]
        self._per_source[peer.source] -= 1
        if not self._per_source[peer.source]:
            del self._per_source[peer.source]
        if not peer.queued:
            self._selector.unregister(peer.sock)
        elif queue := self._queues.get(peer.source):
            queue.remove(peer)
            if not queue:
                del self._queues[peer.source]

    def _finish(self, peer: _Pending, answer: bytes) -> None:
        """Send the last answer, then read briefly.

        Closing with unread data could lose the answer.
        """
        with suppress(OSError):
            peer.sock.send(answer)
            peer.sock.shutdown(socket.SHUT_WR)
        peer.session.close()
        if len(self._lingering) >= self._max_pending // 4:
            self._close(next(iter(self._lingering)))
        peer.deadline = time.monotonic() + LINGER_S
        self._lingering[peer] = None
        self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def _discard(self, peer: _Pending) -> None:
        try:
            got = len(peer.sock.recv(MAX_LINE))
        except BlockingIOError:
            return
        except OSError:
            got = 0
        peer.unread -= got
        if not got or peer.unread < 0:
            self._close(peer)

    def _close(self, peer: _Pending) -> None:
        del self._lingering[peer]
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _expire(self) -> None:
        """Refuse or close connections past their deadlines."""
        now = time.monotonic()
        while self._pending and (first := next(iter(self._pending))).deadline <= now:
            if first.queued:
                self._refuse(first, "busy", _TOO_FAST)
            else:
                answer = first.session.tick()
                self._remove(first)
                self._finish(first, answer)
        while self._lingering and (first := next(iter(self._lingering))).deadline <= now:
            self._close(first)
