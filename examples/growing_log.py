"""A log in memory that outgrows its buffer while followers read it.

The writer appends records to a buffer that followers read over RDMA. A header in a region that
never moves says where the log is and how long it is. When the buffer is full, the writer copies the
log into a buffer twice the size and re-registers the region over the new buffer (`rereg`). If the
device cannot do this (Soft-RoCE), the writer creates a new region. Either way, the header tells
followers where the log is now.

    python examples/growing_log.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import random
import struct
import sys
from contextlib import ExitStack

import rdmapost as rp

ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_READ
HEADER = struct.Struct("=QQQ")  # address, rkey, bytes written
LENGTH = struct.Struct("=I")
FIRST, RECORDS = 4096, 2000


class Writer:
    """Appends records."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        self.enter = stack.enter_context
        self.pd, self.cq = self.enter(rp.PD(context)), self.enter(rp.CQ(context, 1))
        self.header = self.enter(rp.MR(self.pd, HEADER.size, ACCESS))
        self.log = self.enter(rp.MR(self.pd, FIRST, ACCESS))
        self.used = self.moves = 0
        self.refused = ""
        self.publish()

    def accept(self, follower: rp.QP) -> tuple[int, int]:
        qp = self.enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        qp.connect(follower.endpoint())
        follower.connect(qp.endpoint())
        return self.header.addr, self.header.rkey

    def append(self, record: bytes) -> None:
        end = self.used + LENGTH.size + len(record)
        if end > self.log.length:
            self.grow(max(2 * self.log.length, end))
        self.log.buffer[self.used : end] = LENGTH.pack(len(record)) + record
        self.used = end
        self.publish()

    def grow(self, size: int) -> None:
        larger = bytearray(size)
        larger[: self.used] = self.log.buffer[: self.used]
        try:
            self.log.rereg(memory=larger)
        except rp.UnsupportedError as error:
            self.refused = str(error)
            old, self.log = self.log, self.enter(rp.MR(self.pd, larger, ACCESS))
            old.close()
        self.moves += 1

    def publish(self) -> None:
        # The address and the rkey may be new each time.
        self.header.buffer[:] = HEADER.pack(self.log.addr, self.log.rkey, self.used)


class Follower:
    """Reads the records appended since its last read."""

    def __init__(self, context: rp.Context, writer: Writer, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.pd, self.cq = enter(rp.PD(context)), enter(rp.CQ(context))
        self.header = enter(rp.MR(self.pd, HEADER.size))
        self.qp = enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        self.where = writer.accept(self.qp)
        self.data = bytearray()

    def read(self, into: rp.MR, addr: int, rkey: int) -> bytes:
        self.qp.post_send(rp.RdmaRead(into[:], remote_addr=addr, rkey=rkey))
        self.cq.wait(1)[0].check()
        return bytes(into.buffer)

    def catch_up(self) -> None:
        addr, rkey, used = HEADER.unpack(self.read(self.header, *self.where))
        if (seen := len(self.data)) < used:
            with rp.MR(self.pd, used - seen) as fresh:
                self.data += self.read(fresh, addr + seen, rkey)

    def records(self) -> list[bytes]:
        found, at = [], 0
        while at < len(self.data):
            (length,) = LENGTH.unpack_from(self.data, at)
            at += LENGTH.size
            found.append(bytes(self.data[at : at + length]))
            at += length
        return found


def main(device: str = "soft0") -> None:
    generator = random.Random(1)
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        writer = Writer(context, stack)
        early, late = (Follower(context, writer, stack) for _ in range(2))
        written = [generator.randbytes(generator.randrange(1, 200)) for _ in range(RECORDS)]
        for number, record in enumerate(written):
            writer.append(record)
            if number % 10 == 0:
                early.catch_up()
        for follower in (early, late):
            follower.catch_up()
            if follower.records() != written:
                sys.exit("a follower's copy differs")
        if writer.refused:
            print("new regions:", writer.refused)
        print(f"{RECORDS} records, {writer.moves} moves: both followers have every byte")


if __name__ == "__main__":
    main(*sys.argv[1:])
