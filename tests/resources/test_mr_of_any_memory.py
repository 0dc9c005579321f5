"""Memory of any kind: read-only buffers, addresses, dma-bufs, and arrays by their interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import struct
import weakref

import pytest
from support import ALL, LOSES_MEMORY, kernel, needs, prints

import rdmapost as rp
from rdmapost import Access, AdviseMRAdvice, AdviseMRFlags, SendFlags, WCStatus
from rdmapost.loopback import Loopback

READ = Access.REMOTE_READ


def _numpy():
    return pytest.importorskip("numpy", reason="numpy is not installed")


def _address(buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _read(rc, mr, length=8):
    """Return what an RDMA read of the start of a region brings."""
    rc.a.post_send(rp.RdmaRead(rc.mine[:length], remote_addr=mr.addr, rkey=mr.rkey))
    rc.wait()
    return bytes(rc.mine.buffer[:length])


def _write(rc, mr, data):
    rc.mine.buffer[: len(data)] = data
    rc.a.post_send(rp.RdmaWrite(rc.mine[: len(data)], remote_addr=mr.addr, rkey=mr.rkey))
    rc.wait()


# ---- read-only buffers ----------------------------------------------------------------


def _read_only_map():
    memory = mmap.mmap(-1, 4096)
    memory[:8] = b"8 bytes!"
    # A file, as a private map of nothing cannot be filled.
    fd = os.memfd_create("test")
    try:
        os.write(fd, bytes(memory))
        return mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _needs_read_only_maps(context):
    release = tuple(int(number) for number in re.findall(r"\d+", kernel())[:2])
    needs(
        context.kind == "soft" or release >= (6, 2),
        "read-only shared mappings: Linux before 6.2 pins memory for writing",
        context,
    )


READ_ONLY = {
    "bytes": lambda: b"8 bytes!" * 8,
    "map": _read_only_map,
    "memoryview": lambda: memoryview(bytearray(b"8 bytes!")).toreadonly(),
    "array": lambda: _numpy().frombuffer(b"8 bytes!", "u1"),
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_read_only_buffer_is_registered_without_local_write(rc, name):
    if name == "map":
        _needs_read_only_maps(rc.pd.context)
    memory = READ_ONLY[name]()
    with rp.MR(rc.pd, memory, READ) as mr:
        assert mr.buffer.readonly
        assert not mr.writable
        assert mr.buffer_addr == mr.addr
        assert _read(rc, mr) == b"8 bytes!"
        rc.b.post_recv(rp.RecvWR(rc.theirs[:]))
        rc.a.post_send(rp.Send(mr[:8]))
        rc.wait(2)
        assert bytes(rc.theirs.buffer[:8]) == b"8 bytes!"


@pytest.mark.parametrize("name", READ_ONLY)
def test_read_only_buffer_with_local_write_is_refused(pd, name):
    with pytest.raises(TypeError, match=r"needs a writable buffer, not .*it is read-only"):
        rp.MR(pd, READ_ONLY[name](), READ | Access.LOCAL_WRITE)


def test_mapped_file_of_numpy_that_is_read_only_is_registered(rc, tmp_path):
    numpy = _numpy()
    _needs_read_only_maps(rc.pd.context)
    (tmp_path / "data").write_bytes(b"8 bytes!" * 512)
    array = numpy.memmap(tmp_path / "data", "u1", "r")
    with rp.MR(rc.pd, array, READ) as mr:
        assert (mr.length, _read(rc, mr)) == (4096, b"8 bytes!")


def test_nothing_is_written_to_a_read_only_buffer(rc):
    data = bytes(64)
    with rp.MR(rc.pd, data, READ) as mr:
        with pytest.raises(rp.PostError, match="registered without LOCAL_WRITE"):
            rc.b.post_recv(rp.RecvWR(mr[:]))
        rc.a.post_send(rp.RdmaWrite(rc.mine[:8], remote_addr=mr.addr, rkey=mr.rkey))
        assert rc.cq.wait()[0].status is WCStatus.REM_ACCESS_ERR
        assert data == bytes(64)


# ---- addresses ------------------------------------------------------------------------


def test_region_of_an_address_is_that_memory(rc):
    memory = mmap.mmap(-1, 4096)
    with rp.MR.at(rc.pd, _address(memory) + 64, 128, ALL) as mr:
        assert (mr.addr, mr.buffer_addr, mr.length) == (_address(memory) + 64,) * 2 + (128,)
        _write(rc, mr, b"8 bytes!")
        assert memory[64:72] == b"8 bytes!"
        assert _read(rc, mr) == b"8 bytes!"


def test_region_of_an_address_keeps_its_owner_until_it_is_closed(pd):
    class Owner:
        memory = mmap.mmap(-1, 4096)

    owner = Owner()
    gone = weakref.ref(owner)
    mr = rp.MR.at(pd, _address(owner.memory), 64, owner=owner)
    del owner
    gc.collect()
    assert gone() is not None
    mr.close()
    gc.collect()
    assert gone() is None


def test_region_of_an_address_has_no_buffer_and_says_so(rc):
    memory = mmap.mmap(-1, 4096)
    with (
        rp.MR.at(rc.pd, _address(memory), 64) as mr,
        pytest.raises(ValueError, match="has no buffer in Python: it was registered by addr"),
    ):
        _ = mr.buffer


@pytest.mark.parametrize("checked", [True, False])
def test_inline_from_a_region_of_an_address_is_refused_in_words(connect, checked):
    memory = mmap.mmap(-1, 4096)
    pair = connect(checked=checked, max_inline_data=16)
    with rp.MR.at(pair.pd, _address(memory), 64) as mr:
        with pytest.raises(rp.PostError, match=r"INLINE reads the buffer .* has none: it was regi"):
            pair.a.post_send(rp.Send(mr[:8], send_flags=SendFlags.INLINE))
        assert pair.a.outstanding.send == 0


@pytest.mark.parametrize(
    ("address", "length", "error", "text"),
    [
        (0, 8, ValueError, "address=0 is not in 1"),
        (-1, 8, ValueError, "address=-1 is not in 1"),
        (1 << 64, 8, ValueError, "is not in 1..2"),
        (4096, 0, ValueError, "a region needs at least 1 byte, got 0"),
        ((1 << 64) - 4, 8, ValueError, "extend past 2"),
        (1.5, 8, TypeError, "address: expected int, got float"),
        (4096, None, TypeError, "length: expected int, got NoneType"),
    ],
)
def test_address_of_a_region_that_cannot_exist_is_refused(pd, address, length, error, text):
    with pytest.raises(error, match=text):
        rp.MR.at(pd, address, length)


def test_address_without_memory_is_refused_by_the_device(pd):
    with mmap.mmap(-1, 1 << 20) as memory:
        address = _address(memory)
        gc.collect()
    with pytest.raises(rp.VerbsError, match="ibv_reg_mr") as caught:
        rp.MR.at(pd, address, 1 << 20)
    assert caught.value.errno == errno.EFAULT
    assert "cannot be pinned" in caught.value.hint or "is not mapped" in caught.value.hint


def test_read_only_memory_at_an_address_cannot_have_local_write(pd):
    address = _numpy().frombuffer(_read_only := _read_only_map(), "u1").ctypes.data
    with pytest.raises(rp.VerbsError) as caught:
        rp.MR.at(pd, address, 64, owner=_read_only)
    assert caught.value.errno == errno.EFAULT
    _needs_read_only_maps(pd.context)
    rp.MR.at(pd, address, 64, READ, owner=_read_only).close()


@pytest.mark.parametrize("access", [ALL, ALL | Access.ZERO_BASED])
def test_buffer_addr_is_the_memory_s_address_whatever_addr_is(pd, access):
    memory = bytearray(64)
    needs(not access & Access.ZERO_BASED or pd.context.kind == "soft", "ZERO_BASED", pd.context)
    with rp.MR(pd, memory, access) as mr:
        assert mr.buffer_addr == _address(memory)
        assert mr.addr == (0 if access & Access.ZERO_BASED else mr.buffer_addr)


# ---- arrays ---------------------------------------------------------------------------


class DLPack:
    """An array whose memory only ``__dlpack__`` describes, as a tensor's."""

    def __init__(self, array, versioned=True):
        self._array, self._versioned = array, versioned

    def __dlpack__(self, **options):
        if not self._versioned:
            if options:
                raise TypeError("unexpected keyword argument")
            return self._array.__dlpack__()
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
def test_array_by_dlpack_is_registered_without_a_copy(rc, versioned, order):
    array = _numpy().zeros((4, 16), "u4", order=order)
    with rp.MR(rc.pd, DLPack(array, versioned), ALL) as mr:
        assert (mr.addr, mr.length) == (array.ctypes.data, 256)
        _write(rc, mr, b"8 bytes!")
        assert array.tobytes("A")[:8] == b"8 bytes!"
        assert mr.buffer[:8] == b"8 bytes!"
        rc.b.post_recv(rp.RecvWR(rc.theirs[:]))
        rc.a.post_send(rp.Send(mr[:8]))
        rc.wait(2)
        assert bytes(rc.theirs.buffer[:8]) == b"8 bytes!"


