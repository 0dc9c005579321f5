"""Exceptions survive being raised in another process, and being copied."""

from __future__ import annotations

import copy
import errno
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import ALL, LIMIT, Pair, run_python

import rdmapost as rp
from rdmapost import cli, errors
from rdmapost.connect import ConnectError

for _package in (rp, cli):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        if not _module.name.endswith(".__main__"):
            importlib.import_module(_module.name)


def _below(error_type: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in error_type.__subclasses__():
        yield child
        yield from _below(child)


EXCEPTIONS = sorted(
    {
        error_type
        for error_type in _below(BaseException)
        if error_type.__module__.split(".")[0] == "rdmapost"
    },
    key=lambda error_type: (error_type.__module__, error_type.__qualname__),
)
"""Every exception that a module of the package defines."""

COMPLETION = rp.WC(
    wr_id=7,
    status=rp.WCStatus.RNR_RETRY_EXC_ERR,
    opcode=None,
    byte_len=0,
    imm_data=None,
    invalidated_rkey=None,
    qp_num=0x11,
    src_qp=0,
    wc_flags=rp.WCFlags(0),
    vendor_err=0x81,
    pkey_index=0,
    slid=0,
    sl=0,
    dlid_path_bits=0,
)

SAMPLES: dict[str, Any] = {
    "str": "what happened",
    "int": errno.EINVAL,
    "int | None": 2,
    "bool": True,
    "tuple[str, ...]": ("SEND", "SEND_WITH_IMM"),
    "tuple[RdmaError, ...]": (),  # exceptions that are alike are not equal
    "WC": COMPLETION,
    "WC | None": COMPLETION,
    "WCStatus": rp.WCStatus.LOC_PROT_ERR,
    "Context": SimpleNamespace(name="soft0"),
    "Any": rp.Send(rp.SGE(4096, 8, 5), wr_id=9),
}
"""An argument for every annotation of their parameters."""


def sample(error_type: type[BaseException]) -> BaseException:
    """Create an exception, as the package does, and add attributes and notes, as any code may."""
    if not inspect.isfunction(error_type.__init__):
        made = error_type("what happened")
    else:
        parameters = inspect.signature(error_type).parameters.values()
        by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        given = {p.name: SAMPLES[p.annotation] for p in parameters}
        made = error_type(
            *[value for name, value in given.items() if name not in by_name],
            **{name: given[name] for name in by_name},
        )
    made.add_note("seen in the test")
    made.seen_by = ["a", {"b": 1}]  # type: ignore[attr-defined]
    return made


OF_OSERROR = ("errno", "strerror", "filename", "filename2")


def whole(error: BaseException) -> dict[str, Any]:
    """Return all that is visible of an exception."""
    return {
        "type": type(error),
        "args": error.args,
        "str": str(error),
        "repr": repr(error),
        **{name: getattr(error, name, None) for name in OF_OSERROR},
        **vars(error),
    }


def raise_it(error: BaseException) -> None:
    raise error


def refuse_a_post() -> None:
    """Post 8 bytes with an atomic whose address is not a multiple of 8."""
    with (
        rp.open_device("soft0") as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, 64, ALL) as mr,
        rp.QP(pd, rp.QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        write = rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey)
        add = rp.AtomicFetchAndAdd(mr[:8], remote_addr=mr.addr + 1, rkey=mr.rkey)
        qp.post_send([write, add])


def in_another_process(call: Callable[..., None], *arguments: Any) -> BaseException:
    """Return what a call raises in a pool's process."""
    # A pool whose thread has died of an unpickling error never answers.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply_async(call, arguments).get(LIMIT)
        except multiprocessing.TimeoutError:
            pytest.fail("nothing came back from the other process")
        except BaseException as error:
            return error
    pytest.fail("nothing was raised")


def test_every_public_exception_is_tested() -> None:
    assert {getattr(errors, name) for name in errors.__all__} <= set(EXCEPTIONS)
    assert ConnectError in EXCEPTIONS


@pytest.mark.parametrize("error_type", EXCEPTIONS, ids=lambda error_type: error_type.__qualname__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_exception_survives_pickling_whole(error_type: type[BaseException], protocol: int) -> None:
    error = sample(error_type)
    assert whole(pickle.loads(pickle.dumps(error, protocol))) == whole(error)


@pytest.mark.parametrize("error_type", EXCEPTIONS, ids=lambda error_type: error_type.__qualname__)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_exception_survives_copying_whole(
    error_type: type[BaseException], copied: Callable[[BaseException], BaseException]
) -> None:
    error = sample(error_type)
    other = copied(error)
    assert other is not error
    assert whole(other) == whole(error)
    assert (other.seen_by is error.seen_by) == (copied is copy.copy)  # type: ignore[attr-defined]


def test_every_exception_comes_back_from_a_pool() -> None:
    made = [sample(error_type) for error_type in EXCEPTIONS]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        answers = [pool.apply_async(raise_it, (error,)) for error in made]
        for error, answer in zip(made, answers, strict=True):
            with pytest.raises(type(error)) as caught:
                answer.get(LIMIT)
            assert whole(caught.value) == whole(error)


def test_refused_post_in_a_pool_names_which_and_why() -> None:
    """The work request names a region, which only its own process has: it arrives as its repr."""
    error = in_another_process(refuse_a_post)
    assert isinstance(error, rp.PostError)
    assert (error.index, error.posted, error.count) == (1, 1, 2)
    assert (error.call, error.errno) == ("ibv_post_send", errno.EINVAL)
    assert "not a multiple of 8" in str(error)
    assert "work request 2 of 2 (index 1)" in str(error)
    assert isinstance(error.wr, str)
    assert error.wr.startswith("AtomicFetchAndAdd(wr_id=")
    assert "sg_list=SGE(addr=0x" in error.wr


def test_pool_of_a_program_ends_when_a_worker_raises() -> None:
    """A whole program: Pool.map raises what the worker raised, and ends."""
    program = """
import multiprocessing, rdmapost as rp

def work(n):
    raise rp.VerbsError("ibv_reg_mr", 12, "raise RLIMIT_MEMLOCK")

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try: pool.map(work, range(3))
        except rp.VerbsError as error: print(error.call, error.errno, error.hint, sep="; ")
"""
    done = run_python(program)
    assert done.stdout == "ibv_reg_mr; 12; raise RLIMIT_MEMLOCK\n", done.stderr


def test_copies_of_a_post_error_name_the_same_resources(rc: Pair) -> None:
    with pytest.raises(rp.PostError) as caught:
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=0, rkey=0, send_flags=1 << 20))
    error = caught.value
    assert error.wr.sg_list.owner is rc.mine
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert copied.wr.sg_list.owner is rc.mine
        assert whole(copied) == whole(error)


