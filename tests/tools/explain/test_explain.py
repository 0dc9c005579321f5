"""``rdmapost explain``: every name has an explanation, correct where that can be tested."""

from __future__ import annotations

import dataclasses
import enum
import errno
import importlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import click
import pytest
from support import ROOT, Connect
from support.cli_runner import run
from support.wr_classes import OPS_CLASSES, SEND_CLASSES

import rdmapost as rp
from rdmapost import Opcode, OpsOpcode, QPState, QPType, WCOpcode, WCStatus, enums
from rdmapost.cli.app import app
from rdmapost.diagnose import Severity
from rdmapost.explain import (
    COLUMNS,
    KINDS,
    Explanation,
    UnknownNameError,
    explain,
    explain_lines,
    names,
)
from rdmapost.posting import rules
from rdmapost.standard.opcodes import QP_TYPES_BY_OPCODE
from rdmapost.tools.explain.errnos import ALIASES

EVERY = [
    explanation
    for kind, known in names().items()
    for name in known
    for explanation in explain(name)
    if explanation.kind == kind
]
MEMBERS: list[enum.Enum] = [
    member
    for enumeration in (
        WCStatus,
        Opcode,
        OpsOpcode,
        WCOpcode,
        QPType,
        QPState,
        rp.SendFlags,
        rp.OpsFlags,
        rp.Access,
        rp.WCFlags,
        rp.EventType,
        rp.PortState,
        rp.MigState,
    )
    for member in enumeration
]


def texts(of: Explanation) -> Iterator[str]:
    """Return an explanation's own text."""
    yield of.meaning
    yield from of.causes
    yield from of.look_at
    yield from filter(None, (of.soft_roce, of.far_side))


PROSE = " ".join(text for one in EVERY for text in texts(one))
"""The text of all explanations."""


def ids(one: object) -> str:
    return f"{one.kind}-{one.name}" if isinstance(one, Explanation) else str(one)


# ---- every name has a text ------------------------------------------------------


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_every_member_of_an_enumeration_is_explained(member: enum.Enum) -> None:
    (found,) = explain(member)
    assert (found.name, found.number) == (member.name, member.value)
    assert len(found.meaning) > 40
    assert found.see


@pytest.mark.parametrize("member", [*WCStatus, *Opcode, *OpsOpcode, *QPState])
def test_every_status_has_causes_and_a_next_step(member: enum.IntEnum) -> None:
    (found,) = explain(member)
    # These cannot fail: they are not posted here, or are not states at all.
    if member.name not in ("DRIVER1", "UNKNOWN"):
        assert found.causes
        assert found.look_at


@pytest.mark.parametrize("name", names()["errno"])
def test_every_errno_has_causes_and_a_next_step(name: str) -> None:
    (found,) = explain(name)
    assert found.number == (524 if name == "ENOTSUPP" else getattr(errno, name))
    assert found.causes
    assert found.look_at


def test_explanation_lists_the_usual_causes_first() -> None:
    """For the two most common statuses, the first cause listed is the one to rule out first."""
    assert "not in RTR or RTS" in explain("RETRY_EXC_ERR")[0].causes[0]
    assert "no receive" in explain("RNR_RETRY_EXC_ERR")[0].causes[0]
    assert "queue" in explain("ENOMEM")[0].meaning


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("LOC_PROT_ERR", "LOCAL_INV"),
        ("LOC_PROT_ERR", "SEND_WITH_INV"),
        ("REM_ACCESS_ERR", "SEND_WITH_INV"),
        ("REM_ACCESS_ERR", "FLUSH_PERSISTENT"),
        ("LOC_LEN_ERR", "roce"),
        ("REM_INV_REQ_ERR", "datagram"),
        ("RDMA_READ", "FENCE"),
        ("RDMA_READ", "RDMA_WRITE"),
        ("LOCAL_INV", "closed"),
        ("EINVAL", "From ibv_rereg_mr: what ibv_reg_mr refuses"),
        ("EINVAL", "the region's keys were invalidated"),
        ("EBUSY", "ibv_rereg_mr while a memory window is bound"),
        ("EOPNOTSUPP", "ibv_rereg_mr"),
    ],
)
def test_known_causes_of_a_status_or_errno_are_listed(name: str, cause: str) -> None:
    assert cause in " ".join(explain(name)[0].causes)


