"""The door of a server: one thread meets everyone who has not shown the token yet.

A stranger has no thread, nothing on the device, and no more than two lines of
memory.  There is room for so many of them; who comes then takes the place of
the one that has been silent for longest, of those from the address that has most
places.  So strangers keep out neither those who say their hello at once, as
clients do, nor those from another address.

Wrong tokens may come only so fast, from each address and in all.  Beyond that a
hello waits for its turn, address by address, before anyone looks at it, so that
what is guessed is not told any faster by the time of the answer.
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

from .address import show_address
from .conversation import HELLO_S, Conversation, Reception
from .messages import MAX_LINE, Error, encode
from .sockets import LINGER_BYTES, LINGER_S

__all__ = ["BACKLOG", "GUESSES", "GUESSES_IN_ALL", "Door"]

_log = logging.getLogger("rdmapost.connect")

BACKLOG = 1024
GUESSES, GUESSES_IN_ALL = 32, 64
"""Wrong tokens a second, from one address and in all; a second's worth may come at once."""
_MAX_STRANGERS = 256
_MAX_WAITING = 128
"""Hellos of one address that wait; in HELLO_S each has had its turn."""
_AT_ONCE = 32
_CROWDED = "too many are at this server's door; try again later"
_GUESSED = "too many wrong tokens come to this server; try again later"


class _Pace:
    """How fast something may happen.

    Attributes:
        due: it may happen again from a second before that time on.
    """

    def __init__(self, per_second: int) -> None:
        self._step = 1 / per_second
        self.due = 0.0

    def count(self, now: float) -> None:
        self.due = max(self.due, now) + self._step

    def left(self, now: float) -> float:
        """Return for how many seconds it may not happen."""
        return max(0.0, self.due - 1.0 - now)


class _Stranger:
    """Somebody at the door.

    Attributes:
        conversation: what has been said.
        source: the address, or the network of an IPv6 one.
        until: when its time is over.
        whole: its hello is there, and waits to be looked at.
        unread: how much more of it is thrown away after the last word.
    """

    def __init__(self, sock: socket.socket, address: tuple[Any, ...], reception: Reception) -> None:
        self.sock = sock
        self.conversation = Conversation(reception, show_address(address))
        self.source = _source(address[0])
        self.until = time.monotonic() + min(reception.timeout, HELLO_S)
        self.whole = False
        self.unread = LINGER_BYTES


def _source(host: str) -> str:
    ip = ip_address(host.partition("%")[0])
    if isinstance(ip, IPv6Address):
        # Whoever has one IPv6 address has the 2**64 of its network.
        return str(ip.ipv4_mapped) if ip.ipv4_mapped else ip.exploded[:19]
    return host


