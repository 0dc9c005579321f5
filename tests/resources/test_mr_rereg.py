"""MR.rereg: a region registered again, over other memory, with other access, in another PD."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import typing
from array import array

import pytest
from support import ALL, needs, null_device, prints
from support.windows import bind_wr

import rdmapost as rp
from rdmapost import Access, MWType, WCStatus
from rdmapost.resources.device import invalidated_of

null = null_device.null
on_null = null_device.on_null


@contextlib.contextmanager
def _or_unsupported(context):
    """Skip a test where the device cannot do this; then the region is as it was."""
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


def test_rereg_that_the_device_refuses_leaves_the_region_as_it_was(rc, monkeypatch):
    _refuse(monkeypatch, rc.pd.context, -1, errno.EINVAL)
    memory, new = bytearray(64), bytearray(64)
    with rp.MR(rc.pd, memory, ALL) as mr:
        with pytest.raises(rp.VerbsError, match="ibv_rereg_mr: EINVAL"):
            mr.rereg(memory=new)
        new.append(1)
        assert _write(rc, mr) is WCStatus.SUCCESS
        assert memory[:8] == b"8 bytes!"


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


@pytest.mark.parametrize("code", [-4, -5, 22])
def test_failure_in_the_middle_of_a_rereg_leaves_a_region_that_can_only_be_closed(
    rc, monkeypatch, code
):
    _refuse(monkeypatch, rc.pd.context, code, errno.EIO)
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