def test_no_two_explanations_are_alike() -> None:
    said = Counter(re.sub(r"\W+", " ", text.lower()) for one in EVERY for text in texts(one))
    # The opcodes of a QP type are a column of the table; two types have the same opcodes.
    said = Counter({text: times for text, times in said.items() if text[:8] != "opcodes "})
    assert [text for text, times in said.items() if times > 1] == []


# ---- the texts are right where that can be tested -------------------------------------


@pytest.mark.parametrize("opcode", Opcode)
def test_qp_types_of_an_opcode_are_those_of_the_rules(opcode: Opcode) -> None:
    (found,) = explain(opcode)
    types = QP_TYPES_BY_OPCODE.get(opcode, frozenset())
    assert set(found.qp_types) == {qp_type.name for qp_type in types}
    assert set(found.qp_types) <= {column.name for column in COLUMNS}
    for flag in rp.SendFlags:
        meant = any(rules.flags_allowed(qp_type, opcode, -1) & flag for qp_type in types)
        assert (flag.name in found.flags) == meant


@pytest.mark.parametrize("wr", [*SEND_CLASSES, *OPS_CLASSES])
def test_fields_of_an_opcode_are_those_of_its_work_request(wr: type) -> None:
    (found,) = explain(wr.opcode)  # type: ignore[attr-defined]
    assert set(found.fields) == {field.name for field in dataclasses.fields(wr)}
    assert found.far_side


def test_explanations_name_only_existing_constants() -> None:
    """A misspelt status or attribute would send its reader looking for nothing."""
    known = (
        {member.name for name in enums.__all__ for member in getattr(enums, name)}
        | set(errno.errorcode.values())
        | {"EOPNOTSUPP", "ENOTSUPP"}
        | set(names()["cm_event"])
    )
    elsewhere = {
        "RLIMIT_MEMLOCK",
        "RLIMIT_NOFILE",
        "CAP_NET_RAW",
        "CAP_IPC_LOCK",
        "PROT_NONE",
        "SA_RESTART",
        "IBV_WR_DRIVER1",
        "RDMAPOST_LIBIBVERBS",
        "NET_RAW",
        "IPC_LOCK",
        "RDMA_CM_EVENT",
        "RDMA_CM_EVENT_REJECTED",
        "RDMA_PS_TCP",
        "RDMA_PS_UDP",
        "LD_LIBRARY_PATH",
        "MLNX_OFED",
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "NO_TAG",
        "O_CREAT",
        "O_EXCL",
        "RDMAV_ALLOW_DISASSOC_DESTROY",
        "SRQ_RESIZE",
        "MEM_WINDOW",
        "MEM_WINDOW_TYPE_2A",
        "MEM_WINDOW_TYPE_2B",
    }
    words = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", PROSE))
    assert words - known - elsewhere == set()
    assert set(re.findall(r"\bE[A-Z]{3,}\b", PROSE)) <= known


@pytest.mark.parametrize(
    ("variable", "owner"),
    [
        ("qp", rp.QP),
        ("mr", rp.MR),
        ("mw", rp.MW),
        ("cq", rp.CQ),
        ("srq", rp.SRQ),
        ("context", rp.Context),
        ("error", rp.PostError),
    ],
)
def test_explanations_name_only_existing_attributes(variable: str, owner: type) -> None:
    named = set(re.findall(rf"\b{variable}\.([a-z_]+)", PROSE))
    made = (
        set(vars(owner(*("x", 22, "y"), index=0, posted=0, count=1)))
        if owner is rp.PostError
        else set()
    )
    assert named
    assert [name for name in named if not hasattr(owner, name) and name not in made] == []


