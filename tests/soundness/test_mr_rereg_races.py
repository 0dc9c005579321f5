"""MR.rereg against posts, closes and other reregs in other threads, and under interrupts."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import threading
import time

import pytest
from support import LOSES_MEMORY, TIMES, prints
from support.connected_pair import LIMIT, Rig, thread
from support.isolated import isolated

import rdmapost as rp
from rdmapost import Access

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
SECONDS = 0.8 * TIMES


def _can(mr: rp.MR) -> bool:
    """Return whether the device supports rereg; if so, the region has moved."""
    with contextlib.suppress(rp.UnsupportedError):
        mr.rereg(memory=mr.length)
        return True
    return False


@isolated()
def test_posts_beside_a_rereg_name_the_region_as_it_is_or_are_refused(device):
    """A post names the region as it is, or is refused; what it writes to is always mapped."""
    rig = Rig(device)
    mr = rp.MR(rig.pd, mmap.PAGESIZE, ALL)
    if _can(mr):
        end = time.monotonic() + SECONDS
        moved = posted = 0
        texts = set()

        def move() -> None:
            nonlocal moved
            while time.monotonic() < end:
                with contextlib.suppress(rp.InUseError):
                    # The old memory is unmapped at once: a device that wrote there would crash.
                    mr.rereg(memory=random.choice((1, 2, 3)) * mmap.PAGESIZE)
                    moved += 1

        with thread(move):
            while time.monotonic() < end:
                try:
                    rig.a.post_send(rp.RdmaRead(mr[:8], remote_addr=rig.mr.addr, rkey=rig.mr.rkey))
                    posted += 1
                except (rp.PostError, rp.ClosedError) as error:
                    texts.add(str(error))
                done = rig.cq.wait() if rig.a.outstanding.send else ()
                if any(wc.status is not rp.WCStatus.SUCCESS for wc in done):
                    # The region moved between the slice and the post.
                    for qp in (rig.a, rig.b):
                        qp.to_reset()
                    rig.a.connect(rig.b.endpoint(), rnr_retry=1)
                    rig.b.connect(rig.a.endpoint(), rnr_retry=1)
        assert moved
        assert posted
        # No other error may be raised.
        allowed = ("another thread is re-registering", "lies outside")
        assert all(any(words in text for words in allowed) for text in texts), texts
    rig.cq.poll()
    mr.close()
    rig.close()


@isolated()
def test_reregs_of_several_threads_take_turns(device):
    """Each changes what it was asked to, whatever the others have changed."""
    rig = Rig(device)
    mr = rp.MR(rig.pd, 4096, ALL)
    pds = [rp.PD(rig.context) for _ in range(2)]
    if _can(mr):
        end = time.monotonic() + SECONDS
        errors = []

        def each(change):
            try:
                while time.monotonic() < end:
                    change()
            except BaseException as error:
                errors.append(error)

        def move():
            mr.rereg(memory=bytearray(random.choice((64, 128))))

        threads = [
            threading.Thread(target=each, args=(change,))
            for change in (
                move,
                move,
                lambda: mr.rereg(pd=random.choice(pds)),
                lambda: mr.rereg(access=random.choice((ALL, Access.LOCAL_WRITE))),
            )
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(LIMIT)
        assert not errors, errors
        assert mr.length in (64, 128)
        assert mr.length == mr.buffer.nbytes
        mr.rereg(pd=rig.pd, access=ALL)
    for pd in pds:
        pd.close()
    mr.close()
    rig.close()


@isolated()
def test_close_beside_a_rereg_closes_the_region(device):
    rig = Rig(device)
    end = time.monotonic() + SECONDS
    with rp.MR(rig.pd, 4096, ALL) as first:
        can = _can(first)
    while can and time.monotonic() < end:
        mr = rp.MR(rig.pd, bytearray(64), ALL)
        memory = bytearray(64)

        def move(mr=mr, memory=memory):
            with contextlib.suppress(rp.ClosedError):
                for _ in range(5):
                    mr.rereg(memory=memory)
                    mr.rereg(memory=64)

        with thread(move):
            time.sleep(random.random() / 1000)
            mr.close()
        assert mr.closed
        memory.append(1)
    rig.close()


@isolated()
def test_close_all_beside_a_rereg_closes_the_region():
    """close_all() closes the region too, at any moment of rereg."""
    for _ in range(15):
        context = rp.open_device("soft0")
        mr = rp.MR(rp.PD(context), 4096)
        begun = threading.Event()

        def work(mr: rp.MR = mr, begun: threading.Event = begun) -> None:
            with contextlib.suppress(rp.ClosedError):
                while True:
                    mr.rereg(access=rp.Access.LOCAL_WRITE)
                    begun.set()

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        assert begun.wait(LIMIT)
        context.close_all()
        assert (mr.closed, context.closed) == (True, True)
        for worker in workers:
            worker.join(LIMIT)
            assert not worker.is_alive()


@isolated(silent=True)
def test_interrupted_rereg_has_happened_or_not(soft):
    """At whatever moment an exception comes, the region is entirely the old or the new one."""
    import signal

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    signal.signal(signal.SIGALRM, stop)
    rig = Rig(soft)
    for delay in range(1, 400):
        old, new = bytearray(64), bytearray(128)
        mr = rp.MR(rig.pd, old, ALL)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay * 2e-6)
            mr.rereg(memory=new)
            while True:
                time.sleep(1)
        except Stop:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert mr.length in (64, 128)
        assert mr.buffer.nbytes == mr.length
        mr.buffer[:8] = b"8 bytes!"
        rig.a.post_send(rp.RdmaWrite(rig.mr[:8], remote_addr=mr.addr + 8, rkey=mr.rkey))
        assert rig.cq.wait()[0].check()
        moved = mr.length == 128
        assert (new if moved else old)[8:16] == rig.mr.buffer[:8]
        gc.collect()
        (old if moved else new).append(1)
        mr.close()
    rig.close()


@isolated()
def test_rereg_in_a_signal_handler_in_the_middle_of_a_verb_is_refused(soft):
    rig = Rig(soft)
    mr = rp.MR(rig.pd, 64, ALL)
    seen = []

    class Number:
        def __index__(self):
            try:
                mr.rereg(memory=64)
            except rp.InUseError as error:
                seen.append(str(error))
            return 8

    with contextlib.suppress(rp.PostError):
        rig.a.post_send(rp.Send(rp.SGE(mr.addr, Number(), mr.lkey, mr)))
    mr.rereg(memory=128)
    assert mr.length == 128
    rig.a.to_reset()
    mr.close()
    rig.close()


@isolated()
def test_fork_while_a_region_moves_leaves_a_child_that_can_open_the_device(soft):
    rig = Rig(soft)
    mr = rp.MR(rig.pd, 4096, ALL)
    end = time.monotonic() + SECONDS

    def move():
        while time.monotonic() < end:
            mr.rereg(memory=4096)

    with thread(move):
        while time.monotonic() < end:
            child = os.fork()
            if not child:
                code = 1
                with contextlib.suppress(BaseException):
                    try:
                        mr.rereg(memory=64)
                    except rp.ClosedError:
                        with (
                            rp.open_device("soft0") as context,
                            rp.PD(context) as pd,
                            rp.MR(pd, 64) as mine,
                        ):
                            mine.rereg(memory=128)
                            code = 0
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
    mr.close()
    rig.close()


FORKS_DURING_REREG = """
import os, signal, sys
import rdmapost as rp
from rdmapost.resources import mr as region

