"""Sphinx configuration; ``.ci/docs`` builds the documentation."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.domains.python import PyObject
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

import rdmapost

project = "rdmapost"
release = version = rdmapost.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
highlight_language = "none"
html_theme = "furo"
html_title = f"rdmapost {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 3

autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    # Show inherited members, except those of these bases, which are well known or documented.
    "inherited-members": "object, int, tuple, bytes, dict, OSError, BaseException",
}
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Unresolved references are errors, except these.
nitpicky = True
nitpick_ignore_regex = [
    # Python's own names: resolving them needs an inventory from the network.
    ("py:.*", r"(asyncio|collections|enum|ipaddress|mmap|os|socket)\..*|array"),
    # Types that only the library itself creates or passes.
    ("py:class", r"rdmapost\.(posting\.PostQueue|prepared\._Item)"),
    ("py:class", r"rdmapost\.tools\.connect\.protocol_messages\.Hello"),
    # What a column is, the methods that take one say.
    ("py:class", "Column"),
    ("py:class", r"(rdmapost\.resources\.resource\.)?Resource"),
]


_DATA = {
    "rdmapost.MULTICAST_QPN": "rdmapost.standard.opcodes",
    "rdmapost.WC_DTYPE": "rdmapost.resources.cq",
}
"""Where public data is defined."""


def before_napoleon(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from taking a docstring's text for a type."""
    if where := _DATA.get(name):
        # A number has the docstring of its type.
        documented = ModuleAnalyzer.for_module(where).find_attr_docs()
        lines[:] = documented.get(("", name.rpartition(".")[2]), lines)
    if what in ("attribute", "data", "property"):
        # Otherwise the text before the first colon would become the type.
        lines[:1] = [f": {line}" for line in lines[:1]]
        return
    types = types_of_fields(obj) if what == "class" else {}
    section, result = "", []
    for number, line in enumerate(lines):
        if not line.startswith(" "):
            section = line
        entry = re.match(r"    (\w+(?:, \w+)*): ", line)
        if section == "Returns:" and lines[number - 1] == section:
            # Otherwise the text before the first colon would become the type.
            line = f"    : {line.strip()}"
        elif section == "Attributes:" and entry:
            names, text = entry[1].split(", "), line[entry.end() :]
            for name in names[:-1]:
                result.append(f"    {name}{shown_type(types, name)}: {text}")
            line = f"    {names[-1]}{shown_type(types, names[-1])}: {text}"
        result.append(line)
    lines[:] = result


def shown_type(types: dict[str, str], name: str) -> str:
    """Return the type of a field in napoleon's form, or nothing."""
    found = types.get(name)
    return f" ({found})" if found else ""


def types_of_fields(cls: Any) -> dict[str, str]:
    """Return the types of a class's attributes: as annotated, of properties, and of arguments."""
    types: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("rdmapost"):
            continue
        init = vars(base).get("__init__")
        types |= getattr(inspect.unwrap(init), "__annotations__", {}) if init else {}
        with contextlib.suppress(PycodeError):
            analyzer = ModuleAnalyzer.for_module(base.__module__)
            analyzer.analyze()
            annotated = analyzer.annotations
            types |= {
                name: text for (owner, name), text in annotated.items() if owner == base.__name__
            }
        types |= vars(base).get("__annotations__", {})
        for name, member in vars(base).items():
            if isinstance(member, property) and "return" in getattr(
                member.fget, "__annotations__", {}
            ):
                types[name] = member.fget.__annotations__["return"]
    return {
        name: found for name, found in types.items() if isinstance(found, str) and found != "Any"
    }


def public_bases(app: Any, name: str, obj: object, options: Any, bases: list[Any]) -> None:
    """Show the nearest public base class, and tuple instead of NamedTuple, which is a function."""
    mros = [base.__mro__ if isinstance(base, type) else (tuple,) for base in bases]
    bases[:] = dict.fromkeys(next(filter(is_public, mro)) for mro in mros)


def is_public(base: type) -> bool:
    """Whether to show a class as a base, instead of listing its members under its subclasses."""
    package, _, module = base.__module__.partition(".")
    if package != "rdmapost":
        return True
    if base.__name__.startswith("_"):
        return False
    private = "_verbs", "errors", "posting", "providers", "resources", "tools"
    return module.split(".")[0] not in private


def shorten_signature(
    app: Any,
    what: str,
    name: str,
    obj: object,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Show what a caller writes: no arguments of a class that a function creates."""
    if signature is None:
        return None
    if what == "class" and " creates it" in (obj.__doc__ or "").partition("\n\n")[0]:
        return "", None
    signature = re.sub(r"(\*\*\w+): ~typing\.Unpack\[[^]]*\]", r"\1", signature)
    # Show an enumeration's member as code has it, not its repr.
    return re.sub(r"<(\w+\.[\w.|]+): \d+>", r"\1", signature), returns


def skip_more(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which the class's docstring lists."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def find_public(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Resolve a reference to a name where it is defined to its public name."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if target.startswith("rdmapost.tools."):
        public = target.replace("rdmapost.tools.", "rdmapost.", 1)
    elif name in rdmapost.__all__:
        public = f"rdmapost.{name}"
    else:
        return None
    if node.get("refdomain") != "py":
        return None
    python = env.domains["py"]
    return python.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], public, node, contnode
    )


ROOT = Path(__file__).resolve().parent.parent
_TO_EXAMPLE = re.compile(r"\]\(\.\./(examples/(\w+)\.py)\)")
_OUTSIDE = {"../README.md#install": "install.md", "../SECURITY.md": "security.md"}
"""Where links lead that leave docs/: their targets are included in pages of the site."""


def adapt_to_site(app: Any, name: str, source: list[str]) -> None:
    """Point links that leave docs/ at pages of the site, and show the examples' sources."""
    text = source[0]
    up = "../" * name.count("/")
    for outside, page in _OUTSIDE.items():
        text = text.replace(f"]({up}{outside})", f"]({up}{page})")
    shown = [
        f"\n## {name}.py\n\n```{{literalinclude}} ../{path}\n:language: python\n```\n"
        for path, name in _TO_EXAMPLE.findall(text)
    ]
    source[0] = _TO_EXAMPLE.sub(r"](#\2py)", text) + "".join(shown)


def drop_bare_bases(app: Any, tree: Any) -> None:
    """Do not say that a class derives from object."""
    for paragraph in list(tree.findall(nodes.paragraph)):
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)


def inline_pictures(app: Any, tree: Any, name: str) -> None:
    """Put SVG pictures into the page itself, where they take the theme's colours."""
    for image in list(tree.findall(nodes.image)):
        if image["uri"].endswith(".svg"):
            svg = (ROOT / "docs" / image["uri"]).read_text()
            image.parent.replace(image, nodes.raw("", svg, format="html"))


def setup(app: Any) -> None:
    """Register the functions above."""
    # Before napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", before_napoleon, 400)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-process-signature", shorten_signature)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-skip-member", skip_more)
    app.connect("missing-reference", find_public)
    app.connect("source-read", adapt_to_site)
    app.connect("doctree-read", drop_bare_bases)
    app.connect("doctree-resolved", inline_pictures)
