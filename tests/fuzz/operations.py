"""The operations of programs: each derives all its choices from one number."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import selectors
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import hostile
import numpy as np
from builders import (
    ALL,
    FLUSHED,
    NEVER,
    acting,
    closing,
    join,
    make_mr,
    make_pair,
    make_srq,
    num,
    wr_id,
)
from draw import Draw
from work_requests import ATOMICS, EVERY_SEND, INLINE, SENDS, Maker, several
from world import ALPHABET, Hostile, Memory, World, address_of, write

import rdmapost as rp
from rdmapost import Access, MWType, QPState, QPType, SendFlags, SRQType

__all__ = ["act", "step"]

_DEEPEST = 3
"""How deep the actions of hostile objects may nest."""


def post_send(world: World, draw: Draw) -> None:
    qp = world.pick("QP", draw)
    if qp is None:
        return
    wr_types = EVERY_SEND if draw.one_in(12) else SENDS[qp.qp_type]

    def make() -> Any:
        if draw.one_in(8):
            return world.pick("wrs", draw)
        maker = Maker(world, draw, qp.checked)
        wr = maker.send(draw.of(wr_types), qp)
        if maker.owned and draw.one_in(4):
            world.keep("wrs", wr, draw)
        return wr

    world.call(qp.post_send, several(world, draw, make))


def post_inline(world: World, draw: Draw) -> None:
    """Post INLINE, with data that only the SGE refers to, and from memory next to a region."""
    pair = world.pick("pairs", draw)
    if pair is None or pair[0].qp_type not in (QPType.RC, QPType.UC):
        return
    qp = pair[0]
    if qp.closed or pair[1].closed:
        return
    if world.call(getattr, qp, "state") is not QPState.RTS:
        reset(world, draw, *pair)
    maker = Maker(world, draw, qp.checked)
    maker.inline = True
    addr, _length, rkey = open_target(world, draw) or (0, 0, 0)
    sges = draw.among(maker.sges, maker.sge, maker.buffer, maker.sges, maker.outside)()
    flags = draw.among(10, SendFlags.INLINE | SendFlags.SIGNALED, np.uint64(10))
    wr = world.build(rp.RdmaWrite, sges, remote_addr=addr, rkey=rkey, send_flags=flags)
    world.call(qp.post_send, wr)


def column(world: World, draw: Draw, count: int, end: int) -> Any:
    """Return a column of numbers below `end`; now and then one is wrong, or it is not a column."""
    numbers = [draw.below(end) for _ in range(count)]
    if draw.one_in(6):
        numbers[draw.below(count)] = draw.among(-1, -(1 << 31), (1 << 31) - 1, end, end + 1)
    made: Any = np.array(numbers, draw.among("i8", "i8", "i4"))
    if draw.one_in(4):
        made = np.repeat(made, 2)[::2]
    if not draw.one_in(12):
        return made
    released = memoryview(bytearray(8 * count)).cast("q")
    released.release()
    wrong = made.astype("f8"), made[:-1], made.tolist(), released, made.reshape(-1, 1), None
    return draw.of(wrong)


def post_columns(world: World, draw: Draw) -> None:
    """Post rows to a queue pair or an SRQ, mostly of valid memory."""
    qp, region = world.pick("QP", draw), world.pick("MR", draw)
    if qp is None or region is None:
        return
    count, size = draw.among(1, 2, 3, 20, 150), draw.among(8, 8, 1, 64)
    blocks = max(1, region.length // size)
    if draw.one_in(3):
        local = world.build(
            region.ranges,
            column(world, draw, count, blocks),
            draw.among(size, column(world, draw, count, size + 1)),
        )
    else:
        local = world.build(region.blocks, column(world, draw, count, blocks), size)
    local = draw.among(local, local, local, (), [])
    ids = draw.among(wr_id(world, draw), column(world, draw, count, 1000))
    if draw.one_in(4):
        world.call(qp.post_recv_columns, local, wr_id=ids)
        return
    if draw.one_in(8) and (srq := world.pick("SRQ", draw)) is not None:
        world.call(srq.post_srq_recv_columns, local, wr_id=ids)
        return
    addr, length, rkey = open_target(world, draw) or (0, 1, 0)
    wr_type = draw.of((rp.RdmaWrite, rp.RdmaRead, rp.Send, rp.RdmaWriteWithImm, *ATOMICS))
    fields: dict[str, Any] = {}
    if wr_type is not rp.Send:
        target = column(world, draw, count, max(1, length // 8))
        fields["remote_addr"] = draw.among(addr, world.build(rp.Blocks, addr, target, 8))
        fields["rkey"] = num(world, draw, rkey, 0, 24, near=region)
    if draw.one_in(3):
        fields["signal_every"] = num(world, draw, draw.among(1, 2, 64, 0), 1)
    if draw.one_in(5):
        fields["send_flags"] = draw.among(SendFlags.INLINE, SendFlags.FENCE, 1 << 9)
    world.call(qp.post_columns, wr_type, local, wr_id=ids, **fields)


def poll_into(world: World, draw: Draw) -> None:
    cq = world.pick("CQ", draw)
    if cq is None:
        return
    rows: Any = bytearray(48 * draw.among(1, 3, 64, 200) + draw.among(0, 0, 0, 0, 8))
    rows = draw.among(rows, memoryview(rows), rows, None if draw.one_in(4) else rows)
    if draw.one_in(8):
        world.call(cq.wait_into, rows, draw.among(1, 2, 0), draw.among(0, 0.0005))
    else:
        world.call(cq.poll_into, rows)


def reset(world: World, draw: Draw, a: Any, b: Any) -> None:
    """Connect two queue pairs again, so that some messages arrive."""
    world.call(a.to_reset)
    world.call(b.to_reset)
    join(world, draw, a, b)


def open_target(world: World, draw: Draw) -> Any:
    """Return the address, length and rkey of remote memory, mostly of an open region."""
    open_to_all = [mr for mr in world.pools["MR"] if int(mr.access) & 15 == 15 and not mr.closed]
    if open_to_all and draw.below(4):
        far = draw.of(open_to_all)
        return far.addr, far.length, far.rkey
    return world.pick("targets", draw)


def post_recv(world: World, draw: Draw) -> None:
    qp = world.pick("QP", draw)
    if qp is None:
        return

    def make() -> Any:
        if draw.one_in(8):
            return world.pick("recvs", draw)
        maker = Maker(world, draw, qp.checked)
        wr = maker.recv()
        if maker.owned and draw.one_in(4):
            world.keep("recvs", wr, draw)
        return wr

    world.call(qp.post_recv, several(world, draw, make))


def post_shared(world: World, draw: Draw) -> None:
    srq = world.pick("SRQ", draw)
    if srq is None:
        return
    maker = Maker(world, draw, True)
    if srq.srq_type is SRQType.TM and draw.below(3):
        wrs = several(world, draw, lambda: maker.ops(True))
        world.call(srq.post_srq_ops, wrs)
    elif draw.one_in(20):
        world.call(srq.post_srq_ops, several(world, draw, lambda: maker.ops(False)))
    else:
        world.call(srq.post_srq_recv, several(world, draw, maker.recv))


def bind_type_1(world: World, draw: Draw) -> None:
    qp = world.pick("QP", draw)
    if qp is None:
        return
    bind = Maker(world, draw, qp.checked).bind()
    bind.pop("rkey", None)
    bind = {"addr": 0, "length": 8, **bind}
    world.call(qp.bind_mw, **bind, wr_id=wr_id(world, draw), send_flags=draw.among(2, 0, 3, 10))


def bind_right(world: World, draw: Draw) -> None:
    """Bind a window correctly, and now and then drop the region."""
    qp, window = world.pick("QP", draw), world.pick("MW", draw)
    pd = world.pick("PD", draw)
    if qp is None or window is None or pd is None:
        return
    if draw.one_in(2):
        make_mr(world, draw, pd, ALL | Access.MW_BIND)
    regions = [region for region in world.pools["MR"] if region.access & Access.MW_BIND]
    if not regions:
        return
    region = draw.of(regions)
    addr, size, rkey = region.addr, region.length, world.build(window.next_rkey)
    if rkey is None:
        return
    if window.mw_type is MWType.TYPE_1:
        world.call(qp.bind_mw, window, region, addr, size, 14)
    else:
        world.call(
            qp.post_send,
            rp.BindMW(mw=window, mr=region, rkey=rkey, addr=addr, length=size, mw_access_flags=14),
        )
    world.keep("targets", (addr, size, rkey), draw)
    del regions
    poll(world, draw)
    if draw.one_in(3):
        with contextlib.suppress(ValueError):
            world.pools["MR"].remove(region)


def poll(world: World, draw: Draw) -> None:
    for cq in list(world.pools["CQ"]) if draw.one_in(2) else [world.pick("CQ", draw)]:
        if cq is not None:
            limit = draw.among(64, 64, 1, 3, 1000, 0, -1)
            found = world.call(cq.poll, num(world, draw, limit, 1, 40))
            if found and limit >= 0 and type(found) is not list:
                world.found("poll", None, f"poll returned a {type(found).__name__}")


def wait(world: World, draw: Draw) -> None:
    cq = world.pick("CQ", draw)
    if cq is not None:
        world.call(cq.wait, draw.among(1, 1, 2, 0, 5), draw.among(0, 0, 0.0005, 1e-6))


def notify(world: World, draw: Draw) -> None:
    channel = world.pick("CompChannel", draw)
    for cq in list(world.pools["CQ"]):
        world.call(cq.req_notify, draw.among(False, True, None))
    if channel is not None:
        cq = world.call(channel.get_cq_event, draw.among(0, 0, 0.0003))
        if cq is not None:
            world.call(cq.req_notify)
            world.call(cq.poll)


def async_event(world: World, draw: Draw) -> None:
    context = world.pick("Context", draw)
    if context is not None:
        event = world.call(context.get_async_event, draw.among(0, 0, 0.0003))
        if event is not None:
            world.note(event)


class _TimelessSelector(selectors.DefaultSelector):
    """Advances the time, without waiting, when nothing is ready."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0 if timeout else timeout)
        if timeout and not found:
            self.now += timeout
        return found


