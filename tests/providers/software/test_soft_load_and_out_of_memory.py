"""soft0 under load: threads, many resources, internal faults, and lack of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import ALL, LIMIT, LOSES_MEMORY, prints, resident, run_python, until

import rdmapost as rp
from rdmapost import QPState, QPType, WCStatus
from rdmapost._binding import native
from rdmapost.providers.roce import protocol_engine
from rdmapost.providers.roce import requester as roce_requester
from rdmapost.providers.roce.device import RoceDevice
from rdmapost.providers.roce.receiver import Receiver
from rdmapost.providers.software import state
from rdmapost.providers.software.qp import QueuePair
from rdmapost.standard.wire import ROCE_V2_PORT

SECONDS = 10
THREADS = 8
CYCLES = 100_000


@pytest.fixture(autouse=True)
def each_test_sees_its_reports(monkeypatch):
    monkeypatch.setattr(state, "_reported", {})


@pytest.fixture
def context():
    with rp.open_device("soft0") as opened:
        yield opened


def errors_in(caplog) -> list[str]:
    """Return the errors that were logged, without the warnings of a lack of memory."""
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_threads_lose_and_duplicate_no_completion(context):
    """Eight threads post to one pair of queue pairs and poll its CQs at the same time."""
    sent: list[Counter[int]] = [Counter() for _ in range(THREADS)]
    seen: list[Counter[int]] = [Counter() for _ in range(THREADS)]
    failures: list[BaseException] = []
    depth = 512
    with (
        rp.PD(context) as pd,
        rp.CQ(context, 4 * depth) as cq,
        rp.MR(pd, 4096, ALL) as mr,
        rp.QP(pd, QPType.RC, cq, max_send_wr=depth, max_recv_wr=depth) as near,
        rp.QP(pd, QPType.RC, cq, max_send_wr=depth, max_recv_wr=depth) as far,
    ):
        near.connect(far.endpoint(), rnr_retry=7, min_rnr_timer=1)
        far.connect(near.endpoint(), rnr_retry=7, min_rnr_timer=1)
        end = time.monotonic() + SECONDS

        def work(number: int) -> None:
            try:
                count = 0
                while time.monotonic() < end:
                    wr_id = number << 40 | count
                    count += 1
                    try:
                        far.post_recv(rp.RecvWR(mr[64:72], wr_id=wr_id << 1))
                    except rp.PostError:
                        pass
                    else:
                        sent[number][wr_id << 1] += 1
                        try:
                            near.post_send(rp.Send(mr[0:8], wr_id=wr_id << 1 | 1))
                        except rp.PostError:
                            pass
                        else:
                            sent[number][wr_id << 1 | 1] += 1
                    for wc in cq.poll():
                        assert wc.status is WCStatus.SUCCESS, wc
                        seen[number][wc.wr_id] += 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 30)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures
        posted = sum(sent, Counter())
        completed = sum(seen, Counter())
        # Every outstanding send, and a receive for each of them, still completes.
        while near.outstanding.send:
            completed.update(wc.wr_id for wc in cq.wait(1, 10))
        far.to_err()
        while far.outstanding.recv:
            completed.update(wc.wr_id for wc in cq.wait(1, 10))
        completed.update(wc.wr_id for wc in cq.poll())
    assert len(posted) > 10_000
    assert completed == posted


def cycles(make, count: int) -> None:
    for _ in range(count):
        make().close()


@pytest.mark.parametrize(
    "resource", ["Context", "PD", "MR", "MW", "CQ", "CompChannel", "SRQ", "XRCD", "QP", "AH"]
)
def test_a_hundred_thousand_resources_leave_nothing_behind(context, resource):
    with rp.PD(context) as pd, rp.CQ(context, 16) as cq:
        memory = bytearray(4096)
        path = rp.AHAttr(dgid=context.choose_gid().gid)
        make = {
            "Context": lambda: rp.open_device("soft0"),
            "PD": lambda: rp.PD(context),
            "MR": lambda: rp.MR(pd, memory, ALL),
            "MW": lambda: rp.MW(pd),
            "CQ": lambda: rp.CQ(context, 16),
            "CompChannel": lambda: rp.CompChannel(context),
            "SRQ": lambda: rp.SRQ(pd, 16),
            "XRCD": lambda: rp.XRCD(context),
            "QP": lambda: rp.QP(pd, QPType.RC, cq),
            "AH": lambda: rp.AH(pd, path),
        }[resource]
        cycles(make, 1000)
        gc.collect()
        memory_before, descriptors_before = resident(), descriptors()
        cycles(make, CYCLES)
        gc.collect()
        assert descriptors() == descriptors_before
        assert resident() - memory_before < 1 << 20


@contextmanager
def two_queue_pairs(context: rp.Context) -> Iterator[tuple[rp.CQ, rp.MR, rp.QP, rp.QP]]:
    """Open two queue pairs on one CQ, not connected, and a region."""
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 4096, ALL) as mr,
        rp.QP(pd, QPType.RC, cq) as first,
        rp.QP(pd, QPType.RC, cq) as second,
    ):
        yield cq, mr, first, second


def test_exception_in_the_device_is_logged_and_fails_the_work_request(context, caplog, monkeypatch):
    """An exception inside a verb ends the work request, and its traceback is logged."""
    from rdmapost.providers.soft0 import responder

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        monkeypatch.setattr(responder, "copy", broken)
        near.post_send(
            [
                rp.RdmaWrite(mr[0:8], wr_id=n, remote_addr=mr.addr + 64, rkey=mr.rkey)
                for n in range(2)
            ]
        )
        first, second = cq.wait(2, 5)
        assert (first.wr_id, first.status) == (0, WCStatus.FATAL_ERR)
        assert (second.wr_id, second.status) == (1, WCStatus.WR_FLUSH_ERR)
        assert "ZeroDivisionError: planted" in caplog.text


def test_bug_that_meets_a_lack_of_memory_is_not_logged_and_its_work_is_done_later(
    context, caplog, monkeypatch
):
    """The other thread logs errors after its verb has ended."""
    from rdmapost.providers.soft0 import requester

    errors = iter([ZeroDivisionError] * 2)

    def broken_twice(qp, _execute=requester.execute_next):
        for error in errors:
            raise error
        return _execute(qp)

    def logged_meanwhile(_: object) -> None:
        state._log_reports()
        raise MemoryError

    with two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        monkeypatch.setattr(requester, "execute_next", broken_twice)
        monkeypatch.setattr(requester, "give_up", logged_meanwhile)
        near.post_send(rp.RdmaWrite(mr[0:8], wr_id=3, remote_addr=mr.addr + 64, rkey=mr.rkey))
        (wc,) = cq.wait(1, 5)
        assert (wc.wr_id, wc.status) == (3, WCStatus.SUCCESS)
    assert errors_in(caplog) == []


def _attempts(device: str, monkeypatch, failures: list[type[Exception]]) -> list[object]:
    """Have the first attempts of the device's work raise; return a list of all attempts."""
    from rdmapost.providers.soft0 import requester

    module = requester if device == "soft0" else protocol_engine
    execute_next, attempts = module.execute_next, []

    def fails(qp):
        attempts.append(qp)
        if len(attempts) <= len(failures):
            raise failures[len(attempts) - 1]
        return execute_next(qp)

    monkeypatch.setattr(module, "execute_next", fails)
    return attempts


