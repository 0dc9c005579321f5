"""GIDs: text and bytes, both ways; and which one is preferred."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Pair

import rdmapost as rp
from rdmapost import GID, GIDType, QPType
from rdmapost.resources.gid import preferred_gid

V1, V2 = GIDType.ROCE_V1, GIDType.ROCE_V2


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
def test_text_or_bytes_that_are_no_gid_are_a_value_error(wrong):
    with pytest.raises(ValueError):  # noqa: PT011 - the standard library has several texts
        GID(wrong)


def test_gid_of_a_queue_pair_is_chosen_with_a_reason(connect, context):
    pair = connect()
    choice = pair.a.gid
    assert choice.reason
    assert choice == context.choose_gid()
    assert pair.a.endpoint().gid == choice.gid
    assert context.choose_gid(gid_index=choice.gid_index).reason == "asked for"


@pytest.mark.parametrize("wrong", [-1, "length", 1 << 40])
def test_gid_index_beyond_the_ports_table_is_refused_at_creation(context, pd, cq, wrong):
    length = context.query_port(1).gid_tbl_len
    wrong = length if wrong == "length" else wrong
    with pytest.raises(
        ValueError,
        match=rf"^gid_index={wrong} is not in 0..{length - 1}, the GID table of "
        rf"{context.name} port 1$",
    ):
        rp.QP(pd, QPType.RC, cq, gid_index=wrong)


def test_queue_pairs_meet_over_every_gid(pd, cq, stack, context):
    for entry in context.query_gid_table():
        pair = Pair(stack, pd, cq, gid_index=entry.gid_index)
        assert pair.a.endpoint().gid == entry.gid
        pair.works()


PREFERENCE = [
    (V2, "::ffff:10.0.0.1", "ROCE_V2 with an IPv4 address"),
    (V2, "2001:db8::1", "ROCE_V2 with an address that is not link-local"),
    (V2, "fe80::1", "ROCE_V2; the port's GIDs of this type are link-local"),
    (V1, "::ffff:10.0.0.1", "ROCE_V1 with an IPv4 address"),
    (V1, "2001:db8::1", "ROCE_V1 with an address that is not link-local"),
    (V1, "fe80::1", "ROCE_V1; the port's GIDs of this type are link-local"),
]
"""The order that the README gives, best first; and the reason for each."""


def gid_table(*rows: tuple[GIDType | None, str, str]) -> list[rp.GIDTableEntry]:
    return [
        rp.GIDTableEntry(index, GID(gid), gid_type, "eth0")
        for index, (gid_type, gid, _) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("better", "worse"),
    [*itertools.combinations(PREFERENCE, 2)],
    ids=lambda row: f"{row[0].name} {row[1]}",
)
def test_preferred_gid_is_roce_v2_then_not_link_local_then_ipv4(better, worse):
    gid_type, gid, reason = better
    for index, table in enumerate((gid_table(better, worse), gid_table(worse, better))):
        assert preferred_gid(table) == rp.GIDChoice(index, GID(gid), gid_type, reason)


def test_gid_of_a_queue_pair_of_a_closed_device_is_refused_although_it_was_read_before():
    context = rp.open_device("soft0")
    qp = rp.QP(rp.PD(context), rp.QPType.RC, rp.CQ(context))
    assert qp.gid.gid
    context.close_all()
    with pytest.raises(rp.ClosedError):
        _ = qp.gid


def test_preferred_gid_of_equal_ones_has_the_lower_index():
    pair = (V2, "::ffff:10.0.0.2", ""), (V2, "::ffff:10.0.0.1", "")
    worse = (V1, "::ffff:10.0.0.1", "")
    assert preferred_gid(gid_table(worse, *pair)).gid_index == 1


def test_only_gid_of_a_port_is_preferred_whatever_it_is():
    assert preferred_gid(gid_table(PREFERENCE[-1])).reason == "the only GID of the port"


@pytest.mark.parametrize("gid_type", [None, GIDType.IB])
def test_preferred_gid_without_roce_versions_is_global(gid_type):
    table = gid_table((gid_type, "fe80::1", ""), (gid_type, "2001:db8::1", ""))
    assert preferred_gid(table).gid_index == 1
