"""Find what guest.py needs on its host: a kernel and some programs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import NoReturn

__all__ = ["EXIT_NO_GUEST", "HIDDEN", "SYSTEM_PATH", "check_tools", "find_kernel", "give_up", "say"]

EXIT_NO_GUEST = 125

# Debian and Ubuntu install some programs (rdma, modprobe) outside an ordinary user's PATH.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The guest mounts its own file systems here, which hide the host's files.
HIDDEN = ("/dev", "/proc", "/run", "/sys", "/var/tmp", "/var/cache", "/var/log")
QEMU = {"x86_64": "qemu-system-x86_64", "aarch64": "qemu-system-aarch64"}
QEMU_PACKAGE = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"}


def say(message: str) -> None:
    """Print a message from the script itself on standard error."""
    with contextlib.suppress(OSError):
        print(f"guest: {message}", file=sys.stderr, flush=True)


def give_up(message: str, status: int = EXIT_NO_GUEST) -> NoReturn:
    """Print why there is no guest, and exit."""
    say(message)
    sys.exit(status)


def version_key(path: Path) -> list[int]:
    """Sort kernel images by version: 6.1.0-9 before 6.1.0-56."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def has_rxe(release: str) -> bool:
    """Return whether a kernel's modules are installed and include Soft-RoCE."""
    return any(Path("/lib/modules", release).glob("kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"))


def find_kernel(wanted: str | None) -> Path:
    """Find a kernel image.

    Args:
        wanted: a path; a series such as "6.12", for its newest installed kernel; or None for the
            newest installed kernel of any series.
    """
    if wanted is not None and "/" in wanted:
        image = Path(wanted).absolute()
        if not image.is_file():
            give_up(f"no kernel image {image}")
    else:
        series = wanted or ""
        images = [
            path
            for path in sorted(Path("/boot").glob("vmlinuz-*"), key=version_key, reverse=True)
            if re.match(rf"{re.escape(series)}(?!\d)", path.name.removeprefix("vmlinuz-"))
            or not series
        ]
        usable = [path for path in images if has_rxe(path.name.removeprefix("vmlinuz-"))]
        if not usable:
            what = f"no kernel {series} in /boot" if not images else f"no rdma_rxe for {images[0]}"
            if "ID=ubuntu" in os_release():
                package = "linux-image-generic (it brings linux-modules-extra)"
            else:
                package = f"linux-image-{'' if series in ('', '6.1') else series + '-'}amd64"
            give_up(f"{what}; install {package}, or give a path with --kernel")
        image = usable[0]
    if not os.access(image, os.R_OK):
        give_up(f"cannot read {image}; run as root, or: sudo chmod a+r {image}")
    return image


def os_release() -> str:
    """Return the contents of /etc/os-release, or an empty string."""
    try:
        return Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""


def check_tools(path: str) -> None:
    """Exit with one line that names every missing program."""
    packages = {
        QEMU.get(platform.machine(), "qemu-system-" + platform.machine()): QEMU_PACKAGE.get(
            platform.machine(), "qemu-system"
        ),
        "rdma": "iproute2",
        "ip": "iproute2",
        "modprobe": "kmod",
        "udevadm": "udev",
        "busybox": "busybox-static",
        "file": "file",
    }
    missing = {
        tool: package for tool, package in packages.items() if not shutil.which(tool, path=path)
    }
    if missing:
        names = " ".join(sorted(set(missing.values())))
        give_up(f"no {', '.join(missing)} on this machine: apt-get install {names}")
    for tool in ("vng", "virtme-run"):
        if not shutil.which(tool, path=path):
            give_up(f"no {tool} on this machine: {sys.executable} -m pip install virtme-ng")
