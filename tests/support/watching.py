"""Queues on a watched device, and numbers that count how often they are read."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType, SRQType
from support import ALL, LIMIT
from support.posting_tap import Tap, open_tap


class Watched:
    """Connected queue pairs on a watched device, and a matching list."""

    def __init__(self, stack: contextlib.ExitStack, *, checked: bool) -> None:
        context = stack.enter_context(rp.open_device("soft0"))
        self.checked = checked
        self.tap: Tap = open_tap(context)
        stack.callback(self.tap.close)
        self.pd = stack.enter_context(rp.PD(context))
        self.cq = stack.enter_context(rp.CQ(context, wc_flags=rp.WCExFlags.WITH_TM_INFO))
        self.mr = stack.enter_context(rp.MR(self.pd, 4096, ALL))
        self.qp = stack.enter_context(rp.QP(self.pd, QPType.RC, self.cq, checked=checked))
        self.qp.connect(self.qp.endpoint())
        self.srq = stack.enter_context(
            rp.SRQ(self.pd, srq_type=SRQType.TM, cq=self.cq, checked=checked)
        )

    def write(self, **fields: Any) -> Any:
        fields = {"remote_addr": self.mr.addr, "rkey": self.mr.rkey, **fields}
        return rp.RdmaWrite(fields.pop("sg_list", self.mr[:8]), **fields)

    def refused(self, wr: Any) -> str:
        """Post what is refused on its own; return why, with nothing posted."""
        with pytest.raises(rp.PostError) as caught:
            self.qp.post_send(wr)
        self.nothing_posted()
        return caught.value.reason

    def nothing_posted(self) -> None:
        assert self.tap.chains == []
        assert self.qp.outstanding == (0, 0)


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    with contextlib.ExitStack() as stack:
        yield Watched(stack, checked=request.param)


def closed_elsewhere(resource: Any) -> bool:
    """Close a resource in another thread; return whether it is closed in time."""
    thread = threading.Thread(target=resource.close)
    thread.start()
    thread.join(LIMIT)
    return not thread.is_alive() and resource.closed


class Counted:
    """A number that counts how often it is read, and then does something."""

    def __init__(self, value: Any, then: Callable[[], Any] = lambda: None) -> None:
        self.value, self.then, self.asked = value, then, 0

    def __index__(self) -> Any:
        self.asked += 1
        self.then()
        return self.value


class Int(int):
    """A subclass of int that lies about itself in every method."""

    def __index__(self) -> int:
        return 99

    def __int__(self) -> int:
        return 99


class Enumerated(enum.IntEnum):
    SEVEN = 7


class Mine(Exception):
    pass


def raises(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
