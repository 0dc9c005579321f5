"""Address handles, and the address vector of a datagram's sender."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from ..._binding import ffi
from ...enums import WCFlags
from ...errors import VerbsError
from ...standard.wire import GRH_BYTES, IPV4, IPV4_MAPPED, IPV6
from .state import context_of, verb

_ANY_HOP_LIMIT = 0xFF


class AddressHandle(NamedTuple):
    """The path to a peer."""

    sgid: bytes
    dgid: bytes
    sl: int
    flow_label: int
    hop_limit: int
    traffic_class: int


@verb
def init_ah_from_wc(context: Any, port_num: int, wc: Any, grh: Any, attr: Any) -> None:
    attr.port_num, attr.dlid, attr.sl = port_num, wc.slid, wc.sl
    attr.src_path_bits = wc.dlid_path_bits
    if not wc.wc_flags & WCFlags.GRH:
        return
    raw = bytes(ffi.buffer(grh))
    if raw[0] >> 4 == 6:
        first, _, _, _, source, target = IPV6.unpack(raw)
        attr.grh.traffic_class, attr.grh.flow_label = first >> 20 & 0xFF, first & 0xFFFFF
    else:
        _, tos, *_, src, dst = IPV4.unpack_from(raw, GRH_BYTES - IPV4.size)
        source, target = IPV4_MAPPED + src, IPV4_MAPPED + dst
        attr.grh.traffic_class = tos
    gids = context_of(context, "ibv_init_ah_from_wc").device.gids
    if target not in gids:
        raise VerbsError("ibv_init_ah_from_wc", errno.ENODATA)
    attr.is_global = 1
    attr.grh.dgid.raw = source
    attr.grh.sgid_index = gids.index(target)
    attr.grh.hop_limit = _ANY_HOP_LIMIT
