"""Type 1 memory windows: ibv_bind_mw, what it refuses, and what a failed bind leaves."""

from __future__ import annotations

import errno

import pytest
from support import ALL, needs
from support.posting_tap import tap

import rdmapost as rp
from rdmapost import Access, DeviceCap, MWType, QPState, QPType, WCOpcode, WCStatus
from rdmapost._binding import ffi, lib

__all__ = ["tap"]  # a fixture

BINDABLE = ALL | Access.MW_BIND
READ_WRITE = Access.REMOTE_READ | Access.REMOTE_WRITE


@pytest.fixture(autouse=True)
def _windows(context):
    needs(context.attr.device_cap_flags & DeviceCap.MEM_WINDOW, "memory windows", context)


@pytest.fixture
def region(pd, stack):
    """256 bytes that a window can be bound to."""
    return stack.enter_context(rp.MR(pd, 256, BINDABLE))


@pytest.fixture
def mw(pd, stack):
    """A window of type 1."""
    return stack.enter_context(rp.MW(pd, MWType.TYPE_1))


def write(pair, addr, rkey):
    """Write 4 bytes from a through a key; return the status."""
    pair.mine.buffer[:4] = b"mine"
    pair.a.post_send(rp.RdmaWrite(pair.mine[:4], remote_addr=addr, rkey=rkey, wr_id=44))
    (done,) = pair.cq.wait()
    assert done.wr_id == 44
    return done.status


def test_bind_opens_a_part_of_a_region(region, mw, rc):
    """The key is new at once, and the completion has the caller's wr_id."""
    before = mw.rkey
    rc.b.bind_mw(mw, region, region.addr + 64, 64, READ_WRITE, wr_id=(1 << 64) - 1)
    assert rc.b.outstanding == (1, 0)
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode, done.qp_num) == ((1 << 64) - 1, WCOpcode.BIND_MW, rc.b.qp_num)
    assert rc.b.outstanding == (0, 0)
    assert mw.rkey == before & ~0xFF | (before + 1) & 0xFF
    assert write(rc, region.addr + 64, mw.rkey) is WCStatus.SUCCESS
    assert bytes(region.buffer[63:69]) == b"\0mine\0"
    assert write(rc, region.addr + 254, mw.rkey) is WCStatus.REM_ACCESS_ERR


def test_window_grants_only_what_it_was_bound_for(region, mw, rc):
    rc.b.bind_mw(mw, region, region.addr, 64, Access.REMOTE_READ)
    rc.wait()
    rc.a.post_send(rp.RdmaRead(rc.mine[:4], remote_addr=region.addr, rkey=mw.rkey))
    rc.wait()
    assert write(rc, region.addr, mw.rkey) is WCStatus.REM_ACCESS_ERR


def test_window_serves_every_queue_pair_of_its_domain(region, mw, connect):
    """That of type 2 serves only the one that bound it."""
    one, other = connect(), connect()
    one.b.bind_mw(mw, region, region.addr, 64, READ_WRITE)
    one.wait()
    assert write(other, region.addr, mw.rkey) is WCStatus.SUCCESS


def test_bound_window_can_be_bound_again(region, mw, rc):
    """Without an invalidation in between; the previous key no longer works."""
    keys = {mw.rkey}
    for _ in range(3):
        rc.b.bind_mw(mw, region, region.addr, 64, READ_WRITE, wr_id=5)
        assert rc.wait()[0].wr_id == 5
        keys.add(mw.rkey)
    assert len(keys) == 4
    assert write(rc, region.addr, mw.rkey) is WCStatus.SUCCESS
    assert write(rc, region.addr, mw.rkey - 1) is WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("through", ["one queue pair, one at a time", "one queue pair", "two"])
def test_region_whose_window_has_been_bound_to_another_is_registered_again(
    pd, mw, connect, context, through
):
    needs(context.kind == "soft", "ibv_rereg_mr", context)
    pairs = [connect(), connect()]
    with rp.MR(pd, 64, BINDABLE) as left, rp.MR(pd, 64, BINDABLE) as bound:
        for pair, region in zip(pairs, (left, bound), strict=True):
            using = pair if through == "two" else pairs[0]
            using.b.bind_mw(mw, region, region.addr, 64, READ_WRITE)
            if through != "one queue pair":
                using.wait()
        if through == "one queue pair":
            pairs[0].wait(2)
        left.rereg(access=ALL)
        with pytest.raises(rp.InUseError, match="bound to it"):
            bound.rereg(access=ALL)
        mw.close()