class Door:
    """Lets those in who give the token.

    Args:
        reception: the server's.
        listener: where they come, not blocking; closed at the end.
        stop_fd: readable when the server ends.
        let_in: takes a socket and the conversation with a client; False if it cannot.
    """

    def __init__(
        self,
        reception: Reception,
        listener: socket.socket,
        stop_fd: int,
        let_in: Callable[[socket.socket, Conversation], bool],
    ) -> None:
        self._reception, self._listener, self._stop_fd = reception, listener, stop_fd
        self._let_in = let_in
        # In the order in which their time is over.
        self._strangers: dict[_Stranger, None] = {}
        self._lingering: dict[_Stranger, None] = {}
        self._places: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Stranger]] = OrderedDict()
        self._guesses: dict[str, _Pace] = {}
        self._in_all = _Pace(GUESSES_IN_ALL)
        # Clients need descriptors too.
        self._most = min(_MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._selector = selectors.DefaultSelector()
        self._warned = 0.0

    def run(self) -> None:
        """Meet everyone, until the server ends."""
        self._selector.register(self._stop_fd, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while self._round():
                pass
            self._selector.unregister(self._stop_fd)
            self._selector.unregister(self._listener)
            for stranger in list(self._strangers):
                self._refuse(stranger, "closing", "the server ends")
            self._empty_backlog()
            while self._lingering:
                self._round()
        finally:
            self._listener.close()
            self._selector.close()
            for stranger in (*self._strangers, *self._lingering):
                stranger.conversation.close()
                stranger.sock.close()

    def _empty_backlog(self) -> None:
        # Closing the listener would reset them without a word.
        with suppress(OSError):
            for _ in range(BACKLOG):
                sock, _ = self._listener.accept()
                with sock, suppress(OSError):
                    sock.send(encode(Error("closing", "the server ends")))

    def _round(self) -> bool:
        """Wait for something, and do all that is to be done; return False at the end."""
        new = False
        for key, _ in self._selector.select(self._patience()):
            if key.fileobj is self._listener:
                new = True
            elif key.data is None:
                return False
            elif key.data in self._strangers:
                self._hear(key.data)
            elif key.data in self._lingering:
                self._throw_away(key.data)
        self._greet()
        if new:
            # After those who are there: their hello may have come by now.
            self._accept()
            self._greet()
        self._part()
        return True

    def _patience(self) -> float | None:
        """Return in how many seconds there is something to do, or None."""
        now = time.monotonic()
        times = [
            next(iter(some)).until - now for some in (self._strangers, self._lingering) if some
        ]
        if self._waiting:
            times.append(min(self._pause(source, now) for source in self._waiting))
        return max(0.0, min(times)) + 0.001 if times else None

    # ---- coming ---------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                self._no_descriptors(error)
                return
            sock.setblocking(False)
            if len(self._strangers) >= self._most:
                self._make_room()
            stranger = _Stranger(sock, address, self._reception)
            self._strangers[stranger] = None
            self._places[stranger.source] += 1
            self._selector.register(sock, selectors.EVENT_READ, stranger)
            self._hear(stranger)

    def _no_descriptors(self, error: OSError) -> None:
        now = time.monotonic()
        if now >= self._warned + 1.0:
            self._warned = now
            _log.warning("cannot accept: %s", error)
        if self._lingering:
            self._hang_up(next(iter(self._lingering)))
        elif self._strangers:
            self._make_room()
        else:
            # Wait until some come free, or the end.
            poller = select.poll()
            poller.register(self._stop_fd, select.POLLIN)
            poller.poll(100)

    def _make_room(self) -> None:
        source = max(self._places, key=self._places.__getitem__)
        for stranger in (one for one in self._strangers if one.source == source):
            if not stranger.whole:
                # Its hello may have come since it was last asked.
                self._hear(stranger)
                if not stranger.whole and stranger in self._strangers:
                    self._refuse(stranger, "busy", _CROWDED)
                if stranger not in self._strangers:
                    return
        # All of them have said theirs, and the last has waited least.
        self._refuse(stranger, "busy", _GUESSED)

    # ---- what they say --------------------------------------------------------

    def _hear(self, stranger: _Stranger) -> None:
        conversation = stranger.conversation
        try:
            data = stranger.sock.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError as error:
            conversation.lost(f"the connection broke: {error.strerror or error}")
            data = b""
        if not data:
            conversation.lost()
            self._forget(stranger)
            conversation.close()
            stranger.sock.close()
        elif conversation.hear(data):
            self._selector.unregister(stranger.sock)
            stranger.whole = True
            waiting = self._waiting.setdefault(stranger.source, deque())
            waiting.append(stranger)
            if len(waiting) > _MAX_WAITING:
                self._refuse(stranger, "busy", _GUESSED)

    def _greet(self) -> None:
        """Look at the hellos, as far as wrong tokens have not come too fast."""
        now = time.monotonic()
        for source in list(self._waiting):
            while source in self._waiting and not self._pause(source, now):
                stranger = self._waiting[source][0]
                answer = stranger.conversation.greet()
                self._forget(stranger)
                if stranger.conversation.code == "token":
                    self._count(source, now)
                if stranger.conversation.over:
                    self._send_off(stranger, answer)
                elif not self._let_in(stranger.sock, stranger.conversation):
                    self._send_off(stranger, stranger.conversation.end("busy", _CROWDED))
                if self._in_all.left(now) and source in self._waiting:
                    # The others first, next time.
                    self._waiting.move_to_end(source)

    def _pause(self, source: str, now: float) -> float:
        """Return for how many seconds no hello from there may be looked at."""
        pace = self._guesses.get(source)
        return max(self._in_all.left(now), 0.0 if pace is None else pace.left(now))

    def _count(self, source: str, now: float) -> None:
        self._in_all.count(now)
        self._guesses.setdefault(source, _Pace(GUESSES)).count(now)
        # So there are never more than a few of them.
        self._guesses = {name: pace for name, pace in self._guesses.items() if pace.due > now}

    # ---- going ----------------------------------------------------------------

    def _refuse(self, stranger: _Stranger, code: str, text: str) -> None:
        self._forget(stranger)
        self._send_off(stranger, stranger.conversation.end(code, text))

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._places[stranger.source] -= 1
        if not self._places[stranger.source]:
            del self._places[stranger.source]
        if not stranger.whole:
            self._selector.unregister(stranger.sock)
        elif waiting := self._waiting.get(stranger.source):
            waiting.remove(stranger)
            if not waiting:
                del self._waiting[stranger.source]

    def _send_off(self, stranger: _Stranger, answer: bytes) -> None:
        """Say the last word, and read on for a moment, so that it is not lost."""
        with suppress(OSError):
            stranger.sock.send(answer)
            stranger.sock.shutdown(socket.SHUT_WR)
        stranger.conversation.close()
        if len(self._lingering) >= self._most // 4:
            self._hang_up(next(iter(self._lingering)))
        stranger.until = time.monotonic() + LINGER_S
        self._lingering[stranger] = None
        self._selector.register(stranger.sock, selectors.EVENT_READ, stranger)

    def _throw_away(self, stranger: _Stranger) -> None:
        try:
            got = len(stranger.sock.recv(MAX_LINE))
        except BlockingIOError:
            return
        except OSError:
            got = 0
        stranger.unread -= got
        if not got or stranger.unread < 0:
            self._hang_up(stranger)

    def _hang_up(self, stranger: _Stranger) -> None:
        del self._lingering[stranger]
        self._selector.unregister(stranger.sock)
        stranger.sock.close()

    def _part(self) -> None:
        """Part with those whose time is over."""
        now = time.monotonic()
        while self._strangers and (first := next(iter(self._strangers))).until <= now:
            if first.whole:
                self._refuse(first, "busy", _GUESSED)
            else:
                answer = first.conversation.tick()
                self._forget(first)
                self._send_off(first, answer)
        while self._lingering and (first := next(iter(self._lingering))).until <= now:
            self._hang_up(first)
