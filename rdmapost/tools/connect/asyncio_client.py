"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from typing import Any

from ...enums import QPType
from ...errors import RdmaError
from ...resources.cq import CQ, WC
from ...resources.device import Context
from ...resources.mr import MR
from ...resources.srq import SRQ
from ..default_ports import CONNECT_PORT
from ..resource_stack import AsyncClosesOnExit, CloseAfterwards
from ..tcp import prepare
from .base_connection import BaseConnection
from .client import MARGIN_S
from .client_session import IORequests, NoData, Outcome
from .errors import ConnectError, ProtocolError, not_reached
from .host_port import check_where
from .protocol_messages import MAX_LINE, Arrival, Bye, Message, Seen
from .qp_options import QPOptions
from .server_state import check_token


async def adial(
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
) -> AsyncConnection:
    """Connect a queue pair to one on a server: ``dial`` for asyncio.

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
        The connection; an asynchronous context manager.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or conflicts with another one.
        ClosedError: the device, mr, srq or cq is closed.
        ConnectError: nothing listens there, or the server refused; the message says why.
        ConnectTimeout: the server did not answer in time.
        ProtocolError: the program that listens there is not an rdmapost server.
        VerbsError: the device refused.
    """
    port = check_where(host, port)
    check_token(token)
    connection = AsyncConnection(
        context,
        host,
        port,
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
    await connection._connect(host, port, token)
    return connection


class AsyncConnection(BaseConnection, AsyncClosesOnExit):
    """A connection to a server; ``adial`` creates it.  Its attributes are those of Connection.

    If a request (report, look) is cancelled (by asyncio.timeout(), for instance) or ends with
    ConnectTimeout, the connection stays usable: the late answer is dropped.  After any other
    ConnectError the connection is closed, and later requests say why.

    The connection belongs to the event loop that ``adial`` ran in: wait, report, look and close
    raise RdmaError elsewhere.

    A connection that is dropped without close() releases everything, with a ResourceWarning.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()
        self._closing = asyncio.get_running_loop().create_future()
        super().__init__(*args, **options)

    async def _connect(self, host: str, port: int, token: str | None) -> None:
        where = self._session.where
        try:
            try:
                async with asyncio.timeout(self.timeout):
                    self._reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
            except (OSError, UnicodeError) as error:
                failed = error if isinstance(error, OSError) else OSError(str(error))
                raise not_reached(where, failed, self.timeout) from error
            prepare(writer.get_extra_info("socket"))
            self._read_on()
            self._writer = writer
            await self._drive(writer, self._handshake(token))
        except BaseException:
            self._disconnect()
            with suppress(RdmaError):
                self._stack.close()
            raise
        self._where = where

    def _read_on(self) -> None:
        # A read is always in progress, so that the server's end is noticed even without a request.
        self._reading = asyncio.create_task(self._reader.read(MAX_LINE))
        self._reading.add_done_callback(_expect_failure)

    async def _ask(self, message: Message, more_time: float = 0.0) -> Message:
        self._refuse_inherited()
        self._refuse_elsewhere()
        leaving = isinstance(message, Bye)
        async with self._turn:
            if self._writer is None or (self._closing.done() and not leaving):
                raise ConnectError(f"the connection is closed{self._closed_by}", "lost")
            try:
                request = self._session.ask(message, more_time)
                return await self._drive(self._writer, request, leaving)
            except ConnectError as error:
                if self._session.survives(error) and not leaving:
                    raise
                # close() still has to send a Bye.
                if not self._closing.done() or leaving:
                    self._closed_by = f": {error}"
                    self._disconnect()
                raise

    def _refuse_elsewhere(self) -> None:
        """Raise RdmaError unless this is the event loop that ``adial`` ran in."""
        loop = self._closing.get_loop()
        if loop.is_closed():
            raise RdmaError(f"{self._named} ended with its event loop, which is closed")
        if loop is not asyncio.get_running_loop():
            raise RdmaError(
                f"{self._named} belongs to another event loop: use it in the one that adial() "
                "ran in (asyncio.run_coroutine_threadsafe)"
            )

    def _is_at_home(self) -> bool:
        """Whether this code runs in the event loop that ``adial`` ran in."""
        try:
            return self._closing.get_loop() is asyncio.get_running_loop()
        except RuntimeError:
            return False

    @property
    def _named(self) -> str:
        return f"the connection to {self._where}" if self._where else "the connection"

    async def _drive(
        self, writer: asyncio.StreamWriter, requests: IORequests, leaving: bool = False
    ) -> Message:
        """Perform a session's I/O requests, and return the server's answer, as Connection does."""
        try:
            data, deadline = next(requests)
            while True:
                left = max(0.0, deadline - time.monotonic())
                if data:
                    outcome = await self._send(writer, data, left)
                else:
                    outcome = await self._receive(left, leaving)
                data, deadline = requests.send(outcome)
        except StopIteration as end:
            answer: Message = end.value
            return answer

    async def _send(self, writer: asyncio.StreamWriter, data: bytes, left: float) -> Outcome:
        try:
            async with asyncio.timeout(left):
                writer.write(data)
                await writer.drain()
        except TimeoutError:
            return NoData.TIMED_OUT
        except OSError as error:
            return error
        return b""

    async def _receive(self, left: float, leaving: bool) -> Outcome:
        awaited: set[asyncio.Future[Any]] = {self._reading}
        if not leaving:
            awaited.add(self._closing)
        # A cancellation here ends the wait, not the read.
        done, _ = await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not leaving and self._closing.done():
            return NoData.CLOSED_MEANWHILE
        if not done:
            return NoData.TIMED_OUT
        try:
            return self._take_read()
        except OSError as error:
            return error

    def _take_read(self) -> bytes:
        """Return the bytes that have been read, and start the next read; b"" at end of file."""
        data = b"" if self._reading.cancelled() else self._reading.result()
        if data:
            self._read_on()
        return data

    async def wait(self, count: int = 1, timeout: float | None = 5.0) -> list[WC]:
        """Wait for completions on this side (cq.completions): Connection.wait for asyncio.

        Args:
            count, timeout: as for Connection.wait.

        Raises:
            WaitTimeout, WaitCancelled, TypeError, ValueError, ClosedError, VerbsError: as
                Connection.wait does.
            RdmaError: the connection belongs to another event loop, or its event loop is closed;
                or a thread or another event loop is already waiting on the same CQ.
        """
        self._refuse_inherited()
        self._refuse_elsewhere()
        return await self.cq.completions(count, timeout)

    async def report(self, index: int = 1, timeout: float | None = 5.0) -> Arrival | None:
        """Ask the server what has arrived in one of its receives: Connection.report for asyncio.

        Args:
            index, timeout: as for Connection.report.

        Returns:
            The arrival, or None if it did not come in time.

        Raises:
            TypeError, ValueError, ClosedError, ConnectError: as Connection.report does.
            RdmaError: the connection belongs to another event loop, or its event loop is closed.
        """
        for request, wait in self._report_requests(index, timeout):
            answer = await self._ask(request, wait + MARGIN_S)
            if isinstance(answer, Arrival):
                return answer
        return None

    async def look(self, offset: int = 0, length: int | None = None) -> Seen:
        """Ask the server what its memory holds: Connection.look for asyncio.

        Args:
            offset, length: as for Connection.look.

        Returns:
            A digest of all those bytes, and the first 1024 of them.

        Raises:
            TypeError, ValueError, ClosedError, ConnectError: as Connection.look does.
            RdmaError: the connection belongs to another event loop, or its event loop is closed.
        """
        seen = await self._ask(self._ask_look(offset, length))
        assert isinstance(seen, Seen), "nothing else answers a look"
        return seen

    @property
    def closed(self) -> bool:
        """True once the server has gone away or dropped this client, as in Connection."""
        if self._pid != os.getpid() or self._closing.get_loop().is_closed():
            return True
        if self._turn.locked():
            return False
        # Without a request, the server sends only its last error.
        if (
            self._writer is None
            or not self._reading.done()
            or not self._session.protocol.answer_pending
        ):
            return self._writer is None or self._reading.done()
        if not self._is_at_home():
            # A late answer was read, and only the connection's event loop can read on.
            return False
        try:
            return self._session.is_over(self._take_read())
        except (OSError, ProtocolError) as error:
            self._closed_by = f": {error}"
            self._disconnect()
            return True

    async def close(self) -> None:
        """Notify the server, and close everything, as Connection.close does.

        Do nothing if already closed, or in the child of a fork: the connection belongs to the
        parent. Other tasks' pending requests raise ConnectError.

        Raises:
            InUseError: one of the caller's queue pairs, on another PD, uses the connection's CQ.
            VerbsError: the device refused.
            RdmaError: the connection belongs to another event loop (nothing is closed), or
                its event loop has been closed (everything is released, but the server is not
                notified).
        """
        if self._pid != os.getpid():
            return
        if self._writer is not None:
            try:
                self._refuse_elsewhere()
            except RdmaError:
                if self._closing.get_loop().is_closed():
                    self._where = ""
                    writer, self._writer = self._writer, None
                    _shut_down(writer)
                    self._release()
                raise
        self._where = ""
        if not self._closing.done():
            self._closing.set_result(None)
        with CloseAfterwards(self._release):
            try:
                if self._writer is not None:
                    with suppress(ConnectError):
                        await self._ask(Bye())
            finally:
                self._disconnect()

    def _abandon(self) -> None:
        if self._writer is not None:
            # A closed loop has already closed the connection.
            with suppress(RuntimeError):
                loop = self._closing.get_loop()
                loop.call_soon_threadsafe(_close, self._writer, self._reading)

    def _disconnect(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            _close(writer, self._reading)


def _expect_failure(reading: asyncio.Task[bytes]) -> None:
    """Keep the event loop from reporting an exception that nobody has retrieved."""
    if not reading.cancelled():
        reading.exception()


def _close(writer: asyncio.StreamWriter, reading: asyncio.Task[bytes]) -> None:
    reading.cancel()
    writer.close()
    # close() is not enough: the child of a fork may have a copy of the descriptor.
    _shut_down(writer)


def _shut_down(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
