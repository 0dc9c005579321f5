"""Devices: the list, opening one, its attributes, ports and tables."""

from __future__ import annotations

import functools
import operator
import os
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from .._arguments import expect, index
from .._arguments import index as whole_number
from .._binding import ffi, native
from ..enums import MTU, AtomicCap, DeviceCap, GIDType, LinkLayer, NodeType, PortState
from ..errors import NoDeviceError, NoRdmaError
from ..providers import DeviceInfo, Provider, soft_provider, verbs_provider
from ..standard.wire import is_multicast_gid
from .waiting import EventSource

_DEVICE_VARIABLE = "RDMAPOST_DEVICE"

NO_DEVICES = (
    "this machine has none; load the NIC's driver, or make a Soft-RoCE device with "
    "'modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0'; or use the "
    "software device, soft0"
)


class GID(bytes):
    """A global identifier: 16 bytes, shown as an IPv6 address (``union ibv_gid``).

    Args:
        value: 16 bytes (or another buffer of them), or text such as "fe80::1" or "::ffff:10.0.0.1".

    Raises:
        TypeError: value is neither bytes-like nor text.
        ValueError: value is not 16 bytes, or not an IPv6 address.
    """

    def __new__(cls, value: bytes | str) -> GID:
        return super().__new__(cls, _gid_bytes("value", value))

    def __str__(self) -> str:
        address = IPv6Address(bytes(self))
        mapped = address.ipv4_mapped
        return f"::ffff:{mapped}" if mapped else str(address)

    def __repr__(self) -> str:
        return f"GID('{self}')"

    @property
    def is_link_local(self) -> bool:
        """Whether it is a link-local address, made from a MAC or a GUID."""
        return IPv6Address(bytes(self)).is_link_local

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 address mapped into IPv6."""
        return IPv6Address(bytes(self)).ipv4_mapped is not None

    @property
    def is_multicast(self) -> bool:
        """Whether it names a multicast group: ff00::/8, or 224.0.0.0/4 mapped into IPv6."""
        return is_multicast_gid(self)


def gid_argument(name: str, given: Any) -> GID:
    """Return an argument or a field as a GID; errors name it."""
    return bytes.__new__(GID, _gid_bytes(name, given))


def _gid_bytes(name: str, value: Any) -> bytes:
    expect(name, value, bytes, str, bytearray, memoryview)
    if isinstance(value, str):
        try:
            raw = IPv6Address(value).packed
        except ValueError:
            raise ValueError(f"{name}: {value!r} {_why_no_gid(value)}") from None
    else:
        raw = bytes(value)
    if len(raw) != 16:
        raise ValueError(f"{name}: a GID has 16 bytes, not {len(raw)}")
    return raw


def _why_no_gid(text: str) -> str:
    try:
        return f"is an IPv4 address; its GID is '::ffff:{IPv4Address(text)}'"
    except ValueError:
        return "is not an IPv6 address"


@dataclass(frozen=True, slots=True)
class GIDTableEntry:
    """A valid entry of a port's GID table (ibv_query_gid_table(3)).

    Attributes:
        index: its index in the table, for gid_index.
        gid: the GID.
        gid_type: its type, or None if libibverbs does not report it.
        ndev: name of the network device behind it, or "".
    """

    index: int
    gid: GID
    gid_type: GIDType | None
    ndev: str


@dataclass(frozen=True, slots=True)
class PortAttr:
    """Attributes of a port (ibv_query_port(3)).

    Attributes:
        port_num: the port, from 1.
        state: its state; only ACTIVE carries traffic.
        link_layer: InfiniBand or Ethernet.
        max_mtu, active_mtu: the largest path MTU, and the one in use.
        gid_tbl_len, pkey_tbl_len: entries in the GID and the P_Key table.
        max_msg_sz: the largest message, in bytes.
        lid, sm_lid: local identifiers; 0 on Ethernet.
        phys_state: 5 is LinkUp, 3 is Disabled.
        active_speed, active_width: encoded as in the man page.
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


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """Attributes of a device (ibv_query_device(3)); the names are the man page's."""

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
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int


