"""Queue pairs: creating them, and posting to them."""

from __future__ import annotations

import errno
import itertools
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .._arguments import expect, index, member
from .._binding import ffi, fill
from ..enums import Access, QPState, QPType, SendFlags
from ..errors import PostError, RdmaError, VerbsError, describe_errno, where_explained
from ..posting.prepared import Batch
from ..posting.queue import PostQueue, recv_queue, send_queue
from ..posting.rules import (
    MAX_MSG_SIZE,
    OPCODES_BY_QP_TYPE,
    Limits,
    check_send_state,
    flags_allowed,
    too_long_a_list,
)
from ..posting.wr import BindMW, RecvWR, SendWR
from .cq import CQ
from .device import PortAttr
from .memory import MR, MW, PD
from .multicast import Multicast
from .qp_init import XRC, how_to_create, refuse_misfits, why_not_created
from .qp_transitions import DEFAULT_QKEY
from .srq import SRQ
from .xrcd import XRCD

if TYPE_CHECKING:
    from ..tools.diagnose import Finding
    from .endpoint import Endpoint

__all__ = ["DEFAULT_QKEY", "QP", "Outstanding"]

_BATCH_NUMBERS = itertools.count()


class Outstanding(NamedTuple):
    """Work requests that are posted and not known to be done.

    Attributes:
        send: on the send queue; unsignaled ones count until a later one completes.
        recv: on the receive queue.
    """

    send: int
    recv: int


