"""Memory regions (MR): the memory, sizes and access they take, and the SGEs that slices are."""

from __future__ import annotations

import array
import errno
import gc
import mmap
import warnings
from typing import Any

import pytest
from support import ALL, LOSES_MEMORY, needs, null_device, prints

import rdmapost as rp
from rdmapost import Access
from rdmapost.resources.resource import open_children


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
def test_region_over_any_writable_buffer_is_that_memory(rc, name):
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
def test_region_over_an_object_without_a_writable_buffer_is_refused(pd, memory):
    with pytest.raises(TypeError, match="a memory region needs a writable buffer, not"):
        rp.MR(pd, memory)


def test_region_over_a_read_only_array_is_refused_as_read_only(pd):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    with pytest.raises(TypeError, match=r"not ndarray \(it is read-only\), or an access without L"):
        rp.MR(pd, numpy.frombuffer(b"8 bytes!", numpy.uint8))


def test_region_over_a_read_only_map_is_refused(pd):
    with (
        mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as memory,
        pytest.raises(TypeError, match="needs a writable buffer, not mmap"),
    ):
        rp.MR(pd, memory)


@pytest.mark.parametrize("memory", [0, -1, bytearray(), array.array("d")])
def test_empty_region_is_refused(pd, memory):
    with pytest.raises(ValueError, match="a region needs at least 1 byte"):
        rp.MR(pd, memory)


def test_region_over_a_buffer_with_gaps_is_refused(pd):
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
def test_slice_outside_its_region_is_an_index_error(pd, bounds):
    with rp.MR(pd, 100) as mr, pytest.raises(IndexError, match="is not within MR of 100 bytes"):
        mr[slice(*bounds)]


@pytest.mark.parametrize("index", [0, "a", (1, 2), slice(0, 10, 2)])
def test_region_index_with_a_step_or_without_a_slice_is_refused(pd, index):
    with rp.MR(pd, 100) as mr, pytest.raises(TypeError, match="with no step"):
        mr[index]


def test_object_laid_out_in_memory_like_a_slice_is_no_slice_of_a_region(pd):
    class Alike:
        __slots__ = ("a", "b", "c")

    alike: Any = Alike()
    alike.a, alike.b, alike.c = 0, 8, None
    with rp.MR(pd, 100) as mr, pytest.raises(TypeError, match="must be a slice of the region"):
        mr[alike]


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


def test_region_larger_than_memory_is_a_memory_error(pd):
    for size, why in (
        (1 << 62, "Cannot allocate memory"),
        (1 << 70, "no address space is that large"),
    ):
        with pytest.raises(MemoryError, match=f"cannot allocate {size} bytes for a region: {why}$"):
            rp.MR(pd, size)


null = null_device.null
on_null = null_device.on_null


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (12, "64 bytes must be locked in memory and this process may lock 64 KiB in all"),
        (11, "to raise it: ulimit -l unlimited"),
        (14, "the memory cannot be pinned: it is a device mapping, is not writable"),
        (22, "the device does not accept this length or these access flags"),
        (5, "ibv_reg_mr: EIO (5, Input/output error)"),
    ],
)
def test_failed_registration_says_what_to_do(on_null, code, words):
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


def test_region_that_cannot_be_deregistered_keeps_its_memory(connect, context):
    """Its last reference is dropped while a window is bound to it and a peer writes through
    that."""
    needs(context.attr.max_mw, "memory windows", context)
    pair = connect()
    mw = rp.MW(pair.pd)
    memory = bytearray(4096)
    mr = rp.MR(pair.pd, memory, ALL | Access.MW_BIND)
    addr, size = mr.addr, mr.length
    rkey = mw.next_rkey()
    bind = rp.BindMW(
        mw=mw, mr=mr, rkey=rkey, addr=addr, length=size, mw_access_flags=Access.REMOTE_WRITE
    )
    pair.a.post_send(bind)
    pair.wait()
    before = {id(r) for r in open_children(pair.pd)}
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        del mr, memory, bind
        gc.collect()
    # It still exists, and its memory has not been reused.
    assert {id(r) for r in open_children(pair.pd)} == before
    others = [bytearray(4096) for _ in range(64)]
    pair.mine.buffer[:5] = b"wrong"
    write = rp.RdmaWrite(pair.mine[:5], remote_addr=addr, rkey=rkey)
    pair.b.post_send(write)
    pair.wait()
    assert not any(any(other) for other in others)
    mw.close()
    for left in open_children(pair.pd):
        if isinstance(left, rp.MR) and left not in (pair.mine, pair.theirs):
            left.close()


CLOSE_WITHOUT_MEMORY = """
import _testcapi, rdmapost as rp
pd = rp.PD(rp.open_device("soft0"))

def exported(memory):
    try: memory.append(0)
    except BufferError: return True
    return False

unfinished, wrong = 0, []
for burst in (1, 16, 200):
    for at in range(80):
        memory = bytearray(64)
        mr = rp.MR(pd, memory)
        _testcapi.set_nomemory(at, at + burst)
        try: mr.close()
        except (MemoryError, rp.VerbsError): pass
        finally: _testcapi.remove_mem_hooks()
        held = exported(memory)
        if not mr.closed and not held: wrong.append((burst, at, "open"))
        unfinished += mr.closed and held
        mr.close()
        if exported(memory): wrong.append((burst, at, "closed"))
pd.close()
print(unfinished > 0, wrong)
"""


def test_region_closed_without_memory_is_released_by_closing_it_again():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(CLOSE_WITHOUT_MEMORY, **LOSES_MEMORY) == "True []"
