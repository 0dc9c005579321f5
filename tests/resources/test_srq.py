"""Shared receive queues (SRQ): their attributes and limit, and how queue pairs share one."""

from __future__ import annotations

import contextlib
import errno

import pytest
from support import ALL, GRH, async_events, needs

import rdmapost as rp
from rdmapost import EventType, QPType

no_old_events = async_events.no_old_events


@pytest.fixture(autouse=True)
def queues(context):
    needs(context.attr.max_srq, "shared receive queues", context)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_list_of_shared_receives_stops_at_the_first_that_cannot_be_posted(
    connect, stack, pd, checked, bad
):
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


@pytest.fixture
def srq(context, pd, stack):
    needs(context.attr.max_srq, "shared receive queues", context)
    return stack.enter_context(rp.SRQ(pd, max_wr=32, max_sge=2))


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UD])
def test_two_queue_pairs_share_a_shared_receive_queue(srq, connect, qp_type):
    """Each message takes the next receive, whichever queue pair it is for."""
    pairs = [connect(qp_type, b_options={"srq": srq}) for _ in range(2)]
    grh = GRH if qp_type is QPType.UD else 0
    memory = pairs[0].theirs
    srq.post_srq_recv([rp.RecvWR(memory[i * 100 : i * 100 + 100], wr_id=i) for i in range(4)])
    assert srq.outstanding == 4
    for number, pair in enumerate((pairs[0], pairs[1], pairs[1], pairs[0])):
        pair.mine.buffer[:1] = bytes([number + 1])
        pair.a.post_send(pair.send(pair.mine[:1], wr_id=100))
        done = {wc.wr_id: wc for wc in pair.wait(2)}
        assert done[number].qp_num == pair.b.qp_num
        assert memory.buffer[number * 100 + grh] == number + 1
        assert srq.outstanding == 3 - number


def test_post_recv_on_its_queue_pair_says_which_call_to_use(srq, connect):
    pair = connect(b_options={"srq": srq})
    with pytest.raises(rp.RdmaError, match=r"takes its receives from SRQ .*srq\.post_srq_recv"):
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))


def test_srq_in_use_cannot_be_closed(srq, connect):
    pair = connect(b_options={"srq": srq})
    with pytest.raises(rp.InUseError, match=f"RC QP {pair.b.qp_num:#x} still open"):
        srq.close()


def test_region_in_a_shared_receive_queue_cannot_be_closed(srq, pd):
    with rp.MR(pd, 64) as mr:
        srq.post_srq_recv(rp.RecvWR(mr[:8], wr_id=71))
        with pytest.raises(rp.InUseError, match="wr_id 71"):
            mr.close()
        srq.close()


def test_receives_of_a_shared_queue_are_checked(srq, pd, context):
    with rp.MR(pd, 64) as mr, rp.PD(context) as other, rp.MR(other, 64) as foreign:
        for wr, words in (
            (rp.RecvWR([mr[:8]] * (srq.max_sge + 1)), f"max_sge={srq.max_sge}"),
            (rp.RecvWR(foreign[:8]), "does not belong to the queue's PD"),
            (rp.RecvWR(mr[5:5]), "length 0"),
            (rp.Send(), "expected RecvWR, got Send"),
        ):
            with pytest.raises(rp.PostError, match=words):
                srq.post_srq_recv([wr])
        assert srq.outstanding == 0


def test_full_shared_receive_queue_is_refused_by_name(srq, pd):
    with rp.MR(pd, 64) as mr:
        depth = srq.max_wr
        srq.post_srq_recv([rp.RecvWR(mr[:8], wr_id=i) for i in range(depth)])
        with pytest.raises(rp.PostError, match=f"the queue is full: max_wr={depth}"):
            srq.post_srq_recv(rp.RecvWR(mr[:8]))
        assert srq.outstanding == depth
        srq.close()


def test_query_of_a_shared_receive_queue_has_its_size_and_limit(srq):
    attr = srq.query()
    assert attr.max_wr >= 32
    assert (srq.max_wr, srq.max_sge) >= (32, 2)
    srq.arm_limit(4)
    assert srq.query().srq_limit == 4


@pytest.mark.parametrize("name", ["max_wr", "max_sge"])
def test_device_decides_whether_a_shared_receive_queue_may_have_size_0(pd, context, name):
    """soft0 and Soft-RoCE refuse it; others create a larger one."""
    needs(context.attr.max_srq, "shared receive queues", context)
    if context.kind == "soft":
        with pytest.raises(rp.VerbsError, match=rf"EINVAL .*: {name}=0 is not in 1\.\.\d+$"):
            rp.SRQ(pd, **{name: 0})
        return
    with contextlib.suppress(rp.VerbsError), rp.SRQ(pd, **{name: 0}) as srq:
        assert getattr(srq, name) >= 0


