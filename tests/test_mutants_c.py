"""What mutation testing changes in a C file (mutants_c.py)."""

from __future__ import annotations

import pytest
from mutants_c import File


def changes(source: str) -> dict[str, str]:
    """Return each change: how it reads, and the source that it makes."""
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
        (
            "if (a < b) return;",
            {"if (a < b) -> never", "a < b -> a <= b", "a < b -> a >= b"},
        ),
        ("while (f()) break;", {"while (f()) -> never", "while (f()) -> while not",
                                "break -> nothing"}),
        # Nothing to change: declarations, addresses, dereferences, calls, strings, comments.
        ("struct thing *p = &q, *r; char **s; f(*p, &r, (char *)s, p->x);", set()),
        ('f("a < b && 1"); /* if (a) return 1; */ // x = 2', set()),
        ("_Static_assert(sizeof(x) == 8, \"a\");", set()),
    ],
)  # fmt: skip
def test_what_is_changed_in_a_function(body, said):
    assert set(changes(f"int g(int a)\n{{\n\t{body}\n}}\n")) == {f"g: {text}" for text in said}


def test_a_dropped_check_is_still_evaluated():
    """What a condition does is done; only what would follow from it is not."""
    source = "int g(void) { if (take(&x)) return -1; return x; }"
    assert changes(source)["g: if (take(&x)) -> never"] == source.replace(
        "(take(&x))", "((take(&x)) && 0)"
    )


def test_tables_and_macros_have_bounds_too():
    """But not the entry that ends an array, which is no rule."""
    table = "static const struct rule rules[] = {\n\t{ A | B, 3 },\n\t{ 0, NULL },\n};\n"
    assert set(changes(table)) == {"rules: A | B -> A & B", "rules: 3 -> 4"}
    macro = "#include <x.h>\n#define MOST(n) \\\n\t((n) < 8)\nint x;\n"
    assert set(changes(macro)) == {
        "MOST: (n) < 8 -> (n) <= 8", "MOST: (n) < 8 -> (n) >= 8", "MOST: (n) < 8 -> (n) < 9",
    }  # fmt: skip


def test_a_function_that_a_macro_declares_has_its_own_name():
    assert list(changes("FUNCTION(poll)\n{\n\tx = 2;\n}\n")) == ["poll: 2 -> 3"]
