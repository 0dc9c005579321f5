"""What belongs to one process, and cannot be copied."""

from __future__ import annotations

import os

from ...errors import ClosedError
from ...resources.resource import Resource


def refuse_inherited(what: str, pid: int) -> None:
    """Refuse what a child process inherits from its parent, which still uses the same sockets.

    Args:
        what: what it is.
        pid: the process that opened it.

    Raises:
        ClosedError: this is another process.
    """
    if pid != os.getpid():
        raise ClosedError(f"{what} was opened by process {pid}")


class NotCopied:
    """What can be neither copied nor pickled: dropping the copy would close the original."""

    __reduce_ex__ = Resource.__reduce_ex__
