"""A library with the benchmarks' null device that gives events on demand."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import textwrap
from collections.abc import Callable

import pytest

from support import ROOT, prints

LIBRARY = r"""
#define OWN_CQ_EVENTS
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
    directory = tmp_path_factory.mktemp("events")
    (directory / "events.c").write_text(LIBRARY)
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
            directory / "events.so",
            directory / "events.c",
        ],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        check=False,
        capture_output=True,
    )
    if built.returncode:
        pytest.skip("the null device does not compile here: are libibverbs' headers there?")
    return directory / "events.so"


@pytest.fixture
def said(library: pathlib.Path) -> Callable[[str], list[str]]:
    """Run a program on the null device; return the lines that it printed."""

    def run(code: str) -> list[str]:
        env = {"RDMAPOST_LIBIBVERBS": str(library), "ASAN_OPTIONS": "detect_leaks=0"}
        return prints(SETUP + INTERRUPT + textwrap.dedent(code), **env).splitlines()

    return run
