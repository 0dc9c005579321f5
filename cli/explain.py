"""``rdmapost explain``."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import click

from .output import Output, columns, width, wrapped

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rdmapost.explain import Explanation, UnknownNameError


_CAUSES = {
    "opcode": "Common failures",
    "ops_opcode": "Common failures",
    "qp_state": "How a QP gets there",
    "send_flag": "What goes wrong",
}
_SOME_QP_TYPES = {"FENCE": "RC, XRC_SEND", "IP_CSUM": "where the device has it"}
_SOME_FIELDS = {"ah": "UD", "remote_qpn": "UD", "remote_qkey": "UD", "remote_srqn": "XRC_SEND"}


def _names(ctx: click.Context, name: click.Parameter, text: str) -> list[CompletionItem]:
    """Complete a name, ignoring case: to the C name if it starts with IBV_, otherwise to Python's
    name."""
    from click.shell_completion import CompletionItem

    from rdmapost.explain import KINDS, names
    from rdmapost.explain import explain as look_up

    in_c = text.upper().startswith("IBV_")
    found: dict[str, dict[str, None]] = {}
    findings = names()["finding"]
    for known in dict.fromkeys(name for of in names().values() for name in of):
        for one in look_up(known):
            spelled = one.constant if in_c else one.name
            if one.kind != "finding" and spelled.upper().startswith(text.upper()):
                found.setdefault(spelled, {})[KINDS[one.kind]] = None
    if not found:
        found = {name: {KINDS["finding"]: None} for name in findings if name.startswith(text)}
    return [CompletionItem(name, help=", ".join(kinds)) for name, kinds in found.items()]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="[NAME|MESSAGE]...", nargs=-1, shell_complete=_names)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def explain(ctx: click.Context, name: tuple[str, ...], as_json: bool) -> None:
    """Explain a status, an errno or an opcode.

    It lists the usual causes, what to look at next, and where Soft-RoCE differs.

    NAME is a completion status or an errno, by name or number, or the name of an
    opcode, a QP type or state, a flag or an event, in any form that programs
    print (RNR_RETRY_EXC_ERR, IBV_WC_RETRY_EXC_ERR, EINVAL, -22, 13, rdma_read).
    It can also be a verb that failed, one of this library's exceptions or a
    finding (ibv_create_srq, WaitTimeout, psn-mismatch).
    MESSAGE is a line that a program printed.  If there are several names or
    messages, they are explained in turn.

    \b
      rdmapost explain EINVAL RETRY_EXC_ERR
      rdmapost explain "Failed status transport retry counter exceeded (12)"
      rdmapost explain < nccl.log

    A log on standard input is searched for statuses, errnos, events and findings
    of rdmapost doctor.  With neither arguments nor a log, all names are listed.
    """
    from rdmapost.explain import KINDS, names

    out: Output = ctx.obj
    out.json = as_json
    if name in ((), ("-",)) and (log := _log(name)) is not None:
        _explain_log(out, log)
        return
    if not name:
        out.doc["names"] = known = names()
        out.finish(
            "\n\n".join(
                f"{KINDS[kind]}:\n{wrapped(', '.join(of), '  ')}" for kind, of in known.items()
            )
        )
        return
    out.doc["name"] = " ".join(name)
    unknown: list[UnknownNameError] = []
    found = _look_up(name, unknown)
    if found:
        out.doc["explanations"] = [asdict(one) for one in found]
        if not (unknown and out.json):
            pages = _joined(_page(one, KINDS[one.kind]) for one in found)
            out.finish("\n\n".join([*_ambiguous(name, found), pages]))
    if unknown:
        out.doc["nearest"] = unknown[0].nearest
        raise click.UsageError("; ".join(map(str, unknown)), ctx)


def _log(name: tuple[str, ...]) -> Iterator[str] | None:
    """Return the lines on standard input, or None if nothing was redirected or piped there."""
    if sys.stdin is None:
        return None
    if not name:
        mode = os.fstat(0).st_mode
        # Standard input is a terminal or /dev/null.
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return None
    lines = io.TextIOWrapper(sys.stdin.buffer, errors="replace")
    first = next(lines, None)
    # An empty pipe, as in a script, is not a log.
    return None if first is None and not name else chain([first or ""], lines)


def _explain_log(out: Output, lines: Iterable[str]) -> None:
    from rdmapost.explain import KINDS, explain_lines

    mentions = explain_lines(lines)
    out.doc["mentions"] = [
        {"name": one.explanation.name, "line": one.line, "number": one.number, "count": one.count}
        for one in mentions
    ]
    if not mentions:
        raise click.ClickException("standard input names no status, errno, event or finding")
    out.doc["explanations"] = [asdict(one.explanation) for one in mentions]
    pages = []
    for one in mentions:
        times = "" if one.count == 1 else f", and {one.count - 1} more"
        where = wrapped(one.line, f"line {one.number}{times}: ")
        pages.append(f"{where}\n\n{_page(one.explanation, KINDS[one.explanation.kind])}")
    out.finish(_joined(pages))


def _look_up(words: tuple[str, ...], unknown: list[UnknownNameError]) -> list[Explanation]:
    """Explain words: as one name, as several names, or as text that a program printed.

    Args:
        words: the words.
        unknown: receives an error for each name that has no explanation.
    """
    from rdmapost.explain import UnknownNameError as UnknownName
    from rdmapost.explain import explain as look_up
    from rdmapost.explain import explain_lines
    from rdmapost.tools.explain.failure_lines import is_failure

    if len(words) > 1 and any(" " in word for word in words):
        # A word with spaces was quoted, so each word is a name or a message.
        found = [one for word in words for one in _look_up((word,), unknown)]
        return list({(one.kind, one.name): one for one in found}.values())
    text = " ".join(words)
    if "\n" in text.strip() and (mentions := explain_lines(text.splitlines())):
        return [one.explanation for one in mentions]
    try:
        return list(look_up(text))
    except UnknownName as error:
        known: list[Explanation] = []
        others: list[UnknownNameError] = []
        for word in dict.fromkeys(words):
            try:
                known += look_up(word)
            except UnknownName as one:
                others.append(one)
        names = len(words) - len(others)
        # "RTR failed" is about the failure, not about the state.
        if (names < len(others) or is_failure(text)) and (mentions := explain_lines([text])):
            return [one.explanation for one in mentions]
        if known and names >= len(others):
            unknown += others
            return known
        unknown.append(error)
        return []


def _ambiguous(words: tuple[str, ...], found: list[Explanation]) -> Iterator[str]:
    """Say of each number among the words that it has two meanings, if it does."""
    from rdmapost.explain import KINDS, UnknownNameError
    from rdmapost.explain import explain as look_up

    for word in dict.fromkeys(words):
        # Only numbers begin with a digit; a negative one is always an errno.
        if not word.strip()[:1].isdigit():
            continue
        try:
            meant = look_up(word)
        except UnknownNameError:
            continue
        if len(meant) > 1 and all(one in found for one in meant):
            each = " and ".join(f"the {KINDS[one.kind]} {one.name}" for one in meant)
            yield wrapped(f"{word.strip()} is both {each}.", "")


def _joined(pages: Iterable[str]) -> str:
    return f"\n\n{'-' * width()}\n\n".join(pages)


def _page(one: Explanation, kind: str) -> str:
    from rdmapost.tools.explain.model import UNNUMBERED

    parts = [
        f"{one.name}: {kind}" if one.kind in UNNUMBERED else f"{one.name}: {kind} {one.number}"
    ]
    if one.constant != one.name:
        parts[0] += f" ({one.constant})"
    parts.append(wrapped(one.meaning, ""))
    if one.kind == "opcode":
        parts.append(_row(one))
    if one.flags or one.fields:
        parts.append(_block("Flags", [_list(one.flags, _SOME_QP_TYPES)]))
        parts.append(_block("Fields", [_list(one.fields, _SOME_FIELDS)]))
    if one.far_side:
        parts.append(_block("The far side sees", [one.far_side]))
    if one.causes:
        title = _CAUSES.get(one.kind, "Usual causes, in order")
        parts.append(_block(title, one.causes, numbered=True))
    if one.look_at:
        parts.append(_block("What to look at", one.look_at, bullet="- "))
    if one.soft_roce:
        parts.append(_block("Soft-RoCE (rxe)", [one.soft_roce]))
    if one.see:
        parts.append(_block("See", ["; ".join(one.see)]))
    return "\n\n".join(part for part in parts if part)


def _row(one: Explanation) -> str:
    """Lay out the QP types that support the opcode."""
    from rdmapost.explain import COLUMNS

    if not one.qp_types:
        return "In no row of ibv_post_send's table."
    heads = [column.name for column in COLUMNS]
    cells = ["X" if head in one.qp_types else "-" for head in heads]
    return columns([["OPCODE", *heads], [one.name, *cells]])


def _list(items: Iterable[str], where: dict[str, str]) -> str:
    return ", ".join(f"{item} ({where[item]})" if item in where else item for item in items)


def _block(title: str, texts: Iterable[str], *, numbered: bool = False, bullet: str = "") -> str:
    lines = [title]
    for number, text in enumerate(texts, 1):
        mark = f"{number}. " if numbered else bullet
        lines.append(wrapped(text or "none", f"  {mark}"))
    return "\n".join(lines)
