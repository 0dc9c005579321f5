"""Multicast: attaching UD queue pairs to groups, and who receives a group's messages."""

from __future__ import annotations

import gc
import runpy
import sys
import threading
from decimal import Decimal
from fractions import Fraction

import pytest
from support import ALL, GRH, ROOT, needs

import rdmapost as rp
from rdmapost import QPType, WCStatus
from rdmapost.resources.device import provider_of
from rdmapost.resources.qp import DEFAULT_QKEY

SOFT_ROCE = 0xFFFFFF
GROUPS = ["ff0e::1234", "::ffff:239.1.2.3"]
JOIN = runpy.run_path(str(ROOT / "examples" / "multicast.py"))["join"]
IPV4_GROUPS = ["::ffff:239.1.2.4", "::ffff:239.1.2.5"]


@pytest.fixture(autouse=True)
def _multicast(context):
    needs(context.attr.max_mcast_grp, "multicast", context)
    ethernet = context.query_port(1).link_layer is rp.LinkLayer.ETHERNET
    needs(ethernet, "Ethernet, where a group needs no LID from a subnet administrator", context)


@pytest.fixture
def hears_itself(context, stack):
    """A host hears its own messages to groups that it has joined."""
    known = context.kind == "soft" or context.attr.vendor_id == SOFT_ROCE
    needs(known, "loopback of its multicast messages", context)
    ndev = next(entry.ndev for entry in context.query_gid_table() if entry.gid.is_ipv4)
    if ndev:
        for group in (*GROUPS, *IPV4_GROUPS):
            stack.enter_context(JOIN(rp.GID(group), ndev))


@pytest.fixture
def group(context):
    """A group of the same type as the port's GID."""
    with rp.PD(context) as pd, rp.CQ(context) as cq, rp.QP(pd, QPType.UD, cq) as qp:
        return rp.GID(GROUPS[qp.gid.gid.is_ipv4])


class Party:
    """A UD queue pair in RTS that has posted receives."""

    def __init__(self, stack, pd, **options):
        self.cq = stack.enter_context(rp.CQ(pd.context))
        self.mr = stack.enter_context(rp.MR(pd, 4096, ALL))
        self.qp = stack.enter_context(rp.QP(pd, QPType.UD, self.cq, **options))
        self.qp.connect()
        self.stack = stack

    def listen(self, count=1):
        for index in range(count):
            self.qp.post_recv(rp.RecvWR(self.mr[index * 256 : index * 256 + 256], wr_id=index))

    def say(self, group, text, **fields):
        path = rp.AHAttr(dgid=group, sgid_index=self.qp.gid.gid_index)
        ah = self.stack.enter_context(rp.AH(self.qp.pd, path))
        self.mr.buffer[2048 : 2048 + len(text)] = text
        fields = {"remote_qpn": rp.MULTICAST_QPN, "remote_qkey": DEFAULT_QKEY, **fields}
        sge = self.mr[2048 : 2048 + len(text)]
        self.qp.post_send(rp.Send(sge, ah=ah, wr_id=99, **fields))

    def heard(self, count):
        """Wait for that many messages, and return them; no more may have come."""
        found = []
        for wc in [*self.cq.wait(count), *self.cq.poll(16)]:
            assert wc.status is WCStatus.SUCCESS
            start = wc.wr_id * 256
            text = bytes(self.mr.buffer[start + GRH : start + wc.byte_len])
            # The last bytes of an IPv4 header or a GRH are the destination.
            last = bytes(self.mr.buffer[start + GRH - 4 : start + GRH])
            found.append((text, last, wc.src_qp))
        return found


@pytest.fixture
def party(pd, stack):
    """Make parties; they are closed afterwards, and their queue pairs first."""
    return lambda **options: Party(stack, pd, **options)


@pytest.mark.usefixtures("hears_itself")
def test_every_attached_queue_pair_gets_one_copy(party, group):
    """One that is not attached gets nothing, and one attached twice no more than others."""
    sender, one, two, stranger = (party() for _ in range(4))
    for listener in (one, two, stranger):
        listener.listen(2)
    one.qp.attach_mcast(group)
    two.qp.attach_mcast(group)
    two.qp.attach_mcast(group)
    sender.say(group, b"to all of you")
    (sent,) = sender.cq.wait()
    assert (sent.wr_id, sent.status) == (99, WCStatus.SUCCESS)
    said = [(b"to all of you", group[-4:], sender.qp.qp_num)]
    assert one.heard(1) == said
    assert two.heard(1) == said
    assert stranger.heard(0) == []


