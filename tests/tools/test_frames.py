"""rdmapost.frames: what its builders refuse, and what ``what_is_wrong`` finds in segments."""

from __future__ import annotations

import pytest

from rdmapost import QPType, frames


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: frames.ethernet("x"), TypeError, "^ethertype: expected int, got str"),
        (lambda: frames.ethernet(1 << 16), ValueError, r"^ethertype=65536 is not in 0\.\.65535"),
        (lambda: frames.tagged(-1, b""), ValueError, r"^tag=-1 is not in 0\.\.2\^64-1"),
        (lambda: frames.tagged(1, "x"), TypeError, "^payload: expected bytes, got str"),
        (lambda: frames.tagged(1, b"", 1 << 32), ValueError, "^app_ctx=4294967296 is not in"),
        (lambda: frames.tcp("UD"), TypeError, "^qp_type: expected QPType, got str"),
        (lambda: frames.tcp(QPType.RC), ValueError, "^qp_type: TSO is for RAW_PACKET and UD"),
    ],
)
def test_arguments_of_the_frame_builders_are_checked(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def segments(qp_type: QPType, payload: bytes, mss: int) -> list[bytes]:
    """Make the right segments of a payload with the device's own code."""
    from rdmapost.providers.soft0 import offload

    link = offload.ethernet if qp_type is QPType.RAW_PACKET else offload.ipoib
    return list(offload.segments(frames.tcp(qp_type), link, payload, mss))


@pytest.mark.parametrize("qp_type", [QPType.RAW_PACKET, QPType.UD])
def test_any_wrong_byte_in_a_segment_is_found(qp_type: QPType) -> None:
    payload, mss = bytes(range(100)), 40
    right = segments(qp_type, payload, mss)
    hdr = frames.tcp(qp_type)
    assert frames.what_is_wrong(right, hdr, qp_type, payload, mss) is None
    for number, packet in enumerate(right):
        for at in range(len(packet)):
            broken = bytearray(packet)
            broken[at] ^= 0x40
            packets = [*right[:number], bytes(broken), *right[number + 1 :]]
            wrong = frames.what_is_wrong(packets, hdr, qp_type, payload, mss)
            assert wrong is not None, (number, at)
            assert wrong.startswith(f"segment {number + 1} of 3: its ")


def test_missing_and_swapped_segments_are_found() -> None:
    payload, qp_type = bytes(range(100)), QPType.UD
    right = segments(qp_type, payload, 50)
    hdr = frames.tcp(qp_type)
    assert frames.what_is_wrong(right[:1], hdr, qp_type, payload, 50) == (
        "1 segment arrived, not 2"
    )
    assert "payload" in str(frames.what_is_wrong(right[::-1], hdr, qp_type, payload, 50))
