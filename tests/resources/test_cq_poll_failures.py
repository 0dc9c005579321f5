"""Polling: failing devices, and several completions at once."""

from __future__ import annotations

import ast
import errno
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import null_device, posting_tap, prints, soft_context
from support.posting_tap import PolledCQ
from support.tag_server import MATCHED, small_server

import rdmapost as rp
from rdmapost._binding import ffi, lib

context = soft_context
tap = posting_tap.tap
server = small_server
null = null_device.null

FAILING = """
import ctypes, os
context, pd, cq = resources()
mr = rp.MR(pd, 64)
qp = rp.QP(pd, rp.QPType.RC, cq)
qp.connect(qp.endpoint())
null = ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"])
null.null_remember(1)
qp.post_recv([rp.RecvWR(mr[0:8], wr_id=1), rp.RecvWR(mr[0:8], wr_id=2)])
found = []
for code in (5, 0):
    null.null_fail_poll(code)
    for call in (cq.poll, lambda: cq.poll(100), lambda: cq.wait(1, timeout=1)):
        try: found.append(call())
        except rp.VerbsError as error: found.append((error.errno, str(error)))
null.null_fail_poll(-1)
found.append([wc.wr_id for wc in cq.poll()])
qp.post_recv(rp.RecvWR(mr[0:8], wr_id=3))
try: cq.wait(2, timeout=0.01)
except rp.WaitTimeout as error: found.append(str(error))
found.append([wc.wr_id for wc in cq.poll()])
print(found)
"""


@pytest.fixture(scope="module")
def failed(null):
    """What polling raised while it failed, and returned when it no longer did; and likewise a
    wait."""
    text = prints(
        null_device.SETUP + FAILING, RDMAPOST_LIBIBVERBS=null, ASAN_OPTIONS="detect_leaks=0"
    )
    return ast.literal_eval(text)


def test_a_poll_that_fails_says_why_and_loses_nothing(failed):
    """Some providers set no errno: that is EIO."""
    assert [code for code, _ in failed[:6]] == [errno.EIO] * 6
    assert all("ibv_poll_cq" in text for _, text in failed[:6])
    assert failed[6] == [1, 2]


def test_spinning_wait_that_times_out_keeps_the_completions_that_came(failed):
    """On a device on which a wait first polls repeatedly."""
    assert failed[7:] == ["1 of 2 completions came within 0.01 s", [3]]


GONE = """
import array, ctypes, os, sys
from rdmapost.resources.aio import _rearm
context, pd, cq = resources()
mr = rp.MR(pd, 64)
qp, other = (rp.QP(pd, rp.QPType.RC, cq) for _ in "ab")
for each in (qp, other): each.connect(each.endpoint())
null = ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"])
null.null_remember(1)
index, rows = array.array("Q", range(3)), memoryview(bytearray(48 * 8))
if sys.argv[2] == "poll": qp.post_recv([rp.RecvWR(mr[0:8], wr_id=i) for i in index])
else: qp.post_recv_columns(mr.blocks(index, 8), wr_id=index)
other.post_recv(rp.RecvWR(mr[0:8], wr_id=7))
# So that they are not taken when the queue pair goes.
null.null_fail_poll(5)
getattr(qp, sys.argv[1])()
null.null_fail_poll(-1)
if sys.argv[2] == "poll": found = [wc.wr_id for wc in cq.poll()]
else: found = [*rows[:48 * cq.poll_into(rows)].cast("Q")[::6]]
print(found, sum(other.outstanding))
other.post_recv([rp.RecvWR(mr[0:8], wr_id=i) for i in (8, 9)])
found = cq.poll()
cq._poller.put_back(found)
null.null_fail_poll(5)
print(_rearm(cq, 3), [wc.wr_id for wc in cq.poll(1)], [wc.wr_id for wc in cq.poll(100)])
"""