class _TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop in which the order of events does not depend on the machine's speed."""

    def __init__(self) -> None:
        self._timeless = _TimelessSelector()
        super().__init__(self._timeless)

    def time(self) -> float:
        return self._timeless.now


def in_asyncio(world: World, draw: Draw) -> None:
    """Wait in tasks of an event loop, and close what they wait for or cancel one of them."""
    cqs = [cq for cq in (world.pick("CQ", draw), world.pick("CQ", draw)) if cq is not None]
    channel, context = world.pick("CompChannel", draw), world.pick("Context", draw)
    act = acting(world, draw)
    choices = [draw.below(8) for _ in range(4)]

    async def some() -> None:
        waits: list[Any] = [cq.completions(draw.among(1, 2, 0), 0.0005) for cq in cqs]
        if channel is not None and choices[0] < 4:
            waits.append(channel.cq_event(0.0005))
        if context is not None and choices[1] < 3:
            waits.append(context.async_event(0.0005))
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.sleep(0)
            if choices[2] < 4:
                act()
            if choices[3] < 3 and tasks:
                tasks[0].cancel()
        finally:
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    failed.append(ended)
                elif isinstance(ended, rp.AsyncEvent):
                    world.note(ended)

    failed: list[Exception] = []

    def turn() -> None:
        # Without interrupts: one in asyncio's own code would test only asyncio.
        with asyncio.Runner(loop_factory=_TimelessLoop if world.serial else None) as runner:
            runner.run(some())

    armed, world.interrupts = world.interrupts, ""
    try:
        world.call(turn)
        for error in failed:
            world.build(_again, error)
    finally:
        world.interrupts = armed


