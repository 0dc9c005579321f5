"""The protocol's messages, and their format: one JSON object per line.

A line is ASCII and has at most 4096 bytes, including its newline. Besides ``type``, each message
has exactly the fields that its class lists; each field is checked separately. The hello carries the
protocol version as ``rdmapost``, and a server that does not speak that version reads nothing else
in the hello.

A session (C is the client, S the server)::

    C hello     its token, what its device can reach, its QP type and endpoint
    S offer     its endpoint, and what it exposes and receives
    C ready     its queue pair is connected
    S ready
    C report    what has arrived in your n-th receive?
    S arrival, or nothing (none within the given time)
    C look      what is in your memory?
    S seen
    C bye       S bye: it has released everything

A request that arrives while a report waits ends the wait: the report is answered with a
``nothing`` message, and then the request is answered.

Instead of an answer, the server may send an error, which is its last message.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, get_args

from ...enums import Access, QPType, WCOpcode, WCStatus, reported
from ...resources.endpoint import Endpoint
from .errors import ProtocolError

VERSION = 2
MAX_LINE = 4096
"""Bytes in a line, including its newline."""
MAX_PRIVATE_DATA = 256
"""Bytes of private data in a hello or an offer."""
MAX_TOKEN = 256
"""Characters in a token."""
HEAD_BYTES = 1024
"""A message contains only the first bytes of the data: at most this many."""
CODES = (
    "format",
    "version",
    "token",
    "device",
    "unsupported",
    "busy",
    "rejected",
    "timeout",
    "closing",
    "failed",
)
"""The types of errors that an error message can report."""
QP_TYPES = (QPType.RC, QPType.UC, QPType.UD)
LONGEST_WAIT_S = 60
"""How many seconds one report may wait."""
_MAX_TEXT = 300
_NAME = 128


# ---- the fields -------------------------------------------------------


class _Codec(NamedTuple):
    """How a value is written to and read from JSON, and a description of valid values."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    what: str


def _identity(value: Any) -> Any:
    return value


def _invalid() -> NoReturn:
    raise ValueError


def _integer(maximum: int, minimum: int = 0) -> _Codec:
    read = partial(_read_integer, minimum, maximum)
    return _Codec(int, read, f"an integer in {minimum}..{maximum}")


def _read_integer(minimum: int, maximum: int, value: Any) -> int:
    # True and False are integers in Python, but not here.
    return value if type(value) is int and minimum <= value <= maximum else _invalid()


def _text(maximum: int) -> _Codec:
    read = partial(_read_text, maximum)
    return _Codec(_identity, read, f"text of at most {maximum} characters")


