"""How many instructions the hot paths take, which does not depend on machine load.

Posting and polling run on the benchmarks' null device under callgrind. The bounds are about one and
a half times what CPython 3.11 takes (unoptimized, as pyenv builds it; others take less), so that
only a real slowdown fails. Run this file as a script to see today's figures, and lower the bounds
when the paths have become faster.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from bench.null import HERE, compile_c

TIMES = 40

BOUNDS = {
    "build/RDMA_WRITE/1/1/checked": 9_600,
    "build/RDMA_WRITE/1/1/unchecked": 9_400,
    "build/RDMA_WRITE/32/1/checked": 8_000,
    "build/RDMA_WRITE/32/1/unchecked": 7_900,
    "prepared/1": 1_250,
    "prepared/32": 60,
    "recv/1/checked": 8_000,
    "recv/32/checked": 6_400,
    "poll/16": 3_300,
}
"""Instructions for each work request or completion, by on_rdmapost.py's names."""
ELSEWHERE = 1.0 if sys.version_info[:2] == (3, 11) else 1.6
"""The factor allowed to other versions: 3.13 takes half as much again if not optimized."""


def count() -> dict[str, float]:
    """Return the instructions that each case takes for each work request."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        null, _ = compile_c(path)
        done = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--dump-before=null_mark",
                f"--callgrind-out-file={path}/out",
                sys.executable,
                HERE / "counted.py",
                str(TIMES),
                *BOUNDS,
            ],
            env={**os.environ, "RDMAPOST_LIBIBVERBS": str(null), "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        counts = {}
        for index, (name, handled) in enumerate(json.loads(done.stdout)):
            # A dump holds what ran since the one before; every second is of what is counted.
            dump = (path / f"out.{2 * index + 2}").read_text()
            (total,) = (line for line in dump.splitlines() if line.startswith("totals:"))
            counts[name] = int(total.split()[1]) / handled
        return counts


@pytest.fixture(scope="module")
def counts() -> dict[str, float]:
    """What each case takes today."""
    for tool in ("valgrind", os.environ.get("CC", "cc")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    return count()


@pytest.mark.parametrize("name", BOUNDS)
def test_instructions_of_a_post_and_a_poll_stay_within_bounds(
    counts: dict[str, float], name: str
) -> None:
    """A work request, or a completion, takes no more instructions than its bound."""
    assert counts[name] <= BOUNDS[name] * ELSEWHERE


if __name__ == "__main__":
    for name, taken in count().items():
        print(f"{name:<36}{taken:10.0f}  bound {BOUNDS[name]}")
