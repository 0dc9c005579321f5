"""Queue pairs: creating them, their states, and posting to them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ._binding import ffi, lib
from ._resource import Resource
from .address import AH, AHAttr, GIDChoice, choose_gid
from .completion import CQ
from .endpoint import Endpoint
from .enums import (
    MTU,
    Access,
    LinkLayer,
    MigState,
    Opcode,
    QPAttrMask,
    QPState,
    QPType,
    SRQType,
)
from .errors import RdmaError, VerbsError, describe_errno
from .inflight import InFlight
from .memory import PD
from .packing import pack_recv, pack_send
from .posting import PostQueue
from .rules import (
    MAX_MSG_SIZE,
    OPCODES_BY_QP_TYPE,
    QP_TYPES_BY_OPCODE,
    Limits,
    check_recv,
    check_send,
    check_send_state,
    check_unsafe,
    flags_allowed,
)
from .srq import SRQ
from .states import FIELDS, missing_attributes
from .wr import SGE, RecvWR, SendWR
from .xrcd import XRCD

__all__ = ["QP", "Outstanding", "QPAttr"]

DEFAULT_QKEY = 0x1111_1111
"""Q_Key of UD queue pairs unless another is given; ibv_ud_pingpong uses it too."""


class Outstanding(NamedTuple):
    """Work requests that are posted and not known to be done.

    Attributes:
        send: on the send queue; unsignaled ones count until a later one completes.
        recv: on the receive queue.
    """

    send: int
    recv: int


@dataclass(frozen=True, slots=True)
class QPAttr:
    """Attributes of a queue pair (ibv_query_qp(3)); the names are the man page's.

    ``timeout`` stands for 4.096 us * 2^timeout (0: for ever); ``min_rnr_timer``
    is encoded as in ibv_modify_qp(3); ``rnr_retry`` 7 means for ever.
    """

    qp_state: QPState
    cur_qp_state: QPState
    path_mtu: MTU | None
    path_mig_state: MigState
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: Access
    ah_attr: AHAttr
    pkey_index: int
    sq_draining: bool
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


class QP(Resource):
    """A queue pair (ibv_create_qp(3)).

    Args:
        pd: the protection domain.
        qp_type: RC, UC, UD, RAW_PACKET, XRC_SEND or XRC_RECV.
        send_cq: where sends complete.
        recv_cq: where receives complete; send_cq unless given.
        srq: take receives from this shared queue.
        xrcd: the XRC domain (XRC_RECV); such a queue pair has no PD and no CQs of
            its own but uses those of the SRQ that a message names.
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
        max_send_wr, ..., max_inline_data: what the device granted.

    Raises:
        ValueError: the device has no such port, a CQ is of another device, or
            something is given or missing that the type does not have or needs.
        ClosedError: the PD or a CQ is closed.
        VerbsError: the device refused; the text says which limit was exceeded.
    """

    __slots__ = (
        "_gid",
        "_gid_index",
        "_limits",
        "_recv",
        "_send",
        "_state",
        "checked",
        "max_inline_data",
        "max_recv_sge",
        "max_recv_wr",
        "max_send_sge",
        "max_send_wr",
        "max_tso_header",
        "pd",
        "port_num",
        "psn",
        "qp_num",
        "qp_type",
        "recv_cq",
        "send_cq",
        "sq_sig_all",
        "srq",
        "xrcd",
    )

    _kind = "QP"

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
        context = pd.context
        recv_cq = send_cq if recv_cq is None else recv_cq
        if send_cq.context is not context or recv_cq.context is not context:
            raise ValueError("the CQ was created on another open device than the PD")
        if srq is not None and srq.pd.context is not context:
            raise ValueError("the SRQ was created on another open device than the PD")
        self.pd, self.send_cq, self.recv_cq, self.srq = pd, send_cq, recv_cq, srq
        self.xrcd = xrcd
        self.qp_type = QPType(qp_type)
        self.max_tso_header = max_tso_header
        if reason := self._what_does_not_fit():
            raise ValueError(reason)
        self.checked = checked
        self.sq_sig_all = sq_sig_all
        self.port_num = port_num
        pd._live()
        port = context.query_port(port_num)
        self._gid_index = gid_index
        self._gid: GIDChoice | None = None
        self._state = QPState.RESET
        self.psn = int.from_bytes(os.urandom(3))

        init = ffi.new("struct ibv_qp_init_attr_ex *")
        init.send_cq, init.recv_cq = send_cq._live(), recv_cq._live()
        if srq is not None:
            init.srq = srq._live()
        if srq is not None or self.qp_type in _XRC:
            max_recv_wr = max_recv_sge = 0
        if self.qp_type is QPType.XRC_RECV:
            max_send_wr = max_send_sge = max_inline_data = 0
        cap = init.cap
        for name, value in (
            ("max_send_wr", max_send_wr), ("max_recv_wr", max_recv_wr),
            ("max_send_sge", max_send_sge), ("max_recv_sge", max_recv_sge),
            ("max_inline_data", max_inline_data),
        ):  # fmt: skip
            try:
                setattr(cap, name, value)
            except OverflowError:
                raise ValueError(f"{name}={value} is not in 0..2^32-1") from None
        init.qp_type = self.qp_type
        init.sq_sig_all = sq_sig_all
        try:
            handle = self._create(init)
        except VerbsError as error:
            error.hint = error.hint or self._why_not_created(cap)
            raise
        self.qp_num: int = handle.qp_num
        self.max_send_wr: int = cap.max_send_wr
        self.max_recv_wr: int = cap.max_recv_wr
        self.max_send_sge: int = cap.max_send_sge
        self.max_recv_sge: int = cap.max_recv_sge
        self.max_inline_data: int = cap.max_inline_data

        device_cap = context.attr.device_cap_flags
        self._limits = Limits(
            self.qp_type, pd, self.max_send_sge, self.max_recv_sge, self.max_inline_data,
            {
                opcode: int(flags_allowed(self.qp_type, opcode, device_cap))
                for opcode in OPCODES_BY_QP_TYPE[self.qp_type]
            },
            port.active_mtu.bytes if self.qp_type is QPType.UD else MAX_MSG_SIZE,
            max_tso_header,
        )  # fmt: skip
        self._send = PostQueue(
            "ibv_post_send", lib.rp_link_send, lib.rp_post_send, SendWR, pack_send,
            # Of a queue that is not there, the check says more than that it is full.
            self.max_send_wr, "max_send_wr", checked and xrcd is None, InFlight(),
        )  # fmt: skip
        self._recv = PostQueue(
            "ibv_post_recv", lib.rp_link_recv, lib.rp_post_recv, RecvWR, pack_recv,
            self.max_recv_wr, "max_recv_wr", checked, InFlight(),
        )  # fmt: skip
        for queue in (self._send.in_flight, self._recv.in_flight):
            context._queues[queue.number] = queue
        parents = {id(p): p for p in (pd, send_cq, recv_cq, srq, xrcd) if p is not None}
        super().__init__(handle, *parents.values())

    def _what_does_not_fit(self) -> str | None:
        kind, name, srq, xrcd = self.qp_type, self.qp_type.name, self.srq, self.xrcd
        if (xrcd is not None) != (kind is QPType.XRC_RECV):
            return (
                f"{name} queue pairs need an XRC domain (xrcd=...)"
                if xrcd is None
                else f"{name} queue pairs have no use for an XRC domain; XRC_RECV ones have"
            )
        if xrcd is not None and xrcd.context is not self.pd.context:
            return "the XRCD was opened on another open device than the PD"
        if srq is not None and (kind in _XRC or srq.srq_type is SRQType.XRC):
            return (
                "receives of XRC belong to the SRQ that a message names (remote_srqn), not to "
                "a queue pair"
            )
        if srq is not None and srq.srq_type is SRQType.TM and kind is not QPType.RC:
            return f"tag matching is for RC queue pairs, not {name}"
        if self.max_tso_header and kind not in QP_TYPES_BY_OPCODE[Opcode.TSO]:
            return f"{name} queue pairs have no TSO, so max_tso_header cannot be given"
        if not 0 <= self.max_tso_header <= 0xFFFF:
            return f"max_tso_header={self.max_tso_header} is not in 0..65535"
        return None

    def _create(self, init: Any) -> Any:
        provider, context, pd = self.pd.context._provider, self.pd.context._live(), self.pd._live()
        if self.xrcd is not None:
            init.xrcd, init.comp_mask = self.xrcd._live(), lib.IBV_QP_INIT_ATTR_XRCD
            init.send_cq = init.recv_cq = ffi.NULL
            return provider.create_qp_ex(context, init)
        if self.max_tso_header or self.qp_type is QPType.XRC_SEND:
            init.pd, init.comp_mask = pd, lib.IBV_QP_INIT_ATTR_PD
            if self.max_tso_header:
                init.max_tso_header = self.max_tso_header
                init.comp_mask |= lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER
            return provider.create_qp_ex(context, init)
        # The plain struct is how the extended one begins.
        return provider.create_qp(pd, ffi.cast("struct ibv_qp_init_attr *", init))

    def __str__(self) -> str:
        return f"{self.qp_type.name} QP {self.qp_num:#x}" if hasattr(self, "qp_num") else self._kind

    def _destroy(self) -> None:
        with self._send.lock, self._recv.lock:
            self._keep_completions()
            self.pd.context._provider.destroy_qp(self._handle)
            self._keep_completions()
            self._handle = None
        for queue in (self._send.in_flight, self._recv.in_flight):
            self.pd.context._queues.pop(queue.number, None)
            queue.clear()

    def _keep_completions(self) -> None:
        if any(self.outstanding) or (self.srq is not None and self.srq.outstanding):
            # The collector may have interrupted whoever holds a CQ: it does not wait for it.
            self.send_cq._keep(wait=not self._abandoned)
            if self.recv_cq is not self.send_cq:
                self.recv_cq._keep(wait=not self._abandoned)

    # ---- addressing ---------------------------------------------------------

    @property
    def gid(self) -> GIDChoice:
        """The local GID that is used, and why (choose_gid).

        Raises:
            RdmaError: the port has none, or not the one asked for.
        """
        if self._gid is None:
            self._gid = choose_gid(self.pd.context, self.port_num, self._gid_index)
        return self._gid

    def endpoint(self) -> Endpoint:
        """Return what the peer must know to connect to this queue pair.

        Raises:
            RdmaError: the port has no GID.
            ClosedError: the QP is closed.
        """
        self._live()
        port = self.pd.context.query_port(self.port_num)
        return Endpoint(self.qp_num, self.psn, self.gid.gid, port.lid, port.active_mtu)

    def path_to(self, remote: Endpoint, *, sl: int = 0, traffic_class: int = 0) -> AHAttr:
        """Return the way to a peer, for an AH or for ibv_modify_qp's ah_attr.

        Args:
            remote: the peer's endpoint.
            sl: service level, 0..15.
            traffic_class: 0..255.
        """
        port = self.pd.context.query_port(self.port_num)
        # On InfiniBand the LID is the way; a GID is needed only beyond the subnet.
        by_lid = port.link_layer is not LinkLayer.ETHERNET and remote.lid != 0
        return AHAttr(
            port_num=self.port_num,
            dlid=remote.lid,
            sl=sl,
            dgid=None if by_lid else remote.gid,
            sgid_index=0 if by_lid else self.gid.index,
            traffic_class=traffic_class,
        )

    def ah_to(self, remote: Endpoint, *, sl: int = 0, traffic_class: int = 0) -> AH:
        """Make an address handle to a UD peer.

        Args:
            remote: the peer's endpoint.
            sl, traffic_class: as in path_to.
        """
        return AH(self.pd, self.path_to(remote, sl=sl, traffic_class=traffic_class))

    # ---- states -------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """Its state, as the device says now."""
        self._state = self.query().qp_state
        return self._state

    def query(self) -> QPAttr:
        """Return its attributes as they are now.

        Raises:
            ClosedError: the QP is closed.
            VerbsError: the device failed.

        See ibv_query_qp(3).
        """
        raw = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        self.pd.context._provider.query_qp(self._live(), raw, _QUERY_MASK, init)
        values: dict[str, Any] = {
            name: getattr(raw, name)
            for name in QPAttr.__dataclass_fields__
            if not name.startswith(("max_send", "max_recv", "max_inline", "ah_attr"))
        }
        values["qp_state"] = QPState(raw.qp_state)
        values["cur_qp_state"] = QPState(raw.cur_qp_state)
        values["path_mtu"] = MTU(raw.path_mtu) if raw.path_mtu else None
        values["path_mig_state"] = MigState(raw.path_mig_state)
        values["qp_access_flags"] = Access(raw.qp_access_flags)
        values["sq_draining"] = bool(raw.sq_draining)
        values["ah_attr"] = AHAttr._read(raw.ah_attr)
        for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge"):
            values[name] = getattr(raw.cap, name)
        values["max_inline_data"] = raw.cap.max_inline_data
        return QPAttr(**values)

    def modify(self, **attrs: Any) -> None:
        """Change attributes; those that are given make up the mask.

        Args:
            attrs: fields of ``struct ibv_qp_attr`` by name (qp_state,
                qp_access_flags, pkey_index, port_num, qkey, ah_attr, path_mtu,
                dest_qp_num, rq_psn, sq_psn, timeout, retry_cnt, rnr_retry,
                min_rnr_timer, max_rd_atomic, max_dest_rd_atomic, ...).

        Raises:
            TypeError: there is no such field.
            ValueError: a step that the state machine does not have, an
                attribute that the step needs and that is missing, or a number
                that does not fit.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        handle = self._live()
        raw = ffi.new("struct ibv_qp_attr *")
        mask = QPAttrMask(0)
        for name, value in attrs.items():
            bit = FIELDS.get(name)
            if bit is None:
                raise TypeError(f"struct ibv_qp_attr has no field {name}")
            mask |= bit
            try:
                if isinstance(value, AHAttr):
                    value._fill(getattr(raw, name))
                else:
                    setattr(raw, name, value)
            except (OverflowError, TypeError, AttributeError) as error:
                raise ValueError(f"{name}={value!r} does not fit: {error}") from None
        state = attrs.get("cur_qp_state", self._state)
        to = QPState(attrs.get("qp_state", state))
        if reason := missing_attributes(self.qp_type, QPState(state), to, mask):
            raise ValueError(reason)
        if to is QPState.RESET:
            self._keep_completions()
        try:
            self.pd.context._provider.modify_qp(handle, raw, mask)
        except VerbsError as error:
            error.hint = error.hint or self._why_not_modified(error.errno, to, attrs)
            raise
        if to is QPState.RESET:
            # A reset drops what is posted, without completions.
            self._keep_completions()
            self._send.in_flight.clear()
            self._recv.in_flight.clear()
        self._state = to

    def to_init(
        self,
        access: int = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC,
        *,
        pkey_index: int = 0,
        qkey: int = DEFAULT_QKEY,
    ) -> None:
        """Bring the queue pair from RESET to INIT; receives can be posted then.

        Args:
            access: what a peer may do through it (not on UD), an Access.
            pkey_index: entry of the port's P_Key table.
            qkey: Q_Key (UD).

        Raises:
            as in modify.
        """
        attrs: dict[str, Any] = {"qp_state": QPState.INIT, "port_num": self.port_num}
        if self.qp_type is not QPType.RAW_PACKET:
            attrs["pkey_index"] = pkey_index
        if self.qp_type is QPType.UD:
            attrs["qkey"] = qkey
        elif self.qp_type is not QPType.RAW_PACKET:
            attrs["qp_access_flags"] = self._grantable(access)
        self.modify(**attrs)

    def _grantable(self, access: int) -> int:
        if self.qp_type is QPType.UC:
            # UC has no reads and atomics, and drivers refuse their flags.
            return access & ~(Access.REMOTE_READ | Access.REMOTE_ATOMIC)
        if not self.pd.context.attr.atomic_cap:
            return access & ~Access.REMOTE_ATOMIC
        return access

    def to_rtr(
        self,
        remote: Endpoint | None = None,
        *,
        min_rnr_timer: int = 12,
        max_dest_rd_atomic: int | None = None,
        sl: int = 0,
        traffic_class: int = 0,
    ) -> None:
        """Bring the queue pair from INIT to RTR: it receives then.

        Args:
            remote: the peer's endpoint; not for UD and RAW_PACKET.
            min_rnr_timer: how long a peer waits when no receive is posted, encoded
                as in the man page; 12 is 0.64 ms.
            max_dest_rd_atomic: reads and atomics of the peer at once; what the
                device can do, at most 16, unless given.
            sl, traffic_class: as in path_to.

        Raises:
            as in modify.
        """
        attrs: dict[str, Any] = {"qp_state": QPState.RTR}
        if self.qp_type not in (QPType.UD, QPType.RAW_PACKET):
            if remote is None:
                raise ValueError(f"a {self.qp_type.name} queue pair needs the peer's endpoint")
            port = self.pd.context.query_port(self.port_num)
            attrs |= {
                "ah_attr": self.path_to(remote, sl=sl, traffic_class=traffic_class),
                "path_mtu": min(port.active_mtu, remote.mtu),
                "dest_qp_num": remote.qpn,
                "rq_psn": remote.psn,
            }
        if self.qp_type in (QPType.RC, QPType.XRC_RECV):
            most = self.pd.context.attr.max_qp_rd_atom
            attrs["min_rnr_timer"] = min_rnr_timer
            attrs["max_dest_rd_atomic"] = (
                min(16, most) if max_dest_rd_atomic is None else max_dest_rd_atomic
            )
        self.modify(**attrs)

    def to_rts(
        self,
        *,
        timeout: int = 14,
        retry_cnt: int = 6,
        rnr_retry: int = 6,
        max_rd_atomic: int | None = None,
    ) -> None:
        """Bring the queue pair from RTR, SQD or SQE to RTS: it sends then.

        The defaults give up: after about half a second without an
        acknowledgement, and after six attempts without a receive.

        Args:
            timeout: wait for an acknowledgement of 4.096 us * 2^timeout, 0..31;
                14 is 67 ms, 0 is for ever.
            retry_cnt: attempts after that, 0..7.
            rnr_retry: attempts when the peer has no receive, 0..7; 7 is for ever.
            max_rd_atomic: own reads and atomics at once; what the device can do,
                at most 16, unless given.

        Raises:
            as in modify.
        """
        attrs: dict[str, Any] = {"qp_state": QPState.RTS}
        if self._state is QPState.RTR:
            if self.qp_type is not QPType.RAW_PACKET:
                attrs["sq_psn"] = self.psn
            if self.qp_type in (QPType.RC, QPType.XRC_SEND, QPType.XRC_RECV):
                attrs["timeout"] = timeout
            if self.qp_type in (QPType.RC, QPType.XRC_SEND):
                most = self.pd.context.attr.max_qp_init_rd_atom
                attrs |= {
                    "retry_cnt": retry_cnt,
                    "rnr_retry": rnr_retry,
                    "max_rd_atomic": min(16, most) if max_rd_atomic is None else max_rd_atomic,
                }
        self.modify(**attrs)

    def connect(
        self,
        remote: Endpoint | None = None,
        *,
        access: int = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC,
        qkey: int = DEFAULT_QKEY,
        **more: int,
    ) -> None:
        """Bring the queue pair to RTS from wherever it is on the way.

        Args:
            remote: the peer's endpoint; not for UD.
            access, qkey: as in to_init.
            more: what to_rtr and to_rts take.

        Raises:
            as in modify.
        """
        unknown = more.keys() - _RTR_OPTIONS - _RTS_OPTIONS
        if unknown:
            raise TypeError(f"connect() has no option {', '.join(sorted(unknown))}")
        if self._state is QPState.RESET:
            self.to_init(access, qkey=qkey)
        if self._state is QPState.INIT:
            self.to_rtr(remote, **{k: v for k, v in more.items() if k in _RTR_OPTIONS})
        self.to_rts(**{k: v for k, v in more.items() if k in _RTS_OPTIONS})

    def to_sqd(self) -> None:
        """Drain the send queue; sends posted from now on are held.

        Raises:
            as in modify.
        """
        self.modify(qp_state=QPState.SQD)

    def to_err(self) -> None:
        """Break the queue pair: what is posted completes with WR_FLUSH_ERR.

        Raises:
            as in modify.
        """
        self.modify(qp_state=QPState.ERR)

    def to_reset(self) -> None:
        """Take the queue pair back to RESET; what is posted is dropped, without completions.

        Raises:
            as in modify.
        """
        self.modify(qp_state=QPState.RESET)

    # ---- posting ------------------------------------------------------------

    @property
    def outstanding(self) -> Outstanding:
        """How many work requests are posted and not known to be done."""
        return Outstanding(self._send.in_flight.outstanding, self._recv.in_flight.outstanding)

    def post_send(self, wrs: SendWR | Sequence[SendWR]) -> None:
        """Post one send work request, or a list of them in one call.

        Memory regions, windows and address handles that they name stay alive
        until they are known to be done.

        Args:
            wrs: a SendWR or a sequence of them; the list stops at the first
                that cannot be posted.

        Raises:
            PostError: a work request was refused; index, posted and reason say
                which, how many went in before it, and why.
            ClosedError: the QP is closed.

        See ibv_post_send(3).
        """
        check = self._check_all if self.checked else self._check_harmful
        self._send.post(self._live, wrs, check, self._hint)

    def post_recv(self, wrs: RecvWR | Sequence[RecvWR]) -> None:
        """Post one receive, or a list of them in one call.

        Args:
            wrs: a RecvWR or a sequence of them; the list stops at the first
                that cannot be posted.

        Raises:
            PostError: a work request was refused.
            ClosedError: the QP is closed.
            RdmaError: the queue pair takes its receives from an SRQ.

        See ibv_post_recv(3).
        """
        self._live()
        if self.qp_type in _XRC:
            raise RdmaError(
                f"{self} has no receive queue: a message goes to the XRC SRQ that it names "
                "(srq.post_srq_recv)"
            )
        if self.srq is not None:
            raise RdmaError(
                f"{self} takes its receives from {self.srq}: post them with srq.post_srq_recv()"
            )
        self._recv.post(self._live, wrs, self._check_recv if self.checked else None, self._hint)

    def _check_all(self, wr: SendWR, sges: Sequence[SGE]) -> str | None:
        return check_send_state(self._state) or check_send(wr, sges, self._limits)

    def _check_harmful(self, wr: SendWR, sges: Sequence[SGE]) -> str | None:
        return check_unsafe(wr, sges, self._limits)

    def _check_recv(self, wr: RecvWR, sges: Sequence[SGE]) -> str | None:
        if self._state is QPState.RESET:
            return "the QP is in RESET; receives can be posted from INIT on (qp.to_init)"
        return check_recv(wr, sges, self._limits)

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
        return f"{name} refused with {describe_errno(code)}"

    def _why_not_created(self, cap: Any) -> str:
        attr = self.pd.context.attr
        for name, most_name in (
            ("max_send_wr", "max_qp_wr"),
            ("max_recv_wr", "max_qp_wr"),
            ("max_send_sge", "max_sge"),
            ("max_recv_sge", "max_sge"),
        ):
            value, most = getattr(cap, name), getattr(attr, most_name)
            if value > most:
                return f"{name}={value}, but the device's {most_name} is {most}"
        device = self.pd.context.name
        if self.max_tso_header:
            return f"max_tso_header={self.max_tso_header}, but {device} may have no TSO"
        if cap.max_inline_data:
            return f"max_inline_data={cap.max_inline_data} may be more than {device} can take"
        return f"{device} may not have {self.qp_type.name} queue pairs, or no more of them"

    def _why_not_modified(self, code: int | None, to: QPState, attrs: dict[str, Any]) -> str:
        port = self.pd.context.query_port(self.port_num)
        if port.state.name != "ACTIVE":
            return f"port {self.port_num} is {port.state.name}; bring the link up"
        if code in (errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT):
            path = attrs.get("ah_attr")
            if isinstance(path, AHAttr) and path.dgid is not None:
                return (
                    f"{path.dgid} cannot be reached from GID {self.gid.index} ({self.gid.gid}); "
                    "both sides need GIDs of one kind and one network (see --gid-index)"
                )
        return f"the QP stays in {self.state.name} and does not go to {to.name}"


_XRC = frozenset({QPType.XRC_SEND, QPType.XRC_RECV})
_RTR_OPTIONS = {"min_rnr_timer", "max_dest_rd_atomic", "sl", "traffic_class"}
_RTS_OPTIONS = {"timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"}

_QUERY_MASK = int(
    QPAttrMask.STATE | QPAttrMask.CUR_STATE | QPAttrMask.CAP | QPAttrMask.AV
    | QPAttrMask.PATH_MTU | QPAttrMask.QKEY | QPAttrMask.RQ_PSN | QPAttrMask.SQ_PSN
    | QPAttrMask.DEST_QPN | QPAttrMask.ACCESS_FLAGS | QPAttrMask.PKEY_INDEX | QPAttrMask.PORT
    | QPAttrMask.TIMEOUT | QPAttrMask.RETRY_CNT | QPAttrMask.RNR_RETRY
    | QPAttrMask.MIN_RNR_TIMER | QPAttrMask.MAX_QP_RD_ATOMIC | QPAttrMask.MAX_DEST_RD_ATOMIC
    | QPAttrMask.PATH_MIG_STATE
)  # fmt: skip
