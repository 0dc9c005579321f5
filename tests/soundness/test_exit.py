"""The end of the interpreter: in time, quietly, whatever is open, bound and outstanding."""

from __future__ import annotations

import pathlib
import time

import pytest
from support import LOSES_MEMORY, TIMES
from support.isolated import isolated, run_python

TESTS = pathlib.Path(__file__).resolve().parent.parent

OPEN = """
import contextlib, faulthandler, os, sys, threading
faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
sys.path.insert(0, sys.argv[3])
from support.connected_pair import *
rig = Rig(sys.argv[1])
"""

ENDS = {
    "window of type 2 bound": """
mw = rp.MW(rig.pd)
rig.b.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=rig.mr, addr=rig.mr.addr, length=64,
                          mw_access_flags=rp.Access.REMOTE_WRITE))
rig.cq.wait(1)[0].check()
""",
    "window of type 1 bound": """
mw = rp.MW(rig.pd, rp.MWType.TYPE_1)
rig.b.bind_mw(mw, rig.mr, rig.mr.addr, 64, rp.Access.REMOTE_WRITE)
rig.cq.wait(1)[0].check()
""",
    "window bound, first made": """
pd = rp.PD(rig.context)
mw = rp.MW(pd)
mr = rp.MR(pd, bytearray(4096), BINDABLE)
a, b = rp.QP(pd, rp.QPType.RC, rig.cq), rp.QP(pd, rp.QPType.RC, rig.cq)
a.connect(b.endpoint()); b.connect(a.endpoint())
a.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=64,
                      mw_access_flags=rp.Access.REMOTE_WRITE))
rig.cq.wait(1)[0].check()
""",
    "window bound, in a cycle": """
mw = rp.MW(rig.pd)
rig.b.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=rig.mr, addr=rig.mr.addr, length=64,
                          mw_access_flags=rp.Access.REMOTE_WRITE))
rig.cq.wait(1)[0].check()
cycle = [mw, rig]
cycle.append(cycle)
del mw, rig, cycle
gc.collect()
""",
    "work outstanding": """
rig.b.post_recv([rig.receive(1), rig.receive(2)])
rig.a.post_send([rig.write(1), rig.write(2)])
batch = rig.a.prepare(rig.write(3))
batch.post()
""",
    "thread that waits": """
started = threading.Event()
def wait():
    started.set()
    with contextlib.suppress(rp.ClosedError):
        rig.cq.wait(1, None)
threading.Thread(target=wait, daemon=True).start()
started.wait()
""",
    "thread that posts": """
started = threading.Event()
def post():
    batch = rig.a.prepare(rig.write(1))
    while True:
        try:
            batch.post()
            rig.cq.poll()
        except rp.PostError:
            pass
        except rp.ClosedError:
            return
        started.set()
threading.Thread(target=post, daemon=True).start()
started.wait()
""",
    "uncaught exception": """
mw = rp.MW(rig.pd)
rig.b.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=rig.mr, addr=rig.mr.addr, length=64,
                          mw_access_flags=rp.Access.REMOTE_WRITE))
rig.cq.wait(1)[0].check()
raise SystemExit(7)
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_program_with_anything_open_exits_promptly_and_silently(how, device):
    """A device may take minutes over a queue pair whose window is bound; nobody waits for that."""
    limit = min(10.0 * TIMES, 30.0)
    program = OPEN + ENDS[how] + "print('the end', flush=True)\n"
    start = time.monotonic()
    status, out, err = run_python(
        ["-W", "error", "-c", program, device, limit, TESTS], limit + 10, LOSES_MEMORY
    )
    assert (status, err) == (7 if how == "uncaught exception" else 0, "")
    assert out == ("" if status else "the end\n")
    assert time.monotonic() - start < limit


@isolated(timeout=30, **LOSES_MEMORY)
def test_close_that_raises_at_exit_leaves_nothing_else_open(soft):
    """Threads keep posting during the exit, which does not wait for them."""
    import threading

    from support.connected_pair import Rig

    import rdmapost as rp

    class Own(rp.QP):
        def close(self) -> None:
            raise ConnectionError("the peer is gone")

    rigs = [Rig(soft) for _ in range(3)]
    threading.current_thread().keeps = Own(rigs[0].pd, rp.QPType.RC, rigs[0].cq)  # type: ignore[attr-defined]

    def post(rig: Rig) -> None:
        while True:
            try:
                rig.a.post_send([rig.write(1)] * 8)
                rig.cq.poll()
            # What Own.close() raises can reach a thread, too, and Python ends with SIGABRT if a
            # thread is printing a traceback at its exit.
            except (rp.RdmaError, ConnectionError):
                return

    for rig in rigs:
        threading.Thread(target=post, args=(rig,), daemon=True).start()
    rigs[2].cq.wait(1, None)


@isolated(silent=True)
def test_finalizer_during_interpreter_exit_may_close(soft):
    """Of an object of the program's own, after the interpreter has begun to end."""
    import os
    import threading

    from support.connected_pair import Rig

    class Owner:
        def __init__(self) -> None:
            self.rig = Rig(soft)
            self.cycle = self

        def __del__(self, exit: object = os._exit) -> None:
            try:
                self.rig.a.close()
                self.rig.mr.close()
                self.rig.cq.poll()
            except Exception as error:
                # A resource that is already closed, or still in use, raises these.
                if type(error).__name__ not in ("ClosedError", "InUseError"):
                    exit(3)  # type: ignore[operator]

    threading.current_thread().keeps = Owner()  # type: ignore[attr-defined]


@pytest.mark.parametrize("others", ["wait", "post"])
def test_finalizer_at_exit_does_not_retry_a_close_that_the_device_refused(others):
    """Threads were stopped in the middle of waits and posts, and still hold their locks."""
    program = OPEN + KEPT_BUSY + OTHERS[others] + "time.sleep(0.3)"
    status, out, err = run_python(["-c", program, "soft0", 10 * TIMES, TESTS], 60, LOSES_MEMORY)
    assert (status, out) == (0, "nothing happened\n")
    assert "close it, or what uses it" not in err


KEPT_BUSY = """
import types
from rdmapost._binding import ffi, lib
init = ffi.new("struct ibv_qp_init_attr_ex *")
init.send_cq = init.recv_cq = rig.cq._handle
init.qp_type, init.pd, init.comp_mask = rp.QPType.RC, rig.pd._handle, lib.IBV_QP_INIT_ATTR_PD
init.cap.max_send_wr = init.cap.max_recv_wr = 1
# Something else in the process, which rdmapost does not know, uses the CQ.
other = rig.context._provider.create_qp_ex(rig.context._handle, init)

class Owner:
    def __init__(self, *owned):
        self.owned = owned

    def __del__(self, write=os.write):
        for one in self.owned:
            one.close()
        try:
            self.owned[0].poll()
        except Exception as error:
            if "the interpreter is exiting" in str(error):
                write(1, b"nothing happened\\n")

sys.modules["owner"] = types.ModuleType("owner")
sys.modules["owner"].owner = Owner(rig.cq, rig.pd, rig.context)
"""
OTHERS = {
    "wait": """
for _ in range(4):
    threading.Thread(target=rig.cq.wait, args=(1, None), daemon=True).start()
""",
    "post": """
def post():
    with contextlib.suppress(rp.ClosedError):
        while True:
            with contextlib.suppress(rp.PostError):
                rig.a.post_send(rig.write(1))
            rig.cq.poll()

for _ in range(4):
    threading.Thread(target=post, daemon=True).start()
""",
}


def test_exit_handler_registered_after_the_import_finds_everything_open():
    """Even if the library is first used afterwards. An earlier one finds everything closed."""
    status, out, err = run_python(
        [
            "-c",
            "import atexit\n"
            "def say(when):\n"
            "    print(when, context.closed)\n"
            "    try: rp.PD(context)\n"
            "    except rp.ClosedError as error: print(error)\n"
            "    try: rp.open_device('soft0')\n"
            "    except rp.ClosedError as error: print(error)\n"
            "atexit.register(say, 'before')\n"
            "import rdmapost as rp\n"
            "atexit.register(say, 'after')\n"
            "context = rp.open_device('soft0')\n",
        ],
        30,
        {},
    )
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "after False",
        "before True",
        "nothing can be opened: the interpreter is exiting",
        "nothing can be opened: the interpreter is exiting",
    ]


def test_library_is_not_loaded_while_the_interpreter_exits():
    status, out, err = run_python(
        [
            "-c",
            "import atexit\n"
            "def late():\n"
            "    try: rp.open_device('soft0')\n"
            "    except ImportError as error: print(error)\n"
            "atexit.register(late)\n"
            "import rdmapost as rp\n",
        ],
        30,
        {},
    )
    assert (status, out, err) == (0, "rdmapost cannot be loaded: the interpreter is exiting\n", "")
