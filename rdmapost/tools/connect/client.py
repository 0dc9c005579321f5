"""The blocking client."""

from __future__ import annotations

import itertools
import math
import os
import select
import socket
import time
import weakref
from contextlib import suppress
from threading import get_ident
from typing import Any

from ..._binding import native
from ...enums import QPType
from ...errors import ClosesOnExit, RdmaError, is_from_system, suppress_system_errors
from ...resources.cq import CQ, WC
from ...resources.device import Context
from ...resources.mr import MR
from ...resources.srq import SRQ
from ..default_ports import CONNECT_PORT
from ..resource_stack import CloseAfterwards
from ..tcp import TCPTimeout, send_all
from ..tcp import dial as dial_tcp
from .base_connection import BaseConnection
from .client_session import IORequests, NoData, Outcome
from .errors import ConnectError, ConnectTimeout, ProtocolError, not_reached
from .host_port import check_where
from .protocol_messages import MAX_LINE, Arrival, Bye, Message, Seen, encode
from .qp_options import QPOptions
from .server_state import check_token
from .wakeup import Wakeup

MARGIN_S = 1.0
"""How many seconds an answer may take beyond the time that the server was asked to wait."""


def dial(
    context: Context,
    host: str = "127.0.0.1",
    port: int = CONNECT_PORT,
    *,
    qp_type: QPType = QPType.RC,
    token: str | None = None,
    timeout: float = 5.0,
    local_size: int | None = None,
    local_access: int | None = None,
    depth: int = 16,
    max_inline_data: int = 0,
    mr: MR | None = None,
    srq: SRQ | None = None,
    cq: CQ | None = None,
    qp_options: QPOptions | None = None,
    private_data: bytes = b"",
    port_num: int = 1,
    gid_index: int | None = None,
) -> Connection:
    """Connect a queue pair to one on a server.

    Args:
        context: an open device that can reach the server's device; soft0 reaches only
            servers in the same process.
        host, port: where the server listens.
        qp_type: RC, UC or UD.
        token: the token that the server requires.
        timeout: seconds for each step.
        local_size: bytes of local memory; 0 still allocates 1 byte; default: 4096.
        local_access: what the server may do with that memory, an Access; LOCAL_WRITE is always
            added.
        depth: work requests that each queue must hold, with one SGE each.
        max_inline_data: the most bytes in one inline work request.
        mr: use this region instead of allocating local memory (local_size, local_access); the
            queue pair is created in its protection domain. The region's key gives the server
            the region's access rights; a window's key gives it the window's. To let the server use
            only windows, register the region with only LOCAL_WRITE | MW_BIND.
        srq: take the queue pair's receives from this SRQ.
        cq: where the queue pair's work requests complete; by default it has its own CQ, with room
            for its send queue and for its receive queue or the SRQ at its current size.
        qp_options: more arguments of QP (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge,
            max_inline_data, send_ops_flags, sq_sig_all, checked) and of QP.connect (timeout,
            retry_cnt, rnr_retry, min_rnr_timer, max_rd_atomic, max_dest_rd_atomic, sl,
            traffic_class). They override depth and max_inline_data. The other defaults are those
            of QP and QP.connect.
        private_data: up to 256 bytes for the server's owner.
        port_num: the local port, from 1.
        gid_index: the local GID; default: chosen by choose_gid.

    Returns:
        The connection; a context manager.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or conflicts with another one.
        ClosedError: the device, mr, srq or cq is closed.
        ConnectError: nothing listens there, or the server refused; the message says why.
        ConnectTimeout: the server did not answer in time.
        ProtocolError: the program that listens there is not an rdmapost server.
        VerbsError: the device refused.
        MemoryError: there is no memory for local_size bytes.
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
        mr=mr,
        srq=srq,
        cq=cq,
        qp_options=qp_options,
        private_data=private_data,
        port_num=port_num,
        gid_index=gid_index,
    )


_OF_CLOSED_SOCKETS = (OSError, ValueError)
"""The exceptions (ConnectError is an OSError) that a request raises in the child if a signal
handler forks: the child's sockets are closed."""


def _from_system(error: OSError) -> OSError:
    if not is_from_system(error):
        raise error
    return error


class _Request:
    """Exists while a request waits for its turn or has it; only a local variable refers to this.

    close(), which does not wait for a turn, has a _Request, too, to keep the descriptors open.
    """

    __slots__ = ("__weakref__",)


