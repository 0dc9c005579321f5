"""Queue pairs: creating them, and posting to them."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .._arguments import expect, fill, index, member, within
from .._arguments import flags as flags_of
from .._binding import address_of, ffi, native
from ..enums import (
    MTU,
    Access,
    FlushLevel,
    FlushType,
    LinkLayer,
    MigState,
    Opcode,
    QPAttrMask,
    QPState,
    QPType,
    QueryQPDataInOrderCaps,
    QueryQPDataInOrderFlags,
    SendFlags,
    SendOps,
)
from ..errors import RdmaError, VerbsError, describe_refusal
from ..posting.columns import Column, LocalRows, with_c_methods
from ..posting.fields import Verb
from ..posting.prepared import Batch, prepare
from ..posting.queue import PostQueue, Reasons
from ..posting.rules import Limits, check_send_state, flags_allowed
from ..posting.wr import BindMW, RecvWR, SendWR
from ..standard.opcodes import MAX_MSG_SIZE, OPCODES_BY_QP_TYPE, SEND_OPS
from ..standard.qp_states import FIELDS, missing_attributes, unchangeable_attributes
from .ah import AH, AHAttr, why_no_path, why_no_source
from .cq import CQ, keep_completions
from .device import provider_of, refuse_beyond
from .device_attr import PortAttr, usable_mtu
from .endpoint import Endpoint
from .gid import GIDChoice, GIDLike, gid_argument
from .mr import MR, access_flags
from .multicast import Group, MulticastGroups, why_not_attached
from .mw import MW
from .pd import PD
from .qp_attr import QUERY_MASK, QPAttr, read_qp_attr
from .qp_create_arguments import XRC, create_call, device_of, unsuitable_argument, why_not_created
from .qp_modify_arguments import (
    INIT_OPTIONS,
    RTR_OPTIONS,
    RTS_OPTIONS,
    beyond_the_device,
    fill_qp_attr,
    grantable,
    late_attributes,
    mask_of,
    options_of_type,
    refuse_another_peer,
    refuse_late_options,
    refuse_missing_entries,
    refuse_out_of_range,
)
from .resource import struct_of
from .srq import SRQ
from .work_queues import HasWorkQueues
from .xrcd import XRCD

if TYPE_CHECKING:
    from ..tools.diagnose import Finding


DEFAULT_QKEY = 0x1111_1111
"""Q_Key of UD queue pairs unless another is given; ibv_ud_pingpong uses it too."""
_RESETS = 8
"""How many times to reset a queue pair that the device keeps moving back to ERR."""
_ALTERNATE = QPAttrMask.ALT_PATH | QPAttrMask.PATH_MIG_STATE
_LATE_STATES = frozenset({QPState.RTR, QPState.RTS, QPState.SQD, QPState.SQE})
"""RTS, and the states after INIT from which it can be reached."""

_EVERY_REMOTE_ACCESS = (
    Access.REMOTE_READ
    | Access.REMOTE_WRITE
    | Access.REMOTE_ATOMIC
    | Access.FLUSH_GLOBAL
    | Access.FLUSH_PERSISTENT
)
_ALL_DATA_IN_ORDER_FLAGS = functools.reduce(operator.or_, QueryQPDataInOrderFlags)
_QP_NUM = operator.attrgetter("qp_num")
_ALL_SEND_OPS = functools.reduce(operator.or_, SendOps)


class Outstanding(NamedTuple):
    """Work requests that are posted and not known to be done.

    Attributes:
        send: on the send queue; unsignaled ones count until a later one completes.
        recv: on the receive queue.
    """

    send: int
    recv: int


def _random_psn() -> int:
    return int.from_bytes(os.urandom(3))


class _Terms:
    """A connection's parameters until the next reset, which replaces this object.

    Attributes:
        psn: the first packet sequence number to send.
        used: packets may have been sent, or expected, with this psn.
        settings: the attributes that modify has set, including the last state other than ERR.
    """

    __slots__ = ("psn", "settings", "used")

    def __init__(self, psn: int) -> None:
        self.psn = psn
        self.settings: dict[str, Any] = {}
        self.used = False


class _Reset:
    """A reset in progress; only the call that performs it holds a strong reference to this.

    Attributes:
        alone: no other reset was in progress after it began.
        made: the device has carried it out, perhaps more than once.
        left: after it began, the device was seen in a state other than RESET.
        posted: how much had been posted to each queue when the device was called.
        before, after: the terms in force when it began, and the new ones that replace them.
    """

    __slots__ = ("__weakref__", "after", "alone", "before", "left", "made", "posted")

    def __init__(self, before: _Terms) -> None:
        self.alone = self.left = self.made = False
        self.posted: list[tuple[native.InFlight, int]] = []
        self.before, self.after = before, _Terms(before.psn)


class QP(HasWorkQueues, struct="ibv_qp"):
    """A queue pair (ibv_create_qp(3)).

    Args:
        pd: the protection domain; None for XRC_RECV.
        qp_type: RC, UC, UD, RAW_PACKET, XRC_SEND or XRC_RECV.
        send_cq: where sends complete; None for XRC_RECV.
        recv_cq: where receives complete; default: send_cq.
        srq: the shared receive queue to take receives from.
        xrcd: the XRC domain (XRC_RECV).  Such a queue pair uses the PD and the CQ of the
            SRQ that a message names, and has none of its own:
            ``QP(None, QPType.XRC_RECV, xrcd=xrcd)``.
        max_send_wr, max_recv_wr: work requests that each queue must hold.
        max_send_sge, max_recv_sge: SGEs per work request.
        max_inline_data: bytes per inline work request.
        max_tso_header: bytes of a TSO header (UD, RAW_PACKET); 0 for no TSO.
        send_ops_flags: SendOps.FLUSH and SendOps.ATOMIC_WRITE, if it is to post these opcodes
            (ibv_wr_post(3)); other opcodes need no flag, but their flags are accepted.
        sq_sig_all: every send generates a completion, SIGNALED or not.
        checked: check work requests before they are posted.
        port_num: the local port, from 1.
        gid_index: index of the local GID; None to let choose_gid choose.

    Attributes:
        context: its open device.
        qp_num: its number.
        qp_type: its type.
        psn: first packet sequence number that it sends; random (a new one after a reset), or the
            sq_psn passed to modify.
        max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data: what
            the device granted.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the device has no such port, or gid_index is beyond the port's GID table (an
            empty entry is refused only when used); a CQ belongs to another open device; or
            the type does not allow an argument, or needs one that is missing.
        ClosedError: the PD or a CQ is closed.
        UnsupportedError: the device or libibverbs lacks one of send_ops_flags, or the device has
            no TSO on this type. With checked=False, the driver decides.
        VerbsError: the device refused; the message says which limit was exceeded.
    """

    __slots__ = (
        "_cqs",
        "_gid",
        "_gid_index",
        "_groups",
        "_has_receives",
        "_latest_reading",
        "_latest_reset",
        "_numbers",
        "_receives_from",
        "_recv",
        "_resets",
        "_send",
        "_sends_from",
        "_srq",
        "_state",
        "_state_set",
        "_terms",
        "checked",
        "max_inline_data",
        "max_recv_sge",
        "max_recv_wr",
        "max_send_sge",
        "max_send_wr",
        "max_tso_header",
        "port_num",
        "qp_num",
        "qp_type",
        "recv_cq",
        "send_cq",
        "send_ops_flags",
        "sq_sig_all",
        "srq",
        "xrcd",
    )

    _type_name = "QP"
    _rank = 1

    def __init__(
        self,
        pd: PD | None,
        qp_type: QPType,
        send_cq: CQ | None = None,
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
        send_ops_flags: int = SendOps(0),
        sq_sig_all: bool = False,
        checked: bool = True,
        port_num: int = 1,
        gid_index: int | None = None,
    ) -> None:
        expect("pd", pd, PD, None)
        expect("send_cq", send_cq, CQ, None)
        expect("recv_cq", recv_cq, CQ, None)
        expect("srq", srq, SRQ, None)
        expect("xrcd", xrcd, XRCD, None)
        self.qp_type = member("qp_type", qp_type, QPType)
        self.context = context = device_of(self.qp_type, pd, send_cq, recv_cq, xrcd)
        recv_cq = send_cq if recv_cq is None else recv_cq
        # None only for XRC_RECV, which neither posts nor completes on them.
        self.pd: PD | Any = pd
        self.send_cq: CQ | Any = send_cq
        self.recv_cq: CQ | Any = recv_cq
        self.srq, self.xrcd = srq, xrcd
        # For closing: a subclass may use those names for different attributes.
        self._cqs, self._srq = (send_cq, recv_cq), srq
        self.max_tso_header = max_tso_header = index("max_tso_header", max_tso_header)
        self.send_ops_flags = ops = flags_of(
            "send_ops_flags", send_ops_flags, _ALL_SEND_OPS, "SendOps flags"
        )
        if reason := unsuitable_argument(self.qp_type, context, srq, max_tso_header, ops):
            raise ValueError(reason)
        for name, given_bool in (("sq_sig_all", sq_sig_all), ("checked", checked)):
            expect(name, given_bool, bool)
        self.sq_sig_all, self.checked = sq_sig_all, checked
        self.port_num = port_num = index("port_num", port_num)
        for parent in (pd, xrcd):
            if parent is not None:
                struct_of(parent)
        port = context.query_port(port_num)
        if gid_index is not None:
            gid_index = index("gid_index", gid_index)
            refuse_beyond("gid_index", gid_index, port.gid_tbl_len, "GID", context, port_num)
        self._gid_index = gid_index
        self._gid: GIDChoice | None = None
        self._groups = MulticastGroups()
        # The queue pair's state, as far as is known, and the last one that modify() set.
        self._state = self._state_set = QPState.RESET
        self._numbers = itertools.count(1)
        # The number of the reading that found `_state`; a change is followed by a reading.
        self._latest_reading = 0
        # The resets whose verbs have not returned: nothing is posted until they all have.
        self._resets: dict[int, weakref.ref[_Reset]] = {}
        # The number of the reset that began last.
        self._latest_reset = 0
        self._terms = _Terms(_random_psn())

        init = ffi.new("struct ibv_qp_init_attr_ex *")
        if send_cq is not None and recv_cq is not None:
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
        create, args = create_call(
            context, pd, xrcd, init, max_tso_header, ops, checked=self.checked
        )
        try:
            self._make(create, args, provider_of(context).destroy_qp, tuple(parents.values()))
        except VerbsError as error:
            error.hint = error.hint or why_not_created(
                error.errno, context, init, max_tso_header, ops
            )
            raise
        self._take(cap, port)

    def _take(self, cap: Any, port: PortAttr) -> None:
        context = self.context
        # Another thread may have closed the QP.
        self.qp_num: int = self._verb(_QP_NUM)
        self.max_send_wr: int = cap.max_send_wr
        self.max_recv_wr: int = cap.max_recv_wr
        self.max_send_sge: int = cap.max_send_sge
        self.max_recv_sge: int = cap.max_recv_sge
        self.max_inline_data: int = cap.max_inline_data

        device_cap = context.attr.device_cap_flags
        limits = Limits(
            self.qp_type,
            0 if self.pd is None else address_of(struct_of(self.pd)),
            self.max_send_sge,
            self.max_recv_sge,
            self.max_inline_data,
            {
                opcode: int(flags_allowed(self.qp_type, opcode, device_cap))
                for opcode in OPCODES_BY_QP_TYPE[self.qp_type]
                if opcode not in SEND_OPS or self.send_ops_flags & SEND_OPS[opcode]
            },
            usable_mtu(port).bytes if self.qp_type is QPType.UD else MAX_MSG_SIZE,
            self.max_tso_header,
            sq_sig_all=self.sq_sig_all,
        )
        self._send = PostQueue(
            Verb.ibv_post_send,
            limits,
            self.max_send_wr,
            Reasons(_why_refused, _why_not_sending),
            checked=self.checked,
            # An XRC_RECV QP has no send queue; the check gives a better reason than "full".
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
        # Without checks the device decides.
        self._sends_from = QPState.RTS if self.checked else QPState.RESET
        self._receives_from = QPState.INIT if self.checked else QPState.RESET
        self._has_receives = self._srq is None and self.qp_type not in XRC
        self._admit_posts()

    def __str__(self) -> str:
        return (
            f"{self.qp_type.name} QP {self.qp_num:#x}"
            if hasattr(self, "qp_num")
            else self._type_name
        )

    def _release(self) -> None:
        if hasattr(self, "_in_flight"):
            # A queue pair that is attached to a group cannot be destroyed.
            for group in self._groups.all():
                # It may already be detached; destroying the QP reports any other failure.
                with contextlib.suppress(VerbsError):
                    self._verb(provider_of(self.context).detach_mcast, *group)
        super()._release()

    def _keep_completions(self) -> None:
        send_cq, recv_cq = self._cqs
        if send_cq is None or recv_cq is None:
            return
        queues = self._in_flight if self._srq is None else self._in_flight + self._srq._in_flight
        if any([queue.outstanding for queue in queues]):
            keep_completions(send_cq)
            if recv_cq is not send_cq:
                keep_completions(recv_cq)

    def _admit_posts(self) -> None:
        """Have the queues accept or refuse posts, according to the state recorded last."""
        resets = self._resets
        for change, reset in list(resets.items()):
            if reset() is None:
                # One interrupt ended the reset, and a second one ended its cleanup.
                resets.pop(change, None)
        # A reset in progress would drop work requests posted now. If another thread has recorded a
        # state in the meantime, these calls may have undone what that thread set: repeat them.
        while True:
            state = self._state
            self._send.set_ready(state >= self._sends_from, resets)
            self._recv.set_ready(self._has_receives and state >= self._receives_from, resets)
            if self._state is state:
                return

    def _read_state(self) -> QPState:
        """Return the state that the device reports, and record it.

        If a call that began later has recorded a state, read again, because the state just read may
        be older.
        """
        while True:
            reading = next(self._numbers)
            state = self.query().qp_state
            if self._note_state(state, reading):
                return state

    def _note_state(self, state: QPState, reading: int) -> bool:
        """Record a state; if a reading that began later has recorded one, return False instead."""
        is_latest = self._latest_reading < reading
        if is_latest:
            # No other thread runs between the comparison and these assignments.
            self._latest_reading = reading
            self._state = state
        self._admit_posts()
        return is_latest

    def _read_state_beside_resets(self) -> None:
        """Read the state if a reset is in progress: the device may already have carried it out."""
        if self._resets:
            with contextlib.suppress(VerbsError):
                self._read_state()

    # ---- addressing ---------------------------------------------------------

    @property
    def gid(self) -> GIDChoice:
        """The local GID in use, and why it was chosen (see choose_gid).

        Raises:
            ValueError: the port has no GID at the QP's gid_index.
            RdmaError: the port has no GID at all.
            ClosedError: the device is closed.
            VerbsError: the device could not be queried.
        """
        # On a closed device choose_gid() raises ClosedError.
        if self._gid is None or self.context.closed:
            self._gid = self.context.choose_gid(self.port_num, self._gid_index)
        return self._gid

    @property
    def psn(self) -> int:
        """First packet sequence number that it sends; the peer must expect it."""
        return self._terms.psn

    def endpoint(self) -> Endpoint:
        """Return what the peer needs to connect to this queue pair.

        Raises:
            ValueError: the port has no GID at the QP's gid_index.
            RdmaError: the port has no GID at all.
            ClosedError: the QP is closed.
        """
        self._open_struct()
        port = self.context.query_port(self.port_num)
        return Endpoint(self.qp_num, self.psn, self.gid.gid, port.lid, usable_mtu(port))

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
        port = self.context.query_port(self.port_num)
        # On InfiniBand the LID is enough; a GID is needed only beyond the subnet.
        by_lid = port.link_layer is not LinkLayer.ETHERNET and remote.lid != 0
        return AHAttr(
            port_num=self.port_num,
            dlid=remote.lid,
            sl=sl,
            dgid=None if by_lid else remote.gid,
            sgid_index=0 if by_lid else self.gid.gid_index,
            traffic_class=traffic_class,
        )

    def ah_to(self, remote: Endpoint, *, sl: int = 0, traffic_class: int = 0) -> AH:
        """Create an address handle to a UD peer.

        Args:
            remote: the peer's endpoint.
            sl: service level, 0..15.
            traffic_class: 0..255.

        Raises:
            TypeError: remote is not an Endpoint.
            ValueError: a number is out of range, or the queue pair is an XRC_RECV.
            ClosedError: the PD is closed.
            VerbsError: the device refused.
        """
        if self.pd is None:
            raise ValueError(f"{self} has no PD on which to create an address handle")
        return AH(self.pd, self.path_to(remote, sl=sl, traffic_class=traffic_class))

    # ---- states -------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """Its state, as the device reports it now."""
        return self._read_state()

    def query(self) -> QPAttr:
        """Return its current attributes.

        Raises:
            ClosedError: the QP is closed.
            VerbsError: the device failed.

        See ibv_query_qp(3).
        """
        raw = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        self._verb(provider_of(self.context).query_qp, raw, QUERY_MASK, init)
        return read_qp_attr(raw, init)

    def query_data_in_order(self, opcode: Opcode, flags: int = 0) -> QueryQPDataInOrderCaps:
        """Return the order in which the data of one work request reaches this side's memory.

        If it is the message's order, a reader may poll the memory instead of waiting for a
        completion.  soft0 and Soft-RoCE promise no order.

        Args:
            opcode: RDMA_READ for reads that this queue pair posts; RDMA_WRITE or SEND for its
                peer's writes or sends.
            flags: QueryQPDataInOrderFlags; without RETURN_CAPS, only WHOLE_MSG can be returned.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: opcode or flags is not valid.
            ClosedError: the QP is closed.
            UnsupportedError: this libibverbs is too old to have the function.

        See ibv_query_qp_data_in_order(3).
        """
        opcode = member("opcode", opcode, Opcode)
        bits = flags_of("flags", flags, _ALL_DATA_IN_ORDER_FLAGS, "QueryQPDataInOrderFlags")
        query = provider_of(self.context).query_qp_data_in_order
        return QueryQPDataInOrderCaps(self._verb(query, int(opcode), bits))

    def modify(
        self,
        *,
        qp_state: QPState | None = None,
        cur_qp_state: QPState | None = None,
        en_sqd_async_notify: bool | None = None,
        qp_access_flags: int | None = None,
        pkey_index: int | None = None,
        port_num: int | None = None,
        qkey: int | None = None,
        ah_attr: AHAttr | None = None,
        path_mtu: MTU | None = None,
        timeout: int | None = None,
        retry_cnt: int | None = None,
        rnr_retry: int | None = None,
        rq_psn: int | None = None,
        sq_psn: int | None = None,
        max_rd_atomic: int | None = None,
        max_dest_rd_atomic: int | None = None,
        min_rnr_timer: int | None = None,
        alt_ah_attr: AHAttr | None = None,
        alt_pkey_index: int | None = None,
        alt_port_num: int | None = None,
        alt_timeout: int | None = None,
        path_mig_state: MigState | None = None,
        dest_qp_num: int | None = None,
        rate_limit: int | None = None,
    ) -> None:
        """Change attributes; the arguments determine the attribute mask.

        Args:
            qp_state: the state to go to.
            cur_qp_state: the state that the queue pair is assumed to be in.
            en_sqd_async_notify: whether the end of draining (SQD) causes an event.
            qp_access_flags: what a peer may do through it, an Access.
            pkey_index: index into the port's P_Key table.
            port_num: the local port, from 1.
            qkey: Q_Key (UD).
            ah_attr: the path to the peer; see path_to.
            path_mtu: the path MTU.
            timeout: how long to wait for an acknowledgement, 4.096 us * 2^timeout, 0..31; 0
                to wait forever.
            retry_cnt: retries after that time, 0..7.
            rnr_retry: retries when the peer has no receive, 0..7; 7 to retry forever.
            rq_psn, sq_psn: first packet sequence number to receive and to send, 24 bits.
            max_rd_atomic, max_dest_rd_atomic: how many reads and atomics this side, or the peer,
                may have outstanding.
            min_rnr_timer: how long the peer waits when no receive is posted, encoded as in the
                man page, 0..31.
            alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout: the alternate path.
            path_mig_state: state of the migration to that path.
            dest_qp_num: the peer's qp_num.
            rate_limit: kbit/s (RAW_PACKET); 0 for no limit.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: the queue pair's type has no such transition, an attribute that the
                transition requires is missing, a number is out of the man page's range, the
                device has no such port, or the port has no such P_Key or GID index.
            ClosedError: the QP is closed.
            VerbsError: the device refused; the message names an attribute that cannot change in
                this transition, or that exceeds the device's limit (max_rd_atomic,
                max_dest_rd_atomic).

        See ibv_modify_qp(3).
        """
        # Not locals(): CPython 3.13's crashes when memory runs out.
        given: dict[str, Any] = {
            "qp_state": qp_state,
            "cur_qp_state": cur_qp_state,
            "en_sqd_async_notify": en_sqd_async_notify,
            "qp_access_flags": qp_access_flags,
            "pkey_index": pkey_index,
            "port_num": port_num,
            "qkey": qkey,
            "ah_attr": ah_attr,
            "path_mtu": path_mtu,
            "timeout": timeout,
            "retry_cnt": retry_cnt,
            "rnr_retry": rnr_retry,
            "rq_psn": rq_psn,
            "sq_psn": sq_psn,
            "max_rd_atomic": max_rd_atomic,
            "max_dest_rd_atomic": max_dest_rd_atomic,
            "min_rnr_timer": min_rnr_timer,
            "alt_ah_attr": alt_ah_attr,
            "alt_pkey_index": alt_pkey_index,
            "alt_port_num": alt_port_num,
            "alt_timeout": alt_timeout,
            "path_mig_state": path_mig_state,
            "dest_qp_num": dest_qp_num,
            "rate_limit": rate_limit,
        }
        attrs = {name: given[name] for name in FIELDS if given[name] is not None}
        self._open_struct()
        raw = ffi.new("struct ibv_qp_attr *")
        mask = mask_of(attrs)
        fill_qp_attr(raw, attrs)
        self._read_state_beside_resets()
        to = member("qp_state", attrs["qp_state"], QPState) if "qp_state" in attrs else None
        state, reason = self._why_no_transition(to, attrs, mask)
        if reason:
            # The recorded state may be out of date: the device may have moved the QP to ERR, or
            # one interrupt may have ended a transition, and a second one its cleanup.
            with contextlib.suppress(VerbsError):
                self._read_state()
            state, reason = self._why_no_transition(to, attrs, mask)
        # If an error has put the QP into ERR, no argument is wrong: let the device refuse.
        if reason and (state is not QPState.ERR or self._state_set is QPState.ERR):
            raise ValueError(reason)
        refuse_out_of_range(attrs)
        refuse_missing_entries(self.context, self.port_num, raw, attrs)
        change, terms, made = next(self._numbers), self._terms, False
        reset, executed = _Reset(terms), None
        try:
            if to is QPState.RESET:
                self._begin_reset(change, reset)
                self._have_reset(raw, mask, change, reset)
            else:
                if to is QPState.INIT and self._resets:
                    executed = self._release_dropped()
                    terms = self._terms
                elif to is QPState.INIT:
                    self._drop_leftovers()
                elif to is not None and to is not QPState.ERR:
                    terms.used = True
                self._verb(provider_of(self.context).modify_qp, raw, mask)
            made = True
            if executed is not None:
                # The device has carried out the reset, although its verb has not returned: work
                # requests posted from now on are kept.
                self._resets.pop(executed, None)
            self._note_modified(to, attrs, reset, terms)
        except VerbsError as error:
            self._resets.pop(change, None)
            with contextlib.suppress(RdmaError):
                self._read_state()
            for path in ("ah_attr", "alt_ah_attr"):
                if path in attrs and (reason := why_no_source(self.context, attrs[path])):
                    raise ValueError(reason) from error
            error.hint = error.hint or self._why_not_modified(error.errno, to, attrs)
            raise
        except BaseException:
            # An interrupt came before or after the device made the transition.
            with contextlib.suppress(RdmaError):
                if made or reset.made or (to is not None and self.state is to):
                    self._note_modified(to, attrs, reset, terms)
            raise
        finally:
            if to is QPState.RESET:
                self._resets.pop(change, None)
                self._admit_posts()

    def _why_no_transition(
        self, to: QPState | None, attrs: dict[str, Any], mask: QPAttrMask
    ) -> tuple[QPState, str | None]:
        """Return the state that a change starts from, and the reason why it is refused, or None."""
        state = member("cur_qp_state", attrs.get("cur_qp_state", self._state), QPState)
        end = state if to is None else to
        return state, missing_attributes(self.qp_type, state, end, mask)

    def _begin_reset(self, change: int, reset: _Reset) -> None:
        """Refuse posts from now on, and record what the reset drops."""
        self._keep_completions()
        self._resets[change] = weakref.ref(reset)
        self._latest_reset = change
        self._admit_posts()
        reset.alone = len(self._resets) == 1
        state = self._state
        with contextlib.suppress(RdmaError):
            state = self.query().qp_state
            reset.left = state is not QPState.RESET
        if state > QPState.RTR:
            # The QP may have sent packets: a delayed one must not have the psn that the peer
            # expects next.
            reset.after.psn = _random_psn()

    def _have_reset(self, raw: Any, mask: int, change: int, reset: _Reset) -> None:
        """Have the device carry out a reset; repeat it if the QP is in ERR afterwards.

        If a request that Soft-RoCE is handling fails during the reset, ibv_modify_qp() returns 0
        and the queue pair is in ERR (rxe_qp_reset() in Linux 6.12).
        """
        for _ in range(_RESETS):
            reset.posted = self._posted()
            self._verb(provider_of(self.context).modify_qp, raw, mask)
            reset.made = True
            try:
                state = self.query().qp_state
            except VerbsError:
                return
            # Another thread may have seen the QP in RESET and used it, in which case that use
            # moved it to ERR.
            if state is not QPState.ERR or change not in self._resets:
                return
            self._drop(reset.posted)
        raise VerbsError(
            "ibv_modify_qp",
            errno.EBUSY,
            hint=f"the device moved the QP to ERR again after each of {_RESETS} resets",
        )

    def _posted(self) -> list[tuple[native.InFlight, int]]:
        """Return how much has been posted to each queue so far."""
        return [(queue, queue.posted) for queue in self._in_flight]

    def _drop(self, posted: list[tuple[native.InFlight, int]]) -> None:
        """Release the work requests that a reset has dropped, without completions."""
        self._keep_completions()
        for queue, count in posted:
            queue.clear_until(count)

    def _drop_leftovers(self) -> None:
        """Release what an interrupted reset has dropped, if the device is in RESET."""
        posted = self._posted()
        # Without checks, the device may have accepted receives in RESET, and will keep them.
        if not self.checked or not any([queue.outstanding for queue, _ in posted]):
            return
        with contextlib.suppress(VerbsError):
            if self.query().qp_state is QPState.RESET:
                self._drop(posted)

    def _release_dropped(self) -> int | None:
        """Release the work requests dropped by resets in progress, if the device is in RESET.

        Returns:
            the number of the latest reset, if the device is known to have carried it out although
            its verb has not returned: no other reset was in progress after it began, and the device
            has been seen in another state since. Otherwise None.
        """
        latest, terms = self._latest_reset, self._terms
        pending = self._resets.get(latest)
        reset = None if pending is None else pending()
        # The peer may already have been given a psn that is still unused, so keep it.
        posted, fresh = self._posted(), _Terms(_random_psn() if terms.used else terms.psn)
        try:
            if self.query().qp_state is not QPState.RESET:
                return None
        except RdmaError:
            return None
        if self._terms is terms:
            self._terms = fresh
        self._drop(posted)
        proven = reset is not None and reset.alone and reset.left
        return latest if proven and self._latest_reset == latest else None

    def _note_modified(
        self, to: QPState | None, attrs: dict[str, Any], reset: _Reset, terms: _Terms
    ) -> None:
        """Record a change that the device has made.

        Args:
            to: the new state; None if only attributes have changed.
            attrs: the attributes that were set.
            reset: the record of the reset; used only if `to` is RESET.
            terms: the connection's terms when the change began.
        """
        if to is QPState.RESET:
            if self._terms is reset.before:
                self._terms = reset.after
            elif self._terms is not reset.after:
                # Another thread has reset and used the queue pair in the meantime.
                self._release_dropped()
            self._drop(reset.posted)
        else:
            if "sq_psn" in attrs:
                terms.psn = attrs["sq_psn"]
            if to is not QPState.ERR:
                terms.settings.update(attrs)
        if to is not None:
            # Another thread may have changed the state since: only the device knows the latest one.
            self._state_set = to
            reading = next(self._numbers)
            try:
                self._read_state()
            except RdmaError:
                self._note_state(to, reading)

    def to_init(
        self, access: int = _EVERY_REMOTE_ACCESS, *, pkey_index: int = 0, qkey: int = DEFAULT_QKEY
    ) -> None:
        """Bring the queue pair from RESET to INIT; receives can be posted from INIT on.

        Args:
            access: what a peer may do through it (not on UD), an Access.
            pkey_index: index into the port's P_Key table.
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
            attrs["qp_access_flags"] = self._grantable(access)
        self.modify(**attrs)

    def _grantable(self, access: int) -> int:
        return grantable(access, self.qp_type, self.context.attr)

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
            remote: the peer's endpoint; not needed for UD and RAW_PACKET.
            min_rnr_timer: how long the peer waits before it retries when no receive is
                posted, encoded as in the man page; 12 is 0.64 ms.
            max_dest_rd_atomic: how many reads and atomics the peer may have outstanding;
                None for the device's limit, up to 16.
            sl: service level, 0..15.
            traffic_class: 0..255.

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
            port = self.context.query_port(self.port_num)
            attrs |= {
                "ah_attr": self.path_to(remote, sl=sl, traffic_class=traffic_class),
                "path_mtu": min(usable_mtu(port), remote.mtu),
                "dest_qp_num": remote.qp_num,
                "rq_psn": remote.psn,
            }
        if self.qp_type in (QPType.RC, QPType.XRC_RECV):
            limit = self.context.attr.max_qp_rd_atom
            attrs["min_rnr_timer"] = min_rnr_timer
            attrs["max_dest_rd_atomic"] = (
                min(16, limit) if max_dest_rd_atomic is None else max_dest_rd_atomic
            )
        self.modify(**attrs)

    def to_rts(
        self,
        *,
        timeout: int | None = None,
        retry_cnt: int | None = None,
        rnr_retry: int | None = None,
        max_rd_atomic: int | None = None,
    ) -> None:
        """Bring the queue pair from RTR, SQD or SQE to RTS, in which it sends.

        With the defaults, a send fails after about half a second without an ACK (four
        seconds on roce devices), or after six retries while the peer has no receive posted.

        From SQD, only the given options change.  In RTS, no option can change: the call does
        nothing without options, and raises ValueError if any is given.

        Args:
            timeout: how long to wait for an ACK, 4.096 us * 2^timeout, 0..31; 0 to wait forever;
                default 14 (67 ms), or 17 (0.54 s) on roce devices (RC, XRC).
            retry_cnt: retries after a timeout or a NAK that reports a missing packet, 0..7;
                default 6 (RC, XRC_SEND).
            rnr_retry: retries while the peer has no receive posted, 0..7; 7 to retry forever;
                default 6 (RC, XRC_SEND).
            max_rd_atomic: how many reads and atomics it may have outstanding; None for
                the device's limit, up to 16 (RC, XRC_SEND).

        Raises:
            TypeError: an argument is not an integer.
            ValueError: an option cannot change in this state, or the transition or an attribute is
                invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        options = {
            "timeout": timeout,
            "retry_cnt": retry_cnt,
            "rnr_retry": rnr_retry,
            "max_rd_atomic": max_rd_atomic,
        }
        self._to_rts(_given(options))

    def _to_rts(self, options: dict[str, int]) -> None:
        """Bring the queue pair to RTS; the options may belong to earlier transitions."""
        options = options_of_type(self.qp_type, options)
        attrs: dict[str, Any] = {"qp_state": QPState.RTS}
        if self._state is QPState.RTR:
            defaults = {
                "timeout": provider_of(self.context).default_timeout,
                "retry_cnt": 6,
                "rnr_retry": 6,
                "max_rd_atomic": min(16, self.context.attr.max_qp_init_rd_atom),
            }
            attrs |= options_of_type(self.qp_type, defaults)
            attrs |= {name: options.pop(name) for name in RTS_OPTIONS & options.keys()}
            if self.qp_type is not QPType.RAW_PACKET:
                attrs["sq_psn"] = self.psn
        # Ask the device: an error may have changed the state.
        if options and (state := self.state) in _LATE_STATES:
            refuse_late_options(str(self), self.qp_type, state, options)
            if "access" in options:
                options["access"] = self._grantable(options["access"])
            changes = late_attributes(options, self.query)
            if state is QPState.SQD:
                self.modify(**changes)  # with qp_state=SQD, Linux 6.12's rxe would drain again
            else:
                attrs |= changes
        self.modify(**attrs)

    def connect(
        self,
        remote: Endpoint | None = None,
        *,
        access: int | None = None,
        qkey: int | None = None,
        min_rnr_timer: int | None = None,
        max_dest_rd_atomic: int | None = None,
        sl: int | None = None,
        traffic_class: int | None = None,
        timeout: int | None = None,
        retry_cnt: int | None = None,
        rnr_retry: int | None = None,
        max_rd_atomic: int | None = None,
    ) -> None:
        """Bring the queue pair to RTS from RESET, INIT, RTR, SQD or SQE.

        In ERR, call to_reset() first, on both sides.

        If a transition has already been made, each of its options is applied if ibv_modify_qp can
        change that option in the queue pair's current state, and refused if not. In RTS without
        options, the call only checks the peer. Options that do not apply to the queue pair's type
        are ignored.

        If the call fails, a queue pair that was in RESET is back in RESET; any other stays in the
        state that it has reached.

        Args:
            remote: the peer's endpoint.  UD and RAW_PACKET ignore it: they have no peer.
            access, qkey: see to_init.
            min_rnr_timer, max_dest_rd_atomic, sl, traffic_class: see to_rtr.
            timeout, retry_cnt, rnr_retry, max_rd_atomic: see to_rts.  None means that
                transition's default.

        Raises:
            TypeError: remote is not an Endpoint, or another argument is not an integer.
            ValueError: remote is missing, the queue pair is connected to another peer or was
                put into ERR by to_err(), an option cannot change in its state, or the transition
                or an attribute is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused, for example because an error had put the queue pair
                into ERR.

        See ibv_modify_qp(3).
        """
        expect("remote", remote, Endpoint, None)
        options = _given(
            {
                "access": None if access is None else access_flags("access", access),
                "qkey": qkey,
                "min_rnr_timer": min_rnr_timer,
                "max_dest_rd_atomic": max_dest_rd_atomic,
                "sl": sl,
                "traffic_class": traffic_class,
                "timeout": timeout,
                "retry_cnt": retry_cnt,
                "rnr_retry": rnr_retry,
                "max_rd_atomic": max_rd_atomic,
            }
        )
        with contextlib.suppress(VerbsError):
            if self._resets or self.query().qp_state is QPState.RESET:
                self._read_state()
        was_reset = self._state is QPState.RESET
        try:
            self._climb(remote, options)
        except BaseException:
            if was_reset and self._state is not QPState.RESET:
                with contextlib.suppress(RdmaError):
                    self.to_reset()
            raise

    def _climb(self, remote: Endpoint | None, options: dict[str, int]) -> None:
        """Bring the queue pair to RTS, and remove each option as it is applied."""
        if self._state is QPState.RESET:
            self.to_init(**_taken(options, INIT_OPTIONS))
        if self._state is QPState.INIT:
            changes = options_of_type(self.qp_type, _taken(options, INIT_OPTIONS))
            if "access" in changes:
                changes["access"] = self._grantable(changes["access"])
            if changes:
                self.modify(qp_state=QPState.INIT, **late_attributes(changes, self.query))
            self.to_rtr(remote, **_taken(options, RTR_OPTIONS))
        elif remote is not None and self.qp_type not in (QPType.UD, QPType.RAW_PACKET):
            refuse_another_peer(str(self), self.query(), remote)
        self._to_rts(options)

    def to_sqd(self) -> None:
        """Bring the queue pair to SQD: drain the send queue, and hold sends posted later.

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
        """Bring the queue pair back to RESET and drop its outstanding work requests.

        They never complete, and the regions, windows, address handles and buffers
        that they hold are released.  Completions that are already in the CQ stay
        there for the next poll or wait.  An SRQ's receives stay posted.

        A queue pair that may have sent packets (it was in RTS or beyond) gets a new psn, which
        the peer must expect: exchange the endpoints again.

        Raises:
            ValueError: the transition is invalid (see modify).
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        self.modify(qp_state=QPState.RESET)

    def _why_not_modified(self, code: int | None, to: QPState | None, attrs: dict[str, Any]) -> str:
        port = self.context.query_port(self.port_num)
        if port.state.name != "ACTIVE":
            return f"port {self.port_num} is {port.state.name}; bring the link up"
        if (state := self.state) is QPState.ERR:
            return "the QP is in ERR: call to_reset() first"
        to = state if to is None else to
        if reason := beyond_the_device(attrs, self.context.attr):
            return reason
        if code in (errno.EINVAL, errno.EOPNOTSUPP) and (
            reason := unchangeable_attributes(self.qp_type, state, to, mask_of(attrs))
        ):
            return reason
        ethernet = port.link_layer is LinkLayer.ETHERNET
        if code == errno.EINVAL and attrs.get("cur_qp_state", state) != state:
            cur = QPState(attrs["cur_qp_state"])
            return f"cur_qp_state={cur.name}, but the QP is in {state.name}"
        if code == errno.EINVAL and ethernet and mask_of(attrs) & _ALTERNATE:
            return "Linux supports alternate paths only on InfiniBand, and this port is Ethernet"
        if (path := attrs.get("ah_attr")) and (
            reason := why_no_path(self.context, path, code, "give gid_index=")
        ):
            return reason
        if state is QPState.SQD and code == errno.EINVAL:
            return (
                "the QP is in SQD, and its send queue may still be draining: wait for the event "
                "SQ_DRAINED, or until query().sq_draining is False"
            )
        if state is to:
            return f"the QP stays as it is, in {state.name}"
        return f"the QP stays in {state.name} and does not go to {to.name}"

    # ---- multicast ----------------------------------------------------------

    def attach_mcast(self, gid: GIDLike, lid: int = 0) -> None:
        """Attach the queue pair to a multicast group, to receive its messages as well (UD).

        To send to the group, use ``remote_qpn=MULTICAST_QPN``, the receivers' Q_Key,
        and an AH with the group as dgid (and its LID as dlid).  Each attached queue
        pair gets one copy of a message, however often it was attached.  Closing the
        queue pair detaches it.

        On a network the host must also have joined the group: on Ethernet with a
        socket's IP_ADD_MEMBERSHIP or IPV6_JOIN_GROUP on the network device that carries
        the GID (examples/multicast.py), on InfiniBand through the subnet administrator.
        Otherwise it drops the packets, while the sender sees SUCCESS.

        Args:
            gid: the group, as a GID, 16 bytes or text: an IPv4 one such as
                "::ffff:239.1.2.3" if the senders' GIDs are IPv4, otherwise one in ff00::/8.
            lid: its LID on InfiniBand; 0 on Ethernet.

        Raises:
            TypeError: gid has the wrong type, or lid is not an integer.
            ValueError: gid is not a multicast GID, or lid is not in 0..65535.
            RdmaError: the queue pair is not of type UD.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_attach_mcast(3).
        """
        verb = functools.partial(self._verb, provider_of(self.context).attach_mcast)
        try:
            self._groups.attach(verb, self._group(gid, lid))
        except VerbsError as error:
            error.hint = error.hint or why_not_attached(self.context, error.errno)
            raise

    def detach_mcast(self, gid: GIDLike, lid: int = 0) -> None:
        """Detach the queue pair from a multicast group.

        Args:
            gid: the group, as passed to attach_mcast.
            lid: its LID on InfiniBand; 0 on Ethernet.

        Raises:
            RdmaError: the queue pair is not attached to the group.
            TypeError: gid has the wrong type, or lid is not an integer.
            ValueError: gid is not a multicast GID, or lid is not in 0..65535.
            ClosedError: the QP is closed.
            VerbsError: the device refused.
        """
        group = self._group(gid, lid)
        verb = functools.partial(self._verb, provider_of(self.context).detach_mcast)
        try:
            self._groups.detach(verb, group)
        except VerbsError:
            attached = self._groups.attached()
            if group in attached:
                raise
            named = ", ".join(sorted([f"{gid} (lid {lid})" for gid, lid in attached]))
            raise RdmaError(
                f"{self} is not attached to {group[0]} (lid {lid})"
                + (f", but to {named}" if named else "")
            ) from None

    def _group(self, gid: GIDLike, lid: int) -> Group:
        if self.qp_type is not QPType.UD:
            raise RdmaError(f"{self} cannot use multicast; only UD queue pairs can")
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
            ClosedError: the QP was inherited through a fork.
        """
        self._refuse_inherited()
        return Outstanding(self._send.in_flight.outstanding, self._recv.in_flight.outstanding)

    def post_send(self, wrs: SendWR | Iterable[SendWR]) -> None:
        """Post one send work request, or a list of them in one call.

        The memory regions, windows and address handles of a work request stay alive
        until it is known to be done.

        Args:
            wrs: a SendWR or an iterable of them, which is read to its end before the
                first is posted.  Posting stops at the first one that is refused; an
                empty list does nothing.

        Raises:
            TypeError: wrs is neither.
            PostError: a work request was refused, or an item is not one. The error
                has wr and index (which one), posted (how many were posted before it) and reason.
            ClosedError: the QP is closed.

        See ibv_post_send(3).
        """
        raise NotImplementedError  # in C: _c/posting/post.c

    def post_columns(
        self,
        wr_type: type[SendWR],
        /,
        sg_list: LocalRows = (),
        *,
        wr_id: Column = 0,
        signal_every: int = 1,
        send_flags: int = 0,
        remote_addr: Column = 0,
        rkey: Column = 0,
        imm_data: Column = 0,
        invalidate_rkey: Column = 0,
        compare_add: Column = 0,
        swap: Column = 0,
        atomic_wr: Column = 0,
        length: Column = 0,
        type: Column = FlushType.GLOBAL,
        level: Column = FlushLevel.RANGE,
        ah: AH | None = None,
        remote_qpn: Column = 0,
        remote_qkey: Column = 0,
        remote_srqn: Column = 0,
    ) -> int:
        """Post many send work requests whose fields are in columns; return how many were posted.

        Row i is a work request whose fields are the i-th numbers of the columns. A column is
        a one-dimensional buffer of 4- or 8-byte integers (numpy, array, memoryview, ctypes)
        with any stride, in native byte order. It is copied during the call. All rows are
        checked before the first is posted. Rows that do not fit into the queue are not
        posted; post them once others have completed. Every call copies and checks all of its
        rows, so pass a long column in slices of about the queue's size.

        Args:
            wr_type: the class of the work requests: any but BindMW and TSO.
            sg_list: ``mr.blocks(...)`` or ``mr.ranges(...)``; or one list of SGEs for all rows.
            wr_id: comes back in the completion: a number for all rows, or a column.
            signal_every: signal every n-th row, and the last row posted. The unsignaled rows
                get no completion; they are done when the next signaled row completes. If the
                device refuses a row in the middle, the last row posted may be unsignaled.
            send_flags: other SendFlags, for all rows.
            remote_addr: a number for all rows, a column, or ``Blocks``.
            rkey, imm_data, invalidate_rkey, compare_add, swap, atomic_wr: the fields of wr_type
                with these names, each a number for all rows or a column.
            length, type, level: the fields of a Flush, each a number for all rows or a column.
            ah: the address handle for all rows.
            remote_qpn, remote_qkey, remote_srqn: each a number for all rows or a column.

        Returns:
            How many rows were posted: all, or as many as the queue had room for.

        Raises:
            TypeError: wr_type cannot be posted by columns, wr_type has no such field, a column
                is not a buffer of integers as above, or no column is given.
            ValueError: the columns have different lengths, or signal_every is not positive.
            PostError: a row was refused; index says which, and wr is that row as an object.
            ClosedError: the QP is closed.

        See ibv_post_send(3).
        """
        raise NotImplementedError  # in C: _c/posting/columns.c

    def post_recv_columns(self, /, sg_list: LocalRows = (), *, wr_id: Column = 0) -> int:
        """Post many receives whose fields are in columns, and return how many were posted.

        Args:
            sg_list: ``mr.blocks(...)`` or ``mr.ranges(...)``; or one list of SGEs for all rows.
            wr_id: comes back in the completion: a number for all rows, or a column.

        Returns:
            How many rows were posted: all, or as many as the queue had room for.

        Raises:
            TypeError: a column is not a buffer of integers (see post_columns), or no column is
                given.
            ValueError: the columns have different lengths.
            PostError: a row was refused; index says which.
            ClosedError: the QP is closed.
            RdmaError: the queue pair takes its receives from an SRQ, or has no receives (XRC).

        See ibv_post_recv(3).
        """
        raise NotImplementedError  # in C: _c/posting/columns.c

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
        raise NotImplementedError  # in C: _c/posting/post.c

    def _refuse_without_receives(self) -> None:
        self._open_struct()
        if self.qp_type in XRC:
            raise RdmaError(
                f"{self} has no receive queue: messages go to the XRC SRQ that they name; post "
                "receives there with srq.post_srq_recv()"
            )
        if self.srq is not None:
            raise RdmaError(
                f"{self} takes its receives from {self.srq}: post them with srq.post_srq_recv() "
                "or srq.post_srq_recv_columns()"
            )

    def prepare(self, wrs: SendWR | Iterable[SendWR]) -> Batch:
        """Check and pack send work requests once, to post them many times.

        ``batch.post()`` posts the whole list; ``batch[index]`` changes fields for the next posts.
        The list can be prepared in any state, and posted from RTS on. A checked queue pair posts it
        only if its queue has room for the whole list.

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
        """Check and pack receives once so that they can be posted many times; see prepare.

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
            self._open_struct()
        except RdmaError:
            # Another thread may have closed the QP without seeing this new list.
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
        """Bind a type 1 window to part of a region (RC, UC, XRC_SEND).

        The bind is posted to the send queue and completes as BIND_MW.  ``mw.rkey`` is the
        new key at once, but a peer may use it only after the completion.  Rebinding a bound
        window invalidates its previous key.

        Args:
            mw: the window; post a BindMW to bind one of type 2.
            mr: the region, registered with Access.MW_BIND and open until the
                window is unbound; also needed to unbind.  If it is ZERO_BASED, or lacks LOCAL_WRITE
                although the peer may write or perform atomics, the bind ends with MW_BIND_ERR.
            addr: address of the first byte.
            length: bytes; 0 unbinds the window.
            mw_access_flags: what the peer may do through the window: REMOTE_READ, REMOTE_WRITE
                and REMOTE_ATOMIC, and ZERO_BASED for addresses that start at 0.
            wr_id: comes back in the completion, 0..2^64-1.
            send_flags: SIGNALED, FENCE or both; 0 for neither.

        Raises:
            PostError: the library or the device refused the bind; the window keeps its
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
        # rxe queues a bind that is posted before RTS, and executes it in RTS.
        self._send.bind(self, wr, sure=self._state >= QPState.RTS)

    def diagnose(self, peer: QP | Endpoint | None = None) -> list[Finding]:
        """Diagnose why sends do not complete, or might not.

        It checks the state, the port, the GID and the path; the time until
        RETRY_EXC_ERR and RNR_RETRY_EXC_ERR; what is outstanding on the queues and in
        the CQs; and whether the peer is connected to this queue pair, agrees on MTU
        and PSNs, and has receives posted.  It changes nothing and reports each problem
        as a finding.

        Args:
            peer: the peer's queue pair, or its endpoint(): then its state, dest_qp_num, rq_psn,
                path_mtu and receives are not checked. If this queue pair is connected to one on
                the same open device, peer can be omitted.

        Returns:
            findings, the problems first.

        Raises:
            TypeError: peer is neither.
        """
        return _checklist(self, peer)


with_c_methods(QP)


def _given(options: dict[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in options.items() if value is not None}


def _taken(options: dict[str, int], names: set[str]) -> dict[str, int]:
    """Remove and return the options with these names."""
    return {name: options.pop(name) for name in names & options.keys()}


_checklist: Callable[[QP, QP | Endpoint | None], list[Finding]]


def set_checklist(function: Callable[[QP, QP | Endpoint | None], list[Finding]]) -> None:
    """Set the function that QP.diagnose calls: resources cannot import tools."""
    global _checklist
    _checklist = function


def asked_gid_index(qp: QP) -> int | None:
    """Return the GID index that a queue pair was created with, or None if it was not given."""
    return qp._gid_index


def chosen_gid(qp: QP) -> GIDChoice | None:
    """Return the GID that a queue pair uses, or None if none is chosen yet."""
    return qp._gid


def settings(qp: QP) -> dict[str, Any]:
    """Return the attributes set since the last reset, by their names in ibv_modify_qp(3).

    qp_state is the last state other than ERR that the queue pair was brought to.
    """
    return qp._terms.settings.copy()


def oldest_send(qp: QP) -> int | None:
    """Return the wr_id of the oldest outstanding send, or None."""
    entry = qp._send.in_flight.entry(0)
    return None if entry is None else entry[0]


def sends_for_receive(qp: QP) -> int | None:
    """Return how many pending sends consume a receive; None if the device does not report this."""
    count: int | None = qp._verb(provider_of(qp.context).sends_for_receive)
    return count


_RESETTING = "the QP's transition to RESET is in progress and would drop it"


def _why_not_sending(qp: QP) -> str:
    if qp._resets:
        return _RESETTING
    # Another thread may have changed the state since the post was refused.
    return check_send_state(qp._state) or (
        f"the QP was not ready to send; it is now in {qp._state.name}: another thread has changed "
        "its state in the meantime"
    )


def _why_not_receiving(qp: QP) -> str:
    qp._refuse_without_receives()
    if qp._resets:
        return _RESETTING
    if qp._state is not QPState.RESET:
        return (
            f"the QP was in RESET; it is now in {qp._state.name}: another thread has changed its "
            "state in the meantime"
        )
    return "the QP is in RESET; receives can be posted from INIT on (qp.to_init)"


def _why_refused(qp: QP, code: int, wr: Any) -> str:
    name = qp.context.name
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        what = getattr(getattr(wr, "opcode", None), "name", "the call")
        return f"{what} is not supported by {name}"
    if code == errno.ENOMEM:
        return f"{name} says that the queue is full, or that the work request is too large for it"
    if code == errno.EINVAL and qp._state < QPState.RTS:
        return f"{name} refused it: the QP is in {qp._state.name}"
    return f"{name} refused with {describe_refusal(code)}"
