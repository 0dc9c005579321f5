"""Options shared by commands, and the types of their values."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import click

from .output import Output, usage_error

if TYPE_CHECKING:
    from .payload import Payload

    _Choice = click.Choice[str]
else:
    # Not generic before click 8.2.
    _Choice = click.Choice

Command = Callable[..., Any]

_MAX_MESSAGE = 1 << 31
_DEFAULT_DATA = "hello, rdma"


def integer(minimum: int, maximum: int | None = None) -> Callable[[str | int], int]:
    """Make an argument type for integers in an inclusive range: decimal, or with 0x, 0o or 0b."""

    def convert(value: str | int) -> int:
        text = str(value)
        try:
            number = int(text, 10 if text.isdecimal() else 0)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not an integer (10 or 0xa)") from None
        if number < minimum or (maximum is not None and number > maximum):
            upper = "" if maximum is None else f" and at most {maximum}"
            raise click.BadParameter(f"{text} is not at least {minimum}{upper}")
        return number

    return convert


U32 = integer(0, (1 << 32) - 1)
U64 = integer(0, (1 << 64) - 1)


def not_empty(text: str) -> str:
    """Refuse an empty string: usually an unset shell variable."""
    if not text:
        raise click.BadParameter("it is empty")
    return text


def listen_address(value: str) -> str:
    """Parse an address to listen on."""
    address = not_empty(value).strip("[]")
    name, _, digits = address.partition(":")
    if name and digits.isdecimal():
        raise click.BadParameter(f"{value!r} includes a port; use --tcp-port {digits}")
    return address


_SIZE = re.compile(r"(\d+|0x[0-9a-f]+)(?:([kmg])(?:i?b)?)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size_in_bytes(text: str) -> int:
    """Parse a number of bytes, with K, M or G for powers of 1024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size (64, 4K, 1M or 0x40)")
    digits, unit = match.groups(default="")
    size = int(digits, 16 if digits[:2] in ("0x", "0X") else 10) * _UNITS[unit.lower()]
    if size > _MAX_MESSAGE:
        raise click.BadParameter(f"{text} is more than a message can hold (2G)")
    return size


def seconds(value: str | float) -> float:
    """Parse a time in seconds: more than 0, at most a day."""
    try:
        time = float(value)
    except ValueError:
        time = math.nan
    if not 0 < time <= 86400:
        raise click.BadParameter(f"expected more than 0 s and at most 86400 s, got {value}")
    return time


@dataclass(frozen=True, slots=True)
class Target:
    """Which device to use, and how.

    Attributes:
        device: its name, or None to choose.
        port: the port, or None for the first active one.
        gid_index: the GID, or None to choose.
        pcap: the file to write the device's packets to, or None.
    """

    device: str | None
    port: int | None
    gid_index: int | None
    pcap: str | None = None


@dataclass(frozen=True, slots=True)
class PostSettings:
    """How to post.

    Attributes:
        qp_type: name of the type, a QPType.
        count: work requests in one post.
        timeout: seconds for all waits.
        flags: names of send flags other than SIGNALED.
    """

    qp_type: str
    count: int
    timeout: float
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """The server to post to.

    Attributes:
        host, port: where it listens.
        token: the token to send, or None.
        offset: bytes from the start of its memory.
    """

    host: str
    port: int
    token: str | None
    offset: int


