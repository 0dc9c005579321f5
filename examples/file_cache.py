"""A cache of a remote node's files: read-only mappings that clients read block by block.

The server maps its files read-only and registers the mappings directly: clients read the kernel's
page cache, and nothing can write there, not even the server's device. A client fetches the blocks
that it lacks, several at a time, and keeps the most recently used ones.

    python examples/file_cache.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import rdmapost as rp

BLOCK, SLOTS, WINDOW = 4096, 64, 16
SIZES = {"index": 3 * BLOCK, "pages": 40 * BLOCK + 1234, "note": 17}


class Offer(NamedTuple):
    """What a client must know about a file."""

    addr: int
    rkey: int
    size: int


class Server:
    """Maps the files of a folder, and lets clients read them."""

    def __init__(self, context: rp.Context, folder: Path, stack: ExitStack) -> None:
        self.enter = stack.enter_context
        self.pd = self.enter(rp.PD(context))
        self.cq = self.enter(rp.CQ(context, 1))  # nothing ever completes here
        self.regions = {path.name: self.register(path) for path in folder.iterdir()}

    def register(self, path: Path) -> rp.MR:
        with path.open("rb") as file:
            shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            try:
                return self.enter(rp.MR(self.pd, shared, rp.Access.REMOTE_READ))
            except rp.VerbsError as error:
                if error.errno != errno.EFAULT:
                    raise
            # Before Linux 6.2, a device cannot pin a shared mapping that is read-only. A private
            # one is a copy, which does not reflect later changes to the file.
            private = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
            return self.enter(rp.MR(self.pd, private, rp.Access.REMOTE_READ))

    def accept(self, client: rp.QP) -> dict[str, Offer]:
        qp = self.enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        qp.connect(client.endpoint())
        client.connect(qp.endpoint())
        return {name: Offer(mr.addr, mr.rkey, len(mr)) for name, mr in self.regions.items()}


class Client:
    """Reads files through a cache of blocks."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.pd, self.cq = enter(rp.PD(context)), enter(rp.CQ(context))
        self.mr = enter(rp.MR(self.pd, SLOTS * BLOCK))
        self.qp = enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        self.files: dict[str, Offer] = {}
        self.cached: OrderedDict[tuple[str, int], int] = OrderedDict()  # slots, by block
        self.free = list(range(SLOTS))
        self.fetched = 0

    def read(self, name: str) -> bytes:
        file = self.files[name]
        data = bytearray()
        for start in range(0, file.size, WINDOW * BLOCK):
            offsets = range(start, min(start + WINDOW * BLOCK, file.size), BLOCK)
            self.fetch(name, [offset for offset in offsets if (name, offset) not in self.cached])
            for offset in offsets:
                self.cached.move_to_end((name, offset))
                slot = self.cached[name, offset] * BLOCK
                data += self.mr.buffer[slot : slot + min(BLOCK, file.size - offset)]
        return bytes(data)

    def fetch(self, name: str, offsets: list[int]) -> None:
        """Read blocks that are not in the cache, all of them at once."""
        file, reads = self.files[name], []
        for offset in offsets:
            slot = self.free.pop() if self.free else self.cached.popitem(last=False)[1]
            self.cached[name, offset] = slot
            into = self.mr[slot * BLOCK : slot * BLOCK + min(BLOCK, file.size - offset)]
            reads.append(rp.RdmaRead(into, remote_addr=file.addr + offset, rkey=file.rkey))
        self.qp.post_send(reads)
        for wc in self.cq.wait(len(reads)):
            wc.check()
        self.fetched += len(reads)

    def try_to_write(self, name: str) -> rp.WCStatus:
        file = self.files[name]
        self.qp.post_send(rp.RdmaWrite(self.mr[:8], remote_addr=file.addr, rkey=file.rkey))
        return self.cq.wait(1)[0].status


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contents = {name: os.urandom(size) for name, size in SIZES.items()}
        for name, content in contents.items():
            (folder / name).write_bytes(content)

        context = stack.enter_context(rp.open_device(device))
        server, client = Server(context, folder, stack), Client(context, stack)
        client.files = server.accept(client.qp)
        for turn in ("first", "second"):
            before = client.fetched
            for name, content in contents.items():
                if client.read(name) != content:
                    sys.exit(f"{name} is damaged")
            print(f"{turn} reading of {len(contents)} files: {client.fetched - before} blocks")
        print("writing:", client.try_to_write("index"))
        if any((folder / name).read_bytes() != content for name, content in contents.items()):
            sys.exit("a file has changed")


if __name__ == "__main__":
    main(*sys.argv[1:])
