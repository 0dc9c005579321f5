"""``rdmapost tso``."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    PostSettings,
    Target,
    device_options,
    integer,
    payload_options_for,
    post_options_for,
)
from .output import Output


def _header(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not bytes in hexadecimal") from None


@click.command()
@click.option(
    "--mss",
    type=integer(1, 0xFFFF),
    metavar="N",
    default=1000,
    show_default=True,
    help="Bytes of data in each segment.",
)
@click.option(
    "--header",
    type=_header,
    metavar="HEX",
    help="Header of every segment.  [default: made-up Ethernet, IPv4, TCP]",
)
@payload_options_for(4000)
@post_options_for("raw", "ud")
@device_options
def tso(
    out: Output,
    target: Target,
    settings: PostSettings,
    payload: bytes,
    mss: int,
    header: bytes | None,
) -> None:
    """Let the device segment data (TSO).

    Each segment is a frame with its own header, or on ud a message that starts
    like IP over InfiniBand.
    """
    from rdmapost import TSO, Opcode, QPType, RdmaError, frames
    from rdmapost.tools.check.segmentation import segments

    from .post_common import source
    from .post_local import loopback, post
    from .results import show, verify

    qp_type = QPType[settings.qp_type]
    hdr = frames.tcp(qp_type) if header is None else header
    length, count = len(payload), max(1, -(-len(payload) // mss))
    room = len(hdr) + min(mss, length)
    with loopback(
        out,
        target,
        settings,
        Opcode.TSO,
        local_size=length,
        remote_size=count * room,
        depth=count,
        max_tso_header=len(hdr),
    ) as pair:
        pair.receive(room, count)
        sges = source(pair.local.mr, settings, payload)
        post(out, pair, [TSO(sg_list=sges, hdr=hdr, mss=mss, wr_id=1, **pair.address)])
        packets = segments(pair, count, room)
        out.doc["byte_len"] = length
    if header is None and (wrong := frames.what_is_wrong(packets, hdr, qp_type, payload, mss)):
        raise RdmaError(f"the device reported success, but {wrong}")
    received = b"".join(packet[len(hdr) :] for packet in packets)
    verify(received, payload, 0, 1)
    results: dict[str, Any] = {
        "mss": mss,
        "segments": count,
        "lengths": [len(packet) for packet in packets],
        "header": hdr.hex(),
        "data": payload,
        "received": received,
    }
    show(out, results)
