"""The peer of near_side: receives everything and checks every byte.

    python -m two_hosts.far_side DEVICE COUNT

It prints its endpoint, reads its peer's, and exits with 0 when every operation has arrived in
order, with the right counter and data.
"""

from __future__ import annotations

import json
import sys

import rdmapost as rp
from rdmapost import Access, QPType

SIZE = 64
DEPTH = 256
"""Posted receives, and so the most sends by which the peer can be ahead."""
SLOTS = 2 * DEPTH
"""Slots for writes: so many that each is checked before the peer writes to it again."""
LIMIT = 30.0


def content(counter: int) -> bytes:
    """The bytes that operation number ``counter`` carries."""
    return b"%08x" % (counter * 2654435761 % 2**32) * (SIZE // 8)


def main(device: str, count: int) -> None:
    with (
        rp.open_device(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context, 2 * DEPTH) as cq,
        rp.MR(
            pd, SLOTS * SIZE, Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
        ) as mr,
        rp.MR(pd, DEPTH * SIZE, Access.LOCAL_WRITE) as landing,
        rp.QP(pd, QPType.RC, cq, max_recv_wr=DEPTH) as qp,
    ):
        print(json.dumps({"endpoint": str(qp.endpoint()), "addr": mr.addr, "rkey": mr.rkey}))
        sys.stdout.flush()
        qp.connect(rp.Endpoint.parse(sys.stdin.readline()))
        places = [landing[i * SIZE : (i + 1) * SIZE] for i in range(DEPTH)]
        qp.post_recv([rp.RecvWR(places[i], wr_id=i) for i in range(DEPTH)])
        print("ready", flush=True)
        expected = 0
        while expected < count:
            for wc in [*cq.wait(1, LIMIT), *cq.poll(DEPTH)]:
                wc.check()
                slot, place = expected % SLOTS, wc.wr_id
                if wc.opcode is rp.WCOpcode.RECV_RDMA_WITH_IMM:
                    found = bytes(mr.buffer[slot * SIZE : (slot + 1) * SIZE])
                else:
                    found = bytes(landing.buffer[place * SIZE : (place + 1) * SIZE])
                if (wc.imm_data, wc.byte_len, found) != (expected, SIZE, content(expected)):
                    sys.exit(f"instead of {expected} came {wc}: {found!r}")
                qp.post_recv(rp.RecvWR(places[place], wr_id=place))
                expected += 1
        print(json.dumps({"received": expected}), flush=True)
        # Keep the memory until the peer has read it.
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
