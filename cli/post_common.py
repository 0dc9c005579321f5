"""What posting to this device and posting to HOST have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rdmapost import CQ, MR, QP, SGE, WC, Context, SendFlags, SendWR, WaitTimeout

from .options import PostSettings
from .output import Output, usage_error
from .payload import Payload, Progress
from .results import record


def check_depth(context: Context, what: str, depth: int, *limits: str) -> None:
    """If no queue can be that deep, end the command with a usage error that names ``what``."""
    for name in limits:
        limit = getattr(context.attr, name)
        if depth > limit:
            usage_error(f"{what} is more than {context.name} can hold in a queue ({name}={limit})")


def send_flags(settings: PostSettings) -> int:
    """Return the requested send flags, with SIGNALED."""
    flags = SendFlags.SIGNALED
    for name in settings.flags:
        flags |= SendFlags[name]
    return flags


def source(
    mr: MR, settings: PostSettings, payload: bytes | Payload, progress: Progress | None = None
) -> Sequence[SGE]:
    """Return the sg_list for a payload: registered memory, or an unregistered buffer if inline."""
    if not payload:
        return []
    if "INLINE" in settings.flags:
        return [SGE.from_buffer(bytes(payload))]
    if isinstance(payload, bytes):
        payload = Payload(payload)
    payload.write_to(mr.buffer, progress)
    return [mr[: len(payload)]]


def post_and_wait(
    out: Output, qp: QP, cq: CQ, wrs: Sequence[SendWR], wait: Callable[[int], list[WC]]
) -> tuple[list[WC], WC]:
    """Post a list of work requests in one call, wait for their completions and record() them.

    Returns:
        all completions, and the one to show: the first that failed, or else the last.

    Raises:
        PostError: one of them was refused.
        WaitTimeout: they did not complete in time.
    """
    qp.post_send(wrs)
    try:
        wcs = wait(len(wrs))
    except WaitTimeout:
        record(out, cq.poll(len(wrs)), len(wrs))
        raise
    record(out, wcs, len(wrs))
    return wcs, next((wc for wc in wcs if wc.status), wcs[-1])
