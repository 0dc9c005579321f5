"""The operations that a program is made of, and how it runs.

Every operation takes all its choices from one number.  Raw addresses, in SGEs
made from numbers, are only ever inside of registered memory or go with a key
that is none; and an INLINE by such an address is never posted to a queue pair
that does not check, where it is at the caller's own risk.  ``_Maker.raw`` says
where such an SGE may be made.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import hostile
import numpy as np
from draw import Draw, mix
from world import ALPHABET, Hostile, Memory, World, filled, residue

import rdmapost as rp
from rdmapost import Access, MWType, QPState, QPType, SendFlags, SRQType, aio

__all__ = ["Plan", "plan_of", "run"]

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
_INLINE = int(SendFlags.INLINE)
_CONNECTED = (
    rp.Send, rp.SendWithImm, rp.SendWithInv, rp.RdmaWrite, rp.RdmaWrite, rp.RdmaWriteWithImm,
    rp.RdmaRead, rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd, rp.LocalInv, rp.BindMW, rp.BindMW,
)  # fmt: skip
_SENDS = {
    QPType.RC: _CONNECTED,
    QPType.UC: _CONNECTED,
    QPType.XRC_SEND: _CONNECTED,
    QPType.XRC_RECV: _CONNECTED,
    QPType.UD: (rp.Send, rp.SendWithImm, rp.TSO),
    QPType.RAW_PACKET: (rp.Send, rp.TSO),
}
_EVERY_SEND = (*_CONNECTED, rp.TSO)
_ATOMICS = (rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd)
_FLAVOURS = ("rc", "rc", "rc", "uc", "ud", "xrc", "srq", "tm", "raw", "mixed")
_CLEAN = frozenset({"rc", "uc", "srq"})
"""Where nothing writes headers of its own into memory."""
_DEEPEST = 3
"""How deep hostile objects may act inside of what others do."""


@dataclass(frozen=True)
class Plan:
    """One program: what it may be known by and replayed from.

    Attributes:
        seed: 64 bits.
        threads: how many there are.
        flavour: which queue pairs it begins with.
        interrupts: "", "counted" (the same moments every time) or "timer".
        steps: for each thread, the seeds of its operations.
    """

    seed: int
    threads: int
    flavour: str
    interrupts: str
    steps: tuple[tuple[int, ...], ...]


def plan_of(seed: int, index: int, most_threads: int) -> Plan:
    """Return the program with a number."""
    own = mix(seed, index)
    draw = Draw(own)
    threads = 1 if draw.one_in(2) else 1 + draw.below(most_threads)
    interrupts = ""
    if draw.one_in(4):
        interrupts = "counted" if threads == 1 else "timer"
    flavour = draw.of(_FLAVOURS)
    count = 20 + draw.below(80)
    return Plan(
        own, threads, flavour, interrupts,
        tuple(tuple(draw.bits() for _ in range(count // threads)) for _ in range(threads)),
    )  # fmt: skip


def run(
    plan: Plan,
    *,
    tell: Callable[[str], None] | None = None,
    keep: frozenset[int] | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> World:
    """Run a program; return its world, with what was found in it.

    Args:
        plan: the program.
        tell: gets every call as text.
        keep: which of its operations to run, by their place; all unless given.
        tick: gets the number of calls made, now and then.
    """
    draw = Draw(mix(plan.seed, 1))
    gc.collect()
    before = residue()
    with World(plan.seed, tell) as world:
        world.act = lambda seed: act(world, seed)  # type: ignore[method-assign]
        world.clean = plan.flavour in _CLEAN
        world.serial = plan.threads == 1
        begin(world, draw, plan.flavour)
        world.interrupts = plan.interrupts
        gc.set_threshold(1 if draw.below(3) else 700)
        if plan.threads > 1:
            sys.setswitchinterval(1e-6)
        try:
            _run_steps(world, plan, keep, tick)
        finally:
            gc.set_threshold(700)
            sys.setswitchinterval(0.005)
        world.interrupts = plan.interrupts
        world.end(before)
        tick(world.count)
    return world


def _run_steps(
    world: World, plan: Plan, keep: frozenset[int] | None, tick: Callable[[int], None]
) -> None:
    def work(which: int) -> None:
        for place, seed in enumerate(plan.steps[which]):
            if world.findings:
                return
            if keep is not None and place not in keep:
                continue
            if world.tell is not None:
                world.tell(f"[{which}:{place}]")
            try:
                step(world, Draw(seed))
            except Exception as error:
                # Of the fuzzer itself, or a caller's object that the library handed on.
                if not isinstance(error, Hostile):
                    world.found("fuzzer", error, "an operation of the fuzzer failed")
            if place % 4 == 0:
                tick(world.count)
                if plan.threads == 1:
                    world.look()

    others = [threading.Thread(target=work, args=(which,)) for which in range(1, plan.threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()
    signal.setitimer(signal.ITIMER_REAL, 0)


def begin(world: World, draw: Draw, flavour: str) -> None:
    """Make what nearly every operation needs."""
    context = world.keep("Context", world.call(rp.open_device, "soft0"), draw)
    pd = world.keep("PD", world.call(rp.PD, context), draw)
    world.keep("CQ", world.call(rp.CQ, context, 1024, tm_info=flavour == "tm"), draw)
    for access in (ALL | Access.MW_BIND, ALL, ALL):
        make_mr(world, draw, pd, access)
    kinds = {
        "rc": QPType.RC, "uc": QPType.UC, "ud": QPType.UD, "xrc": QPType.XRC_SEND,
        "raw": QPType.RAW_PACKET, "srq": QPType.RC, "tm": QPType.RC,
    }  # fmt: skip
    for kind in ("rc", "ud", "xrc") if flavour == "mixed" else (flavour,):
        shared = {"srq": SRQType.BASIC, "tm": SRQType.TM}.get(kind)
        make_pair(world, draw, pd, kinds[kind], shared)
    if flavour not in ("ud", "raw"):
        for kind in MWType:
            world.keep("MW", world.call(rp.MW, pd, kind), draw)


# ---- small choices ----------------------------------------------------------


def acting(world: World, draw: Draw) -> Callable[[], Any]:
    """Return something to be done from the inside of a call."""
    seed = draw.bits()
    return lambda: act(world, seed)


def num(world: World, draw: Draw, value: int, other: int = 0, often: int = 24) -> Any:
    """Return a number, or now and then a hostile object in its place."""
    if not draw.one_in(often):
        return value
    return hostile.number(draw, value, other, acting(world, draw))


def wr_id(world: World, draw: Draw) -> Any:
    """Return a wr_id, also at the edges of the range."""
    return num(
        world, draw, draw.among(draw.below(1000), 0, (1 << 64) - 1, 1 << 63, (1 << 63) - 1), 1, 30
    )


def make_mr(world: World, draw: Draw, pd: Any, access: Any = None) -> None:
    """Register memory of some kind."""
    if access is None:
        access = draw.among(
            ALL, ALL, ALL | Access.MW_BIND, ALL | Access.MW_BIND, ALL | Access.ZERO_BASED,
            ALL | Access.MW_BIND | Access.ZERO_BASED, Access.LOCAL_WRITE, Access(0),
            Access.REMOTE_READ, Access.REMOTE_WRITE, ALL | Access.ON_DEMAND,
        )  # fmt: skip
    memory = Memory(draw.of(Memory.KINDS), draw.among(64, 256, 256, 4096))
    size, constant = memory.size, not int(access) & Access.LOCAL_WRITE
    region = world.call(rp.MR, pd, memory.given(), num(world, draw, int(access), int(ALL), 40))
    world.memories.append(memory)
    if region is None:
        memory.abandoned()
        return
    memory.registered(region, constant)
    # It outlives the region: its key must not.
    world.keep("targets", (region.addr, size, region.rkey), draw)
    world.keep("MR", region, draw)


def make_pair(
    world: World, draw: Draw, pd: Any, qp_type: QPType, shared: SRQType | None = None
) -> None:
    """Make two queue pairs and connect them."""
    cq, other = world.pick("CQ", draw), world.pick("CQ", draw)
    if cq is None or pd is None:
        return
    srq = xrcd = None
    if shared is not None:
        srq = make_srq(world, draw, pd, shared)
    options: dict[str, Any] = {
        "max_send_wr": draw.among(1, 4, 16, 64),
        "max_recv_wr": draw.among(1, 4, 16, 64),
        "max_send_sge": draw.among(1, 2, 4),
        "max_recv_sge": draw.among(1, 2, 4),
        "max_inline_data": draw.among(0, 64, 64, 256, 1024),
        "sq_sig_all": draw.one_in(6),
        "checked": not draw.one_in(4),
    }
    far = dict(options)
    if qp_type in (QPType.UD, QPType.RAW_PACKET):
        options["max_tso_header"] = draw.among(0, 64, 256)
    if qp_type is QPType.XRC_SEND:
        srq = make_srq(world, draw, pd, SRQType.XRC)
        xrcd = getattr(srq, "xrcd", None)
        a = world.call(rp.QP, pd, qp_type, cq, **options)
        b = world.call(rp.QP, pd, QPType.XRC_RECV, cq, xrcd=xrcd, **far)
    else:
        a = world.call(rp.QP, pd, qp_type, cq, other, **options)
        b = world.call(rp.QP, pd, qp_type, cq, srq=srq, **far)
    world.keep("QP", a, draw)
    world.keep("QP", b, draw)
    if a is not None and b is not None:
        join(world, draw, a, b)
        world.keep("pairs", (a, b), draw)


def join(world: World, draw: Draw, a: Any, b: Any) -> None:
    """Connect two queue pairs."""
    ends = [world.call(qp.endpoint) for qp in (a, b)]
    if None in ends:
        return
    # Nothing that depends on time, where the seed alone is to replay it.
    more = {"rnr_retry": 0, "retry_cnt": 0, "timeout": 1}
    if not world.serial and draw.one_in(2):
        more = {"rnr_retry": 1, "min_rnr_timer": 1, "retry_cnt": 1, "timeout": 1}
    access = draw.among(ALL & ~Access.LOCAL_WRITE, Access.REMOTE_WRITE, 0, int(ALL))
    for qp, end in ((a, ends[1]), (b, ends[0])):
        world.call(qp.connect, end, access=access, **more)
    if a.qp_type is QPType.UD:
        world.keep("AH", world.call(a.ah_to, ends[1]), draw)


def make_srq(world: World, draw: Draw, pd: Any, kind: SRQType) -> Any:
    """Make a shared receive queue."""
    options: dict[str, Any] = {"srq_type": kind, "checked": not draw.one_in(4)}
    if kind is not SRQType.BASIC:
        options["cq"] = world.pick("CQ", draw)
    if kind is SRQType.TM:
        options |= {"max_num_tags": draw.among(1, 4, 64), "max_ops": draw.among(1, 4, 64)}
    if kind is SRQType.XRC:
        options["xrcd"] = world.pick("XRCD", draw) or world.keep(
            "XRCD", world.call(rp.XRCD, pd.context), draw
        )
    srq = world.call(rp.SRQ, pd, draw.among(1, 8, 64), draw.among(1, 2, 4), **options)
    return world.keep("SRQ", srq, draw)


# ---- work requests ----------------------------------------------------------


class _Maker:
    """Makes work requests for one queue.

    Args:
        world, draw: as everywhere.
        checked: whether the queue checks.

    Attributes:
        inline: whether the work request may be INLINE, by any of its faces.
        raw: whether SGEs may be only numbers.
        plain: whether it holds nothing but SGEs with an owner that is a region or a buffer:
            such a one may be posted anywhere.
    """

    def __init__(self, world: World, draw: Draw, checked: bool) -> None:
        self.world, self.draw, self.checked = world, draw, checked
        self.inline = False
        self.plain = True

    @property
    def raw(self) -> bool:
        return self.checked or not self.inline

    # ---- SGEs

    def sge(self, size: int | None = None) -> Any:
        world, draw = self.world, self.draw
        kind = draw.below(40)
        if self.inline and kind < 12:
            return self.buffer()
        region = world.pick("MR", draw)
        if region is None or kind == 39:
            return world.pick("sges", draw) or self.buffer()
        length = region.length
        start = draw.below(length)
        if draw.below(3):
            start &= ~7
        stop = min(length, start + (draw.among(8, 8, 16, 64, 100) if size is None else size))
        if kind < 28:
            sge = world.build(region.__getitem__, slice(start, stop))
            if sge is not None and draw.one_in(8):
                world.keep("sges", sge, draw)
            return sge if sge is not None else self.buffer()
        addr, count = region.addr + start, stop - start
        if kind < 31 and self.raw:
            self.plain = False
            if draw.below(3):
                return rp.SGE(addr, count, region.lkey)
            return rp.SGE(draw.bits() >> draw.below(64), count, draw.bits() >> 32 | 1 << 31)
        if kind < 34:
            # Outside of the region, by arithmetic that wraps.
            before = addr - draw.among(0, 8, 32, 64, start + 32)
            outside = draw.among(before, before & (1 << 64) - 1, region.end, region.end - 4)
            with contextlib.suppress(OverflowError):
                return rp.SGE(
                    draw.among(np.uint64, np.int64, int)(outside),
                    draw.among(np.uint32, np.uint64, int)(draw.among(32, 64, count + 32)),
                    region.lkey, region,
                )  # fmt: skip
        if kind < 36:
            return rp.SGE(
                num(world, draw, addr, 8, 2), num(world, draw, count, 1 << 20, 2),
                num(world, draw, region.lkey, 1, 4), region,
            )  # fmt: skip
        if kind == 36:
            return hostile.sge_class()(addr, count, region.lkey, region)
        if kind == 37 and self.checked:
            self.plain = False
            fake = hostile.Fake(region.pd, 0, 1 << 63, region.lkey)
            return rp.SGE(addr, count, region.lkey, draw.among(fake, object(), np.zeros(4), fake))
        return draw.among(
            (addr, count, region.lkey, region), None, 5, "sge", rp.SGE(addr, 0, region.lkey, region),
            hostile.posing(rp.SGE), rp.SGE._make([addr, count, region.lkey, hostile.posing(rp.MR)])
            if self.checked else None,
        )  # fmt: skip

    def buffer(self) -> Any:
        """Make an SGE over a buffer that nothing else may hold."""
        draw, size = self.draw, self.draw.among(1, 8, 16, 60, 200)
        kind = draw.below(8)
        data: Any
        if kind < 3:
            data = filled(size)[1:] + b"\xa0"
        elif kind < 6:
            data = bytearray(filled(size))
            if kind == 5:
                self.world.keep("buffers", data, draw)
        elif kind == 6:
            data = memoryview(np.full(size * 2, 0xA1, np.uint8))[size:]
        else:
            data = self.world.pick("buffers", draw)
            if not data:
                data = b"\xa1"
        sge = self.world.build(rp.SGE.from_buffer, data)
        return sge if sge is not None else rp.SGE.from_buffer(b"\xa2")

    def sges(self) -> Any:
        draw = self.draw
        if draw.below(3):
            return self.sge()
        kind, count = draw.below(12), draw.among(0, 1, 1, 2, 3, 5, 9, 70)
        # They are drawn now, or when they are asked for: in the order of the asking.
        act = acting(self.world, draw) if draw.one_in(2) else None
        if kind < 3:
            return [self.sge() for _ in range(count)]
        if kind == 3:
            return tuple(self.sge() for _ in range(count))
        if kind == 4:
            # Another thread may change it while it is posted.
            shared = [self.sge() for _ in range(count)]
            if self.plain:
                self.world.keep("lists", shared, draw)
            return shared
        if kind == 5:
            return (self.temporary() for _ in range(count))
        if kind == 6:
            return iter([self.temporary() for _ in range(count)])
        if kind < 9:
            told = [count] if draw.below(3) else [count, count + 3, 0, 1, -1]
            return hostile.OnDemand(self.temporary, count, told, act)
        if kind == 9:
            return hostile.Iterating(self.temporary, count, act)
        if kind == 10:
            return draw.among(None, 5, "sges", object(), {}, b"bytes")
        return [self.sge(), draw.among(None, 5, (1, 2, 3), hostile.posing(rp.SGE), [])]

    def temporary(self) -> Any:
        """Make an SGE that only who asked for it holds."""
        return self.buffer() if self.inline or self.draw.one_in(4) else self.sge()

    # ---- fields

    def flags(self) -> Any:
        draw = self.draw
        value = draw.among(
            2, 2, 2, 2, 2, 2, 0, 3, 6, 10, 10, 10, 10, 8, 18, 26, draw.below(64), 1 << 32
        )
        self.inline = bool(value & _INLINE)
        kind = draw.below(24)
        if kind < 12:
            return value
        if kind < 17:
            return SendFlags(value & 31)
        if kind < 20:
            return draw.among(np.uint8, np.uint64, np.int32)(value & 63)
        if kind < 22:
            return value
        # Which face counts nobody knows.
        self.inline = True
        return hostile.number(draw, value, value ^ _INLINE, acting(self.world, draw))

    def send(self, kind: Any, qp: Any) -> Any:
        """Make a send work request."""
        world, draw = self.world, self.draw
        values: dict[str, Any] = {"wr_id": wr_id(world, draw), "send_flags": self.flags()}
        names = {field.name for field in fields(kind)}
        if "sg_list" in names:
            if kind in _ATOMICS and draw.below(4):
                values["sg_list"] = self.sge(8)
            else:
                values["sg_list"] = self.sges()
        if "remote_addr" in names:
            addr, length, rkey = world.pick("targets", draw) or (0, 8, 0)
            offset = draw.among(0, 0, 8, 16, 24, length - 8, length, 4)
            if draw.one_in(12):
                rkey = draw.below(1 << 32)
            values["remote_addr"] = num(world, draw, addr + offset)
            values["rkey"] = num(world, draw, rkey)
        if "compare_add" in names:
            word = 0 if kind is rp.AtomicFetchAndAdd else int.from_bytes(ALPHABET[:8], "little")
            word = word if world.clean else draw.among(word, draw.bits())
            values["compare_add"] = num(world, draw, word, word, 60) if not world.clean else word
            if "swap" in names:
                values["swap"] = word
        if "imm_data" in names:
            values["imm_data"] = num(world, draw, draw.below(1 << 32))
        if "invalidate_rkey" in names:
            target = world.pick("targets", draw)
            values["invalidate_rkey"] = num(world, draw, target[2] if target else 5)
        if "remote_srqn" in names and qp.qp_type is QPType.XRC_SEND:
            srq = world.pick("SRQ", draw)
            number = world.build(getattr, srq, "srq_num") if srq is not None else 0
            values["remote_srqn"] = num(world, draw, number or 0)
        if "ah" in names and qp.qp_type is QPType.UD:
            peer = world.pick("QP", draw)
            values["ah"] = self.handle("AH", rp.AH)
            values["remote_qpn"] = num(world, draw, getattr(peer, "qp_num", 0))
            values["remote_qkey"] = num(world, draw, rp.queuepair.DEFAULT_QKEY)
        if kind is rp.TSO:
            values["hdr"] = hostile.header(draw, draw.among(0, 14, 40, 54, 64, 70000), b"\xa1")
            values["mss"] = num(world, draw, draw.among(1, 64, 1000, 65535, 0))
        if kind is rp.BindMW:
            values |= self.bind()
        return self.build(kind, values)

    def handle(self, pool: str, kind: type) -> Any:
        draw = self.draw
        if draw.one_in(24):
            return draw.among(None, 5, hostile.posing(kind), object(), self.world.pick("CQ", draw))
        return self.world.pick(pool, draw)

    def bind(self) -> dict[str, Any]:
        world, draw = self.world, self.draw
        window, region = self.handle("MW", rp.MW), self.handle("MR", rp.MR)
        found: dict[str, Any] = {"mw": window, "mr": region}
        if isinstance(region, rp.MR) and isinstance(window, rp.MW):
            length = draw.among(region.length, 8, 0, region.length + 1)
            rkey = world.build(window.next_rkey)
            found |= {
                "rkey": num(world, draw, rkey or 0),
                "addr": num(world, draw, region.addr, region.addr - 64),
                "length": num(world, draw, length, 1 << 40),
                "mw_access_flags": num(world, draw, draw.among(2, 6, 14, 14, 0, 1)),
            }
            if rkey is not None:
                world.keep("targets", (region.addr, region.length, rkey), draw)
        return found

    def build(self, kind: Any, values: dict[str, Any]) -> Any:
        world, draw = self.world, self.draw
        if draw.one_in(25):
            self.inline = True
            name = draw.of([name for name in values if name != "sg_list"])
            if name == "send_flags" and not self.raw and not self.plain:
                name = "wr_id"
            choices = [values[name]]
            if isinstance(values[name], int):
                choices.append(int(values[name]) ^ _INLINE)
            if name != "send_flags" or self.checked or self.plain:
                kind = hostile.property_class(kind, name, acting(world, draw), choices)
                self.plain = False
        return world.build(kind, **values)

    def recv(self) -> Any:
        """Make a receive."""
        return self.build(rp.RecvWR, {"wr_id": wr_id(self.world, self.draw), "sg_list": self.sges()})

    def ops(self, tagged: bool) -> Any:
        """Make a tag-matching operation."""
        world, draw = self.world, self.draw
        values: dict[str, Any] = {"wr_id": wr_id(world, draw)}
        if draw.one_in(8):
            values["flags"] = num(world, draw, draw.below(5), 1, 3)
        kind = draw.among(rp.TagAdd, rp.TagAdd, rp.TagAdd, rp.TagDel, rp.TagSync)
        if kind is rp.TagAdd:
            values |= {
                "recv_wr_id": wr_id(world, draw), "sg_list": self.sges(),
                "tag": num(world, draw, draw.below(4)), "mask": draw.among((1 << 64) - 1, 3, 1),
            }  # fmt: skip
        elif kind is rp.TagDel:
            added = world.pick("tags", draw)
            values["handle"] = draw.among(
                getattr(added, "handle", None), getattr(added, "handle", None), None, 5,
                hostile.posing(rp.TagHandle),
            )  # fmt: skip
        wr = world.build(kind, **values)
        if kind is rp.TagAdd:
            world.keep("tags", wr, draw)
        return wr


def several(world: World, draw: Draw, make: Callable[[], Any]) -> Any:
    """Return one work request, or several in one of many forms."""
    kind = draw.below(24)
    if kind < 14:
        return make()
    count = draw.among(0, 1, 2, 3, 5, 20)
    act = acting(world, draw) if draw.one_in(2) else None
    if kind < 18:
        return [make() for _ in range(count)]
    if kind == 18:
        return tuple(make() for _ in range(count))
    if kind == 19:
        return (make() for _ in range(count))
    if kind == 20:
        return iter([make() for _ in range(count)])
    if kind == 21:
        return hostile.OnDemand(make, count, [count, count + 2, 0], act)
    if kind == 22:
        return hostile.Iterating(make, count, act)
    return draw.among(None, 5, [make(), None, make()], [[make()]], object(), hostile.posing(rp.Send))


# ---- operations -------------------------------------------------------------


def post_send(world: World, draw: Draw) -> None:
    qp = world.pick("QP", draw)
    if qp is None:
        return
    kinds = _EVERY_SEND if draw.one_in(12) else _SENDS[qp.qp_type]

    def make() -> Any:
        if draw.one_in(8):
            return world.pick("wrs", draw)
        maker = _Maker(world, draw, qp.checked)
        wr = maker.send(draw.of(kinds), qp)
        if maker.plain and draw.one_in(4):
            world.keep("wrs", wr, draw)
        return wr

    world.call(qp.post_send, several(world, draw, make))


def post_inline(world: World, draw: Draw) -> None:
    """Post INLINE, with data that nothing else holds."""
    qp = world.pick("QP", draw)
    if qp is None or qp.qp_type not in (QPType.RC, QPType.UC):
        return
    maker = _Maker(world, draw, qp.checked)
    maker.inline = True
    addr, _length, rkey = world.pick("targets", draw) or (0, 0, 0)
    sges = draw.among(maker.sges, maker.sge, maker.buffer, maker.sges)()
    flags = draw.among(10, SendFlags.INLINE | SendFlags.SIGNALED, np.uint64(10))
    wr = world.build(rp.RdmaWrite, sges, remote_addr=addr, rkey=rkey, send_flags=flags)
    world.call(qp.post_send, wr)


def post_recv(world: World, draw: Draw) -> None:
    qp = world.pick("QP", draw)
    if qp is None:
        return

    def make() -> Any:
        if draw.one_in(8):
            return world.pick("recvs", draw)
        maker = _Maker(world, draw, qp.checked)
        wr = maker.recv()
        if maker.plain and draw.one_in(4):
            world.keep("recvs", wr, draw)
        return wr

    world.call(qp.post_recv, several(world, draw, make))


def post_shared(world: World, draw: Draw) -> None:
    srq = world.pick("SRQ", draw)
    if srq is None:
        return
    maker = _Maker(world, draw, True)
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
    bind = _Maker(world, draw, qp.checked).bind()
    bind.pop("rkey", None)
    bind = {"addr": 0, "length": 8, **bind}
    world.call(qp.bind_mw, **bind, wr_id=wr_id(world, draw), send_flags=draw.among(2, 0, 3, 10))


def bind_right(world: World, draw: Draw) -> None:
    """Bind a window as it ought to be done, and let go of the region now and then."""
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
    if window.type is MWType.TYPE_1:
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
            most = draw.among(64, 64, 1, 3, 1000, 0, -1)
            found = world.call(cq.poll, num(world, draw, most, 1, 40))
            if found and most >= 0 and type(found) is not list:
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
        event = world.call(rp.get_async_event, context, draw.among(0, 0, 0.0003))
        if event is not None and event.event_type is rp.EventType.CQ_ERR:
            world.overrun = True


def in_asyncio(world: World, draw: Draw) -> None:
    """Wait in tasks of an event loop, and close and cancel what they wait for."""
    cqs = [cq for cq in (world.pick("CQ", draw), world.pick("CQ", draw)) if cq is not None]
    channel, context = world.pick("CompChannel", draw), world.pick("Context", draw)
    act = acting(world, draw)
    choices = [draw.below(8) for _ in range(4)]

    async def some() -> None:
        waits: list[Any] = [cq.completions(draw.among(1, 2, 0), 0.0005) for cq in cqs]
        if channel is not None and choices[0] < 4:
            waits.append(aio.get_cq_event(channel, 0.0005))
        if context is not None and choices[1] < 3:
            waits.append(aio.get_async_event(context, 0.0005))
        tasks = [asyncio.ensure_future(each) for each in waits]
        await asyncio.sleep(0)
        if choices[2] < 4:
            act()
        if choices[3] < 3 and tasks:
            tasks[0].cancel()
        for task in tasks:
            try:
                await task
            except asyncio.CancelledError:
                pass
            except Exception as error:
                failed.append(error)

    failed: list[Exception] = []

    def turn() -> None:
        # An interrupt in asyncio's own code would be asyncio's trouble.
        asyncio.run(some())

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
    maker = _Maker(world, draw, qp.checked)
    if draw.one_in(3):
        wrs, prepare_it = several(world, draw, maker.recv), qp.prepare_recv
    else:
        kinds = _SENDS[qp.qp_type]

        def make() -> Any:
            own = _Maker(world, draw, qp.checked)
            return own.send(draw.of(kinds), qp)

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
    # It may be INLINE, and nothing says whether its queue pair checks: no raw addresses.
    maker = _Maker(world, draw, False)
    maker.inline = True
    addr, length, rkey = world.pick("targets", draw) or (0, 0, 0)
    name = draw.among(
        "sg_list", "sg_list", "wr_id", "imm_data", "remote_addr", "rkey", "compare_add", "swap",
        "remote_qpn", "remote_qkey", "remote_srqn", "invalidate_rkey", "sg_list",
    )  # fmt: skip
    if not hasattr(prepared, name):
        return
    value = {
        "sg_list": maker.sges, "remote_addr": lambda: num(world, draw, addr + draw.below(length + 9), 8, 6),
        "rkey": lambda: num(world, draw, rkey, 1, 6), "wr_id": lambda: wr_id(world, draw),
        "compare_add": lambda: 0, "swap": lambda: 0,
    }.get(name, lambda: num(world, draw, draw.below(1 << 33), 1, 6))()  # fmt: skip
    world.call(setattr, prepared, name, value)
    world.build(getattr, prepared, name)


def make(world: World, draw: Draw) -> None:
    """Make a resource of some kind."""
    context, pd = world.pick("Context", draw), world.pick("PD", draw)
    kind = draw.below(20)
    if kind == 0 or context is None:
        world.keep("Context", world.call(rp.open_device, "soft0"), draw)
    elif kind < 3 or pd is None:
        world.keep("PD", world.call(rp.PD, context), draw)
    elif kind < 6:
        channel = world.pick("CompChannel", draw) if draw.one_in(2) else None
        cqe = num(world, draw, draw.among(1024, 1024, 1024, 64, 1), 5)
        options = {"channel": channel, "tm_info": draw.one_in(3), "comp_vector": 0}
        world.keep("CQ", world.call(rp.CQ, context, cqe, **options), draw)
    elif kind == 6:
        world.keep("CompChannel", world.call(rp.CompChannel, context), draw)
    elif kind < 11:
        make_mr(world, draw, pd)
    elif kind < 13:
        kinds = draw.among(MWType.TYPE_1, MWType.TYPE_2, 2, 3)
        world.keep("MW", world.call(rp.MW, pd, num(world, draw, kinds, 1)), draw)
    elif kind == 13:
        qp, peer = world.pick("QP", draw), world.pick("QP", draw)
        end = None if peer is None else world.call(peer.endpoint)
        if end is not None and qp is not None:
            path = world.call(qp.path_to, end)
            if path is not None:
                world.keep("AH", world.call(rp.AH, pd, path), draw)
    elif kind == 14:
        world.keep("XRCD", world.call(rp.XRCD, context), draw)
    elif kind < 17:
        make_srq(world, draw, pd, draw.among(SRQType.BASIC, SRQType.XRC, SRQType.TM))
    else:
        kinds = draw.among(QPType.RC, QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND, QPType.RAW_PACKET)
        if not world.clean or kinds in (QPType.RC, QPType.UC):
            shared = draw.among(None, None, SRQType.BASIC) if kinds is QPType.RC else None
            make_pair(world, draw, pd, kinds, shared)


def make_wrong(world: World, draw: Draw) -> None:
    """Make a resource of what it cannot be made of."""
    pd, context = world.pick("PD", draw), world.pick("Context", draw)
    cq, qp = world.pick("CQ", draw), world.pick("QP", draw)
    if pd is None or context is None or cq is None:
        return
    kind = draw.below(8)
    if kind < 3:
        wrong: Any = draw.among(
            b"readonly", 0, -1, None, "text", np.zeros(4, object), np.zeros((4, 4), np.uint8)[:, 1],
            memoryview(bytearray(64))[::2], bytearray(0), [], 1.5, object(), np.array([None, "x"]),
        )  # fmt: skip
        made = world.call(rp.MR, pd, wrong, draw.among(int(ALL), 1, 0, 1 << 40, -1, None))
        if made is not None:
            if isinstance(wrong, np.ndarray) and wrong.dtype == object:
                world.found("objects", None, "an array of objects was registered")
            world.keep("MR", made, draw)
    elif kind == 3:
        options = draw.among(
            {"max_send_wr": 1 << 20}, {"max_inline_data": 1 << 20}, {"max_send_sge": -1},
            {"max_recv_wr": num(world, draw, 4, 1 << 30, 1)}, {"port_num": 2}, {"max_tso_header": 9},
            {"gid_index": 77},
        )  # fmt: skip
        world.keep("QP", world.call(rp.QP, pd, QPType.RC, cq, **options), draw)
    elif kind == 4:
        world.call(rp.CQ, context, draw.among(0, -1, 1 << 30, 1 << 70), comp_vector=draw.below(2))
    elif kind == 5:
        world.call(rp.SRQ, pd, draw.among(0, 1 << 20, -1), draw.among(0, 1, 1000))
    elif kind == 6 and qp is not None:
        name = draw.among("qp_state", "path_mtu", "timeout", "nothing", "rq_psn", "dest_qp_num")
        world.call(qp.modify, **{name: num(world, draw, draw.below(70), 1, 2)})
    else:
        gid = rp.GID(bytes(draw.below(256) for _ in range(16)))
        attr = rp.AHAttr(dgid=gid, sl=num(world, draw, draw.below(20), 1, 6), sgid_index=draw.below(3))
        world.keep("AH", world.call(rp.AH, pd, attr), draw)


_CLOSED_MOST = ("Batch", "Batch", "MW", "QP", "AH", "MR", "MR", "MR", "CQ", "SRQ", "CompChannel")


def close(world: World, draw: Draw) -> None:
    """Close something, whether or not it is in use."""
    kind = draw.of(_CLOSED_MOST) if draw.below(8) else draw.among("PD", "XRCD", "Context")
    thing = world.pick(kind, draw)
    if thing is not None:
        world.call(thing.close)
        if draw.one_in(3):
            with contextlib.suppress(ValueError):
                world.pools[kind].remove(thing)


def drop(world: World, draw: Draw) -> None:
    """Let go of something: its finalizer may be what closes it."""
    kind = draw.of((*_CLOSED_MOST, "wrs", "sges"))
    pool = world.pools[kind]
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
    kind = draw.below(12)
    if kind < 5:
        # Most queue pairs are to be of use again.
        world.call(qp.to_reset)
        join(world, draw, qp, peer)
    elif kind < 10:
        verbs = (qp.to_err, qp.to_sqd, qp.to_rts, qp.to_reset, qp.to_init)
        world.call(verbs[kind - 5])
    elif kind == 10:
        world.call(qp.modify, qp_state=draw.of(tuple(QPState)))
    else:
        world.call(qp.to_rts)


def query(world: World, draw: Draw) -> None:
    """Ask for things that change nothing."""
    qp, cq, mr = (world.pick(kind, draw) for kind in ("QP", "CQ", "MR"))
    context, srq, mw = (world.pick(kind, draw) for kind in ("Context", "SRQ", "MW"))
    kind = draw.below(9)
    if kind == 0 and qp is not None:
        world.call(qp.query)
    elif kind == 1 and qp is not None:
        world.call(getattr, qp, draw.among("state", "outstanding", "gid"))
    elif kind == 2 and srq is not None:
        world.call(srq.query)
        world.call(srq.arm_limit, num(world, draw, draw.below(8), 1, 6))
    elif kind == 3 and context is not None:
        world.call(context.query_port, num(world, draw, draw.below(3), 1, 4))
        world.call(context.query_gid_table)
    elif kind == 4 and mw is not None:
        world.call(getattr, mw, "rkey")
        world.call(mw.next_rkey)
    elif kind == 5 and mr is not None:
        bounds = (draw.among(None, 0, -8, 1 << 70, "x"), draw.among(None, 8, -1, 1 << 64, 1.5))
        world.call(mr.__getitem__, slice(*bounds, draw.among(None, None, 1)))
    elif kind == 6 and mr is not None and int(mr.access) & 1:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            mr.buffer[:8] = ALPHABET[:8]
    elif kind == 7 and qp is not None:
        verb = qp.attach_mcast if draw.one_in(2) else qp.detach_mcast
        world.call(verb, draw.among("ff0e::1", "ff0e::2", "::1", b"x"))
    else:
        for thing in (qp, cq, mr, context, srq, mw):
            world.build(repr, thing)


def duplicate(world: World, draw: Draw) -> None:
    """Copy a resource: nothing may own a handle beside it."""
    thing = world.pick(draw.of(_CLOSED_MOST), draw)
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
        world.found("copy", error, f"a copy of a {type(thing).__name__} is refused by another error")
        return
    if found is not thing:
        world.found("copy", None, f"a {type(thing).__name__} was copied")


def assign(world: World, draw: Draw) -> None:
    """Assign to what says where a region is."""
    region = world.pick("MR", draw)
    if region is None:
        return
    name, value = draw.among(
        ("length", 1 << 40), ("addr", 8), ("end", 1 << 63), ("writable", True), ("access", 0)
    )
    with contextlib.suppress(AttributeError):
        setattr(region, name, value)
        world.found("assign", None, f"mr.{name} was assigned")


def change_shared(world: World, draw: Draw) -> None:
    """Change what posts may be looking at: lists of SGEs and buffers of inline data."""
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
                shared.append(_Maker(world, draw, False).buffer())
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
        wr.sg_list = _Maker(world, draw, False).buffer()


def reconnect(world: World, draw: Draw) -> None:
    """Connect a queue pair anew, so that something gets through."""
    pd = world.pick("PD", draw)
    a, b = world.pick("QP", draw), world.pick("QP", draw)
    if pd is None or a is None or b is None:
        return
    for qp in (a, b):
        world.call(qp.to_reset)
    join(world, draw, a, b)


def traffic(world: World, draw: Draw) -> None:
    """Post as applications do, so that most of it succeeds."""
    pair, region, target = (world.pick(kind, draw) for kind in ("pairs", "MR", "targets"))
    if pair is None or region is None or target is None or region.closed:
        return
    a, b = pair
    if a.closed or b.closed:
        return
    if world.call(getattr, a, "state") is not QPState.RTS or draw.one_in(12):
        world.call(a.to_reset)
        world.call(b.to_reset)
        join(world, draw, a, b)
    if b.qp_type in (QPType.UD, QPType.RAW_PACKET):
        region = max(world.pools["MR"], key=len, default=region)
    open_to_all = [mr for mr in world.pools["MR"] if int(mr.access) & 15 == 15 and not mr.closed]
    if open_to_all and draw.below(4):
        far = draw.of(open_to_all)
        target = far.addr, far.length, far.rkey
    kinds = _SENDS[a.qp_type]
    srq = b.srq if b.qp_type is not QPType.XRC_RECV else world.pick("SRQ", draw)
    for place in range(draw.among(2, 5, 20)):
        size = min(region.length, 4096 if b.qp_type is QPType.UD else 64)
        into = world.build(region.__getitem__, slice(0, size))
        sge = world.build(region.__getitem__, slice(8, draw.among(16, 16, 64)))
        if sge is None or into is None:
            return
        kind, recv = draw.of(kinds), rp.RecvWR(into, wr_id=place)
        if not issubclass(kind, rp.RdmaWrite | rp.RdmaRead | rp.BindMW):
            if srq is not None:
                world.call(srq.post_srq_recv, recv)
            elif b.qp_type is not QPType.XRC_RECV:
                world.call(b.post_recv, recv)
        flags = draw.among(2, 2, 2, 0, SendFlags.SIGNALED, 3, 10)
        if kind is rp.BindMW:
            bind_right(world, draw)
            continue
        fits = flags & ~1 if a.qp_type in (QPType.UC, QPType.UD, QPType.RAW_PACKET) else flags
        if kind in (rp.RdmaRead, rp.LocalInv, rp.TSO, *_ATOMICS):
            fits &= ~_INLINE
        values: dict[str, Any] = {"wr_id": place, "send_flags": fits}
        names = {field.name for field in fields(kind)}
        if "sg_list" in names:
            values["sg_list"] = sge._replace(length=8) if kind in _ATOMICS else sge
        if "remote_addr" in names:
            values |= {"remote_addr": (target[0] + 7) & ~7, "rkey": target[2]}
        if "ah" in names and a.qp_type is QPType.UD:
            values |= {
                "ah": world.pick("AH", draw), "remote_qpn": b.qp_num,
                "remote_qkey": rp.queuepair.DEFAULT_QKEY,
            }  # fmt: skip
        if "remote_srqn" in names and a.qp_type is QPType.XRC_SEND and srq is not None:
            values["remote_srqn"] = world.build(getattr, srq, "srq_num") or 0
        if kind is rp.TSO:
            values |= {"hdr": bytes(54), "mss": 16}
        if kind in (rp.LocalInv, rp.SendWithInv):
            window = world.pick("MW", draw)
            values["invalidate_rkey"] = 0 if window is None else world.build(getattr, window, "rkey") or 0
            if draw.below(4):
                continue
        world.call(a.post_send, kind(**values))
        if place % 4 == 3:
            poll(world, draw)
            if world.call(getattr, a, "state") is not QPState.RTS:
                break
    poll(world, draw)


_STEPS: tuple[tuple[Callable[[World, Draw], None], int], ...] = (
    (post_send, 30), (post_inline, 8), (post_recv, 10), (post_shared, 8), (bind_type_1, 2),
    (bind_right, 4), (poll, 14), (wait, 2), (notify, 3), (async_event, 1), (in_asyncio, 1),
    (prepare, 5), (use_batch, 7), (make, 10), (make_wrong, 2), (close, 8), (drop, 6), (collect, 2),
    (change_state, 4), (query, 5), (duplicate, 1), (assign, 1), (change_shared, 3), (reconnect, 3),
    (traffic, 20),
)  # fmt: skip
_WEIGHTED = tuple(what for what, weight in _STEPS for _ in range(weight))
_INNER = (
    close, close, close, drop, post_inline, post_send, poll, collect, change_state, change_shared,
    use_batch, traffic,
)  # fmt: skip


def step(world: World, draw: Draw) -> None:
    """Do one operation."""
    draw.of(_WEIGHTED)(world, draw)


def act(world: World, seed: int) -> None:
    """Do something from the inside of another operation, or raise."""
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
