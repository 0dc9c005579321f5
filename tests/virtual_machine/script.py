"""The script that runs in the guest: it sets up the device and runs the command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from .host import SYSTEM_PATH
from .peer import NETWORK

__all__ = ["guest_script"]

# Runs in the guest as root. The three ports are separate virtio-serial devices, so no message from
# QEMU or virtme-ng ends up in the command's output.
GUEST_SCRIPT = r"""
exec </dev/null
exec 3>/dev/virtio-ports/guest.control || exit 1

setup() {
    modprobe rdma_rxe && modprobe ib_uverbs || return
    ip link set lo up || return
    if [ "$host" ]; then
        address=10.0.1.$host gid=ffff:0a00:010$host
        # It already exists, under a name chosen by udev.
        netdev=$(grep -l ^52:54:00:00:01 /sys/class/net/*/address)
        netdev=$(basename "${netdev%/address}")
    else
        netdev=d0 address=10.0.0.1 gid=ffff:0a00:0001
        ip link add d0 type dummy || return
    fi
    ip address add $address/24 dev $netdev && ip link set $netdev up || return
    rdma link add rxe0 type rxe netdev $netdev || return
    # Both are created asynchronously: the uverbs device by udev, the address's GID by a work queue.
    for _ in $(seq 100); do
        [ -e /dev/infiniband/uverbs0 ] &&
            grep -qs $gid /sys/class/infiniband/rxe0/ports/1/gids/* && return
        sleep 0.1
    done
    echo "rxe0 did not come up"
    return 1
}

mkdir -p /run/rdmapost
reason=$(setup 2>&1) || { echo "failed $reason" | tr '\n' ' ' >&3; echo >&3; exit 1; }
# Reads of the host's files are slow and by default not cached. Mount the directories of Python and
# of programs with caching: their files do not change while the guest runs.
cd /run/rdmapost && mkdir host upper work home
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose guest.host host && {
    for place in "${cached[@]}"; do mount --bind "host$place" "$place"; done
}
# Make the tree writable, with writes kept in memory. Then Python compiles each file only once;
# compiling takes most of a command's start-up time on an emulated machine.
if [ "$directory" != / ]; then
    mount -t overlay -o "lowerdir=host$directory,upperdir=upper,workdir=work" overlay "$directory"
fi
for ((i = 0; i < ${#writable[@]}; i++)); do mount --bind "writable$i" "${writable[i]}"; done
cd "$directory" || { echo "failed cannot enter $directory in the guest" >&3; exit 1; }
echo booted >&3
env -i "${environment[@]}" "${command[@]}" 3>&- \
    >/dev/virtio-ports/guest.stdout 2>/dev/virtio-ports/guest.stderr
echo "status $?" >&3
"""


def guest_script(args: argparse.Namespace) -> str:
    """Return the guest's script with directory, environment and command filled in."""
    environment = {
        "PATH": f"{Path(sys.prefix, 'bin')}:{SYSTEM_PATH}",
        "HOME": "/run/rdmapost/home",
        "LANG": "C.UTF-8",
        "USER": "root",
        "LOGNAME": "root",
        # Fail instead of skipping or falling back to soft0.
        "RDMAPOST_REQUIRE_DEVICE": "1",
    }
    if args.network:
        environment["RDMAPOST_PEER"] = f"{NETWORK}{3 - args.host}"
    if sys.prefix != sys.base_prefix:
        environment["VIRTUAL_ENV"] = sys.prefix
    for setting in args.env:
        name, equals, value = setting.partition("=")
        environment[name] = value if equals else os.environ.get(name, "")
    settings = [f"{name}={value}" for name, value in environment.items()]
    return (
        f"directory={shlex.quote(os.getcwd())}\n"
        f"cached=({shlex.join(dict.fromkeys(['/usr', sys.base_prefix, sys.prefix]))})\n"
        f"writable=({shlex.join(map(str, args.writable))})\n"
        f"environment=({shlex.join(settings)})\n"
        f"host={args.host if args.network else ''}\n"
        f"command=({shlex.join(args.command)})\n{GUEST_SCRIPT}"
    )
