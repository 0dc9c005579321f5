#!/usr/bin/env python3
"""Run a command on a machine with a Soft-RoCE device: a throwaway virtual machine.

    python tests/guest.py --kernel 6.12 -- rdmapost check -d rxe0
    python tests/guest.py --kernel 6.1 -- pytest -m rdma
    python tests/guest.py --peer 'python tests/virtual_machine/agent.py' -- pytest -m two_hosts

The machine boots an installed kernel on top of the host's own files (with virtme-ng and QEMU,
emulated unless --kvm is given), creates the device ``rxe0`` on a dummy network device with the
address 10.0.0.1/24, and runs the command as root, in the current directory, with this script's
Python environment first in PATH. File writes are lost with the machine, except in directories
given with ``--writable``. Standard output and standard error are forwarded separately, unchanged
and without delay.

With --peer, a second machine runs the command given there, and a network connects the two:
``rxe0`` has the address 10.0.1.1/24 in the first machine and 10.0.1.2/24 in the second, and
RDMAPOST_PEER holds the other machine's address. Nothing else is on that network. The second
machine's output goes to standard error, prefixed with "peer:"; it is stopped when the first one
ends. Neither waits for the other to boot.

No privileges are needed, only a readable kernel image. Exit status: the command's own, or 124 on
timeout, 125 if the machine could not be started (booting is retried once; the command never is),
126 if it crashed while the command was running. The reason for these three goes to standard error,
prefixed with "guest:".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from virtual_machine.host import (
    EXIT_NO_GUEST,
    HIDDEN,
    SYSTEM_PATH,
    check_tools,
    find_kernel,
    give_up,
    say,
)
from virtual_machine.machine import Guest
from virtual_machine.peer import Peer, PeerError

EXIT_TIMEOUT = 124
EXIT_GUEST_DIED = 126


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="guest.py",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kernel",
        metavar="SERIES|PATH",
        help="a series (6.1, 6.12: the newest installed) or an image; default: the newest",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=900,
        metavar="SECONDS",
        help="limit for the run (default 900)",
    )
    parser.add_argument(
        "--boot-timeout",
        type=float,
        default=180,
        metavar="SECONDS",
        help="limit for one boot attempt (default 180)",
    )
    parser.add_argument("--memory", default="2G", help="the guest's memory (default 2G)")
    parser.add_argument(
        "--cpus", type=int, default=min(2, os.cpu_count() or 1), help="the guest's CPUs (default 2)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for the command; without VALUE, copy it from this environment",
    )
    parser.add_argument(
        "--writable",
        action="append",
        default=[],
        type=Path,
        metavar="DIRECTORY",
        help="keep what the command writes to this existing directory",
    )
    parser.add_argument(
        "--peer",
        metavar="COMMAND",
        help="run this in a second machine on the same network; it does not see --writable",
    )
    # Passed to the second machine when it is started.
    parser.add_argument("--network", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, choices=(1, 2), default=1, help=argparse.SUPPRESS)
    parser.add_argument(
        "--kvm",
        action="store_true",
        help="use /dev/kvm; without it the machine is emulated, which works everywhere",
    )
    parser.add_argument(
        "--icount",
        action="store_true",
        help="for benchmarks: emulate one CPU whose clock advances 1 ns per instruction",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the guest's console on standard error"
    )
    parser.add_argument("command", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for value, option in ((args.timeout, "--timeout"), (args.boot_timeout, "--boot-timeout")):
        if value <= 0:
            parser.error(f"{option} must be more than 0")
    if args.icount and (args.kvm or args.peer is not None):
        parser.error("--icount allows neither --kvm nor --peer")
    for directory in args.writable:
        if not directory.is_dir():
            parser.error(f"--writable: no directory {directory}")
    args.writable = [directory.resolve() for directory in args.writable]
    return args


def terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exit, so that the guest is shut down."""
    say(f"ended by {signal.Signals(number).name}")
    sys.exit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    """Run the command in a guest and return the exit status."""
    args = parse(arguments)
    path = f"{Path(sys.prefix, 'bin')}:{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    check_tools(path)
    kernel = find_kernel(args.kernel)
    for place in (Path.cwd(), Path(sys.prefix)):
        if any(place.is_relative_to(hidden) for hidden in HIDDEN):
            give_up(f"{place} cannot be seen from the guest; use one outside {' '.join(HIDDEN)}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)

    with contextlib.ExitStack() as stack:
        peer = None
        if args.peer is not None:
            peer = stack.enter_context(Peer(args.peer, peer_options(args, kernel)))
            args.network = peer.network
        try:
            return run(args, kernel, path, peer)
        except PeerError as error:
            say("there is no second machine (any longer)")
            return error.status


def peer_options(args: argparse.Namespace, kernel: Path) -> list[str]:
    """Return the second machine's options, which are the first one's."""
    options = {
        "--kernel": kernel,
        "--timeout": args.timeout,
        "--boot-timeout": args.boot_timeout,
        "--memory": args.memory,
        "--cpus": args.cpus,
    }
    switches = [f"--{name}" for name in ("kvm", "verbose") if getattr(args, name)]
    settings = [f"--env={setting}" for setting in args.env]
    return [f"{name}={value}" for name, value in options.items()] + switches + settings


def run(args: argparse.Namespace, kernel: Path, path: str, peer: Peer | None) -> int:
    """Boot, retrying once, and return the command's exit status."""
    kvm: bool = args.kvm
    deadline = time.monotonic() + args.timeout
    for attempt in (1, 2):
        guest = Guest(args, kernel, path, kvm=kvm)
        try:
            guest.run(time.monotonic() + args.boot_timeout, deadline, peer)
        except TimeoutError:
            if guest.booted or time.monotonic() >= deadline:
                doing = "running the command" if guest.booted else "booting"
                say(f"timed out after {args.timeout:g} s, {doing} ({kernel.name})")
                return EXIT_TIMEOUT
            guest.failure = f"no sign of life after {args.boot_timeout:g} s"
        except BrokenPipeError:
            return 128 + signal.SIGPIPE
        finally:
            guest.close()
        if guest.status is not None:
            return guest.status
        if guest.booted:
            guest.show_console()
            say(f"the machine went down before the command ended ({kernel.name})")
            return EXIT_GUEST_DIED
        reason = guest.failure or "the machine ended early"
        if attempt == 1:
            say(f"{kernel.name} did not boot: {reason}; trying once more")
            # KVM may look available and not work; emulation always works.
            kvm = False
    guest.show_console()
    say(f"{kernel.name} did not boot: {reason}")
    return EXIT_NO_GUEST


if __name__ == "__main__":
    sys.exit(main())
