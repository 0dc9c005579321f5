"""Memory regions and windows, shared receive queues, and what may be closed when."""

from __future__ import annotations

import array
import contextlib
import errno
import mmap

import pytest
from support import ALL, GRH, needs, prints

import rdmapost as rp
from rdmapost import Access, DeviceCap, MWType, QPType, WCStatus

# ---- regions ----------------------------------------------------------------------


def numpy_zeros(shape, dtype, order="C"):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    return numpy.zeros(shape, dtype, order=order)


BUFFERS = {
    "bytearray": lambda: bytearray(64),
    "mmap": lambda: mmap.mmap(-1, 64),
    "array": lambda: array.array("d", [0.0] * 8),
    "memoryview": lambda: memoryview(bytearray(64)),
    "memoryview of a part": lambda: memoryview(bytearray(100))[20:84],
    "memoryview of ints": lambda: memoryview(array.array("I", [0] * 16)),
    "numpy": lambda: numpy_zeros((8, 8), "u1"),
    "numpy of doubles": lambda: numpy_zeros(8, "f8"),
    "numpy big-endian": lambda: numpy_zeros(16, ">u4"),
    "numpy records": lambda: numpy_zeros(4, [("a", "u8"), ("b", "u8")]),
    "numpy by columns": lambda: numpy_zeros((2, 4), "u8", "F"),
    "size": lambda: 64,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_region_over_any_writable_buffer(rc, name):
    """What the device writes is in the buffer itself: nothing is copied."""
    memory = BUFFERS[name]()
    with rp.MR(rc.pd, memory, ALL) as mr:
        assert (mr.length, len(mr), mr.buffer.nbytes, mr.buffer.format) == (64, 64, 64, "B")
        assert str(mr) == f"MR of 64 bytes (lkey {mr.lkey:#x})"
        rc.mine.buffer[:8] = b"\1\2\3\4\5\6\7\x08"
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=mr.addr, rkey=mr.rkey))
        rc.wait()
        assert bytes(mr.buffer[:9]) == b"\1\2\3\4\5\6\7\x08\0"
        if name != "size":
            raw = memory.tobytes("A") if name.startswith("numpy") else bytes(memoryview(memory))
            assert raw[:9] == b"\1\2\3\4\5\6\7\x08\0"


@pytest.mark.parametrize(
    "memory", [b"bytes", "text", None, memoryview(b"read-only"), [1, 2], 1.5, object()]
)
def test_what_is_no_writable_buffer_is_refused(pd, memory):
    with pytest.raises(TypeError, match="a memory region needs a writable buffer, not"):
        rp.MR(pd, memory)


def test_read_only_array_is_refused_as_one(pd):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    with pytest.raises(TypeError, match=r"writable buffer, not ndarray \(it is read-only\)"):
        rp.MR(pd, numpy.frombuffer(b"8 bytes!", numpy.uint8))


def test_read_only_map_is_refused(pd):
    with (
        mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as memory,
        pytest.raises(TypeError, match="needs a writable buffer, not mmap"),
    ):
        rp.MR(pd, memory)


@pytest.mark.parametrize("memory", [0, -1, bytearray(), array.array("d")])
def test_empty_region_is_refused(pd, memory):
    with pytest.raises(ValueError, match="a region has at least 1 byte"):
        rp.MR(pd, memory)


def test_buffer_with_gaps_is_refused(pd):
    with pytest.raises(ValueError, match="has gaps"):
        rp.MR(pd, memoryview(bytearray(64))[::2])


@pytest.mark.parametrize("access", [Access.REMOTE_WRITE, Access.REMOTE_ATOMIC])
def test_remote_write_and_atomic_access_without_local_write_are_refused(pd, access):
    with pytest.raises(ValueError, match=f"{access.name} needs LOCAL_WRITE too"):
        rp.MR(pd, 64, access)


def test_bytearray_cannot_be_resized_while_it_is_registered(pd):
    data = bytearray(64)
    mr = rp.MR(pd, data)
    with pytest.raises(BufferError):
        data.append(1)
    with pytest.raises(BufferError):
        data.clear()
    mr.close()
    data.append(1)
    assert len(data) == 65
    assert mr.closed


def test_region_of_a_size_is_zeroed_and_aligned_and_can_be_read_afterwards(pd):
    with rp.MR(pd, 5000) as mr:
        assert not any(mr.buffer)
        assert mr.addr % mmap.PAGESIZE == 0
        mr.buffer[:4] = b"data"
    assert bytes(mr.buffer[:4]) == b"data"


