"""Exceptions of the caller's own code, while a post reads what it is given, come out unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support import watching, writes
from support.watching import Counted, Mine, closed_elsewhere, raises

import rdmapost as rp

watched = watching.watched


@pytest.mark.parametrize("error", [Mine("x"), KeyError("x"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["number", "sge", "property", "iterator", "sg_list"])
def test_exception_of_the_callers_code_comes_out_unchanged(watched, error, at):
    """Nothing is posted, whatever precedes it in the list."""

    class Odd(rp.RdmaWrite):
        rkey = property(lambda self: raises(error)(), lambda self, value: None)

    def generate(first: Any) -> Iterator[Any]:
        yield first
        raise error

    good = watched.write()
    wrs: Any = {
        "number": [good, watched.write(rkey=Counted(1, raises(error)))],
        "sge": [good, rp.Send(rp.SGE(1, 2, Counted(3, raises(error))))],  # type: ignore[arg-type]
        "property": [good, Odd(watched.mr[:8])],
        "iterator": generate(good),
        "sg_list": [good, rp.Send(generate(watched.mr[:8]))],  # type: ignore[arg-type]
    }[at]
    with pytest.raises(type(error)) as caught:
        watched.qp.post_send(wrs)
    assert caught.value is error
    watched.nothing_posted()
    if at not in ("iterator", "sg_list"):  # exhausted by now
        with pytest.raises(type(error)) as caught:
            watched.qp.prepare(wrs)
        assert caught.value is error
    watched.qp.post_send(good)
    assert watched.cq.wait(1)[0].status is rp.WCStatus.SUCCESS


class OddKey(rp.RdmaWrite):
    """Its rkey cannot be read."""

    error: Any

    @property
    def rkey(self) -> int:  # type: ignore[override]
        raise self.error

    @rkey.setter
    def rkey(self, value: int) -> None: ...


@pytest.mark.parametrize(
    "error", [ValueError, AttributeError, OverflowError, ZeroDivisionError, TypeError, BufferError]
)
def test_post_error_gives_the_exception_of_a_wrong_value_as_its_reason(watched, error):
    """Reading a field may raise it: a PostError says which work request it was."""
    odd = OddKey(watched.mr[:8])
    odd.error = error("no key")
    assert watched.refused(odd) == "no key"
    if error is not TypeError:
        wr = watched.write(rkey=Counted(1, raises(error("no key"))))
        assert watched.refused(wr) == "no key"


def test_exception_whose_str_raises_comes_out_as_what_its_str_raises(watched):
    class Mute(ValueError):
        def __str__(self) -> str:
            raise Mine("no text")

    odd = OddKey(watched.mr[:8])
    odd.error = Mute()
    for wr in (odd, watched.write(rkey=Counted(1, raises(Mute())))):
        with pytest.raises(Mine, match="no text"):
            watched.qp.post_send(wr)
        watched.nothing_posted()


class Failing:
    """A sequence without __iter__, whose first item fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        raise self.error


class FailingAtOnce(Failing):
    def __iter__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [Failing, FailingAtOnce])
def test_exception_of_a_list_of_work_requests_or_sges_propagates_unchanged(watched, kind):
    """Only for what is not a sequence does the error say what it should be."""
    for error in (Mine("mine"), ValueError("no item")):
        with pytest.raises(type(error)) as caught:
            watched.qp.post_send(kind(error))
        assert caught.value is error
    with pytest.raises(Mine):
        watched.qp.post_send(rp.Send(kind(Mine("mine"))))
    assert watched.refused(rp.Send(kind(ValueError("no item")))) == "no item"
    watched.nothing_posted()


def test_type_error_of_an_iterator_of_work_requests_propagates(watched):
    with pytest.raises(TypeError, match="not today"):
        watched.qp.post_send(FailingAtOnce(TypeError("not today")))
    assert watched.refused(rp.Send(FailingAtOnce(TypeError("not today")))) == "not today"


def test_tag_handle_that_cannot_be_set_is_the_callers_error(watched):
    """The receive is already on the matching list, and counted as outstanding."""

    def refuse(self: Any, value: Any) -> None:
        if value is not None:
            raise Mine("no")

    class Stubborn(rp.TagAdd):
        handle = property(lambda self: None, refuse)

    with pytest.raises(Mine):
        watched.srq.post_srq_ops(Stubborn(tag=1))
    assert (watched.srq.outstanding_tags, watched.srq.outstanding_ops) == (1, 1)


def test_queue_pair_can_be_closed_in_another_thread_while_a_refusal_is_explained(watched):
    class Closing(int):
        def __repr__(self) -> str:
            ended.append(closed_elsewhere(watched.qp))
            return "odd"

    ended: list[bool] = []
    with pytest.raises(rp.PostError, match="remote_addr=odd"):
        watched.qp.post_send(watched.write(remote_addr=Closing(-1)))
    assert ended
    assert all(ended)


def test_srq_can_be_closed_in_another_thread_while_a_tag_handle_is_set(watched):
    def close(self: Any, value: Any) -> None:
        if value is not None:
            ended.append(closed_elsewhere(watched.srq))

    class Closing(rp.TagAdd):
        handle = property(lambda self: None, close)

    ended: list[bool] = []
    watched.srq.post_srq_ops(Closing(tag=1))
    assert ended == [True]


def test_exception_in_other_sges_of_a_prepared_work_request_comes_out_unchanged(watched):
    [item] = watched.qp.prepare(watched.write())
    wrong = watched.mr[8:16]._replace(lkey=Counted(1, raises(Mine("x"))))  # type: ignore[arg-type]
    for sges in (wrong, [wrong], Failing(Mine("x"))):
        with pytest.raises(Mine):
            item.sg_list = sges
    assert item.sg_list == (watched.mr[:8],)


def test_exception_of_a_generator_of_work_requests_propagates_and_nothing_is_posted(rc):
    """Nothing is posted, and nothing is counted as posted."""

    def generate():
        yield writes(rc, 1)[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rc.a.post_send(generate())
    assert rc.a.outstanding.send == 0
    rc.works()


def test_exception_of_reading_a_field_propagates_and_nothing_is_posted(rc):
    class Odd(rp.RdmaWrite):
        @property
        def remote_addr(self) -> int:
            raise KeyError("mine")

        @remote_addr.setter
        def remote_addr(self, value: int) -> None:
            pass

    with pytest.raises(KeyError, match="mine"):
        rc.a.post_send([*writes(rc, 2), Odd(rc.mine[:1])])
    assert rc.a.outstanding.send == 0
    rc.works()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 knows no __buffer__")
def test_exception_of_a_headers_own_code_comes_out_unchanged(watched):
    class Odd:
        def __buffer__(self, flags: int) -> memoryview:
            raise Mine("x")

    with pytest.raises(Mine):
        watched.qp.post_send(rp.TSO(rp.SGE(1, 2, 3), hdr=Odd(), mss=1))
    watched.nothing_posted()
