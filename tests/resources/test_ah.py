"""Address handles (AH): what they need, which posts refuse them, and how long they are held."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from decimal import Decimal
from fractions import Fraction

import pytest
from support import ALL, GRH, refused, soft_queues
from support.soft_queues import reason

import rdmapost as rp
from rdmapost import QPType, SendFlags

soft = soft_queues.soft


def test_address_handle_needs_a_port_and_a_gid(pd, context):
    with pytest.raises(ValueError, match=f"{context.name} has no port 9"):
        rp.AH(pd, rp.AHAttr(port_num=9))
    if context.query_port(1).link_layer is rp.LinkLayer.ETHERNET:
        with pytest.raises(ValueError, match="is Ethernet: give the AH a dgid"):
            rp.AH(pd, rp.AHAttr())


def test_source_gid_that_the_port_lacks_is_named(pd, context):
    """Beyond the table the error has the table's length, otherwise the valid indices."""
    gid, length = context.choose_gid().gid, context.query_port(1).gid_tbl_len
    words = (
        f"^sgid_index=200 is not in 0..{length - 1}, the GID table of {context.name} port 1$"
        if length <= 200
        else f"^{context.name} port 1 has no GID with index 200; the valid ones are: .*0"
    )
    with pytest.raises(ValueError, match=words):
        rp.AH(pd, rp.AHAttr(dgid=gid, sgid_index=200))


@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ({"port_num": 1.0}, TypeError, "port_num: expected int, got float"),
        ({"dgid": True}, TypeError, "dgid: expected GID or bytes or str or .*, got bool"),
        ({"dgid": []}, TypeError, "dgid: expected GID or bytes or str or .*, got list"),
        ({"dgid": b"x"}, ValueError, "dgid: a GID has 16 bytes, not 1"),
        ({"dgid": b"y" * 17}, ValueError, "dgid: a GID has 16 bytes, not 17"),
        ({"dgid": "fe80"}, ValueError, "dgid: .*'fe80'"),
        ({"sgid_index": "1"}, TypeError, "sgid_index: expected int, got str"),
        ({"sl": 16}, ValueError, "sl=16 is not in 0..15"),
        ({"flow_label": 1 << 20}, ValueError, r"flow_label=1048576 is not in 0\.\.2\^20-1"),
        ({"hop_limit": -1}, ValueError, "hop_limit=-1 is not in 0..255"),
        ({"traffic_class": 256}, ValueError, "traffic_class=256 is not in 0..255"),
        *(
            ({name: wrong}, TypeError, f"{name}: expected int, got {type(wrong).__name__}")
            for name in ("sl", "dlid", "src_path_bits", "static_rate", "hop_limit", "flow_label")
            for wrong in (Fraction(1, 100), Decimal("0.01"))
        ),
    ],
    ids=str,
)
def test_field_of_an_address_that_cannot_be_is_named(pd, context, field, error, words):
    with pytest.raises(error, match=words):
        rp.AH(pd, rp.AHAttr(**{"dgid": context.choose_gid().gid, **field}))


def test_gid_of_an_address_is_16_bytes_or_text_too(connect, context):
    """The address handle leads where a GID's does."""
    pair = connect(QPType.UD)
    gid = pair.b.endpoint().gid
    for given in (bytes(gid), bytearray(gid), memoryview(gid), str(gid), gid):
        attr = rp.AHAttr(dgid=given, sgid_index=pair.a.gid.gid_index)
        assert attr == rp.AHAttr(dgid=gid, sgid_index=pair.a.gid.gid_index)
        assert type(attr.dgid) is rp.GID
        with rp.AH(pair.a.pd, attr) as ah:
            assert str(ah) == f"AH to {gid}"


