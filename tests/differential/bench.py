"""The device on which programs run, and the memory regions of every program."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Self

import rdmapost as rp
from rdmapost import QPState
from rdmapost._binding import ffi
from rdmapost.providers.soft0.device import device

from .model import REGIONS

__all__ = ["Bench"]


def _pattern(name: str, size: int) -> bytes:
    if name == "counter":
        # Small numbers, so that a compare-and-swap can succeed.
        return b"".join(struct.pack("=Q", index % 4) for index in range(size // 8))
    return random.Random(name).randbytes(size)


class Bench:
    """A device, and the memory regions of every program.

    Args:
        context: an open device.
        mtu: the path MTU; default: the port's.
    """

    def __init__(self, context: rp.Context, mtu: rp.MTU | None = None) -> None:
        self.context = context
        self.soft = context.kind == "soft"
        self._port_mtu = device.port_mtu
        if self.soft and mtu is not None:
            device.port_mtu = mtu
        self.mtu = context.query_port(1).active_mtu if mtu is None else mtu
        with contextlib.ExitStack() as stack:
            self.pds = [stack.enter_context(rp.PD(context)) for _ in range(2)]
            self.regions = {
                name: stack.enter_context(rp.MR(self.pds[spec.pd], spec.size, spec.access))
                for name, spec in REGIONS.items()
            }
            with rp.MR(self.pds[0], 4096, REGIONS["a"].access) as gone:
                self.gone = gone.lkey
            self.cq = stack.enter_context(rp.CQ(context, 1024))
            gid = context.choose_gid()
            self.path = rp.AHAttr(dgid=gid.gid, sgid_index=gid.gid_index)
            self.ah = stack.enter_context(rp.AH(self.pds[0], self.path))
            self._stack = stack.pop_all()
        self._attr = ffi.new("struct ibv_qp_attr *")
        self._init_attr = ffi.new("struct ibv_qp_init_attr *")
        self._contents = {name: _pattern(name, spec.size) for name, spec in REGIONS.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        device.port_mtu = self._port_mtu

    def fill(self) -> None:
        """Give every region its initial contents."""
        for name, content in self._contents.items():
            self.regions[name].buffer[:] = content

    def memory(self) -> dict[str, bytes]:
        """Return the contents of every region."""
        return {name: bytes(region.buffer) for name, region in self.regions.items()}

    def state_of(self, qp: rp.QP) -> str:
        """Query only a queue pair's state, which costs a third of a whole query."""
        self.context._provider.query_qp(
            qp._handle, self._attr, int(rp.QPAttrMask.STATE), self._init_attr
        )
        return QPState(self._attr.qp_state).name

    def busy(self) -> bool:
        """Whether the soft device will retry a request."""
        return bool(device.parked)
