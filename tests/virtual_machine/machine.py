"""The virtual machine: QEMU, started by virtme-ng, and its output."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from .host import say
from .peer import Peer, network_options
from .script import guest_script

__all__ = ["Guest"]

# Drivers for emulated hardware that no test uses; loading them takes a third of the boot.
UNUSED_MODULES = (
    "kvm_amd,kvm_intel,ahci,aesni_intel,ghash_clmulni_intel,sha512_ssse3,"
    "iTCO_wdt,i2c_i801,lpc_ich,i6300esb,psmouse,pcspkr"
)

# A second export of the host's files, to be mounted with other options.
HOST_FILES = (
    "-fsdev local,id=guesthost,path=/,security_model=none,readonly=on,multidevs=remap "
    "-device virtio-9p-pci,fsdev=guesthost,mount_tag=guest.host"
)


class Streams:
    """Three channels from the guest to this process: named pipes that QEMU writes to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[str] = []
        self._control = b""
        self._descriptors: dict[str, int] = {}
        for name in ("control", "stdout", "stderr"):
            os.mkfifo(directory / name, 0o600)
            # O_RDWR, so that reading does not report end of file before QEMU opens the pipe.
            self._descriptors[name] = os.open(directory / name, os.O_RDWR | os.O_NONBLOCK)

    def qemu_options(self) -> str:
        """Return the options that give the guest a port for each channel."""
        # By default each device can have 31 ports, whose queues QEMU polls all the time: with the
        # devices of virtme-ng, 450 descriptors.
        options = [
            "-global virtio-serial-device.max_ports=4",
            "-device virtio-serial-pci,id=guestports",
        ]
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
        """Forward the data in a channel; return whether there was any."""
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
        """Forward all remaining data."""
        for name in self._descriptors:
            while self.take(name):
                pass

    def close(self) -> None:
        """Close the channels."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all the data, in as many calls as it takes."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another process made our standard output non-blocking.
            select_writable(descriptor)


def select_writable(descriptor: int) -> None:
    """Wait until a descriptor is writable."""
    with selectors.SelectSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        selector.select()


class Guest:
    """One attempt to run the guest, from starting QEMU until it exits."""

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
            "--run",
            str(kernel),
            "--name",
            "guest",
            "--cpus",
            "1" if args.icount else str(args.cpus),
            "--memory",
            args.memory,
            "--disable-microvm",
            "--force-9p",
            "--verbose",
            "--append",
            f"modprobe.blacklist={UNUSED_MODULES}",
            "--rodir",
            str(self._directory),
        ]
        if not kvm:
            command.append("--disable-kvm")
        for index, directory in enumerate(args.writable):
            command += ["--rwdir", f"/run/rdmapost/writable{index}={directory}"]
        options = f"{self._streams.qemu_options()} {HOST_FILES}"
        if args.network:
            options += f" {network_options(args.network, args.host)}"
        if args.icount:
            options += " -icount shift=0,sleep=off"
        command += [f"--qemu-opts={options}"]
        command += ["--", f"bash {shlex.quote(str(script))}"]
        environment = dict(os.environ)
        # virtme-ng leaves temporary files behind when killed, and reads the user's settings.
        environment |= {"PATH": path, "TMPDIR": str(self._directory), "HOME": str(self._directory)}
        # In its own process group, so that close() can kill all of it.
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
        """Wait until the command ends, the machine goes down or a deadline passes.

        Raises:
            TimeoutError: a deadline passed: the boot's, or the run's if ``booted``.
            PeerError: the second machine did not boot, or went down.
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
                    # The ports do not buffer writes, so all output has arrived. Allow only a
                    # short time for the shutdown.
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
        """Keep the output of virtme-ng, QEMU and the kernel, to show if booting fails."""
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
        """Show the relevant part of the console, unless --verbose showed it already."""
        if self._verbose:
            return
        lines = self._console.decode(errors="replace").splitlines()
        # A crashing kernel prints the reason first, and then many other lines.
        oops = [i for i, line in enumerate(lines) if re.search("BUG:|Oops|panic - ", line)]
        shown = lines[oops[0] : oops[0] + 30] + lines[oops[0] + 30 :][-2:] if oops else lines[-30:]
        for line in shown:
            say(f"| {line.rstrip()}")

    def close(self) -> None:
        """Kill QEMU and everything else that is still running, and delete temporary files."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._streams.close()
        shutil.rmtree(self._directory, ignore_errors=True)
