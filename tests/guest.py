#!/usr/bin/env python3
"""Run a command beside a Soft-RoCE device, in a throwaway virtual machine.

    python tests/guest.py --kernel 6.12 -- rdmapost check -d rxe0
    python tests/guest.py --kernel 6.1 -- pytest -m rdma
    python tests/guest.py --peer 'python tests/guests/agent.py' -- pytest -m two_hosts

The machine boots an installed kernel over this machine's own files (virtme-ng and QEMU,
emulated unless --kvm is given), makes the device ``rxe0`` on a dummy network device with the
address 10.0.0.1/24, and runs the command there as root, in the current directory, with the
environment of the Python that runs this script first in PATH. What the command writes stays in
the machine and goes with it, but for the directories given with ``--writable``. Its standard
output and standard error come back apart, as they are and as they come.

With --peer there is a second machine, which runs the command given there, and a network of the
two: ``rxe0`` is on it, with the address 10.0.1.1/24 in the first machine and 10.0.1.2/24 in the
second, and RDMAPOST_PEER is the other's. Nothing else is on that network. What the second says is
on standard error, in lines that begin with "peer:"; it is ended when the first has ended. Neither
waits for the other to boot.

It needs no privileges, only a kernel image that it can read. Exit status: the command's own, or
124 if the time ran out, 125 if the machine could not be started (one that does not boot is tried
once more; a command never is), 126 if it went down under the command. The reason for these three
is on standard error, in lines that begin with "guest:".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from guests.peer import NETWORK, Peer, PeerError, network_options

EXIT_TIMEOUT = 124
EXIT_NO_GUEST = 125
EXIT_GUEST_DIED = 126

# Where Debian and Ubuntu keep what an ordinary user's PATH may lack (qemu, rdma, modprobe).
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The guest mounts its own file systems over these: the host's files there are out of sight.
HIDDEN = ("/dev", "/proc", "/run", "/sys", "/var/tmp", "/var/cache", "/var/log")
QEMU = {"x86_64": "qemu-system-x86_64", "aarch64": "qemu-system-aarch64"}
QEMU_PACKAGE = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"}

# Drivers that udev would load for what QEMU has built in and no test uses: a third of the boot.
UNUSED_MODULES = (
    "kvm_amd,kvm_intel,ahci,aesni_intel,ghash_clmulni_intel,sha512_ssse3,"
    "iTCO_wdt,i2c_i801,lpc_ich,i6300esb,psmouse,pcspkr"
)

# The host's files once more, for a mount with options of our own.
HOST_FILES = (
    "-fsdev local,id=guesthost,path=/,security_model=none,readonly=on,multidevs=remap "
    "-device virtio-9p-pci,fsdev=guesthost,mount_tag=guest.host"
)

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
# Make the tree writable; what is written stays in memory.
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


def say(message: str) -> None:
    """Print a line of the script's own on standard error."""
    with contextlib.suppress(OSError):
        print(f"guest: {message}", file=sys.stderr, flush=True)


def give_up(message: str, status: int = EXIT_NO_GUEST) -> NoReturn:
    """Say why there is no guest, and exit."""
    say(message)
    sys.exit(status)


def version_key(path: Path) -> list[int]:
    """Sort kernel images by version: 6.1.0-9 before 6.1.0-56."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def has_rxe(release: str) -> bool:
    """Tell whether a kernel's modules are installed and have Soft-RoCE among them."""
    return any(Path("/lib/modules", release).glob("kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"))


