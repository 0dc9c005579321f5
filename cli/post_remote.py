"""Posting to 'rdmapost serve' in another process (HOST)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from rdmapost import (
    WC,
    Access,
    CompletionError,
    Opcode,
    QPType,
    RdmaError,
    RdmaRead,
    RdmaWrite,
    RdmaWriteWithImm,
    Send,
    SendWithImm,
    SendWR,
    WaitTimeout,
    WCStatus,
)
from rdmapost._arguments import counted
from rdmapost.connect import Arrival, Connection, Seen, dial
from rdmapost.tools.connect.protocol_messages import QP_TYPES, access_names
from rdmapost.tools.connect.served_client import MAX_LATEST
from rdmapost.tools.tcp import name_of

from .options import Peer, PostSettings, Target
from .output import Output, usage_error
from .payload import Payload
from .post_common import check_depth, post_and_wait, send_flags, source
from .results import Shown, mismatch, show, shown, start_document
from .target import open_target

_POLL_INTERVAL_S = 0.01
_NEEDS = {
    Opcode.RDMA_WRITE: Access.REMOTE_WRITE,
    Opcode.RDMA_WRITE_WITH_IMM: Access.REMOTE_WRITE,
    Opcode.RDMA_READ: Access.REMOTE_READ,
    Opcode.ATOMIC_FETCH_AND_ADD: Access.REMOTE_ATOMIC,
    Opcode.ATOMIC_CMP_AND_SWP: Access.REMOTE_ATOMIC,
}


@contextmanager
def _connected(
    out: Output,
    target: Target,
    settings: PostSettings,
    opcode: Opcode,
    peer: Peer,
    *,
    local_size: int,
    inlined: int = 0,
) -> Iterator[Connection]:
    """Open the device and connect a queue pair to the server's."""
    qp_type = QPType[settings.qp_type]
    where = name_of((peer.host, peer.port))
    start_document(out, opcode, settings, peer=where)
    if qp_type not in QP_TYPES:
        usage_error(f"with HOST, --qp-type can only be {_served_types()}")
    with open_target(out, target) as (context, port_num):
        check_depth(context, f"--count {settings.count}", settings.count, "max_qp_wr")
        with dial(
            context,
            peer.host,
            peer.port,
            qp_type=qp_type,
            token=peer.token,
            timeout=settings.timeout,
            local_size=local_size,
            depth=settings.count,
            max_inline_data=inlined if "INLINE" in settings.flags else 0,
            port_num=port_num,
            gid_index=target.gid_index,
        ) as connection:
            out.doc["gid_index"] = connection.qp.gid.gid_index
            offer = connection.offer
            out.note(f"local    {connection.qp}: {connection.qp.endpoint()}")
            out.note(f"remote   client {offer.client} of {where}, {offer.device}: {offer.endpoint}")
            out.note(f"exposed  {_exposed(connection)}")
            if peer.offset and peer.offset >= offer.size:
                usage_error(
                    f"--offset {peer.offset} is past the end of the "
                    f"{counted(offer.size, 'byte')} that {where} exposes"
                )
            yield connection


def _served_types() -> str:
    """Name the values of the command's --qp-type that 'rdmapost serve' has."""
    options = click.get_current_context().command.params
    (offered,) = (option.type for option in options if option.name == "qp_type")
    assert isinstance(offered, click.Choice)
    served = [qp_type.name.lower() for qp_type in QP_TYPES]
    *others, last = [name for name in served if name in offered.choices]
    return f"{', '.join(others)} or {last}" if others else last


def _exposed(connection: Connection) -> str:
    offer = connection.offer
    return (
        f"{counted(offer.size, 'byte')} at {offer.addr:#x} (rkey {offer.rkey:#x}) "
        f"for {', '.join(access_names(offer.access)) or 'nothing'}"
    )


def _why_refused(
    out: Output, connection: Connection, shown: WC, opcode: Opcode, sent: int | None
) -> str | None:
    """Say why the server refused a work request, if the server's offer explains it."""
    offer, peer = connection.offer, out.doc["peer"]
    # The server's queue pair has its region's access flags, and refuses a request before the region
    # does.
    lacks_access = _NEEDS.get(opcode, Access(0)) & ~offer.access
    if shown.status is WCStatus.REM_ACCESS_ERR or (
        lacks_access and shown.status is WCStatus.REM_INV_REQ_ERR
    ):
        allows = ",".join(access_names(offer.access | lacks_access))
        more = f"; 'rdmapost serve --access {allows}' allows it" if lacks_access else ""
        return f"{peer} exposes {_exposed(connection)}{more}"
    failed, room = shown.status is not WCStatus.SUCCESS, offer.receive_size
    if failed and sent is not None and offer.receives and sent > room:
        return (
            f"the message has {counted(sent, 'byte')}, and the receives of {peer} hold "
            f"{room} each; 'rdmapost serve --receive-size {sent}' posts larger ones"
        )
    if shown.status is WCStatus.RETRY_EXC_ERR:
        return _why_unreachable(connection)
    return None


