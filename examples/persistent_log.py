"""A log in remote persistent memory: a record counts only once its commit is persistent.

An append takes one post of four work requests, and one completion: write the record, flush it,
write the log's new length atomically, and flush that. If the power fails in between, the length
still covers only whole records. The log is a mapped file, which stands for persistent memory (a DAX
mapping); on other memory, a flush can only make the data visible (GLOBAL). Software devices accept
any memory, and do not call msync(). A client that dies halfway shows what recovery finds.

FLUSH needs a device that supports it: soft0, a roce device, or, with libibverbs 45 or later,
Soft-RoCE from Linux 6.2 on.

    python examples/persistent_log.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import mmap
import random
import sys
import tempfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import rdmapost as rp

SIZE, RECORDS = 64 * 1024, 200
BEGIN = 64  # the log's length is in the first 8 bytes, alone in its cache line
OPS = rp.SendOps.FLUSH | rp.SendOps.ATOMIC_WRITE
ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE


class Offer(NamedTuple):
    """What a client must know."""

    addr: int
    rkey: int
    type: rp.FlushType


class Server:
    """Owns the memory; its CPU takes no part in appends."""

    def __init__(self, context: rp.Context, path: Path, stack: ExitStack) -> None:
        self.enter = stack.enter_context
        self.pd, self.cq = self.enter(rp.PD(context)), self.enter(rp.CQ(context, 1))
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), SIZE)
        try:
            self.type = rp.FlushType.PERSISTENT
            self.mr = rp.MR(self.pd, memory, ACCESS | rp.Access.FLUSH_PERSISTENT)
        except rp.VerbsError:
            # The device can flush, but this is not persistent memory.
            self.type = rp.FlushType.GLOBAL
            self.mr = rp.MR(self.pd, memory, ACCESS | rp.Access.FLUSH_GLOBAL)
        self.enter(self.mr)

    def accept(self, client: rp.QP) -> Offer:
        qp = self.enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        flushes = rp.Access.FLUSH_GLOBAL | rp.Access.FLUSH_PERSISTENT
        qp.connect(client.endpoint(), access=rp.Access.REMOTE_WRITE | flushes)
        client.connect(qp.endpoint())
        return Offer(self.mr.addr, self.mr.rkey, self.type)


class Log:
    """The only writer of the log."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.pd, self.cq = enter(rp.PD(context)), enter(rp.CQ(context))
        self.mr = enter(rp.MR(self.pd, 4096))
        self.qp = enter(rp.QP(self.pd, rp.QPType.RC, self.cq, send_ops_flags=OPS))
        self.end = BEGIN

    def append(self, payload: bytes, *, commit: bool = True) -> None:
        entry = len(payload).to_bytes(4) + zlib.crc32(payload).to_bytes(4) + payload
        self.mr.buffer[: len(entry)] = entry
        where = {"remote_addr": self.offer.addr + self.end, "rkey": self.offer.rkey}
        head = {"remote_addr": self.offer.addr, "rkey": self.offer.rkey}
        kind, end = self.offer.type, self.end + len(entry)
        steps: list[rp.SendWR] = [
            rp.RdmaWrite(self.mr[: len(entry)], **where, send_flags=0),
            rp.Flush(**where, length=len(entry), type=kind, send_flags=0),
            rp.AtomicWrite(**head, atomic_wr=end, send_flags=0),
            rp.Flush(**head, length=8, type=kind),
        ]
        if not commit:
            steps = [rp.RdmaWrite(self.mr[: len(entry)], **where)]
        self.qp.post_send(steps)
        # A queue pair's work requests take effect in order, so the last one's completion is enough.
        self.cq.wait(1)[0].check()
        self.end = end

    def connect(self, server: Server) -> None:
        self.offer = server.accept(self.qp)


def recover(path: Path) -> list[bytes]:
    """Return the committed records, as after a restart."""
    raw = path.read_bytes()
    end = int.from_bytes(raw[:8], sys.byteorder)
    found, at = [], BEGIN
    while at < end:
        length, checksum = int.from_bytes(raw[at : at + 4]), int.from_bytes(raw[at + 4 : at + 8])
        payload = raw[at + 8 : at + 8 + length]
        if zlib.crc32(payload) != checksum:
            sys.exit(f"the record at {at} is damaged")
        found.append(payload)
        at += 8 + length
    return found


def main(device: str = "soft0") -> None:
    generator = random.Random(1)
    records = [generator.randbytes(generator.randrange(1, 256)) for _ in range(RECORDS)]
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        path.write_bytes(BEGIN.to_bytes(8, sys.byteorder).ljust(SIZE, b"\0"))
        context = stack.enter_context(rp.open_device(device))
        try:
            log = Log(context, stack)
        except rp.UnsupportedError as error:
            sys.exit(str(error))
        log.connect(Server(context, path, stack))
        for record in records:
            log.append(record)
        log.append(b"the client dies before the commit", commit=False)
        if recover(path) != records:
            sys.exit("the recovered log differs")
        print(f"{RECORDS} records recovered, none of the uncommitted one")


if __name__ == "__main__":
    main(*sys.argv[1:])
