"""A queue pair's path to its peer: what to tell the peer, and the steps from state to state."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

from .._arguments import expect, index, member
from .._binding import ffi
from ..enums import MTU, Access, LinkLayer, QPAttrMask, QPState, QPType
from ..errors import RdmaError, VerbsError
from ..qp_states import FIELDS, RANGES, missing_attributes, unchangeable_attributes
from .address import AH, AHAttr, GIDChoice, choose_gid, why_no_source
from .endpoint import Endpoint
from .memory import PD, access_flags
from .qp_attr import QUERY_MASK, QPAttr
from .resource import Resource

__all__ = ["DEFAULT_QKEY", "Steps"]

DEFAULT_QKEY = 0x1111_1111
"""Q_Key of UD queue pairs unless another is given; ibv_ud_pingpong uses it too."""


class Steps(Resource):
    """A queue pair's addressing and states."""

    __slots__ = (
        "_gid",
        "_gid_index",
        "_state",
        "pd",
        "port_num",
        "psn",
        "qp_num",
        "qp_type",
    )

    pd: PD
    port_num: int
    psn: int
    qp_num: int
    qp_type: QPType
    _gid: GIDChoice | None
    _gid_index: int | None
    _state: QPState

    def _keep_completions(self) -> None:
        """Collect what the device has completed, before it is dropped."""
        raise NotImplementedError

    def _note_state(self, state: QPState) -> None:
        """Remember the state: it decides what can be posted."""
        raise NotImplementedError

    def _forget_posted(self) -> None:
        """Forget what was posted: the device has dropped it."""
        raise NotImplementedError

    # ---- addressing ---------------------------------------------------------

    @property
    def gid(self) -> GIDChoice:
        """The local GID that it uses, and why that one (choose_gid).

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
            TypeError: remote is no Endpoint.
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
            TypeError: remote is no Endpoint.
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
        self._verb(self.pd.context._provider.query_qp, raw, QUERY_MASK, init)
        return QPAttr._read(raw)

    def modify(self, **attrs: Any) -> None:
        """Change attributes; the mask is made of those that are passed.

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
        mask = QPAttrMask(0)
        for name, value in attrs.items():
            bit = FIELDS.get(name)
            if bit is None:
                raise TypeError(f"struct ibv_qp_attr has no field {name}")
            mask |= bit
            if name in ("ah_attr", "alt_ah_attr"):
                expect(name, value, AHAttr)
                value._fill(getattr(raw, name))
                continue
            attrs[name] = number = index(name, value, _ENUM_FIELDS.get(name, "int"))
            try:
                setattr(raw, name, number)
            except OverflowError:
                raise ValueError(f"{name}={value!r} does not fit struct ibv_qp_attr") from None
        state = member("cur_qp_state", attrs.get("cur_qp_state", self._state), QPState)
        to = member("qp_state", attrs.get("qp_state", state), QPState)
        if reason := missing_attributes(self.qp_type, state, to, mask):
            raise ValueError(reason)
        if to is QPState.RESET:
            self._keep_completions()
        try:
            self._verb(self.pd.context._provider.modify_qp, raw, mask)
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
            ValueError: access has bits that are not in Access; or as in modify.
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
        """Bring the queue pair from INIT to RTR, in which it receives.

        Args:
            remote: the peer's endpoint; not for UD and RAW_PACKET.
            min_rnr_timer: how long the peer waits before it tries again when no receive
                is posted, encoded as in the man page; 12 is 0.64 ms.
            max_dest_rd_atomic: how many reads and atomics the peer may have outstanding;
                None is what the device can do, at most 16.
            sl, traffic_class: as in path_to.

        Raises:
            TypeError: remote is no Endpoint, or another argument is not an integer.
            ValueError: the peer's endpoint is missing, or as in modify.
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
        """Bring the queue pair from RTR, SQD or SQE to RTS, in which it sends.

        With the defaults it gives up after about half a second without an
        acknowledgement, or after six retries while the peer has no receive.

        Args:
            timeout: how long to wait for an acknowledgement, 4.096 us * 2^timeout,
                0..31; 14 is 67 ms, 0 waits for ever.
            retry_cnt: retries after that, 0..7.
            rnr_retry: retries when the peer has no receive, 0..7; 7 retries for ever.
            max_rd_atomic: how many reads and atomics it may have outstanding; None is
                what the device can do, at most 16.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: as in modify.
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
        """Bring the queue pair to RTS from RESET, INIT, RTR, SQD or SQE.

        From ERR the only way is back: to_reset() first, on both sides.

        Args:
            remote: the peer's endpoint; not for UD.
            access, qkey: as in to_init.
            more: other options of to_rtr and to_rts.

        Raises:
            TypeError: remote is no Endpoint, another argument is not an integer, or there
                is no such option.
            ValueError: the peer's endpoint is missing, the queue pair is connected to
                another one or was put into ERR by to_err(), or as in modify.
            ClosedError: the QP is closed.
            VerbsError: the device refused, as it does if an error has put the queue pair into ERR.

        See ibv_modify_qp(3).
        """
        expect("remote", remote, Endpoint, None)
        unknown = more.keys() - _RTR_OPTIONS - _RTS_OPTIONS
        if unknown:
            raise TypeError(f"connect() has no option {', '.join(sorted(unknown))}")
        if self._state is QPState.RESET:
            self.to_init(access, qkey=qkey)
        if self._state is QPState.INIT:
            self.to_rtr(remote, **{k: v for k, v in more.items() if k in _RTR_OPTIONS})
        elif remote is not None and self.qp_type not in (QPType.UD, QPType.RAW_PACKET):
            self._refuse_another(remote)
        self.to_rts(**{k: v for k, v in more.items() if k in _RTS_OPTIONS})

    def _refuse_another(self, remote: Endpoint) -> None:
        """Refuse to go on with a peer other than the one that RTR has set.

        Raises:
            ValueError: it is another one.
        """
        now = self.query()
        way = now.ah_attr
        by_gid = way.dgid is not None
        if now.dest_qp_num == remote.qpn and (
            way.dgid == remote.gid if by_gid else way.dlid == remote.lid
        ):
            return
        if now.qp_state is QPState.ERR:
            raise ValueError(f"{self} is in ERR; take it back with to_reset() first")
        where = f"GID {way.dgid}" if by_gid else f"LID {way.dlid:#x}"
        raise ValueError(
            f"{self} is in {now.qp_state.name}, connected to QP {now.dest_qp_num:#x} at {where}, "
            f"not to {remote}; take it back with to_reset() first"
        )

    def to_sqd(self) -> None:
        """Drain the send queue; sends posted from now on are held.

        Raises:
            ValueError: as in modify.
            ClosedError: the QP is closed.
            VerbsError: the device refused.

        See ibv_modify_qp(3).
        """
        self.modify(qp_state=QPState.SQD)

    def to_err(self) -> None:
        """Bring the queue pair to ERR: outstanding work requests complete with WR_FLUSH_ERR.

        Raises:
            ValueError: as in modify.
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
            ValueError: as in modify.
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
        if reason := self._out_of_range(attrs):
            return reason
        if code == errno.EINVAL:
            mask = QPAttrMask(0)
            for name in attrs:
                mask |= FIELDS[name]
            if reason := unchangeable_attributes(self.qp_type, state, to, mask):
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

    def _out_of_range(self, attrs: dict[str, Any]) -> str | None:
        """Name an attribute that is out of range for this device, or for any."""
        device = self.pd.context.attr
        ranges = {
            **RANGES,
            "max_rd_atomic": (0, device.max_qp_init_rd_atom),
            "max_dest_rd_atomic": (0, device.max_qp_rd_atom),
        }
        for name, (low, high) in ranges.items():
            if name in attrs and not low <= attrs[name] <= high:
                return f"{name}={attrs[name]} is not in {low}..{high} (ibv_modify_qp(3))"
        return None


_ENUM_FIELDS = {
    "qp_state": QPState.__name__,
    "cur_qp_state": QPState.__name__,
    "path_mtu": MTU.__name__,
    "qp_access_flags": Access.__name__,
}
_RTR_OPTIONS = {"min_rnr_timer", "max_dest_rd_atomic", "sl", "traffic_class"}
_RTS_OPTIONS = {"timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"}
