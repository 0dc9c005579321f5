"""Operations on the software device's matching list, and the memory that they name."""

from __future__ import annotations

import errno
import gc

import pytest
from support import ALL, LOSES_MEMORY, prints, soft_context
from support.tag_server import MATCHED, NO_FLAGS, Server, small_server

import rdmapost as rp
from rdmapost import OpsFlags, QPState, WCFlags, WCOpcode, WCStatus
from rdmapost.providers.soft0 import tags
from rdmapost.providers.software import memory

context = soft_context
server = small_server


# ---- operations -------------------------------------------------------------------


def test_removed_entry_no_longer_matches(server):
    add = server.add(1, recv_wr_id=5)
    server.srq.post_srq_ops(rp.TagDel(wr_id=6, handle=add.handle))
    wc = server.one()
    assert (wc.opcode, wc.status, wc.wr_id) == (WCOpcode.TM_DEL, WCStatus.SUCCESS, 6)
    assert server.srq.outstanding_tags == 0
    server.post_receives()
    server.client.eager(1)
    assert server.one().wr_id == 500


def test_entry_consumed_by_a_message_cannot_be_removed(server):
    """The message's completion comes first, and the TAG_DEL ends with TM_ERR."""
    add = server.add(1, recv_wr_id=5)
    server.client.eager(1)
    server.srq.post_srq_ops(rp.TagDel(wr_id=6, handle=add.handle))
    assert server.srq.outstanding_tags == 1
    received, removed = server.cq.wait(2)
    assert (received.wr_id, received.wc_flags) == (5, MATCHED)
    assert (removed.wr_id, removed.status) == (6, WCStatus.TM_ERR)
    assert (server.srq.outstanding_tags, server.srq.outstanding_ops) == (0, 0)
    assert server.client.peer.state is QPState.RTS


def test_entry_cannot_be_removed_twice(server):
    add = server.add(1)
    server.srq.post_srq_ops([rp.TagDel(wr_id=1, handle=add.handle)] * 2)
    assert [wc.status for wc in server.cq.wait(2)] == [WCStatus.SUCCESS, WCStatus.TM_ERR]


def test_object_laid_out_as_a_handle_is_refused(server):
    """Its first slot is where a handle has a reference to its SRQ's list."""

    class Like:
        __slots__ = ("first", "second", "third", "whatever")

    add, like = server.add(1), Like()
    for like.first in gc.get_referents(add.handle):
        with pytest.raises(rp.PostError, match="needs the handle of a TagAdd that was posted"):
            server.srq.post_srq_ops(rp.TagDel(handle=like))  # type: ignore[arg-type]
    server.srq.post_srq_ops(rp.TagDel(wr_id=6, handle=add.handle))
    assert server.one().status is WCStatus.SUCCESS


def test_handle_of_a_polled_entry_is_refused(server):
    """By then a driver may have reused its number for another entry."""
    add = server.add(1)
    server.client.eager(1)
    server.one()
    with pytest.raises(rp.PostError, match="no longer on the list"):
        server.srq.post_srq_ops(rp.TagDel(handle=add.handle))


def test_old_handle_never_names_a_new_entry(server):
    """However often its slot has been reused."""
    old = server.add(1).handle
    server.srq.post_srq_ops(rp.TagDel(handle=old))
    server.one()
    for _ in range(255):
        add = server.add(1)
        server.srq.post_srq_ops(rp.TagDel(handle=add.handle))
        server.one()
    server.add(2, recv_wr_id=7)
    with pytest.raises(rp.PostError, match="no longer on the list"):
        server.srq.post_srq_ops(rp.TagDel(handle=old))
    server.client.eager(2, b"whole")
    assert (server.one().wr_id, server.bytes(5)) == (7, b"whole")


def test_failed_removal_removes_nothing(stack, pd):
    """Unchecked: only the device knows that the handle is stale."""
    server = Server(stack, pd, checked=False)
    handles = []
    for _ in range(256):
        handles.append(server.add(1).handle)
        server.srq.post_srq_ops(rp.TagDel(handle=handles[-1]))
        server.one()
    old = handles[0]
    server.add(2, recv_wr_id=7)
    server.srq.post_srq_ops(rp.TagDel(handle=old))
    assert server.one().status is WCStatus.TM_ERR
    with pytest.raises(rp.InUseError):
        server.mr.close()
    server.client.eager(2, b"whole")
    assert server.one().wr_id == 7


