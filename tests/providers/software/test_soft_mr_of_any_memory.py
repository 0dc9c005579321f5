"""Regions over memory that soft0 maps, or that may not be there: addresses and dma-bufs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import sys
import tempfile
import tracemalloc
import weakref

import pytest
from support import ALL, GRH, prints, resident, soft_context
from support.roce import open_roce, skip_unless_free

import rdmapost as rp
from rdmapost import Access, AdviseMRAdvice, WCStatus
from rdmapost._binding import native
from rdmapost.providers.software.mapped_memory import may_shrink
from rdmapost.resources.qp import DEFAULT_QKEY
from rdmapost.standard.opcodes import MULTICAST_QPN

context = soft_context
PAGE = mmap.PAGESIZE
PAGES = 11
MADV_POPULATE_WRITE = 23


@pytest.fixture
def fd():
    made = os.memfd_create("test")
    os.truncate(made, 4 * PAGE)
    yield made
    os.close(made)


def _address(buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# ---- memory that has gone ---------------------------------------------------------------


GONE = """
import ctypes, mmap, sys
sys.path.insert(0, {path!r})
import contextlib, rdmapost as rp
from rdmapost import Access
from support import Pair

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
with contextlib.ExitStack() as stack:
    context = stack.enter_context(rp.open_device("soft0"))
    pd, cq = stack.enter_context(rp.PD(context)), stack.enter_context(rp.CQ(context, 64))
    # Large: Python's next arena is mapped at the end of the hole, not at its beginning.
    memory = mmap.mmap(-1, 64 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    gone = stack.enter_context(rp.MR.at(pd, address, 64 << 20, ALL))
    import gc; gc.collect()
    memory.close()
    for post in (
        lambda p: p.a.post_send(rp.Send(gone[:8])),
        lambda p: p.a.post_send(p.wr(rp.RdmaRead, gone[:8])),
        lambda p: p.a.post_send(rp.RdmaWrite(p.mine[:8], remote_addr=gone.addr, rkey=gone.rkey)),
        lambda p: p.a.post_send(rp.RdmaRead(p.mine[:8], remote_addr=gone.addr, rkey=gone.rkey)),
    ):
        pair = Pair(stack, pd, cq, rp.QPType.RC)
        pair.b.post_recv(rp.RecvWR(pair.theirs[:]))
        post(pair)
        done = []
        while not done:
            done = [wc for wc in cq.wait() if wc.qp_num == pair.a.qp_num]
        print(done[0].status.name)
        cq.poll()
"""


def test_memory_that_was_unmapped_completes_with_an_error_instead_of_a_crash():
    tests = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    assert prints(GONE.format(path=tests)).split() == [
        "LOC_PROT_ERR",
        "LOC_PROT_ERR",
        "REM_ACCESS_ERR",
        "REM_ACCESS_ERR",
    ]


FORBID = """
import ctypes, platform

libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "process_vm": {"x86_64": (310, 311), "aarch64": (270, 271)},
    "madvise": {"x86_64": (28, 28), "aarch64": (233, 233)},
}
SECCOMP = {"x86_64": 317, "aarch64": 277}

def forbid(calls, errno=1):
    # Load the number of the system call; for two of them return EPERM, say, else allow it.
    numbers = NUMBERS[calls][platform.machine()]
    code = [(0x20, 0, 0, 0), (0x15, 1, 0, numbers[0]), (0x15, 0, 1, numbers[1]),
            (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)]
    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte),
                    ("value", ctypes.c_uint)]
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.POINTER(Instruction))]
    program = Program(len(code), (Instruction * len(code))(*code))
    assert not libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS"
    # SECCOMP_SET_MODE_FILTER, for all threads: a roce device has one.
    assert not libc.syscall(SECCOMP[platform.machine()], 1, 1, ctypes.byref(program)), "seccomp"
"""
"""As a sandbox does, with seccomp."""

PROTECTED = """
import ctypes, mmap, os, resource, sys
import rdmapost as rp
from rdmapost import Access

libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
PAGE = mmap.PAGESIZE

