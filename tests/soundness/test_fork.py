"""A forked child cannot use its parent's resources: it gets ClosedError, and exits at once."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from support import LOSES_MEMORY, TIMES
from support.connected_pair import LIMIT, Rig, open_files
from support.isolated import isolated

import rdmapost as rp
from rdmapost import QPType
from rdmapost._binding import ffi
from rdmapost.resources.resource import Resource

PACKAGE = f"{os.path.dirname(rp.__file__)}/"
"""Where its files are; the tests may be in a checkout of the same name."""


def ended(pid: int, seconds: float = LIMIT) -> int:
    """Wait for a child, and return its exit status; one that hangs is killed, and is -9."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as child:
        if not select.select([child], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finish(status: int = 0) -> NoReturn:
    """End the child as a program ends, with the interpreter's own clean-up."""
    sys.exit(status)


def everything(rig: Rig) -> dict[str, Callable[[], object]]:
    """Return every operation on the resources of a rig."""
    rp_, to = rp, {"remote_addr": rig.mr.addr, "rkey": rig.mr.rkey}
    srq = rp.SRQ(rig.pd)
    channel = rp.CompChannel(rig.context)
    cq = rp.CQ(rig.context, channel=channel)
    ud = rp.QP(rig.pd, QPType.UD, rig.cq)
    ud.connect()
    ah = ud.ah_to(ud.endpoint())
    mw = rp.MW(rig.pd)
    mw_1 = rp.MW(rig.pd, rp.MWType.TYPE_1)
    batch = rig.a.prepare(rig.write(7))
    receives = rig.b.prepare_recv(rig.receive(8))
    rig.more += [channel, cq, srq, ud, ah, mw, mw_1, batch, receives]
    write, receive = rig.write(9), rig.receive(9)
    inline = rp.RdmaWrite(rig.mr[:8], send_flags=rp.SendFlags.INLINE, **to)
    end, ids = rig.b.endpoint(), array.array("q", [1, 2])
    attr = ah.attr
    bind = rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=rig.mr, addr=rig.mr.addr, length=8)
    return {
        "poll": lambda: rig.cq.poll(),
        "wait": lambda: rig.cq.wait(1, 0.1),
        "wait(0)": lambda: rig.cq.wait(1, 0),
        "post_send": lambda: rig.a.post_send(write),
        "post_send list": lambda: rig.a.post_send([write, write]),
        "post_send inline": lambda: rig.a.post_send(inline),
        "post_send bind": lambda: rig.a.post_send(bind),
        "bind_mw": lambda: rig.a.bind_mw(mw_1, rig.mr, rig.mr.addr, 8, rp.Access.REMOTE_READ),
        "post_recv": lambda: rig.b.post_recv(receive),
        "post_columns": lambda: rig.a.post_columns(rp.RdmaWrite, rig.mr.blocks(ids, 8), **to),
        "post_recv_columns": lambda: rig.b.post_recv_columns(rig.mr[:8], wr_id=ids),
        "post_srq_recv_columns": lambda: srq.post_srq_recv_columns(rig.mr[:8], wr_id=ids),
        "poll_into": lambda: rig.cq.poll_into(bytearray(96)),
        "wait_into": lambda: rig.cq.wait_into(bytearray(96), 1, 0.1),
        "post_srq_recv": lambda: srq.post_srq_recv(receive),
        "prepared": lambda: batch.post(),
        "prepared recv": lambda: receives.post(),
        "prepare": lambda: rig.a.prepare(write),
        "prepared field": lambda: setattr(batch[0], "rkey", 5),
        "prepared wr_id": lambda: setattr(batch[0], "wr_id", 5),
        "prepared sg_list": lambda: setattr(batch[0], "sg_list", write.sg_list),
        "outstanding": lambda: rig.a.outstanding,
        "srq.outstanding": lambda: srq.outstanding,
        "srq.outstanding_tags": lambda: srq.outstanding_tags,
        "srq.outstanding_ops": lambda: srq.outstanding_ops,
        "get_async_event": lambda: rig.context.get_async_event(0),
        "PD": lambda: rp_.PD(rig.context),
        "CQ": lambda: rp_.CQ(rig.context),
        "CompChannel": lambda: rp_.CompChannel(rig.context),
        "XRCD": lambda: rp_.XRCD(rig.context),
        "MR": lambda: rp_.MR(rig.pd, 4096),
        "MW": lambda: rp_.MW(rig.pd),
        "AH": lambda: rp_.AH(rig.pd, attr),
        "SRQ": lambda: rp_.SRQ(rig.pd),
        "QP": lambda: rp_.QP(rig.pd, QPType.RC, rig.cq),
        "query": lambda: rig.a.query(),
        "srq.query": lambda: srq.query(),
        "arm_limit": lambda: srq.arm_limit(1),
        "to_err": lambda: rig.a.to_err(),
        "to_reset": lambda: rig.a.to_reset(),
        "connect": lambda: ud.connect(),
        "connect to": lambda: rig.a.connect(end),
        "ah_to": lambda: ud.ah_to(end),
        "query_port": lambda: rig.context.query_port(),
        "query_gid_table": lambda: rig.context.query_gid_table(),
        "query_pkey": lambda: rig.context.query_pkey(),
        "req_notify": lambda: cq.req_notify(),
        "get_cq_event": lambda: channel.get_cq_event(0),
        "with": lambda: rig.pd.__enter__(),
    }


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_use_in_a_forked_child_names_the_owner_and_the_remedy(device):
    """By the parent's process id; and it changes nothing in the parent."""
    rig = Rig(device)
    uses = everything(rig)
    rig.a.post_send([rig.write(1), rig.write(2), rig.write(3)])
    parent = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        wrong = []
        for name, use in uses.items():
            try:
                result = use()
            except rp.RdmaError as error:
                said = str(error)
                if f"opened by process {parent}" in said and "open the device again" in said:
                    continue
                wrong.append(f"{name}: {type(error).__name__}: {said}")
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
            else:
                wrong.append(f"{name}: {result!r}")
        wrong += [f"{thing} is not closed" for thing in rig.more if not thing.closed]
        os.write(write, "\n".join(wrong).encode())
        os.close(write)
        finish()
    os.close(write)
    with os.fdopen(read) as said:
        wrong = said.read()
    status = ended(child)
    # The parent still has everything.
    done = rig.cq.wait(3, 2)
    assert [wc.check().wr_id for wc in done] == [1, 2, 3]
    assert not wrong, f"in the child:\n{wrong}"
    assert status == 0
    rig.works()
    for thing in rig.more[::-1]:
        thing.close()
    rig.more.clear()
    rig.close()


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_forked_child_that_polls_takes_no_completion_of_its_parent(device):
    rig = Rig(device)
    rig.b.post_recv([rig.receive(10), rig.receive(11)])
    rig.a.post_send([rig.write(1), rig.write(2), rp.Send(rig.mr[:1], wr_id=3)])
    for _ in range(3):
        child = os.fork()
        if not child:
            for take in (
                rig.cq.poll,
                lambda: rig.cq.wait(1, 0.05),
                lambda: rig.cq.poll_into(bytearray(480)),
                lambda: rig.cq.wait_into(bytearray(480), 1, 0.05),
            ):
                try:
                    take()
                except rp.RdmaError:
                    continue
            finish()
        assert ended(child) == 0
    done = sorted(wc.check().wr_id for wc in rig.cq.wait(4, 2))
    assert done == [1, 2, 3, 10]
    rig.works()
    rig.close()


