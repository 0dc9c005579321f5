"""The commands on a device: what they print, and that the bytes arrive."""

from __future__ import annotations

import pathlib

import pytest
from support.cli_runner import done, on, run

import rdmapost as rp
from rdmapost.tools import check as checks

TUTORIAL_RC = {
    "SEND",
    "SEND_WITH_IMM",
    "RDMA_WRITE",
    "RDMA_WRITE_WITH_IMM",
    "RDMA_READ",
    "ATOMIC_CMP_AND_SWP",
    "ATOMIC_FETCH_AND_ADD",
}
EVERY_DEVICE = {
    *((opcode, "RC") for opcode in TUTORIAL_RC),
    *((opcode, "UC") for opcode in TUTORIAL_RC if opcode.startswith(("SEND", "RDMA_WRITE"))),
    *((opcode, "UD") for opcode in TUTORIAL_RC if opcode.startswith("SEND")),
}


# ---- check ------------------------------------------------------------------


def test_check_passes_every_opcode_that_the_device_has(context: rp.Context) -> None:
    doc = done(context, "check")
    results = doc["results"]
    assert (doc["device"], doc["kind"]) == (context.name, context.kind)
    assert [r for r in results if r["status"] == "fail"] == []
    assert all(r["detail"] for r in results)
    passed = {(r["opcode"], r["qp_type"]) for r in results if r["status"] == "pass"}
    assert passed >= EVERY_DEVICE
    assert doc["failed"] == 0
    assert doc["passed"] == len(passed)
    assert doc["passed"] + doc["unsupported"] == len(results)


def test_check_prints_a_table(context: rp.Context) -> None:
    ran = on(context, "check")
    assert ran.code == 0
    assert ran.err == ""
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:4] == ["OPCODE", "RC", "UC", "UD"]
    assert lines[1].split()[:4] == ["SEND", "pass", "pass", "pass"]
    assert lines[0].split()[4:] == ["XRC_SEND", "RAW_PACKET"]
    assert " 0 failed" in lines[-1]


