"""What a device counts."""

from __future__ import annotations

from ..._binding import native
from ..base import Counters


class Counted(native.Record):
    """Counters; a step that is rolled back does not change them.

    Attributes:
        sent, received: (packets, bytes); each update stores a new pair, so both change at once.

    The other attributes are named as in Counters.
    """

    def __init__(self) -> None:
        self.sent = self.received = (0, 0)
        self.retransmitted = 0
        self.naks_sent = self.naks_received = self.rnr_naks_sent = self.rnr_naks_received = 0
        self.icrc_errors = self.dropped = self.send_errors = self.faults = 0

    def now(self, rcvbuf_errors: int) -> Counters:
        """Return the counters, including the one that the kernel keeps."""
        others = dict(vars(self))
        both = {direction: others.pop(direction) for direction in ("sent", "received")}
        return Counters(
            **{f"packets_{direction}": packets for direction, (packets, _) in both.items()},
            **{f"bytes_{direction}": size for direction, (_, size) in both.items()},
            **others,
            rcvbuf_errors=rcvbuf_errors,
        )