def test_slice_of_a_region_has_the_address_and_length_of_its_bytes(pd):
    with rp.MR(pd, 100) as mr:
        for bounds, (start, stop) in {
            (None, None): (0, 100),
            (10, None): (10, 100),
            (None, 10): (0, 10),
            (20, 30): (20, 30),
            (-10, None): (90, 100),
            (None, -90): (0, 10),
            (100, 100): (100, 100),
            (-100, 1): (0, 1),
        }.items():
            sge = mr[slice(*bounds)]
            assert sge[:3] == (mr.addr + start, stop - start, mr.lkey)
            assert sge.owner is mr


@pytest.mark.parametrize("bounds", [(0, 101), (-101, None), (101, 101), (50, 40), (90, 1 << 70)])
def test_slice_outside_the_region_is_an_index_error(pd, bounds):
    with rp.MR(pd, 100) as mr, pytest.raises(IndexError, match="is not within MR of 100 bytes"):
        mr[slice(*bounds)]


@pytest.mark.parametrize("index", [0, "a", (1, 2), slice(0, 10, 2)])
def test_only_a_slice_without_a_step_is_an_sge(pd, index):
    with rp.MR(pd, 100) as mr, pytest.raises(TypeError, match="without a step"):
        mr[index]


def test_closed_pd_is_refused(context):
    pd = rp.PD(context)
    pd.close()
    for make in (lambda: rp.MR(pd, 64), lambda: rp.SRQ(pd), lambda: rp.MW(pd)):
        with pytest.raises(rp.ClosedError, match="PD is closed"):
            make()


def test_memlock_limit_is_named(verbs_context):
    """The process may lock 64 KiB, and asks for 1 MiB."""
    said = prints(
        "import os, resource, sys, rdmapost as rp\n"
        "pd = rp.PD(rp.open_device(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        # Root may lock as much as it likes.
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: rp.MR(pd, 1 << 20)\n"
        "except rp.VerbsError as error: print(error.errno, error)\n"
        "else: print('registered')\n",
        verbs_context.name,
    )
    assert said.startswith(f"{errno.ENOMEM} ibv_reg_mr: ENOMEM")
    assert "1048576 bytes must be locked" in said
    assert "this process may lock 64 KiB" in said
    assert "ulimit -l" in said


# ---- closing what is in flight ----------------------------------------------------


def test_region_in_flight_cannot_be_closed(rc):
    """The error names the work requests, by the caller's wr_id."""
    with rp.MR(rc.pd, 64, ALL) as mr:
        rc.b.post_recv([rp.RecvWR(mr[:8], wr_id=i) for i in (71, 72)])
        with pytest.raises(rp.InUseError, match=r"2 outstanding work requests .*wr_id 71, 72\)"):
            mr.close()
        assert not mr.closed
        rc.a.post_send([rp.Send(rc.mine[:8]), rp.Send(rc.mine[:8])])
        rc.wait(4)
    assert mr.closed


def test_many_work_requests_are_not_all_listed(rc):
    mr = rp.MR(rc.pd, 64, ALL)
    rc.b.post_recv([rp.RecvWR(mr[:8], wr_id=i) for i in range(10)])
    with pytest.raises(rp.InUseError, match=r"10 outstanding .*\(wr_id 0, 1, 2, 3, \.\.\.\)"):
        mr.close()
    rc.b.close()
    mr.close()


def test_unsignaled_work_request_keeps_its_region(rc):
    """It is not known to be done until a later one completes."""
    mr = rp.MR(rc.pd, 64)
    rc.a.post_send(rc.wr(rp.RdmaWrite, mr[:8], wr_id=5, send_flags=0))
    with pytest.raises(rp.InUseError, match="wr_id 5"):
        mr.close()
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:8]))
    rc.wait()
    mr.close()


def test_inline_work_request_does_not_keep_its_region(connect):
    pair = connect(max_inline_data=64)
    mr = rp.MR(pair.pd, 64)
    flags = rp.SendFlags.INLINE
    pair.a.post_send(pair.wr(rp.RdmaWrite, mr[:8], send_flags=flags))
    mr.close()
    pair.works()


