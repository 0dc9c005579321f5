"""Resident memory: posting, opening and closing leave it where it was."""

from __future__ import annotations

import contextlib
import gc

from support import ALL, resident, watching

import rdmapost as rp
from rdmapost import QPType

watched = watching.watched


def least_growth(work) -> int:
    """Return by how many bytes this process grows, in the best of three runs of the same.

    What leaks does so in each; what other tests have left for later comes once.
    """
    grown = []
    while len(grown) < 3 and min(grown, default=1 << 20) >= 1 << 20:
        gc.collect()
        before = resident()
        work()
        gc.collect()
        grown.append(resident() - before)
    return min(grown)


def test_200_000_posts_leave_resident_memory_where_it_was(connect):
    pair = connect(QPType.UC, max_send_wr=256)
    # With more than 64 on their way, a requester of Soft-RoCE now and then sleeps until the next
    # post: the last packet may arrive just before it asks to be woken.
    batch = 50
    signaled = int(rp.SendFlags.SIGNALED)
    wrs = [
        pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i, send_flags=signaled * (i == batch - 1))
        for i in range(batch)
    ]

    def post(lists: int) -> None:
        for _ in range(lists):
            pair.a.post_send(wrs)
            pair.wait()

    post(200)
    grown = least_growth(lambda: post(200_000 // batch))
    assert pair.a.outstanding == (0, 0)
    assert grown < 1 << 20, f"{grown} bytes more after 200,000 posts"


def test_opening_and_closing_leaves_resident_memory_where_it_was(connect):
    pair = connect()

    def cycle(count: int) -> None:
        for _ in range(count):
            with rp.MR(pair.pd, bytearray(4096)) as mr, rp.QP(pair.pd, QPType.RC, pair.cq) as qp:
                qp.to_init()
                qp.post_recv(rp.RecvWR(mr[:8]))
                qp.close()

    cycle(20)
    assert least_growth(lambda: cycle(200)) < 1 << 20
    assert len(pair.pd.context._queues) == 4


def test_polling_many_queue_pairs_leaves_resident_memory_where_it_was(context, pd, cq):
    """A CQ remembers the one whose completion it has polled last."""
    wrs = [rp.RdmaWrite(send_flags=0)] * 255 + [rp.RdmaWrite()]

    def cycle(count: int) -> None:
        for _ in range(count):
            with rp.QP(pd, QPType.RC, cq, max_send_wr=256) as qp:
                qp.connect(qp.endpoint())
                qp.post_send(wrs)
                cq.wait()[0].check()

    cycle(20)
    assert least_growth(lambda: cycle(150)) < 1 << 20


def test_work_requests_of_many_regions_leave_resident_memory_where_it_was(watched):
    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(rp.MR(watched.pd, 64, ALL)) for _ in range(12)]
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=12)
        )
        qp.to_init()
        receive = rp.RecvWR([mr[:4] for mr in regions])

        def post(times: int) -> None:
            for _ in range(times):
                qp.post_recv(receive)
                qp.to_reset()
                qp.to_init()
                watched.tap.chains.clear()

        post(200)
        before = resident()
        post(8_000)
        assert resident() - before < 1 << 20
