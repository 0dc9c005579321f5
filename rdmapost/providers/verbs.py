"""The control verbs for real devices, through libibverbs."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .._binding import address_of, ffi, lib, native
from ..enums import EventType, NodeType, TransportType, reported
from ..errors import NoDeviceError, NoRdmaError, UnsupportedError, VerbsError, describe_errno
from .base import DeviceInfo, GIDEntry

_LIBRARY = "libibverbs.so.1"
_LIBRARY_VARIABLE = "RDMAPOST_LIBIBVERBS"
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_ELEMENTS = {
    EventType.CQ_ERR: "cq",
    EventType.QP_FATAL: "qp",
    EventType.QP_REQ_ERR: "qp",
    EventType.QP_ACCESS_ERR: "qp",
    EventType.COMM_EST: "qp",
    EventType.SQ_DRAINED: "qp",
    EventType.PATH_MIG: "qp",
    EventType.PATH_MIG_ERR: "qp",
    EventType.QP_LAST_WQE_REACHED: "qp",
    EventType.SRQ_ERR: "srq",
    EventType.SRQ_LIMIT_REACHED: "srq",
    EventType.WQ_FATAL: "wq",
    EventType.PORT_ACTIVE: "port_num",
    EventType.PORT_ERR: "port_num",
    EventType.LID_CHANGE: "port_num",
    EventType.PKEY_CHANGE: "port_num",
    EventType.SM_CHANGE: "port_num",
    EventType.CLIENT_REREGISTER: "port_num",
    EventType.GID_CHANGE: "port_num",
}
"""The member of an event that names its subject. Events about the whole device have no subject,
and neither do events of unknown types."""
_NO_EVENT = int(ffi.cast("enum ibv_event_type", -1))


def _failed(call: str, code: int) -> VerbsError:
    if code in _UNSUPPORTED:
        return UnsupportedError(call, code)
    return VerbsError(call, code or errno.EIO)


def _zero(call: str, result: int) -> None:
    """Raise if a call failed: if it returned an errno, a negative errno, or -1 with errno set."""
    if result:
        raise _failed(call, ffi.errno if result == -1 else abs(result))


def _group(gid: bytes) -> Any:
    """Return a GID as a union ibv_gid."""
    struct = ffi.new("union ibv_gid *")
    struct.raw = gid
    return struct


def _load() -> None:
    path = os.environ.get(_LIBRARY_VARIABLE) or _LIBRARY
    why = ffi.new("char[512]")
    if not lib.rp_load(path.encode(), why, len(why)):
        return
    text = ffi.string(why).decode(errors="replace")
    if path == _LIBRARY:
        advice = (
            "install it: 'apt install libibverbs1 ibverbs-providers' (Debian, Ubuntu), "
            "'dnf install libibverbs' (Fedora, RHEL)"
        )
    else:
        advice = f"{_LIBRARY_VARIABLE} names it; unset it to use the system's {_LIBRARY}"
    raise NoRdmaError(f"libibverbs cannot be loaded ({text}); {advice}")


class VerbsProvider:
    """libibverbs, loaded when a device is first listed or opened."""

    kind = "verbs"
    spin_ns = 20_000
    default_timeout = 14

    # ---- devices ------------------------------------------------------------

    def list_devices(self) -> list[DeviceInfo]:
        with _DeviceList() as devices:
            return [
                DeviceInfo(
                    name=ffi.string(device.name).decode(),
                    kind=self.kind,
                    guid=_from_network(lib.ibv_get_device_guid(device), 8),
                    node_type=reported(NodeType, device.node_type),
                    dev_path=ffi.string(device.ibdev_path).decode(),
                    transport_type=reported(TransportType, device.transport_type),
                )
                for device in devices
            ]

    def found_device(self, name: str) -> AbstractContextManager[Any]:
        return _FoundDevice(name)

    open_device = lib.ibv_open_device
    close_device = lib.ibv_close_device

    def lacks(self, call: str) -> bool:
        return not lib.rp_has_symbol(call.encode())

    def query_device_ex(self, context: Any, attr: Any) -> None:
        _zero("ibv_query_device_ex", lib.ibv_query_device_ex(context, ffi.NULL, attr))

    def query_port(self, context: Any, port_num: int, attr: Any) -> int:
        speed = ffi.new("uint32_t *")
        _zero("ibv_query_port", lib.rp_query_port(context, port_num, attr, speed))
        return int(speed[0])

    def query_gid_table(self, context: Any, port_num: int, length: int) -> list[GIDEntry]:
        if lib.rp_has_symbol(b"_ibv_query_gid_table"):
            entries = ffi.new("struct ibv_gid_entry[]", max(256, length))
            count = lib.ibv_query_gid_table(context, entries, len(entries), 0)
            if count < 0 and -count not in _UNSUPPORTED:
                raise _failed("ibv_query_gid_table", -count)
            if count >= 0:
                # The call reports every port of the device.
                return [
                    GIDEntry(e.gid_index, bytes(e.gid.raw), e.gid_type, _interface(e.ndev_ifindex))
                    for e in entries[0:count]
                    if e.port_num == port_num
                ]
        return self._query_gids_one_by_one(context, port_num, 0, length)

    def _query_gids_one_by_one(
        self, context: Any, port_num: int, start: int, end: int
    ) -> list[GIDEntry]:
        # For rdma-core before 32; the GID types are then unknown.
        found = []
        gid = ffi.new("union ibv_gid *")
        for index in range(start, end):
            if lib.ibv_query_gid(context, port_num, index, gid) == 0:
                raw = bytes(gid.raw)
                if any(raw):
                    found.append(GIDEntry(index, raw, None, ""))
        return found

    def query_gid_ex(self, context: Any, port_num: int, index: int) -> GIDEntry:
        if lib.rp_has_symbol(b"_ibv_query_gid_ex"):
            entry = ffi.new("struct ibv_gid_entry *")
            code = abs(lib.ibv_query_gid_ex(context, port_num, index, entry, 0))
            if code not in _UNSUPPORTED:
                _zero("ibv_query_gid_ex", code)
                ndev = _interface(entry.ndev_ifindex)
                return GIDEntry(index, bytes(entry.gid.raw), entry.gid_type, ndev)
        for found in self._query_gids_one_by_one(context, port_num, index, index + 1):
            return found
        raise VerbsError("ibv_query_gid", errno.ENODATA)

    def query_pkey(self, context: Any, port_num: int, index: int) -> int:
        pkey = ffi.new("uint16_t *")
        _zero("ibv_query_pkey", lib.ibv_query_pkey(context, port_num, index, pkey))
        return _from_network(pkey[0], 2)

    def query_rt_values(self, context: Any) -> int:
        raw_clock = ffi.new("uint64_t *")
        _zero("ibv_query_rt_values_ex", lib.rp_query_rt_values(context, raw_clock))
        now: int = raw_clock[0]
        return now

    def get_async_event(self, context: Any, events: dict[object, Any]) -> None:
        event, key = ffi.new("struct ibv_async_event *"), object()
        event.event_type = _NO_EVENT
        try:
            failed = lib.rp_get_async_event(context, event)
        finally:
            # An interrupt during the call is raised only after it, when the event has been
            # acknowledged. Python runs signal handlers only after calls, so none runs before the
            # event is stored.
            if event.event_type != _NO_EVENT:
                events[key] = event
        if failed and ffi.errno != errno.EAGAIN:
            raise _failed("ibv_get_async_event", ffi.errno)

    def read_async_event(self, event: Any) -> tuple[int, Any]:
        member = _ELEMENTS.get(event.event_type)
        return event.event_type, None if member is None else getattr(event.element, member)

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> Any:
        raise UnsupportedError(
            "fault injection", errno.EOPNOTSUPP, "only soft0 and roce devices support it"
        )

    def capture(self, context: Any, path: Any, wr_id_of: Callable[[int], Any]) -> Any:
        raise UnsupportedError(
            "Context.capture",
            errno.EOPNOTSUPP,
            "only roce devices see their packets; use 'tcpdump -i NETDEV udp port 4791' for "
            "Soft-RoCE, and 'ibdump' or a mirror port of the switch for a NIC",
        )

    def counters(self, context: Any) -> Any:
        raise UnsupportedError(
            "Context.counters",
            errno.EOPNOTSUPP,
            "only roce devices have these counters; read "
            "/sys/class/infiniband/NAME/ports/PORT/hw_counters",
        )

    # ---- memory -------------------------------------------------------------

    alloc_pd = lib.ibv_alloc_pd
    dealloc_pd = lib.ibv_dealloc_pd
    reg_mr = lib.rp_reg_mr
    dereg_mr = lib.ibv_dereg_mr
    reg_mr_at = reg_mr_mmap = lib.rp_reg_mr
    reg_dmabuf_mr = lib.ibv_reg_dmabuf_mr
    rereg_mr = rereg_mr_at = rereg_mr_mmap = lib.ibv_rereg_mr
    alloc_mw = lib.ibv_alloc_mw
    dealloc_mw = lib.ibv_dealloc_mw

    def advise_mr(self, pd: Any, advice: int, flags: int, sges: Any, count: int) -> None:
        _zero("ibv_advise_mr", lib.ibv_advise_mr(pd, advice, flags, sges, count))

    # ---- completions --------------------------------------------------------

    create_comp_channel = lib.ibv_create_comp_channel
    destroy_comp_channel = lib.ibv_destroy_comp_channel
    create_cq = lib.rp_create_cq
    create_cq_ex = lib.rp_create_cq_ex
    destroy_cq = lib.ibv_destroy_cq

    def resize_cq(self, cq: Any, cqe: int) -> None:
        _zero("ibv_resize_cq", lib.ibv_resize_cq(cq, cqe))

    def has_overrun(self, cq: Any) -> bool:
        return False  # only an event reports it

    def sends_for_receive(self, qp: Any) -> None:
        return None

    def get_cq_event(self, channel: Any, events: dict[int, None]) -> bool | None:
        return native.get_cq_event(address_of(channel), events)

    # ---- queues -------------------------------------------------------------

    create_srq = lib.ibv_create_srq
    create_srq_ex = lib.ibv_create_srq_ex
    destroy_srq = lib.ibv_destroy_srq
    open_xrcd = lib.ibv_open_xrcd
    close_xrcd = lib.ibv_close_xrcd
    create_qp = lib.ibv_create_qp
    create_qp_ex = lib.ibv_create_qp_ex
    destroy_qp = lib.ibv_destroy_qp
    create_ah = lib.ibv_create_ah
    destroy_ah = lib.ibv_destroy_ah

    def init_ah_from_wc(self, context: Any, port_num: int, wc: Any, grh: Any, attr: Any) -> None:
        if lib.ibv_init_ah_from_wc(context, port_num, wc, grh, attr):
            raise _failed("ibv_init_ah_from_wc", ffi.errno)

    def get_srq_num(self, srq: Any) -> int:
        number = ffi.new("uint32_t *")
        _zero("ibv_get_srq_num", lib.ibv_get_srq_num(srq, number))
        found: int = number[0]
        return found

    def modify_srq(self, srq: Any, attr: Any, mask: int) -> None:
        _zero("ibv_modify_srq", lib.ibv_modify_srq(srq, attr, mask))

    def query_srq(self, srq: Any, attr: Any) -> None:
        _zero("ibv_query_srq", lib.ibv_query_srq(srq, attr))

    def modify_qp(self, qp: Any, attr: Any, mask: int) -> None:
        _zero("ibv_modify_qp", lib.ibv_modify_qp(qp, attr, mask))

    def query_qp(self, qp: Any, attr: Any, mask: int, init_attr: Any) -> None:
        _zero("ibv_query_qp", lib.ibv_query_qp(qp, attr, mask, init_attr))

    def query_qp_data_in_order(self, qp: Any, op: int, flags: int) -> int:
        if not lib.rp_has_symbol(b"ibv_query_qp_data_in_order"):
            raise UnsupportedError("ibv_query_qp_data_in_order", errno.EOPNOTSUPP)
        order: int = lib.ibv_query_qp_data_in_order(qp, op, flags)
        return order

    def attach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        _zero("ibv_attach_mcast", lib.ibv_attach_mcast(qp, _group(gid), lid))

    def detach_mcast(self, qp: Any, gid: bytes, lid: int) -> None:
        _zero("ibv_detach_mcast", lib.ibv_detach_mcast(qp, _group(gid), lid))


class _DeviceList:
    """The list of ibv_get_device_list(3), freed on exit."""

    def __enter__(self) -> list[Any]:
        _load()
        count = ffi.new("int *")
        ffi.errno = 0
        self._list = lib.ibv_get_device_list(count)
        if self._list == ffi.NULL:
            # ENOSYS, which old libraries negate: this kernel has no RDMA support.
            code = abs(ffi.errno)
            if code in (0, errno.ENOSYS, errno.ENOENT):
                return []
            raise VerbsError("ibv_get_device_list", code)
        return [self._list[i] for i in range(count[0])]

    def __exit__(self, *_: object) -> None:
        if self._list != ffi.NULL:
            lib.ibv_free_device_list(self._list)


class _FoundDevice(_DeviceList):
    """The device with a given name in the list of ibv_get_device_list(3)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Any:
        devices = super().__enter__()
        try:
            found = [each for each in devices if ffi.string(each.name).decode() == self._name]
            if not found:
                raise NoDeviceError(f"the RDMA device {self._name} is gone")
        except BaseException:
            super().__exit__()
            raise
        self._device = found[0]
        return self._device

    def __exit__(self, *about: object) -> None:
        try:
            if isinstance(about[1], VerbsError):
                raise _cannot_open(self._device, self._name, about[1].errno or 0) from None
        finally:
            super().__exit__()


def _cannot_open(device: Any, name: str, code: int) -> VerbsError:
    node = "/dev/infiniband/" + ffi.string(device.dev_name).decode()
    if not os.path.exists(node):
        hint = f"{name}: {node} is missing; load the module: 'modprobe ib_uverbs'"
    elif not os.access(node, os.R_OK | os.W_OK):
        code = code or errno.EACCES
        hint = f"{name}: no permission for {node}; run as root, or let your group use it (udev)"
    else:
        hint = f"{name}: the driver refused with {describe_errno(code)}; see 'dmesg'"
    return VerbsError("ibv_open_device", code or errno.EIO, hint)


def _from_network(value: int, size: int) -> int:
    """Swap the bytes of a big-endian integer that was read in host order."""
    return int.from_bytes(value.to_bytes(size, sys.byteorder))


def _interface(index: int) -> str:
    if not index:
        return ""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return ""
