"""soft0's control verbs: the shared ones, and those for queues that only soft0 has."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from ...enums import DeviceCap, QPType, RawPacketCap
from ...errors import UnsupportedError
from ..base import Counters, DeviceInfo
from ..software.create_queues import MAX_SGE
from ..software.provider import SoftwareProvider, open_context
from ..software.state import verb
from . import tags
from .device import MAX_MCAST_GRP, MAX_MCAST_QP_ATTACH, NO_PACKETS, device
from .offload import MAX_TSO
from .xrc_domains import SoftQueueVerbs

_TM_CAP_RC = 1

_CAPS = (
    DeviceCap.RC_RNR_NAK_GEN
    | DeviceCap.MEM_WINDOW
    | DeviceCap.MEM_WINDOW_TYPE_2B
    | DeviceCap.MEM_MGT_EXTENSIONS
    | DeviceCap.XRC
    | DeviceCap.UD_IP_CSUM
    | DeviceCap.RAW_IP_CSUM
    | DeviceCap.RAW_MULTI
    | DeviceCap.PORT_ACTIVE_EVENT
    | DeviceCap.SYS_IMAGE_GUID
    | DeviceCap.SRQ_RESIZE
    | DeviceCap.CURR_QP_STATE_MOD
)
_CAPS_EX = DeviceCap.FLUSH_GLOBAL | DeviceCap.FLUSH_PERSISTENT | DeviceCap.ATOMIC_WRITE


class SoftProvider(SoftQueueVerbs, SoftwareProvider):
    """soft0's control verbs."""

    kind = "soft"
    caps, caps_ex = _CAPS, _CAPS_EX
    vendor_part_id = 1

    def list_devices(self) -> list[DeviceInfo]:
        return [self.info(device.name, device.guid)]

    @verb
    def open_device(name: str) -> Any:
        return open_context(device)

    def query_device_ex(self, context: Any, attr: Any) -> None:
        super().query_device_ex(context, attr)
        orig = attr.orig_attr
        orig.max_mcast_grp = MAX_MCAST_GRP
        orig.max_mcast_qp_attach = MAX_MCAST_QP_ATTACH
        orig.max_total_mcast_qp_attach = MAX_MCAST_GRP * MAX_MCAST_QP_ATTACH
        attr.raw_packet_caps = RawPacketCap.IP_CSUM
        attr.tso_caps.max_tso = MAX_TSO
        attr.tso_caps.supported_qpts = 1 << QPType.UD | 1 << QPType.RAW_PACKET
        caps = attr.tm_caps
        caps.max_rndv_hdr_size = tags.MAX_RNDV_HEADER
        caps.max_num_tags, caps.max_ops = tags.MAX_NUM_TAGS, tags.MAX_OPS
        caps.max_sge, caps.flags = MAX_SGE, _TM_CAP_RC

    def capture(self, context: Any, path: Any, wr_id_of: Callable[[int], Any]) -> Any:
        raise UnsupportedError("Context.capture", errno.EOPNOTSUPP, NO_PACKETS)

    @verb
    def counters(context: Any) -> Counters:
        raise UnsupportedError("Context.counters", errno.EOPNOTSUPP, NO_PACKETS)
