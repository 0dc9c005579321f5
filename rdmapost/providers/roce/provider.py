"""The control verbs of devices that speak RoCE v2 over a UDP socket."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from ...enums import QPType
from ...errors import NoDeviceError, UnsupportedError, VerbsError, is_from_system
from ...standard.wire import ROCE_V2_PORT
from ..base import ROCE, Capture, Counters, DeviceInfo, RoceInterface
from ..software import create_queues
from ..software.device import open_devices
from ..software.provider import SoftwareProvider, open_context
from ..software.state import context_of, verb
from . import udp_socket
from .addresses import LocalAddress, candidates
from .capture import RoceCapture
from .device import RoceDevice, guid_of
from .interfaces import holder, list_interfaces

_TYPES = frozenset({QPType.RC, QPType.UC, QPType.UD})


class RoceProvider(SoftwareProvider):
    """The control verbs of RoCE v2 over UDP."""

    kind = "roce"
    vendor_part_id = 2
    # 0.5 s: the peer is a process, which responds late while it or its machine is busy.
    default_timeout = 17

    def list_devices(self) -> list[DeviceInfo]:
        """List the devices that are open; others can be opened by name."""
        return [
            self.info(name, device.guid)
            for name, device in list(open_devices.items())
            if name.startswith(ROCE)
        ]

    def find(self, name: str) -> DeviceInfo:
        """Return the device with this name, which begins with "roce:".

        Raises:
            NoDeviceError: this machine has no such network device or address.
            VerbsError: the addresses cannot be listed, for lack of descriptors.
        """
        try:
            candidates(name.removeprefix(ROCE))
        except LookupError as error:
            raise NoDeviceError(f"there is no device {name}: {error}") from None
        except OSError as error:
            if not is_from_system(error):
                raise
            raise VerbsError("ibv_open_device", error.errno or errno.EIO) from None
        return self.info(name, guid_of(name))

    def list_interfaces(self) -> list[RoceInterface]:
        """List the devices that can be opened and those that cannot, with the reason."""
        return list_interfaces()

    @verb
    def open_device(name: str) -> Any:
        try:
            return open_context(open_devices.get(name) or RoceDevice(name))
        except VerbsError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            address = candidates(name.removeprefix(ROCE))[0]
            who = _opened_as(address) or holder(address)
            reason = f"UDP port {ROCE_V2_PORT} of {address.host} is taken by {who}"
            raise VerbsError("ibv_open_device", errno.EADDRINUSE, reason) from None

    def capture(self, context: Any, path: Any, wr_id_of: Callable[[int], Any]) -> Capture:
        opened = context_of(context, "capture")
        opened.wr_id_of = wr_id_of
        return RoceCapture(path, opened.device)

    @verb
    def counters(context: Any) -> Counters:
        device: Any = context_of(context, "Context.counters").device
        device.sender.note_errors(device)
        counted: Counters = device.counters.now(udp_socket.dropped(device.socket))
        return counted

    @verb
    def create_srq_ex(context: Any, init: Any) -> Any:
        raise UnsupportedError(
            "ibv_create_srq_ex", errno.EOPNOTSUPP, "roce devices have only basic SRQs"
        )

    @verb
    def open_xrcd(context: Any, init: Any) -> Any:
        raise UnsupportedError("ibv_open_xrcd", errno.EOPNOTSUPP, "roce devices have no XRC")

    @verb
    def close_xrcd(xrcd: Any) -> None:
        raise UnsupportedError("ibv_close_xrcd", errno.EOPNOTSUPP, "roce devices have no XRC")

    @verb
    def create_qp(pd: Any, init: Any) -> Any:
        _check_type("ibv_create_qp", init.qp_type)
        return create_queues.make_qp(pd.context, pd, init)

    @verb
    def create_qp_ex(context: Any, init: Any) -> Any:
        _check_type("ibv_create_qp_ex", init.qp_type)
        return create_queues.make_qp_ex(context, init)

    @verb
    def attach_mcast(qp: Any, gid: bytes, lid: int) -> None:
        raise UnsupportedError(
            "ibv_attach_mcast", errno.EOPNOTSUPP, "roce devices have no multicast"
        )

    @verb
    def detach_mcast(qp: Any, gid: bytes, lid: int) -> None:
        raise VerbsError("ibv_detach_mcast", errno.EINVAL)


def _check_type(name: str, qp_type: int) -> None:
    if qp_type not in _TYPES:
        text = f"roce devices have no {QPType(qp_type).name} queue pairs"
        if qp_type in create_queues.QP_TYPES:
            text += "; soft0 has them"
        raise UnsupportedError(name, errno.EOPNOTSUPP, text)


def _opened_as(address: LocalAddress) -> str | None:
    """Say which of this process's open devices has this address, or return None."""
    for name, device in list(open_devices.items()):
        if isinstance(device, RoceDevice) and device.address == address:
            return f"{name}, which this process has opened: open it by that name"
    return None
