"""The fields of a prepared work request: what they accept, and that nothing else has them."""

from __future__ import annotations

import pytest

import rdmapost as rp


@pytest.fixture
def one(rc):
    """A prepared work request with fields of all widths."""
    there = {"remote_addr": rc.theirs.addr, "rkey": rc.theirs.rkey}
    batch = rc.a.prepare(rp.AtomicCmpAndSwp(rc.mine[:8], compare_add=1, swap=2, **there))
    yield batch[0]
    batch.close()


@pytest.fixture
def write(rc):
    there = {"remote_addr": rc.theirs.addr, "rkey": rc.theirs.rkey}
    batch = rc.a.prepare(rp.RdmaWriteWithImm(rc.mine[:8], imm_data=3, **there))
    yield batch[0]
    batch.close()


@pytest.mark.parametrize("name", ["compare_add", "swap"])
@pytest.mark.parametrize("value", [0, 1, 0xFEDC_BA98_7654_3210, (1 << 64) - 1])
def test_64_bit_field_of_a_prepared_work_request_is_kept_whole(one, name, value):
    names = ("compare_add", "swap", "remote_addr", "rkey")
    others = {other: getattr(one, other) for other in names if other != name}
    setattr(one, name, value)
    assert getattr(one, name) == value
    assert {other: getattr(one, other) for other in others} == others


@pytest.mark.parametrize("name", ["rkey", "imm_data"])
@pytest.mark.parametrize("value", [0, 1, 0xFEDC_BA98, (1 << 32) - 1])
def test_32_bit_field_of_a_prepared_work_request_is_kept_whole(write, name, value):
    names = ("rkey", "imm_data", "remote_addr")
    others = {other: getattr(write, other) for other in names if other != name}
    setattr(write, name, value)
    assert getattr(write, name) == value
    assert {other: getattr(write, other) for other in others} == others


@pytest.mark.parametrize(("name", "bits"), [("remote_addr", 64), ("rkey", 32), ("imm_data", 32)])
@pytest.mark.parametrize("wrong", [-1, "over", 1.0, "1", None])
def test_number_too_large_for_a_prepared_field_is_refused_and_changes_nothing(
    write, name, bits, wrong
):
    before = getattr(write, name)
    value = 1 << bits if wrong == "over" else wrong
    said, error = rf"{name}=.* is not in 0\.\.2\^{bits}-1", ValueError
    if not isinstance(value, int):
        error = TypeError
        said = f"{name}: expected int, got {type(value).__name__}"
    with pytest.raises(error, match=said):
        setattr(write, name, value)
    assert getattr(write, name) == before


@pytest.mark.parametrize("name", ["remote_addr", "rkey", "imm_data"])
def test_field_of_a_prepared_work_request_cannot_be_deleted(write, name):
    before = getattr(write, name)
    with pytest.raises(AttributeError, match=f"{name} cannot be deleted"):
        delattr(write, name)
    assert getattr(write, name) == before


def test_field_of_a_prepared_class_is_the_descriptor_itself(write):
    assert type(write).rkey is type(write).__dict__["rkey"]


@pytest.mark.parametrize("other", [object(), None, 5, b"x" * 512])
def test_prepared_field_refuses_an_object_of_another_class(write, other):
    field = type(write).__dict__["rkey"]
    with pytest.raises(TypeError, match="of another class"):
        field.__set__(other, 1)
    if other is not None:
        with pytest.raises(TypeError, match="of another class"):
            field.__get__(other)


def test_prepared_field_that_is_no_number_cannot_be_read_as_a_number(connect):
    """The address handle is a pointer to C, and the SGEs another class's."""
    ud = connect(rp.QPType.UD)
    to = {"ah": ud.a.ah_to(ud.b.endpoint()), "remote_qpn": ud.b.qp_num}
    with ud.a.prepare(rp.Send(ud.mine[:8], **to)) as batch:
        number = type(type(batch[0]).__dict__["remote_qpn"])
        refused = 0
        for index in range(-1, 12):
            field = number(rp.Send, index)
            try:
                assert field.__get__(batch[0]) in (ud.b.qp_num, 0, 0x11111111)
            except TypeError:
                with pytest.raises(TypeError, match="the field is not a number"):
                    field.__set__(batch[0], 16)
                refused += 1
        assert refused >= 8
        batch.post()
    assert ud.wait()[0].wr_id == 0


def test_prepared_work_request_that_no_batch_made_has_no_fields(write):
    made = type(write).__new__(type(write))
    with pytest.raises(TypeError, match="of another class"):
        made.rkey  # noqa: B018 - reading it is what is tested
    with pytest.raises(TypeError, match="of another class"):
        made.rkey = 5


def test_prepared_work_request_and_its_fields_cannot_be_initialised_again(write):
    """Another one would be read with the fields of this class."""
    before = write.rkey
    with pytest.raises(TypeError, match="initialised"):
        type(write).__init__(write, write._batch, 0)
    with pytest.raises(TypeError, match="initialised"):
        type(write).__dict__["rkey"].__init__(rp.Send, 0)
    assert write.rkey == before
