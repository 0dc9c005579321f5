"""Many worker processes behind one connection: XRC.

With RC, a client that talks to N processes on a host needs N connections. With XRC it needs only
one to the host, and each message names the shared receive queue of the process that it is for. The
processes find their common XRC domain through a file. The two workers here open the device
separately and share only that domain, as two processes would; they are threads, so that soft0 can
run them.

    python examples/xrc_workers.py [DEVICE]     (default: soft0; Soft-RoCE has no XRC)
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from contextlib import ExitStack
from threading import Thread

import rdmapost as rp

SIZE, RECEIVES, MESSAGES = 512, 16, 100


class Worker:
    """One of the processes: its own device, memory, SRQ and CQ."""

    def __init__(self, device: str, domain: str, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.context = enter(rp.open_device(device))
        with open(domain) as file:
            # The first process creates the domain; the others find it through the file.
            self.xrcd = enter(rp.XRCD(self.context, file.fileno(), os.O_CREAT))
        self.pd, self.cq = enter(rp.PD(self.context)), enter(rp.CQ(self.context))
        self.mr = enter(rp.MR(self.pd, RECEIVES * SIZE))
        self.srq = enter(
            rp.SRQ(self.pd, RECEIVES, srq_type=rp.SRQType.XRC, xrcd=self.xrcd, cq=self.cq)
        )
        self.received: list[bytes] = []
        for i in range(RECEIVES):
            self.post(i)

    def post(self, i: int) -> None:
        self.srq.post_srq_recv(rp.RecvWR(self.mr[i * SIZE : (i + 1) * SIZE], wr_id=i))

    def accept(self, client: rp.Endpoint, stack: ExitStack) -> rp.Endpoint:
        """Connect a client on behalf of all the host's processes; return the endpoint."""
        qp = stack.enter_context(rp.QP(None, rp.QPType.XRC_RECV, xrcd=self.xrcd))
        qp.connect(client)
        return qp.endpoint()

    def run(self) -> None:
        while len(self.received) < MESSAGES:
            for wc in self.cq.wait(1, timeout=30, max_entries=RECEIVES):
                start = wc.check().wr_id * SIZE
                self.received.append(bytes(self.mr.buffer[start : start + wc.byte_len]))
                self.post(wc.wr_id)


class Client:
    """Sends to any worker over one connection."""

    def __init__(self, device: str, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.context = enter(rp.open_device(device))
        self.pd, self.cq = enter(rp.PD(self.context)), enter(rp.CQ(self.context))
        self.mr = enter(rp.MR(self.pd, SIZE))
        self.qp = enter(rp.QP(self.pd, rp.QPType.XRC_SEND, self.cq))

    def send(self, message: bytes, srq_num: int) -> None:
        self.mr.buffer[: len(message)] = message
        self.qp.post_send(rp.Send(self.mr[: len(message)], remote_srqn=srq_num))
        self.cq.wait(1)[0].check()


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        domain = stack.enter_context(tempfile.NamedTemporaryFile()).name
        try:
            workers = [Worker(device, domain, stack) for _ in range(2)]
        except rp.UnsupportedError as error:
            sys.exit(str(error))
        client = Client(device, stack)
        # The numbers of the SRQs travel like endpoints: over TCP, for example.
        numbers = [worker.srq.srq_num for worker in workers]
        client.qp.connect(workers[0].accept(client.qp.endpoint(), stack), rnr_retry=7)

        threads = [Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        generator = random.Random(1)
        sent: list[list[bytes]] = [[], []]
        order = [0, 1] * MESSAGES
        generator.shuffle(order)
        for which in order:
            message = generator.randbytes(generator.randrange(1, SIZE + 1))
            client.send(message, numbers[which])
            sent[which].append(message)
        for thread in threads:
            thread.join()

        for number, worker in enumerate(workers):
            if worker.received != sent[number]:
                sys.exit(f"worker {number} did not receive what it was sent")
            print(f"worker {number}: {MESSAGES} messages intact")
        print("connections:", 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
