"""Exit and fork: what is open is closed once, quietly, by the process that opened it."""

from __future__ import annotations

import time

from support import LOSES_MEMORY, TIMES, prints
from support.open_stack import SETUP


def test_interpreter_ends_quietly_with_open_resources_in_cycles_and_exceptions(context):
    """With a caught exception, a cycle, and another order."""
    said = prints(
        SETUP + "class Mine(Exception): pass\n"
        "import atexit; atexit.register(print, 'closed')\n"
        "kept = []\n"
        "for _ in range(3):\n"
        "    things = make()\n"
        "    kept = [kept, *list(things.values())[::-1]]\n"
        "kept.append(kept)\n"
        "try:\n"
        "    with rp.open_device(sys.argv[1]) as context, rp.PD(context) as pd:\n"
        "        mr = rp.MR(pd, 64)\n"
        "        raise Mine\n"
        "except Mine:\n"
        "    print('mine')\n",
        context.name,
    )
    assert said == "mine\nclosed"


def test_interpreter_ends_quietly_while_a_thread_waits_for_completions(context):
    said = prints(
        SETUP + "import threading\n"
        "things = make()\n"
        "threading.Thread(target=things['cq'].wait, args=(9, 60), daemon=True).start()\n"
        "while not things['cq']._poller.waiting: pass\n"
        "print('ends')\n",
        context.name,
        **LOSES_MEMORY,
    )
    assert said == "ends"


def test_forked_child_closes_nothing_of_its_parent_however_it_ends(context):
    """The child ends in every possible way, and the parent continues."""
    said = prints(
        SETUP + "things = make()\n"
        "for action in ('exit', 'close', 'garbage'):\n"
        "    sys.stdout.flush()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        if action == 'close':\n"
        "            for name in ('a', 'b', 'mr', 'cq', 'pd', 'context'): things[name].close()\n"
        "        if action == 'garbage':\n"
        "            del things; gc.collect()\n"
        "        sys.exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "a, b, mr, cq = (things[n] for n in ('a', 'b', 'mr', 'cq'))\n"
        "mr.buffer[64:68] = b'work'\n"
        "a.post_send(rp.RdmaWrite(mr[64:68], remote_addr=mr.addr + 200, rkey=mr.rkey, wr_id=9))\n"
        "while 9 not in [wc.check().wr_id for wc in cq.wait()]: pass\n"
        "print(bytes(mr.buffer[200:204]))\n"
        "for name in ('a', 'b', 'mr', 'cq', 'pd', 'context'): things[name].close()\n",
        context.name,
        **LOSES_MEMORY,
    )
    assert said.splitlines() == ["0", "0", "0", "b'work'"]


def test_forking_loses_nothing_of_the_parent(context):
    """Its children come and go, one while a thread polls, and its end is as if there were none.

    They end without their interpreter's end, in which Python loses memory of its own.
    """
    said = prints(
        SETUP + "import threading, warnings\n"
        # From 3.12 on Python warns of a fork beside a thread.
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "things = make()\n"
        "polls = threading.Event()\n"
        "def poll():\n"
        "    while not polls.is_set(): things['cq'].poll()\n"
        "thread = threading.Thread(target=poll)\n"
        "thread.start()\n"
        "for action in ('nothing', 'close', 'garbage'):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        if action == 'close':\n"
        "            for name in ('a', 'b', 'mr', 'cq', 'pd', 'context'): things[name].close()\n"
        "        if action == 'garbage':\n"
        "            things.clear(); gc.collect()\n"
        "        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "polls.set()\n"
        "thread.join()\n"
        "print('ends')\n",
        context.name,
    )
    assert said.splitlines() == ["0", "0", "0", "ends"]


