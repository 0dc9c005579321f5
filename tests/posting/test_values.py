"""Plain values: GIDs, endpoints, SGEs, completions, errors."""

from __future__ import annotations

import errno
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdmapost as rp
from rdmapost import GID, MTU, Endpoint

# ---- GID --------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16))
def test_gid_comes_back_from_its_text(raw):
    gid = GID(raw)
    assert bytes(gid) == raw
    assert GID(str(gid)) == gid
    assert eval(repr(gid), {"GID": GID}) == gid


def test_gid_shows_ipv4_as_such():
    gid = GID("::ffff:10.0.0.1")
    assert str(gid) == "::ffff:10.0.0.1"
    assert gid.is_ipv4
    assert not gid.is_link_local
    assert bytes(gid) == bytes(10) + b"\xff\xff\x0a\x00\x00\x01"


def test_gid_knows_a_link_local_address():
    assert GID("fe80::1").is_link_local
    assert not GID("fe80::1").is_ipv4
    assert not GID("2001:db8::1").is_link_local


@pytest.mark.parametrize("wrong", ["", "10.0.0.1", "fe80", "::g", b"", b"x" * 15, b"x" * 17])
def test_what_is_no_gid_is_a_value_error(wrong):
    with pytest.raises(ValueError):  # noqa: PT011 - the standard library has several texts
        GID(wrong)


# ---- Endpoint ---------------------------------------------------------------------

endpoints = st.builds(
    Endpoint,
    qpn=st.integers(0, (1 << 24) - 1),
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


@given(st.text())
def test_garbage_is_no_endpoint(text):
    with pytest.raises(ValueError, match="not an endpoint"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "qpn=0x1 psn=0x2 gid=::1 lid=0x0 mtu=1000",
        "qpn=0x1000000 psn=0x2 gid=::1 lid=0x0 mtu=1024",
        "qpn=0x1 psn=0x2 gid=:::1 lid=0x0 mtu=1024",
        "qpn=0x1 psn=0x2 gid=::1 lid=0x10000 mtu=1024",
        "qpn=1 psn=0x2 gid=::1 lid=0x0 mtu=1024",
        "qpn=0x1 psn=0x2 gid=::1 lid=0x0 mtu=1024 x",
        "qpn=0x1 psn=0x2 gid=::1 lid=0x0 mtu=\u0661\u0660\u0662\u0664",
    ],
)
def test_line_that_is_nearly_right_is_refused(line):
    with pytest.raises(ValueError):  # noqa: PT011 - which part is wrong decides the text
        Endpoint.parse(line)


def test_long_garbage_is_not_quoted_whole():
    with pytest.raises(ValueError, match="not an endpoint") as caught:
        Endpoint.parse("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"), [("qpn", 1 << 24), ("qpn", -1), ("psn", 1 << 24), ("lid", 1 << 16)]
)
def test_number_of_an_endpoint_that_does_not_fit_is_named(field, value):
    fields = {"qpn": 1, "psn": 2, "gid": GID("::1"), "lid": 0, "mtu": MTU.MTU_1024, field: value}
    with pytest.raises(ValueError, match=f"{field}={value!r} is not in 0"):
        Endpoint(**fields)


def test_mtu_bytes_are_those_of_the_man_page():
    assert [mtu.bytes for mtu in MTU] == [256, 512, 1024, 2048, 4096]


# ---- SGE --------------------------------------------------------------------------


def test_sge_from_a_buffer_holds_it():
    data = bytearray(b"hello")
    sge = rp.SGE.from_buffer(data)
    assert (sge.length, sge.lkey) == (5, 0)
    with pytest.raises(BufferError):
        data.append(0)
    del sge
    data.append(0)


@pytest.mark.parametrize("wrong", [5, "text", None, object()])
def test_sge_from_what_is_no_buffer(wrong):
    with pytest.raises(TypeError):
        rp.SGE.from_buffer(wrong)


def test_sge_from_a_buffer_with_gaps():
    with pytest.raises((ValueError, BufferError)):
        rp.SGE.from_buffer(memoryview(bytearray(10))[::2])


def test_sge_shows_addresses_in_hex():
    assert repr(rp.SGE(4096, 16, 255)) == "SGE(addr=0x1000, length=16, lkey=0xff)"


# ---- errors -----------------------------------------------------------------------


def wc(status: rp.WCStatus, vendor_err: int = 0) -> rp.WC:
    return rp.WC(7, status, None, 0, None, None, 0x11, 0, rp.WCFlags(0), vendor_err, 0, 0, 0, 0)


def test_check_returns_a_successful_completion_and_raises_for_another():
    good = wc(rp.WCStatus.SUCCESS)
    assert good.check() is good
    bad = wc(rp.WCStatus.RNR_RETRY_EXC_ERR, 0x81)
    with pytest.raises(rp.CompletionError) as caught:
        bad.check()
    assert caught.value.wc is bad
    assert str(caught.value) == (
        "the work request with wr_id 7 on QP 0x11 ended with RNR_RETRY_EXC_ERR (vendor_err 0x81)"
    )


def post_error(index: int | None, count: int) -> str:
    return str(
        rp.PostError("ibv_post_send", errno.EINVAL, "why", index=index, posted=index, count=count)
    )


def test_post_error_says_which_and_why():
    assert post_error(3, 8) == "ibv_post_send: work request 4 of 8 (index 3): why [EINVAL]"
    assert post_error(0, 1) == "ibv_post_send: why [EINVAL]"
    assert post_error(None, 1) == "ibv_post_send: why [EINVAL]"
    assert post_error(None, 8) == "ibv_post_send: one of 8 work requests: why [EINVAL]"


def test_errors_are_also_the_standard_ones():
    error = rp.VerbsError("ibv_reg_mr", errno.ENOMEM, "raise the limit")
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror) == (errno.ENOMEM, "Cannot allocate memory")
    assert str(error) == "ibv_reg_mr: ENOMEM (12, Cannot allocate memory): raise the limit"
    assert str(rp.VerbsError("x", 9999)) == "x: errno 9999"
    assert issubclass(rp.WaitTimeout, TimeoutError)
    assert issubclass(rp.ClosedError, ValueError)
    assert issubclass(rp.PostError, rp.VerbsError)
    unsupported = rp.UnsupportedError("ibv_alloc_mw", errno.EOPNOTSUPP)
    assert str(unsupported) == "ibv_alloc_mw is not supported"


@pytest.mark.parametrize("name", rp.errors.__all__)
def test_every_error_is_an_rdma_error(name):
    assert issubclass(getattr(rp, name), rp.RdmaError)
