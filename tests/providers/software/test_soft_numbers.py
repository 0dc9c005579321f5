"""Numbers and keys in use are not assigned again, however many were assigned before."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import soft_context, write

import rdmapost as rp
from rdmapost import QPType, WCStatus
from rdmapost.providers.software import state
from rdmapost.providers.software.numbers import Numbers, RandomNumbers

context = soft_context


def device_of(context: rp.Context) -> Any:
    return state.context_of(context._handle, "test").device


@pytest.fixture
def numbers(context: rp.Context, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets which numbers are left for queue pairs and SRQs."""

    def left(first: int, last: int, start: int) -> None:
        monkeypatch.setattr(device_of(context), "numbers", Numbers(first, last, start))

    return left


@contextlib.contextmanager
def no_more(call: str, what: str) -> Iterator[None]:
    with pytest.raises(rp.VerbsError, match=f"all {what} are in use") as caught:
        yield
    assert (caught.value.call, caught.value.errno) == (call, errno.ENOMEM)


def works(pair: Any) -> None:
    pair.a.post_send(write(pair, 1))
    assert [wc.status for wc in pair.wait()] == [WCStatus.SUCCESS]


@pytest.mark.parametrize("kind", [Numbers, RandomNumbers])
def test_allocator_gives_every_number_once_and_no_other(kind):
    numbers, given = kind(3, 9), set()
    for _ in range(7):
        given.add(numbers.choose("verb", "numbers", given.__contains__))
    assert given == set(range(3, 10))
    with no_more("verb", "numbers"):
        numbers.choose("verb", "numbers", given.__contains__)
    given.remove(5)
    assert numbers.choose("verb", "numbers", given.__contains__) == 5


def test_allocator_gives_a_freed_number_last():
    numbers = Numbers(2, 5)
    given = [numbers.choose("verb", "numbers", set().__contains__) for _ in range(6)]
    assert given == [2, 3, 4, 5, 2, 3]


# ---- queue pairs and SRQs ------------------------------------------------------------


def test_queue_pair_numbers_wrap_around_and_skip_those_in_use(context, pd, cq, connect, stack):
    """As after 2^24 queue pairs."""
    pair, numbers = connect(), device_of(context).numbers
    numbers._next = pair.a.qp_num
    made = [stack.enter_context(rp.QP(pd, QPType.RC, cq)) for _ in range(3)]
    assert not {pair.a.qp_num, pair.b.qp_num} & {qp.qp_num for qp in made}
    works(pair)
    for qp in made:
        qp.close()
    works(pair)


def test_reserved_numbers_are_given_to_no_queue_pair(context, pd, cq, stack):
    """0 and 1, and 0xFFFFFF, which is for multicast."""
    numbers = device_of(context).numbers
    before, numbers._next = numbers._next, 0xFFFFFE
    made = [stack.enter_context(rp.QP(pd, QPType.RC, cq)) for _ in range(2)]
    numbers._next = before
    assert [qp.qp_num for qp in made] == [0xFFFFFE, 2]


def test_queue_pair_takes_no_number_of_an_srq(pd, cq, numbers):
    numbers(7, 9, 7)
    with rp.SRQ(pd), rp.QP(pd, QPType.RC, cq) as qp, rp.SRQ(pd):
        assert qp.qp_num == 8
        with no_more("ibv_create_qp", "queue pair and SRQ numbers"):
            rp.QP(pd, QPType.RC, cq)
        with no_more("ibv_create_srq", "queue pair and SRQ numbers"):
            rp.SRQ(pd)
    with rp.QP(pd, QPType.RC, cq) as again:
        assert again.qp_num == 7


# ---- keys and handles ------------------------------------------------------------------


def test_region_keys_wrap_around_and_skip_those_in_use(context, connect, pd):
    """As after 2^23 keys."""
    pair, indices = connect(), device_of(context).memory.indices
    indices._next = (pair.theirs.lkey >> 8) & 0x7FFFFF
    with rp.MR(pd, 64) as other:
        assert other.rkey >> 8 != pair.theirs.rkey >> 8
        works(pair)
    works(pair)


@pytest.mark.parametrize(
    ("call", "make"),
    [
        ("ibv_reg_mr", lambda pd, mr: rp.MR(pd, 64)),
        ("ibv_rereg_mr", lambda pd, mr: mr.rereg(memory=bytearray(64))),
        ("ibv_alloc_mw", lambda pd, mr: rp.MW(pd, rp.MWType.TYPE_2)),
    ],
)
def test_lack_of_free_memory_keys_is_named(context, pd, monkeypatch, call, make):
    memory = device_of(context).memory
    with rp.MR(pd, 64) as mr:
        index = mr.lkey >> 8
        monkeypatch.setattr(memory, "indices", Numbers(index, index))
        with no_more(call, "memory keys"):
            make(pd, mr)
        assert not mr.closed


def test_object_handles_wrap_around_and_skip_those_in_use(context, pd, cq, monkeypatch):
    """As after 2^32 handles."""
    handle = pd._handle.handle
    monkeypatch.setattr(state, "_handles", Numbers(handle, handle + (1 << 20)))
    with rp.PD(context) as other:
        assert other._handle.handle != handle
    with rp.QP(pd, QPType.RC, cq):
        pass
    monkeypatch.setattr(state, "_handles", Numbers(handle, handle))
    with no_more("ibv_alloc_pd", "handles"):
        rp.PD(context)
