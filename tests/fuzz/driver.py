"""Start workers, report their findings, and shrink the programs that failed."""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import pathlib
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Finding", "hunt", "replay", "work"]

_STATUS = struct.Struct("QQ")
"""The number of the worker's current program, and how many calls it has made."""
_FOUND = 70
"""Exit status of a worker that has a finding."""
_SHRINKING_S = 60.0
_WARM_SEED, _WARMING = 12345, 20
"""Programs that each worker runs first, so that imports and caches are in place."""


class Finding(dict[str, Any]):
    """A failure of a program: program, kind, signature and text."""


# ---- the worker --------------------------------------------------------------


def _quiet_leaks() -> None:
    """Exclude from leak detection what cffi and numpy allocate when they are imported."""
    import contextlib
    import ctypes

    runtime = ctypes.CDLL(None)
    disable = getattr(runtime, "__lsan_disable", None)
    if disable is not None:
        disable()
    import numpy  # noqa: F401

    import rdmapost
    import rdmapost.resources.aio

    with contextlib.suppress(Exception):
        rdmapost.open_device("soft0").close()
    if disable is not None:
        runtime.__lsan_enable()


def work(options: Any) -> int:
    """Run programs until there have been enough calls, or one finds something."""
    _quiet_leaks()
    from programs import plan_of, run

    keep = None
    if options.keep is not None:
        keep = frozenset(int(place) for place in options.keep.split(",") if place)
    log = print if options.program is not None else None
    # The first programs fill caches, which must not happen in a program that may be replayed.
    for index in range(_WARMING):
        run(plan_of(_WARM_SEED, index, 1))
    gc.collect()
    gc.freeze()
    with open(options.worker, "r+b") as file, mmap.mmap(file.fileno(), _STATUS.size) as status:
        ticking = threading.Lock()
        total = 0
        program = options.first if options.program is None else options.program
        started = time.monotonic()
        while total < options.ops:
            if options.seconds and time.monotonic() - started > options.seconds:
                break
            faulthandler.dump_traceback_later(options.limit, exit=True)

            def tick(count: int, program: int = program, before: int = total) -> None:
                # Without a GIL, two threads cannot write to one mmap.
                with ticking:
                    _STATUS.pack_into(status, 0, program, before + count)

            tick(0)
            plan = plan_of(options.seed, program, options.threads)
            if log is not None:
                log(f"{plan.flavour}, {plan.threads} threads, {plan.interrupts or 'no'} interrupts")
            world = run(plan, log=log, keep=keep, tick=tick)
            total += world.count
            if world.findings:
                kind, signature, text = world.findings[0]
                said = {"kind": kind, "signature": f"{kind}: {signature}", "text": text}
                print("FOUND " + json.dumps(said), file=sys.stderr, flush=True)
                sys.stdout.flush()
                # After a finding, the state of this process cannot be trusted.
                os._exit(_FOUND)
            if options.program is not None:
                break
            program += 1
            _STATUS.pack_into(status, 0, program, total)
        faulthandler.cancel_dump_traceback_later()
    return 0


# ---- the driver --------------------------------------------------------------


class _Worker:
    """A worker process.

    Args:
        options: of the command.
        arguments: more arguments for the worker.
        output: where its standard output goes.
    """

    def __init__(
        self, options: Any, *arguments: str, output: int | None = subprocess.DEVNULL
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="fuzz")
        self._status = pathlib.Path(self._folder, "status")
        self._status.write_bytes(bytes(_STATUS.size))
        self._said = pathlib.Path(self._folder, "said")
        env = {"PYTHONHASHSEED": "0", **os.environ}
        if not _sanitized(env):
            # Fills freed memory, and detects writes beside a block.
            env.setdefault("PYTHONMALLOC", "debug")
            env.setdefault("MALLOC_PERTURB_", "90")
        self._options = options
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-X",
                    "faulthandler",
                    str(pathlib.Path(__file__).parent),
                    "--worker",
                    str(self._status),
                    "--seed",
                    str(options.seed),
                    "--threads",
                    str(options.threads),
                    "--limit",
                    str(options.limit),
                    *arguments,
                ],
                stdout=output,
                stderr=said,
                env=env,
            )

    def end(self) -> tuple[int, int, Finding | None]:
        """Wait for the worker to exit; return its program, its calls, and its finding."""
        code = self.process.wait()
        program, calls = _STATUS.unpack(self._status.read_bytes())
        said = self._said.read_text(errors="replace")
        shutil.rmtree(self._folder)
        return program, calls, _finding(code, program, said)


