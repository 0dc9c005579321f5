"""An interrupt at each moment of making, closing, posting and polling leaves everything usable."""

from __future__ import annotations

import array
import contextlib
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support import TIMES
from support.connected_pair import ALL, BINDABLE, INLINE, LIMIT, Memory, Rig, open_files
from support.interrupts import Interrupted, Moment, interrupt_at_each_moment, interrupt_at_random
from support.isolated import isolated
from support.roce import open_roce

import rdmapost as rp
from rdmapost import MWType, QPType, SRQType, connect
from rdmapost.loopback import Loopback
from rdmapost.pingpong import Pingpong

RAISES = {"KeyboardInterrupt": KeyboardInterrupt, "Exception": Interrupted}

# ---- making and closing -----------------------------------------------------------


def _tag_matching(rig: Rig) -> rp.SRQ:
    cq = rp.CQ(rig.context, wc_flags=rp.WCExFlags.WITH_TM_INFO)
    rig.more.append(cq)
    return rp.SRQ(rig.pd, 8, 2, srq_type=SRQType.TM, cq=cq, max_num_tags=8, max_ops=8)


def _with_channel(rig: Rig) -> rp.CQ:
    channel = rp.CompChannel(rig.context)
    rig.more.append(channel)
    return rp.CQ(rig.context, channel=channel)


def _xrc(rig: Rig) -> rp.SRQ:
    xrcd = rp.XRCD(rig.context)
    rig.more.append(xrcd)
    return rp.SRQ(rig.pd, 8, 2, srq_type=SRQType.XRC, xrcd=xrcd, cq=rig.cq)


def _with_srq(rig: Rig) -> rp.QP:
    srq = rp.SRQ(rig.pd)
    rig.more.append(srq)
    return rig.queue_pair(srq=srq)


def _attached(rig: Rig) -> rp.QP:
    qp = rp.QP(rig.pd, QPType.UD, rig.cq)
    rig.more.append(qp)
    qp.connect()
    qp.attach_mcast("ff0e::1")
    return qp


MAKERS: dict[str, Callable[[Rig], Any]] = {
    "Context": lambda rig: rp.open_device(rig.context.name),
    "PD": lambda rig: rp.PD(rig.context),
    "CQ": lambda rig: rp.CQ(rig.context),
    "CQ-extended": lambda rig: rp.CQ(rig.context, wc_flags=rp.WCExFlags.WITH_TM_INFO),
    "CQ-channel": _with_channel,
    "CompChannel": lambda rig: rp.CompChannel(rig.context),
    "MR": lambda rig: rp.MR(rig.pd, 4096, ALL),
    "MR-given": lambda rig: rp.MR(rig.pd, bytearray(4096), ALL),
    "MW": lambda rig: rp.MW(rig.pd),
    "AH": lambda rig: rig.a.ah_to(rig.b.endpoint()),
    "XRCD": lambda rig: rp.XRCD(rig.context),
    "SRQ": lambda rig: rp.SRQ(rig.pd),
    "SRQ-XRC": _xrc,
    "SRQ-TM": _tag_matching,
    "QP": lambda rig: rig.queue_pair(),
    "QP-SRQ": _with_srq,
    "QP-multicast": _attached,
    "prepared": lambda rig: rig.a.prepare([rig.write(1), rig.write(2)]),
    "prepared-recv": lambda rig: rig.b.prepare_recv([rig.receive(1)]),
}
REAL = ["Context", "PD", "CQ", "CQ-channel", "MR", "MR-given", "MW", "SRQ", "QP", "prepared"]
"""Those that are also interrupted on a real device."""


def _make(type_name: str, device: str, raises: str, max_moments: int) -> None:
    def act(rig: Rig) -> None:
        rig.more.append(MAKERS[type_name](rig))

    def check(rig: Rig, _: Moment) -> None:
        rig.works()
        gc.collect()
        rig.close()

    interrupt_at_each_moment(
        lambda: Rig(device),
        act,
        check,
        handler=RAISES[raises],
        max_moments=max_moments,
        seconds=8 * TIMES,
    )


@pytest.mark.parametrize("type_name", MAKERS)
@isolated(silent=True)
def test_interrupted_creation_leaves_nothing(type_name, soft):
    _make(type_name, soft, "KeyboardInterrupt", 100)


@pytest.mark.parametrize("type_name", ["CQ", "MR", "QP", "SRQ-TM"])
@isolated(silent=True)
def test_handlers_exception_during_creation_leaves_nothing(type_name, soft):
    _make(type_name, soft, "Exception", 40)


@pytest.mark.parametrize("type_name", REAL)
@isolated(silent=True)
def test_interrupted_creation_leaves_nothing_on_a_real_device(type_name, real):
    _make(type_name, real, "KeyboardInterrupt", 25)


def _close(type_name: str, device: str, raises: str, max_moments: int) -> None:
    def make() -> Rig:
        rig = Rig(device)
        rig.more.append(MAKERS[type_name](rig))
        return rig

    def check(rig: Rig, moment: Moment) -> None:
        assert moment.raised or not moment.number, "what the handler raised is lost"
        rig.more[-1].close()
        assert getattr(rig.more[-1], "closed", True)
        rig.works()
        rig.close()

    interrupt_at_each_moment(
        make,
        lambda rig: rig.more[-1].close(),
        check,
        handler=RAISES[raises],
        max_moments=max_moments,
        seconds=8 * TIMES,
    )


@pytest.mark.parametrize("type_name", MAKERS)
@isolated(silent=True)
def test_interrupted_close_can_be_repeated(type_name, soft):
    _close(type_name, soft, "KeyboardInterrupt", 100)


@pytest.mark.parametrize("type_name", ["CQ", "MR", "QP", "SRQ-TM"])
@isolated(silent=True)
def test_close_interrupted_by_a_handlers_exception_can_be_repeated(type_name, soft):
    _close(type_name, soft, "Exception", 40)


