"""The short way of a work request that is plainly right.

Most work requests have SGEs of live regions, and flags that their opcode
takes.  C recognises them with a few comparisons, and posts them in the same
call (``_c/plain.c``, ``_c/poster.c``); what it has to know of the classes and
of a queue is said here.
Nothing is refused there: what is not plainly right goes the long way, which
looks at everything and can say what is wrong (``rules``, ``packing``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ._binding import door
from .address import AH
from .enums import QPType, SendFlags
from .memory import MR
from .packing import fields_of
from .rules import Limits
from .wr import (
    SGE,
    AtomicCmpAndSwp,
    AtomicFetchAndAdd,
    LocalInv,
    RdmaRead,
    RdmaWrite,
    RdmaWriteWithImm,
    RecvWR,
    Send,
    SendWithImm,
    SendWithInv,
)

__all__ = ["NONE", "Ways", "plain_receives", "plain_sends"]

_SENDS = (
    Send, SendWithImm, SendWithInv, RdmaWrite, RdmaWriteWithImm, RdmaRead,
    AtomicCmpAndSwp, AtomicFetchAndAdd, LocalInv,
)  # fmt: skip
_ATOMICS = frozenset({AtomicCmpAndSwp, AtomicFetchAndAdd})
_WRITE_LOCALLY = frozenset({RdmaRead, RecvWR}) | _ATOMICS
_ALL_FLAGS = sum(int(flag) for flag in SendFlags)
_NOT_INLINE = ~int(SendFlags.INLINE)
_UNLIMITED = (1 << 64) - 1
_MOST_SGES = 64
"""Where they are not checked; more go the long way."""


class Ways(NamedTuple):
    """What a queue takes the short way, as ``door.Poster`` wants it."""

    checked: bool
    datagram: bool
    pd: Any
    most: int
    """Bytes of one message."""
    max_sge: int
    kinds: tuple[tuple[int, int], ...]
    """Classes, each with the flags that may be set."""


NONE = Ways(False, False, None, 0, 0, ())
"""Nothing goes the short way."""


@functools.cache
def _kinds() -> Mapping[type, int]:
    """Tell C where the classes have what, once; return the numbers that it gives them."""
    door.describe_resources(SGE, MR, AH)
    kinds: Sequence[Any] = (*_SENDS, RecvWR)
    return {
        kind: door.describe_wr(
            kind, int(getattr(kind, "opcode", 0)), kind in _WRITE_LOCALLY, kind in _ATOMICS,
            tuple((name, at, size) for name, (at, size) in fields_of(kind).items()),
        )
        for kind in kinds
    }  # fmt: skip


def plain_sends(limits: Limits, checked: bool) -> Ways:
    """Return what a send queue takes the short way.

    Args:
        limits: what the queue pair was created with.
        checked: whether the work requests are checked.
    """
    datagram, found = limits.qp_type is QPType.UD, []
    kinds = _kinds()
    for kind in _SENDS:
        allowed = limits.flags.get(kind.opcode) if checked else _ALL_FLAGS
        # Drivers follow the pointer to an address handle whatever the opcode.
        if allowed is not None and (not datagram or "ah" in kind.__dataclass_fields__):
            found.append((kinds[kind], allowed & _NOT_INLINE))
    most_sges = limits.max_send_sge if checked else _MOST_SGES
    return Ways(checked, datagram, limits.pd, limits.max_msg_size, most_sges, tuple(found))


def plain_receives(limits: Limits, checked: bool) -> Ways:
    """Return what a receive queue takes the short way; the rest is as in plain_sends."""
    # A receive may be longer than any message.
    most_sges = limits.max_recv_sge if checked else _MOST_SGES
    return Ways(checked, False, limits.pd, _UNLIMITED, most_sges, ((_kinds()[RecvWR], 0),))
