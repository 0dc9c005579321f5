"""The client: dialling a server, and querying it."""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import sys
import time
import weakref
from contextlib import suppress
from io import FileIO
from threading import get_ident
from typing import Any, Self

from ..._binding import native
from ...enums import Access, QPType
from ...errors import RdmaError
from ...resources.device import Context
from ..resource_stack import ClosedAtTheEnd
from .address import DEFAULT_PORT, check_where, resolve, show_address
from .connection import Dialled
from .conversation import check_token
from .errors import ConnectError, ConnectTimeout, ProtocolError
from .messages import MAX_LINE, Arrival, Bye, Error, Message, Seen, encode
from .protocol import ClientSession
from .sockets import errno_of, prepare, send_all

__all__ = ["MARGIN_S", "Connection", "Teller", "dial", "why_not_reached"]

MARGIN_S = 1.0
"""How long an answer may take, besides the time that the server was told to wait."""


def dial(
    context: Context,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    qp_type: QPType = QPType.RC,
    token: str | None = None,
    timeout: float = 5.0,
    local_size: int = 4096,
    local_access: int = Access.LOCAL_WRITE,
    depth: int = 16,
    max_inline_data: int = 0,
    port_num: int = 1,
    gid_index: int | None = None,
) -> Connection:
    """Connect a queue pair to a server's.

    Args:
        context: an open device, which must reach the server's: soft0 reaches
            only servers of the same process.
        host, port: where the server listens.
        qp_type: RC, UC or UD.
        token: the one that the server requires.
        timeout: seconds for each step of the exchange.
        local_size: bytes of local memory.
        local_access: what the server may do with it, an Access.
        depth: work requests that each queue must hold.
        max_inline_data: bytes of one inline work request.
        port_num, gid_index: port and GID of the queue pair, as in QP.

    Returns:
        The connection; a context manager.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range.
        ConnectError: nothing listens there, or the server refused; the text says why.
        ConnectTimeout: it did not answer in time.
        ProtocolError: what listens there speaks something else.
        VerbsError: the device refused.
    """
    port = check_where(host, port)
    check_token(token)
    return Connection(
        context,
        host,
        port,
        token,
        qp_type=qp_type,
        timeout=timeout,
        local_size=local_size,
        local_access=local_access,
        depth=depth,
        max_inline_data=max_inline_data,
        port_num=port_num,
        gid_index=gid_index,
    )


def why_not_reached(where: str, error: OSError, timeout: float) -> ConnectError:
    """Make the error for a connection that failed."""
    if isinstance(error, ConnectError):
        return error
    if isinstance(error, TimeoutError):
        return ConnectTimeout(f"{where} did not answer within {timeout:g} s")
    if error.errno == errno.ECONNREFUSED:
        return ConnectError(
            f"{where} refused the connection: start 'rdmapost serve' there, or name its port",
            "refused",
            error.errno,
        )
    return ConnectError(
        f"{where} cannot be reached: {error.strerror or error}", "unreachable", errno_of(error)
    )