device, protection, limits = sys.argv[1], int(sys.argv[2]), sys.argv[3].split()
with rp.open_device(device) as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    mine = rp.MR(pd, 2 * PAGE, ALL)
    memory = mmap.mmap(-1, 2 * PAGE)
    memory[:] = b"x" * (2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    theirs = rp.MR.at(pd, address, 2 * PAGE, ALL)
    for limit in limits:
        if limit == "descriptors":
            unused = os.dup(0)
            os.close(unused)
            resource.setrlimit(resource.RLIMIT_NOFILE, (unused, unused))
        else:
            name, _, code = limit.partition("=")
            forbid(name, int(code or 1))
    remote = {"rkey": theirs.rkey}
    for post in (
        lambda: rp.RdmaWrite(mine[:8], remote_addr=address, **remote),
        lambda: rp.RdmaWrite(mine[:], remote_addr=address, **remote),
        lambda: rp.RdmaRead(theirs[:8], remote_addr=mine.addr, rkey=mine.rkey),
        lambda: rp.AtomicFetchAndAdd(mine[:8], remote_addr=address, compare_add=1, **remote),
        lambda: rp.RdmaRead(mine[:8], remote_addr=address, **remote),
        lambda: rp.Send(mine[:8]),
    ):
        with rp.QP(pd, rp.QPType.RC, cq) as a, rp.QP(pd, rp.QPType.RC, cq) as b:
            a.connect(b.endpoint()); b.connect(a.endpoint())
            b.post_recv(rp.RecvWR(theirs[:8]))
            assert not libc.mprotect(address, PAGE, protection)
            a.post_send(post())
            done = []
            while not done:
                done = [wc for wc in cq.wait(timeout=20) if wc.qp_num == a.qp_num]
            assert not libc.mprotect(address, PAGE, 3)
            print(done[0].status.name, memory[:].strip(b"x") == b"")
            cq.poll()
    theirs.close(); mine.close()
"""


@pytest.mark.parametrize(
    "limits",
    [
        "",
        "process_vm",
        "descriptors",
        "process_vm descriptors",
        "madvise",
        "madvise descriptors",
        "madvise process_vm descriptors",
    ],
)
@pytest.mark.parametrize("protection", [mmap.PROT_READ, 0])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_memory_that_became_read_only_or_inaccessible_completes_with_an_error(
    device, protection, limits
):
    """Also in a sandbox that forbids a system call, and where no descriptor is left."""
    skip_unless_free(device)
    said = prints(FORBID + PROTECTED, device, str(protection), limits).splitlines()
    readable = protection and not {"process_vm", "descriptors"} <= set(limits.split())
    read = "SUCCESS" if readable else "REM_ACCESS_ERR"
    assert said == [
        f"{status} True"
        for status in (
            "REM_ACCESS_ERR",
            "REM_ACCESS_ERR",
            "LOC_PROT_ERR",
            "REM_ACCESS_ERR",
            read,
            "REM_OP_ERR",
        )
    ]


@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_memory_that_may_be_written_is_written_in_a_sandbox(device):
    """The kernel copies through a pipe where it may not copy directly."""
    skip_unless_free(device)
    rw = mmap.PROT_READ | mmap.PROT_WRITE
    # Before Linux 5.14, madvise() says EINVAL. Without it and /proc/self/maps, the write tells.
    for limits in ("process_vm", f"madvise={errno.EINVAL}", "madvise descriptors"):
        said = prints(FORBID + PROTECTED, device, str(rw), limits).splitlines()
        assert said == ["SUCCESS False"] * 6, limits
    # Never SUCCESS without the data.
    assert set(
        prints(FORBID + PROTECTED, device, str(rw), "process_vm descriptors").splitlines()
    ) == {"REM_ACCESS_ERR True", "LOC_PROT_ERR True", "REM_OP_ERR True"}


BETWEEN = """
import ctypes, mmap, os, resource, sys
import rdmapost as rp
from rdmapost import Access
from rdmapost._binding import native

libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
PAGE = mmap.PAGESIZE
device, what = sys.argv[1:]

def descriptors_run_out():
    unused = os.dup(1)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, HARD))
def descriptors_are_back():
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
def page_becomes_read_only():
    assert not libc.mprotect(address + PAGE, PAGE, 1)
def page_is_writable_again():
    assert not libc.mprotect(address + PAGE, PAGE, 3)

happens, ends = {
    "descriptors": (descriptors_run_out, descriptors_are_back),
    "read-only": (page_becomes_read_only, page_is_writable_again),
}[what]
SOFT, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
checks = 0
def reachable(*args):
    global checks
    found = check(*args)
    checks += found
    if found:
        happens()
    return found

with rp.open_device(device) as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    mine = rp.MR(pd, 2 * PAGE, ALL)
    mine.buffer[:8] = (5).to_bytes(8, sys.byteorder)
    memory = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    theirs = rp.MR.at(pd, address, 2 * PAGE, ALL)
    if what == "descriptors":
        forbid("process_vm")
    check, native.reachable = native.reachable, reachable
    end, remote = address + 2 * PAGE, {"rkey": theirs.rkey}
    for post in (
        lambda: rp.RdmaWrite(mine[:8], remote_addr=end - 8, **remote),
        lambda: rp.RdmaWriteWithImm(mine[:8], remote_addr=end - 8, imm_data=1, **remote),
        lambda: rp.RdmaRead(theirs[-8:], remote_addr=mine.addr, rkey=mine.rkey),
        lambda: rp.AtomicFetchAndAdd(mine[16:24], remote_addr=end - 8, compare_add=1, **remote),
        lambda: rp.AtomicFetchAndAdd(
            theirs[-8:], remote_addr=mine.addr, rkey=mine.rkey, compare_add=1
        ),
        lambda: rp.Send(mine[:8]),
    ):
        with rp.QP(pd, rp.QPType.RC, cq) as a, rp.QP(pd, rp.QPType.RC, cq) as b:
            a.connect(b.endpoint()); b.connect(a.endpoint())
            b.post_recv(rp.RecvWR(theirs[-8:]))
            checks = 0
            a.post_send(post())
            done = []
            while not done:
                done = [wc for wc in cq.wait(timeout=20) if wc.qp_num == a.qp_num]
            ends()
            assert not a.outstanding.send, "one completion"
            print(done[0].status.name, checks, memory[:].strip(b"\\0") == b"")
            mine.buffer[8:24] = bytes(16)
            cq.poll()
    print(int.from_bytes(mine.buffer[:8], sys.byteorder), len(os.listdir("/proc/self/fd")) < 64)
    theirs.close(); mine.close()
