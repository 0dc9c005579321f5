"""Random programs on soft0 from hostile callers: ``python tests/fuzz --ops 1000000``.

A worker process runs program after program; when a program fails, or the
worker crashes or hangs, a new worker replaces it.  Under AddressSanitizer:
``.ci/sanitize --run tests/fuzz --ops 1000000``.
"""

from __future__ import annotations

import argparse
import os
import sys

from driver import hunt, replay, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--ops", type=int, default=100_000, help="calls of the public API in all")
    parser.add_argument("--seconds", type=float, help="stop after that long, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4, choices=range(1, 5), help="at most")
    parser.add_argument("--keep-going", action="store_true", help="go on after a finding")
    parser.add_argument("--first", type=int, default=0, help="the first program")
    parser.add_argument("--program", type=int, help="replay this one, and show its calls")
    parser.add_argument("--keep", help="of that program only these operations: 1,5,7")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one program")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    code = hunt(options) if options.program is None else replay(options)
    sys.stdout.flush()
    # Leaks of this process do not matter: it only starts others.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
