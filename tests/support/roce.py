"""Opening roce devices."""

from __future__ import annotations

import errno

import pytest

import rdmapost as rp


def skip_unless_free(name: str) -> None:
    """Skip the test if a roce device's port is taken."""
    open_roce(name).close()


def open_roce(name: str) -> rp.Context:
    """Open a roce device, or skip the test if its port is taken."""
    try:
        return rp.open_device(name)
    except rp.VerbsError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Soft-RoCE has it on every address.
        pytest.skip(f"{name} cannot be opened: {error}")
