"""What a fault plan does to packets.

This module has no clock and no sockets: packets and times go in, packets come out. What happens to
a packet depends only on the plan and on how many packets went in the same direction before it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._binding import native
from ..fault_plan import PacketFaults

_OVERTAKEN_SECONDS = 0.002
"""How long a packet waits for another one to overtake it."""
_HELD = 1024
"""The most packets that are held back at once; any others pass."""

_MASK = (1 << 64) - 1
_DRAWS = 8
"""Random numbers for each packet, some of them unused."""


class Fate(NamedTuple):
    """What happens to a packet.

    Attributes:
        drop, duplicate, delay, reorder: whether this happens to it.
        damage: a number that chooses the bit to flip, or -1.
    """

    drop: bool
    duplicate: bool
    delay: bool
    reorder: bool
    damage: int


def _draw(seed: int, number: int) -> int:
    """Return the random 64-bit number at an index of a seed's sequence (SplitMix64)."""
    mixed = seed + number * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def fate_of(plan: PacketFaults, direction: int, number: int) -> Fate:
    """Return what a plan does to a packet.

    Args:
        plan: the plan.
        direction: the direction's number; the directions' random choices are independent.
        number: how many packets went in that direction before this one.
    """
    seed = _draw(plan.seed, direction)
    draws = [_draw(seed, number * _DRAWS + n) for n in range(1, 7)]
    rates = plan.drop, plan.duplicate, plan.delay, plan.reorder, plan.corrupt
    drop, duplicate, delay, reorder, corrupt = [
        draw < rate * 2**64 for draw, rate in zip(draws, rates, strict=False)
    ]
    return Fate(drop, duplicate, delay, reorder, draws[5] if corrupt else -1)


class Held(NamedTuple):
    """A packet that is held back.

    Attributes:
        when: the time at which it may go.
        until: the number of a later packet, after which this one may go even before `when`;
            negative if there is none.
        item: the packet.
    """

    when: float
    until: int
    item: Any

    def may_go(self, now: float, number: int) -> bool:
        """Whether its time has come or packet `until` has passed; the latest packet is `number`."""
        return self.when <= now or 0 <= self.until <= number


_WHEN = operator.attrgetter("when")


class Direction(native.Record):
    """A device's packets in one direction.

    Attributes:
        number: identifies the direction; the directions' random choices are independent.
        plan: the plan that applies to them, or None.
        count: how many have gone in this direction under the plan.
        held: the packets being held back.
        is_straight: whether packets pass at once, unchanged (no plan, and no packet waits).
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.plan: PacketFaults | None = None
        self.count = 0
        self.held: tuple[Held, ...] = ()
        self.is_straight = True

    @property
    def due(self) -> float:
        """The time at which `release` next has something to do; infinity if no packet waits."""
        return min([each.when for each in self.held], default=math.inf)

    def begin(self, plan: PacketFaults | None) -> None:
        """Apply a plan from the next packet on; packets that are held stay held."""
        self.plan = plan
        self.count = 0
        self.held = tuple([each._replace(until=-1) for each in self.held])
        self.is_straight = plan is None and not self.held

    def admit(
        self, item: Any, now: float, damaged: Callable[[Any, int], Any]
    ) -> tuple[list[Any], bool]:
        """Apply the plan to the next packet.

        Args:
            item: the packet.
            now: the time.
            damaged: takes a packet and a number that chooses a bit; returns the packet with that
                bit flipped.

        Returns:
            The packets that arrive now, in order, and whether anything happened to this one.
        """
        if self.plan is None:
            return [item], False
        number = self.count
        self.count = number + 1
        fate = fate_of(self.plan, self.number, number)
        arrived = []
        if not fate.drop:
            if fate.damage >= 0:
                item = damaged(item, fate.damage)
            waits = (fate.delay or fate.reorder) and len(self.held) < _HELD
            if waits:
                time = self.plan.delay_by if fate.delay else _OVERTAKEN_SECONDS
                until = -1 if fate.delay else number + 1
                self.held = (*self.held, Held(now + time, until, item))
            else:
                arrived.append(item)
            if fate.duplicate:
                arrived.append(item)
        arrived += self._take(-math.inf, number)
        return arrived, any(fate[:4]) or fate.damage >= 0

    def release(self, now: float) -> list[Any]:
        """Return the packets that have waited long enough, earliest `when` first."""
        return self._take(now, -1)

    def _take(self, now: float, number: int) -> list[Any]:
        gone = [each for each in self.held if each.may_go(now, number)]
        if gone:
            self.held = tuple([each for each in self.held if not each.may_go(now, number)])
            self.is_straight = self.plan is None and not self.held
            gone.sort(key=_WHEN)
        return [each.item for each in gone]


def damage(packet: bytes, covered: bytes, number: int) -> bytes:
    """Return a packet with one bit flipped, so that its ICRC is wrong.

    Some bits are never flipped: those of a field that the ICRC does not cover, and those whose
    flipping would leave an ICRC that is correct for a different IPv4 identification.

    Args:
        packet: the packet, from its BTH to its ICRC.
        covered: its IP and UDP headers as the ICRC covers them.
        number: chooses the bit.
    """
    flipped = bytearray(packet)
    bits = 8 * len(packet)
    for bit in range(number, number + bits):
        at, mask = bit % bits // 8, 1 << bit % 8
        flipped[at] ^= mask
        if native.roce_id(flipped, 0, len(flipped), covered) < 0:
            break
        flipped[at] ^= mask
    return bytes(flipped)