def test_failing_check_leaves_the_others_running(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(trial: checks.Trial) -> str:
        raise ZeroDivisionError("on purpose")

    def late(trial: checks.Trial) -> str:
        with trial.loopback() as pair:
            pair.receive(8)
            pair.arrived()
        return "never"

    rows = [
        checks.Row("BROKEN", (rp.QPType.RC,), broken),
        checks.Row("LATE", (rp.QPType.RC,), late),
        checks.ROWS[0],
    ]
    monkeypatch.setattr("rdmapost.tools.check.runner.ROWS", rows)
    ran = on(context, "check", "--json", "--timeout", "0.2")
    assert ran.code == 1
    assert "ZeroDivisionError: on purpose" in ran.doc["results"][0]["detail"]
    assert "nothing arrived" in ran.doc["results"][1]["detail"]
    assert "within 0.2 s" in ran.doc["results"][1]["detail"]
    assert ran.doc["results"][2]["status"] == "pass"
    assert ran.doc["failed"] == 2
    assert ran.doc["error"].startswith("2 of ")
    text = on(context, "check", "--timeout", "0.2")
    assert text.code == 1
    assert "FAIL [1]" in text.out
    assert "ZeroDivisionError: on purpose" in text.out


def test_verbose_check_says_what_it_found(context: rp.Context) -> None:
    ran = on(context, "check", "-v", "--json")
    assert ran.doc["passed"]
    assert "SEND on RC: pass: " in ran.err


# ---- devices ----------------------------------------------------------------


def test_devices_reports_ports_and_gids(context: rp.Context) -> None:
    doc = done(context, "devices")
    (device,) = doc["devices"]
    assert (device["name"], device["kind"]) == (context.name, context.kind)
    port = device["ports"][0]
    now = context.query_port(1)
    assert port["state"] == "ACTIVE"
    assert port["link_layer"] == now.link_layer.name
    assert port["active_mtu"] == now.active_mtu.bytes
    assert port["gid_index"] == context.choose_gid().gid_index
    assert [gid["gid"] for gid in port["gids"]] == [
        str(entry.gid) for entry in context.query_gid_table(1)
    ]


def test_devices_prints_a_table(context: rp.Context) -> None:
    ran = on(context, "devices")
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    (row,) = [line for line in ran.out.splitlines() if line.startswith(f"{context.name} ")]
    assert row.split()[1] == ("software" if context.kind == "soft" else "verbs")
    assert f"*  GID {context.choose_gid().gid_index} " in ran.out


def test_verbose_devices_says_why_a_gid_was_chosen(context: rp.Context) -> None:
    choice = context.choose_gid()
    quiet, verbose = on(context, "devices"), on(context, "devices", "-v")
    assert quiet.err == ""
    assert verbose.out == quiet.out
    gid_type = "" if choice.gid_type is None else f" ({choice.gid_type.name})"
    assert verbose.err == (
        f"{context.name} port 1: GID {choice.gid_index}, {choice.gid}{gid_type}: {choice.reason}\n"
    )


def test_devices_lists_the_rdma_device_and_soft0(context: rp.Context) -> None:
    names = [device["name"] for device in run("devices", "--json").doc["devices"]]
    assert {context.name, "soft0"} <= set(names)


def test_devices_shows_only_the_gid_asked_for(context: rp.Context) -> None:
    index = context.query_gid_table(1)[0].gid_index
    (device,) = done(context, "devices", "-p", "1", "-g", str(index))["devices"]
    assert [gid["gid_index"] for gid in device["ports"][0]["gids"]] == [index]


@pytest.mark.parametrize(("option", "says"), [("-p", "no port 99"), ("-g", "no GID")])
def test_devices_with_a_missing_port_or_gid_is_a_usage_error(
    context: rp.Context, option: str, says: str
) -> None:
    ran = on(context, "devices", option, "99")
    assert ran.code == 2
    assert says in ran.err


# ---- send, write, read ------------------------------------------------------


@pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])
@pytest.mark.parametrize("more", [[], ["--inline"], ["--solicited"]], ids=["", "inline", "sol"])
def test_send_reports_the_message_that_arrived(
    context: rp.Context, qp_type: str, more: list[str]
) -> None:
    assert done(context, "send", "--data", "hällo", "--qp-type", qp_type, *more) == {
        "device": context.name,
        "kind": context.kind,
        "opcode": "SEND",
        "qp_type": qp_type.upper(),
        "status": "SUCCESS",
        "wr_id": 1,
        "byte_len": 6,
        "gid_index": context.choose_gid().gid_index,
        "data": "hällo",
        "encoding": "utf-8",
        "received": "hällo",
    }


@pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])
def test_send_reports_immediate_data(context: rp.Context, qp_type: str) -> None:
    doc = done(context, "send", "--imm", "0xdeadbeef", "--qp-type", qp_type)
    assert doc["opcode"] == "SEND_WITH_IMM"
    assert doc["imm_data"] == 0xDEADBEEF


@pytest.mark.parametrize("command", ["send", "write", "read"])
def test_post_of_no_bytes_succeeds(context: rp.Context, command: str) -> None:
    doc = done(context, command, "--data", "")
    assert (doc["status"], doc["byte_len"], doc["received"]) == ("SUCCESS", 0, "")


@pytest.mark.parametrize("qp_type", ["rc", "uc"])
@pytest.mark.parametrize("command", ["send", "write"])
def test_message_of_many_packets_arrives_and_is_truncated_in_the_output(
    context: rp.Context, command: str, qp_type: str
) -> None:
    doc = done(context, command, "--size", "64K", "--qp-type", qp_type)
    assert doc["byte_len"] == 65536
    assert doc["encoding"] == "hex"
    assert doc["truncated"] is True
    assert bytes.fromhex(doc["received"]) == bytes(range(256)) * 16


@pytest.mark.parametrize("command", ["send", "write", "read"])
def test_data_that_is_not_text_is_shown_in_hexadecimal(
    context: rp.Context, command: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"\x00\xff\x1b[2J")
    doc = done(context, command, "--data-file", str(file))
    assert (doc["received"], doc["encoding"]) == ("00ff1b5b324a", "hex")
    assert "truncated" not in doc


