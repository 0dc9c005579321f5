"""Code that users write, which type checkers accept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import assert_type

import rdmapost as rp


@dataclass(kw_only=True)
class Tagged(rp.RdmaWrite):
    """A work request with a field of the program's own."""

    tag: int = 0


def prepared(qp: rp.QP, mr: rp.MR) -> None:
    batch = qp.prepare([rp.RdmaWrite(mr[:5], remote_addr=1, rkey=2), rp.Send(mr[5:])])
    batch[1].remote_addr += 64
    batch[0].sg_list = mr[:5]
    batch[0].sg_list = [mr[:5], mr[5:10]]
    assert_type(batch[0].sg_list, tuple[rp.SGE, ...])
    assert_type(batch[0].wr_id, int)
    for item in batch:
        item.imm_data = 3
    batch.post()


def work_requests(qp: rp.QP, mr: rp.MR) -> None:
    assert_type(mr[:5], rp.SGE)
    qp.post_send(rp.Send(mr[:5], wr_id=1, send_flags=rp.SendFlags.SIGNALED | rp.SendFlags.INLINE))
    qp.post_send([rp.Send([mr[:5], rp.SGE(0, 8)]), rp.RdmaRead(mr[:5], remote_addr=mr.addr)])
    qp.post_send(rp.Send(rp.SGE.from_buffer(b"hello"), send_flags=rp.SendFlags.INLINE))
    qp.post_recv(rp.RecvWR(mr[:5], wr_id=2))
    tagged = Tagged(sg_list=mr[:5], remote_addr=1, rkey=2, tag=3)
    assert_type(tagged.tag, int)
    qp.post_send(tagged)


def columns(qp: rp.QP, mr: rp.MR) -> None:
    index = array("q", [3, 0, 2])
    to = rp.Blocks(mr.addr, index, 64)
    posted = qp.post_columns(rp.RdmaWrite, mr.blocks(index, 64), remote_addr=to, rkey=mr.rkey)
    assert_type(posted, int)


def states(qp: rp.QP, remote: rp.Endpoint) -> None:
    qp.modify(qp_state=rp.QPState.RTS, timeout=14)
    qp.connect(remote, timeout=18, min_rnr_timer=1)
    assert_type(qp.state, rp.QPState)
    assert_type(qp.context.attr, rp.DeviceAttr)


def completions(cq: rp.CQ) -> None:
    for wc in cq.wait(2, timeout=5):
        assert_type(wc, rp.WC)
        assert_type(wc.status, rp.WCStatus)
        if wc.opcode:
            print(wc.status, wc.opcode.name, wc.check().wr_id)


async def asynchronous(cq: rp.CQ) -> None:
    assert_type(await cq.completions(2, timeout=5), list[rp.WC])
    async for wc in cq:
        assert_type(wc, rp.WC)


def resources() -> None:
    with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        assert_type(context, rp.Context)
        with rp.MR(pd, bytearray(64)) as mr, rp.QP(pd, rp.QPType.RC, cq) as qp:
            assert_type(mr, rp.MR)
            assert_type(mr.buffer, memoryview)
            assert_type(mr.rkey, int)
            assert_type(qp, rp.QP)