COMMANDS = sorted(
    {
        command
        for one in EVERY
        for text in texts(one)
        for command in re.findall(r"rdmapost [a-z][^.:;,)']*", text)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_the_explanations_run(command: str) -> None:
    words = shlex.split(command)[1:]
    ran = run(*words) if words[0] == "explain" or "-d" in words else run(*words, "-d", "soft0")
    assert ran.code == 0, ran.err


# ---- finding them ---------------------------------------------------------------------


def found(what: str | int) -> list[tuple[str, str]]:
    return [(one.kind, one.name) for one in explain(what)]


@pytest.mark.parametrize(
    ("what", "kind", "name"),
    [
        ("RNR_RETRY_EXC_ERR", "status", "RNR_RETRY_EXC_ERR"),
        ("rnr_retry_exc_err", "status", "RNR_RETRY_EXC_ERR"),
        ("IBV_WC_RNR_RETRY_EXC_ERR", "status", "RNR_RETRY_EXC_ERR"),
        ("WCStatus.RNR_RETRY_EXC_ERR", "status", "RNR_RETRY_EXC_ERR"),
        ("transport retry counter exceeded", "status", "RETRY_EXC_ERR"),
        ("Work Request Flushed Error", "status", "WR_FLUSH_ERR"),
        ("EINVAL", "errno", "EINVAL"),
        (" einval\n", "errno", "EINVAL"),
        ("-22", "errno", "EINVAL"),
        ("0x1c", "errno", "ENOSPC"),
        (-12, "errno", "ENOMEM"),
        ("Cannot allocate memory", "errno", "ENOMEM"),
        ("ENOTSUP", "errno", "EOPNOTSUPP"),
        ("95", "errno", "EOPNOTSUPP"),
        ("524", "errno", "ENOTSUPP"),
        ("EWOULDBLOCK", "errno", "EAGAIN"),
        ("IBV_WR_SEND", "opcode", "SEND"),
        ("IBV_WC_SEND", "wc_opcode", "SEND"),
        ("RdmaWriteWithImm", "opcode", "RDMA_WRITE_WITH_IMM"),
        ("atomic-cmp-and-swp", "opcode", "ATOMIC_CMP_AND_SWP"),
        ("IBV_WR_TAG_ADD", "ops_opcode", "TAG_ADD"),
        (128, "wc_opcode", "RECV"),
        ("IBV_QPT_RC", "qp_type", "RC"),
        ("IBV_QPS_SQD", "qp_state", "SQD"),
        ("IBV_PORT_ACTIVE", "port_state", "ACTIVE"),
        ("PORT_DOWN", "port_state", "DOWN"),
        ("IBV_MIG_REARM", "mig_state", "REARM"),
        ("IBV_SEND_FENCE", "send_flag", "FENCE"),
        ("IBV_WC_WITH_IMM", "wc_flag", "WITH_IMM"),
        ("IBV_EVENT_QP_ACCESS_ERR", "event", "QP_ACCESS_ERR"),
        ("RDMA_CM_EVENT_REJECTED", "cm_event", "REJECTED"),
        ("addr_error", "cm_event", "ADDR_ERROR"),
        ("CONNECT_ERROR", "cm_event", "CONNECT_ERROR"),
        ("ConnectError", "exception", "ConnectError"),
        ("modify QP to RTR", "failure", "modify_qp_to_rtr"),
        ("ibv_poll_cq", "failure", "poll_cq"),
        ("ibv_create_srq_ex", "failure", "create_srq"),
        ("IBV_CREATE_SRQ()", "failure", "create_srq"),
        ("ibv_bind_mw", "failure", "bind_mw"),
        ("ibv_wr_flush", "failure", "post_send"),
        ("IBV_WR_FLUSH", "opcode", "FLUSH"),
    ],
)
def test_name_to_explain_is_found_in_any_spelling(what: str | int, kind: str, name: str) -> None:
    assert found(what) == [(kind, name)]


def test_number_is_explained_as_status_and_as_errno() -> None:
    assert found(13) == [("status", "RNR_RETRY_EXC_ERR"), ("errno", "EACCES")]
    assert found("12") == [("status", "RETRY_EXC_ERR"), ("errno", "ENOMEM")]


def test_opcode_is_explained_for_work_requests_and_completions() -> None:
    assert found("SEND") == [("opcode", "SEND"), ("wc_opcode", "SEND")]


def test_name_of_several_states_is_explained_as_each() -> None:
    assert found("INIT") == [("qp_state", "INIT"), ("port_state", "INIT")]
    assert found("ARMED") == [("port_state", "ARMED"), ("mig_state", "ARMED")]
    assert found("PORT_ACTIVE") == [("event", "PORT_ACTIVE"), ("port_state", "ACTIVE")]


@pytest.mark.parametrize("status", WCStatus)
def test_every_status_is_found_by_number(status: WCStatus) -> None:
    assert ("status", status.name) in found(int(status))
    assert ("status", status.name) in found(str(int(status)))


def test_word_to_explain_that_resembles_no_name_suggests_nothing() -> None:
    with pytest.raises(UnknownNameError, match=r"event, verb, exception or finding$") as caught:
        explain("frobnicate")
    assert caught.value.nearest == ()


@pytest.mark.parametrize(
    ("what", "near"),
    [
        ("RNR_RETRY_ERR", "RNR_RETRY_EXC_ERR"),
        ("RETRY", "RETRY_EXC_ERR"),
        ("ENVAL", "EINVAL"),
        ("RDMA_WRIT", "RDMA_WRITE"),
        ("IBV_WC_REM_ACCES_ERR", "REM_ACCESS_ERR"),
        ("ConnectErr", "ConnectError"),
        ("qp_state", "qp-state"),
        ("ConnectError: something that nobody knows about it", "ConnectError"),
    ],
)
def test_unknown_name_suggests_the_nearest(what: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near) as caught:
        explain(what)
    assert near in caught.value.nearest
    assert isinstance(caught.value, LookupError)


def test_one_name_that_is_almost_right_is_suggested_alone() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean WR_FLUSH_ERR\?$"):
        explain("WR_FLUSH_ER")


@pytest.mark.parametrize("what", ["", "?", "-", "0x", "9" * 5000, "-9999", 1 << 70, "\0", "é" * 99])
def test_text_that_is_nothing_like_a_name_has_no_suggestion(what: str | int) -> None:
    with pytest.raises(UnknownNameError) as caught:
        explain(what)
    assert len(str(caught.value)) < 200


def test_number_too_long_to_print_is_explained_by_its_size() -> None:
    with pytest.raises(UnknownNameError, match=r"^\(70001 bits\) is not the number of a status"):
        explain(1 << 70_000)


@pytest.mark.parametrize("what", [None, 1.0, b"EINVAL", ["EINVAL"]])
def test_explaining_an_object_that_is_no_name_is_a_type_error(what: object) -> None:
    with pytest.raises(TypeError, match=r"^what: expected a name or a number, got"):
        explain(what)  # type: ignore[arg-type]


def test_errno_that_no_verb_documents_is_explained_as_such() -> None:
    for what in ("EMLINK", "emlink", "-31"):
        (found,) = explain(what)
        assert (found.kind, found.name, found.number) == ("errno", "EMLINK", 31)
        assert found.summary == "Too many links"
        assert "No man page of a verb lists this errno" in found.meaning
    (found,) = explain("ENETDOWN")
    assert found.name == "ENETDOWN"


@pytest.mark.parametrize("name", errno.errorcode.values())
def test_name_of_an_errno_is_never_that_of_a_status(name: str) -> None:
    (found,) = explain(name)
    assert (found.kind, found.name) == ("errno", ALIASES.get(name, name))


# ---- the command ------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(itertools.chain.from_iterable(names().values()))))
def test_explain_page_fits_80_columns(name: str) -> None:
    ran = run("explain", name)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{name}: ")
    assert max(map(len, lines)) <= 80
    printed = " ".join(ran.out.split())
    for one in explain(name):
        for text in texts(one):
            assert " ".join(text.split()) in printed


def test_explain_page_of_an_opcode_shows_its_row_of_the_table() -> None:
    lines = run("explain", "rdma_read").out.splitlines()
    head = next(line for line in lines if line.startswith("OPCODE"))
    row = lines[lines.index(head) + 1]
    assert dict(zip(head.split(), row.split(), strict=True)) == {
        "OPCODE": "RDMA_READ",
        "UD": "-",
        "UC": "-",
        "RC": "X",
        "XRC_SEND": "X",
        "RAW_PACKET": "-",
    }


def test_explain_without_a_name_lists_all() -> None:
    ran = run("explain")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    listed = set(re.findall(r"\w+", ran.out))
    assert {member.name for member in MEMBERS} <= listed
    assert {"EINVAL", "ENOMEM"} <= listed
    assert run("explain", "--json").doc == {"names": names()}


def test_phrase_to_explain_needs_no_quotes() -> None:
    assert run("explain", "local", "protection", "error").out.startswith("LOC_PROT_ERR: ")


def test_negative_number_to_explain_is_not_taken_for_an_option() -> None:
    ran = run("explain", "-22")
    assert (ran.code, ran.out.split()[0]) == (0, "EINVAL:")


def test_number_with_two_meanings_says_so_first_and_explains_both() -> None:
    ran = run("explain", "12")
    assert ran.code == 0
    first, blank, head, *_ = ran.out.splitlines()
    assert first == ("12 is both the completion status RETRY_EXC_ERR and the errno ENOMEM.")
    assert (blank, head) == ("", "RETRY_EXC_ERR: completion status 12 (IBV_WC_RETRY_EXC_ERR)")
    assert "\nENOMEM: errno 12\n" in ran.out
    lines = run("explain", "0x1", "EIO", "13").out.splitlines()
    assert lines[0] == "0x1 is both the completion status LOC_LEN_ERR and the errno EPERM."
    assert lines[2].startswith("13 is both the completion status RNR_RETRY_EXC_ERR")
    for words in (["-12"], ["110"], ["ENOMEM"], ["SEND"]):
        assert "is both" not in run("explain", *words).out


def test_several_names_are_explained_in_order() -> None:
    ran = run("explain", "110", "-22", "rtr", "-22")
    assert ran.code == 0
    heads = [page.strip().split("\n")[0] for page in ran.out.split("-" * 80)]
    assert heads == ["ETIMEDOUT: errno 110", "EINVAL: errno 22", "RTR: QP state 2 (IBV_QPS_RTR)"]
    doc = run("explain", "--json", "110", "-22").doc
    assert [one["name"] for one in doc["explanations"]] == ["ETIMEDOUT", "EINVAL"]


def test_of_several_names_the_known_ones_are_explained_and_the_others_named() -> None:
    for args in (["-22", "WaitTimeout", "nonsense"], ["-22", "local protection error", "a b c"]):
        ran = run("explain", *args)
        assert ran.code == 2
        assert [page.strip().split(":")[0] for page in ran.out.split("-" * 80)] == [
            "EINVAL",
            "WaitTimeout" if args[1] == "WaitTimeout" else "LOC_PROT_ERR",
        ]
        assert ran.err.startswith(f"rdmapost explain: '{args[2]}' is not a status")
    doc = run("explain", "--json", "-22", "nonsense").doc
    assert [one["name"] for one in doc["explanations"]] == ["EINVAL"]
    assert doc["error"].startswith("'nonsense' is not a status")


def _exceptions() -> list[type[BaseException]]:
    # Not rdmapost.check's exceptions: they end a check, and nothing else raises them.
    modules = [
        importlib.import_module(f"rdmapost{name}")
        for name in ("", ".connect", ".explain", ".pingpong", ".loopback", ".diagnose")
    ]
    members = [getattr(module, name) for module in modules for name in module.__all__]
    found = {
        member
        for member in members
        if isinstance(member, type) and issubclass(member, BaseException)
    }
    return sorted(found, key=lambda member: member.__name__)


@pytest.mark.parametrize("exception", _exceptions())
def test_every_public_exception_is_explained(exception: type[BaseException]) -> None:
    (found,) = explain(exception.__name__)
    assert found.kind == "exception"
    assert found.constant == f"{exception.__module__}.{exception.__name__}"


CANNOT_FAIL = {"ibv_get_device_guid", "ibv_free_device_list"}


def _called_verbs() -> list[str]:
    """Return all verbs that the source calls or names in an error."""
    found = set()
    for file in (ROOT / "rdmapost").rglob("*.*"):
        if "explain" in file.parts or file.suffix not in (".py", ".c", ".h"):
            continue
        text = file.read_text()
        if file.name == "verbs.cdef.h":
            # A declaration, except of what returns nothing.
            found |= set(re.findall(r"^(?!void ).*\b(ibv_\w+)\(", text, re.MULTILINE))
        elif file.name == "loader.c":
            found |= set(re.findall(r"\bF\([^\"()]*?, _?(ibv_\w+),", text))
        elif file.suffix == ".py":
            found |= set(re.findall(r"\blib\.(ibv_\w+)\(", text))
        found |= set(re.findall(r'(?<!struct=)b?"_?(ibv_[a-z]+_\w+)"', text))
    return sorted(found - CANNOT_FAIL)


@pytest.mark.parametrize("verb", _called_verbs())
def test_every_verb_that_is_called_is_explained_when_it_fails(verb: str) -> None:
    (found,) = explain(verb)
    assert found.kind == "failure"
    assert found.causes
    assert found.look_at
    assert found.see
    for line in (f"{verb} failed", f"app: {verb}(0x7f00) failed: Cannot allocate memory"):
        assert found == explain_lines([line])[0].explanation


def test_verbs_of_all_parts_are_among_those_that_are_explained() -> None:
    assert {
        "ibv_get_pkey_index",  # raised by a resource
        "ibv_create_srq_ex",  # called through the binding
        "ibv_query_gid_ex",  # only in the loader, with an underscore
        "ibv_post_srq_ops",  # an inline function of the header
        "ibv_req_notify_cq",  # named by C
    } <= set(_called_verbs())


def test_name_of_a_verb_and_an_opcode_is_explained_as_both() -> None:
    assert {one.kind for one in explain("bind_mw")} == {"opcode", "wc_opcode", "failure"}
    assert {one.kind for one in explain("BIND_MW")} == {"opcode", "wc_opcode"}


DOCTOR = ROOT / "cli" / "doctor.py"


def _finding_names() -> set[str]:
    """Return all names that the source gives to findings."""
    found = set()
    for file in (*(ROOT / "rdmapost" / "tools" / "diagnose").glob("*.py"), DOCTOR):
        text = file.read_text()
        found |= set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', text))
        found |= set(re.findall(r'wrong\.append\(\("([a-z0-9-]+)"', text))
        found |= set(re.findall(r'name(?:, remedy)? = "([a-z0-9-]+)"', text))
        found |= {
            name
            for pair in re.findall(r'"([a-z0-9-]+)" if \w+ else "([a-z0-9-]+)",', text)
            for name in pair
        }
    return found - set(get_args(Severity))


def test_every_finding_is_explained_and_no_other() -> None:
    assert _finding_names() == set(names()["finding"])
    for name in names()["finding"]:
        assert "finding" in [one.kind for one in explain(name)]


@pytest.mark.parametrize("name", names()["finding"])
def test_explanation_of_a_finding_adds_to_its_remedy(name: str) -> None:
    """Its reader has just seen the finding: do not send them back there."""
    (found,) = [one for one in explain(name) if one.kind == "finding"]
    assert found.look_at
    for text in found.look_at:
        assert not re.search(rf"diagnose|doctor|rdmapost explain|'{name}'", text)


def test_finding_of_an_endpoint_does_not_claim_that_the_peer_was_checked() -> None:
    (found,) = explain("peer")
    assert found.meaning == "This queue pair is connected to its peer."
    assert "an endpoint has no state, dest_qp_num or rq_psn" in found.look_at[0]


def test_vendor_err_is_left_to_the_driver() -> None:
    for what in ("vendor_err", "vendor err 129", "syndrom 0x81", "syndrome 0x88", "vendor code=5"):
        (found,) = explain(what)
        assert found.name == "vendor_err"
    assert [one.name for one in explain("0x81")] == ["RECV_RDMA_WITH_IMM", "vendor_err"]
    assert [one.name for one in explain(0x81)] == ["RECV_RDMA_WITH_IMM"]
    with pytest.raises(UnknownNameError, match="a vendor_err is known only to the driver"):
        explain("249")


def test_help_of_explain_fits_80_columns() -> None:
    ran = run("explain", "--help")
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    # explain("event 15") is an error: only these two are printed as bare numbers.
    assert "a completion status or an errno, by name or number" in " ".join(ran.out.split())
    assert "explain" in run("--help").out


def test_json_of_explain_has_every_field() -> None:
    doc = run("explain", "13", "--json").doc
    assert doc.keys() == {"name", "explanations"}
    assert doc["name"] == "13"
    assert [one["kind"] for one in doc["explanations"]] == ["status", "errno"]
    for one in doc["explanations"]:
        assert one.keys() == {field.name for field in dataclasses.fields(Explanation)}
        assert one["kind"] in KINDS
        assert isinstance(one["number"], int)
        for key in ("name", "constant", "meaning", "soft_roce", "far_side"):
            assert isinstance(one[key], str)
        for key in ("causes", "look_at", "see", "qp_types", "flags", "fields"):
            assert all(isinstance(text, str) for text in one[key])


@pytest.mark.parametrize("name", ["RNR_RETRY", "nonsense", "-x", "31337"])
def test_unknown_name_to_explain_is_a_usage_error(name: str) -> None:
    ran = run("explain", name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("rdmapost explain: ")
    ran = run("explain", name, "--json")
    assert ran.code == 2
    assert ran.doc["name"] == name
    assert ran.doc["error"] in ran.err
    assert ran.doc["nearest"] == (["RNR_RETRY_EXC_ERR"] if name == "RNR_RETRY" else [])


def test_explain_is_listed_in_the_help() -> None:
    assert isinstance(app, click.Group)
    assert "explain" in app.commands


# ---- errors that point here ----------------------------------------------------------------


def named_by(text: str) -> list[Explanation]:
    """Return what the command in an error's text explains."""
    (name,) = re.findall(r"rdmapost explain (\w+)", text)
    return list(explain(name))


def test_failed_completion_points_to_explain(connect: Connect) -> None:
    pair = connect(rnr_retry=0)
    pair.a.post_send(pair.send(pair.mine[:8]))
    with pytest.raises(rp.CompletionError) as caught:
        pair.cq.wait(1)[0].check()
    assert named_by("\n".join(caught.value.__notes__))[0].name == "RNR_RETRY_EXC_ERR"
    assert "rdmapost explain" not in str(caught.value)


def test_verbs_error_without_a_hint_points_to_explain() -> None:
    assert named_by(str(rp.VerbsError("ibv_reg_mr", errno.EFAULT)))[0].name == "EFAULT"
    # If the cause is known, the error has a hint instead.
    assert "explain" not in str(rp.VerbsError("ibv_reg_mr", errno.ENOMEM, "raise ulimit -l"))
    assert "explain" not in str(rp.UnsupportedError("ibv_alloc_mw", errno.EOPNOTSUPP))


def test_post_refused_by_the_device_points_to_explain() -> None:
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64) as mr,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        context.faults.fail_post(errno.EIO)
        with pytest.raises(rp.PostError) as caught:
            qp.post_send(rp.Send(mr[:8]))
    assert named_by(str(caught.value))[0].name == "EIO"


def test_failed_command_points_to_explain_and_quotes_it(capsys: pytest.CaptureFixture[str]) -> None:
    from rdmapost.cli.failure import report
    from rdmapost.cli.output import Output

    for status in WCStatus:
        if not status:
            continue
        wc = rp.WC(1, status, None, 0, None, None, 17, 0, rp.WCFlags(0), 0, 0, 0, 0, 0)
        with pytest.raises(rp.CompletionError) as caught:
            wc.check()
        assert report(caught.value, Output()) == 1
        said = capsys.readouterr().err
        [explanation] = named_by(said)
        assert explanation.name == status.name
        assert explanation.meaning.startswith(explanation.summary)
        assert explanation.summary in said
