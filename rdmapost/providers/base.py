"""The control verbs, as the resources call them.

Data verbs (posting, polling) call the same compiled functions on every device.
Control verbs cannot: the exported libibverbs functions use a private part of
their context.  A provider executes them; resources never ask which provider
they run on.

Every method takes and returns the C structs as cffi pointers, and raises
VerbsError (UnsupportedError where the device does not support the call).

A verb that creates or destroys a struct may be a C function instead. C calls it
(Resource._make), and it reports failure as libibverbs does: by a NULL or
non-zero result, with errno set.  No interrupt can come between such a call and
the recording of its result.
"""

from __future__ import annotations

import os
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol

from ..enums import MTU, Access, NodeType, TransportType
from ..errors import ClosesOnExit
from .fault_plan import FaultPlan

ROCE = "roce:"
"""The prefix of the names of devices on UDP sockets; a network device or address follows it."""

DMABUF_ACCESS = (
    Access.LOCAL_WRITE
    | Access.REMOTE_WRITE
    | Access.REMOTE_READ
    | Access.REMOTE_ATOMIC
    | Access.RELAXED_ORDERING
)
"""The access flags that the kernel accepts for a dma-buf region."""


def refused_of_dmabuf(access: int) -> str:
    """Name the access flags that the kernel refuses for a dma-buf region; return "" if none.

    Args:
        access: the flags of the region.
    """
    refused = Access(access) & ~DMABUF_ACCESS
    return f"a region of a dma-buf cannot have Access.{refused.name}" if refused else ""


class RoceInterface(NamedTuple):
    """A network device on which a roce device can be opened, unless something is in the way.

    Attributes:
        name: the device's name for open_device(), such as "roce:eth0".
        address: the address that the roce device would use.
        path_mtu: the largest MTU that the network device allows.
        obstacle: why it cannot be opened now, or None.
    """

    name: str
    address: str
    path_mtu: MTU
    obstacle: str | None


class DeviceInfo(NamedTuple):
    """A device that can be opened.

    Attributes:
        name: the kernel's name for it, such as rxe0 or mlx5_0.
        kind: "verbs", "soft" or "roce".
        guid: node GUID, in host order.
        node_type: its type, a NodeType.
        dev_path: its entry in sysfs, or "".
        transport_type: its transport, a TransportType.
    """

    name: str
    kind: str
    guid: int
    node_type: NodeType
    dev_path: str
    transport_type: TransportType = TransportType.UNKNOWN

    @property
    def pci_address(self) -> str | None:
        """Its PCI address, such as "0000:3b:00.0"; None if it is not a PCI device."""
        name = os.path.basename(os.path.realpath(os.path.join(self.dev_path, "device")))
        return name if self.dev_path and _PCI_ADDRESS.fullmatch(name) else None

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that it is attached to; None if the kernel does not say."""
        if not self.dev_path:
            return None
        try:
            with open(os.path.join(self.dev_path, "device", "numa_node"), encoding="ascii") as file:
                node = int(file.read())
        except (OSError, ValueError):
            return None
        return None if node < 0 else node


_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class GIDEntry(NamedTuple):
    """An entry of a port's GID table as the provider reports it.

    Attributes:
        gid_index: its index in the table.
        raw: the 16 bytes.
        gid_type: a GIDType value, or None where the provider cannot tell.
        ndev: name of the network device behind it, or "".
    """

    gid_index: int
    raw: bytes
    gid_type: int | None
    ndev: str


class Counters(NamedTuple):
    """What a device has counted since it was opened.

    Attributes:
        packets_sent, packets_received: packets, including those that were dropped, but not
            send_errors.
        bytes_sent, bytes_received: their bytes, without the IP and UDP headers.
        retransmitted: request packets that were sent again.
        naks_sent, naks_received: NAKs, other than RNR NAKs.
        rnr_naks_sent, rnr_naks_received: RNR NAKs, sent because no receive was posted.
        icrc_errors: packets that were dropped because they were corrupted.
        dropped: packets that the device dropped because of an ICRC error, because the destination
            queue pair does not exist, because they come from another peer, or because they do not
            fit the queue pair's state; on UC and UD also requests that cannot be executed, because
            no receive is posted or the rkey does not permit the write.
        rcvbuf_errors: packets that the kernel dropped before the device could read them: the
            socket's receive buffer was full.
        send_errors: packets that could not be sent: the kernel refused them, or one side has an
            IPv4 address and the other an IPv6 address.
        faults: packets that the fault plan has affected.
    """

    packets_sent: int
    packets_received: int
    bytes_sent: int
    bytes_received: int
    retransmitted: int
    naks_sent: int
    naks_received: int
    rnr_naks_sent: int
    rnr_naks_received: int
    icrc_errors: int
    dropped: int
    rcvbuf_errors: int
    send_errors: int
    faults: int


class Capture(ClosesOnExit, metaclass=ABCMeta):
    """A capture in progress; Context.capture() creates it.

    As a context manager, it ends when the with block does. Dropping the last reference to it also
    ends it.
    """

    __slots__ = ("__weakref__",)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("cannot copy or pickle 'Capture' object: it belongs to an open device")

    @property
    @abstractmethod
    def path(self) -> str | bytes:
        """The file's path."""

    @property
    @abstractmethod
    def packets(self) -> int:
        """How many packets are in the file."""

    @property
    @abstractmethod
    def dropped(self) -> int:
        """How many packets are missing because the file could not be written fast enough."""

    @property
    @abstractmethod
    def error(self) -> OSError | None:
        """Why the capture has ended early; None if it has not."""

    @abstractmethod
    def close(self) -> None:
        """End the capture, and complete the file.

        Closing the device also ends the capture.  If the capture has already ended, or in the child
        of a fork, this does nothing.

        If a signal handler or a finalizer calls this while the device is in the middle of a step,
        the call does not wait for the file.  Nothing more is captured, but the file may not be
        complete until later: call this again to wait for that, and to have any error raised;
        otherwise, any error is only logged.

        Raises:
            RdmaError: the capture ended early because the file could not be written, or its last
                packets are still not in the file after 30 s.
        """


