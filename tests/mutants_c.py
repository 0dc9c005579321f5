"""Mutants of the C files, for mutate.py: the possible changes to a file, and modules with them.

A C file is changed token by token: another comparison or operator, an operand without effect, a
check that never applies, a number off by one. A change that does not compile is not a mutant, and
one that compiles to an identical object is equivalent. Only the changed file and the files that
include it are compiled; the other objects are built once.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
C = ROOT / "rdmapost" / "_c"


def name_of(path: str) -> str:
    """Return a C file's path below ``rdmapost/_c``, as it is included."""
    return os.path.relpath(ROOT / path, C)


# ---- tokens -----------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<comment>/\*.*?\*/|//[^\n]*)
      | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.)*)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>(?:0[xX][0-9a-fA-F]+|[0-9]+))[uUlL]*
      | (?P<name>[A-Za-z_]\w*)
      | (?P<op><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[^\s\\])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_DEFINE = re.compile(r"[ \t]*#[ \t]*define[ \t]+(\w+)(?:\([^)]*\))?")


@dataclass(frozen=True)
class Token:
    """A token: its type, text, position, and enclosing function or object."""

    type: str
    text: str
    start: int
    end: int
    where: str


def tokens_of(source: str) -> list[Token]:
    """Return a C file's tokens; of its directives, only macro bodies."""
    found: list[Token] = []
    depth, head, where = 0, len(found), ""
    for token in _tokens(source, 0, len(source)):
        type, text = token.type, token.text
        if type == "directive":
            define = _DEFINE.match(text)
            if define:
                at = token.start + define.end()
                found.append(Token("op", ";", at, at, define[1]))
                found += [
                    Token(part.type, part.text, part.start, part.end, define[1])
                    for part in _tokens(source, at, token.end)
                ]
                found.append(Token("op", ";", token.end, token.end, define[1]))
                if not depth:
                    head = len(found)
            continue
        if text == "{":
            if not depth:
                where = _declared(found[head:])
            depth += 1
        found.append(Token(type, text, token.start, token.end, where))
        depth -= text == "}"
        if not depth and text in (";", "}"):
            head, where = len(found), ""
    return found


def _tokens(source: str, start: int, end: int) -> Iterator[Token]:
    for match in _TOKEN.finditer(source, start, end):
        type = match.lastgroup or ""
        if type != "comment":
            # Keep the suffix when a number changes.
            yield Token(type, match[type], match.start(type), match.end(type), "")


def _declared(head: list[Token]) -> str:
    """Return the name that a declaration declares, given what precedes its body."""
    names = [token.text for token in head if token.type == "name"]
    for before, token in itertools.pairwise(head):
        if token.text == "(" and before.type == "name" and before.text != "__attribute__":
            # FUNCTION(name) and the like.
            after = names[names.index(before.text) + 1 :]
            return after[0] if before.text.isupper() and after else before.text
    return names[-1] if names else ""


# ---- mutants ----------------------------------------------------------------------

_OPERATORS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "%": ("+",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "<<": (">>",),
    ">>": ("<<",),
    "++": ("--",),
    "--": ("++",),
    "+=": ("-=",),
    "-=": ("+=",),
    "&=": ("|=",),
    "|=": ("&=",),
    "<<=": (">>=",),
    ">>=": ("<<=",),
}
_NEUTRAL = {"&&": "1", "||": "0"}
_MARKS = {"==", "!=", "<", "<=", ">", ">=", "&&", "||", "!"}
"""Operators with mutants of their own: a condition with one need not be inverted as a whole."""
_ENDS = {";", ",", "?", ":", "{", "}", "&&", "||", "return", "=", "+=", "-=", "|=", "&=", "case"}
_OPEN, _CLOSE = {"(": ")", "[": "]", "{": "}"}, {")": "(", "]": "[", "}": "{"}
_UNTOUCHED = {"static_assert", "_Static_assert", "__attribute__"}
_REFUSING = {"rp_refuse", "refuse"}
"""Functions that take a number for a rule's text; 0 if the text has none."""
_LIMIT = re.compile(r"U?INT\d+_MAX|SIZE_MAX|PY_SSIZE_T_MAX")


