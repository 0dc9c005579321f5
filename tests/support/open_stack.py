"""A program that opens a device and everything on it."""

from __future__ import annotations

SETUP = """
import gc, os, sys, rdmapost as rp
ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE | rp.Access.REMOTE_READ

def make():
    context = rp.open_device(sys.argv[1])
    pd, cq = rp.PD(context), rp.CQ(context)
    mr = rp.MR(pd, bytearray(4096), ALL)
    a, b = rp.QP(pd, rp.QPType.RC, cq), rp.QP(pd, rp.QPType.RC, cq)
    a.connect(b.endpoint(), rnr_retry=1)
    b.connect(a.endpoint(), rnr_retry=1)
    b.post_recv([rp.RecvWR(mr[:64], wr_id=i) for i in range(5)])
    a.post_send(rp.Send(mr[64:128], send_flags=0))
    return {"context": context, "pd": pd, "cq": cq, "mr": mr, "a": a, "b": b}
"""
