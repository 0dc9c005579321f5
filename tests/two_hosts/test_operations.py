"""10,000 operations between two machines: none is lost, duplicated or out of order."""

from __future__ import annotations

import json

import pytest

import rdmapost as rp
from rdmapost import Access, QPType

from .far_side import SIZE, SLOTS, content
from .remote import LIMIT, Remote

pytestmark = pytest.mark.two_hosts

COUNT = 10_000
BATCH = 16
WINDOW = 64


def test_ten_thousand_operations_arrive_once_in_order_with_their_data(device: rp.Context) -> None:
    """Sends and writes with a counter; the peer checks each, and a read checks the last."""
    with (
        Remote("env", "PYTHONPATH=tests", "python", "-m", "two_hosts.far_side", str(COUNT)) as far,
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
        for start in range(0, COUNT, BATCH):
            if start - len(done) > WINDOW - BATCH:
                done += [wc.check().wr_id for wc in cq.wait(BATCH, LIMIT)]
            qp.post_send([operation(counter) for counter in range(start, start + BATCH)])
        done += [wc.check().wr_id for wc in cq.wait(COUNT - len(done), LIMIT)]
        assert done == list(range(COUNT))
        assert json.loads(far.until("out", "received")) == {"received": COUNT}

        with rp.MR(pd, SLOTS * SIZE, Access.LOCAL_WRITE) as read:
            qp.post_send(
                rp.RdmaRead(read[:], remote_addr=there["addr"], rkey=there["rkey"], wr_id=COUNT)
            )
            (wc,) = cq.wait(1, LIMIT)
            assert wc.check().byte_len in (0, SLOTS * SIZE)
            last = range(COUNT - SLOTS, COUNT)
            for counter in (counter for counter in last if counter % 2 == 0):
                at = counter % SLOTS * SIZE
                assert bytes(read.buffer[at : at + SIZE]) == content(counter)
        far.write("\n")
        ended = far.ended()
    assert (ended.status, ended.err) == (0, "")
