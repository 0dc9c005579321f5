"""``rdmapost devices``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from .options import Target, device_names, device_options, not_empty
from .output import Output, columns, echo, usage_error, width, wrapped

if TYPE_CHECKING:
    from rdmapost import Context, DeviceInfo, PortAttr, RoceInterface


@click.command()
@click.argument("name", required=False, type=not_empty, shell_complete=device_names)
@device_options
def devices(out: Output, target: Target, name: str | None) -> None:
    """List devices, their ports and GIDs.

    With NAME, list only that device, as -d does.

    A star marks the GID used by default.  soft0, the software device, exists in
    every process.  The devices that can be opened on a UDP socket are listed last.
    With -v, also show the counters of roce devices, which start at 0 when a
    process opens the device.
    """
    from rdmapost import (
        NoDeviceError,
        NoRdmaError,
        RdmaError,
        list_devices,
        list_roce_interfaces,
        open_device,
    )

    from .target import device_is_required

    if name is not None:
        if target.device not in (None, name):
            usage_error(f"'{name}' and '-d {target.device}' name two devices")
        target = replace(target, device=name)
    out.doc["devices"] = found = []
    infos = list_devices()
    names = [info.name for info in infos] if target.device is None else [target.device]
    if target.device is None and all(info.kind == "soft" for info in infos):
        # Try to open one: the error says why there is none.
        try:
            open_device().close()
        except (NoRdmaError, NoDeviceError) as error:
            if device_is_required():
                raise
            if isinstance(error, NoRdmaError):
                echo(f"rdmapost devices: {error}", err=True)
    failures: list[tuple[str, RdmaError]] = []
    for name in names:
        try:
            with open_device(name) as context:
                info = next((info for info in infos if info.name == name), None)
                found.append(_describe(context, info, target, out))
        except NoDeviceError:
            raise
        except RdmaError as error:
            failures.append((name, error))
    if len(failures) == len(names):
        raise failures[0][1]
    for name, why in failures:
        # A device that cannot be opened does not hide the others.
        echo(f"rdmapost devices: {why}", err=True)
        found.append({"name": name, "error": str(why), "ports": []})
    ports = [port for device in found for port in device["ports"]]
    if not ports:
        usage_error(f"{' and '.join(names)} has no port {target.port}")
    if target.gid_index is not None and not any(port["gids"] for port in ports):
        usage_error(f"{' and '.join(names)} has no GID with index {target.gid_index}")
    text = _text(found)
    if target.device is None:
        interfaces = list_roce_interfaces()
        out.doc["roce_interfaces"] = [
            {**one._asdict(), "path_mtu": one.path_mtu.bytes} for one in interfaces
        ]
        text += _over_udp(interfaces)
    out.finish(text)


def _over_udp(interfaces: list[RoceInterface]) -> str:
    """Lay out the devices that can be opened on a UDP socket, and the reasons why others cannot."""
    rows = [["OVER UDP", "ADDRESS", "MTU"]]
    rows += [[one.name, one.address, str(one.path_mtu.bytes)] for one in interfaces]
    head, *lines = columns(rows).splitlines()
    for place, one in enumerate(interfaces):
        if one.obstacle is not None:
            line = f"{lines[place].ljust(len(head))}  {one.obstacle}"
            if len(line) > width():
                line = f"{lines[place]}\n{wrapped(one.obstacle, '   ')}"
            lines[place] = line
    return "\n".join(["", "", head, *lines]) if interfaces else ""


def _describe(
    context: Context, info: DeviceInfo | None, target: Target, out: Output
) -> dict[str, Any]:
    attr = context.attr
    counters = context.counters()._asdict() if out.verbose and context.kind == "roce" else None
    wanted = range(1, attr.phys_port_cnt + 1) if target.port is None else [target.port]
    return {
        "name": context.name,
        "kind": context.kind,
        "node_type": context.node_type.name,
        "fw_ver": attr.fw_ver,
        "node_guid": f"{attr.node_guid:016x}",
        "pci_address": None if info is None else info.pci_address,
        "numa_node": None if info is None else info.numa_node,
        **({} if counters is None else {"counters": counters}),
        "ports": [
            _describe_port(context, context.query_port(number), target, out)
            for number in wanted
            if number <= attr.phys_port_cnt
        ],
    }


def _describe_port(context: Context, port: PortAttr, target: Target, out: Output) -> dict[str, Any]:
    from rdmapost import RdmaError

    table = context.query_gid_table(port.port_num)
    chosen = None
    try:
        choice = context.choose_gid(port.port_num)
        chosen = choice.gid_index
        out.note(f"{context.name} port {port.port_num}: GID {choice}")
    except RdmaError as error:
        out.note(str(error))
    return {
        "port": port.port_num,
        "state": port.state.name,
        "link_layer": port.link_layer.name,
        "active_mtu": port.active_mtu.bytes,
        "max_mtu": port.max_mtu.bytes,
        "lid": port.lid,
        "gid_index": chosen,
        "gids": [
            {
                "gid_index": entry.gid_index,
                "gid": str(entry.gid),
                "type": None if entry.gid_type is None else entry.gid_type.name,
                "netdev": entry.ndev or None,
            }
            for entry in table
            if target.gid_index in (None, entry.gid_index)
        ],
    }


def _text(found: list[dict[str, Any]]) -> str:
    """Lay out the ports in a table, with a table of GIDs below each."""
    rows: list[list[str]] = []
    below: list[str] = []
    gids = _gids([port for device in found for port in device["ports"]])
    for device in found:
        for port in device["ports"]:
            rows.append(
                [
                    device["name"],
                    "software" if device["kind"] == "soft" else device["kind"],
                    str(port["port"]),
                    port["state"],
                    port["link_layer"],
                    str(port["active_mtu"]),
                    str(port["max_mtu"]),
                    str(port["lid"]) if port["lid"] else "-",
                ]
            )
            below.append("\n".join([*_place(device), *next(gids), *_counters(device)]))
    head, *lines = _table(rows)
    return "\n".join([head, *map("\n".join, zip(lines, below, strict=True))])


def _table(rows: list[list[str]]) -> list[str]:
    """Lay out the ports within the width of the output; the first item has the headings."""
    for link_layer, max_mtu in (("LINK LAYER", "MAX MTU"), ("LAYER", "MAX")):
        heads = ["DEVICE", "KIND", "PORT", "STATE", link_layer, "MTU", max_mtu, "LID"]
        lines = columns([heads, *rows]).splitlines()
        if max(map(len, lines)) <= width():
            return lines
    # Put each name on a separate line.
    rest = columns([row[1:] for row in (heads, *rows)]).splitlines()
    return [f"{row[0]}\n   {line}" for row, line in zip((heads, *rows), rest, strict=True)]


def _place(device: dict[str, Any]) -> list[str]:
    """Show a device's PCI address and NUMA node, if the kernel reports them."""
    address, node = device["pci_address"], device["numa_node"]
    where = [] if address is None else [f"PCI {address}"]
    where += [] if node is None else [f"NUMA node {node}"]
    return [f"   {', '.join(where)}"] if where else []


def _counters(device: dict[str, Any]) -> list[str]:
    counted = device.get("counters", {})
    return columns([["  ", name, str(n)] for name, n in counted.items()]).splitlines()


def _gids(ports: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of each port's GIDs; the columns of all ports line up."""
    tables = [
        [
            [
                " *" if gid["gid_index"] == port["gid_index"] else "",
                f"GID {gid['gid_index']}",
                gid["gid"],
                gid["type"] or "",
                gid["netdev"] or "",
            ]
            for gid in port["gids"]
        ]
        or [["", "no GID", "", "", ""]]
        for port in ports
    ]
    lines = iter(columns([row for table in tables for row in table]).splitlines())
    for table in tables:
        yield list(islice(lines, len(table)))
