"""Endpoints: lines of text, both ways, and what is refused as one."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmapost import GID, MTU, Endpoint

endpoints = st.builds(
    Endpoint,
    qp_num=st.integers(0, (1 << 24) - 1),
    psn=st.integers(0, (1 << 24) - 1),
    gid=st.binary(min_size=16, max_size=16).map(GID),
    lid=st.integers(0, (1 << 16) - 1),
    mtu=st.sampled_from(MTU),
)


@given(endpoints)
def test_endpoint_comes_back_from_its_line(endpoint):
    line = str(endpoint)
    assert "\n" not in line
    assert Endpoint.parse(line) == endpoint
    assert Endpoint.parse(f"  {line}\n") == endpoint


@given(endpoints, st.data())
def test_endpoint_with_a_change_is_another_or_none(endpoint, data):
    """One character of the line is replaced: what is read is what was written, or an error."""
    line = str(endpoint)
    at = data.draw(st.integers(0, len(line) - 1))
    char = data.draw(st.characters() | st.sampled_from(string.printable))
    changed = line[:at] + char + line[at + 1 :]
    try:
        parsed = Endpoint.parse(changed)
    except ValueError:
        return
    assert changed.isascii() or changed.strip().isascii()
    assert Endpoint.parse(str(parsed)) == parsed


def test_missing_fields_of_an_endpoint_are_named():
    with pytest.raises(ValueError, match=r"psn=0x5'; it has no gid, lid, mtu$"):
        Endpoint.parse("qp_num=0x12 psn=0x5")
    with pytest.raises(ValueError, match=r"^not an endpoint: 'hello'$"):
        Endpoint.parse("hello")


HEX = "a hexadecimal number such as 0x1f"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("qp_num=0x1 psn=0x1 gid=::1 lid=0 mtu=1024", f"lid=0 is not {HEX}"),
        (
            "qp_num=0x1 psn=0x1 gid=::1 lid=0 mtu=4097",
            f"lid=0 is not {HEX}; mtu=4097 is not one of 256, 512, 1024, 2048, 4096",
        ),
        (
            "qp_num=0x1000000 psn=0 gid=::1 lid=0x0 mtu=4096",
            f"qp_num=16777216 is not in 0..2^24-1; psn=0 is not {HEX}",
        ),
        (
            "qp_num=1 psn=0x1 gid=zz lid=0x0 mtu=1024",
            f"qp_num=1 is not {HEX}; gid: 'zz' is not an IPv6 address",
        ),
        ("qp_num=0x1 psn=0x1 gid=fe80::1%a lid=0x0 mtu=1024", "gid=fe80::1%a is not a GID"),
        ("qp_num=0x1 psn=0x1 gid=::1 lid=0x0 mtu=1k", "mtu=1k is not a number of bytes"),
        (
            "qp_num=0x1 psn=0x1 gid=::1 lid=0x0 mtu=1024 extra=2",
            "'extra=' is not one of its fields: qp_num, psn, gid, lid, mtu",
        ),
        (
            "qp_num=0x1 psn=0x1 gid=::1 lid=0x0 mtu=1024 mtu",
            "'mtu' is not one of its fields: qp_num, psn, gid, lid, mtu",
        ),
        (
            "qp_num=0x1 qp_num=0x2 psn=0x1 gid=::1 lid=0x0 mtu=1024",
            "qp_num is given more than once",
        ),
        (
            "psn=0x1 qp_num=0x1 gid=::1 lid=0x0 mtu=1024",
            "its fields are qp_num, psn, gid, lid, mtu, in this order, with one space between them",
        ),
    ],
)
def test_wrong_fields_of_an_endpoint_are_named(line, why):
    with pytest.raises(ValueError, match="not an endpoint") as caught:
        Endpoint.parse(line)
    assert str(caught.value) == f"not an endpoint: {line!r}; {why}"


@given(st.text())
def test_garbage_is_no_endpoint(text):
    with pytest.raises(ValueError, match="not an endpoint"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "qp_num=1 psn=0x2 gid=::1 lid=0x0 mtu=1024",
        "qp_num=0x1 psn=0x2 gid=::1 lid=0x0 mtu=1024 x",
        "qp_num=0x1 psn=0x2 gid=fe80::1%\u00e9 lid=0x0 mtu=1024",
        "qp_num=0x1 psn=0x2 gid=::1 lid=0x0 mtu=\u0661\u0660\u0662\u0664",
    ],
)
def test_endpoint_line_that_is_nearly_right_is_refused(line):
    with pytest.raises(ValueError, match=r"^not an endpoint: "):
        Endpoint.parse(line)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"qp_num": "0x1000000"}, r"^qp_num=16777216 is not in 0\.\.2\^24-1$"),
        ({"psn": "0x1000000"}, r"^psn=16777216 is not in 0\.\.2\^24-1$"),
        ({"lid": "0x10000"}, r"^lid=65536 is not in 0\.\.65535$"),
        ({"gid": ":::1"}, "^gid: ':::1' is not an IPv6 address$"),
        ({"gid": "10.0.0.1"}, "^gid: '10.0.0.1' is an IPv4 address; its GID is '::ffff:10.0.0.1'$"),
        ({"mtu": "1000"}, "^mtu=1000 is not one of 256, 512, 1024, 2048, 4096$"),
    ],
)
def test_field_of_an_endpoint_line_that_is_out_of_range_is_named(changed, text):
    fields = {"qp_num": "0x1", "psn": "0x2", "gid": "::1", "lid": "0x0", "mtu": "1024", **changed}
    with pytest.raises(ValueError, match=text):
        Endpoint.parse(" ".join(f"{name}={value}" for name, value in fields.items()))


def test_refused_endpoint_line_of_long_garbage_is_not_quoted_whole():
    with pytest.raises(ValueError, match="not an endpoint") as caught:
        Endpoint.parse("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"), [("qp_num", 1 << 24), ("qp_num", -1), ("psn", 1 << 24), ("lid", 1 << 16)]
)
def test_number_of_an_endpoint_that_does_not_fit_is_named(field, value):
    fields = {"qp_num": 1, "psn": 2, "gid": GID("::1"), "lid": 0, "mtu": MTU.MTU_1024, field: value}
    with pytest.raises(ValueError, match=f"{field}={value!r} is not in 0"):
        Endpoint(**fields)


def test_mtu_bytes_are_those_of_the_man_page():
    assert [mtu.bytes for mtu in MTU] == [256, 512, 1024, 2048, 4096]
