"""A metrics collector that decides which agents may connect: a server with its own MR, SRQ and CQ.

Each agent says who it is when it connects (private data). The collector rejects agents
whose version it does not know, and tells each of the others which row of its table to use. An agent
writes its row over RDMA and reports the row's checksum in a message; all agents' messages arrive in
one SRQ and complete on one CQ. The same server runs first with threads, then in asyncio.

    python examples/collector.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import rdmapost as rp
from rdmapost import connect

ROW, AGENTS, VERSION = 4096, 6, 2
MESSAGE = 64
ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
TUNED = connect.QPOptions(max_inline_data=MESSAGE, timeout=16, rnr_retry=7)
LOCALHOST = "127.0.0.1"


class Collector:
    """The table, and where the agents' messages arrive."""

    def __init__(self, context: rp.Context) -> None:
        self.pd, self.cq = rp.PD(context), rp.CQ(context, 256)
        self.table = rp.MR(self.pd, AGENTS * ROW, ACCESS)
        self.inbox = rp.MR(self.pd, 2 * AGENTS * MESSAGE)
        self.srq = rp.SRQ(self.pd, max_wr=2 * AGENTS)
        self.rows: dict[int, int] = {}  # each queue pair's row
        self.intact: set[int] = set()
        for i in range(2 * AGENTS):
            self.post(i)

    def post(self, i: int) -> None:
        place = self.inbox[i * MESSAGE : (i + 1) * MESSAGE]
        self.srq.post_srq_recv(rp.RecvWR(place, wr_id=i))

    def admit(self, agent: connect.ServedClient) -> bytes:
        """Answer a new agent, in its thread; the server connects it afterwards."""
        hello = json.loads(agent.private_data)
        if hello["version"] != VERSION:
            raise rp.RdmaError(f"{hello['name']}: version {hello['version']} is not supported")
        self.rows[agent.qp.qp_num] = hello["row"]
        return json.dumps({"offset": hello["row"] * ROW, "size": ROW}).encode()

    def take(self, wc: rp.WC) -> None:
        """Check a row against the checksum that its agent sent."""
        start = wc.check().wr_id * MESSAGE
        checksum = int(bytes(self.inbox.buffer[start : start + wc.byte_len]))
        row = self.rows[wc.qp_num]
        # The row was written before the message was sent, so its data is already in memory.
        if zlib.crc32(self.table.buffer[row * ROW : (row + 1) * ROW]) == checksum:
            self.intact.add(row)
        self.post(wc.wr_id)


def hello(row: int, version: int = VERSION) -> bytes:
    return json.dumps({"name": f"agent {row}", "row": row, "version": version}).encode()


def row_and_message(peer: connect.Connection | connect.AsyncConnection) -> list[rp.SendWR]:
    """Return the work requests that write a new row and report it."""
    place = json.loads(peer.offer.private_data)
    peer.mr.buffer[:ROW] = os.urandom(ROW)
    checksum = rp.SGE.from_buffer(b"%d" % zlib.crc32(peer.mr.buffer[: place["size"]]))
    return [
        rp.RdmaWrite(peer.mr[:ROW], **peer.target(place["offset"]), send_flags=0),
        rp.Send(checksum, send_flags=rp.SendFlags.SIGNALED | rp.SendFlags.INLINE),
    ]


def with_threads(context: rp.Context, collector: Collector) -> str:
    def agent(row: int) -> None:
        with connect.dial(
            context, *where, private_data=hello(row), local_size=ROW, qp_options=TUNED
        ) as peer:
            peer.qp.post_send(row_and_message(peer))
            peer.wait()[0].check()

    with (
        connect.serve(
            context,
            LOCALHOST,
            0,
            mr=collector.table,
            srq=collector.srq,
            cq=collector.cq,
            qp_options=TUNED,
            on_connect=collector.admit,
        ) as server,
        ThreadPoolExecutor() as pool,
    ):
        where = server.address[:2]
        agents = [pool.submit(agent, row) for row in range(AGENTS)]
        for wc in collector.cq.wait(AGENTS, timeout=30):
            collector.take(wc)
        for each in agents:
            each.result()
        try:
            connect.dial(context, *where, private_data=hello(9, version=1)).close()
        except connect.ConnectError as error:
            return error.code
    return "admitted"


async def with_asyncio(context: rp.Context, collector: Collector) -> str:
    async def agent(row: int) -> None:
        async with await connect.adial(
            context, *where, private_data=hello(row), local_size=ROW, qp_options=TUNED
        ) as peer:
            peer.qp.post_send(row_and_message(peer))
            (await peer.cq.completions(1))[0].check()

    async with await connect.aserve(
        context,
        LOCALHOST,
        0,
        mr=collector.table,
        srq=collector.srq,
        cq=collector.cq,
        qp_options=TUNED,
        on_connect=collector.admit,
    ) as server:
        where = server.address[:2]
        agents = asyncio.gather(*(agent(row) for row in range(AGENTS)))
        for wc in await collector.cq.completions(AGENTS, timeout=30):
            collector.take(wc)
        await agents
        try:
            await (await connect.adial(context, *where, private_data=hello(9, version=1))).close()
        except connect.ConnectError as error:
            return error.code
    return "admitted"


def main(device: str = "soft0") -> None:
    context = rp.open_device(device)
    try:
        first, second = Collector(context), Collector(context)
        old = with_threads(context, first)
        print(f"threads: {len(first.intact)} rows intact, version 1 {old}")
        old = asyncio.run(with_asyncio(context, second))
        print(f"asyncio: {len(second.intact)} rows intact, version 1 {old}")
        if first.intact != second.intact or len(first.intact) < AGENTS:
            sys.exit("a row is damaged")
    finally:
        context.close_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
