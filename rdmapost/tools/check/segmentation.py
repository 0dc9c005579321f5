"""Checks of segmentation offload (TSO), on UD and RAW_PACKET."""

from __future__ import annotations

from ...enums import Opcode, WCOpcode
from ...posting.wr import TSO
from .. import frames
from ..loopback import Loopback
from .assertions import completed, unharmed
from .registry import Failed, Row, Trial, check
from .sends import arrived

ROWS: list[Row] = []

_MSS = 200
_PAYLOAD = 3 * _MSS + 11


@check(ROWS, Opcode.TSO)
def _tso(trial: Trial) -> str:
    hdr = frames.tcp(trial.qp_type)
    count, room = -(-_PAYLOAD // _MSS), len(hdr) + _MSS
    with trial.loopback(
        local_size=_PAYLOAD, remote_size=(count + 1) * room, max_tso_header=len(hdr)
    ) as pair:
        # One more receive than segments, to notice a surplus segment.
        pair.receive(room, count + 1)
        payload = bytes(pair.local.mr.buffer)
        pair.local.qp.post_send(
            TSO(sg_list=pair.local.mr[:], hdr=hdr, mss=_MSS, wr_id=7, **pair.address)
        )
        completed(pair.sent(), WCOpcode.TSO, wr_id=7)
        packets = segments(pair, count, room)
        if wrong := frames.what_is_wrong(packets, hdr, trial.qp_type, payload, _MSS):
            raise Failed(wrong)
        unharmed(pair, (0, count * (pair.headroom + room)))
        if pair.remote.cq.poll():
            raise Failed("more segments arrived than the payload has")
    lengths = ", ".join(str(len(packet)) for packet in packets)
    return f"{count} segments of {lengths} bytes, each with its own lengths, numbers and checksums"


def segments(pair: Loopback, count: int, room: int) -> list[bytes]:
    """Wait for the segments of a TSO, and return them in order of arrival.

    Args:
        pair: the queue pairs; receives of `room` bytes each are posted, with consecutive buffers
            from the start of the remote memory.
        count: the number of segments.
        room: message bytes that each receive holds.
    """
    return [
        pair.received(wc.check().byte_len - pair.headroom, index, room=room)
        for index, wc in enumerate(arrived(pair, count))
    ]
