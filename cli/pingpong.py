"""``rdmapost pingpong``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from rdmapost._arguments import counted
from rdmapost.tools.default_ports import PINGPONG_PORT

from .options import (
    Target,
    device_options,
    given,
    integer,
    listen_address,
    not_empty,
    pcap_option,
    seconds,
    size_in_bytes,
    timeout_option,
)
from .output import Output, columns, echo, fields, usage_error

if TYPE_CHECKING:
    from rdmapost.pingpong import Address, Pingpong, Result

_MTUS = ("256", "512", "1024", "2048", "4096")


@click.command()
@click.argument("server", metavar="[HOST[:PORT]]", type=not_empty, required=False)
@click.option(
    "--qp-type",
    type=click.Choice(["rc", "uc", "ud"], case_sensitive=False),
    default="rc",
    show_default=True,
    help="Type of the queue pair, the same on both sides.",
)
@click.option(
    "-s",
    "--size",
    type=size_in_bytes,
    metavar="N[K|M|G]",
    help="Bytes per message.  [default: 4096; on ud 1024]",
)
@click.option(
    "-n",
    "--iters",
    type=integer(1, (1 << 31) - 1),
    metavar="N",
    default=1000,
    show_default=True,
    help="Messages each way.",
)
@click.option(
    "-r",
    "--rx-depth",
    type=integer(1, 1 << 24),
    metavar="N",
    default=500,
    show_default=True,
    help="Receives to post at a time.",
)
@click.option(
    "-m",
    "--mtu",
    type=click.Choice(_MTUS),
    help="Path MTU (rc, uc), the same on both sides.  [default: 1024]",
)
@click.option(
    "-l",
    "--sl",
    type=integer(0, 15),
    metavar="N",
    default=0,
    show_default=True,
    help="Service level, 0 to 15.",
)
@click.option("-c", "--validate", is_flag=True, help="Verify the data at the end.")
@click.option("-e", "--events", is_flag=True, help="Sleep until a completion instead of polling.")
@click.option(
    "--tcp-port",
    type=integer(0, 65535),
    metavar="N",
    default=PINGPONG_PORT,
    show_default=True,
    help="TCP port of the handshake (-p of the stock programs).",
)
@click.option(
    "--bind",
    type=listen_address,
    metavar="ADDRESS",
    help="Listen here.  [default: on every address]",
)
@click.option(
    "--wait",
    type=seconds,
    metavar="SECONDS",
    help="Wait this long for a client.  [default: no limit]",
)
@timeout_option
@pcap_option
@device_options
def pingpong(
    out: Output,
    target: Target,
    server: str | None,
    qp_type: str,
    size: int | None,
    iters: int,
    rx_depth: int,
    mtu: str | None,
    sl: int,
    validate: bool,
    events: bool,
    tcp_port: int,
    bind: str | None,
    wait: float | None,
    timeout: float,
) -> None:
    """Send a message back and forth between two hosts, and time it.

    Without HOST, act as the server and wait for one client; with HOST, connect
    to the server there.  The other side can also be a program from
    ibverbs-utils: ibv_rc_pingpong, ibv_uc_pingpong or ibv_ud_pingpong.  On RoCE
    those need a GID index (-g INDEX).  Both sides need the same --qp-type, --size,
    --iters and --mtu; if both sides are rdmapost, they compare these first.

    A server listens on every address, like ibv_rc_pingpong, because its client
    is on another machine; it accepts one connection and exposes no memory.  The
    timeout applies to each step of the handshake and to each message.
    """
    host = None
    if server is not None:
        host, tcp_port = _where(server, tcp_port)
    if host is not None and (bind is not None or wait is not None):
        usage_error("--bind and --wait are for a server, which takes no HOST")
    if size == 0:
        usage_error("--size 0: a message needs at least one byte")
    from rdmapost import MTU, QPType
    from rdmapost.pingpong import Pingpong, listen
    from rdmapost.tools.reachability import why_confined

    from .target import open_target

    out.doc.update(
        device=None,
        kind=None,
        role="server" if host is None else "client",
        peer=None,
        qp_type=qp_type.upper(),
        size=size,
        iters=iters,
        gid_index=None,
    )
    with open_target(out, target) as (context, port_num):
        if why := why_confined(context):
            echo(why, err=True)
        try:
            side = Pingpong(
                context,
                QPType[qp_type.upper()],
                size=size,
                iters=iters,
                rx_depth=rx_depth,
                mtu=None if mtu is None else MTU[f"MTU_{mtu}"],
                validate=validate,
                events=events,
                sl=sl,
                port_num=port_num,
                gid_index=target.gid_index,
                timeout=timeout,
            )
        except ValueError as error:
            usage_error(str(error))
        with side:
            out.doc.update(size=side.size, gid_index=side.gid_index, local=_address(side.local))
            out.note(f"local    {side.local}")
            if host is not None:
                with _progress(out, side) as progress:
                    result = side.run_client(host, tcp_port, progress=progress)
            else:
                result = _serve(out, side, listen(bind, tcp_port), wait)
    _show(out, result)


def _where(server: str, tcp_port: int) -> tuple[str, int]:
    """Return the host and the port of a server; a bare IPv6 address needs no brackets."""
    from rdmapost.tools.connect.host_port import parse_address

    if server.count(":") > 1 and not server.startswith("["):
        return server, tcp_port
    try:
        host, port = parse_address(server, tcp_port)
    except ValueError as error:
        usage_error(str(error))
    if given("tcp_port") and port != tcp_port:
        usage_error(f"'{server}' and '--tcp-port {tcp_port}' name two ports")
    return host, port


def _serve(out: Output, side: Pingpong, listener: Any, wait: float | None) -> Result:
    from rdmapost.pingpong import name_of

    with listener:
        echo(f"waiting for a client on {name_of(listener.getsockname())}", err=True)
        with _progress(out, side) as progress:
            return side.run_server(listener, timeout=wait, progress=progress)


@contextmanager
def _progress(out: Output, side: Pingpong) -> Iterator[Callable[[int], None] | None]:
    """Yield the progress callback: it shows a bar on a terminal, and notes the peer if verbose.

    If there is nothing to show, yield None, so that no callback slows the run down.
    """
    if not sys.stderr.isatty():
        yield (lambda done: None if done else _note_peer(out, side)) if out.verbose else None
        return
    with ExitStack() as stack:
        bars: list[Any] = []

        def progress(done: int) -> None:
            if not bars:
                _note_peer(out, side)
                bar = click.progressbar(length=side.iters, file=sys.stderr)
                bars.append(stack.enter_context(bar))
            bars[0].update(done - bars[0].pos)

        yield progress
        progress(side.iters)


def _note_peer(out: Output, side: Pingpong) -> None:
    out.note(f"remote   {side.remote}")


def _address(address: Address) -> dict[str, Any]:
    return {
        "lid": address.lid,
        "qp_num": address.qp_num,
        "psn": address.psn,
        "gid": str(address.gid),
    }


def _show(out: Output, result: Result) -> None:
    latency = result.latency
    times = {} if latency is None else {name: getattr(latency, name) for name in latency.__slots__}
    out.doc.update(
        peer=result.peer,
        remote=_address(result.remote),
        round_trips=result.round_trips,
        seconds=result.seconds,
        latency_us=times or None,
        usec_per_iter=result.usec_per_iter,
        messages_per_second=result.messages_per_second,
        bytes_per_second=result.bytes_per_second,
        validated=result.validated,
    )
    out.finish(_text(out, result, times))


def _text(out: Output, result: Result, times: dict[str, float]) -> str:
    doc = out.doc
    lines: list[tuple[str, object]] = [
        ("messages", f"{result.iters} of {counted(result.size, 'byte')} each way"),
        (
            "time",
            f"{result.seconds:.2f} s for {result.round_trips} round trips, "
            f"{result.usec_per_iter:.2f} usec/iter",
        ),
    ]
    if times:
        percentiles = [name.replace("_", ".") for name in times]
        table = columns([percentiles, [f"{t:.1f}" for t in times.values()]])
        names, values = table.splitlines()
        lines += [("latency", names), ("", f"{values} us")]
    lines.append(
        (
            "rate",
            f"{result.messages_per_second:.0f} messages/s, {result.bytes_per_second / 1e6:.2f} "
            f"MB/s, {result.bytes_per_second * 8 / 1e6:.2f} Mbit/s, both ways",
        )
    )
    if result.validated:
        lines.append(("data", "verified"))
    title = f"pingpong on {doc['qp_type']}, {doc['device']}, {doc['role']}"
    return f"{title} of {result.peer}: SUCCESS\n{fields(lines)}"