@dataclass(frozen=True)
class Edit:
    """One change: the replacement, and its description."""

    start: int
    end: int
    text: str
    said: str
    where: str


class File:
    """A C file, and the possible changes to it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokens_of(source)

    def edits(self) -> Iterator[Edit]:
        """Yield every change."""
        dropped: set[tuple[int, int]] = set()
        skip = -1
        for at, token in enumerate(self.tokens):
            if token.text in _UNTOUCHED and self._text(at + 1) == "(":
                skip = max(skip, self._closing(at + 1))
            if at <= skip:
                continue
            if token.type == "number":
                yield from self._number(at)
            elif token.type == "name":
                yield from self._word(at)
            elif token.type == "op":
                yield from self._operator(at, dropped)

    def _text(self, at: int) -> str:
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def _is_operand(self, at: int) -> bool:
        """Whether an operator after this one is binary, rather than unary."""
        token = self.tokens[at]
        return token.text in (")", "]") or (
            token.type in ("number", "name", "string") and token.text not in ("return", "case")
        )

    def _is_binary(self, at: int) -> bool:
        # A pointer declaration has no space after the star, and a cast none before its operand.
        spaced = self.source[self.tokens[at].end : self.tokens[at].end + 1].isspace()
        return self._is_operand(at - 1) and (spaced or self._text(at) not in ("*", "&"))

    def _closing(self, at: int) -> int:
        """Return the index of the closing bracket for the one opened here."""
        depth = 0
        for other in range(at, len(self.tokens)):
            depth += (self._text(other) in _OPEN) - (self._text(other) in _CLOSE)
            if not depth:
                return other
        return len(self.tokens) - 1

    def _reach(self, at: int, step: int) -> int:
        """Return the last token of the same operand in a direction."""
        openers, closers = (_OPEN, _CLOSE) if step > 0 else (_CLOSE, _OPEN)
        depth = int(self._text(at) in openers)
        while 0 <= at + step < len(self.tokens):
            text = self._text(at + step)
            if not depth and (text in _ENDS or text in closers):
                break
            depth += (text in openers) - (text in closers)
            at += step
        return at

    def _span(self, first: int, last: int) -> tuple[int, int]:
        return self.tokens[first].start, self.tokens[last].end

    def _instead(self, at: int, first: int, last: int, text: str, wide: bool = False) -> Edit:
        """Return a change to some tokens, described with the operands around them."""
        start, end = self._span(first, last)
        left, right = self._reach(first, -1), self._reach(last, 1)
        if wide:
            left, right = self._reach(at - 1, -1), self._reach(at + 1, 1)
        begin, stop = self._span(left, right)
        before, after = self.source[begin:stop], self.source[begin:start] + text
        after += self.source[end:stop]
        said = f"{_short(before)} -> {_short(after)}"
        return Edit(start, end, text, said, self.tokens[at].where)

    def _number(self, at: int) -> Iterator[Edit]:
        text = self._text(at)
        value = int(text, 0) if text[:2] in ("0x", "0X") else int(text)
        sign = self._text(at - 1) == "-" and not self._is_operand(at - 2)
        if sign:
            # -1 to 0: a failure that reports success.
            yield self._instead(at, at - 1, at, "0")
        elif not self._is_sentinel(at) and not self._is_untold(at):
            other = 0 if value == 1 else value + 1
            yield self._instead(at, at, at, hex(other) if text[:2] in ("0x", "0X") else str(other))

    def _is_sentinel(self, at: int) -> bool:
        """Whether it belongs to an array's terminating entry: { 0, NULL }."""
        first, last = at, at
        while self._text(first - 1) in ("0", "NULL", ","):
            first -= 1
        while self._text(last + 1) in ("0", "NULL", ","):
            last += 1
        return self._text(first - 1) == "{" and self._text(last + 1) == "}"

    def _is_untold(self, at: int) -> bool:
        """Whether it is the 0 of refuse(..., 0), which has no meaning."""
        if [self._text(at + step) for step in (-1, 0, 1)] != [",", "0", ")"]:
            return False
        depth = 0
        for other in range(at, -1, -1):
            depth += (self._text(other) in _OPEN) - (self._text(other) in _CLOSE)
            if depth:
                return self._text(other - 1) in _REFUSING
        return False

    def _word(self, at: int) -> Iterator[Edit]:
        token, before, after = self.tokens[at], self._text(at - 1), self._text(at + 1)
        if token.text in ("if", "while") and after == "(":
            last = self._closing(at + 1)
            start, end = self._span(at + 1, last)
            head = self.source[start:end]
            said = f"{token.text} {_short(head)}"
            if head != "(0)":
                yield Edit(start, end, f"({head} && 0)", f"{said} -> never", token.where)
            marks = {self._text(other) for other in range(at + 1, last)}
            if not marks & _MARKS:
                yield Edit(start, end, f"(!{head})", f"{said} -> {token.text} not", token.where)
        elif token.text in ("break", "continue") and after == ";":
            yield Edit(token.start, token.end, "", f"{token.text} -> nothing", token.where)
        elif _LIMIT.fullmatch(token.text) and before not in (".", "->"):
            yield self._instead(at, at, at, f"({token.text} - 1)")

    def _operator(self, at: int, dropped: set[tuple[int, int]]) -> Iterator[Edit]:
        token, text = self.tokens[at], self._text(at)
        if text in ("!", "~"):
            yield self._instead(at, at, at, "")
        elif text == "?":
            first = at
            while self._reach(first, -1) != first or self._text(first - 1) in ("&&", "||"):
                first = min(first - 1, self._reach(first, -1))
            marks = {self._text(other) for other in range(first, at)}
            if not marks & _MARKS:
                start, end = self._span(first, at - 1)
                head = self.source[start:end]
                said = f"{_short(head)} ? -> !({_short(head)}) ?"
                yield Edit(start, end, f"!({head})", said, token.where)
        elif text in _OPERATORS and (text in ("++", "--") or self._is_binary(at)):
            for other in _OPERATORS[text]:
                yield self._instead(at, at, at, other, wide=text in _NEUTRAL)
        if text in _NEUTRAL:
            for first, last in (
                (self._reach(at - 1, -1), at - 1),
                (at + 1, self._reach(at + 1, 1)),
            ):
                if (first, last) not in dropped:
                    dropped.add((first, last))
                    start, end = self._span(first, last)
                    said = f"{_short(self.source[start:end])} -> {_NEUTRAL[text]}"
                    yield Edit(start, end, _NEUTRAL[text], said, token.where)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 90 else text[:87] + "..."


