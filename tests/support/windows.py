"""Binding memory windows."""

from __future__ import annotations

from typing import Any

import rdmapost as rp


def bind_wr(
    mw: rp.MW, mr: rp.MR, access: rp.Access = rp.Access.REMOTE_WRITE, **fields: Any
) -> rp.BindMW:
    """Return the work request that binds a window to a region's first 64 bytes."""
    return rp.BindMW(
        mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=64, mw_access_flags=access, **fields
    )
