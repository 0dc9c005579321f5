"""Type 2 memory windows: BIND_MW, SEND_WITH_INV and LOCAL_INV."""

from __future__ import annotations

import array
import contextlib
import sys
import weakref
from typing import Any

import pytest
from support import ALL, CONNECTED, needs, posting_tap, soft_queues
from support.in_flight import gone

import rdmapost as rp
from rdmapost import Access, DeviceCap, MWType, QPType, WCFlags, WCOpcode, WCStatus

soft = soft_queues.soft
tap = posting_tap.tap

BINDABLE = ALL | Access.MW_BIND


@pytest.fixture
def window(context, rc, stack):
    """A type 2 window and a region that it can be bound to, on b's side."""
    needs(
        context.attr.device_cap_flags
        & (DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B),
        "memory windows of type 2",
        context,
    )
    region = stack.enter_context(rp.MR(rc.pd, 256, BINDABLE))
    # It is closed before the queue pairs: rxe waits for a window bound through one.
    mw = stack.enter_context(rp.MW(rc.pd))
    return mw, region


def bind(rc, mw, region, start=64, length=64, access=None, **fields):
    access = Access.REMOTE_WRITE | Access.REMOTE_READ if access is None else access
    rkey = mw.next_rkey()
    rc.b.post_send(
        rp.BindMW(
            mw=mw,
            rkey=rkey,
            mr=region,
            addr=region.addr + start,
            length=length,
            mw_access_flags=access,
            **fields,
        )
    )
    return rkey


def test_window_opens_a_part_of_a_region(rc, window):
    mw, region = window
    rkey = bind(rc, mw, region, wr_id=1)
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (1, rp.WCOpcode.BIND_MW)
    rc.mine.buffer[:4] = b"mine"
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=rkey))
    rc.wait()
    assert bytes(region.buffer[63:69]) == b"\0mine\0"
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 126, rkey=rkey))
    outside = rc.cq.wait()[0].status
    # IBTA: REM_ACCESS_ERR; rxe looks only at the bounds of the region.
    assert outside in (WCStatus.REM_ACCESS_ERR, WCStatus.SUCCESS)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 254, rkey=rkey))
    refused = rc.cq.wait()[0].status
    assert refused is (WCStatus.WR_FLUSH_ERR if outside else WCStatus.REM_ACCESS_ERR)


def test_window_is_bound_again_with_a_new_key(rc, window):
    """next_rkey() gives a new key each time; the old one no longer works."""
    mw, region = window
    first = bind(rc, mw, region)
    rc.wait()
    assert mw.rkey == first
    rc.b.post_send(rp.LocalInv(invalidate_rkey=first))
    rc.wait()
    second = bind(rc, mw, region, start=0)
    rc.wait()
    assert second != first
    assert second >> 8 == first >> 8
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr, rkey=second))
    rc.wait()
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr, rkey=first))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("windows", [1, 2])
def test_region_with_bound_windows_cannot_be_closed(rc, window, windows):
    """The error names them. Once they are closed the region can be."""
    first, _ = window
    region = rp.MR(rc.pd, 256, BINDABLE)
    bound = [first, rp.MW(rc.pd)][:windows]
    for mw in bound:
        bind(rc, mw, region)
        rc.wait()
    with pytest.raises(rp.InUseError) as caught:
        region.close()
    assert str(caught.value) == (
        f"{region} cannot be closed: {', '.join(map(str, reversed(bound)))} bound to it; "
        f"unbind or close {'it' if windows == 1 else 'them'} first"
    )
    assert not region.closed
    for mw in bound:
        mw.close()
    region.close()


def test_region_whose_last_window_is_closed_meanwhile_is_closed(rc, window, monkeypatch):
    """Another thread closes it after the device has refused, and before the window is named."""
    mw, _ = window
    region = rp.MR(rc.pd, 256, BINDABLE)
    bind(rc, mw, region)
    rc.wait()
    why_not = rp.MR._why_not

    def after_it_is_closed(mr: rp.MR, change: str) -> str | None:
        mw.close()
        return why_not(mr, change)

    monkeypatch.setattr(rp.MR, "_why_not", after_it_is_closed)
    region.close()
    assert region.closed


