"""The ring of what is in flight: that it grows when it is full, wherever it begins, and lists."""

from __future__ import annotations

import weakref

import pytest

from rdmapost.inflight import InFlight

FIRST = 16
"""Entries that the ring has at first."""


class Memory:
    """Stands for what a work request refers to."""


@pytest.mark.parametrize("done", [0, 1, 5, FIRST - 1, FIRST])
def test_it_grows_when_it_is_full_wherever_it_begins(done):
    """Nothing outstanding is written over, and nothing that is done comes back."""
    queue = InFlight()
    tickets, kept = [], []

    def add() -> None:
        memory = Memory()
        tickets.append(queue.next_ticket())
        kept.append(weakref.ref(memory))
        queue.add(len(kept) - 1, (memory,))

    for _ in range(FIRST):
        add()
    for at in range(done):
        assert queue.complete(tickets[at]) == at
    for _ in range(3 * FIRST):
        add()
    assert [ref() is None for ref in kept] == [at < done for at in range(4 * FIRST)]
    for at in range(done, 4 * FIRST):
        assert queue.complete(tickets[at]) == at
        assert kept[at]() is None
    assert queue.outstanding == 0


@pytest.mark.parametrize(
    "steps", [(0, 1, 2), (0, 2), (1, 2), (2,), (0, 1, 3), (1, 4), (0, 3), (3,)]
)
def test_a_list_is_let_go_with_its_last(steps):
    """Completed one by one or several at once; what comes after it is on its own."""
    queue = InFlight()
    memory, other = Memory(), Memory()
    refs = weakref.ref(memory), weakref.ref(other)
    first = queue.next_ticket()
    queue.add_list([10, 11, 12], [(memory,)] * 3)
    queue.add_list([13, 14], [(other,)] * 2)
    del memory, other
    for step in steps:
        assert queue.complete(first + step) == 10 + step
        assert queue.outstanding == 4 - step
        assert [ref() is None for ref in refs] == [step >= 2, step >= 4]
    for step in range(steps[-1] + 1, 5):
        assert queue.complete(first + step) == 10 + step
    assert [ref() for ref in refs] == [None, None]
    assert queue.outstanding == 0


@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_latest_are_taken_back_from_a_list_that_has_begun(done, count):
    """What the device refused of a list; what it took is still known by its ticket."""
    queue = InFlight()
    first = queue.next_ticket()
    queue.add_list([10, 11, 12, 13, 14], [()] * 5)
    for at in range(done):
        assert queue.complete(first + at) == 10 + at
    queue.forget_last(count)
    assert queue.outstanding == 5 - done - count
    for at in range(done, 5 - count):
        assert queue.complete(first + at) == 10 + at
    assert queue.complete(first + 5 - count) is None
    assert queue.outstanding == 0


@pytest.mark.parametrize("name", ["complete", "forget_last"])
@pytest.mark.parametrize("wrong", [-1, 1 << 64, "1", 1.0, None])
def test_what_is_no_number_of_64_bits_changes_nothing(name, wrong):
    queue = InFlight()
    ticket = queue.next_ticket()
    queue.add(7, ())
    with pytest.raises((TypeError, OverflowError)):
        getattr(queue, name)(wrong)
    assert queue.outstanding == 1
    assert queue.complete(ticket) == 7


def test_the_largest_number_is_one_like_any_other():
    queue = InFlight()
    queue.add_list([1, 2, 3], [()] * 3)
    assert queue.complete((1 << 64) - 1) is None
    assert queue.outstanding == 3
    queue.forget_last((1 << 64) - 1)
    assert queue.outstanding == 0


@pytest.mark.parametrize(("name", "args"), [("add", (1,)), ("add_list", ([1], ((),)))])
def test_an_entry_is_taken_whole_or_not_at_all(name, args):
    queue = InFlight()
    with pytest.raises(TypeError):
        getattr(queue, name)(*args)
    assert queue.outstanding == 0


def test_an_empty_list_is_no_entry():
    queue = InFlight()
    ticket = queue.next_ticket()
    queue.add_list([], [])
    queue.add(5, ())
    assert queue.complete(ticket) == 5