def _again(error: Exception) -> None:
    raise error


def prepare(world: World, draw: Draw) -> None:
    qp = world.pick("QP", draw)
    if qp is None:
        return
    maker = Maker(world, draw, qp.checked)
    if draw.one_in(3):
        wrs, prepare_it = several(world, draw, maker.recv), qp.prepare_recv
    else:
        wr_types = SENDS[qp.qp_type]

        def make() -> Any:
            own = Maker(world, draw, qp.checked)
            return own.send(draw.of(wr_types), qp)

        wrs, prepare_it = several(world, draw, make), qp.prepare
    batch = world.keep("Batch", world.call(prepare_it, wrs), draw)
    if batch is not None:
        world.call(batch.post)


def use_batch(world: World, draw: Draw) -> None:
    batch = world.pick("Batch", draw)
    if batch is None:
        return
    count = world.build(len, batch)
    if not count:
        return
    for _ in range(draw.below(4)):
        prepared = world.build(batch.__getitem__, draw.below(count))
        if prepared is not None:
            patch(world, draw, prepared)
    for _ in range(draw.among(1, 1, 2, 10)):
        world.call(batch.post)
    if draw.one_in(6):
        world.call(batch.close)
        world.call(batch.post)


def patch(world: World, draw: Draw, prepared: Any) -> None:
    """Change a field of a prepared work request."""
    # The work request may be INLINE on a queue pair that does not check: no raw addresses.
    maker = Maker(world, draw, False)
    maker.inline = True
    addr, length, rkey = world.pick("targets", draw) or (0, 0, 0)
    name = draw.among(
        "sg_list",
        "sg_list",
        "wr_id",
        "imm_data",
        "remote_addr",
        "rkey",
        "compare_add",
        "swap",
        "remote_qpn",
        "remote_qkey",
        "remote_srqn",
        "invalidate_rkey",
        "sg_list",
    )
    if not hasattr(prepared, name):
        return
    value = {
        "sg_list": maker.sges,
        "remote_addr": lambda: num(world, draw, addr + draw.below(length + 9), 8, 6),
        "rkey": lambda: num(world, draw, rkey, 1, 6),
        "wr_id": lambda: wr_id(world, draw),
        "compare_add": lambda: 0,
        "swap": lambda: 0,
    }.get(name, lambda: num(world, draw, draw.below(1 << 33), 1, 6))()
    world.call(setattr, prepared, name, value)
    world.build(getattr, prepared, name)