def test_invalidated_window_is_closed_to_peers(rc, window):
    mw, region = window
    rkey = bind(rc, mw, region)
    rc.wait()
    rc.b.post_send(rp.LocalInv(invalidate_rkey=rkey, wr_id=3))
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (3, rp.WCOpcode.LOCAL_INV)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=rkey))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize(
    "keys", ["column", "column after wr_id", "the same"], ids=lambda keys: keys.replace(" ", "_")
)
def test_windows_invalidated_by_columns_are_closed_to_peers_and_release_their_regions(
    rc, window, stack, keys
):
    first, _ = window
    windows = [first, stack.enter_context(rp.MW(rc.pd))][: 1 + (keys != "the same")]
    region = stack.enter_context(rp.MR(rc.pd, 256, BINDABLE))
    bound = array.array("I")
    for mw in windows:
        bound.append(bind(rc, mw, region))
        rc.wait()
    ids = array.array("q", range(7, 7 + len(bound)))
    columns = {"invalidate_rkey": bound, "wr_id": ids}
    if keys == "column after wr_id":
        columns = {"wr_id": ids, "invalidate_rkey": bound}
    elif keys == "the same":
        columns = {"wr_id": ids, "invalidate_rkey": bound[0]}
    assert rc.b.post_columns(rp.LocalInv, **columns) == len(bound)
    assert [wc.check().wr_id for wc in rc.wait(len(bound))] == [*ids]
    region.close()
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=bound[-1]))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_peer_invalidates_a_window_with_a_send(rc, window):
    """SEND_WITH_INV: the receiver's completion names the key."""
    mw, region = window
    rkey = bind(rc, mw, region)
    rc.wait()
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=rkey, wr_id=9))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].imm_data is None
    if not done[7].wc_flags & rp.WCFlags.IP_CSUM_OK:
        assert done[7].wc_flags & rp.WCFlags.WITH_INV
        assert done[7].invalidated_rkey == rkey
    # Else it is rxe: it hands out the kernel's own numbers of the flags, in which
    # "with invalidate" is what user space knows as IP_CSUM_OK.
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=rkey))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_window_and_region_of_a_posted_bind_stay_open(rc, window):
    mw, region = window
    bind(rc, mw, region, wr_id=5, send_flags=0)
    for resource in (mw, region):
        with pytest.raises(rp.InUseError, match="wr_id 5"):
            resource.close()
    rc.b.post_send(rp.RdmaWrite(remote_addr=rc.mine.addr, rkey=rc.mine.rkey))
    rc.wait()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mw": None}, "BIND_MW needs a memory window"),
        ({"mr": None}, "BIND_MW needs a memory window"),
        ({"length": 1000}, "lies outside MR of 256 bytes"),
        ({"addr": 5}, "lies outside"),
        ({"mr": "unbindable"}, "was registered without MW_BIND"),
        ({"mw": "region"}, "mw: expected MW, got MR"),
        ({"mr": "window"}, "mr: expected MR, got MW"),
    ],
)
def test_type_2_bind_with_a_wrong_field_is_refused(rc, window, fields, words):
    mw, region = window
    stand_for = {"unbindable": rc.theirs, "region": region, "window": mw}
    given = {name: stand_for.get(value, value) for name, value in fields.items()}
    wr = rp.BindMW(
        **{
            "mw": mw,
            "rkey": mw.next_rkey(),
            "mr": region,
            "addr": region.addr,
            "length": 8,
            **given,
        }
    )
    with pytest.raises(rp.PostError, match=words):
        rc.b.post_send(wr)
    rc.works()


def test_window_is_not_bound_with_the_key_of_another(rc, window, stack):
    """A device would take only the low byte, and open this window to anyone who has its new key."""
    mw, region = window
    other = stack.enter_context(rp.MW(rc.pd))
    before = mw.rkey
    for wrong in (other.rkey, region.rkey, 0, (1 << 32) - 1):
        with pytest.raises(rp.PostError, match=f"rkey={wrong:#x} is not a key of MW") as caught:
            rc.b.post_send(rp.BindMW(mw=mw, rkey=wrong, mr=region, addr=region.addr, length=64))
        assert (caught.value.posted, mw.rkey) == (0, before)
    rc.works()


def test_bind_is_judged_by_the_windows_key_while_another_is_in_flight(rc, window):
    mw, region = window
    first = mw.rkey
    keys = [first & ~0xFF | (first + n) & 0xFF for n in (1, 2)]

    def to(rkey: int, **fields: Any) -> rp.BindMW:
        return rp.BindMW(mw=mw, rkey=rkey, mr=region, addr=region.addr, length=64, **fields)

    with pytest.raises(rp.PostError, match=r"\(index 1\): rkey=.* is not a key of MW") as caught:
        rc.b.post_send([to(keys[0]), to(keys[1] ^ 0x100)])
    assert (caught.value.posted, mw.rkey) == (1, keys[0])
    with pytest.raises(rp.PostError, match="is not a key of MW"):
        rc.b.post_send(to(keys[1] ^ 0x100))
    rc.wait(1)
    assert mw.rkey == keys[0]