class Provider(Protocol):
    """Executes the control verbs for one family of devices."""

    kind: str
    spin_ns: int
    """How long to spin before sleeping."""
    default_timeout: int
    """The timeout of to_rts() unless another is given (ibv_modify_qp(3))."""

    def list_devices(self) -> list[DeviceInfo]: ...
    def found_device(self, name: str) -> AbstractContextManager[Any]:
        """Find a device for open_device(); if opening it in the with block fails, explain why."""
        ...

    def open_device(self, device: Any) -> Any: ...
    def close_device(self, context: Any) -> None: ...
    def lacks(self, call: str) -> bool:
        """Whether the loaded library lacks this function."""
        ...

    def query_device_ex(self, context: Any, attr: Any) -> None: ...
    def query_port(self, context: Any, port_num: int, attr: Any) -> int:
        """Fill a ``struct ibv_port_attr``; return active_speed_ex, which only newer ones have."""
        ...

    def query_gid_table(self, context: Any, port_num: int, length: int) -> list[GIDEntry]: ...
    def query_gid_ex(self, context: Any, port_num: int, index: int) -> GIDEntry: ...
    def query_pkey(self, context: Any, port_num: int, index: int) -> int: ...

    def query_rt_values(self, context: Any) -> int:
        """Return the device's clock."""
        ...

    def get_async_event(self, context: Any, events: dict[object, Any]) -> None:
        """Get and acknowledge the next event, if any is pending.

        Args:
            events: the event is read and stored here, under a new key, atomically, so that an
                interrupt cannot lose it.
        """
        ...

    def read_async_event(self, event: Any) -> tuple[int, Any]:
        """Return an event's type and its subject: a struct, a port number or None."""
        ...

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> FaultPlan:
        """Return the device's fault injection plan."""
        ...

    def capture(
        self, context: Any, path: str | bytes | os.PathLike[Any], wr_id_of: Callable[[int], Any]
    ) -> Capture:
        """Begin to write the device's packets to a file.

        Args:
            path: the file.
            wr_id_of: maps the device's wr_id to the caller's, or to None.
        """
        ...

    def counters(self, context: Any) -> Counters:
        """Return the device's counters."""
        ...

    def alloc_pd(self, context: Any) -> Any: ...
    def dealloc_pd(self, pd: Any) -> None: ...
    def reg_mr(self, pd: Any, addr: Any, length: int, access: int) -> Any: ...
    def reg_mr_at(self, pd: Any, addr: Any, length: int, access: int) -> Any:
        """Register memory that this process may be unable to access, now or later."""
        ...

    def reg_mr_mmap(self, pd: Any, addr: Any, length: int, access: int) -> Any:
        """Register memory that may be backed by a file, which may be truncated later."""
        ...

    def reg_dmabuf_mr(
        self, pd: Any, offset: int, length: int, iova: int, fd: int, access: int
    ) -> Any: ...
    def rereg_mr(
        self, mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int
    ) -> int | None:
        """Return an ibv_rereg_mr_err_code, or raise and leave the region unchanged."""
        ...

    def rereg_mr_at(
        self, mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int
    ) -> int | None:
        """Like rereg_mr, but for memory that this process may be unable to access."""
        ...

    def rereg_mr_mmap(
        self, mr: Any, flags: int, pd: Any, addr: Any, length: int, access: int
    ) -> int | None:
        """Like rereg_mr, for memory that may be a mapped file."""
        ...

    def advise_mr(self, pd: Any, advice: int, flags: int, sges: Any, count: int) -> None: ...
    def dereg_mr(self, mr: Any) -> None: ...
    def alloc_mw(self, pd: Any, mw_type: int) -> Any: ...
    def dealloc_mw(self, mw: Any) -> None: ...

    def create_comp_channel(self, context: Any) -> Any: ...
    def destroy_comp_channel(self, channel: Any) -> None: ...
    def create_cq(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any: ...
    def create_cq_ex(
        self, context: Any, cqe: int, channel: Any, comp_vector: int, wc_flags: int
    ) -> Any:
        """Create a CQ whose completions have the extra fields of wc_flags; return its ibv_cq."""
        ...

    def resize_cq(self, cq: Any, cqe: int) -> None: ...
    def destroy_cq(self, cq: Any) -> None: ...
    def has_overrun(self, cq: Any) -> bool:
        """Whether a CQ is known to have overrun; some devices report overruns only in an event."""
        ...

    def sends_for_receive(self, qp: Any) -> int | None:
        """Count the pending sends that will consume a receive; None if the device cannot tell."""
        ...

    def get_cq_event(self, channel: Any, events: dict[int, None]) -> bool | None:
        """Get and acknowledge an event from a non-blocking channel.

        Args:
            events: the event is read and the address of its CQ's struct is stored here,
                atomically, so that an interrupt cannot lose the event.

        Returns:
            True, or None if no event is pending.
        """
        ...

    def create_srq(self, pd: Any, init_attr: Any) -> Any: ...
    def create_srq_ex(self, context: Any, init_attr: Any) -> Any: ...
    def get_srq_num(self, srq: Any) -> int: ...
    def modify_srq(self, srq: Any, attr: Any, mask: int) -> None: ...
    def query_srq(self, srq: Any, attr: Any) -> None: ...
    def destroy_srq(self, srq: Any) -> None: ...

    def open_xrcd(self, context: Any, init_attr: Any) -> Any: ...
    def close_xrcd(self, xrcd: Any) -> None: ...

    def create_qp(self, pd: Any, init_attr: Any) -> Any: ...
    def create_qp_ex(self, context: Any, init_attr: Any) -> Any: ...
    def modify_qp(self, qp: Any, attr: Any, mask: int) -> None: ...
    def query_qp(self, qp: Any, attr: Any, mask: int, init_attr: Any) -> None: ...
    def query_qp_data_in_order(self, qp: Any, op: int, flags: int) -> int: ...
    def destroy_qp(self, qp: Any) -> None: ...
    def attach_mcast(self, qp: Any, gid: bytes, lid: int) -> None: ...
    def detach_mcast(self, qp: Any, gid: bytes, lid: int) -> None: ...
    def create_ah(self, pd: Any, attr: Any) -> Any: ...
    def destroy_ah(self, ah: Any) -> None: ...
    def init_ah_from_wc(
        self, context: Any, port_num: int, wc: Any, grh: Any, attr: Any
    ) -> None: ...
