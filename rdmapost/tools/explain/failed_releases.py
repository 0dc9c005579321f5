"""Explanations of failed releases, after which the object still exists."""

from __future__ import annotations

from .model import Explanation, failure


def _release(name: str, what: str, used: str) -> Explanation:
    """Explain why something could not be released.

    Args:
        name: the verb without ibv_.
        what: the kind of object.
        used: what may still be using the object; if anything is, the verb returns EBUSY.
    """
    return failure(
        name,
        f"The {what} could not be released: it still exists.",
        f"EBUSY: what still uses the {what}; rdma resource show. Other errnos: dmesg.",
        causes=(
            f"{used} (EBUSY).",
            f"The device was removed before the {what} (EIO): the kernel has released it already, "
            "and with RDMAV_ALLOW_DISASSOC_DESTROY set the call succeeds.",
        ),
    )


RELEASES: tuple[Explanation, ...] = (
    failure(
        "close_device",
        "The device could not be closed.",
        "The order in which the program releases things: the device comes last.",
        causes=(
            "The context was closed before, or is not from ibv_open_device.",
            "Something else closed the context's file descriptor (EBADF).",
        ),
    ),
    _release(
        "dealloc_pd",
        "protection domain",
        "A region, window, queue pair, SRQ or address handle is still on it",
    ),
    _release(
        "dereg_mr",
        "memory region",
        "A memory window is bound to it: invalidate or deallocate the window first",
    ),
    _release(
        "dealloc_mw",
        "memory window",
        "A driver may refuse a window that is bound: invalidate it first",
    ),
    _release(
        "destroy_comp_channel",
        "completion channel",
        "A CQ still reports to it: destroy its CQs first",
    ),
    _release(
        "destroy_cq",
        "completion queue",
        "A queue pair or an XRC or tag-matching SRQ still completes on it",
    ),
    _release("destroy_srq", "shared receive queue", "A queue pair still receives from it"),
    _release(
        "close_xrcd", "XRC domain", "An XRC SRQ or an XRC_RECV queue pair still belongs to it"
    ),
    _release(
        "destroy_qp",
        "queue pair",
        "It is still attached to a multicast group: ibv_detach_mcast first",
    ),
    _release(
        "destroy_ah",
        "address handle",
        "A driver may refuse a handle that sends still use: wait for their completions",
    ),
    failure(
        "detach_mcast",
        "The queue pair could not be detached from the multicast group.",
        "The GID and the LID with which ibv_attach_mcast was called.",
        causes=("It is not, or no longer, attached with this GID and this LID (EINVAL).",),
    ),
)
