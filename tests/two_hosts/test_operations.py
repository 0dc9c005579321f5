"""10,000 operations between two machines: none is lost, duplicated or out of order."""

from __future__ import annotations

import pytest

import rdmapost as rp

from .near_side import exchange
from .remote import DEVICE

pytestmark = pytest.mark.two_hosts


def test_ten_thousand_operations_between_two_hosts_arrive_once_in_order(device: rp.Context) -> None:
    """The other machine checks each send and write, and a read checks the last."""
    exchange(device, DEVICE, 10_000)
