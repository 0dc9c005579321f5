"""Full queues: refused by name, and usable after polling."""

from __future__ import annotations

import errno
import sys

import pytest
from support import needs, soft_queues

import rdmapost as rp

unchecked = soft_queues.unchecked


def test_full_send_queue_is_refused_by_name_and_usable_after_polling(connect):
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    pair.a.post_send([pair.wr(rp.RdmaWrite, pair.mine[:1]) for _ in range(depth)])
    assert pair.a.outstanding.send == depth
    with pytest.raises(rp.PostError, match=f"the queue is full: max_send_wr={depth}") as caught:
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1]))
    assert caught.value.errno == errno.ENOMEM
    assert "poll the CQ" in str(caught.value)
    pair.wait(depth)
    pair.works()


def test_queue_emptied_before_its_refusal_is_explained_is_still_said_to_be_full(connect):
    """By another thread, for instance; here by a trace function."""
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1]) for _ in range(depth)]
    pair.a.post_send(wrs)

    def empty(frame, event, argument):
        if frame.f_code.co_name == "full":
            sys.settrace(None)
            pair.a.to_reset()

    before = sys.gettrace()
    sys.settrace(empty)
    try:
        with pytest.raises(rp.PostError) as caught:
            pair.a.post_send(wrs[0])
    finally:
        sys.settrace(before)
    said = str(caught.value)
    assert f"the queue was full: max_send_wr={depth}; now there is room" in said


def test_list_longer_than_the_free_slots_is_posted_up_to_the_last_free_slot(connect):
    pair = connect(max_send_wr=16)
    depth = pair.a.max_send_wr
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=0))
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(1, depth + 1)]
    with pytest.raises(rp.PostError, match="the queue is full") as caught:
        pair.a.post_send(wrs)
    assert (caught.value.index, caught.value.posted) == (depth - 1, depth - 1)
    assert [wc.wr_id for wc in pair.wait(depth)] == list(range(depth))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("prepared", [False, True], ids=["posted", "prepared"])
@pytest.mark.parametrize("kind", [list, iter])
def test_error_for_a_list_longer_than_its_queue_does_not_advise_to_poll(
    connect, checked, prepared, kind
):
    """It never fits, however many are polled; a checked queue pair does not even prepare it."""
    pair = connect(max_send_wr=16, checked=checked)
    depth = pair.a.max_send_wr
    # More than a device has beyond what it grants.
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(4 * depth)]

    def post() -> None:
        if not prepared:
            pair.a.post_send(kind(wrs))
        elif checked:
            pair.a.prepare(kind(wrs))
        else:
            pair.a.prepare(kind(wrs)).post()

    with pytest.raises(rp.PostError) as caught:
        post()
    error = caught.value
    assert error.errno == errno.ENOMEM
    assert error.reason == (
        f"a list of {4 * depth} cannot fit a queue of max_send_wr={depth}; "
        "post it in parts, or create a deeper queue"
    )
    # Those that fit are posted, except for a prepared list, which is posted whole or not at all.
    if checked:
        assert error.posted == (0 if prepared else depth)
        assert (error.index, error.count) == (depth, 4 * depth)
        assert error.wr is wrs[depth]
    assert [wc.wr_id for wc in pair.wait(error.posted)] == list(range(error.posted))


def test_full_receive_queue_is_refused_by_name(connect):
    pair = connect(max_recv_wr=8)
    depth = pair.b.max_recv_wr
    pair.b.post_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(depth)])
    with pytest.raises(rp.PostError, match=f"the queue is full: max_recv_wr={depth}") as caught:
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert caught.value.errno == errno.ENOMEM
    assert pair.b.outstanding == (0, depth)
    pair.a.post_send(rp.Send(pair.mine[:8]))
    pair.wait(2)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))
    assert pair.b.outstanding == (0, depth)


def test_unchecked_post_to_a_full_queue_is_enomem_with_an_index(connect):
    """The device's own ENOMEM: when it decides, and with the index."""
    pair = connect(max_recv_wr=4, checked=False)
    with pytest.raises(rp.PostError) as caught:
        pair.b.post_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(5000)])
    error = caught.value
    assert error.errno == errno.ENOMEM
    assert error.index == error.posted == pair.b.outstanding.recv
    assert error.index is not None
    assert error.index >= 4
    assert error.wr.wr_id == error.index


def test_work_requests_before_the_one_that_overfills_the_queue_complete(connect, context):
    """As many as the queue holds, refused by name beyond, and all of them complete."""
    pair = connect(max_send_wr=8)
    depth = pair.a.max_send_wr
    wrs = [pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i) for i in range(depth + 3)]
    needs(depth < 1000, "queues as small as requested", context)
    with pytest.raises(rp.PostError, match=f"cannot fit a queue of max_send_wr={depth}") as caught:
        pair.a.post_send(wrs)
    assert caught.value.posted == depth
    assert [wc.wr_id for wc in pair.wait(depth)] == list(range(depth))
    pair.a.post_send(wrs[depth:])
    assert [wc.wr_id for wc in pair.wait(3)] == [depth, depth + 1, depth + 2]


def test_unchecked_full_queue_is_left_to_the_device(unchecked):
    """In its own words, when it decides, and also ENOMEM."""
    qp = unchecked.qp()
    qp.post_recv([rp.RecvWR()] * qp.max_recv_wr)
    with pytest.raises(rp.PostError) as caught:
        qp.post_recv(rp.RecvWR())
    assert caught.value.errno == errno.ENOMEM
    assert "soft0 says that the queue is full" in caught.value.reason
    with qp.prepare(rp.Send()) as batch:
        for _ in range(qp.max_send_wr):
            batch.post()
        with pytest.raises(rp.PostError) as caught:
            batch.post()
    assert caught.value.errno == errno.ENOMEM
    assert "soft0 says that the queue is full" in caught.value.reason
