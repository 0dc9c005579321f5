"""How the documentation is built, by ``.ci/docs``."""

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
    # Those of classes that only share what others have; not these, which are known or shown.
    "inherited-members": "Resource, int, tuple, bytes, OSError, BaseException",
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A name that leads nowhere is an error, but for these.
nitpicky = True
nitpick_ignore_regex = [
    # Python's own: its inventory is on the network.
    ("py:.*", r"(asyncio|collections|enum|ipaddress|mmap|os|socket)\..*|array"),
    # What only the library itself makes or passes on.
    ("py:class", r"rdmapost\.(posting\.PostQueue|prepared\._Item)"),
    ("py:class", r"rdmapost\.tools\.connect\.(server_state\.ServerState|protocol_messages\.Hello)"),
    ("py:class", r"rdmapost\.providers\.base\.Provider"),
]


def before_napoleon(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Let napoleon see no types where the docstrings have none."""
    if what in ("attribute", "data", "property"):
        # What stands before the first colon would be the type.
        lines[:1] = [f": {line}" for line in lines[:1]]
        return
    inside = False
    for number, line in enumerate(lines):
        if not line.startswith(" "):
            inside = line == "Attributes:"
        elif inside and (names := re.match(r"    (\w+(?:, \w+)+):", line)):
            # Of several names all but the last would be the type.
            lines[number] = line.replace(names[1], names[1].replace(", ", ","), 1)


def public_bases(app: Any, name: str, obj: object, options: Any, bases: list[Any]) -> None:
    """Show the nearest base that has a name for users, and no NamedTuple, which is a function."""
    mros = [base.__mro__ if isinstance(base, type) else (tuple,) for base in bases]
    bases[:] = [next(filter(is_public, mro)) for mro in mros]


def is_public(base: type) -> bool:
    """Whether a class is shown as a base, and not what it has as its heirs' own."""
    package, _, room = base.__module__.partition(".")
    if package != "rdmapost" or base.__name__ == "Resource":
        return True
    return room.split(".")[0] not in ("_verbs", "posting", "providers", "resources", "tools")


def skip_more(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which their class tells."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def find_public(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Lead a name that types say where it is defined to where users find it."""
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
    """Have sphinx call these."""
    # Napoleon comes at 500.
    app.connect("autodoc-process-docstring", before_napoleon, 400)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", skip_more)
    app.connect("missing-reference", find_public)
