"""What gc.get_objects() and frames show of the library's inside may be read and spoiled.

The library may then lose completions or raise anything, but the process goes on.
"""

from __future__ import annotations

import gc

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