@pytest.mark.parametrize("qp_type", ["rc", "uc"])
@pytest.mark.parametrize("more", [[], ["--inline"]], ids=["", "inline"])
def test_write_reports_the_memory_of_the_other_side(
    context: rp.Context, qp_type: str, more: list[str]
) -> None:
    doc = done(context, "write", "--data", "xyz", "--qp-type", qp_type, *more)
    assert doc["opcode"] == "RDMA_WRITE"
    assert (doc["byte_len"], doc["received"]) == (3, "xyz")
    assert "imm_data" not in doc


@pytest.mark.parametrize("qp_type", ["rc", "uc"])
def test_write_reports_immediate_data(context: rp.Context, qp_type: str) -> None:
    doc = done(context, "write", "--imm", "7", "--qp-type", qp_type)
    assert doc["opcode"] == "RDMA_WRITE_WITH_IMM"
    assert doc["imm_data"] == 7


def test_read_reports_the_memory_of_the_other_side(context: rp.Context) -> None:
    doc = done(context, "read", "--data", "over there", "--fence")
    assert doc["opcode"] == "RDMA_READ"
    assert (doc["byte_len"], doc["received"]) == (10, "over there")


@pytest.mark.parametrize(
    "args",
    [
        ["send"],
        ["send", "--qp-type", "ud"],
        ["send", "--qp-type", "uc"],
        ["write"],
        ["write", "--imm", "1"],
        ["read"],
        ["atomic", "fetch-add"],
    ],
    ids=" ".join,
)
def test_count_posts_a_list_and_reports_every_completion(
    context: rp.Context, args: list[str]
) -> None:
    doc = done(context, *args, "--count", "9")
    assert doc["count"] == doc["wr_id"] == 9
    assert doc["completions"] == [{"wr_id": n, "status": "SUCCESS"} for n in range(1, 10)]


def test_list_longer_than_a_queue_is_a_usage_error(context: rp.Context) -> None:
    ran = on(context, "send", "--count", "0x7fffffff", "--json")
    assert ran.code == 2
    assert f"more than {context.name} can hold in a queue (max_" in ran.doc["error"]


# ---- atomics ----------------------------------------------------------------


def test_fetch_and_add_reports_the_old_and_the_new_value(context: rp.Context) -> None:
    doc = done(context, "atomic", "fetch-add", "--initial", "10", "--add", "5")
    assert (doc["opcode"], doc["byte_len"]) == ("ATOMIC_FETCH_AND_ADD", 8)
    assert (doc["old"], doc["new"]) == (10, 15)


def test_fetch_and_add_wraps_at_2_to_the_64(context: rp.Context) -> None:
    doc = done(context, "atomic", "fetch-add", "--initial", hex((1 << 64) - 1), "--add", "0x2")
    assert (doc["old"], doc["new"]) == ((1 << 64) - 1, 1)


def test_repeated_fetch_and_add_reports_every_old_value(context: rp.Context) -> None:
    doc = done(context, "atomic", "fetch-add", "--add", "3", "--count", "4")
    assert (doc["old"], doc["new"], doc["olds"]) == (0, 12, [0, 3, 6, 9])


@pytest.mark.parametrize(("compare", "new"), [("7", 9), ("8", 7)])
def test_compare_and_swap_swaps_only_when_equal(
    context: rp.Context, compare: str, new: int
) -> None:
    doc = done(context, "atomic", "cas", "--initial", "7", "--compare", compare, "--swap", "9")
    assert doc["opcode"] == "ATOMIC_CMP_AND_SWP"
    assert (doc["old"], doc["new"]) == (7, new)


# ---- text -------------------------------------------------------------------