def test_address_handle_in_flight_cannot_be_closed(connect):
    pair = connect(QPType.UD)
    pair.a.post_send(pair.send(pair.mine[:8], wr_id=5, send_flags=0))
    with pytest.raises(rp.InUseError, match=r"AH to .* cannot be closed: .*wr_id 5"):
        pair.ah.close()
    pair.b.post_recv(rp.RecvWR(pair.theirs[:64]))
    pair.a.post_send(pair.send(pair.mine[:8]))
    pair.wait(1)
    while pair.a.outstanding.send:
        pair.wait(1)
    pair.ah.close()


def test_pd_with_open_resources_names_them(rc):
    with pytest.raises(rp.InUseError, match="PD cannot be closed: MR of 8192 bytes"):
        rc.pd.close()
    with pytest.raises(rp.InUseError, match=r"device .* cannot be closed: "):
        rc.pd.context.close()
    rc.works()


# ---- memory windows ---------------------------------------------------------------

BINDABLE = ALL | Access.MW_BIND


@pytest.fixture
def window(context, rc, stack):
    """A type 2 window and a region that it can be bound to, on b's side."""
    needs(
        context.attr.device_cap_flags
        & (DeviceCap.MEM_WINDOW_TYPE_2A | DeviceCap.MEM_WINDOW_TYPE_2B),
        "memory windows of type 2",
        context,
    )
    region = stack.enter_context(rp.MR(rc.pd, 256, BINDABLE))
    # It is closed before the queue pairs: rxe waits for a window bound through one.
    mw = stack.enter_context(rp.MW(rc.pd))
    return mw, region


def bind(rc, mw, region, start=64, length=64, access=None, **fields):
    access = Access.REMOTE_WRITE | Access.REMOTE_READ if access is None else access
    rkey = mw.next_rkey()
    rc.b.post_send(
        rp.BindMW(
            mw=mw,
            rkey=rkey,
            mr=region,
            addr=region.addr + start,
            length=length,
            mw_access_flags=access,
            **fields,
        )
    )
    return rkey


def test_window_opens_a_part_of_a_region(rc, window):
    mw, region = window
    rkey = bind(rc, mw, region, wr_id=1)
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (1, rp.WCOpcode.BIND_MW)
    rc.mine.buffer[:4] = b"mine"
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=rkey))
    rc.wait()
    assert bytes(region.buffer[63:69]) == b"\0mine\0"
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 126, rkey=rkey))
    outside = rc.cq.wait()[0].status
    # IBTA: REM_ACCESS_ERR; rxe looks only at the bounds of the region.
    assert outside in (WCStatus.REM_ACCESS_ERR, WCStatus.SUCCESS)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 254, rkey=rkey))
    refused = rc.cq.wait()[0].status
    assert refused is (WCStatus.WR_FLUSH_ERR if outside else WCStatus.REM_ACCESS_ERR)


def test_window_is_bound_again_with_a_new_key(rc, window):
    """next_rkey() gives a new key each time; the old one no longer works."""
    mw, region = window
    first = bind(rc, mw, region)
    rc.wait()
    assert mw.rkey == first
    rc.b.post_send(rp.LocalInv(invalidate_rkey=first))
    rc.wait()
    second = bind(rc, mw, region, start=0)
    rc.wait()
    assert second != first
    assert second >> 8 == first >> 8
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr, rkey=second))
    rc.wait()
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr, rkey=first))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("windows", [1, 2])
def test_region_with_bound_windows_cannot_be_closed(rc, window, windows):
    """The error names them. Once they are closed the region can be."""
    first, _ = window
    region = rp.MR(rc.pd, 256, BINDABLE)
    bound = [first, rp.MW(rc.pd)][:windows]
    for mw in bound:
        bind(rc, mw, region)
        rc.wait()
    with pytest.raises(rp.InUseError) as caught:
        region.close()
    assert str(caught.value) == (
        f"{region} cannot be closed: {', '.join(map(str, reversed(bound)))} bound to it; "
        f"unbind or close {'it' if windows == 1 else 'them'} first"
    )
    assert not region.closed
    for mw in bound:
        mw.close()
    region.close()