def _read_text(maximum: int, value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= maximum else _invalid()


def _printable(maximum: int) -> _Codec:
    # The text will be shown on a terminal.
    write, read = partial(_write_printable, maximum), partial(_read_printable, maximum)
    return _Codec(write, read, f"printable text of at most {maximum} characters")


def printable(text: str) -> str:
    """Return the text with a space for each line break or other unprintable character."""
    return "".join([c if c.isprintable() else " " for c in text])


def _write_printable(maximum: int, value: str) -> str:
    return printable(value)[:maximum]


def _read_printable(maximum: int, value: Any) -> str:
    fits = isinstance(value, str) and len(value) <= maximum and value.isprintable()
    return str(value) if fits else _invalid()


def _member(names: dict[str, Any]) -> _Codec:
    listed = ", ".join(names) if len(names) < 12 else "a known name"
    write, read = partial(_write_member, names), partial(_read_member, names)
    return _Codec(write, read, f"one of {listed}")


def _write_member(names: dict[str, Any], member: Any) -> str:
    (name,) = [name for name, each in names.items() if each == member]
    return name


def _read_member(names: dict[str, Any], value: Any) -> Any:
    return names[value] if isinstance(value, str) and value in names else _invalid()


def _reported(enum: Any) -> _Codec:
    """Return the codec for a value from a device: its name or, if that is unknown, its number."""
    read = partial(_read_reported, enum)
    return _Codec(attrgetter("name"), read, "a known name, or a number")


def _read_reported(enum: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return _invalid()
    if value in enum.__members__:
        return enum[value]
    is_number = value.isascii() and value.isdigit() and len(value) < 11
    return reported(enum, int(value)) if is_number else _invalid()


def _optional(codec: _Codec) -> _Codec:
    write, read = partial(_unless_none, codec.write), partial(_unless_none, codec.read)
    return _Codec(write, read, f"{codec.what}, or null")


def _unless_none(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def _read_endpoint(value: Any) -> Endpoint:
    return Endpoint.parse(value) if isinstance(value, str) and len(value) < 160 else _invalid()


_ACCESS = {"read": Access.REMOTE_READ, "write": Access.REMOTE_WRITE, "atomic": Access.REMOTE_ATOMIC}


def access_names(access: Access) -> list[str]:
    """Return what access flags permit, by name, in this order: read, write, atomic."""
    return [name for name, flag in _ACCESS.items() if access & flag]


def _read_access(value: Any) -> Access:
    if not isinstance(value, list) or len(value) > len(_ACCESS):
        _invalid()
    flags = Access(0)
    for name in value:
        if not isinstance(name, str) or name not in _ACCESS or flags & _ACCESS[name]:
            _invalid()
        flags |= _ACCESS[name]
    return flags


def _read_hex(minimum: int, maximum: int, value: Any) -> str:
    if not isinstance(value, str) or len(value) % 2 or not minimum <= len(value) <= maximum:
        _invalid()
    if value.strip("0123456789abcdef"):
        _invalid()
    return str(value)


def _read_digest(value: Any) -> str:
    return "" if value == "" else _read_hex(64, 64, value)


_U32, _U64 = _integer((1 << 32) - 1), _integer((1 << 64) - 1)
_ENDPOINT = _Codec(str, _read_endpoint, "an endpoint (qp_num=... psn=... gid=... lid=... mtu=...)")
_DATA = _Codec(
    lambda value: bytes(value[:HEAD_BYTES]).hex(),
    lambda value: bytes.fromhex(_read_hex(0, 2 * HEAD_BYTES, value)),
    f"hexadecimal text of at most {HEAD_BYTES} bytes",
)
_PRIVATE_DATA = _Codec(
    bytes.hex,
    lambda value: bytes.fromhex(_read_hex(0, 2 * MAX_PRIVATE_DATA, value)),
    f"hexadecimal text of at most {MAX_PRIVATE_DATA} bytes",
)
_DIGEST = _Codec(_identity, _read_digest, "64 hexadecimal digits, or nothing")


def _with(codec: _Codec) -> dict[str, _Codec]:
    return {"codec": codec}


# ---- messages -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The client's first message.

    Attributes:
        token: the token, or None.
        fabric: the devices that its device can reach (reachability.fabric_of).
        qp_type: type of the queue pairs: RC, UC or UD.
        endpoint: the endpoint of its queue pair.
        private_data: bytes for the server's owner.
    """

    token: str | None = field(metadata=_with(_optional(_text(MAX_TOKEN))))
    fabric: str = field(metadata=_with(_printable(_NAME)))
    qp_type: QPType = field(
        metadata=_with(_member({qp_type.name: qp_type for qp_type in QP_TYPES}))
    )
    endpoint: Endpoint = field(metadata=_with(_ENDPOINT))
    private_data: bytes = field(default=b"", metadata=_with(_PRIVATE_DATA))


@dataclass(frozen=True, slots=True)
class Offer:
    """What the server offers this client.

    Attributes:
        client: the client's number at this server, from 1.
        device: name of the server's device.
        endpoint: the server's queue pair.
        qkey: its Q_Key on UD; otherwise 0.
        addr, rkey, size: the exposed memory.
        access: what the client may do with it: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC. FLUSH is
            not among them, because the protocol has no name for it; if the owner's mr permits it,
            the owner can say so in private_data.
        receives: how many receives are posted; they are reposted as they are used.
        receive_size: message bytes that each receive can hold.
        private_data: bytes from the server's owner.
    """

    client: int = field(metadata=_with(_U64))
    device: str = field(metadata=_with(_printable(_NAME)))
    endpoint: Endpoint = field(metadata=_with(_ENDPOINT))
    qkey: int = field(metadata=_with(_U32))
    addr: int = field(metadata=_with(_U64))
    rkey: int = field(metadata=_with(_U32))
    size: int = field(metadata=_with(_U64))
    access: Access = field(
        metadata=_with(_Codec(access_names, _read_access, "a list of read, write and atomic"))
    )
    receives: int = field(metadata=_with(_U32))
    receive_size: int = field(metadata=_with(_U32))
    private_data: bytes = field(default=b"", metadata=_with(_PRIVATE_DATA))


@dataclass(frozen=True, slots=True)
class Ready:
    """The sender's queue pair is connected; sent first by the client, then by the server."""


@dataclass(frozen=True, slots=True)
class Report:
    """The client asks what has arrived in one of the server's receives.

    Attributes:
        index: the receive's number, from 1.
        timeout_ms: how long to wait for an arrival.
    """

    index: int = field(metadata=_with(_integer((1 << 64) - 1, 1)))
    timeout_ms: int = field(metadata=_with(_integer(1000 * LONGEST_WAIT_S)))


@dataclass(frozen=True, slots=True)
class Arrival:
    """What has arrived in a receive.

    Attributes:
        index: which receive, from 1.
        status: the completion's status; unless it is SUCCESS, the other fields are not valid.
        opcode: the operation that completed, or None.
        byte_len: bytes of the message.
        imm_data: immediate data in host order, or None.
        sha256: the digest of the whole message, in hex; "" if the message went elsewhere
            (RDMA_WRITE_WITH_IMM).
        data: the first bytes of the message, at most 1024: compare sha256 for the rest; empty if
            the message went elsewhere.
    """

    index: int = field(metadata=_with(_integer((1 << 64) - 1, 1)))
    status: WCStatus = field(metadata=_with(_reported(WCStatus)))
    opcode: WCOpcode | None = field(metadata=_with(_optional(_reported(WCOpcode))))
    byte_len: int = field(metadata=_with(_U32))
    imm_data: int | None = field(metadata=_with(_optional(_U32)))
    sha256: str = field(metadata=_with(_DIGEST))
    data: bytes = field(metadata=_with(_DATA))


@dataclass(frozen=True, slots=True)
class Nothing:
    """No message has arrived for that receive.

    Attributes:
        arrived: how many messages have arrived.
    """

    arrived: int = field(metadata=_with(_U64))


@dataclass(frozen=True, slots=True)
class Look:
    """The client asks for the contents of the exposed memory.

    Attributes:
        offset, length: the range of the memory.
    """

    offset: int = field(metadata=_with(_U64))
    length: int = field(metadata=_with(_U64))


@dataclass(frozen=True, slots=True)
class Seen:
    """The contents of the exposed memory.

    Attributes:
        offset, length: the range of the memory.
        sha256: the digest of all those bytes, in hex.
        data: the first of them, at most 1024: compare sha256 for the rest.
    """

    offset: int = field(metadata=_with(_U64))
    length: int = field(metadata=_with(_U64))
    sha256: str = field(metadata=_with(_DIGEST))
    data: bytes = field(metadata=_with(_DATA))


@dataclass(frozen=True, slots=True)
class Bye:
    """From the client: it is leaving. From the server: the client's resources are released."""


@dataclass(frozen=True, slots=True)
class Error:
    """Why the server ends the connection.

    Attributes:
        code: the type of error, one of CODES.
        text: one line for people to read.
    """

    code: str = field(metadata=_with(_member({code: code for code in CODES})))
    text: str = field(metadata=_with(_printable(_MAX_TEXT)))


Message = Hello | Offer | Ready | Report | Arrival | Nothing | Look | Seen | Bye | Error

_CODECS: dict[type, dict[str, _Codec]] = {
    message_type: {item.name: item.metadata["codec"] for item in dataclasses.fields(message_type)}
    for message_type in get_args(Message)
}


# ---- lines --------------------------------------------------------------------


_TEXT = json.JSONEncoder()


def _name(message_type: type[Message]) -> str:
    return message_type.__name__.lower()


def encode(message: Message) -> bytes:
    """Write a message as a line, with its newline."""
    # Clients of every version read errors.
    content: dict[str, Any] = {"rdmapost": VERSION} if isinstance(message, Hello | Error) else {}
    content["type"] = _name(type(message))
    for name, codec in _CODECS[type(message)].items():
        content[name] = codec.write(getattr(message, name))
    members = [f'"{name}":{_json(value)}' for name, value in content.items()]
    return f"{{{','.join(members)}}}\n".encode()


def _json(value: Any) -> str:
    # Only strings go through json, because it creates functions for other values, and Python 3.12
    # and 3.13 crash if there is no memory for a function.
    if isinstance(value, str):
        return _TEXT.encode(value)
    if isinstance(value, list):
        return f"[{','.join([_json(each) for each in value])}]"
    return "null" if value is None else f"{value:d}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate field")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_line(line: bytes) -> dict[str, Any]:
    """Read a line as one JSON object, without checking its contents."""
    try:
        fields = json.loads(
            line.decode("ascii"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ProtocolError(f"this is not a line with one JSON object: {_short(line)}")
    return fields


def read_version(fields: dict[str, Any]) -> int:
    """Return the version given in a session's first message."""
    version = fields.get("rdmapost")
    if type(version) is not int:
        raise ProtocolError("the first message does not give its protocol version (field rdmapost)")
    return version


def decode(fields: dict[str, Any], *expected: type[Message]) -> Message:
    """Read a JSON object as a message of one of the expected types."""
    given = fields.get("type")
    for message_type in expected:
        name, codecs = _name(message_type), _CODECS[message_type]
        if given == name:
            break
    else:
        wanted = " or ".join(map(_name, expected))
        raise ProtocolError(f"expected a message of type {wanted}, got {_short(given)}")
    besides = {"type", "rdmapost"} if message_type in (Hello, Error) else {"type"}
    for key in fields:
        if key not in codecs and key not in besides:
            raise ProtocolError(f"{name} has no field {_short(key)}")
    values = {}
    for key, codec in codecs.items():
        if key not in fields:
            raise ProtocolError(f"{name} lacks its field {key}")
        try:
            values[key] = codec.read(fields[key])
        except ValueError:
            raise ProtocolError(
                f"{key} of {name}: expected {codec.what}, got {_short(fields[key])}"
            ) from None
    return message_type(**values)


def _short(value: object) -> str:
    # The value may be anything, of any length and depth.
    if isinstance(value, bytes):
        shown = repr(value[:40])[1:]
        return f"{shown}..." if len(value) > 40 else shown
    if isinstance(value, str):
        return repr(value[:40]) + ("..." if len(value) > 40 else "")
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'JSON object'}"
    return f"{value!s:.40}" if isinstance(value, int | float) else "null"
