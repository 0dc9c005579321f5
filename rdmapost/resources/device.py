"""Devices: list them, open one, query its attributes, ports and tables, and choose a GID."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import operator
import os
from typing import Any

from .._arguments import expect, index, shown, within
from .._binding import ffi, native
from ..enums import GIDType, NodeType, PortState, reported
from ..errors import (
    ADD_SOFT_ROCE,
    CloseError,
    NoDeviceError,
    NoRdmaError,
    RdmaError,
    UnsupportedError,
    VerbsError,
    where_explained,
)
from ..providers import (
    ROCE,
    Capture,
    Counters,
    DeviceInfo,
    FaultPlan,
    GIDEntry,
    Provider,
    RoceInterface,
    roce_provider,
    soft_provider,
    verbs_provider,
)
from .device_attr import PortAttr, read_device_attr, read_port_attr
from .events import AsyncEvent, next_async_event
from .gid import GID, GIDChoice, GIDTableEntry, no_such_gid, preferred_gid
from .resource import close_with_all_below
from .waitable import EventSource, wait_for_event

_SOFTWARE_DEVICES = "soft0", f"{ROCE}lo"
_MAX_TABLE_ENTRIES = 1 << 16
"""The most entries of a GID or P_Key table."""

NO_DEVICES = (
    "this machine has none; load the NIC's driver, or, if the kernel has it ('rdmapost doctor'), "
    f"make a Soft-RoCE device with '{ADD_SOFT_ROCE.format('eth0')}'; "
    "or use a software device: soft0 within one process, roce:lo between processes"
)


def list_devices() -> list[DeviceInfo]:
    """List the devices that can be opened: those of libibverbs, and soft0, the software device.

    Without libibverbs there is only soft0.

    Raises:
        VerbsError: the kernel could not be queried.

    See ibv_get_device_list(3).
    """
    try:
        found = verbs_provider().list_devices()
    except NoRdmaError:
        found = []
    return found + soft_provider().list_devices()


def list_roce_interfaces() -> list[RoceInterface]:
    """List the network devices with an address; say whether a roce device can be opened on each.

    Returns:
        for each network device that has an address: the name for open_device(), the
        address, the path MTU, and why the roce device cannot be opened now, or None. UDP
        port 4791 of the address may be held by another program, Soft-RoCE or a roce device
        of this process; "roce:lo" then takes the next free loopback address.

    Raises:
        VerbsError: the network devices cannot be listed, for lack of descriptors.
    """
    return roce_provider().list_interfaces()


def device_of_environment() -> str | None:
    """Return the device that RDMAPOST_DEVICE names, or None."""
    return os.environ.get("RDMAPOST_DEVICE") or None


def open_device(name: str | None = None) -> Context:
    """Open a device.

    Args:
        name: its name.  "soft0" is the software device in this process; "roce:" followed by a
            network device or an address, such as "roce:lo", "roce:eth0" or "roce:10.0.0.2", is a
            software device that speaks RoCE v2 over a UDP socket.  None opens the device that
            RDMAPOST_DEVICE names or, if that is not set, the first device of libibverbs with an
            active port, never a software device.

    Raises:
        TypeError: name is neither text nor None.
        NoRdmaError: libibverbs cannot be loaded.
        NoDeviceError: there is no such device, or none with an active port.
        VerbsError: the device cannot be opened; the message says what is missing.

    See ibv_open_device(3).
    """
    expect("name", name, str, None)
    if name is None:
        name = device_of_environment()
    if name is None:
        return _open_active()
    if name.startswith(ROCE):
        roce = roce_provider()
        return Context(roce, roce.find(name))
    # Try soft0 first: it does not need libibverbs.
    for provider in (soft_provider(), verbs_provider()):
        found = provider.list_devices()
        for info in found:
            if info.name == name:
                return Context(provider, info)
    raise NoDeviceError(f"there is no RDMA device {name or repr(name)}{_instead(name, found)}")


def _instead(name: str, found: list[DeviceInfo]) -> str:
    """Say which device may have been meant, or which devices exist."""
    names = [info.name for info in found]
    near = difflib.get_close_matches(name.lower(), [*names, *_SOFTWARE_DEVICES], n=1)
    if not near:
        with contextlib.suppress(RdmaError):
            # The name of a network device.
            near = [roce_provider().find(f"{ROCE}{name}").name]
    if near and near[0] not in names:
        return f"; did you mean {near[0]}?"
    return f": there is {', '.join(names)}" if names else f": {NO_DEVICES}"


def _open_active() -> Context:
    provider = verbs_provider()
    seen = []
    for info in provider.list_devices():
        context = Context(provider, info)
        ports = [context.query_port(n) for n in range(1, context.attr.phys_port_cnt + 1)]
        if any([port.state is PortState.ACTIVE for port in ports]):
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
        kind: "verbs" for a device of libibverbs, "soft" for soft0, "roce" for RoCE v2 over UDP.
        guid: its node GUID, in host order.
        node_type: its type, a NodeType.
        attr: its attributes, a DeviceAttr.
    """

    __slots__ = (
        "_invalidated",
        "_provider",
        "_queues",
        "attr",
        "guid",
        "kind",
        "name",
        "node_type",
    )

    _type_name = "device"
    _rank = 9
    _instead = ", or call close_all()"

    def __init__(self, provider: Provider, info: DeviceInfo) -> None:
        self._provider = provider
        self._queues: dict[int, Any] = {}
        self._invalidated: dict[int, bytes] = {}
        self._events = {}
        self._poller = native.Poller(None, {}, {}, 0, 0, -1, None)
        self.name = info.name
        self.kind = provider.kind
        self.guid = info.guid
        self.node_type = reported(NodeType, info.node_type)
        with provider.found_device(info.name) as device:
            self._make(provider.open_device, (device,), provider.close_device, ())
        # A thread must not block if another one reads the event first.
        os.set_blocking(self.async_fd, False)
        raw = ffi.new("struct ibv_device_attr_ex *")
        self._verb(provider.query_device_ex, raw)
        self.attr = read_device_attr(raw)

    def __str__(self) -> str:
        return f"device {self.name}" if hasattr(self, "name") else self._type_name

    def _event_fd(self) -> int:
        return self.async_fd

    def _get_event(self) -> object:
        return self._verb(self._provider.get_async_event, self._events)

    def close_all(self) -> None:
        """Close everything that was created on the device, then the device.

        rdmapost.connect's servers are closed first, as if by their close().  The rest are closed in
        an order that devices accept: windows, queue pairs, address handles, shared receive queues,
        regions, CQs, channels, XRC domains and protection domains.  Outstanding work ends with the
        queue pairs; threads and tasks that wait on a CQ, a channel or the device get ClosedError.
        On a closed device it does nothing.

        Raises:
            CloseError: a resource could not be closed.  Everything else that could be closed is
                closed, but the device is still open; call this again once the cause is gone.

        See ibv_close_device(3).
        """
        errors = close_with_all_below(self)
        for resource, error in errors:
            more = f" (and {len(errors) - 1} more: see errors)" if len(errors) > 1 else ""
            text = resource._failure_text(error)
            raise CloseError(text + more, tuple([each for _, each in errors])) from error

    def query_rt_values(self) -> int:
        """Return the current value of the device's clock (raw_clock).

        It counts ticks at attr.hca_core_clock kHz, like WC.completion_ts; only the bits in
        attr.completion_timestamp_mask are valid.

        Raises:
            ClosedError: the device is closed.
            UnsupportedError: the device has no clock that can be read.
            VerbsError: the query failed.

        See ibv_query_rt_values_ex(3).
        """
        try:
            now: int = self._verb(self._provider.query_rt_values)
        except UnsupportedError as error:
            error.hint = error.hint or f"{self.name} has no clock that can be read"
            raise
        return now

    def query_port(self, port_num: int = 1) -> PortAttr:
        """Return a port's current attributes.

        Args:
            port_num: the port, 1..attr.phys_port_cnt.

        Raises:
            TypeError: port_num is not an integer.
            ValueError: the device has no such port.
            ClosedError: the device is closed.
            VerbsError: the query failed.

        See ibv_query_port(3).
        """
        port_num = self._check_port(port_num)
        raw = ffi.new("struct ibv_port_attr *")
        speed = self._verb(self._provider.query_port, port_num, raw)
        return read_port_attr(port_num, raw, speed)

    def query_gid(self, port_num: int = 1, gid_index: int = 0) -> GID:
        """Return an entry of a port's GID table.

        Args:
            port_num: the port, from 1.
            gid_index: which entry, from 0.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the device has no such port, or the port has no GID at gid_index.
            ClosedError: the device is closed.
            VerbsError: the device failed.

        See ibv_query_gid(3).
        """
        return self.query_gid_ex(port_num, gid_index).gid

    def query_gid_ex(self, port_num: int = 1, gid_index: int = 0) -> GIDTableEntry:
        """Return an entry of a port's GID table with its type and network device.

        Args:
            port_num: the port, from 1.
            gid_index: which entry, from 0.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the device has no such port, or the port has no GID at gid_index.
            ClosedError: the device is closed.
            VerbsError: the device failed.

        See ibv_query_gid_ex(3).
        """
        port_num, gid_index = self._check_port(port_num), index("gid_index", gid_index)
        # A larger index does not fit in the call's argument.
        if 0 <= gid_index < _MAX_TABLE_ENTRIES:
            try:
                return _table_entry(self._verb(self._provider.query_gid_ex, port_num, gid_index))
            except VerbsError:
                if gid_index in [entry.gid_index for entry in self.query_gid_table(port_num)]:
                    raise
        table = self.query_gid_table(port_num)
        raise ValueError(no_such_gid(self.name, port_num, gid_index, table))

    def query_gid_table(self, port_num: int = 1) -> list[GIDTableEntry]:
        """Return the valid entries of a port's GID table.

        Args:
            port_num: the port, from 1.

        Raises:
            TypeError: port_num is not an integer.
            ValueError: the device has no such port.
            ClosedError: the device is closed.
            VerbsError: the device failed.

        See ibv_query_gid_table(3).
        """
        length = self.query_port(port_num).gid_tbl_len
        table = self._verb(self._provider.query_gid_table, port_num, length)
        return [_table_entry(entry) for entry in table]

    def query_pkey(self, port_num: int = 1, pkey_index: int = 0) -> int:
        """Return an entry of a port's P_Key table, in host order.

        Args:
            port_num: the port, from 1.
            pkey_index: which entry, from 0; less than the port's pkey_tbl_len.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the device has no such port, or pkey_index is out of range.
            ClosedError: the device is closed.
            VerbsError: the device failed.

        See ibv_query_pkey(3).
        """
        port_num, pkey_index = self._check_port(port_num), index("pkey_index", pkey_index)
        # A larger index does not fit in the call's argument.
        if 0 <= pkey_index < _MAX_TABLE_ENTRIES:
            try:
                pkey: int = self._verb(self._provider.query_pkey, port_num, pkey_index)
                return pkey
            except VerbsError:
                if pkey_index < self.query_port(port_num).pkey_tbl_len:
                    raise
        length = self.query_port(port_num).pkey_tbl_len
        raise ValueError(not_in_table("pkey_index", pkey_index, length, "P_Key", self, port_num))

    def get_pkey_index(self, pkey: int, port_num: int = 1) -> int:
        """Return a P_Key's index in a port's table, for use as pkey_index.

        Args:
            pkey: the P_Key in host order, with its membership bit: 0..0xFFFF.
            port_num: the port, from 1.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the device has no such port, or pkey is out of range.
            ClosedError: the device is closed.
            VerbsError: the table does not have this P_Key, or the device failed.

        See ibv_get_pkey_index(3).
        """
        pkey = within("pkey", pkey, 0, 0xFFFF)
        length = self.query_port(port_num).pkey_tbl_len
        table = [self.query_pkey(port_num, entry) for entry in range(length)]
        if pkey in table:
            return table.index(pkey)
        has = ", ".join([f"{entry:#06x}" for entry in table if entry]) or "none"
        raise VerbsError(
            "ibv_get_pkey_index",
            errno.ENOENT,
            f"{self.name} port {int(port_num)} has no P_Key {pkey:#06x}; it has {has}",
        )

    @property
    def async_fd(self) -> int:
        """File descriptor that is readable when an asynchronous event is pending.

        On soft0 it is also readable when a work request is due for a retry. The next call to the
        device performs the retry, so get_async_event() may find no event and return None.

        Raises:
            ClosedError: the device is closed.
        """
        fd: int = self._verb(_ASYNC_FD)
        return fd

    @property
    def num_comp_vectors(self) -> int:
        """How many completion vectors it has; a CQ's comp_vector is less than this.

        Raises:
            ClosedError: the device is closed.
        """
        vectors: int = self._verb(_NUM_COMP_VECTORS)
        return vectors

    @property
    def faults(self) -> FaultPlan:
        """The faults to inject.

        soft0 and roce devices have them; only roce devices have packet faults.

        Raises:
            UnsupportedError: this is a real device.
            ClosedError: the device is closed.
        """
        # The plan lives as long as the device, so it must not keep the context open.
        plan: FaultPlan = self._verb(
            self._provider.faults, functools.partial(native.peek_queues, self._queues)
        )
        return plan

    def capture(self, path: str | bytes | os.PathLike[Any]) -> Capture:
        """Begin to capture the device's packets, in both directions, to a file for Wireshark.

        The pcapng file is created, or replaced.  Each packet begins with its IP header; its
        direction is recorded and, where known, its work request and wr_id are noted in a comment.
        Packets that the kernel coalesces or segments appear as on the wire.  The UDP checksum is
        computed, because the device does not see it.

        To end the capture, close the returned object, or use it in a with statement.  Closing the
        device also ends it, as does a write error, which does not affect the device.

        Args:
            path: the file's path.

        Returns:
            The capture.

        Raises:
            UnsupportedError: this is not a roce device; the message says what to use instead.
            OSError: the file cannot be created, another capture is writing to it
                (EBUSY), it is a FIFO that nobody has opened to read (ENXIO), or no thread can be
                started.
            ClosedError: the device is closed.
        """
        wr_id_of = functools.partial(native.peek_queues, self._queues)
        return self._verb(self._provider.capture, path, wr_id_of)  # type: ignore[no-any-return]

    def counters(self) -> Counters:
        """Return the device's counters since it was opened: packets, NAKs, errors.

        Raises:
            UnsupportedError: this is not a roce device; the message says where to look instead.
            ClosedError: the device is closed.
        """
        return self._verb(self._provider.counters)  # type: ignore[no-any-return]

    def get_async_event(self, timeout: float | None = 5.0) -> AsyncEvent | None:
        """Return the next asynchronous event of the device, and acknowledge it.

        ``async_fd`` is readable when there is one.  If a signal handler raises
        (KeyboardInterrupt) after an event is taken but before it is returned, the next call
        returns it.  Closing a resource drops its events that have not been taken; all other events
        are kept until they are taken.

        Args:
            timeout: seconds to wait for one; None for no limit.

        Returns:
            The event, or None if none came in time.

        Raises:
            TypeError: timeout is not a number.
            ValueError: timeout is NaN.
            RdmaError: asyncio tasks are waiting for the device's events.
            ClosedError: the device is closed, or is closed during the wait.
            VerbsError: the device failed.

        See ibv_get_async_event(3).
        """
        refused = f"tasks wait for the events of {self}: await its async_event() there"
        return wait_for_event(self, timeout, next_async_event, refused)

    async def async_event(self, timeout: float | None = 5.0) -> AsyncEvent | None:
        """Wait in an asyncio task for the next asynchronous event: get_async_event for asyncio.

        Args:
            timeout: seconds to wait for one; None for no limit.

        Returns:
            The event, or None if none came in time.

        Raises:
            TypeError: timeout is not a number.
            ValueError: timeout is NaN.
            RdmaError: a thread or another event loop is already waiting for the device's events.
            ClosedError: the device is closed, or is closed during the wait.
            VerbsError: the device failed.

        See ibv_get_async_event(3).
        """
        from .aio import async_event  # asyncio is slow to import

        return await async_event(self, timeout)

    def choose_gid(self, port_num: int = 1, gid_index: int | None = None) -> GIDChoice:
        """Choose one of a port's GIDs, or look up the one at gid_index.

        It prefers RoCE v2 to v1, then any other address to a link-local one, then IPv4 to
        IPv6 (most RoCE networks use IPv4), then the lower index.

        Args:
            port_num: the port, from 1.
            gid_index: use this entry; None to choose one.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: the device has no such port, or the port has no GID at gid_index.
            RdmaError: the port has no GID at all.
            ClosedError: the device is closed.
            VerbsError: the kernel could not be queried.
        """
        if gid_index is not None:
            gid_index = index("gid_index", gid_index)
        table = self.query_gid_table(port_num)
        if gid_index is not None:
            for entry in table:
                if entry.gid_index == gid_index:
                    return GIDChoice(entry.gid_index, entry.gid, entry.gid_type, "asked for")
            raise ValueError(no_such_gid(self.name, port_num, gid_index, table))
        if not table:
            raise RdmaError(
                f"{self.name} port {port_num} has no GID; "
                "give its network device an address and bring it up "
                "('ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up')"
            )
        return preferred_gid(table)

    def _check_port(self, port_num: int) -> int:
        """Check that the device has a port, and return its number as an int."""
        port_num, count = index("port_num", port_num), self.attr.phys_port_cnt
        if 1 <= port_num <= count:
            return port_num
        raise ValueError(
            f"{self.name} has no port {port_num}; its ports are 1..{count}"
            if count > 1
            else f"{self.name} has no port {port_num}; its only port is 1"
        )


