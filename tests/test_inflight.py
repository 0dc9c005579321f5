"""What is posted and not completed: tickets, the order of completions, and what stays alive."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rdmapost.inflight import InFlight, InFlightAny

wr_ids = st.integers(0, (1 << 64) - 1)


class Memory:
    """Stands for what a work request refers to."""


class InOrder(RuleBasedStateMachine):
    """A queue that completes in order, against a list of (ticket, wr_id)."""

    kind: type[InFlight] | type[InFlightAny] = InFlight

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.kind()
        self.model: list[tuple[int, int, weakref.ref[Memory]]] = []
        self.used: list[int] = []

    @rule(
        ids=st.lists(wr_ids, min_size=1, max_size=5), refused=st.integers(0, 5), whole=st.booleans()
    )
    def post(self, ids: list[int], refused: int, whole: bool) -> None:
        """Post a list, in one piece or not, of which the device refuses the last ones."""
        named = [Memory() for _ in ids]
        first = self.queue.next_ticket()
        for ahead, (wr_id, memory) in enumerate(zip(ids, named, strict=True)):
            self.model.append((first + ahead, wr_id, weakref.ref(memory)))
        if whole:
            self.queue.add_list(list(ids), [(memory,) for memory in named])
        else:
            for wr_id, memory in zip(ids, named, strict=True):
                self.queue.add(wr_id, (memory,))
        del named, memory
        count = min(refused, len(ids))
        self.queue.forget_last(count)
        if count:
            del self.model[-count:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Complete one; those before it had no completion of their own."""
        index = data.draw(st.integers(0, len(self.model) - 1))
        ticket, wr_id, _ = self.model[index]
        assert self.queue.complete(ticket) == wr_id
        self.retire(index)
        self.used.append(ticket)

    def retire(self, index: int) -> None:
        del self.model[: index + 1]

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def complete_again(self, data: st.DataObject) -> None:
        """A completion that a driver reports twice finds nothing."""
        ticket = data.draw(st.sampled_from(self.used))
        if ticket not in [entry[0] for entry in self.model]:
            assert self.queue.complete(ticket) is None

    @rule(ahead=st.integers(0, 1 << 30))
    def complete_what_was_never_posted(self, ahead: int) -> None:
        number, count = divmod(self.queue.next_ticket(), 1 << 32)
        assert self.queue.complete(number << 32 | (count + ahead) & 0xFFFF_FFFF) is None

    @rule()
    def clear(self) -> None:
        self.used += [entry[0] for entry in self.model]
        self.queue.clear()
        self.model.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.queue.outstanding == len(self.model)
        assert [wr_id for wr_id, _ in self.queue.references()] == [e[1] for e in self.model]

    @invariant()
    def keeps_alive_what_is_named_and_nothing_else(self) -> None:
        assert all(memory() is not None for _, _, memory in self.model)
        named = {id(memory()) for _, _, memory in self.model}
        assert {id(r) for _, refers in self.queue.references() for r in refers} == named


class AnyOrder(InOrder):
    """A queue that completes in any order: a completion retires only its own."""

    kind = InFlightAny

    def retire(self, index: int) -> None:
        del self.model[index]


TestInOrder = InOrder.TestCase
TestAnyOrder = AnyOrder.TestCase
TestInOrder.settings = TestAnyOrder.settings = settings(max_examples=60)


def test_tickets_name_their_queue():
    """No two queues of a process share tickets, whatever was posted to them."""
    queues = [InFlight(), InFlightAny(), InFlight()]
    assert len({queue.number for queue in queues}) == 3
    for queue in queues:
        assert queue.next_ticket() >> 32 == queue.number


def test_count_wraps_around():
    """After 2^32 work requests the tickets start again, and nothing is mixed up."""
    queue = InFlight()
    queue.posted = queue.done = (1 << 32) - 2
    tickets = []
    for wr_id in range(5):
        tickets.append(queue.next_ticket())
        queue.add(wr_id, ())
    assert [ticket & 0xFFFF_FFFF for ticket in tickets] == [(1 << 32) - 2, (1 << 32) - 1, 0, 1, 2]
    assert queue.complete(tickets[1]) == 1
    assert queue.complete(tickets[0]) is None
    assert queue.complete(tickets[3]) == 3
    assert queue.complete(tickets[4]) == 4
    assert queue.outstanding == 0


def test_memory_is_let_go_at_the_completion():
    for queue in (InFlight(), InFlightAny()):
        memory = Memory()
        ref = weakref.ref(memory)
        ticket = queue.next_ticket()
        queue.add(1, (memory,))
        del memory
        gc.collect()
        assert ref() is not None
        queue.complete(ticket)
        assert ref() is None


@pytest.mark.parametrize("again", ["add", "complete", "clear", "forget_last"])
def test_finalizer_may_come_back(again):
    """What a completion lets go of may run any code, and that finds the queue in order."""
    queue = InFlight()
    left = 40

    class Finalized:
        def __del__(self) -> None:
            nonlocal left
            left -= 1
            if again == "add":
                queue.add(left, ())
            elif again == "complete":
                queue.complete(queue.next_ticket() - 1)
            elif again == "clear":
                queue.clear()
            else:
                queue.forget_last(1)
            assert queue.outstanding == len(list(queue.references()))

    for wr_id in range(20):
        queue.add(wr_id, (Finalized(),))
    queue.add_list([*range(20)], [(Finalized(),) for _ in range(20)])
    assert queue.complete(queue.base | 9) == 9
    queue.clear()
    assert left == 0