@pytest.mark.parametrize("failures", [2, 40])
@pytest.mark.parametrize("posts", ["sends", "receives"])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_posts_to_a_failed_queue_pair_are_flushed_once_there_is_memory(
    device, posts, failures, caplog, monkeypatch
):
    with rp.open_device(device) as context, two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint())
        near.to_err()
        attempts = _attempts(device, monkeypatch, [MemoryError] * failures)
        if posts == "receives":
            near.post_recv([rp.RecvWR(mr[:8], wr_id=n) for n in range(3)])
        else:
            near.post_send([rp.Send(mr[:8], wr_id=n) for n in range(3)])
        wcs = cq.wait(3, 10)
        assert [wc.wr_id for wc in wcs] == [0, 1, 2]
        assert len(attempts) > 2
        assert {wc.status for wc in wcs} == {WCStatus.WR_FLUSH_ERR}
        assert errors_in(caplog) == []


def planted_bug() -> tuple[list[QueuePair], Callable[[QueuePair], None]]:
    """Return a list of calls, and the method that is called, which raises."""
    calls: list[QueuePair] = []

    def broken(qp: QueuePair) -> None:
        calls.append(qp)
        raise ZeroDivisionError("planted")

    return calls, broken


@pytest.mark.parametrize("posts", ["sends", "receives"])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_a_bug_in_the_flush_is_logged_and_not_tried_for_ever(device, posts, caplog, monkeypatch):
    calls, broken = planted_bug()
    with rp.open_device(device) as context, two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint())
        near.to_err()
        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, "flush_posted", broken)
            if posts == "sends":
                near.post_send(rp.Send(mr[:8], wr_id=7))
                (done,) = cq.wait(1, LIMIT)
                assert (done.wr_id, done.status) == (7, WCStatus.FATAL_ERR)
            else:
                near.post_recv(rp.RecvWR(mr[:8], wr_id=7))
                assert not cq.wait(0)
                until(lambda: "planted" in caplog.text)
            assert caplog.text.count("ZeroDivisionError: planted") == 1
            assert len(calls) == 2


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_work_that_cannot_even_fail_because_of_a_bug_is_logged_and_tried_again_rarely(
    device, caplog, monkeypatch
):
    calls, broken = planted_bug()
    with rp.open_device(device) as context, two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint())
        context.faults.complete_with(7, WCStatus.LOC_PROT_ERR)
        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, "flush_sends", broken)
            near.post_send(rp.Send(mr[:8], wr_id=7))
            until(lambda: "planted" in caplog.text)
            assert not cq.wait(0)
            assert len(calls) < 10
        assert caplog.text.count("ZeroDivisionError: planted") == 1
        assert "a software device has a bug" in caplog.text
        (done,) = cq.wait(1, LIMIT)
        assert (done.wr_id, done.status) == (7, WCStatus.LOC_PROT_ERR)


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_a_queue_pair_that_lacks_memory_delays_no_other(device, monkeypatch):
    """The attempts of one take longer than a verb may spend on pending work."""
    flush_posted = QueuePair.flush_posted
    with (
        rp.open_device(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as failed_cq,
        rp.QP(pd, QPType.RC, failed_cq) as failed,
        two_queue_pairs(context) as (cq, mr, near, far),
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        failed.connect(failed.endpoint())
        failed.to_err()
        attempts = []

        def lacks_memory(qp):
            if qp.number == failed.qp_num and lacking:
                attempts.append(qp)
                time.sleep(0.003)
                raise MemoryError
            flush_posted(qp)

        lacking = True
        monkeypatch.setattr(QueuePair, "flush_posted", lacks_memory)
        failed.post_send(rp.Send(wr_id=1))
        far.post_recv([rp.RecvWR(mr[:8]) for _ in range(50)])
        for _ in range(50):
            near.post_send(rp.Send(mr[:8]))
            assert {wc.status for wc in cq.wait(2, LIMIT)} == {WCStatus.SUCCESS}
        assert not failed_cq.poll()
        assert len(attempts) >= 2
        lacking = False
        (done,) = failed_cq.wait(1, LIMIT)
        assert (done.wr_id, done.status) == (1, WCStatus.WR_FLUSH_ERR)


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_no_work_request_fails_for_lack_of_memory(device, caplog, monkeypatch):
    """Not the one that lacks it, nor those that the peer has not answered yet."""
    with rp.open_device(device) as context, two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint(), rnr_retry=7)
        far.connect(near.endpoint(), min_rnr_timer=1)
        near.post_send(rp.Send(mr[:8], wr_id=1))
        attempts = _attempts(device, monkeypatch, [MemoryError] * 9)
        fenced = rp.SendFlags.SIGNALED | rp.SendFlags.FENCE
        near.post_send(rp.Send(mr[:8], wr_id=2, send_flags=fenced))
        until(lambda: not cq.poll() and len(attempts) >= 9)
        assert near.outstanding.send == 2
        far.post_recv([rp.RecvWR(mr[8:16], wr_id=n) for n in (3, 4)])
        wcs = cq.wait(4, LIMIT)
        assert {(wc.wr_id, wc.status) for wc in wcs} == {
            (n, WCStatus.SUCCESS) for n in (1, 2, 3, 4)
        }
        assert not caplog.messages or caplog.messages == [
            f"{device} lacks memory, and will try again"
        ]


def test_many_queue_pairs_whose_timers_lack_memory_delay_no_other(monkeypatch):
    send, starved, attempts = roce_requester.send, set(), []

    def lacks_memory(qp):
        if qp.number in starved:
            attempts.append(qp)
            time.sleep(0.0005)
            raise MemoryError
        send(qp)

    with (
        rp.open_device("roce:lo") as context,
        two_queue_pairs(context) as (cq, mr, near, far),
        rp.CQ(context, 256) as starved_cq,
        contextlib.ExitStack() as stack,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        nobody = dataclasses.replace(far.endpoint(), qp_num=1 << 20)
        for _ in range(100):
            qp = stack.enter_context(rp.QP(near.pd, QPType.RC, starved_cq))
            qp.connect(nobody, timeout=1)
            qp.post_send(rp.Send(mr[:8]))
            starved.add(qp.qp_num)
        monkeypatch.setattr(roce_requester, "send", lacks_memory)
        until(lambda: len(attempts) > 100)
        times = []
        for _ in range(50):
            begin = time.monotonic()
            near.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
            assert cq.wait(1, LIMIT)[0].status is WCStatus.SUCCESS
            times.append(time.monotonic() - begin)
        # One attempt for each of the others takes 0.2 s in all. On a busy machine, other processes
        # delay a few writes.
        assert sorted(times)[40] < 0.1, times


@pytest.mark.parametrize("error", [MemoryError, ZeroDivisionError])
@pytest.mark.parametrize("failing", [["look", "give_up"], ["_receive"]], ids=" and ".join)
def test_a_device_that_cannot_receive_does_not_slow_another(failing, error, caplog, monkeypatch):
    def fails(*_: object) -> None:
        raise error("planted")

    def writes_in(seconds: float) -> int:
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
            count += len(cq.wait(1, LIMIT))
        return count

    with (
        rp.open_device("roce:lo") as roce,
        rp.open_device("soft0") as context,
        two_queue_pairs(context) as (cq, mr, qp, _),
        socket.socket(type=socket.SOCK_DGRAM) as sender,
    ):
        qp.connect(qp.endpoint())
        with monkeypatch.context() as patch:
            for name in failing:
                patch.setattr(Receiver, name, fails)
            # It stays in the device's socket.
            sender.sendto(bytes(64), (socket.inet_ntoa(roce.choose_gid(1).gid[12:]), ROCE_V2_PORT))
            assert writes_in(0.5) > 2000
    assert caplog.text.count("roce:lo has a bug") <= 1


def test_delayed_packets_arrive_after_a_lack_of_memory_although_nobody_calls_a_verb(monkeypatch):
    let_go, attempts = RoceDevice._let_go, []

    def lacks_memory(device):
        attempts.append(time.monotonic())
        if attempts[-1] < attempts[0] + 0.4:
            raise MemoryError
        let_go(device)

    monkeypatch.setattr(RoceDevice, "_let_go", lacks_memory)
    with rp.open_device("roce:lo") as context, two_queue_pairs(context) as (_, mr, near, far):
        near.connect(far.endpoint(), timeout=20)
        far.connect(near.endpoint())
        context.faults.packets(delay=1.0, delay_by=0.02)
        mr.buffer[:8] = b"a letter"
        near.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey))
        until(lambda: bytes(mr.buffer[8:16]) == b"a letter")


