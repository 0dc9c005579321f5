"""The soft device's memory: the checks before each access, to the last byte."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import pytest
from support import ALL, prints

import rdmapost as rp
from rdmapost import Access, MWType, WCStatus
from rdmapost._binding import native
from rdmapost.providers.software.memory import (
    ErrorStatus,
    Memory,
    ProtectionDomain,
    Region,
    RemoteAccessError,
    copy,
    gather,
    total_length,
)

BINDABLE = int(ALL | Access.MW_BIND)
READ, WRITE = int(Access.REMOTE_READ), int(Access.REMOTE_WRITE)
ATOMIC = int(Access.REMOTE_ATOMIC)
BASE, SIZE = 0x1000, 64
QPN = 7


class Place:
    """A device's memory with one region."""

    def __init__(self, access: int = BINDABLE) -> None:
        self.memory = Memory()
        self.pd = ProtectionDomain()
        self.bytes = bytearray(range(SIZE))
        self.region = self.register(access)

    def register(self, access: int = BINDABLE, addr: int = BASE) -> Region:
        return self.memory.register(self.pd, addr, memoryview(self.bytes), access)

    def local(self, *sges: tuple[int, int, int], write: bool = False, **more: Any) -> bytes:
        return gather(self.memory.local(more.pop("pd", self.pd), sges, write, **more))

    def remote(self, addr: int = BASE, length: int = 8, need: int = READ, **more: Any) -> bytes:
        fields = {"pd": self.pd, "qpn": QPN, "rkey": self.region.rkey, **more}
        return bytes(
            self.memory.remote(fields["pd"], fields["qpn"], fields["rkey"], addr, length, need)
        )

    def bind(self, window: Any, addr: int = BASE, length: int = 16, **more: Any) -> None:
        fields = {"region": self.region, "access": READ | WRITE, "pd": self.pd, "qpn": QPN}
        fields |= {"rkey": window.rkey & ~0xFF | 0x33, **more}
        region, access = fields.pop("region"), fields.pop("access")
        self.memory.bind(window, region, addr, length, access, **fields)


@pytest.fixture
def place() -> Place:
    return Place()


def fails(status: WCStatus, call: Any, *args: Any, **fields: Any) -> None:
    with pytest.raises(ErrorStatus) as caught:
        call(*args, **fields)
    assert caught.value.status is status


def refused(words: str, call: Any, *args: Any, **fields: Any) -> None:
    with pytest.raises(RemoteAccessError, match=words):
        call(*args, **fields)


# ---- keys -------------------------------------------------------------------------


def test_successive_keys_differ_in_their_index_and_low_byte(place):
    """A stale key must not be the next one: its index and its tag differ."""
    regions = [place.register() for _ in range(300)]
    keys = [region.lkey for region in regions]
    assert len(set(keys)) == 300
    assert all(0 < key < 1 << 31 and key >> 8 for key in keys)
    assert all(a & 0xFF != b & 0xFF for a, b in itertools.pairwise(keys))
    assert all(region.rkey == region.lkey | 1 << 31 for region in regions)
    # All low bytes are used before the first one is repeated.
    assert len({key & 0xFF for key in keys[:256]}) == 256


def test_key_numbers_wrap_around_and_skip_keys_in_use(place):
    """The numbers wrap around after eight million keys."""
    memory, fresh = place.memory, Memory()
    other = memory.allocate_window(place.pd, MWType.TYPE_2)
    memory.indices._next = 0x7FFFFE
    keys = [place.register().lkey for _ in range(3)]
    assert [key >> 8 for key in keys] == [0x7FFFFE, 0x7FFFFF, 1]
    # Reset the next index and tag to those of the first key.
    memory.indices._next, memory._tag = fresh.indices._next, fresh._tag
    region, window = place.register(), memory.allocate_window(place.pd, MWType.TYPE_2)
    indices = {key >> 8 & 0x7FFFFF for key in (region.rkey, window.rkey)}
    assert not indices & {place.region.lkey >> 8, other.rkey >> 8}
    refused("not bound", place.remote, rkey=window.rkey)
    place.bind(other)
    assert place.remote(rkey=other.rkey) == bytes(range(8))
    for _ in range(2):
        assert place.remote() == place.remote(rkey=place.region.rkey) == bytes(range(8))
        memory.deregister(region)


