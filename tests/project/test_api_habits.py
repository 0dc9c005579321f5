"""What a user learns once and finds true everywhere: numbers, timeouts, exceptions."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import ROOT

import rdmapost as rp
from rdmapost import Access, QPState, QPType
from rdmapost._binding import native
from rdmapost.explain import explain

MODULES = ("check", "connect", "diagnose", "explain", "frames", "loopback", "pingpong")
ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


def public() -> Iterator[tuple[str, Any]]:
    for module in (rp, *(importlib.import_module(f"rdmapost.{name}") for name in MODULES)):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


# ---- numbers ------------------------------------------------------------------


def numbers() -> list[Any]:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    return [numpy.int64, numpy.uint64, numpy.uint32]


@pytest.mark.parametrize("which", range(3), ids=["int64", "uint64", "uint32"])
def test_program_with_only_numpy_numbers_works(context: rp.Context, which: int) -> None:
    """Sizes, limits, keys, offsets, counts, indices; addresses are 64 bits wide."""
    numpy = numbers()
    n: Callable[[int], Any] = numpy[which]
    address = numpy[1]
    assert context.query_port(n(1)).active_mtu
    gid = context.choose_gid(n(1), n(0))
    assert gid == context.choose_gid(1, 0)
    assert context.query_gid(n(1), n(0)) == gid.gid
    assert context.query_pkey(n(1), n(0)) == context.query_pkey(1, 0)
    with (
        rp.PD(context) as pd,
        rp.CQ(context, n(16), comp_vector=n(0)) as cq,
        rp.MR(pd, n(4096), n(int(ALL))) as mr,
        rp.QP(
            pd,
            QPType(int(n(QPType.RC))),
            cq,
            max_send_wr=n(8),
            max_recv_wr=n(8),
            max_send_sge=n(2),
            max_recv_sge=n(2),
            max_inline_data=n(16),
            port_num=n(1),
            gid_index=n(0),
        ) as qp,
    ):
        end = qp.endpoint()
        qp.connect(
            rp.Endpoint(n(end.qp_num), n(end.psn), end.gid, n(end.lid), end.mtu),
            access=n(int(ALL)),
            min_rnr_timer=n(1),
            timeout=n(14),
            retry_cnt=n(7),
            rnr_retry=n(7),
            max_rd_atomic=n(1),
            max_dest_rd_atomic=n(1),
        )
        there = {"remote_addr": address(mr.addr + 64), "rkey": n(mr.rkey)}
        sge = rp.SGE(address(mr.addr), n(8), n(mr.lkey), mr)
        mr.buffer[:8] = (5).to_bytes(8, "little")
        qp.post_recv(rp.RecvWR(mr[n(128) : n(136)], wr_id=n(1)))
        qp.post_send(
            [
                rp.RdmaWrite(sge, wr_id=n(2), send_flags=n(2), **there),
                rp.SendWithImm(sge, wr_id=n(3), imm_data=n(9)),
            ]
        )
        for wc in cq.wait(n(3), timeout=n(5)):
            wc.check()
        assert mr.buffer[64] == mr.buffer[128] == 5
        rows = pytest.importorskip("numpy").arange(2)
        count = qp.post_columns(
            rp.RdmaRead, mr.blocks(rows, n(8)), wr_id=n(4), signal_every=n(2), **there
        )
        assert count == 2
        cq.wait(n(1))[0].check()
        prepared = qp.prepare([rp.RdmaWrite(sge, **there)])
        prepared[n(0)].wr_id = n(6)
        prepared[0].remote_addr += address(8)
        prepared.post()
        (wc,) = cq.wait(n(1), max_entries=n(4))
        assert wc.check().wr_id == 6
        assert cq.poll(n(4)) == []
        qp.modify(qp_state=n(QPState.ERR))
        assert qp.state is QPState.ERR


# ---- timeouts -----------------------------------------------------------------


def test_every_wait_gives_up_after_five_seconds_unless_told_otherwise() -> None:
    found = {}
    for place, thing in public():
        for member, each in inspect.getmembers(thing if inspect.isclass(thing) else None):
            if member.startswith("_") or not callable(each) or inspect.isclass(each):
                continue
            try:
                timeout = inspect.signature(each).parameters.get("timeout")
            except ValueError:
                continue
            # One name for one thing.
            assert "wait" not in inspect.signature(each).parameters, member
            # The timeout of a queue pair is an attribute, and no time to wait.
            if timeout is not None and "float" in str(timeout.annotation):
                found[f"{thing.__name__}.{member}"] = timeout.default
        if inspect.isfunction(thing) and "timeout" in inspect.signature(thing).parameters:
            found[place] = inspect.signature(thing).parameters["timeout"].default
    assert {name for name, default in found.items() if default != 5.0} == set()
    waits = {"CQ.wait", "CQ.wait_into", "CQ.completions", "CompChannel.get_cq_event"}
    waits |= {"Connection.wait", "Connection.report", "AsyncConnection.wait"}
    waits |= {
        "AsyncConnection.report",
        "Pingpong.run_server",
        "CompChannel.cq_event",
        "Context.get_async_event",
        "Context.async_event",
    }
    assert waits <= found.keys()


def test_number_of_8_bits_is_not_computed_with_in_8_bits() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    with rp.open_device("soft0") as context:
        tso = context.attr.tso_caps
        for qp_type in QPType:
            for kind in (numpy.uint8, numpy.int64):
                assert tso.supports(kind(qp_type)) == tso.supports(qp_type)
        with pytest.raises(ValueError, match="qp_type=77 is not a valid QPType"):
            tso.supports(77)  # type: ignore[arg-type]
    for kind in (numpy.uint8, numpy.int8, numpy.int64):
        assert explain(kind(12)) == explain(12)
    assert explain(numpy.int8(-12)) == explain("ENOMEM")


# ---- names ------


def test_argument_and_what_shows_it_have_one_name(
    context: rp.Context, pd: rp.PD, cq: rp.CQ
) -> None:
    for wait in (rp.CQ.wait, rp.CQ.wait_into, rp.CQ.completions):
        parameters = inspect.signature(wait).parameters
        assert (parameters["count"].default, parameters["timeout"].default) == (1, 5.0)
    for query in (rp.Context.query_gid, rp.Context.query_gid_ex, rp.Context.choose_gid):
        assert "gid_index" in inspect.signature(query).parameters
    for entry in (*context.query_gid_table(), context.choose_gid(), context.query_gid_ex()):
        assert isinstance(entry.gid_index, int)
    with rp.QP(pd, rp.QPType.UD, cq) as qp, rp.SRQ(pd) as srq:
        assert (qp.qp_type, srq.srq_type) == (rp.QPType.UD, rp.SRQType.BASIC)
    if context.attr.max_mw:
        with rp.MW(pd, mw_type=rp.MWType.TYPE_1) as window:
            assert window.mw_type is rp.MWType.TYPE_1


# ---- exceptions ---------------------------------------------------------------


def test_nothing_that_can_be_closed_or_has_a_finalizer_can_be_copied_or_pickled() -> None:
    """A copy that is dropped would close the original, or its descriptors."""
    finalized = [native.Finalizer]
    for each in finalized:
        finalized += each.__subclasses__()
    classes = {thing for _, thing in public() if isinstance(thing, type)}
    owners = {each for each in classes if hasattr(each, "close")} | set(finalized[1:])
    assert len(owners) > 15
    for owner in owners:
        members = dict.fromkeys(getattr(owner, "__abstractmethods__", ()))
        concrete = type(owner.__name__, (owner,), members) if members else owner
        with pytest.raises(TypeError, match=f"^cannot copy or pickle '{owner.__name__}' object"):
            concrete.__new__(concrete).__reduce_ex__(2)


def test_every_exception_is_an_rdma_error() -> None:
    """And says with a built-in base class what a caller may know it as."""
    raised = {name: thing for name, thing in public() if _is_exception(thing)}
    assert len(raised) > 12
    for thing in raised.values():
        assert issubclass(thing, rp.RdmaError)
        builtin = [base for base in thing.__mro__ if vars(builtins).get(base.__name__) is base]
        assert builtin[0] in {
            Exception,
            OSError,
            ValueError,
            TimeoutError,
            LookupError,
            ConnectionError,
        }


def test_reference_shows_the_tree_of_exceptions() -> None:
    """Each below its base class, with the built-in exception that it is besides."""
    text = (ROOT / "docs/reference/errors.rst").read_text(encoding="utf-8")
    line = r"^   ([│├└─ ]*)((?:\w+\.)?[A-Z]\w+)(?: \((\w+)\))?(?:  |$)"
    shown: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for indent, name, builtin in re.findall(line, text, re.MULTILINE):
        above = [*above[: len(indent) // 4], name.rpartition(".")[2]]
        shown[name] = (*above[-2:-1], *([builtin] if builtin else []))
    expected: dict[str, tuple[str, ...]] = {}
    for place, thing in public():
        if _is_exception(thing):
            bases = [base.__name__ for base in thing.__bases__ if base is not Exception]
            expected[place.removeprefix("rdmapost.").removeprefix("tools.")] = tuple(bases)
    assert shown == expected


def _is_exception(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)
