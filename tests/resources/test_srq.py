"""Lists of shared receives: where they stop, which is used when, and what UD puts in front."""

from __future__ import annotations

import errno

import pytest
from support import GRH, needs

import rdmapost as rp
from rdmapost import QPType


@pytest.fixture(autouse=True)
def queues(context):
    needs(context.attr.max_srq, "shared receive queues", context)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_list_stops_at_the_first_that_cannot_be_posted(connect, stack, pd, checked, bad):
    """Those before it stay posted, and messages use them in order."""
    srq = stack.enter_context(rp.SRQ(pd, max_wr=16, max_sge=2, checked=checked))
    pair = connect(b_options={"srq": srq})
    wrs = [rp.RecvWR(pair.theirs[8 * i : 8 * i + 8], wr_id=i) for i in range(4)]
    wrs[bad] = rp.RecvWR([pair.theirs[:1]] * (srq.max_sge + 1), wr_id=99)
    with pytest.raises(rp.PostError) as caught:
        srq.post_srq_recv(wrs)
    error = caught.value
    assert (error.index, error.posted, error.wr) == (bad, bad, wrs[bad])
    assert error.errno in (errno.EINVAL, errno.ENOMEM)
    if checked:
        assert f"{srq.max_sge + 1} SGEs" in error.reason
    assert srq.outstanding == bad
    srq.post_srq_recv(rp.RecvWR(pair.theirs[100:108], wr_id=50))
    pair.a.post_send([rp.Send(pair.mine[:8], wr_id=900)] * (bad + 1))
    done = [wc.wr_id for wc in pair.wait(2 * bad + 2) if wc.wr_id != 900]
    assert done == [*range(bad), 50]
    assert srq.outstanding == 0


@pytest.mark.parametrize("wr_id", [0, 1, (1 << 32) + 1, (1 << 64) - 1])
def test_wr_id_comes_back_whole(connect, stack, pd, wr_id):
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(b_options={"srq": srq})
    srq.post_srq_recv(rp.RecvWR(pair.theirs[:8], wr_id=wr_id))
    pair.a.post_send(rp.Send(pair.mine[:8], send_flags=0))
    (done,) = pair.wait()
    assert (done.wr_id, done.qp_num) == (wr_id, pair.b.qp_num)


def test_message_is_scattered_over_the_sges_of_a_shared_receive(connect, stack, pd):
    srq = stack.enter_context(rp.SRQ(pd, max_sge=2))
    pair = connect(b_options={"srq": srq})
    pair.mine.buffer[:8] = b"somewhat"
    srq.post_srq_recv(rp.RecvWR([pair.theirs[100:104], pair.theirs[0:20]], wr_id=1))
    pair.a.post_send(rp.Send(pair.mine[:8], send_flags=0))
    (done,) = pair.wait()
    assert done.byte_len == 8
    assert bytes(pair.theirs.buffer[100:105]) == b"some\0"
    assert bytes(pair.theirs.buffer[:5]) == b"what\0"


def test_shared_receives_of_ud_start_with_the_header_too(connect, stack, pd):
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(QPType.UD, b_options={"srq": srq})
    pair.mine.buffer[:7] = b"payload"
    recv = rp.RecvWR(pair.theirs[: GRH + 100], wr_id=1)
    srq.post_srq_recv(recv)
    pair.a.post_send(pair.send(pair.mine[:7], send_flags=0))
    (done,) = pair.wait()
    assert done.byte_len == GRH + 7
    grh, payload = done.datagram(recv)
    assert payload == b"payload"
    assert grh is not None
    assert grh.sgid == pair.a.gid.gid


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("state", [rp.QPState.RESET, rp.QPState.RTS])
def test_queue_pair_with_a_shared_queue_has_none_of_its_own(connect, stack, pd, checked, state):
    """In any state, checked or not; the error says which call it is."""
    srq = stack.enter_context(rp.SRQ(pd))
    pair = connect(b_options={"srq": srq}, checked=checked, to=state)
    with pytest.raises(rp.RdmaError, match=r"takes its receives from SRQ .*srq\.post_srq_recv\(\)"):
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert pair.b.outstanding == (0, 0)
    assert srq.outstanding == 0


def test_post_srq_recv_of_anything_but_receives_is_refused(stack, pd, context):
    srq = stack.enter_context(rp.SRQ(pd))
    for wrong in (None, 5, object()):
        with pytest.raises(TypeError, match="ibv_post_srq_recv: expected RecvWR or an iterable"):
            srq.post_srq_recv(wrong)
    with pytest.raises(rp.PostError, match="expected RecvWR, got Send"):
        srq.post_srq_recv([rp.Send()])
    srq.close()
    with pytest.raises(rp.ClosedError, match=r"SRQ of .* is closed"):
        srq.post_srq_recv(rp.RecvWR())
