"""Random programs of work requests on soft0 and on a roce device: everything must agree.

``RDMAPOST_PROGRAMS`` says how many programs, ``RDMAPOST_FIRST_SEED`` where their seeds start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from differential import adaptations
from differential.bench import Bench
from differential.deviations import Deviation
from differential.generate import program_of
from differential.model import Program
from differential.run import run
from differential.shrink import shrink
from differential.transcript import differences
from support.roce import open_roce

import rdmapost as rp

PROGRAMS = int(os.environ.get("RDMAPOST_PROGRAMS", "100"))
FIRST_SEED = int(os.environ.get("RDMAPOST_FIRST_SEED", "0"))
CHUNK = 50

TABLE = [
    Deviation(
        "a datagram that does not fit into its receive",
        "It ends the receive on soft0, as on hardware; roce drops it, as Soft-RoCE does.",
        fit=adaptations.datagrams_that_fit,
    )
]


@pytest.fixture(scope="module")
def roce() -> Iterator[Bench]:
    with open_roce("roce:127.0.0.115") as context, Bench(context) as bench:
        yield bench


@pytest.fixture(scope="module")
def soft(roce: Bench) -> Iterator[Bench]:
    """soft0 with the other device's MTU."""
    with rp.open_device("soft0") as context, Bench(context, roce.mtu) as bench:
        yield bench


def compare(program: Program, soft: Bench, roce: Bench) -> tuple[Program, list[str]]:
    """Run a program on both; return what was run, and where they differ."""
    expected = run(program, soft, deviations=TABLE)
    found = run(expected.program, roce, expected=expected)
    return expected.program, differences(expected, found)


@pytest.mark.parametrize(
    "first", range(FIRST_SEED, FIRST_SEED + PROGRAMS, CHUNK), ids=lambda first: f"from-{first}"
)
def test_soft0_and_roce_produce_the_same_transcript(first: int, soft: Bench, roce: Bench) -> None:
    for seed in range(first, min(first + CHUNK, FIRST_SEED + PROGRAMS)):
        program, lines = compare(program_of(seed), soft, roce)
        if lines:
            program = shrink(program, lambda each: bool(compare(each, soft, roce)[1]))
            program, shorter = compare(program, soft, roce)
            said = "\n".join(shorter or lines)
            pytest.fail(f"seed {seed}, soft0 -> {roce.context.name}:\n{said}\n{program}")