def test_invalidated_window_is_closed_to_peers(rc, window):
    mw, region = window
    rkey = bind(rc, mw, region)
    rc.wait()
    rc.b.post_send(rp.LocalInv(invalidate_rkey=rkey, wr_id=3))
    (done,) = rc.wait()
    assert (done.wr_id, done.opcode) == (3, rp.WCOpcode.LOCAL_INV)
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=rkey))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_peer_invalidates_a_window_with_a_send(rc, window):
    """SEND_WITH_INV: the receiver's completion names the key."""
    mw, region = window
    rkey = bind(rc, mw, region)
    rc.wait()
    rc.b.post_recv(rp.RecvWR(rc.theirs[:8], wr_id=7))
    rc.a.post_send(rp.SendWithInv(rc.mine[:8], invalidate_rkey=rkey, wr_id=9))
    done = {wc.wr_id: wc for wc in rc.wait(2)}
    assert done[7].imm_data is None
    if not done[7].wc_flags & rp.WCFlags.IP_CSUM_OK:
        assert done[7].wc_flags & rp.WCFlags.WITH_INV
        assert done[7].invalidated_rkey == rkey
    # Else it is rxe: it hands out the kernel's own numbers of the flags, in which
    # "with invalidate" is what user space knows as IP_CSUM_OK.
    rc.a.post_send(rc.wr(rp.RdmaWrite, rc.mine[:4], remote_addr=region.addr + 64, rkey=rkey))
    assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR


def test_window_and_region_of_a_posted_bind_stay_open(rc, window):
    mw, region = window
    bind(rc, mw, region, wr_id=5, send_flags=0)
    for resource in (mw, region):
        with pytest.raises(rp.InUseError, match="wr_id 5"):
            resource.close()
    rc.b.post_send(rp.RdmaWrite(remote_addr=rc.mine.addr, rkey=rc.mine.rkey))
    rc.wait()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mw": None}, "BIND_MW needs a memory window"),
        ({"mr": None}, "BIND_MW needs a memory window"),
        ({"length": 1000}, "lies outside MR of 256 bytes"),
        ({"addr": 5}, "lies outside"),
        ({"mr": "plain"}, "was registered without MW_BIND"),
        ({"mw": "region"}, "mw: expected MW, got MR"),
        ({"mr": "window"}, "mr: expected MR, got MW"),
    ],
)
def test_bind_with_a_wrong_field_is_refused(rc, window, fields, words):
    mw, region = window
    stand_for = {"plain": rc.theirs, "region": region, "window": mw}
    given = {name: stand_for.get(value, value) for name, value in fields.items()}
    wr = rp.BindMW(
        **{
            "mw": mw,
            "rkey": mw.next_rkey(),
            "mr": region,
            "addr": region.addr,
            "length": 8,
            **given,
        }
    )
    with pytest.raises(rp.PostError, match=words):
        rc.b.post_send(wr)
    rc.works()


@pytest.mark.parametrize("name", ["mw", "mr"])
def test_bind_without_a_pointer_is_refused_unchecked_too(connect, context, name):
    """A driver would follow the NULL."""
    needs(context.attr.device_cap_flags & DeviceCap.MEM_WINDOW_TYPE_2B, "windows", context)
    pair = connect(checked=False)
    with rp.MW(pair.pd) as mw, rp.MR(pair.pd, 64, BINDABLE) as region:
        wr = rp.BindMW(mw=mw, mr=region, addr=region.addr, length=8)
        setattr(wr, name, None)
        with pytest.raises(rp.PostError, match="BIND_MW needs"):
            pair.a.post_send(wr)


def test_type_1_window_is_not_bound_by_a_work_request(rc, context):
    needs(context.attr.device_cap_flags & DeviceCap.MEM_WINDOW, "windows of type 1", context)
    with (
        rp.MW(rc.pd, MWType.TYPE_1) as mw,
        rp.MR(rc.pd, 64, BINDABLE) as region,
        pytest.raises(rp.PostError, match="is of type 1"),
    ):
        rc.a.post_send(rp.BindMW(mw=mw, mr=region, addr=region.addr, length=8))


# ---- shared receive queues --------------------------------------------------------


@pytest.fixture
def srq(context, pd, stack):
    needs(context.attr.max_srq, "shared receive queues", context)
    return stack.enter_context(rp.SRQ(pd, max_wr=32, max_sge=2))


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UD])
def test_two_queue_pairs_share_one(srq, connect, qp_type):
    """Each message takes the next receive, whichever queue pair it is for."""
    pairs = [connect(qp_type, b_options={"srq": srq}) for _ in range(2)]
    grh = GRH if qp_type is QPType.UD else 0
    memory = pairs[0].theirs
    srq.post_srq_recv([rp.RecvWR(memory[i * 100 : i * 100 + 100], wr_id=i) for i in range(4)])
    assert srq.outstanding == 4
    for number, pair in enumerate((pairs[0], pairs[1], pairs[1], pairs[0])):
        pair.mine.buffer[:1] = bytes([number + 1])
        pair.a.post_send(pair.send(pair.mine[:1], wr_id=100))
        done = {wc.wr_id: wc for wc in pair.wait(2)}
        assert done[number].qp_num == pair.b.qp_num
        assert memory.buffer[number * 100 + grh] == number + 1
        assert srq.outstanding == 3 - number