@pytest.mark.parametrize("type_name", REAL)
@isolated(silent=True)
def test_interrupted_close_can_be_repeated_on_a_real_device(type_name, real):
    _close(type_name, real, "KeyboardInterrupt", 25)


def _loopback(context: rp.Context, opened: contextlib.ExitStack) -> Loopback:
    loopback = Loopback(context)
    loopback.window()
    loopback.region(64, ALL)
    loopback.local.qp.post_send(rp.Send(loopback.local.mr[:8]))
    return loopback


def _connection(context: rp.Context, opened: contextlib.ExitStack) -> connect.Connection:
    server = opened.enter_context(connect.serve(context, port=0, timeout=1.0))
    connection = connect.dial(context, *server.address, timeout=1.0)
    connection.region(64)
    connection.qp.post_send(rp.Send(connection.mr[:8]))
    return connection


SEVERAL: dict[str, Callable[[rp.Context, contextlib.ExitStack], Any]] = {
    "Loopback": _loopback,
    "Pingpong": lambda context, opened: Pingpong(context),
    "Connection": _connection,
}


@pytest.mark.parametrize("what", SEVERAL)
@isolated(silent=True)
def test_interrupted_close_of_several_resources_can_be_repeated(what, soft):
    files = open_files()

    def make() -> tuple[Any, contextlib.ExitStack]:
        opened = contextlib.ExitStack()
        context = opened.enter_context(rp.open_device(soft))
        return SEVERAL[what](context, opened), opened

    def act(things: tuple[Any, contextlib.ExitStack]) -> None:
        things[0].close()
        # What comes in a finalizer is raised afterwards.
        time.sleep(0)

    def check(things: tuple[Any, contextlib.ExitStack], _: Moment) -> None:
        things[0].close()
        # A context cannot be closed while anything on it is open.
        things[1].close()
        assert not open_files() - files

    interrupt_at_each_moment(make, act, check, max_moments=100)


@pytest.mark.parametrize("verb", ["prepare", "prepare_recv"])
@isolated(silent=True)
def test_handler_that_closes_a_queue_pair_during_prepare_may_close_the_region_too(verb, soft):
    """At any moment of prepare(), which then raises ClosedError or returns a closed list."""

    def make() -> Rig:
        rig = Rig(soft)
        rig.more.append(rp.MR(rig.pd, 64))
        return rig

    def act(rig: Rig) -> None:
        region = rig.more[-1]
        with contextlib.suppress(rp.ClosedError):
            wr = rp.RecvWR(region[:8]) if verb == "prepare_recv" else rp.Send(region[:8])
            assert getattr(rig.a, verb)([wr, wr]).closed == rig.a.closed

    def close(rig: Rig) -> None:
        rig.a.close()
        rig.more[-1].close()

    def check(rig: Rig, _: Moment) -> None:
        for thing in (rig.a, *rig.more, rig.b, rig.mr, rig.cq, rig.pd, rig.context):
            thing.close()
        assert not open_files() - rig.files

    interrupt_at_each_moment(make, act, check, handler=close)


@pytest.mark.parametrize("verb", ["prepare", "prepare_recv"])
@isolated(silent=True)
def test_queue_pair_and_region_of_an_interrupted_prepare_can_be_closed(verb, soft):
    """Also while what was raised is kept, and with its traceback the list."""
    kept: list[BaseException] = []

    def act(rig: Rig) -> None:
        wr = rp.RecvWR(rig.mr[:8]) if verb == "prepare_recv" else rp.Send(rig.mr[:8])
        try:
            getattr(rig.a, verb)([wr, wr])
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    def check(rig: Rig, _: Moment) -> None:
        for thing in (rig.a, rig.b, rig.mr, rig.cq, rig.pd, rig.context):
            thing.close()
        kept.clear()

    interrupt_at_each_moment(lambda: Rig(soft), act, check)


@isolated(silent=True)
def test_handler_that_prepares_while_its_queue_pair_is_closed_leaves_no_list_open(soft):
    """At any moment of close(): prepare() raises ClosedError or returns a list that gets closed."""

    def prepare(rig: Rig) -> None:
        with contextlib.suppress(rp.ClosedError):
            rig.more.append(rig.a.prepare(rig.write(1)))

    def check(rig: Rig, _: Moment) -> None:
        assert rig.a.closed
        assert all(batch.closed for batch in rig.more)
        rig.context.close_all()
        assert not open_files() - rig.files

    interrupt_at_each_moment(lambda: Rig(soft), lambda rig: rig.a.close(), check, handler=prepare)


def _outstanding(rig: Rig) -> None:
    """Leave receives, writes, and a prepared list that has been posted on a's queue pair."""
    rig.a.post_recv([rig.receive(number) for number in range(4)])
    rig.more.append(rig.a.prepare([rig.write(1), rig.write(2)]))
    rig.more[-1].post()
    rig.a.post_send([rig.write(3), rig.write(4)])


@isolated(silent=True)
def test_interrupted_close_of_a_queue_pair_with_outstanding_work_can_be_repeated(soft):
    """It can be closed again, and then its region; its completions are there or still come."""

    def make() -> Rig:
        rig = Rig(soft)
        _outstanding(rig)
        return rig

    def check(rig: Rig, _: Moment) -> None:
        rig.a.close()
        rig.found += rig.cq.poll()
        assert {wc.wr_id for wc in rig.found} >= {1, 2, 3, 4}
        rig.b.close()
        for thing in (*rig.more, rig.mr, rig.cq, rig.pd, rig.context):
            thing.close()
        assert not open_files() - rig.files

    interrupt_at_each_moment(make, lambda rig: rig.a.close(), check)


@isolated(silent=True)
def test_interrupted_reset_of_a_queue_pair_can_be_repeated(soft):
    """Reset again it has nothing outstanding, and can be connected again."""

    def make() -> Rig:
        rig = Rig(soft)
        _outstanding(rig)
        return rig

    def check(rig: Rig, _: Moment) -> None:
        rig.a.to_reset()
        assert rig.a.outstanding == (0, 0)
        rig.b.to_reset()
        rig.a.connect(rig.b.endpoint())
        rig.b.connect(rig.a.endpoint())
        rig.works()
        rig.close()

    interrupt_at_each_moment(make, lambda rig: rig.a.to_reset(), check, max_moments=80)


