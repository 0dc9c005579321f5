"""``rdmapost atomic cas`` and ``rdmapost atomic fetch-add``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from .groups import Group, group_options
from .options import (
    U64,
    Peer,
    PostSettings,
    Target,
    device_options,
    flag_options,
    given,
    pcap_option,
    peer_options,
    read_options,
)
from .output import Output, usage_error

if TYPE_CHECKING:
    from rdmapost import Opcode, SendWR


@click.group(cls=Group, invoke_without_command=True)
@group_options
def atomic() -> None:
    """Atomically change 64 bits of a second queue pair, or of HOST."""


_initial_option = click.option(
    "--initial",
    type=U64,
    metavar="N",
    default=0,
    show_default=True,
    help="Initial value (only without HOST).",
)


@atomic.command("cas")
@_initial_option
@click.option(
    "--compare",
    type=U64,
    metavar="N",
    default=0,
    show_default=True,
    help="Swap if the value equals this.",
)
@click.option("--swap", type=U64, metavar="N", default=1, show_default=True, help="The new value.")
@flag_options("fence")
@read_options
@peer_options(offset=True)
@pcap_option
@device_options
def compare_and_swap(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer | None,
    initial: int,
    compare: int,
    swap: int,
) -> None:
    """Compare and swap: replace a value if it is the expected one.

    The second queue pair is on the same device.  HOST runs 'rdmapost serve',
    which reports the new contents of its memory.
    """
    from rdmapost import AtomicCmpAndSwp, Opcode

    make = partial(AtomicCmpAndSwp, compare_add=compare, swap=swap)
    request = {"initial": initial, "compare": compare, "swap": swap}

    def after(old: int) -> int:
        return swap if old == compare else old

    _run(out, target, settings, peer, Opcode.ATOMIC_CMP_AND_SWP, make, after, request)


@atomic.command("fetch-add")
@_initial_option
@click.option(
    "--add", type=U64, metavar="N", default=1, show_default=True, help="What to add; wraps at 2^64."
)
@flag_options("fence")
@read_options
@peer_options(offset=True)
@pcap_option
@device_options
def fetch_and_add(
    out: Output, target: Target, settings: PostSettings, peer: Peer | None, initial: int, add: int
) -> None:
    """Fetch and add: add to a value, and fetch the old one.

    The second queue pair is on the same device.  HOST runs 'rdmapost serve',
    which reports the new contents of its memory.
    """
    from rdmapost import AtomicFetchAndAdd, Opcode

    make = partial(AtomicFetchAndAdd, compare_add=add)
    request = {"initial": initial, "add": add}

    def after(old: int) -> int:
        return (old + add) % (1 << 64)

    _run(out, target, settings, peer, Opcode.ATOMIC_FETCH_AND_ADD, make, after, request)


def _run(
    out: Output,
    target: Target,
    settings: PostSettings,
    peer: Peer | None,
    opcode: Opcode,
    make: Callable[..., SendWR],
    after: Callable[[int], int],
    request: dict[str, int],
) -> None:
    """Post atomics on one value, and check the result of each.

    Args:
        out, target, settings, peer, opcode: as in the other commands.
        make: makes the work request.
        after: computes the new value from the old.
        request: the operands, for the JSON document.
    """
    from rdmapost import RdmaError

    from .post_common import send_flags
    from .post_local import loopback, post
    from .results import show

    initial = request["initial"]
    if peer is not None:
        from .post_remote import atomic_at

        if given("initial"):
            usage_error("--initial works only without HOST")
        there = {name: value for name, value in request.items() if name != "initial"}
        atomic_at(out, target, settings, peer, opcode, make, there)
        return
    count = settings.count
    with loopback(out, target, settings, opcode, local_size=8 * count, remote_size=8) as pair:
        context = pair.local.cq.context
        if not context.attr.atomic_cap:
            raise RdmaError(f"{context.name} has no atomics (atomic_cap is NONE)")
        pair.remote.mr.buffer[:8] = initial.to_bytes(8, sys.byteorder)
        flags = send_flags(settings)
        post(
            out,
            pair,
            [
                make(
                    wr_id=index + 1,
                    send_flags=flags,
                    sg_list=pair.cut(pair.local, 8 * index, 8),
                    **pair.target(),
                )
                for index in range(count)
            ],
        )
        local = pair.local.mr.buffer.cast("Q")
        olds = [local[index] for index in range(count)]
        new = pair.remote.mr.buffer[:8].cast("Q")[0]
        out.doc["byte_len"] = 8
    expected = initial
    for index, old in enumerate(olds):
        if old != expected:
            raise RdmaError(f"atomic {index + 1} of {count} found {old}, not {expected}")
        expected = after(expected)
    if new != expected:
        raise RdmaError(f"the value is now {new}, not {expected}")
    results: dict[str, Any] = {**request, "old": olds[0], "new": new}
    if "swap" in request:
        results["swapped"] = request["compare"] in olds
    show(out, results if count == 1 else {**results, "olds": olds})
