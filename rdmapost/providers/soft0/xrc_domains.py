"""XRC domains, and the files that they are associated with."""

from __future__ import annotations

import errno
import os
from typing import Any

from ..._binding import ffi
from ...errors import VerbsError
from ..software.device_queues import XRCDomain
from ..software.state import bound, table

domains: dict[tuple[int, int], XRCDomain] = table()
"""The XRC domains that are associated with a file, by the file's inode."""


def domain_of(xrcd: Any, name: str) -> XRCDomain:
    """Return the XRC domain behind a struct, for the named verb."""
    domain: XRCDomain = bound(ffi.cast("struct rp_soft_xrcd *", xrcd), name)
    return domain


def find_domain(init: Any) -> XRCDomain:
    """Return the existing XRC domain to open, or a new one (ibv_open_xrcd(3))."""
    if init.fd == -1:
        return XRCDomain(None)
    try:
        status = os.fstat(init.fd)
    except OSError as error:
        raise VerbsError("ibv_open_xrcd", error.errno or errno.EBADF) from None
    inode = status.st_dev, status.st_ino
    if inode in domains:
        if init.oflags & os.O_EXCL:
            raise VerbsError("ibv_open_xrcd", errno.EINVAL, "the file already has an XRC domain")
    elif not init.oflags & os.O_CREAT:
        raise VerbsError("ibv_open_xrcd", errno.EAGAIN, "the file has no XRC domain; pass O_CREAT")
    else:
        domains[inode] = XRCDomain(inode)
    return domains[inode]