def test_unchecked_bind_changes_only_the_low_byte_of_the_key(connect, window):
    """The device ignores the other bits, and so must the window's key."""
    mw, region = window
    pair = connect(checked=False)
    key = mw.next_rkey()
    access = rp.Access.REMOTE_WRITE
    wrong = rp.BindMW(
        mw=mw, rkey=key ^ 0xA5A500, mr=region, addr=region.addr, length=64, mw_access_flags=access
    )
    pair.b.post_send(wrong)
    [done] = pair.wait(1)
    assert (done.status, mw.rkey) == (WCStatus.SUCCESS, key)
    pair.a.post_send(rp.RdmaWrite(pair.mine[:8], remote_addr=region.addr, rkey=mw.rkey))
    [done] = pair.wait(1)
    assert done.status is WCStatus.SUCCESS
    # rxe takes 50 s to destroy a queue pair with a window.
    mw.close()


def test_key_of_a_window_keeps_its_upper_bits(window):
    mw, _ = window
    before = mw.rkey
    mw.rkey = mw.next_rkey()
    mw.rkey = before
    for wrong in (before ^ 0x100, 0, (1 << 32) - 1):
        with pytest.raises(ValueError, match=f"^rkey={wrong:#x} is not a key of MW"):
            mw.rkey = wrong
    assert mw.rkey == before


@pytest.mark.parametrize("name", ["mw", "mr"])
def test_bind_without_a_pointer_is_refused_unchecked_too(connect, context, name):
    """A driver would follow the NULL."""
    needs(context.attr.device_cap_flags & DeviceCap.MEM_WINDOW_TYPE_2B, "windows", context)
    pair = connect(checked=False)
    with rp.MW(pair.pd) as mw, rp.MR(pair.pd, 64, BINDABLE) as region:
        wr = rp.BindMW(mw=mw, mr=region, addr=region.addr, length=8)
        setattr(wr, name, None)
        with pytest.raises(rp.PostError, match="BIND_MW needs"):
            pair.a.post_send(wr)


def test_type_1_window_is_not_bound_by_a_work_request(rc, context):
    needs(context.attr.device_cap_flags & DeviceCap.MEM_WINDOW, "windows of type 1", context)
    with (
        rp.MW(rc.pd, MWType.TYPE_1) as mw,
        rp.MR(rc.pd, 64, BINDABLE) as region,
        pytest.raises(rp.PostError, match="is of type 1"),
    ):
        rc.a.post_send(rp.BindMW(mw=mw, mr=region, addr=region.addr, length=8))


@pytest.mark.parametrize("qp_type", CONNECTED)
def test_invalidated_rkey_is_in_the_completion(connect, stack, context, qp_type):
    needs(context.kind == "soft", "WITH_INV flag in completions", context)
    pair = connect(qp_type)
    region = stack.enter_context(rp.MR(pair.pd, 64, ALL | rp.Access.MW_BIND))
    mw = stack.enter_context(rp.MW(pair.pd))
    pair.b.post_send(
        rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=region, addr=region.addr, length=64, wr_id=1)
    )
    pair.wait()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:8], wr_id=7))
    pair.a.post_send(rp.SendWithInv(pair.mine[:8], invalidate_rkey=mw.rkey, wr_id=9))
    done = {wc.wr_id: wc for wc in pair.wait(2)}
    assert done[7].invalidated_rkey == mw.rkey
    assert done[7].wc_flags & rp.WCFlags.WITH_INV
    assert (done[7].imm_data, done[9].invalidated_rkey) == (None, None)


@pytest.mark.parametrize("at", range(4))
def test_any_of_several_polled_rows_may_report_an_invalidated_window(rc, window, context, at):
    needs(context.kind == "soft", "WITH_INV flag in completions", context)
    mw, region = window
    rkey = bind(rc, mw, region)
    rc.wait()
    ids = array.array("Q", range(5, 9))
    rc.b.post_recv_columns(rc.theirs.blocks(ids, 8), wr_id=ids)
    sends = [rp.Send(rc.mine[:8]) for _ in range(4)]
    sends[at] = rp.SendWithInv(rc.mine[:8], invalidate_rkey=rkey)
    for send in sends:
        send.send_flags = rp.SendFlags(0)
    rc.a.post_send(sends)
    got = memoryview(bytearray(48 * 8))
    assert rc.cq.poll_into(got) == 4
    keys = [int.from_bytes(got[48 * row :][24:28], sys.byteorder) for row in range(4)]
    assert keys == [rkey if row == at else 0 for row in range(4)]
    assert [got[48 * row] for row in range(4)] == [5, 6, 7, 8]
    # While a window is bound to it, that is refused.
    region.rereg(access=BINDABLE)


