"""Posting to a second queue pair on the same device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rdmapost import WC, Opcode, OpsOpcode, QPType, SendWR
from rdmapost._arguments import counted
from rdmapost.loopback import Loopback, Side
from rdmapost.resources.qp import QP

from .options import PostSettings, Target
from .output import Output
from .post_common import check_depth, post_and_wait
from .results import start_document
from .target import open_target


@contextmanager
def loopback(
    out: Output,
    target: Target,
    settings: PostSettings,
    opcode: Opcode | OpsOpcode,
    *,
    local_size: int,
    remote_size: int,
    inlined: int = 0,
    depth: int | None = None,
    **options: Any,
) -> Iterator[Loopback]:
    """Open the device and create two queue pairs on it.

    Args:
        out: the command's output; its document gets the opcode and settings.
        target, settings, opcode: the command's options, and the opcode that it posts.
        inlined: bytes of one inline work request.
        depth: work requests that each queue must hold; default: settings.count.
        local_size, remote_size, options: as in Loopback.
    """
    start_document(out, opcode, settings)
    with open_target(out, target) as (context, port_num):
        what = f"--count {settings.count}" if depth is None else counted(depth, "segment")
        depth = settings.count if depth is None else depth
        check_depth(context, what, depth, "max_qp_wr", "max_cqe")
        with Loopback(
            context,
            QPType[settings.qp_type],
            local_size=local_size,
            remote_size=remote_size,
            depth=depth,
            max_inline_data=inlined if "INLINE" in settings.flags else 0,
            port_num=port_num,
            gid_index=target.gid_index,
            timeout=settings.timeout,
            **options,
        ) as pair:
            out.doc["gid_index"] = pair.local.qp.gid.gid_index
            _note_queue_pairs(out, pair)
            yield pair


def post(out: Output, pair: Loopback, wrs: Sequence[SendWR], side: Side | None = None) -> list[WC]:
    """Post a list of work requests in one call, and wait until they are done.

    The local side posts, unless another is given.

    Raises:
        PostError: one of them was refused.
        CompletionError: one of them failed.
        WaitTimeout: they did not complete in time.
    """
    side = pair.local if side is None else side
    wait = pair.sent if side is pair.local else pair.arrived
    wcs, shown = post_and_wait(out, side.qp, side.cq, wrs, wait)
    shown.check()
    return wcs


def arrive(out: Output, pair: Loopback, count: int) -> list[WC]:
    """Wait for the remote side's completions.

    Raises:
        CompletionError: one of them failed.
        WaitTimeout: they did not come in time.
    """
    wcs = pair.arrived(count)
    for wc in wcs:
        if wc.status:
            out.doc.update(status=wc.status.name, wr_id=wc.wr_id)
            wc.check()
    return wcs


def _note_queue_pairs(out: Output, pair: Loopback) -> None:
    if not out.verbose:
        return
    for name, qp in (("local", pair.local.qp), ("remote", pair.remote.qp)):
        out.note(f"{name:<8} {qp}: {_attributes(qp)}")


def _attributes(qp: QP) -> str:
    attr = qp.query()
    shown: dict[str, object] = {"state": attr.qp_state.name}
    if qp.qp_type is QPType.UD:
        shown["qkey"] = f"{attr.qkey:#x}"
    elif attr.path_mtu is not None:
        shown["path_mtu"] = attr.path_mtu.bytes
    if qp.qp_type in (QPType.RC, QPType.XRC_SEND):
        for name in ("timeout", "retry_cnt", "rnr_retry", "min_rnr_timer", "max_rd_atomic"):
            shown[name] = getattr(attr, name)
    for name in ("max_send_wr", "max_recv_wr", "max_inline_data"):
        shown[name] = getattr(qp, name)
    return ", ".join(f"{name} {value}" for name, value in shown.items())
