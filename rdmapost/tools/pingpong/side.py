"""One side of a ping-pong: its queue pair, its memory, the run, and what can go wrong."""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable
from typing import Any

from ..._arguments import counted, expect, index, member, seconds, time_limit
from ...enums import MTU, Access, LinkLayer, QPState, QPType, SendFlags, WCStatus
from ...errors import RdmaError, WaitTimeout
from ...posting.wr import RecvWR, Send
from ...resources.ah import AH, AHAttr
from ...resources.cq import CQ, WC
from ...resources.device import Context
from ...resources.device_attr import usable_mtu
from ...resources.gid import GID
from ...resources.mr import MR
from ...resources.pd import PD
from ...resources.qp import DEFAULT_QKEY, QP
from ...standard.wire import GRH_BYTES
from ..default_ports import PINGPONG_PORT
from ..reachability import why_confined
from ..resource_stack import ResourceHolder, ResourceStack
from .handshake import DONE, Address, PingpongError, accept, dial
from .payload import FILL, fill, what_is_wrong
from .result import Latency, Result
from .settings import Settings

QP_TYPES = (QPType.RC, QPType.UC, QPType.UD)

_RECV_ID, _SEND_ID = 1, 2
_POISON = 0xA5
_NO_GID = GID(bytes(16))
_PROGRESS_EVERY_NS = 200_000_000
_RECEIVES_AT_ONCE = 16


