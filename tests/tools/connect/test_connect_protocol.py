"""The protocol without a network: its messages, both state machines, and invalid messages.

Each of 100,000 malformed inputs is refused by name, or is a valid message after all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from support import LOSES_MEMORY, prints

import rdmapost as rp
from rdmapost.connect import ConnectError, ProtocolError, parse_address
from rdmapost.enums import reported
from rdmapost.tools.connect.host_port import is_loopback
from rdmapost.tools.connect.protocol import (
    ClientProtocol,
    LineReader,
    ServerProtocol,
    SessionState,
    token_matches,
)
from rdmapost.tools.connect.protocol_messages import (
    CODES,
    HEAD_BYTES,
    MAX_LINE,
    MAX_TOKEN,
    VERSION,
    Arrival,
    Bye,
    Error,
    Hello,
    Look,
    Message,
    Nothing,
    Offer,
    Ready,
    Report,
    Seen,
    decode,
    encode,
    parse_line,
)
from rdmapost.tools.connect.server_state import check_token
from rdmapost.tools.reachability import why_unreachable
from rdmapost.tools.tcp import name_of

MALFORMED = 100_000
"""Inputs of the fuzz test."""

ENDPOINT = rp.Endpoint(0x11, 0xABCDEF, rp.GID("::ffff:10.0.0.1"), 0, rp.MTU.MTU_1024)
HELLO = Hello("secret", "verbs", rp.QPType.RC, ENDPOINT, b"\x00 any bytes")
OFFER = Offer(
    1,
    "rxe0",
    ENDPOINT,
    0,
    (1 << 64) - 4096,
    (1 << 32) - 1,
    4096,
    rp.Access.REMOTE_READ | rp.Access.REMOTE_ATOMIC,
    16,
    4096,
    bytes(range(256)),
)
MESSAGES: list[Message] = [
    HELLO,
    Hello(None, "verbs", rp.QPType.UD, ENDPOINT),
    OFFER,
    Ready(),
    Report(1, 60_000),
    Arrival(3, rp.WCStatus.SUCCESS, rp.WCOpcode.RECV, 5, 7, "0a" * 32, b"hello"),
    Arrival(1, rp.WCStatus.WR_FLUSH_ERR, None, 0, None, "", b""),
    Nothing(0),
    Look(0, 4096),
    Seen(0, 4096, "ff" * 32, bytes(HEAD_BYTES)),
    Bye(),
    Error("busy", "try again later"),
    # From a server whose device reports values that this version does not know.
    Arrival(2, reported(rp.WCStatus, 99), reported(rp.WCOpcode, 250), 0, None, "", b""),
]


def read(line: bytes, *types: type[Message]) -> Message:
    return decode(parse_line(line), *(types or tuple(map(type, MESSAGES))))


# ---- messages -----------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_one_short_line_and_is_read_back(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) <= MAX_LINE
    assert line.isascii()
    assert read(line, type(message)) == message


def test_the_longest_messages_fit_into_one_line_of_the_limit() -> None:
    assert (
        len(encode(Hello("\U0001f600" * MAX_TOKEN, "x" * 128, rp.QPType.RC, ENDPOINT, bytes(256))))
        < MAX_LINE
    )
    assert len(encode(Error("failed", "\U0001f600" * 9999))) <= MAX_LINE
    head = Seen((1 << 64) - 1, (1 << 64) - 1, "ff" * 32, b"x" * 99999)
    assert len(encode(head)) <= MAX_LINE
    assert read(encode(head)).data == b"x" * HEAD_BYTES  # type: ignore[union-attr]


def test_the_text_of_an_error_holds_no_control_characters() -> None:
    sent = Error("failed", "red \x1b[31m\nnext\u202eline")
    assert read(encode(sent)) == Error("failed", "red  [31m next line")
    for text in ("\x1b[31m", "a\nb", "\u202e"):
        line = json.dumps({"rdmapost": 2, "type": "error", "code": "failed", "text": text})
        with pytest.raises(ProtocolError, match="text of error"):
            read(line.encode(), Error)


@pytest.mark.parametrize("code", CODES)
def test_an_error_of_every_code_is_read_back(code: str) -> None:
    assert read(encode(Error(code, "why"))) == Error(code, "why")


WRONG: list[tuple[str, Any]] = [
    ("token", 5),
    ("token", "x" * (MAX_TOKEN + 1)),
    ("token", ["secret"]),
    ("fabric", None),
    ("fabric", "x" * 129),
    ("fabric", "a\nb"),
    ("qp_type", "XRC_SEND"),
    ("qp_type", 2),
    ("qp_type", None),
    ("qp_type", {}),
    ("endpoint", "qp_num=0x1000000 psn=0x0 gid=::1 lid=0x0 mtu=1024"),
    ("endpoint", "qp_num=0x11 psn=0x0 gid=:::1 lid=0x0 mtu=1024"),
    ("endpoint", "qp_num=0x11 psn=0x0 gid=::1 lid=0x0 mtu=1000"),
    ("endpoint", "x" * 4000),
    ("endpoint", 17),
    ("endpoint", None),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda v: str(v)[:24])
def test_each_field_of_a_hello_is_checked(field: str, value: Any) -> None:
    fields = {**json.loads(encode(HELLO)), field: value}
    with pytest.raises(ProtocolError, match=f"^{field} of hello: expected .*, got "):
        decode(fields, Hello)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("addr", 1 << 64),
        ("addr", -1),
        ("addr", 1.0),
        ("addr", True),
        ("addr", "0x10"),
        ("rkey", 1 << 32),
        ("size", None),
        ("client", []),
        ("receives", -1),
        ("access", "read"),
        ("access", ["read", "read"]),
        ("access", ["local"]),
        ("access", [["read"]]),
        ("access", ["read", "write", "atomic", "read"]),
    ],
    ids=str,
)
def test_each_field_of_an_offer_is_checked(field: str, value: Any) -> None:
    fields = {**json.loads(encode(OFFER)), field: value}
    with pytest.raises(ProtocolError, match=f"^{field} of offer: expected .*, got "):
        decode(fields, Offer)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_with_an_unknown_or_a_missing_field_is_refused(message: Message) -> None:
    fields = json.loads(encode(message))
    with pytest.raises(ProtocolError, match="has no field 'colour'"):
        decode({**fields, "colour": "blue"}, type(message))
    for field in fields.keys() - {"type", "rdmapost"}:
        less = {name: value for name, value in fields.items() if name != field}
        with pytest.raises(ProtocolError, match=f"lacks its field {field}"):
            decode(less, type(message))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"hello"',
        b'{"type":"ready"',
        b'{"type":"ready"}}',
        b'{"type":"ready","type":"bye"}',
        b'{"type":NaN}',
        b'{"type":Infinity}',
        b"{'type':1}",
        b"\xff\xfe",
        '{"type":"b\u00ffe"}'.encode(),
        b'{"a":' + b"[" * 4000,
        b"{" * 4000,
        b'{"type":"ready"}\x00',
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_line_that_is_not_one_json_object_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a line with one JSON object"):
        parse_line(line)


# ---- lines ----------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_lines_are_read_from_pieces_of_any_size(piece: int) -> None:
    stream = b"".join(map(encode, MESSAGES))
    lines = LineReader()
    found = []
    for start in range(0, len(stream), piece):
        lines.feed(stream[start : start + piece])
        while (line := lines.next_line()) is not None:
            found.append(read(line))
    assert found == MESSAGES
    assert not lines.partial


@pytest.mark.parametrize("ended", [b"", b"\n"], ids=["endless", "ended"])
def test_a_line_longer_than_the_limit_is_refused(ended: bytes) -> None:
    lines = LineReader()
    lines.feed(b"{" + b" " * (MAX_LINE - 2))
    assert lines.next_line() is None
    lines.feed(b" " + ended)
    with pytest.raises(ProtocolError, match="longer than 4096 bytes"):
        lines.next_line()
    fits = LineReader()
    fits.feed(b"{" + b" " * (MAX_LINE - 2) + b"\n")
    assert fits.next_line() == b"{" + b" " * (MAX_LINE - 2)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1", b"\x16\x03\x01", b"0000:000011:", b"\n"])
def test_another_protocol_is_recognised_at_its_first_byte(first: bytes) -> None:
    protocol = ServerProtocol()
    protocol.receive(first)
    with pytest.raises(ProtocolError, match="not rdmapost's protocol"):
        protocol.next_message()


# ---- both sides -------------------------------------------------------------------


def server_at(state: SessionState, token: str | None = None) -> ServerProtocol:
    protocol = ServerProtocol(token)
    if state is not SessionState.HELLO:
        protocol.receive(encode(HELLO))
        assert protocol.next_message() == HELLO
    if state is SessionState.OPEN:
        protocol.receive(encode(Ready()))
        assert protocol.next_message() == Ready()
    assert protocol.state is state
    return protocol


def test_the_server_reads_every_message_from_hello_to_bye() -> None:
    protocol = server_at(SessionState.OPEN)
    asked: list[Message] = [Report(1, 0), Look(0, 1), Report(2, 5), Bye()]
    protocol.receive(b"".join(map(encode, asked)))
    assert [protocol.next_message() for _ in asked] == asked
    assert protocol.state is SessionState.OVER
    protocol.receive(b"more")
    assert protocol.next_message() is None


CAN_COME: dict[SessionState, tuple[type, ...]] = {
    SessionState.HELLO: (Hello,),
    SessionState.READY: (Ready, Bye),
    SessionState.OPEN: (Report, Look, Bye),
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("state", CAN_COME, ids=lambda state: state.name)
def test_the_server_accepts_a_message_only_in_its_state(
    state: SessionState, message: Message
) -> None:
    protocol = server_at(state)
    protocol.receive(encode(message))
    if isinstance(message, CAN_COME[state]):
        assert protocol.next_message() == message
        return
    with pytest.raises(ProtocolError) as error:
        protocol.next_message()
    assert error.value.code == "format"
    assert protocol.state is SessionState.OVER
    # It is over: a valid message comes too late.
    protocol.receive(encode(HELLO))
    assert protocol.next_message() is None


@pytest.mark.parametrize("version", [0, VERSION + 1, -1, pytest.param(10**3000, id="10**3000")])
def test_another_protocol_version_is_refused_before_anything_else_is_read(version: int) -> None:
    protocol = ServerProtocol("secret")
    line = json.dumps({"rdmapost": version, "type": "greetings", "new": [1]})
    protocol.receive(line.encode() + b"\n")
    with pytest.raises(ProtocolError, match=rf"speaks version {VERSION} .* use the same") as error:
        protocol.next_message()
    assert error.value.code == "version"


@pytest.mark.parametrize("version", [None, "1", 1.0, True, [1]])
def test_a_hello_without_a_version_is_refused(version: object) -> None:
    protocol = ServerProtocol()
    line = json.dumps({**json.loads(encode(HELLO)), "rdmapost": version})
    protocol.receive(line.encode() + b"\n")
    with pytest.raises(ProtocolError, match="does not give its protocol version"):
        protocol.next_message()


@pytest.mark.parametrize(
    "token", [None, "", "Secret", "secret ", "s", "secret" * 100, 5, ["secret"]]
)
def test_a_client_with_a_wrong_token_learns_only_that_it_is_wrong(token: object) -> None:
    protocol = ServerProtocol("secret")
    # The rest is wrong too, but is not checked.
    protocol.receive(json.dumps({"rdmapost": 2, "token": token, "qp_type": 99}).encode() + b"\n")
    with pytest.raises(ProtocolError, match="token") as error:
        protocol.next_message()
    assert error.value.code == "token"
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("token", ["secret", "gehe\u00efm", "\udc80raw"])
def test_a_hello_with_the_right_token_is_accepted(token: str) -> None:
    protocol = ServerProtocol(token)
    hello = Hello(token, "verbs", rp.QPType.RC, ENDPOINT)
    protocol.receive(encode(hello))
    assert protocol.next_message() == hello
    assert token_matches(token, token)
    assert not token_matches(None, token)
    assert token_matches(None, None)
    assert token_matches("anything", None)


@pytest.mark.parametrize("token", ["", "x" * (MAX_TOKEN + 1)])
def test_a_token_that_is_empty_or_too_long_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 characters"):
        check_token(token)
    check_token("x" * MAX_TOKEN)
    check_token(None)


def test_the_client_accepts_the_answer_to_its_request() -> None:
    protocol = ClientProtocol()
    for asked, answer in (
        (HELLO, OFFER),
        (Ready(), Ready()),
        (Report(1, 0), Nothing(0)),
        (Look(0, 1), MESSAGES[9]),
        (Bye(), Bye()),
    ):
        protocol.ask(asked)
        assert protocol.next_message() is None
        protocol.receive(encode(answer))
        assert protocol.next_message() == answer


def test_the_client_refuses_the_answer_to_another_request() -> None:
    protocol = ClientProtocol()
    protocol.ask(HELLO)
    with pytest.raises(ConnectError, match="not yet answered"):
        protocol.ask(Ready())
    protocol.receive(encode(Nothing(0)))
    with pytest.raises(ProtocolError, match="type offer or error, got 'nothing'"):
        protocol.next_message()


@pytest.mark.parametrize("asked", [None, HELLO, Ready(), Bye()])
def test_the_client_accepts_an_error_at_any_time(asked: Message | None) -> None:
    protocol = ClientProtocol()
    if asked is not None:
        protocol.ask(asked)
    protocol.receive(encode(Error("closing", "the server is shutting down")))
    assert protocol.next_message() == Error("closing", "the server is shutting down")


# ---- nonsense ---------------------------------------------------------------------


def garbage(rng: random.Random, line: bytes) -> bytes:
    return rng.randbytes(rng.randrange(1, 80))


def text(rng: random.Random, line: bytes) -> bytes:
    return bytes(rng.choices(b'{}[]":,\\ntrue0123.eE-u\x00\xff', k=rng.randrange(1, 120)))


def flipped(rng: random.Random, line: bytes) -> bytes:
    changed = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, line: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(line) + 1) for _ in range(2))
    return line[:start] + line[stop:]


def spliced(rng: random.Random, line: bytes) -> bytes:
    other = encode(rng.choice(MESSAGES))
    return line[: rng.randrange(len(line))] + other[rng.randrange(len(other)) :]


VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 64,
    1 << 200,
    0.5,
    1e308,
    "",
    "x",
    "x" * 300,
    "\x1b[2J",
    "\ud800",
    "SUCCESS",
    "RC",
    "read",
    "00" * 32,
    [],
    [[]],
    ["read"],
    {},
    {"a": {"b": []}},
]


def revalued(rng: random.Random, line: bytes) -> bytes:
    fields = json.loads(line)
    name = rng.choice([*fields, "extra"])
    if rng.randrange(5):
        fields[name] = rng.choice(VALUES)
    else:
        fields.pop(name, None)
    return json.dumps(fields).encode() + b"\n"


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    garbage,
    text,
    flipped,
    cut,
    spliced,
    revalued,
    revalued,
]


def test_malformed_input_is_refused_with_a_protocol_error_and_no_other() -> None:
    rng = random.Random(6)
    lines = [encode(message) for message in MESSAGES]
    refused = read_all = 0
    codes: set[str] = set()
    longest = 0
    for _ in range(MALFORMED):
        data = rng.choice(MUTATIONS)(rng, rng.choice(lines))
        protocol: ServerProtocol | ClientProtocol
        if rng.randrange(2):
            protocol = ServerProtocol(rng.choice([None, "secret"]))
            protocol.state = rng.choice([SessionState.HELLO, SessionState.READY, SessionState.OPEN])
        else:
            protocol = ClientProtocol()
            protocol.ask(rng.choice([HELLO, Ready(), Report(1, 0), Look(0, 1), Bye()]))
        protocol.receive(data)
        try:
            while (message := protocol.next_message()) is not None:
                # A message that is accepted is complete and within its ranges.
                assert read(encode(message), type(message)) == message
                read_all += 1
        except ProtocolError as error:
            refused += 1
            codes.add(error.code)
            # The text of the refusal can be sent: it fits into a message.
            longest = max(longest, len(str(error)), len(encode(Error("format", str(error)))) // 4)
    assert refused > MALFORMED // 2
    assert read_all > 100
    assert codes == {"format", "version", "token"}
    assert longest < 300


# ---- addresses and devices --------------------------------------------------------


WITHOUT_MEMORY = """
import gc, _testcapi
from rdmapost.tools.connect import client_session, protocol
from rdmapost.tools.connect.protocol_messages import *
def attempt(at):
    # Whether a look was answered, although one allocation fails.
    client = client_session.ClientSession("server", 5.0)
    server = protocol.ServerProtocol()
    server.state = protocol.SessionState.OPEN
    try:
        _testcapi.set_nomemory(at, at + 1)
        try:
            requests = client.ask(Look(0, 64))
            data, deadline = next(requests)
            server.receive(data)
            look = server.next_message()
            answer = encode(Seen(look.offset, look.length, "ab" * 32, bytes(64)))
            requests.send(b"")
            requests.send(answer)
        except StopIteration as end: return end.value.length == 64
        finally: _testcapi.remove_mem_hooks()
    except MemoryError: return False
