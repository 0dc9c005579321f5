"""FENCE: a work request waits for the reads and atomics before it."""

from __future__ import annotations

import sys

import pytest
from support import Pair, needs

import rdmapost as rp
from rdmapost import SendFlags

FENCE = SendFlags.FENCE | SendFlags.SIGNALED


@pytest.fixture
def patient(connect) -> Pair:
    """A pair that never retransmits during a test: rxe loses fenced requests that it resends."""
    pair = connect(to=rp.QPState.RESET)
    pair.a.connect(pair.b.endpoint(), timeout=21)
    pair.b.connect(pair.a.endpoint())
    return pair


def test_fence_waits_for_the_reads_before_it(patient):
    """The fenced message carries the bytes that were read."""
    size, pair = 4096, patient
    for value in range(1, 9):
        pair.theirs.buffer[:size] = bytes([value]) * size
        pair.b.post_recv(rp.RecvWR(pair.theirs[size : 2 * size], wr_id=7))
        pair.a.post_send(
            [
                pair.wr(rp.RdmaRead, pair.mine[:size], wr_id=1),
                rp.Send(pair.mine[:size], wr_id=2, send_flags=FENCE),
            ]
        )
        done = [wc.wr_id for wc in pair.wait(3)]
        assert [wr_id for wr_id in done if wr_id < 7] == [1, 2]
        assert bytes(pair.theirs.buffer[size:]) == bytes([value]) * size


def test_fence_waits_for_the_atomics_before_it(patient, context):
    needs(context.attr.atomic_cap, "atomics", context)
    pair = patient
    old = pair.wr(rp.AtomicFetchAndAdd, pair.mine[:8], compare_add=1)
    write = pair.wr(
        rp.RdmaWrite, pair.mine[:8], remote_addr=pair.theirs.addr + 64, send_flags=FENCE
    )
    for value in range(8):
        pair.a.post_send([old, write])
        pair.wait(2)
        assert int.from_bytes(pair.theirs.buffer[64:72], sys.byteorder) == value


def test_fence_waits_for_a_read_that_is_answered_late(connect, context):
    """The peer is not ready yet: neither the read nor the request fenced after it goes out."""
    needs(context.kind == "soft", "fence across retransmissions", context)
    pair = connect(to=rp.QPState.RESET)
    pair.a.connect(pair.b.endpoint(), timeout=12, retry_cnt=7)
    pair.theirs.buffer[:4] = b"late"
    pair.a.post_send(
        [
            pair.wr(rp.RdmaRead, pair.mine[:4], wr_id=1),
            pair.wr(
                rp.RdmaWrite,
                pair.mine[:4],
                wr_id=2,
                remote_addr=pair.theirs.addr + 64,
                send_flags=FENCE,
            ),
        ]
    )
    assert pair.cq.poll() == []
    pair.b.connect(pair.a.endpoint())
    assert [wc.wr_id for wc in pair.wait(2)] == [1, 2]
    assert bytes(pair.theirs.buffer[64:68]) == b"late"


def test_fence_and_solicited_may_be_combined_on_one_send(rc):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8]))
    flags = SendFlags.SIGNALED | SendFlags.FENCE | SendFlags.SOLICITED
    rc.a.post_send([rc.wr(rp.RdmaRead, rc.mine[:8]), rp.Send(rc.mine[:8], send_flags=flags)])
    assert len(rc.wait(3)) == 3
