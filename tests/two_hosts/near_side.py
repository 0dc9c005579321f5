"""The side of ``far_side`` that posts: sends and writes with a counter, and a read at the end."""

from __future__ import annotations

import json

import rdmapost as rp
from rdmapost import Access, QPType

from .far_side import SIZE, SLOTS, content
from .remote import LIMIT, Remote

BATCH = 16
WINDOW = 64


def exchange(device: rp.Context, far_device: str, count: int) -> None:
    """Post operations whose order and data the other machine checks; assert that all succeed."""
    with (
        Remote(
            "env", "PYTHONPATH=tests", "python", "-m", "two_hosts.far_side", far_device, str(count)
        ) as far,
        rp.PD(device) as pd,
        rp.CQ(device, 2 * WINDOW) as cq,
        rp.MR(pd, SLOTS * SIZE, Access.LOCAL_WRITE) as mr,
        rp.QP(pd, QPType.RC, cq, max_send_wr=WINDOW) as qp,
    ):
        there = json.loads(far.until("out", "endpoint"))
        far.write(f"{qp.endpoint()}\n")
        qp.connect(rp.Endpoint.parse(there["endpoint"]), rnr_retry=7)
        far.until("out", "ready")

        def operation(counter: int) -> rp.SendWR:
            slot = slice(counter % SLOTS * SIZE, (counter % SLOTS + 1) * SIZE)
            mr.buffer[slot] = content(counter)
            if counter % 2:
                return rp.SendWithImm(mr[slot], imm_data=counter, wr_id=counter)
            return rp.RdmaWriteWithImm(
                mr[slot],
                remote_addr=there["addr"] + slot.start,
                rkey=there["rkey"],
                imm_data=counter,
                wr_id=counter,
            )

        done: list[int] = []
        for start in range(0, count, BATCH):
            if start - len(done) > WINDOW - BATCH:
                done += [wc.check().wr_id for wc in cq.wait(BATCH, LIMIT)]
            qp.post_send([operation(counter) for counter in range(start, start + BATCH)])
        done += [wc.check().wr_id for wc in cq.wait(count - len(done), LIMIT)]
        assert done == list(range(count))
        assert json.loads(far.until("out", "received")) == {"received": count}

        with rp.MR(pd, SLOTS * SIZE, Access.LOCAL_WRITE) as read:
            qp.post_send(
                rp.RdmaRead(read[:], remote_addr=there["addr"], rkey=there["rkey"], wr_id=count)
            )
            (wc,) = cq.wait(1, LIMIT)
            assert wc.check().byte_len in (0, SLOTS * SIZE)
            last = range(count - SLOTS, count)
            for counter in (counter for counter in last if counter % 2 == 0):
                at = counter % SLOTS * SIZE
                assert bytes(read.buffer[at : at + SIZE]) == content(counter)
        far.write("\n")
        ended = far.ended()
    assert (ended.status, ended.err) == (0, "")