@isolated(silent=True, warnings="ignore")
def test_interrupted_region_keeps_its_memory_while_it_is_registered(device):
    """While it is made or collected.  Its domain, which a device closes only without regions,
    tells whether one is left; memory that is not held any more must not be registered.
    """
    import weakref

    def interrupted(collected: bool) -> None:
        class Things:
            """A PD, and memory that only the region refers to."""

            def __init__(self) -> None:
                self.context = rp.open_device(device)
                self.pd = rp.PD(self.context)
                memory = Memory(4096)
                self.ref = weakref.ref(memory)
                self.made: list[Any] = [memory]
                del memory
                if collected:
                    self.made[0] = rp.MR(self.pd, self.made[0], ALL)

        def act(things: Things) -> None:
            if not collected:
                things.made.append(rp.MR(things.pd, things.made[0], ALL))
            things.made.clear()

        def check(things: Things, _: Moment) -> None:
            things.made.clear()
            gc.collect()
            if collected and things.ref() is not None:
                # Held for the life of the process, which is said.
                assert any(issubclass(w.category, ResourceWarning) for w in said)
                said.clear()
                return
            assert things.ref() is None, "nothing is registered, and the memory is held"
            things.pd.close()
            things.context.close()

        interrupt_at_each_moment(Things, act, check, max_moments=100 // TIMES, seconds=8 * TIMES)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        interrupted(False)
        interrupted(True)


@pytest.mark.parametrize("raises", RAISES)
@isolated(silent=True, warnings="ignore")
def test_interrupted_with_block_over_all_resources_closes_them(raises, soft):
    """``with`` gives everything back, or says in a ResourceWarning what it could not."""

    def act(things: dict[str, Any]) -> None:
        with (
            rp.open_device(soft) as context,
            rp.PD(context) as pd,
            rp.CQ(context) as cq,
            rp.MR(pd, 4096, BINDABLE) as mr,
            rp.MW(pd),
            rp.SRQ(pd) as srq,
            rp.QP(pd, QPType.RC, cq) as a,
            rp.QP(pd, QPType.RC, cq, srq=srq) as b,
        ):
            a.connect(b.endpoint())
            b.connect(a.endpoint())
            a.post_send(rp.RdmaWrite(mr[:8], remote_addr=mr.addr + 64, rkey=mr.rkey))
            cq.wait(1)

    def make() -> dict[str, Any]:
        return {"files": open_files(), "warned": warned()}

    said = warnings.catch_warnings(record=True)
    log = said.__enter__()
    warnings.simplefilter("always")

    def warned() -> int:
        return sum(issubclass(warning.category, ResourceWarning) for warning in log)

    def check(things: dict[str, Any], _: Moment) -> None:
        gc.collect()
        left = open_files() - things["files"]
        assert not left or warned() > things["warned"], f"left without a warning: {left}"

    interrupt_at_each_moment(make, act, check, handler=RAISES[raises], max_moments=150)


# ---- posting ----------------------------------------------------------------------


def _window(rig: Rig) -> rp.BindMW:
    rig.more.append(rp.MW(rig.pd))
    mw = rig.more[-1]
    return rp.BindMW(
        mw=mw,
        rkey=mw.next_rkey(),
        mr=rig.mr,
        addr=rig.mr.addr,
        length=64,
        mw_access_flags=rp.Access.REMOTE_READ,
        wr_id=1,
    )


POSTS: dict[str, Callable[[Rig], Callable[[], object]]] = {
    # Each prepares what is posted and returns the post: writes with the wr_ids 1 and up.
    "one": lambda rig: partial(rig.a.post_send, rig.write(1)),
    "list": lambda rig: partial(rig.a.post_send, [rig.write(i) for i in (1, 2, 3)]),
    "inline": lambda rig: partial(rig.a.post_send, rig.write(1, send_flags=INLINE)),
    "inline-list": lambda rig: partial(
        rig.a.post_send, [rig.write(i, send_flags=INLINE) for i in (1, 2, 3)]
    ),
    "refused-at-2": lambda rig: partial(
        _refused, partial(rig.a.post_send, [rig.write(1), rig.write(2, rkey=-1), rig.write(3)])
    ),
    "bind-mw": lambda rig: partial(rig.a.post_send, [_window(rig), rig.write(2)]),
    "columns": lambda rig: partial(_by_columns, rig, [1, 2, 3]),
    "columns-refused-at-2": lambda rig: partial(_refused, partial(_by_columns, rig, [1, 2, -1])),
}


def _by_columns(rig: Rig, ids: list[int]) -> None:
    rig.mr.buffer[0] = 1
    numbers = array.array("q", ids)
    rig.a.post_columns(
        rp.RdmaWrite,
        rig.mr[:1],
        wr_id=numbers,
        remote_addr=rp.Blocks(rig.mr.addr + 1024, numbers, 1),
        rkey=rig.mr.rkey,
    )


def _refused(post: Callable[[], object]) -> None:
    with contextlib.suppress(rp.PostError):
        post()


def _prepared(rig: Rig) -> Callable[[], object]:
    rig.more.append(rig.a.prepare([rig.write(1), rig.write(2)]))
    return rig.more[-1].post


POSTS["prepared"] = _prepared


def _post_check(rig: Rig, _: Moment) -> None:
    rig.drain()
    done = {wc.check().wr_id for wc in rig.found}
    assert done >= rig.written(), f"written {rig.written()}, completed {done}"
    rig.works()
    rig.close()


def _post_rig(how: str, device: str) -> Any:
    rig = Rig(device)
    rig.post = POSTS[how](rig)  # type: ignore[attr-defined]
    return rig


@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize("how", POSTS)
@isolated(silent=True)
def test_interrupted_post_counts_as_outstanding_what_the_device_has(how, raises, soft):
    """All of it completes."""
    interrupt_at_each_moment(
        lambda: _post_rig(how, soft),
        lambda rig: rig.post(),
        _post_check,
        handler=RAISES[raises],
        max_moments=120 if raises == "KeyboardInterrupt" else 40,
    )


@pytest.mark.parametrize("how", ["list", "inline", "bind-mw"])
@isolated(silent=True, timeout=60)
def test_interrupted_post_counts_as_outstanding_what_a_real_device_has(how, real):
    interrupt_at_each_moment(
        lambda: _post_rig(how, real),
        lambda rig: rig.post(),
        _post_check,
        max_moments=25,
        seconds=8 * TIMES,
    )


@isolated(silent=True)
def test_interrupted_type_1_bind_counts_as_outstanding_what_the_device_has(soft):
    def make() -> Rig:
        rig = Rig(soft)
        rig.more.append(rp.MW(rig.pd, MWType.TYPE_1))
        return rig

    def act(rig: Rig) -> None:
        rig.a.bind_mw(rig.more[0], rig.mr, rig.mr.addr, 64, rp.Access.REMOTE_READ, wr_id=1)

    interrupt_at_each_moment(make, act, _post_check)


@isolated(silent=True)
def test_interrupted_tso_counts_as_outstanding_what_the_device_has(soft):
    from support.packets import ETHERNET, IPV4, ipv4, tcp

    def make() -> Rig:
        rig = Rig(soft)
        qp = rp.QP(rig.pd, QPType.RAW_PACKET, rig.cq, max_tso_header=256)
        rig.more.append(qp)
        qp.connect()
        return rig

    def act(rig: Rig) -> None:
        header = ETHERNET + IPV4 + ipv4(6, tcp())
        rig.more[0].post_send(rp.TSO(rig.mr[:1000], hdr=header, mss=300, wr_id=1))

    def check(rig: Rig, moment: Moment) -> None:
        qp = rig.more[0]
        left = qp.outstanding.send
        assert len(rig.cq.wait(left, 2)) == left
        assert qp.outstanding.send == 0
        act(rig)
        assert [wc.check().wr_id for wc in rig.cq.wait(1, 2)] == [1]
        rig.close()

    interrupt_at_each_moment(make, act, check, max_moments=80)


def _receive(rig: Rig) -> None:
    rig.b.post_recv([rig.receive(number) for number in (1, 2, 3)])


def _receive_by_columns(rig: Rig) -> None:
    rig.b.post_recv_columns(rig.mr[3072:3080], wr_id=array.array("i", [1, 2, 3]))


@pytest.mark.parametrize("columns", [False, True], ids=["objects", "columns"])
@pytest.mark.parametrize("raises", RAISES)
@isolated(silent=True)
def test_interrupted_post_of_receives_counts_as_outstanding_what_the_device_has(
    raises, columns, soft
):
    def check(rig: Rig, _: Moment) -> None:
        posted = rig.b.outstanding.recv
        rig.drain_receives()
        taken = [wc.wr_id for wc in rig.found if wc.opcode is rp.WCOpcode.RECV]
        assert taken == [*range(1, posted + 1)]
        rig.b.post_recv(rig.receive(7))
        rig.drain_receives()
        rig.close()

    interrupt_at_each_moment(
        lambda: Rig(soft),
        _receive_by_columns if columns else _receive,
        check,
        handler=RAISES[raises],
        max_moments=80,
    )


class Shared(Rig):
    """With a third queue pair that receives from an SRQ, and a fourth that sends to it."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.srq = rp.SRQ(self.pd, max_wr=64)
        self.to, self.sender = self.queue_pair(srq=self.srq), self.queue_pair(max_send_wr=128)
        self.to.connect(self.sender.endpoint(), rnr_retry=1)
        self.sender.connect(self.to.endpoint(), rnr_retry=1)
        self.more += [self.srq, self.to, self.sender]

    def send(self, count: int) -> None:
        """Send so many messages that no completion tells of."""
        quiet = rp.Send(self.mr[:8], wr_id=900, send_flags=0)
        last = rp.Send(self.mr[:8], wr_id=901)
        for at in range(0, count, 32):
            number = min(32, count - at)
            self.sender.post_send([quiet] * (number - 1) + [last])

    def receives(self) -> list[int]:
        return [wc.wr_id for wc in self.found if wc.qp_num == self.to.qp_num]

    def drain_shared(self) -> None:
        """Poll until all receives of the SRQ have completed."""
        deadline = time.monotonic() + LIMIT
        while True:
            self.found += self.cq.poll()
            if not self.srq.outstanding and not self.sender.outstanding.send:
                break
            assert time.monotonic() < deadline, (
                f"{self.srq.outstanding} outstanding that do not complete, "
                f"{len(self.receives())} came"
            )
        self.found += self.cq.poll()


def _shared(rig: Shared) -> None:
    rig.srq.post_srq_recv([rig.receive(number) for number in (1, 2, 3)])


def _shared_by_columns(rig: Shared) -> None:
    rig.srq.post_srq_recv_columns(rig.mr[3072:3080], wr_id=array.array("i", [1, 2, 3]))


@pytest.mark.parametrize("columns", [False, True], ids=["objects", "columns"])
@pytest.mark.parametrize("raises", RAISES)
@isolated(silent=True)
def test_interrupted_post_to_an_srq_counts_as_outstanding_what_the_device_has(
    raises, columns, soft
):
    def check(rig: Shared, _: Moment) -> None:
        posted = rig.srq.outstanding
        rig.send(posted)
        rig.drain_shared()
        assert rig.receives() == [*range(1, posted + 1)]
        rig.srq.post_srq_recv(rig.receive(7))
        rig.send(1)
        rig.drain_shared()
        rig.close()

    interrupt_at_each_moment(
        lambda: Shared(soft),
        _shared_by_columns if columns else _shared,
        check,
        handler=RAISES[raises],
        max_moments=80,
    )


@isolated(silent=True)
def test_interrupted_post_of_tag_operations_counts_as_outstanding_what_the_device_has(soft):
    """Accepted operations complete, and their entries can be removed."""

    def make() -> Rig:
        rig = Rig(soft)
        rig.more.append(_tag_matching(rig))
        rig.ops = [  # type: ignore[attr-defined]
            rp.TagAdd(tag=tag, wr_id=tag, recv_wr_id=10 + tag, sg_list=rig.mr[:64])
            for tag in (1, 2, 3)
        ]
        return rig

    def check(rig: Any, _: Moment) -> None:
        cq, srq = rig.more
        left = srq.outstanding_ops
        assert len(cq.wait(left, 2)) == left
        assert srq.outstanding_ops == 0
        srq.post_srq_ops(rp.TagSync(wr_id=9))
        assert [wc.check().wr_id for wc in cq.wait(1, 2)] == [9]
        rig.close()

    interrupt_at_each_moment(
        make, lambda rig: rig.more[1].post_srq_ops(rig.ops), check, max_moments=100
    )


# ---- polling ----------------------------------------------------------------------


def _take_by_poll(rig: Rig) -> None:
    rig.found.extend(rig.cq.poll())


def _take_by_wait(rig: Rig) -> None:
    rig.found.extend(rig.cq.wait(4, 5))


EMPTY = b"\xee" * 48


def _take_by_poll_into(rig: Rig) -> None:
    rig.cq.poll_into(rig.rows)


def _take_by_wait_into(rig: Rig) -> None:
    rig.cq.wait_into(rig.rows, 4, 5)


TAKES = {
    "poll": _take_by_poll,
    "wait": _take_by_wait,
    "poll_into": _take_by_poll_into,
    "wait_into": _take_by_wait_into,
}


@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize("how", TAKES)
@isolated(silent=True)
def test_interrupted_poll_or_wait_loses_no_completion(how, raises, soft):
    """Each is returned once: by the interrupted poll, or by the next one."""

    def make() -> Rig:
        rig = Rig(soft)
        rig.b.post_recv([rig.receive(10), rig.receive(11)])
        rig.a.post_send([rig.write(1), rig.write(2)])
        ids = array.array("q", [3, 4])
        rig.a.post_columns(rp.Send, rig.mr[:1], wr_id=ids)
        return rig

    def check(rig: Rig, _: Moment) -> None:
        rig.drain()
        deadline = time.monotonic() + 2
        rows = (rig.rows[at : at + 48] for at in range(0, len(rig.rows), 48))
        taken = [int.from_bytes(row[:8], sys.byteorder) for row in rows if row != EMPTY]
        while len(rig.found) + len(taken) < 6 and time.monotonic() < deadline:
            rig.found += rig.cq.poll()
        assert sorted([wc.wr_id for wc in rig.found] + taken) == [1, 2, 3, 4, 10, 11]
        assert (rig.a.outstanding.send, rig.b.outstanding.recv) == (0, 0)
        rig.works()
        rig.close()

    interrupt_at_each_moment(
        make,
        TAKES[how],
        check,
        handler=RAISES[raises],
        max_moments=150 if raises == "KeyboardInterrupt" else 50,
    )


@pytest.mark.parametrize("raises", RAISES)
@isolated(silent=True)
def test_interrupted_poll_of_shared_receives_loses_no_completion(raises, soft):
    """All of a batch of 64 are returned, whenever the interrupt arrives."""

    def make() -> Shared:
        rig = Shared(soft)
        rig.srq.post_srq_recv([rig.receive(number) for number in range(60)])
        rig.send(60)
        return rig

    def check(rig: Shared, _: Moment) -> None:
        rig.drain_shared()
        assert sorted(rig.receives()) == [*range(60)]
        rig.close()

    interrupt_at_each_moment(make, _take_by_poll, check, handler=RAISES[raises], max_moments=40)


@isolated(silent=True)
def test_polls_interrupted_at_random_lose_no_shared_receive(soft):
    """The timer's interrupts also arrive between the moments tried above, in batch after batch."""
    rig = Shared(soft)
    sent = 0

    def act() -> None:
        rig.found.extend(rig.cq.poll())

    def after() -> None:
        nonlocal sent
        rig.drain_shared()
        room = 40
        rig.srq.post_srq_recv([rig.receive(sent + number) for number in range(room)])
        rig.send(room)
        sent += room

    after()
    interrupt_at_random(act, 150, after)
    rig.drain_shared()
    assert sorted(rig.receives()) == [*range(sent)]
    rig.close()


@pytest.mark.parametrize("sleeps", [True, False], ids=["sleeps", "spins"])
@isolated(silent=True)
def test_interrupted_wait_for_missing_completions_leaves_the_cq_usable(sleeps, soft):
    def act(rig: Rig) -> None:
        with contextlib.suppress(rp.WaitTimeout):
            rig.cq.wait(1, 0.003 if sleeps else 0)

    def check(rig: Rig, _: Moment) -> None:
        rig.works()
        rig.close()

    interrupt_at_each_moment(lambda: Rig(soft), act, check, max_moments=60)


# ---- handlers that raise nothing --------------------------------------------------


def _nested_poll(rig: Rig) -> None:
    rig.found.extend(rig.cq.poll())


def _nested_post(rig: Rig) -> None:
    rig.a.post_send(rig.write(50))


def _nested_close(rig: Rig) -> None:
    # What the interrupted verb may be using: it is closed now, later or, refused, not at all.
    for thing in (*rig.more, rig.a, rig.mr, rig.cq):
        with contextlib.suppress(rp.InUseError):
            thing.close()


NESTED = {"polls": _nested_poll, "posts": _nested_post, "closes": _nested_close}
VERBS: dict[str, Callable[[Rig], object]] = {
    "post": lambda rig: rig.a.post_send(rig.wrs["post"]),  # type: ignore[attr-defined]
    "inline": lambda rig: rig.a.post_send(rig.wrs["inline"]),  # type: ignore[attr-defined]
    "recv": lambda rig: rig.a.post_recv(rig.wrs["recv"]),  # type: ignore[attr-defined]
    "prepared": lambda rig: rig.more[0].post(),
    "poll": lambda rig: rig.found.extend(rig.cq.poll()),
    "wait": lambda rig: rig.found.extend(rig.cq.wait(1, 0.02)),
    "query": lambda rig: rig.a.query(),
    "modify": lambda rig: rig.a.to_err(),
    "make-qp": lambda rig: rig.more.append(rig.queue_pair()),
    "make-mr": lambda rig: rig.more.append(rp.MR(rig.pd, 64)),
    "close-qp": lambda rig: rig.a.close(),
    "close-mr": lambda rig: rig.more[1].close(),
}


def _verb_rig(device: str) -> Rig:
    rig = Rig(device)
    rig.wrs = {  # type: ignore[attr-defined]
        "post": [rig.write(1), rig.write(2)],
        "inline": rig.write(1, send_flags=INLINE),
        "recv": [rig.receive(1), rig.receive(2)],
    }
    rig.more += [rig.a.prepare(rig.write(9)), rp.MR(rig.pd, 64)]
    rig.a.post_send([rig.write(3), rig.write(4)])
    return rig


@pytest.mark.parametrize("nested", ["polls", "posts"])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if "close" not in verb])
@isolated(silent=True, timeout=30)
def test_signal_handler_may_poll_and_post_within_any_verb(verb, nested, soft):
    """Neither waits for the other, and what both have posted completes."""

    def check(rig: Rig, moment: Moment) -> None:
        assert not moment.raised
        if verb == "modify":
            rig.a.to_reset()
            rig.b.to_reset()
            rig.a.connect(rig.b.endpoint())
            rig.b.connect(rig.a.endpoint())
        else:
            rig.drain()
            done = [wc.wr_id for wc in rig.found]
            wanted = {3, 4} | rig.written()
            if nested == "posts" and moment.number and moment.where:
                wanted |= {50}
            assert sorted(done) == sorted(wanted)
        rig.works()
        rig.close()

    def act(rig: Rig) -> None:
        with contextlib.suppress(rp.WaitTimeout):
            # The handler may have polled them.
            VERBS[verb](rig)

    def handle(rig: Rig) -> None:
        if verb == "modify":
            # In ERR a post may be accepted or refused.
            with contextlib.suppress(rp.PostError):
                NESTED[nested](rig)
        else:
            NESTED[nested](rig)

    interrupt_at_each_moment(
        lambda: _verb_rig(soft), act, check, handler=handle, max_moments=25, seconds=5
    )