def test_handle_of_another_queue_is_refused(stack, pd, server):
    """Drivers take the number as an index: not even an unchecked post gets through."""
    for checked in (True, False):
        other = Server(stack, pd, checked=checked)
        for handle in (None, server.add(1).handle, 3):
            with pytest.raises(
                rp.PostError, match="handle of a TagAdd that was posted to this SRQ"
            ):
                other.srq.post_srq_ops(rp.TagDel(handle=handle))
        assert other.srq.outstanding_ops == 0


def test_signaled_decides_whether_an_operation_completes(server):
    server.srq.post_srq_ops(
        [
            rp.TagAdd(wr_id=1, tag=1, flags=0),
            rp.TagSync(wr_id=2, flags=OpsFlags.TM_SYNC),
            rp.TagAdd(wr_id=3, tag=2),
        ]
    )
    assert server.srq.outstanding_ops == 3
    wc = server.one()
    assert (wc.wr_id, wc.opcode, wc.wc_flags) == (3, WCOpcode.TM_ADD, NO_FLAGS)
    assert server.srq.outstanding_ops == 0


def test_each_tag_add_of_a_list_gets_its_own_handle(server):
    adds = [rp.TagAdd(tag=i, recv_wr_id=i, flags=0) for i in range(5)]
    server.srq.post_srq_ops(adds)
    assert len({repr(add.handle) for add in adds}) == 5
    server.srq.post_srq_ops([rp.TagDel(wr_id=i, handle=adds[i].handle) for i in (4, 0, 2)])
    assert [(wc.wr_id, wc.status) for wc in server.cq.wait(3)] == [
        (4, WCStatus.SUCCESS),
        (0, WCStatus.SUCCESS),
        (2, WCStatus.SUCCESS),
    ]
    assert server.srq.outstanding_tags == 2
    for tag in (3, 1):
        server.client.eager(tag)
        assert server.one().wr_id == tag


def test_unsignaled_removal_is_retired_by_the_next_completion(server):
    add = server.add(1)
    server.srq.post_srq_ops(rp.TagDel(handle=add.handle, flags=0))
    assert server.srq.outstanding_tags == 1
    server.srq.post_srq_ops(rp.TagSync())
    server.one()
    assert (server.srq.outstanding_tags, server.srq.outstanding_ops) == (0, 0)


def test_unsignaled_removal_counts_although_the_next_operation_fails(server):
    """The error is that of the last: the first has removed the entry."""
    add = server.add(1)
    server.srq.post_srq_ops([rp.TagDel(handle=add.handle, flags=0), rp.TagDel(handle=add.handle)])
    assert server.one().status is WCStatus.TM_ERR
    assert (server.srq.outstanding_tags, server.srq.outstanding_ops) == (0, 0)


