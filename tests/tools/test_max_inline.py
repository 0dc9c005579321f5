"""The largest inline size that a device grants, and how it is found."""

from __future__ import annotations

import contextlib
import errno
from decimal import Decimal
from fractions import Fraction

import pytest
from support import interrupt_everywhere, needs

import rdmapost as rp
from rdmapost import QPType, SendFlags

MAX_ATTEMPTS = 2 * 17 + 1


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_max_inline_is_the_largest_that_the_device_grants(pd, cq, qp_type):
    """A queue pair gets it, and no queue pair gets a byte more."""
    found = rp.max_inline(pd, qp_type, cq)
    with rp.QP(pd, qp_type, cq, max_inline_data=found) as qp:
        assert qp.max_inline_data >= found
    more = None
    with (
        contextlib.suppress(rp.VerbsError),
        rp.QP(pd, qp_type, cq, max_inline_data=found + 1) as qp,
    ):
        more = qp.max_inline_data
    assert more is None or more <= found


def test_max_inline_bytes_can_be_posted_inline(connect, pd, cq, context):
    found = rp.max_inline(pd, QPType.RC, cq)
    needs(found, "inline data", context)
    pair = connect(max_inline_data=found)
    data = bytes(i % 251 for i in range(found))
    inline = rp.SGE.from_buffer(bytearray(data))
    pair.a.post_send(
        pair.wr(rp.RdmaWrite, inline, send_flags=SendFlags.INLINE | SendFlags.SIGNALED)
    )
    pair.wait()
    assert bytes(pair.theirs.buffer[:found]) == data


@pytest.mark.parametrize("enough", [0, 1, 63, 64, 65, 100])
def test_max_inline_returns_at_most_at_most(pd, cq, context, enough):
    granted = rp.max_inline(pd, QPType.RC, cq)
    assert rp.max_inline(pd, QPType.RC, cq, at_most=enough) == min(enough, granted)


def test_max_inline_leaves_no_queue_pair_open(context, cq):
    pd = rp.PD(context)
    rp.max_inline(pd, QPType.RC, cq, max_send_sge=2, max_send_wr=8)
    pd.close()
    assert pd.closed


@pytest.mark.parametrize("at_most", [Fraction(1, 100), Decimal(64), 64.5, 64.0, "64", None])
def test_max_inline_refuses_an_at_most_that_is_not_an_integer(pd, cq, at_most, monkeypatch):
    """It is refused before the search, which would not end."""
    monkeypatch.setattr(
        rp.tools.max_inline, "QP", lambda *_, **__: pytest.fail("a queue pair was made")
    )
    words = f"^at_most: expected int, got {type(at_most).__name__}"
    with pytest.raises(TypeError, match=words):
        rp.max_inline(pd, QPType.RC, cq, at_most=at_most)


@pytest.mark.parametrize("at_most", [-1, (1 << 31) + 1])
def test_max_inline_refuses_an_at_most_that_does_not_fit(pd, cq, at_most):
    with pytest.raises(ValueError, match=f"at_most={at_most} is not in"):
        rp.max_inline(pd, QPType.RC, cq, at_most=at_most)


def test_max_inline_of_a_refused_queue_pair_raises_its_error(pd, cq, context):
    """The device refuses another argument, not the inline data."""
    limit = context.attr.max_qp_wr
    with pytest.raises(rp.VerbsError, match=f"max_send_wr={limit + 1} is more than the device's"):
        rp.max_inline(pd, QPType.RC, cq, max_send_wr=limit + 1)
    with pytest.raises(TypeError, match="max_inline_data"):
        rp.max_inline(pd, QPType.RC, cq, max_inline_data=8)


class Driver:
    """Stands in for QP, with the habits of drivers that are not available here.

    Args:
        limit: the bytes that it takes.
        habit: "refuses" more than the limit, "rounds" a request up to the next multiple of 48 (at
            most the limit), or always "grants" the limit.
        code: the errno of a refusal.
    """

    def __init__(self, limit: int, habit: str, code: int = errno.EINVAL) -> None:
        self.limit, self.habit, self.code = limit, habit, code
        self.attempts = self.open = 0
        self.stuck = 0
        """The number of the queue pair that cannot be destroyed, from 1."""

    def __call__(self, *_: object, max_inline_data: int) -> Driver:
        self.attempts += 1
        if self.habit != "grants" and max_inline_data > self.limit:
            raise rp.VerbsError("ibv_create_qp", self.code)
        self.max_inline_data = max_inline_data
        if self.habit == "rounds":
            self.max_inline_data = min(self.limit, -(-max_inline_data // 48) * 48)
        elif self.habit == "grants":
            self.max_inline_data = self.limit
        self.open += 1
        return self

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.open -= 1
        if self.attempts == self.stuck:
            raise rp.VerbsError("ibv_destroy_qp", self.code)


@pytest.mark.parametrize("habit", ["refuses", "rounds", "grants"])
@pytest.mark.parametrize(
    "limit", [0, 1, 28, 63, 64, 65, 127, 128, 188, 512, 988, 1024, 4000, 65535, 65536]
)
def test_max_inline_finds_the_limit_whatever_a_driver_grants(monkeypatch, limit, habit):
    driver = Driver(limit, habit)
    monkeypatch.setattr(rp.tools.max_inline, "QP", driver)
    assert rp.max_inline(None, QPType.RC, None) == limit
    assert driver.attempts <= MAX_ATTEMPTS
    assert driver.open == 0


def test_queue_pair_that_cannot_be_destroyed_is_not_taken_for_one_that_was_refused(monkeypatch):
    """Drivers return EINVAL in both cases."""
    driver = Driver(100, "refuses")
    driver.stuck = 2
    monkeypatch.setattr(rp.tools.max_inline, "QP", driver)
    monkeypatch.setattr(rp.tools.max_inline, "close_quietly", lambda _: None)
    with pytest.raises(rp.VerbsError, match=r"^ibv_destroy_qp"):
        rp.max_inline(None, QPType.RC, None)
    assert driver.attempts == 2


def test_interrupted_max_inline_leaves_no_queue_pair_open(pd, cq):
    """Only the first probe is interrupted; the others are alike."""
    assert interrupt_everywhere(lambda: rp.max_inline(pd, QPType.RC, cq, at_most=0)) > 50


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EPERM, errno.EIO])
def test_max_inline_reports_a_refusal_for_another_reason(monkeypatch, code):
    driver = Driver(100, "refuses", code)
    monkeypatch.setattr(rp.tools.max_inline, "QP", driver)
    with pytest.raises(rp.VerbsError, match=errno.errorcode[code]):
        rp.max_inline(None, QPType.RC, None)
    assert driver.open == 0


def test_max_inline_refuses_the_option_max_inline_data(pd, cq):
    with pytest.raises(TypeError, match=r"multiple values for keyword argument .max_inline_data."):
        rp.max_inline(pd, QPType.RC, cq, max_inline_data=64)