def test_a_lack_of_memory_delays_no_timer_of_another_device(monkeypatch):
    with (
        rp.open_device("soft0") as other,
        two_queue_pairs(other) as (_, mr, failed, _),
        rp.open_device("roce:lo") as context,
        two_queue_pairs(context) as (cq, far_mr, near, far),
    ):
        failed.connect(failed.endpoint())
        failed.to_err()

        def lacks_memory(qp):
            if qp.device.name == "soft0":
                time.sleep(0.02)
                raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(QueuePair, "flush_posted", lacks_memory)
            failed.post_send(rp.Send(mr[:8]))
            near.connect(far.endpoint(), timeout=12, retry_cnt=0)
            longest = 0.0
            for _ in range(8):
                begin = time.monotonic()
                near.post_send(rp.Send(far_mr[:8]))
                assert cq.wait(1, LIMIT)[0].status is WCStatus.RETRY_EXC_ERR
                longest = max(longest, time.monotonic() - begin)
                near.to_reset()
                near.connect(far.endpoint(), timeout=12, retry_cnt=0)
        # 17 ms, or 40 ms more if both attempts come in between; the next ones are 0.2 s later.
        assert longest < 0.15


@pytest.mark.parametrize("error", [MemoryError, ZeroDivisionError])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_work_that_is_due_is_retried_at_intervals_until_it_succeeds(
    device, error, caplog, monkeypatch
):
    run_due, attempts = state.run_due, []

    def fails():
        attempts.append(time.monotonic())
        if attempts[-1] < attempts[0] + 0.3:
            raise error("planted")
        run_due()

    with rp.open_device(device) as context, two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint(), rnr_retry=7)
        far.connect(near.endpoint(), min_rnr_timer=14)
        near.post_send(rp.Send(mr[:8], wr_id=1))
        monkeypatch.setattr(state, "run_due", fails)
        far.post_recv(rp.RecvWR(mr[8:16], wr_id=2))
        assert {wc.wr_id for wc in cq.wait(2, LIMIT)} == {1, 2}
        assert attempts[-1] >= attempts[0] + 0.3
        assert len(attempts) < 600
    if error is ZeroDivisionError:
        assert "a software device has a bug" in caplog.text


