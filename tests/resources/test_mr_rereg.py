"""MR.rereg: a region registered again, over other memory, with other access, in another PD."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import signal
import threading
import typing
import weakref
from array import array

import pytest
from support import ALL, LIMIT, needs, null_device, prints, until
from support.threads import thread
from support.windows import bind_wr

import rdmapost as rp
from rdmapost import Access, MWType, WCStatus
from rdmapost.resources.device import invalidated_of

null = null_device.null
on_null = null_device.on_null


@contextlib.contextmanager
def _or_unsupported(context, *regions):
    """Skip a test where the device cannot do this, with its regions closed."""
    refused = ""
    try:
        yield
    except rp.UnsupportedError as error:
        refused = str(error)
    if refused:
        assert context.name != "soft0"
        assert refused.startswith(
            f"ibv_rereg_mr is not supported: the driver of {context.name} does not have it"
        )
        for region in regions:
            region.close()
        pytest.skip(f"{context.name}: {refused}")


def _write(rc, mr, data=b"8 bytes!"):
    """Write to the start of a region, and return the status."""
    rc.mine.buffer[: len(data)] = data
    rc.a.post_send(rp.RdmaWrite(rc.mine[: len(data)], remote_addr=mr.addr, rkey=mr.rkey))
    return rc.cq.wait()[0].status


def test_rereg_moves_a_region_to_other_memory(rc):
    old, new = bytearray(64), bytearray(128)
    with rp.MR(rc.pd, old, ALL) as mr:
        with _or_unsupported(rc.pd.context):
            mr.rereg(memory=new)
        assert (mr.length, len(mr), mr.buffer.nbytes, mr.end - mr.addr) == (128,) * 4
        assert mr.access == ALL
        assert _write(rc, mr) is WCStatus.SUCCESS
        assert (new[:8], old) == (b"8 bytes!", bytes(64))
        rc.b.post_recv(rp.RecvWR(mr[64:]))
        rc.a.post_send(rp.Send(rc.mine[:8]))
        rc.wait(2)
        assert new[64:72] == b"8 bytes!"
        old.append(1)
        with pytest.raises(BufferError):
            new.append(1)
    new.append(1)


def test_rereg_may_move_a_region_to_memory_of_another_kind(rc):
    with rp.MR(rc.pd, bytearray(64), ALL) as mr:
        with _or_unsupported(rc.pd.context):
            mr.rereg(memory=4096)
        assert _write(rc, mr) is WCStatus.SUCCESS
        assert mr.buffer[:8] == b"8 bytes!"
        mr.rereg(memory=b"8 bytes!", access=Access.REMOTE_READ)
        assert mr.buffer.readonly
        rc.a.post_send(rp.RdmaRead(rc.mine[8:16], remote_addr=mr.addr, rkey=mr.rkey))
        rc.wait()
        assert rc.mine.buffer[8:16] == b"8 bytes!"


def test_rereg_of_the_access_changes_nothing_else(rc):
    with rp.MR(rc.pd, 64, Access.LOCAL_WRITE) as mr:
        addr, buffer = mr.addr, mr.buffer
        with _or_unsupported(rc.pd.context):
            mr.rereg(access=ALL)
        assert (mr.addr, mr.length, mr.access, mr.writable) == (addr, 64, ALL, True)
        assert mr.buffer is buffer
        assert _write(rc, mr) is WCStatus.SUCCESS
        mr.rereg(access=0)
        with pytest.raises(rp.PostError, match="registered without LOCAL_WRITE"):
            rc.b.post_recv(rp.RecvWR(mr[:]))
        assert _write(rc, mr) is WCStatus.REM_ACCESS_ERR


def test_rereg_moves_a_region_to_another_pd(rc):
    with rp.PD(rc.pd.context) as other, contextlib.ExitStack() as stack:
        mr = stack.enter_context(rp.MR(rc.pd, 64, ALL))
        with _or_unsupported(rc.pd.context):
            mr.rereg(pd=other)
        assert mr.pd is other
        with pytest.raises(rp.PostError, match="does not belong to the queue's PD"):
            rc.a.post_send(rp.Send(mr[:8]))
        with pytest.raises(rp.InUseError, match=r"PD cannot be closed: MR of 64 bytes"):
            other.close()
        assert _write(rc, mr) is WCStatus.REM_ACCESS_ERR


def test_pd_that_a_region_has_left_can_be_closed(context):
    with rp.PD(context) as there, rp.PD(context) as here:
        mr = rp.MR(here, 64)
        try:
            with _or_unsupported(context):
                mr.rereg(pd=there)
            here.close()
        finally:
            mr.close()


def test_rereg_with_new_access_does_not_make_a_read_only_buffer_writable(pd):
    with rp.MR(pd, b"8 bytes!", 0) as mr:
        with pytest.raises(TypeError, match="cannot have LOCAL_WRITE: its memory is read-only"):
            mr.rereg(access=Access.LOCAL_WRITE)
        with pytest.raises(TypeError, match="it is read-only"):
            mr.rereg(access=Access.LOCAL_WRITE, memory=b"others")
        assert mr.buffer == b"8 bytes!"


def test_rereg_with_new_access_does_not_make_a_read_only_array_writable(pd):
    """Nor does one that has no buffer in Python, whose interface says that it is."""
    memory = bytearray(64)

    class Array:
        __cuda_array_interface__: typing.ClassVar = {
            "shape": (64,),
            "typestr": "|u1",
            "data": (ctypes.addressof(ctypes.c_char.from_buffer(memory)), True),
            "version": 3,
        }

    with rp.MR(pd, Array(), 0) as mr:
        with _or_unsupported(pd.context):
            mr.rereg(access=Access.REMOTE_READ)
        with pytest.raises(TypeError, match="cannot have LOCAL_WRITE: its memory is read-only"):
            mr.rereg(access=Access.LOCAL_WRITE)
        mr.rereg(memory=64, access=Access.LOCAL_WRITE)
        assert mr.writable


def test_wrong_arguments_of_rereg_are_refused_and_the_region_is_as_it_was(pd, stack):
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    other = stack.enter_context(rp.open_device(pd.context.name))
    foreign = stack.enter_context(rp.PD(other))
    for call, error, text in (
        (lambda: mr.rereg(), ValueError, r"rereg\(\) needs memory, access or pd"),
        (lambda: mr.rereg(pd=4), TypeError, "pd: expected PD or None, got int"),
        (lambda: mr.rereg(pd=foreign), ValueError, "a PD of the same open device"),
        (lambda: mr.rereg(access=1 << 40), ValueError, "is not a combination of Access flags"),
        (lambda: mr.rereg(access=2), ValueError, "REMOTE_WRITE needs LOCAL_WRITE too"),
        (lambda: mr.rereg(memory=0), ValueError, "a region needs at least 1 byte"),
        (lambda: mr.rereg(memory="x"), TypeError, "needs a writable buffer, not str"),
        (lambda: mr.rereg(access=ALL | Access.ZERO_BASED), ValueError, "ZERO_BASED"),
    ):
        with pytest.raises(error, match=text):
            call()
    assert (mr.access, mr.length, mr.pd) == (ALL, 64, pd)


def test_zero_based_region_registered_again_in_place_stays_zero_based(pd):
    needs(pd.context.kind == "soft", "ZERO_BASED", pd.context)
    with rp.MR(pd, 64, ALL | Access.ZERO_BASED) as mr:
        for changes in ({"memory": 64}, {"access": ALL}):
            with pytest.raises(ValueError, match="ZERO_BASED"):
                mr.rereg(**changes)
        mr.rereg(access=Access.LOCAL_WRITE | Access.ZERO_BASED)
        assert (mr.addr, mr.access) == (0, Access.LOCAL_WRITE | Access.ZERO_BASED)


def test_closed_region_is_not_registered_again(pd):
    mr = rp.MR(pd, 64)
    mr.close()
    memory = bytearray(64)
    with pytest.raises(rp.ClosedError, match=r"MR of 64 bytes .* is closed"):
        mr.rereg(memory=memory)
    memory.append(1)


def test_region_is_not_registered_again_while_a_work_request_names_it(rc):
    new = bytearray(64)
    with rp.MR(rc.pd, 64, ALL) as mr:
        key = mr.lkey
        rc.b.post_recv(rp.RecvWR(mr[:], wr_id=7))
        with pytest.raises(rp.InUseError, match=r"cannot be registered again: in use by 1 .*_id 7"):
            mr.rereg(memory=new)
        new.append(1)
        assert (mr.lkey, mr.length) == (key, 64)
        rc.a.post_send(rp.Send(rc.mine[:8]))
        rc.wait(2)
        with _or_unsupported(rc.pd.context):
            mr.rereg(memory=new)


def test_region_is_not_registered_again_while_it_is_prepared(rc):
    with rp.MR(rc.pd, 64, ALL) as mr:
        batch = rc.a.prepare([rp.Send(mr[:8])])
        with pytest.raises(rp.InUseError, match=r"be registered again: .* still open"):
            mr.rereg(memory=64)
        batch.close()
        with _or_unsupported(rc.pd.context):
            mr.rereg(memory=64)


def test_region_is_not_registered_again_while_a_window_is_bound_to_it(rc):
    with contextlib.ExitStack() as stack:
        mr = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
        try:
            mw = stack.enter_context(rp.MW(rc.pd, MWType.TYPE_2))
        except rp.UnsupportedError:
            pytest.skip("no memory windows")
        rc.a.post_send(bind_wr(mw, mr, Access.REMOTE_READ))
        rc.wait()
        with pytest.raises(rp.InUseError, match=r"again: MW .* bound to it; unbind or close it"):
            mr.rereg(memory=64)
        mw.close()
        with _or_unsupported(rc.pd.context):
            mr.rereg(memory=64)


def test_sge_of_memory_that_a_region_has_left_reaches_nothing(rc):
    """Its address is refused if the region is elsewhere, and its key is no key any more."""
    with rp.MR(rc.pd, 4096, ALL) as mr:
        sge, rkey, addr = mr[:8], mr.rkey, mr.addr
        with _or_unsupported(rc.pd.context):
            mr.rereg(memory=4096)
        if addr != mr.addr:
            with pytest.raises(rp.PostError, match="lies outside"):
                rc.a.post_send(rp.Send(sge))
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=addr, rkey=rkey))
        assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize(
    ("code", "number", "said"),
    [
        (-1, errno.EINVAL, "ibv_rereg_mr: EINVAL"),
        (-1, errno.EPERM, "ibv_rereg_mr: EPERM"),
        (-2, errno.ENOMEM, "ibv_rereg_mr: ENOMEM"),
        (-1, 0, "ibv_rereg_mr: EIO"),
        (-4, errno.ENOSYS, "ibv_rereg_mr is not supported"),
        (-4, errno.EOPNOTSUPP, "ibv_rereg_mr is not supported"),
    ],
)
def test_rereg_that_the_device_refuses_leaves_the_region_as_it_was(
    rc, monkeypatch, code, number, said
):
    _refuse(monkeypatch, rc.pd.context, code, number)
    memory, new = bytearray(64), bytearray(64)
    with rp.MR(rc.pd, memory, ALL) as mr:
        with pytest.raises(rp.VerbsError, match=said):
            mr.rereg(memory=new)
        new.append(1)
        assert _write(rc, mr) is WCStatus.SUCCESS
        assert memory[:8] == b"8 bytes!"


def test_exception_in_the_device_leaves_the_region_as_it_was(pd, monkeypatch):
    from rdmapost.resources.device import provider_of

    def fail(*_):
        raise ZeroDivisionError

    for name in ("rereg_mr", "rereg_mr_at"):
        monkeypatch.setattr(type(provider_of(pd.context)), name, staticmethod(fail))
    memory, new = bytearray(64), bytearray(128)
    with rp.MR(pd, memory, ALL) as mr:
        with pytest.raises(ZeroDivisionError):
            mr.rereg(memory=new)
        new.append(1)
        assert mr.length == 64
        with pytest.raises(BufferError):
            memory.append(1)


@pytest.fixture
def windowed(rc, context, stack):
    """A window of type 2 that b has bound to a region."""
    needs(context.kind == "soft", "ibv_rereg_mr and WITH_INV in completions", context)
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    mw = stack.enter_context(rp.MW(rc.pd))
    _bind(rc, mw, region)
    return mw, region


def _bind(rc, mw, region, rkey=None, **fields):
    rkey = mw.next_rkey() if rkey is None else rkey
    wr = rp.BindMW(mw=mw, rkey=rkey, mr=region, addr=region.addr, length=64, **fields)
    rc.b.post_send(wr)
    rc.wait(1)


def _refused(mw, region):
    """Whether the region cannot be registered again, because of the window."""
    try:
        region.rereg(access=ALL | Access.MW_BIND)
    except rp.InUseError as error:
        refused = str(error)
    else:
        return False
    assert f"{mw} bound to it; unbind or close it first" in refused
    return True


def _by_peer(rc, mw):
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8]))
    rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=mw.rkey))


def _by_itself(rc, mw):
    rc.b.post_send(rp.LocalInv(invalidate_rkey=mw.rkey))


def _from_a_list(rc, mw):
    """The key is another one by the time that the list is posted."""
    write = rp.RdmaWrite(rc.theirs[:8], remote_addr=rc.mine.addr, rkey=rc.mine.rkey, send_flags=0)
    batch = rc.b.prepare([write, rp.LocalInv(invalidate_rkey=1, wr_id=7), write])
    batch[1].invalidate_rkey = mw.rkey
    batch.post()
    batch[1].invalidate_rkey = 1
    batch.close()


def _from_columns(rc, mw):
    """A row without a completion of its own, among some that invalidate other windows."""
    with contextlib.ExitStack() as stack:
        region = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
        others = [stack.enter_context(rp.MW(rc.pd)) for _ in range(3)]
        for other in others:
            _bind(rc, other, region)
        keys = array("I", [others[0].rkey, mw.rkey, others[1].rkey, others[2].rkey])
        assert rc.b.post_columns(rp.LocalInv, invalidate_rkey=keys, signal_every=3) == len(keys)


@pytest.mark.parametrize(
    ("invalidate", "completions"),
    [(_by_peer, 2), (_by_itself, 1), (_from_a_list, 1), (_from_columns, 2)],
)
@pytest.mark.parametrize("as_rows", [False, True], ids=["wait", "wait_into"])
def test_region_of_an_invalidated_window_is_registered_again(
    rc, windowed, invalidate, completions, as_rows
):
    """By either side; once that completion is polled."""
    mw, region = windowed
    assert _refused(mw, region)
    invalidate(rc, mw)
    assert _refused(mw, region)
    if as_rows:
        assert rc.cq.wait_into(bytearray(48 * completions), completions, 10) == completions
    else:
        rc.wait(completions)
    assert not _refused(mw, region)
    # The same key, with a low byte that the window has had before, opens it again.
    _bind(rc, mw, region, mw.rkey)
    assert _refused(mw, region)


@pytest.mark.parametrize(("invalidate", "completions"), [(_by_peer, 2), (_by_itself, 1)])
@pytest.mark.parametrize("verb", ["close", "rereg"])
def test_refused_rereg_names_only_the_windows_that_are_bound(
    rc, stack, windowed, invalidate, completions, verb
):
    unbound, region = windowed
    bound = stack.enter_context(rp.MW(rc.pd))
    _bind(rc, bound, region)
    invalidate(rc, unbound)
    rc.wait(completions)
    with pytest.raises(rp.InUseError, match="unbind or close it first") as caught:
        region.close() if verb == "close" else region.rereg(access=region.access)
    assert str(bound) in str(caught.value)
    assert str(unbound) not in str(caught.value)


@pytest.mark.parametrize("how", ["prepare", "post_columns"])
def test_window_bound_again_after_a_list_that_invalidates_it_is_bound(rc, windowed, how):
    """Each post of a list counts from its own time on."""
    mw, region = windowed
    key = mw.rkey
    if how == "prepare":
        rc.b.prepare(rp.LocalInv(invalidate_rkey=key, send_flags=0)).post()
    else:
        rc.b.post_columns(rp.LocalInv, invalidate_rkey=array("I", [key]), signal_every=2)
    _bind(rc, mw, region, key)
    rc.cq.poll()
    assert _refused(mw, region)


@pytest.mark.parametrize("how", ["prepare", "post_columns"])
def test_invalidations_that_the_device_does_not_take_leave_their_windows_bound(
    rc, context, stack, how
):
    """The others have not happened; each completion has its wr_id."""
    needs(context.kind == "soft", "faults", context)
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    windows = [stack.enter_context(rp.MW(rc.pd)) for _ in range(4)]
    for mw in windows:
        _bind(rc, mw, region)
    keys = [mw.rkey for mw in windows]
    context.faults.fail_post(errno.EPERM, after=3)
    wrs = [rp.LocalInv(invalidate_rkey=key, wr_id=i) for i, key in enumerate(keys)]
    columns = {"invalidate_rkey": array("I", keys), "wr_id": array("q", range(4))}
    with pytest.raises(rp.PostError) as caught:
        rc.b.prepare(wrs).post() if how == "prepare" else rc.b.post_columns(rp.LocalInv, **columns)
    assert caught.value.posted == 3
    assert rc.b.outstanding.send == 3
    assert [(wc.wr_id, wc.status) for wc in rc.cq.wait(3)] == [
        (i, WCStatus.SUCCESS) for i in range(3)
    ]
    with pytest.raises(rp.InUseError) as refused:
        region.rereg(memory=64)
    assert [str(mw) in str(refused.value) for mw in windows] == [False, False, False, True]
    rc.b.post_send(rp.LocalInv(invalidate_rkey=keys[3], wr_id=9))
    assert rc.cq.wait()[0].wr_id == 9
    region.rereg(memory=64)


def test_window_bound_again_with_the_same_key_before_the_completion_is_bound(rc, windowed):
    mw, region = windowed
    key = mw.rkey
    rc.b.post_send(rp.LocalInv(invalidate_rkey=key, send_flags=0))
    _bind(rc, mw, region, key)
    assert _refused(mw, region)


@pytest.mark.parametrize("first", ["bind", "invalidation"])
def test_window_bound_again_with_its_key_before_the_peers_invalidation_is_polled_is_bound(
    rc, windowed, context, stack, first
):
    """That completion is of the earlier bind, whenever it is polled."""
    _, region = windowed
    later = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    cq, others = stack.enter_context(rp.CQ(context)), stack.enter_context(rp.CQ(context))
    a = stack.enter_context(rp.QP(rc.pd, rp.QPType.RC, others))
    b = stack.enter_context(rp.QP(rc.pd, rp.QPType.RC, cq, recv_cq=others))
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mw = stack.enter_context(rp.MW(rc.pd))
    key = mw.next_rkey()
    b.post_send(rp.BindMW(mw=mw, rkey=key, mr=region, addr=region.addr, length=64))
    cq.wait(1)[0].check()
    b.post_recv(rp.RecvWR(rc.theirs[:8]))
    a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=key))
    b.post_send(rp.BindMW(mw=mw, rkey=key, mr=later, addr=later.addr, length=64))
    for polled, count in [(cq, 1), (others, 2)] if first == "bind" else [(others, 2), (cq, 1)]:
        for wc in polled.wait(count, timeout=5):
            wc.check()
    assert _refused(mw, later)
    b.post_send(rp.LocalInv(invalidate_rkey=key))
    cq.wait(1)[0].check()
    assert not _refused(mw, later)


@pytest.mark.parametrize("by_peer", [False, True])
def test_invalidation_does_not_end_the_bind_that_another_queue_pair_executes_later(
    rc, connect, windowed, context, stack, by_peer
):
    """Binds of one window through two queue pairs are executed in any order."""
    _, region = windowed
    later = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    cq, others = stack.enter_context(rp.CQ(context)), stack.enter_context(rp.CQ(context))
    a, b = (stack.enter_context(rp.QP(rc.pd, rp.QPType.RC, others, recv_cq=cq)) for _ in "ab")
    a.connect(b.endpoint())
    b.connect(a.endpoint())
    mw = stack.enter_context(rp.MW(rc.pd))
    key = mw.next_rkey()
    # Its bind waits behind a message for which the peer has no receive.
    waiting = connect(rnr_retry=7)
    waiting.a.post_send(rp.Send(rc.mine[:8]))
    waiting.a.post_send(rp.BindMW(mw=mw, rkey=key, mr=later, addr=later.addr, length=64))
    a.post_send(rp.BindMW(mw=mw, rkey=key, mr=region, addr=region.addr, length=64))
    others.wait(1)[0].check()
    if by_peer:
        a.post_recv(rp.RecvWR(rc.theirs[:8]))
        b.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=key))
        cq.wait(1)[0].check()
    else:
        a.post_send(rp.LocalInv(invalidate_rkey=key))
    others.wait(1)[0].check()
    waiting.b.post_recv(rp.RecvWR(rc.theirs[8:16]))
    rc.wait(3)
    assert _refused(mw, later)


def test_bind_that_fails_is_not_the_one_that_an_invalidation_ends(rc, windowed):
    """A later bind under the same key is, once that has succeeded."""
    mw, region = windowed
    key = mw.rkey
    rc.b.post_send(rp.BindMW(mw=mw, rkey=key, mr=region, addr=region.addr, length=64))
    assert rc.cq.wait(1)[0].status is WCStatus.MW_BIND_ERR
    assert _refused(mw, region)
    for qp, peer in [(rc.a, rc.b), (rc.b, rc.a)]:
        qp.to_reset()
        qp.connect(peer.endpoint())
    _by_itself(rc, mw)
    rc.wait(1)
    assert not _refused(mw, region)
    _bind(rc, mw, region, key)
    assert _refused(mw, region)
    _by_itself(rc, mw)
    rc.wait(1)
    assert not _refused(mw, region)


def test_each_bind_under_one_key_is_ended_by_the_invalidation_that_follows_it(
    rc, windowed, context, stack
):
    """Whichever queue pair the window is bound through, if its invalidation has been polled."""
    mw, region = windowed
    key = mw.rkey
    cq = stack.enter_context(rp.CQ(context))
    other = stack.enter_context(rp.QP(rc.pd, rp.QPType.RC, cq))
    other.connect(rc.a.endpoint())
    _by_itself(rc, mw)
    rc.wait(1)
    for qp, polled in [(other, cq), (rc.b, rc.cq)] * 2:
        assert not _refused(mw, region)
        qp.post_send(rp.BindMW(mw=mw, rkey=key, mr=region, addr=region.addr, length=64))
        polled.wait(1)[0].check()
        assert _refused(mw, region)
        qp.post_send(rp.LocalInv(invalidate_rkey=key))
        polled.wait(1)[0].check()
    assert not _refused(mw, region)


def test_invalidation_of_a_window_that_is_not_bound_does_not_end_a_later_bind(
    rc, windowed, context
):
    """The device says that it has succeeded."""
    mw, region = windowed
    key = mw.rkey
    _by_itself(rc, mw)
    rc.wait(1)
    for wr_id in (5, 6):
        context.faults.complete_with(wr_id, WCStatus.SUCCESS)
        rc.b.post_send(rp.LocalInv(invalidate_rkey=key, wr_id=wr_id))
        rc.wait(1)
    _bind(rc, mw, region, key)
    assert _refused(mw, region)
    _by_itself(rc, mw)
    rc.wait(1)
    assert not _refused(mw, region)


def test_bind_whose_failure_is_polled_after_an_invalidation_of_its_key_does_not_end_a_later_one(
    rc, windowed, context, stack
):
    """The device says that the window was invalidated, and then that it was never bound."""
    mw, region = windowed
    key = mw.rkey
    _by_itself(rc, mw)
    rc.wait(1)
    cq = stack.enter_context(rp.CQ(context))
    other = stack.enter_context(rp.QP(rc.pd, rp.QPType.RC, cq))
    other.connect(rc.a.endpoint())

    def bind(**fields):
        bound = {"mw": mw, "rkey": key, "mr": region, "addr": region.addr, "length": 64}
        other.post_send(rp.BindMW(**bound, **fields))

    context.faults.complete_with(5, WCStatus.MW_BIND_ERR)
    bind(wr_id=5)
    context.faults.complete_with(6, WCStatus.SUCCESS)
    rc.b.post_send(rp.LocalInv(invalidate_rkey=key, wr_id=6))
    rc.wait(1)
    assert cq.wait(1)[0].status is WCStatus.MW_BIND_ERR
    other.to_reset()
    other.connect(rc.a.endpoint())
    bind()
    cq.wait(1)[0].check()
    assert _refused(mw, region)


class Forged(rp.MW):
    """A window of type 2 whose constructor gives it other counts than MW does."""

    def __init__(self, pd, *counts):
        from rdmapost.resources.device import provider_of

        self.pd, self.mw_type = pd, MWType.TYPE_2
        provider = provider_of(pd.context)
        self._make(provider.alloc_mw, (pd, self.mw_type), provider.dealloc_mw, (pd,), *counts)


@pytest.mark.parametrize("counts", [(), (None,), (b"",), (bytearray(4096),), (bytes(4095),)])
def test_window_without_counts_counts_as_bound_until_it_is_closed(rc, context, counts):
    needs(context.kind == "soft", "ibv_rereg_mr", context)
    with rp.MR(rc.pd, 64, ALL | Access.MW_BIND) as region:
        with Forged(rc.pd, *counts) as mw:
            _bind(rc, mw, region)
            _by_itself(rc, mw)
            rc.wait(1)
            assert _refused(mw, region)
        region.rereg(access=ALL)


def test_bind_that_the_device_refuses_is_not_the_one_that_an_invalidation_ends(rc, context, stack):
    """A later bind under the same key is."""
    needs(context.kind == "soft", "faults", context)
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    mw = stack.enter_context(rp.MW(rc.pd))
    key = mw.next_rkey()
    context.faults.fail_post(errno.EPERM)
    with pytest.raises(rp.PostError):
        _bind(rc, mw, region, key)
    _bind(rc, mw, region, key)
    assert _refused(mw, region)
    _by_itself(rc, mw)
    rc.wait(1)
    assert not _refused(mw, region)


def test_unsignaled_invalidation_counts_when_a_later_work_request_completes(rc, windowed):
    mw, region = windowed
    rc.b.post_send(rp.LocalInv(invalidate_rkey=mw.rkey, send_flags=0))
    assert _refused(mw, region)
    rc.b.post_send(rp.RdmaWrite(rc.theirs[:8], remote_addr=rc.mine.addr, rkey=rc.mine.rkey))
    rc.wait(1)
    assert not _refused(mw, region)


def test_invalidation_that_fails_leaves_the_window_bound(rc, windowed):
    mw, region = windowed
    rc.b.post_send(rp.LocalInv(invalidate_rkey=mw.rkey ^ 1))
    assert rc.cq.wait()[0].status is not WCStatus.SUCCESS
    assert _refused(mw, region)
    _by_itself(rc, mw)
    assert rc.cq.wait()[0].status is WCStatus.WR_FLUSH_ERR
    assert _refused(mw, region)


def test_invalidation_of_another_key_leaves_the_window_bound(rc, windowed, stack):
    mw, region = windowed
    other = stack.enter_context(rp.MW(rc.pd))
    _bind(rc, other, region)
    _by_itself(rc, other)
    rc.wait(1)
    assert _refused(mw, region)
    _by_itself(rc, mw)
    rc.wait(1)
    assert not _refused(mw, region)


def test_closed_windows_leave_no_record(rc, context, stack):
    needs(context.kind == "soft", "WITH_INV in completions", context)
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    for _ in range(3):
        with rp.MW(rc.pd) as mw:
            _bind(rc, mw, region)
            _by_itself(rc, mw)
            rc.wait(1)
            index = mw.rkey >> 8
            assert invalidated_of(context)[index] != 0
        assert index not in invalidated_of(context)


def test_invalidation_that_is_polled_after_its_window_was_closed_leaves_no_record(
    rc, context, stack
):
    needs(context.kind == "soft", "WITH_INV in completions", context)
    region = stack.enter_context(rp.MR(rc.pd, 64, ALL | Access.MW_BIND))
    with rp.MW(rc.pd) as mw:
        _bind(rc, mw, region)
        rc.b.post_send(rp.LocalInv(invalidate_rkey=mw.rkey))
        index = mw.rkey >> 8
    rc.wait(1)
    assert index not in invalidated_of(context)


def test_rereg_on_a_device_without_the_verb_leaves_the_region_as_it_was(rc, monkeypatch):
    _refuse(monkeypatch, rc.pd.context, -4, errno.EOPNOTSUPP)
    with rp.MR(rc.pd, 64, ALL) as mr:
        name = rc.pd.context.name
        words = f"^ibv_rereg_mr is not supported: the driver of {name} does not have it, at"
        with pytest.raises(rp.UnsupportedError, match=words):
            mr.rereg(memory=64)
        assert _write(rc, mr) is WCStatus.SUCCESS


def test_library_without_ibv_rereg_mr_is_named(on_null):
    said = on_null("""
        context, pd, cq = resources()
        mr = rp.MR(pd, 64)
        print(said(lambda: mr.rereg(access=1)))
        print(said(lambda: rp.MR.from_dmabuf(pd, 0, 0, 64, 0)))
        print(said(lambda: pd.advise_mr(0, mr[:])))
    """)
    lacks = "is not supported: the installed libibverbs does not have it"
    assert said.splitlines() == [
        f"UnsupportedError: ibv_rereg_mr {lacks}",
        f"UnsupportedError: ibv_reg_dmabuf_mr {lacks}",
        "UnsupportedError: ibv_advise_mr is not supported: null0 or the installed libibverbs "
        "lacks it",
    ]


@pytest.mark.parametrize(
    ("code", "number"), [(-4, errno.EIO), (-5, errno.EIO), (22, errno.EIO), (-4, 0)]
)
def test_failure_in_the_middle_of_a_rereg_leaves_a_region_that_can_only_be_closed(
    rc, monkeypatch, code, number
):
    _refuse(monkeypatch, rc.pd.context, code, number)
    memory, new = bytearray(64), bytearray(64)
    mr, there = rp.MR(rc.pd, memory, ALL), rp.PD(rc.pd.context)
    sge = mr[:8]
    with pytest.raises(rp.VerbsError, match="ibv_rereg_mr: EIO"):
        mr.rereg(memory=new, pd=there)
    unusable = "MR of 64 bytes .* cannot be used: its re-registration failed; close it"
    with pytest.raises(rp.ClosedError, match=unusable):
        mr.rereg(access=0)
    with pytest.raises(rp.PostError, match=unusable):
        rc.a.post_send(rp.Send(sge))
    assert not mr.closed
    # The device may use either memory, in either PD.
    for each in (memory, new):
        with pytest.raises(BufferError):
            each.append(1)
    with pytest.raises(rp.InUseError):
        there.close()
    mr.close()
    assert mr.closed
    gc.collect()
    memory.append(1)
    new.append(1)
    there.close()


def test_region_whose_rereg_failed_is_closed_when_it_is_dropped(pd, monkeypatch):
    _refuse(monkeypatch, pd.context, -4, errno.EIO)
    memory = bytearray(64)
    mr = rp.MR(pd, memory, ALL)
    with pytest.raises(rp.VerbsError):
        mr.rereg(memory=64)
    del mr
    gc.collect()
    memory.append(1)


def test_error_of_the_device_after_a_rereg_took_effect_is_not_raised(rc, monkeypatch):
    """The old pages could not be made to be copied in a fork: the new region is valid."""
    _refuse(monkeypatch, rc.pd.context, -3, errno.ENOMEM)
    memory, new = bytearray(64), bytearray(128)
    with rp.MR(rc.pd, memory, ALL) as mr:
        mr.rereg(memory=new)
        memory.append(1)
        assert mr.length == 128


class Own(rp.MR):
    """A region whose parts of a rereg do what a test says.

    Attributes:
        first, last: around the attributes that are set when the device has changed the region.
        before: called once, when what to change has been prepared.
        settles: raised, one at a time, by the release of the memory that was left.
    """

    first: tuple[typing.Any, ...] = ()
    last: tuple[typing.Any, ...] = ()
    before: typing.Any = None
    settles: typing.Any = ()

    def _attributes(self, form):
        if self.before is not None:
            before, self.before = self.before, None
            before()
        return (*self.first, *super()._attributes(form), *self.last)

    def _settle(self):
        for error in self.settles:
            self.settles = self.settles[1:]
            raise error
        super()._settle()


def test_rereg_in_the_middle_of_another_of_the_same_region_is_not_undone(rc, stack):
    """As by a signal handler, or another thread."""
    there = stack.enter_context(rp.PD(rc.pd.context))
    mr = stack.enter_context(Own(rc.pd, 64, ALL))
    mr.before = lambda: mr.rereg(pd=there)
    with _or_unsupported(rc.pd.context):
        mr.rereg(memory=128)
    assert (mr.pd, mr.length) == (there, 128)
    with pytest.raises(rp.InUseError, match="MR of 128 bytes"):
        there.close()


@pytest.mark.parametrize(
    "wrong", [5, ["slot", "self", 1], ("slot", "self"), ("name", "self", 1)], ids=str
)
def test_subclass_that_has_something_else_set_than_its_slots_is_refused(pd, wrong):
    given = {"slot": rp.MR.__dict__["_end"], "self": None}
    with Own(pd, memory := bytearray(64), ALL) as mr:
        if isinstance(wrong, list | tuple):
            wrong = type(wrong)(given.get(part, part) for part in wrong)
        mr.first = (wrong,)
        with pytest.raises(TypeError, match="not an attribute in __slots__ to set"):
            mr.rereg(memory=128)
        assert (mr.length, mr.end - mr.addr) == (64, 64)
        with pytest.raises(BufferError):
            memory.append(1)


def test_slot_that_a_region_does_not_have_is_not_set(pd):
    with Own(pd, 64, ALL) as mr:
        mr.last = ((rp.PD.__dict__["context"].fget.__self__, mr, None),)
        with _or_unsupported(pd.context):
            mr.rereg(memory=128)
        assert mr.length == 128


def test_exception_while_the_old_memory_is_released_leaves_a_region_that_has_moved(pd):
    """It is released before the next change, or that is not made."""
    old, new = bytearray(64), bytearray(128)
    with Own(pd, old, ALL) as mr:
        mr.settles = [LookupError(n) for n in range(100)]
        with pytest.raises(LookupError) as first, _or_unsupported(pd.context):
            mr.rereg(memory=new)
        assert first.value.args == (0,)
        with pytest.raises(LookupError):
            mr.rereg(memory=256)
        assert mr.length == 128
        with pytest.raises(BufferError):
            old.append(1)
        mr.settles = []
        mr.rereg(access=Access.LOCAL_WRITE)
        old.append(1)
        with pytest.raises(BufferError):
            new.append(1)


def test_region_lets_go_of_the_pd_and_the_owner_of_the_memory_that_it_has_left(context, pd):
    memory = bytearray(64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    owner, left = Held(), rp.PD(context)
    gone = [weakref.ref(owner), weakref.ref(left)]
    with rp.MR.at(left, address, 64, ALL, owner) as mr:
        with _or_unsupported(context):
            mr.rereg(memory=64, pd=pd)
        del owner, left
        gc.collect()
        assert [one() for one in gone] == [None, None]


class Held:
    """An owner of memory."""


def test_region_that_is_closed_but_not_forgotten_is_not_registered_again(pd):
    class Rude(rp.MR):
        rude = False

        def _forget(self):
            if self.rude:
                raise LookupError
            super()._forget()

    mr = Rude(pd, 64, ALL)
    with _or_unsupported(pd.context, mr):
        mr.rereg(memory=64)
    mr.rude = True
    with pytest.raises(LookupError):
        mr.close()
    for _ in range(2):
        with pytest.raises(rp.ClosedError, match=r"^MR of 64 bytes .* is closed$"):
            mr.rereg(memory=64)
        with pytest.raises(rp.ClosedError, match=r"^MR of 64 bytes .* is closed$"):
            mr._open_struct()
    mr.rude = False
    mr.close()


def test_close_after_a_rereg_admits_no_use_until_it_has_waited_for_verbs(pd):
    class Used(rp.MR):
        woken = False

        def _wake(self):
            with pytest.raises(rp.ClosedError, match=r"^MR of 64 bytes .* is closed$"):
                self._open_struct()
            self.woken = True

    mr = Used(pd, 64, ALL)
    with _or_unsupported(pd.context, mr):
        mr.rereg(access=Access.LOCAL_WRITE)
    mr.close()
    assert (mr.woken, mr.closed) == (True, True)


def test_region_is_not_moved_to_a_closed_pd(pd):
    there = rp.PD(pd.context)
    there.close()
    with rp.MR(pd, 64, ALL) as mr:
        with pytest.raises(rp.ClosedError, match=r"^PD is closed$"):
            mr.rereg(pd=there)
        assert mr.pd is pd


def test_rereg_in_the_middle_of_a_verb_of_its_thread_is_refused(pd):
    with rp.MR(pd, 64) as mr:
        with pytest.raises(rp.InUseError, match="in the middle of one of this thread's verbs"):
            pd._verb(lambda _: mr.rereg(memory=128))
        assert mr.length == 64


def test_region_is_not_moved_to_a_pd_that_close_all_is_closing(context):
    needs(context.kind == "soft", "ibv_rereg_mr", context)
    said = []

    class Moves(rp.MR):
        def _release(self):
            with pytest.raises(rp.ClosedError) as refused:
                mr.rereg(pd=there)
            said.append(str(refused.value))
            super()._release()

    with rp.open_device(context.name) as opened:
        here, there = rp.PD(opened), rp.PD(opened)
        mr = rp.MR(here, 64, ALL)
        last = Moves(here, 64, ALL)
        opened.close_all()
    assert last.closed
    assert said == ["PD is being closed"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_rereg_waits_for_a_verb_of_another_thread(pd, monkeypatch, interrupted):
    """Unless a signal handler raises meanwhile: then the region is as it was."""
    mr = rp.MR(pd, 64, ALL)
    with _or_unsupported(pd.context, mr):
        mr.rereg(access=ALL)
    inside, go, order = threading.Event(), threading.Event(), []

    def verb(_):
        inside.set()
        until(lambda: mr._handle is None)
        with pytest.raises(rp.ClosedError, match=r"^another thread is re-registering MR of 64 b"):
            mr._open_struct()
        assert go.wait(LIMIT)
        order.append("verb")

    def handler(*_):
        order.append("signal")
        if interrupted:
            raise LookupError
        go.set()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with thread(lambda: mr._verb(verb)) as raised:
            assert inside.wait(LIMIT)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(LookupError) if interrupted else contextlib.nullcontext():
                mr.rereg(memory=128)
            order.append("rereg")
            go.set()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not raised
    assert order == (["signal", "rereg", "verb"] if interrupted else ["signal", "verb", "rereg"])
    assert mr.length == (64 if interrupted else 128)
    mr.rereg(memory=256)
    mr.close()
    assert mr.closed


def test_interrupted_rereg_that_waits_for_a_close_leaves_the_region_to_that(pd):
    inside, go = threading.Event(), threading.Event()

    class Slow(rp.MR):
        def _release(self):
            super()._release()
            inside.set()
            assert go.wait(LIMIT)

    def handler(*_):
        raise LookupError

    mr = Slow(pd, memory := bytearray(64), ALL)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with thread(mr.close) as raised:
            assert inside.wait(LIMIT)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(LookupError):
                mr.rereg(memory=128)
            assert mr.length == 64
            go.set()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not raised
    assert mr.closed
    memory.append(1)


def test_region_left_open_at_exit_is_not_registered_again():
    """The device refuses to deregister it, and the interpreter has closed what it could."""
    code = (
        "import atexit\n"
        "def late():\n"
        "    try: mr.rereg(access=0)\n"
        "    except rp.ClosedError as error: print(error)\n"
        "    print(mr.closed)\n"
        "atexit.register(late)\n"
        "import rdmapost as rp\n"
        "context = rp.open_device('soft0')\n"
        "mr = rp.MR(rp.PD(context), 64)\n"
        "type(context._provider).dereg_mr = staticmethod(lambda mr: 5)\n"
        "mr = rp.MR(mr.pd, 64)\n"
    )
    said = prints(code)
    assert said.startswith("MR of 64 bytes")
    assert said.endswith("cannot be used: the interpreter is exiting\nFalse")


def test_dmabuf_is_not_registered_again(pd):
    fd = os.memfd_create("test")
    try:
        os.truncate(fd, mmap.PAGESIZE)
        try:
            mr = rp.MR.from_dmabuf(pd, fd, 0, 64, 0)
        except rp.VerbsError:
            pytest.skip("a memfd is no dma-buf to this device")
        with mr, pytest.raises(rp.UnsupportedError, match="a dma-buf region cannot be"):
            mr.rereg(memory=64)
    finally:
        os.close(fd)


def test_child_of_a_fork_does_not_register_the_parents_region_again(device):
    code = (
        "import os, sys, rdmapost as rp\n"
        "with rp.open_device(sys.argv[1]) as context, rp.PD(context) as pd, rp.MR(pd, 64) as mr:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try:\n"
        "            mr.rereg(memory=64)\n"
        "        except rp.ClosedError as error:\n"
        "            print(error, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    print(mr.closed)\n"
    )
    shown = prints(code, device)
    assert "was opened by process" in shown
    assert shown.endswith("False")


def _refuse(monkeypatch, context, code, number):
    """Have the device's ibv_rereg_mr fail."""
    from rdmapost._binding import ffi
    from rdmapost.resources.device import provider_of

    def ibv_rereg_mr(*_):
        ffi.errno = number
        return code

    for name in ("rereg_mr", "rereg_mr_at"):
        monkeypatch.setattr(type(provider_of(context)), name, staticmethod(ibv_rereg_mr))
