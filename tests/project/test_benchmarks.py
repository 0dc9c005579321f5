"""The benchmarks that need no device run, and print what they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import LIMIT

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("program", "options", "rows"),
    [
        ("soft.py", ("--count", "64", "--runs", "1"), ("round trip", "empty cq.poll()", "columns")),
        ("waiting.py", ("--count", "2"), ("us",)),
        ("startup.py", ("--runs", "1"), ("rdmapost",)),
    ],
)
def test_benchmark_prints_its_rows(program, options, rows):
    ran = subprocess.run(
        [sys.executable, BENCH / program, *options],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    for row in rows:
        assert row in ran.stdout
