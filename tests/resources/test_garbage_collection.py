"""Garbage: resources dropped in any order, in a cycle, or by another thread are given back."""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import queue
import textwrap
import time
import warnings
from typing import Any

import pytest
from support import ALL, LOSES_MEMORY, needs, prints
from support.open_stack import SETUP
from support.windows import bind_wr

import rdmapost as rp
from rdmapost import Access, QPType
from rdmapost.resources.resource import open_children

FILES = """
def open_files():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [f"{link} {os.readlink(link)}" for link in links if os.path.lexists(link)]
"""


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


def test_resources_made_in_one_thread_are_released_by_another(context):
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


class Connection:
    """What users write: an object with a queue pair and its memory, which refer back to it."""

    def __init__(self, pd: rp.PD, cq: rp.CQ, refers: str) -> None:
        class Region(rp.MR):
            pass

        class Memory(bytearray):
            pass

        if refers == "owner":
            self.memory = bytearray(4096)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
            self.mr = rp.MR.at(pd, address, 4096, ALL, owner=self)
        else:
            buffer = Memory(4096)
            self.mr = Region(pd, buffer, ALL)
            holder: Any = buffer if refers == "buffer" else self.mr
            holder.connection = self
        self.qp = rp.QP(pd, QPType.RC, cq)


@pytest.mark.parametrize("refers", ["owner", "buffer", "attribute"])
def test_queue_pair_whose_memory_refers_to_it_is_collected_with_work_outstanding(
    context, pd, refers
):
    """Its completed work is still delivered by a CQ that others use."""
    with rp.CQ(context) as cq, rp.QP(pd, QPType.RC, cq) as peer, rp.MR(pd, 64, ALL) as target:
        for _ in range(5):
            made = Connection(pd, cq, refers)
            made.qp.connect(peer.endpoint())
            peer.connect(made.qp.endpoint())
            made.qp.post_recv(rp.RecvWR(made.mr[:64]))
            where = {"remote_addr": target.addr, "rkey": target.rkey}
            made.qp.post_send(rp.RdmaWrite(made.mr[:8], wr_id=78, **where))
            deadline = time.monotonic() + 10
            while not cq._poller.fill(cq, 1) and time.monotonic() < deadline:
                pass
            # A CQ remembers the queue that it polled last: let that be another.
            peer.post_send(rp.RdmaWrite(target[:8], wr_id=79, **where))
            del made
            gc.collect()
            assert [wc.wr_id for wc in cq.wait(2, 10)] == [78, 79]
            gc.collect()
            assert open_children(pd) == [peer, target]
            peer.to_reset()


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


@pytest.mark.parametrize("turned", [False, True])
def test_window_and_region_that_are_garbage_go_in_that_order(connect, context, turned):
    needs(context.attr.max_mw, "memory windows", context)
    pair = connect()
    before = len(open_children(pair.pd))
    mr = rp.MR(pair.pd, 64, ALL | Access.MW_BIND)
    mw = rp.MW(pair.pd)
    bind = bind_wr(mw, mr)
    pair.a.post_send(bind)
    pair.wait()
    holder: list[Any] = [mr, mw] if turned else [mw, mr]
    holder.append(holder)
    del mw, mr, bind, holder
    with warnings.catch_warnings(action="error", category=ResourceWarning):
        gc.collect()  # soft0 keeps a region that a window is bound to, and that would be reported
    assert len(open_children(pair.pd)) == before


def test_collector_at_every_allocation_leaves_nothing_open(context):
    """Queue pairs, windows and regions die in cycles in the middle of verbs."""
    before = len(open_children(context))
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(20):
            pd, cq = rp.PD(context), rp.CQ(context)
            mr = rp.MR(pd, 4096, ALL)
            a, b = rp.QP(pd, QPType.RC, cq), rp.QP(pd, QPType.RC, cq)
            a.connect(b.endpoint())
            b.connect(a.endpoint())
            b.post_recv([rp.RecvWR(mr[:64], wr_id=i) for i in range(4)])
            a.post_send(rp.Send(mr[:8]))
            holder: list[Any] = [pd, cq, mr, a, b]
            holder.append(holder)
            del pd, cq, mr, a, b, holder
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(open_children(context)) == before
