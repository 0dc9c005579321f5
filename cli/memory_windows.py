"""``rdmapost bind-mw`` and ``rdmapost invalidate``."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    PostSettings,
    Target,
    device_options,
    flag_options,
    payload_options,
    pcap_option,
    post_options_for,
)
from .output import Output, usage_error

_WRITE_BYTES = 16
"""The size of the write that tests a key."""


@click.command("bind-mw")
@payload_options
@flag_options("fence")
@post_options_for("rc", "uc", "xrc")
@pcap_option
@device_options
def bind_mw(out: Output, target: Target, settings: PostSettings, payload: bytes) -> None:
    """Bind a type 2 memory window, and write data through it.

    The window is as long as the data; a second write tests whether the memory next
    to the window is out of reach.  On xrc the side that binds cannot be the target of
    a write, so the command only tests whether a write with the window's key is refused.
    """
    from rdmapost import Opcode, RdmaError, RdmaWrite
    from rdmapost.tools.check.memory_windows import admitted
    from rdmapost.tools.check.registry import MARGIN
    from rdmapost.tools.window_binding import WINDOW_REGION, bind_wr, binder

    from .post_common import send_flags, source
    from .post_local import loopback, post
    from .results import show, verify

    length = len(payload)
    if not length:
        usage_error("a memory window needs at least 1 byte")
    with loopback(
        out,
        target,
        settings,
        Opcode.BIND_MW,
        access=WINDOW_REGION,
        depth=4,
        local_size=max(_WRITE_BYTES, length),
        remote_size=max(_WRITE_BYTES, length) + 2 * MARGIN,
    ) as pair:
        wr = bind_wr(pair, pair.window(), MARGIN, length, wr_id=1)
        wr.send_flags = send_flags(settings)
        post(out, pair, [wr], binder(pair))
        out.doc["byte_len"] = length
        results: dict[str, Any] = {"rkey": wr.rkey}
        if binder(pair) is pair.remote:
            sges = source(pair.local.mr, settings, payload)
            pair.local.qp.post_send(
                RdmaWrite(sg_list=sges, wr_id=2, **pair.target(MARGIN, wr.rkey))
            )
            pair.sent()[0].check()
            pair.settled(payload, MARGIN)
            received = bytes(pair.remote.mr.buffer[MARGIN : MARGIN + length])
            verify(received, payload, 0, 1)
            results |= {"data": payload, "received": received}
            # Soft-RoCE does not enforce the window's bounds.
            results["outside_refused"] = not admitted(pair, wr.rkey, MARGIN - _WRITE_BYTES)
        else:
            if admitted(pair, wr.rkey, MARGIN):
                raise RdmaError("a queue pair that did not bind the window could write to it")
            results["target_refused"] = True
    show(out, results)


@click.command()
@flag_options("fence")
@post_options_for("rc", "uc", "xrc")
@pcap_option
@device_options
def invalidate(out: Output, target: Target, settings: PostSettings) -> None:
    """Invalidate the key of a type 2 memory window (LOCAL_INV).

    First bind the window and write through it; afterwards, check that a write with
    the same key fails.
    """
    from rdmapost import LocalInv, Opcode, RdmaError
    from rdmapost.tools.check.memory_windows import admitted
    from rdmapost.tools.check.registry import MARGIN
    from rdmapost.tools.window_binding import WINDOW_REGION, bind_wr, binder

    from .post_common import send_flags
    from .post_local import loopback, post
    from .results import show

    with loopback(
        out,
        target,
        settings,
        Opcode.LOCAL_INV,
        access=WINDOW_REGION,
        depth=4,
        local_size=_WRITE_BYTES,
        remote_size=_WRITE_BYTES + 2 * MARGIN,
    ) as pair:
        side = binder(pair)
        bind = bind_wr(pair, pair.window(), MARGIN, _WRITE_BYTES)
        side.qp.post_send(bind)
        (pair.arrived() if side is pair.remote else pair.sent())[0].check()
        if side is pair.remote and not admitted(pair, bind.rkey, MARGIN):
            raise RdmaError("a write through the window was refused while it was bound")
        post(
            out,
            pair,
            [LocalInv(wr_id=1, invalidate_rkey=bind.rkey, send_flags=send_flags(settings))],
            side,
        )
        out.doc["byte_len"] = 0
        if admitted(pair, bind.rkey, MARGIN):
            raise RdmaError("a write with the invalidated key succeeded")
    show(out, {"rkey": bind.rkey, "refused_afterwards": True})
