"""Enumerations: they print as names, compare as numbers, and a member that is 0 is no trap."""

from __future__ import annotations

import enum
import inspect
import json
import pickle

import pytest

import rdmapost as rp
from rdmapost.enums import reported

PUBLIC = [
    each
    for name in rp.__all__
    if inspect.isclass(each := getattr(rp, name)) and issubclass(each, enum.Enum)
]
ENUMS = [each for each in PUBLIC if not issubclass(each, enum.Flag)]
FLAGS = [each for each in PUBLIC if issubclass(each, enum.Flag)]
FALSE = [rp.WCStatus.SUCCESS, rp.AtomicCap.NONE]
"""Their classes say that they are false: no failure, no atomics."""

every_class = pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)


def test_all_public_enumerations_are_found() -> None:
    assert len(ENUMS) > 12
    assert len(FLAGS) > 10


@every_class
def test_enumeration_member_prints_its_name(cls: type[enum.IntEnum]) -> None:
    for member in cls:
        assert str(member) == f"{member}" == f"{member!s}" == "%s" % member == member.name  # noqa: UP031
        assert f"{member:>30}" == member.name.rjust(30)


@every_class
def test_enumeration_member_equals_its_number(cls: type[enum.IntEnum]) -> None:
    for member in cls:
        number = int(member)
        assert member == number
        assert hash(member) == hash(number)
        assert f"{member:d} {member:#06x}" == f"{number:d} {number:#06x}"
        assert json.dumps([member]) == f"[{number}]"
        assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize("cls", ENUMS, ids=lambda cls: cls.__name__)
def test_enumeration_member_that_is_zero_is_true_unless_it_means_none(
    cls: type[enum.IntEnum],
) -> None:
    for member in cls:
        assert bool(member) is (member not in [each for each in FALSE if type(each) is cls])


def test_flags_print_as_their_names() -> None:
    assert str(rp.Access.LOCAL_WRITE | rp.Access.REMOTE_READ) == "LOCAL_WRITE|REMOTE_READ"
    assert f"{rp.Access.LOCAL_WRITE | rp.Access.REMOTE_READ:#x}" == "0x5"


@pytest.mark.parametrize("cls", FLAGS, ids=lambda cls: cls.__name__)
def test_no_flags_print_as_0_and_are_false(cls: type[enum.IntFlag]) -> None:
    assert str(cls(0)) == f"{cls(0)}" == "0"
    assert not cls(0)


def test_unknown_flag_prints_as_its_bit() -> None:
    assert str(rp.Access(1 << 30)) == "0x40000000"


def test_unknown_number_from_a_device_prints_as_the_number() -> None:
    unknown = reported(rp.WCStatus, 77)
    assert str(unknown) == f"{unknown}" == f"{unknown:d}" == "77"
    assert unknown


def test_send_completion_has_an_opcode_that_is_true() -> None:
    """``if wc.opcode`` asks whether the device reported one."""
    assert rp.WCOpcode.SEND == 0
    assert rp.WCOpcode.SEND
