"""SRQ.modify: how many receives a shared receive queue holds, and its limit."""

from __future__ import annotations

import threading

import pytest
from support import interrupt_everywhere, needs, null_device

import rdmapost as rp

null = null_device.null
on_null = null_device.on_null


@pytest.fixture
def resizes(context):
    needs(context.attr.max_srq, "shared receive queues", context)
    needs(context.attr.device_cap_flags & rp.DeviceCap.SRQ_RESIZE, "SRQ_RESIZE", context)


@pytest.fixture
def srq(resizes, pd, stack):
    return stack.enter_context(rp.SRQ(pd, max_wr=32))


@pytest.mark.usefixtures("resizes")
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_resized_srq_takes_more_receives_and_keeps_those_posted(connect, stack, pd, checked):
    """Messages use all of them, in the order in which they were posted."""
    srq = stack.enter_context(rp.SRQ(pd, max_wr=32, checked=checked))
    before = srq.max_wr
    pair = connect(b_options={"srq": srq})
    srq.post_srq_recv([rp.RecvWR(pair.theirs[:8], wr_id=n) for n in range(before)])
    srq.modify(max_wr=before + 40)
    assert srq.max_wr >= before + 40
    assert srq.query().max_wr == srq.max_wr
    assert str(srq) == f"SRQ of {srq.max_wr} work requests"
    total = before + 40
    srq.post_srq_recv([rp.RecvWR(pair.theirs[:8], wr_id=n) for n in range(before, total)])
    assert srq.outstanding == total
    found: list[int] = []
    for _ in range(total):
        pair.a.post_send(rp.Send(pair.mine[:8], wr_id=9999))
        found += [wc.wr_id for wc in pair.wait(2) if wc.wr_id != 9999]
    assert found == [*range(total)]


def test_srq_made_smaller_refuses_receives_earlier(srq):
    before = srq.max_wr
    srq.modify(max_wr=8)
    size = srq.max_wr
    assert 8 <= size < before
    srq.post_srq_recv([rp.RecvWR(wr_id=n) for n in range(size)])
    with pytest.raises(rp.PostError, match=f"the queue is full: max_wr={size}"):
        srq.post_srq_recv(rp.RecvWR())
    assert srq.outstanding == size


def test_srq_is_not_made_smaller_than_what_is_posted(srq):
    before = srq.query()
    srq.post_srq_recv([rp.RecvWR(wr_id=n) for n in range(20)])
    words = "ibv_modify_srq: EINVAL .*: max_wr=10 is less than the 20 receives that are posted"
    with pytest.raises(rp.VerbsError, match=words):
        srq.modify(max_wr=10)
    assert srq.query() == before
    # Older kernels grant more than the creation says.
    assert (srq.max_wr, srq.outstanding) == (before.max_wr, 20)
    srq.post_srq_recv([rp.RecvWR()] * (before.max_wr - 20))


def test_srq_can_be_made_as_small_as_what_is_posted(srq):
    srq.post_srq_recv([rp.RecvWR(wr_id=n) for n in range(20)])
    srq.modify(max_wr=20)
    srq.post_srq_recv([rp.RecvWR()] * (srq.max_wr - 20))
    assert srq.outstanding == srq.max_wr


def test_srq_size_above_the_devices_limit_is_refused_and_named(context, srq):
    limit = context.attr.max_srq_wr
    words = rf"max_wr={limit + 1} is more than the device's max_srq_wr={limit}$"
    with pytest.raises(rp.VerbsError, match=words):
        srq.modify(max_wr=limit + 1)
    assert srq.query().max_wr == srq.max_wr


def test_srq_size_of_0_is_refused_with_the_range(context, srq):
    with pytest.raises(rp.VerbsError, match=rf"max_wr=0 is not in 1..{context.attr.max_srq_wr}$"):
        srq.modify(max_wr=0)
    assert srq.query().max_wr == srq.max_wr


