"""Lifetimes on a device: memory in flight, garbage, fork, exit, and no leak over many posts."""

from __future__ import annotations

import concurrent.futures
import gc
import queue
import textwrap
import weakref

import pytest
from support import ALL, LOSES_MEMORY, prints, resident

import rdmapost as rp
from rdmapost import QPType, SendFlags
from rdmapost.resources.resource import open_children

SETUP = """
import gc, os, sys, rdmapost as rp
ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE | rp.Access.REMOTE_READ

def make():
    context = rp.open_device(sys.argv[1])
    pd, cq = rp.PD(context), rp.CQ(context)
    mr = rp.MR(pd, bytearray(4096), ALL)
    a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
    a.connect(b.endpoint(), rnr_retry=1)
    b.connect(a.endpoint(), rnr_retry=1)
    b.post_recv([rp.RecvWR(mr[:64], wr_id=i) for i in range(5)])
    a.post_send(rp.Send(mr[64:128], send_flags=0))
    return {"context": context, "pd": pd, "cq": cq, "mr": mr, "a": a, "b": b}
"""

FILES = """
def open_files():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [f"{link} {os.readlink(link)}" for link in links if os.path.lexists(link)]
"""


def test_memory_lives_until_the_completion(rc):
    """The user has dropped every reference, and the device still writes there."""
    mr = rp.MR(rc.pd, bytearray(64), ALL)
    ref = weakref.ref(mr)
    rc.b.post_recv(rp.RecvWR(mr[:8], wr_id=1))
    view = mr.buffer
    del mr
    gc.collect()
    assert ref() is not None
    rc.mine.buffer[:4] = b"late"
    rc.a.post_send(rp.Send(rc.mine[:4]))
    rc.wait(2)
    gc.collect()
    assert ref() is None
    # The region is closed, and its memory back with its owner.
    with pytest.raises(ValueError, match="released"):
        bytes(view)


@pytest.mark.parametrize("how", ["post_send", "prepare"])
@pytest.mark.parametrize("inline", [False, True], ids=["", "INLINE"])
def test_address_handle_lives_until_the_completion(connect, inline, how):
    """INLINE data is copied when it is posted; the address handle is not."""
    pair = connect(QPType.UD, max_inline_data=64)
    ah = pair.a.ah_to(pair.b.endpoint())
    ref = weakref.ref(ah)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100]))
    flags = SendFlags.SIGNALED | (SendFlags.INLINE if inline else SendFlags(0))
    wr = pair.send(pair.mine[:4], ah=ah, send_flags=flags)
    del ah
    if how == "prepare":
        batch = pair.a.prepare(wr)
        batch.post()
        batch.close()
    else:
        pair.a.post_send(wr)
    del wr
    gc.collect()
    assert ref() is not None
    pair.wait(2)
    gc.collect()
    assert ref() is None


def test_dropped_queue_pair_lets_its_memory_go(pd, cq):
    mr = rp.MR(pd, 64)
    qp = rp.QP(pd, QPType.RC, cq)
    qp.to_init()
    qp.post_recv(rp.RecvWR(mr[:8]))
    del qp
    gc.collect()
    mr.close()


def test_garbage_in_any_order_gives_everything_back(context):
    """Nothing is closed by hand, work requests are outstanding, and all files are closed."""
    said = prints(
        SETUP + FILES + "rp.list_devices()\n"
        "before = set(open_files())\n"
        "for order in range(6):\n"
        "    things = make()\n"
        "    for name in [*things][order:] + [*things][:order]: del things[name]\n"
        "    gc.collect()\n"
        # And in one piece, through a cycle.
        "    things = make()\n"
        "    things['self'] = things\n"
        "    del things\n"
        "    gc.collect()\n"
        "    print(sorted(set(open_files()) - before))\n",
        context.name,
    )
    assert said.splitlines() == ["[]"] * 6


def test_interpreter_ends_quietly_with_everything_open(context):
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


def test_interpreter_ends_quietly_while_a_thread_waits(context):
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


def test_child_of_a_fork_closes_nothing(context):
    """The child ends in every possible way, and the parent continues."""
    said = prints(
        SETUP + "things = make()\n"
        "for way in ('exit', 'close', 'garbage'):\n"
        "    sys.stdout.flush()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        if way == 'close':\n"
        "            for name in ('a', 'b', 'mr', 'cq', 'pd', 'context'): things[name].close()\n"
        "        if way == 'garbage':\n"
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
        "for way in ('nothing', 'close', 'garbage'):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        if way == 'close':\n"
        "            for name in ('a', 'b', 'mr', 'cq', 'pd', 'context'): things[name].close()\n"
        "        if way == 'garbage':\n"
        "            things.clear(); gc.collect()\n"
        "        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "polls.set()\n"
        "thread.join()\n"
        "print('ends')\n",
        context.name,
    )
    assert said.splitlines() == ["0", "0", "0", "ends"]


