"""``rdmapost tag add``, ``rdmapost tag del`` and ``rdmapost tag sync``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from .groups import Group, group_options
from .options import U64, PostSettings, Target, device_options, payload_options, post_options_for
from .output import Output

if TYPE_CHECKING:
    from rdmapost import WC, OpsOpcode, OpsWR, TagAdd
    from rdmapost.loopback import Loopback


_ALL_BITS = (1 << 64) - 1
_DEPTH = 4


@click.group(cls=Group, invoke_without_command=True)
@group_options
def tag() -> None:
    """Match messages to buffers by their tags."""


def _tag_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every operation has."""
    for decorate in (
        device_options,
        post_options_for("rc"),
        payload_options,
        click.option(
            "--tag",
            type=U64,
            metavar="N",
            default=1,
            show_default=True,
            help="The tag of the buffer.",
        ),
    ):
        function = decorate(function)
    return function


@tag.command("add")
@click.option("--mask", type=U64, metavar="N", help="Tag bits that must match.  [default: all]")
@click.option("--message-tag", type=U64, metavar="N", help="The message's tag.  [default: --tag]")
@_tag_options
def add(
    out: Output,
    target: Target,
    settings: PostSettings,
    payload: bytes,
    tag: int,
    mask: int | None,
    message_tag: int | None,
) -> None:
    """Add a tagged buffer, and send a message to it.

    A message that does not match goes to an ordinary receive: it is unexpected.
    """
    from rdmapost import OpsOpcode, WCOpcode

    mask = _ALL_BITS if mask is None else mask
    with _tags(out, target, settings, OpsOpcode.TAG_ADD, payload) as pair:
        _operate(out, pair, _buffer(pair, payload, tag, mask), WCOpcode.TM_ADD)
        results = _send(out, pair, payload, tag if message_tag is None else message_tag)
    _show(out, {"tag": tag, "mask": mask, **results})


@tag.command("del")
@_tag_options
def delete(out: Output, target: Target, settings: PostSettings, payload: bytes, tag: int) -> None:
    """Add a tagged buffer, remove it, and send a message with its tag.

    The message matches nothing, so it goes to an ordinary receive: it is unexpected.
    """
    from rdmapost import OpsOpcode, RdmaError, TagDel, WCOpcode

    with _tags(out, target, settings, OpsOpcode.TAG_DEL, payload) as pair:
        entry = _buffer(pair, payload, tag)
        _operate(out, pair, entry, WCOpcode.TM_ADD)
        _operate(out, pair, TagDel(wr_id=2, handle=entry.handle), WCOpcode.TM_DEL)
        results = _send(out, pair, payload, tag)
    if results["matched"]:
        raise RdmaError("a message matched the buffer that was removed")
    _show(out, {"tag": tag, **results})


@tag.command("sync")
@_tag_options
def sync(out: Output, target: Target, settings: PostSettings, payload: bytes, tag: int) -> None:
    """Tell the device how many unexpected messages there were.

    Here there is exactly one; until it is reported, no added buffer matches anything.
    """
    from rdmapost import OpsOpcode, RdmaError, TagSync, WCFlags, WCOpcode

    with _tags(out, target, settings, OpsOpcode.TAG_SYNC, payload) as pair:
        if _send(out, pair, payload, tag)["matched"]:
            raise RdmaError("a message matched although no buffer was added")
        wc = _operate(out, pair, _buffer(pair, payload, tag), WCOpcode.TM_ADD)
        requested = bool(wc.wc_flags & WCFlags.TM_SYNC_REQ)
        _operate(out, pair, TagSync(wr_id=2, unexpected_cnt=1), WCOpcode.TM_SYNC)
        results = _send(out, pair, payload, tag)
    if not results["matched"]:
        raise RdmaError("a message did not match after the sync")
    _show(out, {"tag": tag, "unexpected_cnt": 1, "sync_requested": requested, **results})


@contextmanager
def _tags(
    out: Output, target: Target, settings: PostSettings, opcode: OpsOpcode, payload: bytes
) -> Iterator[Loopback]:
    """Create a pair whose remote side matches tags, with receives for unexpected messages.

    The memory for these receives follows the tagged buffer.
    """
    from rdmapost import RecvWR, SRQType
    from rdmapost.frames import TMH_BYTES

    from .post_local import loopback

    length = len(payload)
    size = TMH_BYTES + length
    with loopback(
        out,
        target,
        settings,
        opcode,
        local_size=size,
        remote_size=length + 2 * size,
        depth=_DEPTH,
        srq_type=SRQType.TM,
    ) as pair:
        mr = pair.remote.mr
        pair.post_receives(
            [RecvWR(mr[start : start + size], wr_id=start) for start in (length, length + size)]
        )
        yield pair


def _buffer(pair: Loopback, payload: bytes, tag: int, mask: int = _ALL_BITS) -> TagAdd:
    from rdmapost import TagAdd

    sges = pair.cut(pair.remote, 0, len(payload))
    return TagAdd(wr_id=1, recv_wr_id=0, sg_list=sges, tag=tag, mask=mask)


def _operate(out: Output, pair: Loopback, wr: OpsWR, opcode: Any) -> WC:
    """Post an operation and wait until it is done."""
    from rdmapost import RdmaError

    from .results import record

    assert pair.srq is not None, "_tags() asks for it"
    pair.srq.post_srq_ops(wr)
    (wc,) = pair.arrived()
    record(out, [wc], 1)
    if wc.check().opcode is not opcode:
        found = "an unknown opcode" if wc.opcode is None else wc.opcode.name
        raise RdmaError(f"the completion says {found}, not {opcode.name}")
    return wc


def _send(out: Output, pair: Loopback, payload: bytes, tag: int) -> dict[str, Any]:
    """Send a message and return how it was received."""
    from rdmapost import RdmaError, Send, WCFlags
    from rdmapost.frames import TMH_BYTES, tagged
    from rdmapost.tools.check.tag_matching import wait_for_message

    from .results import verify

    message = tagged(tag, payload)
    pair.local.mr.buffer[:] = message
    pair.local.qp.post_send(Send(sg_list=pair.local.mr[:], wr_id=1))
    pair.sent()[0].check()
    first, last = wait_for_message(pair)
    matched = bool(last.check().wc_flags & WCFlags.TM_DATA_VALID)
    # The completion has the tag only if the message matched.
    if matched and first.check().tm_tag != tag:
        raise RdmaError(f"the completion has tag {first.tm_tag}, not {tag}")
    # An unmatched message keeps its header; wr_id is the offset of its buffer.
    found = bytes(pair.remote.mr.buffer[last.wr_id : last.wr_id + last.byte_len])
    received = found if matched else found[TMH_BYTES:]
    verify(received, payload, 0, 1)
    out.doc["byte_len"] = len(received)
    return {"matched": matched, "tm_tag": tag, "data": payload, "received": received}


def _show(out: Output, results: dict[str, Any]) -> None:
    from .results import show

    show(out, results)