def test_srq_limit_and_max_wr_change_together_and_bound_each_other(srq):
    """One call changes both, and the limit is never more than the size."""
    srq.modify(max_wr=64, srq_limit=8)
    assert srq.query() == rp.SRQAttr(srq.max_wr, srq.max_sge, 8)
    srq.modify(srq_limit=4)
    assert srq.query().srq_limit == 4
    with pytest.raises(rp.VerbsError, match=r"srq_limit=100000 is more than max_wr=\d+"):
        srq.modify(srq_limit=100_000)
    srq.modify(srq_limit=30)
    with pytest.raises(rp.VerbsError, match="max_wr=16 is less than the armed srq_limit=30"):
        srq.modify(max_wr=16)
    # Soft-RoCE compares with the limit that is armed.
    srq.modify(srq_limit=0)
    srq.modify(max_wr=16)
    assert srq.query().srq_limit == 0


def test_srq_modify_names_wrong_arguments(srq):
    with pytest.raises(ValueError, match=r"^pass max_wr, srq_limit or both$"):
        srq.modify()
    for name in ("max_wr", "srq_limit"):
        for wrong in (-1, 1 << 32):
            with pytest.raises(ValueError, match=rf"^{name}={wrong} is not in 0\.\.2\^32-1$"):
                srq.modify(**{name: wrong})
        with pytest.raises(TypeError, match=f"^{name}: expected int, got float$"):
            srq.modify(**{name: 4.0})
    srq.close()
    with pytest.raises(rp.ClosedError, match="is closed"):
        srq.modify(max_wr=8)


def test_srq_size_is_the_devices_after_two_threads_have_modified_it(resizes, pd):
    """The second modifies it while the first is about to note the size that it got."""

    class Contested(rp.SRQ):
        others = 1

        def query(self):
            found = super().query()
            if self.others:
                Contested.others = 0
                other = threading.Thread(target=self.modify, kwargs={"max_wr": 1000})
                other.start()
                other.join(20)
            return found

    with rp.MR(pd, 64) as mr, Contested(pd, 64) as srq:
        srq.modify(max_wr=10)
        assert Contested.others == 0
        assert srq.max_wr >= 1000
        srq.post_srq_recv([rp.RecvWR(mr[:8])] * 1000)
        assert srq.outstanding == 1000


def test_interrupted_srq_resize_leaves_the_size_that_the_srq_has(soft):
    with rp.open_device(soft) as context, rp.PD(context) as pd, rp.SRQ(pd, 16) as srq:

        def resize() -> None:
            srq.modify(max_wr=48 - srq.max_wr)

        assert interrupt_everywhere(resize)
        assert srq.max_wr in (16, 32)
        assert srq.query().max_wr == srq.max_wr
        srq.post_srq_recv([rp.RecvWR()] * srq.max_wr)
        with pytest.raises(rp.PostError, match=f"the queue is full: max_wr={srq.max_wr}"):
            srq.post_srq_recv(rp.RecvWR())


@pytest.mark.usefixtures("resizes")
@pytest.mark.parametrize("name", ["max_wr", "max_sge"])
def test_srq_limit_of_the_device_that_creation_exceeds_is_named(context, pd, name):
    limit = getattr(context.attr, name.replace("max_", "max_srq_"))
    words = rf"^ibv_create_srq: E\w+ .*: {name}={limit + 1} is more than the device's \w+={limit}$"
    with pytest.raises(rp.VerbsError, match=words):
        rp.SRQ(pd, **{name: limit + 1})


def test_srq_refused_within_all_limits_says_how_many_there_may_be(on_null):
    said = on_null(
        """
        context, pd, cq = resources()
        print(said(lambda: rp.SRQ(pd)))
        """,
        NULL_REFUSES="ibv_create_srq=12",
    )
    assert said.startswith("VerbsError: ibv_create_srq: ENOMEM (12, ")
    assert "null0 may have no more SRQs (max_srq=" in said
    assert said.endswith("see 'rdmapost explain ENOMEM'")
    said = on_null(
        """
        context = rp.open_device("null0")
        print(said(lambda: rp.CQ(context)))
        """,
        NULL_REFUSES="ibv_create_cq=22",
    )
    assert "null0 may have no more CQs (max_cq=" in said
