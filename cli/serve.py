"""``rdmapost serve``."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Self

import click

from rdmapost._arguments import counted
from rdmapost.tools.default_ports import CONNECT_PORT

from .options import (
    Target,
    check_token,
    device_options,
    integer,
    listen_address,
    payload_of,
    pcap_option,
    seconds,
    size_in_bytes,
    token_option,
)
from .output import Output, echo, quoted, usage_error

if TYPE_CHECKING:
    from rdmapost.connect import Event, Server
    from rdmapost.tools.connect.protocol_messages import Arrival


_MAX_WAITING = 10_000
"""The most unprinted events to keep; any others are only counted."""
_ACCESS = ("read", "write", "atomic")


def _max_clients(value: str | int) -> int:
    """Convert --max-clients, within the library's limit."""
    from rdmapost.tools.connect.server_state import MAX_CLIENTS

    return integer(1, MAX_CLIENTS)(value)


def _access(value: str) -> str:
    names = [name.strip() for name in value.lower().split(",")]
    if names == ["none"]:
        return ""
    for name in names:
        if name not in _ACCESS:
            raise click.BadParameter(
                f"{name!r} is not read, write or atomic; separate several with commas, or give none"
            )
    return ",".join(names)


def _access_lists(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last name of --access."""
    given, comma, last = incomplete.rpartition(",")
    names = [*_ACCESS, *([] if comma else ["none"])]
    left = [name for name in names if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in left if name.startswith(last.lower())]


@click.command()
@click.option(
    "--bind",
    type=listen_address,
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 or :: for all.",
)
@click.option(
    "--tcp-port",
    type=integer(0, 65535),
    metavar="N",
    default=CONNECT_PORT,
    show_default=True,
    help="TCP port to listen on; 0 for any free one.",
)
@click.option(
    "--size",
    type=size_in_bytes,
    metavar="N[K|M|G]",
    help="Bytes of memory that a client can access.  [default: 4096]",
)
@click.option(
    "--count",
    type=integer(0, 1 << 14),
    metavar="N",
    default=16,
    show_default=True,
    help="Receives to post for each client; used ones are posted again.",
)
@click.option(
    "--receive-size",
    type=size_in_bytes,
    metavar="N[K|M|G]",
    help="Message bytes that each receive can hold.  [default: --size, at most 64K]",
)
@click.option(
    "--access",
    type=_access,
    metavar="LIST",
    shell_complete=_access_lists,
    help="Access that clients get: read,write,atomic, or none.  "
    "[default: all that the device supports]",
)
@click.option("--data", metavar="TEXT", help="Initial contents of the memory; the rest is zeros.")
@click.option(
    "--data-file",
    type=click.File("rb"),
    metavar="FILE",
    help="Read the initial contents from a file; - is standard input.",
)
@click.option("--shared", is_flag=True, help="Let all clients share one memory.")
@token_option("Accept only clients that give this token")
@click.option(
    "--max-clients",
    type=_max_clients,
    metavar="N",
    default=16,
    show_default=True,
    help="Maximum number of clients at a time.",
)
@click.option(
    "--timeout",
    type=seconds,
    metavar="SECONDS",
    default=5.0,
    show_default=True,
    help="Time limit for each step of the handshake with a client.",
)
@click.option(
    "--idle-timeout",
    type=seconds,
    metavar="SECONDS",
    help="Disconnect a client after this time without a request or message.  [default: never]",
)
@pcap_option
@device_options
def serve(
    out: Output,
    target: Target,
    bind: str,
    tcp_port: int,
    size: int | None,
    count: int,
    receive_size: int | None,
    access: str | None,
    data: str | None,
    data_file: IO[bytes] | None,
    shared: bool,
    token: str | None,
    max_clients: int,
    timeout: float,
    idle_timeout: float | None,
) -> None:
    """Let commands in other processes post to this device.

    These are send, write, read and atomic with HOST[:PORT].  The server prints the
    address, key and size of the memory that each client gets, and reports what
    arrives, until SIGINT (Ctrl-C) or SIGTERM.  With --json it prints each event
    as one line of JSON.  Nothing is encrypted: listen only on a network
    whose users may read everything, the token included.
    """
    from rdmapost import Access
    from rdmapost.tools import connect as library
    from rdmapost.tools.connect.exposure import DEFAULT_SIZE
    from rdmapost.tools.reachability import why_confined

    from .target import open_target

    if data is not None and data_file is not None:
        usage_error("--data and --data-file are mutually exclusive")
    check_token(token)
    content = bytes(payload_of(data or "", data_file, None))
    if size is None:
        size = max(DEFAULT_SIZE, len(content))
    if size < len(content):
        usage_error(f"--size {size} is too small for {counted(len(content), 'byte')} of data")
    if size == 0:
        usage_error("--size 0: the memory needs at least one byte")
    flags = None
    if access is not None:
        flags = Access(0)
        for name in filter(None, access.split(",")):
            flags |= Access[f"REMOTE_{name.upper()}"]
    with (
        _Printer(out) as printer,
        _log_to_stderr(),
        _signals(printer),
        open_target(out, target) as (context, port_num),
    ):
        if why := why_confined(context):
            echo(why, err=True)
        with library.serve(
            context,
            bind,
            tcp_port,
            size=size,
            access=flags,
            count=count,
            receive_size=receive_size,
            data=content,
            shared=shared,
            token=token,
            max_clients=max_clients,
            timeout=timeout,
            idle_timeout=idle_timeout,
            port_num=port_num,
            gid_index=target.gid_index,
            on_event=printer.put,
        ) as server:
            printer.serving(server)
            printer.run()
        # Events from closing the server.
        printer.rest()
        printer.ended()


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    loggers = [logging.getLogger(f"rdmapost.{name}") for name in ("connect", "roce.capture")]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("rdmapost: %(message)s"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def _signals(printer: _Printer) -> Iterator[None]:
    """End the printer on SIGINT and SIGTERM; a second signal has its usual effect."""
    before: dict[signal.Signals, Any] = {}

    def end(number: int, frame: object) -> None:
        for name, handler in before.items():
            signal.signal(name, handler)
        printer.end()

    # The kernel may deliver the signal to any thread, but only this one runs the handler.
    woken = signal.set_wakeup_fd(printer.wake_fd, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)


class _Printer:
    """Prints the events of the server's threads, in this thread."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._clients = 0
        self._ending = False
        self._ready, self.wake_fd = os.pipe()
        for fd in (self._ready, self.wake_fd):
            os.set_blocking(fd, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._ready)
        os.close(self.wake_fd)

    def put(self, event: Event) -> None:
        """Queue an event, from any thread; drop it if printing cannot keep up."""
        if len(self._events) < _MAX_WAITING:
            self._events.append(event)
        else:
            self._dropped += 1
        self._wake()

    def end(self) -> None:
        """Make run return; safe in a signal handler."""
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        # If the pipe is full, it wakes run() as well.
        with suppress(BlockingIOError):
            os.write(self.wake_fd, b"\0")

    def run(self) -> None:
        """Print events until end() is called."""
        poller = select.poll()
        poller.register(self._ready, select.POLLIN)
        while not self._ending:
            poller.poll()
            with suppress(BlockingIOError):
                os.read(self._ready, 4096)
            # Notice the end even while events keep coming.
            while self._events and not self._ending:
                self._show(self._events.popleft())

    def rest(self) -> None:
        """Print the remaining events."""
        while self._events:
            self._show(self._events.popleft())

    def serving(self, server: Server) -> None:
        """Print the server's address and its exposure."""
        from rdmapost.tools.connect.protocol_messages import access_names

        host, port = server.address[:2]
        size, count = server.exposure.size, server.exposure.count
        access = access_names(server.exposure.access)
        doc = {
            **self._out.doc,
            "host": host,
            "port": port,
            "size": size,
            "access": access,
            "count": count,
            "receive_size": server.exposure.receive_size,
            "warning": server.warning,
        }
        allowed = ", ".join(access) or "no access"
        self._line(
            "serving",
            doc,
            f"serving on {server} ({self._out.doc['device']}): {counted(size, 'byte')} for "
            f"{allowed}; {counted(count, 'receive')}",
        )

    def ended(self) -> None:
        """Print that the server has ended."""
        doc: dict[str, Any] = {"clients": self._clients}
        text = f"ended after {counted(self._clients, 'client')}"
        if self._dropped:
            doc["not_shown"] = self._dropped
            text += f"; {self._dropped} events were not shown"
        self._line("ended", doc, text)

    def _line(self, event: str, doc: dict[str, Any], text: str) -> None:
        if self._out.json:
            click.echo(json.dumps({"event": event, **doc}))
        else:
            echo(text)

    def _show(self, event: Event) -> None:
        from rdmapost.connect import Arrived, Joined, Left, Refused
        from rdmapost.tools.connect.protocol_messages import access_names

        if isinstance(event, Joined):
            self._clients += 1
            offer = event.offer
            self._line(
                "joined",
                {
                    "client": event.client,
                    "address": event.address,
                    "qp_type": event.qp_type.name,
                    "qp_num": offer.endpoint.qp_num,
                    "addr": offer.addr,
                    "rkey": offer.rkey,
                    "size": offer.size,
                    "access": access_names(offer.access),
                    "receives": offer.receives,
                    "receive_size": offer.receive_size,
                },
                f"client {event.client} from {event.address}: {event.qp_type.name}, "
                f"address {offer.addr:#x}, rkey {offer.rkey:#x}, size {offer.size}",
            )
        elif isinstance(event, Arrived):
            self._arrived(event.client, event.arrival)
        elif isinstance(event, Left):
            doc: dict[str, Any] = {
                "client": event.client,
                "address": event.address,
                "reason": event.reason,
                "changed": None,
            }
            text = f"client {event.client} left: {event.reason}"
            if (changed := event.changed) is not None:
                data, shown = _shown(changed.data)
                doc["changed"] = {"offset": changed.offset, "length": changed.length, **data}
                where = f"memory {changed.offset}..{changed.offset + changed.length}"
                text = f"client {event.client}: {where} holds {shown}\n{text}"
            self._line("left", doc, text)
        elif isinstance(event, Refused):
            self._line(
                "refused",
                {"address": event.address, "code": event.code, "error": event.text},
                f"refused {event.address}: {event.text}",
            )

    def _arrived(self, client: int, arrival: Arrival) -> None:
        from rdmapost import WCStatus

        doc: dict[str, Any] = {
            "client": client,
            "index": arrival.index,
            "status": arrival.status.name,
            "opcode": None if arrival.opcode is None else arrival.opcode.name,
            "byte_len": arrival.byte_len,
            "imm_data": arrival.imm_data,
        }
        if arrival.status:
            text = f"client {client}: its queue pair failed: "
            if arrival.status is WCStatus.WR_FLUSH_ERR:
                text += "one of the client's requests was refused, or ended in an error there; "
                text += f"receives end with {arrival.status.name}"
            else:
                text += arrival.status.name
            self._line("arrived", doc, text)
            return
        text = f"client {client}: {doc['opcode']} of {counted(arrival.byte_len, 'byte')}"
        if arrival.imm_data is not None:
            text += f", imm_data {arrival.imm_data:#x}"
        if arrival.sha256:
            data, shown = _shown(arrival.data)
            doc |= {"sha256": arrival.sha256, **data}
            text += f": {shown}"
        self._line("arrived", doc, text)


def _shown(data: bytes) -> tuple[dict[str, str], str]:
    """Return data for the document, and its beginning for the text."""
    from .results import as_text, shown

    text, encoding = as_text(shown(data))
    start = text[:60] + ("..." if len(text) > 60 else "")
    return {"data": text, "encoding": encoding}, (
        quoted(start) if encoding == "utf-8" else f"hex {start}"
    )
