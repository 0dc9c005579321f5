"""What is posted and not completed: which wr_ids come back, and what stays alive for how long.

Three state machines post lists that the device accepts in part, complete some of it and query the
rest, against models: a send queue, which completes in order; an SRQ, which does not; and a matching
list, whose receives end by a message, in one or two completions, or by a TAG_DEL.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import ALL, resident
from support.tag_server import EAGER, Server, tmh
from support.tap import Tap, open_tap

import rdmapost as rp
from rdmapost import OpsFlags, QPType, SendFlags, WCStatus
from rdmapost._binding import native
from rdmapost.posting.fields import TYPE_NUMBERS

wr_ids = st.integers(0, (1 << 64) - 1)
ENOMEM, U64 = 12, (1 << 64) - 1


@dataclass(eq=False)
class Entry:
    """An outstanding work request: its wr_id, and a region that it alone names."""

    wr_id: int
    region: weakref.ref[rp.MR] | None = None
    signaled: bool = True
    removes: Entry | None = None
    handle: Any = None
    tag: int = 0
    seen: bool = False
    beside: list[Entry] = field(default_factory=list)
    """What else its post of a prepared list holds: that is one, until the last of it is done."""


def refused(close: Callable[[], None]) -> str:
    """Return why something cannot be closed, keeping nothing of the exception, which refers to
    it."""
    try:
        close()
    except rp.InUseError as error:
        return str(error)
    return ""


class Machine(RuleBasedStateMachine):
    """A watched device, and what all three machines do."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.context = self.stack.enter_context(rp.open_device("soft0"))
        self.tap = open_tap(self.context)
        self.stack.callback(self.tap.close)
        self.pd = self.stack.enter_context(rp.PD(self.context))
        self.gone: list[weakref.ref[rp.MR]] = []

    def teardown(self) -> None:
        self.stack.close()

    def region(self) -> rp.MR:
        """Make a region that the caller drops once it has been posted."""
        return rp.MR(self.pd, 64, ALL)

    def posted(self, post: Callable[[Any], None], wrs: Any, taken: int | None) -> int | None:
        """Post to a device that accepts so many; return the index of the refused one, or None."""
        if taken is not None:
            self.tap.refuse(passed=taken)
        said: tuple[int | None, int | None] = (None, None)
        try:
            post(wrs)
        except rp.PostError as error:
            said = error.index, error.posted
        self.tap.answer = None
        # The chains are of no interest.
        self.tap.chains.clear()
        assert said[0] == said[1]
        return said[0]

    def retire(self, *entries: Entry) -> None:
        self.gone += [entry.region for entry in entries if entry.region is not None]

    def check(self, entries: Sequence[Entry]) -> None:
        """Check that what is outstanding holds its memory, and that nothing else is held."""
        assert all(entry.region is None or entry.region() is not None for entry in entries)
        assert [ref for ref in self.gone if ref() is not None] == []
        self.gone.clear()

    def refuses_to_close(self, mr: rp.MR, wr_ids: list[int]) -> None:
        said, more = refused(mr.close), ", ..." if len(wr_ids) > 4 else ""
        assert f"(wr_id {', '.join(map(str, wr_ids[:4]))}{more})" in said
        assert said.startswith(
            f"{mr} cannot be closed: in use by {len(wr_ids)} outstanding work request"
            f"{'s' * (len(wr_ids) != 1)} (wr_id"
        )


lists = st.lists(st.tuples(wr_ids, st.booleans()), min_size=1, max_size=5)
partly = st.none() | st.integers(0, 5)