def device_names(ctx: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Complete the name of a device."""
    from rdmapost import RdmaError, list_devices, list_roce_interfaces

    try:
        names = [info.name for info in list_devices()]
        names += [one.name for one in list_roce_interfaces() if one.obstacle is None]
    except RdmaError:
        # The shell cannot show an error during completion.
        return []
    return [name for name in dict.fromkeys(names) if name.startswith(text)]


_PORT = integer(1, 255)
_TCP_PORT_OF = {"tcp_port": "--tcp-port", "server": "HOST:PORT"}


def _device_port(value: str | int) -> int:
    """Parse a device port; for a number that can only be a TCP port, name the right option."""
    try:
        return _PORT(value)
    except click.BadParameter as error:
        text = str(value)
        names = [param.name or "" for param in click.get_current_context().command.params]
        where = [option for name, option in _TCP_PORT_OF.items() if name in names]
        if where and text.isdecimal() and int(text) > 255:
            raise click.BadParameter(
                f"{error.message} (the port of the device); for the TCP port use {where[0]}",
                error.ctx,
                error.param,
            ) from None
        raise


class _JsonOption(click.Option):
    """--json, with help that depends on the command."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0], _JSON_LINES if ctx.command.name == "serve" else record[1])


_JSON = "Print one JSON document."
_JSON_LINES = "Print one JSON object per line, for each event."
_COMMON = (
    click.option(
        "-d",
        "--device",
        type=not_empty,
        metavar="NAME",
        shell_complete=device_names,
        help="Device, such as mlx5_0, rxe0, roce:lo or soft0.",
    ),
    click.option("-p", "--port", type=_device_port, metavar="N", help="Device port, from 1."),
    click.option(
        "-g", "--gid-index", type=integer(0, 65535), metavar="N", help="Local GID to use."
    ),
    click.option("--json", "as_json", is_flag=True, cls=_JsonOption, help=_JSON),
    click.option("-v", "--verbose", is_flag=True, help="Print on stderr what is used and why."),
)


def common_options(function: Command) -> Command:
    """Add -d, -p, -g, --json and -v."""
    for option in reversed(_COMMON):
        function = option(function)
    return function


def device_options(function: Command) -> Command:
    """Add -d, -p, -g, --json and -v; the command gets ``out`` and ``target``."""

    @common_options
    @functools.wraps(function)
    def command(
        *,
        device: str | None,
        port: int | None,
        gid_index: int | None,
        as_json: bool,
        verbose: bool,
        pcap: str | None = None,
        **options: Any,
    ) -> Any:
        out = click.get_current_context().find_object(Output)
        assert out is not None, "App.main() makes it"
        out.json, out.verbose = as_json, verbose
        return function(out=out, target=Target(device, port, gid_index, pcap), **options)

    return command


pcap_option = click.option(
    "--pcap",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the packets to a file for Wireshark (roce devices).",
)
"""--pcap, for commands with device_options, which get the file's name in ``target``."""


timeout_option = click.option(
    "--timeout",
    type=seconds,
    metavar="SECONDS",
    default=5.0,
    show_default=True,
    help="Give up after this time.",
)


class _TokenOption(click.Option):
    """An option that distinguishes an empty environment variable from an unset one."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        # click ignores an empty variable; a server would then require no token.
        return os.environ.get(str(self.envvar))


def check_token(token: str | None) -> None:
    """Refuse an invalid token, from --token or its variable, as a usage error."""
    from rdmapost.tools.connect.server_state import check_token

    try:
        check_token(token)
    except ValueError as error:
        usage_error(f"{error} (--token, or the variable RDMAPOST_TOKEN)")


def token_option(text: str) -> Callable[[Command], Command]:
    """Add --token; ``text`` says what it is for."""
    return click.option(
        "--token",
        cls=_TokenOption,
        metavar="T",
        envvar="RDMAPOST_TOKEN",
        show_envvar=True,
        help=f"{text}; other users can see it on the command line, but not in the variable.",
    )


def given(name: str) -> bool:
    """Whether an option was given on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def peer_options(*, offset: bool) -> Callable[[Command], Command]:
    """Add HOST[:PORT] and its options; the command gets ``peer``, or None without HOST."""

    def decorate(function: Command) -> Command:
        @click.argument("server", metavar="[HOST[:PORT]]", required=False)
        @token_option("Token that 'rdmapost serve' requires")
        @functools.wraps(function)
        def command(
            server: str | None, token: str | None, offset: int | None = None, **options: Any
        ) -> Any:
            if server is None:
                for name, value in (("token", token), ("offset", offset)):
                    if value is not None and given(name):
                        usage_error(f"--{name} needs a HOST to post to")
                return function(peer=None, **options)
            from rdmapost.tools.connect.host_port import parse_address

            check_token(token)
            try:
                host, port = parse_address(server)
            except ValueError as error:
                usage_error(str(error))
            return function(peer=Peer(host, port, token, offset or 0), **options)

        if offset:
            command = click.option(
                "--offset",
                type=size_in_bytes,
                metavar="N[K|M|G]",
                help="Offset in the memory of HOST.  [default: 0]",
            )(command)
        return command

    return decorate


def flag_options(*names: str) -> Callable[[Command], Command]:
    """Add options for send flags; they end up in ``settings.flags``."""
    texts = {
        "inline": "Copy the data when it is posted (SendFlags.INLINE).",
        "fence": "Wait for earlier reads and atomics (SendFlags.FENCE).",
        "solicited": "Ask for a solicited event (SendFlags.SOLICITED).",
    }

    def decorate(function: Command) -> Command:
        for name in reversed(names):
            function = click.option(f"--{name}", is_flag=True, help=texts[name])(function)
        return function

    return decorate


_QP_TYPES = {"rc": "RC", "uc": "UC", "ud": "UD", "xrc": "XRC_SEND", "raw": "RAW_PACKET"}
"""The names of the queue pair types on the command line, and in QPType."""


class _QPTypeChoice(_Choice):
    """Accepts the short names, and those in ``rdmapost check`` and the man pages."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        for short, name in _QP_TYPES.items():
            if str(value).upper() == name and short in self.choices:
                return short
        return super().convert(value, param, ctx)


def post_options_for(
    *qp_types: str, count: bool = False, where: str = ""
) -> Callable[[Command], Command]:
    """Add --timeout and, if wanted, --qp-type and --count; the command gets ``settings``.

    Args:
        qp_types: the possible types of the queue pairs; the first is the default. If there
            are several, --qp-type is added.
        count: whether to add --count.
        where: which memory the work requests use, for the help of --count.
    """

    def decorate(function: Command) -> Command:
        @timeout_option
        @functools.wraps(function)
        def command(
            timeout: float, qp_type: str = qp_types[0], count: int = 1, **options: Any
        ) -> Any:
            flags = tuple(
                name.upper()
                for name in ("inline", "fence", "solicited")
                if options.pop(name, False)
            )
            return function(
                settings=PostSettings(_QP_TYPES[qp_type], count, timeout, flags), **options
            )

        if count:
            command = click.option(
                "--count",
                type=integer(1),
                metavar="N",
                default=1,
                show_default=True,
                help=f"Post N work requests in one list{where}.",
            )(command)
        if len(qp_types) > 1:
            command = click.option(
                "--qp-type",
                type=_QPTypeChoice(qp_types, case_sensitive=False),
                default=qp_types[0],
                show_default=True,
                help="Type of the queue pairs.",
            )(command)
        return command

    return decorate


send_options = post_options_for(*_QP_TYPES, count=True)
write_options = post_options_for("rc", "uc", "xrc", count=True, where=", to N consecutive places")
read_options = post_options_for("rc", "xrc", count=True)
"""The options of reads and atomics."""


class _DataFile(click.File):
    """A file or standard input; a usage error if standard input is closed."""

    name = "filename"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "-" and sys.stdin is None:
            self.fail("standard input is closed", param, ctx)
        return super().convert(value, param, ctx)


def payload_options_for(
    size_unless_given: int | None, *, whole: bool = True
) -> Callable[[Command], Command]:
    """Add --data, --data-file and --size; the command gets ``payload``.

    Args:
        size_unless_given: default size of the generated data; None if the default is a short text.
        whole: whether to pass bytes to the command, instead of a Payload.
    """
    text_default = "" if size_unless_given else f"  [default: {_DEFAULT_DATA!r}]"
    size_default = f"  [default: {size_unless_given}]" if size_unless_given else ""

    def decorate(function: Command) -> Command:
        @click.option("--data", metavar="TEXT", help=f"The data.{text_default}")
        @click.option(
            "--data-file",
            type=_DataFile("rb"),
            metavar="FILE",
            help="Take the data from a file; - is standard input.",
        )
        @click.option(
            "--size",
            type=size_in_bytes,
            metavar="N[K|M|G]",
            help=f"Generate this many bytes of data.{size_default}",
        )
        @functools.wraps(function)
        def command(
            data: str | None, data_file: IO[bytes] | None, size: int | None, **options: Any
        ) -> Any:
            given = sum(source is not None for source in (data, data_file, size))
            if given > 1:
                usage_error("--data, --data-file and --size are mutually exclusive")
            if not given:
                size = size_unless_given
            payload = payload_of(data, data_file, size)
            return function(payload=bytes(payload) if whole else payload, **options)

        return command

    return decorate


payload_options = payload_options_for(None)
large_payload_options = payload_options_for(None, whole=False)


def payload_of(data: str | None, data_file: IO[bytes] | None, size: int | None) -> Payload:
    """Return the payload that the options specify: generated bytes, a file's contents or text."""
    from .payload import Payload

    if size is not None:
        return Payload(bytes(range(256)), size)
    if data_file is None:
        return Payload(os.fsencode(_DEFAULT_DATA if data is None else data))
    content = bytearray()
    # Read in pieces, because read(n) allocates n bytes even for a short file.
    while piece := data_file.read(1 << 20):
        content += piece
        if len(content) > _MAX_MESSAGE:
            usage_error(f"{data_file.name} is longer than a message can be (2G)")
    return Payload(bytes(content))