@pytest.mark.parametrize("verb", VERBS)
@isolated(silent=True, timeout=30)
def test_signal_handler_may_close_within_any_verb(verb, soft):
    """The close happens then or later; the verb succeeds or raises ClosedError."""

    def act(rig: Rig) -> None:
        try:
            with contextlib.suppress(rp.ClosedError, rp.WaitTimeout):
                VERBS[verb](rig)
        except rp.PostError as error:
            assert "closed" in str(error), error  # noqa: PT017

    def check(rig: Rig, _: Moment) -> None:
        for thing in (*rig.more[::-1], rig.a, rig.b, rig.mr, rig.cq, rig.pd, rig.context):
            thing.close()
        gc.collect()
        left = open_files() - rig.files
        assert not left, f"descriptors left: {left}"

    interrupt_at_each_moment(
        lambda: _verb_rig(soft), act, check, handler=_nested_close, max_moments=40, seconds=5
    )


def _ordered_rig(device: str, waits: str) -> Rig:
    """Create a rig with a prepared list, on a device that has other work pending."""
    rig = Rig(device)
    rig.mr.buffer[16:24] = b"original"
    rig.other = rp.MR(rig.pd, bytearray(b"another."), ALL)  # type: ignore[attr-defined]
    rig.list = rig.a.prepare(  # type: ignore[attr-defined]
        [rig.write(1), _write_to(rig, 2048, sg_list=rig.mr[16:24], wr_id=2)]
    )
    rig.posts = []  # type: ignore[attr-defined]
    if waits == "fault":
        # The fault never happens.
        rig.context.faults.fail_post(5, after=1 << 40)
    else:
        qps = rig.queue_pair(), rig.queue_pair()
        rig.more += qps
        for qp, peer in (qps, qps[::-1]):
            qp.connect(peer.endpoint(), rnr_retry=7)
        # The peer has no receive, so the device keeps retrying the send.
        qps[0].post_send(rp.Send(rig.mr[:8], wr_id=77))
    return rig