def test_array_by_dlpack_lives_as_long_as_the_region_and_views_of_it(pd):
    numpy = _numpy()

    class Array(numpy.ndarray):
        pass

    array = numpy.zeros(4096, "u1").view(Array)
    gone = weakref.ref(array)
    mr = rp.MR(pd, DLPack(array))
    del array
    gc.collect()
    assert gone() is not None
    part = mr.buffer[:8]
    mr.close()
    del mr
    gc.collect()
    assert gone() is not None
    part[:] = b"8 bytes!"
    del part
    gc.collect()
    assert gone() is None


def test_dlpack_capsule_is_used_once(pd):
    """Another library cannot free the memory under the region."""
    array = _numpy().arange(512, dtype="u1")

    class Tensor:
        capsule = array.__dlpack__()

        def __dlpack__(self, **_):
            return self.capsule

        def __dlpack_device__(self):
            return 1, 0

    free = weakref.ref(array)
    del array
    with rp.MR(pd, Tensor(), ALL) as mr:
        with pytest.raises((ValueError, BufferError, RuntimeError)):
            _numpy().from_dlpack(Tensor())
        with pytest.raises(TypeError, match="no unused DLPack capsule"):
            rp.MR(pd, Tensor(), ALL)
        Tensor.capsule = None
        gc.collect()
        assert mr.buffer[511] == 255
        assert free() is not None
    del mr
    gc.collect()
    assert free() is None


