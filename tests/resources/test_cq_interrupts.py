"""Polling and waiting under interrupts, finalizers and threads, and out of memory.

No completion is lost, no lock stays held, and nothing waits forever.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import textwrap
import threading
import time
from types import FrameType

import pytest
from support import LIMIT, LOSES_MEMORY, Pair, ended, needs, prints, run_python, until, write

import rdmapost as rp


class Interrupt(Exception):
    """What the handler of a signal raises."""


@pytest.fixture
def interrupts():
    """Raise Interrupt in this thread after so many seconds, and every second from then on.

    Its list has the place of each: an interrupt that is lost fails the test, and does not hang it.
    """

    def interrupt(_: int, frame: FrameType) -> None:
        raised.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
        raise Interrupt

    def start(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)

    raised: list[str] = []
    start.raised = raised
    before = signal.signal(signal.SIGALRM, interrupt)
    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def collects_always():
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


# ---- interrupts ---------------------------------------------------------------


def take(cq: rp.CQ, how: str) -> list[rp.WC]:
    # No `with`: what follows in its __exit__ could be interrupted, too.
    try:
        return cq.poll(3) if how == "poll" else cq.wait(3, 0.0005)
    except rp.WaitTimeout:
        return []


@pytest.mark.parametrize("how", ["poll", "wait"])
def test_interrupts_at_any_moment_lose_no_completion(rc, interrupts, how):
    rng, got, posted, hits = random.Random(1), [], 0, 0
    while hits < 300:
        count = rng.randint(1, 8)
        rc.a.post_send([write(rc, posted + i) for i in range(count)])
        posted += count
        found: list[rp.WC] = []
        try:
            interrupts(rng.uniform(1e-6, 1.2e-4))
            while True:
                found = take(rc.cq, how)
                got += found
        except Interrupt:
            hits += 1
            if found and got[-len(found) :] != found:
                got += found
        interrupts(0)
        assert len(interrupts.raised) == hits, interrupts.raised[-2:]
        while rc.a.outstanding.send:
            got += rc.cq.poll()
    got += rc.cq.poll(1000)
    assert [wc.wr_id for wc in got] == list(range(posted))


def steps(function) -> int:
    """Return how many function calls and returns a call of this takes."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event != "return"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def interrupted(function, moment: int) -> None:
    """Call it, and raise Interrupt at one of the moments that steps() counts."""

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal moment
        moment -= event != "return"
        if moment == 0 and event != "return":
            raise Interrupt

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("checked", [True, False])
def test_a_reset_that_is_interrupted_leaves_nothing_outstanding_that_the_device_does_not_have(
    connect, context, checked
):
    pair = connect(checked=checked)

    def fill() -> None:
        pair.a.to_reset()
        pair.a.connect(pair.b.endpoint())
        pair.a.post_recv([rp.RecvWR(pair.mine[:8], wr_id=i) for i in range(4)])

    fill()
    # An emulated machine takes half a second for each moment.
    every = 1 if context.kind == "soft" else 3
    for moment in range(1, steps(pair.a.to_reset), every):
        fill()
        with contextlib.suppress(Interrupt):
            interrupted(pair.a.to_reset, moment)
        # It has been reset, or has all of them; a real device flushes these in a moment.
        has = pair.a.outstanding.recv
        if pair.a.query().qp_state is not rp.QPState.RESET:
            pair.a.to_err()
        assert len(pair.cq.wait(has)) == has, moment
        assert not pair.cq.poll()
        assert pair.a.outstanding == (0, 0)


@pytest.mark.parametrize("queue", ["send queue", "SRQ"])
@pytest.mark.parametrize("how", ["poll", "wait"])
def test_an_exception_in_the_middle_of_a_batch_leaves_the_whole_batch(
    connect, context, pd, stack, how, queue
):
    needs(context.attr.max_srq, "shared receive queues", context)
    srq = stack.enter_context(rp.SRQ(pd, 64))
    cq = stack.enter_context(rp.CQ(context, 64))
    pair = connect(b_options={"srq": srq, "recv_cq": cq})
    stack.callback(pair.b.close)
    if queue == "send queue":
        cq = pair.cq

    def fill() -> None:
        srq.post_srq_recv([rp.RecvWR(pair.theirs[:8], wr_id=i) for i in range(8)])
        pair.a.post_send([pair.send(pair.mine[:8], wr_id=i) for i in range(8)])
        other = pair.cq if queue == "SRQ" else pair.b.recv_cq
        assert len(other.wait(8, LIMIT)) == 8
        # The far side may complete first. These are polled, but nothing more.
        while pair.a.outstanding.send:
            with pytest.raises(rp.WaitTimeout):
                cq.wait(9, 0.01)

    def call() -> list[rp.WC]:
        return cq.poll(8) if how == "poll" else cq.wait(8)

    fill()
    moments = steps(call)
    assert moments > 2
    for moment in range(1, moments - 1):
        fill()
        with pytest.raises(Interrupt):
            interrupted(call, moment)
        assert [wc.wr_id for wc in cq.wait(8, LIMIT)] == list(range(8))
        assert (pair.a.outstanding, srq.outstanding) == ((0, 0), 0)


