"""The queue pair state machine as data: which attributes each transition requires and allows.

From ibv_modify_qp(3).  A transition is (state, next state); a QP type has only
the transitions in the table.  RESET and ERR can be reached from any state.
"""

from __future__ import annotations

from ..enums import QPAttrMask as M
from ..enums import QPState as S
from ..enums import QPType as T
from ..enums import is_known

_CONNECTION = M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN
_RESPONDER = M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
_REQUESTER = M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.SQ_PSN | M.MAX_QP_RD_ATOMIC
_IDENTITY = M.PKEY_INDEX | M.PORT
_NONE = M(0)

_TRANSITIONS = ((S.RESET, S.INIT), (S.INIT, S.RTR), (S.RTR, S.RTS))

_TO_RTS = {
    T.RC: (_IDENTITY | M.ACCESS_FLAGS, _CONNECTION | _RESPONDER, _REQUESTER),
    T.UC: (_IDENTITY | M.ACCESS_FLAGS, _CONNECTION, M.SQ_PSN),
    T.UD: (_IDENTITY | M.QKEY, _NONE, M.SQ_PSN),
    T.RAW_PACKET: (M.PORT, _NONE, _NONE),
    T.XRC_SEND: (_IDENTITY | M.ACCESS_FLAGS, _CONNECTION, _REQUESTER),
    T.XRC_RECV: (_IDENTITY | M.ACCESS_FLAGS, _CONNECTION | _RESPONDER, M.TIMEOUT | M.SQ_PSN),
}

REQUIRED: dict[T, dict[tuple[S, S], M]] = {
    qp_type: {
        **dict(zip(_TRANSITIONS, masks, strict=True)),
        (S.INIT, S.INIT): _NONE,
        (S.RTS, S.RTS): _NONE,
        (S.RTS, S.SQD): _NONE,
        (S.SQD, S.SQD): _NONE,
        (S.SQD, S.RTS): _NONE,
        (S.SQE, S.RTS): _NONE,
        **{(state, end): _NONE for state in S for end in (S.RESET, S.ERR)},
    }
    for qp_type, masks in _TO_RTS.items()
}
"""For each QP type, the attributes that a transition requires besides qp_state."""

_PATH = M.ALT_PATH | M.ACCESS_FLAGS | M.PATH_MIG_STATE
_RUNNING = {
    T.RC: M.CUR_STATE | _PATH | M.MIN_RNR_TIMER,
    T.UC: M.CUR_STATE | _PATH,
    T.UD: M.CUR_STATE | M.QKEY,
    T.RAW_PACKET: M.RATE_LIMIT,
    T.XRC_SEND: M.CUR_STATE | _PATH,
    T.XRC_RECV: M.CUR_STATE | _PATH | M.MIN_RNR_TIMER,
}
_ON_RTR = M.ALT_PATH | M.ACCESS_FLAGS | M.PKEY_INDEX
_DRAINED = {
    T.RC: _PATH | _IDENTITY | M.AV | _RESPONDER | (_REQUESTER & ~M.SQ_PSN),
    T.UC: _PATH | M.PKEY_INDEX | M.AV,
    T.UD: M.PKEY_INDEX | M.QKEY,
    T.RAW_PACKET: _NONE,
    T.XRC_SEND: _PATH | _IDENTITY | M.AV | (_REQUESTER & ~M.SQ_PSN),
    T.XRC_RECV: _PATH | _IDENTITY | M.AV | _RESPONDER | M.TIMEOUT,
}

OPTIONAL: dict[T, dict[tuple[S, S], M]] = {
    qp_type: {
        (S.INIT, S.INIT): REQUIRED[qp_type][S.RESET, S.INIT],
        (S.INIT, S.RTR): {T.UD: M.PKEY_INDEX | M.QKEY, T.RAW_PACKET: _NONE}.get(qp_type, _ON_RTR),
        (S.RTR, S.RTS): running,
        (S.RTS, S.RTS): running,
        (S.RTS, S.SQD): M.EN_SQD_ASYNC_NOTIFY,
        (S.SQD, S.SQD): _DRAINED[qp_type],
        (S.SQD, S.RTS): running,
        (S.SQE, S.RTS): running,
    }
    for qp_type, running in _RUNNING.items()
}
"""For each QP type, the attributes that a transition may also change."""

