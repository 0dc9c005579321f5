"""Completion channels: ibv_req_notify_cq and ibv_get_cq_event."""

from __future__ import annotations

import select
import threading
import time

import pytest
from support import ALL, LIMIT, connected, ended, event_library, waiting

import rdmapost as rp
from rdmapost import SendFlags

library = event_library.library
said = event_library.said


@pytest.fixture
def channel(context, stack):
    return stack.enter_context(rp.CompChannel(context))


@pytest.fixture
def mr(pd, stack):
    return stack.enter_context(rp.MR(pd, 4096, ALL))


def test_an_event_names_the_cq_that_has_completions(context, pd, channel, cq, mr, stack):
    quiet = stack.enter_context(rp.CQ(context, 8, channel=channel))
    busy = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, busy)
    far.post_recv(rp.RecvWR(mr[64:128], wr_id=3))
    quiet.req_notify()
    busy.req_notify()
    assert channel.get_cq_event(0) is None
    near.post_send(rp.Send(mr[0:8]))
    assert channel.get_cq_event(5) is busy
    assert [wc.wr_id for wc in busy.poll()] == [3]
    # One event for one request; no other was requested.
    assert channel.get_cq_event(0) is None


def test_the_descriptor_is_readable_when_there_is_an_event(context, pd, channel, cq, mr, stack):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv([rp.RecvWR(mr[64:128])] * 2)
    far_cq.req_notify()
    assert select.select([channel], [], [], 0)[0] == []
    near.post_send(rp.Send(mr[0:8]))
    assert select.select([channel], [], [], 5)[0] == [channel]
    assert channel.get_cq_event(0) is far_cq


def test_req_notify_for_solicited_messages_does_not_replace_one_for_any(
    context, pd, channel, cq, mr, stack
):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv(rp.RecvWR(mr[64:128]))
    far_cq.req_notify()
    far_cq.req_notify(solicited_only=True)
    near.post_send(rp.Send(mr[0:8]))
    assert channel.get_cq_event(5) is far_cq


