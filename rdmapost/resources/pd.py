"""Protection domains."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

from .._arguments import expect, member, within
from .._arguments import flags as flags_of
from .._binding import ffi
from ..enums import AdviseMRAdvice, AdviseMRFlags
from ..errors import UnsupportedError
from ..posting.wr import SGE
from .device import Context, provider_of
from .resource import Resource, struct_of

_MAX_U32, _MAX_U64 = (1 << 32) - 1, (1 << 64) - 1
_ALL_ADVICE_FLAGS = functools.reduce(operator.or_, AdviseMRFlags)


class PD(Resource, struct="ibv_pd"):
    """A protection domain; resources work together only if they share one (ibv_alloc_pd(3)).

    Args:
        context: an open device.

    Raises:
        TypeError: an argument has the wrong type.
        ClosedError: the device is closed.
        VerbsError: the device has no more PDs.
    """

    __slots__ = ("context",)

    _type_name = "PD"
    _rank = 8

    def __init__(self, context: Context) -> None:
        expect("context", context, Context)
        self.context = context
        provider = provider_of(context)
        self._make(provider.alloc_pd, (context,), provider.dealloc_pd, (context,))

    def advise_mr(
        self, advice: AdviseMRAdvice, sg_list: SGE | Sequence[SGE], flags: int = 0
    ) -> None:
        """Advise the device about memory of ON_DEMAND regions (ibv_advise_mr(3)).

        soft0 only checks the arguments: its memory is always present.

        Args:
            advice: what to do; see AdviseMRAdvice.
            sg_list: an SGE, or a sequence of them, over regions of this protection domain.
            flags: an AdviseMRFlags; without FLUSH, the call may return before the device has
                acted on the advice.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: advice or flags is invalid, or sg_list is empty.
            ClosedError: the PD or a region is closed.
            UnsupportedError: the device or libibverbs does not have this verb.
            VerbsError: the device refused.
        """
        known = member("advice", advice, AdviseMRAdvice)
        bits = flags_of("flags", flags, _ALL_ADVICE_FLAGS, "AdviseMRFlags")
        if not isinstance(sg_list, Iterable):
            raise TypeError(f"sg_list: expected SGEs, got {type(sg_list).__name__}")
        sges = [sg_list] if isinstance(sg_list, SGE) else list(sg_list)
        if not sges:
            raise ValueError("sg_list: expected at least one SGE")
        array = ffi.new("struct ibv_sge[]", len(sges))
        for entry, sge in zip(array, sges, strict=True):
            expect("sg_list", sge, SGE)
            if isinstance(sge.owner, Resource):
                struct_of(sge.owner)
            entry.addr = within("addr", sge.addr, 0, _MAX_U64)
            entry.length = within("length", sge.length, 0, _MAX_U32)
            entry.lkey = within("lkey", sge.lkey, 0, _MAX_U32)
        provider = provider_of(self.context)
        try:
            self._verb(provider.advise_mr, int(known), int(bits), array, len(sges))
        except UnsupportedError as error:
            error.hint = error.hint or f"{self.context.name} or the installed libibverbs lacks it"
            raise