def _write_to(rig: Rig, at: int, **fields: Any) -> rp.RdmaWrite:
    return rp.RdmaWrite(remote_addr=rig.mr.addr + at, rkey=rig.mr.rkey, **fields)


def _change_and_post_list(rig: Any) -> None:
    rig.list[1].sg_list = rig.other[:8]
    rig.list[1].remote_addr = rig.mr.addr + 2056
    rig.list[1].wr_id = 3
    rig.list.post()
    rig.posts += [1, 3]


def _post_another(rig: Any) -> None:
    rig.a.post_send(_write_to(rig, 2056, sg_list=rig.other[:8], wr_id=3))
    rig.posts += [3]


IN_THE_MIDDLE = {"changes-list": _change_and_post_list, "posts": _post_another}


@pytest.mark.parametrize("waits", ["rnr", "fault"])
@pytest.mark.parametrize("nested", IN_THE_MIDDLE)
@pytest.mark.parametrize("outer", ["list", "objects"])
@isolated(silent=True, timeout=60)
def test_handler_within_a_post_does_not_change_what_is_posted(outer, nested, waits, soft):
    """The interrupted post is unchanged; what the handler posts follows it."""
    tried = []

    def act(rig: Any) -> None:
        if outer == "list":
            rig.list.post()
        else:
            rig.a.post_send([rig.write(1), _write_to(rig, 2048, sg_list=rig.mr[16:24], wr_id=2)])

    def check(rig: Any, moment: Moment) -> None:
        assert not moment.raised
        tried.append(bool(rig.posts))
        if rig.posts:
            with pytest.raises(rp.InUseError):
                rig.other.close()
        rig.drain()
        assert [wc.check().wr_id for wc in rig.found] == [1, 2, *rig.posts]
        assert bytes(rig.mr.buffer[2048:2056]) == b"original"
        assert bytes(rig.mr.buffer[2056:2064]) == (b"another." if rig.posts else bytes(8))
        rig.list.close()
        rig.other.close()
        rig.works()
        rig.close()

    interrupt_at_each_moment(
        lambda: _ordered_rig(soft, waits),
        act,
        check,
        handler=IN_THE_MIDDLE[nested],
        max_moments=40,
        seconds=5,
        within="/rdmapost/providers/",
    )
    assert sum(tried) > 3, "the handler has not run in the middle of posts"


