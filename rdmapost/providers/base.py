"""The control verbs, as the resources call them.

Data verbs (posting, polling) call the same compiled functions on every device.
Control verbs cannot: the exported libibverbs functions use a private part of
their context.  A provider executes them; resources never ask which provider
they run on.

Every method takes and returns the C structs as cffi pointers, and raises
VerbsError (UnsupportedError where the device does not support the call).

A verb that creates or destroys a struct may be a C function instead. C calls it
(Resource._make), and it reports failure as libibverbs does: by NULL or a
non-zero result, and errno.  No interrupt can come between such a call and
recording its result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol


class DeviceInfo(NamedTuple):
    """A device that can be opened.

    Attributes:
        name: the kernel's name for it, such as rxe0 or mlx5_0.
        kind: "verbs" or "soft".
        guid: node GUID, in host order.
        node_type: a NodeType value.
        dev_path: its entry in sysfs, or "".
    """

    name: str
    kind: str
    guid: int
    node_type: int
    dev_path: str


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


class Provider(Protocol):
    """Executes the control verbs for one family of devices."""

    kind: str
    spin_ns: int
    """How long it pays to poll before sleeping."""

    def list_devices(self) -> list[DeviceInfo]: ...
    def found_device(self, name: str) -> AbstractContextManager[Any]:
        """Find a device for open_device(), and explain its error if that fails in the block."""
        ...

    def open_device(self, device: Any) -> Any: ...
    def close_device(self, context: Any) -> None: ...
    def query_device(self, context: Any, attr: Any) -> None: ...
    def query_device_ex(self, context: Any, attr: Any) -> None: ...
    def query_port(self, context: Any, port_num: int, attr: Any) -> None: ...
    def query_gid_table(self, context: Any, port_num: int, length: int) -> list[GIDEntry]: ...
    def query_pkey(self, context: Any, port_num: int, index: int) -> int: ...

    def get_async_event(self, context: Any, events: dict[object, Any]) -> None:
        """Get and acknowledge the next event, if any is pending.

        Args:
            events: where it is stored, under a new key, atomically with reading it, so that
                an interrupt cannot lose it.
        """
        ...

    def read_async_event(self, event: Any) -> tuple[int, Any]:
        """Return an event's type, and the struct or port number that it is about, or None."""
        ...

    def faults(self, context: Any, wr_id_of: Callable[[int], int | None]) -> Any:
        """Return the device's fault injection plan."""
        ...

    def alloc_pd(self, context: Any) -> Any: ...
    def dealloc_pd(self, pd: Any) -> None: ...
    def reg_mr(self, pd: Any, addr: Any, length: int, access: int) -> Any: ...
    def dereg_mr(self, mr: Any) -> None: ...
    def alloc_mw(self, pd: Any, mw_type: int) -> Any: ...
    def dealloc_mw(self, mw: Any) -> None: ...

    def create_comp_channel(self, context: Any) -> Any: ...
    def destroy_comp_channel(self, channel: Any) -> None: ...
    def create_cq(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any: ...
    def create_cq_ex(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        """Create a CQ that also reports the tags of tag-matching messages; return its ibv_cq."""
        ...

    def destroy_cq(self, cq: Any) -> None: ...
    def has_overrun(self, cq: Any) -> bool:
        """Whether a CQ is known to have overrun; a device may report that by an event alone."""
        ...

    def sends_for_receive(self, qp: Any) -> int | None:
        """Count the pending sends that will consume a receive; None if the device cannot tell."""
        ...

    def get_cq_event(self, channel: Any, events: dict[int, None]) -> bool | None:
        """Get and acknowledge an event of a non-blocking channel.

        Args:
            events: where the address of its CQ's struct is stored, atomically with reading the
                event, so that an interrupt cannot lose it.

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
    def destroy_qp(self, qp: Any) -> None: ...
    def attach_mcast(self, qp: Any, gid: bytes, lid: int) -> None: ...
    def detach_mcast(self, qp: Any, gid: bytes, lid: int) -> None: ...
    def create_ah(self, pd: Any, attr: Any) -> Any: ...
    def destroy_ah(self, ah: Any) -> None: ...
