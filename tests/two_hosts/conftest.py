"""Fixtures of the tests that need a second machine, without which they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import rdmapost as rp

from .remote import DEVICE, wait_for_agent

NO_PEER = (
    "no second machine (RDMAPOST_PEER); "
    "tests/guest.py --peer 'python tests/virtual_machine/agent.py' runs these"
)


@pytest.fixture(scope="session")
def peer() -> str:
    """The address of the other machine, on which the agent is running."""
    address = os.environ.get("RDMAPOST_PEER")
    if not address:
        pytest.skip(NO_PEER)
    wait_for_agent()
    return address


@pytest.fixture(scope="module")
def device(peer: str) -> Iterator[rp.Context]:
    """This machine's device on the network between the two."""
    with rp.open_device(DEVICE) as context:
        yield context