def test_entry_that_the_device_fails_to_remove_is_held_and_still_matches(server, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    add = server.add(1, recv_wr_id=5)
    with monkeypatch.context() as patched:
        patched.setattr(tags.MatchingList, "_remove", broken)
        server.srq.post_srq_ops(rp.TagDel(handle=add.handle))
        assert server.one().status is WCStatus.FATAL_ERR
    assert server.srq.outstanding_tags == 1
    with pytest.raises(rp.InUseError, match="wr_id 5"):
        server.mr.close()
    server.client.eager(1, b"whole")
    assert (server.one().wr_id, server.bytes(5)) == (5, b"whole")


def test_synchronization_removes_no_entry(server):
    """Not even the first that was ever added."""
    server.add(1, recv_wr_id=5)
    server.srq.post_srq_ops(rp.TagSync(wr_id=6))
    assert server.one().wr_id == 6
    assert server.srq.outstanding_tags == 1
    server.client.eager(1)
    assert server.one().wr_id == 5


def test_tag_add_to_a_full_list_is_refused_by_name(server):
    """A slot comes free once the completion of its message has been polled."""
    for tag in range(8):
        server.add(tag, recv_wr_id=tag)
    with pytest.raises(rp.PostError, match="the matching list is full: all max_num_tags=8"):
        server.srq.post_srq_ops(rp.TagAdd(tag=9))
    server.client.eager(3)
    with pytest.raises(rp.PostError, match="matching list is full"):
        server.srq.post_srq_ops(rp.TagAdd(tag=9))
    server.one()
    server.add(9)


class Unwilling(rp.TagAdd):
    """Refuses its handle."""

    __slots__ = ("error",)

    @property
    def handle(self):
        return None

    @handle.setter
    def handle(self, _):
        if hasattr(self, "error"):
            raise self.error


@pytest.mark.parametrize("checked", [True, False])
def test_post_error_is_raised_although_a_tag_add_refuses_its_handle(stack, pd, checked):
    """What was posted must be reported; why the handle could not be set is its context."""
    server = Server(stack, pd, max_num_tags=2, checked=checked)
    adds = [Unwilling(tag=i, wr_id=i) for i in range(4)]
    for i, add in enumerate(adds):
        add.error = KeyError(i)
    with pytest.raises(rp.PostError) as caught:
        server.srq.post_srq_ops(adds)
    assert (caught.value.index, caught.value.posted) == (2, 2)
    assert repr(caught.value.__context__) == "KeyError(0)"
    assert [wc.wr_id for wc in server.cq.wait(2)] == [0, 1]
    assert server.srq.outstanding_tags == 2


def test_interrupt_while_a_handle_is_set_is_raised_instead_of_the_post_error(stack, pd):
    server = Server(stack, pd, max_num_tags=1)
    adds = [Unwilling(tag=i, wr_id=i) for i in range(2)]
    adds[0].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        server.srq.post_srq_ops(adds)
    assert isinstance(caught.value.__context__, rp.PostError)
    assert caught.value.__context__.posted == 1
    server.one()


def test_error_of_a_tag_add_that_refuses_its_handle_is_raised_after_a_complete_post(server):
    add = Unwilling(tag=1, wr_id=1)
    add.error = KeyError(1)
    with pytest.raises(KeyError):
        server.srq.post_srq_ops(add)
    assert server.one().wr_id == 1
    assert server.srq.outstanding_tags == 1


def test_device_refuses_an_entry_beyond_max_num_tags_with_enomem(stack, pd):
    server = Server(stack, pd, max_num_tags=2, checked=False)
    adds = [rp.TagAdd(tag=i, recv_wr_id=i, wr_id=i) for i in range(4)]
    with pytest.raises(rp.PostError) as caught:
        server.srq.post_srq_ops(adds)
    assert (caught.value.errno, caught.value.index) == (errno.ENOMEM, 2)
    assert caught.value.posted == 2
    assert [wc.wr_id for wc in server.cq.wait(2)] == [0, 1]
    assert [add.handle is None for add in adds] == [False, False, True, True]
    assert server.srq.outstanding_tags == 2
    server.client.eager(1)
    with pytest.raises(rp.PostError):
        server.srq.post_srq_ops(adds[2])
    assert server.one().wr_id == 1
    server.srq.post_srq_ops(adds[2])


def test_operation_on_a_full_operation_queue_is_refused_by_name(server):
    server.srq.post_srq_ops([rp.TagSync(wr_id=i) for i in range(8)])
    with pytest.raises(rp.PostError, match="the queue is full: max_ops=8") as caught:
        server.srq.post_srq_ops(rp.TagSync())
    assert caught.value.errno == errno.ENOMEM
    assert [wc.wr_id for wc in server.cq.wait(8)] == list(range(8))
    server.srq.post_srq_ops(rp.TagSync())


def test_unsignaled_operations_fill_the_devices_operation_queue(stack, pd):
    """Their slots come free with a later signaled one, as on a send queue."""
    server = Server(stack, pd, max_ops=2, checked=False)
    server.srq.post_srq_ops([rp.TagSync(flags=0), rp.TagSync(flags=0)])
    with pytest.raises(rp.PostError, match=r"operations .* full \(max_ops=2, ") as caught:
        server.srq.post_srq_ops(rp.TagSync())
    assert (caught.value.errno, caught.value.index) == (errno.ENOMEM, 0)


def test_invalid_tag_operations_are_refused_before_they_are_posted(server, pd, context, stack):
    mr = server.mr
    foreign = stack.enter_context(rp.MR(stack.enter_context(rp.PD(context)), 64))
    read_only = stack.enter_context(rp.MR(pd, 64, rp.Access.REMOTE_READ))
    for op, words in (
        (rp.TagAdd(sg_list=[mr[i : i + 1] for i in range(33)]), "33 SGEs.*=32"),
        (rp.TagAdd(sg_list=foreign[:8]), "not belong to the queue's PD"),
        (rp.TagAdd(sg_list=read_only[:8]), "without LOCAL_WRITE"),
        (rp.TagAdd(sg_list=mr[3:3]), "length 0"),
        (rp.TagAdd(tag=0x30, mask=0x0F), "no message can match"),
        (rp.TagAdd(unexpected_cnt=2), "unexpected_cnt=2 is ignored without"),
        (rp.TagSync(flags=OpsFlags.SIGNALED), "has no effect"),
        (rp.TagSync(flags=8), "bits that are not flags"),
        (rp.TagAdd(recv_wr_id=1 << 64), "recv_wr_id=18446744073709551616 is not in"),
        (rp.TagAdd(tag=-1), "tag=-1"),
        (rp.TagAdd(tag="x"), "tag: expected int, got str"),
        (rp.TagSync(unexpected_cnt=1 << 32), "unexpected_cnt=4294967296 is not in"),
        (rp.Send(), "expected OpsWR, got Send"),
    ):
        with pytest.raises(rp.PostError, match=words) as caught:
            server.srq.post_srq_ops([rp.TagAdd(tag=0), op])
        assert (caught.value.index, caught.value.posted) == (1, 1)
        # Earlier operations remain posted.
        assert server.one().opcode is WCOpcode.TM_ADD
        assert server.srq.outstanding_tags == 1
        server.client.eager(0)
        server.one()


def test_invalid_unchecked_tag_operations_are_refused_with_an_errno(stack, pd):
    server = Server(stack, pd, checked=False)
    mr = server.mr
    with pytest.raises(rp.PostError) as caught:
        server.srq.post_srq_ops(
            [rp.TagAdd(tag=1), rp.TagAdd(sg_list=[mr[i : i + 1] for i in range(33)])]
        )
    assert (caught.value.errno, caught.value.index) == (errno.EINVAL, 1)
    assert server.one().opcode is WCOpcode.TM_ADD
    assert server.srq.outstanding_tags == 1


# ---- memory -----------------------------------------------------------------------


def test_tagged_buffer_is_held_until_its_message_has_arrived(server, pd):
    mr = rp.MR(pd, 64)
    server.srq.post_srq_ops(rp.TagAdd(tag=1, recv_wr_id=77, sg_list=mr[:], flags=0))
    with pytest.raises(rp.InUseError, match="wr_id 77"):
        mr.close()
    server.client.eager(1, b"data")
    with pytest.raises(rp.InUseError, match="wr_id 77"):
        mr.close()
    server.one()
    # The operation was not signaled, and holds nothing.
    assert bytes(mr.buffer[:4]) == b"data"
    mr.close()


def test_tagged_buffer_is_released_when_its_removal_completes(server, pd):
    mr = rp.MR(pd, 64)
    add = rp.TagAdd(tag=1, recv_wr_id=77, sg_list=mr[:], flags=0)
    server.srq.post_srq_ops([add])
    server.srq.post_srq_ops(rp.TagDel(handle=add.handle))
    with pytest.raises(rp.InUseError, match="wr_id 77"):
        mr.close()
    server.one()
    mr.close()


@pytest.mark.parametrize("signaled", [True, False])
def test_tagged_buffer_is_held_while_its_message_is_arriving(server, pd, signaled):
    """The TAG_DEL came too late; its completion, or that of the next, says nothing of the data."""
    mr = rp.MR(pd, 16384, ALL)
    add = rp.TagAdd(tag=1, recv_wr_id=77, sg_list=mr[:], flags=0)
    server.srq.post_srq_ops(add)
    # The data cannot be fetched yet.
    server.client.peer.to_sqd()
    assert server.client.send(server.client.rndv(1, b"x" * 9000)) is WCStatus.SUCCESS
    if signaled:
        server.srq.post_srq_ops(rp.TagDel(wr_id=8, handle=add.handle))
    else:
        server.srq.post_srq_ops([rp.TagDel(handle=add.handle, flags=0), rp.TagSync(wr_id=8)])
    seen = [server.cq.wait(1)[0] for _ in range(2)]
    assert [wc.wr_id for wc in seen] == [77, 8]
    ended = WCStatus.TM_ERR if signaled else WCStatus.SUCCESS
    assert [wc.status for wc in seen] == [WCStatus.SUCCESS, ended]
    assert server.srq.outstanding_tags == 1
    with pytest.raises(rp.InUseError, match="wr_id 77"):
        mr.close()
    server.client.qp.post_recv(rp.RecvWR(server.client.mr[4096:4200]))
    server.client.peer.to_rts()
    wc = server.one()
    assert (wc.wr_id, wc.wc_flags) == (77, WCFlags.TM_DATA_VALID)
    assert server.srq.outstanding_tags == 0
    mr.close()


def test_removal_of_an_entry_invalidates_no_window_whatever_its_key(server, pd, stack, monkeypatch):
    """Even if the key is the number by which the library knows the entry."""
    region = stack.enter_context(rp.MR(pd, 64, ALL | rp.Access.MW_BIND))
    with monkeypatch.context() as patched:
        patched.setattr(memory.Memory, "_new_key", lambda *_: 1 << 24)
        mw = stack.enter_context(rp.MW(pd))
    key = mw.rkey | 1
    bind = rp.BindMW(mw=mw, rkey=key, mr=region, addr=region.addr, length=64)
    server.client.qp.post_send(bind)
    server.client.cq.wait(1)[0].check()
    assert mw.rkey == key
    for _ in range(2):
        add = server.add(1)
        server.srq.post_srq_ops(rp.TagDel(handle=add.handle))
        server.one().check()
    with pytest.raises(rp.InUseError, match="bound to it"):
        region.close()


def test_closing_a_tag_matching_queue_releases_its_buffers(stack, pd):
    server = Server(stack, pd, clients=1)
    server.add(1)
    for client in server.clients:
        client.qp.close()
        client.peer.close()
    server.srq.close()
    server.mr.close()


def test_late_removal_removes_no_other_entry(stack, pd):
    """However often the entry's slot has been reused meanwhile."""
    server = Server(stack, pd, max_num_tags=8, max_ops=1024)
    late = server.add(5, size=64, recv_wr_id=6, flags=0)
    assert server.client.eager(5) is WCStatus.SUCCESS
    server.srq.post_srq_ops(rp.TagDel(handle=late.handle, flags=0, wr_id=7))
    assert server.one().wr_id == 6
    for number in range(260):
        server.add(5, size=64, recv_wr_id=1000 + number, flags=0)
        if number == 255:
            server.srq.post_srq_ops(rp.TagSync(wr_id=8))
            assert server.one().wr_id == 8
            assert server.srq.outstanding_tags == 1
        assert server.client.eager(5) is WCStatus.SUCCESS
        assert server.one().wr_id == 1000 + number


# ---- a queue without a matching list ----------------------------------------------


def test_tag_operation_on_a_queue_without_a_matching_list_is_refused(pd, stack):
    srq = stack.enter_context(rp.SRQ(pd))
    for op in (rp.TagAdd(), rp.TagDel(), rp.TagSync()):
        with pytest.raises(rp.PostError, match=r"no matching list; .*SRQType\.TM") as caught:
            srq.post_srq_ops(op)
        assert caught.value.errno == errno.EINVAL
        assert (caught.value.index, caught.value.posted) == (0, 0)
    assert (srq.outstanding_tags, srq.outstanding_ops) == (0, 0)


LACKS_MEMORY = """
import contextlib
import _testcapi
import rdmapost as rp

lost = []
with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    context = enter(rp.open_device("soft0"))
    pd = enter(rp.PD(context))
    mr = enter(rp.MR(pd, 64, rp.Access.LOCAL_WRITE))
    cq = enter(rp.CQ(context, 256, wc_flags=rp.WCExFlags.WITH_TM_INFO))
    srq = rp.SRQ(pd, 4, srq_type=rp.SRQType.TM, cq=cq, max_num_tags=64, max_ops=64)
    stack.callback(srq.close)
    for at in range(50):
        add = rp.TagAdd(sg_list=mr[:8], tag=at, wr_id=at)
        before = srq.outstanding_tags
        _testcapi.set_nomemory(at, at + 1)
        try: srq.post_srq_ops(add)
        except (MemoryError, rp.PostError): pass
        finally: _testcapi.remove_mem_hooks()
        if (srq.outstanding_tags > before) != (add.handle is not None):
            lost.append(at)
    print(lost, srq.outstanding_tags > 0)
"""


def test_entry_that_was_added_without_memory_to_spare_has_its_handle():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    assert prints(LACKS_MEMORY, **LOSES_MEMORY) == "[] True"
