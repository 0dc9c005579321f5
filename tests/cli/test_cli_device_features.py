"""The commands for keys, tags, segments, XRC and raw packets: what they print and do."""

from __future__ import annotations

from typing import Any

import pytest
from support import needs
from support.cli_runner import done, on, run

import rdmapost as rp
from rdmapost import DeviceCap, QPType, SRQType
from rdmapost.loopback import Loopback


def lacks(context: rp.Context, **options: Any) -> str | None:
    """Return what the library says when a device cannot do something, or None if it can."""
    try:
        with Loopback(context, **options):
            return None
    except rp.VerbsError as error:
        return str(error)


def common(context: rp.Context, opcode: str, qp_type: str, byte_len: int) -> dict[str, Any]:
    """Return the fields that every successful post's JSON document starts with."""
    return {
        "device": context.name,
        "kind": context.kind,
        "opcode": opcode,
        "qp_type": qp_type,
        "status": "SUCCESS",
        "wr_id": 1,
        "byte_len": byte_len,
        "gid_index": context.choose_gid().gid_index,
    }


@pytest.fixture
def xrc(context: rp.Context) -> rp.Context:
    needs(context.attr.device_cap_flags & DeviceCap.XRC, "XRC", context)
    return context


@pytest.fixture
def raw(context: rp.Context) -> rp.Context:
    why = lacks(context, qp_type=QPType.RAW_PACKET)
    needs(why is None, f"raw packets ({why})", context)
    return context


@pytest.fixture
def matching(context: rp.Context) -> rp.Context:
    why = lacks(context, srq_type=SRQType.TM)
    needs(why is None, f"tag matching ({why})", context)
    return context


@pytest.fixture
def windows(context: rp.Context) -> rp.Context:
    caps = context.attr.device_cap_flags
    needs(caps & (DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B), "windows", context)
    return context


# ---- XRC ----------------------------------------------------------------------


def test_send_over_xrc_reports_the_message(xrc: rp.Context) -> None:
    assert done(xrc, "send", "--data", "abc", "--qp-type", "xrc") == {
        **common(xrc, "SEND", "XRC_SEND", 3),
        "data": "abc",
        "encoding": "utf-8",
        "received": "abc",
    }


@pytest.mark.parametrize("name", ["rc", "RC", "uc", "ud", "xrc", "XRC_SEND", "raw", "raw_packet"])
def test_qp_type_is_accepted_by_either_name(name: str) -> None:
    wanted = {"XRC": "XRC_SEND", "RAW": "RAW_PACKET"}.get(name.upper(), name.upper())
    with rp.open_device("soft0") as context:
        assert done(context, "send", "--qp-type", name)["qp_type"] == wanted


@pytest.mark.parametrize("more", [["--imm", "7"], ["--inline"], ["--solicited"]], ids=" ".join)
@pytest.mark.parametrize("command", ["send", "write"])
def test_options_of_posting_commands_work_over_xrc(
    xrc: rp.Context, command: str, more: list[str]
) -> None:
    if (command, more) == ("write", ["--solicited"]):
        more = ["--imm", "7", *more]
    doc = done(xrc, command, "--data", "abc", "--qp-type", "xrc", *more)
    assert (doc["qp_type"], doc["received"]) == ("XRC_SEND", "abc")
    assert doc.get("imm_data") == (7 if "--imm" in more else None)


@pytest.mark.parametrize("command", ["send", "write", "read"])
def test_list_of_posts_works_over_xrc(xrc: rp.Context, command: str) -> None:
    doc = done(xrc, command, "--size", "64K", "--count", "5", "--qp-type", "xrc")
    assert (doc["count"], doc["byte_len"]) == (5, 65536)
    assert bytes.fromhex(doc["received"]) == bytes(range(256)) * 16


def test_atomics_work_over_xrc(xrc: rp.Context) -> None:
    doc = done(xrc, "atomic", "fetch-add", "--initial", "10", "--add", "5", "--qp-type", "xrc")
    assert (doc["qp_type"], doc["old"], doc["new"]) == ("XRC_SEND", 10, 15)
    doc = done(xrc, "atomic", "cas", "--initial", "3", "--compare", "3", "--qp-type", "xrc")
    assert (doc["old"], doc["new"]) == (3, 1)


def test_verbose_names_the_xrc_queue_pairs(xrc: rp.Context) -> None:
    ran = on(xrc, "send", "-v", "--qp-type", "xrc")
    assert "local    XRC_SEND QP" in ran.err
    assert "remote   XRC_RECV QP" in ran.err
    assert ran.err.count("state RTS") == 2


