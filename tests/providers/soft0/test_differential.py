"""Random programs of work requests on the soft device and on a real one.

Everything must agree, except as listed in ``differential/deviations.py``; and each entry of that
table has a program that shows it. ``RDMAPOST_PROGRAMS`` says how many programs,
``RDMAPOST_FIRST_SEED`` where their seeds start. Run it with ``tests/guest.py -- pytest
tests/providers/soft0/test_differential.py``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import pytest
from conftest import open_verbs
from differential.bench import Bench
from differential.deviations import DEVIATIONS, Deviation, for_kernel, kernel_of
from differential.generate import program_of
from differential.model import Program
from differential.run import PATIENCE_S, run
from differential.shrink import shrink
from differential.transcript import differences

import rdmapost as rp

pytestmark = pytest.mark.rdma

PROGRAMS = int(os.environ.get("RDMAPOST_PROGRAMS", "500"))
FIRST_SEED = int(os.environ.get("RDMAPOST_FIRST_SEED", "0"))
CHUNK = 50
"""Programs in one test: few enough to show how far it came."""

_KERNEL = kernel_of(platform.release())
_TABLE = for_kernel(platform.release())
_SOFT_ROCE_VENDOR = 0xFFFFFF
_NEVER_COMES_S = 1.5
"""How long to wait for a completion that only one of the devices reports."""


@pytest.fixture(scope="module")
def real() -> Iterator[Bench]:
    """The real device."""
    with open_verbs() as context:
        if context.attr.vendor_id != _SOFT_ROCE_VENDOR:
            pytest.skip(f"{context.name} is not Soft-RoCE, and the table is of that")
        with Bench(context) as bench:
            yield bench


@pytest.fixture(scope="module")
def soft(real: Bench) -> Iterator[Bench]:
    """The soft device, with the real one's MTU."""
    with rp.open_device("soft0") as context, Bench(context, real.mtu) as bench:
        yield bench


def compare(
    program: Program,
    soft: Bench,
    real: Bench,
    table: list[Deviation] | None,
    patience: float = PATIENCE_S,
) -> tuple[Program, list[str]]:
    """Run a program on both; return what was run, and where they differ."""
    expected = run(program, soft, deviations=table)
    found = run(expected.program, real, expected=expected, patience=patience)
    return expected.program, differences(expected, found)


@pytest.mark.parametrize(
    "first", range(FIRST_SEED, FIRST_SEED + PROGRAMS, CHUNK), ids=lambda first: f"from-{first}"
)
def test_soft0_and_the_real_device_produce_the_same_transcript(
    first: int, soft: Bench, real: Bench
) -> None:
    for seed in range(first, min(first + CHUNK, FIRST_SEED + PROGRAMS)):
        program = program_of(seed)
        _, lines = compare(program, soft, real, _TABLE)
        if lines:
            program = shrink(program, lambda p: bool(compare(p, soft, real, _TABLE)[1]))
            program, shorter = compare(program, soft, real, _TABLE)
            said = "\n".join(shorter or lines)
            pytest.fail(f"seed {seed}, soft device -> {real.context.name}:\n{said}\n{program}")


@pytest.mark.parametrize("entry", DEVIATIONS, ids=lambda entry: entry.name.replace(" ", "-"))
def test_listed_deviation_of_the_real_device_still_exists(entry: Deviation, real: Bench) -> None:
    # On another soft device: the program may leave the memory unusable.
    with rp.open_device("soft0") as context, Bench(context, real.mtu) as soft:
        if _KERNEL in entry.seen:
            _, lines = compare(entry.program, soft, real, None, patience=_NEVER_COMES_S)
            # Of memory only the place is listed, not the bytes, which depend on the program.
            assert [line for line in lines if not line.startswith(entry.seen[_KERNEL])] == []
            assert len(lines) == len(entry.seen[_KERNEL]), (lines, entry.why)
    with rp.open_device("soft0") as context, Bench(context, real.mtu) as soft:
        # The table accepts the difference, for other kernels too.
        program, lines = compare(entry.program, soft, real, _TABLE)
        assert not lines, program