def attempt(at):
    left, root, child = at, os.getpid(), None
    def trace(frame, event, arg):
        nonlocal left, child
        if frame.f_code.co_filename != region.__file__:
            return None
        if event == "line" and os.getpid() == root:
            left -= 1
            if left == 0:
                # As a signal handler would.
                child = os.fork()
                signal.alarm(0 if child else 20)
        return trace
    with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.MR(pd, 64) as mr:
        sys.settrace(trace)
        try:
            mr.rereg(memory=128)
            code = 0
        except rp.ClosedError:
            code = 1
        except BaseException as error:
            code = 2
            print(at, repr(error), file=sys.stderr)
        finally:
            sys.settrace(None)
        if os.getpid() != root:
            try:
                mr.rereg(memory=256)
                code = 3
            except rp.ClosedError:
                mr.close()
            os._exit(code)
    return child if child is None else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

seen, at = set(), 0
while (code := attempt(at := at + 1)) is not None:
    seen.add(code)
print(at > 40, seen <= {0, 1}, 1 in seen)
"""


def test_child_of_a_fork_in_the_middle_of_a_rereg_is_told_that_its_region_is_closed():
    assert prints(FORKS_DURING_REREG) == "True True True"


REREG_WITHOUT_MEMORY = """
import sys, _testcapi, rdmapost as rp
ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
pd = rp.PD(rp.open_device("soft0"))
cq = rp.CQ(pd.context)
qp = rp.QP(pd, rp.QPType.RC, cq)
qp.connect(qp.endpoint())
mine = rp.MR(pd, 64, ALL)

def exported(memory):
    try: memory.append(0)
    except BufferError: return True
    return False

one = sys.argv[1] == "1"
moved = stayed = 0
wrong = []
for at in range(400):
    old, new = bytearray(8192), bytearray(4096)
    mr = rp.MR(pd, old, ALL)
    before = mr.addr
    _testcapi.set_nomemory(at, at + int(sys.argv[1]))
    try: mr.rereg(memory=new)
    except MemoryError: done = False
    else: done = True
    finally: _testcapi.remove_mem_hooks()
    qp.post_send(rp.RdmaWrite(mine[:8], remote_addr=mr.addr, rkey=mr.rkey))
    wc, = cq.wait()
    if mr.addr == before:
        stayed += 1
        # In the middle of a burst, what would release the new memory at once may fail, too.
        if wc.status or mr.length != 8192 or not exported(old) or one and exported(new):
            wrong.append((at, "stayed", wc.status))
    else:
        moved += 1
        if wc.status or mr.length != 4096 or not exported(new):
            wrong.append((at, "moved", wc.status))
        # The old memory is released then, at the latest.
        mr.rereg(access=ALL)
        if exported(old):
            wrong.append((at, "old"))
    if wc.status:
        qp.to_reset()
        qp.connect(qp.endpoint())
    mr.close()
    if exported(old) or one and exported(new): wrong.append((at, "closed"))
    if done: break
print(done, stayed > 0, moved > 0, wrong)
"""


@pytest.mark.parametrize("burst", [1, 16, 200])
def test_rereg_without_memory_moves_the_region_or_leaves_it(burst):
    """The device never uses memory that has been given back, and the attributes are its own."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(REREG_WITHOUT_MEMORY, str(burst), **LOSES_MEMORY) == "True True True []"
