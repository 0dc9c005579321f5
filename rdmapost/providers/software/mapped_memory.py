"""Which memory of this process is mapped, for regions made from addresses or dma-bufs."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib

from ..._arguments import counted
from ..._binding import native
from ...enums import Access
from ...errors import VerbsError, is_from_system
from ..base import refused_of_dmabuf


def check_mapped(name: str, start: int, length: int, write: bool) -> None:
    """Check that memory is mapped with the permissions that an access needs.

    Raises:
        VerbsError: EFAULT from the verb ``name``: some of it is unmapped or lacks the permission.
    """
    if not native.permitted(start, length, write):
        raise VerbsError(
            name, errno.EFAULT, "some of this memory is not mapped for the requested access"
        )


_SHARED_ANONYMOUS = ([b"/dev/zero"], [b"/dev/zero (deleted)"])
"""How /proc/self/maps names shared anonymous memory, which nobody can truncate."""


def may_shrink(start: int, length: int) -> bool:
    """Whether memory is a mapped file, which another process can truncate."""
    end = start + length
    try:
        maps = pathlib.Path("/proc/self/maps").read_bytes()
    except OSError as error:
        if not is_from_system(error):
            raise
        return True
    # Not splitlines(): a file's name may contain other line endings.
    for line in filter(None, maps.split(b"\n")):
        bounds, _, _, _, inode, *path = line.split(None, 5)
        low, high = bounds.split(b"-")
        is_file = inode != b"0" and path not in _SHARED_ANONYMOUS
        if is_file and int(low, 16) < end and int(high, 16) > start:
            return True
    return False


def map_dmabuf(fd: int, offset: int, length: int, iova: int, access: int) -> memoryview:
    """Map part of a dma-buf, or of any file that can be mapped.

    Raises:
        VerbsError: the kernel would refuse it too.
    """
    name = "ibv_reg_dmabuf_mr"
    if refused := refused_of_dmabuf(access):
        raise VerbsError(name, errno.EINVAL, refused)
    extra = offset % mmap.ALLOCATIONGRANULARITY
    if extra != iova % mmap.ALLOCATIONGRANULARITY:
        raise VerbsError(
            name, errno.EINVAL, "offset and iova must be at the same position in a page"
        )
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if access & Access.LOCAL_WRITE else 0)
    try:
        # Not beyond a file's end: an access there kills the process.
        size = os.fstat(fd).st_size
        if size and offset + length > size:
            raise ValueError(f"it has {counted(size, 'byte')}")
        mapped = mmap.mmap(
            fd, extra + length, flags=mmap.MAP_SHARED, prot=protection, offset=offset - extra
        )
    except (OSError, OverflowError, ValueError) as error:
        code, why = errno.EINVAL, f": {error}"
        if isinstance(error, OSError) and error.errno:
            # The errno already says why.
            code, why = error.errno, ""
        raise VerbsError(name, code, f"fd {fd} cannot be mapped{why}") from None
    return memoryview(mapped)[extra:]
