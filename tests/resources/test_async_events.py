"""Asynchronous events new in libibverbs; and these and a CQ's events under interrupts.

No device here gives events on demand, so a library with the benchmarks' null device does.
"""

from __future__ import annotations

import os
import pathlib
import select
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator

import pytest
from support import ROOT, prints

import rdmapost as rp

LIBRARY = r"""
#include "null.c"

static struct ibv_async_event queue[64];
static unsigned int head, tail, acknowledged;

void event_add(int type, int port);
void event_add_qp(int type, struct ibv_qp *qp);
unsigned int event_acknowledged(void);

void event_add(int type, int port)
{
	queue[tail % 64].event_type = type;
	queue[tail++ % 64].element.port_num = port;
}

void event_add_qp(int type, struct ibv_qp *qp)
{
	queue[tail % 64].event_type = type;
	queue[tail++ % 64].element.qp = qp;
}

unsigned int event_acknowledged(void)
{
	return acknowledged;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	(void)context;
	if (head == tail) {
		errno = EAGAIN;
		return -1;
	}
	*event = queue[head++ % 64];
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
	acknowledged++;
}

static struct ibv_cq *cq_events[64];
static unsigned int cq_head, cq_tail, cq_acknowledged;

void event_add_cq(struct ibv_cq *cq);
unsigned int event_cq_acknowledged(void);

void event_add_cq(struct ibv_cq *cq)
{
	cq_events[cq_tail++ % 64] = cq;
}

unsigned int event_cq_acknowledged(void)
{
	return cq_acknowledged;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	unsigned int head = __atomic_load_n(&cq_head, __ATOMIC_SEQ_CST);

	(void)channel;
	(void)cq_context;
	do {
		if (head == cq_tail) {
			errno = EAGAIN;
			return -1;
		}
		*cq = cq_events[head % 64];
	} while (!__atomic_compare_exchange_n(&cq_head, &head, head + 1, 0,
		__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	(void)cq;
	__atomic_add_fetch(&cq_acknowledged, count, __ATOMIC_SEQ_CST);
}
"""

SETUP = """
import ctypes, os, signal, sys
import rdmapost as rp
library = ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"])
library.event_add_qp.argtypes = [ctypes.c_int, ctypes.c_void_p]
library.event_add_cq.argtypes = [ctypes.c_void_p]
context = rp.open_device("null0")
"""

INTERRUPT = '''
def interrupted(call, moment):
    """Call, with a SIGINT at one of the moments at which Python runs signal handlers.

    Return whether there was one, and what the call returned.
    """
    at, result = 0, None
    def look(frame, event, argument):
        nonlocal at
        # At the start of a function, and when a call of C has come back.
        if event in ("call", "c_return", "c_exception"):
            at += 1
            if at == moment:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)
    try:
        sys.setprofile(look)
        try: result = call()
        finally: sys.setprofile(None)
    except KeyboardInterrupt: return True, None
    return False, result
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The null device with events, compiled."""
    cc = os.environ.get("CC", "cc").split()
    if shutil.which(cc[0]) is None:
        pytest.skip("there is no C compiler")
    into = tmp_path_factory.mktemp("events")
    (into / "events.c").write_text(LIBRARY)
    built = subprocess.run(
        [
            *cc,
            "-shared",
            "-fPIC",
            "-O1",
            "-std=gnu11",
            "-I",
            ROOT / "tests/bench",
            "-o",
            into / "events.so",
            into / "events.c",
        ],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        check=False,
        capture_output=True,
    )
    if built.returncode:
        pytest.skip("the null device does not compile here: are libibverbs' headers there?")
    return into / "events.so"


@pytest.fixture
def said(library: pathlib.Path) -> Callable[[str], list[str]]:
    """Run a program on the null device; return the lines that it printed."""

    def run(code: str) -> list[str]:
        env = {"RDMAPOST_LIBIBVERBS": str(library), "ASAN_OPTIONS": "detect_leaks=0"}
        return prints(SETUP + INTERRUPT + textwrap.dedent(code), **env).splitlines()

    return run


def test_event_of_a_type_that_is_not_known_comes_as_its_number(said) -> None:
    """The next libibverbs has types that this package does not know, and their elements."""
    assert said("""
        library.event_add(77, 12345)
        library.event_add(rp.EventType.PORT_ERR, 1)
        for _ in range(2):
            event = rp.get_async_event(context)
            print(repr(event.event_type), event.element, library.event_acknowledged())
        print(rp.get_async_event(context))
    """) == ["77 None 1", "<EventType.PORT_ERR: 10> 1 2", "None"]


@pytest.mark.parametrize("name", ["DEVICE_FATAL", "DEVICE_SPEED_CHANGE"])
def test_event_of_the_whole_device_names_no_port(said, name: str) -> None:
    """The kernel fills in a meaningless port."""
    assert said(f"""
        library.event_add(rp.EventType.{name}, 1)
        print(*rp.get_async_event(context), library.event_acknowledged())
    """) == [f"{8 if name == 'DEVICE_FATAL' else 20} None 1"]


def test_interrupt_at_any_moment_loses_no_event_of_the_library_and_acknowledges_it_once(
    said,
) -> None:
    lines = said("""
        from rdmapost._binding import address_of
        pd, cq = rp.PD(context), rp.CQ(context)
        qp = rp.QP(pd, rp.QPType.RC, cq)
        for moment in range(1, 200):
            library.event_add_qp(rp.EventType.QP_FATAL, address_of(qp._handle))
            hit, event = interrupted(lambda: rp.get_async_event(context), moment)
            if hit:
                event = rp.get_async_event(context)
            assert event == (rp.EventType.QP_FATAL, qp), (moment, event)
            assert rp.get_async_event(context) is None, moment
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
                    hit, event = interrupted(lambda: rp.get_async_event(context), moment)
                    if hit:
                        event = rp.get_async_event(context)
                    assert event == (rp.EventType.QP_ACCESS_ERR, qp), (moment, event)
                    assert rp.get_async_event(context) is None, moment
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
        assert rp.get_async_event(soft0) is None


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
        assert rp.get_async_event(soft0) == (rp.EventType.QP_ACCESS_ERR, stays)
        assert rp.get_async_event(soft0) is None


def test_threads_that_take_events_share_them_out(said) -> None:
    """No event comes twice, and none is left behind."""
    assert said("""
        import threading
        sys.setswitchinterval(1e-6)
        taken = []
        def take():
            while (event := rp.get_async_event(context)) is not None:
                taken.append(event.element)
        for turn in range(50):
            for port in range(60):
                library.event_add(rp.EventType.PORT_ERR, turn * 60 + port)
            threads = [threading.Thread(target=take) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join(60)
            while (event := rp.get_async_event(context)) is not None:
                taken.append(event.element)
        print(sorted(taken) == list(range(3000)), library.event_acknowledged())
    """) == ["True 3000"]


def test_interrupt_at_any_moment_loses_no_event_of_a_cq_and_acknowledges_it_once(said) -> None:
    """ibv_destroy_cq(3) waits for ever if one is not acknowledged."""
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
