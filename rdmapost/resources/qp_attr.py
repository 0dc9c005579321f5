"""The attributes of a queue pair as dataclasses: what ``QP.query`` in ``qp.py`` returns."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

from ..enums import MTU, Access, MigState, QPAttrMask, QPState, QPType, reported
from .ah import AHAttr, read_ah_attr


@dataclass(frozen=True, slots=True)
class QPInitAttr:
    """What a queue pair was created with (``struct ibv_qp_init_attr``, ibv_query_qp(3)).

    Attributes:
        qp_type: its type.
        sq_sig_all: whether every send generates a completion.
        max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data: the
            sizes of its queues; a device may report more than it granted.
    """

    qp_type: QPType
    sq_sig_all: bool
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


@dataclass(frozen=True, slots=True)
class QPAttr:
    """Attributes of a queue pair (ibv_query_qp(3)); the names are the man page's.

    The alternate path (``alt_...``) is valid if one has been set with QP.modify.

    Attributes:
        qp_state: the state.
        cur_qp_state: the state that the device assumes.
        path_mtu: the path MTU (RC, UC); None if it has none.
        path_mig_state: the state of path migration.
        qkey: the Q_Key (UD).
        rq_psn: packet sequence number that it expects next, or began with, 24 bits.
        sq_psn: packet sequence number that it sends next, or began with, 24 bits.
        dest_qp_num: number of the peer's queue pair (RC, UC).
        qp_access_flags: what a peer may do through it.
        ah_attr: the path to the peer (RC, UC); its dgid is None until it has been set.
        pkey_index: index into the port's P_Key table.
        en_sqd_async_notify: whether an event reports the end of draining.
        sq_draining: whether the send queue is draining (SQD).
        max_rd_atomic: RDMA reads and atomics that it may have outstanding.
        max_dest_rd_atomic: RDMA reads and atomics that the peer may have outstanding.
        min_rnr_timer: how long the peer waits after an RNR NAK, encoded as in ibv_modify_qp(3); 12
            is 0.64 ms.
        port_num: the local port, from 1.
        timeout: how long it waits for an acknowledgement, 4.096 us * 2^timeout; 0: forever.
        retry_cnt: retries after a timeout or a NAK that reports a missing packet, 0..7.
        rnr_retry: retries after an RNR NAK, 0..7; 7 to retry forever.
        max_send_wr: work requests that the send queue can hold.
        max_recv_wr: work requests that the receive queue can hold.
        max_send_sge: SGEs in one work request on the send queue.
        max_recv_sge: SGEs in one receive.
        max_inline_data: the most bytes in one inline work request.
        alt_ah_attr: the alternate path; its dgid is None if none has been set.
        alt_pkey_index: its index into the port's P_Key table.
        alt_port_num: its local port, from 1.
        alt_timeout: its timeout, encoded like timeout.
        rate_limit: the limit on its sends in kbit/s (RAW_PACKET); 0 if there is none, or if the
            device does not report it (with libibverbs, none does).
        init_attr: what the queue pair was created with.
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
    en_sqd_async_notify: bool
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
    alt_ah_attr: AHAttr
    alt_pkey_index: int
    alt_port_num: int
    alt_timeout: int
    rate_limit: int
    init_attr: QPInitAttr


QUERY_MASK = int(
    functools.reduce(operator.or_, QPAttrMask)
    # The kernel reports no rate limit, and libibverbs refuses its bit.
    & ~QPAttrMask.RATE_LIMIT
)
"""The attributes that a query asks for."""
_CAP = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
_OWN = QPAttr.__dataclass_fields__.keys() - {*_CAP, "init_attr"}
"""The attributes in ``struct ibv_qp_attr`` itself."""


def read_qp_attr(raw: Any, init: Any) -> QPAttr:
    """Return the attributes in a ``struct ibv_qp_attr`` and a ``struct ibv_qp_init_attr``."""
    values: dict[str, Any] = {name: getattr(raw, name) for name in _OWN}
    values |= {name: getattr(raw.cap, name) for name in _CAP}
    values["qp_state"] = reported(QPState, raw.qp_state)
    values["cur_qp_state"] = reported(QPState, raw.cur_qp_state)
    values["path_mtu"] = reported(MTU, raw.path_mtu) if raw.path_mtu else None
    values["path_mig_state"] = reported(MigState, raw.path_mig_state)
    values["qp_access_flags"] = Access(raw.qp_access_flags)
    for name in ("sq_draining", "en_sqd_async_notify"):
        values[name] = bool(values[name])
    for name in ("ah_attr", "alt_ah_attr"):
        values[name] = read_ah_attr(values[name])
    cap = {name: getattr(init.cap, name) for name in _CAP}
    init_attr = QPInitAttr(reported(QPType, init.qp_type), bool(init.sq_sig_all), **cap)
    return QPAttr(**values, init_attr=init_attr)