class _Unprintable:
    def __reduce__(self) -> str:
        raise ValueError("not to be pickled")

    def __repr__(self) -> str:
        raise ValueError("not to be printed")


class _Unloadable:
    """What can be pickled and not unpickled, as an exception of another package may be."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)

    def __repr__(self) -> str:
        return "<unloadable>"


def test_exception_with_any_content_can_be_pickled_and_copied() -> None:
    error = rp.RdmaError("text", threading.Lock(), _Unloadable())
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.unprintable = _Unprintable()  # type: ignore[attr-defined]
    error.unloadable = _Unloadable()  # type: ignore[attr-defined]
    error.itself = error  # type: ignore[attr-defined]
    error.nested = sample(rp.PostError)  # type: ignore[attr-defined]
    came = pickle.loads(pickle.dumps(error))
    assert came.args[0] == "text"
    assert "lock" in came.args[1]
    assert came.args[2] == came.unloadable == "<unloadable>"
    assert "lock" in came.lock
    assert "_Unprintable object at" in came.unprintable
    assert whole(came.nested) == whole(error.nested)  # type: ignore[attr-defined]
    assert came.itself is came
    copied = copy.deepcopy(error)
    assert copied.itself is copied  # type: ignore[attr-defined]
    assert copied.lock is error.lock  # type: ignore[attr-defined]
    assert copied.nested is not error.nested  # type: ignore[attr-defined]


class _Slotted:
    """What only protocol 2 and later can pickle."""

    __slots__ = ("value",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_attribute_of_an_exception_that_the_protocol_can_pickle_is_kept(protocol: int) -> None:
    error = rp.RdmaError("text")
    error.slotted = _Slotted()  # type: ignore[attr-defined]
    error.slotted.value = 5  # type: ignore[attr-defined]
    came = pickle.loads(pickle.dumps(error, protocol))
    if protocol < 2:
        assert "_Slotted object at" in came.slotted
    else:
        assert came.slotted.value == 5


def test_attributes_set_on_an_oserror_are_kept_by_pickling() -> None:
    error = rp.VerbsError("ibv_open_device", errno.EACCES)
    error.filename, error.errno = "/dev/infiniband/uverbs0", errno.EPERM
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (other.filename, other.errno) == ("/dev/infiniband/uverbs0", errno.EPERM)
        assert other.args == error.args


class Mine(rp.VerbsError):
    """A user's exception, with its own constructor."""

    def __init__(self) -> None:
        super().__init__("ibv_mine", errno.EIO, "a hint")


class Reduced(rp.RdmaError):
    """A user's own exception that defines its own pickling."""

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.number + 1,)


def test_pickling_uses_the_reduce_of_a_derived_exception() -> None:
    assert pickle.loads(pickle.dumps(Reduced(5))).number == 6


def test_exception_class_of_a_user_survives_pickling_and_copying() -> None:
    error = Mine()
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert whole(other) == whole(error)


def post_error(index: int | None, count: int) -> str:
    return str(
        rp.PostError("ibv_post_send", errno.EINVAL, "why", index=index, posted=index, count=count)
    )


def test_post_error_says_which_work_request_was_refused_and_why():
    assert post_error(3, 8) == "ibv_post_send: work request 4 of 8 (index 3): why [EINVAL]"
    assert post_error(0, 1) == "ibv_post_send: why [EINVAL]"
    assert post_error(None, 1) == "ibv_post_send: why [EINVAL]"
    assert post_error(None, 8) == "ibv_post_send: one of 8 work requests: why [EINVAL]"


def test_errors_derive_from_the_matching_builtin_exceptions():
    error = rp.VerbsError("ibv_reg_mr", errno.ENOMEM, "raise the limit")
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror) == (errno.ENOMEM, "Cannot allocate memory")
    assert str(error) == "ibv_reg_mr: ENOMEM (12, Cannot allocate memory): raise the limit"
    assert str(rp.VerbsError("x", 9999)) == "x: errno 9999"
    assert issubclass(rp.WaitTimeout, TimeoutError)
    assert issubclass(rp.ClosedError, ValueError)
    assert issubclass(rp.PostError, rp.VerbsError)
    unsupported = rp.UnsupportedError("ibv_alloc_mw", errno.EOPNOTSUPP)
    assert str(unsupported) == "ibv_alloc_mw is not supported"


@pytest.mark.parametrize("name", rp.errors.__all__)
def test_every_error_is_an_rdma_error(name):
    assert issubclass(getattr(rp, name), rp.RdmaError)