IN_CHILD = """
import os, sys, warnings, rdmapost as rp
warnings.simplefilter("ignore", DeprecationWarning)

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            sys.stdout.flush()
        except BaseException as error:
            print("wrong", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_error_in_the_child_of_a_fork_names_the_process_that_opened_the_resource(context):
    said = prints(
        IN_CHILD + "context = rp.open_device(sys.argv[1])\n"
        "pd, cq, channel = rp.PD(context), rp.CQ(context), rp.CompChannel(context)\n"
        "mr, qp, srq = rp.MR(pd, 64), rp.QP(pd, rp.QPType.RC, cq), rp.SRQ(pd)\n"
        "opener = os.getpid()\n"
        "def use():\n"
        "    for verb in (\n"
        "        context.query_port, lambda: context.async_fd, lambda: rp.PD(context),\n"
        "        lambda: rp.CQ(context), lambda: rp.MR(pd, 64), lambda: rp.MW(pd),\n"
        "        lambda: rp.QP(pd, rp.QPType.RC, cq), lambda: context.get_async_event(0),\n"
        "        channel.fileno, qp.query, qp.to_init, srq.query, lambda: srq.arm_limit(1),\n"
        "        cq.poll, cq.wait, lambda: qp.post_send(rp.Send(mr[:8])),\n"
        "        lambda: qp.post_recv(rp.RecvWR(mr[:8])), lambda: srq.post_srq_recv(rp.RecvWR()),\n"
        "    ):\n"
        "        try: verb()\n"
        "        except rp.ClosedError as error:\n"
        "            text = f'was opened by process {opener}; open the device again'\n"
        "            assert str(error).endswith(text), error\n"
        "        else: raise AssertionError(verb)\n"
        "    for resource in (context, pd, cq, mr, qp, srq, channel):\n"
        "        resource.close()\n"
        "        assert resource.closed\n"
        "    with rp.open_device('soft0') as other, rp.PD(other) as own, rp.MR(own, 64) as fresh:\n"
        "        print(len(fresh), other.query_port().port_num)\n"
        "in_child(use)\n"
        "print(qp.query().qp_state.name, context.closed)\n",
        context.name,
        **LOSES_MEMORY,
    )
    assert said.splitlines() == ["64 1", "0", "RESET False"]


def test_child_of_a_fork_ends_at_once_beside_threads(context):
    """Other threads were in the middle of verbs and closes; they do not exist in the child."""
    said = prints(
        IN_CHILD + "import signal, threading\n"
        "context = rp.open_device(sys.argv[1])\n"
        "pd, cq = rp.PD(context), rp.CQ(context)\n"
        "qp = rp.QP(pd, rp.QPType.RC, cq)\n"
        "end = threading.Event()\n"
        "def use():\n"
        "    while not end.is_set():\n"
        "        qp.query()\n"
        "        with rp.MR(pd, 64), rp.CQ(context): pass\n"
        "threads = [threading.Thread(target=use) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for _ in range(10):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        signal.alarm(60)\n"
        "        sys.exit(0)\n"
        "    assert not os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 'the child hangs'\n"
        "end.set()\n"
        "for thread in threads: thread.join()\n"
        "print('ends')\n",
        context.name,
        **LOSES_MEMORY,
    )
    assert said == "ends"


def test_resources_are_closed_at_exit_in_an_order_that_devices_accept():
    """Windows before queue pairs and regions: some devices wait for them, others refuse."""
    said = prints(
        "import atexit, rdmapost as rp\n"
        "from rdmapost.providers.soft0.provider import SoftProvider\n"
        "for name in [*dir(SoftProvider)]:\n"
        "    if name.startswith(('destroy_', 'dealloc_', 'dereg_', 'close_')):\n"
        "        def noted(struct, name=name, call=getattr(SoftProvider, name)):\n"
        "            print(name)\n"
        "            return call(struct)\n"
        "        setattr(SoftProvider, name, staticmethod(noted))\n"
        "context = rp.open_device('soft0')\n"
        "pd, xrcd = rp.PD(context), rp.XRCD(context)\n"
        "channel = rp.CompChannel(context)\n"
        "mw = rp.MW(pd)\n"
        "cq = rp.CQ(context, channel=channel)\n"
        "ALL = rp.Access.LOCAL_WRITE | rp.Access.MW_BIND | rp.Access.REMOTE_WRITE\n"
        "mr, srq = rp.MR(pd, 64, ALL), rp.SRQ(pd)\n"
        "a, b = (rp.QP(pd, rp.QPType.RC, cq, srq=srq) for _ in 'ab')\n"
        "a.connect(b.endpoint()), b.connect(a.endpoint())\n"
        "ah = a.ah_to(b.endpoint())\n"
        "a.post_send(rp.BindMW(mw=mw, mr=mr, rkey=mw.next_rkey(), addr=mr.addr, length=64,\n"
        "                      mw_access_flags=rp.Access.REMOTE_WRITE))\n"
        "assert cq.poll()[0].status == 0\n"
    )
    assert said.split() == [
        "dealloc_mw",
        "destroy_qp",
        "destroy_qp",
        "destroy_ah",
        "destroy_srq",
        "dereg_mr",
        "destroy_cq",
        "destroy_comp_channel",
        "close_xrcd",
        "dealloc_pd",
        "close_device",
    ]


def test_exit_does_not_wait_for_a_verb_of_a_daemon_thread():
    """For a second, and no longer."""
    begun = time.monotonic()
    said = prints(
        "import threading, rdmapost as rp\n"
        "context = rp.open_device('soft0')\n"
        "inside = threading.Event()\n"
        "def verb(_):\n"
        "    inside.set()\n"
        "    threading.Event().wait(600)\n"
        "threading.Thread(target=context._verb, args=(verb,), daemon=True).start()\n"
        "assert inside.wait(60)\n"
        "print('ends')\n",
        **LOSES_MEMORY,
    )
    assert said == "ends"
    assert time.monotonic() - begun < 30 * TIMES


closed: list[str] = []


def test_resource_that_another_keeps_busy_is_closed_at_exit():
    """A region that posted work requests name closes only after their queue pair."""
    said = prints(
        "import atexit\n"
        "atexit.register(print, 'end')\n"
        "import rdmapost as rp\n"
        "from rdmapost.resources.resource import Resource\n"
        "from rdmapost._binding import ffi\n"
        "class Thing(Resource):\n"
        "    def __init__(self, name, *above):\n"
        "        def destroy(_):\n"
        "            if name == 'mr' and not qp.closed: raise rp.InUseError('mr')\n"
        "            print(name, flush=True)\n"
        "        self._make(ffi.new, ('char *',), destroy, above)\n"
        "context = Thing('context'); pd = Thing('pd', context)\n"
        "mr = Thing('mr', pd); qp = Thing('qp', pd)\n"
    )
    assert said.split() == ["qp", "mr", "pd", "context", "end"]


def test_verb_of_a_daemon_thread_that_ends_in_a_moment_is_waited_for_at_exit():
    said = prints(
        "import threading, time\n"
        "from rdmapost.resources.resource import Resource\n"
        "from rdmapost._binding import ffi\n"
        "class Thing(Resource):\n"
        "    def __init__(self):\n"
        "        self._make(ffi.new, ('char *',), lambda _: print('gone', flush=True), ())\n"
        "thing, inside = Thing(), threading.Event()\n"
        "def verb(_):\n"
        "    inside.set()\n"
        "    time.sleep(0.2)\n"
        "threading.Thread(target=thing._verb, args=(verb,), daemon=True).start()\n"
        "inside.wait(10)\n"
    )
    assert said == "gone"


def test_resource_created_while_everything_is_closed_at_exit_is_not_used():
    said = prints(
        "import os\n"
        "from rdmapost import ClosedError\n"
        "from rdmapost.resources.resource import Resource, close_all\n"
        "from rdmapost._binding import ffi\n"
        "class Thing(Resource):\n"
        "    def __init__(self):\n"
        "        self._make(self.create, (), print, ())\n"
        "    def create(self):\n"
        "        close_all()\n"
        "        return ffi.new('char *')\n"
        "thing = Thing()\n"
        "try: thing._open_struct()\n"
        "except ClosedError as error: print(error)\n"
        "print(thing.closed, flush=True)\n"
        "os._exit(0)\n"
    )
    assert said == "resource cannot be used: the interpreter is exiting\nFalse"
