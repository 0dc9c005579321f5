"""Threads that wait for completions: woken at once, asleep until then, by descriptors of their own.

A thread that nobody wakes looks again after a second, so a wake-up that is lost costs no more than
that: these tests tell a moment from a second.  Each has several tries, for the machine may be busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pathlib
import resource
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import LIMIT, prints, until

import rdmapost as rp

TRIES = 6
AT_ONCE = 0.5


def at_once(attempt: Callable[[], float]) -> bool:
    """Return whether something takes less than half a second in one of some tries."""
    return any(attempt() < AT_ONCE for _ in range(TRIES))


def idle(attempt: Callable[[], object]) -> bool:
    """Return whether a call uses almost no CPU time."""
    for _ in range(TRIES):
        began, used = time.monotonic(), time.process_time()
        attempt()
        took, used = time.monotonic() - began, time.process_time() - used
        began, cpu_before = time.monotonic(), time.process_time()
        while time.monotonic() < began + 0.1:
            pass
        if used < (time.process_time() - cpu_before) * took / 0.1 / 4:
            return True
    return False


class Waiter(threading.Thread):
    """A thread that calls a function, which waits."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.result, self.ended = call, None, 0.0
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except rp.RdmaError as error:
            self.result = error
        self.ended = time.monotonic()

    def end(self) -> Any:
        self.join(LIMIT)
        assert not self.is_alive()
        return self.result


def asleep(source: rp.CQ | rp.CompChannel, waiters: int) -> None:
    """Wait until so many threads wait, and for the moment after which they sleep."""
    until(lambda: source._poller.waiting == waiters)
    time.sleep(0.02)


def write(rc: Any, count: int = 1) -> None:
    rc.a.post_send([rc.wr(rp.RdmaWrite, rc.mine[:1], wr_id=i) for i in range(count)])


def seconds_until_it_ends(waiter: Waiter, rc: Any, count: int) -> float:
    """Complete as many work requests as the thread waits for; return how long it then waits."""
    began = time.monotonic()
    write(rc, count)
    assert len(waiter.end()) == count
    return waiter.ended - began


@contextlib.contextmanager
def handling(handle: Callable[..., None]) -> Iterator[None]:
    """Have SIGALRM call a function."""
    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


WAITS = {
    "CQ": (rp.CQ, lambda cq, seconds: cq.wait(1, seconds)),
    "channel": (rp.CompChannel, lambda channel, seconds: channel.get_cq_event(seconds)),
}


@pytest.fixture(params=WAITS)
def source(request, context, stack) -> Iterator[tuple[Any, Callable[[Any, float | None], Any]]]:
    """How to cause an event, and how to wait for it."""
    make, wait = WAITS[request.param]
    return lambda: stack.enter_context(make(context)), wait


def test_closing_a_cq_ends_a_wait_at_once(source):
    make, wait = source

    def attempt() -> float:
        it = make()
        waiter = Waiter(lambda: wait(it, None))
        asleep(it, 1)
        began = time.monotonic()
        it.close()
        assert isinstance(waiter.end(), rp.ClosedError)
        return waiter.ended - began

    assert at_once(attempt)


def test_wait_ends_as_soon_as_its_time_is_over(source):
    make, wait = source
    it = make()

    def attempt() -> float:
        began = time.monotonic()
        with contextlib.suppress(rp.WaitTimeout):
            assert wait(it, 0.05) is None
        took = time.monotonic() - began
        assert took >= 0.05
        return took

    assert at_once(attempt)


def test_thread_that_waits_sleeps(source):
    make, wait = source
    it = make()

    def attempt() -> None:
        with contextlib.suppress(rp.WaitTimeout):
            wait(it, 0.5)

    assert idle(attempt)


def test_event_that_wakes_a_wait_is_taken_off_the_channel(rc):
    """Otherwise no other wait would sleep."""

    def attempt() -> bool:
        waiter = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        write(rc)
        assert len(waiter.end()) == 1
        return not select.select([rc.cq._event_fd()], [], [], 0)[0]

    assert any(attempt() for _ in range(TRIES))


