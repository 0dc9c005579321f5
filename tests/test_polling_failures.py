"""Polling: devices that fail, and completions that come several at once."""

from __future__ import annotations

import ast
import errno

import pytest
import test_refusals
from support import prints, soft_context
from tag_server import MATCHED, small_server

import rdmapost as rp

context = soft_context
server = small_server
null = test_refusals.null

FAILING = """
import ctypes, os
context, pd, cq = resources()
mr = rp.MR(pd, 64)
qp = rp.QP(pd, rp.QPType.RC, cq)
qp.connect(qp.endpoint())
null = ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"])
null.null_remember(1)
qp.post_recv([rp.RecvWR(mr[0:8], wr_id=1), rp.RecvWR(mr[0:8], wr_id=2)])
found = []
for code in (5, 0):
    null.null_fail_poll(code)
    for call in (cq.poll, lambda: cq.poll(100), lambda: cq.wait(1, timeout=1)):
        try: found.append(call())
        except rp.VerbsError as error: found.append((error.errno, str(error)))
null.null_fail_poll(-1)
found.append([wc.wr_id for wc in cq.poll()])
qp.post_recv(rp.RecvWR(mr[0:8], wr_id=3))
try: cq.wait(2, timeout=0.01)
except rp.WaitTimeout as error: found.append(str(error))
found.append([wc.wr_id for wc in cq.poll()])
print(found)
"""


@pytest.fixture(scope="module")
def failed(null):
    """What polling said while it failed, what came when it no longer did, and of a wait."""
    text = prints(
        test_refusals.SETUP + FAILING, RDMAPOST_LIBIBVERBS=null, ASAN_OPTIONS="detect_leaks=0"
    )
    return ast.literal_eval(text)


def test_a_poll_that_fails_says_why_and_loses_nothing(failed):
    """Some providers set no errno: that is EIO."""
    assert [code for code, _ in failed[:6]] == [errno.EIO] * 6
    assert all("ibv_poll_cq" in text for _, text in failed[:6])
    assert failed[6] == [1, 2]


def test_a_wait_that_spins_keeps_what_came(failed):
    """It is on a device that is waited for by polling it again and again at first."""
    assert failed[7:] == ["1 of 2 completions came within 0.01 s", [3]]


@pytest.mark.parametrize("count", [2, 7])
def test_each_message_of_a_batch_has_its_own_tag(server, count):
    """The tag and the sender's data of one completion are no other's."""
    for i in range(count):
        server.add(0xFFFF_FFFF_0000_0000 + i, i * 64, 64, recv_wr_id=i)
    for i in reversed(range(count)):
        server.client.eager(0xFFFF_FFFF_0000_0000 + i, bytes([i]), 0xFFFF_0000 + i)
    batch = server.cq.wait(count)
    assert [
        (wc.wr_id, wc.tm_tag, wc.tm_priv, wc.wc_flags) for wc in batch
    ] == [
        (i, 0xFFFF_FFFF_0000_0000 + i, 0xFFFF_0000 + i, MATCHED) for i in reversed(range(count))
    ]  # fmt: skip


def test_queues_of_one_batch_each_have_their_own(rc):
    """Completions of two queue pairs and four queues, as they come, in one poll."""
    for at in (0, 10, 20):
        for wr_id in range(at, at + 4):
            mine, theirs = (rc.a, rc.b) if wr_id % 2 else (rc.b, rc.a)
            theirs.post_recv(rp.RecvWR(rc.theirs[:64], wr_id=wr_id))
            mine.post_send(rp.Send(rc.mine[:8], wr_id=100 + wr_id))
        found = {wc.check().wr_id: wc.qp_num for wc in rc.wait(8)}
        for wr_id in range(at, at + 4):
            mine, theirs = (rc.a, rc.b) if wr_id % 2 else (rc.b, rc.a)
            assert found.pop(wr_id) == theirs.qp_num
            assert found.pop(100 + wr_id) == mine.qp_num
        assert found == {}
    assert sum(rc.a.outstanding) + sum(rc.b.outstanding) == 0
