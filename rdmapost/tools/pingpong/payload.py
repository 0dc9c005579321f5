"""Message data: the data that a client sends, and how received data differs from it.

The stock programs mark the first byte of each page, and check only those bytes.
"""

from __future__ import annotations

import mmap

FILL = 0x7B
_PAGE_START = 0
_SMALLEST_PAGE = 4096
_PIECE = 1 << 20


def fill(buffer: memoryview, byte: int = FILL, *, marked: bool = False) -> None:
    """Fill a buffer; by default with the data of a client's message.

    Args:
        marked: whether to mark the first byte of each page, for a peer that validates.
    """
    page = bytes((_PAGE_START if marked else byte,)) + bytes((byte,)) * (mmap.PAGESIZE - 1)
    # Fill it in pieces, so that signals are handled in between.
    piece = page * (_PIECE // mmap.PAGESIZE)
    for begin in range(0, len(buffer), len(piece)):
        part = buffer[begin : begin + len(piece)]
        part[:] = piece[: len(part)]


def what_is_wrong(found: bytes, *, is_server: bool) -> str:
    """Compare received data with what a validating client sends; return "" if it matches.

    The peer's pages may be smaller than ours, so marks every 4 KiB are accepted, too. With
    is_server, the data comes from the client.
    """
    marks = found[:: mmap.PAGESIZE]
    wrong = len(marks) - marks.count(_PAGE_START)
    if wrong:
        first = next(i for i, byte in enumerate(marks) if byte != _PAGE_START)
        at, want = first * mmap.PAGESIZE, _PAGE_START
    else:
        rest = bytearray(found)
        small = len(range(0, len(found), _SMALLEST_PAGE))
        if set(rest[::_SMALLEST_PAGE]) <= {_PAGE_START, FILL}:
            rest[::_SMALLEST_PAGE] = bytes((FILL,)) * small
        wrong = len(found) - rest.count(FILL)
        if not wrong:
            return ""
        at, want = next(i for i, byte in enumerate(rest) if byte != FILL), FILL
    text = (
        f"the data is wrong: {wrong} of {len(found)} bytes, the first at {at}: "
        f"{found[at]:#04x}, not {want:#04x}"
    )
    if is_server and found[at] == FILL:
        text += "; does the client validate (-c), and are its pages as large?"
    return text