def test_waits_leave_the_descriptors_as_they_were(source):
    make, wait = source
    it = make()
    before = sorted(os.listdir("/proc/self/fd"))
    standard_input = os.fstat(0)
    for _ in range(3):
        with contextlib.suppress(rp.WaitTimeout):
            wait(it, 0.01)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.path.samestat(os.fstat(0), standard_input)


def test_wait_whose_descriptor_is_0_is_like_any_other():
    """In a program whose standard input is closed."""
    code = """
import os, threading, time
import rdmapost as rp
context = rp.open_device("soft0")
rp.PD(context).close()

def attempt():
    cq, said = rp.CQ(context), []
    def wait():
        try: cq.wait(1, 60)
        except rp.ClosedError: said.append(time.monotonic())
    os.close(0)
    thread = threading.Thread(target=wait)
    thread.start()
    while not os.path.exists("/proc/self/fd/0"): time.sleep(0.001)
    time.sleep(0.02)
    is_event = "eventfd" in os.readlink("/proc/self/fd/0")
    cq._poller.wake_all()  # It looks, and sleeps again.
    time.sleep(0.02)
    began = time.monotonic()
    cq.close()
    thread.join()
    assert not os.path.exists("/proc/self/fd/0")
    assert os.open("/dev/null", os.O_RDONLY) == 0
    assert is_event
    return said[0] - began

print(any(attempt() < 0.5 for _ in range(6)))
"""
    assert prints(code) == "True"


