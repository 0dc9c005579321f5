"""Checks of SEND, with and without immediate data."""

from __future__ import annotations

from collections.abc import Callable

from ...enums import Opcode, QPType, WCOpcode
from ...errors import WaitTimeout
from ...posting.wr import Send, SendWithImm, SendWR
from ...resources.cq import WC
from ..loopback import Loopback
from .assertions import completed, same, same_bytes, unharmed
from .registry import MARGIN, Row, Trial, Unsupported, check

ROWS: list[Row] = []

IMM = 0x12345678


@check(ROWS, Opcode.SEND)
def _send(trial: Trial) -> str:
    return _message(trial, lambda **fields: Send(**fields))


@check(ROWS, Opcode.SEND_WITH_IMM)
def _send_with_imm(trial: Trial) -> str:
    return _message(trial, lambda **fields: SendWithImm(imm_data=IMM, **fields), imm_data=IMM)


def _message(trial: Trial, make: Callable[..., SendWR], imm_data: int | None = None) -> str:
    with trial.loopback() as pair:
        room = trial.length + MARGIN
        pair.receive(room)
        pair.local.qp.post_send(make(sg_list=pair.local.mr[:], wr_id=7, **pair.address))
        completed(pair.sent(), WCOpcode.SEND, wr_id=7)
        wc = completed(arrived(pair), WCOpcode.RECV, wr_id=1)
        same("byte_len", wc.byte_len, pair.headroom + trial.length)
        same("imm_data", wc.imm_data, imm_data)
        same_bytes("message", pair.received(trial.length, room=room), pair.local.mr.buffer)
        unharmed(pair, (pair.headroom, trial.length))
    return f"{trial.length} bytes arrived" + ("" if imm_data is None else " with immediate data")


def arrived(pair: Loopback, count: int = 1) -> list[WC]:
    """Wait for completions on the remote side.

    Raises:
        WaitTimeout: they did not arrive in time.
        Unsupported: frames did not arrive in time; a device need not deliver them.
    """
    try:
        return pair.arrived(count)
    except WaitTimeout:
        if pair.local.qp.qp_type is not QPType.RAW_PACKET:
            raise
        raise Unsupported(
            f"{pair.local.cq.context.name} sent the frame, but delivers it only to a queue pair "
            "with a flow rule (ibv_create_flow)"
        ) from None