# ---- all mutants in one module ------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """The position of a function in a C file: its declaration, name and body.

    Attributes:
        start: the start of its declaration.
        name: its name, which is at ``name_at``.
        body: the opening brace of its body.
        end: the position after the closing brace.
        arguments: the names of its parameters.
    """

    start: int
    name: str
    name_at: int
    body: int
    end: int
    arguments: tuple[str, ...]


def functions_of(source: str) -> list[Function]:
    """Return a C file's functions, except those declared by a macro."""
    found: list[Function] = []
    depth, body = 0, 0
    head: list[Token] = []
    declared: tuple[Token, tuple[str, ...]] | None = None
    for token in _tokens(source, 0, len(source)):
        if token.type == "directive":
            continue
        if token.text == "{":
            if not depth:
                declared, body = _parameters(head), token.start
            depth += 1
        elif token.text == "}":
            depth -= 1
            if not depth and declared:
                name, arguments = declared
                start = head[0].start
                found.append(Function(start, name.text, name.start, body, token.end, arguments))
        if not depth and token.text in (";", "}"):
            head = []
        elif not depth:
            head.append(token)
    return found


def _parameters(head: list[Token]) -> tuple[Token, tuple[str, ...]] | None:
    """Return the name and the parameters of a function, given what precedes its body."""
    texts = [token.text for token in head]
    if "(" not in texts or texts[-1] != ")" or "__attribute__" in texts:
        return None
    at = texts.index("(")
    inner = head[at + 1 : -1]
    name = head[at - 1]
    if any(token.text in ("(", ")", ".") for token in inner) or name.text.isupper():
        return None
    arguments: list[str] = []
    for last, param in itertools.groupby(inner, lambda token: token.text == ","):
        if not last:
            arguments.append([token.text for token in param if token.type == "name"][-1])
    return name, tuple(arguments) if arguments != ["void"] else ()