class InOrder(Machine):
    """A send queue: a completion retires its work request and all before it."""

    DEPTH = 16

    def __init__(self) -> None:
        super().__init__()
        self.cq = self.stack.enter_context(rp.CQ(self.context, 64))
        self.remote = self.stack.enter_context(rp.MR(self.pd, 64, ALL))
        self.shared = self.stack.enter_context(rp.MR(self.pd, 64, ALL))
        self.qp = self.stack.enter_context(
            rp.QP(self.pd, QPType.RC, self.cq, max_send_wr=self.DEPTH)
        )
        assert self.qp.max_send_wr == self.DEPTH
        self.qp.connect(self.qp.endpoint())
        self.model: list[Entry] = []
        self.completed: list[int] = []  # by the device, before a reset
        self.batch: rp.Batch | None = None
        self.prepared: list[Entry] = []
        self.given: list[Entry] = []  # with the prepared list, which has the work requests

    def make(self, items: Any) -> tuple[list[rp.RdmaWrite], list[Entry]]:
        wrs, entries = [], []
        for number, (wr_id, signaled) in enumerate(items):
            mr = self.region()
            # Every other one also names a region that others name.
            sges = [mr[:8], self.shared[:8]] if number % 2 else [mr[:8]]
            wrs.append(
                rp.RdmaWrite(
                    sges,
                    wr_id=wr_id,
                    remote_addr=self.remote.addr,
                    rkey=self.remote.rkey,
                    send_flags=SendFlags.SIGNALED if signaled else SendFlags(0),
                )
            )
            entries.append(Entry(wr_id, weakref.ref(mr), signaled, tag=number % 2))
        return wrs, entries

    def took(self, entries: list[Entry], refused: int | None) -> None:
        taken = entries if refused is None else entries[:refused]
        self.model += taken
        self.retire(*entries[len(taken) :])

    @rule(items=lists, taken=partly, bad=st.none() | st.integers(0, 5))
    def post(self, items: Any, taken: int | None, bad: int | None) -> None:
        """Post a list whose end the device refuses, or the library one in the middle."""
        wrs, entries = self.make(items)
        room = self.DEPTH - len(self.model)
        stops = [room] if len(wrs) > room else []
        if bad is not None and bad < len(wrs):
            wrs[bad].rkey = 1 << 32
            stops.append(bad)
        admitted = min([len(wrs), *stops])
        if taken is not None and taken < admitted:
            expected: int | None = taken
        else:
            taken, expected = None, admitted if stops else None
        single = len(wrs) == 1
        refused = self.posted(self.qp.post_send, wrs[0] if single else wrs, taken)
        assert refused == expected
        self.took(entries, refused)

    @rule(items=lists)
    def prepare(self, items: Any) -> None:
        """Replace the prepared list by another, and close it."""
        if self.batch is not None:
            self.batch.close()
            ended, self.prepared, self.given = [*self.prepared, *self.given], [], []
            self.unless_held(*ended)
            self.agrees()
        wrs, self.prepared = self.make(items)
        self.given = list(self.prepared)
        self.batch = self.qp.prepare(wrs)

    def unless_held(self, *entries: Entry) -> None:
        """Retire what nothing that is outstanding or prepared names, too."""
        still = {id(entry.region) for entry in self.held()}
        every = {id(one.region): one for entry in entries for one in (entry, *entry.beside)}
        self.retire(*(one for at, one in every.items() if at not in still))

    def held(self) -> list[Entry]:
        beside = itertools.chain.from_iterable(entry.beside for entry in self.model)
        return [*self.model, *beside, *self.prepared, *self.given]

    @precondition(lambda self: self.batch)
    @rule(taken=partly)
    def post_prepared(self, taken: int | None) -> None:
        """Post a prepared list; the device may refuse the end of it."""
        assert self.batch is not None
        count = len(self.prepared)
        room = self.DEPTH - len(self.model)
        if count > room:
            assert self.refused_whole(self.batch) == (ENOMEM, room, 0)
            return
        taken = None if taken is None or taken >= count else taken
        batch = self.batch
        refused = self.posted(lambda _: batch.post(), None, taken)
        assert refused == taken
        # Each post is another of the same, and names the same regions.
        beside = list(self.prepared)
        self.model += [
            Entry(e.wr_id, e.region, e.signaled, tag=e.tag, beside=beside)
            for e in self.prepared[:refused]
        ]

    def refused_whole(self, batch: rp.Batch) -> tuple[Any, ...]:
        # What pytest.raises() gives would keep the work request, and with it the region.
        try:
            batch.post()
        except rp.PostError as error:
            return error.errno, error.index, error.posted
        return ()

    @precondition(lambda self: self.batch)
    @rule(data=st.data(), wr_id=wr_ids)
    def change(self, data: st.DataObject, wr_id: int) -> None:
        """Change a prepared work request: what is outstanding stays as it is."""
        assert self.batch is not None
        index = data.draw(st.integers(0, len(self.prepared) - 1))
        before = self.prepared[index]
        mr = self.region()
        self.batch[index].wr_id = wr_id
        self.batch[index].sg_list = [mr[:8], self.shared[:8]] if before.tag else mr[:8]
        self.prepared[index] = Entry(wr_id, weakref.ref(mr), before.signaled, tag=before.tag)
        self.unless_held(before)

    @rule(most=st.integers(1, 6))
    def poll(self, most: int) -> None:
        completed, self.completed = self.completed[:most], self.completed[most:]
        signaled = [index for index, entry in enumerate(self.model) if entry.signaled]
        signaled = signaled[: most - len(completed)]
        done = [wc.check().wr_id for wc in self.cq.poll(most)]
        assert done == completed + [self.model[index].wr_id for index in signaled]
        if signaled:
            self.forget(signaled[-1] + 1)

    @rule()
    def reset(self) -> None:
        """What has completed by then is reported; nothing else is outstanding."""
        self.completed += [entry.wr_id for entry in self.model if entry.signaled]
        self.qp.to_reset()
        self.qp.connect(self.qp.endpoint())
        self.forget(len(self.model))

    def forget(self, count: int) -> None:
        done, self.model = self.model[:count], self.model[count:]
        self.unless_held(*done)

    @rule()
    def close_what_is_named(self) -> None:
        if self.batch is not None:
            mr = self.prepared[0].region
            assert mr is not None
            region = mr()
            assert region is not None
            assert f"{self.batch} still open" in refused(region.close)
        named = [entry.wr_id for entry in self.model if entry.tag]
        if named and not (self.batch and any(entry.tag for entry in self.prepared)):
            self.refuses_to_close(self.shared, named)

    @invariant()
    def agrees(self) -> None:
        assert self.qp.outstanding == (len(self.model), 0)
        self.check(self.held())


