"""The checks: their registration, where they run, and their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ...enums import DeviceCap, Opcode, OpsOpcode, QPType
from ...errors import RdmaError
from ...resources.device import Context
from ...resources.device_attr import usable_mtu
from ...standard.opcodes import QP_TYPES_BY_OPCODE
from ..frames import ETHERNET_BYTES, ethernet
from ..loopback import Loopback

QP_TYPES = (QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND, QPType.RAW_PACKET)
"""The QP types, in the order of the output."""

MARGIN = 32
"""Bytes of remote memory on either side of the range that may change."""
UNTOUCHED = 0xA5
"""The byte that fills the remote memory."""

_RAW_PAYLOAD = 256


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check.

    Attributes:
        opcode: the operation's name.
        qp_type: the QP type's name.
        status: whether it passed.
        detail: what was verified, or why it failed or is not supported.
    """

    opcode: str
    qp_type: str
    status: Literal["pass", "fail", "unsupported"]
    detail: str


@dataclass(frozen=True, slots=True)
class Row:
    """A check, and the QP types it runs on.

    Attributes:
        opcode: the operation's name.
        qp_types: the QP types.
        run: performs it, and returns what was verified.
    """

    opcode: str
    qp_types: tuple[QPType, ...]
    run: Callable[[Trial], str]


class Failed(RdmaError):
    """The device did not do what it should have done."""


class Unsupported(RdmaError):
    """The device cannot do this."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The device, port and QP type that a check runs on.

    Attributes:
        context: the device.
        qp_type: the type of queue pair.
        port_num: the port, from 1.
        gid_index: the GID; None if choose_gid chooses it.
        timeout: seconds for all waits of a check in total.
        caps: device_cap_flags.
        length: bytes of a message, enough for several packets if the type allows it.
    """

    context: Context
    qp_type: QPType
    port_num: int
    gid_index: int | None
    timeout: float
    caps: DeviceCap = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        mtu = usable_mtu(self.context.query_port(self.port_num)).bytes
        length = {QPType.UD: mtu, QPType.RAW_PACKET: ETHERNET_BYTES + _RAW_PAYLOAD}.get(
            self.qp_type, 3 * mtu + 5
        )
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "caps", self.context.attr.device_cap_flags)

    def loopback(
        self, *, local_size: int | None = None, remote_size: int | None = None, **options: Any
    ) -> Loopback:
        """Create the pair of queue pairs; local memory holds random data, remote memory known data.

        Args:
            local_size, remote_size: bytes of memory on each side; default: room for one
                message, and on the remote side a margin before and after it.
            options: the other arguments of Loopback.
        """
        pair = Loopback(
            self.context,
            self.qp_type,
            local_size=self.length if local_size is None else local_size,
            remote_size=self.length + 2 * MARGIN if remote_size is None else remote_size,
            port_num=self.port_num,
            gid_index=self.gid_index,
            timeout=self.timeout,
            **options,
        )
        self.make_up(pair)
        pair.remote.mr.buffer[:] = bytes([UNTOUCHED]) * pair.remote.mr.length
        return pair

    def make_up(self, pair: Loopback) -> None:
        """Fill the local memory with random bytes, after an Ethernet header on RAW_PACKET.

        Args:
            pair: the queue pairs.
        """
        pair.local.mr.buffer[:] = random.randbytes(pair.local.mr.length)
        if self.qp_type is QPType.RAW_PACKET:
            pair.local.mr.buffer[:ETHERNET_BYTES] = ethernet()


Register = Callable[[Callable[[Trial], str]], Callable[[Trial], str]]


def check(rows: list[Row], opcode: Opcode | OpsOpcode | str, *qp_types: QPType) -> Register:
    """Register a check.

    Args:
        rows: the list to add it to.
        opcode: the opcode, or the name of the operation.
        qp_types: the QP types it runs on; for an Opcode, the man page's table determines them.
    """
    if isinstance(opcode, Opcode):
        qp_types = tuple(t for t in QP_TYPES if t in QP_TYPES_BY_OPCODE[opcode])

    def register(run: Callable[[Trial], str]) -> Callable[[Trial], str]:
        rows.append(Row(opcode if isinstance(opcode, str) else opcode.name, qp_types, run))
        return run

    return register
