"""A datagram server that answers anyone who sends to it.

UD queue pairs are not connected: one of them serves any number of clients. A request's completion
has the sender's queue pair number, and its GRH has the sender's address: `AH.from_wc` uses both to
make an address handle for the reply.

    python examples/ud_reply.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import rdmapost as rp

QKEY = 0x1234
REQUESTS = 6


class Node:
    """A UD queue pair with one receive buffer and one send buffer."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        enter = self.enter = stack.enter_context
        self.pd = enter(rp.PD(context))
        self.sent, self.arrived = enter(rp.CQ(context)), enter(rp.CQ(context))
        self.mr = enter(rp.MR(self.pd, 512))
        self.receive = rp.RecvWR(self.mr[:256])
        self.qp = enter(rp.QP(self.pd, rp.QPType.UD, self.sent, self.arrived))
        self.qp.connect(qkey=QKEY)
        self.qp.post_recv(self.receive)

    def send(self, data: bytes, ah: rp.AH, qpn: int) -> None:
        end = 256 + len(data)
        self.mr.buffer[256:end] = data
        self.qp.post_send(rp.Send(self.mr[256:end], ah=ah, remote_qpn=qpn, remote_qkey=QKEY))
        self.sent.wait(1)[0].check()

    def next_datagram(self) -> tuple[rp.WC, rp.Datagram]:
        """Wait for a datagram, and repost its receive."""
        wc = self.arrived.wait(1)[0]
        datagram = wc.datagram(self.receive)
        self.qp.post_recv(self.receive)
        return wc, datagram


def serve(server: Node) -> int:
    """Answer REQUESTS requests, and return how many clients sent them."""
    # Making an address handle takes a system call, so keep one for each client.
    known: dict[tuple[rp.GID, int], rp.AH] = {}
    for _ in range(REQUESTS):
        wc, datagram = server.next_datagram()
        assert datagram.grh is not None
        client = datagram.grh.sgid, wc.src_qp
        if client not in known:
            known[client] = server.enter(rp.AH.from_wc(server.pd, wc, datagram.grh))
        server.send(datagram.payload.upper(), known[client], wc.src_qp)
    return len(known)


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        server = Node(context, stack)
        address = server.qp.endpoint()
        pool = stack.enter_context(ThreadPoolExecutor())
        serving = pool.submit(serve, server)

        for name in ("ann", "ben"):
            client = Node(context, stack)
            ah = stack.enter_context(client.qp.ah_to(address))
            for word in ("hello", "from", name):
                client.send(word.encode(), ah, address.qp_num)
                _, reply = client.next_datagram()
                print(word, "->", reply.payload.decode())
        print("served", serving.result(), "clients")


if __name__ == "__main__":
    main(*sys.argv[1:])