def find_kernel(wanted: str | None) -> Path:
    """Find a kernel image.

    Args:
        wanted: a path, or a series such as "6.12" of which the newest installed one is taken, or
            None for the newest of all.
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
    """Return what says which distribution this is."""
    try:
        return Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""


def check_tools(path: str) -> None:
    """Stop with one line for everything that is missing."""
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


class Streams:
    """The guest's three channels to this process: named pipes that QEMU writes to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[str] = []
        self._control = b""
        self._descriptors: dict[str, int] = {}
        for name in ("control", "stdout", "stderr"):
            os.mkfifo(directory / name, 0o600)
            # Read and write: the pipe has no end of file before QEMU opens it.
            self._descriptors[name] = os.open(directory / name, os.O_RDWR | os.O_NONBLOCK)

    def qemu_options(self) -> str:
        """Return the options that give the guest a port for each channel."""
        options = ["-device virtio-serial-pci,id=guestports"]
        for name in self._descriptors:
            options.append(f"-chardev file,id=guest{name},path={self.directory / name}")
            options.append(
                f"-device virtserialport,bus=guestports.0,name=guest.{name},chardev=guest{name}"
            )
        return " ".join(options)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Watch the channels."""
        for name, descriptor in self._descriptors.items():
            selector.register(descriptor, selectors.EVENT_READ, name)

    def take(self, name: str) -> bool:
        """Pass on what there is in a channel; return whether there was anything."""
        try:
            data = os.read(self._descriptors[name], 65536)
        except BlockingIOError:
            return False
        if name == "control":
            *lines, self._control = (self._control + data).split(b"\n")
            self.events += [line.decode(errors="replace").strip() for line in lines]
        else:
            write_all(1 if name == "stdout" else 2, data)
        return True

    def drain(self) -> None:
        """Pass on everything that is left."""
        for name in self._descriptors:
            while self.take(name):
                pass

    def close(self) -> None:
        """Close the channels."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, however often that takes."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Someone else made our standard output non-blocking.
            select_writable(descriptor)


def select_writable(descriptor: int) -> None:
    """Wait until a descriptor takes data."""
    with selectors.SelectSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        selector.select()


