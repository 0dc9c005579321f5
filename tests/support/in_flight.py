"""A pair whose work requests hold memory, and checks of whether they still do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

import rdmapost as rp


def why_open(close: Callable[[], None]) -> str:
    """Return why something cannot be closed, keeping nothing of the exception, which refers to
    it."""
    try:
        close()
    except rp.InUseError as error:
        return str(error)
    return ""


@pytest.fixture
def pair(connect) -> Any:
    return connect(max_send_wr=16)


def write_from(pair: Any, mr: rp.MR, wr_id: int = 0) -> rp.RdmaWrite:
    return rp.RdmaWrite(mr[:8], wr_id=wr_id, remote_addr=pair.theirs.addr, rkey=pair.theirs.rkey)


def gone(*regions: weakref.ref[rp.MR]) -> bool:
    return all(region() is None for region in regions)
