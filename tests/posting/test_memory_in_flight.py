"""Memory of posted work requests: it lives, and its region stays open, until the completion."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
from support import ALL, nothing_comes, watching

import rdmapost as rp
from rdmapost import QPState, QPType

watched = watching.watched


def test_region_in_flight_cannot_be_closed(rc):
    """The error names the work requests, by the caller's wr_id."""
    with rp.MR(rc.pd, 64, ALL) as mr:
        rc.b.post_recv([rp.RecvWR(mr[:8], wr_id=i) for i in (71, 72)])
        with pytest.raises(rp.InUseError, match=r"2 outstanding work requests .*wr_id 71, 72\)"):
            mr.close()
        assert not mr.closed
        rc.a.post_send([rp.Send(rc.mine[:8]), rp.Send(rc.mine[:8])])
        rc.wait(4)
    assert mr.closed


@pytest.mark.parametrize("error", [rp.InUseError, LookupError])
def test_region_closes_if_its_last_completion_is_polled_while_its_close_is_being_refused(rc, error):
    """Another exception, as of a signal handler, comes out all the same."""

    class Region(rp.MR):
        def _refuse_posted(self) -> None:
            try:
                super()._refuse_posted()
            except rp.InUseError as refused:
                rc.wait(2)
                raise refused if error is rp.InUseError else error from None

    mr = Region(rc.pd, 64, ALL)
    rc.b.post_recv(rp.RecvWR(mr[:8]))
    rc.a.post_send(rp.Send(rc.mine[:8]))
    with contextlib.nullcontext() if error is rp.InUseError else pytest.raises(error):
        mr.close()
    assert mr.closed is (error is rp.InUseError)
    mr.close()


def test_refused_close_of_a_region_lists_only_a_few_of_many_work_requests(rc):
    mr = rp.MR(rc.pd, 64, ALL)
    rc.b.post_recv([rp.RecvWR(mr[:8], wr_id=i) for i in range(10)])
    with pytest.raises(rp.InUseError, match=r"10 outstanding .*\(wr_id 0, 1, 2, 3, \.\.\.\)"):
        mr.close()
    rc.b.close()
    mr.close()


def test_unsignaled_work_request_keeps_its_region(rc):
    """It is not known to be done until a later one completes."""
    mr = rp.MR(rc.pd, 64)
    rc.a.post_send(rc.wr(rp.RdmaWrite, mr[:8], wr_id=5, send_flags=0))
    with pytest.raises(rp.InUseError, match="wr_id 5"):
        mr.close()
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    rc.wait()
    mr.close()


def test_memory_of_a_posted_work_request_lives_until_its_completion(rc):
    """The user has dropped every reference, and the device still writes there."""
    mr = rp.MR(rc.pd, bytearray(64), ALL)
    ref = weakref.ref(mr)
    rc.b.post_recv(rp.RecvWR(mr[:8], wr_id=1))
    view = mr.buffer
    del mr
    gc.collect()
    assert ref() is not None
    rc.mine.buffer[:4] = b"late"
    rc.a.post_send(rp.Send(rc.mine[:4]))
    rc.wait(2)
    gc.collect()
    assert ref() is None
    # The region is closed, and its memory back with its owner.
    with pytest.raises(ValueError, match="released"):
        bytes(view)


def test_dropped_queue_pair_releases_the_memory_of_its_work_requests(pd, cq):
    mr = rp.MR(pd, 64)
    qp = rp.QP(pd, QPType.RC, cq)
    qp.to_init()
    qp.post_recv(rp.RecvWR(mr[:8]))
    del qp
    gc.collect()
    mr.close()


@pytest.mark.parametrize("inline", [False, True], ids=["by reference", "inline"])
def test_buffer_belongs_to_the_device_until_the_completion(connect, inline):
    """What is written there before that may be sent; inline data was copied when posted."""
    pair = connect(to=QPState.RESET, max_inline_data=16)
    pair.a.connect(pair.b.endpoint(), rnr_retry=7)
    pair.b.connect(pair.a.endpoint())
    flags = rp.SendFlags.SIGNALED | (rp.SendFlags.INLINE if inline else 0)
    pair.mine.buffer[:6] = b"before"
    pair.a.post_send(rp.Send(pair.mine[:6], send_flags=flags))
    # Nothing receives it yet, so it is retried.
    nothing_comes(pair.cq)
    pair.mine.buffer[:6] = b"after!"
    # A packet with the old bytes may be on its way: it is refused, too.
    nothing_comes(pair.cq)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:6]))
    pair.wait(2)
    assert bytes(pair.theirs.buffer[:6]) == (b"before" if inline else b"after!")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_every_region_of_a_work_request_is_in_use_until_it_is_done(watched, count):
    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(rp.MR(watched.pd, 64, ALL)) for _ in range(count)]
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=count)
        )
        qp.to_init()
        qp.post_recv(rp.RecvWR([mr[:4] for mr in regions]))
        for mr in regions:
            with pytest.raises(
                rp.InUseError, match=r"1 outstanding work request .* its completion,"
            ):
                mr.close()
        qp.to_reset()


@pytest.mark.parametrize("as_list", [False, True], ids=["posts", "list"])
def test_work_requests_with_the_same_regions_each_hold_them(connect, as_list):
    """Two hold the same regions; the others, some of these, and more."""
    pair = connect(max_recv_sge=4)
    a, b, c, d = (rp.MR(pair.pd, 64, ALL) for _ in range(4))
    held: list[tuple[rp.MR, ...]] = [(a, b), (a, b), (a, c), (a, c, b), (d, b), (a, d), (b,)]
    held += [(b, a), (c, d), (a, b, c, d), (c, d), (a, b)]
    wrs = [rp.RecvWR([mr[:2] for mr in regions]) for regions in held]
    if as_list:
        pair.b.post_recv(wrs)
    for wr in () if as_list else wrs:
        pair.b.post_recv(wr)
    while held:
        for mr in {mr for regions in held for mr in regions}:
            count = sum(mr in regions for regions in held)
            with pytest.raises(rp.InUseError, match=f"{count} outstanding work request"):
                mr.close()
        pair.a.post_send(rp.Send(pair.mine[:2]))
        pair.wait(2)
        done = held.pop(0)
        for mr in set(done).difference(*held):
            mr.close()


def test_region_of_a_post_is_held_whatever_reading_its_numbers_runs(watched):
    """What is held so far is a tuple, which the collector exposes to anyone; it is kept here."""
    kept: list[Any] = []

    class Address:
        def __init__(self, number: int) -> None:
            self.number = number

        def __index__(self) -> int:
            kept.append([found for found in gc.get_objects() if type(found) is tuple])
            return self.number

    with contextlib.ExitStack() as stack:
        regions = [stack.enter_context(rp.MR(watched.pd, 64, ALL)) for _ in range(7)]
        qp = stack.enter_context(
            rp.QP(watched.pd, QPType.RC, watched.cq, checked=watched.checked, max_recv_sge=7)
        )
        qp.to_init()
        qp.post_recv(
            rp.RecvWR([rp.SGE(Address(mr.addr), 8, mr.lkey, mr) for mr in regions], wr_id=3)  # type: ignore[arg-type]
        )
        assert len(kept) == 7
        for mr in regions:
            with pytest.raises(rp.InUseError, match="wr_id 3"):
                mr.close()
        qp.to_reset()