def test_keys_that_were_invalidated_belong_to_the_next_region_that_gets_them(place):
    """Closing the invalidated region does not affect the new one."""
    memory, first = place.memory, place.region
    memory.invalidate(place.pd, QPN, first.rkey)
    memory.indices._next, memory._tag = first.lkey >> 8, 0
    second = place.register()
    assert second.lkey == first.lkey
    memory.deregister(first)
    assert place.remote(rkey=second.rkey) == bytes(range(8))
    assert place.local((BASE, 8, second.lkey)) == bytes(range(8))


def test_keys_of_a_deregistered_region_are_unknown(place):
    lkey = place.region.lkey
    place.memory.deregister(place.region)
    fails(WCStatus.LOC_PROT_ERR, place.local, (BASE, 8, lkey))
    refused("no such rkey", place.remote)
    assert not place.region.valid


# ---- local ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "length", "fits"),
    [
        (0, SIZE, True),
        (SIZE - 1, 1, True),
        (1, SIZE - 1, True),
        (-1, 8, False),
        (0, SIZE + 1, False),
        (SIZE, 1, False),
        (SIZE - 7, 8, False),
    ],
)
def test_access_must_lie_within_its_region(place, start, length, fits):
    sge = (BASE + start, length, place.region.lkey)
    if fits:
        assert place.local(sge) == bytes(range(start, start + length))
        assert place.remote(BASE + start, length) == bytes(range(start, start + length))
    else:
        fails(WCStatus.LOC_PROT_ERR, place.local, sge)
        refused("outside", place.remote, BASE + start, length)


def test_lkey_of_another_protection_domain_is_refused(place):
    sge = (BASE, 8, place.region.lkey)
    fails(WCStatus.LOC_PROT_ERR, place.local, sge, pd=ProtectionDomain())
    fails(WCStatus.LOC_PROT_ERR, place.local, (BASE, 8, place.region.lkey + 1))
    fails(WCStatus.LOC_PROT_ERR, place.local, (BASE, 8, place.region.rkey))


def test_device_writes_need_the_local_write_flag():
    place = Place(int(Access.REMOTE_READ))
    sge = (BASE, 8, place.region.lkey)
    assert place.local(sge) == bytes(range(8))
    fails(WCStatus.LOC_PROT_ERR, place.local, sge, write=True)
    writable = Place(int(Access.LOCAL_WRITE))
    assert writable.local((BASE, 8, writable.region.lkey), write=True)


def test_sge_of_length_0_means_2_to_the_31_bytes(place):
    """As on some hardware. Such an SGE lies outside every ordinary region."""
    fails(WCStatus.LOC_PROT_ERR, place.local, (BASE, 0, place.region.lkey))
    # Only the bytes that are needed are checked.
    assert place.local((BASE, 0, place.region.lkey), size=8) == bytes(range(8))
    # Address space not backed by memory.
    with mmap.mmap(-1, (1 << 31) + 1, prot=mmap.PROT_READ) as large, memoryview(large) as whole:
        region = place.memory.register(place.pd, BASE, whole, BINDABLE)
        (found,) = place.memory.local(place.pd, [(BASE, 0, region.lkey)], False)
        assert len(found) == 1 << 31
        found.release()
    assert total_length([(BASE, 8, 0), (BASE, 0, 0)]) == 8 + (1 << 31)