class AnyOrder(Machine):
    """An SRQ: its receives complete on several CQs, and each retires its own only."""

    DEPTH, QPS = 16, 3

    def __init__(self) -> None:
        super().__init__()
        make = self.stack.enter_context
        self.srq = make(rp.SRQ(self.pd, self.DEPTH, 1))
        assert self.srq.max_wr == self.DEPTH
        self.cqs = [make(rp.CQ(self.context, 64)) for _ in range(self.QPS)]
        sent = make(rp.CQ(self.context, 256))
        self.sent = sent
        self.senders = []
        for cq in self.cqs:
            target = make(rp.QP(self.pd, QPType.RC, sent, cq, srq=self.srq))
            sender = make(rp.QP(self.pd, QPType.RC, sent))
            sender.connect(target.endpoint(), rnr_retry=0)
            target.connect(sender.endpoint())
            self.senders.append(sender)
        self.posts: list[Entry] = []
        self.arrived: list[list[Entry]] = [[] for _ in self.cqs]

    @property
    def outstanding(self) -> list[Entry]:
        return [*self.posts, *itertools.chain.from_iterable(self.arrived)]

    @rule(ids=st.lists(wr_ids, min_size=1, max_size=6), taken=partly)
    def post(self, ids: list[int], taken: int | None) -> None:
        regions = [self.region() for _ in ids]
        wrs = [rp.RecvWR(mr[:8], wr_id) for mr, wr_id in zip(regions, ids, strict=True)]
        entries = [Entry(i, weakref.ref(mr)) for mr, i in zip(regions, ids, strict=True)]
        del regions
        room = min(len(ids), self.DEPTH - len(self.outstanding))
        taken = None if taken is None or taken >= room else taken
        refused = self.posted(self.srq.post_srq_recv, wrs, taken)
        assert refused == (taken if taken is not None else room if room < len(ids) else None)
        kept = len(ids) if refused is None else refused
        self.posts += entries[:kept]
        self.retire(*entries[kept:])

    @precondition(lambda self: self.posts)
    @rule(to=st.integers(0, QPS - 1))
    def send(self, to: int) -> None:
        """A message takes the receive at the head."""
        self.senders[to].post_send(rp.Send())
        assert self.sent.wait(1)[0].status is WCStatus.SUCCESS
        self.arrived[to].append(self.posts.pop(0))

    @rule(on=st.integers(0, QPS - 1), most=st.integers(1, 3))
    def poll(self, on: int, most: int) -> None:
        done, self.arrived[on] = self.arrived[on][:most], self.arrived[on][most:]
        assert [wc.check().wr_id for wc in self.cqs[on].poll(most)] == [e.wr_id for e in done]
        self.retire(*done)

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def close_what_is_named(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.outstanding))
        assert entry.region is not None
        mr = entry.region()
        assert mr is not None
        self.refuses_to_close(mr, [entry.wr_id])

    @invariant()
    def agrees(self) -> None:
        assert self.srq.outstanding == len(self.outstanding)
        self.check(self.outstanding)


class Tagged(Machine):
    """A matching list: operations complete in order, and its receives as messages come."""

    TAGS, OPS = 8, 12

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(self.stack, self.pd, max_num_tags=self.TAGS, max_ops=self.OPS)
        self.srq, self.client = self.server.srq, self.server.client
        self.ops: list[Entry] = []
        self.listed: list[Entry] = []  # by the device
        self.held: list[Entry] = []  # by the library
        self.completed: list[tuple[Entry, str]] = []  # in the CQ
        self.tags = itertools.count(1)

    def carried_out(self, op: Entry, entry: Entry | None) -> None:
        """Note what the device does with an operation."""
        self.ops.append(op)
        if entry is not None:
            self.listed.append(entry)
            self.held.append(entry)
        elif op.removes in self.listed:
            self.listed.remove(op.removes)
        if op.signaled:
            self.completed.append((op, "op"))

    @rule(
        adds=st.lists(st.tuples(wr_ids, wr_ids, st.booleans()), min_size=1, max_size=4),
        taken=partly,
    )
    def add(self, adds: Any, taken: int | None) -> None:
        wrs: list[Any] = []
        entries = []
        for wr_id, recv_wr_id, signaled in adds:
            mr, tag = rp.MR(self.pd, 8192, ALL), next(self.tags)
            flags = OpsFlags.SIGNALED if signaled else OpsFlags(0)
            wrs.append(
                rp.TagAdd(wr_id=wr_id, recv_wr_id=recv_wr_id, tag=tag, sg_list=mr[:], flags=flags)
            )
            receive = Entry(recv_wr_id, weakref.ref(mr), tag=tag)
            entries.append((Entry(wr_id, signaled=signaled), receive))
        del mr
        room = min(len(wrs), self.OPS - len(self.ops), self.TAGS - len(self.held))
        taken = None if taken is None or taken >= room else taken
        refused = self.posted(self.srq.post_srq_ops, wrs, taken)
        assert refused == (taken if taken is not None else room if room < len(wrs) else None)
        kept = len(wrs) if refused is None else refused
        assert all((wr.handle is not None) is (i < kept) for i, wr in enumerate(wrs))
        for wr, (op, entry) in zip(wrs[:kept], entries, strict=False):
            entry.handle = wr.handle
            self.carried_out(op, entry)
        self.retire(*(entry for _, entry in entries[kept:]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), wr_id=wr_ids, signaled=st.booleans(), refused=st.booleans())
    def remove(self, data: st.DataObject, wr_id: int, signaled: bool, refused: bool) -> None:
        """Remove a receive, which a message may have taken already."""
        entry = data.draw(st.sampled_from(self.held))
        flags = OpsFlags.SIGNALED if signaled else OpsFlags(0)
        wr = rp.TagDel(wr_id=wr_id, handle=entry.handle, flags=flags)
        full = len(self.ops) == self.OPS
        taken = 0 if refused and not full else None
        assert self.posted(self.srq.post_srq_ops, wr, taken) == (0 if refused or full else None)
        if not (refused or full):
            self.carried_out(Entry(wr_id, signaled=signaled, removes=entry), None)

    @precondition(lambda self: self.listed)
    @rule(data=st.data(), long=st.booleans())
    def message(self, data: st.DataObject, long: bool) -> None:
        """A message of several packets completes twice: when it matches, and when it has
        arrived."""
        entry = data.draw(st.sampled_from(self.listed))
        payload = bytes(6000 if long else 10)
        assert self.client.send(tmh(EAGER, entry.tag) + payload) is WCStatus.SUCCESS
        self.listed.remove(entry)
        self.completed += [(entry, "match"), (entry, "data")] if long else [(entry, "data")]

    @rule(most=st.integers(1, 4))
    def poll(self, most: int) -> None:
        completed, self.completed = self.completed[:most], self.completed[most:]
        # One at a time, to see what each of them releases.
        for entry, what in completed:
            [wc] = self.srq.cq.poll(1)  # type: ignore[union-attr]
            assert wc.wr_id == entry.wr_id
            if what == "match":
                assert wc.wc_flags == rp.WCFlags.TM_MATCH
                entry.seen = True
            elif what == "data":
                self.held.remove(entry)
                self.retire(entry)
            else:
                self.done(entry)
            self.agrees()

    def done(self, op: Entry) -> None:
        """An operation is done, and so are those before it, with what they removed."""
        at = self.ops.index(op)
        done, self.ops = self.ops[: at + 1], self.ops[at + 1 :]
        for entry in (one.removes for one in done):
            if entry is not None and entry in self.held and not entry.seen:
                self.held.remove(entry)
                self.retire(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close_what_is_named(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.held))
        assert entry.region is not None
        mr = entry.region()
        assert mr is not None
        self.refuses_to_close(mr, [entry.wr_id])

    @invariant()
    def agrees(self) -> None:
        assert self.srq.outstanding_tags == len(self.held)
        assert self.srq.outstanding_ops == len(self.ops)
        self.check(self.held)


few = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestInOrder, TestAnyOrder, TestTagged = InOrder.TestCase, AnyOrder.TestCase, Tagged.TestCase
TestInOrder.settings = TestAnyOrder.settings = TestTagged.settings = few


# ---- what ends otherwise -------------------------------------------------------------


@pytest.fixture
def pair(connect) -> Any:
    return connect(max_send_wr=16)


def write(pair: Any, mr: rp.MR, wr_id: int = 0) -> rp.RdmaWrite:
    return rp.RdmaWrite(mr[:8], wr_id=wr_id, remote_addr=pair.theirs.addr, rkey=pair.theirs.rkey)


def gone(*regions: weakref.ref[rp.MR]) -> bool:
    return all(region() is None for region in regions)


def test_closed_prepared_list_releases_its_memory_while_it_is_referenced(pair, pd):
    first, second = rp.MR(pd, 64), rp.MR(pd, 64)
    regions = weakref.ref(first), weakref.ref(second)
    batch = pair.a.prepare(write(pair, first))
    batch[0].sg_list = second[:8]
    del first, second
    assert not gone(regions[1])
    batch.close()
    assert gone(*regions)


def test_what_is_refused_of_a_prepared_work_request_keeps_nothing(pair, pd):
    mr = rp.MR(pd, 64)
    region = weakref.ref(mr)
    batch = pair.a.prepare([write(pair, mr), write(pair, mr)])
    del mr
    for name, value in (("wr_id", -1), ("rkey", 1 << 32), ("sg_list", ()), ("sg_list", 5)):
        with pytest.raises(ValueError, match=r"wr_id|rkey|SGE"):
            setattr(batch[1], name, value)
    batch.close()
    assert gone(region)


def test_setting_a_number_that_closes_its_prepared_list_raises_closed_error(pair, pd):
    """From its __index__, so that the list is gone by the time the number is found not to fit."""
    batch = pair.a.prepare(write(pair, pair.mine))
    item = batch[0]

    class Closing:
        def __index__(self) -> int:
            batch.close()
            return 1 << 64

    for name in ("wr_id", "rkey"):
        with pytest.raises(rp.ClosedError, match="the prepared list of 1 is closed"):
            setattr(item, name, Closing())


@pytest.mark.parametrize("bad", ["null", "left alone", "nowhere"])
def test_work_requests_of_a_device_without_bad_wr_count_as_posted(pair, pd, context, bad, stack):
    """All count as posted, so that the memory stays until the queue pair is reset."""
    if context.kind != "soft":
        pytest.skip("only soft0 can be made to refuse")
    tap = open_tap(context)
    stack.callback(tap.close)
    mr = rp.MR(pd, 64)
    region = weakref.ref(mr)
    tap.refuse(passed=1, rc=5, bad={"null": 0, "left alone": 1, "nowhere": 3}[bad])
    with pytest.raises(rp.PostError) as caught:
        pair.a.post_send([write(pair, mr, wr_id) for wr_id in range(3)])
    error = caught.value
    assert (error.errno, error.index, error.posted, error.wr) == (5, None, None, None)
    del mr, error, caught
    tap.answer = None
    tap.chains.clear()
    assert pair.a.outstanding.send == 3
    assert [wc.wr_id for wc in pair.cq.wait(1)] == [0]
    assert pair.a.outstanding.send == 2
    assert not gone(region)
    pair.a.to_reset()
    assert gone(region)