def make(world: World, draw: Draw) -> None:
    """Create a resource of some kind."""
    context, pd = world.pick("Context", draw), world.pick("PD", draw)
    choice = draw.below(20)
    if choice == 0 or context is None:
        world.keep("Context", world.call(rp.open_device, "soft0"), draw)
    elif choice < 3 or pd is None:
        world.keep("PD", world.call(rp.PD, context), draw)
    elif choice < 6:
        channel = world.pick("CompChannel", draw) if draw.one_in(2) else None
        cqe = num(world, draw, draw.among(1024, 1024, 1024, 64, 1), 5)
        options = {"channel": channel, "wc_flags": draw.one_in(3) * 0x480, "comp_vector": 0}
        world.keep("CQ", world.call(rp.CQ, context, cqe, **options), draw)
    elif choice == 6:
        world.keep("CompChannel", world.call(rp.CompChannel, context), draw)
    elif choice < 11:
        make_mr(world, draw, pd)
    elif choice < 13:
        mw_type = draw.among(MWType.TYPE_1, MWType.TYPE_2, 2, 3)
        world.keep("MW", world.call(rp.MW, pd, num(world, draw, mw_type, 1)), draw)
    elif choice == 13:
        qp, peer = world.pick("QP", draw), world.pick("QP", draw)
        end = None if peer is None else world.call(peer.endpoint)
        if end is not None and qp is not None:
            path = world.call(qp.path_to, end)
            if path is not None:
                world.keep("AH", world.call(rp.AH, pd, path), draw)
    elif choice == 14:
        world.keep("XRCD", world.call(rp.XRCD, context), draw)
    elif choice < 17:
        make_srq(world, draw, pd, draw.among(SRQType.BASIC, SRQType.XRC, SRQType.TM))
    else:
        qp_type = draw.among(
            QPType.RC, QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND, QPType.RAW_PACKET
        )
        if not world.clean or qp_type in (QPType.RC, QPType.UC):
            shared = draw.among(None, None, SRQType.BASIC) if qp_type is QPType.RC else None
            make_pair(world, draw, pd, qp_type, shared)


def make_wrong(world: World, draw: Draw) -> None:
    """Create a resource with wrong arguments."""
    pd, context = world.pick("PD", draw), world.pick("Context", draw)
    cq, qp = world.pick("CQ", draw), world.pick("QP", draw)
    if pd is None or context is None or cq is None:
        return
    choice = draw.below(8)
    if choice < 3:
        wrong: Any = draw.among(
            b"readonly",
            0,
            -1,
            None,
            "text",
            np.zeros(4, object),
            np.zeros((4, 4), np.uint8)[:, 1],
            memoryview(bytearray(64))[::2],
            bytearray(0),
            [],
            1.5,
            object(),
            np.array([None, "x"]),
        )
        made = world.call(rp.MR, pd, wrong, draw.among(int(ALL), 1, 0, 1 << 40, -1, None))
        if made is not None:
            if isinstance(wrong, np.ndarray) and wrong.dtype == object:
                world.found("objects", None, "an array of objects was registered")
            world.keep("MR", made, draw)
    elif choice == 3:
        options = draw.among(
            {"max_send_wr": 1 << 20},
            {"max_inline_data": 1 << 20},
            {"max_send_sge": -1},
            {"max_recv_wr": num(world, draw, 4, 1 << 30, 1)},
            {"port_num": 2},
            {"max_tso_header": 9},
            {"gid_index": 77},
        )
        world.keep("QP", world.call(rp.QP, pd, QPType.RC, cq, **options), draw)
    elif choice == 4:
        world.call(rp.CQ, context, draw.among(0, -1, 1 << 30, 1 << 70), comp_vector=draw.below(2))
    elif choice == 5:
        world.call(rp.SRQ, pd, draw.among(0, 1 << 20, -1), draw.among(0, 1, 1000))
    elif choice == 6 and qp is not None:
        name = draw.among("qp_state", "path_mtu", "timeout", "nothing", "rq_psn", "dest_qp_num")
        value = draw.below(70)
        if name == "timeout" and world.serial:
            value |= NEVER
        world.call(qp.modify, **{name: num(world, draw, value, NEVER, 2)})
    else:
        gid = rp.GID(bytes(draw.below(256) for _ in range(16)))
        attr = rp.AHAttr(
            dgid=gid, sl=num(world, draw, draw.below(20), 1, 6), sgid_index=draw.below(3)
        )
        world.keep("AH", world.call(rp.AH, pd, attr), draw)