def list_devices() -> list[DeviceInfo]:
    """List the devices that can be opened: those of libibverbs, and the software device.

    Without libibverbs there is only the software device.

    Raises:
        VerbsError: the kernel could not be queried.

    See ibv_get_device_list(3).
    """
    try:
        found = verbs_provider().list_devices()
    except NoRdmaError:
        found = []
    return found + soft_provider().list_devices()


def open_device(name: str | None = None) -> Context:
    """Open a device.

    Args:
        name: its name; "soft0" is the software device of this process.  None opens
            the device that RDMAPOST_DEVICE names or, if that is not set, the first
            device of libibverbs with an active port, never the software device.

    Raises:
        TypeError: name is neither text nor None.
        NoRdmaError: libibverbs cannot be loaded.
        NoDeviceError: there is no such device, or none with an active port.
        VerbsError: the device cannot be opened; the text says what is missing.

    See ibv_open_device(3).
    """
    expect("name", name, str, None)
    if name is None:
        name = os.environ.get(_DEVICE_VARIABLE) or None
    if name is None:
        return _open_active()
    # The soft device first: it exists with or without libibverbs.
    for provider in (soft_provider(), verbs_provider()):
        found = provider.list_devices()
        for info in found:
            if info.name == name:
                return Context(provider, info)
    names = ", ".join(info.name for info in found)
    devices = f"there is {names}" if names else NO_DEVICES
    raise NoDeviceError(f"there is no RDMA device {name or repr(name)}: {devices}")


def _open_active() -> Context:
    provider = verbs_provider()
    seen = []
    for info in provider.list_devices():
        context = Context(provider, info)
        ports = [context.query_port(n) for n in range(1, context.attr.phys_port_cnt + 1)]
        if any(port.state is PortState.ACTIVE for port in ports):
            return context
        seen += [f"{info.name} port {port.port_num} is {port.state.name}" for port in ports]
        context.close()
    if seen:
        raise NoDeviceError(
            f"no RDMA device has an active port ({'; '.join(seen)}); bring the link up, "
            "or name a device"
        )
    raise NoDeviceError(f"there is no RDMA device: {NO_DEVICES}")


