"""What a WC has for each field of ``struct ibv_wc``, on the benchmarks' null device.

No other device at hand sets them all, or to distinct numbers; this one completes with what it is
given.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest
from support import null_device, prints, soft_context

import rdmapost as rp
from rdmapost import WCFlags, WCOpcode, WCStatus

context = soft_context
null = null_device.null

GIVEN = {
    "status": 0,
    "opcode": int(WCOpcode.RECV),
    "byte_len": 0xFFFF_FFF1,
    "imm_data": 0x01020304,
    "qp_num": 0xFFFF_FFF2,
    "src_qp": 0xFFFF_FFF3,
    "wc_flags": int(WCFlags.GRH),
    "vendor_err": 0xFFFF_FFF4,
    "pkey_index": 0xFFF5,
    "slid": 0xFFF6,
    "sl": 0xF7,
    "dlid_path_bits": 0xF8,
}

SAME = ("byte_len", "src_qp", "vendor_err", "qp_num", "pkey_index", "slid", "sl", "dlid_path_bits")
ONLY_ON_REQUEST = (
    "tm_tag",
    "tm_priv",
    "completion_ts",
    "completion_wallclock_ns",
    "cvlan",
    "flow_tag",
)
ONLY_IN_SUCCESS = ("byte_len", "src_qp", "pkey_index", "slid", "sl", "dlid_path_bits")

CASES: dict[str, dict[str, int]] = {
    "receive": {},
    "with immediate data": {"wc_flags": int(WCFlags.WITH_IMM)},
    "with a key": {"wc_flags": int(WCFlags.WITH_INV), "invalidated_rkey": 0x0A0B0C0D},
    **{
        f"send, {flag.name}": {"opcode": int(WCOpcode.SEND), "wc_flags": int(flag)}
        for flag in (WCFlags.WITH_IMM, WCFlags.WITH_INV)
    },
    **{
        f"failed, {flag.name}": {"status": int(WCStatus.REM_OP_ERR), "wc_flags": int(flag)}
        for flag in (WCFlags.GRH, WCFlags.WITH_IMM, WCFlags.WITH_INV)
    },
    **{f"status {status}": {"status": status} for status in (31, 32, 200)},
    **{f"opcode {opcode}": {"opcode": opcode} for opcode in (228, 255, 256)},
    **{f"flags {flags:#x}": {"wc_flags": flags} for flags in (0x7F, 0x80, 1 << 20)},
}
"""What differs from the above."""

PROGRAM = """
import ctypes, os, socket
from rdmapost._binding import address_of, ffi

context, pd, cq = resources()
mr = rp.MR(pd, 64)
qp = rp.QP(pd, rp.QPType.RC, cq)
qp.connect(qp.endpoint())
null = ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"])
null.null_remember(1)
found = {}
for case, given in cases.items():
    given["imm_data"] = socket.htonl(given["imm_data"])
    like = ffi.new("struct ibv_wc *")
    for name, value in given.items():
        setattr(like, name, value)
    null.null_complete_as(ctypes.c_void_p(address_of(like)))
    qp.post_recv(rp.RecvWR(mr[0:8], wr_id=(1 << 64) - 9))
    (wc,) = cq.wait(1, timeout=5)
    found[case] = {}
    for name, value in wc._asdict().items():
        found[case][name] = value if value is None else int(value)
