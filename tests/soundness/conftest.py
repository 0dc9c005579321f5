"""Fixtures of the tests that run their body in a Python of its own (``isolated``)."""

from __future__ import annotations

import pytest

import rdmapost as rp


@pytest.fixture
def device(context: rp.Context) -> str:
    """The name of a device: soft0, and with the marker ``rdma`` a real one."""
    return context.name


@pytest.fixture
def soft() -> str:
    """The name of the device that is always there."""
    return "soft0"


@pytest.fixture
def real(verbs_context: rp.Context) -> str:
    """The name of a real device, for what soft0 runs in a test of its own."""
    return verbs_context.name