def test_sges_beyond_the_needed_size_are_not_checked(place):
    key = place.region.lkey
    good, bad = (BASE, 8, key), (BASE + SIZE, 8, key)
    assert place.local(good, bad, size=8) == bytes(range(8))
    assert place.local(good, bad, size=5) == bytes(range(5))
    assert place.local(bad, size=0) == b""
    # Even the key is not checked.
    assert place.local(good, (BASE, 8, key + 1), size=8) == bytes(range(8))
    fails(WCStatus.LOC_PROT_ERR, place.local, good, bad, size=9)
    fails(WCStatus.LOC_LEN_ERR, place.local, good, size=9)
    fails(WCStatus.LOC_LEN_ERR, place.local, size=1)
    assert place.local(good, (BASE + 32, 8, key), size=12) == bytes([*range(8), *range(32, 36)])
    assert place.local(good, (BASE + 32, 8, key)) == bytes([*range(8), *range(32, 40)])


# ---- remote -----------------------------------------------------------------------


def test_rkey_of_another_protection_domain_is_refused(place):
    refused("no such rkey", place.remote, pd=ProtectionDomain())
    refused("no such rkey", place.remote, rkey=place.region.rkey + 1)
    refused("no such rkey", place.remote, rkey=place.region.lkey)


@pytest.mark.parametrize("need", [READ, WRITE, ATOMIC])
def test_remote_access_needs_its_flag(need):
    assert Place(need).remote(need=need) == bytes(range(8))
    refused("grant", Place(BINDABLE & ~need).remote, need=need)
    refused("grant", Place(need).remote, need=BINDABLE & ~need & (READ | WRITE | ATOMIC))


def test_zero_based_region_is_addressed_from_its_start(place):
    region = place.register(BINDABLE | int(Access.ZERO_BASED), addr=0)
    assert place.remote(0, SIZE, rkey=region.rkey) == bytes(range(SIZE))
    assert place.remote(8, 8, rkey=region.rkey) == bytes(range(8, 16))
    refused("outside", place.remote, SIZE, 1, rkey=region.rkey)


# ---- windows ----------------------------------------------------------------------


@pytest.fixture(params=[MWType.TYPE_1, MWType.TYPE_2])
def window(request, place) -> Any:
    return place.memory.allocate_window(place.pd, request.param)


def test_window_grants_access_to_its_range_only(place, window):
    refused("not bound", place.remote, rkey=window.rkey)
    place.bind(window, BASE + 8, 16)
    assert place.region.windows == 1
    assert place.remote(BASE + 8, 16, rkey=window.rkey) == bytes(range(8, 24))
    refused("outside", place.remote, BASE + 7, 1, rkey=window.rkey)
    refused("outside", place.remote, BASE + 24, 1, rkey=window.rkey)
    refused("outside", place.remote, BASE + 8, 17, rkey=window.rkey)
    refused("grant", place.remote, BASE + 8, 8, ATOMIC, rkey=window.rkey)
    refused("not bound", place.remote, BASE + 8, 8, rkey=window.rkey, pd=ProtectionDomain())


def test_zero_based_window_is_addressed_from_its_start(place, window):
    place.bind(window, BASE + 8, 16, access=READ | int(Access.ZERO_BASED))
    assert place.remote(0, 16, rkey=window.rkey) == bytes(range(8, 24))
    refused("outside", place.remote, 16, 1, rkey=window.rkey)


def test_binding_changes_the_low_byte_of_the_key(place, window):
    before = window.rkey
    place.bind(window)
    assert window.rkey == before & ~0xFF | 0x33
    refused("no such rkey", place.remote, rkey=before)
    assert place.remote(rkey=window.rkey)


def test_type_2_window_works_only_on_the_queue_pair_that_bound_it(place, window):
    place.bind(window)
    if window.type is MWType.TYPE_2:
        refused("another queue pair", place.remote, rkey=window.rkey, qpn=QPN + 1)
    else:
        assert place.remote(rkey=window.rkey, qpn=QPN + 1)


