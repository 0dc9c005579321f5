"""The benchmarks run, and print what they measure."""

from __future__ import annotations

import shutil
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
        (
            "roce.py",
            ("--count", "9", "--writes", "2", "--seconds", "0.2"),
            ("UDP", "polling", "MTU 1024", "sleeping target", "busy target", "256 queue pairs"),
        ),
    ],
)
def test_benchmark_prints_its_rows(program, options, rows):
    runs(program, options, rows)


def test_benchmark_of_the_null_device_prints_its_rows():
    if shutil.which("cc") is None:
        pytest.skip("this machine has no C compiler")
    options = ("--runs", "1", "--rounds", "1", "--no-growth")
    runs("null.py", options, ("list of 32, checked", "4096", "poll_into 256", "its SGE"))


@pytest.mark.rdma
def test_benchmark_of_a_real_device_prints_its_rows(verbs_context):
    if shutil.which("cc") is None:
        pytest.skip("this machine has no C compiler")
    options = ("-d", verbs_context.name, "--rows", "32", "--rounds", "2", "--runs", "1")
    runs("columns_on_device.py", options, ("columns", "lists of 32"))


def runs(program, options, rows):
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