def test_bind_of_length_0_unbinds_a_window(pd, mw, rc):
    """The key then grants nothing, and the region can be closed."""
    region = rp.MR(pd, 256, BINDABLE)
    rc.b.bind_mw(mw, region, region.addr, 64, READ_WRITE)
    rc.wait()
    rc.b.bind_mw(mw, region, 0, 0)
    rc.wait()
    addr = region.addr
    region.close()
    assert write(rc, addr, mw.rkey) is WCStatus.REM_ACCESS_ERR


def test_unsignaled_bind_is_done_when_a_later_work_request_is(region, mw, rc):
    """Until then it is outstanding, and what it names stays open."""
    rc.b.bind_mw(mw, region, region.addr, 64, READ_WRITE, wr_id=5, send_flags=0)
    assert rc.b.outstanding == (1, 0)
    for resource in (mw, region):
        with pytest.raises(rp.InUseError, match="wr_id 5"):
            resource.close()
    rc.b.post_send(rp.RdmaWrite(remote_addr=rc.mine.addr, rkey=rc.mine.rkey, wr_id=6))
    assert [wc.wr_id for wc in rc.wait()] == [6]
    assert rc.b.outstanding == (0, 0)


def test_binds_and_work_requests_share_one_queue_in_order(region, mw, rc):
    rc.b.post_send(rp.RdmaWrite(remote_addr=rc.mine.addr, rkey=rc.mine.rkey, wr_id=1))
    rc.b.bind_mw(mw, region, region.addr, 64, READ_WRITE, wr_id=2)
    rc.b.post_send(rp.RdmaWrite(remote_addr=rc.mine.addr, rkey=rc.mine.rkey, wr_id=3))
    assert [wc.wr_id for wc in rc.wait(3)] == [1, 2, 3]


# ---- what is refused --------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mw": None}, "needs a memory window"),
        ({"mr": None}, "needs a memory window .* and a memory region"),
        ({"mr": None, "addr": 0, "length": 0}, "and a memory region"),
        ({"mw": "region"}, "mw: expected MW, got MR"),
        ({"mr": "mw"}, "mr: expected MR, got MW"),
        ({"mw": "closed window"}, "MW is closed"),
        ({"mr": "closed region"}, "MR of 64 bytes .* is closed"),
        ({"mr": "elsewhere"}, "queue pair's open device"),
        ({"wr_id": -1}, "wr_id=-1 is not in"),
        ({"wr_id": 1 << 64}, "wr_id=.* is not in"),
        ({"addr": -1}, "addr=-1 is not in"),
        ({"addr": "1"}, "addr: expected int, got str"),
        ({"length": 1 << 64}, "length=.* is not in"),
        ({"mw_access_flags": 1 << 32}, "mw_access_flags=.* is not in"),
        ({"send_flags": None}, "send_flags: expected int, got NoneType"),
    ],
)
def test_bind_that_would_do_harm_is_refused_unchecked_too(
    context, pd, connect, region, mw, stack, checked, given, words
):
    closed_window, closed_region = rp.MW(pd, MWType.TYPE_1), rp.MR(pd, 64, BINDABLE)
    closed_window.close()
    closed_region.close()
    elsewhere = stack.enter_context(rp.PD(stack.enter_context(rp.open_device(context.name))))
    stand_for = {
        "region": region,
        "mw": mw,
        "closed window": closed_window,
        "closed region": closed_region,
        "elsewhere": stack.enter_context(rp.MR(elsewhere, 64, BINDABLE)),
    }
    if checked and given.get("mr") == "elsewhere":
        words = "the queue pair's PD"
    refused(connect(checked=checked), mw, region, given, stand_for, words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mw": "type 2"}, "is of type 2, but .*; post a BindMW"),
        ({"mw": "foreign window"}, r"MW \(rkey .*the queue pair's PD"),
        ({"mr": "foreign region"}, r"MR of 64 bytes .*the queue pair's PD"),
        ({"mr": "unbindable"}, "was registered without MW_BIND"),
        ({"length": 257}, "lies outside MR of 256 bytes"),
        ({"addr": 5}, "lies outside"),
        ({"send_flags": rp.SendFlags.INLINE}, "INLINE has no meaning on BIND_MW"),
        ({"send_flags": 1 << 20}, "not send flags"),
    ],
)
def test_bind_that_breaks_a_rule_is_refused_by_a_checked_queue_pair(
    context, rc, region, mw, stack, given, words
):
    if given.get("mw") == "type 2":
        two = DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B
        needs(context.attr.device_cap_flags & two, "windows of type 2", context)
    other = stack.enter_context(rp.PD(context))
    stand_for = {
        "type 2": lambda: rp.MW(rc.pd),
        "foreign window": lambda: rp.MW(other, MWType.TYPE_1),
        "foreign region": lambda: rp.MR(other, 64, BINDABLE),
        "unbindable": lambda: rp.MR(rc.pd, 256, ALL),
    }
    made = {
        value: stack.enter_context(stand_for[value]())
        for value in given.values()
        if value in stand_for
    }
    refused(rc, mw, region, given, made, words)