def test_bind_that_breaks_a_rule_ends_with_mw_bind_err(place, window):
    """Neither the key nor the binding changes."""
    before = window.rkey
    other = ProtectionDomain()
    wrong: list[dict[str, Any]] = [
        {"pd": other},
        {"region": None},
        {"region": place.memory.register(other, BASE, memoryview(place.bytes), BINDABLE)},
        {"region": place.register(BINDABLE & ~int(Access.MW_BIND))},
        {"region": place.register(BINDABLE | int(Access.ZERO_BASED))},
        {"region": place.register(BINDABLE & ~int(Access.LOCAL_WRITE)), "access": WRITE},
        {"region": place.register(BINDABLE & ~int(Access.LOCAL_WRITE)), "access": ATOMIC},
        {"addr": BASE - 1},
        {"addr": BASE + SIZE - 15},
        {"length": SIZE + 1},
    ]
    for fields in wrong:
        fails(WCStatus.MW_BIND_ERR, place.bind, window, **fields)
        assert (window.rkey, window.region) == (before, None)
    gone = place.register()
    place.memory.deregister(gone)
    fails(WCStatus.MW_BIND_ERR, place.bind, window, region=gone)
    # Allowed: the region's edges, and read access to a region without LOCAL_WRITE.
    place.bind(window, BASE, SIZE)
    window.unbind()
    place.bind(window, region=place.register(BINDABLE & ~int(Access.LOCAL_WRITE)), access=READ)


def test_only_type_1_windows_can_be_bound_while_bound(place, window):
    place.bind(window)
    if window.type is MWType.TYPE_2:
        fails(WCStatus.MW_BIND_ERR, place.bind, window)
        assert place.region.windows == 1
        return
    place.bind(window, BASE + 32, 8)
    assert place.region.windows == 1
    assert place.remote(BASE + 32, 8, rkey=window.rkey) == bytes(range(32, 40))


def test_bind_of_length_0_unbinds_a_type_1_window(place, window):
    if window.type is MWType.TYPE_2:
        fails(WCStatus.MW_BIND_ERR, place.bind, window, length=0)
        return
    place.bind(window)
    rkey = window.rkey & ~0xFF | 0x44
    place.bind(window, length=0, region=None, rkey=rkey)
    assert (window.region, window.rkey, place.region.windows) == (None, rkey, 0)
    refused("not bound", place.remote, rkey=rkey)
    fails(WCStatus.MW_BIND_ERR, place.bind, window, length=0, pd=ProtectionDomain())


@pytest.mark.parametrize("length", [0, 16])
def test_bind_changes_only_the_low_byte_of_the_requested_key(place, length):
    """Otherwise a window could take over another's key."""
    window = place.memory.allocate_window(place.pd, MWType.TYPE_1)
    before, region = window.rkey, place.region
    place.bind(window, length=length, rkey=region.rkey)
    assert window.rkey == before & ~0xFF | region.rkey & 0xFF
    assert place.remote(rkey=region.rkey) == bytes(range(8))
    place.memory.deallocate_window(window)
    assert place.remote(rkey=region.rkey) == bytes(range(8))


def test_window_over_a_deregistered_region_grants_nothing(place, window):
    place.bind(window)
    place.memory.deregister(place.region)
    refused("not bound", place.remote, rkey=window.rkey)


def test_key_of_a_deallocated_window_is_unknown(place, window):
    place.bind(window)
    place.memory.deallocate_window(window)
    assert place.region.windows == 0
    refused("no such rkey", place.remote, rkey=window.rkey)


# ---- invalidation -----------------------------------------------------------------


def test_only_bound_type_2_windows_are_invalidated_and_only_by_their_queue_pair(place, window):
    assert not place.memory.invalidate(place.pd, QPN, window.rkey)
    place.bind(window)
    assert not place.memory.invalidate(ProtectionDomain(), QPN, window.rkey)
    if window.type is MWType.TYPE_1:
        assert not place.memory.invalidate(place.pd, QPN, window.rkey)
        assert place.remote(rkey=window.rkey)
        return
    assert not place.memory.invalidate(place.pd, QPN + 1, window.rkey)
    assert place.memory.invalidate(place.pd, QPN, window.rkey)
    assert place.region.windows == 0
    refused("not bound", place.remote, rkey=window.rkey)
    assert not place.memory.invalidate(place.pd, QPN, window.rkey)
    # The window can be bound again.
    place.bind(window)