@pytest.mark.usefixtures("hears_itself")
def test_message_reaches_the_members_of_its_group_only(party):
    first, second = map(rp.GID, IPV4_GROUPS)
    sender, one, both = party(), party(), party()
    for listener in (one, both):
        listener.listen(2)
    one.qp.attach_mcast(first)
    both.qp.attach_mcast(str(first))
    both.qp.attach_mcast(bytes(second))
    sender.say(first, b"first")
    assert [text for text, *_ in one.heard(1) + both.heard(1)] == [b"first", b"first"]
    # Not before: nothing keeps datagrams in order.
    sender.say(second, b"second")
    assert [text for text, *_ in both.heard(1)] == [b"second"]
    assert one.heard(0) == []
    sender.cq.wait(2)


@pytest.mark.usefixtures("hears_itself")
def test_detached_queue_pair_receives_no_more_messages_to_the_group(party, group):
    sender, one, two = party(), party(), party()
    for listener in (one, two):
        listener.listen(2)
        listener.qp.attach_mcast(group)
    one.qp.detach_mcast(group)
    sender.say(group, b"still there?")
    sender.cq.wait()
    assert len(two.heard(1)) == 1
    assert one.heard(0) == []


@pytest.mark.usefixtures("hears_itself")
def test_wrong_qkey_and_no_receive_are_dropped_for_those_only(party, group):
    """Each receiver of a message is independent."""
    sender, ready, deaf, other_key = party(), party(), party(), party()
    other_key.qp.modify(qkey=0x2222)
    ready.listen()
    other_key.listen()
    for listener in (ready, deaf, other_key):
        listener.qp.attach_mcast(group)
    sender.say(group, b"hello")
    assert sender.cq.wait()[0].status is WCStatus.SUCCESS
    assert len(ready.heard(1)) == 1
    assert deaf.heard(0) == other_key.heard(0) == []


@pytest.mark.usefixtures("hears_itself")
def test_closed_queue_pair_leaves_its_groups(party, group):
    sender, gone, stays = party(), party(), party()
    for listener in (gone, stays):
        listener.listen()
        listener.qp.attach_mcast(group)
    gone.qp.close()
    sender.say(group, b"hello")
    sender.cq.wait()
    assert len(stays.heard(1)) == 1


def test_attached_queue_pair_that_is_closed_is_detached_first(pd, cq, group, monkeypatch):
    """A real device refuses to destroy an attached one; soft0 does not."""
    provider, detached = provider_of(pd.context), []
    detach = provider.detach_mcast

    def detach_mcast(*args):
        detached.append(qp.closed)
        return detach(*args)

    monkeypatch.setattr(provider, "detach_mcast", detach_mcast)
    with rp.QP(pd, QPType.UD, cq) as qp:
        qp.connect()
        qp.attach_mcast(group)
    assert qp.closed
    assert detached == [False]


def test_attached_queue_pair_still_receives_unicast_messages(connect, group):
    pair = connect(QPType.UD)
    pair.b.attach_mcast(group)
    pair.works()
    pair.b.detach_mcast(group)
    pair.works()


def test_queue_pair_can_be_attached_again_after_it_was_detached(connect, group):
    pair = connect(QPType.UD)
    for _ in range(3):
        pair.a.attach_mcast(group)
        pair.a.detach_mcast(group)
    with pytest.raises(rp.RdmaError, match=f"{pair.a} is not attached to {group}"):
        pair.a.detach_mcast(group)


def test_group_that_threads_attach_and_detach_at_once_can_be_left(pd, cq, group, monkeypatch):
    """Between the device's action and the record of it, another thread may attach it again."""
    qp = rp.QP(pd, QPType.UD, cq)
    qp.connect()
    qp.attach_mcast(group)
    provider = pd.context._provider
    detach = provider.detach_mcast

    def detach_then_attach(*args):
        detach(*args)
        monkeypatch.undo()
        again = threading.Thread(target=qp.attach_mcast, args=(group,))
        again.start()
        again.join(20)

    monkeypatch.setattr(provider, "detach_mcast", detach_then_attach)
    qp.detach_mcast(group)
    # It is attached, whichever record came first: it can be detached, and closing detaches it.
    qp.detach_mcast(group)
    qp.attach_mcast(group)
    qp.close()
    assert qp.closed