NO_MORE = frozenset({errno.EINVAL, errno.ENOMEM})
"""The errnos with which devices refuse a resource as too large, or as one too many."""


def no_more(context: Context, what: str, limit_name: str, code: int) -> str:
    """Say why a device may have refused one more resource.

    Args:
        context: the device.
        what: the kind of resource, in the plural.
        limit_name: the device attribute that limits their number.
        code: the errno.
    """
    limit = f"{limit_name}={getattr(context.attr, limit_name)}"
    return f"{context.name} may have no more {what} ({limit}); {where_explained(code)}"


def not_in_table(
    name: str, number: int, length: int, what: str, context: Context, port_num: int
) -> str:
    """Say that an index is not in a port's table; the arguments are those of refuse_beyond."""
    return (
        f"{name}={shown(number)} is not in 0..{length - 1}, "
        f"the {what} table of {context.name} port {port_num}"
    )


def refuse_beyond(
    name: str, number: int, length: int, what: str, context: Context, port_num: int
) -> None:
    """Refuse an index that is out of range for a port's table.

    An index in range need not have an entry. Index 0 is left to the device, because a port may
    have no table.

    Args:
        name: the index's name.
        number: the index.
        length: the table's length.
        what: what the table holds, in the singular.
        context: the device.
        port_num: the port.

    Raises:
        ValueError: the index is not in the table.
    """
    if not 0 <= number < max(length, 1):
        raise ValueError(not_in_table(name, number, length, what, context, port_num))


def provider_of(context: Context) -> Provider:
    """Return the provider of a device's control verbs."""
    return context._provider


def in_flight_of(context: Context) -> dict[int, Any]:
    """Return a device's queues by number; completions find their queue in this table."""
    return context._queues


def invalidated_of(context: Context) -> dict[int, bytes]:
    """Return the dict that counts a device's key invalidations (native.InFlight.enroll)."""
    return context._invalidated


_ASYNC_FD = operator.attrgetter("async_fd")
_NUM_COMP_VECTORS = operator.attrgetter("num_comp_vectors")


def _table_entry(entry: GIDEntry) -> GIDTableEntry:
    gid_type = None if entry.gid_type is None else reported(GIDType, entry.gid_type)
    return GIDTableEntry(entry.gid_index, GID(entry.raw), gid_type, entry.ndev)