def test_post_recv_on_its_queue_pair_says_which_call_to_use(srq, connect):
    pair = connect(b_options={"srq": srq})
    with pytest.raises(rp.RdmaError, match=r"takes its receives from SRQ .*srq\.post_srq_recv"):
        pair.b.post_recv(rp.RecvWR(pair.theirs[:8]))


def test_tag_matching_is_not_supported(verbs_context):
    """The message is more than errno 95."""
    needs(verbs_context.attr.max_srq, "shared receive queues", verbs_context)
    with rp.PD(verbs_context) as pd, rp.SRQ(pd) as srq:
        for wr in (rp.TagAdd(tag=1), rp.TagDel(), rp.TagSync()):
            with pytest.raises(
                rp.PostError, match=f"tag matching is not supported by {verbs_context.name}"
            ) as caught:
                srq.post_srq_ops(wr)
            assert (caught.value.index, caught.value.posted) == (0, 0)
        assert srq.outstanding == 0


def test_srq_in_use_cannot_be_closed(srq, connect):
    pair = connect(b_options={"srq": srq})
    with pytest.raises(rp.InUseError, match=f"RC QP {pair.b.qp_num:#x} still open"):
        srq.close()


def test_region_in_a_shared_receive_queue_cannot_be_closed(srq, pd):
    with rp.MR(pd, 64) as mr:
        srq.post_srq_recv(rp.RecvWR(mr[:8], wr_id=71))
        with pytest.raises(rp.InUseError, match="wr_id 71"):
            mr.close()
        srq.close()


def test_receives_of_a_shared_queue_are_checked(srq, pd, context):
    with rp.MR(pd, 64) as mr, rp.PD(context) as other, rp.MR(other, 64) as foreign:
        for wr, words in (
            (rp.RecvWR([mr[:8]] * (srq.max_sge + 1)), f"max_recv_sge={srq.max_sge}"),
            (rp.RecvWR(foreign[:8]), "another PD"),
            (rp.RecvWR(mr[5:5]), "length 0"),
            (rp.Send(), "expected RecvWR, got Send"),
        ):
            with pytest.raises(rp.PostError, match=words):
                srq.post_srq_recv([wr])
        assert srq.outstanding == 0


def test_full_shared_receive_queue_is_refused_by_name(srq, pd):
    with rp.MR(pd, 64) as mr:
        depth = srq.max_wr
        srq.post_srq_recv([rp.RecvWR(mr[:8], wr_id=i) for i in range(depth)])
        with pytest.raises(rp.PostError, match=f"the queue is full: max_wr={depth}"):
            srq.post_srq_recv(rp.RecvWR(mr[:8]))
        assert srq.outstanding == depth
        srq.close()


def test_attributes_of_a_shared_receive_queue(srq):
    attr = srq.query()
    assert attr.max_wr >= 32
    assert (srq.max_wr, srq.max_sge) >= (32, 2)
    srq.arm_limit(4)
    assert srq.query().srq_limit == 4


@pytest.mark.parametrize("name", ["max_wr", "max_sge"])
def test_device_decides_whether_a_shared_receive_queue_may_have_size_0(pd, context, name):
    """soft0 and Soft-RoCE refuse it; others create a larger one."""
    needs(context.attr.max_srq, "shared receive queues", context)
    if context.kind == "soft":
        with pytest.raises(
            rp.VerbsError, match=r"EINVAL .*max_wr is in 1\.\..* and max_sge in 1\.\."
        ):
            rp.SRQ(pd, **{name: 0})
        return
    with contextlib.suppress(rp.VerbsError), rp.SRQ(pd, **{name: 0}) as srq:
        assert getattr(srq, name) >= 0


@pytest.mark.parametrize("name", ["max_wr", "max_sge"])
@pytest.mark.parametrize("value", [-1, 1 << 32])
def test_size_of_a_shared_receive_queue_that_does_not_fit(pd, context, name, value):
    needs(context.attr.max_srq, "shared receive queues", context)
    with pytest.raises(ValueError, match=f"{name}={value}"):
        rp.SRQ(pd, **{name: value})