@pytest.mark.parametrize("by", ["poll", "poll_into"])
@pytest.mark.parametrize("call", ["close", "to_reset"])
def test_completion_of_a_work_request_no_longer_outstanding_retires_nothing(null, call, by):
    """Those of other queue pairs in the same batch are delivered, and what is there stays."""
    env = {"RDMAPOST_LIBIBVERBS": null, "ASAN_OPTIONS": "detect_leaks=0"}
    said = prints(null_device.SETUP + GONE, call, by, **env)
    assert said.splitlines() == ["[7] 0", "2 [8] [9]"]


@pytest.mark.parametrize("count", [2, 7])
def test_each_message_of_a_batch_has_its_own_tag(server, count):
    """One completion's tag and sender's data are not another's."""
    for i in range(count):
        server.add(0xFFFF_FFFF_0000_0000 + i, i * 64, 64, recv_wr_id=i)
    for i in reversed(range(count)):
        server.client.eager(0xFFFF_FFFF_0000_0000 + i, bytes([i]), 0xFFFF_0000 + i)
    batch = server.cq.wait(count)
    assert [(wc.wr_id, wc.tm_tag, wc.tm_priv, wc.wc_flags) for wc in batch] == [
        (i, 0xFFFF_FFFF_0000_0000 + i, 0xFFFF_0000 + i, MATCHED) for i in reversed(range(count))
    ]


def test_completions_of_several_queues_in_one_poll_keep_their_queue_pair(rc):
    """Completions of two queue pairs and four queues, interleaved, in one poll."""
    for at in (0, 10, 20):
        for wr_id in range(at, at + 4):
            mine, theirs = (rc.a, rc.b) if wr_id % 2 else (rc.b, rc.a)
            theirs.post_recv(rp.RecvWR(rc.theirs[:64], wr_id=wr_id))
            mine.post_send(rp.Send(rc.mine[:8], wr_id=100 + wr_id))
        found = {wc.check().wr_id: wc.qp_num for wc in rc.wait(8)}
        for wr_id in range(at, at + 4):
            mine, theirs = (rc.a, rc.b) if wr_id % 2 else (rc.b, rc.a)
            assert found.pop(wr_id) == theirs.qp_num
            assert found.pop(100 + wr_id) == mine.qp_num
        assert found == {}
    assert sum(rc.a.outstanding) + sum(rc.b.outstanding) == 0


def rows_of(call: Callable[..., int], *args: Any) -> list[bytes]:
    """Return the rows that poll_into or wait_into writes."""
    got = bytearray(48 * 128)
    count = call(got, *args)
    return [bytes(got[at : at + 48]) for at in range(0, 48 * count, 48)]


CALLS: dict[str, Callable[[rp.CQ], int]] = {
    "poll": lambda cq: len(cq.poll(128)),
    "wait": lambda cq: len(cq.wait(64, max_entries=128)),
    "poll_into": lambda cq: len(rows_of(cq.poll_into)),
    "wait_into": lambda cq: len(rows_of(cq.wait_into, 64)),
}


@pytest.fixture
def pd_of_tap(tap, stack) -> rp.PD:
    return stack.enter_context(rp.PD(tap.context))


@pytest.fixture
def tapped(tap, pd_of_tap, stack) -> tuple[rp.CQ, rp.QP]:
    """A CQ whose polls call the test, and a queue pair that is connected to itself."""
    pd, cq = pd_of_tap, stack.enter_context(rp.CQ(tap.context, 128))
    qp = stack.enter_context(rp.QP(pd, rp.QPType.RC, cq, max_send_wr=64))
    qp.connect(qp.endpoint())
    return cq, qp


