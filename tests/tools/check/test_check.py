"""The loopback checks: their rows, what each one saw, and that each detects faults."""

from __future__ import annotations

import textwrap
import time
from typing import Any

import pytest

import rdmapost as rp
from rdmapost import QPType, check
from rdmapost.check import ROWS, Failed, Result, Trial, run_checks
from rdmapost.standard.opcodes import QP_TYPES_BY_OPCODE
from rdmapost.tools.check import runner

BESIDE_THE_TABLE = {
    "POST_COLUMNS": {"RC", "UC", "XRC_SEND"},
    "RECV": {"RC", "UC", "UD", "RAW_PACKET"},
    "SRQ_RECV": {"RC", "UD", "XRC_SEND"},
    "TAG_ADD": {"RC"},
    "TAG_DEL": {"RC"},
    "TAG_SYNC": {"RC"},
}
EXPECTED = {
    *((op.name, t.name) for op, types in QP_TYPES_BY_OPCODE.items() for t in types),
    *((name, qp_type) for name, types in BESIDE_THE_TABLE.items() for qp_type in types),
}


@pytest.fixture(scope="module")
def soft() -> Any:
    with rp.open_device("soft0") as opened:
        yield opened


@pytest.fixture(scope="module")
def results(soft: rp.Context) -> dict[tuple[str, str], Result]:
    return {(result.opcode, result.qp_type): result for result in run_checks(soft)}


def test_every_opcode_is_checked_on_every_qp_type_of_the_table() -> None:
    rows = [(row.opcode, t.name) for row in ROWS for t in row.qp_types]
    assert set(rows) == EXPECTED
    assert len(rows) == len(EXPECTED)


def test_every_check_passes_on_the_software_device(results: dict[tuple[str, str], Result]) -> None:
    assert set(results) == EXPECTED
    assert [result for result in results.values() if result.status != "pass"] == []


def test_all_checks_finish_within_4_seconds(soft: rp.Context) -> None:
    start = time.perf_counter()
    assert len(list(run_checks(soft))) == len(EXPECTED)
    # A tenth of this is usual; a wait that runs into its timeout is longer.
    assert time.perf_counter() - start < 4


def test_wrong_arguments_are_refused_before_the_first_result(soft: Any) -> None:
    wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "context: expected Context, got int", 5, {}),
        (ValueError, "soft0 has no port 2", soft, {"port_num": 2}),
        (ValueError, "soft0 port 1 has no GID with index 99", soft, {"gid_index": 99}),
        (TypeError, "gid_index: expected int, got str", soft, {"gid_index": "0"}),
        (TypeError, "timeout: expected seconds, got str", soft, {"timeout": "5"}),
        (ValueError, "timeout=0: expected more than 0 s", soft, {"timeout": 0}),
    ]
    for error, text, context, options in wrong:
        with pytest.raises(error, match=f"^{text}"):
            run_checks(context, **options)


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_writes_outside_a_window_are_refused(
    results: dict[tuple[str, str], Result], qp_type: str
) -> None:
    detail = results["BIND_MW", qp_type].detail
    assert detail == "the key is valid when bound, refused before, refused outside the window"


@pytest.mark.parametrize("qp_type", ["RC", "UC", "XRC_SEND"])
def test_invalidated_key_is_named_in_the_completion(
    results: dict[tuple[str, str], Result], qp_type: str
) -> None:
    detail = results["SEND_WITH_INV", qp_type].detail
    assert detail.endswith("refused afterwards, and named in the receive's completion (WITH_INV)")


def test_no_check_fails_on_any_device(context: rp.Context) -> None:
    found = list(run_checks(context))
    assert {(result.opcode, result.qp_type) for result in found} == EXPECTED
    assert [result for result in found if result.status == "fail"] == []
    assert all(result.detail for result in found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.opcode)
def test_check_runs_alone_and_leaks_no_resource(soft: rp.Context, row: Any) -> None:
    for qp_type in row.qp_types:
        with rp.open_device("soft0") as context:
            assert row.run(Trial(context, qp_type, 1, None, 5.0))
            # Raises InUseError while anything is open on the device.
            context.close()