class _Turn(weakref.ref[_Request]):
    """A place in the queue of requests, given up when its _Request is gone.

    A lock would stay locked if a signal handler raised between its acquisition and the ``try``; a
    local variable is always released.
    """

    __slots__ = ("number", "thread")
    number: float
    """-infinity until a number is assigned; infinity for close()."""
    thread: int


class Connection(BaseConnection, ClosesOnExit):
    """A connection to a server; ``dial`` creates it.

    Post to ``qp``.  ``**target(offset)`` gives a work request's fields for an offset in the
    server's memory: ``RdmaWrite(peer.mr[:5], **peer.target(64))``.  On UD, ``**address`` gives
    those that address the server's queue pair: ``Send(peer.mr[:5], **peer.address)``.

    Attributes:
        qp: the queue pair, in RTS.
        cq: where all of its work requests complete.
        mr: local memory.
        offer: the server's offer: addr, rkey, size, access, receives, receive_size, and its
            private_data.
        address: the fields that address the server's queue pair, on UD; otherwise empty.
        headroom: bytes in front of a received message: the GRH on UD.

    If a request (report, look) ends with ConnectTimeout, or because a signal handler raises
    (KeyboardInterrupt) while the connection waits for the answer, the connection stays usable: the
    late answer is dropped. If a handler raises while the request is sent or the answer is read,
    and after any other ConnectError, the connection is closed, and later requests say why.

    A connection that is dropped without close() is closed, with a ResourceWarning.
    """

    def __init__(
        self, context: Context, host: str, port: int, token: str | None, **options: Any
    ) -> None:
        self._socket: socket.socket | None = None
        # One request at a time, from any thread.
        self._turns: set[_Turn] = set()
        self._numbers = itertools.count()
        self._closing = False
        # Once this is set, the last request in progress closes the descriptors.
        self._over = False
        self._consistent = True
        super().__init__(context, host, port, **options)
        where = self._session.where
        # Wakes threads waiting for an answer, so that close() need not wait for them.
        self._wakeup: Wakeup | None = None
        try:
            try:
                self._wakeup = Wakeup()
                self._socket = dial_tcp(host, port, self.timeout)
            except OSError as error:
                raise not_reached(where, error, self.timeout) from error
            self._drive(self._socket, self._handshake(token))
        except BaseException as error:
            self._abandon()
            with suppress(RdmaError):
                self._stack.close()
            if isinstance(error, _OF_CLOSED_SOCKETS):
                self._refuse_inherited()
            raise
        self._where = where

    def _ask(self, message: Message, more_time: float = 0.0) -> Message:
        """Send a message and return the answer."""
        self._refuse_inherited()
        request = _Request()
        leaving = isinstance(message, Bye)
        try:
            mine = self._enqueue(request)
            self._await_turn(mine, self.timeout + more_time, leaving)
            sock = self._socket
            if sock is None or self._over or (self._closing and not leaving):
                raise ConnectError(f"the connection is closed{self._closed_by}", "lost")
            try:
                return self._drive(sock, self._session.ask(message, more_time), leaving)
            except BaseException as error:
                if isinstance(error, _OF_CLOSED_SOCKETS):
                    self._refuse_inherited()
                self._note_failure(error, leaving)
                raise
        finally:
            # A traceback would keep the frame alive, and so the turn.
            del request
            self._close_unused()

    def _note_failure(self, error: BaseException, leaving: bool) -> None:
        if self._session.survives(error) and not leaving:
            self._consistent = True
        elif isinstance(error, ConnectError):
            # close() still has to send a Bye.
            if not self._closing or leaving:
                self._closed_by = f": {error}"
                self._disconnect()
        elif not self._consistent:
            # How much was sent and received is unknown.
            self._closed_by = f": {type(error).__name__} interrupted a request"
            self._disconnect()

    def _enqueue(self, request: _Request, asks: bool = True) -> _Turn:
        try:
            # A weak reference must be hashed while its referent exists: set(map()) creates and
            # hashes it in one call, which no signal handler interrupts.
            (turn,) = set(map(_Turn, (request,), (self._turns.discard,)))
            # Add the turn before it has a number: later turns wait until the number is assigned,
            # because it may be lower than theirs.
            turn.number, turn.thread = -math.inf if asks else math.inf, get_ident()
            self._turns.add(turn)
            if asks:
                turn.number = next(self._numbers)
            return turn
        finally:
            # As in _ask: a traceback would keep this frame, too.
            del request

    def _is_asking(self, mine: _Turn | None = None) -> bool:
        """Return whether this thread is in the middle of a request, other than `mine`."""
        this = get_ident()
        return any(
            [
                turn.thread == this and turn is not mine and turn.number < math.inf
                for turn in self._turns.copy()
            ]
        )

    def _await_turn(self, mine: _Turn, limit: float, leaving: bool) -> None:
        if not leaving and self._is_asking(mine):
            raise ConnectError(
                "this thread is in the middle of another request to the server", "busy"
            )
        deadline = time.monotonic() + limit
        # Every turn that may have a lower number is in the set: later turns get higher numbers.
        ahead = {turn for turn in self._turns.copy() if turn.thread != mine.thread}
        while any([turn.number < mine.number for turn in ahead & self._turns.copy()]):
            if time.monotonic() >= deadline:
                raise ConnectTimeout(
                    f"other threads' requests to {self._session.where} took more than {limit:g} s"
                )
            time.sleep(0.002)

    def _drive(self, sock: socket.socket, requests: IORequests, leaving: bool = False) -> Message:
        """Perform a session's I/O requests, and return the server's answer.

        If leaving, continue even though close() was called: close() itself sends the Bye.
        """
        # False while it is unknown how much was sent and received.
        self._consistent = False
        outcome: Outcome | None = None
        while True:
            try:
                # The first outcome is None, which starts the generator.
                data, deadline = requests.send(outcome)  # type: ignore[arg-type]
            except StopIteration as end:
                self._consistent = True
                answer: Message = end.value
                return answer
            if data:
                outcome = self._send(sock, data, deadline)
            else:
                outcome = self._receive(sock, deadline, leaving)

    def _send(self, sock: socket.socket, data: bytes, deadline: float) -> Outcome:
        try:
            send_all(sock, data, max(0.0, deadline - time.monotonic()))
        except TCPTimeout:
            return NoData.TIMED_OUT
        except OSError as error:
            return _from_system(error)
        return b""

    def _receive(self, sock: socket.socket, deadline: float, leaving: bool) -> Outcome:
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        if not leaving and (wakeup := self._wakeup) is not None:
            poller.register(wakeup.fd, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            self._consistent = True
            ready = poller.poll(min(left, 3600.0) * 1000 + 1) if left > 0 else []
            self._consistent = False
            if not leaving and self._closing:
                return NoData.CLOSED_MEANWHILE
            if not ready:
                return NoData.TIMED_OUT
            try:
                return sock.recv(MAX_LINE)
            except BlockingIOError:
                continue
            except OSError as error:
                return _from_system(error)

    def wait(self, count: int = 1, timeout: float | None = 5.0) -> list[WC]:
        """Wait for completions on this side (cq.wait).

        The wait does not end when the server goes away.  Work requests in flight to the server
        complete with an error; posted receives do not complete.  Wait with a timeout, and then see
        whether the connection is ``closed``.

        Args:
            count: how many.
            timeout: seconds; None for no limit.

        Raises:
            WaitTimeout: fewer came; they stay for the next wait.
            WaitCancelled: cq.cancel_waits() was called.
            TypeError: an argument is not a number.
            ValueError: count is negative, or timeout is NaN.
            ClosedError: the connection is closed, or is closed during the wait. With your own
                CQ (dial's cq), only closing that CQ ends the wait.
            VerbsError: the device failed.
        """
        return self.cq.wait(count, timeout)

    # ---- asking the server ----------------------------------------------------

    def report(self, index: int = 1, timeout: float | None = 5.0) -> Arrival | None:
        """Ask the server what has arrived in one of its receives.

        Args:
            index: which receive, from 1, in order of use.
            timeout: seconds to wait for the arrival; a negative one counts as 0; None for no limit.

        Returns:
            The arrival, or None if it did not come in time. If the server posts no receives, None
                at once.

        Raises:
            TypeError: an argument is not a number.
            ValueError: index is not in 1..2**64-1, or timeout is NaN.
            ClosedError: another process opened the connection.
            ConnectError: the server is gone or no longer keeps the arrival, the connection
                is closed, or a signal handler has interrupted another request of this thread.
            ConnectTimeout: there was no answer within timeout plus the connection's timeout plus
                one second, or other requests took too long; the connection stays usable.
        """
        for request, wait in self._report_requests(index, timeout):
            answer = self._ask(request, wait + MARGIN_S)
            if isinstance(answer, Arrival):
                return answer
        return None

    def look(self, offset: int = 0, length: int | None = None) -> Seen:
        """Ask the server what its memory holds.

        Args:
            offset: bytes from the start of its memory.
            length: bytes; default: all that follow.

        Returns:
            A digest of all those bytes, and the first 1024 of them; for the rest, compare digests
            or look again.  Both are empty if the server does not reveal them: the memory also holds
            others' data and the client may not read it, or it has no buffer (MR.at,
            MR.from_dmabuf).

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the range is outside the exposed memory.
            ClosedError: another process opened the connection.
            ConnectError: the server is gone, the connection was closed in the meantime, or a
                signal handler has interrupted another request of this thread.
            ConnectTimeout: there was no answer in time, or other requests took too long; the
                connection stays usable.
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
        if self._pid != os.getpid() or self._over:
            return True
        request = _Request()
        try:
            mine = self._enqueue(request)
            if any([turn.number < mine.number for turn in self._turns.copy()]):
                return False
            if (sock := self._socket) is None or self._over or (fd := sock.fileno()) < 0:
                return True
            return self._has_ended(sock, fd)
        finally:
            del request
            self._close_unused()

    def _has_ended(self, sock: socket.socket, fd: int) -> bool:
        """Read any unsolicited data; return whether the connection has ended."""
        # Without a request, the server sends only its last error.
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while poller.poll(0):
            if not self._session.protocol.answer_pending or self._read_unasked(sock):
                return True
        return False

    def _read_unasked(self, sock: socket.socket) -> bool:
        """Read bytes that came without a request, such as a late answer; return whether the
        connection has ended."""
        try:
            return self._session.is_over(sock.recv(MAX_LINE))
        except BlockingIOError:
            return False
        except (OSError, ProtocolError) as error:
            self._closed_by = f": {error}"
            self._disconnect()
            return True
        except BaseException:
            self._disconnect()
            raise

    def close(self) -> None:
        """Notify the server, and close everything; do nothing if already closed.

        "Everything" includes what the caller has created on the connection's own PD (qp.pd), such
        as address handles (qp.ah_to), regions and windows.  The PD of an mr or srq passed to dial
        stays open, with everything on it that does not belong to the connection.

        When close() returns, the server has released its side, unless it is gone or has not
        answered within the timeout given to dial; context.close_all() does not wait. Requests in
        progress end with a ConnectError, including one of this thread that a signal handler has
        interrupted. In the child of a fork, close() does nothing: the connection belongs to the
        parent.

        If called in a signal handler or finalizer that interrupts a verb or a wait of its thread,
        close() does not wait for the server; this side is released once the verb or the wait has
        returned.

        Raises:
            InUseError: one of the caller's queue pairs, on another PD, uses the connection's CQ.
            VerbsError: the device refused.
        """
        if self._pid != os.getpid():
            return
        self._closing, self._where = True, ""
        with CloseAfterwards(self._release):
            request: _Request | None = None
            try:
                request = _Request()
                self._enqueue(request, asks=False)
                if (wakeup := self._wakeup) is not None:
                    wakeup.ring()
                if (sock := self._socket) is not None and not self._over:
                    self._leave(sock)
            finally:
                self._disconnect()
                del request
                self._close_unused()

    def _abandon(self) -> None:
        self._disconnect()
        self._close_unused()

    def _leave(self, sock: socket.socket) -> None:
        if (in_verb := native.in_verb()) or self._is_asking():
            # The server's release may have to wait for that verb.
            self._shut_down(sock, 0.0 if in_verb else self.timeout)
        else:
            with suppress(ConnectError):
                self._ask(Bye())

    def _shut_down(self, sock: socket.socket, limit: float) -> None:
        """Send a Bye even if a request is unfinished; wait for the server to hang up."""
        deadline = time.monotonic() + limit
        poller = select.poll()
        with suppress_system_errors:
            poller.register(sock, select.POLLIN)
            # The server could not parse a Bye after half a request.
            if self._consistent:
                sock.send(encode(Bye()))
            sock.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0 and poller.poll(left * 1000 + 1):
                if not sock.recv(MAX_LINE):
                    break
            # Requests waiting for an answer end now.
            sock.shutdown(socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        """End the TCP connection, and with it every request in progress."""
        self._over = True
        if (sock := self._socket) is not None:
            # Not close(): the child of a fork may have a copy. Ignore errors: other code may have
            # closed the descriptor.
            with suppress_system_errors:
                sock.shutdown(socket.SHUT_RDWR)

    def _close_unused(self) -> None:
        """Close the descriptors once the connection is over and no request can use them.

        If they were closed earlier, their numbers could be reused, and another thread's system call
        would reach the wrong file.
        """
        # Check in this order: a request takes its turn first, and then checks _over.
        if not self._over or self._turns:
            return
        if (sock := self._socket) is not None:
            with suppress_system_errors:
                sock.close()
        self._socket = self._wakeup = None
