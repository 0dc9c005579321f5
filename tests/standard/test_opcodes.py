"""The numbers and tables of the specification that posting needs."""

from __future__ import annotations

import rdmapost as rp
from rdmapost.standard import opcodes


def test_multicast_qpn_is_the_number_of_the_specification():
    """The highest of 24 bits; on soft0 alone, any other would do."""
    assert opcodes.MULTICAST_QPN == rp.MULTICAST_QPN == 0xFFFFFF
