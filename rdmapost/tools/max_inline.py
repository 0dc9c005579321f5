"""How many inline bytes a device grants.

No device attribute reports it, and it depends on the queue pair's type and
other limits; the only way to find out is to create queue pairs
(ibv_create_qp(3)).  Drivers differ: some refuse a size that is too large, some
grant more than was requested, and some grant less.
"""

from __future__ import annotations

import errno
from typing import TypedDict, Unpack

from .._arguments import within
from ..enums import QPType
from ..errors import VerbsError
from ..resources.cq import CQ
from ..resources.pd import PD
from ..resources.qp import QP
from ..resources.resource import close_quietly
from ..resources.srq import SRQ
from ..resources.xrcd import XRCD

_TOO_MUCH = frozenset(
    {errno.EINVAL, errno.ENOMEM, errno.E2BIG, errno.ERANGE, errno.ENOSPC, errno.EOPNOTSUPP}
)
"""The errnos that drivers return for more inline data than they support."""
_FIRST = 64
"""Where the search begins: a cache line, which nearly every device grants."""


class _QPOptions(TypedDict, total=False):
    """QP's other arguments."""

    recv_cq: CQ | None
    srq: SRQ | None
    xrcd: XRCD | None
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_tso_header: int
    send_ops_flags: int
    sq_sig_all: bool
    checked: bool
    port_num: int
    gid_index: int | None


def max_inline(
    pd: PD, qp_type: QPType, send_cq: CQ, *, at_most: int = 1 << 16, **options: Unpack[_QPOptions]
) -> int:
    """Find the largest max_inline_data that a device grants.

    It creates and closes at most 2n + 1 queue pairs, where n is the number of bits in
    at_most; this takes a few milliseconds on most devices.

    Args:
        pd: the protection domain.
        qp_type: type of the queue pair; XRC_RECV has no sends.
        send_cq: the CQ on which its sends would complete.
        at_most: the largest size to try, 0..2^31.
        options: QP's other options.  Pass those of the actual queue pair: a
            device may grant less to a queue with more SGEs.

    Returns:
        bytes, at most at_most; 0 if the device supports no inline data.

    Raises:
        TypeError: at_most is not an integer; or as for QP.
        ValueError: at_most is out of range; or as for QP.
        VerbsError: the device refuses the queue pair even without inline data,
            or for a reason other than its size.
    """
    at_most = within("at_most", at_most, 0, 1 << 31)
    given = pd, qp_type, send_cq, options
    # The largest size known to be granted, and the smallest known not to be.
    low, high = _granted(*given, 0) or 0, at_most + 1
    size = max(_FIRST, 2 * low)
    while low + 1 < high:
        # Double first, because limits are small; then bisect.
        size = size if low < size < high else (low + high) // 2
        granted = _granted(*given, size)
        if granted is None:
            high = size
        elif granted < size:
            return min(max(low, granted), at_most)
        else:
            low = granted
        size = 2 * low if high > at_most else 0
    return min(low, at_most)


def _granted(pd: PD, qp_type: QPType, send_cq: CQ, options: _QPOptions, size: int) -> int | None:
    """Return the max_inline_data that a device grants if asked for a size; None if it refuses."""
    try:
        qp = QP(pd, qp_type, send_cq, max_inline_data=size, **options)
    except VerbsError as error:
        # Without inline data the size cannot be the reason.
        if not size or error.errno not in _TOO_MUCH:
            raise
        return None
    # Not a with statement, which runs Python code: an interrupt could come before the close.
    granted = qp.max_inline_data
    try:
        qp.close()
    except BaseException:
        # An interrupt may have ended the close early.
        close_quietly(qp)
        raise
    return granted
