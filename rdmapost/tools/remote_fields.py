"""The fields of a work request that name a place in the other side's memory."""

from __future__ import annotations

from typing import Any

from ..enums import Opcode, QPType
from ..standard.opcodes import QP_TYPES_BY_OPCODE


def remote_fields(qp_type: QPType, remote_addr: int, rkey: int) -> dict[str, Any]:
    """Return the fields that name a remote address.

    Args:
        qp_type: the type of the queue pair that posts the work request.
        remote_addr, rkey: their values.

    Raises:
        ValueError: this type cannot access remote memory.
    """
    if qp_type not in QP_TYPES_BY_OPCODE[Opcode.RDMA_WRITE]:
        raise ValueError(
            f"{qp_type.name} queue pairs cannot access remote memory, so there is no target: "
            "send with **address"
        )
    return {"remote_addr": remote_addr, "rkey": rkey}