@pytest.mark.parametrize("by", ["poll_into", "wait_into"])
def test_interrupt_of_a_call_that_writes_rows_is_raised_and_loses_no_completion(rc, by):
    """It writes those of WCs that were put back, which calls Python for each."""
    rc.a.post_send([write(rc, i) for i in range(8)])
    wcs = rc.cq.wait(8, LIMIT)
    got = memoryview(bytearray(48 * 8))

    def call() -> None:
        if by == "poll_into":
            rc.cq.poll_into(got)
        else:
            rc.cq.wait_into(got, 8)

    rc.cq._poller.put_back(wcs)
    moments = steps(call)
    assert moments > 8
    kept = 0
    for moment in range(1, moments - 1):
        got[:] = b"\xee" * len(got)
        rc.cq._poller.put_back(wcs)
        with pytest.raises(Interrupt):
            interrupted(call, moment)
        rows = [wr_id for wr_id in got.cast("Q")[::6] if wr_id < 8]
        rest = [wc.wr_id for wc in rc.cq.poll(8)]
        assert rows + rest == list(range(8))
        kept += 0 < len(rest) < 8
    assert kept


def test_completions_that_cannot_be_made_stay(rc):
    testing = pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    rc.a.post_send([write(rc, i) for i in range(1000, 1008)])
    failed, got = 0, []
    # They are polled, but nothing more.
    while rc.a.outstanding.send:
        with pytest.raises(rp.WaitTimeout):
            rc.cq.wait(9, 0.01)
    for start in range(200):
        try:
            testing.set_nomemory(start, start + 1)
            got = rc.cq.poll(8)
        except MemoryError:
            failed += 1
        finally:
            testing.remove_mem_hooks()
        if got:
            break
    assert failed
    assert [wc.wr_id for wc in got] == list(range(1000, 1008))


WITHOUT_MEMORY = """
import _testcapi, rdmapost as rp
# Python keeps an int for each small number: the queues below have larger ones.
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    for _ in range(140):
        rp.QP(pd, rp.QPType.RC, cq).close()
context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context)
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
a.connect(b.endpoint()), b.connect(a.endpoint())
wrs = [rp.RdmaWrite(mr[:8], wr_id=i, remote_addr=mr.addr, rkey=mr.rkey) for i in (1000, 1001)]
failed = 0
for turn, at in enumerate(2 * (1000, *range(12))):
    found = []
    (a, b)[turn % 2].post_send(wrs)
    _testcapi.set_nomemory(at, at + 1)
    try: found = cq.poll()
    except MemoryError: failed += 1
    finally: _testcapi.remove_mem_hooks()
    found += cq.poll()
    if [wc.wr_id for wc in found] != [1000, 1001]: print("lost", at, found)
print(failed > 0, a.outstanding.send + b.outstanding.send)
"""


def test_close_without_memory_loses_no_completion():
    """Of a queue pair, which first takes the completions that a device might drop."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    program = WITHOUT_MEMORY.split("failed = ")[0] + CLOSES
    # What soft0 cannot clean up when memory runs out is reported on standard error.
    assert run_python(program, **LOSES_MEMORY).stdout == "True []\n"


WAITS_WITHOUT_MEMORY = """
import _testcapi, asyncio, sys, rdmapost as rp
context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context, 256)
mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
qp = rp.QP(pd, rp.QPType.RC, cq, max_send_wr=128)
qp.connect(qp.endpoint())
to = {"remote_addr": mr.addr, "rkey": mr.rkey}
# One more than there may be spare records for, and more in the same call.
wrs = [rp.RdmaWrite(mr[:8], wr_id=1000 + i, **to) for i in range(70)]

def wait(at):
    _testcapi.set_nomemory(at, at + 3)
    try: return cq.wait(65, 1.0, max_entries=69)
    finally: _testcapi.remove_mem_hooks()

async def wait_in_task(at):
    _testcapi.set_nomemory(at, at + 3)
    try: return await cq.completions(65, 1.0, max_entries=69)
    finally: _testcapi.remove_mem_hooks()

failed, lost = 0, []
with asyncio.Runner() as runner:
    # Import what a wait needs: importlib crashes Python 3.13 if memory runs out at the wrong place.
    runner.run(cq.completions(0))
    for at in range(400):
        qp.post_send(wrs)
        found = []
        try: found = wait(at) if sys.argv[1] == "wait" else runner.run(wait_in_task(at))
        except MemoryError: failed += 1
        taken = len(found)
        found += cq.poll(100)
        if [wc.wr_id for wc in found] != list(range(1000, 1070)):
            lost.append((at, taken, len(found)))