class Context(EventSource, struct="ibv_context"):
    """An open device (ibv_open_device(3)); open_device() creates it.

    Attributes:
        name: the device's name.
        kind: "verbs" for a device of libibverbs, "soft" for the software device.
        guid: its node GUID, in host order.
        node_type: its type, a NodeType.
        attr: its attributes, a DeviceAttr.
    """

    __slots__ = ("_provider", "_queues", "attr", "guid", "kind", "name", "node_type")

    _type_name = "device"
    _rank = 9

    def __init__(self, provider: Provider, info: DeviceInfo) -> None:
        self._provider = provider
        self._queues: dict[int, native.InFlight] = {}
        self._events = {}
        self._poller = native.Poller({}, False, 0, -1, None)
        self.name = info.name
        self.kind = provider.kind
        self.guid = info.guid
        self.node_type = _enum(NodeType, info.node_type, NodeType.UNKNOWN)
        with provider.found_device(info.name) as device:
            self._make(provider.open_device, (device,), provider.close_device, ())
        # An event that another thread took must not block this one.
        os.set_blocking(self.async_fd, False)
        self.attr = self._query_attr()

    def __str__(self) -> str:
        return f"device {self.name}" if hasattr(self, "name") else self._type_name

    def _event_fd(self) -> int:
        return self.async_fd

    def _get_event(self) -> object:
        return self._verb(self._provider.get_async_event, self._events)

    def _query_attr(self) -> DeviceAttr:
        raw = ffi.new("struct ibv_device_attr *")
        self._verb(self._provider.query_device, raw)
        values: dict[str, Any] = {
            name: getattr(raw, name) for name in DeviceAttr.__dataclass_fields__
        }
        values["fw_ver"] = ffi.string(raw.fw_ver).decode(errors="replace")
        for guid in ("node_guid", "sys_image_guid"):
            values[guid] = int.from_bytes(values[guid].to_bytes(8, sys.byteorder))
        values["device_cap_flags"] = DeviceCap(raw.device_cap_flags)
        values["atomic_cap"] = _enum(AtomicCap, raw.atomic_cap, AtomicCap.NONE)
        return DeviceAttr(**values)

    def query_port(self, port_num: int = 1) -> PortAttr:
        """Return the attributes of a port as they are now.

        Args:
            port_num: the port, 1..attr.phys_port_cnt.

        Raises:
            ValueError: the device has no such port.
            ClosedError: the device is closed.
            VerbsError: the query failed.

        See ibv_query_port(3).
        """
        port_num = self._check_port(port_num)
        raw = ffi.new("struct ibv_port_attr *")
        self._verb(self._provider.query_port, port_num, raw)
        names = PortAttr.__dataclass_fields__.keys() - {"port_num"}
        values = {name: getattr(raw, name) for name in names}
        values["state"] = _enum(PortState, raw.state, PortState.NOP)
        values["link_layer"] = _enum(LinkLayer, raw.link_layer, LinkLayer.UNSPECIFIED)
        values["max_mtu"] = _enum(MTU, raw.max_mtu, MTU.MTU_4096)
        values["active_mtu"] = _enum(MTU, raw.active_mtu, MTU.MTU_256)
        return PortAttr(port_num, **values)

    def query_gid_table(self, port_num: int = 1) -> list[GIDTableEntry]:
        """Return the valid entries of a port's GID table.

        Args:
            port_num: the port, from 1.

        Raises:
            ValueError: the device has no such port.
            ClosedError: the device is closed.
            VerbsError: the device failed.

        See ibv_query_gid_table(3).
        """
        length = self.query_port(port_num).gid_tbl_len
        return [
            GIDTableEntry(
                entry.gid_index,
                GID(entry.raw),
                None if entry.gid_type is None else GIDType(entry.gid_type),
                entry.ndev,
            )
            for entry in self._verb(self._provider.query_gid_table, port_num, length)
        ]

    def query_pkey(self, port_num: int = 1, index: int = 0) -> int:
        """Return an entry of a port's P_Key table, in host order.

        Args:
            port_num: the port, from 1.
            index: which entry, from 0.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the device has no such port.
            ClosedError: the device is closed.
            VerbsError: there is no such entry, or the device failed.

        See ibv_query_pkey(3).
        """
        port_num, entry = self._check_port(port_num), whole_number("index", index)
        pkey: int = self._verb(self._provider.query_pkey, port_num, entry)
        return pkey

    @property
    def async_fd(self) -> int:
        """File descriptor that is readable when there is an asynchronous event.

        soft0's is also readable when a work request is due for a retry, which the next call of any
        kind makes: get_async_event() may then return None.

        Raises:
            ClosedError: the device is closed.
        """
        fd: int = self._verb(_ASYNC_FD)
        return fd

    @property
    def faults(self) -> Any:
        """The faults to inject (rdmapost.providers.soft0.engine.faults.FaultPlan), on soft0 only.

        Raises:
            UnsupportedError: this is a real device.
            ClosedError: the device is closed.
        """
        # The plan lives as long as the device: it must not keep the context open.
        return self._verb(self._provider.faults, functools.partial(_wr_id_of, self._queues))

    def _check_port(self, port_num: int) -> int:
        """Return the number of an existing port, as an int."""
        port_num, count = index("port_num", port_num), self.attr.phys_port_cnt
        if 1 <= port_num <= count:
            return port_num
        raise ValueError(
            f"{self.name} has no port {port_num}; its ports are 1..{count}"
            if count > 1
            else f"{self.name} has no port {port_num}; its only port is 1"
        )


def query_device_ex(context: Context) -> Any:
    """Return a ``struct ibv_device_attr_ex *`` of a device (ibv_query_device_ex(3))."""
    attr = ffi.new("struct ibv_device_attr_ex *")
    context._verb(context._provider.query_device_ex, attr)
    return attr


def provider_of(context: Context) -> Provider:
    """Return the provider of a device's control verbs."""
    return context._provider


def in_flight_of(context: Context) -> dict[int, native.InFlight]:
    """Return what is posted to a device's queues, by the number of each queue."""
    return context._queues


_ASYNC_FD = operator.attrgetter("async_fd")


def _wr_id_of(queues: dict[int, native.InFlight], cookie: int) -> int | None:
    queue = queues.get(cookie >> 32)
    return None if queue is None else queue.peek(cookie)


def _enum(enum: Any, value: int, otherwise: Any) -> Any:
    """Return a member by value; for a value that only a newer device reports, `otherwise`."""
    try:
        return enum(value)
    except ValueError:
        return otherwise