"""


@pytest.mark.parametrize("what", ["descriptors", "read-only"])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_memory_that_cannot_be_written_when_it_is_written_completes_with_an_error(device, what):
    """It could be at the check just before: never SUCCESS without the data."""
    skip_unless_free(device)
    *statuses, number = prints(FORBID + BETWEEN, device, what).splitlines()
    assert statuses == [
        "REM_ACCESS_ERR 1 True",
        "REM_ACCESS_ERR 1 True",
        "LOC_PROT_ERR 1 True",
        "REM_ACCESS_ERR 1 True",
        "LOC_PROT_ERR 1 True",
        "REM_OP_ERR 1 True",
    ]
    # The atomic operation whose result could not be written was executed once.
    assert number == "6 True"


def _protect(memory: mmap.mmap, page: int, protection: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert not libc.mprotect(_address(memory) + page * PAGE, PAGE, protection)


@pytest.fixture
def becomes_read_only(monkeypatch):
    """Pages; the returned function makes some read-only, except while they are checked."""
    memory = mmap.mmap(-1, PAGES * PAGE)
    check = native.reachable

    def becomes_read_only(*pages: int) -> None:
        def reachable(start: int, *args: int) -> bool:
            page = (start - first) // PAGE
            if page not in pages:
                return check(start, *args)
            _protect(memory, page, mmap.PROT_READ | mmap.PROT_WRITE)
            found = check(start, *args)
            _protect(memory, page, mmap.PROT_READ)
            return found

        first = _address(memory)
        for page in range(PAGES):
            _protect(memory, page, mmap.PROT_READ | mmap.PROT_WRITE)
        monkeypatch.setattr(native, "reachable", reachable)

    yield memory, becomes_read_only
    monkeypatch.undo()
    for page in range(PAGES):
        _protect(memory, page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("failing", [1, 8, 9])
def test_memory_that_cannot_be_written_leaves_other_receivers_of_the_message_alone(
    context, becomes_read_only, failing
):
    """If it is that of more than eight of them, no memory of this kind is written any more."""
    memory, make_read_only = becomes_read_only
    with contextlib.ExitStack() as stack:
        pd = stack.enter_context(rp.PD(context))
        cq = stack.enter_context(rp.CQ(context))
        sender, *receivers = (
            stack.enter_context(rp.QP(pd, rp.QPType.UD, cq, max_recv_sge=2))
            for _ in range(PAGES + 1)
        )
        mr = stack.enter_context(rp.MR.at(pd, _address(memory), PAGES * PAGE, ALL))
        sent = stack.enter_context(rp.MR(pd, 24))
        # The headers of the first and the last that fail adjoin those of their neighbours.
        grhs = [page * PAGE + (PAGE - GRH) * (page in (0, 8)) for page in range(PAGES)]
        data = [page * PAGE + 128 for page in range(PAGES)]
        path = rp.AHAttr(port_num=1, dgid="ff0e::1", sgid_index=0)
        ah = stack.enter_context(rp.AH(pd, path))
        sender.connect()
        for page, qp in enumerate(receivers):
            qp.connect()
            qp.attach_mcast("ff0e::1")
            sges = mr[grhs[page] : grhs[page] + GRH], mr[data[page] : data[page] + 24]
            qp.post_recv(rp.RecvWR(sges, wr_id=page))
        sent.buffer[:] = b"received" * 3
        make_read_only(*range(1, failing + 1))
        to_all = {"ah": ah, "remote_qpn": MULTICAST_QPN, "remote_qkey": DEFAULT_QKEY}
        sender.post_send(rp.Send(sent[:], wr_id=99, **to_all))
        statuses = {wc.wr_id: wc.status.name for wc in cq.wait(PAGES + 1)}
        assert statuses.pop(99) == "SUCCESS"
        received = {page for page, status in statuses.items() if status == "SUCCESS"}
        assert received == ({0, *range(failing + 1, PAGES)} if failing < 9 else set())
        assert set(statuses.values()) <= {"SUCCESS", "LOC_PROT_ERR"}
        assert all(memory[data[page] :][:24] == sent.buffer for page in received)
        # The next message finds the memory as it is then.
        make_read_only()
        sender.post_recv(rp.RecvWR(mr[PAGE : PAGE + 64]))
        to_itself = stack.enter_context(sender.ah_to(sender.endpoint()))
        to_itself = {"ah": to_itself, "remote_qpn": sender.qp_num, "remote_qkey": DEFAULT_QKEY}
        sender.post_send(rp.Send(sent[:], **to_itself))
        assert [wc.status.name for wc in cq.wait(2)] == ["SUCCESS"] * 2


@pytest.mark.parametrize(
    ("read_only", "status", "executed"),
    [("result", WCStatus.LOC_PROT_ERR, 1), ("target", WCStatus.REM_ACCESS_ERR, 0)],
)
def test_atomic_between_two_memories_is_not_executed_twice_if_one_cannot_be_written(
    rc, becomes_read_only, read_only, status, executed
):
    """The verb is repeated without that memory, after the other may have been written."""
    memory, make_read_only = becomes_read_only
    with rp.MR.at(rc.pd, _address(memory), 2 * PAGE, ALL) as mr:
        make_read_only(["target", "result"].index(read_only))
        rc.a.post_send(
            rp.AtomicFetchAndAdd(
                mr[PAGE : PAGE + 8], remote_addr=mr.addr, rkey=mr.rkey, compare_add=1
            )
        )
        assert rc.cq.wait()[0].status is status
        assert int.from_bytes(memory[:8], sys.byteorder) == executed


INLINE_WITHOUT_DESCRIPTORS = """
import errno, os, resource
import rdmapost as rp
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    mr = rp.MR(pd, 64)
    a, b = (rp.QP(pd, rp.QPType.RC, cq, max_inline_data=64) for _ in range(2))
    a.connect(b.endpoint()); b.connect(a.endpoint())
    b.post_recv(rp.RecvWR(mr[:8]))
    send = rp.Send(mr[8:16], send_flags=rp.SendFlags.INLINE | rp.SendFlags.SIGNALED)
    forbid("process_vm")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(1)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, limit[1]))
    try:
        a.post_send(send)
    except rp.PostError as error:
        print(errno.errorcode[error.errno], error.posted)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    a.post_send(send)
    print(*(wc.status.name for wc in cq.wait(2)))
    for each in (a, b, mr):
        each.close()
