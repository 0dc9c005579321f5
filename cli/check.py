"""``rdmapost check``."""

from __future__ import annotations

import contextlib
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .options import Target, device_options, timeout_option
from .output import Output, coloured, columns, width
from .payload import Progress

if TYPE_CHECKING:
    from rdmapost.check import Result


@click.command()
@timeout_option
@device_options
@click.pass_context
def check(ctx: click.Context, out: Output, target: Target, timeout: float) -> None:
    """Post every opcode on every QP type, and verify the result.

    Each opcode is posted from one queue pair on the device to another, and
    verified by the bytes that arrive, the values, or the access that a key then
    grants.  The timeout applies to each check.
    """
    from rdmapost.check import ROWS, run_checks

    from .target import open_target

    results: list[Result] = []
    total = sum(len(row.qp_types) for row in ROWS)
    # Where nothing arrives, every check takes the whole timeout. With -v, each prints a note.
    bar = contextlib.nullcontext() if out.verbose else Progress(total)
    with open_target(out, target) as (context, port_num), bar as progress:
        for result in run_checks(
            context, port_num=port_num, gid_index=target.gid_index, timeout=timeout
        ):
            out.note(f"{result.opcode} on {result.qp_type}: {result.status}: {result.detail}")
            results.append(result)
            if progress is not None:
                progress.add(1)
    counts = {
        name: sum(result.status == status for result in results)
        for name, status in (("passed", "pass"), ("failed", "fail"), ("unsupported", "unsupported"))
    }
    out.doc["results"] = [asdict(result) for result in results]
    out.doc.update(counts)
    if counts["failed"]:
        out.doc["error"] = f"{counts['failed']} of {len(results)} checks failed"
    totals = ", ".join(f"{count} {name}" for name, count in counts.items())
    out.finish(f"{_table(results)}\n\n{out.doc['device']} ({out.doc['kind']}): {totals}")
    ctx.exit(1 if counts["failed"] else 0)


def _table(results: list[Result]) -> str:
    """Lay out results by opcode and QP type, then the reasons for those that did not pass."""
    whys: dict[str, int] = {}
    cells: dict[tuple[str, str], str] = {}
    for result in results:
        cell = "pass"
        if result.status != cell:
            # Each reason is listed only once.
            fails = result.status == "fail"
            why = f"{'failed' if fails else 'unsupported'}: {result.detail}"
            number = whys.setdefault(why, len(whys) + 1)
            cell = f"{'FAIL ' if fails else ''}[{number}]"
        cells[result.opcode, result.qp_type] = cell
    qp_types = list(dict.fromkeys(result.qp_type for result in results))
    rows = [["OPCODE", *qp_types]]
    for opcode in dict.fromkeys(result.opcode for result in results):
        rows.append([opcode, *(cells.get((opcode, qp_type), "") for qp_type in qp_types)])
    notes = [
        textwrap.fill(f"[{number}] {why}", width(), subsequent_indent="    ")
        for why, number in whys.items()
    ]
    table = columns(rows).replace("FAIL ", coloured("FAIL", "red") + " ")
    return "\n".join([table, *([""] if notes else []), *notes])
