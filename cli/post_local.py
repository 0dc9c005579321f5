"""What the one-settings commands have in common: a loopback, one post, and what it yields."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rdmapost import (
    SGE,
    WC,
    Opcode,
    OpsOpcode,
    QPType,
    RdmaError,
    SendFlags,
    SendWR,
    WaitTimeout,
)
from rdmapost.loopback import Loopback, Side
from rdmapost.resources.qp import QP

from .options import PostSettings, Target
from .output import Output, fields
from .target import open_target, usage_error

__all__ = [
    "arrive",
    "as_text",
    "frame_header",
    "loopback",
    "mismatch",
    "post",
    "record",
    "send_flags",
    "show",
    "source",
    "verify",
]

_SHOWN = 4096
"""Bytes of data in the output, at most."""


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
    """Open the device and make two queue pairs on it.

    Args:
        out: gets the keys that every one-settings has.
        target: the device.
        settings: the type and the depth of the queue pairs, and the timeout.
        opcode: what will be posted.
        local_size, remote_size: as in Loopback.
        inlined: bytes of a work request that can be posted inline.
        depth: what each queue must hold, if that is not what is posted at once but segments.
        options: as in Loopback.
    """
    out.doc.update(
        device=None,
        kind=None,
        opcode=opcode.name,
        qp_type=settings.qp_type,
        status=None,
        wr_id=None,
        byte_len=None,
        gid_index=None,
    )
    with open_target(out, target) as (context, port_num):
        attr = context.attr
        what = f"--count {settings.count}" if depth is None else f"{depth} segments"
        depth = settings.count if depth is None else depth
        for name in ("max_qp_wr", "max_cqe"):
            if depth > getattr(attr, name):
                usage_error(
                    f"{what} is more than {context.name} can hold in a queue "
                    f"({name}={getattr(attr, name)})"
                )
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
            out.doc["gid_index"] = pair.local.qp.gid.index
            _note_queue_pairs(out, pair)
            yield pair


def send_flags(settings: PostSettings) -> int:
    """Return the send flags that were asked for, and SIGNALED."""
    flags = SendFlags.SIGNALED
    for name in settings.flags:
        flags |= SendFlags[name]
    return flags


def source(pair: Loopback, settings: PostSettings, payload: bytes) -> Sequence[SGE]:
    """Return the sg_list for a payload: registered memory, or a plain buffer if inline."""
    if "INLINE" in settings.flags:
        return [SGE.from_buffer(payload)] if payload else []
    pair.local.mr.buffer[: len(payload)] = payload
    return pair.cut(pair.local, 0, len(payload))


def frame_header(settings: PostSettings) -> bytes:
    """Return what a message starts with: a made-up Ethernet header on raw packets."""
    from rdmapost.frames import ethernet

    return ethernet() if settings.qp_type == "RAW_PACKET" else b""


def post(out: Output, pair: Loopback, wrs: Sequence[SendWR], side: Side | None = None) -> list[WC]:
    """Post a list of work requests in one call, and wait until they are done.

    Args:
        out: gets ``status`` and ``wr_id``, of the first that failed or else of
            the last, and for a list ``count`` and ``completions``.
        pair: the queue pairs.
        wrs: the work requests.
        side: who posts; the local side unless given.

    Raises:
        PostError: one of them was refused.
        CompletionError: one of them failed.
        WaitTimeout: they did not complete in time.
    """
    side = pair.local if side is None else side
    side.qp.post_send(wrs)
    try:
        wcs = (pair.sent if side is pair.local else pair.arrived)(len(wrs))
    except WaitTimeout:
        record(out, side.cq.poll(len(wrs)), len(wrs))
        raise
    if telling := record(out, wcs, len(wrs)):
        telling.check()
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


def verify(found: bytes | memoryview, expected: bytes, index: int, count: int) -> None:
    """Check that the data is what it must be.

    Raises:
        RdmaError: it is not.
    """
    if found != expected:
        raise mismatch(index, count)


def mismatch(index: int, count: int) -> RdmaError:
    """Make the error of data that is not what was sent."""
    which = f"message {index + 1} of {count}: " if count > 1 else ""
    return RdmaError(
        f"{which}the device reported success, but the data that arrived is not the data that was "
        "sent"
    )


def show(out: Output, yields: dict[str, Any]) -> None:
    """Print what a one-settings did.

    Args:
        out: where to.
        yields: what the operation gave, by name; bytes are data, and a list is
            shown as far as it fits.
    """
    doc = out.doc
    pairs = []
    for name, value in yields.items():
        if isinstance(value, bytes):
            text, encoding = as_text(value)
            doc |= {name: text, "encoding": encoding}
            if len(value) > _SHOWN:
                doc["truncated"] = True
            pairs.append((name, json.dumps(text) if encoding == "utf-8" else f"hex {text}"))
            continue
        doc[name] = value
        if isinstance(value, bool):
            pairs.append((name, str(value).lower()))
        elif isinstance(value, list):
            pairs.append((name, ", ".join(map(str, value))))
        elif value is not None:
            pairs.append((name, value if isinstance(value, str) else f"{value} ({value:#x})"))
    to = f" to {doc['peer']}" if "peer" in doc else ""
    many = f"{doc['count']} x " if "count" in doc else ""
    head = (
        f"{many}{doc['opcode']} of {doc['byte_len']} bytes on {doc['qp_type']}, "
        f"{doc['device']}{to}: {doc['status']}"
    )
    out.finish("\n".join([head, fields(pairs)] if pairs else [head]))


def as_text(data: bytes) -> tuple[str, str]:
    """Return what is shown of data, and how: "utf-8" where it can be printed, else "hex"."""
    shown = data[:_SHOWN]
    try:
        # A character that the cut went through is left out.
        text, _ = codecs.utf_8_decode(shown, "strict", len(data) <= _SHOWN)
    except UnicodeDecodeError:
        return shown.hex(), "hex"
    if all(char.isprintable() or char in "\t\n\r" for char in text):
        return text, "utf-8"
    return shown.hex(), "hex"


def record(out: Output, wcs: list[WC], count: int) -> WC | None:
    """Put completions into the document.

    Returns:
        the first that failed, or else the last, or None while others are missing.
    """
    if count > 1:
        out.doc["count"] = count
        out.doc["completions"] = [{"wr_id": wc.wr_id, "status": wc.status.name} for wc in wcs]
    telling = next((wc for wc in wcs if wc.status), wcs[-1] if len(wcs) == count else None)
    if telling is not None:
        out.doc.update(status=telling.status.name, wr_id=telling.wr_id)
    return telling


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