@pytest.mark.parametrize("key", ["lkey", "rkey"])
def test_region_is_invalidated_in_its_own_domain_once_no_window_is_bound_to_it(place, key):
    memory, region = place.memory, place.region
    assert not memory.invalidate(place.pd, QPN, 0x1234)
    assert not memory.invalidate(place.pd, QPN, 0x1234, True)
    assert not memory.invalidate(ProtectionDomain(), QPN, getattr(region, key))
    window = memory.allocate_window(place.pd, MWType.TYPE_2)
    place.bind(window)
    assert not memory.invalidate(place.pd, QPN, getattr(region, key))
    window.unbind()
    assert memory.invalidate(place.pd, QPN, getattr(region, key))
    assert not region.valid
    refused("no such rkey", place.remote)
    fails(WCStatus.LOC_PROT_ERR, place.local, (BASE, 8, region.lkey))


@pytest.mark.parametrize(
    ("access", "may"),
    [(Access.LOCAL_WRITE | Access.MW_BIND, False), (Access.REMOTE_READ, True)],
    ids=["grants nothing", "grants reads"],
)
def test_peer_invalidates_only_a_region_that_it_may_use(access, may):
    place = Place(int(access))
    region = place.region
    assert not place.memory.invalidate(place.pd, QPN, region.lkey, is_remote=True)
    assert place.memory.invalidate(place.pd, QPN, region.rkey, is_remote=True) is may
    assert region.valid is not may


# ---- copying ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([3], [3]),
        ([3], [5]),
        ([3], [1, 2]),
        ([3], [1, 1, 1, 4]),
        ([1, 2], [3]),
        ([2, 2], [3, 3]),
        ([0, 3], [1, 4]),
        ([4], [2, 3]),
        ([], []),
        ([], [3]),
        ([0], []),
    ],
)
def test_copy_fills_the_target_buffers_in_order(source, target):
    rooms = [bytearray(size) for size in target]
    data = [bytes(range(1 + 10 * i, 1 + 10 * i + size)) for i, size in enumerate(source)]
    copy([memoryview(piece) for piece in data], [memoryview(piece) for piece in rooms])
    whole = b"".join(data)
    assert b"".join(rooms) == whole + bytes(sum(target) - len(whole))


def test_bind_that_fails_leaves_no_reference_cycle_with_its_caller():
    said = prints(
        "import gc, weakref, rdmapost as rp\n"
        "class Local: pass\n"
        "def job():\n"
        "    local = Local()\n"
        "    qp = rp.QP(pd, rp.QPType.RC, cq, checked=False)\n"
        "    qp.connect(qp.endpoint())\n"
        "    mw = rp.MW(pd)\n"
        "    qp.post_send(rp.BindMW(mw=mw, mr=mr, addr=mr.addr, length=8, rkey=mw.next_rkey()))\n"
        "    print(cq.wait(1)[0].status.name)\n"
        "    return weakref.ref(local)\n"
        "with rp.open_device('soft0') as c, rp.PD(c) as pd, rp.CQ(c) as cq, rp.MR(pd, 64) as mr:\n"
        "    gc.disable()\n"
        "    print(job()())\n"
        "    gc.enable()\n"
    )
    assert said.split() == ["MW_BIND_ERR", "None"]


def test_close_in_a_step_of_the_device_takes_effect_at_its_end():
    """As in a verb. A finalizer or a signal handler may call close() there, in any thread."""
    context = rp.open_device("soft0")
    mr = rp.MR(rp.PD(context), 64)
    was_closed = []

    def step() -> None:
        mr.close()
        was_closed.append(mr.closed)

    native.verb(step)
    assert was_closed == [False]
    assert mr.closed
    context.close_all()