@pytest.mark.parametrize(
    ("status", "opcode", "flags", "releases"),
    [
        (WCStatus.SUCCESS, WCOpcode.RECV, WCFlags.WITH_INV, True),
        (WCStatus.SUCCESS, WCOpcode.SEND, WCFlags.WITH_INV, False),
        (WCStatus.SUCCESS, WCOpcode.RECV, WCFlags.WITH_IMM, False),
        (WCStatus.REM_OP_ERR, WCOpcode.RECV, WCFlags.WITH_INV, False),
    ],
)
def test_only_a_received_invalidation_releases_the_region(
    tap, stack, status, opcode, flags, releases
):
    """Some drivers set the flag on the sender's side too; a failed completion's is not valid."""

    def report(count: int, wc: Any) -> int:
        if count:
            wc.status, wc.opcode, wc.wc_flags = status, opcode, flags
        return count

    pd, cq = stack.enter_context(rp.PD(tap.context)), stack.enter_context(rp.CQ(tap.context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())
    region, mw = stack.enter_context(rp.MR(pd, 64, BINDABLE)), stack.enter_context(rp.MW(pd))
    qp.post_send(
        rp.BindMW(
            mw=mw,
            rkey=mw.next_rkey(),
            mr=region,
            addr=region.addr,
            length=64,
            mw_access_flags=Access.REMOTE_WRITE,
        )
    )
    qp.post_recv(rp.RecvWR())
    cq.wait()[0].check()
    qp.post_send(rp.SendWithInv(invalidate_rkey=mw.rkey, send_flags=0))
    tap.on_poll(report)
    assert [wc.status for wc in cq.poll()] == [status]
    tap.on_poll(None)
    with contextlib.nullcontext() if releases else pytest.raises(rp.InUseError, match="MW"):
        region.rereg(access=BINDABLE)


def test_each_rule_of_bind_info_refuses_the_bind_that_breaks_it(soft):
    """The statements about struct ibv_mw_bind_info, one by one."""
    post = soft.qp().post_send
    for wrong in (
        soft.bind(mw=None),
        soft.bind(mr=None),
        soft.bind(mw=soft.window(MWType.TYPE_1)),
        soft.bind(mr=soft.foreign),
        soft.bind(mr=soft.region(64)),
        soft.bind(length=4097),
    ):
        with pytest.raises(rp.PostError):
            post(wrong)
    post(soft.bind())


class Memory(bytearray):
    """Memory that can be checked for still existing."""


@pytest.mark.parametrize(
    ("status", "bound"),
    [
        # The region is the one that was bound, the other, or unknown.
        (WCStatus.SUCCESS, {"new"}),
        (WCStatus.MW_BIND_ERR, {"old"}),
        (WCStatus.LOC_QP_OP_ERR, {"old"}),
        (WCStatus.LOC_PROT_ERR, {"old"}),
        (WCStatus.WR_FLUSH_ERR, {"old", "new"}),
        (WCStatus.GENERAL_ERR, {"old", "new"}),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "with one before it"])
def test_status_of_a_bind_says_which_region_the_window_holds(stack, status, bound, ahead):
    """For an unsignaled one before another that failed, it is unknown."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())
    windows = [rp.MW(pd, rp.MWType.TYPE_1) for _ in range(2)]
    memory = {name: Memory(64) for name in ("old", "new", "other", "third")}
    regions = {name: rp.MR(pd, at, ALL | rp.Access.MW_BIND) for name, at in memory.items()}
    refs = {name: weakref.ref(at) for name, at in memory.items()}
    memory.clear()

    def bind(mw: rp.MW, mr: rp.MR, **fields: Any) -> None:
        qp.bind_mw(mw, mr, mr.addr, 64, **fields)

    bind(windows[0], regions["old"])
    bind(windows[1], regions["other"])
    cq.wait(2)
    if ahead:
        bind(windows[1], regions["third"], send_flags=0)
    if status is not WCStatus.SUCCESS:
        context.faults.complete_with(9, status)
    bind(windows[0], regions["new"], wr_id=9)
    assert [wc.status for wc in cq.wait(1)] == [status]
    regions.clear()
    held = {name for name, ref in refs.items() if not gone(ref)}
    if not ahead:
        beside = {"other"}
    else:
        beside = {"third"} if status is WCStatus.SUCCESS else {"third", "other"}
    assert held == bound | beside
    for mw in windows:
        mw.close()
    assert all(gone(ref) for ref in refs.values())


def test_type_2_window_bound_to_no_bytes_of_a_region_holds_that_region(stack):
    """A length of 0 unbinds only a type 1 window."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq, checked=False))
    qp.connect(qp.endpoint())
    memory = Memory(64)
    ref, mr = weakref.ref(memory), rp.MR(pd, memory, ALL | rp.Access.MW_BIND)
    mw = rp.MW(pd, rp.MWType.TYPE_2)
    context.faults.complete_with(9, WCStatus.SUCCESS)  # soft0 has no such windows
    qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=0, wr_id=9))
    assert cq.wait(1)[0].status is WCStatus.SUCCESS
    del memory, mr
    assert not gone(ref)
    mw.close()
    assert gone(ref)
