"""Ring all-reduce: every rank ends up with the sum of all ranks' arrays.

Each rank writes chunks to the next one with RDMA_WRITE_WITH_IMM: the data lands in place, and the
immediate tells the receiver which step has arrived. The first n - 1 steps add up the chunks;
n - 1 more steps distribute the sums.

    python examples/ring_allreduce.py [DEVICE [RANKS]]     (default: soft0 and 4)
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

import rdmapost as rp

SIZE = 1 << 16
ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
Floats = npt.NDArray[np.float32]


class Rank:
    """One member of the ring.

    Its array is cut into one chunk for each rank. The inbox has room for one chunk per step, so
    a fast neighbour never overwrites a chunk that has not been added yet.
    """

    def __init__(self, context: rp.Context, stack: ExitStack, rank: int, ranks: int, size: int):
        assert size % ranks == 0
        enter = stack.enter_context
        self.rank, self.ranks, self.chunk = rank, ranks, size // ranks
        self.data: Floats = np.zeros(size, np.float32)
        self.inbox: Floats = np.zeros((ranks - 1, self.chunk), np.float32)
        pd = enter(rp.PD(context))
        self.sent, self.arrived = enter(rp.CQ(context)), enter(rp.CQ(context))
        # numpy's memory is registered in place: nothing is copied on the way to the device.
        self.data_mr = enter(rp.MR(pd, self.data, ACCESS))
        self.inbox_mr = enter(rp.MR(pd, self.inbox, ACCESS))
        self.to_next = enter(rp.QP(pd, rp.QPType.RC, self.sent))
        self.from_previous = enter(rp.QP(pd, rp.QPType.RC, self.sent, self.arrived))

    def connect(self, following: Rank) -> None:
        """Connect to the next rank; on several machines these values travel over TCP."""
        self.to_next.connect(following.from_previous.endpoint(), rnr_retry=7)
        following.from_previous.connect(self.to_next.endpoint())
        self.next_data = following.data_mr.addr, following.data_mr.rkey
        self.next_inbox = following.inbox_mr.addr, following.inbox_mr.rkey

    def allreduce(self) -> None:
        ranks, last = self.ranks, self.ranks - 1
        # A write with immediate consumes a receive, which needs no buffer.
        self.from_previous.post_recv([rp.RecvWR() for _ in range(2 * last)])
        for step in range(last):
            mine = (self.rank - step) % ranks
            self.exchange(mine, self.next_inbox, step, step)
            theirs = (mine - 1) % ranks
            self.data[self.span(theirs)] += self.inbox[step]
        for step in range(last):
            mine = (self.rank + 1 - step) % ranks
            self.exchange(mine, self.next_data, mine, last + step)

    def exchange(self, chunk: int, there: tuple[int, int], place: int, step: int) -> None:
        """Write a chunk to the next rank, and wait for the one from the previous rank."""
        addr, rkey = there
        size = self.chunk * self.data.itemsize
        self.to_next.post_send(
            rp.RdmaWriteWithImm(
                self.data_mr[chunk * size : (chunk + 1) * size],
                remote_addr=addr + place * size,
                rkey=rkey,
                imm_data=step,
            )
        )
        wc = self.arrived.wait(1, timeout=60)[0].check()
        assert wc.imm_data == step
        self.sent.wait(1, timeout=60)[0].check()

    def span(self, chunk: int) -> slice:
        return slice(chunk * self.chunk, (chunk + 1) * self.chunk)


def main(device: str = "soft0", ranks: str = "4") -> None:
    count = int(ranks)
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        ring = [Rank(context, stack, i, count, SIZE // count * count) for i in range(count)]
        for i, rank in enumerate(ring):
            rank.connect(ring[(i + 1) % count])
        generator = np.random.default_rng(1)
        for rank in ring:
            rank.data[:] = generator.integers(0, 1000, rank.data.size)
        expected = np.sum([rank.data for rank in ring], axis=0)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(Rank.allreduce, ring))
        if not all(np.array_equal(rank.data, expected) for rank in ring):
            sys.exit("the ranks differ")
        print(f"{count} ranks, {expected.nbytes} bytes each: equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