"""


def test_inline_in_a_sandbox_is_refused_for_what_it_lacks():
    assert prints(FORBID + INLINE_WITHOUT_DESCRIPTORS).split() == [
        "EMFILE",
        "0",
        "SUCCESS",
        "SUCCESS",
    ]


def test_dmabuf_that_was_truncated_completes_with_an_error_instead_of_a_crash(rc, fd):
    with rp.MR.from_dmabuf(rc.pd, fd, 0, 4 * PAGE, 0, ALL) as mr:
        os.truncate(fd, PAGE)
        rc.a.post_send(rp.RdmaRead(rc.mine[:8], remote_addr=2 * PAGE, rkey=mr.rkey))
        assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


CUT = """
import mmap, os, sys, threading
import rdmapost as rp
from rdmapost import Access

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
N = 1 << 22
fd = os.memfd_create("test")
os.ftruncate(fd, N)
seen = set()
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    mine = rp.MR(pd, N, ALL)
    {how}
    a, b = (rp.QP(pd, rp.QPType.RC, cq) for _ in range(2))
    stop = False
    def cut():
        while not stop:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, N)
    thread = threading.Thread(target=cut)
    thread.start()
    for turn in range(150):
        for qp in (a, b):
            qp.to_reset()
        a.connect(b.endpoint()); b.connect(a.endpoint())
        a.post_send((
            rp.RdmaWrite(mine[:], remote_addr=theirs.addr, rkey=theirs.rkey),
            rp.RdmaRead(mine[:], remote_addr=theirs.addr, rkey=theirs.rkey),
            rp.RdmaRead(theirs[:], remote_addr=mine.addr, rkey=mine.rkey),
            rp.AtomicFetchAndAdd(
                mine[:8], remote_addr=theirs.addr, rkey=theirs.rkey, compare_add=1
            ),
        )[turn % 4])
        seen.add(cq.wait()[0].status.name)
    stop = True
    thread.join()
    print(*seen - {{"SUCCESS", "REM_ACCESS_ERR", "LOC_PROT_ERR"}}, "survived")
    for each in (a, b, theirs, mine):
        each.close()
"""

HOW = {
    "dma-buf": "theirs = rp.MR.from_dmabuf(pd, fd, 0, N, 1 << 28, ALL)",
    "mmap": "theirs = rp.MR(pd, mmap.mmap(fd, N), ALL)",
    "view": "theirs = rp.MR(pd, memoryview(mmap.mmap(fd, N))[4096:].cast('I'), ALL)\n"
    "    mine = rp.MR(pd, N - 4096, ALL)",
    "ctypes": "import ctypes\n"
    "    theirs = rp.MR(pd, (ctypes.c_char * N).from_buffer(mmap.mmap(fd, N)), ALL)",
    "rereg": "theirs = rp.MR(pd, 64, ALL); theirs.rereg(memory=mmap.mmap(fd, N))",
}


@pytest.mark.parametrize("how", HOW)
def test_file_that_is_truncated_during_a_transfer_does_not_crash_the_process(how):
    assert prints(CUT.format(how=HOW[how])).split() == ["survived"]


def test_file_that_is_truncated_during_a_transfer_does_not_crash_a_process_in_a_sandbox():
    program = FORBID + "forbid('process_vm')" + CUT.format(how=HOW["mmap"])
    assert prints(program).split() == ["survived"]


@pytest.mark.parametrize("shared", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_file_map_that_has_become_shorter_completes_with_an_error(rc, fd, shared):
    """The part that still exists can be transferred."""
    memory = mmap.mmap(fd, 4 * PAGE, flags=shared)
    with rp.MR(rc.pd, memory, ALL) as mr:
        os.truncate(fd, PAGE)
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=mr.addr, rkey=mr.rkey))
        rc.wait()
        for post in (rp.RdmaRead, rp.RdmaWrite):
            rc.a.post_send(post(rc.mine[:8], remote_addr=mr.addr + PAGE, rkey=mr.rkey))
            assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR
            rc.a.to_reset()
            rc.b.to_reset()
            rc.connect()


INLINE_CUT = """
import array, ctypes, errno, mmap, os
import rdmapost as rp
from rdmapost import SendFlags
fd = os.memfd_create("test")
os.ftruncate(fd, 1 << 16)
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    a, b = (rp.QP(pd, rp.QPType.RC, cq, max_inline_data=64) for _ in range(2))
    a.connect(b.endpoint()); b.connect(a.endpoint())
    theirs = rp.MR(pd, 64, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE)
    mapped = mmap.mmap(fd, 1 << 16)
    mr = rp.MR(pd, {memory}, rp.Access.LOCAL_WRITE)
    os.ftruncate(fd, 4096)
    remote = dict(
        remote_addr=theirs.addr, rkey=theirs.rkey,
        send_flags=SendFlags.INLINE | SendFlags.SIGNALED,
    )
    write = rp.RdmaWrite(mr[8192:8200], **remote)
    prepared = a.prepare(write)
    for post in (
        lambda: a.post_send(write),
        prepared.post,
        lambda: a.post_columns(rp.RdmaWrite, mr.blocks(array.array("q", [1024]), 8), **remote),
    ):
        try:
            post()
        except rp.PostError as error:
            print(error.errno == errno.EFAULT, error.posted)
    a.post_send(rp.RdmaWrite(mr[:8], wr_id=7, **remote))
    print(*(wc.wr_id for wc in cq.wait(1)), a.outstanding.send)
    for each in (a, b, theirs, mr):
        each.close()
