"""Attributes of a queue pair, as a query returns them."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

from ..enums import MTU, Access, MigState, QPAttrMask, QPState
from .address import AHAttr, read_ah_attr


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


QUERY_MASK = int(
    functools.reduce(operator.or_, QPAttrMask)
    & ~(QPAttrMask.EN_SQD_ASYNC_NOTIFY | QPAttrMask.ALT_PATH | QPAttrMask.RATE_LIMIT)
)
"""What a query asks for."""
_CAP = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")


def read_qp_attr(raw: Any) -> QPAttr:
    """Return the attributes in a ``struct ibv_qp_attr``."""
    values: dict[str, Any] = {
        name: getattr(raw, name)
        for name in QPAttr.__dataclass_fields__
        if name not in _CAP and name != "ah_attr"
    }
    values["qp_state"] = QPState(raw.qp_state)
    values["cur_qp_state"] = QPState(raw.cur_qp_state)
    values["path_mtu"] = MTU(raw.path_mtu) if raw.path_mtu else None
    values["path_mig_state"] = MigState(raw.path_mig_state)
    values["qp_access_flags"] = Access(raw.qp_access_flags)
    values["sq_draining"] = bool(raw.sq_draining)
    values["ah_attr"] = read_ah_attr(raw.ah_attr)
    for name in _CAP:
        values[name] = getattr(raw.cap, name)
    return QPAttr(**values)
