"""Memory windows.

Binding one is a work request on a queue pair: ``QP.bind_mw`` (type 1, ibv_bind_mw) and ``BindMW``
(type 2).
"""

from __future__ import annotations

import operator

from .._arguments import expect, member, within
from ..enums import MWType
from ..errors import UnsupportedError
from .device import invalidated_of, provider_of
from .pd import PD
from .work_queues import UsedByWorkRequests

_RKEY = operator.attrgetter("rkey")


class MW(UsedByWorkRequests, struct="ibv_mw"):
    """A memory window: a key to part of a region, bound and unbound by work requests.

    A type 1 window is bound with ``qp.bind_mw`` (ibv_bind_mw(3)), a type 2 window by posting a
    BindMW. Close or unbind the window before you close the region that it is bound to.

    Args:
        pd: the protection domain.
        mw_type: type 1 or type 2; see MWType.

    Attributes:
        mw_type: its type.

    Raises:
        TypeError: an argument has the wrong type.
        ClosedError: the PD is closed.
        UnsupportedError: the device has no memory windows.
        VerbsError: the device has no more windows.

    See ibv_alloc_mw(3).
    """

    __slots__ = ("_index", "mw_type")

    _type_name = "MW"
    _rank = 0

    def __init__(self, pd: PD, mw_type: MWType = MWType.TYPE_2) -> None:
        expect("pd", pd, PD)
        self.pd = pd
        self.mw_type = member("mw_type", mw_type, MWType)
        provider = provider_of(pd.context)
        # The C code counts the binds and invalidations of each of the window's keys in these bytes
        # (_c/handles/windows.c).
        counts = bytes(256 * 16) if self.mw_type is MWType.TYPE_2 else None
        try:
            self._make(provider.alloc_mw, (pd, self.mw_type), provider.dealloc_mw, (pd,), counts)
        except UnsupportedError as error:
            error.hint = error.hint or f"{pd.context.name} has no windows of {self.mw_type.name}"
            raise
        self._index = self.rkey >> 8
        if counts is not None:
            invalidated_of(pd.context)[self._index] = counts

    def _forget(self) -> None:
        if hasattr(self, "_index"):
            invalidated_of(self.pd.context).pop(self._index, None)

    def __str__(self) -> str:
        # A ClosedError's message starts with this, too.
        rkey = self._peek("rkey")
        return self._type_name if rkey is None else f"MW (rkey {rkey:#x})"

    @property
    def rkey(self) -> int:
        """Its key; posting a bind changes its low 8 bits at once.

        If that bind completes with an error, set this back to the previous key (ibv_bind_mw(3)):
        the driver takes the key stored here as the one that the next bind replaces.

        Raises:
            TypeError: the new key is not an integer.
            ValueError: it is not in 0..2^32-1, or not a key of this window: only the low 8 bits
                change.
            ClosedError: the window is closed.
        """
        rkey: int = self._verb(_RKEY)
        return rkey

    @rkey.setter
    def rkey(self, rkey: int) -> None:
        rkey = within("rkey", rkey, 0, (1 << 32) - 1)
        if (rkey ^ self.rkey) & ~0xFF:
            raise ValueError(f"rkey={rkey:#x} is not a key of {self}: only the low 8 bits change")
        self._verb(setattr, "rkey", rkey)

    def next_rkey(self) -> int:
        """Return the rkey for the next bind: its low byte incremented (ibv_inc_rkey(3))."""
        rkey = self.rkey
        return rkey & ~0xFF | (rkey + 1) & 0xFF