for at in range(900):
    if attempt(at): break
    # What a failure has broken shows up later.
    gc.collect()
    compile("x = 1", "", "exec")
print(at > 20, at < 899)
"""


def test_a_request_without_memory_raises_memory_error() -> None:
    """Whichever allocation fails; Python neither crashes nor prints errors."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(WITHOUT_MEMORY, **LOSES_MEMORY) == "True True"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 18600),
        ("10.0.0.1:5", "10.0.0.1", 5),
        ("node7", "node7", 18600),
        ("node7.example.org:65535", "node7.example.org", 65535),
        ("[::1]", "::1", 18600),
        ("[::1]:18515", "::1", 18515),
        ("[fe80::1%eth0]:9", "fe80::1%eth0", 9),
    ],
)
def test_parse_address_reads_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    shown = name_of((host, port))
    assert parse_address(shown) == (host, port)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no host"),
        (":5", "has no host"),
        ("a b", "has no host"),
        ("[]", "IPv6 address"),
        ("::1", r"write an IPv6 address in brackets: \[::1\]"),
        ("fe80::1:18600", "in brackets"),
        ("[::1", "not .ADDRESS."),
        ("[::1]5", "not .ADDRESS."),
        ("[10.0.0.1]:5", "only an IPv6"),
        ("host:", "not a port"),
        ("host:0", "not a port"),
        ("host:65536", "not a port"),
        ("host:1e3", "not a port"),
        ("host:-1", "not a port"),
        ("host:\u0665", "not a port"),
        ("host:" + "9" * 5000, "not a port"),
    ],
    ids=lambda v: v[:20],
)
def test_parse_address_names_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_address(text)


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_is_loopback_holds_only_for_loopback_addresses(address: str, inside: bool) -> None:
    assert is_loopback((address, 1)) is inside


def test_soft_devices_of_two_processes_are_unreachable_with_a_reason() -> None:
    assert why_unreachable("verbs", "verbs") is None
    assert why_unreachable("soft:soft0:1-a", "soft:soft0:1-a") is None
    both = why_unreachable("soft:soft0:1-a", "soft:soft0:2-b")
    assert both is not None
    assert both.startswith("the server's soft0 exists only in its own process")
    client = why_unreachable("verbs", "soft:soft0:2-b")
    assert client is not None
    assert client.startswith("the client's soft0 exists only in its own process")
    assert why_unreachable("verbs", "something else") is not None
