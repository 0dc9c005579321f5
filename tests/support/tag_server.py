"""A tag-matching server and its clients, shared by the tag matching tests."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import OpsFlags, QPType, SRQType, WCFlags, WCOpcode, WCStatus
from support import ALL

NO_TAG, RNDV, FIN, EAGER = range(4)
SYNC = OpsFlags.SIGNALED | OpsFlags.TM_SYNC
MATCHED = WCFlags.TM_MATCH | WCFlags.TM_DATA_VALID
NO_FLAGS = WCFlags(0)

RECEIVES = 32768
"""Offset of the server's untagged receives; tagged buffers come before it."""
SLOT = 1024


def tmh(opcode: int, tag: int = 0, app_ctx: int = 0) -> bytes:
    return struct.pack("!B3xIQ", opcode, app_ctx, tag)


class Server:
    """A tag-matching SRQ with its own CQ, and clients connected to it."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        pd: rp.PD,
        clients: int = 1,
        channel: rp.CompChannel | None = None,
        **options: Any,
    ) -> None:
        self.pd = pd
        context = pd.context
        self.cq = stack.enter_context(
            rp.CQ(context, 256, channel=channel, wc_flags=rp.WCExFlags.WITH_TM_INFO)
        )
        self.mr = stack.enter_context(rp.MR(pd, 65536, ALL))
        self.srq = rp.SRQ(pd, 16, 2, srq_type=SRQType.TM, cq=self.cq, **options)
        stack.callback(self.srq.close)
        self.send_cq = stack.enter_context(rp.CQ(context))
        self.clients = [Client(stack, self) for _ in range(clients)]
        self.client = self.clients[0]

    def add(self, tag: int, at: int = 0, size: int = SLOT, **fields: Any) -> rp.TagAdd:
        """Add an entry for a tag, and poll its completion; return its work request."""
        op = rp.TagAdd(tag=tag, sg_list=self.mr[at : at + size] if size else (), **fields)
        self.srq.post_srq_ops(op)
        if op.flags & OpsFlags.SIGNALED:
            wc = self.cq.wait(1)[0].check()
            assert (wc.wr_id, wc.opcode) == (op.wr_id, WCOpcode.TM_ADD)
        return op

    def post_receives(self, count: int = 1) -> None:
        """Post receives for unmatched messages, with wr_id from 500."""
        mr = self.mr
        self.srq.post_srq_recv(
            [
                rp.RecvWR(mr[RECEIVES + i * SLOT : RECEIVES + (i + 1) * SLOT], wr_id=500 + i)
                for i in range(count)
            ]
        )

    def bytes(self, size: int, at: int = 0) -> bytes:
        return bytes(self.mr.buffer[at : at + size])

    def one(self) -> rp.WC:
        """Return the only completion."""
        [wc] = self.cq.wait(1)
        assert self.cq.poll() == []
        return wc


@pytest.fixture
def small_server(stack: contextlib.ExitStack, pd: rp.PD) -> Server:
    """A server with room for 8 entries and 8 operations: ``server = small_server``."""
    return Server(stack, pd, max_num_tags=8, max_ops=8)


class Client:
    """A queue pair connected to a server, with its own memory and CQ."""

    def __init__(self, stack: contextlib.ExitStack, server: Server) -> None:
        pd = server.pd
        self.cq = stack.enter_context(rp.CQ(pd.context))
        self.mr = stack.enter_context(rp.MR(pd, 65536, ALL))
        self.qp = rp.QP(pd, QPType.RC, self.cq, max_inline_data=64)
        self.peer = rp.QP(pd, QPType.RC, server.send_cq, srq=server.srq)
        stack.callback(self.peer.close)
        stack.callback(self.qp.close)
        self.qp.connect(self.peer.endpoint(), rnr_retry=1)
        self.peer.connect(self.qp.endpoint(), rnr_retry=1)

    def post(self, message: bytes) -> None:
        self.mr.buffer[: len(message)] = message
        self.qp.post_send(rp.Send(self.mr[: len(message)] if message else (), wr_id=1))

    def send(self, message: bytes) -> WCStatus:
        """Send a message; return its completion."""
        self.post(message)
        [wc] = self.cq.wait(1)
        assert wc.wr_id == 1
        return wc.status

    def eager(self, tag: int, payload: bytes = b"", app_ctx: int = 0) -> WCStatus:
        return self.send(tmh(EAGER, tag, app_ctx) + payload)

    def rndv(self, tag: int, data: bytes, *, app_ctx: int = 9, more: bytes = b"", **wrong: int):
        """Make a rendezvous request for data at 8192."""
        self.mr.buffer[8192 : 8192 + len(data)] = data
        fields = {"va": self.mr.addr + 8192, "rkey": self.mr.rkey, "len": len(data)} | wrong
        return tmh(RNDV, tag, app_ctx) + struct.pack("!QII", *fields.values()) + more