@pytest.mark.parametrize(
    ("rc", "bad", "code", "posted"),
    [
        (-22, 2, 22, 2),  # siw: a negative errno
        (0, 2, 5, 2),  # a partial post
        (0, 3, 0, 4),  # garbage after a success
        (95, 0, 95, 0),  # an unsupported call posts nothing
        (38, 1, 38, 0),
    ],
)
def test_bad_wr_of_a_driver_decides_what_stays_outstanding(
    pair, context, stack, rc, bad, code, posted
):
    if context.kind != "soft":
        pytest.skip("only soft0 can be made to refuse")
    tap = open_tap(context)
    stack.callback(tap.close)
    wrs = [write(pair, pair.mine, wr_id) for wr_id in range(4)]
    tap.refuse(passed=posted, rc=rc, bad=bad)
    if code:
        with pytest.raises(rp.PostError) as caught:
            pair.a.post_send(wrs)
        assert (caught.value.errno, caught.value.posted) == (code, posted)
    else:
        pair.a.post_send(wrs)
    assert pair.a.outstanding.send == posted
    assert [wc.wr_id for wc in pair.cq.poll()] == list(range(posted))


def test_memory_of_inline_data_is_free_when_the_post_returns(connect, pd):
    """That of the others in the list is not."""
    pair = connect(max_inline_data=64)
    inline, plain = rp.MR(pd, 64), rp.MR(pd, 64)
    wrs = [write(pair, inline, 1), write(pair, plain, 2), write(pair, inline, 3)]
    for wr in (wrs[0], wrs[2]):
        wr.send_flags = SendFlags.INLINE
    wrs[1].send_flags = SendFlags(0)
    pair.a.post_send(wrs)
    assert pair.a.outstanding.send == 3
    inline.close()
    assert "wr_id 2" in refused(plain.close)
    pair.a.to_reset()
    plain.close()


def test_flags_that_only_resemble_inline_release_no_memory(stack):
    """The flag of a tagged receive that has the value of INLINE, and INLINE on a bind."""
    context = stack.enter_context(rp.open_device("soft0"))
    tap = open_tap(context)
    stack.callback(tap.close)
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context, tm_info=True))
    srq = rp.SRQ(pd, srq_type=rp.SRQType.TM, cq=cq, checked=False)
    qp = rp.QP(pd, QPType.RC, cq, checked=False)
    qp.connect(qp.endpoint())
    mr = rp.MR(pd, 64, ALL | rp.Access.MW_BIND)
    mw = rp.MW(pd, rp.MWType.TYPE_2)
    # It reports them as posted, and never completes them.
    tap.refuse(rc=0, bad=0)
    srq.post_srq_ops(rp.TagAdd(sg_list=mr[:8], recv_wr_id=5, flags=int(SendFlags.INLINE)))
    assert "wr_id 5" in refused(mr.close)
    srq.close()
    assert refused(mr.close) == ""
    mr = rp.MR(pd, 64, ALL | rp.Access.MW_BIND)
    qp.post_send(
        rp.BindMW(
            mw=mw,
            rkey=mw.next_rkey(),
            mr=mr,
            addr=mr.addr,
            length=64,
            wr_id=6,
            send_flags=SendFlags.INLINE,
        )
    )
    assert "wr_id 6" in refused(mr.close)
    assert "wr_id 6" in refused(mw.close)
    qp.close()
    mw.close()
    mr.close()


def counters(queue: Any) -> Any:
    """Return how many were posted to a queue and how many of these are done, as C counts them."""
    return (ctypes.c_uint64 * 2).from_address(id(queue) + object.__basicsize__)


def test_count_wraps_around(pair, context):
    """After 2^32 work requests the tickets start again, and nothing is mixed up."""
    qp = pair.a
    for turn in range(3):
        qp.post_send([write(pair, pair.mine, wr_id) for wr_id in range(4)])
        assert [wc.wr_id for wc in pair.wait(4)] == [0, 1, 2, 3]
        counted = counters(qp._send.in_flight)
        assert list(counted) == [4 * turn + 4] * 2
    # This does not really post 2^32: that takes a minute.
    counted[0] = counted[1] = (1 << 32) - 6
    batch = qp.prepare([write(pair, pair.mine, wr_id) for wr_id in (20, 21, 22)])
    quiet = write(pair, pair.mine, 10)
    quiet.send_flags = SendFlags(0)
    region = rp.MR(pair.pd, 64)
    named = weakref.ref(region)
    qp.post_send([quiet, write(pair, region, 11)])
    del region
    batch.post()
    qp.post_send([quiet, quiet, write(pair, pair.mine, 12)])
    batch.post()
    assert qp.outstanding.send == 11
    depth = qp.max_send_wr
    with pytest.raises(rp.PostError, match="the queue is full"):
        qp.post_send([quiet] * (depth - 10))
    assert qp.outstanding.send == depth
    for wr_id, done in ((11, 2), (20, 3), (21, 4), (22, 5), (12, 8), (20, 9), (21, 10)):
        assert [wc.wr_id for wc in pair.wait(1)] == [wr_id]
        assert qp.outstanding.send == depth - done
        assert gone(named)
    assert list(counted) == [(1 << 32) + depth - 6, (1 << 32) + 4]
    batch.close()
    qp.to_reset()
    assert qp.outstanding.send == 0


def test_slots_of_a_shared_queue_are_reused_more_often_than_their_cookies_can_count(pair, pd):
    """A ticket says how often its slot was used, in 8 bits.  No more slots are made for it."""
    with (
        rp.SRQ(pd, 16, 1) as srq,
        rp.CQ(pd.context) as cq,
        rp.QP(pd, QPType.RC, cq, srq=srq) as target,
        rp.QP(pd, QPType.RC, cq) as sender,
    ):
        sender.connect(target.endpoint())
        target.connect(sender.endpoint())
        srq.post_srq_recv([rp.RecvWR(wr_id=n) for n in range(3)])

        def receive(numbers: range) -> None:
            for n in numbers:
                srq.post_srq_recv(rp.RecvWR(wr_id=n + 3))
                sender.post_send(rp.Send(send_flags=SendFlags.SIGNALED, wr_id=1 << 40))
                assert {wc.check().wr_id for wc in cq.wait(2)} == {n, 1 << 40}
                assert srq.outstanding == 3

        receive(range(1000))
        before = resident()
        receive(range(1000, 8000))
        assert resident() - before < 1 << 18


