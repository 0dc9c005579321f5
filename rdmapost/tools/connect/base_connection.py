"""A client's queue pair and memory, and the server's offer.

This module does no I/O: the clients perform the operations that ``client_session`` yields.
"""

from __future__ import annotations

import math
import os
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..._arguments import counted, index, member, seconds, time_limit, within
from ..._binding import native
from ...enums import Access, QPType
from ...errors import ClosedError, RdmaError
from ...resources.cq import CQ
from ...resources.device import Context
from ...resources.mr import MR, access_flags
from ...resources.pd import PD
from ...resources.qp import QP
from ...resources.srq import SRQ
from ...standard.wire import GRH_BYTES
from ..reachability import fabric_of
from ..remote_fields import remote_fields
from ..resource_stack import NotCopied, ResourceStack, refuse_inherited
from ..tcp import name_of
from .client_session import ClientSession, IORequests
from .errors import ProtocolError
from .exposure import bytes_within, windows_access
from .protocol_messages import LONGEST_WAIT_S, QP_TYPES, Hello, Look, Offer, Ready, Report
from .qp_options import QPOptions, check_given, private_bytes

_SIZE = 4096


class BaseConnection(native.Finalizer, NotCopied):
    """A queue pair of this device, connected to a server's.

    The attributes are described in ``Connection``: ``help()`` shows only a class's own docstring.
    """

    def __init__(
        self,
        context: Context,
        host: str,
        port: int,
        *,
        qp_type: QPType,
        local_size: int | None,
        local_access: int | None,
        depth: int,
        max_inline_data: int,
        mr: MR | None,
        srq: SRQ | None,
        cq: CQ | None,
        qp_options: QPOptions | None,
        private_data: bytes,
        port_num: int,
        gid_index: int | None,
        timeout: float,
    ) -> None:
        qp_type = member("qp_type", qp_type, QPType)
        if qp_type not in QP_TYPES:
            raise ValueError(
                f"{qp_type.name} queue pairs are not supported; "
                f"{', '.join([each.name for each in QP_TYPES])} are"
            )
        given = check_given(context, mr, srq, cq, qp_options)
        if mr is None:
            local_size = within("local_size", _SIZE if local_size is None else local_size, 0)
            default = Access.LOCAL_WRITE if local_access is None else local_access
            access = access_flags("local_access", default)
        elif local_size is not None or local_access is not None:
            raise ValueError("local_size and local_access cannot be given with mr")
        else:
            access = mr.access
        depth = within("depth", depth, 1, context.attr.max_qp_wr)
        self._session = ClientSession(name_of((host, port)), time_limit(timeout))
        self._pid = os.getpid()
        # Why it was closed, if not by close(): ": " and the reason.
        self._closed_by = ""
        # The server, HOST:PORT, while the connection is open.
        self._where = ""
        self.headroom = GRH_BYTES if qp_type is QPType.UD else 0
        self.address: dict[str, Any] = {}
        self._local_access, self._given = access, given
        self._private_data = private_bytes(private_data)
        self._stack = ResourceStack()
        with self._stack.closed_on_error() as stack:
            pd = stack.add(PD(context)) if given.pd is None else given.pd
            self._own_pd = pd if given.pd is None else None
            options = {
                "max_send_wr": depth,
                "max_recv_wr": depth,
                "max_send_sge": 1,
                "max_recv_sge": 1,
                "max_inline_data": max_inline_data,
                **given.create,
            }
            if cq is None:
                receives = options["max_recv_wr"] if srq is None else srq.max_wr
                room = options["max_send_wr"] + receives
                cq = stack.add(CQ(context, max(1, min(room, context.attr.max_cqe))))
            if mr is None:
                size = max(1, local_size or 0)
                mr = stack.add(MR(pd, size, access | Access.LOCAL_WRITE))
            self.cq, self.mr = cq, mr
            # Close these after the queue pair, whose outstanding work requests may use them.
            self._used = stack.add(ResourceStack())
            self.qp = stack.add(
                QP(pd, qp_type, cq, srq=srq, port_num=port_num, gid_index=gid_index, **options)
            )

    def __repr__(self) -> str:
        name = f"rdmapost.connect.{type(self).__name__}"
        if not hasattr(self, "qp"):
            # The constructor has failed, and a traceback shows this.
            return f"<{name}>"
        # Not ``closed``: that reads from the socket.
        is_open = self._where and not self._closed_by and self._pid == os.getpid()
        return f"<{name} {self.qp} to {self._session.where}{'' if is_open else ' (closed)'}>"

    @property
    def timeout(self) -> float:
        """Seconds for each step of a request; assign to it to change it.

        wait has its own timeout; report adds its own timeout plus one second to this one.

        Raises:
            TypeError, ValueError: as for dial, on assignment.
        """
        return self._session.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._session.timeout = time_limit(timeout)

    def _handshake(self, token: str | None) -> IORequests:
        """Connect the queue pair to the server's; raise the errors of dial()."""
        qp_type, fabric = self.qp.qp_type, fabric_of(self.qp.context)
        hello = Hello(token, fabric, qp_type, self.qp.endpoint(), self._private_data)
        offer = yield from self._session.ask(hello)
        assert isinstance(offer, Offer), "nothing else answers a hello"
        if offer.addr + offer.size > 1 << 64:
            raise ProtocolError("the server offers memory that extends past 2^64")
        self.offer = offer
        if qp_type is QPType.UD:
            self.qp.connect(qkey=offer.qkey, **self._given.connect)
            self.address = {
                "ah": self._used.add(self.qp.ah_to(offer.endpoint)),
                "remote_qpn": offer.endpoint.qp_num,
                "remote_qkey": offer.qkey,
            }
        else:
            access = self._local_access | windows_access(self._local_access)
            self.qp.connect(offer.endpoint, access=access, **self._given.connect)
        ready = yield from self._session.ask(Ready())
        self._session.established = True
        return ready

    def _refuse_inherited(self) -> None:
        """Raise ClosedError in a forked child: the TCP connection belongs to the parent."""
        refuse_inherited("the connection", self._pid)

    def target(self, offset: int = 0) -> dict[str, Any]:
        """Return the fields of a work request that name a place in the server's memory.

        Args:
            offset: bytes from the start of that memory.

        Raises:
            TypeError: offset is not an integer.
            ValueError: offset is negative, or outside the exposed memory; or this is a UD
                connection, which cannot access it: send with ``**address``.
            ClosedError: another process opened the connection.
        """
        self._refuse_inherited()
        offset = index("offset", offset)
        if not 0 <= offset < self.offer.size:
            raise ValueError(
                f"offset={offset} is not in the server's {counted(self.offer.size, 'byte')}"
            )
        return remote_fields(self.qp.qp_type, self.offer.addr + offset, self.offer.rkey)

    def region(self, length: int, access: int = Access.LOCAL_WRITE) -> MR:
        """Create another region of local memory; it is closed with the connection.

        Args:
            length: bytes.
            access: what may be done with it, an Access.

        Raises:
            TypeError, ValueError, MemoryError, VerbsError: as for MR.
            ClosedError: close() has been called.
        """
        region = self._used.add(MR(self.qp.pd, length, access))
        if self._used.ended:
            region.close()
            raise ClosedError("the connection is closed")
        return region

    def _report_requests(
        self, number: int, timeout: float | None
    ) -> Iterator[tuple[Report, float]]:
        """Yield requests for one report, each with the seconds that the server may wait.

        Take the next request when the server has waited that long without a report.
        """
        number = within("index", number, 1, (1 << 64) - 1)
        limit = seconds(timeout)
        # Ask even a server without receives: if the connection is closed, the error says why.
        limit = limit if self.offer.receives else 0.0
        left = math.inf if limit is None else max(0.0, limit)
        deadline = time.monotonic() + left
        while True:
            wait = min(left, LONGEST_WAIT_S)
            yield Report(number, int(wait * 1000)), wait
            if left <= LONGEST_WAIT_S:
                return
            # Rounded because error messages show it.
            left = round(max(0.0, deadline - time.monotonic()), 1)

    def _ask_look(self, offset: int, length: int | None) -> Look:
        return Look(*bytes_within(self.offer.size, offset, length))

    def _abandon(self) -> None:
        """Close the TCP connection without a Bye; a finalizer may call this in any thread."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close everything, including what other code has created on the connection's own PD."""
        self._stack.close_with_all_on(self._own_pd)

    def _finalize(self) -> None:
        where = getattr(self, "_where", "")
        if not where or self._pid != os.getpid():
            return
        # Not close(): that waits for the server.
        self._abandon()
        # Nor _release(): objects that other code still refers to stay open, and the PD with them.
        with suppress(RdmaError):
            self._stack.close()
        self._where = ""
        warnings.warn(
            f"the connection to {where} was not closed", ResourceWarning, source=self, stacklevel=2
        )


def _name_methods() -> None:
    """Set each method's qualified name to Connection.NAME, for errors about its arguments."""
    for name, method in vars(BaseConnection).items():
        if isinstance(method, types.FunctionType) and not name.startswith("_"):
            method.__qualname__ = f"Connection.{name}"


_name_methods()
