"""Remote procedure calls in asyncio: one server, many clients, one shared receive queue.

The server posts 32 receives that all of its clients share, rather than a set for each client. A
request arrives in one of the buffers, and the reply is written over it and sent from there. When
the send has completed, the buffer is posted again.

    python examples/rpc_srq_asyncio.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import ExitStack
from typing import Any

import rdmapost as rp

BUFFER, BUFFERS, CLIENTS = 256, 32, 8


class Server:
    """Answers calls to its functions."""

    def __init__(self, context: rp.Context, stack: ExitStack, functions: dict[str, Any]) -> None:
        self.enter, self.functions = stack.enter_context, functions
        self.pd = self.enter(rp.PD(context))
        self.cq = self.enter(rp.CQ(context, 4 * BUFFERS))
        self.mr = self.enter(rp.MR(self.pd, BUFFERS * BUFFER))
        self.srq = self.enter(rp.SRQ(self.pd, max_wr=BUFFERS))
        self.qps: dict[int, rp.QP] = {}
        self.srq.post_srq_recv([self.receive(i) for i in range(BUFFERS)])

    def receive(self, i: int) -> rp.RecvWR:
        return rp.RecvWR(self.mr[i * BUFFER : (i + 1) * BUFFER], wr_id=i)

    def accept(self, client: str) -> str:
        # A reply is sent from a receive buffer, so a send queue needs at most one slot per buffer.
        qp = self.enter(rp.QP(self.pd, rp.QPType.RC, self.cq, srq=self.srq, max_send_wr=BUFFERS))
        qp.connect(rp.Endpoint.parse(client))
        self.qps[qp.qp_num] = qp
        return str(qp.endpoint())

    async def run(self) -> None:
        async for wc in self.cq:
            if wc.status:
                # The client has gone. Its queue pair is in ERR; the others are unaffected.
                if (qp := self.qps.pop(wc.qp_num, None)) is not None:
                    qp.close()
                self.srq.post_srq_recv(self.receive(wc.wr_id))
            elif wc.opcode is rp.WCOpcode.RECV:
                start = wc.wr_id * BUFFER
                request = bytes(self.mr.buffer[start : start + wc.byte_len])
                reply = self.answer(request)
                self.mr.buffer[start : start + len(reply)] = reply
                self.qps[wc.qp_num].post_send(
                    rp.Send(self.mr[start : start + len(reply)], wr_id=wc.wr_id)
                )
            else:
                self.srq.post_srq_recv(self.receive(wc.wr_id))

    def answer(self, request: bytes) -> bytes:
        call = json.loads(request)
        try:
            result = {"result": self.functions[call["method"]](*call["args"])}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps({"id": call["id"], **result}).encode()


class Client:
    """Calls the server's functions; several calls may be in flight."""

    def __init__(self, context: rp.Context, stack: ExitStack, depth: int = 4) -> None:
        enter = stack.enter_context
        self.pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context, 4 * depth))
        self.mr = enter(rp.MR(self.pd, 2 * depth * BUFFER))
        self.qp = enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        self.depth = depth
        self.free = asyncio.Semaphore(depth)
        self.slots = list(range(depth))
        self.ids = itertools.count()
        self.replies: dict[int, asyncio.Future[Any]] = {}

    def connect(self, server: str) -> None:
        # Wait for a receive if all of the server's are in use.
        self.qp.connect(rp.Endpoint.parse(server), rnr_retry=7)

    async def run(self) -> None:
        """Deliver the replies."""
        async for wc in self.cq:
            wc.check()
            if wc.opcode is rp.WCOpcode.RECV:
                start = wc.wr_id * BUFFER
                reply = json.loads(bytes(self.mr.buffer[start : start + wc.byte_len]))
                self.replies.pop(reply["id"]).set_result(reply)

    async def call(self, method: str, *args: Any) -> Any:
        async with self.free:
            slot, number = self.slots.pop(), next(self.ids)
            try:
                reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self.replies[number] = reply
                received = self.mr[slot * BUFFER : (slot + 1) * BUFFER]
                self.qp.post_recv(rp.RecvWR(received, wr_id=slot))
                request = json.dumps({"id": number, "method": method, "args": args}).encode()
                start = (self.depth + slot) * BUFFER
                self.mr.buffer[start : start + len(request)] = request
                self.qp.post_send(rp.Send(self.mr[start : start + len(request)]))
                answer = await reply
            finally:
                self.slots.append(slot)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


async def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        server = Server(context, stack, {"add": lambda a, b: a + b, "upper": str.upper})
        clients = [Client(context, stack) for _ in range(CLIENTS)]
        for client in clients:
            client.connect(server.accept(str(client.qp.endpoint())))
        running = [server.run(), *(client.run() for client in clients)]
        tasks = [asyncio.create_task(each) for each in running]

        print("2 + 3 =", await clients[0].call("add", 2, 3))
        print(await clients[1].call("upper", "shared receive queue"))
        sums = await asyncio.gather(
            *(client.call("add", i, i) for client in clients for i in range(25))
        )
        print(len(sums), "calls from", CLIENTS, "clients, total", sum(sums))
        try:
            await clients[0].call("divide", 1, 0)
        except RuntimeError as error:
            print("refused:", error)

        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
