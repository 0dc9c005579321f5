"""What runs in a guest: the set-up of the device, and then the command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from .host import SYSTEM_PATH
from .peer import NETWORK

__all__ = ["guest_script"]

# Runs in the guest as root. The three ports are virtio-serial devices of our own: what QEMU and
# virtme-ng have to say goes elsewhere, so nothing is mixed into the command's output.
GUEST_SCRIPT = r"""
exec </dev/null
exec 3>/dev/virtio-ports/guest.control || exit 1

setup() {
    modprobe rdma_rxe && modprobe ib_uverbs || return
    ip link set lo up || return
    if [ "$host" ]; then
        address=10.0.1.$host gid=ffff:0a00:010$host
        # There already, under a name that udev gave it.
        netdev=$(grep -l ^52:54:00:00:01 /sys/class/net/*/address)
        netdev=$(basename "${netdev%/address}")
    else
        netdev=d0 address=10.0.0.1 gid=ffff:0a00:0001
        ip link add d0 type dummy || return
    fi
    ip address add $address/24 dev $netdev && ip link set $netdev up || return
    rdma link add rxe0 type rxe netdev $netdev || return
    # The uverbs device appears by way of udev, the GID of the address by way of a work queue.
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
# The guest reads the host's files one request at a time, over and over; where Python's are, see to
# it that it keeps them. They do not change while it lives.
cd /run/rdmapost && mkdir host upper work home
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose guest.host host && {
    for place in "${cached[@]}"; do mount --bind "host$place" "$place"; done
}
# Make the tree writable; what is written stays in memory. So Python compiles each file once, which
# is most of what a command takes to start on an emulated machine.
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
    """Return the script that the guest runs, with directory, environment and command filled in."""
    environment = {
        "PATH": f"{Path(sys.prefix, 'bin')}:{SYSTEM_PATH}",
        "HOME": "/run/rdmapost/home",
        "LANG": "C.UTF-8",
        "USER": "root",
        "LOGNAME": "root",
        # There is a device: nothing may make do without.
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
        f"cached=({shlex.join(dict.fromkeys([sys.base_prefix, sys.prefix]))})\n"
        f"writable=({shlex.join(map(str, args.writable))})\n"
        f"environment=({shlex.join(settings)})\n"
        f"host={args.host if args.network else ''}\n"
        f"command=({shlex.join(args.command)})\n{GUEST_SCRIPT}"
    )
