"""Register memory of any kind that other libraries allocated, without copying it.

Each kind of memory is filled over RDMA, checked by its own library, and read back over RDMA: a
numpy array, an array that has only DLPack (which PyTorch and JAX tensors also have), ctypes
structures at an address, and a memfd, which another process could share, passed as a dma-buf.

    python examples/any_memory.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import rdmapost as rp

ACCESS = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_READ | rp.Access.REMOTE_WRITE
SIZE = 64 * 1024


class Memory(NamedTuple):
    """A region, and how the library that owns the memory reads it."""

    mr: rp.MR
    content: Callable[[], bytes]


class Tensor:
    """Exposes only an array's DLPack interface."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Sample(ctypes.Structure):
    """One of the structures that a C library might fill."""

    _fields_ = (("sensor", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("value", ctypes.c_double))


def numpy_array(pd: rp.PD) -> Memory:
    array = np.zeros((64, SIZE // 64 // 4), np.float32)
    return Memory(rp.MR(pd, array, ACCESS), array.tobytes)


def dlpack_tensor(pd: rp.PD) -> Memory:
    array = np.zeros(SIZE // 8, np.int64)
    return Memory(rp.MR(pd, Tensor(array), ACCESS), array.tobytes)


def ctypes_structures(pd: rp.PD) -> Memory:
    samples = (Sample * (SIZE // ctypes.sizeof(Sample)))()
    address = ctypes.addressof(samples)
    # The region has only an address, so it also needs the owner, which keeps the memory alive.
    mr = rp.MR.at(pd, address, SIZE, ACCESS, owner=samples)
    return Memory(mr, lambda: ctypes.string_at(address, SIZE))


def memfd_as_dmabuf(pd: rp.PD) -> Memory:
    fd = os.memfd_create("shared")
    try:
        os.truncate(fd, SIZE)
        # 0x10000 is the IOVA by which peers and SGEs name the first byte; it must be page-aligned.
        mr = rp.MR.from_dmabuf(pd, fd, 0, SIZE, 0x10000, ACCESS)
        return Memory(mr, mmap.mmap(fd, SIZE).read)
    finally:
        os.close(fd)  # the region and the mapping each have their own reference


KINDS = {
    "numpy array": numpy_array,
    "DLPack tensor": dlpack_tensor,
    "ctypes structures": ctypes_structures,
    "memfd as dma-buf": memfd_as_dmabuf,
}


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        enter = stack.enter_context
        context = enter(rp.open_device(device))
        pd, cq = enter(rp.PD(context)), enter(rp.CQ(context))
        local = enter(rp.MR(pd, 2 * SIZE))
        a, b = enter(rp.QP(pd, rp.QPType.RC, cq)), enter(rp.QP(pd, rp.QPType.RC, cq))
        a.connect(b.endpoint())
        b.connect(a.endpoint())

        for name, register in KINDS.items():
            try:
                mr, content = register(pd)
            except rp.VerbsError as error:
                print(f"{name}: refused: {error}")
                continue
            with mr:
                sent = random.Random(name).randbytes(SIZE)
                local.buffer[:SIZE] = sent
                there = {"remote_addr": mr.addr, "rkey": mr.rkey}
                a.post_send(rp.RdmaWrite(local[:SIZE], **there, send_flags=0))
                a.post_send(rp.RdmaRead(local[SIZE:], **there))
                cq.wait(1)[0].check()
                if content() != sent or local.buffer[SIZE:] != sent:
                    sys.exit(f"{name}: damaged")
                print(f"{name}: {len(mr)} bytes intact")


if __name__ == "__main__":
    main(*sys.argv[1:])