"""


@pytest.mark.parametrize("memory", ["mapped", "(ctypes.c_int * (1 << 14)).from_buffer(mapped)"])
def test_inline_from_a_file_map_that_has_become_shorter_is_refused_instead_of_a_crash(memory):
    program = INLINE_CUT.replace("{memory}", memory)
    assert prints(program).split() == ["True", "0"] * 3 + ["7", "0"]


EXPORTED_CUT = """
import ctypes, mmap, os
import rdmapost as rp
class Ring(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("data", ctypes.c_char * 65000)]
class Map(mmap.mmap):
    base = None
    __class__ = bytes
class Tensor:
    def __init__(self, memory):
        import numpy
        self.array = numpy.frombuffer(memory, "u1")
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return 1, 0
def exported_by(base, *args):
    global mapped
    mapped = mmap.mmap(fd, 1 << 16)
    import numpy
    class Exporter(eval(base)):
        def __buffer__(self, flags):
            return memoryview(mapped)
    return numpy.frombuffer(Exporter(*args), "u1")
fd = os.memfd_create("test")
os.ftruncate(fd, 1 << 16)
ALL = rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE
with rp.open_device("soft0") as context, rp.PD(context) as pd, rp.CQ(context) as cq:
    a, b = (rp.QP(pd, rp.QPType.RC, cq) for _ in range(2))
    a.connect(b.endpoint()); b.connect(a.endpoint())
    mine = rp.MR(pd, 64, ALL)
    memory = {memory}
    {early}
    theirs = rp.MR(pd, memory, ALL)
    os.ftruncate(fd, 4096)
    for offset in {offsets}:
        a.post_send(rp.RdmaWrite(mine[:8], remote_addr=theirs.addr + offset, rkey=theirs.rkey))
        print(cq.wait()[0].status.name)
    for each in (a, b, theirs, mine):
        each.close()