def test_dlpack_capsule_that_the_garbage_collector_uses_meanwhile_is_used_once(pd):
    """Reading its shape creates objects; up to Python 3.11 these run the collector."""

    class Tensor:
        def __init__(self, capsule):
            self._capsule = capsule

        def __dlpack__(self, **_):
            gc.set_threshold(1)
            gc.enable()
            return self._capsule

        def __dlpack_device__(self):
            return 1, 0

    refused = []

    def use(phase, _):
        if phase == "start" and not refused:
            refused.append(1)
            with contextlib.suppress(TypeError):
                rp.MR(pd, Tensor(capsule), ALL).close()

    before = gc.get_threshold()
    gc.disable()
    gc.callbacks.append(use)
    try:
        for _ in range(20):
            gc.disable()
            refused.clear()
            capsule = _numpy().zeros((1,) * 24 + (64,), "u1").__dlpack__()
            try:
                with rp.MR(pd, Tensor(capsule), ALL) as mr:
                    assert mr.length == 64
                    assert mr.buffer == bytes(64)
            except TypeError as error:
                assert "no unused DLPack capsule" in str(error)  # noqa: PT017
    finally:
        gc.callbacks.remove(use)
        gc.set_threshold(*before)
        gc.enable()


def test_read_only_array_by_dlpack_needs_access_without_local_write(rc):
    array = _numpy().frombuffer(b"8 bytes!" * 8, "u1")
    with pytest.raises(TypeError, match="it is read-only, but access includes LOCAL_WRITE"):
        rp.MR(rc.pd, DLPack(array))
    with rp.MR(rc.pd, DLPack(array), READ) as mr:
        assert mr.buffer.readonly
        assert _read(rc, mr) == b"8 bytes!"


def test_array_with_gaps_by_dlpack_is_refused(pd):
    with pytest.raises(ValueError, match="this array has gaps"):
        rp.MR(pd, DLPack(_numpy().zeros((8, 8), "u1")[:, ::2]))


