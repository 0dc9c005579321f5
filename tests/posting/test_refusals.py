"""The errors when a device refuses, or lies: on the benchmarks' null device.

No library at hand refuses on demand, so the null device stands in for libibverbs here; it is told
which call must fail and how.
"""

from __future__ import annotations

import errno

import pytest
from support import null_device

null = null_device.null
on_null = null_device.on_null


def test_a_device_of_the_library_goes_through_its_life(on_null):
    """Everything that posting needs is made, used and released."""
    said = on_null("""
    print([info.name for info in rp.list_devices()])
    with rp.open_device() as context, rp.PD(context) as pd, rp.CompChannel(context) as channel:
        with rp.CQ(context, channel=channel) as cq, rp.MR(pd, 64) as mr, rp.SRQ(pd) as srq:
            with rp.QP(pd, rp.QPType.RC, cq) as qp, rp.QP(pd, rp.QPType.RC, cq, srq=srq) as b:
                print(context.query_pkey(1, 0), [str(e.gid) for e in context.query_gid_table(1)])
                qp.connect(b.endpoint())
                b.connect(qp.endpoint())
                print(qp.state.name, qp.query().path_mtu.bytes)
                qp.post_send(rp.Send(mr[:8]))
                b.srq.post_srq_recv(rp.RecvWR(mr[:8]))
                print(qp.outstanding)
    """)
    lines = said.splitlines()
    assert lines[0] == "['null0', 'soft0']"
    assert lines[1] == "65535 ['fe80::1']"
    assert lines[2] == "RTS 4096"
    assert lines[3] == "Outstanding(send=1, recv=0)"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (12, "64 bytes must be locked in memory and this process may lock 64 KiB in all"),
        (11, "raise it with 'ulimit -l unlimited'"),
        (14, "the memory cannot be pinned (a device mapping, or not writable)"),
        (22, "the device does not take this length or these access flags"),
        (5, "ibv_reg_mr: EIO (5, Input/output error)"),
    ],
)
def test_memory_that_cannot_be_registered(on_null, code, words):
    text = on_null(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        context, pd, cq = resources()
        print(said(lambda: rp.MR(pd, 64)))
        """,
        NULL_REFUSES=f"ibv_reg_mr={code}",
    )
    assert text.startswith("VerbsError: ibv_reg_mr: ")
    assert words in text


@pytest.mark.parametrize(
    ("call", "make"),
    [
        ("ibv_alloc_pd", "rp.PD(context)"),
        ("ibv_create_cq", "rp.CQ(context)"),
        ("ibv_create_comp_channel", "rp.CompChannel(context)"),
        ("ibv_create_srq", "rp.SRQ(pd)"),
        ("ibv_create_qp", "rp.QP(pd, rp.QPType.RC, cq)"),
        ("ibv_create_ah", "rp.AH(pd, rp.AHAttr(dlid=1))"),
    ],
)
def test_resource_that_cannot_be_made_names_the_call_and_the_errno(on_null, call, make):
    code = f"""
    with rp.open_device("null0") as context:
        pd, cq = {"None, None" if "(context)" in make else "rp.PD(context), rp.CQ(context)"}
        print(said(lambda: {make}))
        del pd, cq
    """
    text = on_null(code, NULL_REFUSES=f"{call}=12")
    assert text.startswith(f"VerbsError: {call}: ENOMEM (12, Cannot allocate memory)")
    assert on_null(code, NULL_REFUSES=f"{call}=95").startswith(f"UnsupportedError: {call} is not")


def test_queue_pair_that_cannot_be_made_says_what_may_be_too_much(on_null):
    text = on_null(
        """
        context, pd, cq = resources()
        print(said(lambda: rp.QP(pd, rp.QPType.RC, cq, max_send_sge=64)))
        print(said(lambda: rp.QP(pd, rp.QPType.RC, cq, max_inline_data=4096)))
        print(said(lambda: rp.QP(pd, rp.QPType.UD, cq, max_tso_header=64)))
        print(said(lambda: rp.QP(pd, rp.QPType.RAW_PACKET, cq)))
        """,
        NULL_REFUSES="ibv_create_qp=22",
    )
    sges, inline, tso, kind = text.splitlines()
    assert sges.endswith("max_send_sge=64, but the device's max_sge is 32")
    assert inline.endswith("max_inline_data=4096 may be more than null0 can take")
    assert tso.endswith("max_tso_header=64, but null0 may have no TSO")
    assert kind.endswith("null0 may not have RAW_PACKET queue pairs, or no more of them")


def test_raw_packets_without_the_right_to_them_name_it(on_null):
    """By the queue pair itself, by the loopback pair, and by the checks."""
    said = on_null(
        """
        from rdmapost.check import run_checks
        from rdmapost.loopback import Loopback
        context, pd, cq = resources()
        print(said(lambda: rp.QP(pd, rp.QPType.RAW_PACKET, cq, max_inline_data=64)))
        print(said(lambda: Loopback(context, rp.QPType.RAW_PACKET)))
        print(*{r.detail for r in run_checks(context) if r.qp_type == "RAW_PACKET"})
        """,
        NULL_REFUSES="ibv_create_qp=1",
    )
    why = "RAW_PACKET queue pairs need CAP_NET_RAW: run as root"
    alone, pair, checks = said.splitlines()
    assert alone == f"VerbsError: ibv_create_qp: EPERM (1, Operation not permitted): {why}"
    assert pair == alone
    assert checks == why


def test_resource_that_the_device_does_not_give_back_stays_open(on_null):
    text = on_null(
        """
        context, pd, cq = resources()
        mr = rp.MR(pd, 64)
        print(said(mr.close), mr.closed)
        """,
        NULL_REFUSES="ibv_dereg_mr=16",
    )
    assert text.startswith("VerbsError: ibv_dereg_mr: EBUSY (16")
    assert text.endswith("False")


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EINVAL])
def test_region_that_the_device_keeps_for_a_window_is_in_use(on_null, code):
    """Devices disagree on the errno. The library knows which window is bound."""
    text = on_null(
        """
        import ctypes, os
        ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"]).null_remember(1)
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.connect(rp.Endpoint(1, 2, "::ffff:192.0.2.1", 0, rp.MTU.MTU_1024))
        mr = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.MW_BIND)
        mw, unbound = rp.MW(pd), rp.MW(pd)
        qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=64))
        cq.wait()
        print(said(mr.close) == f"InUseError: {mr} cannot be closed: {mw} bound to it; "
              "unbind or close it first", mr.closed)
        """,
        NULL_REFUSES=f"ibv_dereg_mr={int(code)}",
    )
    assert text == "True False"


def test_state_that_the_device_refuses(on_null):
    code = """
    context, pd, cq = resources()
    qp = rp.QP(pd, rp.QPType.RC, cq)
    print(said(qp.to_init))
    """
    text = on_null(code, NULL_REFUSES="ibv_modify_qp=22")
    assert text.endswith("the QP stays in RESET and does not go to INIT")
    text = on_null(code, NULL_REFUSES="ibv_modify_qp=22", NULL_PORT_STATE="1")
    assert text.endswith("port 1 is DOWN; bring the link up")


def test_peer_that_cannot_be_reached(on_null):
    """The kernel resolves the path when it is set."""
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.to_init()
        os.environ["NULL_REFUSES"] = "ibv_modify_qp=101"
        remote = rp.Endpoint(1, 2, "::ffff:192.0.2.1", 0, rp.MTU.MTU_1024)
        print(said(lambda: qp.to_rtr(remote)))
        """
    )
    assert "ENETUNREACH" in text
    assert "192.0.2.1 cannot be reached from GID 0 (fe80::1)" in text