def test_exception_in_the_middle_of_set_up_closes_what_was_opened(context):
    opened: list[rp.PD | rp.CQ | rp.MR | rp.QP | rp.Context] = []

    def set_up() -> None:
        with (
            rp.open_device(context.name) as other,
            rp.PD(other) as pd,
            rp.CQ(other) as cq,
            rp.MR(pd, 64) as mr,
            rp.QP(pd, QPType.RC, cq) as qp,
        ):
            opened.extend([other, pd, cq, mr, qp])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        set_up()
    assert len(opened) == 5
    assert all(resource.closed for resource in opened)


def test_interrupt_while_something_is_closed_destroys_it_once(verbs_context):
    """A Ctrl-C during the device's call is raised after it; what it freed is not freed again."""
    said = prints(
        "import contextlib, signal, sys, rdmapost as rp\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, interrupt)\n"
        "def closed(resource, after):\n"
        "    with contextlib.suppress(KeyboardInterrupt):\n"
        "        signal.setitimer(signal.ITIMER_REAL, after)\n"
        "        resource.close()\n"
        "        while True: pass\n"
        "    resource.close()\n"
        "    return resource.closed\n"
        "with rp.open_device(sys.argv[1]) as context:\n"
        "    for index in range(40):\n"
        "        after = (1 + index) * 25e-6\n"
        "        pd, cq = rp.PD(context), rp.CQ(context)\n"
        "        mr, qp = rp.MR(pd, 64), rp.QP(pd, rp.QPType.RC, cq)\n"
        "        assert all(closed(resource, after) for resource in (qp, mr, cq, pd))\n"
        "print('ends')\n",
        verbs_context.name,
    )
    assert said == "ends"


def test_interrupt_anywhere_in_making_or_closing_leaves_nothing(context):
    """An exception out of any line that making and closing run, as of a Ctrl-C."""
    said = prints(
        "import gc, os, sys, rdmapost as rp\n"
        "from rdmapost.resources.resource import open_children\n"
        "library = os.path.dirname(rp.__file__)\n"
        "ours = [library, library + '/posting', library + '/resources']\n"
        "def set_up(keep):\n"
        "    pd, channel = keep(rp.PD(context)), keep(rp.CompChannel(context))\n"
        "    cq, mr = keep(rp.CQ(context, channel=channel)), keep(rp.MR(pd, 64))\n"
        "    srq = keep(rp.SRQ(pd))\n"
        "    a, b = (keep(rp.QP(pd, rp.QPType.RC, cq, srq=s)) for s in (srq, None))\n"
        "    a.connect(b.endpoint()), b.connect(a.endpoint())\n"
        "    keep(a.ah_to(b.endpoint()))\n"
        "def interrupted(after):\n"
        "    left, kept = after, []\n"
        "    def trace(frame, event, argument):\n"
        "        nonlocal left\n"
        # Not in the device, whose bugs it would be.
        "        if os.path.dirname(frame.f_code.co_filename) not in ours: return None\n"
        "        left -= 1\n"
        "        if not left: raise KeyboardInterrupt\n"
        "        return trace\n"
        "    sys.settrace(trace)\n"
        "    try:\n"
        "        set_up(lambda made: kept.append(made) or made)\n"
        "        for made in reversed(kept): made.close()\n"
        "        return False\n"
        "    except KeyboardInterrupt: pass\n"
        "    finally: sys.settrace(None)\n"
        # What was under construction is garbage by now.
        "    for made in reversed(kept): made.close()\n"
        "    return True\n"
        "with rp.open_device(sys.argv[1]) as context:\n"
        "    assert not interrupted(100_000)\n"
        "    files = len(os.listdir('/proc/self/fd'))\n"
        "    after = 1\n"
        "    while interrupted(after):\n"
        # Some of the places are enough if each try involves the kernel.
        "        after += 5 if context.kind == 'soft' else 31\n"
        "        gc.collect()\n"
        "        assert not open_children(context), after\n"
        "        assert len(os.listdir('/proc/self/fd')) == files, after\n"
        "print(after > 100)\n",
        context.name,
    )
    assert said == "True"


