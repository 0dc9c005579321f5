"""ibv_rc_pingpong in Python. The other side may be this program or the C one.

    ibv_rc_pingpong -g 1                                           on one host
    python examples/rc_pingpong.py -d rxe0 10.0.0.1                on the other

soft0, the default, exists only within its process: with it, both sides are threads.
`rdmapost pingpong` does the same and more; this program shows what it takes.
"""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import ExitStack
from threading import Thread

import rdmapost as rp

RECV, SEND = 1, 2
RX_DEPTH = 500
MESSAGE = len("0000:000000:000000:" + 32 * "0") + 1  # with the terminating NUL


class Pingpong:
    """One side of the ping-pong."""

    def __init__(self, context: rp.Context, stack: ExitStack, args: argparse.Namespace) -> None:
        enter = stack.enter_context
        self.args = args
        pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context, RX_DEPTH + 1))
        self.mr = enter(rp.MR(pd, args.size))
        # At most one send is outstanding.
        self.qp = enter(
            rp.QP(
                pd,
                rp.QPType.RC,
                self.cq,
                max_send_wr=1,
                max_recv_wr=RX_DEPTH,
                max_send_sge=1,
                max_recv_sge=1,
                gid_index=args.gid_index,
            )
        )
        self.qp.to_init(access=0)
        self.receives = 0
        self.post_receives()

    def post_receives(self) -> None:
        missing = RX_DEPTH - self.receives
        self.qp.post_recv([rp.RecvWR(self.mr[:], wr_id=RECV)] * missing)
        self.receives += missing

    def address(self) -> bytes:
        """Return this side's address as the C program sends it: LID, QPN, PSN and GID."""
        mine = self.qp.endpoint()
        return b"%04x:%06x:%06x:%s\0" % (mine.lid, mine.qp_num, mine.psn, mine.gid.hex().encode())

    def connect(self, message: bytes) -> None:
        lid, qpn, psn, gid = message.rstrip(b"\0").decode().split(":")
        # Both sides use an MTU of 1024 by default.
        remote = rp.Endpoint(
            int(qpn, 16), int(psn, 16), rp.GID(bytes.fromhex(gid)), int(lid, 16), rp.MTU.MTU_1024
        )
        self.qp.connect(remote, timeout=14, retry_cnt=7, rnr_retry=7, max_rd_atomic=1)

    def serve(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            self.connect(sock.recv(MESSAGE, socket.MSG_WAITALL))
            sock.sendall(self.address())
            assert sock.recv(5, socket.MSG_WAITALL) == b"done\0"
        self.run(is_client=False)

    def dial(self, host: str, port: int) -> None:
        with socket.create_connection((host, port), timeout=10) as sock:
            sock.sendall(self.address())
            self.connect(sock.recv(MESSAGE, socket.MSG_WAITALL))
            sock.sendall(b"done\0")
        self.run(is_client=True)

    def run(self, *, is_client: bool) -> None:
        iters, start = self.args.iters, time.perf_counter()
        send = rp.Send(self.mr[:], wr_id=SEND)
        received = sent = 0
        # A side sends again once its last send has completed and been answered.
        pending = {RECV}
        if is_client:
            self.qp.post_send(send)
            pending.add(SEND)
        while received < iters or sent < iters:
            for wc in self.cq.wait(1):
                pending.discard(wc.check().wr_id)
                if wc.wr_id == SEND:
                    sent += 1
                else:
                    received += 1
                    self.receives -= 1
                    if self.receives <= 1:
                        self.post_receives()
            if not pending and sent < iters:
                self.qp.post_send(send)
                pending = {SEND, RECV}
        if is_client:
            seconds, sent_bytes = time.perf_counter() - start, 2 * iters * self.args.size
            print(f"{sent_bytes} bytes in {seconds:.2f} seconds = ", end="")
            print(f"{sent_bytes * 8 / seconds / 1e6:.2f} Mbit/sec")
            print(f"{iters} iters in {seconds:.2f} seconds = {seconds / iters * 1e6:.2f} usec/iter")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("host", nargs="?", help="the server's address; without it, be the server")
    parser.add_argument("-d", "--device", default="soft0")
    parser.add_argument("-p", "--port", type=int, default=18515)
    parser.add_argument("-s", "--size", type=int, default=4096)
    parser.add_argument("-n", "--iters", type=int, default=1000)
    parser.add_argument("-g", "--gid-index", type=int)
    args = parser.parse_args()
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(args.device))
        side = Pingpong(context, stack, args)
        if args.host is not None:
            side.dial(args.host, args.port)
            return
        with socket.create_server(("", args.port)) as listener:
            if context.kind != "soft":
                side.serve(listener)
                return
            other = Pingpong(context, stack, args)
            thread = Thread(target=other.serve, args=(listener,))
            thread.start()
            side.dial("127.0.0.1", args.port)
            thread.join()


if __name__ == "__main__":
    main()
