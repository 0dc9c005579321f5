"""Which queue pair types support which opcodes (ibv_post_send(3)'s table), and message sizes."""

from __future__ import annotations

from ..enums import Opcode, QPType, SendOps

MAX_MSG_SIZE = 1 << 31
"""The most bytes in one message."""

MULTICAST_QPN = 0xFFFFFF
"""The remote_qpn of a message to a multicast group."""

_CONNECTED = frozenset({QPType.UC, QPType.RC, QPType.XRC_SEND})
RELIABLE = frozenset({QPType.RC, QPType.XRC_SEND})
"""Types whose sends are acknowledged."""

QP_TYPES_BY_OPCODE: dict[Opcode, frozenset[QPType]] = {
    Opcode.SEND: _CONNECTED | {QPType.UD, QPType.RAW_PACKET},
    Opcode.SEND_WITH_IMM: _CONNECTED | {QPType.UD},
    Opcode.RDMA_WRITE: _CONNECTED,
    Opcode.RDMA_WRITE_WITH_IMM: _CONNECTED,
    Opcode.RDMA_READ: RELIABLE,
    Opcode.ATOMIC_CMP_AND_SWP: RELIABLE,
    Opcode.ATOMIC_FETCH_AND_ADD: RELIABLE,
    Opcode.LOCAL_INV: _CONNECTED,
    Opcode.BIND_MW: _CONNECTED,
    Opcode.SEND_WITH_INV: _CONNECTED,
    Opcode.TSO: frozenset({QPType.UD, QPType.RAW_PACKET}),
    Opcode.FLUSH: RELIABLE,
    Opcode.ATOMIC_WRITE: RELIABLE,
}
"""The table of ibv_post_send(3), by rows; the last two are from ibv_wr_post(3)."""

SEND_OPS = {Opcode.FLUSH: SendOps.FLUSH, Opcode.ATOMIC_WRITE: SendOps.ATOMIC_WRITE}
"""Opcodes that only ibv_wr_post(3) supports, and the flags that a queue pair needs for them."""

OPCODES_BY_QP_TYPE: dict[QPType, frozenset[Opcode]] = {
    qp_type: frozenset(op for op, types in QP_TYPES_BY_OPCODE.items() if qp_type in types)
    for qp_type in QPType
}
"""The same table, by columns."""

CONSUMES_RECEIVE = frozenset(
    {Opcode.SEND, Opcode.SEND_WITH_IMM, Opcode.SEND_WITH_INV, Opcode.RDMA_WRITE_WITH_IMM}
)
"""Opcodes that consume one of the peer's receives."""
