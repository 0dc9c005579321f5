"""Binding memory windows to a loopback's remote memory."""

from __future__ import annotations

from ..enums import Access, QPType
from ..posting.wr import BindMW
from ..resources.mw import MW
from .loopback import Loopback, Side

WINDOW_REGION = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.MW_BIND
"""The access flags that a region needs before a window for writes can be bound to it."""


def binder(pair: Loopback) -> Side:
    """Return the side that can bind windows; an XRC target has no send queue."""
    return pair.local if pair.local.qp.qp_type is QPType.XRC_SEND else pair.remote


def bind_wr(pair: Loopback, window: MW, offset: int, length: int, wr_id: int = 0) -> BindMW:
    """Make a work request that binds a window for writes to a range of the remote memory.

    Args:
        pair: the queue pairs.
        window: a window on the loopback's PD.
        offset, length: the range, in bytes.
        wr_id: comes back in the completion.
    """
    region = pair.remote.mr
    return BindMW(
        mw=window,
        rkey=window.next_rkey(),
        mr=region,
        addr=region.addr + offset,
        length=length,
        mw_access_flags=Access.REMOTE_WRITE,
        wr_id=wr_id,
    )
