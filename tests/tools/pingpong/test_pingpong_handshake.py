"""Ping-pong's handshake: what the stock programs send, and any sort of garbage."""

from __future__ import annotations

import pickle
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pingpong_runs import MESSAGE

import rdmapost as rp
from rdmapost import pingpong
from rdmapost.pingpong import Address, PingpongError, name_of
from rdmapost.tools.pingpong.handshake import DONE, Handshake, HandshakeConnection


def test_an_address_is_encoded_as_the_stock_programs_do():
    address = Address(0, 0x11, 0xABCDEF, rp.GID("::ffff:10.0.0.1"))
    assert address.encode() == MESSAGE
    assert len(MESSAGE) == 52
    assert Address.decode(MESSAGE) == address


@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFFFF),
    st.integers(0, 0xFFFFFF),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 57),
)
def test_every_address_is_read_from_pieces_of_any_size(lid, qpn, psn, gid, piece):
    address = Address(lid, qpn, psn, rp.GID(gid))
    server = Handshake(is_client=False)
    reported = address.encode() + DONE
    for start in range(0, len(reported), piece):
        assert server.needed == len(reported) - start
        server.feed(reported[start : start + piece])
    assert server.needed == 0
    assert server.peer == address
    client = Handshake(is_client=True)
    client.feed(address.encode())
    assert client.needed == 0
    assert client.peer == address


def malformed(rng: random.Random) -> bytes:
    """Return something that a peer may send: garbage, or a valid message with faults."""
    whole = bytearray(MESSAGE + DONE)
    fault = rng.randrange(7)
    if fault == 0:
        return rng.randbytes(rng.randint(1, 80))
    if fault == 1:
        return rng.choice(
            [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\0", b"done\0"]
        )
    if fault == 2:
        return bytes(whole[: rng.randrange(len(whole))])
    if fault == 3:
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    elif fault == 4:
        at = rng.randrange(len(whole))
        whole[at:at] = rng.randbytes(rng.randint(1, 4))
    elif fault == 5:
        at = rng.randrange(len(whole))
        del whole[at : at + rng.randint(1, 4)]
    else:
        whole += rng.randbytes(rng.randint(1, 4))
    return bytes(whole)


def test_a_malformed_handshake_is_refused_or_incomplete():
    """Each is refused, incomplete, or valid."""
    rng = random.Random(52)
    refused = incomplete = accepted = 0
    for _ in range(100_000):
        data = malformed(rng)
        exchange = Handshake(is_client=False)
        try:
            at = 0
            while at < len(data):
                piece = rng.randint(1, 60)
                exchange.feed(data[at : at + piece])
                at += piece
        except PingpongError:
            refused += 1
        else:
            if exchange.needed:
                incomplete += 1
                assert 0 < exchange.needed <= 57
            else:
                accepted += 1
                # The same bytes, apart from the case of hex digits.
                assert exchange.peer is not None
                assert exchange.peer.encode() + DONE == data.lower()
    assert refused > 60_000
    assert incomplete > 5_000
    assert accepted > 100


def test_a_malformed_handshake_over_a_connection_ends_at_once(context):
    """The peer sends something wrong, in pieces, and closes; this side does not wait."""
    rng = random.Random(53)
    cq = rp.CQ(context, 1)
    for _ in range(3000):
        ours, theirs = socket.socketpair()
        data = malformed(rng)
        with theirs:
            at = 0
            while at < len(data):
                piece = rng.randint(1, 60)
                theirs.sendall(data[at : at + piece])
                at += piece
        with HandshakeConnection(cq, ours, "peer", 30, is_client=False) as line:
            try:
                line.peer()
                line.done()
            except PingpongError:
                continue
            # Bytes after the handshake are not read.
            assert data[51:57] == b"\0" + DONE


@pytest.mark.parametrize(
    ("sent", "stage"),
    [
        (b"GET / HTTP", "its address"),
        (b"0000:0000111", r"its address"),
        (MESSAGE[:-1] + b" ", "its address"),
        (MESSAGE + b"gone\0", '"done"'),
        (MESSAGE + DONE + b"!", '"done"'),
    ],
)
def test_the_error_for_a_malformed_handshake_names_what_was_expected(sent, stage):
    with pytest.raises(PingpongError, match=stage):
        Handshake(is_client=False).feed(sent)


@pytest.mark.parametrize("data", [b"", MESSAGE[:-1], MESSAGE + b"\0", MESSAGE.replace(b":", b";")])
def test_decode_refuses_a_message_that_is_not_an_address(data):
    with pytest.raises(ValueError, match="not an address of the pingpong handshake"):
        Address.decode(data)


@pytest.mark.parametrize("name", pingpong.__all__)
def test_public_names_are_pickled_under_rdmapost_pingpong(name):
    public = getattr(pingpong, name)
    if not isinstance(public, int):
        assert pickle.loads(pickle.dumps(public)) is public
        assert public.__module__ == "rdmapost.pingpong"


def test_name_of_writes_ipv4_ipv6_and_mapped_addresses():
    assert name_of(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert name_of(("::1", 5, 0, 0)) == "[::1]:5"
    assert name_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1:5"