# ---- at random, and from outside --------------------------------------------------


@pytest.mark.parametrize("verb", ["poll", "post", "wait"])
@isolated(silent=True, timeout=60)
def test_3000_random_interrupts_leave_no_lock_held(verb, soft):
    """This thread and another go on polling and posting after each."""
    rig = Rig(soft, max_send_wr=256)
    wrs = [rig.write(1), rig.write(2)]

    def act() -> None:
        if verb == "poll":
            rig.cq.poll()
        elif verb == "post":
            rig.a.post_send(wrs)
            rig.cq.poll()
        else:
            with contextlib.suppress(rp.WaitTimeout):
                rig.cq.wait(1, 0)

    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def beside() -> None:
        while True:
            go.acquire()
            rig.cq.poll()
            rig.a.post_send(wrs)
            rig.cq.poll()
            done.release()

    threading.Thread(target=beside, daemon=True).start()
    interrupts = 0

    def after() -> None:
        nonlocal interrupts
        interrupts += 1
        rig.cq.poll()
        go.release()
        assert done.acquire(timeout=LIMIT), f"another thread waits after {interrupts} interrupts"

    interrupt_at_random(act, 3000, after, longest=3e-4)
    rig.found.clear()
    rig.drain()
    rig.works()
    rig.close()


@isolated(silent=True, timeout=40)
def test_random_interrupts_of_a_whole_program_leak_nothing_on_the_device(soft):
    """One device, on which resources are made, used and closed under 600 interrupts."""
    rig = Rig(soft)
    kept: list[Any] = []

    def act() -> None:
        kept.append(rp.MR(rig.pd, bytearray(64), ALL))
        kept.append(rig.queue_pair())
        kept.append(rp.CQ(rig.context))
        rig.a.post_send([rig.write(1), rig.write(2)])
        rig.cq.poll()
        while kept:
            kept[-1].close()
            kept.pop()

    def after() -> None:
        for thing in kept:
            thing.close()
        kept.clear()

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    interrupt_at_random(act, 600, after, longest=3e-3)
    sys.unraisablehook = hook
    gc.collect()
    rig.drain()
    rig.works()
    rig.close()


