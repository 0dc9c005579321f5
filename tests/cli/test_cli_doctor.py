"""``rdmapost doctor``: what it prints, its JSON document, and its exit code."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import subprocess
import sys

import pytest
from support.cli_runner import run

import rdmapost as rp

NOTHING = {
    "RDMAPOST_LIBIBVERBS": "/nonexistent",
    "RDMAPOST_DEVICE": "",
    "RDMAPOST_REQUIRE_DEVICE": "",
}
"""A machine without libibverbs."""


def process(*args: str, prelude: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run doctor as a separate process.

    Args:
        args: its arguments.
        prelude: what is done before.
        environment: variables to add.
    """
    program = f"{prelude}\nfrom rdmapost.cli.app import app\napp(['doctor', *{args!r}])\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_doctor_finds_no_problem_with_a_working_device(context: rp.Context) -> None:
    ran = run("doctor", "-d", context.name)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"{context.name} ({context.kind}): 0 problems, ")
    assert f"ok       {context.name}: message" in lines
    assert "PROBLEM" not in ran.out


def test_verbose_doctor_shows_the_evidence_of_what_is_right(context: rp.Context) -> None:
    ran = run("doctor", "-d", context.name, "-v")
    assert ran.code == 0
    assert "a message of 13 bytes arrived" in ran.out
    assert "= 0.47 s until RETRY_EXC_ERR" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.err.startswith(f"device   {context.name}")


def test_json_of_doctor_has_the_findings_and_counts_them(context: rp.Context) -> None:
    ran = run("doctor", "-d", context.name, "--json")
    assert (ran.code, ran.err) == (0, "")
    doc = ran.doc
    assert list(doc) == ["device", "kind", "findings", "counts"]
    assert (doc["device"], doc["kind"]) == (context.name, context.kind)
    for finding in doc["findings"]:
        assert list(finding) == ["name", "severity", "evidence", "remedy", "about"]
    names = {finding["name"] for finding in doc["findings"]}
    assert {"message", "port-active", "memlock", "qp-state", "peer", "timeout", "cq"} <= names
    severities = [finding["severity"] for finding in doc["findings"]]
    assert doc["counts"] == {
        severity: severities.count(severity) for severity in ("problem", "warning", "info", "ok")
    }
    # Both queue pairs are in it, and nothing twice.
    abouts = {f["about"] for f in doc["findings"] if f["name"] == "qp-state"}
    assert len(abouts) == 2
    assert len({json.dumps(finding) for finding in doc["findings"]}) == len(doc["findings"])


def test_missing_gid_is_a_problem_for_doctor(context: rp.Context) -> None:
    ran = run("doctor", "-d", context.name, "-g", "250")
    assert ran.code == 1
    assert ran.out.startswith("PROBLEM  gid-wrong")
    assert "no GID with index 250" in ran.out
    assert ran.out.splitlines()[-1].startswith(f"{context.name} ({context.kind}): 1 problem, ")


def test_missing_port_is_a_problem_for_doctor() -> None:
    ran = run("doctor", "-d", "soft0", "-p", "2", "--json")
    assert ran.code == 1
    assert ran.doc["error"] == "found no-such-port"


def test_doctor_on_a_missing_device_exits_with_3_and_the_findings() -> None:
    ran = run("doctor", "-d", "nosuch0")
    assert ran.code == 3
    assert "no RDMA device nosuch0" in ran.err
    ran = run("doctor", "-d", "nosuch0", "--json")
    assert ran.code == 3
    assert "no RDMA device nosuch0" in ran.doc["error"]
    assert ran.doc["findings"]


def test_missing_device_is_named_in_json_whether_by_option_or_by_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RDMAPOST_DEVICE", raising=False)
    by_option = run("doctor", "-d", "nosuch0", "--json").doc
    monkeypatch.setenv("RDMAPOST_DEVICE", "nosuch0")
    by_variable = run("doctor", "--json").doc
    assert by_option["device"] == by_variable["device"] == "nosuch0"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EADDRINUSE, errno.EBUSY])
