"""Waiting tasks, and queue pairs for them: shared by the asyncio tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType
from support import ALL, Pair

LIMIT = 120
"""Seconds that a wait may take; a lost wake-up shows up as this timeout."""


def write(pair: Pair, wr_id: int = 0) -> rp.RdmaWrite:
    return pair.wr(rp.RdmaWrite, pair.mine[:1], wr_id=wr_id)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function in its own event loop, for at most LIMIT."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT):
            return await main()

    return asyncio.run(limited())


async def settle() -> None:
    """Let every runnable task run until it blocks."""
    for _ in range(5):
        await asyncio.sleep(0)


def abandoned(wait: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """Start a waiting task in its own event loop, and close the loop while it waits."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        task = loop.create_task(wait())
        loop.run_until_complete(settle())
        assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


async def waiting(cq: rp.CQ, count: int = 1) -> asyncio.Task[list[rp.WC]]:
    """Start a task that waits for completions, and return it once it waits."""
    task = asyncio.create_task(cq.completions(count))
    await settle()
    assert not task.done()
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def sharing(context, stack, pd, channel, count):
    """Make queue pairs that are connected to themselves, each with a CQ on the channel."""
    mr = stack.enter_context(rp.MR(pd, 64, ALL))
    made = []
    for _ in range(count):
        cq = stack.enter_context(rp.CQ(context, 64, channel=channel))
        qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
        qp.connect(qp.endpoint())

        def post(wr_id, qp=qp):
            qp.post_send(rp.RdmaWrite(mr[:8], wr_id=wr_id, remote_addr=mr.addr + 32, rkey=mr.rkey))

        made.append((cq, post))
    return made