@pytest.mark.parametrize("call", CALLS)
def test_failure_after_completions_have_come_is_left_to_the_next_call(tap, tapped, call):
    """The device is polled for 64 at a time."""
    cq, qp = tapped
    qp.post_send([rp.RdmaWrite(wr_id=i) for i in range(64)])
    tap.on_poll(lambda count, _: count or -1)
    assert CALLS[call](cq) == 64
    with pytest.raises(rp.VerbsError, match="ibv_poll_cq: EIO"):
        CALLS[call](cq)
    tap.on_poll(None)
    qp.post_send(rp.RdmaWrite(wr_id=64))
    assert [wc.wr_id for wc in cq.wait()] == [64]


@pytest.mark.parametrize("status", [rp.WCStatus.SUCCESS, rp.WCStatus.REM_OP_ERR])
@pytest.mark.parametrize("opcode", [rp.WCOpcode.SEND, rp.WCOpcode.RECV])
@pytest.mark.parametrize("flags", [rp.WCFlags(0), rp.WCFlags.WITH_IMM, rp.WCFlags.WITH_INV])
def test_row_of_a_completion_is_the_same_wherever_it_was_before(tap, tapped, status, opcode, flags):
    """Just polled, or polled before, or a WC.

    Some drivers set the flags of immediate data on the sender's side too, without data.
    """
    cq, qp = tapped

    def report(count: int, wc: Any) -> int:
        if count:
            cookie = wc.wr_id
            ffi.buffer(wc, 46)[:] = bytes(range(1, 47))
            wc.wr_id, wc.status, wc.opcode, wc.wc_flags = cookie, status, opcode, flags
        return count

    tap.on_poll(report)
    found, keys = [], set()
    for where in ("device", "backlog", "WC"):
        qp.post_send(rp.RdmaWrite(wr_id=2**63))
        if where == "backlog":
            assert cq._poller.fill(cq, 1) == 1
        if where == "WC":
            wcs = cq.poll()
            keys = {wcs[0].imm_data, wcs[0].invalidated_rkey} - {None}
            cq._poller.put_back(wcs)
        found += rows_of(cq.poll_into)
    assert found == [found[0]] * 3
    assert int.from_bytes(found[0][:8], sys.byteorder) == 2**63
    has_key = status is rp.WCStatus.SUCCESS and opcode is rp.WCOpcode.RECV and flags
    assert len(keys) == bool(has_key)
    assert int.from_bytes(found[0][24:28], sys.byteorder) == sum(keys)


@pytest.mark.parametrize("by", ["poll", "poll_into"])
@pytest.mark.parametrize("posted_by", ["list", "columns"])
def test_completions_behind_those_that_the_device_reports_are_not_read(
    tap, tapped, pd_of_tap, by, posted_by
):
    """It may leave anything there."""

    def poll() -> list[int]:
        if by == "poll":
            return [wc.wr_id for wc in cq.poll()]
        return [int.from_bytes(row[:8], sys.byteorder) for row in rows_of(cq.poll_into)]

    cq, qp = tapped
    index = np.arange(6, dtype="u8")
    with rp.MR(pd_of_tap, 64) as mr:
        if posted_by == "list":
            qp.post_recv([rp.RecvWR(mr[:8], wr_id=i) for i in range(6)])
        else:
            qp.post_recv_columns(mr.blocks(index, 8), wr_id=index)
        qp.post_send([rp.Send(send_flags=0)] * 4)
        tap.on_poll(lambda count, _: min(count, 3))
        assert poll() == [0, 1, 2]
        assert qp.outstanding.recv == 3
        tap.on_poll(None)
        qp.post_send([rp.Send(send_flags=0), rp.Send()])
        assert poll() == [4, 5, 0]
        assert qp.outstanding == (0, 0)


