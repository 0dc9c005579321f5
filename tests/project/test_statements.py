"""The list of statements itself: nothing is missing, and every entry has tests."""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support import ROOT
from support.statements import STATEMENTS, Statement, read

from rdmapost._binding import ffi
from rdmapost.enums import OpsFlags, OpsOpcode, SendFlags
from rdmapost.standard.opcodes import QP_TYPES_BY_OPCODE

pytestmark = pytest.mark.slow

SECTIONS = {
    "ibv_post_send(3)": [
        "DESCRIPTION",
        "struct ibv_send_wr",
        "struct ibv_mw_bind_info",
        "struct ibv_sge",
        "opcodes by QP type",
        "send_flags",
        "RETURN VALUE",
        "NOTES",
    ],
    "ibv_post_recv(3)": ["DESCRIPTION", "struct ibv_recv_wr", "RETURN VALUE", "NOTES"],
    "ibv_post_srq_recv(3)": ["DESCRIPTION", "struct ibv_recv_wr", "RETURN VALUE", "NOTES"],
    "ibv_post_srq_ops(3)": [
        "DESCRIPTION",
        "struct ibv_ops_wr",
        "phase synchronisation",
        "operations",
        "RETURN VALUE",
    ],
    "the tutorial of ibv_post_send": [
        "states",
        "lists",
        "sizes",
        "inline",
        "flags",
        "the far side",
        "lifetimes",
        "datagrams",
        "shared queues",
        "tag matching",
        "outstanding",
        "why it does not complete",
        "why it crashes",
    ],
}
"""What the pages consist of, and what the tutorial and its questions are about."""

TOPICS = {
    "states": ["RESET, INIT and RTR", "RTS", "SQE takes", "ERR takes", "SQD takes", "from INIT on"],
    "lists": ["before the one that failed stand", "as it was"],
    "sizes": [
        "from 0",
        "2^31",
        "no more",
        "path MTU",
        "sum over the SGEs",
        "different regions",
        "Length 0",
        "no bytes",
    ],
    "inline": ["no registration", "used again at once", "asks for less"],
    "flags": ["FENCE", "SOLICITED", "sq_sig_all", "order of the host", "invalidated key"],
    "lifetimes": ["deregistered", "destroyed"],
    "datagrams": ["40 bytes", "header"],
    "shared queues": ["which call"],
    "tag matching": ["by its name", "unexpected messages"],
    "outstanding": ["qp.outstanding"],
    "why it crashes": ["SGE list", "INLINE", "next", "bad_wr", "address handle"],
}
"""Words that the statements of a section must contain."""

STRUCTS = ("ibv_send_wr", "ibv_recv_wr", "ibv_ops_wr", "ibv_sge", "ibv_mw_bind_info")

COLLECT = """
import json, sys, pytest, inspect

class Collected:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            params = getattr(item, "callspec", None)
            print(json.dumps({
                "file": item.path.stem,
                "name": item.nodeid.partition("::")[2].partition("[")[0],
                "context": "context" in item.fixturenames,
                "real": "verbs_context" in item.fixturenames,
                "device": params.params.get("context") is not None if params else False,
                "source": "".join(
                    inspect.getsource(f) for f in [item.function] + [
                        d.func for name in item.fixturenames
                        for d in item._fixtureinfo.name2fixturedefs.get(name, ())
                        if d.func.__module__ == item.module.__name__
                    ]
                ),
            }))

code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]],
                   plugins=[Collected()])
sys.exit(code)
"""


@dataclass(frozen=True)
class Test:
    """A test that can be collected: on which devices it runs, and its text."""

    __test__ = False

    devices: frozenset[str]
    source: str


@functools.cache
def collected() -> dict[str, Test]:
    """Collect the tests that the list names, as pytest does."""
    files = sorted({f"tests/{test.partition('::')[0]}.py" for s in STATEMENTS for test in s.tests})
    there = [file for file in files if (ROOT / file).exists()]
    done = subprocess.run(
        [sys.executable, "-P", "-c", COLLECT, *there],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Test] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            item = json.loads(line)
            found[f"{item['file']}::{item['name']}"] = Test(devices_of(item), item["source"])
    return found


def devices_of(item: dict) -> frozenset[str]:
    """Say on which devices a test runs, by its fixtures and stated requirements."""
    if item["real"]:
        return frozenset({"verbs"})
    if not item["context"]:
        return frozenset()
    source = item["source"]
    if not item["device"] or re.search(r"needs\([^)]*(kind == \"soft\"|DeviceCap\.XRC)", source):
        return frozenset({"soft0"})
    return frozenset({"soft0", "verbs"})


def members(ctype: Any, name: str) -> Iterator[str]:
    """Go through the members of a struct that hold a value, with those of its unions."""
    for member, field in ctype.fields:
        if field.type.kind not in ("struct", "union"):
            yield f"{name}.{member}"
        elif field.type.cname.startswith("struct ibv_"):
            # A struct that has its own statements.
            assert field.type.cname.removeprefix("struct ") in STRUCTS
        else:
            yield from members(field.type, f"{name}.{member}")


