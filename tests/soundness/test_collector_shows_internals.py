"""Code may read and alter internals of the library that gc.get_objects() and frames expose.

The library may then lose completions or raise any exception, but must not crash.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from support import ALL, prints
from support.connected_pair import Rig
from support.isolated import isolated

import rdmapost as rp
from rdmapost._binding import native
from rdmapost.posting.fields import Verb
from rdmapost.posting.queue import PostQueue


@isolated(silent=True)
def test_collector_shows_no_incomplete_tuple(soft):
    """In the text of an error, which a subclass's __str__ makes."""
    looked = []

    class Window(rp.MW):
        def __str__(self) -> str:
            tuples = [each for each in gc.get_objects() if type(each) is tuple]
            looked.append(sum(len(repr(type(item))) for each in tuples for item in each))
            return "a window"

    rig = Rig(soft)
    mw = Window(rig.pd)
    mw.close()
    with pytest.raises(rp.ClosedError, match="a window is closed"):
        mw.rkey = 5
    assert looked
    rig.close()


@isolated()
def test_region_of_a_closed_prepared_list_can_be_closed_while_a_debugger_keeps_all_it_found(soft):
    """So does the collector of a free-threaded Python, until it has cleared what it found."""
    rig = Rig(soft)
    batch = rig.a.prepare([rp.Send(rig.mr[:8]), rp.Send(rig.mr[8:16])])
    batch.post()
    found = gc.get_objects()
    batch.close()
    with pytest.raises(rp.InUseError, match="in use by 2 outstanding work requests"):
        rig.mr.close()
    rig.a.to_err()
    assert len(rig.cq.wait(2)) == 2
    rig.mr.close()
    del found
    rig.close()


@isolated(silent=True)
def test_completions_that_a_debugger_spoils_do_not_run_code_under_the_lock(soft):
    """A frame shows the list that is put back."""
    rig = Rig(soft)
    outcomes: list[object] = []

    class Status:
        def __index__(self) -> int:
            outcomes.append("called")
            with contextlib.suppress(Exception):
                outcomes.append(rig.cq.poll(1000))
            return 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and frame.f_code.co_name == "poll" and frame.f_locals["found"]:
            sys.setprofile(None)
            found = frame.f_locals["found"]
            status = Status()
            spoiled = [found[0]._replace(status=wrong) for wrong in (status, 2**70, -(2**70))]
            short = tuple.__new__(type(found[0]), (0,))
            found += [(0, status, 0), tuple(found[0]), short, *spoiled, None, status]
            raise KeyError

    rig.a.post_send(rig.write(1))
    sys.setprofile(profile)
    with pytest.raises(KeyError):
        rig.cq.poll()
    with pytest.raises(rp.WaitTimeout) as caught:
        rig.cq.wait(900, 0.0)
    assert caught.value.failed is None
    assert outcomes == []
    assert [wc.wr_id for wc in rig.cq.poll()] == [1, 1, 1, 1]
    rig.close()


SPOILERS: dict[str, object] = {"None": None, "an empty tuple": (), "no entry": (b"", None, 0)}


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("how", ["append", "appendleft"])
@isolated(warnings="ignore")
def test_device_queues_with_anything_in_them_do_not_end_the_process(how, spoiler, soft):
    known = {id(each) for each in gc.get_objects()}
    rig = Rig(soft)
    rig.b.post_recv(rig.receive(1))
    found = [each for each in gc.get_objects() if type(each) is deque and id(each) not in known]
    assert found
    for each in found:
        getattr(each, how)(SPOILERS[spoiler])
    for number in range(2):
        with contextlib.suppress(rp.PostError, rp.VerbsError):
            rig.a.post_send(rp.Send(rig.mr[:8], wr_id=number))
        for _ in range(4):
            rig.cq.poll()
            rig.cq.poll_into(bytearray(48))
    with contextlib.suppress(AttributeError):
        rig.a.to_reset()


@isolated(silent=True)
def test_table_of_queues_with_anything_in_it_finds_no_other_queue(soft):
    rig = Rig(soft)
    tables = [
        each
        for poller in gc.get_objects()
        if type(poller).__name__ == "Poller"
        for each in gc.get_referents(poller)
        if type(each) is dict and each
    ]
    assert tables
    spare = rig.queue_pair()
    kept = [value for table in tables for value in table.values()]
    spare.close()
    del spare
    gc.collect()
    whole, polled = [dict(table) for table in tables], []
    for value in (0x1000, None, *kept, "", 2**100):
        for table, entries in zip(tables, whole, strict=True):
            table.clear()
            table.update(entries)
        # The queue of the latest completion is not looked up again.
        rig.b.post_send(rig.write(2))
        rig.cq.wait()
        for table in tables:
            table.update(dict.fromkeys([*table, *range(20)], value))
        rig.a.post_send(rig.write(1))
        polled.append([wc.wr_id for wc in rig.cq.poll()])
    # One of the values kept is that of the queue itself.
    assert sorted(polled) == [[]] * (len(kept) + 3) + [[1]]


