"""The table of ibv_post_send(3) on a device: each opcode is refused on each type that lacks it.

That it works where the table has it is what ``rdmapost check`` shows (test_check).
"""

from __future__ import annotations

import pytest
from support import needs

import rdmapost as rp
from rdmapost import Opcode, QPType, SendFlags
from rdmapost.posting.rules import QP_TYPES_BY_OPCODE

KINDS = {
    kind.opcode: kind
    for kind in (getattr(rp, name) for name in rp.posting.wr.__all__)
    if isinstance(kind, type) and issubclass(kind, rp.SendWR) and kind is not rp.SendWR
}


def refused(qp: rp.QP, opcode: Opcode) -> None:
    with pytest.raises(rp.PostError) as caught:
        qp.post_send(KINDS[opcode]())
    text = str(caught.value)
    assert f"{opcode.name} is not an opcode of {qp.qp_type.name} QPs; " in text
    assert all(other.name in text for other in QP_TYPES_BY_OPCODE[opcode])
    assert qp.outstanding == (0, 0)


def without(*qp_types: QPType) -> list[tuple[QPType, Opcode]]:
    """Return the empty cells in columns of the table."""
    return [(t, op) for t in qp_types for op in KINDS if t not in QP_TYPES_BY_OPCODE[op]]


@pytest.mark.parametrize(("qp_type", "opcode"), without(QPType.RC, QPType.UC, QPType.UD))
def test_opcode_is_refused_where_the_table_has_no_cross(connect, qp_type, opcode):
    pair = connect(qp_type)
    refused(pair.a, opcode)
    pair.works()


@pytest.mark.parametrize(("qp_type", "opcode"), without(QPType.XRC_SEND, QPType.RAW_PACKET))
def test_opcode_is_refused_on_xrc_and_raw_packets_too(context, pd, cq, qp_type, opcode):
    needs(context.kind == "soft", "XRC, nor raw packets", context)
    with rp.QP(pd, qp_type, cq) as qp, rp.QP(pd, QPType.RC, cq) as other:
        qp.connect(other.endpoint())
        refused(qp, opcode)


def test_every_opcode_of_the_table_has_a_class():
    assert set(KINDS) == set(QP_TYPES_BY_OPCODE)


def test_checksum_offload_that_the_device_lacks_is_refused(rc):
    """Neither soft0 nor Soft-RoCE has it on RC."""
    flags = SendFlags.SIGNALED | SendFlags.IP_CSUM
    with pytest.raises(rp.PostError, match=r"IP_CSUM: the device has no such offload on RC QPs"):
        rc.a.post_send(rp.Send(rc.mine[:8], send_flags=flags))
    rc.works()


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC, QPType.UD])
def test_receive_into_memory_that_may_not_be_written_is_refused(connect, stack, qp_type):
    pair = connect(qp_type)
    read_only = stack.enter_context(rp.MR(pair.pd, 64, rp.Access.REMOTE_READ))
    with pytest.raises(rp.PostError, match=r"the message goes to MR .* without LOCAL_WRITE"):
        pair.b.post_recv(rp.RecvWR([pair.theirs[:8], read_only[:8]]))
    pair.works()
