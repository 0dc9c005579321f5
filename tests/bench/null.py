"""Measure what a post costs: rdmapost, pyverbs and plain C on a device that does nothing.

Run it as ``python tests/bench/null.py``.  The device (null.c) and the C loop
(loop.c) are compiled with cc into a temporary directory.  rdmapost and pyverbs
run in the interpreter that has pyverbs (Debian: python3-pyverbs), if it is the
same version as this one; without pyverbs its columns stay empty.  Every figure
is the lowest CPU time of several runs in several processes, pinned to one CPU:
disturbances only ever make a run slower.

``--against REF`` compares this checkout with a commit: both are built the same
way, outside the checkout, and run alternately.  Rows that differ by more than
5% are measured again before they are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import _cffi_backend

import rdmapost

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LENGTHS = (1, 2, 8, 32, 256)
GROWTH = tuple(10**power for power in range(2, 7))

# Label, case, how rdmapost runs it, and the target ratio to pyverbs, if any.
# Both either make an SGE for each work request, or reuse one ("kept").
GOALS: tuple[tuple[str, str, str, float | None], ...] = (
    ("RDMA write, checked", "build/RDMA_WRITE/1/1", "/checked", 0.20),
    ("RDMA write, unchecked", "build/RDMA_WRITE/1/1", "/unchecked", None),
    ("RDMA write, checked, SGE kept", "build/RDMA_WRITE/1/kept", "/checked", 0.40),
    ("RDMA write, unchecked, SGE kept", "build/RDMA_WRITE/1/kept", "/unchecked", None),
    ("list of 32, checked", "build/RDMA_WRITE/32/1", "/checked", 0.13),
    ("list of 32, unchecked", "build/RDMA_WRITE/32/1", "/unchecked", None),
    ("list of 32, checked, SGE kept", "build/RDMA_WRITE/32/kept", "/checked", 0.20),
    ("list of 32, unchecked, SGE kept", "build/RDMA_WRITE/32/kept", "/unchecked", None),
    ("prepared", "prepared/1", "", 0.8),
    ("prepared list of 32", "prepared/32", "", 1.5),
    ("receive, checked", "recv/1", "/checked", None),
    ("receive, unchecked", "recv/1", "/unchecked", None),
    ("list of 32 receives, checked", "recv/32", "/checked", None),
    ("list of 32 receives, unchecked", "recv/32", "/unchecked", None),
    ("poll 16", "poll/16", "", 0.12),
    ("write, from made to polled", "life/RDMA_WRITE/1", "", None),
    ("list of 32 writes, likewise", "life/RDMA_WRITE/32", "", None),
    ("receive, likewise", "life/RECV/1", "", None),
    ("list of 32 receives, likewise", "life/RECV/32", "", None),
)

COLUMNS: tuple[tuple[int, float, float, str], ...] = (
    (1, 0.6, 0.6, "build/RDMA_WRITE/1/1/checked"),
    (32, 1.0, 12, "build/RDMA_WRITE/32/1"),
    (256, 0.5, 6, "build/RDMA_WRITE/256/1"),
    (4096, 0.35, 4, "build/RDMA_WRITE/256/1"),
)
"""Rows, the target ratio, the target in ns, and the denominator of the ratio: rdmapost's own post
of objects, or C's loop that builds its list."""
ROWS = ((16, 7), (256, 5))
"""Completions polled as rows, and the target in ns."""

REFERENCE = "RDMA_WRITE"
COMPARED = (
    ("INLINE write", "RDMA_WRITE (INLINE)"),
    ("BIND_MW", "BIND_MW (key kept)"),
    ("TSO, on UD", "TSO (UD)"),
)
FORMS = (
    ("built and posted, checked", "build/{}/1/1/checked"),
    ("built and posted, unchecked", "build/{}/1/1/unchecked"),
    ("kept, checked", "kept/{}/checked"),
    ("kept, unchecked", "kept/{}/unchecked"),
    ("prepared", "prepared/{}"),
)
RATIO_GOAL = 1.3
"""The target ratio of each of these cases to a plain write of the same form."""

SAME = 0.05
"""The relative difference up to which two commits count as equal in a row."""
AGAIN = 4
"""How many times to repeat rows that differ by more."""

Figures = Mapping[str, float]