def _why_unreachable(connection: Connection) -> str | None:
    """Say why the server's GID cannot be reached, if a diagnosis finds a reason."""
    for finding in connection.qp.diagnose(connection.offer.endpoint):
        if finding.name == "gid-wrong" and finding.severity == "problem":
            return f"{finding.evidence}; {finding.remedy}"
    return None


def _post(
    out: Output, connection: Connection, wrs: Sequence[SendWR], *, sent: int | None = None
) -> list[WC]:
    """Post a list of work requests in one call, and wait until they are done.

    Args:
        sent: the length of each message that consumes a receive.
    """
    try:
        wait = partial(connection.wait, timeout=connection.timeout)
        wcs, shown = post_and_wait(out, connection.qp, connection.cq, wrs, wait)
    except WaitTimeout:
        raise WaitTimeout(
            f"the posted work requests did not complete within {connection.timeout:g} s"
        ) from None
    if reason := _why_refused(out, connection, shown, wrs[0].opcode, sent):
        raise CompletionError(
            shown,
            f"the work request with wr_id {shown.wr_id} ended with {shown.status.name}; {reason}",
        )
    shown.check()
    return wcs


def _arrivals(out: Output, connection: Connection, count: int) -> list[Arrival]:
    """Ask the server what has arrived."""
    found = []
    for index in range(max(1, count - MAX_LATEST + 1), count + 1):
        arrival = connection.report(index, connection.timeout)
        if arrival is None:
            which = f"message {index} of {count}" if count > 1 else "the message"
            why = _why_unreachable(connection) or _why_dropped(out, connection, count)
            raise WaitTimeout(
                f"{which} did not arrive at {out.doc['peer']} within {connection.timeout:g} s"
                + (f"; {why}" if why else "")
            )
        if arrival.status:
            raise RdmaError(
                f"{out.doc['peer']} could not receive the message: its receive failed with "
                f"{arrival.status.name}"
            )
        found.append(arrival)
    return found


def _why_dropped(out: Output, connection: Connection, count: int) -> str | None:
    """Say why one of ``count`` messages, sent at once, did not arrive; return None on RC."""
    qp_type, receives = connection.qp.qp_type, connection.offer.receives
    if qp_type is QPType.RC:
        return None
    if count > receives:
        return (
            f"{qp_type.name} drops a message that finds no receive, and {out.doc['peer']} posts "
            f"{receives}: 'rdmapost serve --count {count}' posts enough, and --qp-type rc waits "
            "for one"
        )
    return f"{qp_type.name} does not repeat a lost message: send it again, or use --qp-type rc"


def _same(found: Arrival | Seen, expected: Payload, digest: str, index: int, count: int) -> Shown:
    """Compare the received data with the data sent; return the part to print."""
    # The server reports the first bytes, and a digest of all of them.
    if found.data != expected.head(len(found.data)) or found.sha256 != digest:
        raise mismatch(index, count)
    return shown(expected)


# ---- the commands -------------------------------------------------------------------


def send_to(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer,
    payload: Payload,
    imm: int | None,
) -> None:
    """Send messages to a server."""
    opcode = Opcode.SEND if imm is None else Opcode.SEND_WITH_IMM
    length, count = len(payload), settings.count
    with _connected(
        out, target, settings, opcode, peer, local_size=length, inlined=length
    ) as connection:
        fields: dict[str, Any] = {
            "sg_list": source(connection.mr, settings, payload),
            "send_flags": send_flags(settings),
            **connection.address,
        }
        make = Send if imm is None else partial(SendWithImm, imm_data=imm)
        wrs = [make(wr_id=index + 1, **fields) for index in range(count)]
        _post(out, connection, wrs, sent=length)
        arrivals = _arrivals(out, connection, count)
        digest = payload.digest()
        for arrival in arrivals:
            received = _same(arrival, payload, digest, arrival.index - 1, count)
        out.doc["byte_len"] = arrivals[-1].byte_len
    results: dict[str, Any] = {"data": shown(payload), "received": received}
    show(out, results if imm is None else {**results, "imm_data": arrivals[-1].imm_data})