# No #include here: the file may need to define macros before it includes a header.
_SELECTOR = """\
extern char *getenv(const char *);
extern int atoi(const char *);
__attribute__((visibility("default"))) int mutant_selected;
__attribute__((visibility("default"))) char mutant_reached[{count}];
__attribute__((constructor)) static void mutant_select(void)
{{
	const char *number = getenv("{variable}");

	if (number)
		mutant_selected = atoi(number);
}}
"""
VARIABLE = "RDMAPOST_TEST_MUTANT"
"""Selects a mutant in a new process."""


class Selectable:
    """A C file that contains all mutants of its functions, each in a copy of its function.

    The copy to call is selected at run time: ``mutant_selected`` is the mutant's position in
    ``edits``, from 1.  ``mutant_reached`` records which functions have been called.

    Args:
        source: the file.
        edits: its mutants.
    """

    def __init__(self, source: str, edits: list[Edit]) -> None:
        self.source, self.edits = source, edits
        self.functions = functions_of(source)
        self.function_of: dict[int, int] = {}
        for number, edit in enumerate(edits, 1):
            for place, function in enumerate(self.functions):
                if function.body <= edit.start and edit.end <= function.end:
                    self.function_of[number] = place

    def text(self, without: set[int] = frozenset()) -> str:  # type: ignore[assignment]
        """Return the file; compiler errors in mutant 7 are reported in ``mutant-7``."""
        parts, at = [_SELECTOR.format(count=len(self.functions) + 1, variable=VARIABLE)], 0
        for place, function in enumerate(self.functions):
            head = self.source[function.start : function.body]
            parts += [self.source[at : function.start], head.rstrip(), ";\n"]
            cases = []
            for number, its in self.function_of.items():
                if its != place or number in without:
                    continue
                edit = self.edits[number - 1]
                name = f"{function.name}_mutant_{number}"
                parts += [
                    f'\n#line 1 "mutant-{number}"\n',
                    self.source[function.start : function.name_at],
                    name,
                    self.source[function.name_at + len(function.name) : edit.start],
                    edit.text,
                    self.source[edit.end : function.end],
                    "\n",
                ]
                cases.append(f"case {number}: return {name}({', '.join(function.arguments)});")
            line = self.source.count("\n", 0, function.body) + 1
            parts += [
                '\n#line 1 "dispatch"\n',
                head,
                f"{{ mutant_reached[{place}] = 1; switch (mutant_selected) {{ {' '.join(cases)} }}",
                f'\n#line {line} "file"\n',
                self.source[function.body : function.end],
                "}",
            ]
            at = function.end
        return "".join([*parts, self.source[at:]])


# ---- building ---------------------------------------------------------------------


class DoesNotCompile(Exception):
    """The change does not compile."""


class SameObject(Exception):
    """The change compiles to an identical object."""


