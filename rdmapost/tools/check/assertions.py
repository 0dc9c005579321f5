"""The checks' assertions about completions, numbers and bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ...enums import QPType, WCOpcode, WCStatus
from ...posting.wr import RdmaWrite
from ...resources.cq import WC
from ..loopback import Loopback
from .registry import UNTOUCHED, Failed


def write(pair: Loopback, *, offset: int, rkey: int | None = None) -> None:
    """Write the local memory to the remote memory at an offset, and verify the result.

    Args:
        pair: the queue pairs.
        offset: bytes from the start of the remote memory.
        rkey: the key to use; default: the region's.
    """
    pair.local.qp.post_send(
        RdmaWrite(sg_list=pair.local.mr[:], wr_id=7, **pair.target(offset, rkey))
    )
    completed(pair.sent(), WCOpcode.RDMA_WRITE, wr_id=7)
    written(pair, offset, bytes(pair.local.mr.buffer))


def written(pair: Loopback, offset: int, expected: bytes) -> None:
    """Check that the data of a completed write is in the remote memory.

    Args:
        pair: the queue pairs.
        offset: bytes from the start of the remote memory.
        expected: the bytes that were written.

    Raises:
        Failed: the memory holds other bytes.
    """
    if pair.local.qp.qp_type is QPType.UC:
        # A UC write completes without an acknowledgement, so wait for its data.
        pair.settled(expected, offset)
    same_bytes("remote memory", at(pair, offset, len(expected)), expected)


def at(pair: Loopback, offset: int, length: int) -> bytes:
    """Return bytes of the remote memory."""
    return bytes(pair.remote.mr.buffer[offset : offset + length])


def completed(wcs: Iterable[WC], opcode: WCOpcode, *, wr_id: int) -> WC:
    """Check that there is one completion, successful and with this opcode, and return it.

    Raises:
        Failed: it has a different status, opcode or wr_id.
    """
    (wc,) = wcs
    if wc.status is not WCStatus.SUCCESS:
        vendor = f" (vendor_err {wc.vendor_err:#x})" if wc.vendor_err else ""
        raise Failed(f"{opcode.name} ended with {wc.status.name}{vendor}")
    same("wr_id", wc.wr_id, wr_id)
    if wc.opcode is not opcode:
        found = "an unknown opcode" if wc.opcode is None else wc.opcode.name
        raise Failed(f"the completion says {found}, not {opcode.name}")
    return wc


def same(what: str, found: int | None, expected: int | None) -> None:
    """Check that a number is the expected one.

    Raises:
        Failed: it differs.
    """
    if found != expected:
        raise Failed(f"{what} is {_number(found)}, not {_number(expected)}")


def _number(value: int | None) -> str:
    return "missing" if value is None else f"{value:#x}"


def same_bytes(what: str, found: bytes, expected: bytes | memoryview) -> None:
    """Check that bytes are the expected ones.

    Raises:
        Failed: some differ.
    """
    if found == expected:
        return
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    raise Failed(
        f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, the first at {wrong[0]}"
    )


def unharmed(pair: Loopback, *ranges: tuple[int, int]) -> None:
    """Check that the remote memory is untouched except for some ranges and the GRH.

    Args:
        pair: the queue pairs.
        ranges: offset and length of each, in order.

    Raises:
        Failed: other bytes have changed.
    """
    memory = pair.remote.mr.buffer
    start = pair.headroom
    for offset, length in (*ranges, (len(memory), 0)):
        if bytes(memory[start:offset]).strip(bytes([UNTOUCHED])):
            raise Failed("bytes outside the range were changed")
        start = offset + length