def write_to(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer,
    payload: Payload,
    imm: int | None,
) -> None:
    """Write to the memory of a server; several writes go to adjacent ranges."""
    opcode = Opcode.RDMA_WRITE if imm is None else Opcode.RDMA_WRITE_WITH_IMM
    length, count = len(payload), settings.count
    with _connected(
        out, target, settings, opcode, peer, local_size=length, inlined=length
    ) as connection:
        fields: dict[str, Any] = {
            "sg_list": source(connection.mr, settings, payload),
            "send_flags": send_flags(settings),
        }
        places = _places(out, connection, peer, length, count)
        make = RdmaWrite if imm is None else partial(RdmaWriteWithImm, imm_data=imm)
        wrs = [
            make(wr_id=index + 1, **fields, **connection.target(place))
            for index, place in enumerate(places)
        ]
        _post(out, connection, wrs)
        arrivals = [] if imm is None else _arrivals(out, connection, count)
        received: Shown | None = shown(b"")
        digest = payload.digest()
        for index, place in enumerate(places if length else []):
            seen = _settled(connection, place, length, digest)
            received = None if seen is None else _same(seen, payload, digest, index, count)
        out.doc["byte_len"] = length
        out.doc["remote_addr"] = connection.offer.addr + peer.offset
    results: dict[str, Any] = {"data": shown(payload)}
    if received is not None:
        results["received"] = received
    show(out, results if imm is None else {**results, "imm_data": arrivals[-1].imm_data})


def _places(out: Output, connection: Connection, peer: Peer, length: int, count: int) -> list[int]:
    """Return the offset of each of several writes, one after the other in the server's memory."""
    size = connection.offer.size
    places = [peer.offset + index * length for index in range(count)]
    # A write that begins in the memory and ends beyond it is left to the device to refuse.
    for index, place in enumerate(places):
        if index and place >= size:
            usage_error(
                f"--count {count}: the writes are laid out one after another from --offset "
                f"{peer.offset}, and need {counted(peer.offset + count * length, 'byte')}; "
                f"{out.doc['peer']} exposes {size}, and write {index + 1} would begin at {place}"
            )
    return places


def _settled(connection: Connection, place: int, length: int, digest: str) -> Seen | None:
    """Return the contents of the memory; on UC wait for the data to arrive.

    Returns:
        What the server reports, or None if clients may not read the memory.
    """
    deadline = time.monotonic() + connection.timeout
    while True:
        try:
            seen = connection.look(place, length)
        except ValueError as error:
            # On UC a write outside the memory is dropped, and no error completion reports it.
            raise RdmaError(f"the write went outside the exposed memory: {error}") from None
        if not seen.sha256:
            return None
        if seen.sha256 == digest or time.monotonic() > deadline:
            return seen
        time.sleep(_POLL_INTERVAL_S)


def read_from(
    out: Output, target: Target, settings: PostSettings, peer: Peer, length: int | None
) -> None:
    """Read the memory of a server, up to its end unless a length is given."""
    count = settings.count
    with _connected(out, target, settings, Opcode.RDMA_READ, peer, local_size=1) as connection:
        if length is None:
            length = connection.offer.size - peer.offset
        memory = connection.region(max(1, count * length), Access.LOCAL_WRITE)
        flags = send_flags(settings)
        cuts = [(index * length, (index + 1) * length) for index in range(count)]
        wrs = [
            RdmaRead(
                wr_id=index + 1,
                send_flags=flags,
                sg_list=[memory[start:stop]] if length else [],
                **connection.target(peer.offset),
            )
            for index, (start, stop) in enumerate(cuts)
        ]
        _post(out, connection, wrs)
        received = shown(memory.buffer[cuts[-1][0] : cuts[-1][1]])
        out.doc["byte_len"] = length
        out.doc["remote_addr"] = connection.offer.addr + peer.offset
    show(out, {"received": received})


def atomic_at(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer,
    opcode: Opcode,
    make: Callable[..., SendWR],
    given: dict[str, Any],
) -> None:
    """Change a value in the memory of a server; ``given`` has the operands, for the document."""
    count = settings.count
    if peer.offset % 8:
        usage_error(f"--offset {peer.offset} is not a multiple of 8, which an atomic needs")
    with _connected(out, target, settings, opcode, peer, local_size=8 * count) as connection:
        flags = send_flags(settings)
        wrs = [
            make(
                wr_id=index + 1,
                send_flags=flags,
                sg_list=[connection.mr[8 * index : 8 * index + 8]],
                **connection.target(peer.offset),
            )
            for index in range(count)
        ]
        _post(out, connection, wrs)
        local = connection.mr.buffer[: 8 * count].cast("Q")
        olds = [local[index] for index in range(count)]
        seen = connection.look(peer.offset, 8)
        out.doc["byte_len"] = 8
        out.doc["remote_addr"] = connection.offer.addr + peer.offset
    results: dict[str, Any] = {**given, "old": olds[0]}
    if seen.data:
        # The current value; other clients may have changed it.
        results["new"] = int.from_bytes(seen.data, sys.byteorder)
    if "swap" in given:
        results["swapped"] = given["compare"] in olds
    show(out, results if count == 1 else {**results, "olds": olds})