def test_device_that_cannot_be_opened_exits_with_3_and_the_findings(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(name: str | None = None) -> rp.Context:
        raise rp.VerbsError("ibv_open_device", number)

    for where in ("rdmapost.cli.target", "rdmapost.tools.diagnose.machine_checks"):
        monkeypatch.setattr(f"{where}.open_device", refuse)
    ran = run("doctor", "-d", "soft0")
    assert ran.code == run("send", "-d", "soft0").code == 3
    assert ran.out.startswith("PROBLEM  not-opened (soft0)")
    assert ran.err.startswith("rdmapost: ibv_open_device: ")
    ran = run("doctor", "-d", "soft0", "--json")
    assert (ran.code, ran.doc["errno"]) == (3, errno.errorcode[number])
    assert ran.doc["error"].startswith("ibv_open_device: ")
    assert ran.doc["counts"]["problem"] == 1


def test_machine_without_rdma_gets_a_diagnosis_and_a_remedy() -> None:
    ended = process(**NOTHING)
    assert ended.returncode == 1
    assert "using soft0, the software device of this process" in ended.stderr
    assert "PROBLEM  libibverbs-missing" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("soft0 (soft): ")
    # The device is checked as if it had been asked for.
    asked = process("-d", "soft0", **NOTHING)
    assert "soft0 port 1: port-active, gid" in asked.stdout
    assert "soft0 port 1: port-active, gid" in ended.stdout
    text = " ".join(ended.stdout.split())
    if not pathlib.Path("/sys/class/infiniband").exists():
        assert "PROBLEM no-rdma-device (machine) there is no RDMA device" in text
        assert "use a virtual machine that has one" in text


def test_doctor_needs_nothing_of_the_machine_for_a_software_device() -> None:
    ended = process("-d", "soft0", **NOTHING)
    assert ended.returncode == 0
    assert "info     libibverbs-missing" in ended.stdout


def test_doctor_without_the_required_device_exits_with_3_and_the_findings() -> None:
    ended = process("--json", **{**NOTHING, "RDMAPOST_REQUIRE_DEVICE": "1"})
    assert ended.returncode == 3
    doc = json.loads(ended.stdout)
    assert "libibverbs cannot be loaded" in doc["error"]
    assert "libibverbs-missing" in [finding["name"] for finding in doc["findings"]]


def test_doctor_finds_a_memlock_limit_of_0_by_name() -> None:
    """No memory may be locked, by a user who is not root."""
    ended = process(
        "--json",
        prelude="import os, resource\n"
        # All that it imports: another user may not read where Python is.
        "from rdmapost.cli.app import app\n"
        "import io, contextlib\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    app(['doctor', '-d', 'soft0'])\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "if os.geteuid() == 0: os.setuid(65534)\n",
        **NOTHING,
    )
    assert ended.returncode == 1
    doc = json.loads(ended.stdout)
    found = [finding for finding in doc["findings"] if finding["name"] == "memlock"]
    assert [finding["severity"] for finding in found] == ["problem"]
    assert "RLIMIT_MEMLOCK is 0 KiB" in found[0]["evidence"]


def test_failed_message_is_a_problem_and_its_queue_pairs_are_diagnosed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command makes the software device fail the send."""
    real = rp.QP.post_send

    def post_send(qp: rp.QP, wrs: rp.SendWR) -> None:
        plan: rp.FaultPlan = qp.pd.context.faults
        plan.complete_with(0, rp.WCStatus.REM_OP_ERR)
        real(qp, wrs)

    monkeypatch.setattr(rp.QP, "post_send", post_send)
    ran = run("doctor", "-d", "soft0")
    assert ran.code == 1
    assert "PROBLEM  message (soft0)" in ran.out
    assert "13 bytes to the same device: REM_OP_ERR" in ran.out
    assert "-> rdmapost explain REM_OP_ERR" in ran.out
    assert "PROBLEM  qp-state" in ran.out


def test_help_of_doctor_fits_80_columns_and_names_the_exit_codes() -> None:
    ran = run("doctor", "--help")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    for text in ("--device", "--port", "--gid-index", "--json", "Exit codes: 0"):
        assert text in ran.out
    assert "doctor" in run("--help").out