print(failed > 0, lost)
"""


@pytest.mark.parametrize("how", ["wait", "completions"])
def test_wait_for_more_without_memory_loses_no_completion(how):
    """The first are taken before the others, which may not fit in memory."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    # asyncio reports on standard error what it cannot clean up when memory runs out.
    done = run_python(WAITS_WITHOUT_MEMORY, how, **LOSES_MEMORY)
    assert (done.returncode, done.stdout) == (0, "True []\n"), done.stderr


CLOSES = """
lost, failed = [], 0
for at in range(80):
    a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
    a.connect(b.endpoint()), b.connect(a.endpoint())
    a.post_send(wrs)
    _testcapi.set_nomemory(at, at + 1)
    try: a.close()
    except MemoryError: failed += 1
    finally: _testcapi.remove_mem_hooks()
    a.close()
    b.close()
    if [wc.wr_id for wc in cq.poll()] != [1000, 1001]: lost.append(at)
print(failed > 0, lost)
"""


PUT_BACK_WITHOUT_MEMORY = """
import _testcapi, rdmapost as rp
context = rp.open_device("soft0")
pd, cq = rp.PD(context), rp.CQ(context, 512)
qp = rp.QP(pd, rp.QPType.RC, cq, max_send_wr=256)
qp.connect(qp.endpoint())
put_back, lost = cq._poller.put_back, []
for first, second in ((1, 0), (200, 0), (63, 1), (64, 0), (1, 64), (65, 0), (100, 90), (3, 150)):
    wrs = [rp.RdmaWrite(wr_id=1000 + i) for i in range(first + second)]
    qp.post_send(wrs)
    lists = cq.poll(first), cq.poll(second)
    _testcapi.set_nomemory(0)
    try:
        put_back(lists[1])
        put_back(lists[0])
    except MemoryError: lost.append("MemoryError")
    finally: _testcapi.remove_mem_hooks()
    if [wc.wr_id for wc in cq.poll(300)] != [wr.wr_id for wr in wrs]: lost.append((first, second))
print(lost)
"""


def test_completions_just_delivered_can_be_put_back_without_memory():
    """Also those that another thread has polled before."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(PUT_BACK_WITHOUT_MEMORY, **LOSES_MEMORY) == "[]"


FIRST_POLL_WITHOUT_MEMORY = """
import _testcapi, rdmapost as rp
context = rp.open_device("soft0")
pd, failed, lost = rp.PD(context), 0, []
for at in range(0, 90, 3):
    with rp.CQ(context) as cq, rp.QP(pd, rp.QPType.RC, cq) as qp:
        qp.connect(qp.endpoint())
        qp.post_send([rp.RdmaWrite(wr_id=i) for i in range(3)])
        found = []
        _testcapi.set_nomemory(at, at + 3)
        try: found = cq.poll()
        except MemoryError: failed += 1
        finally: _testcapi.remove_mem_hooks()
        if [wc.wr_id for wc in [*found, *cq.poll()]] != [0, 1, 2]: lost.append(at)
print(failed > 20, lost)
"""


def test_first_poll_of_a_cq_without_memory_loses_no_completion():
    """It allocates a record for each completion that may come."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(FIRST_POLL_WITHOUT_MEMORY, **LOSES_MEMORY) == "True []"


def test_poll_without_memory_loses_no_completion():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(WITHOUT_MEMORY, **LOSES_MEMORY) == "True 0"


@pytest.mark.parametrize("how", ["poll", "wait"])
def test_a_signal_handler_may_take_completions_in_the_middle_of_a_poll(rc, how):
    """It and the poll together get everything, once."""
    rng, got, posted, calls = random.Random(2), [], 0, 0

    def handler(*_: object) -> None:
        nonlocal calls
        calls += 1
        with contextlib.suppress(rp.RdmaError):
            got.extend(rc.cq.poll(2) if how == "poll" else rc.cq.wait(2, 0.001))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        while calls < 300:
            rc.a.post_send([write(rc, posted + i) for i in range(8)])
            posted += 8
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1e-4))
            while rc.a.outstanding.send:
                got.extend(rc.cq.poll(4))
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    got.extend(rc.cq.poll(1000))
    assert sorted(wc.wr_id for wc in got) == list(range(posted))


def test_a_finalizer_may_poll_and_close_in_the_middle_of_a_poll(connect, collects_always):
    pair, polled, closed = connect(), [], []

    class Last:
        def __init__(self) -> None:
            self.myself = self
            self.qp = rp.QP(pair.pd, rp.QPType.RC, pair.cq)

        def __del__(self) -> None:
            polled.extend(pair.cq.poll())
            self.qp.close()
            closed.append(self.qp)

    got = []
    for i in range(60):
        Last()
        pair.a.post_send(write(pair, i))
        while pair.a.outstanding.send:
            got += pair.cq.poll()
    gc.collect()
    got += pair.cq.poll()
    assert sorted(wc.wr_id for wc in got + polled) == list(range(60))
    assert len(closed) == 60
    assert all(qp.closed for qp in closed)


