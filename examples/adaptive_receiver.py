"""A receiver that adds receives and enlarges its CQ as the load grows, while messages arrive.

It starts with 8 receives for all of its senders. It takes completions in batches: under load, as
soon as half of the receives have completed; otherwise, whatever arrived within 50 ms. After each
batch under load it doubles its CQ and its SRQ, up to a limit. `cancel_waits` ends it.

Finally, a sender shows how a wait that cannot be satisfied reports the work request that failed.

    python examples/adaptive_receiver.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import random
import sys
from threading import Thread

import rdmapost as rp

FIRST, MOST, SIZE = 8, 128, 256
SENDERS, BURST, BURSTS = 4, 32, 8


class Receiver:
    """Receives messages from any number of senders."""

    def __init__(self, context: rp.Context) -> None:
        self.pd = rp.PD(context)
        self.cq = rp.CQ(context, FIRST)
        self.srq = rp.SRQ(self.pd, max_wr=FIRST)
        self.qps: list[rp.QP] = []
        self.buffers: list[rp.SGE] = []
        self.regions: list[rp.MR] = []
        self.messages: dict[int, list[bytes]] = {}
        self.rejected = 0
        self.add_receives(FIRST)

    def add_receives(self, count: int) -> None:
        mr = rp.MR(self.pd, count * SIZE)
        for i in range(count):
            self.buffers.append(mr[i * SIZE : (i + 1) * SIZE])
            self.regions.append(mr)
            self.post(len(self.buffers) - 1)

    def post(self, i: int) -> None:
        self.srq.post_srq_recv(rp.RecvWR(self.buffers[i], wr_id=i))

    def accept(self, sender: rp.QP) -> None:
        qp = rp.QP(self.pd, rp.QPType.RC, self.cq, srq=self.srq)
        qp.connect(sender.endpoint())
        # 7: wait as long as it takes if all receives are in use.
        sender.connect(qp.endpoint(), rnr_retry=7)
        self.qps.append(qp)
        self.messages[qp.qp_num] = []

    def run(self) -> None:
        while True:
            receives = len(self.buffers)
            try:
                batch = self.cq.wait(receives // 2, timeout=0.05, max_entries=receives)
                busy = True
            except rp.WaitTimeout:
                batch, busy = self.cq.poll(receives), False
            except rp.WaitCancelled:
                return
            for wc in batch:
                self.take(wc)
            if busy and receives < MOST:
                # The CQ first: each receive may produce a completion.
                self.cq.resize(2 * receives)
                self.srq.modify(max_wr=2 * receives)
                self.add_receives(receives)

    def take(self, wc: rp.WC) -> None:
        if wc.status:
            self.rejected += 1
        else:
            start = self.buffers[wc.wr_id].addr - self.regions[wc.wr_id].addr
            data = self.regions[wc.wr_id].buffer[start : start + wc.byte_len]
            self.messages[wc.qp_num].append(bytes(data))
        self.post(wc.wr_id)


class Sender:
    """Sends messages of random lengths and contents."""

    def __init__(self, context: rp.Context, seed: int) -> None:
        self.pd, self.cq = rp.PD(context), rp.CQ(context)
        self.mr = rp.MR(self.pd, BURST * SIZE)
        # Receives for answers would go to an SRQ: the queue pair's own are flushed if it fails.
        self.srq = rp.SRQ(self.pd)
        self.qp = rp.QP(self.pd, rp.QPType.RC, self.cq, srq=self.srq)
        draw = random.Random(seed)
        self.sent = [draw.randbytes(draw.randrange(1, SIZE + 1)) for _ in range(BURST * BURSTS)]

    def run(self) -> None:
        for first in range(0, len(self.sent), BURST):
            sends = []
            for i, message in enumerate(self.sent[first : first + BURST]):
                self.mr.buffer[i * SIZE : i * SIZE + len(message)] = message
                sends.append(rp.Send(self.mr[i * SIZE : i * SIZE + len(message)]))
            self.qp.post_send(sends)
            for wc in self.cq.wait(BURST, timeout=60):
                wc.check()

    def ask_too_much(self) -> rp.WC | None:
        """Send a message that is too long, and wait for its completion and for an answer."""
        self.qp.post_send(rp.Send(self.mr[: 2 * SIZE], wr_id=9))
        try:
            self.cq.wait(2, timeout=1)
        except rp.WaitTimeout as error:
            return error.failed
        return None


def main(device: str = "soft0") -> None:
    context = rp.open_device(device)
    try:
        run(context)
    finally:
        # This closes everything on the device, even if receives are still posted.
        context.close_all()


def run(context: rp.Context) -> None:
    receiver = Receiver(context)
    senders = [Sender(context, seed) for seed in range(SENDERS)]
    for sender in senders:
        receiver.accept(sender.qp)
    receiving = Thread(target=receiver.run)
    receiving.start()
    try:
        threads = [Thread(target=sender.run) for sender in senders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = senders[0].ask_too_much()
    finally:
        # for_good: the receiver may be between two waits at this moment.
        receiver.cq.cancel_waits(for_good=True)
        receiving.join()
    for wc in receiver.cq.poll():
        receiver.take(wc)

    if sorted(receiver.messages.values()) != sorted(sender.sent for sender in senders):
        sys.exit("messages are missing, damaged or out of order")
    count = sum(map(len, receiver.messages.values()))
    print(f"{count} messages of {SENDERS} senders: intact and in order")
    grew = len(receiver.buffers) > FIRST and receiver.cq.cqe >= len(receiver.buffers)
    print("grew under load:", grew)
    print("rejected:", receiver.rejected)
    print("failed:", failed and f"wr_id {failed.wr_id}, {failed.status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