def test_result_is_printed_as_text_without_json(context: rp.Context) -> None:
    ran = on(context, "send", "--data", "two\nlines", "--imm", "16")
    assert ran.err == ""
    assert ran.out.splitlines() == [
        f"SEND_WITH_IMM of 9 bytes on RC, {context.name}: SUCCESS",
        '  data      "two\\nlines"',
        '  received  "two\\nlines"',
        "  imm_data  16 (0x10)",
    ]


def test_result_as_text_is_cut_to_80_columns(context: rp.Context) -> None:
    ran = on(context, "read", "--size", "1K")
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])
def test_verbose_shows_device_port_and_gid_and_why(context: rp.Context, qp_type: str) -> None:
    ran = on(context, "send", "-v", "--json", "--qp-type", qp_type)
    gid = context.choose_gid()
    assert ran.doc["status"] == "SUCCESS"
    assert f"{context.name} ({context.kind}), asked for" in ran.err
    assert f"{gid.gid_index}, {gid.gid}" in ran.err
    assert gid.reason in ran.err
    assert "state RTS" in ran.err


def test_verbose_names_rdmapost_device(
    context: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDMAPOST_DEVICE", context.name)
    ran = run("send", "-v")
    assert ran.code == 0
    assert f"{context.name} ({context.kind}), named by RDMAPOST_DEVICE" in ran.err


def test_gid_index_option_selects_the_gid(context: rp.Context) -> None:
    index = context.query_gid_table(1)[-1].gid_index
    assert done(context, "send", "--gid-index", str(index))["gid_index"] == index


# ---- what does not go -------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["send", "--qp-type", "ud", "--fence"], "FENCE has no meaning on UD QPs"),
        (["send", "--qp-type", "ud", "--size", "64K"], "a message on this UD QP holds at most"),
        (["send", "--qp-type", "ud", "--invalidate"], "SEND_WITH_INV is not supported on UD QPs"),
        (["write", "--solicited"], "SOLICITED has no meaning on RDMA_WRITE"),
    ],
)
def test_refused_post_reports_its_errno_and_index(
    context: rp.Context, args: list[str], says: str
) -> None:
    text = on(context, *args)
    assert (text.code, text.out) == (1, "")
    assert says in text.err
    ran = on(context, *args, "--json")
    assert ran.code == 1
    assert says in ran.doc["error"]
    assert (ran.doc["errno"], ran.doc["index"], ran.doc["posted"]) == ("EINVAL", 0, 0)
    assert ran.doc["status"] is None


def test_inline_data_beyond_the_device_is_an_error(context: rp.Context) -> None:
    ran = on(context, "send", "--inline", "--size", "1M")
    assert (ran.code, ran.out) == (1, "")
    assert "max_inline_data" in ran.err


@pytest.mark.parametrize("command", [["send"], ["check"]], ids=" ".join)
@pytest.mark.parametrize(
    ("option", "says"), [("--port", "has no port 99"), ("-g", "no GID with index 99")]
)
def test_missing_port_or_gid_is_a_usage_error(
    context: rp.Context, command: list[str], option: str, says: str
) -> None:
    ran = on(context, *command, option, "99")
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize(("compare", "swapped"), [("7", True), ("8", False)])
def test_compare_and_swap_says_whether_it_swapped(
    context: rp.Context, compare: str, swapped: bool
) -> None:
    args = ["atomic", "cas", "--initial", "7", "--compare", compare]
    assert done(context, *args)["swapped"] is swapped
    assert f"  swapped  {str(swapped).lower()}\n" in on(context, *args).out


def test_fetch_and_add_says_nothing_of_swapping(context: rp.Context) -> None:
    assert "swapped" not in done(context, "atomic", "fetch-add")


@pytest.mark.parametrize(
    ("command", "qp_types"),
    [
        (["send"], "rc|uc|ud|xrc|raw"),
        (["write"], "rc|uc|xrc"),
        (["read"], "rc|xrc"),
        (["atomic", "cas"], "rc|xrc"),
        (["atomic", "fetch-add"], "rc|xrc"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_qp_type_offers_those_that_have_the_opcode(command: list[str], qp_types: str) -> None:
    assert f"--qp-type [{qp_types}]" in run(*command, "--help").out