def test_idle_queue_pair_survives_a_lack_of_memory_when_its_timer_expires(caplog, monkeypatch):
    on_timer = protocol_engine.on_timer
    calls = []

    def lacks_memory(qp):
        calls.append(qp)
        if len(calls) <= 4:
            raise MemoryError
        on_timer(qp)

    with rp.open_device("roce:lo") as context, two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint(), timeout=8)
        far.connect(near.endpoint())
        far.post_recv(rp.RecvWR(mr[:8]))
        monkeypatch.setattr(protocol_engine, "on_timer", lacks_memory)
        near.post_send(rp.Send(mr[:8]))
        assert {wc.status for wc in cq.wait(2, LIMIT)} == {WCStatus.SUCCESS}
        until(lambda: len(calls) > 4)
        assert near.query().qp_state is QPState.RTS
        assert context.get_async_event(0) is None
        assert errors_in(caplog) == []


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_queue_pair_without_work_survives_a_lack_of_memory(device, monkeypatch):
    with rp.open_device(device) as context, two_queue_pairs(context) as (_, _, near, far):
        _attempts(device, monkeypatch, [MemoryError] * 8)
        near.connect(far.endpoint())
        assert near.query().qp_state is QPState.RTS


INTERRUPTED = """
import signal, sys
import rdmapost as rp
from rdmapost.providers.soft0 import requester
from rdmapost.providers.software import completion
from rdmapost.providers.software import qp as queuepair

struck = []

def strike(*arguments):
    if not struck:
        struck.append(True)
        signal.raise_signal(signal.SIGINT)
    return original(*arguments)

with (
    rp.open_device("soft0") as context,
    rp.PD(context) as pd,
    rp.CQ(context) as cq,
    rp.MR(pd, 64) as mr,
    rp.QP(pd, rp.QPType.RC, cq) as qp,
):
    qp.connect(qp.endpoint())
    original, TARGET = TARGET, strike
    try:
        CALL
        print("went on")
    except KeyboardInterrupt:
        print("interrupted")
    qp.to_reset()
    print(bool(struck), sum(qp.outstanding))
"""


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("requester.execute_next", "qp.post_send(rp.Send())"),
        ("requester._carry_out", "qp.post_send(rp.Send())"),
        ("completion.CompletionQueue.add", "qp.to_err(); qp.post_recv([rp.RecvWR()] * 2)"),
        ("queuepair.QueuePair.flush_posted", "qp.to_err(); qp.post_recv([rp.RecvWR()] * 2)"),
        ("queuepair.QueuePair.flush_posted", "qp.to_err(); qp.prepare_recv(rp.RecvWR()).post()"),
    ],
)
def test_ctrl_c_inside_a_verb_is_raised_by_the_verb(target, call):
    """Wherever in the device the KeyboardInterrupt occurs, the verb raises it."""
    code = INTERRUPTED.replace("TARGET", target).replace("CALL", call)
    assert prints(code).splitlines() == ["interrupted", "True 0"]