_OFTEN_CLOSED = ("Batch", "Batch", "MW", "QP", "AH", "MR", "MR", "MR", "CQ", "SRQ", "CompChannel")


def close(world: World, draw: Draw) -> None:
    """Close something, whether or not it is in use."""
    type_name = draw.of(_OFTEN_CLOSED) if draw.below(8) else draw.among("PD", "XRCD", "Context")
    thing = world.pick(type_name, draw)
    if thing is not None:
        closing(world, thing)()
        if draw.one_in(3):
            with contextlib.suppress(ValueError):
                world.pools[type_name].remove(thing)


def drop(world: World, draw: Draw) -> None:
    """Drop a resource, which its finalizer may close."""
    type_name = draw.of((*_OFTEN_CLOSED, "wrs", "sges"))
    pool = world.pools[type_name]
    if len(pool) <= draw.below(3):
        return
    with contextlib.suppress(IndexError):
        thing = pool.pop(draw.below(len(pool)))
        if draw.one_in(2):
            cycle: list[Any] = [thing]
            cycle.append(cycle)
            if draw.one_in(2):
                cycle.append(hostile.Finalizer(acting(world, draw)))
        elif draw.one_in(3):
            hostile.Finalizer(acting(world, draw))


def collect(world: World, draw: Draw) -> None:
    world.call(gc.collect, draw.among(0, 1, 2, 2))


def change_state(world: World, draw: Draw) -> None:
    qp, peer = world.pick("QP", draw), world.pick("QP", draw)
    if qp is None or peer is None:
        return
    choice = draw.below(12)
    if choice < 5:
        # Connect it again, so that most queue pairs stay usable.
        world.call(qp.to_reset)
        join(world, draw, qp, peer)
    elif choice < 10:
        verbs = (qp.to_err, qp.to_sqd, qp.to_rts, qp.to_reset, qp.to_init)
        world.call(verbs[choice - 5])
    elif choice == 10:
        world.call(qp.modify, qp_state=draw.of(tuple(QPState)))
    else:
        world.call(qp.to_rts)


_WORD = ALPHABET[:8]


def query(world: World, draw: Draw) -> None:
    """Call verbs and properties that change nothing."""
    qp, cq, mr = (world.pick(type_name, draw) for type_name in ("QP", "CQ", "MR"))
    context, srq, mw = (world.pick(type_name, draw) for type_name in ("Context", "SRQ", "MW"))
    choice = draw.below(9)
    if choice == 0 and qp is not None:
        world.call(qp.query)
    elif choice == 1 and qp is not None:
        world.call(getattr, qp, draw.among("state", "outstanding", "gid"))
    elif choice == 2 and srq is not None:
        world.call(srq.query)
        world.call(srq.arm_limit, num(world, draw, draw.below(8), 1, 6))
    elif choice == 3 and context is not None:
        world.call(context.query_port, num(world, draw, draw.below(3), 1, 4))
        world.call(context.query_gid_table)
    elif choice == 4 and mw is not None:
        world.call(getattr, mw, "rkey")
        world.call(mw.next_rkey)
    elif choice == 5 and mr is not None:
        bounds = (draw.among(None, 0, -8, 1 << 70, "x"), draw.among(None, 8, -1, 1 << 64, 1.5))
        world.call(mr.__getitem__, slice(*bounds, draw.among(None, None, 1)))
    elif choice == 6 and mr is not None and int(mr.access) & 1:
        write(mr, _WORD)
    elif choice == 7 and qp is not None:
        verb = qp.attach_mcast if draw.one_in(2) else qp.detach_mcast
        world.call(verb, draw.among("ff0e::1", "ff0e::2", "::1", b"x"))
    else:
        for thing in (qp, cq, mr, context, srq, mw):
            world.build(repr, thing)