# ---- closing ------------------------------------------------------------------


def test_completions_put_back_in_a_signal_handler_wait_for_no_other_poll():
    """The other thread has the CQ's lock, and waits for the device, which our verb holds."""
    code = """
        import threading, time
        import rdmapost as rp
        from rdmapost._binding import native
        context = rp.open_device("soft0")
        pd, cq = rp.PD(context), rp.CQ(context)
        qp, mr = rp.QP(pd, rp.QPType.RC, cq), rp.MR(pd, 64, 7)
        qp.connect(qp.endpoint())
        qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey, wr_id=7))
        found = cq.wait()
        other = threading.Thread(target=lambda: theirs.extend(cq.poll()))
        theirs = []
        def verb():
            other.start()
            time.sleep(0.3)  # nothing tells that it waits for the device
            cq._poller.put_back(found)
        cq._verb(lambda _: native.verb(verb))
        other.join()
        print([wc.wr_id for wc in [*theirs, *cq.poll()]])
    """
    done = run_python(textwrap.dedent(code))
    assert (done.stdout.split(), done.stderr) == (["[7]"], "")


def test_an_interrupt_ends_a_wait_without_end(rc, interrupts):
    rc.a.post_send([write(rc, i) for i in range(3)])
    interrupts(0.05)
    with pytest.raises(Interrupt):
        rc.cq.wait(4, None)
    assert rc.cq._poller.waiting == 0
    assert [wc.wr_id for wc in rc.cq.wait(3)] == [0, 1, 2]


# ---- threads ------------------------------------------------------------------


def test_threads_that_poll_and_wait_share_what_comes(connect):
    """Each completion goes to one of them, once."""
    pairs, total = [connect() for _ in range(2)], 3000
    cq, got, done = pairs[0].cq, [], threading.Event()

    def post(pair: Pair, number: int) -> None:
        for i in range(total // 2):
            while pair.a.outstanding.send > 30:
                time.sleep(0)
            pair.a.post_send(write(pair, number * total + i))

    def taker(seed: int) -> None:
        rng = random.Random(seed)
        while not done.is_set():
            with contextlib.suppress(rp.WaitTimeout):
                if rng.random() < 0.5:
                    got.extend(cq.poll(rng.randint(0, 5)))
                else:
                    got.extend(cq.wait(rng.randint(1, 4), rng.choice([0, 0.001, 0.01])))

    posters = [threading.Thread(target=post, args=(p, n)) for n, p in enumerate(pairs)]
    takers = [threading.Thread(target=taker, args=(n,)) for n in range(4)]
    for thread in posters + takers:
        thread.start()
    ended(posters)
    until(lambda: not any(pair.a.outstanding.send for pair in pairs))
    done.set()
    ended(takers)
    got += cq.poll(total)
    expected = [n * total + i for n in range(2) for i in range(total // 2)]
    assert sorted(wc.wr_id for wc in got) == expected


# ---- waiting ----------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 0, 0.001], ids=["poll", "look", "wait"])
def test_interrupt_at_any_moment_keeps_no_lock(context, timeout):
    """It comes between any two steps of a poll or wait, like Ctrl-C."""

    raised: list[str] = []

    def interrupt(_: int, frame: FrameType) -> None:
        raised.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
        raise KeyboardInterrupt

    def again_and_again(cq: rp.CQ) -> None:
        while True:
            if timeout is None:
                cq.poll()
            else:
                with contextlib.suppress(rp.WaitTimeout):
                    cq.wait(1, timeout)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with rp.CQ(context) as cq:
            for index in range(300):
                with contextlib.suppress(KeyboardInterrupt):
                    # One that is lost must fail the test, not hang it.
                    signal.setitimer(signal.ITIMER_REAL, 2e-4 + index * 1e-6, 1)
                    again_and_again(cq)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert len(raised) == index + 1, raised[-2:]
                # Another thread would wait forever.
                other = threading.Thread(target=cq.poll, daemon=True)
                other.start()
                other.join(LIMIT)
                assert not other.is_alive()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_interrupted_wait_loses_no_completion(rc):
    """A signal whose handler raises arrives in the middle of a wait."""

    class Enough(Exception):
        pass

    def handler(*_: object) -> None:
        raise Enough

    rc.a.post_send([write(rc, i) for i in range(3)])
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Enough):
            rc.cq.wait(4, 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [wc.wr_id for wc in rc.cq.wait(3)] == [0, 1, 2]
