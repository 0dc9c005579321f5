"""Checks of tag matching: the three operations of post_srq_ops.

A message that matches an entry goes into the entry's buffer without its header;
one that matches none is unexpected and goes, header and all, into the next
receive of the shared queue.
"""

from __future__ import annotations

from ...enums import OpsOpcode, QPType, SRQType, WCFlags, WCOpcode
from ...posting.wr import OpsWR, RecvWR, Send, TagAdd, TagDel, TagSync
from ...resources.cq import WC
from ..frames import TMH_BYTES, tagged
from ..loopback import Loopback
from .assertions import at, completed, same, same_bytes, unharmed
from .registry import Failed, Row, Trial, check

ROWS: list[Row] = []

MATCHED = WCFlags.TM_MATCH | WCFlags.TM_DATA_VALID
"""The flags on the completion of a matched and complete message."""

_TAG, _OTHER = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321
_CONTEXT = 0xC0FFEE
_PAYLOAD = 100
_ROOM = 128
_SLOTS = 4
_UNEXPECTED = (_SLOTS - 1) * _ROOM
"""Offset of the receive for unexpected messages, after the tagged buffers."""


@check(ROWS, OpsOpcode.TAG_ADD, QPType.RC)
def _tag_add(trial: Trial) -> str:
    with _tags(trial) as pair:
        # The second entry's mask ignores the low byte of the tag.
        for index, (tag, mask) in enumerate(((_OTHER, (1 << 64) - 1), (_TAG & ~0xFF, ~0xFF))):
            _operate(pair, _add(pair, index, tag, mask & (1 << 64) - 1), WCOpcode.TM_ADD)
        _matches(pair, _TAG, 1)
        _matches(pair, _OTHER, 0)
        unharmed(pair, (0, _PAYLOAD), (_ROOM, _PAYLOAD))
    return f"2 messages of {_PAYLOAD} bytes went to the buffers of their tags, one by its mask"


@check(ROWS, OpsOpcode.TAG_DEL, QPType.RC)
def _tag_del(trial: Trial) -> str:
    with _tags(trial) as pair:
        first, second = _add(pair, 0, _TAG), _add(pair, 1, _TAG)
        for add in (first, second):
            _operate(pair, add, WCOpcode.TM_ADD)
        _operate(pair, TagDel(wr_id=20, handle=first.handle), WCOpcode.TM_DEL)
        _matches(pair, _TAG, 1)
        _operate(pair, _add(pair, 2, _OTHER), WCOpcode.TM_ADD)
        # Nothing is left for this tag: the removed entry does not match.
        _is_unexpected(pair, _TAG)
        unharmed(pair, (_ROOM, _PAYLOAD), (_UNEXPECTED, TMH_BYTES + _PAYLOAD))
    return "a message skips the removed entry and matches the next; a second message matches none"


@check(ROWS, OpsOpcode.TAG_SYNC, QPType.RC)
def _tag_sync(trial: Trial) -> str:
    with _tags(trial) as pair:
        _is_unexpected(pair, _TAG)
        wc = _operate(pair, _add(pair, 0, _TAG), WCOpcode.TM_ADD)
        if not wc.wc_flags & WCFlags.TM_SYNC_REQ:
            raise Failed("TM_ADD does not request a TAG_SYNC after an unexpected message")
        wc = _operate(pair, TagSync(wr_id=20, unexpected_cnt=1), WCOpcode.TM_SYNC)
        if wc.wc_flags & WCFlags.TM_SYNC_REQ:
            raise Failed("TM_SYNC requests another TAG_SYNC although the count was right")
        _matches(pair, _TAG, 0)
        unharmed(pair, (0, _PAYLOAD), (_UNEXPECTED, TMH_BYTES + _PAYLOAD))
    return "requested after an unexpected message; with its count, entries match again"


def _tags(trial: Trial) -> Loopback:
    """Create a pair whose remote side matches tags, with one receive for unexpected messages."""
    pair = trial.loopback(
        local_size=TMH_BYTES + _PAYLOAD, remote_size=_SLOTS * _ROOM, srq_type=SRQType.TM
    )
    receive = pair.remote.mr[_UNEXPECTED : _UNEXPECTED + TMH_BYTES + _PAYLOAD]
    pair.post_receives([RecvWR(receive, wr_id=30)])
    return pair


def _add(pair: Loopback, slot: int, tag: int, mask: int = (1 << 64) - 1) -> TagAdd:
    start = slot * _ROOM
    return TagAdd(
        wr_id=10 + slot,
        recv_wr_id=40 + slot,
        sg_list=pair.remote.mr[start : start + _PAYLOAD],
        tag=tag,
        mask=mask,
    )


def _operate(pair: Loopback, wr: OpsWR, opcode: WCOpcode) -> WC:
    assert pair.srq is not None, "_tags() makes it"
    pair.srq.post_srq_ops(wr)
    return completed(pair.arrived(), opcode, wr_id=wr.wr_id)


def _send(pair: Loopback, tag: int, slot: int) -> bytes:
    message = tagged(tag, bytes([slot]) * _PAYLOAD, _CONTEXT)
    pair.local.mr.buffer[:] = message
    pair.local.qp.post_send(Send(sg_list=pair.local.mr[:], wr_id=7))
    completed(pair.sent(), WCOpcode.SEND, wr_id=7)
    return message


def _matches(pair: Loopback, tag: int, slot: int) -> None:
    """Check that a message goes to the buffer of an entry."""
    message = _send(pair, tag, slot)
    wc = _arrives(pair, tag, wr_id=40 + slot)
    if not wc.wc_flags & WCFlags.TM_DATA_VALID:
        raise Failed("a message did not match the entry that has its tag")
    same("byte_len", wc.byte_len, _PAYLOAD)
    same_bytes("payload", at(pair, slot * _ROOM, _PAYLOAD), message[TMH_BYTES:])


def _is_unexpected(pair: Loopback, tag: int) -> None:
    """Check that a message matches nothing, and goes to the shared queue's ordinary receive."""
    message = _send(pair, tag, 0xFF)
    wc = _arrives(pair, tag, wr_id=30)
    if wc.wc_flags & MATCHED:
        raise Failed("a message matched although no entry has its tag")
    same("byte_len", wc.byte_len, len(message))
    same_bytes("unexpected message", at(pair, _UNEXPECTED, len(message)), message)


def _arrives(pair: Loopback, tag: int, *, wr_id: int) -> WC:
    first, last = wait_for_message(pair)
    for wc in (first, last):
        completed([wc], WCOpcode.TM_RECV, wr_id=wr_id)
    # The completion has the tag only if the message matched.
    if first.wc_flags & WCFlags.TM_MATCH:
        same("tag in the completion", first.tm_tag, tag)
        same("tm_priv", first.tm_priv, _CONTEXT)
    return last


def wait_for_message(pair: Loopback) -> tuple[WC, WC]:
    """Wait for a message, and return the completions with its tag and with its data.

    A message of several packets has two completions; otherwise both are the same one.
    """
    (first,) = pair.arrived()
    if not first.status and first.wc_flags & MATCHED == WCFlags.TM_MATCH:
        (last,) = pair.arrived()
        return first, last
    return first, first