def test_array_that_dlpack_cannot_describe_is_refused_with_the_reason(pd):
    with pytest.raises(TypeError, match=r"cannot be made from this DLPack \(.*DLPack"):
        rp.MR(pd, DLPack(_numpy().zeros(8, object)))


class DLTensor(ctypes.Structure):
    """A DLTensor (dlpack.h of the DLPack project)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _anonymous_ = ("tensor",)
    _fields_ = (
        ("tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )
    name = b"dltensor"


class ManagedVersioned(ctypes.Structure):
    _anonymous_ = ("tensor",)
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )
    name = b"dltensor_versioned"


IS_READ_ONLY, IS_COPIED = 1, 2
"""Flags of a versioned tensor."""

BOTH = pytest.mark.parametrize("kind", [Managed, ManagedVersioned])


class Described:
    """A tensor that a test describes, by default of one row of 64 bytes in a map.

    Attributes:
        memory: the map.
        deleted: the addresses with which its deleter was called.
    """

    def __init__(self, kind, *, shape=(64,), strides=None, delete=None, **fields):
        self.memory, self.deleted = mmap.mmap(-1, 4096), []
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(delete or self.deleted.append)
        fields = {
            "data": _address(self.memory),
            "device_type": 1,
            "code": 1,
            "bits": 8,
            "lanes": 1,
            "ndim": len(shape or ()),
            "deleter": ctypes.cast(self._deleter, ctypes.c_void_p),
            **({"major": 1} if kind is ManagedVersioned else {}),
            **fields,
        }
        self.tensor = kind(**fields)
        for name, numbers in (("shape", shape), ("strides", strides)):
            if numbers is not None:
                setattr(self.tensor, name, (ctypes.c_int64 * len(numbers))(*numbers))

    def __dlpack__(self, **_):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), self.tensor.name, None)

    @property
    def was_deleted(self):
        return self.deleted == [ctypes.addressof(self.tensor)]


@BOTH
@pytest.mark.parametrize(
    ("fields", "start", "length"),
    [
        ({}, 0, 64),
        ({"byte_offset": 128, "device_id": 2}, 128, 64),
        ({"shape": (3, 5), "bits": 16, "lanes": 2}, 0, 60),
        ({"shape": (3, 5), "strides": (1, 3)}, 0, 15),
        ({"shape": None, "bits": 64}, 0, 8),
    ],
)
def test_dlpack_tensor_is_registered_as_described_and_deleted_once(pd, kind, fields, start, length):
    array = Described(kind, **fields)
    with rp.MR(pd, array) as mr:
        assert (mr.addr, mr.length) == (_address(array.memory) + start, length)
        array.memory[start : start + 1] = b"8"
        assert mr.buffer[:1] == b"8"
        assert array.deleted == []
    del mr
    gc.collect()
    assert array.was_deleted


@BOTH
def test_dlpack_tensor_without_a_deleter_is_registered(pd, kind):
    array = Described(kind, deleter=None)
    with rp.MR(pd, array) as mr:
        assert mr.length == 64
    del mr
    gc.collect()
    assert array.deleted == []


@pytest.mark.parametrize(
    ("flags", "readonly"), [(0, False), (IS_COPIED, False), (IS_COPIED | IS_READ_ONLY, True)]
)
def test_dlpack_tensor_is_read_only_if_its_flag_says_so(pd, flags, readonly):
    array = Described(ManagedVersioned, flags=flags, minor=7)
    with rp.MR(pd, array, READ) as mr:
        assert mr.buffer.readonly is readonly


def test_dlpack_tensor_on_a_gpu_has_no_buffer_in_python(pd):
    array = Described(ManagedVersioned, device_type=2)
    with rp.MR(pd, array) as mr, pytest.raises(ValueError, match="has no buffer in Python"):
        _ = mr.buffer


@BOTH
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shape": (-4, -4)}, "a negative extent"),
        ({"shape": (4, -1)}, "a negative extent"),
        ({"shape": (4, 0)}, "a region needs at least 1 byte, got 0"),
        ({"ndim": -1}, "its DLPack tensor has no shape"),
        ({"shape": None, "ndim": 1}, "its DLPack tensor has no shape"),
        ({"strides": (2,)}, "this array has gaps"),
        ({"code": 3}, "its elements are opaque handles"),
    ],
)
def test_dlpack_tensor_that_cannot_be_registered_is_refused_and_deleted(pd, kind, fields, text):
    array = Described(kind, **fields)
    with pytest.raises((TypeError, ValueError), match=text):
        rp.MR(pd, array)
    assert array.was_deleted


def test_dlpack_tensor_of_another_major_version_is_refused_and_deleted(pd):
    array = Described(ManagedVersioned, major=2)
    with pytest.raises(TypeError, match="it uses DLPack 2, not 1"):
        rp.MR(pd, array)
    assert array.was_deleted


@BOTH
def test_exception_of_a_dlpack_deleter_is_reported_and_hides_no_other(pd, kind, monkeypatch):
    """Of one in Python, which ctypes reports; and of one in C, which leaves it set."""
    reported = []
    monkeypatch.setattr("sys.unraisablehook", lambda hooked: reported.append(hooked.exc_type))

    def delete(at):
        raise KeyError(at)

    # It refuses anything but a capsule with a ValueError.
    in_c = ctypes.cast(ctypes.pythonapi.PyCapsule_GetContext, ctypes.c_void_p)
    for fields, exception in (({"delete": delete}, KeyError), ({"deleter": in_c}, ValueError)):
        array = Described(kind, shape=(-4,), **fields)
        with pytest.raises(TypeError, match="a negative extent"):
            rp.MR(pd, array)
        assert reported == [exception]
        reported.clear()


DESCRIBED_WITHOUT_MEMORY = """
import _testcapi, numpy
import rdmapost as rp