def test_address_handle_names_its_peer(pd, context):
    gid = context.choose_gid()
    with rp.AH(pd, rp.AHAttr(dgid=gid.gid, sgid_index=gid.gid_index)) as ah:
        assert str(ah) == f"AH to {gid.gid}"


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_ud_without_an_address_handle_is_refused(connect, checked):
    """Also unchecked: a driver would follow the NULL."""
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="needs an address handle"):
        pair.a.post_send(rp.Send(pair.mine[:4]))
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_closed_address_handle_is_refused(connect, checked):
    pair = connect(QPType.UD, checked=checked)
    pair.ah.close()
    with pytest.raises(rp.PostError, match="is closed"):
        pair.a.post_send(pair.send(pair.mine[:4]))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_ud_send_without_an_address_handle_is_refused(connect, context, checked):
    """Drivers follow the pointer unchecked."""
    pair = connect(QPType.UD, checked=checked)
    assert pair.ah is not None
    with pair.a.ah_to(pair.b.endpoint()) as ah:
        pass
    with (
        rp.open_device(context.name) as other,
        rp.PD(other) as pd,
        rp.AH(pd, pair.ah.attr) as foreign,
        rp.MR(pair.pd, 64, ALL) as mr,
    ):
        for wrong, words in (
            (None, "needs an address handle"),
            (ah, "AH to .* is closed"),
            (foreign, "does not belong to the queue pair's"),
            (mr, "ah: expected AH, got MR"),
            (0x1000, "ah: expected AH, got int"),
            (object(), "ah: expected AH, got object"),
        ):
            for kind in (rp.Send, rp.SendWithImm):
                refused(pair, pair.wr(kind, pair.mine[:8], ah=wrong), words)
    pair.works()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("ah", ["ah", 5, object(), "mr"])
def test_ud_send_whose_ah_is_no_address_handle_is_refused(connect, checked, ah):
    pair = connect(QPType.UD, checked=checked)
    with pytest.raises(rp.PostError, match="ah: expected AH"):
        pair.a.post_send(pair.send(pair.mine[:4], ah=pair.mine if ah == "mr" else ah))
    assert pair.a.outstanding.send == 0
    pair.works()


RC, UC, UD, RAW = QPType.RC, QPType.UC, QPType.UD, QPType.RAW_PACKET


def test_address_handle_of_another_pd_is_refused(soft):
    ah = soft.stack.enter_context(rp.AH(soft.other, soft.ud["ah"].attr))
    assert "the queue pair's PD" in reason(soft.qp(UD).post_send, rp.Send(ah=ah))


def test_an_address_handle_serves_many_posts_and_queue_pairs(connect, stack, cq, pd):
    """Of one domain, and before any of them has completed."""
    pair = connect(QPType.UD)
    second = rp.QP(pd, QPType.UD, cq)
    stack.callback(second.close)
    second.connect()
    pair.b.post_recv([rp.RecvWR(pair.theirs[: GRH + 8], wr_id=7) for _ in range(4)])
    wr = pair.send(pair.mine[:8], wr_id=9)
    pair.a.post_send([wr, wr])
    second.post_send([wr, wr])
    assert sorted(wc.wr_id for wc in pair.wait(8)) == [7] * 4 + [9] * 4


SRC, DST = rp.GID("fe80::1"), rp.GID("fe80::2")


def test_address_handle_cannot_be_altered(connect):
    """Its path cannot change, posted or not; another path needs another handle."""
    ah = connect(QPType.UD).ah
    for name, value in (("sl", 1), ("dgid", SRC), ("port_num", 2)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(ah.attr, name, value)


@pytest.mark.parametrize("how", ["post_send", "prepare"])
@pytest.mark.parametrize("inline", [False, True], ids=["", "INLINE"])
def test_address_handle_lives_until_the_completion(connect, inline, how):
    """INLINE data is copied when it is posted; the address handle is not."""
    pair = connect(QPType.UD, max_inline_data=64)
    ah = pair.a.ah_to(pair.b.endpoint())
    ref = weakref.ref(ah)
    pair.b.post_recv(rp.RecvWR(pair.theirs[:100]))
    flags = SendFlags.SIGNALED | (SendFlags.INLINE if inline else SendFlags(0))
    wr = pair.send(pair.mine[:4], ah=ah, send_flags=flags)
    del ah
    if how == "prepare":
        batch = pair.a.prepare(wr)
        batch.post()
        batch.close()
    else:
        pair.a.post_send(wr)
    del wr
    gc.collect()
    assert ref() is not None
    pair.wait(2)
    gc.collect()
    assert ref() is None


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