def compile_c(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Compile the null device and the C loop; return their paths."""
    cc = os.environ.get("CC", "cc")
    null, loop = directory / "null.so", directory / "loop"
    run = [cc, "-O2", "-std=gnu11", "-Wall", "-Wextra"]
    subprocess.run([*run, "-shared", "-fPIC", "-o", null, HERE / "null.c"], check=True)
    subprocess.run([*run, "-o", loop, HERE / "loop.c", null, f"-Wl,-rpath,{directory}"], check=True)
    return null, loop


def find_pyverbs(null: pathlib.Path) -> str | None:
    """Return the interpreter that has pyverbs: this one, the system's, or None."""
    for python in (sys.executable, "/usr/bin/python3"):
        found = subprocess.run(
            [python, "-c", "import pyverbs.wr"],
            env={**os.environ, "LD_PRELOAD": str(null)},
            capture_output=True,
            check=False,
        )
        if found.returncode == 0:
            return python
    return None


def interpreter_for_both(pyverbs: str | None) -> str:
    """Return the interpreter for rdmapost: the one with pyverbs if rdmapost loads in it."""
    if pyverbs is None:
        return sys.executable
    found = subprocess.run(
        [pyverbs, "-c", "import rdmapost"], env=environment(), capture_output=True, check=False
    )
    return pyverbs if found.returncode == 0 else sys.executable


def environment(tree: pathlib.Path | None = None) -> dict[str, str]:
    """Return an environment in which another interpreter finds rdmapost and cffi's module."""
    places = [
        tree or pathlib.Path(rdmapost.__file__).parent.parent,
        pathlib.Path(_cffi_backend.__file__).parent,
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}


def run_python(
    python: str,
    worker: str,
    runs: int,
    *more: str,
    env: Mapping[str, str],
    tree: pathlib.Path | None = None,
) -> dict[str, float]:
    """Run a worker with the rdmapost in a tree, and return its figures."""
    done = subprocess.run(
        [python, str(HERE / worker), str(runs), *more],
        env={**environment(tree), **env},
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def run_c(loop: pathlib.Path, runs: int) -> dict[str, float]:
    """Run the C loop and return its figures."""
    cpu = max(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(cpu), loop, str(runs)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {name: float(ns) for name, ns in lines}


def keep_least(least: dict[str, float], figures: Figures) -> None:
    """Keep the lower figure of each case."""
    for name, ns in figures.items():
        least[name] = min(ns, least.get(name, ns))


def number(ns: float | None, width: int = 9) -> str:
    """Return a figure as text, right-aligned; "-" if there is none."""
    return f"{'-' if ns is None else format(ns, '.1f'):>{width}}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Return the ratio of two figures, as text."""
    return f"{'-' if ours is None or theirs is None else format(ours / theirs, '.2f'):>7}"


def verdict(is_met: bool) -> str:
    """Return the end of a line that has a target."""
    return "  met" if is_met else "  missed"


def print_goals(ours: Figures, pyverbs: Figures, c: Figures) -> None:
    """Print the figures that have a target, and those compared with them."""
    print(f"{'ns per work request':<32} rdmapost pyverbs       C  ratio  goal")
    for label, case, how, goal in GOALS:
        mine, theirs = ours.get(case + how), pyverbs.get(case)
        line = f"{label:<32}{number(mine)}{number(theirs, 8)}{number(c.get(case), 8)}"
        line += ratio(mine, theirs)
        if goal is not None:
            line += f"  {goal:.2f}"
            if mine is not None and theirs is not None:
                line += verdict(mine <= goal * theirs)
        print(line.rstrip())


def print_columns(ours: Figures, c: Figures) -> None:
    """Print the cost of a row by columns, and of a completion as a row, with their targets."""
    print("\nby columns, ns a row           2 columns  4 columns  ratio of 2  goal, ns and ratio")
    for count, wanted, ns, beside in COLUMNS:
        two, four = (ours.get(f"columns/{name}/{count}") for name in ("two", "four"))
        other = ours.get(beside, c.get(beside))
        line = f"{count:<30}{number(two, 10)}{number(four, 11)}{ratio(two, other):>12}"
        line += f"  {'' if count == 1 else ns} {wanted}"
        if two is not None and other is not None:
            line += verdict(two <= wanted * other and (count == 1 or two <= ns))
        print(line)
    for count, ns in ROWS:
        taken = ours.get(f"poll_into/{count}")
        line = f"{f'poll_into {count}':<30}{number(taken, 10)}{'':>23}  {ns}"
        print(line if taken is None else line + verdict(taken <= ns))


def print_wide(
    title: str, rows: list[tuple[str, str]], ours: Figures, pyverbs: Figures, c: Figures
) -> None:
    """Print a table of cases, checked and unchecked."""
    print(f"\n{title:<25}  checked  ratio unchecked  ratio  pyverbs        C")
    for label, case in rows:
        checked, unchecked = ours.get(case + "/checked"), ours.get(case + "/unchecked")
        theirs = pyverbs.get(case)
        print(
            f"{label:<25}{number(checked)}{ratio(checked, theirs)} {number(unchecked)}"
            f"{ratio(unchecked, theirs)}{number(theirs)}{number(c.get(case))}"
        )


def print_compared(ours: Figures) -> None:
    """Print the cost of work requests that need more than a record, compared with a plain write."""
    print(f"\n{'beside a plain write of its form':<45}      ns  ratio  goal")
    for form, name in FORMS:
        reference = ours.get(name.format(REFERENCE))
        print(f"{'RDMA write, ' + form:<43}{number(reference)}")
        for label, opcode in COMPARED:
            mine = ours.get(name.format(opcode))
            if mine is not None and reference is not None:
                line = f"  {label:<41}{number(mine)}{ratio(mine, reference)}  {RATIO_GOAL:.2f}"
                print(line + verdict(mine <= RATIO_GOAL * reference))


PIECES: tuple[tuple[str, str, int | None], ...] = (
    ("pieces of an RDMA write, checked", "", None),
    ("an SGE: mr[0:8]", "piece/slice", None),
    ("the work request, with an SGE kept", "piece/wr", None),
    ("posting one that is kept", "piece/post/1", None),
    ("posting a list of 32, each", "piece/post/32", None),
    ("changing a prepared work request", "", None),
    ("a number: one.remote_addr = addr", "patch/remote_addr", None),
    ("its wr_id", "patch/wr_id", None),
    ("its SGE", "patch/sg_list", 60),
    ("its SGE twice, to another region and back", "patch/sg_list/regions", None),
    ("beside: a number of a struct, by cffi", "patch/struct", None),
)
"""Label, case, and the target in ns, if any."""


def print_pieces(ours: Figures) -> None:
    """Print a breakdown of the cost of a post, and the cost of changing a prepared one."""
    for label, name, goal in PIECES:
        taken = ours.get(name)
        line = f"{label:<42}{number(taken)}" if name else f"\n{label}"
        if goal:
            line += f"  goal {goal}"
            if taken is not None:
                line += verdict(taken <= goal)
        print(line)


def print_growth(ours: Figures) -> None:
    """Print the cost of one more post when many are outstanding, or were posted before."""
    print("\ncost of one more, after       post, if all   post, if all   poll 16, each")
    print("so many posts                 outstanding    completed")
    for count in GROWTH:
        outstanding, before, poll = (
            ours.get(f"growth/{name}/{count}") for name in ("outstanding", "before", "poll")
        )
        print(f"{count:<30,}{number(outstanding, 11)}{number(before, 13)}{number(poll, 16)}")


def build(directory: pathlib.Path, ref: str | None) -> None:
    """Copy a commit, or the checkout (None), into a directory, and build it there."""
    directory.mkdir()
    if ref is None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        there = [
            name for name in listed.split(b"\0") if name and os.path.exists(ROOT / name.decode())
        ]
        tar = ["tar", "-c", "--null", "--verbatim-files-from", "-T", "-"]
        packed = subprocess.run(
            tar, input=b"\0".join(there), cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
    else:
        packed = subprocess.run(
            ["git", "archive", ref], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
    subprocess.run(["tar", "-x"], cwd=directory, input=packed.stdout, check=True)
    built = subprocess.run(
        [sys.executable, "build_ffi.py"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if built.returncode:
        raise SystemExit(f"{ref or 'the checkout'} cannot be built:\n{built.stdout}")


def low(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return each row's lower quartile: the minimum may be luck that only one commit had."""
    return {name: sorted(taken)[len(taken) // 4] for name, taken in figures.items()}


def differ(before: Figures, after: Figures) -> list[str]:
    """Return the rows present in both that differ by more than SAME."""
    return [name for name in after if name in before and abs(after[name] / before[name] - 1) > SAME]


def compare(ref: str, runs: int, rounds: int, growth: bool) -> list[tuple[str, Figures]]:
    """Measure a commit and the checkout alternately; return the figures of both."""
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        null, _ = compile_c(work)
        trees = [(work / "before", before), (work / "after", after)]
        build(trees[0][0], ref)
        build(trees[1][0], None)

        def measure(names: Sequence[str]) -> None:
            trees.reverse()
            for tree, figures in trees:
                found = run_python(
                    sys.executable,
                    "on_rdmapost.py",
                    runs,
                    *names,
                    tree=tree,
                    env={"RDMAPOST_LIBIBVERBS": str(null)},
                )
                for name, ns in found.items():
                    figures.setdefault(name, []).append(ns)

        for _ in range(rounds):
            measure([])
            if growth:
                measure(["growth"])
        for _ in range(AGAIN * rounds):
            again = differ(low(before), low(after))
            grown = [name for name in again if name.startswith("growth/")]
            if len(again) > len(grown):
                measure([name for name in again if name not in grown])
            if grown:
                measure(["growth"])
    return [(ref, low(before)), ("now", low(after))]


def print_comparison(ref: str, before: Figures, after: Figures) -> None:
    """Print every row of both, and then again the rows that differ."""
    print(f"{'ns for each':<44}{ref[:12]:>12}       now  ratio")
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        mark = f"  {'slower' if after[name] > before[name] else 'faster'}" * (
            name in differ(before, after)
        )
        print(f"{name:<44}{number(old, 12)} {number(new)}{ratio(new, old)}{mark}")
    both = [name for name in after if name in before]
    other = differ(before, after)
    slower = [name for name in other if after[name] > before[name]]
    print(
        f"\n{len(both) - len(other)} of {len(both)} rows within {SAME:.0%}, "
        f"{len(slower)} slower, {len(other) - len(slower)} faster"
    )
    for name in slower:
        print(f"  slower: {name}: {after[name] / before[name]:.2f}")


def main() -> None:
    """Print the tables, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--runs", type=int, default=5, help="runs in a process (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default 3)")
    parser.add_argument("--no-growth", action="store_true", help="leave out the last table")
    parser.add_argument(
        "--against", metavar="REF", help="compare only with rdmapost at this commit"
    )
    options = parser.parse_args()
    if options.against is not None:
        growth = not options.no_growth
        both = compare(options.against, options.runs, options.rounds, growth)
        if options.json:
            json.dump(dict(both), sys.stdout, indent=2)
            print()
        else:
            print_comparison(options.against, both[0][1], both[1][1])
        return
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    c: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        null, loop = compile_c(pathlib.Path(directory))
        pyverbs = find_pyverbs(null)
        python = interpreter_for_both(pyverbs)
        load, preload = {"RDMAPOST_LIBIBVERBS": str(null)}, {"LD_PRELOAD": str(null)}
        # Alternate, so that a busy machine does not slow down only one of them.
        for _ in range(options.rounds):
            keep_least(ours, run_python(python, "on_rdmapost.py", options.runs, env=load))
            if pyverbs is not None:
                figures = run_python(pyverbs, "on_pyverbs.py", options.runs, env=preload)
                keep_least(theirs, figures)
            keep_least(c, run_c(loop, options.runs))
        if not options.no_growth:
            keep_least(ours, run_python(python, "on_rdmapost.py", 3, "growth", env=load))
    if options.json:
        document = {"python": python, "rdmapost": ours, "pyverbs": theirs, "c": c}
        json.dump({**document, "pyverbs_python": pyverbs}, sys.stdout, indent=2)
        print()
        return
    if pyverbs is None:
        print("pyverbs is not installed (Debian: apt-get install python3-pyverbs)")
    else:
        print(f"rdmapost in {python}, pyverbs in {pyverbs}")
    print("best of several runs, CPU time; 'ratio' is to pyverbs\n")
    print_goals(ours, theirs, c)
    print_columns(ours, c)
    rows = [
        (f"list of {length}, {sges} SGE{'s' * (sges > 1)}", f"build/RDMA_WRITE/{length}/{sges}")
        for sges in (1, 4)
        for length in LENGTHS
    ]
    print_wide("RDMA writes, each", rows, ours, theirs, c)
    cases = [name.removesuffix("/checked") for name in ours if name.endswith("/1/1/checked")]
    print_wide(
        "one of each opcode", [(name.split("/")[1], name) for name in cases], ours, theirs, c
    )
    print_compared(ours)
    print_pieces(ours)
    if not options.no_growth:
        print_growth(ours)


if __name__ == "__main__":
    main()
