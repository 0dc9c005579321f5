"""ibv_query_device_ex and ibv_query_port: attributes of a device and of a port as dataclasses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from .._arguments import member
from .._binding import ffi
from ..enums import (
    MTU,
    Access,
    AtomicCap,
    DeviceCap,
    LinkLayer,
    ODPGeneralCap,
    ODPTransportCap,
    PortCap,
    PortState,
    QPType,
    RawPacketCap,
    TMCap,
    reported,
)


@dataclass(frozen=True, slots=True)
class PortAttr:
    """Attributes of a port (ibv_query_port(3)).

    Attributes:
        port_num: the port, from 1.
        state: its state; only ACTIVE carries traffic.
        link_layer: InfiniBand or Ethernet.
        max_mtu, active_mtu: the largest path MTU, and the one in use.
        gid_tbl_len, pkey_tbl_len: how many entries the GID and P_Key tables have.
        max_msg_sz: the largest message, in bytes.
        lid, sm_lid: local identifiers; 0 on Ethernet.
        phys_state: 5 is LinkUp, 3 is Disabled.
        active_speed, active_width: encoded as in the man page.
        active_speed_ex: the speed, even if it does not fit into active_speed (XDR and later); 0
            if libibverbs or the driver is too old to report it (in that case, see active_speed).
        port_cap_flags: what it can do.
        bad_pkey_cntr, qkey_viol_cntr: how many packets had a wrong P_Key or Q_Key.
        lmc: how many low bits of its LID may vary with the path.
        max_vl_num: its virtual lanes, encoded as in the man page.
        sm_sl: service level of the subnet manager.
        subnet_timeout: the longest packet delay in the subnet, 4.096 us * 2^subnet_timeout.
        init_type_reply: what the subnet manager initialized.
        flags, port_cap_flags2: bits described in the man page.
    """

    port_num: int
    state: PortState
    link_layer: LinkLayer
    max_mtu: MTU
    active_mtu: MTU
    gid_tbl_len: int
    pkey_tbl_len: int
    max_msg_sz: int
    lid: int
    sm_lid: int
    phys_state: int
    active_speed: int
    active_width: int
    port_cap_flags: PortCap
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    init_type_reply: int
    flags: int
    port_cap_flags2: int
    active_speed_ex: int


@dataclass(frozen=True, slots=True)
class ODPCaps:
    """On-demand paging (``struct ibv_odp_caps``).

    Attributes:
        general_caps: whether the device has it at all.
        rc_odp_caps, uc_odp_caps, ud_odp_caps, xrc_odp_caps: the operations that may touch
            on-demand regions, on each transport.
    """

    general_caps: ODPGeneralCap
    rc_odp_caps: ODPTransportCap
    uc_odp_caps: ODPTransportCap
    ud_odp_caps: ODPTransportCap
    xrc_odp_caps: ODPTransportCap


@dataclass(frozen=True, slots=True)
class TSOCaps:
    """TCP segmentation offload (``struct ibv_tso_caps``).

    Attributes:
        max_tso: the longest payload of a TSO, in bytes; 0 if the device has none.
        supported_qpts: a bit for each type of queue pair, 1 << QPType.
    """

    max_tso: int
    supported_qpts: int

    def supports(self, qp_type: QPType) -> bool:
        """Whether queue pairs of a type can post TSO work requests.

        Args:
            qp_type: the type, a QPType or its number.

        Raises:
            TypeError: it is not an integer.
            ValueError: it is not a QPType.
        """
        bit = member("qp_type", qp_type, QPType)
        return bool(self.max_tso and self.supported_qpts >> bit & 1)


@dataclass(frozen=True, slots=True)
class TMCaps:
    """Tag matching (``struct ibv_tm_caps``).

    Attributes:
        max_rndv_hdr_size: the longest header of a rendezvous request, in bytes.
        max_num_tags: tagged buffers in one SRQ; 0 if the device has no tag matching.
        flags: the transports that have it.
        max_ops: the most operations outstanding on an SRQ's tag list.
        max_sge: SGEs in a tagged buffer.
    """

    max_rndv_hdr_size: int
    max_num_tags: int
    flags: TMCap
    max_ops: int
    max_sge: int


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """Attributes of a device (ibv_query_device_ex(3)); the names are the man page's.

    If the library or the driver has no extended query, the attributes that only
    that query returns (those from device_cap_flags_ex on) are 0.

    Attributes:
        fw_ver: version of the firmware.
        node_guid: GUID of the device, in host order.
        sys_image_guid: GUID of the system that it is part of, in host order.
        max_mr_size: bytes in one region.
        page_size_cap: a bit for each supported page size, in bytes.
        vendor_id: the vendor's OUI.
        vendor_part_id: the vendor's number for the model.
        hw_ver: version of the hardware.
        max_qp: queue pairs.
        max_qp_wr: work requests in one queue.
        device_cap_flags: what it can do.
        max_sge: SGEs in one work request.
        max_sge_rd: SGEs in one RDMA read.
        max_cq: completion queues.
        max_cqe: entries in one CQ.
        max_mr: regions.
        max_pd: protection domains.
        max_qp_rd_atom: incoming RDMA reads and atomics that one queue pair handles at once.
        max_qp_init_rd_atom: outgoing RDMA reads and atomics that one queue pair may have
            outstanding.
        max_res_rd_atom: incoming RDMA reads and atomics that the whole device handles at once.
        atomic_cap: the scope within which atomics are atomic.
        max_mw: memory windows.
        max_raw_ipv6_qp: raw IPv6 queue pairs.
        max_raw_ethy_qp: raw Ethertype queue pairs.
        max_mcast_grp: multicast groups.
        max_mcast_qp_attach: queue pairs in one group.
        max_total_mcast_qp_attach: queue pairs in all groups together.
        max_ah: address handles.
        max_srq: shared receive queues.
        max_srq_wr: work requests in one SRQ.
        max_srq_sge: SGEs in one receive of an SRQ.
        max_pkeys: P_Keys of a port.
        local_ca_ack_delay: its longest acknowledgement delay, 4.096 us * 2^delay.
        phys_port_cnt: ports.
        device_cap_flags_ex: what it can do, including flags beyond device_cap_flags' 32 bits;
            flags without a name keep their bits.
        completion_timestamp_mask: which bits of a completion's timestamp are valid; 0 for none.
        hca_core_clock: frequency of the timestamp clock, in kHz.
        odp_caps: on-demand paging.
        tso_caps: segmentation offload.
        raw_packet_caps: what raw packet queue pairs can do.
        tm_caps: tag matching.
        phys_port_cnt_ex: ports; unlike phys_port_cnt, it can exceed 255.
    """

    fw_ver: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: DeviceCap
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_res_rd_atom: int
    atomic_cap: AtomicCap
    max_mw: int
    max_raw_ipv6_qp: int
    max_raw_ethy_qp: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_total_mcast_qp_attach: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int
    device_cap_flags_ex: DeviceCap
    completion_timestamp_mask: int
    hca_core_clock: int
    odp_caps: ODPCaps
    tso_caps: TSOCaps
    raw_packet_caps: RawPacketCap
    tm_caps: TMCaps
    phys_port_cnt_ex: int


def read_device_attr(raw: Any) -> DeviceAttr:
    """Return the attributes in a ``struct ibv_device_attr_ex``."""
    orig, transports = raw.orig_attr, raw.odp_caps.per_transport_caps
    values: dict[str, Any] = {
        name: getattr(orig, name) for name in DeviceAttr.__dataclass_fields__ if hasattr(orig, name)
    }
    values["fw_ver"] = ffi.string(orig.fw_ver).decode(errors="replace")
    for guid in ("node_guid", "sys_image_guid"):
        values[guid] = int.from_bytes(values[guid].to_bytes(8, sys.byteorder))
    values["device_cap_flags"] = DeviceCap(orig.device_cap_flags)
    values["atomic_cap"] = reported(AtomicCap, orig.atomic_cap)
    tso, tm = raw.tso_caps, raw.tm_caps
    return DeviceAttr(
        **values,
        device_cap_flags_ex=DeviceCap(raw.device_cap_flags_ex),
        completion_timestamp_mask=raw.completion_timestamp_mask,
        hca_core_clock=raw.hca_core_clock,
        odp_caps=ODPCaps(
            ODPGeneralCap(raw.odp_caps.general_caps),
            ODPTransportCap(transports.rc_odp_caps),
            ODPTransportCap(transports.uc_odp_caps),
            ODPTransportCap(transports.ud_odp_caps),
            ODPTransportCap(raw.xrc_odp_caps),
        ),
        tso_caps=TSOCaps(tso.max_tso, tso.supported_qpts),
        raw_packet_caps=RawPacketCap(raw.raw_packet_caps),
        tm_caps=TMCaps(
            tm.max_rndv_hdr_size, tm.max_num_tags, TMCap(tm.flags), tm.max_ops, tm.max_sge
        ),
        # Older kernels do not report it.
        phys_port_cnt_ex=raw.phys_port_cnt_ex or orig.phys_port_cnt,
    )


def beyond(attr: DeviceAttr, *asked: tuple[str, int, str]) -> str | None:
    """Say which number exceeds its limit; return None if none does.

    Args:
        attr: the device's attributes.
        asked: the name of each number, the number, and the name of its limit.
    """
    for name, value, limit_name in asked:
        limit: int = getattr(attr, limit_name)
        if value > limit:
            return f"{name}={value} is more than the device's {limit_name}={limit}"
    return None


FLUSH_CAPS = {
    Access.FLUSH_GLOBAL: DeviceCap.FLUSH_GLOBAL,
    Access.FLUSH_PERSISTENT: DeviceCap.FLUSH_PERSISTENT,
}
"""The capability that each kind of FLUSH needs."""

_LARGEST_MTU = max(MTU, key=int)


def usable_mtu(port: PortAttr) -> MTU:
    """Return the largest MTU that a port supports and that this version of rdmapost can name.

    This is active_mtu, unless that value is known only to a newer libibverbs or driver.
    """
    return MTU(max(MTU.MTU_256, min(port.active_mtu, _LARGEST_MTU)))


def read_port_attr(port_num: int, raw: Any, active_speed_ex: int) -> PortAttr:
    """Return the attributes in a ``struct ibv_port_attr``, and active_speed_ex."""
    values = {
        name: getattr(raw, name) for name in PortAttr.__dataclass_fields__ if hasattr(raw, name)
    }
    values["state"] = reported(PortState, raw.state)
    values["link_layer"] = reported(LinkLayer, raw.link_layer)
    values["max_mtu"] = reported(MTU, raw.max_mtu)
    values["active_mtu"] = reported(MTU, raw.active_mtu)
    values["port_cap_flags"] = PortCap(raw.port_cap_flags)
    return PortAttr(port_num, active_speed_ex=active_speed_ex, **values)
