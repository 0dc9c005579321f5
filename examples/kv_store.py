"""A key-value store with one-sided operations: clients read and write the server's memory.

The server registers a table and hands out its address and rkey; after that its CPU does nothing. A
client reads a slot with an RDMA read. To change a slot, it locks the slot with a compare-and-swap
and writes the new contents, which also unlocks the slot.

    python examples/kv_store.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import sys
import zlib
from contextlib import ExitStack
from threading import Thread
from typing import NamedTuple

import rdmapost as rp

KEY, VALUE = 16, 32
SLOT = 8 + 8 + KEY + VALUE  # version, checksum, key, value
SLOTS = 64
LAST = (b"alice 99", b"bob 99")
ACCESS = (
    rp.Access.LOCAL_WRITE | rp.Access.REMOTE_READ | rp.Access.REMOTE_WRITE | rp.Access.REMOTE_ATOMIC
)


class Offer(NamedTuple):
    """What a client must know; send it over TCP, for example."""

    endpoint: str
    addr: int
    rkey: int


class Server:
    """Holds the table, and a queue pair for each client."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        self.enter = stack.enter_context
        self.pd = self.enter(rp.PD(context))
        self.cq = self.enter(rp.CQ(context, 1))  # nothing ever completes here
        self.table = self.enter(rp.MR(self.pd, SLOTS * SLOT, ACCESS))

    def accept(self, client: str) -> Offer:
        qp = self.enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        qp.connect(rp.Endpoint.parse(client))
        return Offer(str(qp.endpoint()), self.table.addr, self.table.rkey)


class Client:
    """Reads and writes the server's table."""

    def __init__(self, context: rp.Context, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.pd = enter(rp.PD(context))
        self.cq = enter(rp.CQ(context))
        self.mr = enter(rp.MR(self.pd, SLOT + 8))
        self.qp = enter(rp.QP(self.pd, rp.QPType.RC, self.cq))
        self.word = self.mr[SLOT : SLOT + 8]  # where an atomic puts the previous value

    def connect(self, offer: Offer) -> None:
        self.qp.connect(rp.Endpoint.parse(offer.endpoint))
        self.addr, self.rkey = offer.addr, offer.rkey

    def get(self, key: str) -> bytes | None:
        name = padded(key, KEY)
        for slot in probe(name):
            version, found, value = self._read(slot)
            if found == name:
                return value.rstrip(b"\0")
            if version == 0:
                return None  # never used, so the key is not in the table
        return None

    def put(self, key: str, value: bytes) -> None:
        name = padded(key, KEY)
        for slot in probe(name):
            while True:
                version, found, _ = self._read(slot)
                if version and found != name:
                    break  # another key's slot: try the next one
                if self._swap(slot, version, version + 1):
                    self._write(slot, version + 2, name + value.ljust(VALUE, b"\0"))
                    return
        raise RuntimeError("the table is full")

    def _read(self, slot: int) -> tuple[int, bytes, bytes]:
        """Read a slot; retry if a writer has locked it or changes it during the read."""
        while True:
            self.qp.post_send(rp.RdmaRead(self.mr[:SLOT], **self._at(slot)))
            self._done()
            raw = bytes(self.mr.buffer[:SLOT])
            version, checksum = int.from_bytes(raw[:8], sys.byteorder), raw[8:16]
            if version == 0 or (version % 2 == 0 and checksum == checksum_of(raw[16:])):
                return version, raw[16 : 16 + KEY], raw[16 + KEY :]

    def _swap(self, slot: int, old: int, new: int) -> bool:
        """Replace a slot's version if it is still the old one."""
        self.qp.post_send(
            rp.AtomicCmpAndSwp(self.word, compare_add=old, swap=new, **self._at(slot))
        )
        self._done()
        return int.from_bytes(self.mr.buffer[SLOT:], sys.byteorder) == old

    def _write(self, slot: int, version: int, content: bytes) -> None:
        raw = version.to_bytes(8, sys.byteorder) + checksum_of(content) + content
        self.mr.buffer[:SLOT] = raw
        # The version comes last, because it unlocks the slot. A queue pair's writes arrive in
        # posting order, so only the last one needs a completion.
        self.qp.post_send(
            [
                rp.RdmaWrite(self.mr[8:SLOT], **self._at(slot, 8), send_flags=0),
                rp.RdmaWrite(self.mr[:8], **self._at(slot)),
            ]
        )
        self._done()

    def _at(self, slot: int, offset: int = 0) -> dict[str, int]:
        return {"remote_addr": self.addr + slot * SLOT + offset, "rkey": self.rkey}

    def _done(self) -> None:
        self.cq.wait(1)[0].check()


def padded(key: str, size: int) -> bytes:
    return key.encode().ljust(size, b"\0")


def checksum_of(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(8)


def probe(name: bytes) -> list[int]:
    """Return the slots that may hold a key, in order."""
    first = zlib.crc32(name) % SLOTS
    return [(first + i) % SLOTS for i in range(SLOTS)]


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        context = stack.enter_context(rp.open_device(device))
        server = Server(context, stack)
        alice, bob = Client(context, stack), Client(context, stack)
        for client in (alice, bob):
            client.connect(server.accept(str(client.qp.endpoint())))

        alice.put("colour", b"blue")
        print("bob reads", bob.get("colour"))
        bob.put("colour", b"red")
        print("alice reads", alice.get("colour"))
        print("no such key:", alice.get("shape"))

        def count(client: Client, name: str) -> None:
            for i in range(100):
                client.put("last", f"{name} {i}".encode())

        writers = ((alice, "alice"), (bob, "bob"))
        threads = [Thread(target=count, args=writer) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = alice.get("last")
        print("after 200 writes by two clients:", "intact" if last in LAST else last)


if __name__ == "__main__":
    main(*sys.argv[1:])
