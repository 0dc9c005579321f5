"""The fuzzer itself: ``python tests/fuzz`` runs random programs from hostile callers."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

FUZZ = pathlib.Path(__file__).parent / "fuzz"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(FUZZ), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_seed_replays_a_program_of_one_thread_call_by_call():
    pytest.importorskip("numpy", reason="numpy is not installed")
    first, second = (
        fuzz("--seed", "3", "--threads", "1", "--program", "1").stdout for _ in range(2)
    )
    assert first.count("\n") > 30
    assert _without_addresses(first) == _without_addresses(second)


def _without_addresses(said: str) -> list[str]:
    # Long lines are cut, where depends on the addresses.
    return [re.sub(r"0x[0-9a-f]+|\d{5,}|psn=\d+", "N", line)[:100] for line in said.splitlines()]
