"""XRC domains."""

from __future__ import annotations

import os

from .._arguments import expect, index, within
from .._binding import ffi, lib
from ..errors import UnsupportedError
from .device import Context, provider_of
from .resource import Resource


class XRCD(Resource, struct="ibv_xrcd"):
    """An XRC domain: its XRC_RECV queue pairs deliver to its XRC shared receive queues.

    Args:
        context: an open device.
        fd: a file descriptor; processes that open the same file share the domain.
            -1 creates a new domain that no other process shares, whatever oflags says.
        oflags: os.O_CREAT creates the domain if the file has none; with os.O_EXCL,
            the call fails if it already exists.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: fd is not in -1..2^31-1, or oflags has any other flag.
        ClosedError: the device is closed.
        UnsupportedError: the device has no XRC.
        VerbsError: the device refused.

    See ibv_open_xrcd(3).
    """

    __slots__ = ("context",)

    _type_name = "XRCD"
    _rank = 7

    def __init__(self, context: Context, fd: int = -1, oflags: int = os.O_CREAT) -> None:
        expect("context", context, Context)
        self.context = context
        fd, oflags = within("fd", fd, -1, (1 << 31) - 1), index("oflags", oflags)
        if oflags & ~(os.O_CREAT | os.O_EXCL):
            raise ValueError(f"oflags={oflags:#x} is not a combination of os.O_CREAT and os.O_EXCL")
        init = ffi.new("struct ibv_xrcd_init_attr *")
        init.comp_mask = lib.IBV_XRCD_INIT_ATTR_FD | lib.IBV_XRCD_INIT_ATTR_OFLAGS
        init.fd, init.oflags = fd, oflags
        provider = provider_of(context)
        try:
            self._make(provider.open_xrcd, (context, init), provider.close_xrcd, (context,))
        except UnsupportedError as error:
            error.hint = error.hint or f"{context.name} has no XRC"
            raise
