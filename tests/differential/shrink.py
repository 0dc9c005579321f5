"""Shrinking a failing program for as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .model import End, Move, Pair, Post, Program, Recv, Step

__all__ = ["shrink"]


def shrink(program: Program, fails: Callable[[Program], bool], *, seconds: float = 60.0) -> Program:
    """Return a program that fails, and that passes without any one of its parts.

    Args:
        program: a program that fails.
        fails: tells whether a smaller program fails.
        seconds: when to stop, because programs that hang take long.
    """
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > deadline:
                return program
            if fails(candidate):
                program = candidate
                smaller = True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield the programs that lack one part, the largest parts first."""
    steps, pairs = program.steps, program.pairs
    for size in (len(steps) // 2, 1):
        for at in range(0, len(steps), size or 1):
            if size:
                yield Program(pairs, steps[:at] + steps[at + size :])
    for at in range(len(pairs)):
        if len(pairs) > 1 and not any(step.qp // 2 == at for step in steps):
            moved = tuple(replace(s, qp=s.qp - 2) if s.qp > 2 * at else s for s in steps)
            yield Program(pairs[:at] + pairs[at + 1 :], moved)
    for at, step in enumerate(steps):
        for other in _smaller_steps(step):
            yield Program(pairs, (*steps[:at], other, *steps[at + 1 :]))
    for at, pair in enumerate(pairs):
        for other_pair in _smaller_pairs(pair):
            yield Program((*pairs[:at], other_pair, *pairs[at + 1 :]), steps)


def _smaller_steps(step: Step) -> Iterator[Any]:
    if isinstance(step, Move):
        return
    wrs: tuple[Any, ...] = step.wrs
    make: type[Post | Recv] = type(step)
    for at, wr in enumerate(wrs):
        if len(wrs) > 1:
            yield make(step.qp, wrs[:at] + wrs[at + 1 :])
        for other in _smaller_wrs(wr):
            yield make(step.qp, (*wrs[:at], other, *wrs[at + 1 :]))


def _smaller_wrs(wr: Any) -> Iterator[Any]:
    for at, sge in enumerate(wr.sges):
        yield replace(wr, sges=wr.sges[:at] + wr.sges[at + 1 :])
        for size in (1, 8):
            if sge.length > size:
                shorter = replace(sge, length=size)
                yield replace(wr, sges=(*wr.sges[:at], shorter, *wr.sges[at + 1 :]))
        if sge.offset:
            moved = replace(sge, offset=0)
            yield replace(wr, sges=(*wr.sges[:at], moved, *wr.sges[at + 1 :]))
        if sge.key:
            yield replace(wr, sges=(*wr.sges[:at], replace(sge, key=""), *wr.sges[at + 1 :]))
    for flag in getattr(wr, "flags", ()):
        yield replace(wr, flags=tuple(f for f in wr.flags if f != flag))
    at = getattr(wr, "at", None)
    if at is not None:
        if at.offset:
            yield replace(wr, at=replace(at, offset=0))
        if at.key:
            yield replace(wr, at=replace(at, key=""))
        if at.region != "b":
            yield replace(wr, at=replace(at, region="b"))


def _smaller_pairs(pair: Pair) -> Iterator[Pair]:
    if pair.rnr_retry:
        yield replace(pair, rnr_retry=0)
    for name in ("a", "b"):
        end = getattr(pair, name)
        for field in fields(End):
            if getattr(end, field.name) != field.default:
                yield replace(pair, **{name: replace(end, **{field.name: field.default})})