FIELDS: dict[str, M] = {
    "qp_state": M.STATE,
    "cur_qp_state": M.CUR_STATE,
    "en_sqd_async_notify": M.EN_SQD_ASYNC_NOTIFY,
    "qp_access_flags": M.ACCESS_FLAGS,
    "pkey_index": M.PKEY_INDEX,
    "port_num": M.PORT,
    "qkey": M.QKEY,
    "ah_attr": M.AV,
    "path_mtu": M.PATH_MTU,
    "timeout": M.TIMEOUT,
    "retry_cnt": M.RETRY_CNT,
    "rnr_retry": M.RNR_RETRY,
    "rq_psn": M.RQ_PSN,
    "max_rd_atomic": M.MAX_QP_RD_ATOMIC,
    "alt_ah_attr": M.ALT_PATH,
    "alt_pkey_index": M.ALT_PATH,
    "alt_port_num": M.ALT_PATH,
    "alt_timeout": M.ALT_PATH,
    "min_rnr_timer": M.MIN_RNR_TIMER,
    "sq_psn": M.SQ_PSN,
    "max_dest_rd_atomic": M.MAX_DEST_RD_ATOMIC,
    "path_mig_state": M.PATH_MIG_STATE,
    "dest_qp_num": M.DEST_QPN,
    "rate_limit": M.RATE_LIMIT,
}
"""Fields of ``struct ibv_qp_attr`` and the mask bit of each."""

RANGES: dict[str, tuple[int, int]] = {
    "path_mtu": (1, 5),
    "dest_qp_num": (0, 0xFFFFFF),
    "rq_psn": (0, 0xFFFFFF),
    "sq_psn": (0, 0xFFFFFF),
    "timeout": (0, 31),
    "alt_timeout": (0, 31),
    "retry_cnt": (0, 7),
    "rnr_retry": (0, 7),
    "min_rnr_timer": (0, 31),
}
"""The range of values that a field can have on any device, inclusive."""


def _names(mask: int) -> str:
    return ", ".join([name for name, bit in FIELDS.items() if bit & mask])


def missing_attributes(qp_type: T, state: S, to: S, mask: M) -> str | None:
    """Say why a transition cannot be made with these attributes, or return None.

    Any transition is allowed from a state that only a newer libibverbs or driver knows.
    """
    if not is_known(state):
        return None
    required = REQUIRED.get(qp_type, {}).get((state, to))
    if required is None:
        ends = sorted([end.name for start, end in REQUIRED.get(qp_type, {}) if start is state])
        remedy = ": call to_reset() first" if state is S.ERR else ""
        if state in (S.RESET, S.INIT) and to in (S.RTR, S.RTS):
            remedy = "; connect() takes one to RTS"
        return (
            f"{qp_type.name} queue pairs cannot go from {state.name} to {to.name}; "
            f"from {state.name} they can go to {', '.join(ends)}{remedy}"
        )
    lacking = required & ~mask
    if lacking:
        return (
            f"{state.name} to {to.name} also needs {_names(lacking)} on {qp_type.name} queue pairs "
            "(ibv_modify_qp(3))"
        )
    return None


def unchangeable_attributes(qp_type: T, state: S, to: S, mask: M) -> str | None:
    """Say which of these attributes a transition cannot change, or return None."""
    required = REQUIRED.get(qp_type, {}).get((state, to))
    if required is None:
        return None
    wrong = mask & ~(required | OPTIONAL[qp_type].get((state, to), _NONE) | M.STATE)
    if not wrong:
        return None
    return f"{_names(wrong)} cannot be changed from {state.name} to {to.name} (ibv_modify_qp(3))"