def duplicate(world: World, draw: Draw) -> None:
    """Try to copy a resource, which must fail: no second object may own its handle."""
    thing = world.pick(draw.of(_OFTEN_CLOSED), draw)
    if thing is None:
        return
    how: Callable[[Any], Any] = draw.among(
        copy.copy, copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))
    )
    try:
        found = how(thing)
    except TypeError:
        return
    except Exception as error:
        world.found(
            "copy", error, f"a copy of a {type(thing).__name__} is refused by another error"
        )
        return
    if found is not thing:
        world.found("copy", None, f"a {type(thing).__name__} was copied")


def assign(world: World, draw: Draw) -> None:
    """Try to assign to an attribute that says where a region is, which must fail."""
    region = world.pick("MR", draw)
    if region is None:
        return
    name, value = draw.among(
        ("length", 1 << 40), ("addr", 8), ("end", 1 << 63), ("writable", True), ("access", 0)
    )
    with contextlib.suppress(AttributeError, TypeError):
        setattr(region, name, value)
        world.found("assign", None, f"mr.{name} was assigned")


def change_shared(world: World, draw: Draw) -> None:
    """Change what a post may be reading: lists of SGEs, and inline data."""
    shared, data = world.pick("lists", draw), world.pick("buffers", draw)
    wr = world.pick("wrs", draw)
    with contextlib.suppress(IndexError, BufferError, ValueError):
        if shared is not None:
            choice = draw.below(4)
            if choice == 0:
                shared.clear()
            elif choice == 1:
                shared.pop()
            elif choice == 2:
                shared.append(Maker(world, draw, False).buffer())
            else:
                shared.append(draw.among(None, 5, hostile.posing(rp.SGE)))
        if data is not None:
            if draw.one_in(2):
                data.extend(b"\xa1" * 5000)
            else:
                data.clear()
            with contextlib.suppress(ValueError):
                world.pools["buffers"].remove(data)
    if wr is not None and hasattr(wr, "sg_list"):
        wr.sg_list = Maker(world, draw, False).buffer()


def reconnect(world: World, draw: Draw) -> None:
    """Connect two queue pairs of any types, or one with itself."""
    a, b = world.pick("QP", draw), world.pick("QP", draw)
    if a is not None and b is not None:
        reset(world, draw, a, b)


