"""The output of the posting commands: the completions, and the data that arrived."""

from __future__ import annotations

import codecs
from typing import Any, NamedTuple

from rdmapost import WC, Opcode, OpsOpcode, RdmaError
from rdmapost._arguments import counted

from .options import PostSettings
from .output import Output, fields, quoted
from .payload import Payload, Progress

_SHOWN = 4096
"""The most bytes of data in the output."""


def start_document(
    out: Output, opcode: Opcode | OpsOpcode, settings: PostSettings, **more: Any
) -> None:
    """Set every posting command's keys, so that they are present even if the command fails."""
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


def record(out: Output, wcs: list[WC], count: int) -> None:
    """Put the completions of ``count`` work requests into the document.

    ``status`` and ``wr_id`` come from the first failed completion, or else from the last
    one if none is missing.
    """
    if count > 1:
        out.doc["count"] = count
        out.doc["completions"] = [{"wr_id": wc.wr_id, "status": wc.status.name} for wc in wcs]
    one = next((wc for wc in wcs if wc.status), wcs[-1] if len(wcs) == count else None)
    if one is not None:
        out.doc.update(status=one.status.name, wr_id=one.wr_id)


class Shown(NamedTuple):
    """The part of the data that the output shows.

    Attributes:
        head: its first bytes.
        length: the length of all the data.
    """

    head: bytes
    length: int


def shown(data: bytes | memoryview | Payload) -> Shown:
    """Return the part of the data that the output shows."""
    head = data.head(_SHOWN) if isinstance(data, Payload) else bytes(data[:_SHOWN])
    return Shown(head, len(data))


def verify(
    found: bytes | memoryview,
    expected: bytes | Payload,
    index: int,
    count: int,
    progress: Progress | None = None,
) -> None:
    """Raise RdmaError if the data is not as expected."""
    if isinstance(expected, bytes):
        expected = Payload(expected)
    if not expected.is_in(memoryview(found), progress):
        raise mismatch(index, count)


def mismatch(index: int, count: int) -> RdmaError:
    """Return the error for data that differs from the data sent."""
    which = f"message {index + 1} of {count}: " if count > 1 else ""
    return RdmaError(
        f"{which}the device reported success, but the data that arrived is not the data that was "
        "sent"
    )


def show(out: Output, results: dict[str, Any]) -> None:
    """Print the results of a posting command, by name; lists are cut to the output's width."""
    doc = out.doc
    pairs = []
    for name, value in results.items():
        if isinstance(value, bytes):
            value = shown(value)
        if isinstance(value, Shown):
            text, encoding = as_text(value)
            doc |= {name: text, "encoding": encoding}
            if value.length > _SHOWN:
                doc["truncated"] = True
            pairs.append((name, quoted(text) if encoding == "utf-8" else f"hex {text}"))
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
        f"{many}{doc['opcode']} of {counted(doc['byte_len'], 'byte')} on {doc['qp_type']}, "
        f"{doc['device']}{to}: {doc['status']}"
    )
    out.finish("\n".join([head, fields(pairs)] if pairs else [head]))


def as_text(data: Shown) -> tuple[str, str]:
    """Return data as text with its encoding: "utf-8" if printable, else "hex"."""
    try:
        # Leave out the last character if not all of its bytes are shown.
        text, _ = codecs.utf_8_decode(data.head, "strict", data.length <= _SHOWN)
    except UnicodeDecodeError:
        return data.head.hex(), "hex"
    if all(char.isprintable() or char in "\t\n\r" for char in text):
        return text, "utf-8"
    return data.head.hex(), "hex"
