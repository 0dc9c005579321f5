"""Opening the device that a command uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rdmapost import (
    Capture,
    Context,
    NoDeviceError,
    NoRdmaError,
    PortAttr,
    PortState,
    RdmaError,
    UnsupportedError,
    list_devices,
    open_device,
)
from rdmapost._arguments import counted
from rdmapost.resources.device import device_of_environment

from .options import Target
from .output import Output, echo, usage_error

SOFT = "soft0"

_CARRIES_TRAFFIC = (PortState.ACTIVE, PortState.ACTIVE_DEFER)


@contextmanager
def open_target(out: Output, target: Target) -> Iterator[tuple[Context, int]]:
    """Open the device that the options name, or choose one.

    If there is no RDMA device, this chooses soft0, the software device in this
    process, and says so on standard error.

    Yields:
        the device and the port number.

    Raises:
        click.UsageError: the device has no such port or no such GID, or the file for its packets
            cannot be created.
        RdmaError: the port carries no traffic, or has no GID.
        NoRdmaError, NoDeviceError, VerbsError: as in open_device.
    """
    context, why = _open(out, target)
    with context, _capture(out, context, target):
        out.doc.update(device=context.name, kind=context.kind)
        ports = _ports(context, target)
        port = next((port for port in ports if port.state in _CARRIES_TRAFFIC), ports[0])
        out.note(f"device   {context.name} ({context.kind}), {why}")
        out.note(
            f"port     {port.port_num}, {port.state.name}, {port.link_layer.name}, "
            f"MTU {port.active_mtu.bytes}"
        )
        if port.state not in _CARRIES_TRAFFIC:
            raise RdmaError(
                f"{context.name} port {port.port_num} is {port.state.name}; bring its network "
                "device up ('ip link set NETDEV up'), or start a subnet manager on InfiniBand"
            )
        try:
            gid = context.choose_gid(port.port_num, target.gid_index)
        except ValueError as error:
            usage_error(str(error))
        out.note(f"GID      {gid}")
        yield context, port.port_num
        if out.verbose and context.kind == "roce":
            counters = {name: n for name, n in context.counters()._asdict().items() if n}
            out.note(f"counters {', '.join(f'{name} {n}' for name, n in counters.items())}")


@contextmanager
def _capture(out: Output, context: Context, target: Target) -> Iterator[None]:
    """Capture the device's packets if --pcap was given.

    If the file cannot be completed, the command still prints its result.
    """
    if target.pcap is None:
        yield
        return
    log, silent = logging.getLogger("rdmapost.roce.capture"), logging.NullHandler()
    # Keep the capture's error out of the log: the command reports it.
    log.addHandler(silent)
    is_done = False
    try:
        with _begin(context, target.pcap) as capture:
            yield
            is_done = True
        out.note(f"capture  {counted(capture.packets, 'packet')} in {target.pcap}")
    except RdmaError as error:
        if not is_done:
            raise
        out.failure = error
    finally:
        log.removeHandler(silent)


def _begin(context: Context, path: str) -> Capture:
    try:
        return context.capture(path)
    except UnsupportedError as error:
        raise UnsupportedError("--pcap", error.errno, error.hint) from error
    except RdmaError:
        raise
    except OSError as error:
        usage_error(f"--pcap {path}: {error.strerror or error}")


def _ports(context: Context, target: Target) -> list[PortAttr]:
    count = context.attr.phys_port_cnt
    if target.port is None:
        return [context.query_port(number) for number in range(1, count + 1)]
    try:
        return [context.query_port(target.port)]
    except ValueError as error:
        usage_error(str(error))


def device_is_required() -> bool:
    """Whether RDMAPOST_REQUIRE_DEVICE forbids falling back to soft0."""
    return os.environ.get("RDMAPOST_REQUIRE_DEVICE", "") not in ("", "0")


def _open(out: Output, target: Target) -> tuple[Context, str]:
    """Open the device; return it, and why it was chosen."""
    if target.device is not None:
        return open_device(target.device), "asked for"
    if device_of_environment():
        return open_device(), "named by RDMAPOST_DEVICE"
    try:
        return open_device(), "the first with an active port"
    except (NoRdmaError, NoDeviceError) as error:
        if device_is_required():
            raise
        if isinstance(error, NoRdmaError):
            # Without libibverbs, there may be a device that cannot be seen.
            echo(f"using {SOFT}, the software device of this process: {error}", err=True)
            return open_device(SOFT), "because libibverbs cannot be loaded"
        lacking = "no RDMA device"
        if any(info.kind != "soft" for info in list_devices()):
            lacking += " with an active port"
        echo(f"{lacking}: using {SOFT}, the software device of this process", err=True)
        out.note(str(error))
        return open_device(SOFT), lacking