@pytest.mark.parametrize("verb", ["poll()", "wait(1, 0.001)", "wait(1, None)"])
def test_ctrl_c_ends_a_polling_program_as_interrupted(verb):
    """One of it, at any moment: the program closes everything and ends as interrupted."""
    program = (
        "import contextlib, faulthandler, sys, rdmapost as rp\n"
        "faulthandler.dump_traceback_later(20, exit=True)\n"
        "with rp.open_device('soft0') as context, rp.CQ(context) as cq:\n"
        "    print('polls', flush=True)\n"
        "    while True:\n"
        "        with contextlib.suppress(rp.WaitTimeout):\n"
        f"            cq.{verb}\n"
    )
    ended = []
    for number in range(8):
        with subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "polls\n"
            time.sleep(0.001 * number)  # Interrupt each time at another moment.
            process.send_signal(signal.SIGINT)
            try:
                _, err = process.communicate(timeout=30)
            finally:
                process.kill()
            ended.append((process.returncode, err.strip().rpartition("\n")[2]))
    assert ended == [(-signal.SIGINT, "KeyboardInterrupt")] * 8


# ---- the harness itself -----------------------------------------------------------


class Leaky:
    """Takes a lock in one step and gives it back in another: what must be seen to fail."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def verb(self) -> None:
        self.lock.acquire()
        len("the work")
        self.lock.release()


def test_harness_detects_a_lock_left_held_by_an_interrupt():
    def check(leaky: Leaky, _: Moment) -> None:
        assert leaky.lock.acquire(blocking=False), "locked"

    with pytest.raises(AssertionError, match=r"after 2 of 4 moments[^$]*after acquire\(\)"):
        interrupt_at_each_moment(Leaky, Leaky.verb, check)


def test_harness_ends_if_a_verb_deadlocks_on_its_own_thread():
    def check(_: Leaky, moment: Moment) -> None:
        assert not moment.raised

    with pytest.raises(AssertionError, match=r"TooLong: not done in 0\.5 s"):
        interrupt_at_each_moment(Leaky, Leaky.verb, check, handler=Leaky.verb, seconds=0.5)


def test_random_harness_detects_a_lock_left_held_by_an_interrupt():
    leaky = Leaky()

    def after() -> None:
        assert leaky.lock.acquire(timeout=0.2), "locked"
        leaky.lock.release()

    with pytest.raises(AssertionError, match="locked"):
        interrupt_at_random(leaky.verb, 3000, after)


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_interrupt_of_close_all_is_raised_and_what_is_left_can_be_closed(error) -> None:
    def make() -> list[Any]:
        context = rp.open_device("soft0")
        pd, cq = rp.PD(context), rp.CQ(context)
        return [context, pd, cq, rp.MR(pd, 64), rp.MW(pd), rp.QP(pd, rp.QPType.RC, cq)]

    def check(things: list[Any], moment: Moment) -> None:
        things[0].close_all()
        assert [one.closed for one in things] == [True] * len(things)
        assert moment.raised == bool(moment.number)

    interrupt_at_each_moment(
        make, lambda things: things[0].close_all(), check, handler=error, within="/rdmapost/"
    )


class Late(Interrupted, TimeoutError):
    """What a program's own time limit raises: an OSError without an errno."""