class Guest:
    """One attempt: from starting QEMU to its end."""

    def __init__(self, args: argparse.Namespace, kernel: Path, path: str, *, kvm: bool) -> None:
        self.booted = False
        self.status: int | None = None
        self.failure = ""
        self._console = b""
        self._verbose: bool = args.verbose
        self._directory = Path(tempfile.mkdtemp(prefix="rdmapost-guest-"))
        self._streams = Streams(self._directory)
        script = self._directory / "run"
        script.write_text(guest_script(args), encoding="utf-8", errors="surrogateescape")
        command = [
            "vng",
            "--run", str(kernel),
            "--name", "guest",
            "--cpus", str(args.cpus),
            "--memory", args.memory,
            "--disable-microvm",
            "--force-9p",
            "--verbose",
            "--append", f"modprobe.blacklist={UNUSED_MODULES}",
            "--rodir", str(self._directory),
        ]  # fmt: skip
        if not kvm:
            command.append("--disable-kvm")
        for index, directory in enumerate(args.writable):
            command += ["--rwdir", f"/run/rdmapost/writable{index}={directory}"]
        options = f"{self._streams.qemu_options()} {HOST_FILES}"
        if args.network:
            options += f" {network_options(args.network, args.host)}"
        command += [f"--qemu-opts={options}"]
        command += ["--", f"bash {shlex.quote(str(script))}"]
        environment = dict(os.environ)
        # virtme-ng leaves temporary files behind when it is killed, and reads a user's settings.
        environment |= {
            "PATH": path,
            "TMPDIR": str(self._directory),
            "HOME": str(self._directory),
        }
        # From here on it must not be left behind: it runs in a process group of its own.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment,
            start_new_session=True,
        )

    def run(self, boot_deadline: float, deadline: float, peer: Peer | None = None) -> None:
        """Wait for the end of the command, or of the machine, or of the time.

        Raises:
            TimeoutError: the time ran out; ``booted`` says which of the two.
            PeerError: there is no second machine, or no longer.
        """
        assert self._process.stdout is not None
        log = self._process.stdout.fileno()
        os.set_blocking(log, False)
        process = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(log, selectors.EVENT_READ, "log")
            selector.register(process, selectors.EVENT_READ, "process")
            self._streams.register(selector)
            if peer is not None:
                selector.register(peer, selectors.EVENT_READ, "peer")
            ended = False
            while not ended:
                limit = deadline if self.booted else min(boot_deadline, deadline)
                left = limit - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in selector.select(left):
                    if key.data == "log":
                        if not self._take_log(log):
                            selector.unregister(log)
                    elif key.data == "process":
                        ended = True
                    elif key.data == "peer" and peer is not None:
                        if not peer.take():
                            selector.unregister(peer)
                            peer.check()
                    else:
                        self._streams.take(key.data)
                self._note_events()
                if self.status is not None or self.failure:
                    # The ports have no buffer that outlives a write: all output is here already.
                    # What remains is to shut down, for which there is no need to wait long.
                    deadline = min(deadline, time.monotonic() + 10)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(10)
                    ended = True
        os.close(process)
        self._streams.drain()
        self._note_events()
        while self._take_log(log):
            pass

    def _take_log(self, log: int) -> bool:
        """Keep what virtme-ng, QEMU and the kernel say, for when it does not boot."""
        try:
            data = os.read(log, 65536)
        except BlockingIOError:
            return False
        if self._verbose:
            write_all(2, data)
        self._console = (self._console + data)[-65536:]
        return bool(data)

    def _note_events(self) -> None:
        for event in self._streams.events:
            word, _, rest = event.partition(" ")
            if word == "booted":
                self.booted = True
            elif word == "failed":
                self.failure = rest
            elif word == "status":
                self.status = int(rest)
        self._streams.events.clear()

    def show_console(self) -> None:
        """Show what the kernel, QEMU or virtme-ng left that matters, unless shown already."""
        if self._verbose:
            return
        lines = self._console.decode(errors="replace").splitlines()
        # A kernel that goes down says first why, and then much else.
        oops = [i for i, line in enumerate(lines) if re.search("BUG:|Oops|panic - ", line)]
        shown = lines[oops[0] : oops[0] + 30] + lines[oops[0] + 30 :][-2:] if oops else lines[-30:]
        for line in shown:
            say(f"| {line.rstrip()}")

    def close(self) -> None:
        """End whatever still runs, QEMU included, and remove the traces."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._streams.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def guest_script(args: argparse.Namespace) -> str:
    """Return the script that the guest runs, with directory, environment and command filled in."""
    environment = {
        "PATH": f"{Path(sys.prefix, 'bin')}:{SYSTEM_PATH}",
        "HOME": "/run/rdmapost/home",
        "LANG": "C.UTF-8",
        "USER": "root",
        "LOGNAME": "root",
        "PYTHONDONTWRITEBYTECODE": "1",
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
        "--timeout", type=float, default=900, metavar="SECONDS", help="for all of it (default 900)"
    )
    parser.add_argument(
        "--boot-timeout",
        type=float,
        default=180,
        metavar="SECONDS",
        help="for one attempt to boot (default 180)",
    )
    parser.add_argument("--memory", default="2G", help="of the guest (default 2G)")
    parser.add_argument(
        "--cpus", type=int, default=min(2, os.cpu_count() or 1), help="of the guest (default 2)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for the command; without VALUE, as it is here",
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
    # What the second machine is started with.
    parser.add_argument("--network", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, choices=(1, 2), default=1, help=argparse.SUPPRESS)
    parser.add_argument(
        "--kvm",
        action="store_true",
        help="use /dev/kvm; without it the machine is emulated, which works everywhere",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the guest's console on standard error"
    )
    parser.add_argument("command", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for value, option in ((args.timeout, "--timeout"), (args.boot_timeout, "--boot-timeout")):
        if value <= 0:
            parser.error(f"{option} must be more than 0")
    for directory in args.writable:
        if not directory.is_dir():
            parser.error(f"--writable: no directory {directory}")
    args.writable = [directory.resolve() for directory in args.writable]
    return args


def terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exit, so that the guest is ended on the way."""
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
    """Return the options of the second machine: those of the first."""
    options = {
        "--kernel": kernel, "--timeout": args.timeout, "--boot-timeout": args.boot_timeout,
        "--memory": args.memory, "--cpus": args.cpus,
    }  # fmt: skip
    switches = [f"--{name}" for name in ("kvm", "verbose") if getattr(args, name)]
    settings = [f"--env={setting}" for setting in args.env]
    return [f"{name}={value}" for name, value in options.items()] + switches + settings


def run(args: argparse.Namespace, kernel: Path, path: str, peer: Peer | None) -> int:
    """Boot, twice if need be, and return the exit status of the command."""
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
            # Emulation works where KVM only seems to.
            kvm = False
    guest.show_console()
    say(f"{kernel.name} did not boot: {reason}")
    return EXIT_NO_GUEST


if __name__ == "__main__":
    sys.exit(main())