def test_completions_of_any_two_queue_pairs_keep_their_queue_pair(stack):
    """Whatever their numbers on the device, which count from 0."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context))
    qps = [stack.enter_context(rp.QP(pd, rp.QPType.RC, cq)) for _ in range(5)]
    for qp in qps:
        qp.connect(qp.endpoint())
    for pair in itertools.product(enumerate(qps), repeat=2):
        for wr_id, qp in pair:
            qp.post_recv(rp.RecvWR(wr_id=10 + wr_id))
            qp.post_send(rp.Send(wr_id=wr_id))
        found = sorted((wc.wr_id, wc.qp_num) for wc in cq.poll())
        assert found == sorted((kind + wr_id, qp.qp_num) for wr_id, qp in pair for kind in (0, 10))
        assert not any(map(sum, (qp.outstanding for qp in qps)))


# ---- what the shim makes of a device's answers ----------------------------------------

SECOND = 10**9
BOTH = pytest.mark.parametrize("extended", [False, True], ids=["ibv_cq", "ibv_cq_ex"])


class Polled:
    """What one call of the shim returned, and what it wrote."""

    def __init__(
        self, cq: PolledCQ, extended: bool, max_entries: int, min_entries: int = 0, spin_ns: int = 0
    ) -> None:
        room = 8
        self.wc = ffi.new("struct ibv_wc[]", room)
        self.more = ffi.new("struct rp_wc_ex[]", room)
        for array in (self.wc, self.more):
            ffi.buffer(array)[:] = b"\xee" * ffi.sizeof(array)
        address = ffi.cast("struct ibv_cq *", cq.address)
        more = self.more if extended else ffi.NULL
        self.count = lib.rp_poll_cq(address, self.wc, more, max_entries, min_entries, spin_ns)
        self.errno = ffi.errno if self.count < 0 else 0
        self.wr_ids = [self.wc[i].wr_id for i in range(max(self.count, 0))]


@BOTH
@pytest.mark.parametrize(
    ("answers", "max_entries", "min_entries", "spin_ns", "count", "polls"),
    [
        ([2], 4, 0, 0, 2, 1),
        ([4], 4, 4, 0, 4, 1),
        ([0], 1, 0, 0, 0, 1),
        ([1, 1], 4, 2, 0, 1, 1),
        ([1, 1], 4, 2, 1, 2, 2),
        ([1, 0, 2, 1], 4, 3, SECOND, 3, 3),
        ([1, 0, 3, 1], 4, 4, SECOND, 4, 3),
        ([2, -1], 4, 4, SECOND, 2, 2),
    ],
)
def test_wait_polls_until_it_has_enough_completions_and_no_longer(
    extended, answers, max_entries, min_entries, spin_ns, count, polls
):
    """And no longer; completions before a failure are not lost."""
    cq = PolledCQ(extended, answers)
    done = Polled(cq, extended, max_entries, min_entries, spin_ns)
    assert (done.count, done.wr_ids, cq.polls) == (count, [*range(count)], polls)
    there = 0
    for at, (asked, answer) in enumerate(zip(cq.asked, answers, strict=False)):
        assert asked == (0 if extended else max_entries - there), f"poll {at}"
        there += max(answer, 0)
    assert cq.ended == (count if extended else 0)


def test_an_extended_cq_is_asked_for_no_more_than_there_is_room_for():
    cq = PolledCQ(True, [2, 9])
    done = Polled(cq, True, 5, 5, SECOND)
    assert (done.wr_ids, cq.polls, cq.ended) == ([0, 1, 2, 3, 4], 2, 5)
    assert bytes(ffi.buffer(done.wc[5:6])) == b"\xee" * ffi.sizeof("struct ibv_wc")


@BOTH
def test_a_poll_that_fails_is_eio(extended):
    cq = PolledCQ(extended, [-1])
    done = Polled(cq, extended, 4)
    assert (done.count, done.errno, cq.polls, cq.ended) == (-1, errno.EIO, 1, 0)


def test_completions_before_an_extended_cq_fails_are_returned():
    cq = PolledCQ(True, [-3])
    done = Polled(cq, True, 4, 2)
    assert (done.wr_ids, cq.polls, cq.ended) == ([0, 1], 1, 2)


@pytest.mark.parametrize(("answers", "count"), [([5], -1), ([2, 3], 2), ([4, 1], 4)])
def test_a_device_that_returns_more_than_there_is_room_for_has_failed(answers, count):
    done = Polled(PolledCQ(False, answers), False, 4, 4, SECOND)
    assert (done.count, done.errno) == (count, errno.EIO if count < 0 else 0)


@BOTH
@pytest.mark.parametrize(("max_entries", "min_entries"), [(0, 0), (-1, -1), (1, 2)])
def test_poll_for_more_than_the_array_holds_is_einval(extended, max_entries, min_entries):
    cq = PolledCQ(extended, [1])
    done = Polled(cq, extended, max_entries, min_entries)
    assert (done.count, done.errno, cq.polls) == (-1, errno.EINVAL, 0)


@BOTH
def test_spinning_wait_ends_when_its_time_is_over(extended):
    """It is longer than a second, so that the nanoseconds wrap."""
    cq = PolledCQ(extended, [])
    begun = time.monotonic_ns()
    assert Polled(cq, extended, 1, 1, 1_050_000_000).count == 0
    assert time.monotonic_ns() - begun >= 1_050_000_000
    assert cq.polls > 2


@BOTH
@pytest.mark.parametrize("missing", ["cq", "wc"])
def test_polling_with_a_null_pointer_is_einval(extended, missing):
    given: dict[str, Any] = {
        "cq": ffi.cast("struct ibv_cq *", PolledCQ(extended, [1]).address),
        "wc": ffi.new("struct ibv_wc *"),
        "more": ffi.new("struct rp_wc_ex *") if extended else ffi.NULL,
    }
    given[missing] = ffi.NULL
    assert lib.rp_poll_cq(*given.values(), 1, 0, 0) == -1
    assert ffi.errno == errno.EINVAL


FIELDS = {
    "opcode": 10,
    "byte_len": 30,
    "imm_data": 40,
    "src_qp": 60,
    "wc_flags": 70,
    "slid": 80,
    "sl": 90,
    "dlid_path_bits": 100,
}
"""What is in a success only, and what PolledCQ makes of wr_id 0 for it."""


@pytest.mark.parametrize("reports", [True, False])
def test_an_extended_cq_is_asked_for_what_its_completions_have(reports):
    """A failed one has no more than qp_num and vendor_err; what is not asked for is 0."""
    done = Polled(PolledCQ(True, [2], reports), True, 2)
    good, failed = done.wc[0], done.wc[1]
    assert {name: getattr(good, name) for name in FIELDS} == FIELDS
    assert (good.status, good.qp_num, good.vendor_err, good.pkey_index) == (0, 50, 0, 0)
    assert {name: getattr(failed, name) for name in FIELDS} == dict.fromkeys(FIELDS, 0)
    assert (failed.qp_num, failed.vendor_err, failed.pkey_index) == (51, 21, 0)
    assert failed.status == rp.WCStatus.REM_OP_ERR
    names = ("completion_ts", "completion_wallclock_ns", "flow_tag", "cvlan")
    found = [
        (more.tm.tag, more.tm.priv, *(getattr(more, name) for name in names))
        for more in done.more[0:2]
    ]
    assert found == [(110, 120, 130, 140, 150, 160) if reports else (0,) * 6, (0,) * 6]


def test_device_that_refuses_req_notify_is_a_verbs_error():
    """Its CQ is destroyed behind the library's back."""
    code = """
import os
import rdmapost as rp
context = rp.open_device("soft0")
cq = rp.CQ(context, channel=rp.CompChannel(context))
context._provider.destroy_cq(cq._handle)
for call in (cq.req_notify, cq.poll):
    try: call()
    except rp.VerbsError as error: print(str(error).partition(" (")[0], flush=True)
os._exit(0)
"""
    assert prints(code).splitlines() == ["ibv_req_notify_cq: EINVAL", "ibv_poll_cq: EIO"]
