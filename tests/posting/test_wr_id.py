"""wr_id: it comes back whole, from every queue."""

from __future__ import annotations

import pytest
from support import needs, watching
from support.watching import Counted, Enumerated, Int

import rdmapost as rp

watched = watching.watched

TWO_TO_THE_64 = 1 << 64


@pytest.mark.parametrize("wr_id", [0, 1, (1 << 32) + 1, TWO_TO_THE_64 - 1])
def test_wr_id_comes_back_whole(rc, wr_id):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=wr_id))
    rc.a.post_send(rp.Send(rc.mine[:8], wr_id=wr_id))
    assert [wc.wr_id for wc in rc.wait(2)] == [wr_id, wr_id]


U64, U32 = (1 << 64) - 1, (1 << 32) - 1


def test_wr_id_of_any_class_comes_back_as_an_int(watched):
    for given, read in ((Int(7), 7), (True, 1), (Counted(U64), U64), (Enumerated.SEVEN, 7)):
        watched.qp.post_send(watched.write(wr_id=given))
        [wc] = watched.cq.wait(1)
        assert wc.wr_id == read
        assert type(wc.wr_id) is int


@pytest.mark.parametrize("wr_id", [0, 1, (1 << 32) + 1, (1 << 64) - 1])
def test_wr_id_of_a_shared_receive_comes_back_whole(connect, stack, pd, context, wr_id):
    needs(context.attr.max_srq, "shared receive queues", context)
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(b_options={"srq": srq})
    srq.post_srq_recv(rp.RecvWR(pair.theirs[:8], wr_id=wr_id))
    pair.a.post_send(rp.Send(pair.mine[:8], send_flags=0))
    (done,) = pair.wait()
    assert (done.wr_id, done.qp_num) == (wr_id, pair.b.qp_num)


def test_send_and_receive_with_one_wr_id_on_one_cq_are_told_apart(connect):
    """Both queues of both sides complete here, all with wr_id 5."""
    pair = connect()
    for _ in range(3):
        pair.a.post_recv(rp.RecvWR(pair.mine[100:200], wr_id=5))
        pair.b.post_recv(rp.RecvWR(pair.theirs[100:200], wr_id=5))
        pair.a.post_send(rp.Send(pair.mine[:8], wr_id=5))
        pair.b.post_send(rp.Send(pair.theirs[:8], wr_id=5))
        done = pair.wait(4)
        assert {(wc.wr_id, wc.qp_num, wc.opcode) for wc in done} == {
            (5, qp.qp_num, opcode)
            for qp in (pair.a, pair.b)
            for opcode in (rp.WCOpcode.SEND, rp.WCOpcode.RECV)
        }
    assert pair.a.outstanding == pair.b.outstanding == (0, 0)