def test_source_gid_that_is_not_there(on_null):
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        qp = rp.QP(pd, rp.QPType.RC, cq)
        qp.to_init()
        os.environ["NULL_REFUSES"] = "ibv_modify_qp=22"
        path = rp.AHAttr(dgid="::ffff:192.0.2.1", sgid_index=50)
        print(said(lambda: qp.modify(
            qp_state=rp.QPState.RTR, ah_attr=path, path_mtu=rp.MTU.MTU_256, dest_qp_num=1,
            rq_psn=0, max_dest_rd_atomic=1, min_rnr_timer=1,
        )))
        """
    )
    assert text.endswith("null0 port 1 has no GID with index 50; the valid ones are: 0")


def test_without_a_name_a_device_with_an_active_port_is_wanted(on_null):
    text = on_null("print(said(rp.open_device))", NULL_PORT_STATE="1")
    assert text == (
        "NoDeviceError: no RDMA device has an active port (null0 port 1 is DOWN); "
        "bring the link up, or name a device"
    )


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        # A missing device has no node.
        ("ibv_open_device=13", "null0: /dev/infiniband/uverbs-null is missing"),
        ("ibv_query_device=5", "ibv_query_device: EIO"),
        ("ibv_get_device_list=5", "ibv_get_device_list: EIO"),
        ("ibv_get_device_list=38", "there is no RDMA device null0"),
    ],
)
def test_error_of_a_device_that_cannot_be_opened_says_what_is_missing(on_null, refuses, words):
    text = on_null('print(said(lambda: rp.open_device("null0")))', NULL_REFUSES=refuses)
    assert words in text


def test_the_doctor_finds_what_cannot_be_listed_or_opened(on_null):
    code = """
    from rdmapost.diagnose import diagnose_machine
    for found in diagnose_machine("null0"):
        print(found.name, found.severity, found.evidence, sep=" | ")
    """
    text = on_null(code, NULL_REFUSES="ibv_get_device_list=5")
    assert "devices-not-listed | problem | ibv_get_device_list: EIO" in text
    text = on_null(code, NULL_REFUSES="ibv_open_device=13")
    assert "not-opened | problem | ibv_open_device: EACCES" in text
    text = on_null(code, NULL_PORT_STATE="2")
    assert "port-down | problem | null0 port 1 is INIT (LinkUp): it carries no traffic" in text


def test_the_list_of_devices_shows_those_that_can_be_opened(on_null):
    """`rdmapost devices` says why the others cannot be opened."""
    code = """
    from rdmapost.cli import main
    import sys
    sys.argv[1:], sys.stderr = ["devices"], sys.stdout
    main()
    """
    text = on_null(code, NULL_REFUSES="ibv_open_device=13")
    assert "rdmapost devices: ibv_open_device: EACCES" in text
    assert "soft0" in text
    assert "INFINIBAND" in on_null(code)


def test_what_the_library_does_not_have_is_not_supported(on_null):
    """The null device has neither the calls of multicast nor those of tag matching."""
    text = on_null("""
    context, pd, cq = resources()
    qp = rp.QP(pd, rp.QPType.UD, cq)
    print(said(lambda: qp.attach_mcast("ff02::1")))
    print(said(lambda: rp.MW(pd, rp.MWType.TYPE_1).close()))
    extended = said(lambda: rp.CQ(context, tm_info=True))
    print(extended)
    """)
    multicast, window, extended = text.splitlines()
    assert multicast == (
        "UnsupportedError: ibv_attach_mcast is not supported: null0 has no multicast"
    )
    assert window == "None"
    assert extended.startswith("UnsupportedError: ibv_create_cq_ex is not supported")


def test_a_queue_pair_of_infiniband_is_diagnosed(on_null):
    """There the LID is the address: no GID is used."""
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        a, b = (rp.QP(pd, rp.QPType.RC, cq) for _ in "ab")
        a.connect(b.endpoint())
        b.connect(a.endpoint())
        names = {found.name: found.severity for found in a.diagnose(b)}
        print(names.get("port-active"), [name for name in names if name.startswith("gid")])
        os.environ["NULL_PORT_STATE"] = "1"
        print([f.evidence for f in a.diagnose() if f.name == "port-down"])
        """
    )
    first, second = text.splitlines()
    assert first == "ok []"
    assert second == "['null0 port 1 is DOWN (LinkUp): it carries no traffic']"