@pytest.fixture
def shortage(monkeypatch):
    """Make a device function fail for lack of memory: shortage(cls, name, times)."""

    def plant(cls: type, name: str, times: int) -> list[int]:
        """Return a list with one item: how many calls will still fail."""
        left, original = [times], getattr(cls, name)

        def starved(*args: object) -> object:
            if left[0]:
                left[0] -= 1
                raise MemoryError
            return original(*args)

        monkeypatch.setattr(cls, name, starved)
        return left

    return plant


def test_send_without_memory_even_to_fail_is_carried_out_later(context, caplog, shortage):
    """The work request is unchanged, and is carried out before later posts."""
    from rdmapost.providers.software import qp as queuepair

    with two_queue_pairs(context) as (cq, mr, near, other):
        near.connect(near.endpoint())
        other.connect(other.endpoint())
        writes = [
            rp.RdmaWrite(mr[0:8], wr_id=n, remote_addr=mr.addr + 64, rkey=mr.rkey) for n in range(3)
        ]
        left = shortage(queuepair.QueuePair, "complete_send", 1000)
        near.post_send(writes[:2])
        other.post_send(writes[2])
        assert cq.poll() == []
        # Both queue pairs' writes have failed.
        assert left[0] <= 1000 - 2 * 2
        left[0] = 0
        assert sorted((wc.wr_id, wc.status) for wc in cq.wait(3, 5)) == [
            (n, WCStatus.SUCCESS) for n in range(3)
        ]
        assert errors_in(caplog) == []


def test_queue_pair_out_of_memory_does_not_block_another(context, monkeypatch):
    from rdmapost.providers.soft0 import requester
    from rdmapost.providers.software import qp as queuepair

    with two_queue_pairs(context) as (cq, mr, near, other):
        near.connect(near.endpoint())
        other.connect(other.endpoint())
        retire = requester._retire

        def starved(qp: queuepair.QueuePair, *args: object) -> None:
            if qp.number == near.qp_num:
                raise MemoryError
            retire(qp, *args)

        write = rp.RdmaWrite(mr[0:8], wr_id=1, remote_addr=mr.addr + 64, rkey=mr.rkey)
        with monkeypatch.context() as patch:
            patch.setattr(requester, "_retire", starved)
            near.post_send(write)
            other.post_send(write)
            assert [wc.qp_num for wc in cq.wait(1, 5)] == [other.qp_num]
            assert cq.poll() == []
        assert [wc.qp_num for wc in cq.wait(1, 5)] == [near.qp_num]


def test_queue_pair_out_of_memory_does_not_stop_the_timer_of_another(context, monkeypatch):
    from rdmapost.providers.soft0 import requester
    from rdmapost.providers.software import qp as queuepair

    with two_queue_pairs(context) as (cq, mr, near, other):
        near.connect(near.endpoint())
        other.connect(other.endpoint(), min_rnr_timer=14, rnr_retry=7)
        retire = requester._retire

        def starved(qp: queuepair.QueuePair, *args: object) -> None:
            if qp.number == near.qp_num:
                raise MemoryError
            retire(qp, *args)

        monkeypatch.setattr(requester, "_retire", starved)
        near.post_send(rp.RdmaWrite(mr[:8], wr_id=1, remote_addr=mr.addr, rkey=mr.rkey))
        other.post_send(rp.Send(mr[:8], wr_id=2))
        other.post_recv(rp.RecvWR(mr[8:16], wr_id=3))
        # The receiver asks for 1.28 ms.
        assert {wc.wr_id for wc in cq.wait(2, LIMIT)} == {2, 3}
        monkeypatch.undo()
        assert [wc.wr_id for wc in cq.wait(1, 5)] == [1]


