"""Asynchronous events: ibv_get_async_event."""

from __future__ import annotations

import select
import textwrap
import threading
from collections.abc import Iterator

import pytest
from support import ALL, async_events, connected, event_library, needs, prints, until
from support.event_library import INTERRUPT

import rdmapost as rp
from rdmapost import EventType, WCStatus

no_old_events = async_events.no_old_events
library = event_library.library
said = event_library.said


@pytest.fixture
def mr(pd, stack):
    return stack.enter_context(rp.MR(pd, 4096, ALL))


@pytest.mark.usefixtures("no_old_events")
def test_an_access_error_is_an_event_of_the_responder(context, pd, cq, mr, stack):
    needs(context.kind == "soft", "asynchronous event for access errors", context)
    near, far = connected(stack, pd, cq, cq)
    near.post_send(rp.RdmaWrite(mr[0:8], remote_addr=mr.addr, rkey=mr.rkey ^ 1))
    assert cq.wait(1)[0].status is WCStatus.REM_ACCESS_ERR
    event = context.get_async_event(5)
    assert event == rp.AsyncEvent(EventType.QP_ACCESS_ERR, far)
    assert context.get_async_event(0) is None


def test_closing_a_device_wakes_a_thread_that_waits_for_its_events(context):
    other, raised = rp.open_device(context.name), []

    def wait():
        try:
            other.get_async_event(None)
        except rp.ClosedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: other._poller.waiting)
    other.close()
    thread.join(20)
    assert raised == [f"device {other.name} is closed"]


def test_event_of_a_type_that_is_not_known_comes_as_its_number(said) -> None:
    """The next libibverbs has types that this package does not know, and their elements."""
    assert said("""
        library.event_add(77, 12345)
        library.event_add(rp.EventType.PORT_ERR, 1)
        for _ in range(2):
            event = context.get_async_event(0)
            print(repr(event.event_type), event.element, library.event_acknowledged())
        print(context.get_async_event(0))
    """) == ["77 None 1", "<EventType.PORT_ERR: 10> 1 2", "None"]


@pytest.mark.parametrize("name", ["DEVICE_FATAL", "DEVICE_SPEED_CHANGE"])
def test_event_of_the_whole_device_names_no_port(said, name: str) -> None:
    """The kernel fills in a meaningless port."""
    assert said(f"""
        library.event_add(rp.EventType.{name}, 1)
        print(*context.get_async_event(0), library.event_acknowledged())
    """) == [f"{name} None 1"]


def test_interrupt_at_any_moment_loses_no_event_of_the_library_and_acknowledges_it_once(
    said,
) -> None:
    lines = said("""
        from rdmapost._binding import address_of
        pd, cq = rp.PD(context), rp.CQ(context)
        qp = rp.QP(pd, rp.QPType.RC, cq)
        for moment in range(1, 200):
            library.event_add_qp(rp.EventType.QP_FATAL, address_of(qp._handle))
            hit, event = interrupted(lambda: context.get_async_event(0), moment)
            if hit:
                event = context.get_async_event(0)
            assert event == (rp.EventType.QP_FATAL, qp), (moment, event)
            assert context.get_async_event(0) is None, moment
            assert library.event_acknowledged() == moment, moment
            if not hit: break
        print(moment)
    """)
    assert 10 < int(lines[0]) < 200


def test_interrupt_at_any_moment_loses_no_event_of_soft0() -> None:
    lines = prints(
        "import signal, sys\nimport rdmapost as rp\n"
        + INTERRUPT
        + textwrap.dedent("""
        with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
            for moment in range(1, 200):
                with rp.MR(pd, 64) as mr, rp.QP(pd, rp.QPType.RC, cq) as qp:
                    qp.connect(qp.endpoint())
                    # The responder, which is the same queue pair, meets a key that is wrong.
                    qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=1))
                    hit, event = interrupted(lambda: context.get_async_event(0), moment)
                    if hit:
                        event = context.get_async_event(0)
                    assert event == (rp.EventType.QP_ACCESS_ERR, qp), (moment, event)
                    assert context.get_async_event(0) is None, moment
                if not hit: break
            print(moment)
        """)
    )
    assert 10 < int(lines) < 200


@pytest.fixture
def soft0() -> Iterator[rp.Context]:
    with rp.open_device("soft0") as context:
        yield context


def test_events_of_closed_resources_are_dropped_on_soft0(soft0) -> None:
    """As the kernel drops them, so that those that nobody collects do not pile up."""
    with rp.PD(soft0) as pd:
        for _ in range(3):
            with rp.CQ(soft0) as cq, rp.MR(pd, 64) as mr:
                with rp.QP(pd, rp.QPType.RC, cq) as qp:
                    qp.connect(qp.endpoint())
                    qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=1))
                    assert select.select([soft0.async_fd], [], [], 0)[0]
                assert not select.select([soft0.async_fd], [], [], 0)[0]
        assert soft0.get_async_event(0) is None


def test_event_of_an_open_queue_pair_outlives_another_one_on_soft0(soft0) -> None:
    with (
        rp.PD(soft0) as pd,
        rp.CQ(soft0) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, rp.QPType.RC, cq) as stays,
    ):
        with rp.QP(pd, rp.QPType.RC, cq) as closed:
            for qp in (closed, stays):
                qp.connect(qp.endpoint())
                qp.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=1))
        assert soft0.get_async_event(0) == (rp.EventType.QP_ACCESS_ERR, stays)
        assert soft0.get_async_event(0) is None


def test_threads_that_take_events_share_them_out(said) -> None:
    """No event comes twice, and none is left behind."""
    assert said("""
        import threading
        sys.setswitchinterval(1e-6)
        taken = []
        def take():
            while (event := context.get_async_event(0)) is not None:
                taken.append(event.element)
        for turn in range(50):
            for port in range(60):
                library.event_add(rp.EventType.PORT_ERR, turn * 60 + port)
            threads = [threading.Thread(target=take) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join(60)
            while (event := context.get_async_event(0)) is not None:
                taken.append(event.element)
        print(sorted(taken) == list(range(3000)), library.event_acknowledged())
    """) == ["True 3000"]