print(found)
"""


@pytest.fixture(scope="module")
def completed(null):
    """What the WC of each case has, of a receive that the device completed so."""
    given = {case: GIVEN | fields for case, fields in CASES.items()}
    text = prints(
        f"{null_device.SETUP}\ncases = {given}\n{PROGRAM}",
        RDMAPOST_LIBIBVERBS=null,
        ASAN_OPTIONS="detect_leaks=0",
    )
    found: dict[str, dict[str, Any]] = ast.literal_eval(text)
    return found


def test_each_field_of_a_completion_is_what_the_device_reported(completed):
    """Numbers that fill their fields, so that truncation or a mix-up shows."""
    wc = completed["receive"]
    assert {name: wc[name] for name in SAME} == {name: GIVEN[name] for name in SAME}
    assert wc["wr_id"] == (1 << 64) - 9
    assert (wc["status"], wc["opcode"]) == (WCStatus.SUCCESS, WCOpcode.RECV)
    assert wc["wc_flags"] == WCFlags.GRH
    assert (wc["imm_data"], wc["invalidated_rkey"]) == (None, None)
    assert [wc[name] for name in ONLY_ON_REQUEST] == [None] * len(ONLY_ON_REQUEST)


def test_immediate_data_is_there_where_the_flags_say_so(completed):
    wc = completed["with immediate data"]
    assert (wc["imm_data"], wc["invalidated_rkey"]) == (0x01020304, None)


def test_invalidated_key_is_there_where_the_flags_say_so(completed):
    """It is in the place of the immediate data, and in host order."""
    wc = completed["with a key"]
    assert (wc["imm_data"], wc["invalidated_rkey"]) == (None, 0x0A0B0C0D)


@pytest.mark.parametrize("flag", [WCFlags.WITH_IMM, WCFlags.WITH_INV])
def test_completion_of_a_send_has_no_immediate_data_or_invalidated_key(completed, flag):
    """Some drivers set the flags there, too."""
    wc = completed[f"send, {flag.name}"]
    assert (wc["imm_data"], wc["invalidated_rkey"]) == (None, None)
    assert wc["opcode"] == WCOpcode.SEND


@pytest.mark.parametrize("flag", [WCFlags.GRH, WCFlags.WITH_IMM, WCFlags.WITH_INV])
def test_error_completion_has_only_its_valid_fields(completed, flag):
    """ibv_poll_cq(3): wr_id, status, qp_num and vendor_err."""
    wc = completed[f"failed, {flag.name}"]
    assert wc["status"] == WCStatus.REM_OP_ERR
    assert (wc["wr_id"], wc["qp_num"]) == ((1 << 64) - 9, GIVEN["qp_num"])
    assert wc["vendor_err"] == GIVEN["vendor_err"]
    assert {name: wc[name] for name in (*ONLY_IN_SUCCESS, "wc_flags")} == dict.fromkeys(
        (*ONLY_IN_SUCCESS, "wc_flags"), 0
    )
    nothing = ("opcode", "imm_data", "invalidated_rkey", *ONLY_ON_REQUEST)
    assert [wc[name] for name in nothing] == [None] * len(nothing)


@pytest.mark.parametrize("status", [31, 32, 200])
def test_completion_status_without_a_name_is_its_number(completed, status):
    """A later library may have more of them."""
    assert completed[f"status {status}"]["status"] == status


@pytest.mark.parametrize("opcode", [228, 255, 256])
def test_completion_opcode_without_a_name_is_its_number(completed, opcode):
    assert completed[f"opcode {opcode}"]["opcode"] == opcode


@pytest.mark.parametrize("flags", [0x7F, 0x80, 1 << 20])
def test_completion_flags_without_a_name_are_kept(completed, flags):
    assert completed[f"flags {flags:#x}"]["wc_flags"] == flags


def test_a_completion_has_the_only_references_to_its_numbers(rc):
    """Anything that took it by mistake would keep it forever."""

    def counts(numbers):
        return [sys.getrefcount(number) for number in numbers if number is not wr_id]

    wr_id = 1 << 40
    before = sys.getrefcount(wr_id)
    for side in (rc.a, rc.b):
        side.post_recv(rp.RecvWR(rc.theirs[:600], wr_id=wr_id))
    rc.a.post_send(rp.SendWithImm(rc.mine[:600], imm_data=70000, wr_id=wr_id))
    rc.b.post_send(rp.Send(rc.mine[:600], wr_id=wr_id))
    found = [value for wc in rc.wait(4) for value in wc if type(value) is int and value > 256]
    assert {600, 70000, wr_id} <= {*found}
    alone = [int(str(value)) for value in found if value is not wr_id]
    assert counts(found) == counts(alone)
    del found
    assert sys.getrefcount(wr_id) == before


def wc(status: rp.WCStatus, vendor_err: int = 0) -> rp.WC:
    return rp.WC(7, status, None, 0, None, None, 0x11, 0, rp.WCFlags(0), vendor_err, 0, 0, 0, 0)


def test_check_returns_a_successful_completion_and_raises_for_another():
    good = wc(rp.WCStatus.SUCCESS)
    assert good.check() is good
    bad = wc(rp.WCStatus.RNR_RETRY_EXC_ERR, 0x81)
    with pytest.raises(rp.CompletionError) as caught:
        bad.check()
    assert caught.value.wc is bad
    assert str(caught.value) == (
        "the work request with wr_id 7 on QP 0x11 ended with RNR_RETRY_EXC_ERR (vendor_err 0x81)"
    )
