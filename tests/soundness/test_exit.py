"""The end of the interpreter: in time, quietly, whatever is open, bound and outstanding."""

from __future__ import annotations

import time

import pytest
from isolated import TIMES, isolated, run_python

OPEN = """
import faulthandler, os, sys
faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
sys.path[:0] = sys.argv[3:]
from rig import *
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
def test_program_ends_at_once_and_quietly_with(how, device):
    """A device may take minutes over a queue pair whose window is bound; nobody waits for that."""
    import pathlib

    here = pathlib.Path(__file__).resolve().parent
    limit = min(10.0 * TIMES, 30.0)
    program = OPEN + ENDS[how] + "print('the end', flush=True)\n"
    start = time.monotonic()
    status, out, err = run_python(
        ["-W", "error", "-c", program, device, limit, here, here.parent], limit + 10, {}
    )
    assert (status, err) == (7 if how == "uncaught exception" else 0, "")
    assert out == ("" if status else "the end\n")
    assert time.monotonic() - start < limit


@isolated(timeout=30)
def test_close_that_raises_keeps_nothing_else_open_at_the_end(soft):
    """Threads that post go on meanwhile, and the end does not wait for them."""
    import threading

    from rig import Rig

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
            except rp.RdmaError:
                return

    for rig in rigs:
        threading.Thread(target=post, args=(rig,), daemon=True).start()
    rigs[2].cq.wait(1, None)


@isolated(silent=True)
def test_finalizer_that_runs_at_the_end_may_close(soft):
    """Of an object of the program's own, after the interpreter has begun to end."""
    import os
    import threading

    from rig import Rig

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
                # What is closed by then says so.
                if type(error).__name__ not in ("ClosedError", "InUseError"):
                    exit(3)  # type: ignore[operator]

    threading.current_thread().keeps = Owner()  # type: ignore[attr-defined]
