"""Move blocks of a KV cache between two nodes; numpy arrays list the source and target blocks.

A prefill node has computed the attention keys and values of some prompts, in blocks of 16 tokens.
A decode node needs them, in different blocks of its cache: the prefill node writes them there, or
the decode node reads them. `post_columns` takes the block numbers as arrays and posts an RDMA write
or read for each, without a Python object per block.

    python examples/kv_cache_blocks.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import numpy as np

import rdmapost as rp

LAYERS, BLOCKS, USED = 4, 256, 200
BLOCK = 16 * 2 * 4 * 128  # tokens, K and V, heads, bytes of a token's head
QUEUE = 256


def move(
    qp: rp.QP,
    cq: rp.CQ,
    wr_type: type[rp.RdmaWrite | rp.RdmaRead],
    mine: tuple[rp.MR, np.ndarray],
    theirs: tuple[rp.MR, np.ndarray],
) -> None:
    """Write blocks of mine to theirs, or read theirs into mine; each is a region and indices."""
    (local, here), (remote, there) = mine, theirs
    ids, rows = np.arange(len(here)), np.zeros(64, rp.WC_DTYPE)
    posted = done = 0
    while done < len(here):
        if posted < len(here):
            # A call reads all of its rows, so pass no more than the queue can hold. It posts as
            # many as fit, and none if the queue is full.
            part = slice(posted, posted + QUEUE)
            posted += qp.post_columns(
                wr_type,
                local.blocks(here[part], BLOCK),
                remote_addr=rp.Blocks(remote.addr, there[part], BLOCK),
                rkey=remote.rkey,
                wr_id=ids[part],
                signal_every=32,
            )
        completed = rows[: cq.poll_into(rows)]
        if failed := [row for row in completed if row["status"]]:
            raise RuntimeError(f"block {failed[0]['wr_id']}: status {failed[0]['status']}")
        if len(completed):
            # A completion stands for its work request and all earlier ones.
            done = int(completed["wr_id"][-1]) + 1


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        enter = stack.enter_context
        context = enter(rp.open_device(device))
        pd, cq = enter(rp.PD(context)), enter(rp.CQ(context, 2 * QUEUE))
        prefill = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, BLOCK), np.uint8)
        decode = np.zeros_like(prefill)
        full = enter(rp.MR(pd, prefill, rp.Access.REMOTE_READ))
        empty = enter(rp.MR(pd, decode, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE))
        a = enter(rp.QP(pd, rp.QPType.RC, cq, max_send_wr=QUEUE))
        b = enter(rp.QP(pd, rp.QPType.RC, cq, max_send_wr=QUEUE))
        a.connect(b.endpoint())
        b.connect(a.endpoint())

        # The block tables: block i of the prompts is block source[i] of the prefill node's cache
        # and target[i] of the decode node's, in every layer; the layers follow each other.
        generator = np.random.default_rng(2)
        source, target = generator.permutation(BLOCKS)[:USED], generator.permutation(BLOCKS)[:USED]
        first = np.arange(LAYERS)[:, None] * BLOCKS
        filled, wanted = (full, (first + source).ravel()), (empty, (first + target).ravel())

        for qp, wr_type, mine, theirs in (
            (a, rp.RdmaWrite, filled, wanted),
            (b, rp.RdmaRead, wanted, filled),
        ):
            decode[:] = 0
            move(qp, cq, wr_type, mine, theirs)
            if not np.array_equal(decode[:, target], prefill[:, source]):
                sys.exit(f"{wr_type.__name__}: a block is damaged")
            moved, untouched = first.size * USED, int((~decode.any(axis=2)).sum())
            print(
                f"{wr_type.__name__}: {moved} blocks of {BLOCK} bytes intact, {untouched} untouched"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
