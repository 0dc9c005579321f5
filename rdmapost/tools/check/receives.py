"""Checks of receives: post_recv and post_srq_recv."""

from __future__ import annotations

from ...enums import QPType, SRQType, WCOpcode
from ...posting.wr import RecvWR, Send
from .assertions import at, completed, same, same_bytes, unharmed
from .registry import MARGIN, Row, Trial, check
from .sends import arrived

ROWS: list[Row] = []

_MESSAGE = 96
"""Bytes of each message."""
_FIRST = 40
"""Bytes of each message that go into the first of its two buffers."""
_COUNT = 3


@check(ROWS, "RECV", QPType.RC, QPType.UC, QPType.UD, QPType.RAW_PACKET)
def _recv(trial: Trial) -> str:
    return _scattered(trial, None)


@check(ROWS, "SRQ_RECV", QPType.RC, QPType.UD, QPType.XRC_SEND)
def _srq_recv(trial: Trial) -> str:
    return _scattered(trial, SRQType.BASIC)


def _scattered(trial: Trial, srq_type: SRQType | None) -> str:
    """Post a list of receives of two buffers each, and send as many messages."""
    rest = _MESSAGE - _FIRST
    with trial.loopback(
        local_size=_MESSAGE,
        # For each receive: its first buffer, a margin, its second buffer, a margin.
        remote_size=_COUNT * (_MESSAGE + 2 * MARGIN),
        max_recv_sge=2,
        srq_type=srq_type,
    ) as pair:
        mr, first = pair.remote.mr, pair.headroom + _FIRST
        size = first + MARGIN + rest + MARGIN
        pair.post_receives(
            [
                RecvWR(
                    [mr[start : start + first], mr[start + first + MARGIN : start + size - MARGIN]],
                    wr_id=50 + index,
                )
                for index, start in enumerate(range(0, _COUNT * size, size))
            ]
        )
        ranges: list[tuple[int, int]] = []
        for index in range(_COUNT):
            trial.make_up(pair)
            pair.local.qp.post_send(Send(sg_list=pair.local.mr[:], wr_id=7, **pair.address))
            completed(pair.sent(), WCOpcode.SEND, wr_id=7)
            wc = completed(arrived(pair), WCOpcode.RECV, wr_id=50 + index)
            same("byte_len", wc.byte_len, pair.headroom + _MESSAGE)
            start = index * size
            # On UD the GRH precedes the message.
            pieces = [(start + pair.headroom, _FIRST), (start + first + MARGIN, rest)]
            message = b"".join(at(pair, *piece) for piece in pieces)
            same_bytes(f"message {index + 1}", message, pair.local.mr.buffer)
            ranges += [(start, first), pieces[1]]
            unharmed(pair, *ranges)
            left = pair.srq.outstanding if pair.srq else pair.remote.qp.outstanding.recv
            same("receives outstanding", left, _COUNT - 1 - index)
    where = "the shared queue" if srq_type is not None else "the queue"
    return f"{_COUNT} messages took {where}'s receives in order, each scattered to 2 buffers"