def traffic(world: World, draw: Draw) -> None:
    """Post as applications do, so that most of it succeeds."""
    pair, region, target = (
        world.pick("pairs", draw),
        world.pick("MR", draw),
        open_target(world, draw),
    )
    if pair is None or region is None or target is None or region.closed:
        return
    a, b = pair
    if a.closed or b.closed:
        return
    if world.call(getattr, a, "state") is not QPState.RTS or draw.one_in(12):
        reset(world, draw, a, b)
    if b.qp_type in (QPType.UD, QPType.RAW_PACKET):
        region = max(world.pools["MR"], key=len, default=region)
    wr_types = SENDS[a.qp_type]
    srq = b.srq if b.qp_type is not QPType.XRC_RECV else world.pick("SRQ", draw)
    for place in range(draw.among(2, 5, 20)):
        size = min(region.length, 4096 if b.qp_type is QPType.UD else 64)
        recv_sge = world.build(region.__getitem__, slice(0, size))
        sge = world.build(region.__getitem__, slice(8, draw.among(16, 16, 64)))
        if sge is None or recv_sge is None:
            return
        wr_type, recv = draw.of(wr_types), rp.RecvWR(recv_sge, wr_id=place)
        if not issubclass(wr_type, rp.RdmaWrite | rp.RdmaRead | rp.BindMW):
            if srq is not None:
                world.call(srq.post_srq_recv, recv)
            elif b.qp_type is not QPType.XRC_RECV:
                world.call(b.post_recv, recv)
        flags = draw.among(2, 2, 2, 0, SendFlags.SIGNALED, 3, 10)
        if wr_type is rp.BindMW:
            bind_right(world, draw)
            continue
        fits = flags & ~1 if a.qp_type in (QPType.UC, QPType.UD, QPType.RAW_PACKET) else flags
        if wr_type in (rp.RdmaRead, rp.LocalInv, rp.TSO, rp.AtomicWrite, rp.Flush, *ATOMICS):
            fits &= ~INLINE
        values: dict[str, Any] = {"wr_id": place, "send_flags": fits}
        names = {field.name for field in fields(wr_type)}
        if "sg_list" in names:
            values["sg_list"] = sge._replace(length=8) if wr_type in ATOMICS else sge
        if "remote_addr" in names:
            values |= {"remote_addr": (target[0] + 7) & ~7, "rkey": target[2]}
        if wr_type is rp.Flush:
            values["length"] = 8
        if wr_type is rp.AtomicWrite:
            values["atomic_wr"] = int.from_bytes(_WORD, "little")
        if "ah" in names and a.qp_type is QPType.UD:
            values |= {
                "ah": world.pick("AH", draw),
                "remote_qpn": b.qp_num,
                "remote_qkey": rp.resources.qp.DEFAULT_QKEY,
            }
        if "remote_srqn" in names and a.qp_type is QPType.XRC_SEND and srq is not None:
            values["remote_srqn"] = world.build(getattr, srq, "srq_num") or 0
        if wr_type is rp.TSO:
            values |= {"hdr": bytes(54), "mss": 16}
        if wr_type in (rp.LocalInv, rp.SendWithInv):
            window = world.pick("MW", draw)
            values["invalidate_rkey"] = (
                0 if window is None else world.build(getattr, window, "rkey") or 0
            )
            if draw.below(4):
                continue
        world.call(a.post_send, wr_type(**values))
        if place % 4 == 3:
            poll(world, draw)
            if world.call(getattr, a, "state") is not QPState.RTS:
                break
    poll(world, draw)


def rereg(world: World, draw: Draw) -> None:
    """Register a region again."""
    region, pd = world.pick("MR", draw), world.pick("PD", draw)
    # Not a read-only region: the fuzzer checks that its memory never changes.
    if region is None or not int(region.access) & Access.LOCAL_WRITE:
        return
    if draw.below(3):
        access = draw.among(ALL, FLUSHED, ALL | Access.MW_BIND, Access.LOCAL_WRITE)
        options = {"access": num(world, draw, int(access), 1 << 40, 12, region)}
        world.call(region.rereg, **(options if draw.below(3) else {"pd": pd}))
        return
    old = [memory for memory in world.memories if memory.region and memory.region() is region]
    memory = Memory(draw.among("guarded", "bytearray", "mmap", "numpy", "array"), 256)
    world.memories.append(memory)
    memory.abandoned()
    world.call(region.rereg, memory=memory.given())
    if region.buffer_addr == address_of(memory.given()):
        for each in old:
            each.abandoned()
        memory.registered(region, False)
    world.keep("targets", (region.addr, region.length, region.rkey), draw)


def resize(world: World, draw: Draw) -> None:
    """Change the size of a queue, end waits for a CQ, or advise on memory."""
    cq, srq = world.pick("CQ", draw), world.pick("SRQ", draw)
    pd, region = world.pick("PD", draw), world.pick("MR", draw)
    choice = draw.below(4)
    if choice == 0 and cq is not None:
        world.call(cq.resize, num(world, draw, draw.among(1024, 2048, 64, 1, 0), 1 << 40, 6, cq))
    elif choice == 1 and srq is not None:
        limit = draw.among({}, {"srq_limit": 3})
        world.call(
            srq.modify, max_wr=num(world, draw, draw.among(64, 8, 1, 0), 1 << 40, 6), **limit
        )
    elif choice == 2 and cq is not None:
        world.call(cq.cancel_waits)
    elif pd is not None and region is not None:
        sges = Maker(world, draw, True).sges()
        world.call(pd.advise_mr, draw.below(4), sges, num(world, draw, draw.below(3), 1, 6))


def close_context(world: World, draw: Draw) -> None:
    context = world.pick("Context", draw)
    if context is not None and len(world.pools["Context"]) > 1:
        world.call(context.close_all)