# ---- raw packets ----------------------------------------------------------------


def test_send_on_raw_reports_header_and_data(raw: rp.Context) -> None:
    assert done(raw, "send", "--data", "abc", "--qp-type", "raw") == {
        **common(raw, "SEND", "RAW_PACKET", 17),
        "header": "02000000000202000000000188b5",
        "data": "abc",
        "encoding": "utf-8",
        "received": "abc",
    }


def test_list_of_inline_sends_works_on_raw(raw: rp.Context) -> None:
    doc = done(raw, "send", "--inline", "--count", "3", "--qp-type", "raw")
    assert (doc["count"], doc["received"]) == (3, "hello, rdma")


@pytest.mark.parametrize("option", [["--imm", "1"], ["--invalidate"]])
def test_raw_refuses_sends_with_more_than_data(raw: rp.Context, option: list[str]) -> None:
    ran = on(raw, "send", *option, "--qp-type", "raw")
    assert (ran.code, ran.out) == (1, "")
    assert "is not supported on RAW_PACKET QPs" in ran.err


@pytest.mark.parametrize("command", [["write"], ["read"], ["atomic", "cas"]])
def test_commands_that_cannot_use_raw_queue_pairs_refuse_qp_type_raw(
    raw: rp.Context, command: list[str]
) -> None:
    ran = on(raw, *command, "--qp-type", "raw")
    assert (ran.code, ran.out) == (2, "")
    assert "'raw' is not one of" in ran.err


# ---- what a device lacks --------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["send", "--qp-type", "xrc"], {"qp_type": QPType.XRC_SEND}),
        (["send", "--qp-type", "raw"], {"qp_type": QPType.RAW_PACKET}),
        (["tso"], {"qp_type": QPType.RAW_PACKET, "max_tso_header": 54}),
        (["tso", "--qp-type", "ud"], {"qp_type": QPType.UD, "max_tso_header": 44}),
        (["tag", "add"], {"srq_type": SRQType.TM}),
        (["tag", "del"], {"srq_type": SRQType.TM}),
        (["tag", "sync"], {"srq_type": SRQType.TM}),
    ],
)
def test_command_works_or_says_what_the_device_lacks(
    context: rp.Context, command: list[str], options: dict[str, Any]
) -> None:
    """A missing device feature is reported in one line, in the library's words."""
    why = lacks(context, **options)
    ran = on(context, *command)
    if why is None:
        assert (ran.code, ran.err) == (0, "")
        return
    # Lack of permission is the device's matter, anything else the command's.
    assert ran.code == (3 if "CAP_NET_RAW" in why else 1)
    assert ran.err.splitlines() == [f"rdmapost: {why}"]


