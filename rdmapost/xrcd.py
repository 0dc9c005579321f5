"""XRC domains."""

from __future__ import annotations

import os

from ._arguments import expect, index
from ._binding import ffi, lib
from ._resource import Resource
from .device import Context

__all__ = ["XRCD"]


class XRCD(Resource, struct="ibv_xrcd"):
    """An XRC domain: which XRC targets may use which XRC shared receive queues.

    Args:
        context: an open device.
        fd: an open file, by whose inode other processes find the same domain;
            -1 for a domain that is nobody else's.
        oflags: os.O_CREAT makes the domain if the file has none; os.O_EXCL with
            it refuses one that is there already.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number does not fit.
        ClosedError: the device is closed.
        UnsupportedError: the device has no XRC.
        VerbsError: the device refused.

    See ibv_open_xrcd(3).
    """

    __slots__ = ("context",)

    _kind = "XRCD"
    _rank = 7

    def __init__(self, context: Context, fd: int = -1, oflags: int = os.O_CREAT) -> None:
        expect("context", context, Context)
        self.context = context
        init = ffi.new("struct ibv_xrcd_init_attr *")
        init.comp_mask = lib.IBV_XRCD_INIT_ATTR_FD | lib.IBV_XRCD_INIT_ATTR_OFLAGS
        try:
            init.fd, init.oflags = index("fd", fd), index("oflags", oflags)
        except OverflowError:
            raise ValueError(f"fd={fd} or oflags={oflags} does not fit into 32 bits") from None
        provider = context._provider
        self._make(provider.open_xrcd, (context, init), provider.close_xrcd, (context,))
