"""Queue pairs: creating them, and posting to them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .._arguments import expect, fill, index, member, within
from .._binding import address_of, ffi
from ..enums import Access, LinkLayer, QPState, QPType, SendFlags
from ..errors import RdmaError, VerbsError, describe_errno, where_explained
from ..posting.fields import Verb
from ..posting.prepared import Batch, prepare
from ..posting.queue import PostQueue, Reasons
from ..posting.rules import (
    MAX_MSG_SIZE,
    OPCODES_BY_QP_TYPE,
    Limits,
    check_send_state,
    flags_allowed,
)
from ..posting.wr import BindMW, RecvWR, SendWR
from ..standard.qp_states import missing_attributes, unchangeable_attributes
from .address import AH, AHAttr, GIDChoice, choose_gid, why_no_source
from .cq import CQ, keep_completions
from .device import GID, PortAttr, gid_argument, provider_of
from .endpoint import Endpoint
from .memory import MR, MW, PD, access_flags
from .multicast import Group, MulticastGroups, why_not_attached
from .posted import PostTarget
from .qp_attr import QUERY_MASK, QPAttr, read_qp_attr
from .qp_init import XRC, how_to_create, why_misfit, why_not_created
from .qp_transitions import (
    RTR_OPTIONS,
    RTS_OPTIONS,
    fill_attributes,
    grantable,
    mask_of,
    out_of_range,
    refuse_another_peer,
)
from .resource import struct_of
from .srq import SRQ
from .xrcd import XRCD

if TYPE_CHECKING:
    from ..tools.diagnose import Finding


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


class QP(PostTarget, struct="ibv_qp"):
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
        "_gid",
        "_gid_index",
        "_groups",
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

    _type_name = "QP"
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
        if reason := why_misfit(self.qp_type, pd, srq, xrcd, max_tso_header):
            raise ValueError(reason)
        self.checked = bool(checked)
        self.sq_sig_all = bool(sq_sig_all)
        self.port_num = port_num = index("port_num", port_num)
        if gid_index is not None:
            gid_index = index("gid_index", gid_index)
        struct_of(pd)
        port = context.query_port(port_num)
        self._gid_index = gid_index
        self._gid: GIDChoice | None = None
        self._groups = MulticastGroups()
        self._state = QPState.RESET
        self.psn = int.from_bytes(os.urandom(3))

        init = ffi.new("struct ibv_qp_init_attr_ex *")
        init.send_cq, init.recv_cq = struct_of(send_cq), struct_of(recv_cq)
        if srq is not None:
            init.srq = struct_of(srq)
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
            handle = self._make(
                create, args, provider_of(context).destroy_qp, tuple(parents.values())
            )
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
        limits = Limits(
            self.qp_type,
            address_of(struct_of(pd)),
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
        self._send = PostQueue(
            Verb.ibv_post_send,
            limits,
            self.max_send_wr,
            Reasons(_why_refused, _why_not_sending),
            checked=self.checked,
            # If there is no queue, the check gives a better reason than that it is full.
            bounded=self.xrcd is None,
        )
        self._recv = PostQueue(
            Verb.ibv_post_recv,
            limits,
            self.max_recv_wr,
            Reasons(_why_refused, _why_not_receiving),
            checked=self.checked,
        )
        self._open_queues(self._send.in_flight, self._recv.in_flight)
        self._note_state(QPState.RESET)

    def __str__(self) -> str:
        return (
            f"{self.qp_type.name} QP {self.qp_num:#x}"
            if hasattr(self, "qp_num")
            else self._type_name
        )

    def _release(self) -> None:
        if hasattr(self, "_in_flight"):
            # A queue pair that is attached cannot be destroyed.
            for group in self._groups.all():
                # Where it is not attached; else the destruction says why not.
                with contextlib.suppress(VerbsError):
                    self._detach(group)
        super()._release()

    def _keep_completions(self) -> None:
        if any(self.outstanding) or (self.srq is not None and self.srq.outstanding):
            keep_completions(self.send_cq)
            if self.recv_cq is not self.send_cq:
                keep_completions(self.recv_cq)

    def _note_state(self, state: QPState) -> None:
        self._state = state
        self._send.set_ready(state >= QPState.RTS or not self.checked)
        receives = self.srq is None and self.qp_type not in XRC
        self._recv.set_ready(receives and (state is not QPState.RESET or not self.checked))

    # ---- addressing ---------------------------------------------------------

    @property
    def gid(self) -> GIDChoice:
        """The local GID in use, and why it was chosen (see choose_gid).

        Raises:
            RdmaError: the port has none, or not the one asked for.
        """
        if self._gid is None:
            self._gid = choose_gid(self.pd.context, self.port_num, self._gid_index)
        return self._gid

    def endpoint(self) -> Endpoint:
        """Return what the peer needs to connect to this queue pair.

        Raises:
            RdmaError: the port has no GID.
            ClosedError: the QP is closed.
        """
        self._live()
        port = self.pd.context.query_port(self.port_num)
        return Endpoint(self.qp_num, self.psn, self.gid.gid, port.lid, port.active_mtu)

    def path_to(self, remote: Endpoint, *, sl: int = 0, traffic_class: int = 0) -> AHAttr:
        """Return the path to a peer, for an AH or for ibv_modify_qp's ah_attr.

        Args:
            remote: the peer's endpoint.
            sl: service level, 0..15.
            traffic_class: 0..255.

        Raises:
            TypeError: remote is not an Endpoint.
        """
        expect("remote", remote, Endpoint)
        port = self.pd.context.query_port(self.port_num)
        # On InfiniBand the LID is enough; a GID is needed only beyond the subnet.
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

        Raises:
            TypeError: remote is not an Endpoint.
            ValueError: a number does not fit.
            ClosedError: the PD is closed.
            VerbsError: the device refused.
        """
        return AH(self.pd, self.path_to(remote, sl=sl, traffic_class=traffic_class))

    # ---- states -------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """Its state, as the device reports it now."""
        self._note_state(self.query().qp_state)
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
        self._verb(provider_of(self.pd.context).query_qp, raw, QUERY_MASK, init)
        return read_qp_attr(raw)

    def modify(self, **attrs: Any) -> None:
        """Change attributes; the attribute mask is derived from the ones given.

        Args:
            attrs: fields of ``struct ibv_qp_attr`` by name (qp_state,
                qp_access_flags, pkey_index, port_num, qkey, ah_attr, path_mtu,
                dest_qp_num, rq_psn, sq_psn, timeout, retry_cnt, rnr_retry,
                min_rnr_timer, max_rd_atomic, max_dest_rd_atomic, ...).

        Raises:
            TypeError: there is no such field, or its value is of another type.
            ValueError: the state machine has no such step, an attribute that
                the step needs is missing, or a number is out of range.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        self._live()
        raw = ffi.new("struct ibv_qp_attr *")
        mask = mask_of(attrs)
        fill_attributes(raw, attrs)
        state = member("cur_qp_state", attrs.get("cur_qp_state", self._state), QPState)
        to = member("qp_state", attrs.get("qp_state", state), QPState)
        if reason := missing_attributes(self.qp_type, state, to, mask):
            raise ValueError(reason)
        if to is QPState.RESET:
            self._keep_completions()
        try:
            self._verb(provider_of(self.pd.context).modify_qp, raw, mask)
            self._note_modified(to)
        except VerbsError as error:
            error.hint = error.hint or self._why_not_modified(error.errno, to, attrs)
            raise
        except BaseException:
            # An interrupt came before or after the device did it.
            with contextlib.suppress(RdmaError):
                if self.state is to:
                    self._note_modified(to)
            raise

    def _note_modified(self, to: QPState) -> None:
        if to is QPState.RESET:
            # A reset drops what is posted, without completions.
            self._keep_completions()
            self._forget_posted()
        self._note_state(to)

    def to_init(
        self,
        access: int = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC,
        *,
        pkey_index: int = 0,
        qkey: int = DEFAULT_QKEY,
    ) -> None:
        """Bring the queue pair from RESET to INIT, from which receives can be posted.

        Args:
            access: what a peer may do through it (not on UD), an Access.
            pkey_index: entry of the port's P_Key table.
            qkey: Q_Key (UD).

        Raises:
            TypeError: an argument is not an integer.
            ValueError: access has bits that are not in Access, or the transition or an attribute
                is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        access = access_flags("access", access)
        attrs: dict[str, Any] = {"qp_state": QPState.INIT, "port_num": self.port_num}
        if self.qp_type is not QPType.RAW_PACKET:
            attrs["pkey_index"] = pkey_index
        if self.qp_type is QPType.UD:
            attrs["qkey"] = qkey
        elif self.qp_type is not QPType.RAW_PACKET:
            attrs["qp_access_flags"] = grantable(access, self.qp_type, self.pd.context.attr)
        self.modify(**attrs)

    def to_rtr(
        self,
        remote: Endpoint | None = None,
        *,
        min_rnr_timer: int = 12,
        max_dest_rd_atomic: int | None = None,
        sl: int = 0,
        traffic_class: int = 0,
    ) -> None:
        """Bring the queue pair from INIT to RTR, in which it receives.

        Args:
            remote: the peer's endpoint; not for UD and RAW_PACKET.
            min_rnr_timer: how long the peer waits before it tries again when no receive
                is posted, encoded as in the man page; 12 is 0.64 ms.
            max_dest_rd_atomic: how many reads and atomics the peer may have outstanding;
                None for the device's limit, up to 16.
            sl, traffic_class: as in path_to.

        Raises:
            TypeError: remote is not an Endpoint, or another argument is not an integer.
            ValueError: remote is missing, or the transition or an attribute is invalid (see
                modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        expect("remote", remote, Endpoint, None)
        attrs: dict[str, Any] = {"qp_state": QPState.RTR}
        if self.qp_type not in (QPType.UD, QPType.RAW_PACKET):
            if remote is None:
                raise ValueError(f"{self.qp_type.name} queue pairs need the peer's endpoint")
            port = self.pd.context.query_port(self.port_num)
            attrs |= {
                "ah_attr": self.path_to(remote, sl=sl, traffic_class=traffic_class),
                "path_mtu": min(port.active_mtu, remote.mtu),
                "dest_qp_num": remote.qpn,
                "rq_psn": remote.psn,
            }
        if self.qp_type in (QPType.RC, QPType.XRC_RECV):
            limit = self.pd.context.attr.max_qp_rd_atom
            attrs["min_rnr_timer"] = min_rnr_timer
            attrs["max_dest_rd_atomic"] = (
                min(16, limit) if max_dest_rd_atomic is None else max_dest_rd_atomic
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
        """Bring the queue pair from RTR, SQD or SQE to RTS, in which it sends.

        With the defaults a send fails after about half a second without an
        acknowledgement, or after six retries while the peer has no receive.

        Args:
            timeout: how long to wait for an acknowledgement, 4.096 us * 2^timeout,
                0..31; 14 is 67 ms, 0 waits for ever.
            retry_cnt: retries after that, 0..7.
            rnr_retry: retries when the peer has no receive, 0..7; 7 retries for ever.
            max_rd_atomic: how many reads and atomics it may have outstanding; None for
                the device's limit, up to 16.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the transition or an attribute is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        attrs: dict[str, Any] = {"qp_state": QPState.RTS}
        if self._state is QPState.RTR:
            if self.qp_type is not QPType.RAW_PACKET:
                attrs["sq_psn"] = self.psn
            if self.qp_type in (QPType.RC, QPType.XRC_SEND, QPType.XRC_RECV):
                attrs["timeout"] = timeout
            if self.qp_type in (QPType.RC, QPType.XRC_SEND):
                limit = self.pd.context.attr.max_qp_init_rd_atom
                attrs |= {
                    "retry_cnt": retry_cnt,
                    "rnr_retry": rnr_retry,
                    "max_rd_atomic": min(16, limit) if max_rd_atomic is None else max_rd_atomic,
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
        """Bring the queue pair to RTS from RESET, INIT, RTR, SQD or SQE.

        From ERR call to_reset() first, on both sides.

        Args:
            remote: the peer's endpoint; not for UD.
            access, qkey: as in to_init.
            more: other options of to_rtr and to_rts.

        Raises:
            TypeError: remote is not an Endpoint, another argument is not an integer, or there
                is no such option.
            ValueError: remote is missing, the queue pair is connected to another peer or was
                put into ERR by to_err(), or the transition or an attribute is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused, as it does if an error has put the queue pair into ERR.

        See ibv_modify_qp(3).
        """
        expect("remote", remote, Endpoint, None)
        unknown = more.keys() - RTR_OPTIONS - RTS_OPTIONS
        if unknown:
            raise TypeError(f"connect() has no option {', '.join(sorted(unknown))}")
        if self._state is QPState.RESET:
            self.to_init(access, qkey=qkey)
        if self._state is QPState.INIT:
            self.to_rtr(remote, **{k: v for k, v in more.items() if k in RTR_OPTIONS})
        elif remote is not None and self.qp_type not in (QPType.UD, QPType.RAW_PACKET):
            refuse_another_peer(str(self), self.query(), remote)
        self.to_rts(**{k: v for k, v in more.items() if k in RTS_OPTIONS})

    def to_sqd(self) -> None:
        """Drain the send queue; sends posted from now on are held.

        Raises:
            ValueError: the transition is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        self.modify(qp_state=QPState.SQD)

    def to_err(self) -> None:
        """Bring the queue pair to ERR: outstanding work requests complete with WR_FLUSH_ERR.

        Raises:
            ValueError: the transition is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        self.modify(qp_state=QPState.ERR)

    def to_reset(self) -> None:
        """Take the queue pair back to RESET and drop its outstanding work requests.

        They never complete, and the regions, windows, address handles and buffers
        that they hold are released.  Completions that are in the CQ by then stay
        there for the next poll or wait.  Receives of an SRQ stay posted.

        Raises:
            ValueError: the transition is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        self.modify(qp_state=QPState.RESET)

    def _why_not_modified(self, code: int | None, to: QPState, attrs: dict[str, Any]) -> str:
        port = self.pd.context.query_port(self.port_num)
        if port.state.name != "ACTIVE":
            return f"port {self.port_num} is {port.state.name}; bring the link up"
        if (state := self.state) is QPState.ERR:
            return "the QP is in ERR: take it back with to_reset() first"
        if reason := out_of_range(attrs, self.pd.context.attr):
            return reason
        if code == errno.EINVAL and (
            reason := unchangeable_attributes(self.qp_type, state, to, mask_of(attrs))
        ):
            return reason
        if code in (errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT):
            path = attrs.get("ah_attr")
            if isinstance(path, AHAttr) and path.dgid is not None:
                if reason := why_no_source(self.pd.context, path):
                    return reason
                return (
                    f"{path.dgid} cannot be reached from GID {self.gid.index} ({self.gid.gid}); "
                    "both sides need GIDs of one kind and one network (see --gid-index)"
                )
        return f"the QP stays in {state.name} and does not go to {to.name}"

    # ---- multicast ----------------------------------------------------------

    def attach_mcast(self, gid: GID | bytes | str, lid: int = 0) -> None:
        """Also receive what is sent to a multicast group (UD).

        A message to the group has ``remote_qpn=MULTICAST_QPN``, the Q_Key of the
        receivers, and an AH with the group as dgid (and its LID as dlid).  Each
        queue pair that is attached gets one copy, however often it was attached.
        On a network the port must also have joined the group, on InfiniBand
        through the subnet administrator.  Closing the queue pair detaches it.

        Args:
            gid: the group: in ff00::/8, or an IPv4 one such as "::ffff:239.1.2.3".
            lid: its LID on InfiniBand; 0 on Ethernet.

        Raises:
            TypeError: gid is of another type, or lid is not an integer.
            ValueError: it is not a multicast GID, or lid is not in 0..65535.
            RdmaError: the queue pair is not of type UD.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_attach_mcast(3).
        """
        verb = functools.partial(self._verb, provider_of(self.pd.context).attach_mcast)
        try:
            self._groups.attach(verb, self._group(gid, lid))
        except VerbsError as error:
            error.hint = error.hint or why_not_attached(self.pd.context, error.errno)
            raise

    def detach_mcast(self, gid: GID | bytes | str, lid: int = 0) -> None:
        """Stop receiving what is sent to a multicast group.

        Args:
            gid, lid: as passed to attach_mcast.

        Raises:
            RdmaError: the queue pair is not attached to the group.
            TypeError: gid is of another type, or lid is not an integer.
            ValueError: it is not a multicast GID, or lid is not in 0..65535.
            ClosedError: the QP is closed.
            VerbsError: the device refused.
        """
        group = self._group(gid, lid)
        try:
            self._detach(group)
        except VerbsError:
            attached = self._groups.attached()
            if group in attached:
                raise
            named = ", ".join(sorted(f"{gid} (lid {lid})" for gid, lid in attached))
            raise RdmaError(
                f"{self} is not attached to {group[0]} (lid {lid})"
                + (f", but to {named}" if named else "")
            ) from None

    def _detach(self, group: Group) -> None:
        verb = functools.partial(self._verb, provider_of(self.pd.context).detach_mcast)
        self._groups.detach(verb, group)

    def _group(self, gid: GID | bytes | str, lid: int) -> Group:
        if self.qp_type is not QPType.UD:
            raise RdmaError(f"{self} has no multicast; UD queue pairs have it")
        group = gid_argument("gid", gid)
        if not group.is_multicast:
            raise ValueError(
                f"gid: {group} is not a multicast GID such as ff0e::1 (ff00::/8) or "
                "::ffff:239.1.2.3 (::ffff:224.0.0.0/100)"
            )
        return group, within("lid", lid, 0, 0xFFFF)

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
        batch = prepare(queue, self, wrs, self._batches)
        try:
            self._live()
        except RdmaError:
            # If another thread has closed the QP meanwhile, it may not have seen the list.
            batch.close()
            raise
        return batch

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
        return _checklist(self, peer)


_checklist: Callable[[QP, QP | Endpoint | None], list[Finding]]


def set_checklist(function: Callable[[QP, QP | Endpoint | None], list[Finding]]) -> None:
    """Set what QP.diagnose calls: the resources know none of the tools."""
    global _checklist
    _checklist = function


def asked_gid_index(qp: QP) -> int | None:
    """Return the GID index that a queue pair was created with, or None if it chooses."""
    return qp._gid_index


def chosen_gid(qp: QP) -> GIDChoice | None:
    """Return the GID that a queue pair has chosen, or None if it has not yet."""
    return qp._gid


def oldest_send(qp: QP) -> int | None:
    """Return the wr_id of the oldest outstanding send, or None."""
    entry = qp._send.in_flight.entry(0)
    return None if entry is None else entry[0]


def sends_for_receive(qp: QP) -> int | None:
    """Return how many pending sends consume a receive; None where the device does not know."""
    count: int | None = qp._verb(provider_of(qp.pd.context).sends_for_receive)
    return count


def _why_not_sending(qp: QP) -> str:
    return check_send_state(qp._state) or f"the QP is in {qp._state.name}"


def _why_not_receiving(qp: QP) -> str:
    qp._refuse_without_receives()
    return "the QP is in RESET; receives can be posted from INIT on (qp.to_init)"


def _why_refused(qp: QP, code: int, wr: Any) -> str:
    name = qp.pd.context.name
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        what = getattr(getattr(wr, "opcode", None), "name", "the call")
        return f"{what} is not supported by {name}"
    if code == errno.ENOMEM:
        return f"{name} says that the queue is full, or the work request too large for it"
    if code == errno.EINVAL and qp._state < QPState.RTS:
        return f"{name} refused it: the QP is in {qp._state.name}"
    return f"{name} refused with {describe_errno(code)}; {where_explained(code)}"
