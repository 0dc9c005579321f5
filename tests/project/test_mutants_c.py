"""What mutation testing changes in a C file (mutants_c.py)."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from mutants_c import VARIABLE, File, Selectable, functions_of


def changes(source: str) -> dict[str, str]:
    """Return each change: its description, and the resulting source."""
    return {
        f"{edit.where}: {edit.said}": source[: edit.start] + edit.text + source[edit.end :]
        for edit in File(source).edits()
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = a < b;", {"a < b -> a <= b", "a < b -> a >= b"}),
        ("x = a == b;", {"a == b -> a != b"}),
        ("x = a && b;", {"a && b -> a || b", "a -> 1", "b -> 1"}),
        ("x = a || f(b, c);", {"a || f(b, c) -> a && f(b, c)", "a -> 0", "f(b, c) -> 0"}),
        ("x = !a;", {"!a -> a"}),
        ("x = ~a;", {"~a -> a"}),
        ("x = a + 7;", {"a + 7 -> a - 7", "a + 7 -> a + 8"}),
        ("x = a * b;", {"a * b -> a + b"}),
        ("x = 0x10u;", {"0x10 -> 0x11"}),
        ("x = 1;", {"1 -> 0"}),
        ("return -1;", {"-1 -> 0"}),
        ("x = UINT32_MAX;", {"UINT32_MAX -> (UINT32_MAX - 1)"}),
        ("x = a ? b : c;", {"a ? -> !(a) ?"}),
        ("x++;", {"x++ -> x--"}),
        ("x |= a;", {"x |= a -> x &= a"}),
        ("if (f(a)) return;", {"if (f(a)) -> never", "if (f(a)) -> if not"}),
        ("if (a < b) return;", {"if (a < b) -> never", "a < b -> a <= b", "a < b -> a >= b"}),
        (
            "while (f()) break;",
            {"while (f()) -> never", "while (f()) -> while not", "break -> nothing"},
        ),
        ('return rp_refuse(post, "x", 0);', set()),
        (
            'return rp_refuse(post, "x", 0) - 1;',
            {
                'rp_refuse(post, "x", 0) - 1 -> rp_refuse(post, "x", 0) + 1',
                'rp_refuse(post, "x", 0) - 1 -> rp_refuse(post, "x", 0) - 0',
            },
        ),
        ("return other(post, 0);", {"0 -> 1"}),
        # Nothing to change: declarations, addresses, dereferences, calls, strings, comments.
        ("struct thing *p = &q, *r; char **s; f(*p, &r, (char *)s, p->x);", set()),
        ('f("a < b && 1"); /* if (a) return 1; */ // x = 2', set()),
        ('_Static_assert(sizeof(x) == 8, "a");', set()),
    ],
)
def test_mutants_of_a_function_are_listed(body, said):
    assert set(changes(f"int g(int a)\n{{\n\t{body}\n}}\n")) == {f"g: {text}" for text in said}


def test_mutant_that_drops_a_check_still_evaluates_its_condition():
    """A condition's side effects happen; only its consequence does not."""
    source = "int g(void) { if (take(&x)) return -1; return x; }"
    assert changes(source)["g: if (take(&x)) -> never"] == source.replace(
        "(take(&x))", "((take(&x)) && 0)"
    )


def test_tables_and_macros_have_mutants():
    """But not the entry that ends an array, which is not a rule."""
    table = "static const struct rule rules[] = {\n\t{ A | B, 3 },\n\t{ 0, NULL },\n};\n"
    assert set(changes(table)) == {"rules: A | B -> A & B", "rules: 3 -> 4"}
    macro = "#include <x.h>\n#define SMALL(n) \\\n\t((n) < 8)\nint x;\n"
    assert set(changes(macro)) == {
        "SMALL: (n) < 8 -> (n) <= 8",
        "SMALL: (n) < 8 -> (n) >= 8",
        "SMALL: (n) < 8 -> (n) < 9",
    }


def test_function_declared_by_a_macro_keeps_its_name():
    assert list(changes("FUNCTION(poll)\n{\n\tx = 2;\n}\n")) == ["poll: 2 -> 3"]


# ---- all mutants in one module ------------------------------------------------------

SOURCE = """\
#include <stddef.h>
#define LIMIT 8
struct point { int x; };
static int is_less(const struct point *p,
			int than);
static int is_less(const struct point *p, int than)
{
	return p->x < than;
}

int count(int from, int to)
{
	struct point p = { from };
	int n = 0;

	while (is_less(&p, to)) {
		p.x++;
		n += 1;
	}
	return n < LIMIT ? n : -1;
}
"""


def test_mutator_finds_c_functions_with_their_parameters():
    found = {function.name: function.arguments for function in functions_of(SOURCE)}
    assert found == {"is_less": ("p", "than"), "count": ("from", "to")}
    assert functions_of("FUNCTION(poll)\n{\n}\nint table[] = { 1 };\n") == []
    [function] = functions_of("int f(void)\n{\n}\n")
    assert function.arguments == ()


def _library(source: str, directory: pathlib.Path) -> str:
    cc = os.environ.get("CC", "cc").split()
    if shutil.which(cc[0]) is None:
        pytest.skip("there is no C compiler")
    (directory / "x.c").write_text(source)
    subprocess.run(
        [*cc, "-w", "-shared", "-fPIC", "-o", directory / "x.so", directory / "x.c"],
        check=True,
        # Ignore what the compiler itself leaks (.ci/sanitize).
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    return str(directory / "x.so")


def test_mutant_is_selected_while_the_module_runs(tmp_path):
    """And only that: each behaves as when compiled alone."""
    edits = [*File(SOURCE).edits()]
    file = Selectable(SOURCE, edits)
    library = ctypes.CDLL(_library(file.text(), tmp_path))
    selected = ctypes.c_int.in_dll(library, "mutant_selected")
    reached = (ctypes.c_char * 2).in_dll(library, "mutant_reached")
    assert reached.raw == bytes(2)
    came = {}
    for number, edit in enumerate(edits, 1):
        if edit.said in ("p->x < than -> p->x <= than", "1 -> 0", "n < LIMIT -> n >= LIMIT"):
            selected.value = number
            came[edit.said] = library.count(1, 5)
    assert came == {"p->x < than -> p->x <= than": 5, "1 -> 0": 0, "n < LIMIT -> n >= LIMIT": -1}
    assert reached.raw == bytes([1, 1])
    selected.value = 0
    assert library.count(1, 5) == 4
    # Code outside functions cannot be selected.
    assert {edits[number - 1].where for number in file.function_of} == {"is_less", "count"}
    assert {edit.where for edit in edits} == {"is_less", "count", "LIMIT"}


def test_environment_selects_the_mutant_of_a_new_process(tmp_path):
    edits = [*File(SOURCE).edits()]
    number = [edit.said for edit in edits].index("1 -> 0") + 1
    library = _library(Selectable(SOURCE, edits).text(), tmp_path)
    program = f"import ctypes; print(ctypes.CDLL({library!r}).count(1, 5))"
    for environment, printed in (({}, "4\n"), ({VARIABLE: str(number)}, "0\n")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout == printed


def test_mutant_that_does_not_compile_is_left_out():
    edits = [*File(SOURCE).edits()]
    text = Selectable(SOURCE, edits).text({1})
    assert '"mutant-1"' not in text
    assert "case 1:" not in text
    assert '"mutant-2"' in text
