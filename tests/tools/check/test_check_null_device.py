"""The checks on the null device, which reports success and does nothing."""

from __future__ import annotations

from support import null_device
from support.null_device import LIES

null = null_device.null
on_null = null_device.on_null


def test_checks_fail_on_a_device_that_only_claims_to_carry_out_work(on_null):
    """None passes, and none stops the others."""
    said = on_null(
        LIES
        + """
from rdmapost.check import run_checks
with rp.open_device("null0") as context:
    for result in run_checks(context, timeout=0.2):
        print(result.opcode, result.qp_type, result.status, result.detail, sep=" | ")
"""
    )
    results = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in said.splitlines()}
    assert {status for status, _ in results.values()} == {"fail", "unsupported"}
    assert results["SEND", "RC"] == ["fail", "byte_len is 0x8, not 0x3005"]
    assert results["SEND", "XRC_SEND"] == ["unsupported", "null0 has no XRC queue pairs"]
    status, detail = results["RDMA_WRITE", "RC"]
    assert (status, detail.split()[:2]) == ("fail", ["remote", "memory:"])
    assert "bytes are wrong, the first at" in detail
    assert results["RDMA_WRITE_WITH_IMM", "RC"] == [
        "fail",
        "the completion says RECV, not RECV_RDMA_WITH_IMM",
    ]
    assert results["ATOMIC_FETCH_AND_ADD", "RC"][1].startswith("old value is ")
    assert results["BIND_MW", "RC"] == ["fail", "a write succeeded but did not arrive"]
    assert results["LOCAL_INV", "RC"] == ["unsupported", "null0 cannot invalidate keys"]
    assert results["TAG_ADD", "RC"] == ["unsupported", "null0 has no tag matching"]
    assert "null0 has no TSO on UD queue pairs" in results["TSO", "UD"][1]
    assert "nothing arrived at the remote queue pair" in results["SRQ_RECV", "RC"][1]
