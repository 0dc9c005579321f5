"""``rdmapost send``."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    U32,
    Shot,
    Target,
    device_options,
    flag_options,
    payload_options,
    shot_options,
)
from .output import Output

__all__ = ["send"]


@click.command()
@payload_options
@click.option("--imm", type=U32, metavar="N", help="Send 32 bits of immediate data too.")
@flag_options("inline", "fence", "solicited")
@shot_options
@device_options
def send(out: Output, target: Target, shot: Shot, payload: bytes, imm: int | None) -> None:
    """Send a message to a second queue pair of the same device."""
    from rdmapost import Opcode, Send, SendWithImm

    from .oneshot import arrive, loopback, post, send_flags, show, source, verify

    length, count = len(payload), shot.count
    opcode = Opcode.SEND if imm is None else Opcode.SEND_WITH_IMM
    with loopback(
        out, target, shot, opcode, local_size=length, remote_size=count * length, inlined=length
    ) as pair:
        pair.receive(length, count)
        fields: dict[str, Any] = {
            "sg_list": source(pair, shot, payload),
            "send_flags": send_flags(shot),
            **pair.address,
        }
        post(
            out,
            pair,
            [
                Send(wr_id=wr_id, **fields)
                if imm is None
                else SendWithImm(wr_id=wr_id, imm_data=imm, **fields)
                for wr_id in range(1, count + 1)
            ],
        )
        wcs = arrive(out, pair, count)
        for index, wc in enumerate(wcs):
            received = pair.received(wc.byte_len - pair.headroom, index, room=length)
            verify(received, payload, index, count)
        out.doc["byte_len"] = wcs[-1].byte_len - pair.headroom
    yields: dict[str, Any] = {"data": payload, "received": received}
    show(out, yields if imm is None else {**yields, "imm_data": wcs[-1].imm_data})