def refused(pair, mw, region, given, stand_for, words):
    """Check that a bind is refused, that nothing has changed, and that the next one works."""
    before = mw.rkey
    given = {name: stand_for.get(value, value) for name, value in given.items()}
    arguments = {"mw": mw, "mr": region, "addr": region.addr, "length": 64, **given}
    with pytest.raises(rp.PostError, match=words) as caught:
        pair.b.bind_mw(**arguments)
    error = caught.value
    assert (error.errno, error.call) == (errno.EINVAL, "ibv_bind_mw")
    assert (error.index, error.posted) == (0, 0)
    assert mw.rkey == before
    assert pair.b.outstanding == (0, 0)
    pair.b.bind_mw(mw, region, region.addr, 64, READ_WRITE, wr_id=9)
    assert [wc.wr_id for wc in pair.wait()] == [9]
    pair.works()


@pytest.mark.parametrize("checked", [True, False])
def test_datagrams_have_no_windows(connect, region, mw, checked):
    """A driver would read a missing address handle."""
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="BIND_MW is not supported on UD QPs"):
        pair.b.bind_mw(mw, region, region.addr, 64)


@pytest.mark.parametrize("state", [QPState.RESET, QPState.INIT])
def test_bind_before_rts_is_refused(connect, region, mw, state):
    pair = connect(to=QPState.RESET)
    if state is QPState.INIT:
        pair.b.to_init()
    before = mw.rkey
    with pytest.raises(rp.PostError, match=f"the QP is in {state.name}"):
        pair.b.bind_mw(mw, region, region.addr, 64)
    assert pair.b.outstanding == (0, 0)
    assert mw.rkey == before


def test_unchecked_bind_before_rts_may_have_gone_in(connect, region, mw):
    """Soft-RoCE refuses it and carries it out later: so it counts as posted."""
    pair = connect(to=QPState.RESET, checked=False)
    before = mw.rkey
    with pytest.raises(rp.PostError, match="the QP is in RESET") as caught:
        pair.b.bind_mw(mw, region, region.addr, 64, wr_id=8)
    assert mw.rkey == before
    assert (caught.value.index, caught.value.posted) == (None, None)
    assert pair.b.outstanding == (1, 0)
    with pytest.raises(rp.InUseError, match="wr_id 8"):
        mw.close()


def test_bind_mw_on_a_full_queue_is_refused_by_name(connect, region, mw):
    pair = connect(max_send_wr=4)
    depth = pair.b.max_send_wr
    for _ in range(depth):
        pair.b.bind_mw(mw, region, region.addr, 64, send_flags=0)
    key = mw.rkey
    with pytest.raises(rp.PostError, match=f"queue is full: max_send_wr={depth} and") as caught:
        pair.b.bind_mw(mw, region, region.addr, 64)
    assert caught.value.errno == errno.ENOMEM
    assert pair.b.outstanding == (depth, 0)
    assert mw.rkey == key


def test_bind_on_a_closed_queue_pair_raises_closed_error(rc, region, mw):
    rc.b.close()
    with pytest.raises(rp.ClosedError, match="is closed"):
        rc.b.bind_mw(mw, region, region.addr, 64)