class Tensor:
    def __init__(self, capsule): self.capsule = capsule
    def __dlpack__(self, **_): return self.capsule

pd = rp.PD(rp.open_device("soft0"))
for version in (0, 1):
    at, mr = 0, None
    while not mr:
        array = numpy.zeros((1000, 2, 300), "u1")
        tensor = Tensor(array.__dlpack__(max_version=(version, 0)))
        _testcapi.set_nomemory(at, at + 1)
        try: mr = rp.MR(pd, tensor)
        except (MemoryError, rp.VerbsError): pass
        except TypeError as error:
            # Python's open() says so.
            if "PathLike" not in str(error): raise
        finally: _testcapi.remove_mem_hooks()
        at += 1
    mr.buffer[:8] = b"8 bytes!"
    print(at > 10, mr.length, bytes(array[0, 0, :8]))
    mr.close()
"""


def test_array_by_dlpack_is_registered_or_refused_if_memory_runs_out():
    """Whichever allocation fails."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    _numpy()
    said = "True 600000 b'8 bytes!'"
    assert prints(DESCRIBED_WITHOUT_MEMORY, **LOSES_MEMORY).splitlines() == [said, said]


@pytest.mark.parametrize("capsule", [None, 1, "a capsule"])
def test_object_returned_by_dlpack_that_is_no_capsule_is_refused(pd, capsule):
    class Liar:
        def __dlpack__(self, **_):
            return capsule

    with pytest.raises(TypeError, match="returned no unused DLPack capsule"):
        rp.MR(pd, Liar())


def test_array_of_python_objects_is_refused(pd):
    array = _numpy().zeros(8, object)
    with pytest.raises(TypeError, match="the device would write over references to Python obj"):
        rp.MR(pd, array)
    with pytest.raises(TypeError, match="the device would send references to Python objects"):
        rp.MR(pd, array, READ)


def test_fields_of_an_array_are_refused_if_a_field_between_them_refers_to_objects(pd):
    """Their format names neither the objects nor the rest of the row."""
    array = _numpy().zeros(8, [("x", "i8"), ("o", "O")])
    nested = _numpy().zeros(8, [("n", array.dtype)])["n"]
    for whole in (array, nested, _numpy().ma.array(array), array.view(_numpy().recarray)):
        part = whole[["x"]]
        for memory in (part, memoryview(part), memoryview(part).cast("B")):
            with pytest.raises(TypeError, match="would write over references to Python objects"):
                rp.MR(pd, memory)
    with pytest.raises(TypeError, match="the device would send references to Python objects"):
        rp.MR(pd, array[["x"]][0], READ)
    numbers = _numpy().zeros(8, [("x", "i8"), ("y", "i8")])
    with rp.MR(pd, numbers[["x"]]) as mr:
        assert len(mr) == 128