@pytest.mark.parametrize("waits", ["wait", "get_cq_event", "get_async_event"])
@isolated(silent=True, timeout=30, **LOSES_MEMORY)
def test_child_forked_while_threads_wait_can_start_threads_and_exit(waits, device):
    """The threads that waited are not in it, and others have their stacks."""
    rig = Rig(device)
    channel = rp.CompChannel(rig.context)
    verbs: dict[str, Callable[[float], object]] = {
        "wait": lambda seconds: rig.cq.wait(1, seconds),
        "get_cq_event": channel.get_cq_event,
        "get_async_event": lambda seconds: rig.context.get_async_event(seconds),
    }
    verb = verbs[waits]
    pids: list[int] = []

    def fork(*_: object) -> None:
        pids.append(os.fork())
        if pids[-1]:
            return
        for _ in range(8):
            thread_ = threading.Thread(target=lambda: bytearray(1 << 16))
            thread_.start()
            thread_.join()

    def waiter() -> None:
        with contextlib.suppress(rp.ClosedError):
            verb(60)

    waiters = [threading.Thread(target=waiter) for _ in range(4)]
    for one in waiters:
        one.start()
    signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with contextlib.suppress(rp.WaitTimeout):
            verb(0.5)
    except rp.ClosedError:
        assert not pids[-1], "this is the parent"
        finish(7)
    assert ended(pids[0]) == 7
    channel.close()
    rig.close()
    for one in waiters:
        one.join(LIMIT)
        assert not one.is_alive()