# ---- what is refused --------------------------------------------------------------


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
@pytest.mark.parametrize("call", ["attach_mcast", "detach_mcast"])
def test_multicast_is_refused_on_queue_pairs_other_than_ud(pd, cq, qp_type, call):
    with (
        rp.QP(pd, qp_type, cq) as qp,
        pytest.raises(rp.RdmaError, match=f"{qp_type.name} QP .* cannot use multicast; only UD"),
    ):
        getattr(qp, call)("ff0e::1")


@pytest.mark.parametrize("call", ["attach_mcast", "detach_mcast"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fe80::1",), "fe80::1 is not a multicast GID"),
        (
            ("::ffff:10.0.0.1",),
            r"^gid: ::ffff:10.0.0.1 is not a multicast GID .*::ffff:239\.1\.2\.3",
        ),
        (("239.1.2.3",), "^gid: '239.1.2.3' is an IPv4 address; its GID is '::ffff:239.1.2.3'"),
        (("::ffff:240.0.0.1",), "is not a multicast GID"),
        ((bytes(16),), ":: is not a multicast GID"),
        ((b"\xff" * 15,), "a GID has 16 bytes, not 15"),
        (("group",), "^gid: .*'group'"),
        (("ff0e::1", -1), "lid=-1 is not in"),
        (("ff0e::1", 1 << 16), "lid=65536 is not in"),
    ],
)
def test_gid_that_is_not_multicast_is_refused(pd, cq, call, arguments, words):
    with rp.QP(pd, QPType.UD, cq) as qp, pytest.raises(ValueError, match=words):
        getattr(qp, call)(*arguments)


@pytest.mark.parametrize("call", ["attach_mcast", "detach_mcast"])
@pytest.mark.parametrize("lid", [0.5, 0.0, Decimal("0.01"), Fraction(1, 100), "0", None], ids=repr)
def test_lid_that_is_no_whole_number_is_refused(pd, cq, call, lid):
    words = f"^lid: expected int, got {type(lid).__name__}"
    with rp.QP(pd, QPType.UD, cq) as qp, pytest.raises(TypeError, match=words):
        getattr(qp, call)("ff0e::1", lid)


def test_detaching_from_another_group_names_those_attached(connect, group):
    """The error says which groups it is attached to."""
    pair = connect(QPType.UD)
    with pytest.raises(rp.RdmaError, match=r"is not attached to ff0e::9 \(lid \d+\)$"):
        pair.a.detach_mcast("ff0e::9")
    pair.a.attach_mcast(group)
    with pytest.raises(rp.RdmaError, match=rf"ff0e::9 \(lid 0\), but to {group} \(lid 0\)"):
        pair.a.detach_mcast("ff0e::9")
    pair.a.detach_mcast(group)


@pytest.mark.parametrize("call", ["attach_mcast", "detach_mcast"])
def test_multicast_calls_on_a_closed_queue_pair_raise_closed_error(pd, cq, call, group):
    qp = rp.QP(pd, QPType.UD, cq)
    qp.close()
    with pytest.raises(rp.ClosedError, match="is closed"):
        getattr(qp, call)(group)


def test_groups_that_were_left_take_no_memory(connect, group):
    """Of a queue pair that attaches to ever other groups, or again and again to one."""
    qp = connect(QPType.UD).a
    others = [rp.GID(bytes(group)[:14] + number.to_bytes(2)) for number in range(1, 401)]

    def attach_and_detach(groups):
        for other in groups:
            qp.attach_mcast(other)
            qp.attach_mcast(other)
            qp.detach_mcast(other)

    attach_and_detach(others[:100])
    gc.collect()
    before = sys.getallocatedblocks()
    attach_and_detach(others[100:])
    gc.collect()
    left = sys.getallocatedblocks() - before
    assert left < 100, f"{left} blocks for 300 groups"