def test_check_added_by_the_user_is_run(soft: rp.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in the documentation."""
    _, example = check.__doc__.split("too::\n")
    rows = list(ROWS)
    monkeypatch.setattr(runner, "ROWS", rows)
    names = {"rdmapost": rp, "QPType": QPType, **vars(check), "ROWS": rows}
    exec(textwrap.dedent(example), names)
    assert list(run_checks(soft))[-2:] == [
        Result("EMPTY_SEND", qp_type, "pass", "an empty message arrived")
        for qp_type in ("RC", "UD")
    ]


# ---- checks detect faults ---------------------------------------------------------


@pytest.mark.parametrize(("opcode", "qp_type"), sorted(EXPECTED), ids=str)
def test_completion_with_an_error_status_fails_its_check(
    soft: rp.Context, opcode: str, qp_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check examines the status of every completion that it waits for."""
    (row,) = [row for row in ROWS if row.opcode == opcode]
    poll = rp.CQ.wait

    def wait(cq: rp.CQ, *args: Any) -> list[rp.WC]:
        return [wc._replace(status=rp.WCStatus.GENERAL_ERR) for wc in poll(cq, *args)]

    monkeypatch.setattr(rp.CQ, "wait", wait)
    with pytest.raises(rp.RdmaError, match="GENERAL_ERR"):
        row.run(Trial(soft, QPType[qp_type], 1, None, 0.2))


@pytest.mark.parametrize(
    ("opcode", "qp_type"),
    sorted(
        (opcode, t)
        for opcode, t in EXPECTED
        # Their data is a value, which copy() does not move, or they have none.
        if opcode not in ("ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD", "ATOMIC_WRITE")
        and (opcode, t) not in (("BIND_MW", "XRC_SEND"), ("LOCAL_INV", "XRC_SEND"))
    ),
    ids=str,
)
def test_message_that_does_not_arrive_fails_its_check(
    soft: rp.Context, opcode: str, qp_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion alone proves nothing."""

    def copy(source: Any, target: Any) -> None:
        """Copy nothing."""

    for module in ("soft0.requester", "soft0.responder", "software.responder"):
        monkeypatch.setattr(f"rdmapost.providers.{module}.copy", copy, raising=False)
    (row,) = [row for row in ROWS if row.opcode == opcode]
    with pytest.raises(Failed):
        row.run(Trial(soft, QPType[qp_type], 1, None, 0.2))


@pytest.mark.parametrize("opcode", ["RDMA_WRITE", "POST_COLUMNS", "BIND_MW", "LOCAL_INV"])
def test_uc_write_that_arrives_after_its_completion_passes_its_check(
    soft: rp.Context, opcode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion only says that the message has left."""
    (row,) = [row for row in ROWS if row.opcode == opcode]
    on_their_way: list[tuple[memoryview, bytes]] = []

    def copy(source: Any, target: Any) -> None:
        assert len(target) == 1
        on_their_way.append((target[0], b"".join(map(bytes, source))))

    def arrive(_: float) -> None:
        for room, data in on_their_way:
            room[: len(data)] = data
        on_their_way.clear()

    monkeypatch.setattr("rdmapost.providers.soft0.responder.copy", copy)
    monkeypatch.setattr("rdmapost.tools.loopback.time.sleep", arrive)
    assert row.run(Trial(soft, QPType.UC, 1, None, 5.0))


def test_frames_that_do_not_arrive_are_unsupported(
    soft: rp.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NIC needs a flow rule before it delivers frames to a queue pair."""
    monkeypatch.setattr("rdmapost.providers.soft0.raw._send_frame", lambda qp, frame: None)
    found = list(run_checks(soft, timeout=0.1))
    raw = [result for result in found if result.qp_type == "RAW_PACKET"]
    assert {result.status for result in raw} == {"unsupported"}
    assert all("flow rule" in result.detail for result in raw)
