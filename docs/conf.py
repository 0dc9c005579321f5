"""Sphinx configuration; ``.ci/docs`` builds the documentation."""

from __future__ import annotations

import re
from typing import Any

import rdmapost

project = "rdmapost"
release = version = rdmapost.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "Post RDMA work requests from Python"}
html_copy_source = False
myst_heading_anchors = 3

autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    # Show inherited members, except those of these bases, which are well known or documented.
    "inherited-members": "Resource, int, tuple, bytes, OSError, BaseException",
}
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
    ("py:class", r"rdmapost\.tools\.connect\.(server_state\.ServerState|protocol_messages\.Hello)"),
    ("py:class", r"rdmapost\.providers\.base\.Provider"),
]


def before_napoleon(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from taking a docstring's text for a type."""
    if what in ("attribute", "data", "property"):
        # Otherwise the text before the first colon would become the type.
        lines[:1] = [f": {line}" for line in lines[:1]]
        return
    inside = False
    for number, line in enumerate(lines):
        if not line.startswith(" "):
            inside = line == "Attributes:"
        elif inside and (names := re.match(r"    (\w+(?:, \w+)+):", line)):
            # Otherwise all names but the last would become the type.
            lines[number] = line.replace(names[1], names[1].replace(", ", ","), 1)


def public_bases(app: Any, name: str, obj: object, options: Any, bases: list[Any]) -> None:
    """Show the nearest public base class, and tuple instead of NamedTuple, which is a function."""
    mros = [base.__mro__ if isinstance(base, type) else (tuple,) for base in bases]
    bases[:] = [next(filter(is_public, mro)) for mro in mros]


def is_public(base: type) -> bool:
    """Whether to show a class as a base, instead of listing its members under its subclasses."""
    package, _, module = base.__module__.partition(".")
    if package != "rdmapost" or base.__name__ == "Resource":
        return True
    return module.split(".")[0] not in ("_verbs", "posting", "providers", "resources", "tools")


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


def setup(app: Any) -> None:
    """Register the functions above."""
    # Before napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", before_napoleon, 400)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", skip_more)
    app.connect("missing-reference", find_public)