def test_req_notify_with_solicited_only_wakes_for_solicited_messages_alone(
    context, pd, channel, cq, mr, stack
):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv([rp.RecvWR(mr[64:128], wr_id=n) for n in range(2)])
    far_cq.req_notify(solicited_only=True)
    near.post_send(rp.Send(mr[0:8]))
    cq.wait(1)
    assert channel.get_cq_event(0) is None
    near.post_send(rp.Send(mr[0:8], send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    assert channel.get_cq_event(5) is far_cq
    assert [wc.wr_id for wc in far_cq.poll()] == [0, 1]
    # One event was requested.
    far.post_recv(rp.RecvWR(mr[64:128]))
    near.post_send(rp.Send(mr[0:8], send_flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    cq.wait(2)
    assert channel.get_cq_event(0) is None


def test_a_thread_asleep_on_the_channel_wakes(context, pd, channel, cq, mr, stack):
    far_cq = stack.enter_context(rp.CQ(context, 8, channel=channel))
    near, far = connected(stack, pd, cq, far_cq)
    far.post_recv(rp.RecvWR(mr[64:128]))
    far_cq.req_notify()
    woken = []
    sleeper = threading.Thread(target=lambda: woken.append(channel.get_cq_event(10)))
    sleeper.start()
    near.post_send(rp.Send(mr[0:8]))
    sleeper.join(10)
    assert woken == [far_cq]


def test_misuse_of_completion_channels_is_refused_with_advice(context, pd, channel, cq, stack):
    shared = stack.enter_context(rp.CQ(context, 8, channel=channel))
    with pytest.raises(rp.RdmaError, match="uses a shared completion channel"):
        shared.wait(1, 0)
    with pytest.raises(rp.RdmaError, match="created without a completion channel: pass"):
        cq.req_notify()
    with pytest.raises(rp.InUseError, match="CQ of"):
        channel.close()
    shared.close()
    channel.close()
    with pytest.raises(rp.ClosedError):
        channel.fileno()


def test_closing_a_channel_ends_the_threads_that_wait_for_its_events(context):
    channel, errors = rp.CompChannel(context), []

    def wait() -> None:
        try:
            channel.get_cq_event(None)
        except rp.ClosedError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting(channel, threads)
    channel.close()
    ended(threads)
    assert errors == ["completion channel is closed"] * 3


def test_a_thread_that_polls_for_events_does_not_keep_a_channel_open(context):
    for _ in range(20):
        channel, looks, errors = rp.CompChannel(context), threading.Semaphore(0), []

        def look(channel=channel, looks=looks, errors=errors) -> None:
            try:
                while True:
                    assert channel.get_cq_event(0) is None
                    looks.release()
            except rp.ClosedError as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            assert looks.acquire(timeout=LIMIT)
        start = time.monotonic()
        channel.close()
        assert time.monotonic() - start < 2
        ended(threads)
        assert len(errors) == 2


def test_interrupt_at_any_moment_loses_no_event_of_a_cq_and_acknowledges_it_once(said) -> None:
    """ibv_destroy_cq(3) waits forever if one is not acknowledged."""
    lines = said("""
        from rdmapost._binding import address_of
        channel = rp.CompChannel(context)
        cq, other = rp.CQ(context, channel=channel), rp.CQ(context, channel=channel)
        for moment in range(1, 400):
            library.event_add_cq(address_of(other._handle))
            hit, found = interrupted(lambda: channel.get_cq_event(0), moment)
            # Taken or not, none is left that is not acknowledged.
            taken = library.event_cq_acknowledged()
            assert taken in (moment - 1, moment), (moment, taken)
            if hit:
                found = channel.get_cq_event(0)
            assert found is other, (moment, found)
            assert channel.get_cq_event(0) is None, moment
            assert library.event_cq_acknowledged() == moment, moment
            if not hit: break
        print(moment)
    """)
    assert 5 < int(lines[0]) < 400


def test_shortage_of_memory_loses_no_event_of_a_cq_unless_it_lasts(said) -> None:
    """A wait for an event ends with MemoryError then, and the next event comes."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    lines = said("""
        import _testcapi
        from rdmapost._binding import address_of
        channel = rp.CompChannel(context)
        cq = rp.CQ(context, channel=channel)
        def look(first, end):
            library.event_add_cq(address_of(cq._handle))
            _testcapi.set_nomemory(first, end)
            try: return channel.get_cq_event(0)
            except MemoryError: return None
            finally: _testcapi.remove_mem_hooks()
        # The dict of the events grows at the first.
        print(look(1000, 1001) is cq)
        brief, lasting, lost = set(), set(), []
        for at in range(40):
            if look(at, at + 1) is not cq:
                brief.add(at)
                if channel.get_cq_event(0) is not cq: lost.append(at)
            if look(at, 0) is not cq:
                lasting.add(at)
                channel.get_cq_event(0)
        print(set() < brief < lasting, lost)
        print(look(1000, 1001) is cq, channel.get_cq_event(0), library.event_cq_acknowledged())
    """)
    assert lines == ["True", "True []", "True None 82"]


def test_threads_that_take_events_of_cqs_share_them_out(said) -> None:
    """One announcement wakes one thread, and none is left behind."""
    assert said("""
        import threading
        from rdmapost._binding import address_of
        sys.setswitchinterval(1e-6)
        channel = rp.CompChannel(context)
        cqs = [rp.CQ(context, channel=channel) for _ in range(60)]
        taken = []
        def take():
            while (cq := channel.get_cq_event(0)) is not None:
                taken.append(cq)
        for turn in range(50):
            for cq in cqs:
                library.event_add_cq(address_of(cq._handle))
            threads = [threading.Thread(target=take) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join(60)
            take()
        print(sorted(map(id, taken)) == sorted(50 * [*map(id, cqs)]))
        print(library.event_cq_acknowledged())
    """) == ["True", "3000"]