"""


def statuses_after_truncation(memory: str, offsets: str, early: str = "pass") -> list[str]:
    """Write to memory in a file that has become shorter, in another process.

    Args:
        memory: an expression for the memory, of the descriptor ``fd``.
        offsets: the bytes from its start at which to write.
        early: a statement to run before the memory is registered.
    """
    program = EXPORTED_CUT.replace("{memory}", memory).replace("{offsets}", offsets)
    return prints(program.replace("{early}", early)).split()


@pytest.mark.parametrize("early", ["pass", "os.ftruncate(fd, 0)"])
@pytest.mark.parametrize("memory", ["Ring.from_buffer(mmap.mmap(fd, 1 << 16))", "Map(fd, 1 << 16)"])
def test_file_map_that_looks_like_allocated_memory_does_not_crash_the_process(memory, early):
    """Its field or attribute `base` is None, as in an array that owns its memory."""
    assert statuses_after_truncation(memory, "[8192]", early) == ["REM_ACCESS_ERR"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have no __buffer__")
@pytest.mark.parametrize("base", ["bytes", "bytearray", "numpy.ndarray"])
def test_file_map_that_a_subclass_exports_does_not_crash_the_process(base):
    pytest.importorskip("numpy")
    memory = f"exported_by({base!r}, 3)"
    assert statuses_after_truncation(memory, "[8192]") == ["REM_ACCESS_ERR"]


def test_tensor_in_a_file_map_that_has_become_shorter_completes_with_an_error():
    pytest.importorskip("numpy")
    statuses = statuses_after_truncation("Tensor(mmap.mmap(fd, 1 << 16))", "[0, 8192]")
    assert statuses == ["SUCCESS", "REM_ACCESS_ERR"]


def test_numpy_map_of_a_file_that_has_become_shorter_completes_with_an_error(rc, fd):
    numpy = pytest.importorskip("numpy")
    memory = numpy.memmap(f"/proc/self/fd/{fd}", "u4", "r+")[8:].reshape(2, -1)
    with rp.MR(rc.pd, memory, ALL) as mr:
        os.truncate(fd, PAGE)
        rc.a.post_send(rp.RdmaRead(rc.mine[:8], remote_addr=mr.addr + PAGE, rkey=mr.rkey))
        assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_anonymous_map_is_not_taken_for_a_file(pd):
    """For a region that may be a file, soft0 has the kernel copy, which is slower."""
    for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        memory = mmap.mmap(-1, 3 * PAGE, flags=flags)
        assert not may_shrink(_address(memory), 3 * PAGE)


def test_file_whose_path_begins_like_shared_anonymous_memory_is_taken_for_a_file():
    """/proc/self/maps lists shared anonymous memory as /dev/zero (deleted)."""
    if not os.access("/dev", os.W_OK):
        pytest.skip("no file can be created in /dev")
    with tempfile.NamedTemporaryFile(dir="/dev", prefix="zero-") as file:
        file.truncate(PAGE)
        memory = mmap.mmap(file.fileno(), PAGE)
        assert may_shrink(_address(memory), PAGE)


def test_file_whose_name_has_a_line_end_does_not_disturb_the_search(tmp_path):
    """The kernel escapes only a newline in /proc/self/maps."""
    path = tmp_path / "a\rb"
    path.write_bytes(bytes(PAGE))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), PAGE)
    assert may_shrink(_address(memory), PAGE)
    anonymous = mmap.mmap(-1, PAGE)
    assert not may_shrink(_address(anonymous), PAGE)


def test_maps_are_searched_for_files_in_the_whole_range(fd):
    memory = mmap.mmap(fd, 4 * PAGE)
    address = _address(memory)
    assert may_shrink(address, 1)
    assert may_shrink(address + 4 * PAGE - 1, 1)
    assert may_shrink(address - 1, 2)


def test_file_mapped_behind_anonymous_memory_in_the_range_is_found(fd):
    """The file is mapped over a part of the anonymous memory, so that the two are neighbours."""
    shared = mmap.mmap(-1, 8 * PAGE)
    first = _address(shared)
    assert not may_shrink(first, 8 * PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    fixed = mmap.MAP_SHARED | 0x10
    assert libc.mmap(first + 4 * PAGE, PAGE, mmap.PROT_READ, fixed, fd, 0) == first + 4 * PAGE
    assert may_shrink(first, 8 * PAGE)


# ---- memory that the kernel copies ------------------------------------------------------


def test_memory_copied_by_the_kernel_is_read_and_written_whole(fd):
    memory = mmap.mmap(fd, 4 * PAGE)
    room = native.Room(_address(memory) + 8, 4 * PAGE - 8, memory)
    assert len(room) == 4 * PAGE - 8
    data = os.urandom(3 * PAGE - 8)
    room[PAGE:].fill(data)
    assert memory[PAGE + 8 :] == data
    assert room[PAGE:].read() == data
    part = room[16:32]
    part.fill(b"sixteen bytes it")
    assert (len(part), part.read()) == (16, b"sixteen bytes it")
    assert memory[24:40] == b"sixteen bytes it"
    with pytest.raises(ValueError, match="the lengths differ"):
        part.fill(b"short")
    with pytest.raises(TypeError):
        part.fill(None)
    os.truncate(fd, PAGE)
    assert room.read() is None
    assert part.read() == b"sixteen bytes it"
    with pytest.raises(OSError, match="Bad address"):
        room[2 * PAGE : 2 * PAGE + 8].fill(b"not kept")


LARGE_ROOM = """
import ctypes, mmap, os
from rdmapost._binding import native