# ---- what fails later -------------------------------------------------------------


def test_window_keeps_the_key_of_a_failed_bind_until_it_is_set_back(region, mw, connect):
    """The key is that of the bind that failed, until it is set back (ibv_bind_mw(3))."""
    pair = connect(checked=False)
    before = mw.rkey
    pair.b.bind_mw(mw, region, region.addr, 1 << 20, READ_WRITE, wr_id=5)
    assert mw.rkey != before
    (done,) = pair.cq.wait()
    assert done.wr_id == 5
    # On 6.12 rxe may flush the very work request that failed.
    assert done.status in (WCStatus.MW_BIND_ERR, WCStatus.WR_FLUSH_ERR)
    mw.rkey = before
    again = connect()
    again.b.bind_mw(mw, region, region.addr, 64, READ_WRITE)
    again.wait()
    assert write(again, region.addr, mw.rkey) is WCStatus.SUCCESS


@pytest.mark.parametrize("rkey", [-1, 1 << 32])
def test_rkey_of_a_window_that_does_not_fit_is_refused(mw, rkey):
    before = mw.rkey
    with pytest.raises(ValueError, match=f"rkey={rkey} is not in"):
        mw.rkey = rkey
    assert mw.rkey == before


class TestOnSoft0:
    """What the soft device does on demand, and the shim without a driver behind it."""

    @pytest.fixture
    def context(self):
        with rp.open_device("soft0") as opened:
            yield opened

    def test_bind_that_the_device_refuses_leaves_the_rkey_and_nothing_outstanding(
        self, context, rc, region, mw
    ):
        before = mw.rkey
        context.faults.fail_post(errno.ENOMEM)
        with pytest.raises(rp.PostError, match="soft0 says that the queue is full") as caught:
            rc.b.bind_mw(mw, region, region.addr, 64, READ_WRITE)
        assert (caught.value.errno, caught.value.index) == (errno.ENOMEM, 0)
        assert (mw.rkey, rc.b.outstanding) == (before, (0, 0))
        rc.b.bind_mw(mw, region, region.addr, 64, READ_WRITE, wr_id=3)
        assert [wc.wr_id for wc in rc.wait()] == [3]

    def test_rp_bind_mw_refuses_null_pointers(self, rc, region, mw):
        qp, window, null = rc.b._handle, mw._handle, ffi.NULL
        bind = ffi.new("struct ibv_mw_bind *")
        assert lib.rp_bind_mw(qp, window, bind) == errno.EINVAL
        bind.bind_info.mr = region._handle
        assert lib.rp_bind_mw(null, window, bind) == errno.EINVAL
        assert lib.rp_bind_mw(qp, null, bind) == errno.EINVAL
        assert lib.rp_bind_mw(qp, window, null) == errno.EINVAL


@pytest.mark.parametrize("count", [1, 3])
def test_post_sets_the_keys_of_windows_where_the_driver_does_not(tap, stack, count):
    """Many drivers set none; one that accepts nothing shows who sets them."""
    pd = stack.enter_context(rp.PD(tap.context))
    cq = stack.enter_context(rp.CQ(tap.context))
    region = stack.enter_context(rp.MR(pd, 256, BINDABLE))
    windows = [stack.enter_context(rp.MW(pd, MWType.TYPE_2)) for _ in range(count)]
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())

    def binds() -> list[rp.BindMW]:
        return [
            rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=region, addr=region.addr, length=64)
            for mw in windows
        ]

    wrs = binds()
    tap.refuse(passed=0, rc=0, bad=0)
    qp.post_send([rp.LocalInv(), *wrs])
    assert [mw.rkey for mw in windows] == [wr.rkey for wr in wrs]
    # A refused bind leaves the old key; if the outcome is unknown, it may be the new one.
    before = [mw.rkey for mw in windows]
    tap.refuse(passed=0, rc=22, bad=2)
    with pytest.raises(rp.PostError):
        qp.post_send([*binds(), rp.LocalInv()])
    assert [mw.rkey for mw in windows] == before
    tap.refuse(passed=0, rc=22, bad=0)
    with pytest.raises(rp.PostError):
        qp.post_send(wrs := binds())
    assert [mw.rkey for mw in windows] == [wr.rkey for wr in wrs]
    tap.answer = None
    qp.to_reset()