@pytest.mark.parametrize("ending", ["exit", "fall off", "del", "close", "exception"])
@isolated(silent=True, timeout=30, **LOSES_MEMORY)
def test_forked_child_exits_promptly_whatever_other_threads_were_doing(ending, device):
    """One posts a prepared list, one lists and INLINE, one polls, at the moment of the fork."""
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.setswitchinterval(1e-5)
    rig = Rig(device, max_send_wr=512)
    other = rig.queue_pair(max_send_wr=512, max_inline_data=64)
    other.connect(rig.b.endpoint())
    rig.more.append(other)
    batch = rig.a.prepare([rig.write(1), rig.write(2)])
    inline = rig.write(3, send_flags=rp.SendFlags.SIGNALED | rp.SendFlags.INLINE)
    stop = threading.Event()

    def repeat(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            while not stop.is_set():
                with contextlib.suppress(rp.PostError):
                    work()

        return run

    threads = [
        threading.Thread(target=repeat(work))
        for work in (batch.post, lambda: rig.a.post_send([inline, inline]), rig.cq.poll)
    ]
    for one in threads:
        one.start()
    statuses = []
    for _ in range(12 // min(TIMES, 3)):
        child = os.fork()
        if not child:
            if ending == "exit":
                finish()
            elif ending == "exception":
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                raise RuntimeError("the child's own")
            elif ending == "del":
                del rig, other, batch, inline, threads
                gc.collect()
                finish()
            elif ending == "close":
                for thing in (batch, other, rig.a, rig.b, rig.mr, rig.cq, rig.pd, rig.context):
                    # Closing is a no-op, or raises an error that names the parent.
                    try:
                        thing.close()
                    except rp.RdmaError:
                        continue
                finish()
            else:
                return
        statuses.append(ended(child, 3 * TIMES))
        if statuses[-1] == -9:
            break
    stop.set()
    for one in threads:
        one.join()
    batch.close()
    assert set(statuses) == {1 if ending == "exception" else 0}, statuses
    rig.cq.poll(512)
    other.to_reset()
    rig.drain()
    rig.works()
    rig.found.clear()
    rig.close()


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_forked_child_can_open_its_own_device(device):
    """It posts on that device; the parent's resources are unaffected."""
    rig = Rig(device)
    for _ in range(3):
        child = os.fork()
        if not child:
            own = Rig(device)
            own.works()
            own.close()
            finish()
        rig.works()
        assert ended(child) == 0
    rig.close()


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_region_of_the_parent_is_closed_where_its_child_posts_to_a_queue_pair_of_its_own(device):
    rig = Rig(device)
    child = os.fork()
    if not child:
        own = Rig(device)
        with pytest.raises(rp.PostError, match=re.escape(f"{rig.mr} is closed")):
            own.a.post_send(rp.RdmaWrite(rig.mr[:8], remote_addr=own.mr.addr, rkey=own.mr.rkey))
        own.works()
        own.close()
        finish()
    assert ended(child) == 0
    rig.close()


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_child_forked_within_a_constructor_can_close_what_it_opens(soft):
    """There, the constructor fails; closes are no longer deferred to its end."""
    context = rp.open_device(soft)
    pids: list[int] = []

    class Forks:
        def __index__(self) -> int:
            pids.append(os.fork())
            return 64

    try:
        cq = rp.CQ(context, Forks())
    except rp.ClosedError:
        with rp.open_device(soft) as own:
            pd = rp.PD(own)
            with rp.MR(pd, 64) as mr:
                mr.rereg(memory=bytearray(64))
            pd.close()
        finish(0 if (own.closed, pd.closed, mr.closed) == (True, True, True) else 3)
    assert ended(pids[0]) == 0
    cq.close()
    context.close()
    assert context.closed


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_forked_child_has_a_copy_of_a_regions_memory(device):
    with rp.open_device(device) as context, rp.PD(context) as pd, rp.MR(pd, 64) as mr:
        mr.buffer[:] = b"p" * 64
        child = os.fork()
        if not child:
            mr.buffer[:] = b"c" * 64
            finish()
        assert ended(child) == 0
        assert bytes(mr.buffer) == b"p" * 64


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_use_in_a_grandchild_is_refused_and_it_can_open_its_own_device(soft):
    rig = Rig(soft)
    child = os.fork()
    if not child:
        own = Rig(soft)
        inner = os.fork()
        if not inner:
            for cq, opener in ((rig.cq, os.getppid()), (own.cq, os.getppid())):
                with pytest.raises(rp.RdmaError, match="open the device again") as caught:
                    cq.poll()
                if cq is own.cq:
                    assert f"opened by process {opener}" in str(caught.value)
            mine = Rig(soft)
            mine.works()
            mine.close()
            finish()
        status = ended(inner)
        own.works()
        own.close()
        finish(status)
    assert ended(child) == 0
    rig.works()
    rig.close()


def _work(number: int) -> int:
    """Run in a process of a pool: open a device and write."""
    own = Rig("soft0")
    own.works()
    own.close()
    return number


@isolated(silent=True, timeout=30, **LOSES_MEMORY)
def test_pool_of_forked_processes_can_open_its_own_devices(soft):
    import multiprocessing

    warnings.simplefilter("ignore", DeprecationWarning)
    rig = Rig(soft)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_work, range(6)) == [*range(6)]
        pool.close()
        pool.join()
    rig.works()
    # The pool's pipes may be closed later.
    rig.files |= open_files()
    rig.close()


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_child_forked_within_a_verb_can_exit(soft):
    """A handler or a finalizer may fork; the child goes on out of the verb and ends."""
    from support.interrupts import Moment, interrupt_at_each_moment

    class Child(BaseException):
        """Leads the child out of everything."""

    def handler(rig: Any) -> None:
        rig.child = os.fork()
        if not rig.child:
            raise Child
        assert ended(rig.child, 2) == 0

    def act(rig: Rig) -> None:
        rig.a.post_send([rig.write(1), rig.write(2)])
        rig.found.extend(rig.cq.poll())

    def check(rig: Rig, _: Moment) -> None:
        rig.drain()
        assert sorted(wc.wr_id for wc in rig.found) == [1, 2]
        rig.close()

    try:
        interrupt_at_each_moment(lambda: Rig(soft), act, check, handler=handler, max_moments=20)
    except Child:
        finish()


IN_A_VERB: dict[str, Callable[[Any], object]] = {
    "poll": lambda rig: rig.found.extend(rig.cq.poll()),
    "wait": lambda rig: rig.found.extend(rig.cq.wait(1, 5)),
    "query": lambda rig: rig.a.query(),
    "create": lambda rig: rp.PD(rig.context).close(),
    "open": lambda rig: rp.open_device("soft0").close(),
    "destroy": lambda rig: rig.more[0].close(),
}


@pytest.mark.parametrize("verb", IN_A_VERB)
@isolated(silent=True, timeout=30, **LOSES_MEMORY)
def test_verb_interrupted_by_a_forking_handler_names_the_owner_in_the_child(verb, soft):
    """ClosedError and what to do, where it does not return; close() does nothing."""
    from support.interrupts import Moment, interrupt_at_each_moment

    parent = os.getpid()
    reading, writing = os.pipe()

    def make() -> Any:
        rig: Any = Rig(soft)
        rig.more.append(rig.queue_pair())
        rig.a.post_send(rp.Send(rig.mr[:8], wr_id=5))
        # The peer has no receive: after this time the next verb makes the device retry the send.
        time.sleep(0.002)
        return rig

    def fork(rig: Any) -> None:
        rig.child = os.fork()
        if rig.child:
            assert ended(rig.child) == 0

    def act(rig: Any) -> None:
        try:
            IN_A_VERB[verb](rig)
        except BaseException as error:
            if os.getpid() == parent:
                raise
            refused = isinstance(error, rp.ClosedError) and "open the device again" in str(error)
            if verb == "destroy" or not refused:
                os.write(writing, f"{error!r}\n".encode())
        if os.getpid() != parent:
            os._exit(0)

    def check(rig: Any, _: Moment) -> None:
        rig.drain()
        assert [wc.wr_id for wc in rig.found] == [5]
        rig.close()

    interrupt_at_each_moment(make, act, check, handler=fork, max_moments=40, within=PACKAGE)
    os.close(writing)
    with os.fdopen(reading) as said:
        wrong = said.read()
    assert not wrong, f"in the children:\n{wrong}"


class Slow(rp.PD):
    """Stops in the middle of its close()."""

    __slots__ = ("stop",)

    def _release(self) -> None:
        self.stop()


@pytest.mark.parametrize("busy", ["in a verb", "closing"])
@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_waiting_close_returns_in_the_child_of_a_forking_handler(busy, device):
    """The child lacks the thread that the close waits for, and destroys nothing of its parent's."""
    parent = os.getpid()
    rig = Rig(device)
    pd = Slow(rig.context)
    inside, go = threading.Event(), threading.Event()
    children = []

    def stop(*_: object) -> None:
        inside.set()
        go.wait(LIMIT)

    def fork(*_: object) -> None:
        children.append(os.fork())
        if children[0]:
            statuses.append(ended(children[0]))
            go.set()

    pd.stop = stop if busy == "closing" else lambda: None
    statuses: list[int] = []
    other = threading.Thread(target=pd.close if busy == "closing" else lambda: pd._verb(stop))
    other.start()
    assert inside.wait(LIMIT)
    signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    pd.close()
    if os.getpid() != parent:
        os._exit(7)
    other.join(LIMIT)
    assert statuses == [7]
    assert pd.closed
    rig.works()
    rig.close()


@isolated(silent=True, timeout=20, **LOSES_MEMORY)
def test_child_forked_before_a_destroy_leaves_it_to_the_parent():
    """A driver would execute the child's destroy too."""
    parent = os.getpid()
    destroyed: list[int] = []

    class Forking(Resource):
        __slots__ = ()

        def _release(self) -> None:
            child = os.fork()
            assert not child or ended(child) == 7

    thing = Forking()
    thing._make(ffi.new, ("int *",), lambda _: destroyed.append(os.getpid()), ())
    thing.close()
    if os.getpid() != parent:
        os._exit(1 if destroyed else 7)
    assert destroyed == [parent]


LOADING = """
import os, sys, threading
import rdmapost as rp
inside, go = threading.Event(), threading.Event()

class Slow:
    "Stops the thread that imports the soft device in the middle of that."
    def find_spec(self, name, path=None, target=None):
        if name == "rdmapost.providers.software.device":
            inside.set()
            go.wait(20)

rp.Context
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=rp.open_device, args=("soft0",))
thread.start()
assert inside.wait(20)
threading.Timer(0.3, go.set).start()
child = os.fork()
if not child:
    import faulthandler
    faulthandler.dump_traceback_later(10, exit=True)
    go.set()
    rp.open_device("soft0").close()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join(20)
"""


def test_child_forked_while_a_thread_opens_the_first_device_can_open_one() -> None:
    done = subprocess.run(
        # -P: test the installed package, not one in the current directory.
        [sys.executable, "-P", "-W", "ignore", "-c", LOADING],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["0"], done.stderr[-600:]
