"""What is posted to queue pairs and SRQs, and what cannot be closed because of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._arguments import counted
from .._binding import native
from ..errors import InUseError
from ..posting.prepared import OpenBatches
from .device import in_flight_of
from .resource import Resource, close_dropped, open_handles


class PostTarget(Resource):
    """A queue pair or an SRQ: work requests are posted to its queues."""

    __slots__ = ("_batches", "_in_flight", "pd")

    pd: Any
    _batches: OpenBatches
    _in_flight: tuple[native.InFlight, ...]
    """What is posted to each of its queues; its CQs find them by number."""

    def _open_queues(self, *queues: native.InFlight) -> None:
        """Let completions of these queues be found."""
        self._batches = OpenBatches()
        self._in_flight = queues
        for queue in queues:
            in_flight_of(self.pd.context)[queue.number] = queue

    def _keep_completions(self) -> None:
        """Collect what the device has completed, before it is dropped."""
        raise NotImplementedError

    def _forget_posted(self) -> None:
        """Forget what was posted: the device has dropped it."""
        for queue in self._in_flight:
            queue.clear()

    def _release(self) -> None:
        if not hasattr(self, "_in_flight"):
            # An interrupt has cut the constructor short: nothing was posted.
            return
        for batch in self._batches:
            batch.close()
        self._keep_completions()

    def _forget(self) -> None:
        if not hasattr(self, "_in_flight"):
            return
        self._keep_completions()
        for queue in self._in_flight:
            in_flight_of(self.pd.context).pop(queue.number, None)
            queue.clear()


class Postable(Resource):
    """What work requests name: it cannot be closed while they are outstanding or prepared."""

    __slots__ = ("pd",)

    pd: Any

    def _refuse_posted(self) -> None:
        """Raise InUseError, unless this has closed queue pairs that nobody refers to."""
        targets = [
            handle
            for handle in open_handles()
            # The collector may have cleared one that the device refused to destroy.
            if isinstance(handle, PostTarget) and hasattr(handle, "_in_flight")
        ]
        if close_dropped(targets):
            return
        batches = [str(batch) for target in targets for batch in target._batches.naming(self)]
        if batches:
            raise InUseError(
                f"{self} cannot be closed: {', '.join(batches)} still open; "
                f"close {'it' if len(batches) == 1 else 'them'} first"
            )
        named = [
            (wr_id, queue)
            for queue in list(in_flight_of(self.pd.context).values())
            for wr_id, held in _outstanding_of(queue)
            if held is self or (isinstance(held, tuple) and self in held)
        ]
        if not named:
            raise InUseError(
                f"{self} cannot be closed: in use by an outstanding prepared list, or by a post of "
                "another thread that is about to end; poll the completions and try again, or close "
                "the QP first"
            )
        holders = " or ".join(sorted({_holder(queue, targets) for _, queue in named}))
        shown = ", ".join(str(wr_id) for wr_id, _ in named[:4]) + (
            ", ..." if len(named) > 4 else ""
        )
        raise InUseError(
            f"{self} cannot be closed: in use by {counted(len(named), 'outstanding work request')} "
            f"(wr_id {shown}); poll their completions, or close {holders} first"
        )


def _holder(queue: native.InFlight, targets: list[PostTarget]) -> str:
    """Say what a queue belongs to."""
    return next(
        (f"the {each._type_name}" for each in targets if queue in each._in_flight), "the QP"
    )


def _outstanding_of(queue: native.InFlight) -> Iterator[tuple[int, Any]]:
    """Iterate over a queue's outstanding work requests: the wr_id of each, and what it holds."""
    index = 0
    while (entry := queue.entry(index)) is not None:
        yield entry
        index += 1
