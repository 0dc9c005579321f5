"""TSO: its header and mss, as they are read and held."""

from __future__ import annotations

import pytest
from support import soft_queues, watching
from support.soft_queues import reason
from support.watching import Counted

import rdmapost as rp
from rdmapost import Opcode, QPType

watched = watching.watched
soft = soft_queues.soft


def test_buffer_of_a_header_is_held_until_it_is_sent(watched):
    """A bytearray cannot be resized behind the device's back."""
    hdr = bytearray(b"header")
    wr = rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=Counted(5, lambda: hdr.__setitem__(0, 0x48)))
    watched.tap.refuse()
    with pytest.raises(rp.PostError):
        watched.qp.post_send(wr)
    if watched.tap.chains:
        [record] = watched.tap.last()
        assert record.hdr == b"Header"
    hdr.extend(b"more")

    def resize() -> None:
        with pytest.raises(BufferError):
            hdr.extend(b"more")

    wr = rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=Counted(5, resize))
    with pytest.raises(rp.PostError):
        watched.qp.post_send(wr)
    assert wr.mss.asked == 1


@pytest.mark.parametrize("watched", [False], ids=["unchecked"], indirect=True)
def test_longest_header_that_16_bits_can_count_is_read_whole(watched):
    hdr = bytes(range(256)) * 256
    watched.tap.refuse()
    with pytest.raises(rp.PostError):
        watched.qp.post_send(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr[1:], mss=1))
    [record] = watched.tap.last()
    assert record.hdr == hdr[1:]
    with pytest.raises(rp.PostError, match="hdr has 65536 bytes; at most 65535 fit"):
        watched.qp.post_send(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=1))
    assert len(watched.tap.chains) == 1


def test_header_that_is_released_or_none_is_refused(watched):
    view = memoryview(b"header")
    view.release()
    for hdr in (view, None):
        assert watched.refused(rp.TSO(rp.SGE(1, 2, 3), hdr=hdr, mss=1)) == "hdr is not bytes"


RC, UC, UD, RAW = QPType.RC, QPType.UC, QPType.UD, QPType.RAW_PACKET


@pytest.mark.parametrize("mss", [0, -1, 1 << 16])
@pytest.mark.parametrize("qp_type", [UD, RAW])
def test_tso_needs_a_segment_size(soft, qp_type, mss):
    said = reason(soft.qp(qp_type).post_send, soft.valid(Opcode.TSO, qp_type, mss=mss))
    assert said == ("mss=-1 is not in 1..65535" if mss < 0 else f"mss={mss} is not in 1..65535")
