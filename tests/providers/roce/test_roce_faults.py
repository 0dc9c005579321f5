"""The faults of packets that a user can plan on a roce device."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import GRH, LIMIT, Pair, until
from support.pcapng import check_headers, payload_of, read
from support.roce import open_roce, skip_unless_free

import rdmapost as rp
from rdmapost import QPType, WCStatus
from rdmapost._binding import native
from rdmapost.loopback import Loopback
from rdmapost.providers.fault_plan import PacketFaults
from rdmapost.providers.roce.addresses import flow
from rdmapost.providers.roce.faults import Direction, damage, fate_of
from rdmapost.standard.wire import ROCE_V2_PORT

DEVICE = "roce:lo"
NONE = PacketFaults(0, 0, 0, 0, 0, 0.005, 0)
KINDS = ("drop", "duplicate", "delay", "reorder", "corrupt")
EVERYTHING = dict.fromkeys(KINDS, 0.05)


@pytest.fixture(scope="module")
def opened() -> Iterator[rp.Context]:
    with open_roce(DEVICE) as context:
        yield context


@pytest.fixture
def context(opened: rp.Context) -> Iterator[rp.Context]:
    yield opened
    opened.faults.clear()


# ---- the plan ------------------------------------------------------------------------------


def test_packet_faults_of_the_same_seed_are_the_same_plan():
    plan = NONE._replace(**EVERYTHING)
    first = [fate_of(plan, 1, n) for n in range(1000)]
    assert first == [fate_of(plan, 1, n) for n in range(1000)]
    assert first != [fate_of(plan._replace(seed=1), 1, n) for n in range(1000)]
    # The same packets again, received, must not meet the same fates.
    assert first != [fate_of(plan, 2, n) for n in range(1000)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 1.0])
def test_packet_fault_rates_are_kept_and_independent(kind, rate):
    count = 20_000
    alone = NONE._replace(**{kind: rate}, seed=7)
    at = KINDS.index(kind)

    def hit(plan: PacketFaults) -> list[bool]:
        return [
            bool(fate[at]) if at < 4 else fate.damage >= 0
            for fate in (fate_of(plan, 1, n) for n in range(count))
        ]

    chosen = hit(alone)
    assert sum(chosen) == pytest.approx(rate * count, abs=0.01 * count)
    if rate in (0.0, 1.0):
        assert sum(chosen) == rate * count
    others = dict.fromkeys(set(KINDS) - {kind}, 0.3)
    assert hit(alone._replace(**others)) == chosen


def direction(**rates: float) -> Direction:
    made = Direction(1)
    made.begin(NONE._replace(**rates))
    return made


def admit(to: Direction, item: Any, now: float = 0.0) -> list[Any]:
    return to.admit(item, now, lambda item, number: f"damaged {item}")[0]


def test_packets_are_dropped_duplicated_or_damaged_as_planned():
    assert admit(Direction(1), "a") == ["a"]
    assert admit(direction(), "a") == ["a"]
    assert admit(direction(drop=1), "a") == []
    assert admit(direction(duplicate=1), "a") == ["a", "a"]
    assert admit(direction(corrupt=1), "a") == ["damaged a"]
    assert admit(direction(drop=1, duplicate=1, corrupt=1), "a") == []


def test_packet_delayed_by_a_planned_fault_arrives_later():
    delayed = direction(delay=1, delay_by=2.0)
    assert admit(delayed, "a", 10.0) == admit(delayed, "b", 11.0) == []
    assert delayed.due == 12.0
    assert delayed.release(11.9) == []
    assert delayed.release(12.0) == ["a"]
    assert delayed.release(99.0) == ["b"]
    assert delayed.due == math.inf


def test_next_packet_overtakes_one_that_is_reordered():
    plan = NONE._replace(reorder=0.5, seed=3)
    reorders = [fate_of(plan, 1, n).reorder for n in range(100)]
    (at, *_) = [n for n in range(99) if reorders[n : n + 2] == [True, False]]
    made = Direction(1)
    made.begin(plan)
    made.count = at
    assert admit(made, "a") == []
    assert admit(made, "b") == ["b", "a"]
    made.count = at
    assert admit(made, "last", 5.0) == []
    assert made.release(5.001) == []
    assert made.release(5.002) == ["last"]


def test_packet_fault_plan_that_ends_loses_no_waiting_packet():
    delayed = direction(delay=1, delay_by=2.0)
    admit(delayed, "a")
    delayed.begin(None)
    assert not delayed.is_straight
    assert admit(delayed, "b") == ["b"]
    assert delayed.release(2.0) == ["a"]
    assert delayed.is_straight


def test_number_of_packets_that_wait_is_bounded():
    delayed = direction(delay=1, delay_by=1000.0)
    passed = [admit(delayed, n) for n in range(3000)]
    assert sum(map(len, passed)) + len(delayed.held) == 3000
    assert len(delayed.held) < 2000


@pytest.mark.parametrize("address", ["::ffff:10.0.0.1", "fd00::1"], ids=["IPv4", "IPv6"])
def test_damaged_packet_has_a_wrong_icrc_whatever_bit_is_chosen(address):
    gid = socket.inet_pton(socket.AF_INET6, address)
    covered = flow(gid, gid, ROCE_V2_PORT)
    assert covered is not None
    header = bytes((4, 0x40, 0xFF, 0xFF, *bytes(8)))
    data = bytearray(200)
    size = native.roce_build(data, covered, [header], (os.urandom(100),), 100)
    packet = bytes(data[:size])
    assert native.roce_id(packet, 0, size, covered) == 0
    for number in [*range(8 * size + 1), (1 << 64) - 1]:
        made = damage(packet, covered, number)
        assert native.roce_id(made, 0, size, covered) < 0
        flipped = [one ^ other for one, other in zip(made, packet, strict=True)]
        assert sum(byte.bit_count() for byte in flipped) == 1


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"drop": 1.1}, ValueError, r"drop=1.1 is not in 0\.\.1"),
        ({"corrupt": -1}, ValueError, r"corrupt=-1 is not in 0\.\.1"),
        ({"delay": float("nan")}, ValueError, "delay: expected number, got NaN"),
        ({"reorder": "5%"}, TypeError, "reorder: expected number, got str"),
        ({"duplicate": None}, TypeError, "duplicate: expected number, got NoneType"),
        ({"delay_by": 0}, ValueError, "delay_by=0: expected more than 0 s"),
        ({"seed": -1}, ValueError, "seed=-1 is not in 0"),
        ({"seed": 1.5}, TypeError, "seed: expected int, got float"),
    ],
)
def test_wrong_packet_fault_plan_is_refused_and_the_old_one_stays(context, options, error, says):
    with pytest.raises(error, match=says):
        context.faults.packets(**options)


def test_packet_faults_on_soft0_are_refused():
    with (
        rp.open_device("soft0") as soft,
        pytest.raises(rp.UnsupportedError, match="soft0 has no packets; use a roce device"),
    ):
        soft.faults.packets(drop=0.1)


@pytest.mark.rdma
def test_packet_faults_on_a_real_device_are_refused(verbs_context):
    with pytest.raises(rp.UnsupportedError, match="only soft0 and roce devices support it"):
        _ = verbs_context.faults


# ---- on a device ---------------------------------------------------------------------------


def faults(context: rp.Context) -> int:
    return context.counters().faults


@pytest.mark.parametrize("both", ["sent", "received"])
def test_packet_lost_on_every_attempt_ends_with_retry_exc_err(context, connect, both):
    pair: Pair = connect(to=rp.QPState.RESET)
    pair.a.connect(pair.b.endpoint(), timeout=10, retry_cnt=1)
    pair.b.connect(pair.a.endpoint())
    other = "received" if both == "sent" else "sent"
    context.faults.packets(drop=1, **{other: False})
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    (wc,) = pair.cq.wait(1, LIMIT)
    assert wc.status is WCStatus.RETRY_EXC_ERR
    assert faults(context) > 0


def test_packet_faults_of_one_direction_leave_those_of_the_other(context, connect):
    pair: Pair = connect()
    context.faults.packets(duplicate=1, received=False)
    context.faults.packets(duplicate=1, sent=False)
    before = context.counters()
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    pair.wait()
    now = context.counters()
    assert now.packets_sent - before.packets_sent >= 2
    until(lambda: context.counters().packets_received - before.packets_received >= 8)
    context.faults.packets(sent=False)
    context.faults.clear()
    before = faults(context)
    pair.works()
    assert faults(context) == before


def datagrams(context: rp.Context, pair: Pair, **plan: Any) -> list[int]:
    """Send datagrams under a plan; return which ones arrive, in order."""
    count = 64
    pair.b.post_recv([rp.RecvWR(pair.theirs[64 * n : 64 * n + 64]) for n in range(count * 2)])
    context.faults.packets(received=False, **plan)
    for number in range(count):
        # 0 means that the receive got no message.
        pair.mine.buffer[0] = number + 1
        pair.a.post_send(pair.send(pair.mine[:1], wr_id=1))
        found = pair.cq.wait(1, LIMIT)
        while found[-1].wr_id != 1:
            found = pair.cq.wait(1, LIMIT)
    context.faults.clear()
    time.sleep(0.02)  # what waits goes within 5 ms
    # The last one: nothing comes after it.
    pair.mine.buffer[0] = 255
    pair.a.post_send(pair.send(pair.mine[:1], wr_id=1))
    arrived = []
    for at in itertools.count(GRH, 64):
        until(lambda at=at: pair.cq.poll() or pair.theirs.buffer[at])
        arrived.append(pair.theirs.buffer[at])
        if arrived[-1] == 255:
            return arrived
    raise AssertionError


def test_receiver_sees_the_same_faults_with_the_same_seed(context, connect):
    seen = {}
    for seed, turn in itertools.product((1, 2), (0, 1)):
        pair = connect(QPType.UD, size=64 * 256, max_recv_wr=256)
        pair.theirs.buffer[:] = bytes(len(pair.theirs.buffer))
        rates = {"drop": 0.2, "duplicate": 0.2, "corrupt": 0.2}
        seen[seed, turn] = datagrams(context, pair, seed=seed, **rates)
    assert seen[1, 0] == seen[1, 1] != seen[2, 0] == seen[2, 1]
    numbers = seen[1, 0][:-1]
    assert 20 < len(set(numbers)) < 64
    assert len(numbers) > len(set(numbers))
    assert numbers == sorted(numbers)


def test_reordered_datagrams_are_overtaken_by_the_next(context, connect):
    pair = connect(QPType.UD, size=64 * 256, max_recv_wr=256)
    pair.theirs.buffer[:] = bytes(len(pair.theirs.buffer))
    numbers = datagrams(context, pair, reorder=0.2, delay=0.1)[:-1]
    assert sorted(numbers) == [*range(1, 65)] != numbers


def program(pair: Pair, seed: int) -> None:
    """Writes, reads, sends and atomics of all sizes, in both directions at once."""
    rng = random.Random(seed)
    here, there = pair.mine.buffer, pair.theirs.buffer
    half = len(here) // 2
    for _ in range(12):
        size = rng.choice([1, 100, 4096, 5000, 20_000])
        here[:half], there[:half] = rng.randbytes(half), rng.randbytes(half)
        there[half : half + 8] = here[half : half + 8] = bytes(8)
        wrs, expected = {}, []
        for qp, near, far in ((pair.a, pair.mine, pair.theirs), (pair.b, pair.theirs, pair.mine)):
            at = half + 64
            remote = {"rkey": far.rkey}
            wrs[qp] = [
                rp.RdmaWrite(near[:size], wr_id=1, remote_addr=far.addr + at, **remote),
                rp.Send(near[:size], wr_id=2),
                rp.AtomicFetchAndAdd(
                    near[half + 16 : half + 24],
                    wr_id=3,
                    remote_addr=far.addr + half,
                    compare_add=size,
                    **remote,
                ),
                rp.RdmaRead(
                    near[at + 2 * size : at + 3 * size], wr_id=4, remote_addr=far.addr, **remote
                ),
            ]
            qp.post_recv(rp.RecvWR(near[at + size : at + 2 * size], wr_id=5))
            expected.append((near.buffer, bytes(far.buffer[:size])))
        for qp, list_of_wrs in wrs.items():
            qp.post_send(list_of_wrs)
        done = pair.cq.wait(10, LIMIT)
        assert [wc.status for wc in done] == [WCStatus.SUCCESS] * 10
        assert sorted(wc.wr_id for wc in done) == sorted([1, 2, 3, 4, 5] * 2)
        for buffer, theirs in expected:
            at = half + 64
            assert buffer[at : at + size] == theirs, "written"
            assert buffer[at + size : at + 2 * size] == theirs, "sent"
            assert buffer[at + 2 * size : at + 3 * size] == theirs, "read"
            # Exactly once, whatever was lost or came twice.
            assert int.from_bytes(buffer[half : half + 8], sys.byteorder) == size


PLANS = [{kind: 0.05} for kind in KINDS] + [EVERYTHING]


def patient(pair: Pair) -> None:
    """Connect a pair with short timeouts and all retries."""
    for near, far in ((pair.a, pair.b), (pair.b, pair.a)):
        near.connect(far.endpoint(), timeout=12, retry_cnt=7, rnr_retry=7)


@pytest.mark.parametrize("where", ["sent", "received"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan))
def test_generated_programs_end_as_specified_on_a_bad_network(context, connect, plan, where):
    pair: Pair = connect(to=rp.QPState.RESET, size=1 << 18)
    patient(pair)
    before = faults(context)
    context.faults.packets(**plan, **{"sent": False, "received": False, where: True})
    program(pair, 1)
    assert faults(context) > before
    context.faults.clear()
    pair.works()


@pytest.mark.parametrize("seed", range(4))
def test_every_operation_ends_with_a_named_status_on_a_network_that_is_too_bad(
    context, connect, seed
):
    """A quarter of the packets is lost each way."""
    pair: Pair = connect(to=rp.QPState.RESET, size=1 << 18)
    patient(pair)
    context.faults.packets(seed=seed, **dict.fromkeys(KINDS, 0.15))
    wrs = [
        wr
        for n in range(4)
        for wr in (
            pair.wr(rp.RdmaWrite, pair.mine[:20_000], wr_id=4 * n),
            pair.wr(rp.RdmaRead, pair.mine[30_000:50_000], wr_id=4 * n + 1),
            pair.wr(rp.AtomicFetchAndAdd, pair.mine[:8], wr_id=4 * n + 2, compare_add=1),
        )
    ]
    pair.a.post_send(wrs)
    done = pair.cq.wait(len(wrs), LIMIT)
    assert [wc.wr_id for wc in done] == [wr.wr_id for wr in wrs]
    statuses = [wc.status for wc in done]
    failed = [status for status in statuses if status]
    assert failed == statuses[len(statuses) - len(failed) :]
    flushed = [WCStatus.WR_FLUSH_ERR] * (len(failed) - 1)
    assert failed in ([], [WCStatus.RETRY_EXC_ERR, *flushed])


@pytest.mark.parametrize("qp_type", [QPType.UC, QPType.UD], ids=lambda t: t.name)
def test_unreliable_messages_are_lost_whole_or_arrive_right(context, connect, qp_type):
    """And the sender does not notice."""
    pair: Pair = connect(qp_type)
    size, grh = (4000, GRH) if qp_type is QPType.UD else (8000, 0)
    content = os.urandom(size)
    pair.mine.buffer[:size] = content
    context.faults.packets(**EVERYTHING, seed=5)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:], wr_id=2))
    sent = arrived = 0
    while sent < 100:
        pair.a.post_send(pair.send(pair.mine[:size], wr_id=1))
        for wc in pair.wait(1):
            if wc.wr_id == 1:
                sent += 1
                continue
            arrived += 1
            assert wc.byte_len == grh + size
            assert pair.theirs.buffer[grh : grh + size] == content
            pair.theirs.buffer[grh : grh + size] = bytes(size)
            pair.b.post_recv(rp.RecvWR(pair.theirs[:], wr_id=2))
        while pair.a.outstanding.send:
            pair.wait(1)
            sent += 1
    assert arrived > 20


def test_roce_devices_inject_the_faults_of_soft0(context, connect):
    pair: Pair = connect()
    context.faults.fail_post(errno.ENOMEM)
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8]))
    assert caught.value.errno == errno.ENOMEM
    context.faults.not_ready(pair.b.qp_num, 1)
    pair.works()
    context.faults.complete_with(8, WCStatus.SUCCESS)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8], wr_id=8))
    assert pair.cq.wait(1)[0].status is WCStatus.SUCCESS
    pair.works()
    context.faults.complete_with(9, WCStatus.RETRY_EXC_ERR)
    pair.a.post_send(pair.wr(rp.RdmaWrite, pair.mine[:8], wr_id=9))
    assert pair.cq.wait(1)[0].status is WCStatus.RETRY_EXC_ERR


def test_a_read_that_has_begun_ignores_a_planned_status(context, connect):
    """Its data arrives completely; the status is for the next work request."""
    pair: Pair = connect(size=1 << 20)
    pair.theirs.buffer[:] = b"r" * (1 << 20)
    context.faults.packets(drop=1.0, sent=False)
    pair.a.post_send(pair.wr(rp.RdmaRead, pair.mine[:], wr_id=5))
    context.faults.complete_with(5, WCStatus.REM_OP_ERR)
    context.faults.packets()
    (done,) = pair.cq.wait(1)
    assert (done.status, done.byte_len) == (WCStatus.SUCCESS, 1 << 20)
    assert bytes(pair.mine.buffer) == b"r" * (1 << 20)
    pair.a.post_send(pair.wr(rp.RdmaRead, pair.mine[:8], wr_id=5))
    assert pair.cq.wait(1)[0].status is WCStatus.REM_OP_ERR


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_planned_success_reports_the_length_of_a_real_one(device):
    skip_unless_free(device)
    with rp.open_device(device) as context:
        lengths = []
        for planned in (False, True):
            with Loopback(context) as loopback:
                mr = loopback.local.mr
                for wr in (
                    rp.RdmaRead(mr[:24], wr_id=1, **loopback.target()),
                    rp.AtomicFetchAndAdd(mr[:8], wr_id=2, compare_add=1, **loopback.target()),
                    rp.RdmaWrite(mr[:24], wr_id=3, **loopback.target()),
                ):
                    if planned:
                        context.faults.complete_with(wr.wr_id, WCStatus.SUCCESS)
                    loopback.local.qp.post_send(wr)
                    lengths.append(loopback.sent()[0].check().byte_len)
        assert lengths[:3] == lengths[3:]


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_refused_post_with_an_unknown_errno_names_no_explanation(device):
    """`rdmapost explain` does not know it."""
    skip_unless_free(device)
    with rp.open_device(device) as context, Loopback(context) as loopback:
        context.faults.fail_post(4095)
        with pytest.raises(rp.PostError) as caught:
            loopback.local.qp.post_send(rp.Send(loopback.local.mr[:8]))
        assert str(caught.value) == f"ibv_post_send: {device} refused with errno 4095 [4095]"


def test_capture_has_what_is_sent_and_what_comes(context, connect, tmp_path):
    """Not what the plan drops before it is sent; what is damaged on purpose says so."""
    pair, path = connect(QPType.UD), tmp_path / "packets"
    rates = {"drop": 0.2, "duplicate": 0.2, "corrupt": 0.2, "seed": 1}
    fates = [fate_of(NONE._replace(**rates), 1, n) for n in range(50)]  # type: ignore[arg-type]
    with context.capture(path) as capture:
        context.faults.packets(**rates, received=False)
        for number in range(50):
            pair.mine.buffer[0] = number
            pair.a.post_send(pair.send(pair.mine[:1], wr_id=number))
            pair.wait()
        sent = sum((1 + fate.duplicate) * (not fate.drop) for fate in fates)
        until(lambda: capture.packets >= 2 * sent)
    seen = read(path)
    assert len(seen) == 2 * sent
    mine = [each for each in seen if each.is_sent]
    expected = [
        number
        for number, fate in enumerate(fates)
        if not fate.drop
        for _ in range(1 + fate.duplicate)
    ]
    assert [int(each.comment.split()[2].rstrip(",")) for each in mine] == expected
    for each, number in zip(mine, expected, strict=True):
        is_damaged = fates[number].damage >= 0
        assert each.comment.endswith("damaged on purpose") is is_damaged
        if not is_damaged:
            check_headers(each.frame)
            assert payload_of(each.frame)[20] == number
    damaged = [each for each in seen if each.comment == "its ICRC is wrong"]
    assert len(damaged) == sum(fates[number].damage >= 0 for number in expected)
