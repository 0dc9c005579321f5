"""Move blocks of a KV cache between two nodes; numpy arrays list the source and target blocks.

A prefill node has computed the attention keys and values of some prompts, in blocks of 16 tokens.
A decode node needs them, in different blocks of its cache. `post_columns` takes the block numbers
as arrays and posts an RDMA write for each, without a Python object per block.

    python examples/kv_cache_blocks.py [DEVICE]     (default: soft0)
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import numpy as np

import rdmapost as rp

LAYERS, BLOCKS, USED = 4, 256, 200
BLOCK = 16 * 2 * 128  # tokens, K and V, bytes of a token's head
QUEUE = 256


def main(device: str = "soft0") -> None:
    with ExitStack() as stack:
        enter = stack.enter_context
        context = enter(rp.open_device(device))
        pd, cq = enter(rp.PD(context)), enter(rp.CQ(context, 2 * QUEUE))
        prefill = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, BLOCK), np.uint8)
        decode = np.zeros_like(prefill)
        local = enter(rp.MR(pd, prefill))
        remote = enter(rp.MR(pd, decode, rp.Access.LOCAL_WRITE | rp.Access.REMOTE_WRITE))
        a = enter(rp.QP(pd, rp.QPType.RC, cq, max_send_wr=QUEUE))
        b = enter(rp.QP(pd, rp.QPType.RC, cq))
        a.connect(b.endpoint())
        b.connect(a.endpoint())

        # The block tables: block i of the prompts is block source[i] here and target[i] there, in
        # every layer; a layer's blocks follow those of the previous layer.
        generator = np.random.default_rng(2)
        source, target = generator.permutation(BLOCKS)[:USED], generator.permutation(BLOCKS)[:USED]
        first = np.arange(LAYERS)[:, None] * BLOCKS
        here, there = (first + source).ravel(), (first + target).ravel()

        rows = np.zeros(64, rp.WC_DTYPE)
        posted = done = 0
        while done < len(here):
            if posted < len(here):
                # This posts as many as fit into the queue, and none if it is full.
                posted += a.post_columns(
                    rp.RdmaWrite,
                    local.blocks(here[posted:], BLOCK),
                    remote_addr=rp.Blocks(remote.addr, there[posted:], BLOCK),
                    rkey=remote.rkey,
                    wr_id=np.arange(posted, len(here)),
                    signal_every=32,
                )
            completed = rows[: cq.poll_into(rows)]
            if failed := [row for row in completed if row["status"]]:
                raise RuntimeError(f"block {failed[0]['wr_id']}: status {failed[0]['status']}")
            if len(completed):
                # A completion stands for its work request and all earlier ones.
                done = int(completed["wr_id"][-1]) + 1

        if not np.array_equal(decode[:, target], prefill[:, source]):
            sys.exit("a block is damaged")
        print(f"{done} blocks of {BLOCK} bytes: intact")
        print("untouched:", int((~decode.any(axis=2)).sum()), "blocks")


if __name__ == "__main__":
    main(*sys.argv[1:])