PAGE, SIZE = mmap.PAGESIZE, 300_000
fd = os.memfd_create("test")
os.ftruncate(fd, SIZE)
memory = mmap.mmap(fd, SIZE)
room = native.Room(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 3, SIZE - 5, memory)
data = os.urandom(SIZE - 5)
open_before = len(os.listdir("/proc/self/fd"))
room.fill(data)
assert room[7:8].read() == data[7:8]
print(memory[:] == bytes(3) + data + bytes(2), room.read() == data)
os.ftruncate(fd, SIZE // 2 // PAGE * PAGE)
for act in (room.read, lambda: room.fill(data), lambda: room[-9:].fill(b"not there")):
    try:
        print(act())
    except OSError as error:
        print(error.strerror)
print(len(os.listdir("/proc/self/fd")) - open_before)
"""


@pytest.mark.parametrize("refusal", [0, errno.EPERM, errno.ENOSYS, errno.EACCES])
def test_much_memory_copied_by_the_kernel_arrives_whole_or_is_an_error(refusal):
    """Many times what is copied at once; through a pipe where a sandbox forbids the calls."""
    sandbox = f"forbid('process_vm', {refusal})" if refusal else ""
    assert prints(FORBID + sandbox + LARGE_ROOM).splitlines() == [
        "True True",
        "None",
        "Bad address",
        "Bad address",
        "0",
    ]


@pytest.fixture
def after_a_post(context):
    """A post forgets which writes of earlier ones were refused."""
    with rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, rp.QPType.RC, cq) as qp:
        qp.connect(qp.endpoint())
        qp.post_send(rp.RdmaWrite())
        cq.wait()[0].check()


def test_memory_is_permitted_where_every_page_of_the_range_is(after_a_post, fd):
    memory = mmap.mmap(-1, 8 * PAGE)
    first = _address(memory)
    _protect(memory, 3, mmap.PROT_READ)
    _protect(memory, 5, 0)

    def reads_writes(start: int, length: int) -> tuple[bool, bool]:
        writes = native.permitted(first + start, length, True)
        assert native.reachable(first + start, length) is writes
        return native.permitted(first + start, length, False), writes

    before = len(os.listdir("/proc/self/fd"))
    try:
        assert reads_writes(8, 0) == (True, True)
        assert reads_writes(8, 3 * PAGE - 8) == (True, True)
        assert reads_writes(8, 3 * PAGE - 7) == (True, False)
        assert reads_writes(3 * PAGE - 1, 1) == (True, True)
        assert reads_writes(3 * PAGE - 1, 2) == (True, False)
        assert reads_writes(2 * PAGE, 3 * PAGE) == (True, False)
        assert reads_writes(3 * PAGE, 1) == (True, False)
        assert reads_writes(4 * PAGE, PAGE) == (True, True)
        assert reads_writes(4 * PAGE, PAGE + 1) == (False, False)
        assert reads_writes(4 * PAGE, 3 * PAGE) == (False, False)
        assert reads_writes(5 * PAGE, PAGE) == (False, False)
        assert reads_writes(6 * PAGE - 1, 2) == (False, False)
        assert reads_writes(6 * PAGE, 2 * PAGE) == (True, True)
        # The sum of the address and the length is 0 or 8.
        assert reads_writes(-first - 8, 8) == (False, False)
        assert reads_writes(-first - 8, 16) == (False, False)
    finally:
        for page in (3, 5):
            _protect(memory, page, mmap.PROT_READ | mmap.PROT_WRITE)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.EPERM, errno.ENOSYS])
def test_error_of_an_earlier_call_decides_nothing_about_memory(after_a_post, code):
    libc = ctypes.CDLL(None)
    libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
    memory = mmap.mmap(-1, PAGE)
    libc.__errno_location()[0] = code
    assert native.reachable(_address(memory), PAGE)
    for size in (1, PAGE):
        room = native.Room(_address(memory), size, memory)
        libc.__errno_location()[0] = code
        room.fill(b"x" * size)
        libc.__errno_location()[0] = code
        assert room.read() == b"x" * size


def test_write_to_memory_whose_end_has_gone_leaves_its_beginning_unchanged(rc, fd):
    """Its pages are faulted in before the first byte is written."""
    memory = mmap.mmap(fd, 4 * PAGE)
    try:
        mmap.mmap(-1, PAGE).madvise(MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("the kernel does not fault pages in when it is asked to")
    with rp.MR(rc.pd, memory, ALL) as mr, rp.MR(rc.pd, b"\xff" * PAGE, 0) as mine:
        os.truncate(fd, 2 * PAGE)
        rc.a.post_send(rp.RdmaWrite(mine[:], remote_addr=mr.addr + PAGE + 8, rkey=mr.rkey))
        assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR
    assert not any(memory[: 2 * PAGE])


def test_memory_functions_refuse_what_they_cannot_take():
    memory = bytearray(8)
    room = native.Room(_address(memory), 8, memory)
    for call in (
        lambda: native.Room("address", 8, memory),
        lambda: native.reachable("address", 8),
        lambda: native.permitted("address", 8, True),
        lambda: room["start":],
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(MemoryError):
        native.Room(_address(memory), 1 << 62, memory).read()


def test_memory_that_may_be_unmapped_is_kept_as_long_as_a_part_of_it():
    class Memory(bytearray):
        """A bytearray that a weakref can observe."""

    memory = Memory(64)
    gone = weakref.ref(memory)
    room = native.Room(_address(memory), 64, memory)
    part = room[8:16]
    del memory, room
    gc.collect()
    part.fill(b"is there")
    assert part.read() == b"is there"
    del part
    assert gone() is None


@pytest.mark.parametrize("level", rp.FlushLevel)
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
def test_flush_checks_the_key_and_touches_no_memory(fd, device, level):
    """However large the region is: it may be a file with holes."""
    size = 5 << 30
    os.truncate(fd, size)
    access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.FLUSH_GLOBAL
    with (
        open_roce(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.MR(pd, mmap.mmap(fd, size), access) as mr,
        rp.QP(pd, rp.QPType.RC, cq, send_ops_flags=rp.SendOps.FLUSH) as near,
        rp.QP(pd, rp.QPType.RC, cq) as far,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint(), access=access)
        before = resident()
        length = (1 << 32) - 1 if level is rp.FlushLevel.RANGE else 0
        near.post_send(rp.Flush(remote_addr=mr.addr, rkey=mr.rkey, level=level, length=length))
        assert cq.wait(timeout=20)[0].status is WCStatus.SUCCESS
        assert resident() - before < 16 << 20
    assert os.fstat(fd).st_blocks == 0


def test_read_takes_one_copy_of_memory_that_the_kernel_copies(rc, fd):
    size = 16 << 20
    os.truncate(fd, size)
    with (
        rp.MR(rc.pd, mmap.mmap(fd, size), ALL) as theirs,
        rp.MR(rc.pd, mmap.mmap(-1, size), ALL) as mine,
    ):
        rc.a.post_send(rp.RdmaRead(mine[:], remote_addr=theirs.addr, rkey=theirs.rkey))
        rc.wait()
        tracemalloc.start()
        try:
            rc.a.post_send(rp.RdmaRead(mine[:], remote_addr=theirs.addr, rkey=theirs.rkey))
            rc.wait()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < size + (1 << 20)


# ---- dma-bufs ---------------------------------------------------------------------------


@pytest.mark.parametrize("iova", [0, 1 << 40])
def test_region_of_a_dmabuf_is_that_memory_at_its_iova(rc, fd, iova):
    with rp.MR.from_dmabuf(rc.pd, fd, PAGE + 16, 64, iova + 16, ALL) as mr:
        assert (mr.addr, mr.end, mr.length) == (iova + 16, iova + 80, 64)
        assert mr.buffer_addr is None
        rc.mine.buffer[:8] = b"8 bytes!"
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=iova + 16, rkey=mr.rkey))
        rc.wait()
        assert os.pread(fd, 8, PAGE + 16) == b"8 bytes!"
        os.pwrite(fd, b"new data", PAGE + 24)
        rc.b.post_recv(rp.RecvWR(rc.theirs[:]))
        rc.a.post_send(rp.Send(mr[8:16]))
        rc.wait(2)
        assert bytes(rc.theirs.buffer[:8]) == b"new data"
        with pytest.raises(rp.PostError, match="lies outside"):
            rc.a.post_send(rp.Send(rp.SGE(iova + 8, 8, mr.lkey, mr)))


def test_descriptor_of_a_dmabuf_may_be_closed(rc, fd):
    other = os.dup(fd)
    with rp.MR.from_dmabuf(rc.pd, other, 0, PAGE, 0, ALL) as mr:
        os.close(other)
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=0, rkey=mr.rkey))
        rc.wait()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        rp.MR.from_dmabuf(rc.pd, fd, 0, PAGE, 0, ALL).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_inline_from_a_dmabuf_is_refused(rc, fd):
    with (
        rp.MR.from_dmabuf(rc.pd, fd, 0, PAGE, 0, ALL) as mr,
        pytest.raises(rp.PostError, match="INLINE reads the buffer"),
    ):
        rc.a.post_send(rp.Send(mr[:8], send_flags=rp.SendFlags.INLINE))


def test_dmabuf_without_local_write_may_be_read_only(rc, fd):
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(rp.VerbsError) as caught:
            rp.MR.from_dmabuf(rc.pd, read_only, 0, PAGE, 0, ALL)
        assert caught.value.errno == errno.EACCES
        rp.MR.from_dmabuf(rc.pd, read_only, 0, PAGE, 0, Access.REMOTE_READ).close()
    finally:
        os.close(read_only)


@pytest.mark.parametrize(
    ("offset", "length", "iova", "access", "text"),
    [
        (0, 8, 1, ALL, "offset and iova must be at the same position in a page"),
        (0, 5 * PAGE, 0, ALL, f"it has {4 * PAGE} bytes"),
        *(
            (0, 8, 0, ALL | flag, f"a region of a dma-buf cannot have Access.{flag.name}")
            for flag in (
                Access.MW_BIND,
                Access.ZERO_BASED,
                Access.HUGETLB,
                Access.FLUSH_GLOBAL,
                Access.FLUSH_PERSISTENT,
                Access.MW_BIND | Access.HUGETLB,
            )
        ),
    ],
)
def test_dmabuf_that_the_kernel_would_refuse_is_refused(rc, fd, offset, length, iova, access, text):
    with pytest.raises(rp.VerbsError, match="ibv_reg_dmabuf_mr: EINVAL") as caught:
        rp.MR.from_dmabuf(rc.pd, fd, offset, length, iova, access)
    assert text in caught.value.hint


def test_descriptor_that_cannot_be_mapped_is_refused(pd):
    fd = os.eventfd(0)
    try:
        with pytest.raises(rp.VerbsError, match="ibv_reg_dmabuf_mr: ENODEV"):
            rp.MR.from_dmabuf(pd, fd, 0, 8, 0)
    finally:
        os.close(fd)
    with pytest.raises(rp.VerbsError, match="ibv_reg_dmabuf_mr: EBADF") as caught:
        rp.MR.from_dmabuf(pd, fd, 0, 8, 0)
    assert str(caught.value).count("descriptor") == 1
    assert str(caught.value).endswith(f": fd {fd} cannot be mapped")


# ---- advice -----------------------------------------------------------------------------


def test_advice_that_a_device_would_refuse_is_refused(pd, context):
    def refused(*arguments):
        with pytest.raises(rp.VerbsError, match="ibv_advise_mr") as caught:
            pd.advise_mr(*arguments)
        return caught.value.errno

    with rp.PD(context) as other, rp.MR(pd, 64) as mr, rp.MR(other, 64) as foreign:
        assert refused(0, foreign[:]) == errno.ENOENT
        assert refused(0, rp.SGE(mr.addr, 65, mr.lkey)) == errno.EFAULT
        with rp.MR(pd, 64, 0) as read_only:
            assert refused(AdviseMRAdvice.PREFETCH_WRITE, read_only[:]) == errno.EPERM
            pd.advise_mr(AdviseMRAdvice.PREFETCH_NO_FAULT, read_only[:])


@pytest.mark.parametrize("kind", ["file", "address"])
def test_atomic_write_reaches_memory_that_is_mapped(fd, kind, context):
    memory = mmap.mmap(fd, PAGE)
    access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
    with (
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        (
            rp.MR(pd, memory, access)
            if kind == "file"
            else rp.MR.at(pd, _address(memory), PAGE, access)
        ) as mr,
        rp.QP(pd, rp.QPType.RC, cq, send_ops_flags=rp.SendOps.ATOMIC_WRITE) as near,
        rp.QP(pd, rp.QPType.RC, cq) as far,
    ):
        near.connect(far.endpoint())
        far.connect(near.endpoint())
        value = 0x0102030405060708
        near.post_send(
            rp.AtomicWrite(atomic_wr=value, remote_addr=mr.addr + 64, rkey=mr.rkey, wr_id=7)
        )
        (wc,) = cq.wait()
        assert (wc.wr_id, wc.status) == (7, WCStatus.SUCCESS)
        assert memory[64:72] == value.to_bytes(8, sys.byteorder)
        assert not any(memory[:64] + memory[72:])