class Teller:
    """Describes the outcome of an exchange, for any shell.

    Args:
        where: the server, HOST:PORT.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def answer(self, message: Message) -> Message:
        """Return the server's answer.

        Raises:
            ConnectError: it is an error.
        """
        if isinstance(message, Error):
            raise ConnectError(f"{self.where} refused: {message.text}", message.code)
        return message

    def wrong(self, error: ProtocolError) -> ProtocolError:
        """Make the error for a server that speaks something else."""
        return ProtocolError(f"{self.where} is not an 'rdmapost serve': {error}", error.code)

    def ended(self, half: bool, why: str = "") -> ConnectError:
        """Make the error for a connection that is gone."""
        how = f" ({why})" if why else " in the middle of a message" if half else ""
        return ConnectError(f"{self.where} closed the connection{how} and did not answer", "lost")

    def closing(self) -> ConnectError:
        """Make the error for a question that close() has ended."""
        return ConnectError("the connection was closed before the answer came", "lost")

    def silent(self, seconds: float) -> ConnectTimeout:
        """Make the error for a server that does not answer."""
        return ConnectTimeout(
            f"{self.where} took the connection and did not answer within {seconds:g} s: "
            "is it 'rdmapost serve'?"
        )


class _Asking:
    """Held only by a local variable, while a question has its turn or waits for it."""

    __slots__ = ("__weakref__",)


class _Turn(weakref.ref[_Asking]):
    """A place in the queue of questions, given up when its _Asking is gone.

    A lock would stay locked if a signal handler raised between its acquisition and the ``try``; a
    local variable is always released.
    """

    __slots__ = ("number", "thread")
    number: int
    thread: int


class Connection(Dialled, ClosedAtTheEnd):
    """A connection to a server; ``dial`` makes it.

    If a signal handler raises (KeyboardInterrupt) during a question (report, look), the connection
    stays usable: the late answer is dropped. In the rare case that it raises while bytes are sent
    or received, the connection is closed.

    A connection that is dropped without close() is closed, with a ResourceWarning.
    """

    def __init__(
        self, context: Context, host: str, port: int, token: str | None, **options: Any
    ) -> None:
        self._socket: socket.socket | None = None
        # One question at a time, from any thread.
        self._turns: set[_Turn] = set()
        self._numbers = itertools.count()
        self._closing = False
        # Closed in the middle of a question, whose end closes the descriptors.
        self._left = False
        self._steady = True
        self._why = ""
        super().__init__(context, **options)
        # Wakes threads waiting for an answer, so that close() need not wait for them. No signal
        # handler can run before the descriptor has its owner: map calls both in C.
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        try:
            (self._wake,) = map(FileIO, map(os.eventfd, (0,), (flags,)), ("r+",))
        except OSError as error:
            with suppress(RdmaError):
                self._give_back()
            raise why_not_reached(show_address((host, port)), error, self.timeout) from error
        try:
            self._session = ClientSession()
            self._socket = self._reach(host, port)
            greeting = self.greeting(token)
            message = next(greeting)
            with suppress(StopIteration):
                while True:
                    message = greeting.send(self._ask(message))
        except BaseException:
            self._abandon()
            with suppress(RdmaError):
                self._give_back()
            raise
        self._where = self._teller.where

    def _reach(self, host: str, port: int) -> socket.socket:
        deadline = time.monotonic() + self.timeout
        where = show_address((host, port))
        self._teller = Teller(where)
        last: OSError = OSError(f"{host} has no address")
        for family, kind, proto, _, address in resolve(host, port, self.timeout):
            try:
                sock = socket.socket(family, kind, proto)
            except OSError as error:
                last = error
                continue
            try:
                # Try every address of a host within the one timeout.
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(address)
                sock.setblocking(False)
                prepare(sock)
                return sock
            except OSError as error:
                sock.close()
                last = error
            except BaseException:
                sock.close()
                raise
        raise why_not_reached(where, last, self.timeout) from last

    def _ask(self, message: Message, more_time: float = 0.0) -> Message:
        """Send a message and return the answer.

        Raises:
            ConnectError: there is none; the connection is then closed, unless other questions were
                in the way.
            ClosedError: another process opened the connection.
        """
        self._refuse_inherited()
        asking = _Asking()
        try:
            mine = self._line_up(asking)
            self._await_turn(mine, self.timeout + more_time, isinstance(message, Bye))
            if self._socket is None or (self._closing and not isinstance(message, Bye)):
                raise ConnectError(f"the connection is closed{self._why}", "lost")
            return self._ask_now(self._socket, message, more_time)
        finally:
            # Do not leave it to the frame, which a traceback keeps.
            del asking
            self._abandon_if_left()

    def _line_up(self, asking: _Asking) -> _Turn:
        # A set, because discard needs the hash, which needs a live referent: one call makes both.
        (turn,) = set(map(_Turn, (asking,), (self._turns.discard,)))
        turn.number, turn.thread = next(self._numbers), get_ident()
        self._turns.add(turn)
        return turn

    def _is_asking(self, mine: _Turn | None = None) -> bool:
        """Return whether this thread is in the middle of a question, other than `mine`."""
        this = get_ident()
        return any(turn.thread == this and turn is not mine for turn in self._turns.copy())

    def _await_turn(self, mine: _Turn, limit: float, leaving: bool) -> None:
        if not leaving and self._is_asking(mine):
            raise ConnectError(
                "this thread is in the middle of another question to the server", "busy"
            )
        deadline = time.monotonic() + limit
        while any(
            turn.number < mine.number and turn.thread != mine.thread for turn in self._turns.copy()
        ):
            if time.monotonic() >= deadline:
                raise ConnectTimeout(
                    f"other threads' questions to {self._teller.where} took more than {limit:g} s"
                )
            time.sleep(0.002)

    def _ask_now(self, sock: socket.socket, message: Message, more_time: float) -> Message:
        self._steady = True
        try:
            answer = self._exchange(sock, message, more_time)
            self._steady = True
            return self._teller.answer(answer)
        except BaseException as error:
            if isinstance(error, ConnectError):
                # close() still has to say goodbye.
                if not self._closing or isinstance(message, Bye):
                    self._hang_up()
            elif not self._steady:
                # It is unknown what has been sent and received.
                self._why = f": {type(error).__name__} interrupted a question"
                self._hang_up()
            raise

    def _exchange(self, sock: socket.socket, message: Message, more_time: float) -> Message:
        session, data = self._session, encode(message)
        leaving = isinstance(message, Bye)
        if session.busy and not leaving:
            # The late answer to an interrupted question.
            late = self._answer(sock, self.timeout)
            if isinstance(late, Error):
                return late
        self._steady = False
        session.ask(message)
        broken: OSError | None = None
        try:
            send_all(sock, data, self.timeout)
        except TimeoutError:
            raise self._teller.silent(self.timeout) from None
        except OSError as error:
            # What the server said before it went may still be pending.
            broken = error
        return self._answer(sock, self.timeout + more_time, broken, leaving)

    def _answer(
        self,
        sock: socket.socket,
        limit: float,
        broken: OSError | None = None,
        leaving: bool = False,
    ) -> Message:
        session, teller = self._session, self._teller
        deadline = time.monotonic() + limit
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        if not leaving:
            poller.register(self._wake, select.POLLIN)
        while True:
            self._steady = False
            try:
                if (answer := session.next_message()) is not None:
                    return answer
            except ProtocolError as error:
                raise teller.wrong(error) from None
            left = deadline - time.monotonic()
            self._steady = True
            ready = poller.poll(min(left, 3600.0) * 1000 + 1) if left > 0 else []
            self._steady = False
            if not leaving and self._closing:
                raise teller.closing()
            if not ready:
                raise teller.silent(limit)
            try:
                data = sock.recv(MAX_LINE)
            except BlockingIOError:
                continue
            except OSError as error:
                raise teller.ended(session.partial, error.strerror or str(error)) from None
            if not data:
                why = "" if broken is None else broken.strerror or str(broken)
                raise teller.ended(session.partial, why)
            session.receive(data)

    # ---- asking the server ----------------------------------------------------

    def report(self, index: int = 1, timeout: float | None = None) -> Arrival | None:
        """Ask the server what has arrived in one of its receives.

        Args:
            index: which, from 1, in order of use.
            timeout: seconds to wait for it, at most 60; a negative one counts as 0; the
                connection's unless given.

        Returns:
            The arrival, or None if it did not come in time.

        Raises:
            TypeError: an argument is not a number.
            ValueError: index is not in 1..2**64-1, or timeout is NaN.
            ClosedError: another process opened the connection.
            ConnectError: the server is gone, no longer has the report, the connection
                was closed meanwhile, or a signal handler has interrupted another question
                of this thread.
            ConnectTimeout: there was no answer in time, or other questions took too long.
        """
        question, wait = self._ask_report(index, timeout)
        return self._as_arrival(self._ask(question, wait + MARGIN_S))

    def look(self, offset: int = 0, length: int | None = None) -> Seen:
        """Ask the server what its memory holds.

        Args:
            offset: from its start.
            length: bytes; all that follow unless given.

        Returns:
            A digest and the first bytes; empty if the server does not tell, because the memory also
            holds others' data and may not be read.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: that is outside the exposed memory.
            ClosedError: another process opened the connection.
            ConnectError: the server is gone, the connection was closed meanwhile, or a
                signal handler has interrupted another question of this thread.
            ConnectTimeout: there was no answer in time, or other questions took too long.
        """
        seen = self._ask(self._ask_look(offset, length))
        assert isinstance(seen, Seen), "nothing else answers a look"
        return seen

    # ---- the end ----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True once the server has gone away or dropped this client.

        It becomes True at once, or within half a minute if the server's host has
        disappeared; the next request says why.  It is False while a request is pending.
        """
        if self._pid != os.getpid() or self._left:
            return True
        asking = _Asking()
        try:
            mine = self._line_up(asking)
            if any(turn.number < mine.number for turn in self._turns.copy()):
                return False
            if (sock := self._socket) is None or (fd := sock.fileno()) < 0:
                return True
            # It speaks unasked only to say why it goes.
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            while poller.poll(0):
                if not self._session.owed or self._is_last(sock):
                    return True
            return False
        finally:
            del asking
            self._abandon_if_left()

    def _is_last(self, sock: socket.socket) -> bool:
        """Read what may be a late answer; return whether it is the end instead."""
        try:
            if not (data := sock.recv(MAX_LINE)):
                return True
            self._session.receive(data)
            return self._session.late()
        except BlockingIOError:
            return False
        except (OSError, ProtocolError):
            self._hang_up()
            return True
        except BaseException:
            self._hang_up()
            raise

    def close(self) -> None:
        """Tell the server, and close everything; do nothing if already closed.

        When it returns, the server has released its side, unless it is gone. Questions in progress
        end with a ConnectError, including one of this thread that a signal handler has interrupted.
        In the child of a fork it does nothing: its parent has the connection.

        In a signal handler or finalizer in the middle of its thread's verb or wait, it does not
        wait for the server, and this side is released once that has ended.

        Raises:
            VerbsError: the device refused.
        """
        if self._pid != os.getpid():
            return
        self._closing, self._where = True, ""
        try:
            if (sock := self._socket) is not None:
                # If another thread has closed it meanwhile, there is nobody to wake.
                with suppress(ValueError):
                    self._wake.write((1).to_bytes(8, sys.byteorder))
                self._part(sock)
        finally:
            if not (self._left and self._turns):
                self._abandon()
            self._give_back()

    def _abandon_if_left(self) -> None:
        if self._left and not self._turns:
            self._abandon()

    def _abandon(self) -> None:
        self._hang_up()
        self._wake.close()

    def _part(self, sock: socket.socket) -> None:
        if (in_verb := native.in_verb()) or self._is_asking():
            self._left = True
            # The server's release may have to wait for that verb.
            self._leave(sock, 0.0 if in_verb else self.timeout)
        else:
            with suppress(ConnectError):
                self._ask(Bye())

    def _leave(self, sock: socket.socket, limit: float) -> None:
        """Tell the server in the middle of a question; wait until it has gone."""
        deadline = time.monotonic() + limit
        poller = select.poll()
        with suppress(OSError):
            poller.register(sock, select.POLLIN)
            # After half a question it could not be parsed.
            if self._steady:
                sock.send(encode(Bye()))
            sock.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0 and poller.poll(left * 1000 + 1):
                if not sock.recv(MAX_LINE):
                    break
            # Anything waiting for an answer now continues.
            sock.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def __enter__(self) -> Self:
        self._refuse_inherited()
        return self