# ---- a device that says it has done what it has not -------------------------------

LIES = """
import ctypes, os, sys
# Every work request completes, and nothing is carried out.
ctypes.CDLL(os.environ["RDMAPOST_LIBIBVERBS"]).null_remember(1)
"""
COMMAND = """
from rdmapost.cli import main
sys.stderr = sys.stdout
sys.argv[1:] = os.environ["COMMAND"].split()
try: main()
except SystemExit as end: print("exit", end.code)
"""


def test_the_checks_see_that_nothing_has_been_done(on_null):
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
    assert results["BIND_MW", "RC"] == ["fail", "a write succeeded and did not arrive"]
    assert results["LOCAL_INV", "RC"] == ["unsupported", "null0 cannot invalidate keys"]
    assert results["TAG_ADD", "RC"] == ["unsupported", "tag matching is not supported by null0"]
    assert "TSO on UD queue pairs is not supported" in results["TSO", "UD"][1]
    assert "nothing arrived at the remote queue pair" in results["SRQ_RECV", "RC"][1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("send", "the data that arrived is not the data that was sent"),
        ("send --count 3", "message 1 of 3: "),
        ("write", "the data that arrived is not the data that was sent"),
        ("read", "the data that arrived is not the data that was sent"),
        ("atomic fetch-add", "the value is now 0, not 1"),
        ("bind-mw", "the data that arrived is not the data that was sent"),
        ("doctor", "other data arrived than the"),
    ],
)
def test_command_on_a_device_that_lies_fails_with_its_reason(on_null, command, words):
    said = on_null(LIES + COMMAND, COMMAND=f"{command} -d null0 --timeout 0.5")
    assert words in " ".join(said.split())
    assert said.endswith("exit 1")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("send", "the posted work requests did not complete within 0.2 s"),
        ("check", "the posted work requests did not complete within 0.2 s"),
        ("doctor", "bytes to the same device: the posted work requests did not complete"),
    ],
)
def test_the_command_line_does_not_wait_for_ever(on_null, command, words):
    """The null device completes nothing unless it is told to."""
    said = on_null("import os, sys" + COMMAND, COMMAND=f"{command} -d null0 --timeout 0.2")
    assert words in " ".join(said.split())
    assert said.endswith("exit 1")