def test_what_one_thread_makes_another_drops(context):
    """Resources change hands with work outstanding; the last thread releases them."""
    rounds, threads = 12, 4
    before = len(open_children(context))
    handed: queue.Queue[list[object] | None] = queue.Queue(2)
    dropped: list[int] = []

    def make() -> None:
        for _ in range(rounds):
            pd, cq = rp.PD(context), rp.CQ(context)
            mr = rp.MR(pd, bytearray(4096), ALL)
            a, b = rp.QP(pd, QPType.RC, cq), rp.QP(pd, QPType.RC, cq)
            a.connect(b.endpoint(), rnr_retry=1)
            b.connect(a.endpoint(), rnr_retry=1)
            b.post_recv([rp.RecvWR(mr[:64], wr_id=i) for i in range(5)])
            a.post_send(rp.Send(mr[64:128]))
            handed.put([mr, a, pd, b, cq], timeout=60)

    def drop() -> None:
        while (things := handed.get(timeout=60)) is not None:
            while things:
                things.pop(0)
            gc.collect()
            dropped.append(1)

    with concurrent.futures.ThreadPoolExecutor(2 * threads) as pool:
        makers = [pool.submit(make) for _ in range(threads)]
        droppers = [pool.submit(drop) for _ in range(threads)]
        for maker in makers:
            maker.result()
        for _ in droppers:
            handed.put(None, timeout=60)
        for dropper in droppers:
            dropper.result()
    assert len(dropped) == rounds * threads
    gc.collect()
    assert len(open_children(context)) == before


def test_garbage_during_a_poll_does_not_lock_up(connect, context):
    """The collector may drop a queue pair while its CQ is being polled, in the same thread."""
    pair = connect()
    for _ in range(5):
        doomed = rp.QP(pair.pd, QPType.RC, pair.cq)
        doomed.to_init()
        doomed.post_recv(rp.RecvWR(pair.mine[:8]))
        cycle = [doomed]
        cycle.append(cycle)
        del doomed, cycle
        gc.collect()
    pair.works()


def least_growth(work) -> int:
    """Return by how many bytes this process grows, in the best of three runs of the same.

    What leaks does so in each; what other tests have left for later comes once.
    """
    grown = []
    while len(grown) < 3 and min(grown, default=1 << 20) >= 1 << 20:
        gc.collect()
        before = resident()
        work()
        gc.collect()
        grown.append(resident() - before)
    return min(grown)


def test_200_000_posts_leave_resident_memory_where_it_was(connect):
    pair = connect(QPType.UC, max_send_wr=256)
    # With more than 64 on their way, a requester of Soft-RoCE now and then sleeps until the next
    # post: the last packet may arrive just before it asks to be woken.
    batch = 50
    signaled = int(rp.SendFlags.SIGNALED)
    wrs = [
        pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=i, send_flags=signaled * (i == batch - 1))
        for i in range(batch)
    ]

    def post(lists: int) -> None:
        for _ in range(lists):
            pair.a.post_send(wrs)
            pair.wait()

    post(200)
    grown = least_growth(lambda: post(200_000 // batch))
    assert pair.a.outstanding == (0, 0)
    assert grown < 1 << 20, f"{grown} bytes more after 200,000 posts"


def test_opening_and_closing_leaves_resident_memory_where_it_was(connect):
    pair = connect()

    def cycle(count: int) -> None:
        for _ in range(count):
            with rp.MR(pair.pd, bytearray(4096)) as mr, rp.QP(pair.pd, QPType.RC, pair.cq) as qp:
                qp.to_init()
                qp.post_recv(rp.RecvWR(mr[:8]))
                qp.close()

    cycle(20)
    assert least_growth(lambda: cycle(200)) < 1 << 20
    assert len(pair.pd.context._queues) == 4


@pytest.mark.parametrize("made_of", ["size", "bytearray", "memoryview", "fortran"])
def test_regions_in_a_cycle_are_collected(made_of: str) -> None:
    """The collector takes a region, its views and what was sent inline with them, in any order."""
    code = """
    import gc, sys
    import numpy
    import rdmapost as rp

    class Holder: pass

    def make(kind):
        return {
            "size": lambda: 64,
            "bytearray": lambda: bytearray(64),
            "memoryview": lambda: memoryview(bytearray(128))[32:96],
            "fortran": lambda: numpy.zeros((8, 8), order="F", dtype="u1"),
        }[kind]()

    with rp.open_device("soft0") as context, rp.PD(context) as pd:
        for order in range(6):
            holder, memory = Holder(), make(sys.argv[1])
            parts = [memory, rp.MR(pd, memory)]
            parts += [parts[1].buffer, parts[1].buffer[2:4], parts[1][2:4]]
            data = memoryview(bytearray(8))
            parts += [data, rp.SGE.from_buffer(data)]
            parts = parts[order:] + parts[:order]
            for name, part in enumerate(parts):
                setattr(holder, f"part{name}", part)
            holder.itself = holder
            del holder, memory, parts, part, data
            gc.collect()
    print("done")
    """
    # numpy keeps what it allocates when it is imported.
    assert prints(textwrap.dedent(code), made_of, **LOSES_MEMORY) == "done"


def test_the_collector_may_take_a_memoryview_and_an_sge_over_it():
    code = """
    import gc
    import rdmapost as rp

    view = memoryview(bytearray(64))
    garbage = [view, rp.SGE.from_buffer(view)]
    garbage.append(garbage)
    del view, garbage
    gc.collect()
    print("done")
    """
    assert prints(textwrap.dedent(code)) == "done"