@pytest.mark.parametrize("name", ["max_wr", "max_sge", "max_num_tags", "max_ops"])
@pytest.mark.parametrize("value", [-1, 1 << 32])
def test_shared_receive_queue_of_a_size_that_does_not_fit_is_refused(pd, context, name, value):
    needs(context.attr.max_srq, "shared receive queues", context)
    with pytest.raises(ValueError, match=f"{name}={value}"):
        rp.SRQ(pd, **{name: value})


def test_srq_limit_out_of_range_is_refused_by_name(context, pd):
    needs(context.attr.max_srq, "shared receive queues", context)
    with rp.SRQ(pd) as srq:
        for wrong in (-1, 1 << 32):
            with pytest.raises(ValueError, match=f"srq_limit={wrong} is not in 0..2\\^32-1"):
                srq.arm_limit(wrong)


def test_region_that_an_srq_holds_says_to_close_the_srq(context, pd, rc):
    needs(context.attr.max_srq, "shared receive queues", context)
    mr, srq = rp.MR(pd, 64, ALL), rp.SRQ(pd)
    srq.post_srq_recv(rp.RecvWR(mr[:8], wr_id=5))
    with pytest.raises(rp.InUseError, match=r"\(wr_id 5\); .* or close the SRQ first"):
        mr.close()
    rc.b.post_recv(rp.RecvWR(mr[:8], wr_id=6))
    with pytest.raises(rp.InUseError, match="or close the QP or the SRQ first"):
        mr.close()
    srq.close()
    with pytest.raises(rp.InUseError, match="or close the QP first"):
        mr.close()
    rc.b.to_reset()
    mr.close()


@pytest.fixture
def mr(pd, stack):
    return stack.enter_context(rp.MR(pd, 4096, ALL))


@pytest.mark.usefixtures("no_old_events")
def test_limit_above_what_remains_fires_when_the_next_receive_is_taken(context, pd, cq, mr, stack):
    virtual = context.kind != "verbs" or context.name.startswith("rxe")
    needs(virtual, "this moment of the event", context)
    srq = stack.enter_context(rp.SRQ(pd, 8))
    near = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    far = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    far.connect(near.endpoint())
    near.connect(far.endpoint())
    srq.arm_limit(4)
    srq.post_srq_recv([rp.RecvWR(mr[64:128])] * 2)
    srq.arm_limit(4)
    assert context.get_async_event(0.1) is None
    assert srq.query().srq_limit == 4
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(2)
    assert context.get_async_event(5) == rp.AsyncEvent(EventType.SRQ_LIMIT_REACHED, srq)


@pytest.mark.usefixtures("no_old_events")
def test_the_limit_of_an_srq_is_an_event(context, pd, cq, mr, stack):
    srq = stack.enter_context(rp.SRQ(pd, 8))
    near = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    far = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    far.connect(near.endpoint())
    near.connect(far.endpoint())
    srq.post_srq_recv([rp.RecvWR(mr[64:128])] * 4)
    srq.arm_limit(3)
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(2)
    assert context.get_async_event(0) is None
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(2)
    assert context.get_async_event(5) == rp.AsyncEvent(EventType.SRQ_LIMIT_REACHED, srq)
    assert srq.query().srq_limit == 0


def test_more_receives_of_an_srq_can_be_outstanding_than_have_been_at_first(pd):
    with (
        rp.CQ(pd.context, 512) as cq,
        rp.SRQ(pd, 200, 1) as srq,
        rp.QP(pd, QPType.RC, cq, srq=srq) as target,
        rp.QP(pd, QPType.RC, cq, max_send_wr=200) as sender,
    ):
        sender.connect(target.endpoint())
        target.connect(sender.endpoint())
        for count in (1, 10, 30, 100, 7, 150):
            for wr_id in range(count // 2):
                srq.post_srq_recv(rp.RecvWR(wr_id=wr_id))
            srq.post_srq_recv([rp.RecvWR(wr_id=wr_id) for wr_id in range(count // 2, count)])
            assert srq.outstanding == count
            sender.post_send([rp.Send(send_flags=0)] * (count - 1) + [rp.Send(wr_id=1 << 40)])
            found = [wc.check().wr_id for wc in cq.wait(count + 1)]
            assert sorted(found) == [*range(count), 1 << 40]
            assert srq.outstanding == 0