def test_rereg_refuses_an_array_whose_gaps_hide_python_objects(pd):
    array = _numpy().zeros(8, [("x", "i8"), ("o", "O")])
    with rp.MR(pd, bytearray(128)) as mr:
        with pytest.raises(TypeError, match="would write over references to Python objects"):
            mr.rereg(memory=array[["x"]])
        assert not mr.closed


def test_array_of_a_type_without_a_buffer_is_refused_with_the_reason(pd):
    with pytest.raises(TypeError, match=r"ndarray of datetime64.* the same memory as bytes"):
        rp.MR(pd, _numpy().zeros(8, "M8[s]"))


class CUDA:
    """An array that describes its memory as one on a GPU does, in the memory of a map."""

    def __init__(self, **changes):
        self.memory = mmap.mmap(-1, 4096)
        self.described = {
            "shape": (8, 4),
            "typestr": "<f4",
            "data": (_address(self.memory), False),
            "strides": None,
            "version": 3,
        } | changes

    @property
    def __cuda_array_interface__(self):
        return self.described


@pytest.mark.parametrize("strides", [None, (16, 4), (4, 32)])
def test_array_by_the_cuda_array_interface_is_registered_at_its_pointer(rc, strides):
    array = CUDA(strides=strides)
    with rp.MR(rc.pd, array, ALL) as mr:
        assert (mr.addr, mr.length) == (_address(array.memory), 128)
        _write(rc, mr, b"8 bytes!")
        assert array.memory[:8] == b"8 bytes!"
        with pytest.raises(ValueError, match="has no buffer in Python"):
            _ = mr.buffer


def test_array_on_a_gpu_lives_as_long_as_its_region(pd):
    array = CUDA()
    gone = weakref.ref(array)
    mr = rp.MR(pd, array)
    del array
    gc.collect()
    assert gone() is not None
    mr.close()
    assert gone() is None


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"typestr": "|O8"}, TypeError, "references to Python objects"),
        (
            {"typestr": "|V16", "descr": [("a", "<i8"), ("b", [("c", "|O8")])]},
            TypeError,
            "references to Python objects",
        ),
        ({"mask": CUDA}, TypeError, "it has a mask"),
        ({"data": (4096, True)}, TypeError, "it is read-only, but access includes LOCAL_WRITE"),
        ({"shape": (8, 0)}, ValueError, "a region needs at least 1 byte, got 0"),
        ({"shape": (-4, -4)}, TypeError, "a negative extent"),
        ({"strides": (32, 4)}, ValueError, "this array has gaps"),
        ({"strides": (-16, 4)}, ValueError, "this array has gaps"),
        ({"data": None}, TypeError, "its __cuda_array_interface__ is malformed"),
        ({"typestr": "<f"}, TypeError, "its __cuda_array_interface__ is malformed"),
        ({"data": (0, False)}, ValueError, "address=0 is not in 1"),
    ],
)
def test_array_on_a_gpu_that_cannot_be_registered_is_refused_by_name(pd, changes, error, text):
    with pytest.raises(error, match=text):
        rp.MR(pd, CUDA(**changes))


def test_memory_that_only_a_gpu_reaches_is_refused_with_what_to_try(pd):
    """The pointer is reserved, and not to be accessed, as that of a GPU."""
    with mmap.mmap(-1, 1 << 20) as memory:
        address = _address(memory)
        gc.collect()
    with pytest.raises(rp.VerbsError, match="ibv_reg_mr") as caught:
        rp.MR(pd, CUDA(data=(address, False), shape=(1 << 18,)))
    assert caught.value.errno == errno.EFAULT


# ---- dma-bufs -------------------------------------------------------------------------


