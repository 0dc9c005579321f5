"""The fuzzer itself: ``python tests/fuzz`` runs random programs from hostile callers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import ROOT, run_python

FUZZ = ROOT / "tests" / "fuzz"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(FUZZ), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_fuzz_seed_replays_a_program_of_one_thread_call_by_call():
    pytest.importorskip("numpy", reason="numpy is not installed")
    first, second = (
        fuzz("--seed", "3", "--threads", "1", "--program", "1").stdout for _ in range(2)
    )
    assert first.count("\n") > 30
    assert _without_addresses(first) == _without_addresses(second)


AFTER = """
import sys
sys.path.insert(0, sys.argv[1])
from programs import plan_of, run

for program in range(8):
    run(plan_of(3, program, 1), log=print if program == 7 else None)
"""


def test_fuzz_program_of_one_thread_does_the_same_after_others_as_alone():
    pytest.importorskip("numpy", reason="numpy is not installed")
    alone = fuzz("--seed", "3", "--threads", "1", "--program", "7").stdout
    after = run_python(AFTER, str(FUZZ), PYTHONHASHSEED="0").stdout
    assert after.count("\n") > 30
    # The first line says what program it is.
    assert _without_addresses(alone)[1:] == _without_addresses(after)


def test_fuzz_finding_comes_with_the_command_that_replays_it(tmp_path):
    pytest.importorskip("numpy", reason="numpy is not installed")
    for module in FUZZ.glob("*.py"):
        text = module.read_text()
        if module.name == "operations.py":
            # Programs that find something at once.
            text += "\n\ndef poll(world, draw):\n    world.found('poll', None, 'wrong')\n"
            text += "\n_WEIGHTED = (poll,)\n"
        (tmp_path / module.name).write_text(text)
    found = subprocess.run(
        [sys.executable, "-P", str(tmp_path), "--threads", "1", "--ops", "1000", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 1
    assert "python tests/fuzz --seed 5 --threads 1 --program 0" in found.stdout


def _without_addresses(said: str) -> list[str]:
    # Long lines are cut, where depends on the addresses.
    return [
        re.sub(r"0x[0-9a-f]+|\d{5,}|(?:psn|qp_num)=\d+", "N", line)[:100]
        for line in said.splitlines()
    ]
