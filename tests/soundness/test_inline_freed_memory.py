"""INLINE reads the memory of its SGEs while nobody can take it away.

Freed memory is filled (PYTHONMALLOC=debug), so that what is read too late is seen.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.connected_pair import INLINE, Number, Rig
from support.isolated import isolated

import rdmapost as rp

PIECES = [bytes([65 + index]) * 16 for index in range(4)]


class OnDemand(Sequence[rp.SGE]):
    """Makes each SGE, and the bytes that it is over, when it is asked for."""

    def __len__(self) -> int:
        return len(PIECES)

    def __getitem__(self, index: Any) -> Any:
        return rp.SGE.from_buffer(bytes(bytearray(PIECES[index])))


def on_demand() -> Iterator[rp.SGE]:
    for piece in PIECES:
        yield rp.SGE.from_buffer(bytes(bytearray(piece)))


MAKERS: dict[str, Callable[[], Any]] = {
    "generator": on_demand,
    "sequence": OnDemand,
    "list": lambda: list(on_demand()),
}


@pytest.mark.parametrize("maker", MAKERS)
@isolated(silent=True, PYTHONMALLOC="debug")
def test_inline_data_of_temporary_sges_arrives(maker, device):
    """The SGEs may be gone when the post reads: not the bytes that they name."""
    rig = Rig(device)
    for turn in range(100):
        at = 1024 + 64 * (turn % 8)
        wrs = [
            rp.RdmaWrite(
                MAKERS[maker](), send_flags=INLINE, remote_addr=rig.mr.addr + at, rkey=rig.mr.rkey
            )
            for _ in range(1 + turn % 2)
        ]
        rig.mr.buffer[at : at + 64] = bytes(64)
        try:
            rig.a.post_send(wrs)
        except (TypeError, rp.PostError):
            # It may be refused, but not read when it is gone.
            assert maker == "generator"
            continue
        for wc in rig.cq.wait(len(wrs)):
            wc.check()
        assert bytes(rig.mr.buffer[at : at + 64]) == b"".join(PIECES)
    rig.close()


@isolated(silent=True, PYTHONMALLOC="debug")
def test_prepared_list_holds_the_memory_of_temporary_inline_sges(device):
    """Its SGEs were made on demand, too, and it is posted when they are gone."""
    rig = Rig(device)
    batch = rig.a.prepare(
        rp.RdmaWrite(
            OnDemand(), send_flags=INLINE, remote_addr=rig.mr.addr + 1024, rkey=rig.mr.rkey
        )
    )
    for _ in range(10):
        rig.mr.buffer[1024:1088] = bytes(64)
        batch.post()
        rig.cq.wait(1)[0].check()
        assert bytes(rig.mr.buffer[1024:1088]) == b"".join(PIECES)
    batch[0].sg_list = OnDemand()
    batch.post()
    rig.cq.wait(1)[0].check()
    assert bytes(rig.mr.buffer[1024:1088]) == b"".join(PIECES)
    batch.close()
    rig.close()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@isolated(silent=True)
def test_inline_post_racing_a_close_of_its_region_reads_no_freed_memory(checked, device):
    """The memory is unmapped as soon as the region is closed: a read would end the process."""
    sys.setswitchinterval(1e-6)
    rig = Rig(device, checked=checked, max_send_wr=512)
    for _ in range(60):
        memory = mmap.mmap(-1, 4096)
        memory[:8] = b"is there"
        mr = rp.MR(rig.pd, memory)
        wr = rp.RdmaWrite(
            [mr[:8], mr[8:16]], send_flags=INLINE, remote_addr=rig.mr.addr + 1024, rkey=rig.mr.rkey
        )
        started = threading.Event()
        raised: list[BaseException] = []

        def post(
            wr: rp.RdmaWrite = wr,
            raised: list[BaseException] = raised,
            started: threading.Event = started,
        ) -> None:
            try:
                while True:
                    rig.a.post_send([wr, wr])
                    started.set()
                    rig.cq.wait(2)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=post)
        thread.start()
        started.wait()
        while not mr.closed:
            try:
                mr.close()
            except rp.InUseError:
                continue
        memory.close()
        thread.join()
        assert isinstance(raised[0], rp.ClosedError | rp.PostError), raised
        assert "closed" in str(raised[0])
        rig.found.clear()
        rig.drain()
    rig.works()
    rig.close()


@pytest.mark.parametrize("field", ["wr_id", "remote_addr", "rkey", "send_flags"])
@isolated(silent=True)
def test_field_that_closes_the_region_of_its_inline_post_causes_no_read_of_freed_memory(
    field, device
):
    """Each time that it is read, also the last; then the post is refused, or has the bytes."""
    for turn in range(1, 7):
        rig = Rig(device)
        memory = mmap.mmap(-1, 4096)
        memory[:8] = b"is there"
        mr = rp.MR(rig.pd, memory)
        reads = 0

        def close(turn: int = turn, mr: rp.MR = mr, memory: mmap.mmap = memory) -> None:
            nonlocal reads
            reads += 1
            if reads == turn:
                try:
                    mr.close()
                except rp.InUseError:
                    return
                if mr.closed:
                    memory.close()

        fields = {
            "wr_id": 7,
            "remote_addr": rig.mr.addr + 1024,
            "rkey": rig.mr.rkey,
            "send_flags": int(INLINE),
        }
        fields[field] = Number(fields[field], close)  # type: ignore[assignment]
        reads = 0
        try:
            rig.a.post_send(rp.RdmaWrite(mr[:8], **fields))
        except (rp.PostError, TypeError, rp.ClosedError):
            assert rig.a.outstanding.send == 0
        else:
            rig.cq.wait(1)[0].check()
            assert bytes(rig.mr.buffer[1024:1032]) == b"is there"
        mr.close()
        rig.works()
        rig.close()