class Lacking:
    """Takes features away from the software device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from rdmapost.providers.soft0.provider import SoftProvider

        query = SoftProvider.query_device_ex

        def query_device_ex(provider: Any, context: Any, attr: Any) -> None:
            query(provider, context, attr)
            attr.orig_attr.device_cap_flags &= ~int(DeviceCap.XRC)
            attr.tso_caps.max_tso = attr.tm_caps.max_num_tags = 0

        monkeypatch.setattr(SoftProvider, "query_device_ex", query_device_ex)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["send", "--qp-type", "xrc"], "ibv_open_xrcd is not supported: soft0 has no XRC"),
        (
            ["tso", "--qp-type", "ud"],
            "ibv_create_qp_ex is not supported: soft0 has no TSO on UD queue pairs",
        ),
        (["tag", "add"], "ibv_create_srq_ex is not supported: soft0 has no tag matching"),
    ],
)
def test_command_names_a_feature_that_the_device_lacks_in_one_line(
    command: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lacking(monkeypatch)
    ran = run(*command, "-d", "soft0", "--json")
    assert ran.code == 1
    assert ran.err == f"rdmapost: {says}\n"
    assert (ran.doc["error"], ran.doc["status"]) == (says, None)


def test_check_says_what_a_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    Lacking(monkeypatch)
    ran = run("check", "-d", "soft0", "--json")
    assert (ran.code, ran.doc["failed"]) == (0, 0)
    why = {
        (r["opcode"], r["qp_type"]): r["detail"]
        for r in ran.doc["results"]
        if r["status"] == "unsupported"
    }
    assert {t for _, t in why if t == "XRC_SEND"}
    assert why["TAG_ADD", "RC"] == "soft0 has no tag matching"
    assert why["TSO", "UD"] == "soft0 has no TSO on UD queue pairs"
    text = run("check", "-d", "soft0").out
    assert max(map(len, text.splitlines())) <= 80
    assert "unsupported: soft0 has no tag matching" in text


# ---- keys -----------------------------------------------------------------------


@pytest.fixture(params=["rc", "uc", "xrc"])
def keyed(request: pytest.FixtureRequest, windows: rp.Context) -> tuple[rp.Context, str]:
    qp_type: str = request.param
    if qp_type == "xrc":
        needs(windows.attr.device_cap_flags & DeviceCap.XRC, "XRC", windows)
    return windows, qp_type


def managed(context: rp.Context, qp_type: str, *args: str) -> dict[str, Any]:
    """Run a command for keys that must succeed, where the device has it on the QP type."""
    ran = on(context, *args, "--qp-type", qp_type, "--json")
    # InfiniBand makes these optional on UC.
    refused = qp_type == "uc" and ran.doc["status"] in ("LOC_QP_OP_ERR", "WR_FLUSH_ERR")
    needs(not refused, f"{args[0]} on UC ({ran.doc['status']})", context)
    assert (ran.code, ran.err) == (0, "")
    return ran.doc


NAMES = {"rc": "RC", "uc": "UC", "xrc": "XRC_SEND"}


def test_bind_mw_reports_the_new_key_and_its_bounds(keyed: tuple[rp.Context, str]) -> None:
    context, qp_type = keyed
    doc = managed(context, qp_type, "bind-mw", "--data", "through it")
    assert doc.pop("rkey")
    expected = common(context, "BIND_MW", NAMES[qp_type], 10)
    if qp_type == "xrc":
        assert doc == {**expected, "target_refused": True}
        return
    bounded = doc.pop("outside_refused")
    assert bounded or context.kind != "soft"
    data = {"data": "through it", "encoding": "utf-8", "received": "through it"}
    assert doc == {**expected, **data}


def test_invalidate_reports_that_the_key_is_refused_afterwards(
    keyed: tuple[rp.Context, str],
) -> None:
    context, qp_type = keyed
    doc = managed(context, qp_type, "invalidate")
    assert doc.pop("rkey")
    expected = common(context, "LOCAL_INV", NAMES[qp_type], 0)
    assert doc == {**expected, "refused_afterwards": True}


@pytest.mark.parametrize("count", [1, 3])
def test_send_with_invalidate_reports_the_invalidated_key(windows: rp.Context, count: int) -> None:
    doc = done(windows, "send", "--invalidate", "--data", "abc", "--count", str(count))
    assert (doc["opcode"], doc["qp_type"], doc["received"]) == ("SEND_WITH_INV", "RC", "abc")
    assert doc["rkey"]
    # Soft-RoCE does not name the key in the completion.
    reported = {doc["rkey"]} if windows.kind == "soft" else {doc["rkey"], None}
    assert doc["invalidated_rkey"] in reported


@pytest.mark.parametrize("more", [["--inline"], ["--size", "10K", "--count", "2"]], ids=" ".join)
def test_send_with_invalidate_over_xrc_invalidates_a_region(
    xrc: rp.Context, more: list[str]
) -> None:
    doc = done(xrc, "send", "--invalidate", "--qp-type", "xrc", *more)
    assert doc["opcode"] == "SEND_WITH_INV"
    assert doc["invalidated_rkey"] == doc["rkey"]


def test_send_with_invalidate_is_refused_on_ud(context: rp.Context) -> None:
    ran = on(context, "send", "--invalidate", "--qp-type", "ud", "--json")
    assert ran.code == 1
    assert "SEND_WITH_INV is not supported on UD QPs" in ran.doc["error"]
    assert ran.doc["index"] == 0


def test_invalidate_prints_its_result_as_text(windows: rp.Context) -> None:
    lines = on(windows, "invalidate").out.splitlines()
    assert lines[0] == f"LOCAL_INV of 0 bytes on RC, {windows.name}: SUCCESS"
    assert lines[-1] == "  refused_afterwards  true"


# ---- segments -------------------------------------------------------------------


@pytest.fixture(params=["raw", "ud"])
def cutting(request: pytest.FixtureRequest, context: rp.Context) -> tuple[rp.Context, str]:
    qp_type = QPType.UD if request.param == "ud" else QPType.RAW_PACKET
    why = lacks(context, qp_type=qp_type, max_tso_header=54)
    needs(why is None, f"TSO ({why})", context)
    return context, request.param


def test_tso_reports_each_segment(cutting: tuple[rp.Context, str]) -> None:
    context, qp_type = cutting
    name, header = ("UD", 44) if qp_type == "ud" else ("RAW_PACKET", 54)
    doc = done(context, "tso", "--mss", "4", "--data", "hello, rdma", "--qp-type", qp_type)
    assert len(bytes.fromhex(doc.pop("header"))) == header
    assert doc == {
        **common(context, "TSO", name, 11),
        "mss": 4,
        "segments": 3,
        "lengths": [header + 4, header + 4, header + 3],
        "data": "hello, rdma",
        "encoding": "utf-8",
        "received": "hello, rdma",
    }


def test_tso_cuts_a_large_payload(cutting: tuple[rp.Context, str]) -> None:
    context, qp_type = cutting
    doc = done(context, "tso", "--size", "100K", "--mss", "0x578", "--qp-type", qp_type)
    assert (doc["segments"], doc["byte_len"]) == (74, 102400)
    assert sum(doc["lengths"]) == 102400 + 74 * (44 if qp_type == "ud" else 54)
    text = on(context, "tso", "--size", "100K", "--qp-type", qp_type).out
    assert max(map(len, text.splitlines())) <= 80


def test_tso_of_more_segments_than_a_queue_holds_is_a_usage_error(
    cutting: tuple[rp.Context, str],
) -> None:
    context, qp_type = cutting
    ran = on(context, "tso", "--size", "64M", "--mss", "1", "--qp-type", qp_type)
    assert (ran.code, ran.out) == (2, "")
    assert "67108864 segments is more than" in ran.err


def test_tso_uses_the_given_header(cutting: tuple[rp.Context, str]) -> None:
    context, qp_type = cutting
    ip = "45000000000000004011" + "0000" + "0a0000010a000002"
    link = "08000000" if qp_type == "ud" else "02" * 12 + "0800"
    header = link + ip + "0001000200080000"
    doc = done(context, "tso", "--header", header, "--mss", "900", "--qp-type", qp_type)
    assert (doc["header"], doc["segments"]) == (header, 5)


def test_tso_header_must_be_hexadecimal(cutting: tuple[rp.Context, str]) -> None:
    context, qp_type = cutting
    ran = on(context, "tso", "--header", "00" * 14, "--json", "--qp-type", qp_type)
    assert ran.code == 1
    assert ran.doc["status"] == "LOC_QP_OP_ERR"


# ---- tags -----------------------------------------------------------------------


@pytest.mark.parametrize("data", ["abc", ""])
def test_tag_add_reports_the_matched_message(matching: rp.Context, data: str) -> None:
    assert done(matching, "tag", "add", "--tag", "0x1f", "--data", data) == {
        **common(matching, "TAG_ADD", "RC", len(data)),
        "tag": 0x1F,
        "mask": (1 << 64) - 1,
        "matched": True,
        "tm_tag": 0x1F,
        "data": data,
        "encoding": "utf-8",
        "received": data,
    }


@pytest.mark.parametrize(("message_tag", "matched"), [("0x1f", True), ("0x2f", False)])
@pytest.mark.parametrize("size", ["10", "100K"])
def test_tag_add_matches_under_its_mask(
    matching: rp.Context, message_tag: str, matched: bool, size: str
) -> None:
    doc = done(
        matching,
        "tag",
        "add",
        "--tag",
        "0x10",
        "--mask",
        "0xf0",
        "--message-tag",
        message_tag,
        "--size",
        size,
    )
    assert (doc["matched"], doc["tm_tag"]) == (matched, int(message_tag, 16))
    assert doc["received"] == doc["data"]


def test_tag_with_bits_outside_its_mask_is_refused(matching: rp.Context) -> None:
    ran = on(matching, "tag", "add", "--tag", "0x11", "--mask", "0xf0")
    assert (ran.code, ran.out) == (1, "")
    assert "has bits outside mask=0xf0" in ran.err


def test_tag_del_leaves_the_message_unexpected(matching: rp.Context) -> None:
    doc = done(matching, "tag", "del", "--tag", "5", "--data", "abc")
    assert doc == {
        **common(matching, "TAG_DEL", "RC", 3),
        "wr_id": 2,
        "tag": 5,
        "matched": False,
        "tm_tag": 5,
        "data": "abc",
        "encoding": "utf-8",
        "received": "abc",
    }


def test_tag_sync_lets_entries_match_again(matching: rp.Context) -> None:
    doc = done(matching, "tag", "sync", "--data", "abc")
    assert doc == {
        **common(matching, "TAG_SYNC", "RC", 3),
        "wr_id": 2,
        "tag": 1,
        "unexpected_cnt": 1,
        "sync_requested": True,
        "matched": True,
        "tm_tag": 1,
        "data": "abc",
        "encoding": "utf-8",
        "received": "abc",
    }