def _mapped(rig: Rig) -> rp.MR:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        return rp.MR(rig.pd, mmap.mmap(file.fileno(), 4096))


TIMED: dict[str, Callable[[Rig], Any]] = {
    "open_device soft0": lambda rig: rp.open_device("soft0"),
    "CompChannel": lambda rig: rp.CompChannel(rig.context),
    "MR of a mapped file": _mapped,
    "MR": lambda rig: rp.MR(rig.pd, 64),
}


@pytest.mark.parametrize("what", TIMED)
def test_timeout_error_of_a_handler_is_not_taken_for_a_system_calls(what, soft):
    def act(rig: Rig) -> None:
        rig.more.append(TIMED[what](rig))

    def check(rig: Rig, moment: Moment) -> None:
        assert moment.raised == bool(moment.number)
        rig.works()
        gc.collect()
        rig.close()

    interrupt_at_each_moment(lambda: Rig(soft), act, check, handler=Late, within="/rdmapost/")


def test_timeout_error_of_a_handler_is_raised_by_the_opening_of_a_roce_device():
    def check(opened: list[rp.Context], moment: Moment) -> None:
        assert moment.raised == bool(moment.number)
        for context in opened:
            context.close()

    interrupt_at_each_moment(
        list,
        lambda opened: opened.append(open_roce("roce:127.0.0.66")),
        check,
        handler=Late,
        within="/rdmapost/",
    )


def test_interrupted_send_that_the_kernel_refuses_is_not_counted_as_sent():
    def make() -> tuple[rp.Context, rp.QP, rp.AH]:
        context = open_roce("roce:127.0.0.67")
        pd, cq = rp.PD(context), rp.CQ(context)
        qp = rp.QP(pd, QPType.UD, cq)
        qp.connect()
        return context, qp, rp.AH(pd, rp.AHAttr(dgid="::ffff:203.0.113.9", sgid_index=0))

    def act(things: tuple[rp.Context, rp.QP, rp.AH]) -> None:
        context, qp, ah = things
        qp.post_send(rp.Send(ah=ah, remote_qpn=7))
        qp.send_cq.poll()
        context.counters()

    def check(things: tuple[rp.Context, rp.QP, rp.AH], moment: Moment) -> None:
        assert moment.raised == bool(moment.number)
        counted = things[0].counters()
        things[0].close_all()
        assert (counted.packets_sent, counted.bytes_sent) == (0, 0)

    interrupt_at_each_moment(make, act, check, within="/rdmapost/providers/roce/")


@pytest.mark.parametrize("what", ["look", "close"])
def test_timeout_error_of_a_handler_is_not_taken_for_the_connections(what, soft):
    def make() -> tuple[rp.Context, connect.Server, connect.Connection]:
        context = rp.open_device(soft)
        server = connect.serve(context, port=0)
        return context, server, connect.dial(context, *server.address[:2])

    def act(things: tuple[rp.Context, connect.Server, connect.Connection]) -> None:
        if what == "look":
            things[2].look(0, 4)
        else:
            things[2].close()
            # What comes in a finalizer is raised afterwards.
            time.sleep(0)

    def check(
        things: tuple[rp.Context, connect.Server, connect.Connection], moment: Moment
    ) -> None:
        context, server, peer = things
        peer.close()
        server.close()
        context.close()
        assert moment.raised == bool(moment.number)

    interrupt_at_each_moment(make, act, check, handler=Late, within="/rdmapost/")


@pytest.mark.parametrize("where", ["the retry", "giving up"])
@pytest.mark.parametrize("device", ["soft0", "roce:lo"])
@isolated(silent=True, timeout=30)
def test_interrupt_beside_a_lack_of_memory_is_raised_and_fails_no_work(device, where):
    """No other thread, in which handlers do not run, can be started."""
    from rdmapost.providers.roce import protocol_engine
    from rdmapost.providers.soft0 import requester
    from rdmapost.providers.software import state

    module = requester if device == "soft0" else protocol_engine
    execute_next, report = module.execute_next, state._report_rarely
    attempts = []

    def lacks_memory_first(qp: Any) -> Any:
        attempts.append("execute")
        if where == "the retry" and len(attempts) == 2:
            signal.raise_signal(signal.SIGINT)
        if len(attempts) <= 2:
            raise MemoryError
        return execute_next(qp)

    def interrupted(*report_of: Any) -> None:
        if where == "giving up":
            attempts.append("give up")
            signal.raise_signal(signal.SIGINT)
        report(*report_of)

    with (
        rp.open_device(device) as context,
        rp.PD(context) as pd,
        rp.CQ(context) as cq,
        rp.QP(pd, QPType.RC, cq) as qp,
    ):
        qp.connect(qp.endpoint())
        qp.post_recv(rp.RecvWR(wr_id=2))
        module.execute_next, state._report_rarely = lacks_memory_first, interrupted
        threading.stack_size(1 << 46)
        # The device's own thread would find the work first.
        sys.setswitchinterval(30)

        def post() -> None:
            qp.post_send(rp.Send(wr_id=1))
            # Python raises what a handler raised when it next looks.
            cq.wait(0)

        with pytest.raises(KeyboardInterrupt):
            post()
        module.execute_next, state._report_rarely = execute_next, report
        assert ("give up" in attempts) is (where == "giving up")
        sys.setswitchinterval(0.005)
        threading.stack_size(0)
        assert {(wc.wr_id, wc.status) for wc in cq.wait(2, LIMIT)} == {(1, 0), (2, 0)}
