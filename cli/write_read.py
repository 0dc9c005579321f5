"""``rdmapost write`` and ``rdmapost read``."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from .options import (
    U32,
    Peer,
    PostSettings,
    Target,
    device_options,
    flag_options,
    given,
    large_payload_options,
    pcap_option,
    peer_options,
    read_options,
    write_options,
)
from .output import Output, usage_error
from .payload import Payload, Progress, touch


@click.command()
@large_payload_options
@click.option("--imm", type=U32, metavar="N", help="Also send 32 bits of immediate data.")
@flag_options("inline", "fence", "solicited")
@write_options
@peer_options(offset=True)
@pcap_option
@device_options
def write(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer | None,
    payload: Payload,
    imm: int | None,
) -> None:
    """Write to the memory of a second queue pair, or of HOST.

    The second queue pair is on the same device.  HOST runs 'rdmapost serve',
    which reports the new contents of its memory.
    """
    if peer is not None:
        from .post_remote import write_to

        write_to(out, target, settings, peer, payload, imm)
        return
    from rdmapost import Opcode, RdmaWrite, RdmaWriteWithImm

    from .post_common import send_flags, source
    from .post_local import arrive, loopback, post
    from .results import show, shown, verify

    length, count = len(payload), settings.count
    opcode = Opcode.RDMA_WRITE if imm is None else Opcode.RDMA_WRITE_WITH_IMM
    with (
        Progress((1 + 2 * count) * length) as progress,
        loopback(
            out,
            target,
            settings,
            opcode,
            local_size=length,
            remote_size=count * length,
            inlined=length,
        ) as pair,
    ):
        touch(pair.remote.mr.buffer, progress)
        fields: dict[str, Any] = {
            "sg_list": source(pair.local.mr, settings, payload, progress),
            "send_flags": send_flags(settings),
        }
        if imm is not None:
            pair.receive(0, count)
        make = RdmaWrite if imm is None else partial(RdmaWriteWithImm, imm_data=imm)
        wrs = [
            make(wr_id=index + 1, **fields, **pair.target(index * length)) for index in range(count)
        ]
        post(out, pair, wrs)
        wcs = [] if imm is None else arrive(out, pair, count)
        for index in range(count):
            received = pair.remote.mr.buffer[index * length : (index + 1) * length]
            if settings.qp_type == "UC" and not payload.is_in(received):
                # The write is not acknowledged, and its data may still be in transit.
                pair.settled(bytes(payload), index * length)
            verify(received, payload, index, count, progress)
        out.doc["byte_len"] = length
        arrived = shown(received)
    results: dict[str, Any] = {"data": shown(payload), "received": arrived}
    show(out, results if imm is None else {**results, "imm_data": wcs[-1].imm_data})


@click.command()
@large_payload_options
@flag_options("fence")
@read_options
@peer_options(offset=True)
@pcap_option
@device_options
def read(
    out: Output, target: Target, settings: PostSettings, peer: Peer | None, payload: Payload
) -> None:
    """Read the memory of a second queue pair, or of HOST.

    The second queue pair is on the same device, and the data options set the
    contents of its memory.  HOST runs 'rdmapost serve', and --size is the number
    of bytes to read (default: all of the exposed memory).
    """
    if peer is not None:
        from .post_remote import read_from

        if given("data") or given("data_file"):
            usage_error("--data and --data-file work only without HOST")
        read_from(out, target, settings, peer, len(payload) if given("size") else None)
        return
    from rdmapost import Opcode, RdmaRead

    from .post_common import send_flags
    from .post_local import loopback, post
    from .results import show, shown, verify

    length, count = len(payload), settings.count
    with (
        Progress((1 + 2 * count) * length) as progress,
        loopback(
            out, target, settings, Opcode.RDMA_READ, local_size=count * length, remote_size=length
        ) as pair,
    ):
        touch(pair.local.mr.buffer, progress)
        payload.write_to(pair.remote.mr.buffer, progress)
        flags = send_flags(settings)
        post(
            out,
            pair,
            [
                RdmaRead(
                    wr_id=index + 1,
                    send_flags=flags,
                    sg_list=pair.cut(pair.local, index * length, length),
                    **pair.target(),
                )
                for index in range(count)
            ],
        )
        for index in range(count):
            received = pair.local.mr.buffer[index * length : (index + 1) * length]
            verify(received, payload, index, count, progress)
        out.doc["byte_len"] = length
        arrived = shown(received)
    show(out, {"data": shown(payload), "received": arrived})
