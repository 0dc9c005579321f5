"""Extended CQs: completions with timestamps, on devices that have them."""

from __future__ import annotations

import threading
import time

import pytest
from support import Pair, ended, needs, null_device, waiting, write, writes

import rdmapost as rp
from rdmapost import WCExFlags
from rdmapost._binding import native

null = null_device.null
on_null = null_device.on_null

TS, WALLCLOCK = WCExFlags.WITH_COMPLETION_TIMESTAMP, WCExFlags.WITH_COMPLETION_TIMESTAMP_WALLCLOCK


@pytest.fixture
def stamped(context):
    """A CQ with timestamps of both clocks."""
    needs(context.attr.completion_timestamp_mask, "completion timestamps", context)
    with rp.CQ(context, 128, wc_flags=TS | WALLCLOCK) as cq:
        yield cq


def test_completion_timestamps_are_in_order_between_post_and_poll(context, stamped, stack, pd):
    """By the device's clock and by the system's: in order, and between the post and the poll."""
    pair = Pair(stack, pd, stamped)
    earlier, earlier_wallclock = context.query_rt_values(), time.time_ns()
    found: list[rp.WC] = []
    for number in range(4):
        pair.a.post_send(write(pair, number))
        found += [wc.check() for wc in stamped.wait(1)]
    clocks = [earlier, *[wc.completion_ts for wc in found], context.query_rt_values()]
    assert clocks == sorted(clocks)
    wallclocks = [wc.completion_wallclock_ns for wc in found]
    wallclocks = [earlier_wallclock, *wallclocks, time.time_ns()]
    assert wallclocks == sorted(wallclocks)
    assert len(set(clocks)) == 6
    assert [wc.wr_id for wc in found] == [*range(4)]


def test_completion_timestamp_is_of_the_completion_and_not_of_the_poll(context, stamped, stack, pd):
    """soft0's clock counts nanoseconds."""
    pair = Pair(stack, pd, stamped)
    pair.a.post_send(writes(pair, 2))
    while stamped._poller.fill(stamped, 2) < 2:
        time.sleep(0.001)
    time.sleep(0.2)
    polled = context.query_rt_values()
    ticks = context.attr.hca_core_clock * 100  # in 0.1 s
    for wc in stamped.wait(2):
        assert polled - wc.completion_ts > ticks


def test_clock_of_the_device_advances_at_its_documented_frequency(context):
    needs(context.attr.completion_timestamp_mask, "completion timestamps", context)
    begun, host = context.query_rt_values(), time.monotonic_ns()
    time.sleep(0.2)
    ticks, passed = context.query_rt_values() - begun, time.monotonic_ns() - host
    assert ticks * 1_000_000 / context.attr.hca_core_clock == pytest.approx(passed, rel=0.2)


def test_cq_reports_the_time_of_the_clock_that_was_asked_for(context, stack, pd):
    needs(context.attr.completion_timestamp_mask, "completion timestamps", context)
    for wc_flags in (TS, WALLCLOCK):
        cq = stack.enter_context(rp.CQ(context, wc_flags=wc_flags))
        pair = Pair(stack, pd, cq)
        pair.a.post_send(write(pair))
        (wc,) = pair.wait()
        assert (wc.completion_ts is not None) == (wc_flags == TS)
        assert (wc.completion_wallclock_ns is not None) == (wc_flags == WALLCLOCK)


def test_failed_completion_has_no_timestamp(context, stamped, stack, pd):
    """Only wr_id, status, qp_num and vendor_err of one are valid."""
    pair = Pair(stack, pd, stamped)
    bad = rp.RdmaWrite(pair.mine[:8], remote_addr=pair.theirs.addr, rkey=pair.theirs.rkey ^ 0x5A00)
    pair.a.post_send(bad)
    (wc,) = stamped.wait()
    assert wc.status is rp.WCStatus.REM_ACCESS_ERR
    assert (wc.completion_ts, wc.completion_wallclock_ns) == (None, None)


