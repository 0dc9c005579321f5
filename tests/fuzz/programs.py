"""A program: its plan, and how it runs."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from builders import ALL, make_mr, make_pair
from draw import Draw, mix
from operations import act, step
from world import Hostile, World, leftovers, renumber

import rdmapost as rp
from rdmapost import Access, MWType, QPType, SRQType

__all__ = ["Plan", "plan_of", "run"]

_FLAVOURS = ("rc", "rc", "rc", "uc", "ud", "xrc", "srq", "tm", "raw", "mixed")
_CLEAN = frozenset({"rc", "uc", "srq"})
"""Flavours in which the device writes no headers, only data, into memory."""


@dataclass(frozen=True)
class Plan:
    """One program: everything needed to replay it.

    Attributes:
        seed: 64 bits.
        threads: their number.
        flavour: the queue pairs with which it begins.
        interrupts: "", "counted" (the same moments every time) or "timer".
        steps: for each thread, the seeds of its operations.
    """

    seed: int
    threads: int
    flavour: str
    interrupts: str
    steps: tuple[tuple[int, ...], ...]


def plan_of(seed: int, index: int, max_threads: int) -> Plan:
    """Return the plan of the program with this index."""
    own = mix(seed, index)
    draw = Draw(own)
    threads = 1 if draw.one_in(2) else 1 + draw.below(max_threads)
    interrupts = ""
    if draw.one_in(4):
        interrupts = "counted" if threads == 1 else "timer"
    flavour = draw.of(_FLAVOURS)
    count = 20 + draw.below(80)
    return Plan(
        own,
        threads,
        flavour,
        interrupts,
        tuple(tuple(draw.bits() for _ in range(count // threads)) for _ in range(threads)),
    )


def run(
    plan: Plan,
    *,
    log: Callable[[str], None] | None = None,
    keep: frozenset[int] | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> World:
    """Run a program; return its world, with its findings.

    Args:
        plan: the program.
        log: gets every call as text.
        keep: which of its operations to run, by their place; default: all.
        tick: gets the number of calls made, now and then.
    """
    draw = Draw(mix(plan.seed, 1))
    _reset_state()
    before = leftovers()
    with World(plan.seed, log) as world:
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


def _reset_state() -> None:
    """Reset everything that earlier programs affect, so that a program runs the same way alone."""
    renumber()
    # Earlier objects affect when the garbage collector runs.
    gc.collect()
    gc.freeze()
    gc.collect()


def _run_steps(
    world: World, plan: Plan, keep: frozenset[int] | None, tick: Callable[[int], None]
) -> None:
    def work(which: int) -> None:
        for place, seed in enumerate(plan.steps[which]):
            if world.findings:
                return
            if keep is not None and place not in keep:
                continue
            if world.log is not None:
                world.log(f"[{which}:{place}]")
            try:
                step(world, Draw(seed))
            except Exception as error:
                # A bug of the fuzzer, or a Hostile that the library has let through.
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
    """Create the resources that nearly every operation needs."""
    context = world.keep("Context", world.call(rp.open_device, "soft0"), draw)
    pd = world.keep("PD", world.call(rp.PD, context), draw)
    world.keep(
        "CQ",
        world.call(rp.CQ, context, 1024, wc_flags=(flavour == "tm") * rp.WCExFlags.WITH_TM_INFO),
        draw,
    )
    for access in (ALL | Access.MW_BIND, ALL, ALL):
        make_mr(world, draw, pd, access)
    qp_types = {
        "rc": QPType.RC,
        "uc": QPType.UC,
        "ud": QPType.UD,
        "xrc": QPType.XRC_SEND,
        "raw": QPType.RAW_PACKET,
        "srq": QPType.RC,
        "tm": QPType.RC,
    }
    for name in ("rc", "ud", "xrc") if flavour == "mixed" else (flavour,):
        shared = {"srq": SRQType.BASIC, "tm": SRQType.TM}.get(name)
        make_pair(world, draw, pd, qp_types[name], shared)
    if flavour not in ("ud", "raw"):
        for mw_type in MWType:
            world.keep("MW", world.call(rp.MW, pd, mw_type), draw)
