"""Create the resources, numbers and memory that operations use."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import hostile
from draw import Draw
from world import Memory, World, filled, write

import rdmapost as rp
from rdmapost import Access, QPType, SendOps, SRQType

__all__ = [
    "ALL",
    "FLUSHED",
    "NEVER",
    "acting",
    "closing",
    "join",
    "make_mr",
    "make_pair",
    "make_srq",
    "num",
    "wr_id",
]

NEVER = 31
"""timeout=31: a missing acknowledgement is noticed only after hours."""

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
FLUSHED = ALL | Access.FLUSH_GLOBAL | Access.FLUSH_PERSISTENT


def acting(world: World, draw: Draw) -> Callable[[], Any]:
    """Return a function that runs an operation from within another call."""
    seed = draw.bits()
    return lambda: world.act(seed)


def num(
    world: World, draw: Draw, value: int, other: int = 0, often: int = 24, near: Any = None
) -> Any:
    """Return a number, or now and then a hostile object in its place.

    Args:
        world, draw: the program's world, and the source of choices.
        value: the number.
        other: the number that the object may return instead.
        often: a hostile object takes its place once in this many times.
        near: a resource that the object may close when it is asked for its value.
    """
    if not draw.one_in(often):
        return value
    act = acting(world, draw)
    if near is not None and draw.one_in(2):
        act = closing(world, near)
    return hostile.number(draw, value, other, act)


def closing(world: World, thing: Any) -> Callable[[], Any]:
    """Return a function that closes a resource from within a call, and overwrites its memory."""

    def act() -> None:
        if hasattr(thing, "close"):
            world.call(thing.close)
            world.retire(thing)

    return act


def wr_id(world: World, draw: Draw) -> Any:
    """Return a wr_id, sometimes at the edges of the range."""
    return num(
        world, draw, draw.among(draw.below(1000), 0, (1 << 64) - 1, 1 << 63, (1 << 63) - 1), 1, 30
    )


def make_mr(world: World, draw: Draw, pd: Any, access: Any = None) -> None:
    """Register memory of some kind."""
    if access is None:
        access = draw.among(
            ALL,
            FLUSHED,
            FLUSHED | Access.MW_BIND,
            ALL | Access.MW_BIND,
            ALL | Access.ZERO_BASED,
            ALL | Access.MW_BIND | Access.ZERO_BASED,
            Access.LOCAL_WRITE,
            Access(0),
            Access.REMOTE_READ,
            Access.REMOTE_WRITE,
            ALL | Access.ON_DEMAND,
        )
    if draw.one_in(4):
        # Only the region refers to this memory, which is freed with it.
        size = draw.among(64, 256, 4096)
        loose = draw.among(bytearray(filled(size)), mmap.mmap(-1, size), size, size)
        region = world.keep("MR", world.call(rp.MR, pd, loose, int(access)), draw)
        if region is not None:
            write(region, filled(size))
            world.keep("targets", (region.addr, size, region.rkey), draw)
        return
    memory = Memory(draw.of(Memory.TYPES), draw.among(64, 256, 256, 4096))
    region = world.call(rp.MR, pd, memory.given(), num(world, draw, int(access), int(ALL), 40))
    world.memories.append(memory)
    if region is None:
        memory.abandoned()
        return
    memory.registered(region, not int(region.access) & Access.LOCAL_WRITE)
    # The memory outlives the region, but the key must not be valid any longer.
    world.keep("targets", (region.addr, memory.size, region.rkey), draw)
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
    if qp_type in (QPType.RC, QPType.XRC_SEND):
        both = SendOps.FLUSH | SendOps.ATOMIC_WRITE
        options["send_ops_flags"] = draw.among(both, both, SendOps.FLUSH, 0)
    if qp_type in (QPType.UD, QPType.RAW_PACKET):
        options["max_tso_header"] = draw.among(0, 64, 256)
    if qp_type is QPType.XRC_SEND:
        srq = make_srq(world, draw, pd, SRQType.XRC)
        xrcd = getattr(srq, "xrcd", None)
        a = world.call(rp.QP, pd, qp_type, cq, **options)
        b = world.call(rp.QP, None, QPType.XRC_RECV, xrcd=xrcd, **far)
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
    # In one thread nothing may depend on time, so that the seed alone replays the program.
    more = {"rnr_retry": 0, "retry_cnt": 0, "timeout": NEVER if world.serial else 1}
    if not world.serial and draw.one_in(2):
        more = {"rnr_retry": 1, "min_rnr_timer": 1, "retry_cnt": 1, "timeout": 1}
    remote = FLUSHED & ~Access.LOCAL_WRITE
    access = draw.among(remote, Access.REMOTE_WRITE, 0, int(ALL))
    for qp, end in ((a, ends[1]), (b, ends[0])):
        world.call(qp.connect, end, access=access, **more)
    if a.qp_type is QPType.UD:
        world.keep("AH", world.call(a.ah_to, ends[1]), draw)


def make_srq(world: World, draw: Draw, pd: Any, srq_type: SRQType) -> Any:
    """Make a shared receive queue."""
    options: dict[str, Any] = {"srq_type": srq_type, "checked": not draw.one_in(4)}
    if srq_type is not SRQType.BASIC:
        options["cq"] = world.pick("CQ", draw)
    if srq_type is SRQType.TM:
        options |= {"max_num_tags": draw.among(1, 4, 64), "max_ops": draw.among(1, 4, 64)}
    if srq_type is SRQType.XRC:
        options["xrcd"] = world.pick("XRCD", draw) or world.keep(
            "XRCD", world.call(rp.XRCD, pd.context), draw
        )
    srq = world.call(rp.SRQ, pd, draw.among(1, 8, 64), draw.among(1, 2, 4), **options)
    return world.keep("SRQ", srq, draw)
