"""``rdmapost doctor``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rdmapost._arguments import counted

from .failure import lacks_device
from .options import Target, device_options, timeout_option
from .output import Output, coloured, wrapped

if TYPE_CHECKING:
    from rdmapost import Context
    from rdmapost.diagnose import Finding
    from rdmapost.loopback import Loopback


_LABELS = {"problem": "PROBLEM", "warning": "warning", "info": "info", "ok": "ok"}
_COLOURS = {"PROBLEM": "red", "warning": "yellow"}
_MESSAGE = b"hello, doctor"


@click.command()
@timeout_option
@device_options
@click.pass_context
def doctor(ctx: click.Context, out: Output, target: Target, timeout: float) -> None:
    """Find out what keeps RDMA from working on this machine.

    It checks the machine: library, modules, permissions, ports, GIDs and limits.
    Then it sends a message between two queue pairs on the device, and diagnoses
    both.  Each finding comes with its evidence and a remedy; checks that pass
    are only named, unless -v is given.

    Exit codes: 0 no problem, 1 a problem, 2 usage, 3 no such device, or it
    cannot be opened.
    """
    from rdmapost import RdmaError
    from rdmapost.diagnose import diagnose_machine, worst_first
    from rdmapost.resources.device import device_of_environment

    from .target import open_target

    # The device that the findings are about, even if it cannot be opened.
    out.doc.update(device=target.device or device_of_environment(), kind=None)
    found = diagnose_machine(target.device, port_num=target.port, gid_index=target.gid_index)
    lacking: Exception | None = None
    try:
        with open_target(out, target) as (context, port_num):
            if not _about(found, context.name):
                # open_target() chose soft0, so the findings above are not about it.
                its = diagnose_machine(context.name, port_num=port_num, gid_index=target.gid_index)
                found += _about(its, context.name)
            found += _try(context, port_num, target.gid_index, timeout)
    except (RdmaError, ValueError, click.UsageError) as error:
        if lacks_device(error):
            lacking = error
        # Usually a consequence of a finding.
        elif not any(finding.severity == "problem" for finding in found):
            found.append(_failed(str(out.doc["device"]), str(error)))
    found = worst_first(dict.fromkeys(found))
    counts = {
        severity: sum(finding.severity == severity for finding in found) for severity in _LABELS
    }
    out.doc["findings"] = [dataclasses.asdict(finding) for finding in found]
    out.doc["counts"] = counts
    text = _text(found, out.verbose)
    if lacking is not None:
        if not out.json:
            click.echo(text)
        raise lacking
    if counts["problem"]:
        names = dict.fromkeys(finding.name for finding in found if finding.severity == "problem")
        out.doc["error"] = f"found {', '.join(names)}"
    out.finish(f"{text}\n\n{_summary(out, counts)}")
    ctx.exit(1 if counts["problem"] else 0)


def _about(findings: list[Finding], device: str) -> list[Finding]:
    """Return the findings about a device and its ports."""
    return [finding for finding in findings if finding.about.split(" ")[0] == device]


def _try(context: Context, port_num: int, gid_index: int | None, timeout: float) -> list[Finding]:
    """Send a message between two queue pairs on the device, and diagnose both."""
    from rdmapost import RecvWR, Send
    from rdmapost.loopback import Loopback

    with Loopback(context, port_num=port_num, gid_index=gid_index, timeout=timeout) as pair:
        here, there = pair.local, pair.remote
        size = len(_MESSAGE)
        here.mr.buffer[:size] = _MESSAGE
        # A receive for the message, and one that stays posted: diagnose() would report a queue
        # pair that has no receives.
        pair.receive(size, 2)
        here.qp.post_recv(RecvWR(here.mr[size : 2 * size]))
        here.qp.post_send(Send(here.mr[:size]))
        outcome = _outcome(context.name, pair)
        return [outcome, *here.qp.diagnose(there.qp), *there.qp.diagnose(here.qp)]


def _outcome(device: str, pair: Loopback) -> Finding:
    from rdmapost import WaitTimeout
    from rdmapost.diagnose import Finding

    size = len(_MESSAGE)
    try:
        wcs = pair.sent()
        if not wcs[0].status:
            wcs += pair.arrived()
    except WaitTimeout as error:
        return _failed(device, f"a message of {size} bytes to the same device: {error}")
    failed = next((wc.status.name for wc in wcs if wc.status), None)
    if failed is not None:
        evidence = f"a message of {size} bytes to the same device: {failed}"
        remedy = f"rdmapost explain {failed}"
        return Finding("message", "problem", evidence, remedy, device)
    if pair.received(size) != _MESSAGE:
        return _failed(device, f"the data that arrived is not the {size} bytes that were sent")
    return Finding("message", "ok", f"a message of {size} bytes arrived", about=device)


def _failed(device: str, evidence: str) -> Finding:
    from rdmapost.diagnose import Finding

    remedy = f"rdmapost send -d {device} -v; see 'dmesg'"
    return Finding("message", "problem", evidence, remedy, device)


def _text(found: Sequence[Finding], verbose: bool) -> str:
    lines = []
    good: dict[str, list[str]] = {}
    for finding in found:
        if finding.severity == "ok" and not verbose:
            good.setdefault(finding.about, []).append(finding.name)
            continue
        about = f" ({finding.about})" if finding.about else ""
        label = _LABELS[finding.severity]
        name = wrapped(f"{finding.name}{about}", f"{label:9}").removeprefix(label)
        lines.append((coloured(label, _COLOURS[label]) if label in _COLOURS else label) + name)
        lines.append(wrapped(finding.evidence, " " * 9))
        if finding.remedy:
            lines.append(wrapped(finding.remedy, " " * 9 + "-> "))
    for about, names in good.items():
        lines.append(wrapped(f"{about}: {', '.join(names)}", f"{_LABELS['ok']:9}"))
    return "\n".join(lines)


def _summary(out: Output, counts: dict[str, int]) -> str:
    parts = [
        counted(counts["problem"], "problem"),
        counted(counts["warning"], "warning"),
        f"{counts['info']} info",
        f"{counts['ok']} ok",
    ]
    return wrapped(f"{out.doc['device']} ({out.doc['kind']}): {', '.join(parts)}", "")
