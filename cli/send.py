"""``rdmapost send``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import (
    U32,
    Peer,
    PostSettings,
    Target,
    device_options,
    flag_options,
    large_payload_options,
    pcap_option,
    peer_options,
    send_options,
)
from .output import Output, usage_error
from .payload import Payload, Progress, touch

if TYPE_CHECKING:
    from rdmapost import SendWR
    from rdmapost.loopback import Loopback


@click.command()
@large_payload_options
@click.option("--imm", type=U32, metavar="N", help="Also send 32 bits of immediate data.")
@click.option(
    "--invalidate", is_flag=True, help="Also invalidate a key of the other side (WITH_INV)."
)
@flag_options("inline", "fence", "solicited")
@send_options
@peer_options(offset=False)
@pcap_option
@device_options
def send(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer | None,
    payload: Payload,
    imm: int | None,
    invalidate: bool,
) -> None:
    """Send a message to a second queue pair, or to HOST.

    The second queue pair is on the same device.  HOST runs 'rdmapost serve',
    which reports what arrives.

    With --invalidate the command first creates the key to invalidate: that of a
    memory window bound by the other side, or on xrc that of a memory region.  With
    --qp-type raw the data follows a made-up Ethernet header.
    """
    from rdmapost import Opcode, RdmaError, Send, SendWithImm, SendWithInv
    from rdmapost.frames import ethernet

    from .post_common import send_flags, source
    from .post_local import arrive, loopback, post
    from .results import show, shown, verify

    if invalidate and imm is not None:
        usage_error("--imm and --invalidate are mutually exclusive")
    if peer is not None:
        from .post_remote import send_to

        if invalidate:
            usage_error("--invalidate works only without HOST")
        send_to(out, target, settings, peer, payload, imm)
        return
    from rdmapost.tools.window_binding import WINDOW_REGION

    header = ethernet() if settings.qp_type == "RAW_PACKET" else b""
    message, count = Payload(header + bytes(payload)) if header else payload, settings.count
    length = len(message)
    opcode = Opcode.SEND if imm is None else Opcode.SEND_WITH_IMM
    if invalidate:
        opcode = Opcode.SEND_WITH_INV
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
            # The other side's memory must permit windows to be bound to it.
            access=WINDOW_REGION if invalidate else None,
        ) as pair,
    ):
        touch(pair.remote.mr.buffer, progress)
        rkeys = _keys(pair, count) if invalidate else []
        pair.receive(length, count)
        fields: dict[str, Any] = {
            "sg_list": source(pair.local.mr, settings, message, progress),
            "send_flags": send_flags(settings),
        }

        def make(index: int) -> SendWR:
            wr_id = index + 1
            if invalidate:
                srqn = pair.address.get("remote_srqn", 0)
                return SendWithInv(
                    wr_id=wr_id, invalidate_rkey=rkeys[index], remote_srqn=srqn, **fields
                )
            if imm is not None:
                return SendWithImm(wr_id=wr_id, imm_data=imm, **fields, **pair.address)
            return Send(wr_id=wr_id, **fields, **pair.address)

        post(out, pair, [make(index) for index in range(count)])
        wcs = arrive(out, pair, count)
        for index, wc in enumerate(wcs):
            start = index * (pair.headroom + length) + pair.headroom
            received = pair.remote.mr.buffer[start : start + wc.byte_len - pair.headroom]
            verify(received, message, index, count, progress)
        out.doc["byte_len"] = wcs[-1].byte_len - pair.headroom
        arrived = shown(received[len(header) :])
    results: dict[str, Any] = {"data": shown(payload), "received": arrived}
    if header:
        results = {"header": header.hex(), **results}
    if imm is not None:
        results["imm_data"] = wcs[-1].imm_data
    if invalidate:
        results |= {"rkey": rkeys[-1], "invalidated_rkey": wcs[-1].invalidated_rkey}
        for wc, rkey in zip(wcs, rkeys, strict=True):
            # Soft-RoCE's completion does not name the key.
            if wc.invalidated_rkey not in (None, rkey):
                raise RdmaError(f"the completion names key {wc.invalidated_rkey:#x}, not {rkey:#x}")
    show(out, results)


def _keys(pair: Loopback, count: int) -> list[int]:
    """On the other side, create keys that can be invalidated."""
    from rdmapost import Access, Opcode, QPType, WaitTimeout
    from rdmapost.standard.opcodes import OPCODES_BY_QP_TYPE
    from rdmapost.tools.window_binding import bind_wr

    qp_type = pair.local.qp.qp_type
    if Opcode.SEND_WITH_INV not in OPCODES_BY_QP_TYPE[qp_type]:
        # The post will be refused with the reason.
        return [0] * count
    if qp_type is QPType.XRC_SEND:
        # An XRC target has no send queue, so it cannot bind a window.
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        return [pair.region(1, access).rkey for _ in range(count)]
    binds = [bind_wr(pair, pair.window(), 0, 1) for _ in range(count)]
    pair.remote.qp.post_send(binds)
    try:
        for wc in pair.arrived(count):
            wc.check()
    except WaitTimeout:
        raise WaitTimeout("the memory window was not bound in time") from None
    return [bind.rkey for bind in binds]