def test_every_posting_statement_names_an_existing_test() -> None:
    named = [(said.text, test) for said in STATEMENTS for test in said.tests or [None]]
    assert [(text, test) for text, test in named if test not in collected()] == []
    assert [item for item, n in Counter(named).items() if n > 1] == []


def test_posting_statements_name_the_devices_on_which_their_tests_run() -> None:
    wrong = []
    for said in STATEMENTS:
        where = frozenset().union(*(collected()[test].devices for test in said.tests))
        if said.devices != where:
            wrong.append((said.text, sorted(said.devices), sorted(where)))
    assert wrong == []


def test_posting_statement_not_shown_on_a_real_device_says_what_it_lacks() -> None:
    assert [s.text for s in STATEMENTS if bool(s.lacks) != (s.devices == {"soft0"})] == []


def test_posting_statement_that_is_checked_has_a_test_that_sees_the_refusal() -> None:
    """By one of its tests, that waits for the exception or asks for the reason."""
    refusing = re.compile(r"\braises\(|\breason\(|\brefused\(")
    assert [
        said.text
        for said in STATEMENTS
        if said.how == "checked"
        and not any(refusing.search(collected()[test].source) for test in said.tests)
    ] == []


def test_posting_statement_is_a_sentence_and_impossible_checked_or_shown() -> None:
    assert [s.text for s in STATEMENTS if s.text[-1] != "."] == []
    assert {said.how for said in STATEMENTS} == {"impossible", "checked", "shown"}


def test_no_posting_statement_is_repeated() -> None:
    assert [text for text, n in Counter(said.text for said in STATEMENTS).items() if n > 1] == []


def test_every_section_of_the_posting_man_pages_has_statements() -> None:
    parts = [part for part, _ in itertools.groupby((s.source, s.section) for s in STATEMENTS)]
    assert parts == [(source, part) for source, parts in SECTIONS.items() for part in parts]


@pytest.mark.parametrize(("section", "words"), [(s, w) for s, ws in TOPICS.items() for w in ws])
def test_every_topic_of_the_posting_tutorial_has_statements(section: str, words: str) -> None:
    assert [s for s in STATEMENTS if s.section == section and words in s.text] != []


def test_every_struct_member_opcode_and_flag_has_one_posting_statement() -> None:
    """And of only one, so that it is clear which one applies."""
    structs = {name: ffi.typeof(f"struct {name}") for name in STRUCTS}
    wanted = [
        *itertools.chain.from_iterable(members(ctype, name) for name, ctype in structs.items()),
        *(f"IBV_WR_{opcode.name}" for opcode in [*QP_TYPES_BY_OPCODE, *OpsOpcode]),
        *(f"IBV_SEND_{flag.name}" for flag in SendFlags),
        *(f"IBV_OPS_{flag.name}" for flag in OpsFlags),
    ]
    assert sorted(name for said in STATEMENTS for name in said.names) == sorted(wanted)


# ---- reading the list, and the tests -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("test_send::test_send_arrives_in_the_peers_receive_buffer", {"soft0", "verbs"}),
        (
            "test_mw_type_2_bind_and_invalidate::test_each_rule_of_bind_info_refuses_the_bind_that_breaks_it",
            set(),
        ),
        (
            "test_soft_tag_ops::test_tag_operation_on_a_queue_without_a_matching_list_is_refused",
            {"soft0"},
        ),
        ("test_xrc::test_xrc_queue_pairs_refuse_what_their_end_cannot_do", {"soft0"}),
        ("test_qp_states::test_unchecked_send_before_rts_is_refused_by_the_device", {"soft0"}),
        (
            "test_driver_errnos::test_tag_matching_on_a_device_without_it_is_an_unsupported_error",
            {"verbs"},
        ),
        ("test_soft_faults::TestFaults::test_planned_fault_refuses_a_post", {"soft0"}),
    ],
)
def test_devices_of_a_test_are_read_from_its_parameters(name: str, devices: set[str]) -> None:
    assert collected()[name].devices == devices


def test_list_of_posting_statements_is_parsed() -> None:
    assert read(
        "# Title\n\nWords.\n\n- not one\n\n## page(3)\n\n### NOTES\n\n- This.\n"
        "  Shown, on soft0 (Soft-RoCE lacks XRC). About `a.b`, `C`.\n  - `f::t`\n  - `f::u`\n"
        "- That.\n  Checked.\n  - `g::t`\n"
    ) == [
        Statement(
            "page(3)", "NOTES", "This.", "shown", {"soft0"}, "XRC", ["a.b", "C"], ["f::t", "f::u"]
        ),
        Statement("page(3)", "NOTES", "That.", "checked", set(), "", [], ["g::t"]),
    ]
    with pytest.raises(ValueError, match="Perhaps"):
        read("\n## page(3)\n\n- This.\n  Perhaps, on soft0.\n")