def test_extended_cq_reports_every_other_field_like_an_ordinary_one(context, stack, pd):
    """Standard flags ask for nothing more; some drivers have them only."""
    fields = []
    for wc_flags in (0, WCExFlags.WITH_BYTE_LEN | WCExFlags.WITH_IMM):
        try:
            cq = stack.enter_context(rp.CQ(context, wc_flags=wc_flags))
        except rp.UnsupportedError:
            pytest.skip(f"{context.name} has no extended CQs")
        assert cq.wc_flags == wc_flags
        pair = Pair(stack, pd, cq)
        pair.b.post_recv(rp.RecvWR(pair.theirs[:64], wr_id=1))
        pair.a.post_send(rp.SendWithImm(pair.mine[:8], wr_id=2, imm_data=0x1234))
        done = {wc.wr_id: wc.check() for wc in pair.wait(2)}
        assert (done[1].qp_num, done[2].qp_num) == (pair.b.qp_num, pair.a.qp_num)
        fields.append(
            [(wc.opcode, wc.byte_len, wc.imm_data, wc.completion_ts) for wc in (done[1], done[2])]
        )
        assert done[1].imm_data == 0x1234
        # A thread sleeps on its channel, and rows hold it, like any other.
        waiter = threading.Thread(target=lambda cq=cq: cq.wait(3, 60))
        waiter.start()
        waiting(cq, [waiter])
        pair.a.post_send(writes(pair, 3))
        ended([waiter])
        pair.a.post_send(writes(pair, 3))
        assert cq.wait_into(bytearray(48 * 4), 3) == 3
        pair.a.close()
        pair.b.close()
    assert fields[0][0] == fields[1][0]
    assert fields[0][1][0] == fields[1][1][0]


def test_ordinary_completions_have_no_timestamps(rc):
    rc.a.post_send(write(rc))
    (wc,) = rc.wait()
    assert (wc.completion_ts, wc.completion_wallclock_ns) == (None, None)


@pytest.mark.parametrize("wc_flags", [TS, WALLCLOCK])
def test_device_without_timestamps_says_so(context, wc_flags):
    needs(not context.attr.completion_timestamp_mask, "refusal of completion timestamps", context)
    with pytest.raises(rp.UnsupportedError, match=r"ibv_create_cq_ex is not supported: .* has no "):
        rp.CQ(context, wc_flags=wc_flags)
    with pytest.raises(rp.UnsupportedError, match=r"has no clock that can be read$"):
        context.query_rt_values()


@pytest.mark.parametrize(
    "wc_flags", [WCExFlags.WITH_CVLAN, WCExFlags.WITH_FLOW_TAG, WCExFlags.WITH_FLOW_TAG | TS]
)
def test_vlan_and_flow_tags_that_the_device_does_not_report_are_named(context, wc_flags):
    needs(context.kind != "verbs" or context.name.startswith("rxe"), "virtual devices", context)
    needs(not wc_flags & TS or context.attr.completion_timestamp_mask, "timestamps", context)
    named = wc_flags & ~TS
    with pytest.raises(rp.UnsupportedError, match=rf"{context.name} does not report {named}$"):
        rp.CQ(context, wc_flags=wc_flags)


@pytest.mark.parametrize("field", ["cvlan", "flow_tag"])
def test_vlan_or_flow_tag_is_shown_if_the_cq_was_created_with_it(soft, stack, monkeypatch, field):
    """No device of the tests reports one: soft0's, which are 0, are shown as if asked for."""
    flag = WCExFlags[f"WITH_{field.upper()}"]
    poller = native.Poller
    monkeypatch.setattr(
        native,
        "Poller",
        lambda cq, of, keys, flags, *rest: poller(cq, of, keys, flags | flag, *rest),
    )
    context = stack.enter_context(rp.open_device(soft))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context, wc_flags=TS))
    pair = Pair(stack, pd, cq)
    pair.a.post_send(write(pair))
    (wc,) = pair.wait()
    assert {"cvlan": wc.cvlan, "flow_tag": wc.flow_tag} == {
        "cvlan": None,
        "flow_tag": None,
        field: 0,
    }


def test_library_without_extended_cqs_says_so(on_null):
    text = on_null("""
    context, pd, cq = resources()
    print(said(lambda: rp.CQ(context, wc_flags=rp.WCExFlags.WITH_COMPLETION_TIMESTAMP)))
    print(said(context.query_rt_values))
    """)
    cq, clock = text.splitlines()
    assert cq.startswith("UnsupportedError: ibv_create_cq_ex is not supported: null0 has no compl")
    assert clock.startswith("UnsupportedError: ibv_query_rt_values_ex is not supported")


def test_unknown_wc_flags_are_refused(context):
    for wrong in (1 << 12, -1, 1 << 40):
        with pytest.raises(ValueError, match=r"^wc_flags=.* is not a combination of WCExFlags$"):
            rp.CQ(context, wc_flags=wrong)
    with pytest.raises(TypeError, match=r"^wc_flags: expected int, got str$"):
        rp.CQ(context, wc_flags="TS")


def test_clock_of_a_closed_device_cannot_be_read(context):
    with rp.open_device(context.name) as another:
        pass
    with pytest.raises(rp.ClosedError, match="is closed"):
        another.query_rt_values()