class Straying(Tap):
    """Has a device complete other work requests than those that it is handed."""

    stray = 0

    def _look(self, verb: int, first: int, answer: Any) -> None:
        super()._look(verb, first, answer)
        wr_id = ctypes.c_uint64.from_address(first)
        wr_id.value = wr_id.value & ~0xFFFF_FFFF | (wr_id.value + self.stray) & 0xFFFF_FFFF


@pytest.fixture
def straying(stack) -> Any:
    context = stack.enter_context(rp.open_device("soft0"))
    plain = open_tap(context)  # or the test is skipped
    plain.close()
    tap = Straying(plain._library, context)
    stack.callback(tap.close)
    return tap


@pytest.mark.parametrize("stray", [1, 2, 3, 4, 100, 1 << 31, (1 << 32) - 3, (1 << 32) - 2])
def test_completion_of_what_is_not_outstanding_retires_nothing(straying, stack, stray):
    """After what was posted, and before what is done: a send queue is in order."""
    pd = stack.enter_context(rp.PD(straying.context))
    cq = stack.enter_context(rp.CQ(straying.context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())
    mr = stack.enter_context(rp.MR(pd, 64, ALL))

    def wr(wr_id: int, flags: SendFlags = SendFlags.SIGNALED) -> rp.RdmaWrite:
        return rp.RdmaWrite((), wr_id=wr_id, send_flags=flags, remote_addr=mr.addr, rkey=mr.rkey)

    qp.post_send([wr(0), wr(1)])
    assert len(cq.wait(2)) == 2
    qp.post_send(wr(2, SendFlags(0)))
    straying.stray = stray
    qp.post_send(wr(3))
    straying.stray = 0
    assert cq.poll() == []
    assert qp.outstanding.send == 2
    qp.post_send(wr(4))
    assert [wc.wr_id for wc in cq.wait(1)] == [4]
    assert qp.outstanding.send == 0


@pytest.mark.parametrize("stray", [-1, 1, 15, 16, 17, 0xFFFF, 1 << 24, 0xFFFFFE, 255 << 24])
def test_completion_of_what_no_slot_has_retires_nothing(straying, stack, stray):
    """In any order: an SRQ's receives."""
    pd = stack.enter_context(rp.PD(straying.context))
    cq = stack.enter_context(rp.CQ(straying.context))
    srq = stack.enter_context(rp.SRQ(pd, 8, 1))
    target = stack.enter_context(rp.QP(pd, QPType.RC, cq, srq=srq))
    sender = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    sender.connect(target.endpoint())
    target.connect(sender.endpoint())
    straying.stray = stray
    srq.post_srq_recv(rp.RecvWR(wr_id=1))
    straying.stray = 0
    sender.post_send(rp.Send(wr_id=10))
    assert [wc.wr_id for wc in cq.wait(1)] == [10]
    assert cq.poll() == []
    assert srq.outstanding == 1
    srq.post_srq_recv(rp.RecvWR(wr_id=2))
    sender.post_send(rp.Send(wr_id=11))
    assert {wc.wr_id for wc in cq.wait(2)} == {2, 11}
    assert srq.outstanding == 1
    for queue in (target, sender, srq):
        queue.close()


def test_more_can_be_outstanding_than_have_been_at_first(connect, stack):
    """Their room grows: in a queue used before, and in any order."""
    pair = connect(max_send_wr=200)
    for count in (1, 10, 30, 100, 7, 150):
        regions = [stack.enter_context(rp.MR(pair.pd, 64)) for _ in range(count)]
        wrs = [write(pair, mr, wr_id) for wr_id, mr in enumerate(regions)]
        if count == 100:
            for wr in wrs:
                pair.a.post_send(wr)
        else:
            pair.a.post_send(wrs)
        assert pair.a.outstanding.send == count
        assert f"wr_id {count - 1}" in refused(regions[-1].close)
        assert [wc.wr_id for wc in pair.wait(count)] == list(range(count))
        for mr in regions:
            mr.close()


def test_more_receives_of_an_srq_can_be_outstanding_than_have_been_at_first(pd):
    with (
        rp.CQ(pd.context, 512) as cq,
        rp.SRQ(pd, 200, 1) as srq,
        rp.QP(pd, QPType.RC, cq, srq=srq) as target,
        rp.QP(pd, QPType.RC, cq, max_send_wr=200) as sender,
    ):
        sender.connect(target.endpoint())
        target.connect(sender.endpoint())
        for count in (1, 10, 30, 100, 7, 150):
            for wr_id in range(count // 2):
                srq.post_srq_recv(rp.RecvWR(wr_id=wr_id))
            srq.post_srq_recv([rp.RecvWR(wr_id=wr_id) for wr_id in range(count // 2, count)])
            assert srq.outstanding == count
            sender.post_send([rp.Send(send_flags=0)] * (count - 1) + [rp.Send(wr_id=1 << 40)])
            found = [wc.check().wr_id for wc in cq.wait(count + 1)]
            assert sorted(found) == [*range(count), 1 << 40]
            assert srq.outstanding == 0


def test_each_region_of_a_closed_prepared_list_is_held_while_it_is_outstanding(pair, pd):
    first, second, third = (rp.MR(pd, 64) for _ in range(3))
    wrs = [write(pair, first, 1), write(pair, third, 2)]
    wrs[0].sg_list = [first[:8], second[:8]]
    for wr in wrs:
        wr.send_flags = SendFlags(0)
    batch = pair.a.prepare(wrs)
    batch.post()
    batch.close()
    for mr in (first, second, third):
        assert refused(mr.close)
    pair.a.to_reset()
    for mr in (first, second, third):
        mr.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_closed_region_is_named_at_any_place_in_an_sg_list(pair, pd, at):
    sges = [rp.MR(pd, 64)[:8] for _ in range(3)]
    closed = sges[at].owner
    assert closed is not None
    closed.close()
    with pytest.raises(rp.PostError, match="is closed"):
        pair.a.post_send(rp.Send(sges))
    with pytest.raises(rp.PostError, match="is closed"):
        pair.a.prepare([rp.LocalInv(), rp.Send(sges)])
    assert pair.a.outstanding.send == 0
    for sge in sges:
        assert sge.owner is not None
        sge.owner.close()


def test_handle_of_a_tagged_receive_does_not_match_the_next_in_its_slot(stack):
    """Many times over: no receive is removed by the handle of another."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context, tm_info=True))
    srq = stack.enter_context(rp.SRQ(pd, srq_type=rp.SRQType.TM, cq=cq))
    stale: list[Any] = []
    for tag in range(40):
        add = rp.TagAdd(tag=tag, flags=0)
        srq.post_srq_ops(add)
        for handle in stale:
            with pytest.raises(rp.PostError, match="not on the list any more"):
                srq.post_srq_ops(rp.TagDel(handle=handle))
        assert srq.outstanding_tags == 1
        srq.post_srq_ops(rp.TagDel(handle=add.handle))
        [wc] = cq.wait(1)
        assert wc.status is WCStatus.SUCCESS
        stale.append(add.handle)
    assert srq.outstanding_tags == 0


class Memory(bytearray):
    """Memory that can be checked for still existing."""


@pytest.mark.parametrize(
    ("status", "bound"),
    [
        # The region is the one that was bound, the other, or unknown.
        (WCStatus.SUCCESS, {"new"}),
        (WCStatus.MW_BIND_ERR, {"old"}),
        (WCStatus.LOC_QP_OP_ERR, {"old"}),
        (WCStatus.LOC_PROT_ERR, {"old"}),
        (WCStatus.WR_FLUSH_ERR, {"old", "new"}),
        (WCStatus.GENERAL_ERR, {"old", "new"}),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "with one before it"])
def test_status_of_a_bind_says_which_region_the_window_holds(stack, status, bound, ahead):
    """For an unsignaled one before another that failed, it is unknown."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())
    windows = [rp.MW(pd, rp.MWType.TYPE_1) for _ in range(2)]
    memory = {name: Memory(64) for name in ("old", "new", "other", "third")}
    regions = {name: rp.MR(pd, at, ALL | rp.Access.MW_BIND) for name, at in memory.items()}
    refs = {name: weakref.ref(at) for name, at in memory.items()}
    memory.clear()

    def bind(mw: rp.MW, mr: rp.MR, **fields: Any) -> None:
        qp.bind_mw(mw, mr, mr.addr, 64, **fields)

    bind(windows[0], regions["old"])
    bind(windows[1], regions["other"])
    cq.wait(2)
    if ahead:
        bind(windows[1], regions["third"], send_flags=0)
    if status is not WCStatus.SUCCESS:
        context.faults.complete_with(9, status)
    bind(windows[0], regions["new"], wr_id=9)
    assert [wc.status for wc in cq.wait(1)] == [status]
    regions.clear()
    held = {name for name, ref in refs.items() if not gone(ref)}
    if not ahead:
        beside = {"other"}
    else:
        beside = {"third"} if status is WCStatus.SUCCESS else {"third", "other"}
    assert held == bound | beside
    for mw in windows:
        mw.close()
    assert all(gone(ref) for ref in refs.values())


def test_window_of_type_2_that_is_bound_to_nothing_of_a_region_holds_it_all_the_same(stack):
    """A length of 0 unbinds only a type 1 window."""
    context = stack.enter_context(rp.open_device("soft0"))
    pd = stack.enter_context(rp.PD(context))
    cq = stack.enter_context(rp.CQ(context))
    qp = stack.enter_context(rp.QP(pd, QPType.RC, cq))
    qp.connect(qp.endpoint())
    memory = Memory(64)
    ref, mr = weakref.ref(memory), rp.MR(pd, memory, ALL | rp.Access.MW_BIND)
    mw = rp.MW(pd, rp.MWType.TYPE_2)
    context.faults.complete_with(9, WCStatus.SUCCESS)  # soft0 has no such windows
    qp.post_send(rp.BindMW(mw=mw, rkey=mw.next_rkey(), mr=mr, addr=mr.addr, length=0, wr_id=9))
    assert cq.wait(1)[0].status is WCStatus.SUCCESS
    del memory, mr
    assert not gone(ref)
    mw.close()
    assert gone(ref)


# ---- what only the library itself calls ----------------------------------------------


def queue(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "verb": 0,
        "in_flight": native.InFlight(),
        "checked": True,
        "pd": 0,
        "room": 1,
        "datagram": False,
        "binds": False,
        "max_sge": 1,
        "max_msg_size": 1,
        "max_inline_data": 0,
        "max_tso_header": 0,
        "max_num_tags": 0,
        "kinds": (),
    }
    return native.Queue(**{**given, **changed})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"verb": -1}, "there is no such verb"),
        ({"verb": 4}, "there is no such verb"),
        ({"kinds": ((-1, 0),)}, "no such class"),
        ({"kinds": ((0, 0), (99, 0))}, "no such class"),
        ({"kinds": ((len(TYPE_NUMBERS), 0),)}, "no such class"),
        ({"kinds": ((1,),)}, "argument"),
        ({"kinds": 5}, "tuple"),
        ({"in_flight": None}, "InFlight"),
    ],
)
def test_queue_of_wrong_arguments_is_refused(wrong, error):
    with pytest.raises((TypeError, ValueError), match=error):
        queue(**wrong)
    for verb in range(4):
        queue(verb=verb, kinds=((0, 0), (len(TYPE_NUMBERS) - 1, 0)))


def test_queue_is_initialised_once():
    made = queue()
    with pytest.raises(TypeError, match="it has been initialised"):
        made.__init__(
            verb=0,
            in_flight=native.InFlight(),
            checked=True,
            pd=0,
            room=1,
            datagram=False,
            binds=False,
            max_sge=1,
            max_msg_size=1,
            max_inline_data=0,
            max_tso_header=0,
            max_num_tags=0,
            kinds=(),
        )


def test_queue_takes_posts_of_its_owner_only(pair):
    """Before the first and after."""
    made, wr = queue(), rp.Send()
    for _ in range(2):
        for wrong in ((), (pair.a,), (pair.a, wr, wr), (wr, wr), (None, wr)):
            for at in (made, pair.a._send, native.Queue.__new__(native.Queue)):
                with pytest.raises(TypeError, match="post"):
                    at.post(*wrong)
        for wrong in ((), (pair.a, wr), (None, wr, True), (wr, wr, True)):
            with pytest.raises(TypeError):
                pair.a._send.bind_mw(*wrong)
        with pytest.raises(TypeError, match="post"):
            native.Queue.__new__(native.Queue).post(pair.a, wr)
        assert pair.a.outstanding == (0, 0)
        pair.a.post_send(write(pair, pair.mine))
        pair.wait()


def test_what_is_neither_true_nor_false_makes_no_queue_ready():
    class Odd:
        def __bool__(self) -> bool:
            raise ArithmeticError("odd")

    with pytest.raises(ArithmeticError, match="odd"):
        queue().set_ready(Odd())


def test_cookie_of_nothing_outstanding_is_not_found(pair, pd):
    """In a send queue, and among the slots of an SRQ."""
    sends = pair.a._send.in_flight
    pair.a.post_send([write(pair, pair.mine, wr_id) for wr_id in (1, 2)])
    pair.wait(2)
    silent = write(pair, pair.mine, 3)
    silent.send_flags = SendFlags(0)
    pair.a.post_send([silent] * 2)
    tickets = [*range(-3, 8), 1 << 31, (1 << 32) - 1]
    found = {ticket for ticket in tickets if sends.peek(ticket & U64) is not None}
    assert found == {2, 3}
    assert [sends.entry(i) is None for i in (0, 1, 2, 3, U64)] == [False, False, True, True, True]
    with rp.SRQ(pd, 4, 1) as srq:
        receives = srq._recv.in_flight
        base = receives.number << 32
        assert receives.number != sends.number
        assert {receives.peek(base | n) for n in range(100)} == {None}
        srq.post_srq_recv([rp.RecvWR(wr_id=70), rp.RecvWR(wr_id=71)])
        found = {n: receives.peek(base | n) for n in (*range(100), 1 << 24 | 1, 0xFFFFFF)}
        assert {n: wr_id for n, wr_id in found.items() if wr_id is not None} == {1: 70, 2: 71}
        assert [receives.entry(i) for i in (0, 1, 2, U64)] == [(70, None), (71, None), None, None]
    for wrong in ("x", -1, 1 << 64):
        for ask in (sends.peek, sends.entry):
            with pytest.raises((TypeError, OverflowError)):
                ask(wrong)


def test_entry_of_a_prepared_list_is_that_of_its_work_request(pair, pd):
    """Of the first still outstanding."""
    sends = pair.a._send.in_flight
    regions = [rp.MR(pd, 64) for _ in range(3)]
    wrs = [write(pair, mr, wr_id) for wr_id, mr in enumerate(regions)]
    wrs[1].send_flags = wrs[2].send_flags = SendFlags(0)
    pair.a.prepare(wrs).post()
    assert [sends.entry(i) for i in range(4)] == [
        (0, regions[0]),
        (1, regions[1]),
        (2, regions[2]),
        None,
    ]
    pair.wait(1)
    assert [sends.entry(i) for i in range(3)] == [(1, regions[1]), (2, regions[2]), None]
    pair.a.to_reset()


def test_tagged_receives_are_of_an_inflight():
    for wrong in ({"tagged": 5}, {"tagged": object()}, {"other": 1}):
        with pytest.raises(TypeError):
            native.InFlight(**wrong)
    assert native.InFlight(tagged=native.InFlight(in_order=False)).outstanding == 0


@pytest.mark.parametrize("name", ["Sent", "TagHandle"])
def test_what_only_a_post_makes_cannot_be_made(name):
    with pytest.raises(TypeError, match="cannot create"):
        getattr(native, name)()