@isolated()
def test_private_methods_called_with_wrong_objects_do_not_end_the_process(soft):
    class Region(rp.MR):
        attributes: Any = ()

        def _remake(self, *args: Any) -> Any:
            return super()._remake(*args[:-1], self.attributes)

    context = rp.open_device(soft)
    pd, cq = rp.PD(context), rp.CQ(context, 64)
    mr = Region(pd, 64, ALL)
    a, b = (rp.QP(pd, rp.QPType.RC, cq) for _ in range(2))
    a.connect(b.endpoint())
    write = rp.RdmaWrite(mr[:8], remote_addr=mr.addr, rkey=mr.rkey)
    bind = rp.BindMW(mw=rp.MW(pd), mr=mr)
    for wrong in (write, [write], [bind], rp.RecvWR(mr[:8]), None):
        with pytest.raises(TypeError, match="expected a BindMW"):
            a._send.bind_mw(a, wrong, True)  # type: ignore[arg-type]
    for owner in (b, context, mr, cq):
        with pytest.raises(TypeError, match="has another owner"):
            a._send.bind_mw(owner, bind, True)
        with pytest.raises(TypeError, match="has another owner"):
            native.Prepared()._prepare(a._send, owner, [write])
    for mr.attributes in ((5,), ((5,),), ((5, 6, 7),), ((),)):
        with pytest.raises(TypeError, match="not an attribute in __slots__"):
            mr.rereg(access=ALL)
    functions = native.undo, native.try_on_commit, native.on_commit, native.at_the_end
    assert not any(isinstance(each.__self__, list) for each in functions)  # type: ignore[attr-defined]


@isolated()
def test_queue_that_is_initialised_while_its_arguments_are_read_stays_as_it_is(soft):
    context = rp.open_device(soft)
    qp = rp.QP(rp.PD(context), rp.QPType.RC, rp.CQ(context))
    given: dict[str, Any] = {}

    class Noting(native.Queue):
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

    class Queue(PostQueue, Noting):
        pass

    Queue(Verb.ibv_post_send, qp._send.limits, 8, qp._send._reasons, checked=True)
    queue = native.Queue.__new__(native.Queue)

    class Number:
        def __index__(self) -> int:
            native.Queue.__init__(queue, **given)
            return int(Verb.ibv_post_recv)

    with pytest.raises(TypeError, match="already been initialised"):
        native.Queue.__init__(queue, **{**given, "verb": Number()})
    with pytest.raises(TypeError, match="has another owner"):
        queue.bind_mw(qp, rp.BindMW(), True)