def test_fd_that_is_no_dmabuf_is_refused_by_a_real_device(verbs_context):
    fd = os.memfd_create("test")
    try:
        os.truncate(fd, 8192)
        with rp.PD(verbs_context) as pd, pytest.raises(rp.VerbsError, match="ibv_reg_dmabuf_mr"):
            rp.MR.from_dmabuf(pd, fd, 0, 8192, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _udmabuf(size):
    """Yield a dma-buf that the kernel has made of memory, and the memory."""
    with contextlib.ExitStack() as stack:
        try:
            device = os.open("/dev/udmabuf", os.O_RDWR)
        except OSError as error:
            pytest.skip(f"this kernel makes no dma-buf: {error}")
        stack.callback(os.close, device)
        memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        stack.callback(os.close, memory)
        os.truncate(memory, size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        # UDMABUF_CREATE, with UDMABUF_FLAGS_CLOEXEC
        fd = fcntl.ioctl(device, 0x40187542, bytearray(struct.pack("IIQQ", memory, 1, 0, size)))
        stack.callback(os.close, fd)
        yield fd, memory


def test_dmabuf_of_the_kernel_is_registered_or_refused_by_name(verbs_context):
    """soft0 takes it. Of real devices few do, and Soft-RoCE does not."""
    with _udmabuf(8192) as (fd, memory):
        with (
            rp.open_device("soft0") as soft,
            Loopback(soft) as pair,
            rp.MR.from_dmabuf(pair.remote.mr.pd, fd, 4096, 64, 1 << 40, ALL) as mr,
        ):
            pair.local.mr.buffer[:8] = b"8 bytes!"
            target = {"remote_addr": mr.addr + 8, "rkey": mr.rkey}
            pair.local.qp.post_send(rp.RdmaWrite(pair.local.mr[:8], **target))
            pair.sent()[0].check()
            assert os.pread(memory, 8, 4096 + 8) == b"8 bytes!"
        why = ""
        with rp.PD(verbs_context) as pd:
            try:
                rp.MR.from_dmabuf(pd, fd, 0, 8192, 0).close()
            except rp.UnsupportedError as error:
                why = str(error)
        assert not why or ("ibv_reg_dmabuf_mr" in why and verbs_context.name in why)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((-1, 0, 8, 0), ValueError, "fd=-1 is not in 0"),
        ((0, -1, 8, 0), ValueError, "offset=-1 is not in 0"),
        ((0, 0, 0, 0), ValueError, "a region needs at least 1 byte, got 0"),
        ((0, 0, 8, 1 << 64), ValueError, "iova=.* is not in 0"),
        ((0, 0, 8, (1 << 64) - 7), ValueError, "iova=0xf{15}9 and length=8 extend past 2.64"),
        (("a", 0, 8, 0), TypeError, "fd: expected int, got str"),
    ],
)
def test_arguments_of_a_dmabuf_are_checked(pd, arguments, error, text):
    with pytest.raises(error, match=text):
        rp.MR.from_dmabuf(pd, *arguments)


# ---- advice ---------------------------------------------------------------------------


def test_advice_is_followed_or_the_device_says_that_it_cannot(pd):
    with rp.MR(pd, 4096, ALL) as mr:
        refused = contextlib.nullcontext()
        if pd.context.kind == "verbs":
            # Neither rxe nor siw has it.
            refused = pytest.raises(rp.VerbsError, match="ibv_advise_mr")
        with refused:
            pd.advise_mr(AdviseMRAdvice.PREFETCH_WRITE, mr[:], AdviseMRFlags.FLUSH)
            pd.advise_mr(AdviseMRAdvice.PREFETCH, [mr[:64], mr[64:]])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((7, []), ValueError, "advice=7 is not a valid AdviseMRAdvice"),
        ((0, []), ValueError, "expected at least one SGE"),
        ((0, ["x"]), TypeError, "sg_list: expected SGE, got str"),
        ((0, 5), TypeError, "sg_list: expected SGEs, got int"),
        ((0, [], 2), ValueError, "flags=0x2 is not a combination of AdviseMRFlags"),
    ],
)
def test_arguments_of_advise_are_checked(pd, arguments, error, text):
    with pytest.raises(error, match=text):
        pd.advise_mr(*arguments)


def test_advice_about_a_closed_region_is_refused(pd):
    with rp.MR(pd, 4096) as mr:
        sge = mr[:]
    with pytest.raises(rp.ClosedError, match=r"MR.* is closed"):
        pd.advise_mr(0, sge)


def test_registering_a_buffer_reads_no_attribute_of_its_exporter(pd):
    """It may be anyone's code, or a field in memory that can no longer be read."""

    class Map(mmap.mmap):
        @property
        def base(self):
            raise AssertionError

    memory = Map(-1, 64)
    with rp.MR(pd, memory):
        pass
    memory.close()
