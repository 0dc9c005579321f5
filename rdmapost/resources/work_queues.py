"""Base classes: of QP and SRQ, which have work queues; of MR, MW and AH, which work requests use.

While a work request is outstanding or prepared, the resources that it uses cannot be closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._arguments import counted
from .._binding import native
from ..errors import InUseError
from ..posting.prepared import OpenBatches
from .device import in_flight_of, invalidated_of
from .resource import Resource, close_dropped, open_handles

if TYPE_CHECKING:
    from .device import Context
    from .pd import PD


class HasWorkQueues(Resource):
    """A queue pair or an SRQ."""

    __slots__ = ("_batches", "context", "pd")

    if TYPE_CHECKING:
        pd: PD | Any
        context: Context
    _batches: OpenBatches

    def _open_queues(self, *queues: native.InFlight) -> None:
        """Register the queues with the device, so that completions find their records."""
        self._batches = OpenBatches()
        native.own_queues(self, queues)
        for queue in queues:
            queue.enroll(in_flight_of(self.context), invalidated_of(self.context))

    def _keep_completions(self) -> None:
        """Poll the available completions before the device drops them."""
        raise NotImplementedError

    def _release(self) -> None:
        if not hasattr(self, "_in_flight"):
            # An interrupt ended the constructor early: nothing was posted.
            return
        for batch in self._batches:
            batch.close()
        self._keep_completions()

    def _forget(self) -> None:
        if hasattr(self, "_in_flight"):
            self._keep_completions()


class UsedByWorkRequests(Resource):
    """A region, a window or an address handle."""

    __slots__ = ("pd",)

    if TYPE_CHECKING:
        pd: PD

    def _refuse_posted(self) -> None:
        """Close queue pairs that nothing refers to any more; raise InUseError if there are none."""
        owners = [
            handle
            for handle in open_handles()
            # The collector may have cleared a handle that the device refused to destroy.
            if isinstance(handle, HasWorkQueues) and hasattr(handle, "_in_flight")
        ]
        if close_dropped(owners):
            return
        batches = [str(batch) for owner in owners for batch in owner._batches.naming(self)]
        if batches:
            raise InUseError(
                f"{self} cannot be closed: {', '.join(batches)} still open; "
                f"close {'it' if len(batches) == 1 else 'them'} first"
            )
        using = [
            (wr_id, owner)
            for owner in owners
            for queue in owner._in_flight
            for wr_id, held in _outstanding_of(queue)
            if held is self or (isinstance(held, tuple) and any([one is self for one in held]))
        ]
        if not using:
            raise InUseError(
                f"{self} cannot be closed: in use by an outstanding prepared list, or by another "
                "thread's post, which is about to return; poll the completions and try again, or "
                "close the QP first"
            )
        holders = " or ".join(sorted({f"the {owner._type_name}" for _, owner in using}))
        shown = ", ".join([str(wr_id) for wr_id, _ in using[:4]]) + (
            ", ..." if len(using) > 4 else ""
        )
        what = "its completion" if len(using) == 1 else "their completions"
        raise InUseError(
            f"{self} cannot be closed: in use by {counted(len(using), 'outstanding work request')} "
            f"(wr_id {shown}); poll {what}, or close {holders} first"
        )


def _outstanding_of(queue: native.InFlight) -> list[tuple[int, Any]]:
    """List a queue's outstanding work requests: each one's wr_id and the resources it uses."""
    found: list[tuple[int, Any]] = []
    while (entry := queue.entry(len(found))) is not None:
        found.append(entry)
    return found
