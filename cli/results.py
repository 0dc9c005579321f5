"""Shared by the posting commands: posting a list, its completions, and their output."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any

from rdmapost import (
    CQ,
    MR,
    QP,
    SGE,
    WC,
    Context,
    Opcode,
    OpsOpcode,
    RdmaError,
    SendFlags,
    SendWR,
    WaitTimeout,
)

from .options import PostSettings
from .output import Output, fields, usage_error

_SHOWN = 4096
"""Bytes of data in the output, at most."""


def start_document(
    out: Output, opcode: Opcode | OpsOpcode, settings: PostSettings, **more: Any
) -> None:
    """Set the keys that every posting command has, so that they are there if it fails."""
    out.doc.update(
        device=None,
        kind=None,
        opcode=opcode.name,
        qp_type=settings.qp_type,
        **more,
        status=None,
        wr_id=None,
        byte_len=None,
        gid_index=None,
    )


def check_depth(context: Context, what: str, depth: int, *limits: str) -> None:
    """End the command with a usage error if a queue cannot be that deep, because of ``what``."""
    for name in limits:
        limit = getattr(context.attr, name)
        if depth > limit:
            usage_error(f"{what} is more than {context.name} can hold in a queue ({name}={limit})")


def send_flags(settings: PostSettings) -> int:
    """Return the send flags that were asked for, and SIGNALED."""
    flags = SendFlags.SIGNALED
    for name in settings.flags:
        flags |= SendFlags[name]
    return flags


def source(mr: MR, settings: PostSettings, payload: bytes) -> Sequence[SGE]:
    """Return the sg_list for a payload: registered memory, or an unregistered buffer if inline."""
    if not payload:
        return []
    if "INLINE" in settings.flags:
        return [SGE.from_buffer(payload)]
    mr.buffer[: len(payload)] = payload
    return [mr[: len(payload)]]


def post_and_wait(
    out: Output, qp: QP, cq: CQ, wrs: Sequence[SendWR], wait: Callable[[int], list[WC]]
) -> tuple[list[WC], WC]:
    """Post a list of work requests in one call, and wait and record() until they are done.

    Returns:
        the completions, and the first that failed or else the last.

    Raises:
        PostError: one of them was refused.
        WaitTimeout: they did not complete in time.
    """
    qp.post_send(wrs)
    try:
        wcs = wait(len(wrs))
    except WaitTimeout:
        record(out, cq.poll(len(wrs)), len(wrs))
        raise
    record(out, wcs, len(wrs))
    return wcs, next((wc for wc in wcs if wc.status), wcs[-1])


def record(out: Output, wcs: list[WC], count: int) -> None:
    """Put the completions of ``count`` work requests into the document.

    ``status`` and ``wr_id`` are those of the first that failed, or else of the last
    if none is missing.
    """
    if count > 1:
        out.doc["count"] = count
        out.doc["completions"] = [{"wr_id": wc.wr_id, "status": wc.status.name} for wc in wcs]
    shown = next((wc for wc in wcs if wc.status), wcs[-1] if len(wcs) == count else None)
    if shown is not None:
        out.doc.update(status=shown.status.name, wr_id=shown.wr_id)


def verify(found: bytes | memoryview, expected: bytes, index: int, count: int) -> None:
    """Raise RdmaError if the data is not as expected."""
    if found != expected:
        raise mismatch(index, count)


def mismatch(index: int, count: int) -> RdmaError:
    """Make the error for data that is not what was sent."""
    which = f"message {index + 1} of {count}: " if count > 1 else ""
    return RdmaError(
        f"{which}the device reported success, but the data that arrived is not the data that was "
        "sent"
    )


def show(out: Output, yields: dict[str, Any]) -> None:
    """Print the results of a posting command, by name; a list is shown as far as it fits."""
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
    """Return data as text with its encoding: "utf-8" if printable, else "hex"."""
    shown = data[:_SHOWN]
    try:
        # Leave out a character that is cut in two.
        text, _ = codecs.utf_8_decode(shown, "strict", len(data) <= _SHOWN)
    except UnicodeDecodeError:
        return shown.hex(), "hex"
    if all(char.isprintable() or char in "\t\n\r" for char in text):
        return text, "utf-8"
    return shown.hex(), "hex"