def test_signal_that_another_thread_gets_ends_the_wait_of_the_main_thread(source):
    """Nothing wakes the main thread then: it looks for signals once a second."""
    make, wait = source
    it = make()

    class Struck(Exception):
        pass

    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    ends = threading.Event()

    def get_struck() -> None:
        asleep(it, 1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        ends.wait(LIMIT)

    other = threading.Thread(target=get_struck)
    other.start()
    began = time.monotonic()
    try:
        with pytest.raises(Struck):
            wait(it, 30)
        assert time.monotonic() - began < 15
    finally:
        ends.set()
        other.join()
        signal.signal(signal.SIGUSR1, before)


def test_close_between_a_poll_and_the_sleep_after_it_ends_the_wait_at_once(context):
    class Channel(rp.CompChannel):
        def _take_event(self) -> None:
            if not looked.is_set():
                looked.set()
                assert shut.wait(LIMIT)

    def attempt() -> float:
        looked.clear()
        shut.clear()
        channel = Channel(context)
        waiter = Waiter(lambda: channel.get_cq_event(LIMIT))
        assert looked.wait(LIMIT)
        closer = Waiter(channel.close)
        until(lambda: not is_open(channel))
        time.sleep(0.02)
        began = time.monotonic()
        shut.set()
        assert isinstance(waiter.end(), rp.ClosedError)
        closer.end()
        return waiter.ended - began

    def is_open(channel: rp.CompChannel) -> bool:
        with contextlib.suppress(rp.ClosedError):
            return bool(channel._open_struct())
        return False

    looked, shut = threading.Event(), threading.Event()
    assert at_once(attempt)


def test_descriptor_of_a_wait_is_not_inherited(source):
    make, wait = source
    it = make()
    before = eventfds()
    waiter = Waiter(lambda: wait(it, LIMIT))
    until(lambda: eventfds() - before)
    made = eventfds() - before
    assert not any(map(os.get_inheritable, made))
    it.close()
    waiter.end()


def eventfds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "eventfd" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


def test_wait_that_gets_no_descriptor_raises_its_errno():
    code = """
import os, resource
import rdmapost as rp
with rp.open_device("soft0") as context, rp.CQ(context) as cq, rp.CompChannel(context) as channel:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    for wait in (lambda: cq.wait(1, 0.2), lambda: channel.get_cq_event(0.2)):
        try: wait()
        except rp.VerbsError as error: print(str(error).partition(" (")[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try: cq.wait(1, 0.01)
    except rp.WaitTimeout as error: print(error)
"""
    assert prints(code).splitlines() == [
        "eventfd: EMFILE",
        "eventfd: EMFILE",
        "0 of 1 completions came within 0.01 s",
    ]


def test_handlers_exception_ends_a_wait_inside_another_signal_handler(rc):
    """A handler of one signal waits, and that of another raises."""

    class Struck(Exception):
        pass

    def wait(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        rc.cq.wait(1, 30)

    def strike(*_: object) -> None:
        raise Struck

    kept = [
        (number, signal.signal(number, how))
        for number, how in ((signal.SIGUSR1, wait), (signal.SIGALRM, strike))
    ]
    try:
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        timer.start()
        began = time.monotonic()
        with pytest.raises(Struck):
            rc.cq.wait(1, 30)
        assert time.monotonic() - began < 20
        timer.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, how in kept:
            signal.signal(number, how)
    write(rc)
    assert len(rc.cq.wait(1)) == 1


# ---- several threads --------------------------------------------------------------


def test_completion_that_the_thread_that_sleeps_on_the_channel_has_polled_wakes_its_owner(rc):
    """It wants three itself, and the other two one each."""

    def attempt() -> float:
        leader = Waiter(lambda: rc.cq.wait(3, LIMIT))
        asleep(rc.cq, 1)
        others = [Waiter(lambda: rc.cq.wait(1, LIMIT)) for _ in range(2)]
        asleep(rc.cq, 3)
        began = time.monotonic()
        write(rc, 2)
        assert [len(other.end()) for other in others] == [1, 1]
        took = max(other.ended for other in others) - began
        write(rc, 3)
        assert len(leader.end()) == 3
        return took

    assert at_once(attempt)


def test_thread_takes_the_place_of_another_that_slept_on_the_channel(rc):
    """The first has what it waits for and goes; completions that come later wake the second."""

    def attempt() -> float:
        first = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        second = Waiter(lambda: rc.cq.wait(2, LIMIT))
        asleep(rc.cq, 2)
        write(rc)
        assert len(first.end()) == 1
        time.sleep(0.05)
        return seconds_until_it_ends(second, rc, 2)

    assert at_once(attempt)


def test_wait_leaves_a_completion_to_a_wait_that_began_before_it(rc):
    """Or a thread that posts and waits in a loop would starve all others."""

    def attempt() -> bool:
        first = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        write(rc)
        try:
            rc.cq.wait(1, 0.2)
        except rp.WaitTimeout:
            return len(first.end()) == 1
        write(rc)
        first.end()
        return False

    # It leaves it for 10 ms: on a busy machine, the first may not wake up in time.
    assert any(attempt() for _ in range(5))


def test_wait_leaves_nothing_to_a_wait_that_began_after_it(rc):
    """It takes a completion within the 10 ms for which it would leave one to an earlier wait."""

    def attempt() -> float:
        first = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        second = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 2)
        began = time.monotonic()
        write(rc)
        assert len(first.end()) == 1
        write(rc)
        assert len(second.end()) == 1
        return first.ended - began

    assert any(attempt() < 0.008 for _ in range(30))


def test_wait_takes_what_a_wait_that_began_before_it_cannot_use(rc):
    first = Waiter(lambda: rc.cq.wait(3, LIMIT))
    asleep(rc.cq, 1)
    write(rc, 2)
    assert len(rc.cq.wait(2, LIMIT)) == 2
    write(rc, 3)
    assert len(first.end()) == 3


def test_wait_does_not_wait_for_a_thread_that_waits_for_it(rc):
    """The main thread waits, and its signal handler joins a thread that waits, too."""
    found = []

    def handle(*_: object) -> None:
        write(rc)
        other = Waiter(lambda: rc.cq.wait(1, LIMIT))
        found.append(other.end())
        write(rc)

    with handling(handle):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert len(rc.cq.wait(1, LIMIT)) == 1
    assert len(found[0]) == 1


def meanwhile(rc: Any, does: Callable[[], None], count: int = 1) -> None:
    """Wait for completions, and call a function in the middle of that, in a signal handler."""
    done = []

    def handle(*_: object) -> None:
        does()
        done.append(True)
        write(rc, count)

    with handling(handle):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert len(rc.cq.wait(count, LIMIT)) == count
    assert done


def test_wait_takes_at_once_what_comes_besides_what_an_earlier_wait_wants(rc):
    """Even while the earlier wait takes nothing."""

    def others() -> None:
        def attempt() -> float:
            began = time.monotonic()
            write(rc)
            other = Waiter(lambda: rc.cq.wait(1, LIMIT))
            assert len(other.end()) == 1
            return other.ended - began

        write(rc)
        assert any(attempt() < 0.008 for _ in range(30))

    meanwhile(rc, others)
    assert len(rc.cq.wait(1, LIMIT)) == 1


def test_wait_that_leaves_a_polled_completion_wakes_its_waiter(rc):
    """The thread that sleeps on the channel does not: it is in a signal handler."""

    def others() -> None:
        def attempt() -> float:
            other = Waiter(lambda: rc.cq.wait(1, LIMIT))
            asleep(rc.cq, 2)
            began = time.monotonic()
            write(rc)
            with pytest.raises(rp.WaitTimeout):
                # A device may take a moment to complete it.
                rc.cq.wait(4, 0.1)
            assert len(other.end()) == 1
            return other.ended - began

        assert at_once(attempt)

    meanwhile(rc, others, 3)


def test_wait_leaves_completions_to_an_earlier_wait_for_10_ms_although_a_signal_comes(rc):
    def others() -> None:
        for _ in range(TRIES):
            write(rc)
            began = time.monotonic()
            other = Waiter(lambda: rc.cq.wait(1, LIMIT))
            time.sleep(0.003)
            signal.pthread_kill(other.ident, signal.SIGURG)
            assert len(other.end()) == 1
            assert other.ended - began >= 0.01

    before = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        meanwhile(rc, others)
    finally:
        signal.signal(signal.SIGURG, before)


def test_wait_sleeps_while_it_leaves_completions_to_an_earlier_wait(rc):
    if rc.cq.context.kind != "soft":
        pytest.skip("the emulated machine of Soft-RoCE starts threads for longer than they sleep")

    def others() -> None:
        for _ in range(20):
            write(rc)
            assert len(Waiter(lambda: rc.cq.wait(1, LIMIT)).end()) == 1

    calm: list[bool] = []
    meanwhile(rc, lambda: calm.append(idle(others)))
    assert calm == [True]


def test_wait_that_leaves_completions_to_an_earlier_wait_says_if_it_gets_no_descriptor(rc):
    def others() -> None:
        write(rc)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            came = Waiter(lambda: rc.cq.wait(1, LIMIT)).end()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert "eventfd: EMFILE" in str(came)
        assert len(rc.cq.wait(1, LIMIT)) == 1

    meanwhile(rc, others)


@pytest.mark.parametrize("vain", [0, 1, 3])
def test_completions_that_are_put_back_wake_their_waiters(rc, vain):
    """As after an interrupt; also who was woken in vain before, because they were taken again."""

    def attempt() -> float:
        write(rc)
        found = rc.cq.wait(1)
        waiter = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        for _ in range(vain):
            rc.cq._poller.put_back(found)
            found = rc.cq.poll()
            if not found:  # The other thread was faster.
                assert len(waiter.end()) == 1
                return AT_ONCE
            time.sleep(0.02)
        began = time.monotonic()
        rc.cq._poller.put_back(found)
        assert waiter.end() == found
        return waiter.ended - began

    assert at_once(attempt)


def test_thread_that_is_woken_in_vain_sleeps_again(rc):
    def attempt() -> None:
        write(rc)
        found = rc.cq.wait(1)
        waiter = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        rc.cq._poller.put_back(found)
        if found := rc.cq.poll():
            time.sleep(0.5)
            rc.cq._poller.put_back(found)
        assert len(waiter.end()) == 1

    assert idle(attempt)


def test_poll_of_another_thread_wakes_the_waiter_for_what_it_leaves(rc):
    """One that polls fewer than there are."""

    def attempt() -> float:
        waiter = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        began = time.monotonic()
        write(rc, 2)
        taken = rc.cq.poll(1)
        assert len(waiter.end()) == 1
        took = waiter.ended - began
        assert len(taken + rc.cq.poll()) == 1
        return took

    assert at_once(attempt)


@pytest.mark.parametrize("next_use", ["wait", "await", "close"])
def test_waiting_state_of_a_finished_event_loop_goes_with_the_next_wait(rc, next_use):
    async def main() -> Any:
        task = asyncio.create_task(rc.cq.completions(1, LIMIT))
        while rc.cq._poller.tasks is None:
            await asyncio.sleep(0)
        place = weakref.ref(rc.cq._poller.tasks)
        write(rc)
        assert len(await task) == 1
        return place

    place = asyncio.run(main())
    if next_use == "close":
        for resource in (rc.a, rc.b, rc.cq):
            resource.close()
    else:
        with pytest.raises(rp.WaitTimeout):
            rc.cq.wait(1, 0.01) if next_use == "wait" else asyncio.run(rc.cq.completions(1, 0.01))
    gc.collect()
    assert place() is None


def test_thread_waits_on_when_the_tasks_that_slept_on_the_channel_are_gone(rc):
    def attempt() -> float:
        async def main() -> Waiter:
            task = asyncio.create_task(rc.cq.completions(1, LIMIT))
            while rc.cq._poller.tasks is None:
                await asyncio.sleep(0)
            waiter = Waiter(lambda: rc.cq.wait(2, LIMIT))
            until(lambda: rc.cq._poller.waiting == 1)
            await asyncio.sleep(0.02)
            write(rc)
            assert len(await task) == 1
            return waiter

        waiter = asyncio.run(main())
        time.sleep(0.05)
        return seconds_until_it_ends(waiter, rc, 2)

    assert at_once(attempt)


def test_thread_that_does_not_sleep_on_the_channel_sleeps(rc):
    """Whatever comes on standard input: it has no other descriptor than its own."""

    def attempt() -> None:
        waiters = [Waiter(lambda: rc.cq.wait(1, LIMIT)) for _ in range(2)]
        asleep(rc.cq, 2)
        time.sleep(0.5)
        write(rc, 2)
        assert [len(waiter.end()) for waiter in waiters] == [1, 1]

    assert idle(attempt)


def test_threads_that_wait_wake_at_most_once_a_second_while_nothing_comes(rc):
    def sleeps(thread: Waiter) -> int:
        status = pathlib.Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def attempt() -> int:
        waiters = [Waiter(lambda: rc.cq.wait(1, LIMIT)) for _ in range(2)]
        asleep(rc.cq, 2)
        before = [sleeps(waiter) for waiter in waiters]
        time.sleep(0.5)
        woke = sum(map(sleeps, waiters)) - sum(before)
        write(rc, 2)
        assert [len(waiter.end()) for waiter in waiters] == [1, 1]
        return woke

    assert any(attempt() < 10 for _ in range(TRIES))


def test_exception_from_waking_the_event_loop_ends_the_wait(cq):
    def wake() -> None:
        raise LookupError

    assert cq._poller.claim(wake)
    try:
        for call in (lambda: cq.wait(1, 5), lambda: cq._poller.claim(print)):
            with pytest.raises(LookupError):
                call()
    finally:
        assert cq._poller.unclaim(wake, cq._poller.claims)
    with pytest.raises(rp.WaitTimeout):
        cq.wait(1, 0.01)


def test_wait_beside_tasks_of_a_stopped_event_loop_ends_soon(rc):
    """Nobody sleeps on the channel then."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(rc.cq.completions(8))
    loop.run_until_complete(asyncio.sleep(0.01))

    def attempt() -> float:
        waiter = Waiter(lambda: rc.cq.wait(1, LIMIT))
        asleep(rc.cq, 1)
        return seconds_until_it_ends(waiter, rc, 1)

    try:
        assert at_once(attempt)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()