class Build:
    """The module's objects, built once, and modules that differ in one file.

    Args:
        work: an empty directory, to build in.
    """

    def __init__(self, work: pathlib.Path) -> None:
        self.work = work
        with open(ROOT / "pyproject.toml", "rb") as file:
            (extension,) = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
        sys.path.insert(0, str(ROOT))
        import build_ffi

        sys.path.remove(str(ROOT))
        macros = [] if build_ffi.FREE_THREADED else extension.get("define-macros", [])
        self.compiler = shlex.split(os.environ.get("CC", "cc"))
        # So that an uninitialized variable is never correct by chance.
        self.options = [
            "-O1",
            "-fPIC",
            "-fwrapv",
            "-ftrivial-auto-var-init=pattern",
            "-w",
            f"-I{sysconfig.get_path('include')}",
            "-I.",
            *(f"-D{name}={value}" for name, value in macros),
            *(option for option in extension["extra-compile-args"] if not option.startswith("-W")),
        ]
        self.libraries = [f"-l{name}" for name in extension["libraries"]]
        # Named rdmapost/_verbs.abi3.so where the build uses the stable ABI.
        suffix = ".abi3.so" if macros else sysconfig.get_config_var("EXT_SUFFIX")
        self.module = f"_verbs{suffix}"

        self.sources = {str(path.relative_to(C)): path for path in C.rglob("*.[ch]")}
        self.sources["_verbs.c"] = work / "generated.c"
        with contextlib.redirect_stdout(io.StringIO()):
            build_ffi.ffibuilder.emit_c_code(str(self.sources["_verbs.c"]))
        place = self._lay(work / "_c")
        self.objects: dict[str, pathlib.Path] = {}
        self.needed_by: dict[str, list[str]] = {}
        names = [os.path.relpath(source, "rdmapost/_c") for source in extension["sources"]]
        for source in (*names, "_verbs.c"):
            self.objects[source] = self._compile(place, source)
            for part in self._cc("-MM", source, place=place).replace("\\\n", " ").split()[1:]:
                self.needed_by.setdefault(os.path.normpath(part), []).append(source)

    def _lay(self, place: pathlib.Path) -> pathlib.Path:
        """Copy the sources into a directory, optionally replacing one of them."""
        place.mkdir(parents=True)
        for name, path in self.sources.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).symlink_to(path)
        return place

    def _cc(self, *options: str, place: pathlib.Path) -> str:
        done = subprocess.run(
            [*self.compiler, *self.options, *options],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DoesNotCompile(done.stderr)
        return done.stdout

    def _compile(self, place: pathlib.Path, source: str, *options: str) -> pathlib.Path:
        made = place / f"{source}.o"
        self._cc(*options, "-c", source, "-o", str(made), place=place)
        return made

    def package(self, place: pathlib.Path) -> pathlib.Path:
        """Create a package directory without the compiled module; return the module's path."""
        package = place / "rdmapost"
        package.mkdir(parents=True)
        for entry in (ROOT / "rdmapost").iterdir():
            if entry.name not in ("__pycache__", "_c") and entry.suffix != ".so":
                (package / entry.name).symlink_to(entry)
        (package / "cli").symlink_to(ROOT / "cli")
        self._lay(package / "_c")
        return package / self.module

    def link(self, name: str, source: str | None, target: pathlib.Path) -> None:
        """Link the module with one file changed, or with none.

        Args:
            name: the C file, or a header; the files that include it are recompiled.
            source: its new contents; None leaves it unchanged.
            target: the module's path, as returned by ``package``.

        Raises:
            DoesNotCompile, SameObject: the change does not compile, or makes no difference.
        """
        objects, place = dict(self.objects), target.parent / "_c"
        if source is not None:
            (place / name).unlink()
            (place / name).write_text(source)
            try:
                made = {part: self._compile(place, part) for part in self.needed_by[name]}
            finally:
                (place / name).unlink()
                (place / name).symlink_to(self.sources[name])
            if all(path.read_bytes() == objects[part].read_bytes() for part, path in made.items()):
                raise SameObject
            objects |= made
        self._link(objects, target)

    def link_selectable(self, name: str, file: Selectable, target: pathlib.Path) -> set[int]:
        """Link the module with all mutants of a C file in it; return those that do not compile."""
        place, wrong = target.parent / "_c", set[int]()
        (place / name).unlink()
        while True:
            (place / name).write_text(file.text(wrong))
            try:
                # It is large and runs only once, so do not optimize it.
                made = self._compile(place, name, "-O0")
                break
            except DoesNotCompile as error:
                found = {int(number) for number in re.findall(r"mutant-(\d+):", str(error))} - wrong
                if not found:
                    raise
                wrong |= found
        self._link(self.objects | {name: made}, target)
        return wrong

    def _link(self, objects: dict[str, pathlib.Path], target: pathlib.Path) -> None:
        target.unlink(missing_ok=True)
        subprocess.run(
            [*self.compiler, "-shared", "-o", target, *objects.values(), *self.libraries],
            check=True,
        )
