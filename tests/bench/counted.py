"""Run statements a fixed number of times between marks, for test_instructions.py to count.

A mark is a P_Key query, for which the null device calls null_mark().

The arguments are the number of times and the names of on_rdmapost.py's cases;
RDMAPOST_LIBIBVERBS is the null device.  Prints the cases in the order in which
they ran, with the number of work requests in each.
"""

from __future__ import annotations

import gc
import json
import sys

from on_rdmapost import Bench

if __name__ == "__main__":
    times, wanted = int(sys.argv[1]), set(sys.argv[2:])
    bench = Bench()
    ran = []
    for case in bench.cases():
        if case.name not in wanted:
            continue
        wanted.remove(case.name)
        # In a function, as in real code, so that names are local.
        body = "\n".join("        " + line for line in case.statement.splitlines())
        scope = dict(case.names)
        exec(f"def run(times):\n    for _ in range(times):\n{body}", scope)
        if case.before is not None:
            case.before(2 * times)
        # Run it once first, to create what is created on first use.
        scope["run"](times)
        # Collect now, so that a collection due from earlier cases is not counted.
        gc.collect()
        bench.context.query_pkey(1, 0)
        scope["run"](times)
        bench.context.query_pkey(1, 0)
        if case.after is not None:
            case.after()
        ran.append((case.name, times * case.each))
    json.dump(ran, sys.stdout)
