"""The work request classes."""

from __future__ import annotations

import rdmapost as rp

__all__ = ["OPS_CLASSES", "SEND_CLASSES"]

SEND_CLASSES = (
    rp.Send,
    rp.SendWithImm,
    rp.SendWithInv,
    rp.RdmaWrite,
    rp.RdmaWriteWithImm,
    rp.RdmaRead,
    rp.AtomicCmpAndSwp,
    rp.AtomicFetchAndAdd,
    rp.LocalInv,
    rp.BindMW,
    rp.TSO,
    rp.AtomicWrite,
    rp.Flush,
)
OPS_CLASSES = (rp.TagAdd, rp.TagDel, rp.TagSync)
