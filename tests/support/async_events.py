"""Asynchronous events: reading them, and discarding those of earlier tests."""

from __future__ import annotations

from typing import Any

import pytest

import rdmapost as rp
from rdmapost import EventType


@pytest.fixture
def no_old_events(context: rp.Context) -> None:
    """Discard events that earlier tests have left."""
    events(context)


def events(context: rp.Context) -> list[tuple[EventType, Any]]:
    """Take the pending events; return the type and element of each."""
    found = []
    while event := context.get_async_event(0):
        found.append((event.event_type, event.element))
    return found


def event(context: rp.Context) -> rp.AsyncEvent:
    found = context.get_async_event(5)
    assert found is not None
    return found