class Pingpong(ResourceHolder):
    """One side of a ping-pong; a context manager that runs once.

    Args:
        context: an open device; close() refuses to close it before the Pingpong, and close_all()
            closes both.
        qp_type: RC, UC or UD; the same on both sides.
        size: bytes per message, at least 1, and on UD at most the port's MTU; the same on
            both sides.  By default 4096, or 1024 on UD, like the stock programs.
        iters: messages each way, at least 1; the same on both sides.
        rx_depth: how many receives to keep posted, at least 1.
        mtu: the path MTU of RC and UC, the same on both sides; by default 1024, like the
            stock programs, or the port's active MTU if that is smaller.
        validate: check the data at the end.  The client marks the start of every page
            with 0, like ``-c`` of the stock programs, so a server that validates needs a
            client that does, too.
        events: sleep until a completion event; otherwise poll continuously.
        sl: service level, 0..15.
        port_num: the local port, from 1.
        gid_index: the local GID; by default choose_gid chooses it.  On InfiniBand the GID is
            sent to the peer only if gid_index is given.
        timeout: seconds for each step of the handshake, and for each message.

    Attributes:
        size: bytes per message.
        iters: messages each way.
        local: the address sent to the peer.
        remote: the peer's address; None until it is known.
        gid_index: the local GID of that address, or None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of range, or the type is not supported.
        ClosedError: the device is closed.
        RdmaError: the port has no GID, or not the one asked for.
        VerbsError: the device refused.
    """

    def __init__(
        self,
        context: Context,
        qp_type: QPType = QPType.RC,
        *,
        size: int | None = None,
        iters: int = 1000,
        rx_depth: int = 500,
        mtu: MTU | None = None,
        validate: bool = False,
        events: bool = False,
        sl: int = 0,
        port_num: int = 1,
        gid_index: int | None = None,
        timeout: float = 5.0,
    ) -> None:
        expect("context", context, Context)
        qp_type = member("qp_type", qp_type, QPType)
        if qp_type not in QP_TYPES:
            raise ValueError(f"qp_type: a pingpong needs RC, UC or UD, not {qp_type.name}")
        port = context.query_port(port_num)
        self._ud = qp_type is QPType.UD
        iters, rx_depth, sl = index("iters", iters), index("rx_depth", rx_depth), index("sl", sl)
        if size is None:
            size = 1024 if self._ud else 4096
        self.size = index("size", size)
        active = usable_mtu(port)
        self._path_mtu = min(MTU.MTU_1024, active) if mtu is None else member("mtu", mtu, MTU)
        if self._path_mtu > active:
            raise ValueError(
                f"mtu={self._path_mtu.bytes} is more than the active MTU of "
                f"{context.name} port {port_num}, {active.bytes}"
            )
        longest, why = port.max_msg_sz, ""
        if self._ud:
            longest = active.bytes
            why = f": a UD message is one packet, and {context.name} port {port_num} has this MTU"
        for name, value, minimum, maximum in (
            ("size", self.size, 1, longest),
            ("iters", iters, 1, (1 << 31) - 1),
            ("rx_depth", rx_depth, 1, min(context.attr.max_qp_wr, context.attr.max_cqe - 1)),
            ("sl", sl, 0, 15),
        ):
            if not minimum <= value <= maximum:
                reason = why if name == "size" and value > maximum else ""
                raise ValueError(f"{name}={value} is not in {minimum}..{maximum}{reason}")
        for name, given in (("validate", validate), ("events", events)):
            expect(name, given, bool)
        self.iters, self.validate, self.timeout = iters, validate, time_limit(timeout)
        self._rx_depth, self._events, self._sl = rx_depth, events, sl
        self._headroom = GRH_BYTES if self._ud else 0
        self._peer = "the peer"
        self._ran = self._compared = False
        self._settings = Settings(
            qp_type, self.size, self.iters, None if self._ud else self._path_mtu
        )
        self.remote: Address | None = None
        super().__init__()
        with self._stack.closed_on_error() as stack:
            self._pd = stack.add(PD(context))
            self._cq = stack.add(CQ(context, rx_depth + 1))
            # The resources that the queue pair's work requests use are closed after it. Do not
            # reset it first: in RESET, Soft-RoCE drops unsent packets, including the last
            # acknowledgement, and the peer would report a timeout.
            self._opened = stack.add(ResourceStack())
            self._qp = stack.add(
                QP(
                    self._pd,
                    qp_type,
                    self._cq,
                    max_send_wr=1,
                    max_recv_wr=rx_depth,
                    max_send_sge=1,
                    max_recv_sge=1,
                    port_num=port_num,
                    gid_index=gid_index,
                )
            )
            by_gid = port.link_layer is LinkLayer.ETHERNET or gid_index is not None
            gid = self._qp.gid.gid if by_gid else _NO_GID
            self.gid_index = self._qp.gid.gid_index if by_gid else None
            self._needs_gid = port.link_layer is LinkLayer.ETHERNET
            self.local = Address(port.lid, self._qp.qp_num, self._qp.psn, gid)

    def run_client(
        self, host: str, port: int = PINGPONG_PORT, *, progress: Callable[[int], None] | None = None
    ) -> Result:
        """Connect to a server and run the test.

        Args:
            host, port: where the server listens.
            progress: called with 0 when the handshake is done, then occasionally with
                the number of messages that have come back.

        Returns:
            What was measured.

        Raises:
            PingpongError: the server cannot be reached, breaks the handshake, does
                not answer, or is gone; or the data is not what was sent.
            ClosedError: the Pingpong is closed, before or during the run: by its close(), or by
                the context's close_all().
            RdmaError: it has already run.
            VerbsError: the device refused.
        """
        self._begin(is_client=True)
        with dial(self._cq, host, port, self.timeout) as line:
            self._peer = line.who
            line.send(self.local.encode())
            remote = line.peer()
            self._connect(remote)
            line.send(DONE)
            self._compared = line.compare(self._settings)
        return self._run("client", remote, progress)

    def run_server(
        self,
        listener: socket.socket,
        *,
        timeout: float | None = 5.0,
        progress: Callable[[int], None] | None = None,
    ) -> Result:
        """Wait for one client and run the test.

        Args:
            listener: a listening socket (``listen``); closed when a client has connected.
            timeout: seconds to wait for a client; None for no limit.
            progress: called with 0 when the handshake is done, then occasionally with
                the number of messages received.

        Returns:
            What was measured.

        Raises:
            PingpongError: no client connected; or the client broke the handshake, or is gone;
                or the data is not that of a client that validates.
            TypeError: timeout is not a number.
            ValueError: it is NaN.
            ClosedError: the Pingpong is closed, before or during the run: by its close(), or by
                the context's close_all().
            RdmaError: it has already run.
            VerbsError: the device refused.
        """
        self._begin(is_client=False)
        with accept(self._cq, listener, self.timeout, seconds(timeout)) as line:
            self._peer = line.who
            remote = line.peer()
            # Connect first: once the client has the answer, it may send.
            self._connect(remote)
            line.send(self.local.encode())
            line.done()
            self._compared = line.compare(self._settings)
        return self._run("server", remote, progress)

    # ---- before ---------------------------------------------------------------

    def _begin(self, *, is_client: bool) -> None:
        """Register the memory and post the receives, before the peer learns our address."""
        if self._ran:
            raise RdmaError("a Pingpong runs once; make another one")
        self._ran = True
        slot = self._headroom + self.size
        # A server sends the received data back from the same buffer, as the stock programs do.
        # A client has two buffers, to check the data that it receives.
        self._mr = mr = self._opened.add(
            MR(self._pd, slot * (2 if is_client else 1), Access.LOCAL_WRITE)
        )
        self._receive_offset = slot if is_client else 0
        if is_client:
            fill(mr.buffer[self._headroom : slot], marked=self.validate)
        fill(mr.buffer[self._receive_offset :], _POISON if self.validate else FILL)
        self._receive = RecvWR(
            mr[self._receive_offset : self._receive_offset + slot], wr_id=_RECV_ID
        )
        self._qp.to_init(0)
        self._qp.post_recv([self._receive] * self._rx_depth)

    def _connect(self, remote: Address) -> None:
        qp, self.remote = self._qp, remote
        # Two queue pairs of one process never have the same number.
        if remote.qp_num == qp.qp_num and (why := why_confined(qp.context)):
            raise PingpongError(f"{self._peer} is in another process, but {why}")
        by_gid = any(remote.gid[8:])
        if self._needs_gid and not by_gid:
            raise PingpongError(
                f"{self._peer} sent no GID, which Ethernet (RoCE) needs: start it with -g INDEX"
            )
        path = AHAttr(
            port_num=qp.port_num,
            dlid=remote.lid,
            sl=self._sl,
            dgid=remote.gid if by_gid else None,
            sgid_index=qp.gid.gid_index if by_gid else 0,
        )
        attrs: dict[str, Any] = {}
        if not self._ud:
            attrs = {
                "ah_attr": path,
                "path_mtu": self._path_mtu,
                "dest_qp_num": remote.qp_num,
                "rq_psn": remote.psn,
            }
        if qp.qp_type is QPType.RC:
            attrs |= {"min_rnr_timer": 12, "max_dest_rd_atomic": 1}
        qp.modify(qp_state=QPState.RTR, **attrs)
        # Fewer attempts than the stock programs make: Soft-RoCE retries forever with 7.
        qp.to_rts(timeout=14, retry_cnt=6, rnr_retry=7, max_rd_atomic=1)
        fields: dict[str, Any] = {}
        if self._ud:
            ah = self._opened.add(AH(self._pd, path))
            fields = {"ah": ah, "remote_qpn": remote.qp_num, "remote_qkey": DEFAULT_QKEY}
        flags = SendFlags.SIGNALED
        if qp.max_inline_data >= self.size:
            flags |= SendFlags.INLINE
        message = self._mr[self._headroom : self._headroom + self.size]
        self._message = Send(message, wr_id=_SEND_ID, send_flags=flags, **fields)

    # ---- the run --------------------------------------------------------------

    def _run(self, role: str, remote: Address, progress: Callable[[int], None] | None) -> Result:
        if progress is not None:
            progress(0)
        times, seconds = self._exchange_messages(role == "client", progress)
        if self.validate:
            start = self._receive_offset + self._headroom
            found = bytes(self._mr.buffer[start : start + self.size])
            if wrong := what_is_wrong(found, is_server=role == "server"):
                raise PingpongError(wrong)
        return Result(
            role,
            self._peer,
            self.local,
            remote,
            self.size,
            self.iters,
            len(times),
            seconds,
            Latency.of(times) if times else None,
            self.validate,
        )

    def _exchange_messages(
        self, send: bool, progress: Callable[[int], None] | None
    ) -> tuple[array[int], float]:
        """Send the message back and forth; the side with `send` begins.

        Returns:
            the round-trip times in ns, and the total time in seconds.
        """
        clock, qp, message, iters = time.perf_counter_ns, self._qp, self._message, self.iters
        next_completions = self._sleep if self._events else self._spin
        expected = self._headroom + self.size
        # Post receives in batches while a message is under way, when that adds no latency.
        batch = max(1, min(_RECEIVES_AT_ONCE, self._rx_depth // 2))
        receives, posted_receives = [self._receive] * batch, self._rx_depth
        times = array("Q")
        began = posted_at = received_at = left_out = 0
        reported_at, reporting = clock(), False
        received = posted = sent = 0
        due = send
        while received < iters or sent < iters:
            if due:
                if not posted_receives:
                    qp.post_recv(receives)
                    posted_receives += batch
                before, posted_at = posted_at, clock()
                if reporting:
                    left_out += posted_at - before
                    reporting = False
                began = began or posted_at
                qp.post_send(message)
                posted += 1
                due = False
                if posted_receives + batch <= self._rx_depth:
                    qp.post_recv(receives)
                    posted_receives += batch
                if progress is not None and posted_at - reported_at > _PROGRESS_EVERY_NS:
                    progress(received)
                    reported_at, reporting = posted_at, True
            for wc in next_completions(received):
                if wc.status:
                    raise self._completion_error(wc, received)
                if wc.wr_id == _SEND_ID:
                    sent += 1
                else:
                    now = clock()
                    if posted_at and not reporting:
                        times.append(now - posted_at)
                        received_at = now
                    posted_receives -= 1
                    received += 1
                    if wc.byte_len != expected:
                        raise PingpongError(self._wrong_size(wc.byte_len - self._headroom))
            due = posted < iters and sent == posted and received == posted + (not send)
        return times, max(0, received_at - began - left_out) / 1e9

    def _spin(self, received: int) -> list[WC]:
        """Poll for completions; ``received`` messages have arrived."""
        poll, clock = self._cq.poll, time.monotonic
        end = clock() + self.timeout
        while not (found := poll(2)):
            if clock() > end:
                raise self._timeout_error(received)
            # Let the peer run: it may be another thread of this process.
            os.sched_yield()
        return found

    def _sleep(self, received: int) -> list[WC]:
        """Wait for a completion; a timeout error says that ``received`` messages have arrived."""
        try:
            return self._cq.wait(1, self.timeout)
        except WaitTimeout:
            raise self._timeout_error(received) from None

    # ---- what went wrong ------------------------------------------------------

    def _progress_of(self, received: int) -> str:
        return f"after {received} of {self.iters} messages" if received else "from the start"

    def _timeout_error(self, received: int) -> PingpongError:
        qp_type = self._qp.qp_type
        text = (
            f"no message from {self._peer} within {self.timeout:g} s, "
            f"{self._progress_of(received)}: it has died, or its link is down"
            f"{self._unlike(received)}"
        )
        if received:
            text += ", or it was given fewer iterations"
        if qp_type is not QPType.RC:
            text += f"; or a message was lost, which {qp_type.name} does not repeat"
        return PingpongError(text)

    def _completion_error(self, wc: WC, received: int) -> PingpongError:
        if wc.status is WCStatus.RETRY_EXC_ERR:
            likely = (
                "it has died, its link is down, or it was given fewer iterations"
                if received
                else "check that both sides' GIDs are on the same network" + self._unlike(received)
            )
            return PingpongError(
                f"{self._peer} does not answer, {self._progress_of(received)} "
                f"({wc.status.name}): {likely}"
            )
        if wc.status is WCStatus.REM_OP_ERR:
            # Soft-RoCE's status if the peer's memory disappears while a message arrives there, or
            # the message is larger than the receive.
            return PingpongError(
                f"{self._peer} could not accept a message, {self._progress_of(received)} "
                f"({wc.status.name}): it has died, or its device failed{self._unlike(received)}"
            )
        too_long = wc.status in (WCStatus.LOC_LEN_ERR, WCStatus.REM_INV_REQ_ERR)
        # Soft-RoCE's status for a receive that is too small.
        if too_long or (wc.wr_id == _RECV_ID and wc.status is WCStatus.LOC_QP_OP_ERR):
            if self._ud:
                return PingpongError(
                    f"a message did not fit into the receive ({wc.status.name}): give both sides "
                    f"the same size; here it is {self.size}"
                )
            return PingpongError(
                "a message did not fit into the receive, or has a different path MTU "
                f"({wc.status.name}): give both sides the same size and mtu; here they are "
                f"{self.size} and {self._path_mtu.bytes}"
            )
        what = "receive" if wc.wr_id == _RECV_ID else "send"
        return PingpongError(
            f"a {what} ended with {wc.status.name}, {self._progress_of(received)} with "
            f"{self._peer}{self._unlike(received)}"
        )

    def _unlike(self, received: int) -> str:
        """Return a hint that settings may differ; "" if they were compared or a message arrived."""
        if received or self._compared:
            return ""
        fields = self._settings.fields()
        del fields["iters"]
        here = ", ".join(f"{name}={value}" for name, value in fields.items())
        return f"; if the sides differ, give both the same (here {here})"

    def _wrong_size(self, size: int) -> str:
        sent = f"{self._peer} sent {counted(size, 'byte')}, not {self.size}"
        return f"{sent}: give both sides the same size"