@isolated()
def test_private_functions_of_the_software_devices_check_their_arguments(soft):
    context = rp.open_device(soft)

    class Sequence:
        """Not a tuple: no one keeps its items."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return (native.DeviceQueue(), [], 0)[index]

    queue, ends = native.DeviceQueue(), Sequence()
    with pytest.raises(TypeError):
        native.FastPath(queue, {}, {}, {}, {}, None, None, None, ends, ends, 1, 1, 1, 0, 0)
    end = queue, [], 0
    with pytest.raises(TypeError, match=r"^rq: expected DeviceQueue or None"):
        native.FastPath(queue, {}, {}, {}, {}, None, None, context, end, end, 1, 1, 1, 0, 0)
    held = sys.getrefcount(queue)
    native.FastPath(queue, {}, {}, {}, {}, None, None, queue, end, end, 1, 1, 1, 0, 0)
    assert sys.getrefcount(queue) == held
    with pytest.raises(IndexError):
        native.verb(native.made)
    with pytest.raises(TypeError, match="not a list of handles"):
        native.defer_closes(context)


@isolated()
def test_made_in_made_undoes_both_with_their_own_results(soft):
    outer: list[Any] = []
    inner: list[Any] = []
    context = rp.open_device(soft)

    def fail_after(function: Any, *args: Any) -> None:
        native.made(outer.append, function, *args)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        native.verb(fail_after, native.made, inner.append, int, "7")
    assert (outer, inner) == ([7], [7])
    with pytest.raises(ZeroDivisionError):
        native.verb(fail_after, native.undo, inner.append, 8)
    assert (outer, inner) == ([7, None], [7, 8])
    with pytest.raises(ValueError, match="invalid literal"):
        native.verb(fail_after, native.made, inner.append, int, "x")
    assert (outer, inner) == ([7, None], [7, 8])
    context.close()


@isolated()
def test_poller_refuses_wrong_arguments(soft):
    rig = Rig(soft)
    cq, poller = rig.cq, rig.cq._poller
    calls: dict[Callable[..., object], tuple[Any, ...]] = {
        poller.poll: (cq, 1, []),
        poller.wait: (cq, 1, 0, 0.0, []),
        poller.fill: (cq, 1, None),
        poller.notify: (cq, False),
        poller.until: (cq, -1, print, 0.0, False),
        poller.unclaim: (print, 0),
    }
    for call, args in calls.items():
        wrong = [(), args[:-1], (*args, None), (*args, None, None), (None, *args[1:])]
        if call == poller.fill:
            wrong.remove(args[:-1])
        if call == poller.unclaim:
            wrong[-1] = (print, "")
        if call not in (poller.until, poller.unclaim):
            wrong.append((rig.context, *args[1:]))
        for these in wrong:
            with pytest.raises(TypeError):
                call(*these)
    for call, these in (
        (poller.poll, (cq, 1, ())),
        (poller.poll, (cq, "", [])),
        (poller.wait, (cq, 1, 0, "", [])),
        (poller.until, (cq, "", print, 0.0, False)),
        (poller.until, (cq, -1, print, "", False)),
        (poller.put_back, ((),)),
        (native.get_cq_event, ()),
        (native.get_cq_event, (0, {})),
        (native.get_cq_event, ("", {})),
        (native.Poller, (None, {}, [], 0, 0, -1, None)),
    ):
        with pytest.raises(TypeError):
            call(*these)
    rig.works()
    rig.close()


@isolated()
def test_completion_whose_row_is_none_is_not_written(soft):
    rig = Rig(soft)
    rig.a.post_send(rig.write(1))
    wcs = rig.cq.wait()
    rig.cq._poller.put_back(wcs)
    row = rp.WC._row
    for wrong in (b"", bytes(47), bytes(49), "x" * 48, None):
        rp.WC._row = lambda _, wrong=wrong: wrong  # type: ignore[method-assign, misc, return-value]
        with pytest.raises(TypeError):
            rig.cq.poll_into(bytearray(48))
    rp.WC._row = row  # type: ignore[method-assign]
    assert rig.cq.poll() == wcs
    rig.close()


@isolated()
def test_poller_refuses_negative_numbers(soft):
    rig = Rig(soft)
    poller = rig.cq._poller
    with pytest.raises(ValueError, match=r"^count=-1 is negative$"):
        poller.fill(rig.cq, -1)
    with pytest.raises(ValueError, match=r"^count=-2 is negative$"):
        poller.wait(rig.cq, -2, 0, 0.0, [])
    with pytest.raises(ValueError, match=r"^promised=-3 is negative$"):
        poller.wait(rig.cq, 1, -3, 0.0, [])
    rig.close()


@isolated()
@pytest.mark.parametrize("wrong", ["", -1, 256, None])
def test_refused_description_of_completions_changes_none(soft, wrong):
    rig = Rig(soft)
    for at in (1, 3, 5):
        given: list[Any] = [tuple, {0: "no"}, str, {0: "no", 1: "no"}, str, {0: "no"}, str, str]
        given[at] = "" if wrong == "" else {wrong: "no"}
        with pytest.raises((TypeError, ValueError)):
            native.describe_wc(*given)
    rig.a.post_send(rp.RdmaWrite(rig.mr[:8], remote_addr=rig.mr.addr, rkey=rig.mr.rkey, wr_id=3))
    [wc] = rig.cq.wait(1, 5)
    assert type(wc) is rp.WC
    assert (wc.status, wc.opcode) == (rp.WCStatus.SUCCESS, rp.WCOpcode.RDMA_WRITE)
    assert wc.wc_flags == rp.WCFlags(0)
    rig.close()


def test_private_functions_do_no_harm_before_a_software_device_is_opened():
    code = """
import contextlib, sys
import rdmapost as rp
from rdmapost._binding import native

calls = [
    (native.verb, native.made, len, list),
    (native.run_device,),
    (native.start, 1),
    (native.put, [], 1),
]
print("rdmapost.providers.software" in sys.modules)
for function, *arguments in calls:
    with contextlib.suppress(Exception):
        function(*arguments)
with rp.open_device("soft0") as context, rp.PD(context):
    print("open")
"""
    assert prints(code) == "False\nopen"
