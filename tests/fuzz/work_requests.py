"""Work requests of every class, correct ones and hostile ones.

The raw addresses of SGEs made from numbers always lie in registered memory, or have an invalid
key.  INLINE with a raw address is never posted to an unchecked queue pair, which would read any
address at the caller's risk.  ``Maker.raw`` says where such an SGE may be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import hostile
import numpy as np
from builders import acting, num, wr_id
from draw import Draw
from world import ALPHABET, World, filled

import rdmapost as rp
from rdmapost import QPType, SendFlags

__all__ = ["ATOMICS", "EVERY_SEND", "INLINE", "SENDS", "Maker", "several"]

INLINE = int(SendFlags.INLINE)
_CONNECTED = (
    rp.Send,
    rp.SendWithImm,
    rp.SendWithInv,
    rp.RdmaWrite,
    rp.RdmaWrite,
    rp.RdmaWriteWithImm,
    rp.RdmaRead,
    rp.AtomicCmpAndSwp,
    rp.AtomicFetchAndAdd,
    rp.AtomicWrite,
    rp.Flush,
    rp.LocalInv,
    rp.BindMW,
    rp.BindMW,
)
_RC_ONLY = (rp.RdmaRead, rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd, rp.AtomicWrite, rp.Flush)
SENDS = {
    QPType.RC: _CONNECTED,
    QPType.UC: tuple(wr_type for wr_type in _CONNECTED if wr_type not in _RC_ONLY),
    QPType.XRC_SEND: _CONNECTED,
    QPType.XRC_RECV: _CONNECTED,
    QPType.UD: (rp.Send, rp.SendWithImm, rp.TSO),
    QPType.RAW_PACKET: (rp.Send, rp.TSO),
}
EVERY_SEND = (*_CONNECTED, rp.TSO)
ATOMICS = (rp.AtomicCmpAndSwp, rp.AtomicFetchAndAdd)


class Maker:
    """Makes work requests for one queue.

    Args:
        world, draw: the program's world, and the source of choices.
        checked: whether the queue checks.

    Attributes:
        inline: whether the flags may be INLINE, whichever value a hostile object returns.
        raw: whether SGEs may be only numbers.
        owned: whether every SGE has an owner, a region or a buffer: then the work request may
            be posted to any queue.
    """

    def __init__(self, world: World, draw: Draw, checked: bool) -> None:
        self.world, self.draw, self.checked = world, draw, checked
        self.inline = False
        self.owned = True

    @property
    def raw(self) -> bool:
        return self.checked or not self.inline

    # ---- SGEs

    def sge(self, size: int | None = None) -> Any:
        world, draw = self.world, self.draw
        choice = draw.below(40)
        if self.inline and choice < 12:
            return self.buffer()
        region = world.pick("MR", draw)
        if region is None or choice == 39:
            return world.pick("sges", draw) or self.buffer()
        length = region.length
        start = draw.below(length)
        if draw.below(3):
            start &= ~7
        stop = min(length, start + (draw.among(8, 8, 16, 64, 100) if size is None else size))
        if choice < 28:
            sge = world.build(region.__getitem__, slice(start, stop))
            if sge is not None and draw.one_in(8):
                world.keep("sges", sge, draw)
            return sge if sge is not None else self.buffer()
        addr, count = region.addr + start, stop - start
        if choice < 31 and self.raw:
            self.owned = False
            if draw.below(3):
                return rp.SGE(addr, count, region.lkey)
            return rp.SGE(draw.bits() >> draw.below(64), count, draw.bits() >> 32 | 1 << 31)
        if choice < 34:
            return self.outside()
        if choice < 36:
            return rp.SGE(
                num(world, draw, addr, 8, 2, region),
                num(world, draw, count, 1 << 20, 2, region),
                num(world, draw, region.lkey, 1, 4, region),
                region,
            )
        if choice == 36:
            return hostile.sge_class()(addr, count, region.lkey, region)
        if choice == 37 and self.checked:
            self.owned = False
            fake = hostile.Fake(region.pd, 0, 1 << 63, region.lkey)
            return rp.SGE(addr, count, region.lkey, draw.among(fake, object(), np.zeros(4), fake))
        posing = region
        if self.checked:
            self.owned = False
            posing = hostile.posing(rp.MR, region.pd)
        return draw.among(
            (addr, count, region.lkey, region),
            None,
            5,
            "sge",
            hostile.posing(rp.SGE),
            rp.SGE(addr, 0, region.lkey, region),
            rp.SGE(addr, count, region.lkey, posing),
        )

    def outside(self) -> Any:
        """Make an SGE outside its region, whose address arithmetic may wrap."""
        draw, region = self.draw, self.world.pick("MR", self.draw)
        if region is None:
            return self.buffer()
        before = region.addr - draw.among(8, 32, 64)
        start = draw.among(before, before, before & (1 << 64) - 1, region.end, region.end - 4)
        length = draw.among(8, 32, 64, region.length + 32)
        try:
            return rp.SGE(
                draw.among(np.uint64, np.uint64, np.int64, int)(start),
                draw.among(np.uint32, np.uint64, int)(length),
                region.lkey,
                region,
            )
        except OverflowError:
            return self.buffer()

    def buffer(self) -> Any:
        """Make an SGE over a buffer, to which often nothing else refers."""
        draw, size = self.draw, self.draw.among(1, 8, 16, 60, 200)
        choice = draw.below(8)
        data: Any
        if choice < 3:
            data = filled(size)[1:] + b"\xa0"
        elif choice < 6:
            data = bytearray(filled(size))
            if choice == 5:
                self.world.keep("buffers", data, draw)
        elif choice == 6:
            data = memoryview(np.full(size * 2, 0xA1, np.uint8))[size:]
        else:
            data = self.world.pick("buffers", draw)
            if not data:
                data = b"\xa1"
        sge = self.world.build(rp.SGE.from_buffer, data)
        return sge if sge is not None else rp.SGE.from_buffer(b"\xa2")

    def sges(self) -> Any:
        draw = self.draw
        if draw.below(3):
            return self.sge()
        choice, count = draw.below(12), draw.among(0, 1, 1, 2, 3, 5, 9, 70)
        # Elements are drawn now, or when they are requested, in that order.
        act = acting(self.world, draw) if draw.one_in(2) else None
        if choice < 3:
            return [self.sge() for _ in range(count)]
        if choice == 3:
            return tuple(self.sge() for _ in range(count))
        if choice == 4:
            # Another thread may change this list while it is posted.
            shared = [self.sge() for _ in range(count)]
            if self.owned:
                self.world.keep("lists", shared, draw)
            return shared
        if choice == 5:
            return (self.temporary() for _ in range(count))
        if choice == 6:
            return iter([self.temporary() for _ in range(count)])
        if choice < 9:
            counts = [count] if draw.below(3) else [count, count + 3, 0, 1, -1]
            return hostile.OnDemand(self.temporary, count, counts, act)
        if choice == 9:
            return hostile.Iterating(self.temporary, count, act)
        if choice == 10:
            return draw.among(None, 5, "sges", object(), {}, b"bytes")
        return [self.sge(), draw.among(None, 5, (1, 2, 3), hostile.posing(rp.SGE), [])]

    def temporary(self) -> Any:
        """Make an SGE to which only the caller refers."""
        return self.buffer() if self.inline or self.draw.one_in(4) else self.sge()

    # ---- fields

    def flags(self) -> Any:
        draw = self.draw
        value = draw.among(
            2, 2, 2, 2, 2, 2, 0, 3, 6, 10, 10, 10, 10, 8, 18, 26, draw.below(64), 1 << 32
        )
        self.inline = bool(value & INLINE)
        choice = draw.below(24)
        if choice < 12:
            return value
        if choice < 17:
            return SendFlags(value & 31)
        if choice < 20:
            return draw.among(np.uint8, np.uint64, np.int32)(value & 63)
        if choice < 22:
            return value
        # It is unknown which of the values the library will use.
        self.inline = True
        return hostile.number(draw, value, value ^ INLINE, acting(self.world, draw))

    def send(self, wr_type: Any, qp: Any) -> Any:
        """Make a send work request."""
        world, draw = self.world, self.draw
        values: dict[str, Any] = {"wr_id": wr_id(world, draw), "send_flags": self.flags()}
        names = {field.name for field in fields(wr_type)}
        if "sg_list" in names:
            if wr_type in ATOMICS and draw.below(4):
                values["sg_list"] = self.sge(8)
            else:
                values["sg_list"] = self.sges()
        if "remote_addr" in names:
            addr, length, rkey = world.pick("targets", draw) or (0, 8, 0)
            offset = draw.among(0, 0, 8, 16, 24, length - 8, length, 4)
            if draw.one_in(12):
                rkey = draw.below(1 << 32)
            values["remote_addr"] = num(world, draw, addr + offset)
            values["rkey"] = num(world, draw, rkey)
        if "compare_add" in names:
            word = 0 if wr_type is rp.AtomicFetchAndAdd else int.from_bytes(ALPHABET[:8], "little")
            word = word if world.clean else draw.among(word, draw.bits())
            values["compare_add"] = num(world, draw, word, word, 60) if not world.clean else word
            if "swap" in names:
                values["swap"] = word
        if wr_type is rp.AtomicWrite:
            word = int.from_bytes(ALPHABET[8:16], "little")
            values["atomic_wr"] = word if world.clean else num(world, draw, word, draw.bits())
        if wr_type is rp.Flush:
            values["length"] = num(world, draw, draw.among(8, 64, 0, 1 << 20), 1 << 40)
            values["type"] = num(world, draw, draw.among(1, 1, 2, 3, 0), 7)
            values["level"] = num(world, draw, draw.among(0, 1, 2), 1)
        if "imm_data" in names:
            values["imm_data"] = num(world, draw, draw.below(1 << 32))
        if "invalidate_rkey" in names:
            target = world.pick("targets", draw)
            values["invalidate_rkey"] = num(world, draw, target[2] if target else 5)
        if "remote_srqn" in names and qp.qp_type is QPType.XRC_SEND:
            srq = world.pick("SRQ", draw)
            number = world.build(getattr, srq, "srq_num") if srq is not None else 0
            values["remote_srqn"] = num(world, draw, number or 0)
        if "ah" in names and qp.qp_type is QPType.UD:
            peer = world.pick("QP", draw)
            values["ah"] = self.handle("AH", rp.AH)
            values["remote_qpn"] = num(world, draw, getattr(peer, "qp_num", 0), 0, 12, values["ah"])
            values["remote_qkey"] = num(world, draw, rp.resources.qp.DEFAULT_QKEY)
        if wr_type is rp.TSO:
            values["hdr"] = hostile.header(draw, draw.among(0, 14, 40, 54, 64, 70000), b"\xa1")
            values["mss"] = num(world, draw, draw.among(1, 64, 1000, 65535, 0))
        if wr_type is rp.BindMW:
            values |= self.bind()
        return self.build(wr_type, values)

    def handle(self, pool: str, cls: type) -> Any:
        draw, pd = self.draw, self.world.pick("PD", self.draw)
        if draw.one_in(24):
            return draw.among(None, 5, hostile.posing(cls, pd), hostile.posing(cls, pd), object())
        return self.world.pick(pool, draw)

    def bind(self) -> dict[str, Any]:
        world, draw = self.world, self.draw
        window, region = self.handle("MW", rp.MW), self.handle("MR", rp.MR)
        found: dict[str, Any] = {"mw": window, "mr": region}
        if isinstance(region, rp.MR) and isinstance(window, rp.MW):
            length = draw.among(region.length, 8, 0, region.length + 1)
            rkey = world.build(window.next_rkey)
            found |= {
                "rkey": num(world, draw, rkey or 0),
                "addr": num(world, draw, region.addr, region.addr - 64, 12, region),
                "length": num(world, draw, length, 1 << 40, 12, window),
                "mw_access_flags": num(world, draw, draw.among(2, 6, 14, 14, 0, 1)),
            }
            if rkey is not None:
                world.keep("targets", (region.addr, region.length, rkey), draw)
        return found

    def build(self, wr_type: Any, values: dict[str, Any]) -> Any:
        world, draw = self.world, self.draw
        if draw.one_in(25):
            self.inline = True
            name = draw.of([name for name in values if name != "sg_list"])
            if name == "send_flags" and not self.raw and not self.owned:
                name = "wr_id"
            choices = [values[name]]
            if isinstance(values[name], int):
                choices.append(int(values[name]) ^ INLINE)
            if name != "send_flags" or self.checked or self.owned:
                wr_type = hostile.property_class(wr_type, name, acting(world, draw), choices)
                self.owned = False
        return world.build(wr_type, **values)

    def recv(self) -> Any:
        """Make a receive."""
        return self.build(
            rp.RecvWR, {"wr_id": wr_id(self.world, self.draw), "sg_list": self.sges()}
        )

    def ops(self, tagged: bool) -> Any:
        """Make a tag-matching operation."""
        world, draw = self.world, self.draw
        values: dict[str, Any] = {"wr_id": wr_id(world, draw)}
        if draw.one_in(8):
            values["flags"] = num(world, draw, draw.below(5), 1, 3)
        wr_type = draw.among(rp.TagAdd, rp.TagAdd, rp.TagAdd, rp.TagDel, rp.TagSync)
        if wr_type is rp.TagAdd:
            values |= {
                "recv_wr_id": wr_id(world, draw),
                "sg_list": self.sges(),
                "tag": num(world, draw, draw.below(4)),
                "mask": draw.among((1 << 64) - 1, 3, 1),
            }
        elif wr_type is rp.TagDel:
            added = world.pick("tags", draw)
            values["handle"] = draw.among(
                getattr(added, "handle", None),
                getattr(added, "handle", None),
                None,
                5,
                hostile.posing(rp.TagHandle),
            )
        wr = world.build(wr_type, **values)
        if wr_type is rp.TagAdd:
            world.keep("tags", wr, draw)
        return wr


def several(world: World, draw: Draw, make: Callable[[], Any]) -> Any:
    """Return one work request, or several in one of many forms."""
    choice = draw.below(24)
    if choice < 14:
        return make()
    count = draw.among(0, 1, 2, 3, 5, 20)
    act = acting(world, draw) if draw.one_in(2) else None
    if choice < 18:
        return [make() for _ in range(count)]
    if choice == 18:
        return tuple(make() for _ in range(count))
    if choice == 19:
        return (make() for _ in range(count))
    if choice == 20:
        return iter([make() for _ in range(count)])
    if choice == 21:
        return hostile.OnDemand(make, count, [count, count + 2, 0], act)
    if choice == 22:
        return hostile.Iterating(make, count, act)
    return draw.among(
        None, 5, [make(), None, make()], [[make()]], object(), hostile.posing(rp.Send)
    )