def race(world: World, draw: Draw) -> None:
    """Use something in another thread while it is closed in this one."""
    context, pd, end = world.pick("Context", draw), world.pick("PD", draw), None
    cq, qp = world.pick("CQ", draw), world.pick("QP", draw)
    if world.serial or None in (context, pd, cq, qp) or context.closed or pd.closed:
        return
    end = world.call(qp.endpoint)
    path = None if end is None else world.call(qp.path_to, end)
    choice = draw.below(8)
    thing: Any = None
    if choice < 2:
        channel = world.keep("CompChannel", world.call(rp.CompChannel, context), draw)
        thing = world.call(rp.CQ, context, 64, channel=channel)
        verb = draw.among(lambda: thing.req_notify(), lambda: thing.poll())
        if choice and channel is not None:
            if thing is not None:
                world.call(thing.close)
            thing = channel
            verb = draw.among(
                lambda: channel.get_cq_event(0), lambda: rp.CQ(context, 4, channel=channel)
            )
    elif choice < 4:
        thing = world.call(rp.PD, context)
        verb = draw.among(
            lambda: rp.AH(thing, path),
            lambda: rp.MR(thing, 64),
            lambda: rp.MW(thing),
            lambda: rp.SRQ(thing),
            lambda: rp.QP(thing, QPType.RC, cq),
        )
    elif choice == 4:
        thing = world.call(rp.QP, pd, QPType.RC, cq)
        region = world.pick("MR", draw)
        verb = draw.among(
            lambda: thing.query(),
            lambda: thing.to_err(),
            lambda: thing.to_init(),
            lambda: thing.post_recv(rp.RecvWR(region[:8])),
            lambda: thing.endpoint(),
            lambda: thing.post_send(rp.RdmaWrite(region[:8])),
            lambda: thing.connect(end),
        )
    elif choice == 5:
        thing = world.call(rp.SRQ, pd)
        verb = draw.among(
            lambda: thing.query(),
            lambda: thing.arm_limit(1),
            lambda: rp.QP(pd, QPType.RC, cq, srq=thing),
        )
    elif choice == 6:
        thing = world.call(rp.CQ, context, 64)
        verb = draw.among(
            lambda: thing.poll(), lambda: thing.wait(1, 0.0001), lambda: rp.QP(pd, QPType.RC, thing)
        )
    else:
        thing = world.call(rp.open_device, "soft0")
        verb = draw.among(
            lambda: thing.query_port(),
            lambda: rp.PD(thing),
            lambda: rp.CQ(thing, 4),
            lambda: thing.get_async_event(0),
            lambda: rp.CompChannel(thing),
            lambda: rp.XRCD(thing),
        )
    if thing is None:
        return
    world.made.append(weakref.ref(thing))

    def use() -> None:
        for _ in range(6):
            world.call(verb)

    other = threading.Thread(target=use)
    other.start()
    for _ in range(draw.below(200)):
        pass
    world.call(thing.close)
    other.join()
    world.call(thing.close)


_STEPS: tuple[tuple[Callable[[World, Draw], None], int], ...] = (
    (post_send, 30),
    (post_inline, 8),
    (post_columns, 12),
    (poll_into, 5),
    (post_recv, 10),
    (post_shared, 8),
    (bind_type_1, 2),
    (bind_right, 4),
    (poll, 14),
    (wait, 2),
    (notify, 3),
    (async_event, 1),
    (in_asyncio, 1),
    (prepare, 5),
    (use_batch, 7),
    (make, 10),
    (make_wrong, 2),
    (close, 8),
    (drop, 6),
    (collect, 2),
    (change_state, 4),
    (query, 5),
    (duplicate, 1),
    (assign, 1),
    (change_shared, 3),
    (reconnect, 3),
    (traffic, 20),
    (race, 8),
    (rereg, 3),
    (resize, 2),
    (close_context, 1),
)
_WEIGHTED = tuple(what for what, weight in _STEPS for _ in range(weight))
_INNER = (
    close,
    close,
    close,
    drop,
    post_inline,
    post_columns,
    post_send,
    poll,
    collect,
    change_state,
    change_shared,
    use_batch,
    traffic,
    rereg,
    resize,
)


def step(world: World, draw: Draw) -> None:
    """Do one operation."""
    draw.of(_WEIGHTED)(world, draw)


def act(world: World, seed: int) -> None:
    """Do an operation from within another one, or raise."""
    if world.closing or world.findings:
        return
    inside = getattr(world.local, "inside", 0)
    if inside >= _DEEPEST:
        return
    draw = Draw(seed)
    if draw.one_in(6):
        raise Hostile("raised by a hostile object")
    world.local.inside = inside + 1
    try:
        draw.of(_INNER)(world, draw)
    finally:
        world.local.inside = inside