class QP(Multicast, struct="ibv_qp"):
    """A queue pair (ibv_create_qp(3)).

    Args:
        pd: the protection domain.
        qp_type: RC, UC, UD, RAW_PACKET, XRC_SEND or XRC_RECV.
        send_cq: where sends complete.
        recv_cq: where receives complete; send_cq unless given.
        srq: take receives from this shared queue.
        xrcd: the XRC domain (XRC_RECV).  Such a queue pair uses the PD and the CQ of the
            SRQ that a message names, so pd and send_cq may be any of the same open device;
            nothing completes on send_cq, and both stay open as long as the queue pair.
        max_send_wr, max_recv_wr: work requests that each queue must hold.
        max_send_sge, max_recv_sge: SGEs of one work request.
        max_inline_data: bytes of one inline work request.
        max_tso_header: bytes of a TSO's header (UD, RAW_PACKET); 0 for no TSO.
        sq_sig_all: every send generates a completion, SIGNALED or not.
        checked: check work requests before they are posted.
        port_num: the local port, from 1.
        gid_index: the local GID; chosen by choose_gid unless given.

    Attributes:
        qp_num: its number.
        qp_type: its type.
        psn: first packet sequence number that it sends; random.
        max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data: what
            the device granted.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the device has no such port, a CQ is of another device, or
            an argument is given that the type does not have, or one that it needs
            is missing.
        ClosedError: the PD or a CQ is closed.
        VerbsError: the device refused; the text says which limit was exceeded.
    """

    __slots__ = (
        "_batches",
        "_enough_batches",
        "_limits",
        "_recv",
        "_send",
        "checked",
        "max_inline_data",
        "max_recv_sge",
        "max_recv_wr",
        "max_send_sge",
        "max_send_wr",
        "max_tso_header",
        "recv_cq",
        "send_cq",
        "sq_sig_all",
        "srq",
        "xrcd",
    )

    _kind = "QP"
    _rank = 1

    def __init__(
        self,
        pd: PD,
        qp_type: QPType,
        send_cq: CQ,
        recv_cq: CQ | None = None,
        *,
        srq: SRQ | None = None,
        xrcd: XRCD | None = None,
        max_send_wr: int = 64,
        max_recv_wr: int = 64,
        max_send_sge: int = 4,
        max_recv_sge: int = 4,
        max_inline_data: int = 0,
        max_tso_header: int = 0,
        sq_sig_all: bool = False,
        checked: bool = True,
        port_num: int = 1,
        gid_index: int | None = None,
    ) -> None:
        expect("pd", pd, PD)
        expect("send_cq", send_cq, CQ)
        expect("recv_cq", recv_cq, CQ, None)
        expect("srq", srq, SRQ, None)
        expect("xrcd", xrcd, XRCD, None)
        context = pd.context
        recv_cq = send_cq if recv_cq is None else recv_cq
        if send_cq.context is not context or recv_cq.context is not context:
            raise ValueError("the CQ was created on another open device than the PD")
        self.pd, self.send_cq, self.recv_cq, self.srq = pd, send_cq, recv_cq, srq
        self.xrcd = xrcd
        self.qp_type = member("qp_type", qp_type, QPType)
        self.max_tso_header = max_tso_header = index("max_tso_header", max_tso_header)
        refuse_misfits(self.qp_type, pd, srq, xrcd, max_tso_header)
        self.checked = bool(checked)
        self.sq_sig_all = bool(sq_sig_all)
        self.port_num = port_num = index("port_num", port_num)
        if gid_index is not None:
            gid_index = index("gid_index", gid_index)
        pd._live()
        port = context.query_port(port_num)
        self._gid_index = gid_index
        self._gid = None
        self._groups = {}
        self._state = QPState.RESET
        self.psn = int.from_bytes(os.urandom(3))

        init = ffi.new("struct ibv_qp_init_attr_ex *")
        init.send_cq, init.recv_cq = send_cq._live(), recv_cq._live()
        if srq is not None:
            init.srq = srq._live()
        if srq is not None or self.qp_type in XRC:
            max_recv_wr = max_recv_sge = 0
        if self.qp_type is QPType.XRC_RECV:
            max_send_wr = max_send_sge = max_inline_data = 0
        cap = init.cap
        fill(
            cap,
            max_send_wr=max_send_wr,
            max_recv_wr=max_recv_wr,
            max_send_sge=max_send_sge,
            max_recv_sge=max_recv_sge,
            max_inline_data=max_inline_data,
        )
        init.qp_type = self.qp_type
        init.sq_sig_all = self.sq_sig_all
        given = (pd, send_cq, recv_cq, srq, xrcd)
        parents = {id(p): p for p in given if p is not None}
        create, args = how_to_create(pd, xrcd, init, max_tso_header)
        try:
            handle = self._make(create, args, context._provider.destroy_qp, tuple(parents.values()))
        except VerbsError as error:
            error.hint = error.hint or why_not_created(error.errno, pd, init, max_tso_header)
            raise
        self._take(handle, cap, port)

    def _take(self, handle: Any, cap: Any, port: PortAttr) -> None:
        pd, context = self.pd, self.pd.context
        self.qp_num: int = handle.qp_num
        self.max_send_wr: int = cap.max_send_wr
        self.max_recv_wr: int = cap.max_recv_wr
        self.max_send_sge: int = cap.max_send_sge
        self.max_recv_sge: int = cap.max_recv_sge
        self.max_inline_data: int = cap.max_inline_data

        device_cap = context.attr.device_cap_flags
        self._limits = Limits(
            self.qp_type,
            pd,
            self.max_send_sge,
            self.max_recv_sge,
            self.max_inline_data,
            {
                opcode: int(flags_allowed(self.qp_type, opcode, device_cap))
                for opcode in OPCODES_BY_QP_TYPE[self.qp_type]
            },
            port.active_mtu.bytes if self.qp_type is QPType.UD else MAX_MSG_SIZE,
            self.max_tso_header,
            sq_sig_all=self.sq_sig_all,
        )
        # If there is no queue, the check gives a better reason than that it is full.
        self._send = send_queue(
            self._limits, self.max_send_wr, checked=self.checked, bounded=self.xrcd is None
        )
        self._recv = recv_queue(self._limits, self.max_recv_wr, checked=self.checked)
        self._batches: dict[int, weakref.ref[Batch]] = {}
        self._enough_batches = 1
        for queue in (self._send, self._recv):
            context._queues[queue.in_flight.number] = queue.in_flight
        self._note_state(QPState.RESET)

    def __str__(self) -> str:
        return f"{self.qp_type.name} QP {self.qp_num:#x}" if hasattr(self, "qp_num") else self._kind

    def _release(self) -> None:
        if not hasattr(self, "_batches"):
            # An interrupt has cut the constructor short: nothing was posted.
            return
        for batch in self._prepared_lists():
            batch.close()
        self._leave_groups()
        self._keep_completions()

    def _forget(self) -> None:
        if not hasattr(self, "_batches"):
            return
        self._keep_completions()
        for queue in (self._send.in_flight, self._recv.in_flight):
            self.pd.context._queues.pop(queue.number, None)
            queue.clear()

    def _keep_completions(self) -> None:
        if any(self.outstanding) or (self.srq is not None and self.srq.outstanding):
            self.send_cq._keep()
            if self.recv_cq is not self.send_cq:
                self.recv_cq._keep()

    def _note_state(self, state: QPState) -> None:
        self._state = state
        self._send.set_ready(state >= QPState.RTS or not self.checked)
        receives = self.srq is None and self.qp_type not in XRC
        self._recv.set_ready(receives and (state is not QPState.RESET or not self.checked))

    def _forget_posted(self) -> None:
        self._send.in_flight.clear()
        self._recv.in_flight.clear()

    # ---- posting ------------------------------------------------------------

    @property
    def outstanding(self) -> Outstanding:
        """How many work requests are posted and not known to be done.

        Raises:
            ClosedError: the process that opened the QP has forked this one.
        """
        self._refuse_inherited()
        return Outstanding(self._send.in_flight.outstanding, self._recv.in_flight.outstanding)

    def post_send(self, wrs: SendWR | Iterable[SendWR]) -> None:
        """Post one send work request, or a list of them in one call.

        Memory regions, windows and address handles that they name stay alive
        until the work requests are known to be done.

        Args:
            wrs: a SendWR or an iterable of them, which is read to its end before the
                first is posted.  Posting stops at the first that cannot be posted; an
                empty list does nothing.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, or an item is not one; wr and index say
                which, posted how many were posted before it, and reason why.
            ClosedError: the QP is closed.

        See ibv_post_send(3).
        """
        self._send.post(self, wrs)

    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post one receive, or a list of them in one call.

        Args:
            wrs: a RecvWR or an iterable of them, read and posted as by post_send.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, or an item is not one.
            ClosedError: the QP is closed.
            RdmaError: the queue pair takes its receives from an SRQ.

        See ibv_post_recv(3).
        """
        self._recv.post(self, wrs)

    def _refuse_without_receives(self) -> None:
        self._live()
        if self.qp_type in XRC:
            raise RdmaError(
                f"{self} has no receive queue: a message goes to the XRC SRQ that it names "
                "(srq.post_srq_recv)"
            )
        if self.srq is not None:
            raise RdmaError(
                f"{self} takes its receives from {self.srq}: post them with srq.post_srq_recv()"
            )

    def prepare(self, wrs: SendWR | Iterable[SendWR]) -> Batch:
        """Check and pack send work requests once, for posting them many times.

        ``batch.post()`` posts the whole list; ``batch[index]`` changes fields for the next posts.
        The list can be prepared in any state, and posted from RTS on. A checked queue pair accepts
        it only while it has room for all of it.

        Args:
            wrs: a SendWR or an iterable of them, but no BindMW.

        Returns:
            the prepared list.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request cannot be posted, or a checked queue could never
                hold all of them; index says which.
            ValueError: the list is empty.
            ClosedError: the QP is closed.

        See ibv_post_send(3).
        """
        return self._prepared(self._send, wrs)

    def prepare_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> Batch:
        """Check and pack receives once, as prepare does sends, for posting them many times.

        Args:
            wrs: a RecvWR or an iterable of them.

        Returns:
            the prepared list.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request cannot be posted, or a checked queue could never
                hold all of them; index says which.
            ValueError: the list is empty.
            ClosedError: the QP is closed.
            RdmaError: the queue pair takes its receives from an SRQ.

        See ibv_post_recv(3).
        """
        self._refuse_without_receives()
        return self._prepared(self._recv, wrs)

    def _prepared(self, queue: PostQueue, wrs: Any) -> Batch:
        batch = Batch()
        if not issubclass(type(wrs), queue.wr_type) and issubclass(type(wrs), Iterable):
            wrs = tuple(wrs)
        # Closing the QP closes it, as soon as it names anything.
        self._note_batch(batch)
        batch._prepare(queue, self, wrs)
        try:
            self._live()
            if self.checked and len(batch) > queue.depth:
                raise PostError(
                    queue.verb,
                    errno.ENOMEM,
                    too_long_a_list(queue, len(batch)),
                    index=queue.depth,
                    posted=0,
                    count=len(batch),
                    wr=wrs[queue.depth] if queue.depth else wrs,
                )
        except RdmaError:
            # If another thread has closed the QP meanwhile, it may not have seen the list.
            batch.close()
            raise
        return batch

    def _prepared_lists(self) -> list[Batch]:
        # Other threads may add to it.
        return [batch for one in tuple(self._batches.values()) if (batch := one()) is not None]

    def _note_batch(self, batch: Batch) -> None:
        self._batches[next(_BATCH_NUMBERS)] = weakref.ref(batch)
        if len(self._batches) > self._enough_batches:
            # Not in a weakref callback: what a signal handler raises there is lost.
            for number, one in tuple(self._batches.items()):
                if one() is None:
                    self._batches.pop(number, None)
            self._enough_batches = 2 * len(self._batches)

    def bind_mw(
        self,
        mw: MW,
        mr: MR,
        addr: int,
        length: int,
        mw_access_flags: int = Access(0),
        *,
        wr_id: int = 0,
        send_flags: int = SendFlags.SIGNALED,
    ) -> None:
        """Post the binding of a type 1 window to part of a region (RC, UC, XRC_SEND).

        It takes a slot in the send queue and completes there as BIND_MW.
        ``mw.rkey`` is the new key at once; a peer may use it after the
        completion.  Binding a bound window again invalidates its previous key.

        Args:
            mw: the window; post a BindMW to bind one of type 2.
            mr: the region, registered with Access.MW_BIND and open until the
                window is unbound; also needed to unbind.
            addr: address of the first byte.
            length: bytes; 0 unbinds the window.
            mw_access_flags: what the peer may do through the window, an Access.
            wr_id: comes back in the completion, 0..2^64-1.
            send_flags: SIGNALED, FENCE or both; 0 for neither.

        Raises:
            PostError: the library or the device refused it; the window keeps its
                previous key.
            ClosedError: the QP is closed.

        See ibv_bind_mw(3).
        """
        wr = BindMW(
            wr_id=wr_id,
            send_flags=send_flags,
            mw=mw,
            mr=mr,
            addr=addr,
            length=length,
            mw_access_flags=mw_access_flags,
        )
        # rxe keeps what was posted before RTS, and carries it out in RTS.
        self._send.bind(self, wr, sure=self._state >= QPState.RTS)

    def _why_not_ready(self, queue: PostQueue) -> str:
        """Say why nothing can be posted to a queue now.

        Raises:
            RdmaError: nothing ever can.
        """
        if queue is self._send:
            return check_send_state(self._state) or f"the QP is in {self._state.name}"
        self._refuse_without_receives()
        return "the QP is in RESET; receives can be posted from INIT on (qp.to_init)"

    def diagnose(self, peer: QP | Endpoint | None = None) -> list[Finding]:
        """Say what is wrong, or may go wrong: a checklist of why sends do not complete.

        It checks the state, the port, the GID and the path; the time until
        RETRY_EXC_ERR and RNR_RETRY_EXC_ERR; what is outstanding on the queues and in
        the CQs; and whether the peer is connected to this queue pair, agrees on MTU
        and PSNs, and has receives.  It changes nothing and reports each problem as a
        finding.

        Args:
            peer: the other side, or its endpoint().  A connected queue pair finds a
                peer on the same open device by itself.

        Returns:
            findings, the problems first.

        Raises:
            TypeError: the peer is neither.
        """
        found: list[Finding] = self._checklist(self, peer)
        return found

    _checklist: ClassVar[Any]
    """A function of both sides; the package's public face sets it (_public.py)."""

    # ---- explanations -------------------------------------------------------

    def _hint(self, code: int, wr: Any) -> str:
        name = self.pd.context.name
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            what = getattr(getattr(wr, "opcode", None), "name", "the call")
            return f"{what} is not supported by {name}"
        if code == errno.ENOMEM:
            return f"{name} says that the queue is full, or the work request too large for it"
        if code == errno.EINVAL and self._state < QPState.RTS:
            return f"{name} refused it: the QP is in {self._state.name}"
        return f"{name} refused with {describe_errno(code)}; {where_explained(code)}"
