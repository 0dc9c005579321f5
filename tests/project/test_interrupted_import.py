"""Ctrl-C while the library is loaded: it can be loaded again, and then works."""

from __future__ import annotations

import pytest
from support import prints

LOAD = """
import sys

def load():
    import rdmapost
    rdmapost.QP
    rdmapost.list_devices()

def once(key, seen=set()):
    if key not in seen:
        seen.add(key)
        raise KeyboardInterrupt

def on_line(frame, event, arg):
    name = frame.f_globals.get("__name__", "")
    # The lines of a class body register nothing.
    if event == "line" and name.startswith("rdmapost") and "__qualname__" not in frame.f_locals:
        once((name, frame.f_lineno))
    return on_line

def on_return(frame, event, arg):
    name = frame.f_globals.get("__name__", "")
    if arg == sys.modules.pop and frame.f_code.co_name == "_load_unlocked":
        # The module has been run, and the importer now forgets it.
        name = frame.f_locals["spec"].name
    if event == "c_return" and name.startswith("rdmapost"):
        once((name, frame.f_lineno, arg.__name__))

def load_interrupted(begin, end):
    interrupts = 0
    while True:
        try:
            begin()
            try:
                load()
            finally:
                end()
        except KeyboardInterrupt:
            interrupts += 1
        else:
            return interrupts
"""

WRITE = """
import rdmapost as rp
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    with rp.QP(pd, rp.QPType.RC, cq) as a, rp.QP(pd, rp.QPType.RC, cq) as b:
        a.connect(b.endpoint()), b.connect(a.endpoint())
        with rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE) as mr:
            mr.buffer[:4] = b"data"
            a.post_send(rp.RdmaWrite(mr[:4], remote_addr=mr.addr + 8, rkey=mr.rkey))
            print(cq.wait()[0].check().opcode.name, bytes(mr.buffer[8:12]))
            print(type(a.gid.gid).__module__, rp.AH(pd, a.path_to(b.endpoint())).pd is pd)
"""


@pytest.mark.parametrize(
    "interrupted",
    [
        "(lambda: sys.settrace(on_line)), (lambda: sys.settrace(None))",
        "(lambda: sys.setprofile(on_return)), (lambda: sys.setprofile(None))",
    ],
    ids=["at_each_line", "after_each_call_of_c"],
)
def test_import_that_was_interrupted_succeeds_when_repeated(interrupted):
    """One process is interrupted at each moment in turn, and each time imports again."""
    said = prints(f"{LOAD}\nprint(load_interrupted({interrupted}) > 100)\n{WRITE}")
    assert said.splitlines() == ["True", "RDMA_WRITE b'data'", "rdmapost True"]