def test_a_timer_set_in_the_same_verb_does_not_delay_work_that_lacked_memory(context, monkeypatch):
    """A sender waits 655 ms for a receive; what lacked memory before it must not wait as long."""
    from rdmapost.providers.soft0.device import SoftDevice

    attempts: list[int] = []

    def lack(real: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def step(self: Any, worker: Any) -> bool:
            attempts.append(worker.number)
            # An attempt, a second one on another thread, and the end of the work request.
            if attempts.count(lacking.qp_num) <= 3 and worker.number == lacking.qp_num:
                raise MemoryError
            return bool(real(self, worker))

        return step

    def post() -> None:
        lacking.post_send(rp.RdmaWrite(mr[:8], wr_id=1, remote_addr=mr.addr, rkey=mr.rkey))
        other.post_send(rp.Send(mr[:8], wr_id=2))

    with two_queue_pairs(context) as (cq, mr, lacking, other):
        lacking.connect(lacking.endpoint())
        other.connect(other.endpoint(), min_rnr_timer=0, rnr_retry=7)
        for name in ("execute_next", "give_up"):
            monkeypatch.setattr(SoftDevice, name, lack(getattr(SoftDevice, name)))
        waiter = threading.Thread(target=lambda: done.extend(cq.wait(1, 5)))
        done: list[rp.WC] = []
        waiter.start()
        until(native.sleeping)
        native.verb(post)
        waiter.join()
        assert [(wc.wr_id, wc.status) for wc in done] == [(1, WCStatus.SUCCESS)]
        assert attempts.count(other.qp_num) == 1


def test_retry_without_memory_is_made_later(context, caplog, shortage):
    from rdmapost.providers.software import device

    with two_queue_pairs(context) as (cq, mr, near, far):
        near.connect(far.endpoint(), timeout=14, retry_cnt=0)
        near.post_send(rp.Send(mr[0:8], wr_id=1))
        left = shortage(device.Device, "start", 2 * 3)
        (wc,) = cq.wait(1, 20)
        assert (wc.wr_id, wc.status, left) == (1, WCStatus.RETRY_EXC_ERR, [0])


ROLLED_BACK = """
import struct
import _testcapi
import rdmapost as rp
from rdmapost._binding import native

rp.open_device("soft0")
# More arguments than CPython keeps tuples for.
OLD, NEW = bytes(range(30)), bytes(30)
state = bytearray(OLD)
write = struct.Struct("30B").pack_into

def change():
    native.undo(write, state, 0, *OLD)
    write(state, 0, *NEW)
    _testcapi.set_nomemory(0)
    raise failure

def verb():
    try:
        native.verb(change)
    finally:
        _testcapi.remove_mem_hooks()

failure = ZeroDivisionError()
try:
    verb()
except (ZeroDivisionError, MemoryError):
    print(state == OLD)
"""


def test_rollback_of_a_device_step_needs_no_memory():
    pytest.importorskip("_testcapi")
    assert prints(ROLLED_BACK) == "True"


CLOSED_WITHOUT_MEMORY = """
import warnings
import _testcapi
import rdmapost as rp

warnings.simplefilter("ignore")
context = rp.open_device("soft0")

def make():
    pd = rp.PD(context)
    cq = rp.CQ(context)
    qp = rp.QP(pd, rp.QPType.RC, cq)
    mr = rp.MR(pd, 64)
    return {
        "ah": qp.ah_to(qp.endpoint()), "srq": rp.SRQ(pd), "mw": rp.MW(pd), "mr": mr, "qp": qp,
        "cq": cq, "pd": pd,
    }

refused = 0
for name in ("ah", "srq", "mw", "mr", "qp", "cq", "pd"):
    for burst in (1, 2, 5, 30):
        for at in range(300):
            made = make()
            while next(iter(made)) != name:
                made.pop(next(iter(made))).close()
            one = made.pop(name)
            _testcapi.set_nomemory(at, at + burst)
            try:
                one.close()
                done = True
            except (MemoryError, rp.VerbsError):
                done = False
            finally:
                _testcapi.remove_mem_hooks()
            refused += not one.closed
            one.close()
            for each in made.values():
                each.close()
            if done:
                break
print("all can be closed" if refused else "no close ran out of memory")
"""


def test_resource_that_could_not_be_closed_without_memory_can_be_closed_later():
    """soft0 does not half destroy a resource."""
    pytest.importorskip("_testcapi")
    assert prints(CLOSED_WITHOUT_MEMORY).endswith("all can be closed")


MEMORY_KEYS_WITHOUT_MEMORY = """
import sys, _testcapi, rdmapost as rp
verb = sys.argv[1]
context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context)
ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
qp = rp.QP(pd, rp.QPType.RC, cq)
qp.connect(qp.endpoint())
mine = rp.MR(pd, 64, ALL)
memory, other = bytearray(64), bytearray(64)
unknown = []
# At one of these numbers the table of keys is full: to add to it takes memory.
for count in (42, 43, 85, 86, 170, 171):
    made = [rp.MR(pd, memory, ALL) for _ in range(count - 1)]
    for at in range(130):
        mr = made[at % len(made)]
        _testcapi.set_nomemory(at, at + 1000)
        try: mr.close() if verb == "close" else mr.rereg(memory=other)
        except (MemoryError, rp.VerbsError): pass
        finally: _testcapi.remove_mem_hooks()
        if mr.closed: break
        qp.post_send(rp.RdmaWrite(mine[:8], remote_addr=mr.addr, rkey=mr.rkey))
        if cq.wait()[0].status:
            unknown.append((count, at))
            qp.to_reset()
            qp.connect(qp.endpoint())
    for mr in made: mr.close()
print(unknown)
"""


@pytest.mark.parametrize("verb", ["close", "rereg"])
def test_region_that_could_not_be_closed_or_moved_without_memory_keeps_its_keys(verb):
    pytest.importorskip("_testcapi")
    assert prints(MEMORY_KEYS_WITHOUT_MEMORY, verb, **LOSES_MEMORY) == "[]"


ONE_FAILED_ALLOCATION = """
import sys, time
import _testcapi
import rdmapost as rp

context = rp.open_device("soft0")
pd = rp.PD(context)
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
# Python keeps an int for each small number: the queues here have larger ones.
for _ in range(140):
    rp.CQ(context).close()

def write(number):
    return rp.RdmaWrite(mr[:8], wr_id=number, remote_addr=mr.addr, rkey=mr.rkey)

def pair(channel=None):
    cq = rp.CQ(context, channel=channel)
    a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
    a.connect(b.endpoint()), b.connect(a.endpoint())
    return cq, a, b

def starved(at, act):
    error = found = None
    _testcapi.set_nomemory(at, at + 1)
    try:
        found = act()
    except (MemoryError, rp.VerbsError) as caught:
        error = caught
    finally:
        _testcapi.remove_mem_hooks()
    return found, error

def posted(at):
    cq, a, b = pair()
    b.post_recv(rp.RecvWR(mr[:8]))
    a.to_sqd()
    a.post_send(rp.Send(mr[8:16]))
    starved(at, a.to_rts)
    if a.state is rp.QPState.SQD:
        a.to_rts()
    return len(cq.wait(2, 2)) == 2, (a, b, cq)

def retried(at):
    cq, a, b = pair()
    a.post_send(rp.Send(mr[8:16]))
    b.post_recv(rp.RecvWR(mr[:8]))
    time.sleep(0.002)  # the retry is due
    found, _ = starved(at, cq.poll)
    return len(found or []) + len(cq.wait(2 - len(found or []), 2)) == 2, (a, b, cq)

def announced(at):
    channel = rp.CompChannel(context)
    cq, a, b = pair(channel)
    cq.req_notify()
    a.post_send(write(1))
    event, _ = starved(at, lambda: channel.get_cq_event(0))
    return event or channel.get_cq_event(2), (a, b, cq, channel)

def reported(at):
    while context.get_async_event(0):
        pass
    cq, a, b = pair()
    a.post_send(rp.RdmaWrite(mr[:8], remote_addr=0, rkey=0xdead))
    event, _ = starved(at, lambda: context.get_async_event(0))
    return event or context.get_async_event(2), (a, b, cq)

def kept(act, at):
    cq, a, b = pair()
    a.post_send([write(number) for number in range(5)])
    starved(at, lambda: act(a))
    act(a)
    return [wc.wr_id for wc in cq.poll()] == [*range(5)], (a, b, cq)

case, allocations = sys.argv[1], int(sys.argv[2])
for at in range(allocations):
    good, made = {
        "a post before RTS": posted, "a retry": retried, "an event of a CQ": announced,
        "an event of the device": reported, "reset": lambda at: kept(rp.QP.to_reset, at),
        "close": lambda at: kept(rp.QP.close, at),
    }[case](at)
    if not good:
        print("lost at allocation", at)
    for one in made:
        one.close()
print("done")
"""


@pytest.mark.parametrize(
    "case",
    [
        "a post before RTS",
        "a retry",
        "an event of a CQ",
        "an event of the device",
        "reset",
        "close",
    ],
)
def test_one_failed_allocation_loses_nothing(case):
    """No completion, event or posted work request is lost."""
    pytest.importorskip("_testcapi")
    assert prints(ONE_FAILED_ALLOCATION, case, "150") == "done"


MANY_EVENTS = """
import _testcapi
import rdmapost as rp

context = rp.open_device("soft0")
pd, channel = rp.PD(context), rp.CompChannel(context)
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
made = []
for _ in range(40):
    cq = rp.CQ(context, channel=channel)
    qp = rp.QP(pd, rp.QPType.RC, cq)
    qp.connect(qp.endpoint())
    cq.req_notify()
    made.append((cq, qp))
for at, (_, qp) in enumerate(made):
    posted = False
    while not posted:
        _testcapi.set_nomemory(at, at + 1)
        try:
            qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
            posted = True
        except (MemoryError, rp.RdmaError):
            at += 1
        finally:
            _testcapi.remove_mem_hooks()
seen = 0
while channel.get_cq_event(0.5) is not None:
    seen += 1
print(seen)
"""


def test_a_channel_with_many_events_loses_none_without_memory():
    pytest.importorskip("_testcapi")
    assert prints(MANY_EVENTS) == "40"


EVENTS_WITHOUT_MEMORY = """
import sys, _testcapi, rdmapost as rp
context = rp.open_device("soft0")
pd = rp.PD(context)
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
burst, lost, failed = int(sys.argv[1]), [], 0

def starved(take):
    global failed
    _testcapi.set_nomemory(at, at + burst)
    try: found = take(0)
    except MemoryError: found, failed = None, failed + 1
    finally: _testcapi.remove_mem_hooks()
    return found or take(0.05)

for at in range(60):
    channel = rp.CompChannel(context)
    cq = rp.CQ(context, channel=channel)
    qp = rp.QP(pd, rp.QPType.RC, cq)
    qp.connect(qp.endpoint())
    cq.req_notify()
    qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey))
    if starved(channel.get_cq_event) is not cq: lost.append(("cq", at))
    qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=0, rkey=0))
    if starved(context.get_async_event) is None: lost.append(("async", at))
    while context.get_async_event(0): pass
    qp.close(), cq.close(), channel.close()
print(failed > 0, lost)
"""


@pytest.mark.parametrize("burst", [1, 18, 40])
def test_no_event_is_lost_without_memory(burst):
    pytest.importorskip("_testcapi")
    done = run_python(EVENTS_WITHOUT_MEMORY, str(burst), **LOSES_MEMORY)
    assert done.stdout.strip() == "True []", done.stderr


FLUSH_WITHOUT_MEMORY = """
import _testcapi, logging, sys
import rdmapost as rp

logging.disable()
context = rp.open_device(sys.argv[1])
cq = rp.CQ(context, 4096)
qp = rp.QP(rp.PD(context), rp.QPType.RC, cq, max_send_wr=2000)
qp.connect(qp.endpoint())
qp.to_err()
wr = rp.Send()
for at in [*range(120)] * 3:
    try:
        _testcapi.set_nomemory(at, 10**9)
        for _ in range(3):
            qp.post_send(wr)
    except (MemoryError, rp.VerbsError):
        pass
    finally:
        _testcapi.remove_mem_hooks()
posted = qp.outstanding.send
wcs = cq.wait(posted, 10)
print(posted > 100, {wc.status.name for wc in wcs}, qp.outstanding.send)
"""


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_posts_in_err_are_flushed_wherever_their_verbs_run_out_of_memory(device):
    pytest.importorskip("_testcapi")
    said = prints(FLUSH_WITHOUT_MEMORY, device, **LOSES_MEMORY)
    assert said == "True {'WR_FLUSH_ERR'} 0"


MANY_PARTS_WITHOUT_MEMORY = """
import sys, _testcapi, rdmapost as rp

context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context)
# Python keeps an int for each small number: these are larger.
for _ in range(140):
    rp.CQ(context).close()
theirs = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
mine = rp.MR(pd, bytearray(range(1, 65)))
more = {"max_send_sge": 6, "max_recv_sge": 6, "max_inline_data": 64}
a, b = (rp.QP(pd, rp.QPType.RC, cq, **more) for _ in range(2))
a.connect(b.endpoint(), rnr_retry=7), b.connect(a.endpoint())
parts = [mine[8 * n : 8 * n + 8] for n in range(6)]
write = {"remote_addr": theirs.addr, "rkey": theirs.rkey}
inline = rp.SendFlags.SIGNALED | rp.SendFlags.INLINE
send, write, copied, receive = (
    rp.Send(parts), rp.RdmaWrite(parts, **write), rp.RdmaWrite(parts, send_flags=inline, **write),
    rp.RecvWR([theirs[8 * n : 8 * n + 8] for n in range(6)]),
)
refused = []
for at in range(int(sys.argv[1])):
    for post, wr, *others in (
        (a.post_send, write), (a.post_send, copied), (a.post_send, send, (b.post_recv, receive)),
        (b.post_recv, receive, (a.post_send, send)),
    ):
        theirs.buffer[:] = bytes(64)
        _testcapi.set_nomemory(at, at + 1)
        try:
            post(wr)
        except (MemoryError, rp.PostError) as error:
            refused.append(error)
        finally:
            _testcapi.remove_mem_hooks()
        if a.outstanding.send + b.outstanding.recv == 0:
            continue
        for other, more in others:
            other(more)
        done = {wc.status.name for wc in cq.wait(1 + len(others), 10)}
        if done != {"SUCCESS"} or theirs.buffer[:48] != mine.buffer[:48]:
            print("allocation", at, wr, done)
print(len(refused) > 0, a.outstanding, b.outstanding)
"""


def test_work_request_of_many_parts_is_refused_or_carried_out_whole_without_memory():
    pytest.importorskip("_testcapi")
    said = prints(MANY_PARTS_WITHOUT_MEMORY, "60", **LOSES_MEMORY)
    assert said == "True Outstanding(send=0, recv=0) Outstanding(send=0, recv=0)"


TSO_WITHOUT_MEMORY = """
import _testcapi, rdmapost as rp
from rdmapost.loopback import Loopback
errors = set()
for at in range(60):
    with Loopback(rp.open_device("soft0"), qp_type=rp.QPType.UD, max_tso_header=64) as pair:
        wr = rp.TSO(pair.local.mr[:64], hdr=bytes(54), mss=32, wr_id=1 << 40, **pair.address)
        _testcapi.set_nomemory(at, at + 1)
        try: pair.local.qp.post_send(wr)
        except BaseException as error: errors.add(type(error))
        finally: _testcapi.remove_mem_hooks()
print(errors <= {MemoryError, rp.PostError})
"""


def test_work_request_that_is_carried_out_on_another_attempt_raises_no_error():
    """Python 3.11 raises SystemError if there is no memory to call a function."""
    pytest.importorskip("_testcapi")
    assert prints(TSO_WITHOUT_MEMORY, **LOSES_MEMORY) == "True"


INTERRUPTED_WITHOUT_MEMORY = """
import _testcapi, logging, sys, rdmapost as rp
from rdmapost.loopback import Loopback
from rdmapost.providers.soft0 import requester
logging.disable()
carry_out = requester._carry_out

def interrupted(*args):
    requester._carry_out = carry_out
    _testcapi.set_nomemory(at, at + 1)
    raise KeyboardInterrupt

for at in range(40):
    with Loopback(rp.open_device("soft0")) as pair:
        wr = rp.RdmaWrite(pair.local.mr[:64], wr_id=1 << 40, **pair.target())
        requester._carry_out = interrupted
        try:
            pair.local.qp.post_send(wr)
        except (KeyboardInterrupt, MemoryError):
            pass
        finally:
            _testcapi.remove_mem_hooks()
        (wc,) = pair.local.cq.wait(1, 10)
        print(at, wc.wr_id == 1 << 40, wc.status.name, pair.local.cq.poll())
"""


def test_interrupt_and_one_failed_allocation_end_a_work_request_once():
    """Creating a thread in C for the next attempt ended the process if that lacked memory."""
    pytest.importorskip("_testcapi")
    done = run_python(INTERRUPTED_WITHOUT_MEMORY, **LOSES_MEMORY)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [str(n) for n in range(40)]
    for line in lines:
        assert re.fullmatch(r"\d+ True (SUCCESS|FATAL_ERR) \[\]", line)
    assert "SUCCESS" in done.stdout
