"""What gc.get_objects() and frames show of the library's inside may be read and spoiled.

The library may then lose completions or raise anything, but the process goes on.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from types import FrameType
from typing import Any

import pytest
from connected_pair import Rig
from isolated import isolated

import rdmapost as rp


@isolated(silent=True)
def test_collector_shows_no_incomplete_tuple(soft):
    """In the text of an error, which a subclass's __str__ makes."""
    looked = []

    class Window(rp.MW):
        def __str__(self) -> str:
            tuples = [each for each in gc.get_objects() if type(each) is tuple]
            looked.append(sum(len(repr(type(item))) for each in tuples for item in each))
            return "a window"

    rig = Rig(soft)
    mw = Window(rig.pd)
    mw.close()
    with pytest.raises(rp.ClosedError, match="a window is closed"):
        mw.rkey = 5
    assert looked
    rig.close()


@isolated(silent=True)
def test_completions_that_a_debugger_spoils_do_not_run_code_under_the_lock(soft):
    """A frame shows the list that is put back."""
    rig = Rig(soft)
    outcomes: list[object] = []

    class Status:
        def __index__(self) -> int:
            outcomes.append("called")
            with contextlib.suppress(Exception):
                outcomes.append(rig.cq.poll(1000))
            return 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and frame.f_code.co_name == "poll" and frame.f_locals["found"]:
            sys.setprofile(None)
            found = frame.f_locals["found"]
            status = Status()
            found += [(0, status, 0), (0, status), found[0]._replace(status=status), None, status]
            raise KeyError

    rig.a.post_send(rig.write(1))
    sys.setprofile(profile)
    with pytest.raises(KeyError):
        rig.cq.poll()
    with pytest.raises(rp.WaitTimeout):
        rig.cq.wait(900, 0.0)
    assert outcomes == []
    assert [wc.wr_id for wc in rig.cq.poll()] == [1, 1]
    rig.close()