def _sanitized(env: Mapping[str, str]) -> bool:
    return "asan" in env.get("LD_PRELOAD", "")


def _finding(code: int, program: int, said: str) -> Finding | None:
    if code == 0:
        return None
    for line in said.splitlines():
        if line.startswith("FOUND "):
            return Finding(program=program, **json.loads(line[6:]))
    if summary := re.search(r"^SUMMARY: .*$|^.*runtime error: .*$", said, re.M):
        kind = "sanitizer"
        signature = summary[0].replace("SUMMARY: ", "") + f", in {_top_of_stack(said)[:80]}"
    elif "Timeout (" in said:
        kind, signature = "hang", _top_of_stack(said)
    else:
        kind, signature = f"ended with {code}", _top_of_stack(said)
    return Finding(program=program, kind=kind, signature=f"{kind}: {signature}", text=said[-12000:])


def _top_of_stack(said: str) -> str:
    frames = re.findall(r'File "[^"]*/((?:rdmapost|fuzz)/[^"]*)", line \d+ in (\S+)', said)
    return f"{frames[0][1]} ({frames[0][0]})" if frames else said.strip()[-200:]


def hunt(options: Any) -> int:
    """Run programs; print the findings; return the exit status."""
    started = time.monotonic()
    done, program = 0, options.first
    seen: dict[str, list[Any]] = {}
    while done < options.ops:
        arguments = ["--ops", str(options.ops - done), "--first", str(program)]
        if options.seconds:
            left = options.seconds - (time.monotonic() - started)
            if left <= 0:
                break
            arguments += ["--seconds", str(left)]
        program, calls, finding = _Worker(options, *arguments).end()
        done += calls
        if finding is None:
            break
        known = seen.setdefault(finding["signature"], [0, done, finding])
        known[0] += 1
        if known[0] == 1:
            print(f"after {done} operations, program {program}: {finding['signature']}", flush=True)
            _show(options, finding)
            if not options.keep_going:
                return 1
        program += 1
    seconds = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    print(
        f"{done} operations in {program - options.first} programs, {seconds:.0f} s "
        f"({done / max(seconds, 1e-9):.0f}/s, {done / max(busy, 1e-9):.0f}/s of processor time), "
        f"seed {options.seed}: {len(seen)} kinds of findings"
    )
    for signature, (count, first, finding) in sorted(seen.items(), key=lambda item: item[1][1]):
        print(f"{count:6} times, first after {first:7} (program {finding['program']}): {signature}")
    return 1 if seen else 0


def _show(options: Any, finding: Finding) -> None:
    print(finding["text"])
    python = ".ci/sanitize --run" if _sanitized(os.environ) else "python"
    again = f"{python} tests/fuzz --seed {options.seed} --threads {options.threads} --program"
    print(f"to replay it: {again} {finding['program']}")
    from programs import plan_of

    plan = plan_of(options.seed, finding["program"], options.threads)
    if plan.threads > 1:
        print(f"it has {plan.threads} threads, so it may take several attempts")
    elif (kept := _shrink(options, finding, len(plan.steps[0]))) is not None:
        shown = "," + ",".join(map(str, kept))
        print(f"shrunk: {again} {finding['program']} --keep {shown}", flush=True)
        # Print the calls of the shrunk program.
        _Worker(options, "--program", str(finding["program"]), "--keep", shown, output=None).end()


def _fails(options: Any, finding: Finding, kept: list[int]) -> bool:
    worker = _Worker(
        options, "--program", str(finding["program"]), "--keep", ",".join(map(str, kept)) + ","
    )
    found = worker.end()[2]
    return found is not None and found["kind"] == finding["kind"]


def _shrink(options: Any, finding: Finding, count: int) -> list[int] | None:
    """Leave out operations while the program still fails; return the remaining ones."""
    deadline = time.monotonic() + _SHRINKING_S
    kept, size = list(range(count)), count
    if not _fails(options, finding, kept):
        return None
    while size and time.monotonic() < deadline:
        for at in range(0, len(kept), size):
            fewer = kept[:at] + kept[at + size :]
            if _fails(options, finding, fewer):
                kept = fewer
                break
        else:
            size //= 2
    return kept


def replay(options: Any) -> int:
    """Run one program, and print its calls and what it finds; return the exit status."""
    arguments = ["--program", str(options.program)]
    if options.keep is not None:
        arguments += ["--keep", options.keep]
    finding = _Worker(options, *arguments, output=None).end()[2]
    if finding is not None:
        print(f"{finding['signature']}\n{finding['text']}")
    return 1 if finding is not None else 0
